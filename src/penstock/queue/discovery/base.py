"""The contract of a discovery mode: how a worker finds packs that it may claim.

A mode decides which part of the queue to look at, and when; what it finds are hints. The ledger
alone decides who may run what, so mixed modes, and changes of mode while running, are safe. A
mode also says which part of the queue this worker is the monitor of.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import PenstockError
from penstock.queue.discovery.scanner import PackCandidate, Run, ScanResult
from penstock.queue.ids import PackAt
from penstock.queue.shards.allocation import WorkerLoad

PEEK_SECONDS: Final = 4.0


@dataclass(frozen=True, slots=True)
class DiscoveryRequest:
    """What a worker looks for."""

    worth: Callable[[PackCandidate], int]
    """How many tasks of a sight are of use to it."""
    tasks: int
    """How many it wants."""
    has_room: bool = True
    """Whether it could run something now; otherwise it only wants to know what waits."""
    is_afresh: bool = True
    """Whether it has let go of what it knew, so that only lists will do."""


class Discovery(ABC):
    """One worker's way to find work. Used by one worker, from `keep` to `release`."""

    name: str
    """The worker's name in the queue."""
    sight_seconds: float
    """How long something that was found is worth trying: until others will have taken it."""
    reread_seconds: float = 0.0
    """How soon a ledger that has changed again is worth another reading."""
    is_alone: bool
    """Whether nobody else looks at the same packs, as a rule."""
    is_whole: bool = False
    """Whether every look shows what is urgent."""
    peek_seconds: float = PEEK_SECONDS
    """How often a worker that has enough to do asks whether something more urgent has come."""

    @property
    def is_prompt(self) -> bool:
        """Whether looks are cheap now, and go on as often with room as without."""
        return False

    def patience_seconds(self, at: PackAt) -> float:  # noqa: ARG002 - for those who share
        """How old the ledger of a pack in progress must be to be worth reading."""
        return 0.0

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        """Set when it is worth looking at once, or when all is lost."""
        self.lost: PenstockError | None = None
        """Why the worker has to stop at once, and to give back what runs."""

    async def begin(self) -> None:  # noqa: B027 - most need nothing before they look
        """Take what the worker needs. Raises a `PenstockError` if it can never have it."""

    def handled(self, at: PackAt) -> None:  # noqa: B027 - most have nothing to remember
        """A pack was claimed, by this worker or another, or it is over. Asks for nothing."""

    def strained(self) -> None:  # noqa: B027 - most tell nobody
        """The load has changed so that others should know at once."""

    @abstractmethod
    async def look(self, wanted: DiscoveryRequest) -> ScanResult:
        """Look once at the part of the queue that is this worker's to look at."""

    async def peek(self, wanted: DiscoveryRequest) -> ScanResult | None:  # noqa: ARG002 - who looks at all of it
        """Look only at what is more urgent than most; None if there is no news of that."""
        return None

    def pause_seconds(self, seconds: float, *, has_room: bool = True) -> float:  # noqa: ARG002
        """How long to wait for the next look, where the pace says so long."""
        return seconds

    @abstractmethod
    def guarded(self) -> Sequence[Run]:
        """The slots that this worker is the monitor of, now."""

    @abstractmethod
    async def keep(self, load: Callable[[], WorkerLoad]) -> None:
        """Keep up what the mode needs, leases say, until cancelled."""

    @abstractmethod
    async def release(self) -> None:
        """Let go, so that others can take over at once. Within a bound; never fails."""
