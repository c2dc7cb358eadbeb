"""A worker's capacity: how many tasks it holds and runs.

`concurrency` tasks run at a time. Of a pack of many, more may be claimed ahead: as many as this
worker runs of that type until its next settlement, so that one write brings the work between
two. A pack of one is claimed only when there is a slot for it. While other packs wait for room,
a pack in progress gets no more: packs take turns.

Urgent tasks do not wait for what was only claimed ahead: to a pack of a higher priority the room
of less urgent tasks counts as free, and its tasks get the next free slots. Tasks that yield keep
their claims, which costs no request; what waits too long for a slot is given back.

How fast tasks of a type are is known from the last of them, by the time in which the worker held
any: after an idle hour the first claim of a pack is as large as the next ones.

A handler that ignores its interruption keeps its slot and its room. When all slots are stuck so,
nothing more is claimed, and what waits for a slot is to be given back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from heapq import heappop, heappush
from itertools import count
from types import TracebackType
from typing import Final

from penstock.kernel.clock import Clock

AHEAD_MIN: Final = 1
"""So many times `concurrency` may be claimed ahead whatever the rate, to begin with."""
AHEAD_MAX: Final = 16
SOON_SECONDS: Final = 30.0
"""What a worker has run in so long needs no help: whoever helps lists, claims and settles too."""
_INSTANTS_MIN: Final = 64
"""A rate is known when so many tasks of a type have ended,"""
_INSTANTS_MAX: Final = 256
"""and is that of so many: tasks that begin together end together, and a few say nothing."""


class ConcurrencySlots:
    """What runs at a time: so many, and of those that wait the most urgent first, then the first.

    `async with slots.of(priority):` is one of them.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    def of(self, priority: int) -> _Slot:
        """A slot for something of this priority."""
        return _Slot(self, priority)

    async def acquire(self, priority: int) -> None:
        """Wait for a slot."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (-priority, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Give a slot to who is next."""
        while self._waiting:
            *_, turn = heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class _Slot:
    __slots__ = ("_priority", "_slots")

    def __init__(self, slots: ConcurrencySlots, priority: int) -> None:
        self._slots = slots
        self._priority = priority

    async def __aenter__(self) -> None:
        await self._slots.acquire(self._priority)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._slots.release()


class WorkerCapacity:
    """One worker's room. `held` counts tasks that are claimed, or about to be, and not ended."""

    def __init__(self, concurrency: int, *, clock: Clock, freed: asyncio.Event) -> None:
        self.concurrency = concurrency
        self.slots = ConcurrencySlots(concurrency)
        self.held = 0
        self.contended: int | None = None
        """The highest priority of the packs that have been found and wait for room, if any do."""
        self._held: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self.is_reserved = False
        """Nothing more is to be claimed: a task is to run with nothing beside it (`exclusive`)."""
        self.stuck = 0
        """How many slots have a handler that was interrupted and goes on."""
        self._clock = clock
        self._freed = freed
        self.waiting: set[asyncio.Event] = set()
        """Set whenever room is given back: packs in progress that have no slot for more."""
        self._busy_seconds = self._busy_since = 0.0
        self._ended: dict[str, deque[float]] = {}

    @property
    def free(self) -> int:
        """How many tasks could start at once."""
        return 0 if self.is_reserved else max(0, self.concurrency - self.held)

    @property
    def is_stuck(self) -> bool:
        """Whether nothing can start until a handler ends that should have."""
        return self.stuck >= self.concurrency

    def free_for(self, priority: int) -> int:
        """How many tasks of this priority could start before what is less urgent."""
        return 0 if self.is_reserved else max(0, self.concurrency - self._held_before(priority))

    def startable(self, taken: int, *, priority: int) -> int:
        """How many of so many for which room was taken can start at once, and at least one."""
        return max(1, taken + self.concurrency - self._held_before(priority))

    def is_contended(self, priority: int) -> bool:
        """Whether packs wait for room that are as urgent as this."""
        return self.contended is not None and self.contended >= priority

    def take(
        self,
        count: int,
        *,
        type: str,
        priority: int = 0,
        ahead_seconds: float = 0.0,
        blindly: bool = True,
    ) -> int:
        """Reserve room for up to `count` tasks; returns for how many.

        With `ahead_seconds`, also for those that this worker will run in that time; `blindly`
        for some even if their rate is not known.
        """
        limit = 0 if self.is_reserved else self.concurrency
        if limit and ahead_seconds and not self.is_stuck:
            soon = int(self._rate(type) * ahead_seconds)
            limit += min(max(AHEAD_MIN * limit if blindly else 0, soon), AHEAD_MAX * limit)
        taken = max(0, min(count, limit - self._held_before(priority)))
        self.hold(taken, priority=priority)
        self._instants(type)  # Its rate is from now on.
        return taken

    def hold(self, count: int, *, priority: int = 0) -> None:
        """Count tasks that were claimed, whether there is room for them or not."""
        if not count:
            return
        if not self.held:
            self._busy_since = self._clock.monotonic()
        self.held += count
        self._held[priority] = self._held.get(priority, 0) + count

    def wait(self, count: int, *, priority: int) -> None:
        """So many more, or less, of what is claimed wait for a slot."""
        self._waiting[priority] = self._waiting.get(priority, 0) + count

    def give(self, count: int, *, priority: int = 0) -> None:
        """Give room back."""
        if not count:
            return
        if self.held == count:
            self._busy_seconds = self._busy_instant()
        self.held -= count
        left = self._held.get(priority, 0) - count
        assert left >= 0, "more room was given back than was taken"
        if left:
            self._held[priority] = left
        else:
            del self._held[priority]
        self._freed.set()
        for each in self.waiting:
            each.set()

    def _held_before(self, priority: int) -> int:
        """How many are held that something of this priority has to wait for.

        Those that run, as always; but not those that wait for a slot and are less urgent, and if
        there are such, not those either that run: a slot soon comes free, for it or for them.
        """
        if not any(waiting for each, waiting in self._waiting.items() if each < priority):
            return self.held
        return sum(held for each, held in self._held.items() if each >= priority)

    def note_end(self, type: str) -> None:
        """A task of this type has run to its end."""
        self._instants(type).append(self._busy_instant())

    def is_soon(self, count: int, type: str) -> bool:
        """Whether this worker, as fast as it is known to be, runs so many in `SOON_SECONDS`."""
        return count <= self._rate(type) * SOON_SECONDS

    def _instants(self, type: str) -> deque[float]:
        """When the rate of a type began, and when its last tasks ended, on the busy clock."""
        instants = self._ended.get(type)
        if instants is None:
            instants = deque([self._busy_instant()], maxlen=_INSTANTS_MAX + 1)
            self._ended[type] = instants
        return instants

    def _rate(self, type: str) -> float:
        """Tasks of a type a second, by the last ones; 0 if too few have ended."""
        instants = self._instants(type)
        if len(instants) <= _INSTANTS_MIN:
            return 0.0
        return (len(instants) - 1) / max(1e-3, self._busy_instant() - instants[0])

    def _busy_instant(self) -> float:
        """The time on a clock that stands still while nothing is held."""
        running = self._clock.monotonic() - self._busy_since if self.held else 0.0
        return self._busy_seconds + running
