"""Child processes that never outlive their parent, even one that is killed with `kill -9`.

`Leashed` starts a command below a small process, this module run with `-m`, whose standard input
is a pipe that only the parent holds. When the parent ends, in whatever way, the pipe closes; then
the command gets SIGTERM, and SIGKILL after a grace period. The parent stops it the same way: by
closing the pipe. Nothing polls, and no process ids are written down.

The command is the head of a process group, and both signals go to the whole of it: what it has
started is ended with it, at the latest when the command itself has ended, unless it has left the
group. A parent that forks without an exec shares the pipe with its fork, which counts as the
parent as long as it lives. When the small process itself is killed with `kill -9`, the command is
killed too, on Linux; what the command has started is then on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.kernel.parents import die_with
from penstock.kernel.service import Service


class Leashed(Service):
    """A command that runs until `stop`, or until this process ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        grace_seconds: float = 10.0,
    ) -> None:
        self._command = command
        self._log = log
        self._environment = environment
        self._folder = folder
        self._grace_seconds = grace_seconds
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        """Whether the command has been started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                __name__,
                str(self._grace_seconds),
                *self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
            )

    async def stop(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(self._grace_seconds + 5):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        # Let the pipe's transport see its end, or it complains when it is collected.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await self._process.stdin.wait_closed()
        self._process = None


def main(arguments: Sequence[str]) -> int:
    """Run a command until it ends or standard input does."""
    grace_seconds, command = float(arguments[0]), arguments[1:]
    # The parent decides when this ends; a Ctrl-C in its terminal must not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(  # noqa: S603 - the caller's own
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        # Harmless here: there is no other thread yet.
        preexec_fn=functools.partial(die_with, os.getpid()),  # noqa: PLW1509
    )

    def send(number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)

    def end_with_parent() -> None:
        # Not through a buffer, whose lock this thread would hold when the interpreter ends.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        send(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_seconds)
        send(signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: send(signal.SIGTERM))
    code = child.wait()
    send(signal.SIGKILL)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
