"""What every part of a queue's code is given: the store, the keys, the settings, randomness."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kernel.entropy import Entropy
from penstock.queue.config import QueueConfig
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.store.base import ObjectStore
from penstock.store.time import Interval


@dataclass(frozen=True, slots=True)
class Access:
    """One process's access to one queue."""

    store: ObjectStore
    layout: QueueLayout
    config: QueueConfig
    entropy: Entropy
    incarnation: Incarnation = NOBODY

    def now(self) -> Interval:
        """The store's time as far as it is known, without a request."""
        known = self.store.clock.estimate()
        assert known is not None, "the time is asked for when a queue is opened"
        return known
