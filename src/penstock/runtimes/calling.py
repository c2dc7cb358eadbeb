"""Calls a user's function inside a child process, interrupts it, and says how it ended.

Plain functions run in the main thread, where signals are heard; awaitables run on a loop of their
own there. Whatever the function raises becomes a `Failed` with a sentence that people read: the
error, and the part of the traceback that is theirs. The full traceback goes to the log.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from penstock.kernel.clock import Clock
from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.kernel.handler_errors import DoNotRetry
from penstock.runtimes.base import Made
from penstock.runtimes.frames import Begin, Style
from penstock.runtimes.lambdas import context_of, event_of
from penstock.runtimes.references import Reference
from penstock.runtimes.task import Line, Stopped, Stopping, Task, make_folders

_REASON_CHARACTERS_MAX: Final = 4_000
_TRACE_LINES_MAX: Final = 20
_FORGOTTEN_MAX: Final = 1_000
"""How many ended children of a function are looked at."""

Function = Callable[..., Any]


class Interruption:
    """Ends the function that runs now, unless it has said that it ends by itself.

    `ask` is called by the handler of a signal, so in the main thread, between any two of its
    instructions. Within `shielded` the main thread is left alone until it is done.
    """

    def __init__(self) -> None:
        self.stopping = Stopping()
        self._end: Callable[[], None] | None = None
        self._is_shielded = False
        self._is_asked = False

    @property
    def is_asked(self) -> bool:
        """Whether this task was asked to end; the function does not count as having looked."""
        return self.stopping.is_set

    def renew(self) -> None:
        """A new task: nothing was asked of it."""
        self.stopping = Stopping()
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


class Code:
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
            self._functions[entry] = self._load(Reference(module, name))
        return self._functions[entry]

    def _load(self, wanted: Reference) -> Function:
        before = set(sys.modules)
        importlib.invalidate_caches()
        try:
            return self._found(wanted)
        finally:
            # Also what was imported in vain: it stays, and would outlive its being put right.
            self._remember(set(sys.modules) - before)

    def _found(self, wanted: Reference) -> Function:
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
    begin: Begin, code: Code, *, line: Line, interruption: Interruption, clock: Clock
) -> tuple[Made, ...]:
    """Call the function and return what it has made."""
    make_folders(begin.work)
    task = Task(begin.work, line=line, stopping=interruption.stopping)
    with interruption.ends_by(_raise_stopped):
        function = code.function(begin.entry)
        if begin.style is Style.EVENT:
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
    """The work as it is handed back, if this error says so and not that it has failed."""
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


def _awaited(awaitable: Awaitable[Any], interruption: Interruption) -> Any:
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
    ours = [place for place, frame in enumerate(found) if frame.filename == __file__]
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
