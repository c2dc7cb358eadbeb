"""One attempt, from its assignment to what is told of its end.

| ends because | told to the dispatcher |
|---|---|
| the work returned | what it made |
| the work failed, or what it made cannot be published | a failure, with the work's own words |
| it took longer than it may, beside waiting | a failure: "It took longer than …" |
| the dispatcher asked to cancel it | a failure; the task becomes cancelled |
| the worker stops | a release, which is not counted: "The worker was stopped." |
| this worker cannot run it: no such module, another release | a release, delayed |
| its process died, and others ran in it | a release, and that it is to run alone |
| its process died, and it was alone | a failure, and the same |
| the dispatcher refused the attempt | nothing: it is another's now, or over |

What the dispatcher refuses to publish because it was merged with what is not published any more is
not over: it is run again with what is (`merge_again`), or told again when others are done.

Interrupting cancels the runtime's `run` and waits until nothing of the work runs any more. Work
that ends well all the same has ended well. A runtime that does not let go within its grace period
and some is told of loudly; its end is told as if it had, and whoever runs the attempt keeps its
place taken until it has really ended (`released`).

Called by `penstock.worker.worker`, from the event loop. A crash leaves a lease that runs out.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from penstock.dispatcher.wire.work import Assignment, EndAsk, HeldAsk, PartAnswer
from penstock.kernel.clock import Clock
from penstock.kernel.errors import PenstockError, WorkFailed, WorkReleased
from penstock.runtimes.base import Finished, Staged, Voice, Work
from penstock.runtimes.secrets import hidden
from penstock.worker import orders

_log = logging.getLogger(__name__)

Running = Callable[[Work, Voice], Coroutine[Any, Any, Finished]]
"""What runs the work: a runtime's `run`, and what is done around it."""

_LETTING_GO_SECONDS: Final = 20.0
"""How long a runtime may take, beyond the grace period, to end work by force."""
_TRACE_MAX: Final = 20_000


class Interruption(Enum):
    """Why an attempt is ended from outside. A later one never replaces an earlier, but LOST."""

    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    LOST = "lost"


class Attempt:
    """One attempt that this worker holds."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.place = assignment.batch or f"{assignment.task_id}-{assignment.attempt}"
        """What it takes of the worker's room; attempts of a batch share one place."""
        self.progress: dict[str, Any] | None = None
        """The last word that was not passed on."""
        self.token = assignment.token
        """The newest capability token; empty if the dispatcher has given none."""
        self.token_news = asyncio.Event()
        """Set when there is a newer one."""
        self._other_token = ""
        """The one before it, which is known to have proved something."""
        self.minting = asyncio.Lock()
        """Held while credentials are asked for: the dispatcher mints one after the other."""
        self.is_over = False
        """Whether the work has ended, and only the end has to be told."""
        self.has_observed_columns = False
        """Whether it tells columns that were only seen, and may be left out: see decision 0030."""
        self.secrets: Mapping[str, str] = {}
        """The values that its work was given: no failure is told with one of them in it."""
        self.merges = 0
        """How often it has merged again."""
        self.staged: Mapping[str, Staged] = {}
        """What it has computed, if that only has to be merged again."""
        self.waits = 0
        """How often it has waited for others to merge."""
        self._why: Interruption | None = None
        self._interrupted = asyncio.Event()
        self._is_timed = True
        self._retimed = asyncio.Event()
        self._running: asyncio.Task[Finished] | None = None

    @property
    def task_id(self) -> int:
        return self.assignment.task_id

    @property
    def is_lost(self) -> bool:
        """Whether there is nothing to tell any more."""
        return self._why is Interruption.LOST

    @property
    def released(self) -> asyncio.Task[Finished] | None:
        """The work, if it runs although its end was told."""
        return self._running if self._running is not None and not self._running.done() else None

    def held_ask(self) -> HeldAsk:
        """What a heartbeat says."""
        return HeldAsk(
            task_id=self.assignment.task_id,
            attempt=self.assignment.attempt,
            lease_token=self.assignment.lease_token,
            token=self.token or None,
            progress=self.progress,
        )

    def renew(self, token: str) -> None:
        """Take the token that a heartbeat has brought; none keeps the old one."""
        if token and token != self.token:
            self._other_token, self.token = self.token, token
            self.token_news.set()

    def doubt(self, token: str) -> None:
        """This token has proved nothing, so the next call brings the other one that there is.

        A newer one can be signed by a key that nobody knows, as after a failover of Postgres; and
        where the older one is no good either, they take turns.
        """
        if token == self.token and self._other_token:
            self.token, self._other_token = self._other_token, self.token
            self.token_news.set()

    def interrupt(self, why: Interruption) -> None:
        """End the attempt. Harmless if it has ended."""
        if self._why is None or why is Interruption.LOST:
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
        """Have the runtime end the work now that it has let go of gently so far."""
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

    def interrupted(self) -> EndAsk | None:
        """The end of an attempt that was interrupted while nothing of it ran."""
        return None if self.is_lost else self.unfinished(self._interruption())

    async def run(self, running: Running, work: Work, voice: Voice) -> EndAsk | None:
        """Run the work, and return what to tell of its end; None if nothing is to be told."""
        if self._why is None:
            # Not in a group: one that does not let go must not keep the worker.
            self._running = asyncio.get_running_loop().create_task(
                running(work, voice), name=f"task {work.task_id} attempt {work.attempt}"
            )
            try:
                await self._wait(self._running, work)
            finally:
                self._running.cancel()
        self.is_over = True
        return None if self.is_lost else self._end(work)

    async def _wait(self, running: asyncio.Task[Finished], work: Work) -> None:
        """Until the work has ended, or does not let go."""
        has_limit = not orders.is_always_on(self.assignment)
        while True:
            self._retimed.clear()
            is_timed = has_limit and self._is_timed
            seconds = self.assignment.timeout_seconds if is_timed else None
            await _first(running, (self._interrupted, self._retimed), seconds)
            if running.done() or self._interrupted.is_set() or not self._retimed.is_set():
                break
        if not running.done():
            self.interrupt(Interruption.TIMEOUT)
            seconds = work.grace_seconds + _LETTING_GO_SECONDS
            await asyncio.wait({running}, timeout=seconds)
            if not running.done():
                told = "%s: its runtime has not ended it within %.0f s; its slot stays taken"
                _log.error(told, self, seconds)
        if running.done() and not running.cancelled():
            # Seen, also if nobody is told of it.
            running.exception()

    def _end(self, work: Work) -> EndAsk:
        try:
            finished = self._finished()
            self.staged = finished.staged
            self.has_observed_columns = any(
                each.facts is not None and each.facts.is_observed for each in finished.made
            )
            return orders.succeeded(
                work, finished, lease_token=self.assignment.lease_token, token=self.token
            )
        except WorkFailed as error:
            return self.unfinished(error, log=work.log)

    def _finished(self) -> Finished:
        """What became of the work; `WorkFailed` if it was not ended by itself, and well."""
        if self._running is None or not self._running.done() or self._running.cancelled():
            raise self._interruption()
        error = self._running.exception()
        if error is None:
            return self._running.result()
        if isinstance(error, WorkFailed):
            # Work that is interrupted says so in many ways: why it was is what counts.
            raise error if self._why is None else self._interruption()
        if not isinstance(error, PenstockError):
            trace = "".join(traceback.format_exception(error)).rstrip()
            _log.error("%s failed in its runtime\n%s", self, self._hidden(trace[:_TRACE_MAX]))
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise (WorkFailed(told) if self._why is None else self._interruption()) from error

    def _interruption(self) -> WorkFailed:
        match self._why:
            case Interruption.TIMEOUT:
                return WorkFailed(f"It took longer than {self.assignment.timeout_seconds:g} s.")
            case Interruption.CANCELLED:
                return WorkFailed("It was cancelled.")
            case Interruption.STOPPED:
                return WorkReleased("The worker was stopped.", is_delayed=False)
            case Interruption.LOST | None:
                return WorkFailed("Its runtime gave it up.")

    def unfinished(self, error: WorkFailed, *, log: str = "") -> EndAsk:
        """The end of this attempt as a release or a failure, as the error says."""
        said = f"{error.message} {error.hint}".strip()
        if not isinstance(error, WorkReleased):
            return self.failure(
                said, is_retried=error.is_retried, runs_alone=error.runs_alone, log=log
            )
        return orders.released(
            self.assignment,
            self._hidden(said[: orders.REASON_CHARACTERS_MAX]),
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
        return orders.failed(
            self.assignment,
            self._hidden(reason[: orders.REASON_CHARACTERS_MAX]),
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
