"""One attempt, from its assignment to the completion that is reported.

| ends because | reported to the dispatcher |
|---|---|
| the work returned | what it made |
| the work failed, or what it made cannot be published | a failure, with the work's own message |
| its timeout, which does not run while it waits | a failure: "It took longer than …" |
| the dispatcher asked to cancel it | a failure; the task becomes cancelled |
| the worker stops | a release, which is not counted: "The worker was stopped." |
| it was claimed ahead, and no slot became free | a release, not begun |
| this worker cannot run it: no such module, another release | a release, delayed |
| its process died, and others ran in it | a release, and that it is to run alone |
| its process died, and it was alone | a failure, and the same |
| the dispatcher refused the attempt | nothing: another attempt has taken over, or it is over |

An attempt whose completion is refused, because what it was merged with is no longer published,
is not over: it is run again with what is published now (`merge_again`), or reported again when
others are done.

Interrupting cancels the runtime's `run` and waits until nothing of the work runs any more. Work
that ends well all the same has ended well. A runtime that does not let go within its grace
period and some more is logged as an error; the end is reported as if it had, and the executor
keeps the slot taken until the work has really ended (`released`).

Called by `executor`, from the event loop. A crash leaves a lease that expires.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from penstock.datasets.layout import attempt_name
from penstock.kernel.clock import Clock
from penstock.kernel.errors import PenstockError, WorkFailed, WorkReleased
from penstock.protocol.work import Assignment, EndAsk, HeldAsk, PartAnswer
from penstock.runtimes.base import AttemptWork, Staged, WorkReporter, WorkResult
from penstock.runtimes.secrets import hidden
from penstock.worker import assignment_codec

_log = logging.getLogger(__name__)

RunFunction = Callable[[AttemptWork, WorkReporter], Coroutine[Any, Any, WorkResult]]
"""What runs the work: a runtime's `run`, and what is done around it."""

_LETTING_GO_SECONDS: Final = 20.0
"""How long a runtime may take, beyond the grace period, to end work by force."""
_TRACE_MAX: Final = 20_000


class InterruptReason(Enum):
    """Why an attempt is ended from outside. A later one never replaces an earlier, but LOST."""

    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    NO_SLOT = "no slot"
    LOST = "lost"
    UNHEARD = "unheard"


class TaskAttempt:
    """One attempt that this worker holds."""

    def __init__(
        self,
        assignment: Assignment,
        *,
        begins: Callable[[], None] = lambda: None,
        is_asked: bool = False,
    ) -> None:
        """`begins` is called when its code is about to run."""
        self.assignment = assignment
        self.is_asked = is_asked
        """Whether its claim is acknowledged before it begins."""
        self.begins = begins
        self.name = attempt_name(
            task_id=assignment.task_id,
            attempt=assignment.attempt,
            lease_token=assignment.lease_token,
        )
        """No other attempt has it, also not one of the same number: see decision 0076."""
        self.place = assignment.batch or self.name
        """What it takes of the worker's room; attempts of a batch share one place."""
        self.progress: dict[str, Any] | None = None
        """The latest progress that no heartbeat has sent yet."""
        self.token = assignment.token
        """The newest capability token; empty if the dispatcher has given none."""
        self.token_news = asyncio.Event()
        """Set when there is a newer one."""
        self._other_token = ""
        """The one before it, which was accepted."""
        self.minting = asyncio.Lock()
        """Held while credentials are asked for: the dispatcher mints one after the other."""
        self.is_acknowledged = asyncio.Event()
        """Set when a heartbeat of it was answered: its lease is ours, and the claim is known."""
        self.is_over = False
        """Whether the work has ended, and only its completion has to be reported."""
        self.has_observed_columns = False
        """Whether it reports columns that were only observed: see decision 0030."""
        self.secrets: Mapping[str, str] = {}
        """The values that its work was given: they are redacted in failures."""
        self.merges = 0
        """How often it has merged again."""
        self.staged: Mapping[str, Staged] = {}
        """What it has computed, if that only has to be merged again."""
        self.waits = 0
        """How often it has waited for others to merge."""
        self._why: InterruptReason | None = None
        self._interrupted = asyncio.Event()
        self._is_timed = True
        self._retimed = asyncio.Event()
        self._running: asyncio.Task[WorkResult] | None = None

    @property
    def task_id(self) -> int:
        return self.assignment.task_id

    @property
    def is_lost(self) -> bool:
        """Whether the lease was lost, so that nothing is reported."""
        return self._why is InterruptReason.LOST

    @property
    def released(self) -> asyncio.Task[WorkResult] | None:
        """The work, if it runs although its completion was reported."""
        return self._running if self._running is not None and not self._running.done() else None

    def held_ask(self) -> HeldAsk:
        """The heartbeat of this attempt."""
        return HeldAsk(
            task_id=self.assignment.task_id,
            attempt=self.assignment.attempt,
            lease_token=self.assignment.lease_token,
            token=self.token or None,
            progress=self.progress,
        )

    def renew(self, token: str) -> None:
        """Take the token that a heartbeat returned; none keeps the old one."""
        if token and token != self.token:
            self._other_token, self.token = self.token, token
            self.token_news.set()

    def doubt(self, token: str) -> None:
        """This token was rejected, so the next call sends the other one.

        A newer one can be signed by a key that nobody knows, as after a failover of Postgres; and
        where the older one is no good either, they take turns.
        """
        if token == self.token and self._other_token:
            self.token, self._other_token = self._other_token, self.token
            self.token_news.set()

    def interrupt(self, why: InterruptReason) -> None:
        """End the attempt. Harmless if it has ended."""
        if self._why is None or why is InterruptReason.LOST:
            self._why = why
        # Once: a second cancellation would cut short what the runtime does about the first.
        if self._running is not None and not self._interrupted.is_set():
            self._running.cancel()
        self._interrupted.set()

    def time(self, *, is_running: bool) -> None:
        """Whether its time limit runs; if so, from now on."""
        self._is_timed = is_running
        self._retimed.set()

    def cut_short(self) -> None:
        """Have the runtime kill the work that it has only asked to end so far."""
        if self._running is not None and self._interrupted.is_set():
            self._running.cancel()

    def merge_again(self, current: dict[str, list[PartAnswer]]) -> None:
        """What is published by now is what the next run merges with, alone."""
        self.assignment = msgspec.structs.replace(self.assignment, current=current, batch="")
        self.merges += 1
        self._running = None
        self.is_over = False

    async def pause(self, clock: Clock, seconds: float) -> bool:
        """Wait; returns whether nobody has interrupted it."""
        self.waits += 1
        self.is_over = False
        sleeping = asyncio.get_running_loop().create_task(clock.sleep(seconds))
        try:
            await _first(sleeping, (self._interrupted,), None)
        finally:
            sleeping.cancel()
        self.is_over = True
        return self._why is None

    async def acknowledged(self) -> bool:
        """Wait for its first heartbeat; returns whether its code may run."""
        waiting = asyncio.get_running_loop().create_task(self.is_acknowledged.wait())
        try:
            await _first(waiting, (self._interrupted,), self.assignment.heartbeat_seconds)
        finally:
            waiting.cancel()
        if not self.is_acknowledged.is_set():
            self.interrupt(InterruptReason.UNHEARD)
        return self._why is None

    def interrupted(self) -> EndAsk | None:
        """The end of an attempt that was interrupted while nothing of it ran."""
        return None if self.is_lost else self.unfinished(self._interruption())

    async def run(
        self, running: RunFunction, work: AttemptWork, reporter: WorkReporter
    ) -> EndAsk | None:
        """Run the work; returns its completion, or None if nothing is to be reported."""
        if self._why is None:
            # Not in a group: one that does not let go must not keep the worker.
            self._running = asyncio.get_running_loop().create_task(
                running(work, reporter), name=f"task {work.task_id} attempt {work.attempt}"
            )
            try:
                await self._wait(self._running, work)
            finally:
                self._running.cancel()
        self.is_over = True
        return None if self.is_lost else self._end(work)

    async def _wait(self, running: asyncio.Task[WorkResult], work: AttemptWork) -> None:
        """Until the work has ended, or does not let go."""
        has_limit = not assignment_codec.is_always_on(self.assignment)
        while True:
            self._retimed.clear()
            is_timed = has_limit and self._is_timed
            seconds = self.assignment.timeout_seconds if is_timed else None
            await _first(running, (self._interrupted, self._retimed), seconds)
            if running.done() or self._interrupted.is_set() or not self._retimed.is_set():
                break
        if not running.done():
            self.interrupt(InterruptReason.TIMEOUT)
            seconds = work.grace_seconds + _LETTING_GO_SECONDS
            await asyncio.wait({running}, timeout=seconds)
            if not running.done():
                message = "%s: its runtime did not stop it within %.0f s; its slot stays taken"
                _log.error(message, self, seconds)
        if running.done() and not running.cancelled():
            # Retrieved, also if nobody reports it.
            running.exception()

    def _end(self, work: AttemptWork) -> EndAsk:
        try:
            finished = self._finished()
            self.staged = finished.staged
            self.has_observed_columns = any(
                each.facts is not None and each.facts.is_observed for each in finished.made
            )
            return assignment_codec.succeeded(
                work, finished, lease_token=self.assignment.lease_token, token=self.token
            )
        except WorkFailed as error:
            return self.unfinished(error, log=work.log)

    def _finished(self) -> WorkResult:
        """What became of the work; `WorkFailed` if it was not ended by itself, and well."""
        if self._running is None or not self._running.done() or self._running.cancelled():
            raise self._interruption()
        error = self._running.exception()
        if error is None:
            return self._running.result()
        if isinstance(error, WorkFailed):
            # Interrupted work fails in many ways: the reason of the interruption counts.
            raise error if self._why is None else self._interruption()
        if not isinstance(error, PenstockError):
            trace = "".join(traceback.format_exception(error)).rstrip()
            _log.error("%s failed in its runtime\n%s", self, self._hidden(trace[:_TRACE_MAX]))
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise (WorkFailed(message) if self._why is None else self._interruption()) from error

    def _interruption(self) -> WorkFailed:
        match self._why:
            case InterruptReason.TIMEOUT:
                return WorkFailed(f"It took longer than {self.assignment.timeout_seconds:g} s.")
            case InterruptReason.CANCELLED:
                return WorkFailed("It was cancelled.")
            case InterruptReason.STOPPED:
                return WorkReleased("The worker was stopped.", is_delayed=False)
            case InterruptReason.NO_SLOT:
                message = "No slot of its worker became free in time; another worker may have one."
                return WorkReleased(message, is_delayed=False)
            case InterruptReason.UNHEARD:
                message = "No dispatcher has acknowledged its claim in time."
                return WorkReleased(message, is_delayed=False)
            case InterruptReason.LOST | None:
                return WorkFailed("Its runtime stopped it.")

    def unfinished(self, error: WorkFailed, *, log: str = "") -> EndAsk:
        """The end of this attempt as a release or a failure, as the error says."""
        said = f"{error.message} {error.hint}".strip()
        if not isinstance(error, WorkReleased):
            return self.failure(
                said, is_retried=error.is_retried, runs_alone=error.runs_alone, log=log
            )
        return assignment_codec.released(
            self.assignment,
            self._hidden(said[: assignment_codec.REASON_CHARACTERS_MAX]),
            token=self.token,
            is_delayed=error.is_delayed,
            runs_alone=error.runs_alone,
            log=log,
        )

    def failure(
        self,
        reason: str,
        *,
        is_retried: bool = True,
        runs_alone: bool = False,
        log: str = "",
        metrics: dict[str, Any] | None = None,
    ) -> EndAsk:
        """The end of this attempt as a failure."""
        return assignment_codec.failed(
            self.assignment,
            self._hidden(reason[: assignment_codec.REASON_CHARACTERS_MAX]),
            token=self.token,
            is_retried=is_retried,
            runs_alone=runs_alone,
            log=log,
            metrics=metrics,
        )

    def _hidden(self, text: str) -> str:
        """Only for texts that are cut already: it takes a while, and the event loop waits."""
        return hidden(text, self.secrets.values()) if self.secrets else text

    def __str__(self) -> str:
        return f"task {self.task_id} attempt {self.assignment.attempt} of {self.assignment.job}"


async def _first(
    running: asyncio.Task[Any], events: Sequence[asyncio.Event], seconds: float | None
) -> None:
    """Wait for the first of these, or for so long."""
    loop = asyncio.get_running_loop()
    waiting = [loop.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(
            {running, *waiting}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        for each in waiting:
            each.cancel()
