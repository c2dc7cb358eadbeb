"""The gate that is shut while a queue, or a type, is paused.

It reads `control.json` when a worker is about to claim and what it knows is `WORKER_SECONDS` old,
and as often while tasks are admitted, so that a worker on a large pack hears of a pause too. A
worker that has nothing to do asks nothing.

It fails closed: nothing starts on a reading older than `TRUST_SECONDS`, and nothing while the
object is there and cannot be read, which is said in the log. What runs always goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.access import Access
from penstock.queue.control import TRUST_SECONDS, WORKER_SECONDS, ControlReader
from penstock.queue.discovery.scan import Sight
from penstock.queue.running.saying import Saying

_AGAIN_SECONDS: Final = 2.0


class ControlGate:
    """One worker's view of what is paused."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._clock = access.store.clock.machine
        self._reader = ControlReader(access)
        self._say = Saying(self._clock)
        self._asked_at = float("-inf")
        """When it was last read, or tried to be."""
        self._is_unreadable = False
        self._is_shut = False
        """Something was refused since then."""
        self._admitted = 0
        self._busy = asyncio.Event()
        self._asking = asyncio.Lock()

    def may_start(self, type: str) -> bool:
        """Whether a task of this type may start, by what is known now."""
        reader = self._reader
        if self._is_unreadable or reader.age_seconds >= TRUST_SECONDS:
            return False
        return not reader.state.is_paused(type)

    def count(self, tasks: int) -> None:
        """So many more are admitted, or fewer."""
        self._admitted += tasks
        if self._admitted:
            self._busy.set()
        else:
            self._busy.clear()

    def is_shut(self, sight: Sight) -> bool:
        is_worth_asking = self._seconds_to_ask() <= 0
        return not is_worth_asking and not self.may_start(sight.at.type)

    def seconds_to_open(self) -> float | None:
        return max(0.0, self._seconds_to_ask()) if self._is_shut else None

    def _seconds_to_ask(self) -> float:
        return self._asked_at + WORKER_SECONDS - self._clock.monotonic()

    async def admit(self, sight: Sight, tasks: int) -> ControlAdmission | None:
        await self._ask()
        type_ = sight.at.type
        if not self.may_start(type_):
            self._is_shut = True
            mark = self._reader.state.mark(type_)
            reason = mark.reason or self._reader.state.queue.reason
            if not self._is_unreadable:
                self._say(f"tasks of type {type_!r} are paused{': ' if reason else ''}{reason}")
            return None
        return ControlAdmission(self, type_, tasks)

    async def _ask(self) -> None:
        """Know what holds: whoever comes while it is being read waits for the answer."""
        async with self._asking:
            if self._seconds_to_ask() <= 0:
                await self._read()

    async def _read(self) -> None:
        """Read what holds. What cannot be read holds everything back; this is said, not raised."""
        self._asked_at = self._clock.monotonic()
        self._is_shut = False
        try:
            await self._reader.read(seconds=WORKER_SECONDS / 2)
            self._is_unreadable = False
        except UnreadableObject as error:
            self._is_unreadable = True
            self._say(f"nothing is started, since what is paused cannot be read: {error}")
        except StoreError as error:
            self._asked_at -= WORKER_SECONDS - _AGAIN_SECONDS
            self._say(f"what is paused cannot be read, trying again: {error}")

    async def keep(self) -> None:
        while True:
            await self._busy.wait()
            await self._clock.sleep(max(0.1, self._seconds_to_ask()))
            if self._admitted:
                await self._ask()

    async def release(self) -> None:
        pass


class ControlAdmission:
    """Leave to run tasks of a type until it is paused."""

    def __init__(self, gate: ControlGate, type: str, tasks: int) -> None:
        self._gate = gate
        self._type = type
        self.tasks = tasks
        gate.count(tasks)

    def more(self, tasks: int) -> int:
        given = tasks if self.may_start() else 0
        self.tasks += given
        self._gate.count(given)
        return given

    def give(self, tasks: int) -> None:
        self.tasks -= tasks
        self._gate.count(-tasks)

    def may_start(self) -> bool:
        return self._gate.may_start(self._type)

    def begin(self) -> None:
        pass

    def may_run(self) -> bool:
        return True

    def has_more(self) -> bool:
        return self.may_start()

    def watch(self, *, over: Callable[[], None], freed: Callable[[], None]) -> None:
        pass  # What runs goes on, and a pause is heard of at the next write.
