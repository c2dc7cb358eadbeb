"""Runs attempts, from their assignment until their completion is acknowledged.

An attempt takes one of `concurrency` slots while it runs; those of a batch, which were claimed
to be run as one, share a slot, which is free when the last of them has ended. An attempt is
kept alive by heartbeats from its assignment until its completion is acknowledged. If the
dispatcher assigns a task of which an earlier attempt still runs here, that one is over: it is
interrupted and nothing is reported of it, so no call ever names a task twice. While too many
completions are not acknowledged there is no room: more work would only pile up.

Short tasks are claimed *ahead* of free slots, so that a call brings and reports many: as many as
begin within `ahead_seconds`, by how long tasks of their operators took lately, and at most
`_AHEAD_FACTOR` times the slots. They are held, with heartbeats, and have not begun: a worker that
is killed, or stops, gives them back uncounted, and so does one that had no slot for them within
`_AHEAD_SECONDS_MAX`, which then claims nothing ahead until a task has ended.

An attempt whose completion is refused, because what it was merged with is no longer published,
takes a slot again: it merges again, or waits until it may.

An attempt that could be taken back as one that nobody has begun waits in its slot until its
claim is acknowledged (FENCE-20): where the answer came late, where there is no journal, and where
an attempt of the task was taken back before.

Called by `penstock.worker.worker` and `claim_scheduler`, from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.protocol.work import Assignment, EndAsk, NextClaim, TaskResult
from penstock.runtimes.base import AttemptWork, Runtime
from penstock.worker import assignment_codec
from penstock.worker.attempt import InterruptReason, TaskAttempt
from penstock.worker.client import InternalClient
from penstock.worker.heartbeat_sender import HeartbeatSender
from penstock.worker.recovery import AttemptJournal
from penstock.worker.reporter import CompletionReporter, TaskReporter
from penstock.worker.sandbox import CredentialProvider
from penstock.worker.secrets import SecretResolver
from penstock.worker.settings import PipelineWorkerSettings

_log = logging.getLogger(__name__)

_UNREPORTED_MAX: Final = 500
"""With so many completions that are not acknowledged, nothing more is begun."""
_MERGES_MAX: Final = 10
"""How often one attempt merges again: it has its turn long before."""
_TURN_SECONDS: Final = 1.0
"""How long an attempt waits for others to merge, at a time."""
_AHEAD_FACTOR: Final = 3
_AHEAD_SECONDS_MAX: Final = 2.0
"""How long an attempt waits for a slot before another worker may have it."""
_IN_TIME_SHARE: Final = 0.5
"""An answer that took no more of the time to acknowledge it is acknowledged in time."""
_PACE_SHARE: Final = 0.2
"""What a task counts in the average of its operator."""


AttemptCoroutine = Coroutine[Any, Any, EndAsk | None]
"""An attempt that runs, or waits; returns its completion."""


class ClaimFeedback(Protocol):
    """What the claim scheduler learns of attempts that have ended."""

    def freed(self, operator: str) -> None:
        """There is room, or there may be more work of an operator."""
        ...

    def judge(self, operator: str, *, is_able: bool) -> None:
        """Whether this worker could run a task of an operator."""
        ...

    def reserve(self, claimable: Callable[[str], int]) -> Sequence[NextClaim]:
        """What a report of ends may claim; nothing else is claimed until `reserved` is called."""
        ...

    def reserved(self, operator: str, claimed: Sequence[Assignment]) -> None:
        """What it has brought, and of which operator, if it has claimed for any."""
        ...


class AttemptExecutor:
    """The attempts of this worker."""

    def __init__(
        self,
        client: InternalClient,
        runtimes: Mapping[str, Runtime],
        *,
        logs: Path | None,
        credentials: CredentialProvider,
        settings: PipelineWorkerSettings,
        clock: Clock,
        entropy: Entropy,
        claims: ClaimFeedback,
        secrets: SecretResolver | None = None,
    ) -> None:
        self._client = client
        self._runtimes = runtimes
        self._logs = logs
        self._credentials = credentials
        self._settings = settings
        self._clock = clock
        self._entropy = entropy
        self._claims = claims
        self._secrets = secrets
        self.journal = AttemptJournal(None, Path())
        """Where the successor of a killed worker finds what it held."""
        self.heartbeats = HeartbeatSender(client, clock=clock, entropy=entropy)
        self.completions = CompletionReporter(
            client,
            clock=clock,
            entropy=entropy,
            gather_seconds=settings.gather_seconds,
            done=self._done,
            moved=self._moved,
            is_idle=lambda: not self._running,
            reserve=lambda: self._claims.reserve(self.claimable),
            claimed=self._claimed,
        )
        self._running: set[TaskAttempt] = set()
        self._taken: Counter[str] = Counter()
        """The slots that are taken, and by how many attempts."""
        self._ahead: deque[tuple[TaskAttempt, float]] = deque()
        """Attempts without a slot, and until when they wait for one."""
        self._ahead_watch: asyncio.Task[None] | None = None
        self._paces: dict[str, float] = {}
        """How many seconds tasks took lately, by operator."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_stopping = False

    @property
    def room(self) -> int:
        """How many attempts or batches may begin."""
        return 0 if self._is_blocked else self._free

    def claimable(self, operator: str) -> int:
        """How many tasks of an operator a claim may bring: for free slots, and ahead of them.

        Those ahead are replenished when half of them have begun, not one by one.
        """
        if self._is_blocked:
            return 0
        most = self._ahead_max(operator)
        left = most - len(self._ahead)
        return self._free + (left if self._free or 2 * left >= most else 0)

    @property
    def _is_blocked(self) -> bool:
        return self.completions.is_failing or len(self.completions) >= _UNREPORTED_MAX

    @property
    def _free(self) -> int:
        return max(0, self._settings.concurrency - len(self._taken))

    def _ahead_max(self, operator: str) -> int:
        """How many tasks of an operator may wait here for slots, by what runs in these."""
        operators = {operator, *(_claimed_operator(each) for each in self._running)}
        paces = [self._paces.get(each) for each in operators]
        if self._settings.ahead_seconds <= 0 or None in paces:
            return 0
        slots = self._settings.concurrency
        slowest = max((each for each in paces if each), default=0.0)
        most = _AHEAD_FACTOR * slots
        return (
            most if slowest <= 0 else min(most, int(slots * self._settings.ahead_seconds / slowest))
        )

    @property
    def count(self) -> int:
        """How many attempts run."""
        return len(self._running)

    def begin(self, assignments: Sequence[Assignment], *, asked_at: float | None = None) -> None:
        """Run what one claim returned; a worker that stops releases it instead.

        `asked_at` is when it was claimed, if this is no claim of just now.
        """
        self.journal.hold(assignments)
        now = self._clock.monotonic()
        waited = 0.0 if asked_at is None else now - asked_at
        sizes = Counter(each.batch for each in assignments if each.batch)
        for each in assignments:
            try:
                is_asked = _is_asked(each, waited=waited, is_kept=self.journal.is_kept)
                self._begin(each, batch_size=sizes.get(each.batch, 1), is_asked=is_asked)
            except Exception:  # noqa: BLE001 - one assignment never costs the others of its claim
                _log.exception("task %d failed to start; its lease will expire", each.task_id)
                self.journal.release(each)

    def _claimed(self, operator: str, assignments: Sequence[Assignment], asked_at: float) -> None:
        """What a report of ends has brought."""
        if assignments:
            self.begin(assignments, asked_at=asked_at)
        self._claims.reserved(operator, assignments)

    def _begin(self, assignment: Assignment, *, batch_size: int, is_asked: bool) -> None:
        attempt = TaskAttempt(
            assignment, begins=partial(self.journal.begin, assignment), is_asked=is_asked
        )
        before = self.heartbeats.hold(attempt)
        if before is not None:
            _log.warning("%s is interrupted: the task was reassigned", before)
            before.interrupt(InterruptReason.LOST)
            self.completions.forget(before)
            self.journal.release(before.assignment)
        if self._is_stopping:
            attempt.interrupt(InterruptReason.STOPPED)
        elif not self._free and attempt.place not in self._taken:
            self._ahead.append((attempt, self._clock.monotonic() + _AHEAD_SECONDS_MAX))
            if self._ahead_watch is None or self._ahead_watch.done():
                loop = asyncio.get_running_loop()
                self._ahead_watch = loop.create_task(self._watch_ahead())
            return
        self._start(attempt, self._run(attempt, batch_size=batch_size))

    async def _watch_ahead(self) -> None:
        """Give back what has waited too long for a slot."""
        while self._ahead:
            _, until = self._ahead[0]
            await self._clock.sleep(max(0.0, until - self._clock.monotonic()))
            if self._give_back_ahead(InterruptReason.NO_SLOT, now=self._clock.monotonic()):
                # What runs here takes longer than was thought.
                self._paces.clear()

    def _give_back_ahead(self, why: InterruptReason, *, now: float = math.inf) -> int:
        """Give back what waits for a slot, and was to until now; returns how many."""
        count = 0
        while self._ahead and self._ahead[0][1] <= now:
            attempt, _ = self._ahead.popleft()
            attempt.interrupt(why)
            attempt.is_over = True
            end = attempt.interrupted()
            if end is None:
                self._done(attempt)
            else:
                self.completions.add(attempt, end)
            count += 1
        return count

    def _start(self, attempt: TaskAttempt, running: AttemptCoroutine) -> None:
        """Take a slot for it, and supervise it to its end."""
        self._running.add(attempt)
        self._taken[attempt.place] += 1
        self._idle.clear()
        attending = self._supervise(attempt, running)
        task = asyncio.get_running_loop().create_task(attending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drain(self) -> None:
        """Begin nothing more. Sources that never end by themselves are stopped now."""
        self._is_stopping = True
        self._give_back_ahead(InterruptReason.STOPPED)
        for attempt in tuple(self._running):
            if assignment_codec.is_always_on(attempt.assignment):
                attempt.interrupt(InterruptReason.STOPPED)

    def give_back(self) -> None:
        """Interrupt what runs."""
        self._is_stopping = True
        for attempt in tuple(self._running):
            attempt.interrupt(InterruptReason.STOPPED)

    def cut_short(self) -> None:
        """Have what was interrupted end by force."""
        for attempt in tuple(self._running):
            attempt.cut_short()

    async def idle(self) -> None:
        """Return when nothing runs."""
        await self._idle.wait()

    async def close(self) -> None:
        """Let go of what does not end."""
        if self._ahead_watch is not None:
            self._ahead_watch.cancel()
        self._ahead.clear()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=self._settings.grace_seconds)

    async def _supervise(self, attempt: TaskAttempt, running: AttemptCoroutine) -> None:
        began = self._clock.monotonic()
        try:
            try:
                end = await running
            except Exception as error:  # noqa: BLE001 - one attempt never ends the worker
                _log.exception("%s failed in the worker", attempt)
                end = attempt.failure(f"The worker failed: {type(error).__name__}: {error}")
            self._note_pace(_claimed_operator(attempt), self._clock.monotonic() - began)
            if attempt.released is None:
                self._leave(attempt)
            if end is None:
                self._done(attempt)
            else:
                is_able = end.release is None or not end.release.is_delayed
                self._claims.judge(_claimed_operator(attempt), is_able=is_able)
                self.completions.add(attempt, end)
            if attempt.released is not None:
                await asyncio.wait((attempt.released,))
        finally:
            self._leave(attempt)

    def _moved(self, attempt: TaskAttempt, ask: EndAsk, result: TaskResult) -> None:
        """Its outputs were merged with what is no longer published."""
        if attempt.is_lost:
            self._done(attempt)
        elif self._is_stopping:
            message = WorkReleased("The worker was stopped.", is_delayed=False)
            self.completions.add(attempt, attempt.unfinished(message))
        else:
            self._start(attempt, self._merged(attempt, ask, result))

    async def _merged(self, attempt: TaskAttempt, ask: EndAsk, result: TaskResult) -> EndAsk | None:
        """Merge with what is published now; or wait, and report the same completion again."""
        if result.current is not None:
            attempt.merge_again(result.current)
            _log.info("%s merges again with its partitions as published now", attempt)
            if attempt.merges <= _MERGES_MAX:
                return await self._run(attempt, batch_size=1)
            return attempt.failure("Merge retries exhausted: others kept publishing its partition.")
        if attempt.waits * _TURN_SECONDS >= attempt.assignment.timeout_seconds:
            message = "Timed out waiting for other attempts that merge into its partition."
            return attempt.unfinished(WorkReleased(message))
        is_on = await attempt.pause(self._clock, _TURN_SECONDS)
        return ask if is_on else attempt.interrupted()

    async def _run(self, attempt: TaskAttempt, *, batch_size: int) -> EndAsk | None:
        if attempt.is_asked and not await attempt.acknowledged():
            return attempt.interrupted()
        assignment = attempt.assignment
        runtime = self._runtimes.get(assignment.runtime)
        if runtime is None:
            # Of another release, perhaps: the next attempt may be another worker's.
            message = f"This worker has no runtime {assignment.runtime!r}."
            hint = "Configure it, or upgrade the worker to the release of the dispatcher."
            return attempt.unfinished(WorkReleased(message, hint=hint))
        try:
            work = self._work(assignment, batch_size=batch_size, merges=attempt.merges)
            work = replace(work, staged=attempt.staged)
            work = await self._with_secrets(attempt, runtime, work)
        except WorkFailed as error:
            return None if attempt.is_lost else attempt.unfinished(error)
        clock, entropy = self._clock, self._entropy
        reporter = TaskReporter(attempt, work, self._client, clock=clock, entropy=entropy)
        return await attempt.run(partial(self._credentials.run, attempt, runtime), work, reporter)

    def _work(self, assignment: Assignment, *, batch_size: int, merges: int) -> AttemptWork:
        try:
            return assignment_codec.work_of(
                assignment,
                logs=self._logs,
                grace_seconds=self._settings.grace_seconds,
                batch_size=batch_size,
                merges=merges,
            )
        except WorkFailed:
            raise
        except Exception as error:
            raise WorkReleased(
                f"This worker cannot read the task: {type(error).__name__}: {error}.",
                hint="Upgrade it to the release of the dispatcher.",
            ) from error

    async def _with_secrets(
        self, attempt: TaskAttempt, runtime: Runtime, work: AttemptWork
    ) -> AttemptWork:
        """The work with the secrets that its job names, as they are now."""
        references = assignment_codec.secrets_of(attempt.assignment)
        if not references:
            return work
        if why := runtime.secrets_refused(work.operator):
            raise WorkFailed(why, is_retried=False)
        if self._secrets is None:
            message = f"The job {work.job} names secrets, and this worker provides none."
            raise WorkReleased(message)
        attempt.secrets = await self._secrets.values(references, job=work.job)
        return replace(work, secrets=attempt.secrets)

    def _leave(self, attempt: TaskAttempt) -> None:
        """Free its slot."""
        if attempt not in self._running:
            return
        self._running.discard(attempt)
        self._taken[attempt.place] -= 1
        if self._taken[attempt.place] > 0:
            return
        del self._taken[attempt.place]
        if self._ahead and self._free:
            waiting, _ = self._ahead.popleft()
            self._start(waiting, self._run(waiting, batch_size=1))
        if not self._running:
            self._idle.set()
        self._claims.freed("")

    def _note_pace(self, operator: str, seconds: float) -> None:
        before = self._paces.get(operator, seconds)
        self._paces[operator] = before + _PACE_SHARE * (seconds - before)

    def _done(self, attempt: TaskAttempt) -> None:
        """Nothing more is to be reported of it."""
        self.heartbeats.release(attempt)
        self.journal.release(attempt.assignment)
        self._claims.freed(_claimed_operator(attempt))


def _is_asked(assignment: Assignment, *, waited: float, is_kept: bool) -> bool:
    """Whether its claim is to be acknowledged before it begins.

    An answer that came late may be about attempts that are gone. And what is not acknowledged is
    taken back as if it had not begun: who is killed has to leave another proof that it has.
    """
    seconds = assignment.acknowledge_seconds
    is_late = waited >= _IN_TIME_SHARE * seconds
    return seconds > 0 and (is_late or not is_kept or assignment.was_lost)


def _claimed_operator(attempt: TaskAttempt) -> str:
    """The name by which the worker claims such tasks: that of the operator in its queue."""
    return attempt.assignment.claimed_as or attempt.assignment.operator
