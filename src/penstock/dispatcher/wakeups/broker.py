"""The broker of one dispatcher: requests that wait for work, and wake-ups that wait for a request.

A worker that has room keeps one request open (`POST /internal/wait`), which names the operators it
serves; it is answered as soon as one of them has work. Everything is in memory: a wake-up is a
hint, and the tasks are rows in Postgres.

| a wake-up is | means | moved by |
|---|---|---|
| waiting | sent, and no request of its operator was open | a request that names its operator, |
| | | to delivered; `WAITING_SECONDS_MAX`, to nothing |
| delivered | a listener is answering it | the next request of that listener: answered, to |
| | | nothing; returned, to another listener at once, or |
| | | waiting again after `AGAIN_SECONDS`; held, it stays |
| | | for `held_seconds` more; without a word for so |
| | | long, to waiting |

One wake-up waits for each operator and priority, and stands for all that were sent meanwhile: a
claim finds whatever was committed before. It goes to one request, the one that has waited longest;
a claim that leaves tasks behind sends the next. A caller that leaves gives back what its request
was about to be answered with.

What a crash leaves: nothing. Wake-ups of a dispatcher that dies are lost, and found by the claims
that every worker makes twice a minute, and by the reconciler. A dispatcher that stops answers all
requests first, with the word that it stops, so that workers go to the next one.

Called by the API, and by `LongPollSender`. From one event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import Channel
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, system_entropy
from penstock.kernel.errors import DispatcherUnavailable
from penstock.kernel.service import Service

HELD_SECONDS: Final = 15.0
"""How long a wake-up is left to a listener that says nothing more; longer than an answer takes."""
AGAIN_SECONDS: Final = 1.0
WAITING_SECONDS_MAX: Final = 600.0
WAITERS_MAX: Final = 10_000
_AT_ONCE_MAX: Final = 8
_LOOK_SECONDS: Final = 0.5
_IDS: Final = 2**40


@dataclass(frozen=True, slots=True)
class WakeUp:
    """One wake-up in the hands of a listener."""

    id: int
    channel: Channel


@dataclass(eq=False, slots=True)
class _Waiter:
    listener: str
    operators: Collection[str]
    answer: asyncio.Future[Sequence[WakeUp]]


@dataclass(slots=True)
class _Delivered:
    wake_up: WakeUp
    listener: str
    until: float


class Broker(Service):
    """Brings wake-ups and waiting requests together."""

    def __init__(
        self,
        *,
        held_seconds: float = HELD_SECONDS,
        waiters_max: int = WAITERS_MAX,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self._held_seconds = held_seconds
        self._waiters_max = waiters_max
        self._clock = clock or SystemClock()
        # Receipts of another dispatcher, or of one that was here before, mean nothing here.
        self._next_id = (entropy or system_entropy()).randrange(_IDS)
        self._waiting: dict[str, dict[Priority, float]] = {}
        """By operator: since when a wake-up of each priority waits."""
        self._delivered: dict[int, _Delivered] = {}
        self._waiters: dict[str, dict[_Waiter, None]] = {}
        """By operator: the open requests, the one that has waited longest first."""
        self._count = 0
        self._stopping = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    @property
    def waiters(self) -> int:
        """How many requests are open."""
        return self._count

    async def start(self) -> None:
        self._runner = asyncio.get_running_loop().create_task(self._expire(), name="wake-ups")

    async def stop(self) -> None:
        """Answer all requests: this dispatcher stops."""
        self._stopping.set()
        for waiter in {each: None for some in self._waiters.values() for each in some}:
            if not waiter.answer.done():
                waiter.answer.set_exception(_stops())
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            with suppress(asyncio.CancelledError):
                await runner

    def send(self, channels: Iterable[Channel]) -> None:
        """Deliver a wake-up on each channel to whoever waits for it, or keep it until one does."""
        now = self._clock.monotonic()
        for channel in channels:
            self._waiting.setdefault(channel.operator, {}).setdefault(channel.priority, now)
            self._match(channel.operator)

    async def wait(
        self,
        listener: str,
        operators: Collection[str],
        *,
        seconds: float,
        answered: Collection[int] = (),
        returned: Collection[int] = (),
        held: Collection[int] = (),
    ) -> Sequence[WakeUp]:
        """Wait until one of the operators has work; what the listener has done is told first.

        Raises `DispatcherUnavailable` if this dispatcher stops, or too many wait.
        """
        if self._stopping.is_set():
            raise _stops()
        self._settle(listener, answered=answered, returned=returned, held=held)
        found = self._take(listener, operators)
        if found or seconds <= 0 or not operators:
            return found
        if self._count >= self._waiters_max:
            raise DispatcherUnavailable(
                f"{self._waiters_max} workers wait here already.",
                hint="Run another dispatcher.",
            )
        return await self._wait(listener, operators, seconds)

    async def _wait(
        self, listener: str, operators: Collection[str], seconds: float
    ) -> Sequence[WakeUp]:
        waiter = _Waiter(listener, operators, asyncio.get_running_loop().create_future())
        self._count += 1
        for operator in operators:
            self._waiters.setdefault(operator, {})[waiter] = None
        is_answered = False
        try:
            await asyncio.wait({waiter.answer}, timeout=seconds)
            is_answered = True
            return waiter.answer.result() if waiter.answer.done() else ()
        finally:
            self._count -= 1
            self._forget(waiter)
            if not is_answered and waiter.answer.done() and waiter.answer.exception() is None:
                # Whoever asked has left: somebody else may answer.
                for wake_up in waiter.answer.result():
                    del self._delivered[wake_up.id]
                    self.send([wake_up.channel])

    def _forget(self, waiter: _Waiter) -> None:
        for operator in waiter.operators:
            some = self._waiters.get(operator)
            if some is not None:
                some.pop(waiter, None)
                if not some:
                    del self._waiters[operator]

    def _take(self, listener: str, operators: Collection[str]) -> Sequence[WakeUp]:
        """Deliver what waits for these operators, a few at a time."""
        found: list[WakeUp] = []
        for operator in operators:
            priorities = self._waiting.get(operator)
            while priorities and len(found) < _AT_ONCE_MAX:
                priority = min(priorities, key=lambda each: each is not Priority.NORMAL)
                del priorities[priority]
                found.append(self._deliver(Channel(operator, priority), listener))
            if priorities is not None and not priorities:
                del self._waiting[operator]
        return found

    def _deliver(self, channel: Channel, listener: str) -> WakeUp:
        self._next_id += 1
        wake_up = WakeUp(self._next_id, channel)
        until = self._clock.monotonic() + self._held_seconds
        self._delivered[wake_up.id] = _Delivered(wake_up, listener, until)
        return wake_up

    def _match(self, operator: str) -> None:
        """Answer the request that has waited longest for an operator, if there is one."""
        for waiter in self._waiters.get(operator, {}):
            if not waiter.answer.done():
                waiter.answer.set_result(self._take(waiter.listener, waiter.operators))
                self._forget(waiter)
                return

    def _settle(
        self,
        listener: str,
        *,
        answered: Collection[int],
        returned: Collection[int],
        held: Collection[int],
    ) -> None:
        """Take in what a listener says of what it was given; what it was not, is not its to say."""
        now = self._clock.monotonic()
        for number in (*answered, *returned, *held):
            delivered = self._delivered.get(number)
            if delivered is None or delivered.listener != listener:
                continue
            if number in answered:
                del self._delivered[number]
            elif number in held:
                delivered.until = now + self._held_seconds
            elif any(
                waiter.listener != listener
                for waiter in self._waiters.get(delivered.wake_up.channel.operator, {})
            ):
                del self._delivered[number]
                self.send([delivered.wake_up.channel])
            else:
                delivered.until = now + AGAIN_SECONDS

    async def _expire(self) -> None:
        """Send again what nobody has answered, and drop what nobody waits for."""
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            now = self._clock.monotonic()
            for each in [each for each in self._delivered.values() if each.until <= now]:
                del self._delivered[each.wake_up.id]
                self.send([each.wake_up.channel])
            for operator, priorities in list(self._waiting.items()):
                for priority, since in list(priorities.items()):
                    if since + WAITING_SECONDS_MAX <= now:
                        del priorities[priority]
                if not priorities:
                    del self._waiting[operator]


def _stops() -> DispatcherUnavailable:
    return DispatcherUnavailable("This dispatcher stops.", hint="Ask another one.")
