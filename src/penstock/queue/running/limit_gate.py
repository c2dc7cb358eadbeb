"""The gate that keeps limits: tasks with a limit's key pass as far as the limit allows.

One `Hold` for each key that this worker meets; tasks without a key pass at once. A key whose
limit is full is shut until it is worth asking again, so that its packs stand in nobody's way.
While something is held, a loop here renews and returns it, and another, which never waits for the
store, interrupts what runs under permits that can no longer be trusted. A worker that meets no key
asks nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from penstock.kernel.entropy import new_id
from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.access import Access
from penstock.queue.discovery.scan import Sight
from penstock.queue.limits.permits import Hold
from penstock.queue.places import PackAt
from penstock.queue.running.saying import Saying

_TURN_SECONDS: Final = 0.5
_AGAIN_SECONDS: Final = 2.0
_WRITE_SECONDS_MAX: Final = 15.0
_RELEASE_SECONDS: Final = 5.0
_NAME_CHARACTERS: Final = 60


class LimitGate:
    """One worker's part of all limits."""

    def __init__(self, access: Access, *, name: str, concurrency: int) -> None:
        self._access = access
        self._clock = access.store.clock.machine
        self._worker = f"{name[:_NAME_CHARACTERS]}-{new_id(access.entropy, characters=12)}"
        self._concurrency = concurrency
        self._say = Saying(self._clock)
        self._holds: dict[str, Hold] = {}
        self._failed_at: dict[str, float] = {}
        self._busy = asyncio.Event()

    def is_shut(self, sight: Sight) -> bool:
        hold = self._holds.get(sight.limit) if sight.limit else None
        return hold is not None and hold.is_shut()

    def seconds_to_open(self) -> float | None:
        waits = [hold.seconds_to_ask() for hold in self._holds.values() if hold.is_shut()]
        return min(waits, default=None)

    async def admit(self, sight: Sight, tasks: int) -> LimitAdmission | FreeAdmission | None:
        if not sight.limit:
            return FreeAdmission(tasks)
        hold = self._holds.get(sight.limit)
        if hold is None:
            hold = Hold(self._access, sight.limit, worker=self._worker)
            self._holds[sight.limit] = hold
            self._busy.set()
        # What could not start at once would only keep others from it.
        taken = await hold.ask_for(sight.at, min(tasks, self._concurrency))
        if not taken:
            return None
        return LimitAdmission(hold, sight.at, taken, concurrency=self._concurrency)

    async def keep(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mind())
            group.create_task(self._guard())

    async def _guard(self) -> None:
        """Interrupt what runs under permits that have nearly ended."""
        while True:
            await self._busy.wait()
            for hold in self._holds.values():
                if hold.is_over:
                    self._say(f"the limit {hold.key!r} could not be renewed: giving back what runs")
                    hold.end_all()
            await self._clock.sleep(_TURN_SECONDS)

    async def _mind(self) -> None:
        """Renew, return and report."""
        while True:
            await self._busy.wait()
            async with asyncio.TaskGroup() as group:
                for hold in tuple(self._holds.values()):
                    group.create_task(self._mind_one(hold))
            for hold in [hold for hold in self._holds.values() if hold.is_idle]:
                del self._holds[hold.key]
                self._failed_at.pop(hold.key, None)
            if not self._holds:
                self._busy.clear()
            await self._clock.sleep(_TURN_SECONDS)

    async def _mind_one(self, hold: Hold) -> None:
        failed_at = self._failed_at.get(hold.key, float("-inf"))
        if self._clock.monotonic() < failed_at + _AGAIN_SECONDS:
            return
        try:
            async with asyncio.timeout(_WRITE_SECONDS_MAX):
                await hold.mind()
            self._failed_at.pop(hold.key, None)
        except (StoreError, UnreadableObject, TimeoutError) as error:
            self._failed_at[hold.key] = self._clock.monotonic()
            self._say(f"the limit {hold.key!r} cannot be minded, trying again: {error}")

    async def release(self) -> None:
        try:
            async with asyncio.timeout(_RELEASE_SECONDS), asyncio.TaskGroup() as group:
                for hold in self._holds.values():
                    group.create_task(self._end(hold))
        except TimeoutError:
            self._say("what is held of limits ends by itself")

    async def _end(self, hold: Hold) -> None:
        try:
            await hold.end()
        except (StoreError, UnreadableObject) as error:
            self._say(f"what is held of the limit {hold.key!r} ends by itself: {error}")


class LimitAdmission:
    """Leave to run tasks of one pack under one limit."""

    def __init__(self, hold: Hold, at: PackAt, tasks: int, *, concurrency: int) -> None:
        self._hold = hold
        self._at = at
        self._concurrency = concurrency
        self.tasks = tasks
        self._begun = 0
        self._given = 0
        self._pending = 0
        self._calls: tuple[Callable[[], None], Callable[[], None]] | None = None
        self._count_pending()

    def _count_pending(self) -> None:
        """Those that have not started: who ends and who never began is told in one word."""
        pending = self.tasks + self._given - max(self._begun, self._given)
        self._hold.pending += pending - self._pending
        self._pending = pending

    def more(self, tasks: int) -> int:
        # Packs of one limit take turns, as all packs do.
        is_next = not self._hold.is_wished_by_others(self._at)
        startable = max(0, min(tasks, self._concurrency - self._hold.used))
        taken = self._hold.grab(self._at, startable) if is_next else 0
        self.tasks += taken
        self._count_pending()
        if self._calls is not None and taken:
            self._hold.watch(self._at, self._calls)
        return taken

    def give(self, tasks: int) -> None:
        self.tasks -= tasks
        # Before the first start it is clear that they never began.
        self._given += tasks if self._begun else 0
        self._hold.give(tasks)
        self._count_pending()
        if not self.tasks:
            self._hold.forget(self._at)

    def may_start(self) -> bool:
        return self._hold.may_start()

    def begin(self) -> None:
        self._begun += 1
        self._count_pending()
        self._hold.begin()

    def may_run(self) -> bool:
        return not self._hold.is_over

    def has_more(self) -> bool:
        return self._hold.free() != 0 and not self._hold.is_wished_by_others(self._at)

    def watch(self, *, over: Callable[[], None], freed: Callable[[], None]) -> None:
        self._calls = over, freed
        self._hold.watch(self._at, self._calls)


class FreeAdmission:
    """Leave to run tasks that fall under no limit."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks

    def more(self, tasks: int) -> int:
        self.tasks += tasks
        return tasks

    def give(self, tasks: int) -> None:
        self.tasks -= tasks

    def may_start(self) -> bool:
        return True

    def begin(self) -> None:
        pass

    def may_run(self) -> bool:
        return True

    def has_more(self) -> bool:
        return True

    def watch(self, *, over: Callable[[], None], freed: Callable[[], None]) -> None:
        pass
