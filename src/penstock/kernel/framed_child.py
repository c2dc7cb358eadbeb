"""Children that a parent speaks to: started, heard, signalled, and ended by force.

A `FramedChild` runs isolated handlers of the queue, or functions of the runtimes, or is a host of
Spark. This knows no pool and no protocol: who uses it brings the messages (`FrameCodec`), and
keeps, lends and replaces children by rules of its own. `FrameChannel` is the conversation alone.

- It is the head of a session and of a process group of its own, and its standard input is a socket,
  over which both sides send frames (`penstock.kernel.frames`). When the parent ends, in whatever
  way, the socket closes: the child ends itself, and on Linux the kernel ends it (`die_with`), so it
  is made by the thread of the event loop.
- A thread waits for its end, and then kills whatever is left of the group before the child's pid is
  free for others: no signal of ours reaches a stranger. `ended` is set when all that is done.
- A process that it has forked may hold the socket open: what is there is read for
  `_LAST_WORDS_SECONDS` after the end, and no longer.
- What sends something that is no message is killed.

A crash of the parent leaves nothing but what has left the group and the session.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, Self, TypeVar

from penstock.kernel.document_format import UNREADABLE
from penstock.kernel.errors import InvalidInput
from penstock.kernel.frames import READ_BYTES, FrameDecoder

_LAST_WORDS_SECONDS: Final = 1.0
"""How long after its end what a child has said is still read."""
_END_SECONDS: Final = 5.0
_CANCELS_MAX: Final = 100

Message = TypeVar("Message")
"""What the other side may say: a union of structs."""


@dataclass(frozen=True, slots=True)
class FrameCodec(Generic[Message]):
    """What two processes say to each other."""

    encode: Callable[[Any], bytes]
    """A message as a whole frame."""
    decode: Callable[[bytes], Message]
    bytes_max: int
    """How large a message of the other side may be."""
    invalid: Callable[[str], Exception] = ConnectionError
    """What is raised where the other side has sent what is no message."""


class FrameChannel(Generic[Message]):
    """Messages over a socket, to and from another process."""

    def __init__(self, codec: FrameCodec[Message]) -> None:
        self._codec = codec
        self._unframing = FrameDecoder(bytes_max=codec.bytes_max)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, connection: socket.socket) -> None:
        """Use this socket; it is closed if this fails or is cancelled."""
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        except BaseException:
            connection.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the other side may still say something."""
        return self._reader is not None and not self._reader.at_eof()

    def close(self) -> None:
        """Close the connection."""
        if self._writer is not None:
            self._writer.transport.abort()

    def tell(self, message: object) -> None:
        """Send a message, without waiting for room in the buffer."""
        assert self._writer is not None
        self._writer.write(self._codec.encode(message))

    def hand(self, message: object, descriptor: int) -> None:
        """Send a small message with an open file, while nothing else is being sent."""
        assert self._writer is not None
        with suppress(OSError), self._writer.get_extra_info("socket").dup() as connection:
            socket.send_fds(connection, [self._codec.encode(message)], [descriptor])

    async def say(self, message: object) -> None:
        """Send a message; whether it arrived shows in what is received."""
        assert self._writer is not None
        self.tell(message)
        # That the other side has ended shows when receiving.
        with suppress(ConnectionError):
            await self._writer.drain()

    async def hear(self) -> Message | None:
        """The next message; None if the connection is closed. Cancelling loses nothing."""
        assert self._reader is not None
        try:
            while (body := self._unframing.body()) is None:
                more = await self._reader.read(READ_BYTES)
                if not more:
                    return None
                self._unframing.feed(more)
            return self._codec.decode(body)
        except ConnectionError:
            return None
        except (*UNREADABLE, InvalidInput) as error:
            self.garbled()
            why = f"The child process sent an invalid message: {error}."
            raise self._codec.invalid(why) from error

    def garbled(self) -> None:
        """The other side sent an invalid message."""
        self.close()


class StartedProcess:
    """A process that was started by this one. The methods block, and are called in this order."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self.output = process.stdout
        """What it prints, if that is a pipe."""
        self.returncode: int | None = None
        """How it has ended, once it was reaped; None if that is not known."""
        self._process = process

    @classmethod
    def start(
        cls, command: Sequence[str], *, environment: Mapping[str, str] | None, **options: Any
    ) -> tuple[Self, socket.socket]:
        """Start a command, to which the number of this process is added; and the socket to it."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = subprocess.Popen(  # noqa: S603 - the caller's own
                    [*command, str(os.getpid())],
                    stdin=theirs.fileno(),
                    env=environment,
                    start_new_session=True,
                    bufsize=0,
                    **options,
                )
        except BaseException:
            ours.close()
            raise
        return cls(process), ours

    def until_ended(self) -> None:
        """Return when it has ended. Its number is still taken."""
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()

    def kill_session(self) -> None:
        """Kill what is left of its session; only of those that may have other groups in it."""

    def reap(self) -> None:
        """Free its number."""
        self.returncode = self._process.wait()


class FramedChild(FrameChannel[Message]):
    """A child process, and the socket to it. Made in the event loop that speaks to it."""

    def __init__(self, process: StartedProcess, codec: FrameCodec[Message]) -> None:
        super().__init__(codec)
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._is_reaped = False
        self.ended = asyncio.Event()
        self._then: list[Callable[[], None]] = []
        threading.Thread(target=self._wait, name="penstock-child", daemon=True).start()

    async def open(self, connection: socket.socket) -> None:
        """Speak over this socket; the child is ended if this fails or is cancelled."""
        try:
            await super().open(connection)
        except BaseException:
            await self.destroy()
            raise

    @property
    def pid(self) -> int:
        """The number of the process, and of its group."""
        return self._process.pid

    @property
    def is_closed(self) -> bool:
        """Whether nothing is left of it, here either."""
        return self.ended.is_set() and (self._writer is None or self._writer.is_closing())

    def garbled(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the child and all in its group, if it is still there."""
        with self._lock:
            if not self._is_reaped:
                self._kill_group(number)

    def kill(self) -> None:
        """End it by force, without waiting."""
        self.send_signal(signal.SIGKILL)

    def when_ended(self, call: Callable[[], None]) -> None:
        """Have this called, from the event loop, when it is gone."""
        if self.ended.is_set():
            call()
        else:
            self._then.append(call)

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
                # SIGKILL is pending in the kernel; nothing of the user runs any more.
                pass
            break
        self.close()
        if self._writer is not None:
            with suppress(OSError):
                await self._writer.wait_closed()
        if cancelled is not None:
            raise cancelled

    async def why_ended(self, who: str) -> str:
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
        maybe = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
        return f"{who} was killed by {name}{maybe}."

    def at_end(self) -> None:
        """It has ended, and its number is still taken. Called in a thread, and may block."""

    def before_reaping(self) -> None:
        """Its group is killed, and its number is about to be free."""

    def after_reaping(self) -> None:
        """Its number is free; nobody has been told of its end."""

    def _wait(self) -> None:
        self._process.until_ended()
        self.at_end()
        with self._lock:
            self._kill_group(signal.SIGKILL)
            self._process.kill_session()
            self.before_reaping()
            self._is_reaped = True
        self._process.reap()
        self.after_reaping()
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._has_ended)

    def _kill_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _has_ended(self) -> None:
        self.ended.set()
        for call in self._then:
            call()
        # A process that has left the group may hold the socket open.
        self._loop.call_later(_LAST_WORDS_SECONDS, self.close)
