"""How many tasks a worker holds and runs.

`concurrency` tasks run at a time. Of a pack of many, up to `AHEAD` times as many may be claimed
ahead, so that one write brings the work of several rounds; a pack of one is claimed only when
there is a slot for it. While others wait for room, nobody claims ahead.
"""

from __future__ import annotations

import asyncio
from typing import Final

AHEAD: Final = 2


class Room:
    """One worker's room. `held` counts tasks that are claimed, or about to be, and not ended."""

    def __init__(self, concurrency: int, *, freed: asyncio.Event) -> None:
        self.concurrency = concurrency
        self.slots = asyncio.Semaphore(concurrency)
        self.held = 0
        self.is_contended = False
        """Other packs have been found that wait for room."""
        self._freed = freed

    @property
    def free(self) -> int:
        """How many tasks could start at once."""
        return max(0, self.concurrency - self.held)

    def take(self, count: int, *, ahead: bool) -> int:
        """Reserve room for up to `count` tasks; returns for how many."""
        limit = (
            self.concurrency * (1 + AHEAD) if ahead and not self.is_contended else self.concurrency
        )
        taken = max(0, min(count, limit - self.held))
        self.held += taken
        return taken

    def give(self, count: int) -> None:
        """Give room back."""
        self.held -= count
        assert self.held >= 0, "more room was given back than was taken"
        if count:
            self._freed.set()
