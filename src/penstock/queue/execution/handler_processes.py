"""Processes for isolated handlers: the frames they speak, and the pool that owns them.

Frames are JSON (`penstock.kernel.frames`).

| from | frame | when |
|---|---|---|
| worker | `RunHandler` | a process is idle |
| process | `HandlerStarted` | the handler is found and is called now |
| process | `HandlerProgress` | the handler has reported progress |
| worker | `StopHandler` | the handler should end |
| process | `HandlerFinished` | it has; the process is idle |

A `HandlerProcessPool` belongs to one worker. An attempt borrows a process, which runs one
handler at a time, and returns it; the next attempt, of whatever type, finds it warm. A process
that crashed, was killed or did not stop is never used again.

| a process is | leaves by |
|---|---|
| starting, for at most `START_SECONDS` | `HandlerStarted`; or it is killed |
| running | `HandlerFinished`, then idle; crash, or `kill` |
| idle | lent again; or the worker ends, and its input is closed |

- It is a `FramedChild` (`penstock.kernel.framed_child`): to kill it is to kill its process group,
  it is dead when it has ended though a process that it forked lives, and when its worker is gone it
  ends with all that it has started. No signal of a terminal reaches it.
- What handlers print goes to the worker's log, line by line.
- It costs no requests. A worker that has no isolated handler starts nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Self

import msgspec

from penstock.kernel.framed_child import (
    FrameCodec,
    FramedChild,
    StartedProcess,
)
from penstock.kernel.frames import framed
from penstock.queue.execution.handlers import HandlerAddress
from penstock.queue.ledger import NULL, LedgerFailure

FRAME_BYTES_MAX: Final = 256 * 1024 * 1024

ClassName = tuple[str, str]
"""The module and the qualified name of a class."""


class RunHandler(msgspec.Struct, tag_field="say", tag="run", frozen=True):
    """Run a handler."""

    handler: HandlerAddress
    path: tuple[str, ...]
    """Where modules are looked for."""
    type: str
    id: str
    attempt: int
    input: msgspec.Raw
    retried: tuple[ClassName, ...]
    """The classes of errors that are retried."""
    trace: str = ""
    """The span of the attempt, as in the header `traceparent`."""
    never: tuple[ClassName, ...] = ()
    """The classes of errors that are not, whatever `retried` says."""


class StopHandler(msgspec.Struct, tag_field="say", tag="stop", frozen=True):
    """Interrupt the handler."""


class HandlerStarted(msgspec.Struct, tag_field="say", tag="begun", frozen=True):
    """The handler is called now: its time counts from here."""


class HandlerProgress(msgspec.Struct, tag_field="say", tag="report", frozen=True):
    """What the handler says of how far it is."""

    done: float
    total: float
    message: str


class HandlerFinished(msgspec.Struct, tag_field="say", tag="over", frozen=True):
    """The handler has ended: with a result, a failure or a wish, or stopped if with none."""

    result: msgspec.Raw = NULL
    has_result: bool = False
    failure: LedgerFailure | None = None
    is_retried: bool = False
    again_seconds: float | None = None
    """It is to be called again after so long, and has not failed."""
    reason: str = ""


ToChild = RunHandler | StopHandler
ToWorker = HandlerStarted | HandlerProgress | HandlerFinished
to_child: Final[msgspec.json.Decoder[ToChild]] = msgspec.json.Decoder(ToChild)
to_worker: Final[msgspec.json.Decoder[ToWorker]] = msgspec.json.Decoder(ToWorker)


def encode(said: ToChild | ToWorker) -> bytes:
    """As it is sent."""
    return framed(msgspec.json.encode(said))


START_SECONDS: Final = 120.0
"""How long a process may take until its handler is called, the import of its module included."""
_END_SECONDS: Final = 5.0
_WHO: Final = "The process of the handler"
_LINE_CHARACTERS_MAX: Final = 2_000
_BUFFER_BYTES: Final = 65_536

_log = logging.getLogger(__name__)


_CODEC: Final = FrameCodec(encode, to_worker.decode, FRAME_BYTES_MAX, ChildProcessError)


class HandlerProcess(FramedChild[ToWorker]):
    """One process for handlers. Made by `HandlerProcessPool`."""

    def __init__(self, process: StartedProcess) -> None:
        super().__init__(process, _CODEC)
        self._output = asyncio.StreamReader()
        self._log_task: asyncio.Task[None] | None = None
        self._doing = "a handler"
        self.has_run = False
        """Whether it has run a handler before."""
        self.has_begun = False
        """Whether the handler that it was given last was called."""
        self.is_idle = True
        """Whether it may be used: it lives, and no handler is in it."""

    @classmethod
    async def start(cls, inherited: tuple[int, ...] = ()) -> HandlerProcess:
        """A new process, with these descriptors."""
        process, connection = StartedProcess.start(
            (sys.executable, "-m", "penstock.queue.execution.child"),
            environment={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=inherited,
        )
        assert process.output is not None
        child = cls(process)
        try:
            await child.open(connection)
            pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(child._output), process.output
            )
        except BaseException:
            process.output.close()
            await child.destroy()
            raise
        child._log_task = asyncio.get_running_loop().create_task(child._repeat_output(pipe))
        return child

    @property
    def is_alive(self) -> bool:
        return self.is_open and not self.ended.is_set()

    async def run(
        self,
        call: RunHandler,
        *,
        begun: Callable[[], None],
        said: Callable[[HandlerProgress], None],
    ) -> HandlerFinished:
        """Run a handler to its end. Raises `ChildProcessError` if the process dies."""
        self.is_idle = False
        self._doing = f"task {call.id}"
        self.has_begun = False
        try:
            async with asyncio.timeout(START_SECONDS) as limit:
                self.tell(call)
                while True:
                    match await self.hear():
                        case HandlerStarted():
                            self.has_begun = self.has_run = True
                            limit.reschedule(None)
                            begun()
                        case HandlerProgress() as report:
                            said(report)
                        case HandlerFinished() as over:
                            self.has_run = self.is_idle = True
                            return over
                        case None:
                            self.kill()  # If it has only closed its end.
                            raise ChildProcessError(await self.why_ended(_WHO))
        except TimeoutError as error:
            if self.has_begun:
                raise
            text = f"The process of the handler did not start within {START_SECONDS:g} s."
            raise TimeoutError(text) from error

    def interrupt(self, *, at_once: bool) -> bool:
        """Interrupt the handler, or kill it; whether it had not ended yet."""
        if self.is_idle:
            return False
        if at_once:
            self.kill()
        else:
            self.tell(StopHandler())
        return True

    def kill(self) -> None:
        self.is_idle = False
        super().kill()

    async def end(self) -> None:
        """Have it end: by itself if it is idle, or killed. Within a bound."""
        if self.is_idle:
            self.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await self.ended.wait()
        self.is_idle = False
        await self.destroy()
        if self._log_task is not None:
            # Somebody who has left the group may hold the pipe for ever.
            await asyncio.wait((self._log_task,), timeout=_END_SECONDS)
            self._log_task.cancel()

    async def _repeat_output(self, pipe: asyncio.ReadTransport) -> None:
        """What it prints, in the worker's log."""
        rest = b""
        try:
            while chunk := await self._output.read(_BUFFER_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _LINE_CHARACTERS_MAX:
                    lines, rest = [*lines, rest], b""
                self._print(lines)
            self._print([rest] if rest else [])
        finally:
            pipe.close()

    def _print(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip()[:_LINE_CHARACTERS_MAX]
            _log.info("%s: %s", self._doing, text)


class HandlerProcessPool:
    """The processes of one worker's handlers."""

    def __init__(self, *, inherited: tuple[int, ...] = ()) -> None:
        """Each of them has these descriptors: the lock of the worker, which lives as they do."""
        self._inherited = inherited
        self._idle: list[HandlerProcess] = []
        self._all: set[HandlerProcess] = set()
        self._reaped: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[HandlerProcess]:
        """A child for one attempt, warm if there is one."""
        child = None
        while self._idle and child is None:
            child = self._idle.pop()
            if not child.is_alive:
                self._reap(child)
                child = None
        if child is None:
            child = await HandlerProcess.start(self._inherited)
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

    def _reap(self, child: HandlerProcess) -> None:
        if child in self._all:
            self._all.discard(child)
            task = asyncio.get_running_loop().create_task(child.end())
            self._reaped.add(task)
            task.add_done_callback(self._reaped.discard)
