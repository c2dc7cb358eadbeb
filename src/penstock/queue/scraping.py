"""The door through which Prometheus reads a worker's figures: `GET /metrics`, and nothing else.

A small server of its own, so that a worker needs no web framework. It answers one request a
connection, reads at most `REQUEST_BYTES_MAX` of it within `REQUEST_SECONDS`, holds
`CONNECTIONS_MAX` at a time so that nobody takes the worker's files with them, and knows no secrets;
all the same it listens on loopback only, unless somebody says otherwise.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from penstock.kernel.errors import InvalidInput
from penstock.kernel.service import Service

REQUEST_BYTES_MAX: Final = 16 * 1024
REQUEST_SECONDS: Final = 5.0
CONNECTIONS_MAX: Final = 64
_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class MetricsDoor(Service):
    """Answers scrapes with what `text` gives, until it is stopped."""

    def __init__(self, text: Callable[[], str], *, host: str, port: int) -> None:
        self._text = text
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._held = 0

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None, "it was started"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        try:
            self._server = await asyncio.start_server(
                self._answer, self._host, self._port, limit=REQUEST_BYTES_MAX
            )
        except OSError as error:
            why = error.strerror or str(error)
            raise InvalidInput(
                f"The figures cannot be shown on {self._host}:{self._port}: {why}.",
                hint="Give another --metrics-port, or another --metrics-host.",
            ) from error

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(REQUEST_SECONDS):
                    await self._server.wait_closed()
            self._server = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._held >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self._held += 1
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answered(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # Who asks so gets no answer.
        finally:
            self._held -= 1
            writer.close()

    def _answered(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        status, body = http.HTTPStatus.OK, b""
        if method not in (b"GET", b"HEAD"):
            status, body = http.HTTPStatus.METHOD_NOT_ALLOWED, b"Only GET is answered.\n"
        elif path != b"/metrics":
            status, body = http.HTTPStatus.NOT_FOUND, b"The figures are at /metrics.\n"
        else:
            body = self._text().encode()
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Content-Type: {_TYPE}",
            f"Content-Length: {len(body)}",
            "Connection: close",
            "\r\n",
        )
        return "\r\n".join(lines).encode() + (b"" if method == b"HEAD" else body)
