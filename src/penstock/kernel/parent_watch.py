"""The small process between a parent and its command: `-m … GRACE_SECONDS FILE COMMAND`.

FILE is the number of an open file that the command has too, or -1.

What it is for, and whom it ends when, says `penstock.kernel.child_process`. It imports little,
because an installation has one for each of its processes.

`die_with` lets Linux's kernel send a child a signal when the *thread* that made it has ended;
elsewhere it does nothing. So children are made by a thread that lives as long as they should,
mostly the main one. The wish survives `exec`, and is lost when the process changes its user or
makes a child of its own.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
# Opened at import, so that `die_with` does nothing but one call: it is used between fork and exec.
_LIBC: Final = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Have this process get a signal when its parent, a process id, ends; now if it has ended."""
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent:
        # It ended before the kernel knew of our wish.
        os.kill(os.getpid(), by)


def adopt_orphans() -> None:
    """Have what descends from this process, and has lost its parent, become a child of it."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main(arguments: Sequence[str]) -> int:
    """Run a command until it ends or standard input does."""
    grace_seconds, file, command = float(arguments[0]), int(arguments[1]), arguments[2:]
    # The parent decides when this ends; a Ctrl-C in its terminal must not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(  # noqa: S603 - the caller's own
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        pass_fds=() if file < 0 else (file,),
        # Harmless here: there is no other thread yet.
        preexec_fn=functools.partial(die_with, os.getpid()),  # noqa: PLW1509
    )

    def send(number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)

    def end_with_parent() -> None:
        # Not through a buffer, whose lock this thread would hold when the interpreter ends.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        send(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace_seconds)
        send(signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: send(signal.SIGTERM))
    code = child.wait()
    send(signal.SIGKILL)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
