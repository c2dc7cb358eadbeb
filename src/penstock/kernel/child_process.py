"""Child processes that never outlive their parent, even one that is killed with `kill -9`.

`ChildProcess` starts a command below a small process, `penstock.kernel.parent_watch`, whose
standard input is a pipe that only the parent holds. When the parent ends, in whatever way, the
pipe closes; then the command gets SIGTERM, and SIGKILL after a grace period. The parent stops
it the same way: by closing the pipe. Nothing polls, and no process ids are written down.

The command is the head of a process group, and both signals go to the whole of it: what it has
started is ended with it, at the latest when the command itself has ended, unless it has left
the group. A parent that forks without an exec shares the pipe with its fork, which counts as
the parent as long as it lives. When the small process itself is killed with `kill -9`, the
command is killed too, on Linux; what the command has started is then on its own.

`OnDemandProcess` listens on a socket and starts its child when somebody connects, which finds the
socket, and who has connected, as they are. When the child ends, so has this: whoever looks after it
makes another.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.kernel import parent_watch
from penstock.kernel.service import Service


class ChildProcess(Service):
    """A command that runs until `stop`, or until this process ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        grace_seconds: float = 10.0,
        descriptor: int | None = None,
    ) -> None:
        """`descriptor` is an open file that the command has, too, under the same number."""
        self._command = command
        self._log = log
        self._environment = environment
        self._folder = folder
        self._grace_seconds = grace_seconds
        self._descriptor = descriptor
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
                parent_watch.__name__,
                str(self._grace_seconds),
                str(-1 if self._descriptor is None else self._descriptor),
                *self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=self._folder,
                pass_fds=() if self._descriptor is None else (self._descriptor,),
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


class OnDemandProcess(Service):
    """A socket that listens, and the child that serves it from the first connection on."""

    def __init__(self, address: tuple[str, int], make: Callable[[int], ChildProcess]) -> None:
        self._address = address
        self._make = make
        self._socket: socket.socket | None = None
        self._child: ChildProcess | None = None
        self._starting: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether it listens; the child, if it was started, has not ended."""
        if self._starting is not None and not self._starting.done():
            return True
        return self._socket is not None and (self._child is None or self._child.running)

    async def start(self) -> None:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self._socket = socket.create_server(self._address, family=family, backlog=128)
        asyncio.get_running_loop().add_reader(self._socket, self._connected)

    async def stop(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._child is not None:
            await self._child.stop()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> None:
        assert self._socket is not None, "it listens"
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        self._child = self._make(self._socket.fileno())
        self._starting = loop.create_task(self._child.start())
