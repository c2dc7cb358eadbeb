"""How a worker finds candidates: what every discovery mode must do.

A mode decides which part of the queue to look at, and when; what it finds are hints. The ledger
alone decides who may run what, so fleets of mixed modes, and changes of mode while running, are
safe. A mode also says which part of the queue this worker is the monitor of.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.kernel.errors import PenstockError
from penstock.queue.discovery.scan import Run, Sight, View
from penstock.queue.owning.load import Load
from penstock.queue.places import PackAt


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a worker looks for."""

    worth: Callable[[Sight], int]
    """How many tasks of a sight are of use to it."""
    tasks: int
    """How many it wants."""
    has_room: bool = True
    """Whether it could run something now; otherwise it only wants to know what waits."""


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

    @abstractmethod
    async def look(self, wanted: Wanted) -> View:
        """Look once at the part of the queue that is this worker's to look at."""

    @abstractmethod
    def guarded(self) -> Sequence[Run]:
        """The slots that this worker is the monitor of, now."""

    @abstractmethod
    async def keep(self, load: Callable[[], Load]) -> None:
        """Keep up what the mode needs, leases say, until cancelled."""

    @abstractmethod
    async def release(self) -> None:
        """Let go, so that others can take over at once. Within a bound; never fails."""
