"""What a worker works with, the same for all its packs: its store, its name, its room.

With it claims are made, and sent until their answer is known.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import OutcomeUnknown, Throttled, Unavailable
from penstock.queue.claims import PackInHand
from penstock.queue.heartbeats import TOUCH_SLACK_MS
from penstock.queue.outcomes import Claimed, Seen
from penstock.queue.running.handlers import Handler
from penstock.queue.running.isolated import Children
from penstock.queue.running.observing import Watch
from penstock.queue.running.room import Room
from penstock.queue.settings import Heartbeat, WorkerSettings
from penstock.queue.transitions import Claim
from penstock.store.base import ObjectStore
from penstock.store.time import StoreClock

_log = logging.getLogger(__name__)

GIVE_UP_SECONDS: Final = 600.0
"""How long after its lease an ending is still offered to a store that does not answer."""


@dataclass(frozen=True, slots=True)
class Hands:
    """What a worker works with, the same for all its packs."""

    store: ObjectStore
    holder: str
    settings: WorkerSettings
    entropy: Entropy
    room: Room
    watch: Watch = field(default_factory=Watch)
    children: Children | None = None
    """The processes for isolated handlers."""
    incarnation: str = ""
    """Which process this is (`penstock.queue.incarnation`)."""
    clock: StoreClock = field(init=False)
    """The store's, without a way through its wrappers for every task."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "clock", self.store.clock)

    @property
    def lease_ms(self) -> int:
        return int(self.settings.task_lease_seconds * 1000)

    def claim(
        self, handler: Handler, *, tasks_max: int, slots: int, exclusive: bool = False
    ) -> Claim:
        """A new claim, with an id of its own; so many of its tasks can start at once."""
        return Claim(
            new_id(self.entropy, characters=16),
            self.holder,
            self.lease_ms,
            tasks_max,
            handler.retry.attempts,
            touch_ms=self.lease_ms + TOUCH_SLACK_MS if self._is_touching else 0,
            slots=slots,
            exclusive=exclusive,
            incarnation=self.incarnation,
        )

    @property
    def _is_touching(self) -> bool:
        return self.settings.heartbeat is Heartbeat.TOUCH

    async def claim_surely(
        self, hand: PackInHand, claim: Claim, seen: Seen | None
    ) -> Claimed | None:
        """Claim, and if the answer is lost send the same claim again, for a good while.

        It may be written: under another claim the task would wait for the lease of this one, and
        an attempt would be lost that never began.
        """
        clock = self.store.clock.machine
        until = clock.monotonic() + GIVE_UP_SECONDS
        while True:
            try:
                return await hand.claim(claim, seen)
            except (OutcomeUnknown, Throttled, Unavailable) as error:
                if not hand.is_sent or clock.monotonic() >= until:
                    raise
                _log.warning("a claim of %s is sent again: %s", hand.at.path, error)
            await clock.sleep(self.entropy.uniform(0.5, 2.0))

    def now_ms(self) -> int:
        """The store's time, at the latest that it may be."""
        known = self.clock.estimate()
        assert known is not None, "nothing is claimed before the time is known"
        return int(known.latest * 1000)
