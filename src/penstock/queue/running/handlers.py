"""What a worker can run: the user's functions by type, with the rules that they run by.

A worker has one `Handlers`. What a handler is called with is a `TaskContext`; how it is run,
bounded and interrupted is told in `penstock.queue.running.attempts`. A handler that could never run
is refused when it is registered, with a sentence.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.kernel.errors import InvalidInput
from penstock.queue.places import TaskId, check_name
from penstock.queue.running.addresses import Address, address_of, check_addressable
from penstock.queue.running.progress import Voice
from penstock.queue.running.retry import SECONDS_MAX, Retry, is_number


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
    voice: Voice = field(default_factory=Voice, repr=False)
    """Where its reports go."""

    @functools.cached_property
    def input(self) -> Any:
        """What was submitted, decoded when it is first asked for."""
        return json.loads(bytes(self.raw_input))

    def report(self, done: float, total: float = 1.0, message: str = "") -> None:
        """Say how far this attempt is, as often as you like; users see it a few seconds later."""
        self.voice.say(done, total, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """The function for the tasks of one type, and the rules that it runs by."""

    type: str
    function: Callable[[TaskContext], Any]
    timeout_seconds: float | None = None
    retry: Retry = field(default_factory=Retry)
    isolate: bool = False
    """Whether it runs in a process of its own."""
    is_async: bool = field(init=False, repr=False, compare=False)
    """Whether calling it gives a coroutine, as far as can be told without calling it."""

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
        if self.isolate:
            check_addressable(self.function, type=self.type)
        object.__setattr__(self, "is_async", _is_async(self.function))

    @property
    def address(self) -> Address:
        """Where a process of its own finds it. Raises `InvalidInput` if it would not."""
        return address_of(self.function, type=self.type)


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

    def check(self) -> None:
        """Raises `InvalidInput` for an isolated handler that its process would not find."""
        for handler in self._handlers.values():
            if handler.isolate:
                address_of(handler.function, type=handler.type)

    def add(self, handler: Handler) -> None:
        """Register a handler; a type has only one."""
        if handler.type in self._handlers:
            raise InvalidInput(f"There is a handler of {handler.type!r} already.")
        self._handlers[handler.type] = handler


def _is_a(kind: type, value: object) -> bool:
    """An `isinstance` that mypy does not know the answer to."""
    return isinstance(value, kind)


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    # The call of an object is looked up on its class, as Python does it.
    called = inspect.getattr_static(type(function), "__call__", None)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


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
