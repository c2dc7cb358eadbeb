"""Finds, loads, calls and interrupts users' functions, and says how they ended.

A DAG names a function as `module:function`, or as `module.function` at Lambda; installed
packages offer functions by name (`penstock.operators`). Naming imports nothing: the dispatcher
does it too.

`call` runs plain functions in the main thread, which gets signals, and awaitables on a loop of
their own there. Whatever the function raises becomes a `ChildFailed` with a sentence that
people read: the error, and the part of the traceback that is theirs. The full traceback goes to
the log. A handler with Lambda's signature is given the same event and context in a child
process and at AWS.

Called in child processes, in hosts, and in functions that are deployed at AWS.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import DoNotRetry, WorkFailed, WorkReleased
from penstock.runtimes.base import AttemptWork, ProducedOutput
from penstock.runtimes.frames import BeginTask, CallStyle
from penstock.runtimes.task import FunctionTask, ReportChannel, StopFlag, Stopped, make_folders

FUNCTION_FORM: Final = "module:function"
OPERATORS_GROUP: Final = "penstock.operators"


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """A function of a module; `function` may have dots, as a method of a class has."""

    module: str
    function: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


def reference(text: str) -> FunctionReference | None:
    """What `module:function` names; None if it is not of that form."""
    module, colon, function = text.partition(":")
    return (
        FunctionReference(module, function)
        if colon and _dotted(module) and _dotted(function)
        else None
    )


def handler_reference(text: str) -> FunctionReference | None:
    """What a handler's name says: `module.function`, as Lambda has it, or `module:function`."""
    if ":" in text:
        return reference(text)
    module, dot, function = text.rpartition(".")
    return (
        FunctionReference(module, function)
        if dot and _dotted(module) and _dotted(function)
        else None
    )


def installed_operators() -> Mapping[str, FunctionReference]:
    """The functions that installed packages offer by name. Nothing is imported."""
    return {
        each.name: FunctionReference(each.module, each.attr)
        for each in entry_points(group=OPERATORS_GROUP)
        if each.attr
    }


def _dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


_SECONDS_MAX: Final = 900.0
"""What a function gets at AWS at most."""


def event_of(work: AttemptWork) -> dict[str, Any]:
    """The event of a task: why there is one, what it reads, and where it may write."""
    plain: dict[str, Any] = msgspec.to_builtins(work)
    names = ("task_id", "attempt", "job", "operator", "generation", "config", "payload")
    return {name: plain[name] for name in (*names, "inputs", "outputs")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalContext:
    """The part of Lambda's context that means something on any machine."""

    function_name: str
    aws_request_id: str
    timeout_seconds: float
    began_at: float
    function_version: str = "$LATEST"
    clock: Clock = field(default_factory=SystemClock, repr=False)

    def get_remaining_time_in_millis(self) -> int:
        """How long the handler may still run."""
        left = self.began_at + self.timeout_seconds - self.clock.monotonic()
        return max(0, int(left * 1000))


def context_of(work: AttemptWork, *, clock: Clock) -> LocalContext:
    """The context of a task that begins now."""
    return LocalContext(
        function_name=work.operator,
        aws_request_id=f"{work.task_id}-{work.attempt}",
        timeout_seconds=work.timeout_seconds or _SECONDS_MAX,
        began_at=clock.monotonic(),
        clock=clock,
    )


_REASON_CHARACTERS_MAX: Final = 4_000
_TRACE_LINES_MAX: Final = 20
_FORGOTTEN_MAX: Final = 1_000
"""How many ended children of a function are looked at."""

Function = Callable[..., Any]
CALLERS: Final = {__file__}
"""The files that call users' functions: what is below them in a traceback is the user's."""


class FunctionInterrupter:
    """Ends the function that runs now, unless it has said that it ends by itself.

    `ask` is called by the handler of a signal, so in the main thread, between any two of its
    instructions. Within `shielded` the main thread is left alone until it is done.
    """

    def __init__(self) -> None:
        self.stopping = StopFlag()
        self._end: Callable[[], None] | None = None
        self._is_shielded = False
        self._is_asked = False

    @property
    def is_asked(self) -> bool:
        """Whether this task was asked to end; the function does not count as having looked."""
        return self.stopping.is_set

    def renew(self) -> None:
        """A new task: nothing was asked of it."""
        self.stopping = StopFlag()
        self._is_asked = False

    def ask(self) -> None:
        """Have the function end."""
        self.stopping.set()
        if self._is_shielded:
            self._is_asked = True
        elif self._end is not None and not self.stopping.is_watched:
            self._end()

    @contextmanager
    def shielded(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_shielded = True
        try:
            yield
        finally:
            self._is_shielded = False
            if self._is_asked:
                self._is_asked = False
                self.ask()

    @contextmanager
    def ends_by(self, end: Callable[[], None]) -> Iterator[None]:
        """Within this, a function runs that is ended so."""
        self._end = end
        try:
            yield
        finally:
            self._end = None


class LoadedCode:
    """The users' functions that are loaded, and whether they are still what is on disk."""

    def __init__(self) -> None:
        self._functions: dict[str, Function] = {}
        self._files: dict[Path, int] = {}

    def is_stale(self) -> bool:
        """Whether a file has changed since it was imported."""
        return any(_changed_at(path) != at for path, at in self._files.items())

    def function(self, entry: str) -> Function:
        """The function of a `module:function`.

        `WorkReleased` if this worker does not have it, or lacks a module that it imports: another
        worker may. Whatever else goes wrong while it is imported is the code's own failure.
        """
        if entry not in self._functions:
            module, _, name = entry.partition(":")
            self._functions[entry] = self._load(FunctionReference(module, name))
        return self._functions[entry]

    def _load(self, wanted: FunctionReference) -> Function:
        before = set(sys.modules)
        importlib.invalidate_caches()
        try:
            return self._found(wanted)
        finally:
            # Also what was imported in vain: it stays, and would outlive its being put right.
            self._remember(set(sys.modules) - before)

    def _found(self, wanted: FunctionReference) -> Function:
        try:
            found: Any = importlib.import_module(wanted.module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{wanted.module}.".startswith(f"{error.name}."):
                raise WorkReleased(
                    f"The module {wanted.module} does not import: ModuleNotFoundError: {error};"
                    " install what it needs where the worker runs."
                ) from error
            raise WorkReleased(
                f"There is no module {error.name} for {wanted} in {Path.cwd()} or where Python"
                f" looks for modules; start the worker in its folder, or install it.{_closed()}"
            ) from error
        for part in wanted.function.split("."):
            if not hasattr(found, part):
                raise WorkReleased(f"The module {wanted.module} has no {wanted.function}.")
            found = getattr(found, part)
        if not callable(found):
            raise WorkFailed(f"{wanted} is not a function.")
        function: Function = found
        return function

    def _remember(self, modules: set[str]) -> None:
        """Note the files of the user; what is installed is left alone while this process lives."""
        installed = (sys.prefix, sys.base_prefix)
        for name in modules:
            file = getattr(sys.modules.get(name), "__file__", None)
            if file and not file.startswith(installed) and "site-packages" not in file:
                self._files[Path(file)] = _changed_at(Path(file))


def call(
    begin: BeginTask,
    code: LoadedCode,
    *,
    line: ReportChannel,
    interruption: FunctionInterrupter,
    clock: Clock,
) -> tuple[ProducedOutput, ...]:
    """Call the function and return what it has made."""
    make_folders(begin.work)
    task = FunctionTask(begin.work, line=line, stopping=interruption.stopping)
    with interruption.ends_by(_raise_stopped):
        function = code.function(begin.entry)
        if begin.style is CallStyle.EVENT:
            returned = function(event_of(begin.work), context_of(begin.work, clock=clock))
        else:
            returned = function(task)
    if inspect.isawaitable(returned):
        returned = _awaited(returned, interruption)
    if interruption.is_asked and interruption.stopping.is_watched:
        # It was told to stop, and has looked: what it has made may be half of what it would have.
        raise Stopped
    return task.made(returned)


def told(error: BaseException) -> tuple[str, bool]:
    """Why an attempt failed, for people, and whether another one may help."""
    match error:
        case Stopped():
            return "The function was stopped.", True
        case WorkFailed():
            return _text(str(error.message)), error.is_retried
        case SystemExit():
            return _text(f"The function ended by SystemExit: {_shown(error.code)}."), True
    first = _text("".join(traceback.format_exception_only(error)).strip())
    if isinstance(error, SyntaxError):
        # Python says where first; lists show the first line, which is to say what.
        place, _, what = first.rpartition("\n")
        first = f"{what}\n  {place}" if place else what
    trace = "".join(traceback.format_list(_frames(error.__traceback__))).splitlines()
    lines = [first, *trace[-_TRACE_LINES_MAX:]]
    return _text("\n".join(lines)), not isinstance(error, DoNotRetry)


def released(error: BaseException, *, is_asked: bool) -> WorkReleased | None:
    """The release of the work, if this error is one and no failure."""
    if isinstance(error, Stopped):
        # By a signal that the worker knows nothing of, such as one to all processes of a machine.
        # Who raises it unasked has failed, and would be run again at once, time after time.
        return WorkReleased("The function was stopped.", is_delayed=False) if is_asked else None
    return error if isinstance(error, WorkReleased) else None


def is_clean(*, threads: set[threading.Thread]) -> bool:
    """Whether nothing of a function runs on: no thread but these, and no child process."""
    if set(threading.enumerate()) - threads:
        return False
    for _ in range(_FORGOTTEN_MAX):
        try:
            ended, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if not ended:
            break
    return False


def _awaited(awaitable: Awaitable[Any], interruption: FunctionInterrupter) -> Any:
    import asyncio  # noqa: PLC0415 - most functions need none, and starting without it is quicker

    async def main() -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with interruption.ends_by(lambda: _cancel(loop, task)):
            return await awaitable

    def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
        loop.call_soon_threadsafe(task.cancel)

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if not interruption.is_asked:
            # Of something that it has cancelled itself: its own failure.
            raise
        raise Stopped from None


def _raise_stopped() -> None:
    raise Stopped


def _frames(trace: TracebackType | None) -> traceback.StackSummary:
    """The frames below this module: those of the user."""
    found = traceback.extract_tb(trace)
    ours = [place for place, frame in enumerate(found) if frame.filename in CALLERS]
    below = found[ours[-1] + 1 :] if ours else found
    return traceback.StackSummary.from_list(
        [frame for frame in below if not frame.filename.startswith("<frozen importlib")]
    )


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - it is the user's
        return f"<{type(value).__name__}>"


def _text(said: str) -> str:
    return said[:_REASON_CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode()


def _closed() -> str:
    """The folders of modules that this user may not look into, as one more sentence."""
    found = []
    for each in sys.path:
        try:
            os.scandir(each or ".").close()
        except PermissionError:
            found.append(each or str(Path.cwd()))
        except OSError:
            continue
    return f" The user {os.geteuid()} may not look into {', '.join(found)}." if found else ""


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
