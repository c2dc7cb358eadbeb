"""The process in which users' code runs: `python -m penstock.runtimes.child PARENT`.

Or it is forked from one that has imported that code already (`penstock.runtimes.fork_server`).
Over its socket (`penstock.runtimes.frames`) it gets one task after the other from its runtime.
It keeps what is imported from one task to the next, and so a task costs no start of Python. The
main thread runs the function, a second one reads the socket.

- While a task runs, file descriptors 1 and 2 are its log, so that what programs print that the
  function starts is in there too. Nobody but us has the socket.
- While a task runs, the environment has the variables of the attempt, and afterwards what it had
  before.
- SIGTERM asks the running function to stop. Without one, it ends the process.
- A copy of this process that the function has forked sends nothing to the runtime, and ends
  where
  the function does: what it sent would be taken for the end of the task, or of the next one.
- The runtime's end of the socket closes when the runtime ends, in whatever way. Then this
  process
  kills itself with its whole process group; the kernel of Linux does so too if this process is
  too busy to notice.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import WorkFailed
from penstock.kernel.frames import bodies, parent_connection
from penstock.kernel.parent_watch import die_with
from penstock.runtimes.base import WorkEvent, progress_fault
from penstock.runtimes.frames import (
    BeginTask,
    CallStyle,
    ChildDone,
    ChildFailed,
    ChildProgress,
    CredentialsReply,
    CredentialsRequest,
    EmitEvents,
    EventsReply,
    FromChild,
    StaleCode,
    encode_frame,
    to_child,
)
from penstock.runtimes.resource_limits import limit_memory
from penstock.runtimes.secrets import TaskCredentials, print_error
from penstock.runtimes.user_code import (
    FunctionInterrupter,
    LoadedCode,
    call,
    is_clean,
    released,
    told,
)


class RuntimeConnection:
    """The other end of the socket: what it says is kept for the main thread."""

    def __init__(self, connection: socket.socket, interruption: FunctionInterrupter) -> None:
        self._connection = connection
        self._interruption = interruption
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[EventsReply | CredentialsReply]] = {}
        self._number = 0
        self.is_warned = False
        """Whether the log of the task says already that it reports too much."""
        self.tasks: queue.SimpleQueue[BeginTask] = queue.SimpleQueue()

    def send(self, frame: FromChild) -> None:
        """Say something, whole: an interruption waits until it is said."""
        if not self.is_ours:
            raise WorkFailed(
                "A child process of the function cannot report for its task; have it tell"
                " the function, and let the function call progress and emit."
            )
        body = encode_frame(frame)
        with self._interruption.shielded(), self._sending:
            self._connection.sendall(body)

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that the runtime talks to, and no copy of it."""
        return os.getpid() == self._pid

    def progress(self, said: Mapping[str, Any]) -> None:
        """Report it, within bounds: what is beyond them is left out, and the log says so."""
        if why := progress_fault(said):
            if not self.is_warned:
                self.is_warned = True
                # The function may have closed or replaced what this is printed to.
                with suppress(Exception):
                    sys.stderr.write(f"penstock: progress is not reported: {why}\n")
            return
        self.send(ChildProgress(dict(said)))

    def emit(self, news: Sequence[WorkEvent]) -> str:
        """Send events, and wait until they are heard."""
        heard = self._answer(EmitEvents(number=self._next(), news=list(news)))
        assert isinstance(heard, EventsReply)
        return heard.paused

    def credentials(self, locations: Sequence[str]) -> TaskCredentials:
        """Ask for credentials, and wait for them."""
        minted = self._answer(CredentialsRequest(number=self._next(), locations=list(locations)))
        assert isinstance(minted, CredentialsReply)
        assert minted.credentials is not None
        return minted.credentials

    def _next(self) -> int:
        with self._sending:
            self._number += 1
            return self._number

    def _answer(self, asked: EmitEvents | CredentialsRequest) -> EventsReply | CredentialsReply:
        """Ask, and wait for the answer of that number."""
        answers = self._waiting[asked.number] = queue.SimpleQueue()
        try:
            self.send(asked)
            answer = answers.get()
        finally:
            del self._waiting[asked.number]
        if answer.error:
            raise WorkFailed(answer.error)
        return answer

    def listen(self) -> None:
        """Hear the runtime until it is gone; then end all that this process has started."""
        with suppress(OSError):
            for body in bodies(self._connection):
                self._hear(body)
        end_all()

    def take(self, answer: EventsReply | CredentialsReply) -> None:
        """Give it to who has asked; nobody waits any more if the function was interrupted."""
        if answers := self._waiting.get(answer.number):
            answers.put(answer)

    def _hear(self, body: bytes) -> None:
        match to_child.decode(body):
            case BeginTask() as begin:
                self.tasks.put(begin)
            case EventsReply() | CredentialsReply() as answer:
                self.take(answer)
            case _:
                self._interruption.stopping.set()


class FunctionChild:
    """Runs what the runtime sends, one task after the other."""

    def __init__(self, connection: socket.socket, *, code: LoadedCode | None = None) -> None:
        self._interruption = FunctionInterrupter()
        self._runtime = RuntimeConnection(connection, self._interruption)
        self._code = code or LoadedCode()
        self._clock = SystemClock()
        self._is_running = False
        self._folder = Path.cwd()

    def run(self) -> None:
        """Until the process is ended."""
        listening = threading.Thread(target=self._runtime.listen, daemon=True)
        listening.start()
        ours = {threading.main_thread(), listening}
        while True:
            signal.signal(signal.SIGTERM, self._asked_to_stop)
            begin = self._runtime.tasks.get()
            self._interruption.renew()
            if self._code.is_stale():
                self._runtime.send(StaleCode())
                continue
            self._is_running = True
            self._runtime.is_warned = False
            frame = self._outcome(begin)
            if not self._runtime.is_ours:
                os._exit(0 if isinstance(frame, ChildDone) else 1)
            frame.is_clean = frame.is_clean and is_clean(threads=ours)
            end_of(frame, self._runtime.send)
            self._is_running = False
            with suppress(OSError):
                os.chdir(self._folder)

    def _outcome(self, begin: BeginTask) -> ChildDone | ChildFailed:
        if begin.has_log:
            return self._ran(begin)
        try:
            with _printing_to(begin.work.log):
                return self._ran(begin)
        except OSError as error:
            reason = f"The log {begin.work.log} cannot be written: {error.strerror or error}."
            # Another process may do better, if it was this one that has no room for a file.
            return ChildFailed(reason=reason, is_retried=True, is_clean=False)

    def _ran(self, begin: BeginTask) -> ChildDone | ChildFailed:
        if begin.style is CallStyle.EVENT:
            os.environ.clear()
        handed = begin.work.handed
        try:
            limit_memory(begin.work.resources)
            with _variables(handed.variables if handed else {}):
                made = call(
                    begin,
                    self._code,
                    line=self._runtime,
                    interruption=self._interruption,
                    clock=self._clock,
                )
            return ChildDone(made=list(made), is_clean=True)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the function's end
            # The function may have closed or replaced what this is printed to.
            with suppress(Exception):
                print_error(error, begin.work.secrets.values())
            reason, is_retried = told(error)
            back = released(error, is_asked=self._interruption.is_asked)
            return ChildFailed(
                reason=reason,
                is_retried=is_retried,
                is_clean=True,
                is_released=back is not None,
                is_delayed=back is not None and back.is_delayed,
            )

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if not self._is_running:
            sys.exit(0)
        self._interruption.ask()


def end_of(frame: ChildDone | ChildFailed, send: Callable[[FromChild], None]) -> None:
    """Tell how the task has ended, also if what it has made cannot be told."""
    try:
        send(frame)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - what users make may be anything
        reason, _ = told(error)
        said = f"The result of the function cannot be sent: {reason.partition(chr(10))[0]}"
        send(ChildFailed(reason=said, is_retried=True, is_clean=frame.is_clean))


@contextmanager
def _variables(handed: Mapping[str, str]) -> Iterator[None]:
    """Within this, the environment has these variables."""
    before = {name: os.environ.get(name) for name in handed}
    os.environ.update(handed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _printing_to(log: str) -> Iterator[None]:
    """Within this, what is printed is appended to a file; to none if its name is empty."""
    if log:
        Path(log).parent.mkdir(parents=True, exist_ok=True)
    redirect(log or os.devnull)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            # The function may have closed or replaced it.
            with suppress(Exception):
                stream.flush()
        redirect(os.devnull)


def redirect(file: str) -> None:
    """Have what this process prints appended to a file from now on."""
    # Untrusted work on this machine is not to read what others print.
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.close(opened)


def end_all() -> None:
    """Kill this process, and all of its group if that is its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def connected() -> socket.socket:
    """The socket that this process was given as standard input, and all as it is for users' code:
    nothing to read, text in UTF-8, and modules of the working directory."""
    connection = parent_connection()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr] # the interpreter's own are of this kind
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return connection


def main(arguments: Sequence[str]) -> None:
    """Run tasks for the process of this number, over standard input."""
    die_with(int(arguments[0]))
    FunctionChild(connected()).run()


if __name__ == "__main__":
    main(sys.argv[1:])
