"""Handlers: the user's functions by type, their addresses, and the progress that they report.

A worker has one `HandlerRegistry`. A handler is called with a `TaskContext`;
`penstock.queue.execution.attempt` runs, bounds and interrupts it. A handler that could never run
is refused when it is registered, with a sentence.

**Addresses.** A function that runs in a process of its own is not sent there: the other process
imports the module and looks up its name. So it must be a function of a module that has a file. A
script that was started itself is loaded from its file, under the name `MAIN`, so that code below
`if __name__ == "__main__"` runs once only.

**Progress.** A `ProgressReporter` belongs to one attempt. The handler reports from any thread,
and only the last report counts. The writer of the ledger writes what is `unsent`, with the next
heartbeat, and says that it is `sent`. No report causes a write before `PROGRESS_SECONDS` have
passed since the pack's last one, so a handler may report as often as it likes: at most one put
in `PROGRESS_SECONDS` for all tasks of a pack. The last report is written with the outcome. A
crash loses what was not written yet.

For tests in virtual time, `inline_handler` calls a plain function on the loop: it takes no time
there, and nothing can interrupt it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import math
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final

import msgspec

from penstock.kernel.errors import InvalidInput
from penstock.queue.execution.retry import SECONDS_MAX, Retry, is_number
from penstock.queue.ids import TaskId, check_name
from penstock.queue.ledger import LedgerProgress

MAIN: Final = "__penstock_main__"
"""What the script that a worker was started by is called in the processes of its handlers."""


class HandlerAddress(msgspec.Struct, frozen=True):
    """A function of a module, or of a script at a path."""

    module: str
    name: str
    path: str = ""

    def find(self) -> Any:
        """The function. Raises whatever the import of its module does."""
        found: Any = _script(self.path) if self.path else importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


def check_addressable(function: object, *, type: str) -> None:
    """Raises `InvalidInput` for what is surely not a function of a module."""
    name = getattr(function, "__qualname__", "")
    if not isinstance(name, str) or not name or "<" in name:
        said = f"{name or function!r} cannot be imported by its name"
        raise _not_isolated(type, said)


def address_of(function: Callable[..., Any], *, type: str) -> HandlerAddress:
    """Where a function is. Raises `InvalidInput` if another process would not find it."""
    check_addressable(function, type=type)
    name, module = function.__qualname__, function.__module__
    found: Any = sys.modules.get(module)
    if found is None:
        raise _not_isolated(type, f"its module {module!r} cannot be imported")
    address = HandlerAddress(public_module(module), name)
    if address.module == MAIN:
        path = getattr(found, "__file__", None)
        if not path or not Path(path).is_file():
            raise _not_isolated(type, "it is in no file")
        address = HandlerAddress(MAIN, name, str(Path(path).resolve()))
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise _not_isolated(type, f"{module}.{name} is something else, decorated once more perhaps")
    return address


def public_module(module: str) -> str:
    """The name by which another process knows a module of this one."""
    if module != "__main__":
        return module
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return MAIN if spec is None else str(spec.name)


@functools.cache
def _script(path: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(MAIN, path)
    spec = importlib.util.spec_from_loader(MAIN, loader)
    assert spec is not None, "a loader of our own has one"
    module = importlib.util.module_from_spec(spec)
    sys.modules[MAIN] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[MAIN]
        raise
    return module


def _not_isolated(type: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"The handler of {type!r} cannot run in a process of its own: {why}.",
        hint="Use a function at the top of a module, not a lambda or a function in a function.",
    )


PROGRESS_SECONDS: Final = 5.0
"""How long after its last write a pack is written because of a report alone."""
MESSAGE_CHARACTERS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """One report."""

    done: float
    total: float
    message: str

    def at(self, at_ms: int) -> LedgerProgress:
        """As the ledger has it."""
        return LedgerProgress(at_ms, self.done, self.total, self.message)


def _nobody() -> None:
    pass


class ProgressReporter:
    """What one attempt has said last. `notify` is called, in any thread, when there is news."""

    _lock: ClassVar = threading.Lock()
    """Of all: it is held for two assignments, and most attempts say nothing."""

    def __init__(self, notify: Callable[[], None] = _nobody) -> None:
        self._notify = notify
        self._unsent: ProgressReport | None = None

    def say(self, done: float, total: float, message: str) -> None:
        """Take a report. Raises `InvalidInput` for one that nobody could read."""
        said = _checked(done, total, message)
        with self._lock:
            is_first = self._unsent is None
            self._unsent = said
        if is_first:
            self._notify()

    @property
    def unsent(self) -> ProgressReport | None:
        """What was said and is not written."""
        return self._unsent

    def sent(self, said: ProgressReport) -> None:
        """This is written; what was said after it is not."""
        with self._lock:
            if self._unsent is said:
                self._unsent = None


def _checked(done: object, total: object, message: object) -> ProgressReport:
    for name, value in (("done", done), ("total", total)):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidInput(f"A report needs a number for {name!r}, not {value!r}.")
    assert isinstance(done, int | float)
    assert isinstance(total, int | float)
    if done < 0 or total <= 0:
        raise InvalidInput(
            f"A report of {done!r} of {total!r} is not valid.",
            hint="'done' is at least 0 and 'total' above it: task.report(3, total=10).",
        )
    # Text that cannot be encoded would cost the whole pack its write.
    text = str(message).encode("utf-8", "replace").decode()[:MESSAGE_CHARACTERS_MAX]
    return ProgressReport(float(done), float(total), text)


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
    reporter: ProgressReporter = field(default_factory=ProgressReporter, repr=False)
    """Where its reports go."""

    @functools.cached_property
    def input(self) -> Any:
        """What was submitted, decoded when it is first asked for."""
        return json.loads(bytes(self.raw_input))

    def report(self, done: float, total: float = 1.0, message: str = "") -> None:
        """Say how far this attempt is, as often as you like; users see it a few seconds later."""
        self.reporter.say(done, total, message)


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
    def address(self) -> HandlerAddress:
        """Where a process of its own finds it. Raises `InvalidInput` if it would not."""
        return address_of(self.function, type=self.type)


class HandlerRegistry:
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


def inline_handler(handler: Handler) -> Handler:
    """The same handler, run where it is called."""
    function = handler.function if handler.is_async else inline_function(handler.function)
    return dataclasses.replace(handler, function=function, isolate=False)


def inline_function(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function as an `async def`."""

    @functools.wraps(function)
    async def called(value: Any) -> Any:
        result = function(value)
        return await result if inspect.isawaitable(result) else result

    return called
