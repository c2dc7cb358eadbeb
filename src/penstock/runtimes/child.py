"""The process in which users' code runs: `python -m penstock.runtimes.child PARENT`.

Its standard input is a socket to the runtime that started it (`penstock.runtimes.children`), over
which it gets one task after the other; see `penstock.runtimes.frames`. It keeps what is imported
from one task to the next, and so a task costs no start of Python. The main thread runs the
function, a second one hears the runtime.

- While a task runs, file descriptors 1 and 2 are its log, so that what programs print that the
  function starts is in there too. Nobody but us has the socket.
- While a task runs, the environment has the variables that were handed to it, and afterwards what
  it had before.
- SIGTERM asks the running function to stop. Without one, it ends the process.
- A copy of this process that the function has forked says nothing to the runtime, and ends where
  the function does: what it said would be taken for the end of the task, or of the next one.
- The runtime's end of the socket closes when the runtime ends, in whatever way. Then this process
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import WorkFailed
from penstock.kernel.parents import die_with
from penstock.runtimes.base import News, progress_fault
from penstock.runtimes.calling import Code, Interruption, call, is_clean, released, told
from penstock.runtimes.frames import (
    Begin,
    Done,
    Emit,
    Failed,
    FromChild,
    Heard,
    Mint,
    Minted,
    Progress,
    Stale,
    Style,
    bodies,
    framed,
    to_child,
)
from penstock.runtimes.handed import TaskCredentials
from penstock.runtimes.resources import limit_memory
from penstock.runtimes.secrets import print_error


class Runtime:
    """The other end of the socket: what it says is kept for the main thread."""

    def __init__(self, connection: socket.socket, interruption: Interruption) -> None:
        self._connection = connection
        self._interruption = interruption
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[Heard | Minted]] = {}
        self._number = 0
        self.is_warned = False
        """Whether the log of the task says already that it reports too much."""
        self.tasks: queue.SimpleQueue[Begin] = queue.SimpleQueue()

    def send(self, frame: FromChild) -> None:
        """Say something, whole: an interruption waits until it is said."""
        if not self.is_ours:
            raise WorkFailed(
                "A process that the function has started cannot speak for its task; have it tell"
                " the function, and let the function call progress and emit."
            )
        body = framed(frame)
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
        self.send(Progress(dict(said)))

    def emit(self, news: Sequence[News]) -> str:
        """Send events, and wait until they are heard."""
        heard = self._answer(Emit(number=self._next(), news=list(news)))
        assert isinstance(heard, Heard)
        return heard.paused

    def credentials(self, locations: Sequence[str]) -> TaskCredentials:
        """Ask for credentials, and wait for them."""
        minted = self._answer(Mint(number=self._next(), locations=list(locations)))
        assert isinstance(minted, Minted)
        assert minted.credentials is not None
        return minted.credentials

    def _next(self) -> int:
        with self._sending:
            self._number += 1
            return self._number

    def _answer(self, asked: Emit | Mint) -> Heard | Minted:
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
        _end_all()

    def _hear(self, body: bytes) -> None:
        match to_child.decode(body):
            case Begin() as begin:
                self.tasks.put(begin)
            case Heard() | Minted() as answer:
                # Nobody waits any more if the function was interrupted.
                if answers := self._waiting.get(answer.number):
                    answers.put(answer)
            case _:
                self._interruption.stopping.set()


class Child:
    """Runs what the runtime sends, one task after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self._interruption = Interruption()
        self._runtime = Runtime(connection, self._interruption)
        self._code = Code()
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
                self._runtime.send(Stale())
                continue
            self._is_running = True
            self._runtime.is_warned = False
            frame = self._outcome(begin)
            if not self._runtime.is_ours:
                os._exit(0 if isinstance(frame, Done) else 1)
            frame.is_clean = frame.is_clean and is_clean(threads=ours)
            self._end(frame)
            self._is_running = False
            with suppress(OSError):
                os.chdir(self._folder)

    def _end(self, frame: Done | Failed) -> None:
        """Tell how the task has ended, also if what it has made cannot be told."""
        try:
            self._runtime.send(frame)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - what users make may be anything
            reason, _ = told(error)
            said = f"What the function has made cannot be told: {reason.partition(chr(10))[0]}"
            self._runtime.send(Failed(reason=said, is_retried=True, is_clean=frame.is_clean))

    def _outcome(self, begin: Begin) -> Done | Failed:
        if begin.has_log:
            return self._ran(begin)
        try:
            with _printing_to(begin.work.log):
                return self._ran(begin)
        except OSError as error:
            reason = f"The log {begin.work.log} cannot be written: {error.strerror or error}."
            # Another process may do better, if it was this one that has no room for a file.
            return Failed(reason=reason, is_retried=True, is_clean=False)

    def _ran(self, begin: Begin) -> Done | Failed:
        if begin.style is Style.EVENT:
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
            return Done(made=list(made), is_clean=True)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the function's end
            # The function may have closed or replaced what this is printed to.
            with suppress(Exception):
                print_error(error, begin.work.secrets.values())
            reason, is_retried = told(error)
            back = released(error, is_asked=self._interruption.is_asked)
            return Failed(
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
    _redirect(log or os.devnull)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            # The function may have closed or replaced it.
            with suppress(Exception):
                stream.flush()
        _redirect(os.devnull)


def _redirect(file: str) -> None:
    # Untrusted work on this machine is not to read what others print.
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.close(opened)


def _end_all() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str]) -> None:
    """Run tasks for the process of this number, over standard input."""
    die_with(int(arguments[0]))
    # A copy that programs which the function starts do not inherit.
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr] # the interpreter's own are of this kind
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    Child(connection).run()


if __name__ == "__main__":
    main(sys.argv[1:])
