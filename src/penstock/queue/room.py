"""How many tasks a worker holds and runs.

`concurrency` tasks run at a time. Of a pack of many, more may be claimed ahead: as many as this
worker runs until its next settlement, so that one write brings the work between two. A pack of
one is claimed only when there is a slot for it. While other packs wait for room, a pack that is
worked on gets no more: packs take turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from penstock.kernel.clock import Clock

AHEAD_MIN: Final = 1
"""So many times `concurrency` may be claimed ahead whatever the rate, to begin with."""
_INSTANTS: Final = 64


class Room:
    """One worker's room. `held` counts tasks that are claimed, or about to be, and not ended."""

    def __init__(self, concurrency: int, *, clock: Clock, freed: asyncio.Event) -> None:
        self.concurrency = concurrency
        self.slots = asyncio.Semaphore(concurrency)
        self.held = 0
        self.is_contended = False
        """Other packs have been found that wait for room."""
        self._clock = clock
        self._freed = freed
        self._ended: deque[float] = deque(maxlen=_INSTANTS)

    @property
    def free(self) -> int:
        """How many tasks could start at once."""
        return max(0, self.concurrency - self.held)

    def take(self, count: int, *, ahead_seconds: float = 0.0) -> int:
        """Reserve room for up to `count` tasks; returns for how many.

        With `ahead_seconds`, also for those that this worker will run in that time.
        """
        limit = self.concurrency
        if ahead_seconds:
            limit += max(AHEAD_MIN * self.concurrency, int(self._rate() * ahead_seconds))
        taken = max(0, min(count, limit - self.held))
        self.held += taken
        return taken

    def hold(self, count: int) -> None:
        """Count tasks that were claimed, whether there is room for them or not."""
        self.held += count

    def give(self, count: int) -> None:
        """Give room back."""
        self.held -= count
        assert self.held >= 0, "more room was given back than was taken"
        if count:
            self._freed.set()

    def ended(self) -> None:
        """A task has ended: give its room back, and note the rate."""
        self._ended.append(self._clock.monotonic())
        self.give(1)

    def _rate(self) -> float:
        """Tasks a second, by the last ones."""
        if len(self._ended) < _INSTANTS:
            return 0.0
        return _INSTANTS / max(1e-3, self._clock.monotonic() - self._ended[0])
