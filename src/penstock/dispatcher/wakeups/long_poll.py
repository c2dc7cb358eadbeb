"""Wake-ups by long poll, the default: a worker's request waits at a dispatcher until there is work.

The relay of one dispatcher sends a wake-up to its own broker, and by a notification of Postgres to
the brokers of all others (`notifications`); each broker answers one waiting request of that
operator. So a wake-up may reach as many workers as there are dispatchers: all but one find nothing,
or more of the same work. Nothing but Postgres is needed, and nothing is paid for while idle.

A listener has one request open while it answers nothing, and tells with the next one what became of
what it was given. An answer that takes long is held by requests that do not wait. What a listener
that dies was given goes to others after `broker.HELD_SECONDS`; a request that was merely open
costs nothing. While no dispatcher answers it tries again, with growing pauses.

Made by the wiring: the sender in a dispatcher, the listener in a worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import Channel, Heard, Listener, Sender
from penstock.dispatcher.wakeups.broker import HELD_SECONDS, Broker
from penstock.dispatcher.wire.work import (
    WAIT_SECONDS_MAX,
    WaitAnswer,
    WaitAsk,
    WakeUpAnswer,
)
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import DispatcherError

_log = logging.getLogger(__name__)

_PAUSE_SECONDS_MAX: Final = 15.0
_STOP_SECONDS: Final = 20.0
_REPORT_SECONDS: Final = 2.0

Publish = Callable[[Collection[Channel]], Awaitable[None]]
Wait = Callable[[WaitAsk], Awaitable[WaitAnswer]]


class LongPollSender(Sender):
    """Sends wake-ups to the broker here, and to those of the other dispatchers."""

    def __init__(self, broker: Broker, publish: Publish) -> None:
        """`publish` tells the other dispatchers."""
        self._broker = broker
        self._publish = publish

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do."""

    async def send(self, channels: Collection[Channel]) -> Mapping[Channel, str]:
        self._broker.send(channels)
        # If that fails the relay tries again, and a wake-up here is doubled.
        await self._publish(channels)
        return {}


class LongPollListener(Listener):
    """Waits at a dispatcher for work of the operators that it was told last."""

    def __init__(
        self,
        wait: Wait,
        answer: Heard,
        *,
        wait_seconds: float = WAIT_SECONDS_MAX,
        held_seconds: float = HELD_SECONDS,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        """`wait` makes one request; it raises a `DispatcherError` if nobody answers it."""
        self._wait = wait
        self._answer = answer
        self._wait_seconds = wait_seconds
        self._held_seconds = held_seconds
        self._clock = clock or SystemClock()
        self._entropy = entropy or system_entropy()
        self._name = new_id(self._entropy, characters=16)
        self._operators: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._answered: list[int] = []
        self._returned: list[int] = []
        self._runner: asyncio.Task[None] | None = None
        self._is_stopping = False

    def listen_to(self, operators: Collection[str]) -> None:
        wanted = frozenset(operators)
        if wanted != self._operators:
            self._operators = wanted
            self._changed.set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._runner = loop.create_task(self._run(), name="wait for work")

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self._is_stopping = True
        self._changed.set()
        # What is being answered may end.
        await asyncio.wait({runner}, timeout=_STOP_SECONDS)
        runner.cancel()
        with suppress(asyncio.CancelledError):
            await runner

    async def _run(self) -> None:
        failures = 0
        while not self._is_stopping:
            self._changed.clear()
            if not self._operators:
                await self._report()
                await self._changed.wait()
                continue
            try:
                given = await self._ask()
            except DispatcherError as error:
                failures += 1
                if failures == 1:
                    _log.warning("cannot wait for work, trying again: %s", error)
                seconds = min(0.25 * 2.0 ** min(failures, 10), _PAUSE_SECONDS_MAX)
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds * self._entropy.uniform(0.8, 1.2)):
                        await self._changed.wait()
                continue
            if failures:
                _log.info("waiting for work again")
            failures = 0
            await self._answer_all(given)
        await self._report()

    async def _ask(self) -> Sequence[WakeUpAnswer]:
        """Wait for work, until the operators change."""
        operators = sorted(self._operators)
        told = self._receipts(operators, seconds=self._wait_seconds)
        loop = asyncio.get_running_loop()
        request = loop.create_task(self._made(told))
        changed = loop.create_task(self._changed.wait())
        try:
            await asyncio.wait({request, changed}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                return ()
            answer = request.result()
        finally:
            request.cancel()
            changed.cancel()
        self._forget(told)
        return answer.wake_ups

    async def _made(self, ask: WaitAsk) -> WaitAnswer:
        return await self._wait(ask)

    async def _answer_all(self, given: Sequence[WakeUpAnswer]) -> None:
        if not given:
            return
        loop = asyncio.get_running_loop()
        answers = {loop.create_task(self._answer_one(each)): each.id for each in given}
        try:
            open_ = set(answers)
            while open_:
                _, open_ = await asyncio.wait(open_, timeout=self._held_seconds / 3)
                if open_:
                    held = [answers[each] for each in open_]
                    with suppress(DispatcherError):
                        await self._wait(WaitAsk(listener=self._name, operators=[], held=held))
        finally:
            for task in answers:
                task.cancel()

    async def _answer_one(self, given: WakeUpAnswer) -> None:
        try:
            await self._answer(Channel(given.operator, Priority(given.priority)))
        except Exception as error:  # noqa: BLE001 - another worker answers, whatever it was
            _log.info("a wake-up of %s is returned: %s", given.operator, error)
            self._returned.append(given.id)
        else:
            self._answered.append(given.id)

    def _receipts(self, operators: Sequence[str], *, seconds: float) -> WaitAsk:
        return WaitAsk(
            listener=self._name,
            operators=list(operators),
            seconds=seconds,
            answered=list(self._answered),
            returned=list(self._returned),
        )

    def _forget(self, told: WaitAsk) -> None:
        """The dispatcher knows these; none has come to them while the request was open."""
        self._answered = [each for each in self._answered if each not in told.answered]
        self._returned = [each for each in self._returned if each not in told.returned]

    async def _report(self) -> None:
        """Tell what became of what was given, without waiting. To fail costs time elsewhere."""
        if not self._answered and not self._returned:
            return
        told = self._receipts([], seconds=0.0)
        with suppress(DispatcherError, TimeoutError):
            async with asyncio.timeout(_REPORT_SECONDS):
                await self._wait(told)
                self._forget(told)
