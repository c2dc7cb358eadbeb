"""Asks the dispatcher what to serve, and for work when there is room and a reason to.

One claim is under way at a time, for as many tasks as there are free places, and what becomes free
meanwhile goes into the next. It may bring more tasks, in batches that take one place each. A worker
that is nearly full waits a moment before it claims, so that short tasks are claimed several at
once. A worker without room for a while stops listening and sends the wake-ups that it has heard
away, so that they reach one that has some.

Called by `penstock.worker.worker`. A claim whose answer is lost is a lease that runs out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from penstock.dispatcher.wakeups.base import Channel
from penstock.dispatcher.wire.work import ClaimAsk, HelloAsk, OperatorAnswer
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DispatcherError, DispatcherRefused, DispatcherUnavailable
from penstock.runtimes.base import Runtime
from penstock.worker.appetite import Appetite, Asking
from penstock.worker.backoff import Backoff
from penstock.worker.client import UNSERVED, InternalClient
from penstock.worker.hands import Hands
from penstock.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

_WAIT_SECONDS_MAX: Final = 60.0
_IDLE_HELLO_SECONDS: Final = 1.0
_GOODBYE_SECONDS: Final = 3.0
_UNKNOWN_CALLER: Final = frozenset({401, 403, UNSERVED})


class Claiming:
    """What this worker serves, and its claims.

    `listen_to` is the listener's. The runtimes are told to expect work when a dispatcher has named
    operators of theirs, and asked whether they join batches.
    """

    def __init__(
        self,
        client: InternalClient,
        hello: HelloAsk,
        runtimes: Mapping[str, Runtime],
        *,
        settings: WorkerSettings,
        clock: Clock,
        entropy: Entropy,
        listen_to: Callable[[Collection[str]], None],
    ) -> None:
        self._client = client
        self._hello = hello
        self._settings = settings
        self._clock = clock
        self._entropy = entropy
        self._listen_to = listen_to
        self._runtimes = runtimes
        self._joined: frozenset[str] = frozenset()
        """The operators whose tasks may come in batches."""
        self._appetite = Appetite(look_seconds=settings.look_seconds, clock=clock, entropy=entropy)
        self._claims = Backoff(entropy, most_seconds=5.0)
        self._hellos = Backoff(entropy, most_seconds=settings.hello_seconds)
        self._news = asyncio.Event()
        self._stopping = asyncio.Event()
        self._full_since: float | None = None
        self._is_listening = False

    def stop(self) -> None:
        """Claim nothing more. Wake-ups that wait for a claim go elsewhere."""
        self._stopping.set()
        self._news.set()
        self._appetite.refuse(_stopping())

    def freed(self, operator: str) -> None:
        """There is room, or there may be more work of an operator."""
        self._appetite.hunger(operator)
        self._news.set()

    def judge(self, operator: str, *, is_able: bool) -> None:
        """Whether this worker could run a task of an operator: see `Appetite.judge`."""
        self._appetite.judge(operator, is_able=is_able)

    async def heard(self, channel: Channel) -> None:
        """A wake-up: returns when a claim was answered, raises if it has to go elsewhere."""
        if self._stopping.is_set():
            raise _stopping()
        if self._full_since is not None and not self._is_listening:
            raise _full()
        future = self._appetite.hear(channel.operator)
        self._news.set()
        async with asyncio.timeout(self._settings.answer_seconds):
            await future

    async def greet(self) -> None:
        """Say hello until a dispatcher has answered; raises if this worker is not let in."""
        while not self._stopping.is_set():
            try:
                await self._say_hello()
            except DispatcherRefused:
                raise
            except DispatcherUnavailable as error:
                if not self._hellos.failures:
                    _log.warning("waiting for a dispatcher: %s", error.advice)
                await self._pause(self._hellos.next_seconds())
            else:
                self._hellos.succeeded()
                return

    async def keep_greeting(self) -> None:
        """Say hello every few seconds, until stopped."""
        while not self._stopping.is_set():
            # Who has nothing to serve yet waits for a DAG, and somebody waits for that.
            seconds = self._settings.hello_seconds
            if not self._appetite.operators:
                seconds = min(seconds, _IDLE_HELLO_SECONDS)
            await self._pause(seconds * self._entropy.uniform(0.8, 1.2))
            if self._stopping.is_set():
                return
            try:
                await self._say_hello()
            except Exception as error:  # noqa: BLE001 - this goes on whatever is wrong with an answer
                if not self._hellos.failures:
                    told = error.advice if isinstance(error, DispatcherError) else repr(error)
                    _log.warning("no dispatcher answers to a hello: %s", told)
                await self._pause(self._hellos.next_seconds())
            else:
                if self._hellos.succeeded():
                    _log.info("a dispatcher answers to a hello again")

    async def say_goodbye(self) -> None:
        """Tell that this worker leaves, once and briefly; not to be heard costs nothing."""
        with suppress(DispatcherError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self._client.hello(msgspec.structs.replace(self._hello, is_leaving=True))

    async def run(self, hands: Hands) -> None:
        """Claim, until stopped."""
        while not self._stopping.is_set():
            self._news.clear()
            room = hands.room
            self._heed(room)
            asking = None
            if room > 0 and self._appetite.is_hungry:
                if 2 * room < self._settings.concurrency:
                    await self._clock.sleep(self._settings.gather_seconds)
                asking = None if self._stopping.is_set() else self._appetite.next()
            if asking is None:
                await self._wait(room)
            else:
                await self._ask(asking, hands)

    async def _say_hello(self) -> None:
        answer = await self._client.hello(self._hello)
        self._prepare(answer.operators)
        names = list(dict.fromkeys(each.name for each in answer.operators))
        if self._appetite.serve(names):
            _log.info("serving %s", ", ".join(names) or "nothing yet")
            if self._is_listening:
                self._listen_to(names)
            self._news.set()

    def _prepare(self, operators: Sequence[OperatorAnswer]) -> None:
        """Have the runtimes be ready for what is served."""
        alone: set[str] = set()
        for name in {each.runtime for each in operators}:
            runtime = self._runtimes.get(name)
            if runtime is not None:
                runtime.expect()
            if runtime is None or not runtime.joins_batches:
                alone |= {each.name for each in operators if each.runtime == name}
        self._joined = frozenset({each.name for each in operators} - alone)

    async def _ask(self, asking: Asking, hands: Hands) -> None:
        limit = max(1, hands.room)
        is_joined = asking.operator in self._joined
        ask = ClaimAsk(operator=asking.operator, limit=limit, in_batches=is_joined)
        try:
            answer = await self._client.claim(ask)
        except DispatcherRefused as error:
            if error.status in _UNKNOWN_CALLER:
                await self._not_answered(asking, error)
                return
            # An answer all the same: there is nothing here to claim.
            _log.warning("a claim for %s was refused: %s", asking.operator, error.advice)
            self._appetite.answered(asking, is_more=False)
        except DispatcherUnavailable as error:
            await self._not_answered(asking, error)
        except Exception:  # noqa: BLE001 - one answer never ends the claims for all operators
            _log.exception("a claim for %s failed in the worker", asking.operator)
            self._appetite.failed(asking)
            await self._pause(self._claims.next_seconds())
        except BaseException:
            self._appetite.failed(asking)
            raise
        else:
            if self._claims.succeeded():
                _log.info("claims are answered again")
            hands.begin(answer.tasks)
            self._appetite.answered(asking, is_more=len(answer.tasks) >= limit)

    async def _not_answered(self, asking: Asking, error: DispatcherError) -> None:
        self._appetite.failed(asking)
        if self._stopping.is_set():
            self._appetite.refuse(_stopping())
            return
        if not self._claims.failures:
            _log.warning("a claim for %s was not answered: %s", asking.operator, error.advice)
        await self._pause(self._claims.next_seconds())

    def _heed(self, room: int) -> None:
        """Listen while there is room."""
        now = self._clock.monotonic()
        if room > 0:
            self._full_since = None
            if not self._is_listening:
                self._is_listening = True
                self._listen_to(list(self._appetite.operators))
            return
        if self._full_since is None:
            self._full_since = now
        if self._is_listening and now - self._full_since >= self._settings.full_seconds:
            self._is_listening = False
            self._listen_to([])
            self._appetite.refuse(_full())

    async def _wait(self, room: int) -> None:
        seconds = _WAIT_SECONDS_MAX
        if room > 0:
            seconds = min(seconds, self._appetite.seconds_to_look())
        elif self._is_listening:
            seconds = self._settings.full_seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    async def _pause(self, seconds: float) -> None:
        """Wait, unless stopped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()


def hello_of(
    runtimes: Collection[str], *, settings: WorkerSettings, about: Mapping[str, str]
) -> HelloAsk:
    """What a worker says of itself."""
    return HelloAsk(
        runtimes=sorted(runtimes),
        concurrency=settings.concurrency,
        about=dict(about),
        queues=sorted(settings.queues),
    )


def _full() -> DispatcherUnavailable:
    return DispatcherUnavailable("This worker has no room; another one may answer the wake-up.")


def _stopping() -> DispatcherUnavailable:
    return DispatcherUnavailable("This worker stops; another one will answer the wake-up.")
