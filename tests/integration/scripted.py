"""An HTTP server that does what a test tells it, byte by byte, on a plain loopback socket.

Each request that arrives is given to the next script; the last script is used again and again.
A script is an async function of a `Call`: it may read the body, write anything, close, reset or
say nothing. The server runs in the loop of the test and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Self
from urllib.parse import parse_qsl, unquote

from penstock.kernel.clock import Clock, SystemClock
from penstock.store.s3.backend import S3Store
from penstock.store.s3.config import s3_config
from penstock.store.s3.signing import Credentials
from penstock.store.s3.transport import TransportLimits

DATE = "Sun, 08 Nov 2026 08:49:37 GMT"
MODIFIED = "Sat, 07 Nov 2026 08:49:37 GMT"
SERVERS_TIME = parsedate_to_datetime(DATE).timestamp()
KEYS = Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI")
SHORT = TransportLimits(answer_seconds=0.2)


class MachineClock(SystemClock):
    """The clock of a machine whose wall is so far from what the scripted server believes."""

    def __init__(self, off_seconds: float = 0.0) -> None:
        self._wall = SERVERS_TIME + off_seconds

    def wall(self) -> float:
        return self._wall


@dataclass
class Call:
    """One request, as far as it has been read, and the connection to answer on."""

    method: str
    target: str
    headers: dict[str, str]
    connection: int
    reader: asyncio.StreamReader = field(repr=False)
    writer: asyncio.StreamWriter = field(repr=False)
    body: bytes | None = None
    ended: bool = False

    @property
    def path(self) -> str:
        return unquote(self.target.partition("?")[0])

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))

    async def read(self) -> bytes:
        """The body of the request."""
        if self.body is None:
            self.body = await self.reader.readexactly(int(self.headers.get("content-length", 0)))
        return self.body

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def close(self) -> None:
        """End the connection in the usual way."""
        self.ended = True
        self.writer.close()

    async def reset(self) -> None:
        """End the connection rudely: the other side gets ECONNRESET."""
        self.ended = True
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Wait, without a word, until the other side has ended the connection."""
        self.ended = True
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            return


Script = Callable[[Call], Awaitable[None]]


def message(
    status: int = 200,
    body: bytes = b"",
    *,
    date: str | None = DATE,
    length: int | None = -1,
    **headers: str,
) -> bytes:
    """An answer as bytes. `length` is announced; None announces nothing. `x_y` is header `x-y`."""
    lines = [f"HTTP/1.1 {status} Whatever"]
    if date is not None:
        lines.append(f"Date: {date}")
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length < 0 else length}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def says(data: bytes, *, close: bool = False) -> Script:
    """Read the whole request, then answer these bytes."""

    async def script(call: Call) -> None:
        await call.read()
        await call.write(data)
        if close:
            await call.close()

    return script


def answers(
    status: int = 200,
    body: bytes = b"",
    *,
    date: str | None = DATE,
    length: int | None = -1,
    **headers: str,
) -> Script:
    """Read the whole request, then answer. To HEAD, the body is only announced."""

    async def script(call: Call) -> None:
        await call.read()
        answer = message(status, body, date=date, length=length, **headers)
        await call.write(answer[: len(answer) - len(body)] if call.method == "HEAD" else answer)

    return script


def s3_error(
    status: int, code: str, text: str = "No.", *, date: str | None = DATE, **headers: str
) -> Script:
    """An error as S3 writes it."""
    return answers(status, error_xml(code, text), date=date, length=-1, **headers)


def error_xml(code: str, text: str = "No.") -> bytes:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{text}</Message></Error>"
    ).encode()


def fine_object(body: bytes = b"hello", *, etag: str = '"e1"', date: str | None = DATE) -> Script:
    """What a GET or HEAD is answered when all is well."""
    return answers(200, body, date=date, ETag=etag, Last_Modified=MODIFIED)


class ScriptedServer:
    """The server; `async with` starts and stops it."""

    def __init__(self, *scripts: Script, host: str = "127.0.0.1", greet: bool = True) -> None:
        self.scripts = list(scripts)
        self.calls: list[Call] = []
        self.connections = 0
        self.open_now = 0
        self.open_most = 0
        self.greet = greet
        """False: every connection is closed as soon as it is there."""
        self._host = host
        self._handlers: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def endpoint(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    def store(
        self,
        *,
        clock: Clock | None = None,
        limits: TransportLimits | None = None,
        url: str = "s3://bucket",
    ) -> S3Store:
        """A client of this server."""
        mark = "&" if "?" in url else "?"
        config = s3_config(f"{url}{mark}endpoint={self.endpoint}", environment={}, credentials=KEYS)
        return S3Store(config, clock=clock or MachineClock(), limits=limits or TransportLimits())

    async def only(self, count: int) -> None:
        """Wait until no more than this many connections are open."""
        while self.open_now > count:
            await asyncio.wait(self._handlers, return_when=asyncio.FIRST_COMPLETED)

    async def all_gone(self) -> None:
        """Wait until every connection has ended."""
        await self.only(0)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self._host, 0, backlog=1000)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=5)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        self._writers.add(writer)
        self.connections += 1
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        try:
            await self._converse(self.connections, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open_now -= 1
            writer.close()
            self._writers.discard(writer)
            self._handlers.discard(task)

    async def _converse(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while self.greet:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = head[0].split(" ")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            lowered = {name.lower(): value for name, value in headers.items()}
            call = Call(method, target, lowered, number, reader, writer)
            self.calls.append(call)
            place = min(len(self.calls), len(self.scripts)) - 1
            await self.scripts[place](call)
            if call.ended:
                return
            await call.read()
