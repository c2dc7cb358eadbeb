"""A process that has imported a user's module, and forks children from that: `-m … PARENT`.

A forked child costs some milliseconds of CPU, a started one costs a start of Python and every
import of the module. So trusted work of one function forks from a fork server, which runs in
the environment of children, so without credentials of anybody, and never sees a task: the work
and what an attempt is given come over the child's own socket, after the fork. States, as
`penstock.runtimes.child_process` sees them:

    loading ──▶ ready ──(fork, reap)──▶ ready ──▶ retired ──▶ ended, when its last fork has
       └──────▶ unfit: ended; children are started anew, and the log says why

It is unfit, because a fork of it would share or lack something, if importing the module

- failed: then the attempt shows why, in a child of its own;
- left a thread that runs on (of those that end themselves for a fork, as OpenBLAS's do, none is
  left by a trial);
- left a file, a socket or an event loop open, which all forks would read from at once;
- started a process;
- read a variable that only tasks have, such as where credentials are: a fork would go on with
  what
  was read before it had any.

A fork inherits memory, standard streams and the working directory. It closes the fork server's
socket, has a session, a group and a socket of its own, and fresh random numbers: Python's by
itself, NumPy's by `reseed`. Signals have their default handlers here, unless the module has set
others, as in a child that was started.

Forks are waited for here, but only when told to: until then a fork's pid is not free for
others, and the runtime may send signals to it. What a fork has left behind, and which is of its
session, is killed before it is reaped: orphans below this process become its children.

| who ends | what follows |
|---|---|
| the worker | it closes the socket: this process ends; the kernel kills it too, and the guard |
| this process | the kernel kills its forks; their tasks fail, and the next child is started anew |
| a fork | its task fails; nobody else notices |

Linux only. Elsewhere children are always started.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from penstock.kernel.frames import READ_BYTES, FrameDecoder
from penstock.kernel.parent_watch import adopt_orphans, die_with
from penstock.runtimes.child import FunctionChild, connected
from penstock.runtimes.frames import (
    CallStyle,
    ChildForked,
    ChildReaped,
    ForkChild,
    FromTemplate,
    LoadModule,
    ModuleLoaded,
    ReapChild,
    ToTemplate,
    encode_frame,
    to_template,
)
from penstock.runtimes.secrets import VARIABLES
from penstock.runtimes.user_code import LoadedCode

_OPEN_TO_ALL: Final = frozenset({"/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"})
_KILLS_MAX: Final = 1_000


class ForkServer:
    """Serves one runtime, over one socket, one request at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._code = LoadedCode()
        self._forks: set[int] = set()

    def run(self) -> None:
        """Until the runtime closes the socket."""
        unframing = FrameDecoder()
        while True:
            more, handed, _, _ = socket.recv_fds(
                self._connection, READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
            if not more:
                return
            unframing.feed(more)
            while (body := unframing.body()) is not None:
                self._connection.sendall(
                    encode_frame(self._answer(to_template.decode(body), handed))
                )

    def _answer(self, asked: ToTemplate, handed: list[int]) -> FromTemplate:
        match asked:
            case LoadModule() as load:
                return ModuleLoaded(unfit=self._load(load))
            case ForkChild():
                return ChildForked(pid=self._fork(handed.pop()))
            case ReapChild(pid=pid):
                return ChildReaped(code=self._reap(pid))

    def _load(self, load: LoadModule) -> str:
        """Import it; why no child can be forked after that, or nothing."""
        if load.style is CallStyle.EVENT:
            os.environ.clear()
        before = _open_files()
        with _noting(VARIABLES if load.style is CallStyle.TASK else frozenset()) as read:
            try:
                self._code.function(load.entry)
            except BaseException as error:  # noqa: BLE001 - the attempt shows it
                return f"importing it fails ({type(error).__name__})"
        if read:
            return f"it reads {min(read)} while it is imported, before there is a task"
        if left := sorted(set(_open_files().items()) - set(before.items())):
            return f"importing it leaves {left[0][1]} open"
        if _children():
            return "importing it starts a process"
        if (count := _threads()) > 1:
            return f"importing it starts threads ({count - 1})"
        # What is there now is neither looked at nor moved again, and so it stays shared.
        gc.collect()
        gc.freeze()
        return ""

    def _fork(self, theirs: int) -> int:
        me, (reading, writing) = os.getpid(), os.pipe()
        pid = os.fork()
        if pid:
            os.close(theirs)
            os.close(writing)
            self._forks.add(pid)
            # Until it has a group: before that, no signal to its group would reach it.
            os.read(reading, 1)
            os.close(reading)
            return pid
        try:
            os.setsid()
            die_with(me)
            os.close(reading)
            os.close(writing)
            self._connection.close()
            reseed()
            FunctionChild(socket.socket(fileno=theirs), code=self._code).run()
        finally:
            # Never back into the loop of the template.
            os._exit(1)

    def _reap(self, pid: int) -> int:
        """Free the number of a fork that has ended; how it has."""
        self._forks.discard(pid)
        for _ in range(_KILLS_MAX):
            orphans = [each for each in _children() if each != pid and each not in self._forks]
            mine = [each for each in orphans if _is_of_session(each, pid)]
            for each in mine:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            for each in orphans:
                with suppress(ChildProcessError):
                    os.waitpid(each, 0 if each in mine else os.WNOHANG)
            if not mine:
                break
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)


def reseed() -> None:
    """Have NumPy's own generator draw other numbers than all other forks; Python's does so."""
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()


@contextmanager
def _noting(names: frozenset[str]) -> Iterator[set[str]]:
    """Within this, what is read of these variables is noted, by Python code at least."""
    plain = type(os.environ)
    read: set[str] = set()

    def noted(variables: os._Environ[str], name: str) -> str:
        if name in names:
            read.add(name)
        return plain.__getitem__(variables, name)

    os.environ.__class__ = type("Noting", (plain,), {"__getitem__": noted})
    try:
        yield read
    finally:
        os.environ.__class__ = plain


def _open_files() -> dict[int, str]:
    """What is open in this process, by number, but for what everybody may share."""
    found = {}
    for each in Path("/proc/self/fd").iterdir():
        # The one that this loop reads is gone when it is asked for.
        with suppress(OSError):
            found[int(each.name)] = str(each.readlink())
    return {number: what for number, what in found.items() if not _is_shared(what)}


def _is_shared(what: str) -> bool:
    return what in _OPEN_TO_ALL or what == f"/proc/{os.getpid()}/fd"


def _children() -> list[int]:
    return [int(each) for each in Path("/proc/thread-self/children").read_text().split()]


def _is_of_session(process: int, leader: int) -> bool:
    try:
        return os.getsid(process) == leader
    except OSError:
        return False


def _threads() -> int:
    """How many there are, once those have ended that end for a fork, and come back after it."""
    if (count := threading.active_count()) > 1:
        return count
    tasks = Path("/proc/self/task")
    if len(list(tasks.iterdir())) > 1:
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
    return len(list(tasks.iterdir()))


def main(arguments: Sequence[str]) -> None:
    """Fork children for the process of this number, over standard input."""
    die_with(int(arguments[0]))
    adopt_orphans()
    with suppress(ConnectionError):
        ForkServer(connected()).run()


if __name__ == "__main__":
    main(sys.argv[1:])
