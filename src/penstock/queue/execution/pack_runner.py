"""The pack runner: keeps a pack's claims alive, runs its tasks, and writes their outcomes.

One `PackRunner` a pack. It runs the tasks that were claimed, as far as there is room, with one
coroutine for each slot that they may have at once, and writes the ledger when

- everything that it holds has ended, and a slot is free or nothing is left to claim;
- an outcome has waited for others for `settle_seconds`, up to four times as long in large packs;
- nothing of the pack waits to start, there is room, and the pack has more;
- a third of a lease has passed: the heartbeat;
- a handler has reported progress, and the last write is `PROGRESS_SECONDS` ago.

Whatever the reason, one swap does it all: it records outcomes, renews leases and claims more.
So in a pack of many a swap is shared by many tasks, and a pack of one costs one. Where nothing
is to be written, a worker with `heartbeat="touch"` renews with a touch
(`penstock.queue.ledger`).

A task starts only while its lease is surely live and its pack has not expired (QUEUE-16), and is
interrupted when the ledger no longer gives it to this claim. If the store is unavailable, the
same swap is retried until long after the lease has ended; an outcome that nobody has overtaken
still counts then. A worker that dies leaves leases that end by themselves.

`PayloadTransfer` fetches a large input before an attempt and stores a large result before the
outcome is written. Both happen while the task is held and its lease renewed, in its slot, but
not in the handler's time. Failures become outcomes:

| | outcome |
|---|---|
| the input is gone or damaged | failed, not retried: another attempt would find the same |
| the store returns no input, for `FETCH_SECONDS` | given back: the attempt does not count |
| the store refuses the result, or it is nested too deep | failed, not retried |
| the store does not take the result, for `STORE_SECONDS` | given back: the lease is long over |

A refused input is retried as patiently: credentials or policy may change. A crash between
storing a result and the settlement leaves an orphaned payload.

`WorkerContext` is what all packs of a worker share: store, name, capacity, handlers; with it
claims are made, and repeated until their answer is known.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    OutcomeUnknown,
    PayloadLost,
    StoreError,
    Throttled,
    Unavailable,
    UnreadableObject,
)
from penstock.queue.attempt_outcomes import (
    DEPTH_MAX,
    AttemptOutcome,
    Expired,
    Failed,
    GivenBack,
    Rescheduled,
    Retried,
    Succeeded,
    is_too_deep,
    share_of,
)
from penstock.queue.execution.attempt import HandlerAttempt
from penstock.queue.execution.capacity import WorkerCapacity
from penstock.queue.execution.gates import CombinedAdmission
from penstock.queue.execution.handler_processes import HandlerProcessPool
from penstock.queue.execution.handlers import (
    PROGRESS_SECONDS,
    Handler,
    ProgressReport,
    ProgressReporter,
    TaskContext,
)
from penstock.queue.execution.observer import AttemptObserver
from penstock.queue.ids import PackAt, TaskId
from penstock.queue.ledger import TOUCH_SLACK_MS, LedgerFailure, LedgerProgress
from penstock.queue.pack import Pack
from penstock.queue.pack_session import ClaimResult, ListedPack, PackSession, SwapResult
from penstock.queue.payloads import INLINE_BYTES_MAX, Payloads, raw, reference
from penstock.queue.settings import HeartbeatMode, WorkerSettings
from penstock.queue.transitions import LedgerClaim, has_expired
from penstock.store.base import ObjectStore
from penstock.store.time import StoreClock

_log = logging.getLogger(__name__)

GIVE_UP_SECONDS: Final = 600.0
"""How long after its lease an ending is still offered to a store that does not answer."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker works with, the same for all its packs."""

    store: ObjectStore
    holder: str
    settings: WorkerSettings
    entropy: Entropy
    room: WorkerCapacity
    watch: AttemptObserver = field(default_factory=AttemptObserver)
    children: HandlerProcessPool | None = None
    """The processes for isolated handlers."""
    incarnation: str = ""
    """Which process this is (`penstock.queue.incarnation`)."""
    clock: StoreClock = field(init=False)
    """The store's, without a way through its wrappers for every task."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "clock", self.store.clock)

    @property
    def lease_ms(self) -> int:
        return int(self.settings.task_lease_seconds * 1000)

    def claim(
        self, handler: Handler, *, tasks_max: int, slots: int, exclusive: bool = False
    ) -> LedgerClaim:
        """A new claim, with an id of its own; so many of its tasks can start at once."""
        return LedgerClaim(
            new_id(self.entropy, characters=16),
            self.holder,
            self.lease_ms,
            tasks_max,
            handler.retry.attempts,
            touch_ms=self.lease_ms + TOUCH_SLACK_MS if self._is_touching else 0,
            slots=slots,
            exclusive=exclusive,
            incarnation=self.incarnation,
        )

    @property
    def _is_touching(self) -> bool:
        return self.settings.heartbeat is HeartbeatMode.TOUCH

    async def claim_surely(
        self, session: PackSession, claim: LedgerClaim, seen: ListedPack | None
    ) -> ClaimResult | None:
        """Claim, and if the answer is lost send the same claim again, for a good while.

        It may be written: under another claim the task would wait for the lease of this one, and
        an attempt would be lost that never began.
        """
        clock = self.store.clock.machine
        until = clock.monotonic() + GIVE_UP_SECONDS
        while True:
            try:
                return await session.claim(claim, seen)
            except (OutcomeUnknown, Throttled, Unavailable) as error:
                if not session.is_sent or clock.monotonic() >= until:
                    raise
                _log.warning("retrying a claim of %s: %s", session.at.path, error)
            await clock.sleep(self.entropy.uniform(0.5, 2.0))

    def now_ms(self) -> int:
        """The store's time, at the latest that it may be."""
        known = self.clock.estimate()
        assert known is not None, "nothing is claimed before the time is known"
        return int(known.latest * 1000)


FETCH_SECONDS: Final = 60.0
STORE_SECONDS: Final = 600.0
_PAUSE_SECONDS_MAX: Final = 10.0
_PASSING: Final = (OutcomeUnknown, Throttled, Unavailable)

Answer = TypeVar("Answer")


class PayloadTransfer:
    """Carries the payloads of one pack's tasks."""

    def __init__(self, payloads: Payloads, at: PackAt) -> None:
        self._payloads = payloads
        self._at = at
        self._clock = payloads.store.clock.machine
        self._inline_bytes_max = min(INLINE_BYTES_MAX, share_of(at.count))

    def is_large(self, ending: AttemptOutcome | None) -> bool:
        """Whether an attempt came to a result that is for a payload."""
        if not isinstance(ending, Succeeded) or ending.is_ref:
            return False
        return memoryview(ending.result).nbytes > self._inline_bytes_max

    async def fetch_input(self, task: TaskContext, pack: Pack, place: int) -> AttemptOutcome | None:
        """Fetch a task's input if it is large; the ending of an attempt that cannot have it.

        It is no longer tried when the attempt is asked to stop.
        """
        if place not in pack.refs:
            return None
        try:
            ref = reference(bytes(pack.inputs[place]))
            task.raw_input = await self._with_retries(
                lambda: self._payloads.fetch(ref),
                what=f"failed to fetch the input of task {task.id}",
                seconds=FETCH_SECONDS,
                # A task that is given back at once is claimed again at once, by all, for ever.
                passing=(StoreError,),
                is_wanted=lambda: not task.cancel_asked,
            )
        except (PayloadLost, msgspec.MsgspecError) as error:
            return Failed(LedgerFailure(type(error).__name__, str(error)))
        except StoreError as error:
            _log.warning("giving back task %s, failed to fetch its input: %s", task.id, error)
            return GivenBack()
        return None

    async def store(
        self, ending: AttemptOutcome | None, pack: Pack, place: int
    ) -> AttemptOutcome | None:
        """The ending, with its result as a payload if that is large."""
        if not isinstance(ending, Succeeded) or not self.is_large(ending):
            return ending
        body = bytes(ending.result)
        if is_too_deep(body):
            return _bad(f"it is nested more than {DEPTH_MAX} levels deep")
        task = self._at.task(place)
        try:
            ref = await self._with_retries(
                lambda: self._payloads.put(task, body, submitted_ms=pack.submitted_ms),
                what=f"failed to store the result of task {task}",
                seconds=STORE_SECONDS,
            )
        except _PASSING:
            return GivenBack()
        except StoreError as error:
            return _bad(f"it has {len(body):,} bytes, and the store says: {error}")
        return Succeeded(raw(ref), is_ref=True)

    async def _with_retries(
        self,
        ask: Callable[[], Awaitable[Answer]],
        *,
        what: str,
        seconds: float,
        passing: tuple[type[StoreError], ...] = _PASSING,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Answer:
        """Ask until there is an answer, or an error that does not pass by itself."""
        until = self._clock.monotonic() + seconds
        pause = 0.5
        while True:
            try:
                return await ask()
            except passing as error:
                if self._clock.monotonic() + pause >= until or not is_wanted():
                    raise
                _log.warning("%s, retrying: %s", what, error)
            await self._clock.sleep(self._payloads.entropy.uniform(pause / 2, pause))
            pause = min(_PAUSE_SECONDS_MAX, pause * 2)


def _bad(problem: str) -> Failed:
    return Failed(LedgerFailure("BadResult", f"The result cannot be stored: {problem}."))


Spawn = Callable[[Coroutine[Any, Any, None]], None]
"""Runs something beside, as long as the worker runs."""


@dataclass(slots=True, eq=False)
class _Held:
    claim: str
    attempt: HandlerAttempt
    since: float
    pack: Pack
    place: int
    started: bool = False
    begun: bool = False
    """Its handler runs: what it rested on has been checked."""
    ending: AttemptOutcome | None = None


class PackRunner:
    """Some tasks of one pack, claimed by this worker. `run` ends when none is held any more."""

    def __init__(
        self,
        context: WorkerContext,
        session: PackSession,
        handler: Handler,
        *,
        leave: CombinedAdmission,
        spawn: Spawn,
        priority: int = 0,
    ) -> None:
        self.session = session
        self._priority = priority
        self._context = context
        self._handler = handler
        self._leave = leave
        self._spawn = spawn
        self._clock = context.store.clock.machine
        self._transfer = PayloadTransfer(
            Payloads(context.store, session.layout, context.entropy), session.at
        )
        self._settle_seconds = context.settings.settle_seconds_of(session.at.count)
        self._held: dict[int, _Held] = {}
        self._queue: deque[_Held] = deque()
        """What was claimed and has not had a slot yet, in the order of the pack."""
        self._runners = 0
        self._unstarted = 0
        """How many of those that are held have neither started nor ended."""
        self._unended = 0
        self._has_said = False
        """Whether a handler may have said something that is not written."""
        self._expires_ms: dict[str, int] = {}
        self._pack_expires_ms = 0
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ended_at: float | None = None
        self._renewed_at = 0.0
        self._draining = False
        self._is_dry = False
        self._is_slow = False
        self.has_given_back = False
        """Whether others may have some of it that this worker had claimed."""
        self._more: LedgerClaim | None = None
        self._failures = 0
        leave.watch(over=self._interrupt, freed=self._news.set)

    @property
    def left(self) -> int:
        """How many tasks of the pack nobody holds."""
        return self.session.claimable(attempts_max=self._handler.retry.attempts)

    async def run(self, claim: str, claimed: ClaimResult) -> None:
        """Work on what was claimed, and on what more of the pack is claimed on the way."""
        self._begin(claim, claimed)
        try:
            while self._held:
                await self._wait()
                await self._write()
        finally:
            self._let_go()

    def drain(self) -> None:
        """Claim no more, and give back what has not started."""
        self._draining = True
        self._give_back_unstarted()
        self._news.set()

    def give_back(self) -> None:
        """Interrupt what runs and give it back."""
        self.drain()
        self.has_given_back = True
        self._interrupt()

    def _interrupt(self) -> None:
        for held in self._held.values():
            held.attempt.give_back()

    def _give_back_unstarted(self, after_seconds: float = 0.0) -> None:
        """Others may have what waits longer than that for a slot: the tasks before it are slow."""
        until = self._clock.monotonic() - after_seconds
        for held in self._held.values():
            if not held.started and held.since <= until and held.ending is None:
                self._is_slow = self.has_given_back = True
                self._ended(held, GivenBack())

    def _begin(self, claim: str, claimed: ClaimResult) -> None:
        # A claim whose answer was lost for a while has less of its lease left.
        left_seconds = (claimed.expires_ms - self._context.now_ms()) / 1000
        spent_seconds = max(0.0, self._context.settings.task_lease_seconds - left_seconds)
        self._renewed_at = self._clock.monotonic() - spent_seconds
        self._expires_ms[claim] = claimed.expires_ms
        self._pack_expires_ms = claimed.pack.expires_ms
        since = self._clock.monotonic()
        tasks = self.session.at.tasks(claimed.attempts)
        for task, (place, number) in zip(tasks, claimed.attempts.items(), strict=True):
            attempt = self._attempt(claimed, task, place, number)
            held = _Held(claim, attempt, since, claimed.pack, place)
            self._held[place] = held
            self._queue.append(held)
        self._started(-len(claimed.attempts))
        self._unended += len(claimed.attempts)
        for _ in range(min(len(self._queue), self._context.room.concurrency - self._runners)):
            self._runners += 1
            self._spawn(self._run_all())
        if self._draining:
            self.drain()

    def _attempt(self, claimed: ClaimResult, id: TaskId, place: int, number: int) -> HandlerAttempt:
        task = TaskContext(
            id=id,
            type=self.session.at.type,
            attempt=number,
            raw_input=claimed.pack.inputs[place],
            reporter=ProgressReporter(self._on_progress),
        )
        return HandlerAttempt(
            self._handler,
            task,
            counted=number - claimed.given_back[place],
            now_ms=self._context.now_ms,
            entropy=self._context.entropy,
            children=self._context.children,
        )

    def _started(self, count: int) -> None:
        """So many do not wait for a slot any more."""
        self._unstarted -= count
        self._context.room.wait(-count, priority=self._priority)

    async def _run_all(self) -> None:
        """One attempt after the other, each when there is a slot for it, until none waits."""
        slots = self._context.room.slots
        try:
            while self._queue:
                async with slots.of(self._priority):
                    if self._queue:  # Others may have taken the last one.
                        await self._run(self._queue.popleft())
        except BaseException:
            # The worker is torn down: what has not started never will.
            self._context.room.give(len(self._queue), priority=self._priority)
            self._leave.give(len(self._queue))
            self._queue.clear()
            raise
        finally:
            self._runners -= 1

    async def _run(self, held: _Held) -> None:
        """One attempt, in a slot of its own."""
        room = self._context.room
        is_gone = True
        try:
            if held.ending is not None:
                return
            held.started = True
            self._started(1)
            if not self._unstarted and room.free_for(self._priority):
                self._news.set()  # Nothing waits any more: there may be more to claim.
            problem: AttemptOutcome | None = Expired() if self._has_expired() else None
            if problem is None and held.place in held.pack.refs:
                problem = await self._transfer.fetch_input(held.attempt.task, held.pack, held.place)
            if problem is not None or self._has_expired():
                self._ended(held, problem or Expired())
                return
            if not self._is_trusted(held) or not self._leave.begin():
                held.attempt.give_back()
            held.begun = True
            is_gone = False
            ended = await self._context.watch.run(held.attempt, held.pack, clock=self._clock)
            is_gone = ended.released is None
            ending = ended.ending
            if self._transfer.is_large(ending):
                ending = await self._transfer.store(ending, held.pack, held.place)
            self._ended(held, ending)
            room.note_end(self.session.at.type)
            if ended.released is not None:
                await self._until(ended.released)
                is_gone = True
        finally:
            room.give(1, priority=self._priority)
            if is_gone:
                self._leave.give(1)
            # Else this was cancelled, and the handler may go on: its leave must end by itself.

    async def _until(self, released: asyncio.Future[Any]) -> None:
        """The handler does not heed its interruption: its slot is not free yet."""
        room = self._context.room
        room.stuck += 1
        try:
            if room.is_stuck:
                _log.error("all %d handlers are stuck: nothing can start here", room.concurrency)
                self._news.set()
            await asyncio.wait((released,))
        finally:
            room.stuck -= 1

    def _is_trusted(self, held: _Held) -> bool:
        return self._context.now_ms() < self._expires_ms.get(held.claim, 0)

    def _has_expired(self) -> bool:
        if not self._pack_expires_ms:
            return False
        now = self._context.store.clock.estimate()
        return now is not None and has_expired(self._pack_expires_ms, now)

    def _on_progress(self) -> None:
        """A handler has something to say, in whatever thread."""
        self._has_said = True
        with suppress(RuntimeError):  # The loop is closed: nobody writes it any more.
            self._loop.call_soon_threadsafe(self._news.set)

    def _said(self) -> dict[int, ProgressReport]:
        """What handlers have said that is not written yet."""
        if not self._has_said:
            return {}
        self._has_said = False  # Before looking: whoever speaks meanwhile is heard next time.
        said = ((place, held.attempt.task.reporter.unsent) for place, held in self._held.items())
        unsent = {place: each for place, each in said if each is not None}
        self._has_said = self._has_said or bool(unsent)
        return unsent

    def _ended(self, held: _Held, ending: AttemptOutcome | None) -> None:
        if held.ending is None:
            # What was lost has nothing to settle; the ledger refuses it.
            held.ending = ending or GivenBack()
            self._unended -= 1
            self._started(not held.started)
            is_first = self._ended_at is None
            if is_first:
                self._ended_at = self._clock.monotonic()
            # While others wait for a slot, only the first ending sets a time for the next write.
            if is_first or not self._unstarted:
                self._news.set()

    async def _wait(self) -> None:
        """Until there is a reason to write."""
        room = self._context.room
        while self._unended or self._is_held_up():
            is_free = not self._unstarted and room.free_for(self._priority) > 0
            if is_free and self._claimable() and self._leave.has_more():
                return
            seconds = self._next_at() - self._clock.monotonic()
            if seconds <= 0:
                return
            self._news.clear()
            timer = self._loop.call_later(seconds, self._news.set)
            if not self._unended:
                room.waiting.add(self._news)
            try:
                await self._news.wait()
            finally:
                timer.cancel()
                room.waiting.discard(self._news)

    def _is_held_up(self) -> bool:
        """Whether all has ended and there is more, without a slot for it: a later write claims it.

        What has ended waits no longer for that than for its neighbours (`settle_seconds`). What ran
        exclusively does not wait: lost now, it would count as failed.
        """
        if self._context.room.is_reserved:
            return False
        if self._draining or len(self._held) == self.session.at.count:
            return False
        return self._context.room.free_for(self._priority) <= 0 and self.left > 0

    def _next_at(self) -> float:
        """When the next write is due at the latest."""
        instants = [self._renewed_at + self._context.settings.task_lease_seconds / 3]
        if self._ended_at is not None:
            instants.append(self._ended_at + self._settle_seconds)
        if self._said():
            instants.append(self._renewed_at + PROGRESS_SECONDS)
        retry = None if self._draining else self.session.seconds_to_retry()
        if retry is not None:
            instants.append(self._clock.monotonic() + retry)
        return min(instants)

    async def _write(self) -> None:
        """One swap: endings, renewals, and more."""
        may_start = self._leave.may_start() and not self._context.room.is_stuck
        self._give_back_unstarted(
            self._context.settings.task_lease_seconds / 3 if may_start else 0.0
        )
        if not self._leave.may_run():
            self._interrupt()
        endings = {p: (h.claim, h.ending) for p, h in self._held.items() if h.ending is not None}
        live = {held.claim for held in self._held.values() if held.ending is None}
        more = self._more = self._more or self._next_claim()
        said = self._said()
        try:
            swapped = await self._send(endings, live, more, said)
        except (StoreError, UnreadableObject) as error:
            # It may have taken effect: the same claim is sent again, with its room.
            await self._failed(error)
            return
        self._failures = 0
        self._more = None
        self._ended_at = None
        for place, each in said.items():
            self._held[place].attempt.task.reporter.sent(each)
        for place in endings:
            self._tell(place, self._held.pop(place), is_refused=place in swapped.refused)
        self._renew(live, swapped)
        taken = swapped.more
        if more is not None:
            unused = more.tasks_max - (len(taken.attempts) if taken else 0)
            self._context.room.give(unused, priority=self._priority)
            self._leave.give(unused)
            if taken is not None:
                self._begin(more.id, taken)
        # What cannot be had now is found again by a look.
        self._is_dry = more is not None and taken is None

    async def _send(
        self,
        endings: Mapping[int, tuple[str, AttemptOutcome]],
        live: set[str],
        more: LedgerClaim | None,
        said: Mapping[int, ProgressReport],
    ) -> SwapResult:
        """A swap; a touch will do if nothing has to be written, and nothing waits to start."""
        lease_ms = self._context.lease_ms
        if not (endings or more or said) and all(held.begun for held in self._held.values()):
            touched = await self.session.touch(frozenset(live), lease_ms=lease_ms)
            if touched is not None:
                return touched
        reports = self._reports(said)
        return await self.session.swap(
            endings, claims=live, lease_ms=lease_ms, more=more, reports=reports
        )

    def _reports(self, said: Mapping[int, ProgressReport]) -> dict[int, tuple[str, LedgerProgress]]:
        now_ms = self._context.now_ms()
        return {place: (self._held[place].claim, each.at(now_ms)) for place, each in said.items()}

    def _next_claim(self) -> LedgerClaim | None:
        """What else to claim, with the room for it taken."""
        slots = self._context.room.free_for(self._priority)
        room = self._context.room.take(
            self._claimable(),
            type=self.session.at.type,
            priority=self._priority,
            ahead_seconds=self._settle_seconds,
            blindly=not self._is_slow,
        )
        tasks = self._leave.more(room) if room else 0
        self._context.room.give(room - tasks, priority=self._priority)
        if not tasks:
            return None
        return self._context.claim(self._handler, tasks_max=tasks, slots=slots)

    def _tell(self, place: int, held: _Held, *, is_refused: bool) -> None:
        """Tell who watches, and log what a user would want to know."""
        ledger, _ = self.session.ledger
        if ledger is not None and held.ending is not None and not is_refused:
            self._context.watch.written(held.attempt, held.ending, ledger.tasks[place])
        if isinstance(held.ending, Succeeded) and not is_refused:
            return
        what = f"task {held.attempt.task.id}: attempt {held.attempt.task.attempt}"
        match held.ending:
            case _ if is_refused:
                _log.info("%s was overtaken by another attempt", what)
            case Failed(failure):
                _log.warning("%s failed permanently: %s: %s", what, failure.error, failure.message)
            case Retried(failure):
                _log.info("%s will be retried: %s: %s", what, failure.error, failure.message)
            case Rescheduled(due_ms, reason):
                seconds = max(0.0, (due_ms - self._context.now_ms()) / 1000)
                _log.info("%s was rescheduled by %.0f s: %s", what, seconds, reason or "no reason")
            case _:
                pass

    def _claimable(self) -> int:
        is_contended = self._context.room.is_contended(self._priority)
        may_start = self._leave.may_start() and not is_contended
        if self._is_dry or self._draining or not may_start:
            return 0
        return self.session.claimable(
            attempts_max=self._handler.retry.attempts,
            held=[place for place, held in self._held.items() if held.ending is None],
            slots=self._context.room.free_for(self._priority),
        )

    def _renew(self, live: set[str], swapped: SwapResult) -> None:
        self._renewed_at = self._clock.monotonic()
        self._expires_ms = dict(swapped.expires_ms)
        for held in self._held.values():
            if held.claim in live and held.claim not in swapped.expires_ms:
                held.attempt.lose()
        for place in swapped.asked_to_stop & self._held.keys():
            self._held[place].attempt.ask_to_stop()
        if any(held.ending is not None for held in self._held.values()):
            self._ended_at = self._clock.monotonic()

    def _let_go(self) -> None:
        """Nothing more is written for what is held."""
        for held in self._held.values():
            held.attempt.lose()
            self._ended(held, GivenBack())
        self._held.clear()
        if self._more is not None:
            self._context.room.give(self._more.tasks_max, priority=self._priority)
            self._leave.give(self._more.tasks_max)
            self._more = None

    async def _failed(self, error: StoreError | UnreadableObject) -> None:
        """The write failed: try again later, until there is no point in it any more."""
        self._failures += 1
        late_ms = self._context.now_ms() - max(self._expires_ms.values(), default=0)
        if isinstance(error, UnreadableObject) or late_ms > GIVE_UP_SECONDS * 1000:
            _log.error(
                "giving up pack %s, its tasks will be retried: %s", self.session.at.path, error
            )
            self._let_go()
            return
        _log.warning("failed to write pack %s, retrying: %s", self.session.at.path, error)
        pause = min(_PAUSE_SECONDS_MAX, 0.25 * 2.0 ** min(self._failures, 10))
        await self._clock.sleep(self._context.entropy.uniform(pause / 2, pause))
