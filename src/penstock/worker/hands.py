"""What runs here: attempts from their assignment until nothing is left to tell of them.

An attempt takes one of `concurrency` places while it runs; those of a batch, which were claimed to
be run as one, share a place, which is free when the last of them has ended. An attempt is kept
alive by heartbeats from its assignment until its end is answered. If the dispatcher hands out a
task that an earlier attempt of it still runs here, that one is over: it is interrupted and nothing
is told of it, so no call ever names a task twice. While ends are not answered there is no room:
more work would only pile up. An attempt whose end is refused, because what it was merged with is
not published any more, takes a place again: it merges again, or waits until it may.

Called by `penstock.worker.worker` and `claiming`, from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.dispatcher.wire.work import Assignment, EndAsk, TaskResult
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.runtimes.base import Runtime, Work
from penstock.worker import orders
from penstock.worker.attempt import Attempt, Interruption
from penstock.worker.client import InternalClient
from penstock.worker.endings import Endings
from penstock.worker.handing import Handing
from penstock.worker.heartbeats import Heartbeats
from penstock.worker.secrets import Resolver
from penstock.worker.settings import WorkerSettings
from penstock.worker.voice import AttemptVoice

_log = logging.getLogger(__name__)

_UNTOLD_MAX: Final = 500
"""With so many ends that are not answered, nothing more is begun."""
_MERGES_MAX: Final = 10
"""How often one attempt merges again: it has its turn long before."""
_TURN_SECONDS: Final = 1.0
"""How long an attempt waits for others to merge, at a time."""


Running = Coroutine[Any, Any, EndAsk | None]
"""An attempt that runs, or waits: what to tell of its end."""


class Claims(Protocol):
    """Who claims, as it hears of attempts that have ended."""

    def freed(self, operator: str) -> None:
        """There is room, or there may be more work of an operator."""
        ...

    def judge(self, operator: str, *, is_able: bool) -> None:
        """Whether this worker could run a task of an operator."""
        ...


class Hands:
    """The attempts of this worker."""

    def __init__(
        self,
        client: InternalClient,
        runtimes: Mapping[str, Runtime],
        *,
        logs: Path | None,
        handing: Handing,
        settings: WorkerSettings,
        clock: Clock,
        entropy: Entropy,
        claiming: Claims,
        secrets: Resolver | None = None,
    ) -> None:
        self._client = client
        self._runtimes = runtimes
        self._logs = logs
        self._handing = handing
        self._settings = settings
        self._clock = clock
        self._entropy = entropy
        self._claiming = claiming
        self._secrets = secrets
        self.heartbeats = Heartbeats(client, clock=clock, entropy=entropy)
        self.endings = Endings(
            client,
            clock=clock,
            entropy=entropy,
            gather_seconds=settings.gather_seconds,
            done=self._done,
            moved=self._moved,
            is_idle=lambda: not self._running,
        )
        self._running: set[Attempt] = set()
        self._taken: Counter[str] = Counter()
        """The places that are taken, and by how many attempts."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_stopping = False

    @property
    def room(self) -> int:
        """How many attempts or batches may begin."""
        if self.endings.is_failing or len(self.endings) >= _UNTOLD_MAX:
            return 0
        return self._settings.concurrency - len(self._taken)

    @property
    def count(self) -> int:
        """How many attempts run."""
        return len(self._running)

    def begin(self, assignments: Sequence[Assignment]) -> None:
        """Run what one claim has brought; a worker that stops gives it back instead."""
        sizes = Counter(each.batch for each in assignments if each.batch)
        for each in assignments:
            try:
                self._begin(each, batch_size=sizes.get(each.batch, 1))
            except Exception:  # noqa: BLE001 - one assignment never costs the others of its claim
                _log.exception("task %d failed to begin; its lease will run out", each.task_id)

    def _begin(self, assignment: Assignment, *, batch_size: int) -> None:
        attempt = Attempt(assignment)
        before = self.heartbeats.hold(attempt)
        if before is not None:
            _log.warning("%s is interrupted: the task was given out again", before)
            before.interrupt(Interruption.LOST)
            self.endings.forget(before)
        if self._is_stopping:
            attempt.interrupt(Interruption.STOPPED)
        self._attend(attempt, self._run(attempt, batch_size=batch_size))

    def _attend(self, attempt: Attempt, running: Running) -> None:
        """Give it a place, and see it to its end."""
        self._running.add(attempt)
        self._taken[attempt.place] += 1
        self._idle.clear()
        attending = self._attended(attempt, running)
        task = asyncio.get_running_loop().create_task(attending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drain(self) -> None:
        """Begin nothing more. Sources that never end by themselves are stopped now."""
        self._is_stopping = True
        for attempt in tuple(self._running):
            if orders.is_always_on(attempt.assignment):
                attempt.interrupt(Interruption.STOPPED)

    def give_back(self) -> None:
        """Interrupt what runs."""
        self._is_stopping = True
        for attempt in tuple(self._running):
            attempt.interrupt(Interruption.STOPPED)

    def cut_short(self) -> None:
        """Have what was interrupted end by force."""
        for attempt in tuple(self._running):
            attempt.cut_short()

    async def idle(self) -> None:
        """Return when nothing runs."""
        await self._idle.wait()

    async def close(self) -> None:
        """Let go of what does not end."""
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=self._settings.grace_seconds)

    async def _attended(self, attempt: Attempt, running: Running) -> None:
        try:
            try:
                end = await running
            except Exception as error:  # noqa: BLE001 - one attempt never ends the worker
                _log.exception("%s failed in the worker", attempt)
                end = attempt.failure(f"The worker failed: {type(error).__name__}: {error}")
            if attempt.released is None:
                self._leave(attempt)
            if end is None:
                self._done(attempt)
            else:
                is_able = end.release is None or not end.release.is_delayed
                self._claiming.judge(_asked_for(attempt), is_able=is_able)
                self.endings.add(attempt, end)
            if attempt.released is not None:
                await asyncio.wait((attempt.released,))
        finally:
            self._leave(attempt)

    def _moved(self, attempt: Attempt, ask: EndAsk, result: TaskResult) -> None:
        """What it has made was merged with what is not published any more."""
        if attempt.is_lost:
            self._done(attempt)
        elif self._is_stopping:
            told = WorkReleased("The worker was stopped.", is_delayed=False)
            self.endings.add(attempt, attempt.unfinished(told))
        else:
            self._attend(attempt, self._merged(attempt, ask, result))

    async def _merged(self, attempt: Attempt, ask: EndAsk, result: TaskResult) -> EndAsk | None:
        """Merge with what is published now; or wait, and tell the same end again."""
        if result.current is not None:
            attempt.merge_again(result.current)
            _log.info("%s merges with what is published of its partitions now", attempt)
            if attempt.merges <= _MERGES_MAX:
                return await self._run(attempt, batch_size=1)
            return attempt.failure("Others have published its partition again and again.")
        if attempt.waits * _TURN_SECONDS >= attempt.assignment.timeout_seconds:
            told = "Others were merging into its partition for as long as it may take itself."
            return attempt.unfinished(WorkReleased(told))
        is_on = await attempt.pause(self._clock, _TURN_SECONDS)
        return ask if is_on else attempt.interrupted()

    async def _run(self, attempt: Attempt, *, batch_size: int) -> EndAsk | None:
        assignment = attempt.assignment
        runtime = self._runtimes.get(assignment.runtime)
        if runtime is None:
            # Of another release, perhaps: the next attempt may be another worker's.
            told = f"This worker has no runtime {assignment.runtime!r}."
            hint = "Give it one, or bring it to the release of the dispatcher."
            return attempt.unfinished(WorkReleased(told, hint=hint))
        try:
            work = self._work(assignment, batch_size=batch_size, merges=attempt.merges)
            work = replace(work, staged=attempt.staged)
            work = await self._with_secrets(attempt, runtime, work)
        except WorkFailed as error:
            return None if attempt.is_lost else attempt.unfinished(error)
        voice = AttemptVoice(attempt, work, self._client, clock=self._clock, entropy=self._entropy)
        return await attempt.run(partial(self._handing.run, attempt, runtime), work, voice)

    def _work(self, assignment: Assignment, *, batch_size: int, merges: int) -> Work:
        try:
            return orders.work_of(
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
                hint="Bring it to the release of the dispatcher.",
            ) from error

    async def _with_secrets(self, attempt: Attempt, runtime: Runtime, work: Work) -> Work:
        """The work with the secrets that its job names, as they are now."""
        references = orders.secrets_of(attempt.assignment)
        if not references:
            return work
        if why := runtime.secrets_refused(work.operator):
            raise WorkFailed(why, is_retried=False)
        if self._secrets is None:
            told = f"The job {work.job} names secrets, and this worker gives out none."
            raise WorkReleased(told)
        attempt.secrets = await self._secrets.values(references, job=work.job)
        return replace(work, secrets=attempt.secrets)

    def _leave(self, attempt: Attempt) -> None:
        """Free its place."""
        if attempt not in self._running:
            return
        self._running.discard(attempt)
        self._taken[attempt.place] -= 1
        if self._taken[attempt.place] > 0:
            return
        del self._taken[attempt.place]
        if not self._running:
            self._idle.set()
        self._claiming.freed("")

    def _done(self, attempt: Attempt) -> None:
        """Nothing more is to be told of it."""
        self.heartbeats.release(attempt)
        self._claiming.freed(_asked_for(attempt))


def _asked_for(attempt: Attempt) -> str:
    """The name by which the worker asks for such tasks: that of the operator in its queue."""
    return attempt.assignment.claimed_as or attempt.assignment.operator
