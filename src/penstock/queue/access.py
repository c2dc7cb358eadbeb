"""What every part of a queue's code is given: the store, the keys, the settings, randomness."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import StoreError
from penstock.queue.bell import Ringer, ring
from penstock.queue.config import QueueConfig
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.store.base import ObjectStore
from penstock.store.metered import labelled
from penstock.store.time import Interval


@dataclass(frozen=True, slots=True)
class Access:
    """One process's access to one queue."""

    store: ObjectStore
    layout: QueueLayout
    config: QueueConfig
    entropy: Entropy
    incarnation: Incarnation = NOBODY
    ringer: Ringer | None = None
    """Tells workers of what is submitted; without it, they find it by slow lists."""

    async def ring_for_chores(self) -> None:
        """Say that schedules or batches have changed. Never fails: it is a hint."""
        with suppress(StoreError), labelled("chores"):
            await ring(self.store, self.layout.bell, self.entropy)

    def now(self) -> Interval:
        """The store's time as far as it is known, without a request."""
        known = self.store.clock.estimate()
        assert known is not None, "the time is asked for when a queue is opened"
        return known
