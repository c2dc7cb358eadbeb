"""One attempt of one task: the handler is run, bounded, interrupted, and its outcome judged.

A worker makes a `HandlerAttempt` for every task that it has claimed. `run` returns how the
attempt ended and raises nothing but the cancellation of its own caller. It writes nothing: a
crash leaves a claim, whose lease ends by itself.

Invariants
- `async def` handlers run on the loop, plain ones in a daemon thread of their own
  (`HandlerThread`). So one that is stuck blocks neither others nor the end of the process. An
  awaitable that a plain function returns is awaited on the loop.
- A handler that is over its timeout fails with `TimeoutError`, whatever it does afterwards. One
  that was asked to stop before it had ended never ends as succeeded.
- To interrupt is to raise inside the handler: `CancelledError` at an `await`, `TimeoutError` or
  `Cancelled` in a thread; inside a call to C it takes effect only when the call is over.
- A handler that ignores an interruption for a grace period is abandoned: the attempt has ended,
  and `AttemptResult.released` says when the handler is gone. A thread that has timed out gets no
  grace. Its result is dropped.
- Whatever a handler raises is a failure, `KeyboardInterrupt` and `SystemExit` as well: they end
  the attempt and not the worker. Only its class decides whether it is retried. `Reschedule` is no
  failure: the attempt does not count.
- An isolated handler runs in a process of its own
  (`penstock.queue.execution.handler_processes`),
  and its time counts from its call there. Asked to stop, it has its grace and is killed then; at
  its timeout, or when the claim is lost, it is killed at once. A process that dies takes one
  attempt with it, which fails with `ChildProcessError`.
- Each attempt has a copy of its caller's context variables; changes are visible to nobody else.

An attempt is interrupted from the thread of its loop only.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import inspect
import json
import logging
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import Any, Final, Generic, TypeVar

import msgspec

from penstock.kernel.entropy import Entropy
from penstock.queue.attempt_outcomes import (
    RESULT_BYTES_MAX,
    AttemptCancelled,
    AttemptOutcome,
    Failed,
    GivenBack,
    Succeeded,
)
from penstock.queue.execution.handler_processes import (
    HandlerFinished,
    HandlerProcess,
    HandlerProcessPool,
    HandlerProgress,
    RunHandler,
)
from penstock.queue.execution.handlers import Cancelled, Handler, TaskContext, public_module
from penstock.queue.execution.retry import (
    Postponed,
    Raised,
    classes,
    ended_by,
    failed,
    postponed,
    timed_out,
)
from penstock.queue.ledger import NULL, LedgerFailure

_FRAMES_MAX: Final = 40

Outcome = TypeVar("Outcome")


class HandlerThread(Generic[Outcome]):
    """A function in a daemon thread of its own, into which one exception can be raised.

    The exception comes up between any two instructions of the thread, so it must not come up in
    what delivers the outcome. The lock decides: it is raised either before the function is over,
    and then the outcome does not matter any more, or not at all. `nothing` is the outcome of a
    function that was not called; frames of the file `hidden` are not shown.
    """

    def __init__(
        self, function: Callable[[], Outcome], *, nothing: Outcome, hidden: str = ""
    ) -> None:
        self._function = function
        self._nothing = nothing
        self._hidden = (__file__, threading.__file__, hidden)
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Future[Outcome] = self._loop.create_future()
        self._lock = threading.Lock()
        self._ident: int | None = None
        self._is_told = False
        self._is_over = False

    async def run(self) -> Outcome:
        """Run the function; returns when the thread is about to end, however long that takes."""
        threading.Thread(target=self._live, name="penstock-handler", daemon=True).start()
        return await self._arrived

    def tell(self, error: type[BaseException]) -> bool:
        """Have this raised inside, if nothing was before; whether the function was not over."""
        with self._lock:
            if self._ident is not None and not self._is_told:
                _raise_in(self._ident, error)
            self._is_told = True
            return not self._is_over

    def stack(self) -> str:
        """Where the thread is now."""
        frame = sys._current_frames().get(self._ident or 0)  # noqa: SLF001 - documented, if private
        frames = traceback.extract_stack(frame, limit=_FRAMES_MAX) if frame else ()
        shown = [each for each in frames if each.filename not in self._hidden]
        return "".join(traceback.format_list(shown))

    def _live(self) -> None:
        outcome = self._nothing
        try:
            with self._lock:
                self._ident = None if self._is_told else threading.get_ident()
            if self._ident is not None:
                outcome = self._function()
            self._end(outcome)
        except BaseException:  # noqa: BLE001 - only what was told, when the function was just over
            self._end(outcome)
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._arrive, outcome)

    def _end(self, outcome: Outcome) -> None:
        with self._lock:
            self._ident = None
            self._is_over = not isinstance(outcome, Awaitable)
            _raise_in(threading.get_ident(), None)

    def _arrive(self, outcome: Outcome) -> None:
        if not self._arrived.done():
            self._arrived.set_result(outcome)


def _raise_in(ident: int, error: type[BaseException] | None) -> None:
    """Have a thread raise this at its next instruction; None takes back what it has not raised."""
    thing = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), thing)


GRACE_SECONDS: Final = 5.0
"""How long a handler that was interrupted may take to clean up."""

_log = logging.getLogger(__name__)

# The loop itself holds its tasks weakly: without this an abandoned one could vanish halfway.
_left: Final[set[asyncio.Future[Any]]] = set()


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended, and whether its handler has."""

    ending: AttemptOutcome | None
    """None if there is nothing to settle: the claim was lost."""
    released: asyncio.Future[Any] | None = None
    """Done when the handler is gone, until when it occupies its slot. Not to be cancelled."""


class _Why(IntEnum):
    """Why an attempt was interrupted; of several reasons the highest counts."""

    GIVEN_BACK = 1
    TIMEOUT = 2
    STOP = 3
    LOST = 4


_NOTHING: Final = Succeeded(NULL)
_as_json: Final = json.JSONEncoder(
    allow_nan=False, ensure_ascii=False, separators=(",", ":")
).encode
_Outcome = Succeeded | Failed | Raised | Postponed
_Unfinished = Awaitable[Any]  # A plain handler returned something that has to be awaited.


@dataclass(eq=False, slots=True)
class HandlerAttempt:
    """One execution of a handler. `run` once; interrupt at any time, also before."""

    handler: Handler
    task: TaskContext
    _: KW_ONLY
    counted: int
    """The number of this attempt, without those that were given back."""
    now_ms: Callable[[], int]
    """The store's time, at the latest."""
    entropy: Entropy
    grace_seconds: float = GRACE_SECONDS
    children: HandlerProcessPool | None = None
    """The processes for isolated handlers."""
    trace: str = ""
    """The span of this attempt, for a handler in another process."""
    seconds: float = field(default=0.0, init=False)
    """How long it ran, once it has."""
    _why: _Why | None = field(default=None, init=False)
    _news: asyncio.Future[None] | None = field(default=None, init=False)
    """While it runs: done when the handler has ended, or was interrupted."""
    _body: asyncio.Task[_Outcome] | None = field(default=None, init=False)
    _thread: HandlerThread[_Outcome | _Unfinished] | None = field(default=None, init=False)
    _child: HandlerProcess | None = field(default=None, init=False)
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)
    _hung_at: str = field(default="", init=False)

    @property
    def is_interrupted(self) -> bool:
        """Whether it should end, or never begin."""
        return self._why is not None

    def ask_to_stop(self) -> None:
        """The task was cancelled: interrupt the handler; the attempt ends as stopped."""
        self._interrupt(_Why.STOP)

    def give_back(self) -> None:
        """The worker stops: interrupt the handler; the attempt does not count."""
        self._interrupt(_Why.GIVEN_BACK)

    def lose(self) -> None:
        """Another worker has the task: interrupt the handler; there is nothing to settle."""
        self._interrupt(_Why.LOST)

    async def run(self) -> AttemptResult:
        """Run the handler to its end, or to the end of what it is allowed."""
        assert self._body is None, "an attempt is run once"
        if self._why is not None:
            return AttemptResult(self._ending(None))
        loop = asyncio.get_running_loop()
        # Not in a task group, which would wait for ever for a handler that does not end.
        body = self._body = loop.create_task(self._handle())
        self._news = loop.create_future()
        body.add_done_callback(self._wake)
        try:
            await self._wait(body, self._news)
        except asyncio.CancelledError:
            self.lose()
            raise
        finally:
            self._stop_clock()
            if not body.done():
                _left.add(body)
                body.add_done_callback(_left.discard)
        if body.done():
            return AttemptResult(self._ending(None if body.cancelled() else body.result()))
        what = "attempt %d of task %s has ended, but its handler has not yet"
        _log.warning(what, self.task.attempt, self.task.id)
        return AttemptResult(self._ending(None), body)

    async def _wait(self, body: asyncio.Task[_Outcome], news: asyncio.Future[None]) -> None:
        """Until the handler has ended, or was interrupted and has had its grace."""
        if not self.handler.isolate:
            self._start_clock()
        await news
        self._stop_clock()
        if not body.done() and not (self._why is _Why.TIMEOUT and self._thread is not None):
            await asyncio.wait((body,), timeout=self.grace_seconds)
        if not body.done() and self._child is not None:
            self._child.kill()
            await asyncio.wait((body,), timeout=self.grace_seconds)

    def _start_clock(self) -> None:
        """The handler is called now."""
        seconds = self.handler.timeout_seconds
        if seconds is not None and self._why is None:
            self._stop_clock()
            self._timer = asyncio.get_running_loop().call_later(seconds, self._time_out)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _time_out(self) -> None:
        """The handler has had its time."""
        if self._thread is not None:
            self._hung_at = self._thread.stack()
        self._interrupt(_Why.TIMEOUT)

    def _wake(self, _: object = None) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _interrupt(self, why: _Why) -> None:
        has_ended = self._body is not None and not self._tell(self._body, why)
        if has_ended and why is not _Why.LOST:
            return  # What the handler came to stands.
        self.task.cancel_asked = True
        self._why = why if self._why is None else max(why, self._why)
        self._wake()

    def _tell(self, body: asyncio.Task[_Outcome], why: _Why) -> bool:
        """Raise inside the handler; whether it had not ended yet."""
        if body.done():
            return False
        if self._thread is not None:
            return self._thread.tell(TimeoutError if why is _Why.TIMEOUT else Cancelled)
        if self._child is not None:
            return self._child.interrupt(at_once=why in (_Why.TIMEOUT, _Why.LOST))
        body.cancel()
        return True

    async def _handle(self) -> _Outcome:
        """Call the handler, here or in a thread; nothing that it raises comes through."""
        try:
            if self.handler.isolate:
                return await self._handle_apart()
            if self.handler.is_async:
                return _judged(await self.handler.function(self.task))
            context = contextvars.copy_context()
            self._thread = HandlerThread(
                lambda: context.run(self._call), nothing=_judged(None), hidden=__file__
            )
            outcome = await self._thread.run()
            if not isinstance(outcome, Awaitable):
                return outcome
            if self._why is not None:
                if inspect.iscoroutine(outcome):
                    outcome.close()  # Or Python complains that nobody awaits it.
                return _judged(None)
            self._thread = None
            return _judged(await outcome)
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything
            return ended_by(error, self.handler.retry, ours=__file__)

    async def _handle_apart(self) -> _Outcome:
        """Have a process call the handler; one that died before, while idle, is none of it."""
        assert self.children is not None, "a worker with isolated handlers has processes for them"
        handler, task = self.handler, self.task
        call = RunHandler(
            handler.address,
            tuple(sys.path),
            task.type,
            task.id,
            task.attempt,
            task.raw_input,
            _names(classes(handler.retry.on)),
            self.trace,
            _names(classes(handler.retry.never)),
        )
        while True:
            async with self.children.lent() as child:
                was_warm, self._child = child.has_run, child
                try:
                    if self._why is not None:
                        return _judged(None)
                    return _understood(
                        await child.run(call, begun=self._start_clock, said=self._report)
                    )
                except (ChildProcessError, TimeoutError) as error:
                    if not was_warm or child.has_begun or self._why is not None:
                        failure = LedgerFailure(type(error).__name__, str(error))
                        return Raised(failure, handler.retry.retries(error))
                finally:
                    self._child = None

    def _report(self, report: HandlerProgress) -> None:
        self.task.reporter.say(report.done, report.total, report.message)

    def _call(self) -> _Outcome | _Unfinished:
        """A plain handler, from within its thread."""
        try:
            result = self.handler.function(self.task)
            return result if isinstance(result, Awaitable) else _judged(result)
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything
            return ended_by(error, self.handler.retry, ours=__file__)

    def _ending(self, outcome: _Outcome | None) -> AttemptOutcome | None:
        retry = self.handler.retry
        match self._why:
            case _Why.LOST:
                return None
            case _Why.STOP:
                return AttemptCancelled()
            case _Why.GIVEN_BACK:
                return GivenBack()
            case _Why.TIMEOUT:
                trace = outcome.failure.trace if isinstance(outcome, Raised) else self._hung_at
                outcome = timed_out(retry, seconds=self.handler.timeout_seconds, trace=trace)
        if isinstance(outcome, Raised):
            now_ms = self.now_ms()
            return failed(outcome, retry, counted=self.counted, now_ms=now_ms, entropy=self.entropy)
        if isinstance(outcome, Postponed):
            return postponed(outcome, now_ms=self.now_ms())
        # None: somebody who cancels every task there is has cancelled it before its start.
        return outcome or GivenBack()


def _names(kinds: tuple[type[BaseException], ...]) -> tuple[tuple[str, str], ...]:
    """Classes of errors, as another process knows them."""
    return tuple((public_module(each.__module__), each.__qualname__) for each in kinds)


def _understood(over: HandlerFinished) -> _Outcome:
    """What a handler in another process came to."""
    if over.failure is not None:
        return Raised(over.failure, over.is_retried)
    if over.again_seconds is not None:
        return Postponed(over.again_seconds, over.reason)
    # One that was stopped has nothing: why it was is known here.
    return Succeeded(over.result if over.has_result else NULL)


def _judged(result: object) -> Succeeded | Failed:
    """What a handler returned, as JSON, or why it cannot be stored."""
    if result is None:
        return _NOTHING
    try:
        body = _as_json(result).encode()
    except Exception as error:  # noqa: BLE001 - classes of the user's own take part
        problem = f"it is not JSON ({error})"
    else:
        if len(body) <= RESULT_BYTES_MAX:
            return Succeeded(msgspec.Raw(body))
        problem = f"it has {len(body):,} bytes and at most {RESULT_BYTES_MAX:,} are taken"
    return Failed(LedgerFailure("BadResult", f"The result cannot be stored: {problem}."))
