"""Handlers in processes of their own: started, kept warm, told to stop, killed.

`Children` belongs to one worker. An attempt borrows a child, one process that runs one handler at a
time, and gives it back; the next attempt, of whatever type, finds it warm. A child that crashed,
was killed or did not stop is never used again.

| a child is | leaves by |
|---|---|
| starting, for at most `START_SECONDS` | `Begun`; or it is killed |
| running | `Over`, then idle; crash, or `kill` |
| idle | lent again; or the worker ends, and its input is closed |

- A child is the head of a session of its own. To kill it is to kill its process group: whatever it
  has started goes with it, unless that has left the group. No signal of a terminal reaches it.
- A child is dead when its process has ended, though a process that it forked may hold its pipes
  open: what is in the pipe by then is read for `_LAST_WORDS_SECONDS`, and the pipe is closed.
- A child whose worker is gone ends, with all that it has started: its input is closed.
- What handlers print goes to the worker's log, line by line.
- It costs no requests. A worker that has no isolated handler starts nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Self

from penstock.kernel.wire import UNREADABLE
from penstock.queue.running.frames import (
    Begun,
    Over,
    Report,
    Run,
    Stop,
    frame,
    read_frame,
    to_worker,
)

START_SECONDS: Final = 120.0
"""How long a process may take until its handler is called, the import of its module included."""
_END_SECONDS: Final = 5.0
_LAST_WORDS_SECONDS: Final = 1.0
_LINE_CHARACTERS_MAX: Final = 2_000
_BUFFER_BYTES: Final = 65_536

_log = logging.getLogger(__name__)


class _Watch(asyncio.subprocess.SubprocessStreamProtocol):
    """Tells when a process has ended. `Process.wait` also waits for all who hold its pipes."""

    def __init__(self, pipe: asyncio.ReadTransport) -> None:
        self._running = asyncio.get_running_loop()
        super().__init__(limit=_BUFFER_BYTES, loop=self._running)
        self._frames = pipe
        self.ended = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.ended.set()
        # Who listens reads what is there, and then hears the end, whoever else could write.
        self._running.call_later(_LAST_WORDS_SECONDS, self._frames.close)


class Child:
    """One process for handlers. Made by `Children`."""

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        watch: _Watch,
        reader: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._transport = transport
        self._process = asyncio.subprocess.Process(transport, watch, loop)
        self._ended = watch.ended
        self._reader = reader
        self._pipe = pipe
        self._log_task = loop.create_task(self._repeat_output())
        self._doing = "a handler"
        self.has_run = False
        """Whether it has run a handler before."""
        self.has_begun = False
        """Whether the handler that it was given last was called."""
        self.is_idle = True
        """Whether it may be used: it lives, and no handler is in it."""

    @classmethod
    async def start(cls, inherited: tuple[int, ...] = ()) -> Child:
        """A new process, with these descriptors."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        pipe: asyncio.ReadTransport | None = None
        ours, theirs = os.pipe()
        file = os.fdopen(ours, "rb", buffering=0)
        try:
            pipe, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), file
            )
            watch = _Watch(pipe)
            transport, _ = await loop.subprocess_exec(
                lambda: watch,
                sys.executable,
                "-m",
                "penstock.queue.running.child",
                str(theirs),
                str(os.getpid()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs, *inherited),
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        except BaseException:
            if pipe is not None:
                pipe.close()
            file.close()
            raise
        finally:
            os.close(theirs)
        return cls(transport, watch, reader, pipe)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and not self._reader.at_eof()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(
        self, call: Run, *, begun: Callable[[], None], said: Callable[[Report], None]
    ) -> Over:
        """Run a handler to its end. Raises `ChildProcessError` if the process dies."""
        self.is_idle = False
        self._doing = f"task {call.id}"
        self.has_begun = False
        try:
            async with asyncio.timeout(START_SECONDS) as limit:
                self._send(call)
                while True:
                    match await self._hear():
                        case Begun():
                            self.has_begun = self.has_run = True
                            limit.reschedule(None)
                            begun()
                        case Report() as report:
                            said(report)
                        case Over() as over:
                            self.has_run = self.is_idle = True
                            return over
                        case None:
                            raise ChildProcessError(await self._obituary())
        except TimeoutError as error:
            if self.has_begun:
                raise
            text = f"The process of the handler did not begin within {START_SECONDS:g} s."
            raise TimeoutError(text) from error

    def tell(self, *, at_once: bool) -> bool:
        """Interrupt the handler, or kill it; whether it had not ended yet."""
        if self.is_idle:
            return False
        if at_once:
            self.kill()
        else:
            self._send(Stop())
        return True

    def kill(self) -> None:
        """End the process now, with what it has started."""
        self.is_idle = False
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Have it end: by itself if it is idle, or killed. Within a bound."""
        assert self._process.stdin is not None
        if not self.is_idle:
            self.kill()
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            self.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await self._ended.wait()
        self.kill()
        with suppress(BrokenPipeError, ConnectionResetError):
            await self._process.stdin.wait_closed()
        # Somebody who has left the group may hold the pipe for ever.
        await asyncio.wait((self._log_task,), timeout=_END_SECONDS)
        self._log_task.cancel()
        self._pipe.close()
        self._transport.close()

    def _send(self, said: Run | Stop) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, RuntimeError):  # It has ended: who listens to it will hear.
            self._process.stdin.write(frame(said))

    async def _hear(self) -> Begun | Report | Over | None:
        body = await read_frame(self._reader)
        if body is None:
            return None
        try:
            return to_worker.decode(body)
        except UNREADABLE:
            return None  # The handler has written into what is not its own.

    async def _obituary(self) -> str:
        """How it ended, in a sentence."""
        self.kill()  # What is left of it, or if it has only closed its end.
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            return "The process of the handler cannot be heard any more."
        code = self._process.returncode
        assert code is not None
        if code >= 0:
            return f"The process ended with exit code {code} before its handler did."
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        maybe = ", perhaps because memory ran out" if name == "SIGKILL" else ""
        return f"The process of the handler was killed by {name}{maybe}."

    async def _repeat_output(self) -> None:
        """What it prints, in the worker's log."""
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(_BUFFER_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LINE_CHARACTERS_MAX:
                lines, rest = [*lines, rest], b""
            self._print(lines)
        self._print([rest] if rest else [])

    def _print(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip()[:_LINE_CHARACTERS_MAX]
            _log.info("%s: %s", self._doing, text)


class Children:
    """The processes of one worker's handlers."""

    def __init__(self, *, inherited: tuple[int, ...] = ()) -> None:
        """Each of them has these descriptors: the lock of the worker, which lives as they do."""
        self._inherited = inherited
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self._reaped: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Child]:
        """A child for one attempt, warm if there is one."""
        child = None
        while self._idle and child is None:
            child = self._idle.pop()
            if not child.is_alive:
                self._reap(child)
                child = None
        if child is None:
            child = await Child.start(self._inherited)
            self._all.add(child)
        try:
            yield child
        finally:
            if child.is_idle and child.is_alive:
                self._idle.append(child)
            else:
                self._reap(child)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all of them. Within a bound."""
        for child in tuple(self._all):
            self._reap(child)
        while self._reaped:
            await asyncio.wait(tuple(self._reaped))

    def _reap(self, child: Child) -> None:
        if child in self._all:
            self._all.discard(child)
            task = asyncio.get_running_loop().create_task(child.close())
            self._reaped.add(task)
            task.add_done_callback(self._reaped.discard)
