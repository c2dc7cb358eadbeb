"""Decides when to claim tasks and for which operator, and claims them.

An operator is *queued* when there is a reason to claim for it: it is new here, a wake-up came,
the last claim brought as many tasks as were asked for, a task of it has ended, or nobody has
claimed for it for a while. Queued operators are served in order, so that none starves. A claim
that brings fewer tasks than asked for takes the operator out. An operator of which this worker
has released a task, because it cannot run it, *rests* with a growing backoff: nothing of it is
claimed here, and its wake-ups go to other workers.

A wake-up is acknowledged by a claim that began after it arrived: an earlier one may have missed
what the wake-up is about.

One claim is under way at a time, for as many tasks as there are free slots, and short ones ahead of
them (`executor`); what becomes free meanwhile goes into the next. A report of ends is a claim too:
it says what there is room for, and brings tasks that these ends have made (`reserve`). A claim may
bring more tasks, in batches that take one slot each. A worker that is nearly full waits a moment
before it claims, so that short tasks are claimed several at once. A worker without room for a while
stops listening and
refuses the wake-ups that wait here, so that they reach one that has some.

Called by `penstock.worker.worker`, from the event loop. It holds no tasks. Every claim has an id,
which the next one for the same operator repeats if there was no answer: what was begun comes again,
and what nobody asks for again the dispatcher takes back within seconds. What cannot be told to this
worker, as answer after answer is faulty, is left to that.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import msgspec

from penstock.dispatcher.wakeups.base import WakeUpChannel
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import DispatcherError, DispatcherRefused, DispatcherUnavailable
from penstock.protocol.client import UNSERVED
from penstock.protocol.work import Assignment, ClaimAsk, HelloAsk, NextClaim, OperatorAnswer
from penstock.runtimes.base import Runtime
from penstock.worker.client import Backoff, InternalClient
from penstock.worker.executor import AttemptExecutor
from penstock.worker.settings import PipelineWorkerSettings

_REST_SECONDS_MIN: Final = 2.0
_REST_SECONDS_MAX: Final = 60.0
_FAULTS_MAX: Final = 3
"""How often a claim is made whose answer is faulty each time: then it is another claim."""


@dataclass(slots=True)
class _Operator:
    look_at: float
    rests: Backoff
    rests_until: float = 0.0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PendingClaim:
    """The claim that is under way; there is one at a time."""

    operator: str
    waiting: tuple[asyncio.Future[None], ...]


class OperatorQueue:
    """The operators that a worker serves, and which of them are queued."""

    def __init__(self, *, look_seconds: float, clock: Clock, entropy: Entropy) -> None:
        self._look_seconds = look_seconds
        self._clock = clock
        self._entropy = entropy
        self._operators: dict[str, _Operator] = {}
        # A dict as a queue that holds each once.
        self._queued: dict[str, None] = {}
        self._asking: PendingClaim | None = None

    @property
    def operators(self) -> Collection[str]:
        """What is served."""
        return self._operators.keys()

    def serve(self, operators: Collection[str]) -> bool:
        """Serve these from now on; new ones are queued. Returns whether anything has changed."""
        gone = self._operators.keys() - set(operators)
        for name in gone:
            self._queued.pop(name, None)
            _settle(self._operators.pop(name).waiting)
        new = [name for name in operators if name not in self._operators]
        for name in new:
            rests = Backoff(
                self._entropy, first_seconds=_REST_SECONDS_MIN, most_seconds=_REST_SECONDS_MAX
            )
            self._operators[name] = _Operator(self._next_look(), rests)
            self._queued[name] = None
        return bool(gone or new)

    def enqueue(self, operator: str) -> None:
        """Queue an operator: there may be work."""
        known = self._operators.get(operator)
        if known is not None and known.rests_until <= self._clock.monotonic():
            self._queued.setdefault(operator)

    def judge(self, operator: str, *, is_able: bool) -> None:
        """Whether this worker could run a task of an operator; if it could not, that rests."""
        known = self._operators.get(operator)
        if known is None:
            return
        if is_able:
            known.rests.succeeded()
        elif known.rests_until <= self._clock.monotonic():
            # Once for all that one claim has brought.
            known.rests_until = self._clock.monotonic() + known.rests.next_seconds()
            known.look_at = known.rests_until
            self._queued.pop(operator, None)
            _refuse(known.waiting)
            known.waiting = []

    def able(self) -> Iterator[PendingClaim]:
        """What could be claimed: all that do not rest, the queued ones first and in turn."""
        now = self._clock.monotonic()
        for name in (*self._queued, *(self._operators.keys() - self._queued.keys())):
            operator = self._operators[name]
            if operator.rests_until <= now:
                yield PendingClaim(name, tuple(operator.waiting))

    def is_queued(self, operator: str) -> bool:
        return operator in self._queued

    def answered_besides(self, claim: PendingClaim, *, is_more: bool) -> None:
        """A claim was answered that was not taken out of the queue; it settles what waited then."""
        _settle(claim.waiting)
        operator = self._operators.get(claim.operator)
        if operator is None:
            return
        operator.look_at = self._next_look()
        operator.waiting = [each for each in operator.waiting if not each.done()]
        # To the end: the others have their turn.
        self._queued.pop(claim.operator, None)
        if is_more or operator.waiting:
            self.enqueue(claim.operator)

    def wake(self, operator: str) -> asyncio.Future[None]:
        """A wake-up; the future is done when a claim was answered that began after this."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        known = self._operators.get(operator)
        if known is None:
            # If there is work for it after all, the next hello says so.
            future.set_result(None)
            return future
        if known.rests_until > self._clock.monotonic():
            _refuse([future])
            return future
        # Futures that were cancelled are not kept.
        known.waiting = [*(each for each in known.waiting if not each.done()), future]
        self.enqueue(operator)
        return future

    @property
    def first(self) -> str | None:
        """The operator to claim for now."""
        now = self._clock.monotonic()
        for name, operator in self._operators.items():
            if operator.look_at <= now:
                self._queued.setdefault(name)
        return next(iter(self._queued), None)

    def next(self) -> PendingClaim | None:
        """The same, taken out of the queue."""
        name = self.first
        if name is None:
            return None
        del self._queued[name]
        operator = self._operators[name]
        operator.look_at = self._next_look()
        waiting, operator.waiting = tuple(operator.waiting), []
        self._asking = PendingClaim(name, waiting)
        return self._asking

    def answered(self, claim: PendingClaim, *, is_more: bool) -> None:
        """A claim was answered; `is_more` if it brought as many as were asked for."""
        _settle(claim.waiting)
        if is_more:
            self.enqueue(claim.operator)

    def failed(self, claim: PendingClaim) -> None:
        """A claim was not answered: its wake-ups wait for the next one."""
        operator = self._operators.get(claim.operator)
        if operator is None:
            _settle(claim.waiting)
            return
        operator.waiting[:0] = [each for each in claim.waiting if not each.done()]
        self.enqueue(claim.operator)

    def refuse(self, error: Exception) -> None:
        """Refuse all wake-ups that wait, also those that wait for the claim under way."""
        waiting = [*self._asking.waiting] if self._asking is not None else []
        for operator in self._operators.values():
            waiting += operator.waiting
            operator.waiting = []
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def seconds_to_look(self) -> float:
        """How long until an operator is queued by time alone."""
        first = min((each.look_at for each in self._operators.values()), default=math.inf)
        return max(0.0, first - self._clock.monotonic())

    def _next_look(self) -> float:
        seconds = self._look_seconds * self._entropy.uniform(0.8, 1.2)
        return self._clock.monotonic() + seconds


def _refuse(waiting: Collection[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            message = "This worker could not run tasks of this operator; another one may."
            future.set_exception(DispatcherUnavailable(message))


def _settle(waiting: Collection[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)


_log = logging.getLogger(__name__)

_WAIT_SECONDS_MAX: Final = 60.0
_IDLE_HELLO_SECONDS: Final = 1.0
_GOODBYE_SECONDS: Final = 3.0
_RESERVED_MAX: Final = 64
"""Of how many operators a report of ends says what there is room for."""
_UNKNOWN_CALLER: Final = frozenset({401, 403, UNSERVED})


class ClaimScheduler:
    """What this worker serves, and its claims.

    `listen_to` and `is_present` are the listener's. The runtimes are told to expect work when a
    dispatcher has named operators of theirs, and asked whether they join batches.
    """

    def __init__(
        self,
        client: InternalClient,
        hello: HelloAsk,
        runtimes: Mapping[str, Runtime],
        *,
        settings: PipelineWorkerSettings,
        clock: Clock,
        entropy: Entropy,
        listen_to: Callable[[Collection[str]], None],
        is_present: Callable[[], bool],
    ) -> None:
        self._client = client
        self.hello = hello
        """How this worker introduces itself."""
        self._settings = settings
        self._clock = clock
        self._entropy = entropy
        self._listen_to = listen_to
        self._is_present = is_present
        self._runtimes = runtimes
        self._joined: frozenset[str] = frozenset()
        """The operators whose tasks may come in batches."""
        self._queue = OperatorQueue(
            look_seconds=settings.look_seconds, clock=clock, entropy=entropy
        )
        self._claims = Backoff(entropy, most_seconds=5.0)
        self._hellos = Backoff(entropy, most_seconds=5.0)
        self._news = asyncio.Event()
        self._stopping = asyncio.Event()
        self._is_claiming = False
        self._claim_ids: dict[str, str] = {}
        """Of claims that were not answered, by operator: the next one repeats it."""
        self._faults = 0
        """How many faulty answers there were in a row."""
        self._is_told = False
        """Whether dispatchers tell this worker of work by themselves; else a queue does."""
        self._reserved: Mapping[str, tuple[PendingClaim, int]] = {}
        """What a report of ends that is under way may bring, by operator, and how many tasks."""
        self._full_since: float | None = None
        self._is_listening = False

    def stop(self) -> None:
        """Claim nothing more. Wake-ups that wait for a claim go elsewhere."""
        self._stopping.set()
        self._news.set()
        self._queue.refuse(_stopping())

    def freed(self, operator: str) -> None:
        """There is room, or there may be more work of an operator.

        A worker that waits at a dispatcher is told of work, and what it has room for goes with its
        ends: it need not look.
        """
        if not self._is_told or not (self._is_present() or operator in self._reserved):
            self._queue.enqueue(operator)
        self._news.set()

    def reserve(self, claimable: Callable[[str], int]) -> Sequence[NextClaim]:
        """What a report of ends may claim; until `reserved` is called, no other claim is made."""
        self._is_told |= self._is_present()
        if self._stopping.is_set() or self._is_claiming or not self._is_told:
            return ()
        able = islice(self._queue.able(), _RESERVED_MAX)
        self._reserved = {
            each.operator: (each, limit)
            for each in able
            if each.operator not in self._joined and (limit := claimable(each.operator)) > 0
        }
        return [
            NextClaim(operator=name, limit=limit, is_wanted=self._queue.is_queued(name))
            for name, (_, limit) in self._reserved.items()
        ]

    def reserved(self, operator: str, claimed: Sequence[Assignment]) -> None:
        """What the report has brought, of an operator that it has claimed for, if any."""
        reserved, self._reserved = self._reserved, {}
        if operator in reserved:
            pending, limit = reserved[operator]
            self._queue.answered_besides(pending, is_more=len(claimed) >= limit)
        self._news.set()

    def judge(self, operator: str, *, is_able: bool) -> None:
        """Whether this worker could run a task of an operator: see `OperatorQueue.judge`."""
        self._queue.judge(operator, is_able=is_able)

    async def heard(self, channel: WakeUpChannel) -> None:
        """A wake-up: returns when a claim was answered, raises if it has to go elsewhere."""
        if self._stopping.is_set():
            raise _stopping()
        if self._full_since is not None and not self._is_listening:
            raise _full()
        future = self._queue.wake(channel.operator)
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
        """Say hello every half minute, until stopped, unless the listener does."""
        while not self._stopping.is_set():
            # Without operators it waits for a DAG to be applied, and somebody waits for that.
            seconds = self._settings.hello_seconds
            if not self._queue.operators:
                seconds = min(seconds, _IDLE_HELLO_SECONDS)
            await self._pause(seconds * self._entropy.uniform(0.8, 1.2))
            if self._stopping.is_set():
                return
            if self._is_present():
                continue
            try:
                await self._say_hello()
            except Exception as error:  # noqa: BLE001 - this goes on whatever is wrong with an answer
                if not self._hellos.failures:
                    message = error.advice if isinstance(error, DispatcherError) else repr(error)
                    _log.warning("hello failed, retrying: %s", message)
                await self._pause(self._hellos.next_seconds())
            else:
                if self._hellos.succeeded():
                    _log.info("hello succeeded again")

    async def say_goodbye(self) -> None:
        """Report that this worker leaves: one try, which may fail."""
        with suppress(DispatcherError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self._client.hello(msgspec.structs.replace(self.hello, is_leaving=True))

    async def run(self, executor: AttemptExecutor) -> None:
        """Claim, until stopped."""
        while not self._stopping.is_set():
            self._news.clear()
            room = executor.room
            self._update_listening(room)
            claim, operator = None, self._queue.first
            if operator is not None and self._is_left_to_report(operator, executor):
                operator = None
            if operator is not None and self._limit(operator, executor) > 0:
                if 0 < 2 * room < self._settings.concurrency:
                    await self._clock.sleep(self._settings.gather_seconds)
                claim = None if self._stopping.is_set() else self._queue.next()
            if claim is None:
                await self._wait(room)
            else:
                self._is_claiming = True
                try:
                    await self._ask(claim, executor)
                finally:
                    self._is_claiming = False

    async def _say_hello(self) -> None:
        self.serve((await self._client.hello(self.hello)).operators)

    def serve(self, operators: Sequence[OperatorAnswer]) -> None:
        """Serve the operators that a dispatcher has named."""
        self._prepare(operators)
        names = list(dict.fromkeys(each.name for each in operators))
        if self._queue.serve(names):
            _log.info("serving %s", ", ".join(names) or "nothing yet")
            if self._is_listening:
                self._listen_to(names)
            self._news.set()

    def _prepare(self, operators: Sequence[OperatorAnswer]) -> None:
        """Prepare the runtimes of these operators."""
        alone: set[str] = set()
        for name in {each.runtime for each in operators}:
            runtime = self._runtimes.get(name)
            if runtime is not None:
                runtime.expect()
            if runtime is None or not runtime.joins_batches:
                alone |= {each.name for each in operators if each.runtime == name}
        self._joined = frozenset({each.name for each in operators} - alone)

    async def _ask(self, claim: PendingClaim, executor: AttemptExecutor) -> None:
        limit = max(1, self._limit(claim.operator, executor))
        is_joined = claim.operator in self._joined
        claim_id = self._claim_ids.pop(claim.operator, "") or new_id(self._entropy)
        ask = ClaimAsk(
            operator=claim.operator, limit=limit, in_batches=is_joined, claim_id=claim_id
        )
        asked_at = self._clock.monotonic()
        try:
            answer = await self._client.claim(ask)
        except DispatcherRefused as error:
            if error.status in _UNKNOWN_CALLER:
                self._claim_ids[claim.operator] = claim_id
                await self._not_answered(claim, error)
                return
            # An answer all the same: there is nothing here to claim.
            _log.warning("a claim for %s was refused: %s", claim.operator, error.advice)
            self._queue.answered(claim, is_more=False)
        except DispatcherUnavailable as error:
            self._faults = self._faults + 1 if error.is_faulty else 0
            if self._faults < _FAULTS_MAX:
                self._claim_ids[claim.operator] = claim_id
            else:
                self._faults = 0
            await self._not_answered(claim, error)
        except Exception:  # noqa: BLE001 - one answer never ends the claims for all operators
            _log.exception("a claim for %s failed in the worker", claim.operator)
            self._queue.failed(claim)
            await self._pause(self._claims.next_seconds())
        except BaseException:
            self._queue.failed(claim)
            raise
        else:
            if self._claims.succeeded():
                _log.info("claims succeed again")
            executor.begin(answer.tasks, asked_at=asked_at)
            self._queue.answered(claim, is_more=len(answer.tasks) >= limit)

    def _is_left_to_report(self, operator: str, executor: AttemptExecutor) -> bool:
        """Whether a report of ends claims for this operator, or is about to."""
        if not self._is_told or operator in self._joined:
            return False
        return bool(self._reserved) or executor.completions.is_due

    def _limit(self, operator: str, executor: AttemptExecutor) -> int:
        """How many tasks of an operator to claim; batches are for free slots alone."""
        return executor.room if operator in self._joined else executor.claimable(operator)

    async def _not_answered(self, claim: PendingClaim, error: DispatcherError) -> None:
        self._queue.failed(claim)
        if self._stopping.is_set():
            self._queue.refuse(_stopping())
            return
        if not self._claims.failures:
            _log.warning("claim for %s failed, retrying: %s", claim.operator, error.advice)
        await self._pause(self._claims.next_seconds())

    def _update_listening(self, room: int) -> None:
        """Listen while there is room."""
        now = self._clock.monotonic()
        if room > 0:
            self._full_since = None
            if not self._is_listening:
                self._is_listening = True
                self._listen_to(list(self._queue.operators))
            return
        if self._full_since is None:
            self._full_since = now
        if self._is_listening and now - self._full_since >= self._settings.full_seconds:
            self._is_listening = False
            self._listen_to([])
            self._queue.refuse(_full())

    async def _wait(self, room: int) -> None:
        seconds = _WAIT_SECONDS_MAX
        if room > 0:
            seconds = min(seconds, self._queue.seconds_to_look())
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
    runtimes: Collection[str], *, settings: PipelineWorkerSettings, about: Mapping[str, str]
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
