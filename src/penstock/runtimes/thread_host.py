"""The process in which functions of the runtime `thread` run, side by side: `-m … LOG PARENT`.

Its standard input is a socket over which it gets other sockets, one for each task, with the
same frames as `penstock.runtimes.child`. An `async def` runs on the event loop of this process,
with all others; a plain function has a thread of its own.

Asked to stop, an `async def` is cancelled where it awaits. In the thread of a plain function,
`Stopped` is raised between two instructions of Python: one that waits in C, as for a socket or
in `time.sleep`, notices when that returns. A function that has looked at `stopping` is left to
end by itself.

What does not end in its time cannot be ended alone: the runtime ends this process, and releases
the other tasks (`penstock.runtimes.thread`). All that tasks share is shared: memory, the
environment, the working directory, what functions leave running, which ends with the process.

The loop alone writes to sockets, so what interrupts a function never cuts a frame in two. A task
whose socket closes is asked to stop: nobody wants it. When the first socket closes the process
kills itself with its group, as children do.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import inspect
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from penstock.kernel.errors import WorkFailed
from penstock.kernel.frames import READ_BYTES, FrameDecoder
from penstock.kernel.parent_watch import die_with
from penstock.runtimes import user_code
from penstock.runtimes.base import ProducedOutput
from penstock.runtimes.child import RuntimeConnection, connected, end_all, end_of, redirect
from penstock.runtimes.frames import (
    BeginTask,
    ChildDone,
    ChildFailed,
    CredentialsReply,
    CredentialsRequest,
    EmitEvents,
    EventsReply,
    FromChild,
    StaleCode,
    StopTask,
    encode_frame,
    to_child,
)
from penstock.runtimes.log_router import LogRouter, TaskLogs
from penstock.runtimes.secrets import print_error
from penstock.runtimes.task import FunctionTask, Stopped, make_folders
from penstock.runtimes.user_code import FunctionInterrupter, LoadedCode, released, told

_RAISE = ctypes.pythonapi.PyThreadState_SetAsyncExc
user_code.CALLERS.add(__file__)


class _Interruption(FunctionInterrupter):
    """Ends a function that runs in a thread of its own, or on the loop."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def ask(self) -> None:
        with self._lock:
            super().ask()

    @contextmanager
    def shielded(self) -> Iterator[None]:
        # Nothing that may not be interrupted is done in the thread of a function.
        yield

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Within this, the function runs here, and is ended by an exception."""
        thread = ctypes.c_ulong(threading.get_ident())
        with self._lock:
            self._end = lambda: _RAISE(thread, ctypes.py_object(Stopped))
            if self.is_asked:
                self._end()
        try:
            yield
        finally:
            with self._lock:
                self._end = None
                # What was raised too late to be noticed is not for whatever comes after.
                _RAISE(thread, None)


class _Line(RuntimeConnection):
    """What the function of one task says, from any thread."""

    def __init__(self, run: _Run, interruption: FunctionInterrupter) -> None:
        super().__init__(run.connection, interruption)
        self._run = run

    def send(self, frame: FromChild) -> None:
        if not self.is_ours:
            super().send(frame)
        self._run.loop.call_soon_threadsafe(self._run.write, encode_frame(frame))

    def _answer(self, asked: EmitEvents | CredentialsRequest) -> EventsReply | CredentialsReply:
        if threading.current_thread() is threading.main_thread():
            raise WorkFailed(
                "This call blocks, and in an async def it blocks all other tasks of the process;"
                " write await asyncio.to_thread(task.emit, ...).",
                is_retried=False,
            )
        return super()._answer(asked)


class _Run:
    """One task, and the socket that it is talked of."""

    def __init__(self, host: ThreadHost, connection: socket.socket) -> None:
        self.connection = connection
        self.loop = asyncio.get_running_loop()
        self._host = host
        self._interruption = _Interruption()
        self._line = _Line(self, self._interruption)
        self._writer: asyncio.StreamWriter | None = None
        self._running: asyncio.Task[None] | None = None

    def write(self, body: bytes) -> None:
        """Called from the loop."""
        assert self._writer is not None
        self._writer.write(body)

    async def serve(self) -> None:
        """Until the socket is closed."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self.connection)
        unframing = FrameDecoder()
        with suppress(ConnectionError):
            while more := await reader.read(READ_BYTES):
                unframing.feed(more)
                while (body := unframing.body()) is not None:
                    self._hear(to_child.decode(body))
        self.ask()
        if self._running is not None:
            await asyncio.wait({self._running})
        self._writer.close()

    def ask(self) -> None:
        """Have the function end."""
        self._interruption.ask()

    def _hear(self, said: BeginTask | StopTask | EventsReply | CredentialsReply) -> None:
        match said:
            case BeginTask() as begin:
                self._running = self.loop.create_task(self._attempt(begin))
            case StopTask():
                self.ask()
            case answer:
                self._line.take(answer)

    async def _attempt(self, begin: BeginTask) -> None:
        if await asyncio.to_thread(self._host.code.is_stale):
            self._line.send(StaleCode())
            return
        log = TaskLogs(lambda: [begin.work.log] if begin.work.log else [])
        with self._host.printing.to(log):
            frame = await self._outcome(begin)
        end_of(frame, self._line.send)

    async def _outcome(self, begin: BeginTask) -> ChildDone | ChildFailed:
        try:
            return ChildDone(made=list(await self._called(begin)), is_clean=True)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the function's end
            is_asked = self._interruption.is_asked
            if is_asked and isinstance(error, asyncio.CancelledError):
                error = Stopped()
            print_error(error, begin.work.secrets.values())
            reason, is_retried = told(error)
            back = released(error, is_asked=is_asked)
            return ChildFailed(
                reason=reason,
                is_retried=is_retried,
                is_clean=True,
                is_released=back is not None,
                is_delayed=back is not None and back.is_delayed,
            )

    async def _called(self, begin: BeginTask) -> tuple[ProducedOutput, ...]:
        task = FunctionTask(begin.work, line=self._line, stopping=self._interruption.stopping)
        function = await asyncio.to_thread(self._host.prepared, begin)
        if inspect.iscoroutinefunction(function):
            returned = function(task)
        else:
            returned = await self._in_thread(lambda: function(task))
        if inspect.isawaitable(returned):
            running = asyncio.current_task()
            assert running is not None

            def end() -> None:
                running.cancel()

            with self._interruption.ends_by(end):
                if self._interruption.is_asked:
                    end()
                returned = await returned
        if self._interruption.is_asked and self._interruption.stopping.is_watched:
            # It has looked, and what it has made may be half of what it would have.
            raise Stopped
        return task.made(returned)

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        """Call it in a thread of its own, and wait for it however often this is cancelled."""
        ended: asyncio.Future[Any] = self.loop.create_future()

        def run() -> None:
            try:
                with self._interruption.in_this_thread():
                    returned = call()
            except BaseException as error:  # noqa: BLE001 - it is told where it is waited for
                self.loop.call_soon_threadsafe(ended.set_exception, _Carried(error))
            else:
                self.loop.call_soon_threadsafe(ended.set_result, returned)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(run,), daemon=True).start()
        try:
            return await ended
        except _Carried as carried:
            raise carried.error from None


class _Carried(Exception):
    """An error of a function on its way through the loop, which some would end."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class ThreadHost:
    """All tasks of this process."""

    def __init__(self, connection: socket.socket, printing: LogRouter) -> None:
        self.code = LoadedCode()
        self.printing = printing
        self._connection = connection
        self._importing = threading.Lock()
        self._runs: set[_Run] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def prepared(self, begin: BeginTask) -> user_code.Function:
        """The function, and the folders that it writes to. Blocks."""
        make_folders(begin.work)
        with self._importing:
            return self.code.function(begin.entry)

    async def serve(self) -> None:
        """Until the runtime is gone."""
        loop = asyncio.get_running_loop()
        self._connection.settimeout(0)
        loop.add_signal_handler(signal.SIGTERM, self._ask_all)
        over = loop.create_future()

        def more() -> None:
            with suppress(BlockingIOError):
                said, handed, _, _ = socket.recv_fds(
                    self._connection, READ_BYTES, 16, socket.MSG_CMSG_CLOEXEC
                )
                for each in handed:
                    self._open(socket.socket(fileno=each))
                if not said:
                    loop.remove_reader(self._connection)
                    over.set_result(None)

        loop.add_reader(self._connection, more)
        await over

    def _open(self, connection: socket.socket) -> None:
        run = _Run(self, connection)
        task = asyncio.get_running_loop().create_task(run.serve())
        self._runs.add(run)
        self._tasks.add(task)

        def done(_: object) -> None:
            self._runs.discard(run)
            self._tasks.discard(task)

        task.add_done_callback(done)

    def _ask_all(self) -> None:
        for each in tuple(self._runs):
            each.ask()


def main(arguments: Sequence[str]) -> None:
    """Run tasks for the process of this number; what no task prints goes to this log."""
    log, parent = arguments
    die_with(int(parent))
    connection = connected()
    redirect(log or os.devnull)
    printing = LogRouter()
    printing.install()
    with suppress(ConnectionError):
        asyncio.run(ThreadHost(connection, printing).serve())
    end_all()


if __name__ == "__main__":
    main(sys.argv[1:])
