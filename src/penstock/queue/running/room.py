"""How many tasks a worker holds and runs.

`concurrency` tasks run at a time. Of a pack of many, more may be claimed ahead: as many as this
worker runs of that type until its next settlement, so that one write brings the work between two.
A pack of one is claimed only when there is a slot for it. While other packs wait for room, a pack
that is worked on gets no more: packs take turns.

A handler that does not heed its interruption keeps its slot, and its room with it. When all slots
are so stuck, nothing more is claimed, and what waits for a slot is to be given back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from penstock.kernel.clock import Clock

AHEAD_MIN: Final = 1
"""So many times `concurrency` may be claimed ahead whatever the rate, to begin with."""
AHEAD_MAX: Final = 16
_INSTANTS: Final = 64


class Room:
    """One worker's room. `held` counts tasks that are claimed, or about to be, and not ended."""

    def __init__(self, concurrency: int, *, clock: Clock, freed: asyncio.Event) -> None:
        self.concurrency = concurrency
        self.slots = asyncio.Semaphore(concurrency)
        self.held = 0
        self.is_contended = False
        """Other packs have been found that wait for room."""
        self.is_reserved = False
        """Nothing more is to be claimed: a task is to run with nothing beside it (`exclusive`)."""
        self.stuck = 0
        """How many slots have a handler that was interrupted and goes on."""
        self._clock = clock
        self._freed = freed
        self._ended: dict[str, deque[float]] = {}

    @property
    def free(self) -> int:
        """How many tasks could start at once."""
        return 0 if self.is_reserved else max(0, self.concurrency - self.held)

    @property
    def is_stuck(self) -> bool:
        """Whether nothing can start until a handler ends that should have."""
        return self.stuck >= self.concurrency

    def take(
        self, count: int, *, type: str, ahead_seconds: float = 0.0, blindly: bool = True
    ) -> int:
        """Reserve room for up to `count` tasks; returns for how many.

        With `ahead_seconds`, also for those that this worker will run in that time; `blindly`
        for some even if their rate is not known.
        """
        limit = 0 if self.is_reserved else self.concurrency
        if limit and ahead_seconds and not self.is_stuck:
            soon = int(self._rate(type) * ahead_seconds)
            limit += min(max(AHEAD_MIN * limit if blindly else 0, soon), AHEAD_MAX * limit)
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

    def note_end(self, type: str) -> None:
        """A task of this type has run to its end."""
        instants = self._ended.get(type)
        if instants is None:
            instants = self._ended[type] = deque(maxlen=_INSTANTS)
        instants.append(self._clock.monotonic())

    def _rate(self, type: str) -> float:
        """Tasks of a type a second, by the last ones."""
        instants = self._ended.get(type)
        if instants is None or len(instants) < _INSTANTS:
            return 0.0
        return _INSTANTS / max(1e-3, self._clock.monotonic() - instants[0])
