"""Wake-ups by long poll, the default: a worker's request waits at a dispatcher until there is work.

A worker with room keeps one request open (`POST /internal/wait`) that names its operators. The
`Broker` of a dispatcher brings requests and wake-ups together, in memory:

| a wake-up is | means | moved by |
|---|---|---|
| waiting | sent, and no request of its operator was open | a request that names its operator, |
| | | to delivered; `WAITING_SECONDS_MAX`, to nothing |
| delivered | a listener is answering it | the next request of that listener: answered, to |
| | | nothing; returned, to another listener at once, or |
| | | waiting again after `AGAIN_SECONDS`; held, it stays |
| | | for `held_seconds` more; without a word for so |
| | | long, to waiting |

One wake-up waits for each operator and priority and stands for all later ones. As many requests are
answered as there are tasks, less those that are being answered already, and at least one: those
first that have waited longest. A claim that leaves tasks behind sends the next. A wake-up of which
its listener has said nothing goes to many at once (`RESENT_MAX`): where a rack has lost its power,
those who have waited longest may all be gone, and who is there is not known before their requests
end. A caller that leaves gives back what its request was about to get. A dispatcher that stops
answers all requests first.

`LongPollSender` gives wake-ups to the broker here and, by a notification of Postgres, to all others
(`notifications`): for the tasks that nobody was woken for here, and for one at least. So it may
wake in vain one worker of each dispatcher. Nothing but Postgres is needed, and nothing is paid for
while idle.

`LongPollListener` has one request open while it answers nothing, and reports with the next one
what became of its wake-ups; a long answer is held by requests that do not wait. What a dead
listener had goes to others after `HELD_SECONDS`. While no dispatcher answers it retries with
growing pauses.

A crash leaves nothing: lost wake-ups are found by the look of `notifications`, and by the
reconciler. One event loop only. The sender is made in a dispatcher, the
listener in a worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import (
    Heard,
    TaskCounts,
    WakeUpChannel,
    WakeUpListener,
    WakeUpSender,
)
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import DispatcherError, DispatcherUnavailable, PenstockError
from penstock.kernel.service import Service
from penstock.kernel.units import WAIT_SECONDS_MAX
from penstock.protocol.work import (
    HelloAsk,
    OperatorAnswer,
    WaitAnswer,
    WaitAsk,
    WakeUpAnswer,
)

HELD_SECONDS: Final = 15.0
"""How long a wake-up is left to a listener that says nothing more; longer than an answer takes."""
AGAIN_SECONDS: Final = 1.0
WAITING_SECONDS_MAX: Final = 600.0
WAITERS_MAX: Final = 6_000
RESENT_MAX: Final = 100
"""How many requests a wake-up answers of which the first listener has said nothing."""
_AT_ONCE_MAX: Final = 8
_LOOK_SECONDS: Final = 0.5
_IDS: Final = 2**40


@dataclass(frozen=True, slots=True)
class WakeUp:
    """One wake-up in the hands of a listener."""

    id: int
    channel: WakeUpChannel


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
        self.waiters_max = waiters_max
        self._clock = clock or SystemClock()
        # Receipts of another dispatcher, or of one that was here before, mean nothing here.
        self._entropy = entropy or system_entropy()
        self._next_id = self._entropy.randrange(_IDS)
        self._waiting: dict[str, dict[Priority, float]] = {}
        """By operator: since when a wake-up of each priority waits."""
        self._delivered: dict[int, _Delivered] = {}
        self._answering: Counter[WakeUpChannel] = Counter()
        """How many wake-ups of each channel are delivered."""
        self._waiters: dict[str, dict[_Waiter, None]] = {}
        """By operator: the open requests, the one that has waited longest first."""
        self._open: set[_Waiter] = set()
        self._stopping = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    @property
    def waiters(self) -> int:
        """How many requests are open."""
        return len(self._open)

    async def start(self) -> None:
        self._runner = asyncio.get_running_loop().create_task(self._expire(), name="wake-ups")

    async def stop(self) -> None:
        """Answer all requests: this dispatcher stops."""
        self._stopping.set()
        for waiter in self._open:
            if not waiter.answer.done():
                waiter.answer.set_exception(_stops())
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            with suppress(asyncio.CancelledError):
                await runner

    def interrupt(self) -> None:
        """Answer all requests with nothing, so that the workers ask again."""
        for waiter in self._open:
            if not waiter.answer.done():
                waiter.answer.set_result(())

    def send(self, tasks_of: TaskCounts) -> TaskCounts:
        """Deliver wake-ups on each channel to those who wait for it, or keep one until one does.

        Returns how many were delivered of each.
        """
        return {channel: self._send(channel, tasks) for channel, tasks in tasks_of.items()}

    def _send(self, channel: WakeUpChannel, tasks: int) -> int:
        # Whoever is answering may have claimed before the last of these tasks was there.
        wanted = max(1, tasks - self._answering[channel])
        waiters = list(islice(self._ready(channel.operator), wanted))
        for waiter in waiters:
            waiter.answer.set_result([self._deliver(channel, waiter.listener)])
            self._forget(waiter)
        if not waiters:
            now = self._clock.monotonic()
            self._waiting.setdefault(channel.operator, {}).setdefault(channel.priority, now)
        return len(waiters)

    def _ready(self, operator: str) -> Iterator[_Waiter]:
        """The requests that can be answered, the one that has waited longest first."""
        return (each for each in self._waiters.get(operator, ()) if not each.answer.done())

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
        if len(self._open) >= self.waiters_max:
            raise DispatcherUnavailable(
                f"{self.waiters_max} workers already wait at this dispatcher.",
                hint="Start another dispatcher.",
            )
        return await self._wait(listener, operators, seconds)

    async def _wait(
        self, listener: str, operators: Collection[str], seconds: float
    ) -> Sequence[WakeUp]:
        waiter = _Waiter(listener, operators, asyncio.get_running_loop().create_future())
        self._open.add(waiter)
        for operator in operators:
            self._waiters.setdefault(operator, {})[waiter] = None
        is_answered = False
        try:
            await asyncio.wait({waiter.answer}, timeout=seconds)
            is_answered = True
            return waiter.answer.result() if waiter.answer.done() else ()
        finally:
            self._open.discard(waiter)
            self._forget(waiter)
            if not is_answered and waiter.answer.done() and waiter.answer.exception() is None:
                # Whoever asked has left: somebody else may answer.
                for wake_up in waiter.answer.result():
                    self._send(self._take_back(wake_up.id), 1)

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
                found.append(self._deliver(WakeUpChannel(operator, priority), listener))
            if priorities is not None and not priorities:
                del self._waiting[operator]
        return found

    def _deliver(self, channel: WakeUpChannel, listener: str) -> WakeUp:
        self._next_id += 1
        wake_up = WakeUp(self._next_id, channel)
        until = self._clock.monotonic() + self._held_seconds
        self._delivered[wake_up.id] = _Delivered(wake_up, listener, until)
        self._answering[channel] += 1
        return wake_up

    def _take_back(self, number: int) -> WakeUpChannel:
        """A wake-up is in nobody's hands any more; returns what it was about."""
        channel = self._delivered.pop(number).wake_up.channel
        self._answering[channel] -= 1
        if not self._answering[channel]:
            del self._answering[channel]
        return channel

    def _resend(self, channel: WakeUpChannel) -> None:
        """Answer many who wait; keep it until somebody does, if there is nobody."""
        waiters = list(self._ready(channel.operator))
        if not waiters:
            self._send(channel, 1)
            return
        # Of very many some of every age.
        step = -(-len(waiters) // RESENT_MAX)
        for waiter in waiters[self._entropy.randrange(step) :: step]:
            waiter.answer.set_result([self._deliver(channel, waiter.listener)])
            self._forget(waiter)

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
                self._take_back(number)
            elif number in held:
                delivered.until = now + self._held_seconds
            elif any(
                waiter.listener != listener
                for waiter in self._waiters.get(delivered.wake_up.channel.operator, {})
            ):
                self._send(self._take_back(number), 1)
            else:
                delivered.until = now + AGAIN_SECONDS

    async def _expire(self) -> None:
        """Send again what nobody has answered, and drop what nobody waits for."""
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            now = self._clock.monotonic()
            for each in [each for each in self._delivered.values() if each.until <= now]:
                self._resend(self._take_back(each.wake_up.id))
            for operator, priorities in list(self._waiting.items()):
                for priority, since in list(priorities.items()):
                    if since + WAITING_SECONDS_MAX <= now:
                        del priorities[priority]
                if not priorities:
                    del self._waiting[operator]


def _stops() -> DispatcherUnavailable:
    return DispatcherUnavailable("This dispatcher is shutting down.", hint="Try another one.")


_log = logging.getLogger(__name__)

_PAUSE_SECONDS_MAX: Final = 15.0
_STOP_SECONDS: Final = 20.0
_REPORT_SECONDS: Final = 2.0

Publish = Callable[[TaskCounts], Awaitable[None]]
Wait = Callable[[WaitAsk], Awaitable[WaitAnswer]]


class LongPollSender(WakeUpSender):
    """Sends wake-ups to the broker here, and to those of the other dispatchers."""

    def __init__(self, broker: Broker, publish: Publish) -> None:
        """`publish` tells the other dispatchers."""
        self._broker = broker
        self._publish = publish

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do."""

    async def send(self, tasks_of: TaskCounts) -> Mapping[WakeUpChannel, str]:
        woken = self._broker.send(tasks_of)
        # Those who were woken here may be gone. If this fails the relay tries again, and a wake-up
        # here is doubled.
        await self._publish(
            {channel: max(1, tasks - woken[channel]) for channel, tasks in tasks_of.items()}
        )
        return {}


class LongPollListener(WakeUpListener):
    """Waits at a dispatcher for work of the operators that it was told last."""

    def __init__(
        self,
        wait: Wait,
        answer: Heard,
        *,
        hello: HelloAsk | None = None,
        served: Callable[[Sequence[OperatorAnswer]], None] = lambda _: None,
        wait_seconds: float = WAIT_SECONDS_MAX,
        held_seconds: float = HELD_SECONDS,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        """`wait` makes one request; it raises a `DispatcherError` if nobody answers it.

        With a `hello`, a request that waits says that the worker is there, and `served` is told
        what to serve if that are not the operators that are listened to.
        """
        self._hello = hello
        self._served = served
        self._is_present = False
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

    @property
    def is_present(self) -> bool:
        return self._is_present

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
                await self._answer_all(given)
            except Exception as error:  # noqa: BLE001 - listening goes on, whatever it was
                failures += 1
                if failures == 1:
                    # Not our own kind of error is a mistake of ours: its traceback is worth having.
                    is_ours = isinstance(error, PenstockError)
                    _log.warning(
                        "failed to wait for work; retrying: %s",
                        error,
                        exc_info=None if is_ours else error,
                    )
                seconds = min(0.25 * 2.0 ** min(failures, 10), _PAUSE_SECONDS_MAX)
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds * self._entropy.uniform(0.8, 1.2)):
                        await self._changed.wait()
                continue
            if failures:
                _log.info("connection to a dispatcher recovered; waiting for work")
            failures = 0
        await self._report()

    async def _ask(self) -> Sequence[WakeUpAnswer]:
        """Wait for work, until the operators change."""
        operators = sorted(self._operators)
        told = self._receipts(operators, seconds=self._wait_seconds)
        told.hello = self._hello
        self._is_present = self._hello is not None
        loop = asyncio.get_running_loop()
        request = loop.create_task(self._made(told))
        changed = loop.create_task(self._changed.wait())
        try:
            await asyncio.wait({request, changed}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                return ()
            answer = request.result()
        finally:
            self._is_present = False
            request.cancel()
            changed.cancel()
        self._forget(told)
        if answer.operators is not None:
            self._served(answer.operators)
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
            await self._answer(WakeUpChannel(given.operator, Priority(given.priority)))
        except Exception as error:  # noqa: BLE001 - another worker answers, whatever it was
            _log.info("failed to answer a wake-up of %s; returned it: %s", given.operator, error)
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
