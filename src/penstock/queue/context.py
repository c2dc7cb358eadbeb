"""What every part of a queue's code is given: store, layout, settings, randomness, a quiet log.

`QueueContext` is one process's access to one queue. `LogLimiter` logs each sentence once an hour
instead of once per retry.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import StoreError
from penstock.queue.config import QueueConfig
from penstock.queue.doorbell import DoorbellRinger, ring
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.store.base import ObjectStore
from penstock.store.metered import labelled
from penstock.store.time import Interval


@dataclass(frozen=True, slots=True)
class QueueContext:
    """One process's access to one queue."""

    store: ObjectStore
    layout: QueueLayout
    config: QueueConfig
    entropy: Entropy
    incarnation: Incarnation = NOBODY
    ringer: DoorbellRinger | None = None
    """Tells workers of what is submitted; without it, they find it by slow lists."""

    async def ring_bell(self) -> None:
        """Say that schedules or batches have changed. Never fails: it is a hint."""
        with suppress(StoreError), labelled("chores"):
            await ring(self.store, self.layout.bell, self.entropy)

    def now(self) -> Interval:
        """The store's time as far as it is known, without a request."""
        known = self.store.clock.estimate()
        assert known is not None, "the time is asked for when a queue is opened"
        return known


AGAIN_SECONDS: Final = 3600.0
SENTENCES_MAX: Final = 1000

_log = logging.getLogger(__name__)


class LogLimiter:
    """Remembers what it has logged."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said: dict[str, float] = {}

    def __call__(self, sentence: str) -> None:
        """Log a sentence as a warning, unless that was done within the hour."""
        instant = self._clock.monotonic()
        if self._said.get(sentence, float("-inf")) + AGAIN_SECONDS > instant:
            return
        self._said.pop(sentence, None)
        if len(self._said) >= SENTENCES_MAX:
            del self._said[next(iter(self._said))]
        self._said[sentence] = instant
        _log.warning("%s", sentence)
