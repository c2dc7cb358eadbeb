"""One child process as its runtime sees it: started, spoken to, signalled, and never left behind.

A child is the head of its own process group. A thread waits for its end, and then kills whatever
is left of the group, and of the session that it began, before the number of the child is free for
others; so no signal of ours can reach a stranger. `ended` is set when the child is gone and its
group has been killed.

A child of untrusted work runs as a user of its own, and is started through `lowering`. What it has
started is found by that user, wherever it has hidden itself, and killed before `ended` is set. It
prints to its log only, which is opened here: the user needs no way to it.

What a child says is read by the decoder of its kind: `frames.from_child` for children that run
users' code, that of `penstock.runtimes.spark.frames` for hosts of Spark.

The child is made by the thread of the event loop, because the kernel of Linux ends it with that
thread (`penstock.kernel.parents`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec

from penstock.kernel.errors import InvalidInput, WorkFailed, WorkReleased
from penstock.kernel.wire import UNREADABLE
from penstock.runtimes import lowering
from penstock.runtimes.cgroups import Cgroup
from penstock.runtimes.frames import Unframing, framed, heard
from penstock.runtimes.guard import (
    Guard,
    kill_session,
    kill_user,
    resident_bytes,
    session_members,
    user_processes,
)

_READ_BYTES: Final = 65_536
_LAST_WORDS_SECONDS: Final = 0.1
"""How long after its end what a child has said is still read."""
_END_SECONDS: Final = 5.0
_CANCELS_MAX: Final = 100


Heard = TypeVar("Heard")
"""What a child may say: a union of frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a child is started."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    user: int = 0
    """The user of untrusted work that it runs as; 0 for our own."""
    log: str = ""
    """Where a child of another user prints to; empty for nowhere."""
    cgroup: Cgroup | None = None
    """The control group that it runs in, which ends with it."""


class Offspring(Generic[Heard]):
    """A child process, and the socket to it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        guard: Guard,
        loop: asyncio.AbstractEventLoop,
        *,
        decoder: msgspec.json.Decoder[Heard],
        user: int = 0,
        cgroup: Cgroup | None = None,
    ) -> None:
        self._decoder = decoder
        self._user = user
        self._cgroup = cgroup
        self._has_overrun = False
        self._process = process
        self._guard = guard
        self._loop = loop
        self._lock = threading.Lock()
        self._is_reaped = False
        self._unframing = Unframing()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.ended = asyncio.Event()
        self.tasks_begun = 0
        threading.Thread(target=self._wait, name="penstock-child", daemon=True).start()

    @classmethod
    async def born(
        cls, start: Start, *, guard: Guard, decoder: msgspec.json.Decoder[Heard]
    ) -> Offspring[Heard]:
        """Start a child. The number of this process is added to the command."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = _started(start, theirs, guard)
        except OSError as error:
            ours.close()
            if start.cgroup is not None:
                await asyncio.to_thread(start.cgroup.remove)
            what = error.filename or start.command[0]
            raise WorkReleased(
                f"No child process can be started: {error.strerror or error} ({what})."
            ) from error
        loop = asyncio.get_running_loop()
        child = cls(process, guard, loop, decoder=decoder, user=start.user, cgroup=start.cgroup)
        try:
            child._reader, child._writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            await child.destroy()
            raise
        return child

    @property
    def pid(self) -> int:
        """The number of the process, and of its group."""
        return self._process.pid

    def tell(self, frame: msgspec.Struct) -> None:
        """Say something, without waiting until there is room for it."""
        assert self._writer is not None
        self._writer.write(framed(frame))

    async def say(self, frame: msgspec.Struct) -> None:
        """Say something; whether the child has heard it shows in what it says."""
        assert self._writer is not None
        self.tell(frame)
        # The end of a child shows when it is listened to.
        with suppress(ConnectionError):
            await self._writer.drain()

    async def hear(self) -> Heard | None:
        """The next thing that the child says; None if it is gone. Cancelling loses nothing."""
        assert self._reader is not None
        try:
            while (body := self._unframing.body()) is None:
                more = await self._reader.read(_READ_BYTES)
                if not more:
                    return None
                self._unframing.feed(more)
            said = heard(body, self._decoder)
        except ConnectionError:
            return None
        except (*UNREADABLE, InvalidInput) as error:
            self.send_signal(signal.SIGKILL)
            raise WorkFailed(f"The child process said what nobody understands: {error}.") from error
        return said

    @property
    def is_in_cgroup(self) -> bool:
        """Whether the kernel bounds what all its processes use together."""
        return self._cgroup is not None

    @property
    def has_overrun(self) -> bool:
        """Whether processes of it were ended because they used more memory than they may."""
        if not self._has_overrun and self._cgroup is not None:
            self._has_overrun = self._cgroup.has_overrun()
        return self._has_overrun

    def bytes_used(self) -> int:
        """How much memory its processes use together, as far as they can be found. It blocks."""
        found = user_processes(self._user) if self._user else session_members(self.pid)
        return sum(map(resident_bytes, found))

    def end_overrun(self) -> None:
        """End it because it uses more memory than it may."""
        self._has_overrun = True
        self.send_signal(signal.SIGKILL)

    @property
    def is_closed(self) -> bool:
        """Whether nothing is left of it, here either."""
        return self.ended.is_set() and (self._writer is None or self._writer.is_closing())

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the child and all in its group, if it is still there."""
        with self._lock:
            if not self._is_reaped:
                self._kill_group(number)

    async def destroy(self) -> None:
        """End the child by force; returns when it is gone, also if this is cancelled."""
        self.send_signal(signal.SIGKILL)
        cancelled: asyncio.CancelledError | None = None
        for _ in range(_CANCELS_MAX):
            try:
                async with asyncio.timeout(_END_SECONDS):
                    await self.ended.wait()
            except asyncio.CancelledError as error:
                cancelled = error
                continue
            except TimeoutError:
                # The kernel has it in hand; it runs nothing of the user any more.
                pass
            break
        self._close()
        if cancelled is not None:
            raise cancelled

    async def why_ended(self, who: str = "The child process of the task") -> str:
        """How a child that is gone has ended, for people."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self.ended.wait()
        code = self._process.returncode
        if code is None:
            return f"{who} closed its connection."
        if code >= 0:
            return f"{who} ended with exit code {code} before the function had returned."
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = (
            "; if nobody did that, the machine was probably short of memory"
            if -code == signal.SIGKILL
            else ""
        )
        return f"{who} was killed by {name}{hint}."

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            # Known to have ended, and its number still taken.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        if self._user:
            # While the guard still knows of it. Whether any is left is seen by whoever gives the
            # user back.
            with suppress(OSError):
                kill_user(self._user)
        with self._lock:
            self._kill_group(signal.SIGKILL)
            kill_session(self._process.pid)
            self._guard.forget(self._process.pid)
            self._process.wait()
            self._is_reaped = True
        if self._cgroup is not None:
            self._has_overrun = self.has_overrun
            self._cgroup.remove()
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._has_ended)

    def _kill_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _has_ended(self) -> None:
        self.ended.set()
        # A process that has left the group may hold the socket open.
        self._loop.call_later(_LAST_WORDS_SECONDS, self._close)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()


def _started(start: Start, connection: socket.socket, guard: Guard) -> subprocess.Popen[bytes]:
    command = [*start.command, str(os.getpid())]
    if start.user:
        # As root until it has given that up: the user may not be able to run our own Python.
        command = [sys.executable, "-I", "-S", lowering.__file__, str(start.user), *command]
    with _printing(start) as prints:
        process = subprocess.Popen(  # noqa: S603 - the caller's own
            command,
            stdin=connection.fileno(),
            env=start.environment,
            start_new_session=True,
            **prints,
        )
    try:
        guard.watch(process.pid, user=start.user)
        if start.cgroup is not None:
            # Before it is told of any work: nothing of the user has run.
            start.cgroup.admit(process.pid)
    except OSError:
        process.kill()
        # Before its number is free for others, whom the guard would kill.
        guard.forget(process.pid)
        process.wait()
        raise
    return process


@contextmanager
def _printing(start: Start) -> Iterator[dict[str, Any]]:
    """Where a child prints to. One of another user has nothing of ours, such as a terminal."""
    if not start.user:
        yield {"stdout": subprocess.DEVNULL}
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    file = (
        os.open(start.log, flags | os.O_CREAT, 0o640) if start.log else os.open(os.devnull, flags)
    )
    try:
        yield {"stdout": file, "stderr": file}
    finally:
        os.close(file)
