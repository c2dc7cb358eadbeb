"""One attempt of one task: the user's handler is run, bounded, interrupted, and its end judged.

A worker has one `Handlers`, what it can run by type, and makes an `Attempt` for every task that it
has claimed. `Attempt.run` returns how the attempt ended and raises nothing but the cancellation of
its own caller. It writes nothing: a crash leaves a claim, whose lease ends by itself.

What holds
- `async def` handlers run on the loop, plain ones in a daemon thread of their own. So one that is
  stuck holds up neither others nor the end of the process. A plain function that returns an
  awaitable, as a decorator around an `async def` may, has it awaited on the loop.
- A handler that is over its timeout fails with `TimeoutError`, whatever it does afterwards. One
  that was asked to stop before it had ended never ends as succeeded.
- To interrupt is to raise inside the handler: `CancelledError` at an `await`, `TimeoutError` or
  `Cancelled` in a thread, which inside a call to C hears it only when the call is over.
- What does not heed an interruption within a grace period is abandoned: the attempt has ended, and
  `Ended.released` tells when the handler is gone. A thread that has timed out gets no grace. What
  it comes to in the end is dropped.
- Whatever a handler raises is a failure, `KeyboardInterrupt` and `SystemExit` as well: they end
  the attempt and not the worker. Only its class decides whether it is retried.
- Each attempt sees a copy of its caller's context variables, and what it sets nobody else sees.

An attempt is interrupted from the thread of its loop only.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import Any, Final

import msgspec

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import InvalidInput
from penstock.queue.endings import (
    RESULT_BYTES_MAX,
    Ending,
    Failed,
    GivenBack,
    Stopped,
    Succeeded,
)
from penstock.queue.ledger import Failure
from penstock.queue.places import TaskId, check_name
from penstock.queue.running.retry import (
    SECONDS_MAX,
    Raised,
    Retry,
    failed,
    is_number,
    raised,
    timed_out,
)
from penstock.queue.running.threads import HandlerThread

GRACE_SECONDS: Final = 5.0
"""How long a handler that was interrupted may take to clean up."""

_log = logging.getLogger(__name__)

# The loop itself holds its tasks weakly: without this an abandoned one could vanish halfway.
_left: Final[set[asyncio.Future[Any]]] = set()


class Cancelled(BaseException):
    """Raised inside a plain handler that should stop. `except Exception` lets it pass."""


@dataclass(eq=False, kw_only=True)
class TaskContext:
    """What a handler is called with. May be used from any thread."""

    id: TaskId
    type: str
    attempt: int
    """The number of this attempt, counted from 1."""
    raw_input: msgspec.Raw = field(repr=False)
    cancel_asked: bool = False
    """Whether this attempt should end: cancelled, over its time, or its worker stops."""

    @functools.cached_property
    def input(self) -> Any:
        """What was submitted, decoded when it is first asked for."""
        return json.loads(bytes(self.raw_input))


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """The function for the tasks of one type, and the rules that it runs by."""

    type: str
    function: Callable[[TaskContext], Any]
    timeout_seconds: float | None = None
    retry: Retry = field(default_factory=Retry)

    def __post_init__(self) -> None:
        if not _is_a(str, self.type):
            raise InvalidInput(f"A handler needs the name of its type, not {self.type!r}.")
        check_name(self.type, what="type")
        problem = _function_problem(self.function)
        if problem:
            raise InvalidInput(
                f"The handler of {self.type!r} {problem}.",
                hint="Use a function, async or not, with one parameter: def handle(task).",
            )
        seconds = self.timeout_seconds
        if seconds is not None and not (is_number(seconds) and 0 < seconds <= SECONDS_MAX):
            raise InvalidInput(
                f"{seconds!r} is not a timeout for {self.type!r}.",
                hint="Give a positive number of seconds, or None for no timeout.",
            )
        if not _is_a(Retry, self.retry):
            raise InvalidInput(f"The retry of {self.type!r} is {self.retry!r}, not a Retry.")

    @property
    def is_async(self) -> bool:
        """Whether calling it gives a coroutine, as far as can be told without calling it."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        # The call of an object is looked up on its class, as Python does it.
        called = inspect.getattr_static(type(function), "__call__", None)
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


class Handlers:
    """What a worker can run: one handler a type."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    @property
    def types(self) -> tuple[str, ...]:
        """The types that have a handler, sorted."""
        return tuple(sorted(self._handlers))

    def get(self, type: str) -> Handler | None:
        return self._handlers.get(type)

    def add(self, handler: Handler) -> None:
        """Register a handler; a type has only one."""
        if handler.type in self._handlers:
            raise InvalidInput(f"There is a handler of {handler.type!r} already.")
        self._handlers[handler.type] = handler


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended, and whether its handler has."""

    ending: Ending | None
    """None if there is nothing to settle: the claim was lost."""
    released: asyncio.Future[Any] | None = None
    """Done when the handler is gone, until when it occupies its slot. Not to be cancelled."""


class _Why(IntEnum):
    """Why an attempt was interrupted; of several reasons the highest counts."""

    GIVEN_BACK = 1
    TIMEOUT = 2
    STOP = 3
    LOST = 4


_Outcome = Succeeded | Failed | Raised
_Unfinished = Awaitable[Any]  # A plain handler returned something that has to be awaited.


@dataclass(eq=False, slots=True)
class Attempt:
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
    _why: _Why | None = field(default=None, init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _body: asyncio.Task[_Outcome] | None = field(default=None, init=False)
    _thread: HandlerThread[_Outcome | _Unfinished] | None = field(default=None, init=False)
    _hung_at: str = field(default="", init=False)

    def ask_to_stop(self) -> None:
        """The task was cancelled: interrupt the handler; the attempt ends as stopped."""
        self._interrupt(_Why.STOP)

    def give_back(self) -> None:
        """The worker stops: interrupt the handler; the attempt does not count."""
        self._interrupt(_Why.GIVEN_BACK)

    def lose(self) -> None:
        """Another worker has the task: interrupt the handler; there is nothing to settle."""
        self._interrupt(_Why.LOST)

    async def run(self) -> Ended:
        """Run the handler to its end, or to the end of what it is allowed."""
        assert self._body is None, "an attempt is run once"
        if self._why is not None:
            return Ended(self._ending(None))
        # Not in a task group, which would wait for ever for a handler that does not end.
        context = contextvars.copy_context()
        body = asyncio.get_running_loop().create_task(self._handle(), context=context)
        self._body = body
        body.add_done_callback(lambda _: self._news.set())
        try:
            await self._wait(body)
        except asyncio.CancelledError:
            self.lose()
            raise
        finally:
            if not body.done():
                _left.add(body)
                body.add_done_callback(_left.discard)
        if body.done():
            return Ended(self._ending(None if body.cancelled() else body.result()))
        what = "attempt %d of task %s has ended, but its handler has not yet"
        _log.warning(what, self.task.attempt, self.task.id)
        return Ended(self._ending(None), body)

    async def _wait(self, body: asyncio.Task[_Outcome]) -> None:
        """Until the handler has ended, or was interrupted and has had its grace."""
        try:
            async with asyncio.timeout(self.handler.timeout_seconds):
                await self._news.wait()
        except TimeoutError:
            if self._thread is not None:
                self._hung_at = self._thread.stack()
            self._interrupt(_Why.TIMEOUT)
        if not body.done() and not (self._why is _Why.TIMEOUT and self._thread is not None):
            await asyncio.wait((body,), timeout=self.grace_seconds)

    def _interrupt(self, why: _Why) -> None:
        has_ended = self._body is not None and not self._tell(self._body, why)
        if has_ended and why is not _Why.LOST:
            return  # What the handler came to stands.
        self.task.cancel_asked = True
        self._why = why if self._why is None else max(why, self._why)
        self._news.set()

    def _tell(self, body: asyncio.Task[_Outcome], why: _Why) -> bool:
        """Raise inside the handler; whether it had not ended yet."""
        if body.done():
            return False
        if self._thread is not None:
            return self._thread.tell(TimeoutError if why is _Why.TIMEOUT else Cancelled)
        body.cancel()
        return True

    async def _handle(self) -> _Outcome:
        """Call the handler, here or in a thread; nothing that it raises comes through."""
        try:
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
            return raised(error, self.handler.retry, ours=__file__)

    def _call(self) -> _Outcome | _Unfinished:
        """A plain handler, from within its thread."""
        try:
            result = self.handler.function(self.task)
            return result if isinstance(result, Awaitable) else _judged(result)
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything
            return raised(error, self.handler.retry, ours=__file__)

    def _ending(self, outcome: _Outcome | None) -> Ending | None:
        retry = self.handler.retry
        match self._why:
            case _Why.LOST:
                return None
            case _Why.STOP:
                return Stopped()
            case _Why.GIVEN_BACK:
                return GivenBack()
            case _Why.TIMEOUT:
                trace = outcome.failure.trace if isinstance(outcome, Raised) else self._hung_at
                outcome = timed_out(retry, seconds=self.handler.timeout_seconds, trace=trace)
        if isinstance(outcome, Raised):
            now_ms = self.now_ms()
            return failed(outcome, retry, counted=self.counted, now_ms=now_ms, entropy=self.entropy)
        # None: somebody who cancels every task there is has cancelled it before its start.
        return outcome or GivenBack()


def _judged(result: object) -> Succeeded | Failed:
    """What a handler returned, as JSON, or why it cannot be stored."""
    try:
        text = json.dumps(result, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        body = text.encode()
    except Exception as error:  # noqa: BLE001 - classes of the user's own take part
        problem = f"it is not JSON ({error})"
    else:
        if len(body) <= RESULT_BYTES_MAX:
            return Succeeded(msgspec.Raw(body))
        problem = f"it has {len(body):,} bytes and at most {RESULT_BYTES_MAX:,} are taken"
    return Failed(Failure("BadResult", f"The result cannot be stored: {problem}."))


def _is_a(kind: type, value: object) -> bool:
    """An `isinstance` that mypy does not know the answer to."""
    return isinstance(value, kind)


def _function_problem(function: object) -> str:
    if not callable(function):
        return f"cannot be called: {function!r}"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "is a generator; a task has one result"
    with suppress(ValueError):  # Some functions in C do not tell what they take.
        try:
            inspect.signature(function).bind(None)
        except TypeError:
            return "does not take one argument, the task"
    return ""
