"""One HTTP/1.1 connection on the event loop; its parser is that of Node.js, in C (httptools).

Carries one exchange at a time and knows nothing of S3. Called by `transport`, which decides what
is sent and which connection is kept.

What can go wrong is told apart by what it means for a write:
- `NotSent`: the request did not leave this machine.
- `NoAnswer`: it left, or part of it, and no complete answer came back in time.

Whoever gives up, by a time limit or by cancellation, leaves nothing open: a connection whose
exchange did not end is closed instead of used again, and so is one on which something arrives
that nobody asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import httptools

from penstock.kernel.errors import InvalidInput
from penstock.kernel.ports import watch_peer
from penstock.store.time import TimeSample

_LARGE_BYTES: Final = 1024 * 1024
"""An answer that announces more than this gets more time than others."""

_HEADERS_BYTES_MAX: Final = 64 * 1024

Headers = Sequence[tuple[str, str]]


class NotSent(Exception):
    """The request did not leave this machine."""


class NoAnswer(Exception):
    """The request may have arrived; no complete answer came back."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a whole exchange may take: a time, and the slowest that bodies may travel."""

    seconds: float
    bytes_per_second_min: int

    def for_bytes(self, count: int) -> float:
        return count / self.bytes_per_second_min


@dataclass(slots=True)
class Response:
    """The answer. Header names are lower-case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)
    sample: TimeSample | None = None
    """What the answer tells of the store's time, if it does."""


class HttpConnection(asyncio.Protocol):
    """A connection that is open, or was."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._exchange: _Exchange | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls, *, host: str, port: int, tls: ssl.SSLContext | None, seconds: float
    ) -> HttpConnection:
        """Connect, in so many seconds for names, TCP and TLS. Raises `NotSent`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(
                    cls, host, port, ssl=tls, server_hostname=host if tls else None
                )
        except TimeoutError as error:
            what = "TLS connection" if tls else "connection"
            raise NotSent(f"no {what} within {seconds:.3g} s") from error
        except (OSError, UnicodeError) as error:
            raise NotSent(words_of(error)) from error
        return connection

    @property
    def is_open(self) -> bool:
        """Whether it can be used, by the loop that runs now."""
        if self._transport is None or self._transport.is_closing():
            return False
        return self._lost.get_loop() is asyncio.get_running_loop()

    async def exchange(
        self, head: bytes, body: bytes, *, is_head: bool, patience: Patience
    ) -> Response:
        """Send this and receive the whole answer. Closed afterwards, unless that went well."""
        if self._transport is None or not self.is_open:
            raise NotSent("the connection is closed")
        exchange = self._exchange = _Exchange(patience, body_bytes=len(body), is_head=is_head)
        try:
            self._transport.writelines([head, body] if body else [head])
            await exchange.done
            if self._transport.get_write_buffer_size():
                self.close()  # It was answered unread; what is left of it would come first.
        except BaseException:
            # Also when we are cancelled just as the answer is complete: nobody will keep us.
            self.close()
            raise
        finally:
            exchange.end()
            self._exchange = None
        return exchange.response

    async def tunnel(self, head: bytes, *, host: str, tls: ssl.SSLContext, seconds: float) -> None:
        """Have a proxy connect to a host by this request, and speak TLS to that from now on.

        Raises `NotSent`.
        """
        try:
            async with asyncio.timeout(seconds):
                asked = await self.exchange(
                    head, b"", is_head=True, patience=Patience(seconds, bytes_per_second_min=1)
                )
                if not 200 <= asked.status < 300:
                    raise NotSent(f"the proxy answered {asked.status}")
                assert self._transport is not None, "it was used just now"
                self._transport = await asyncio.get_running_loop().start_tls(
                    self._transport, self, tls, server_hostname=host
                )
        except TimeoutError as error:
            self.close()
            raise NotSent(f"the proxy gave no TLS connection within {seconds:.3g} s") from error
        except (OSError, NoAnswer) as error:
            self.close()
            raise NotSent(f"by the proxy: {words_of(error)}") from error

    def close(self) -> asyncio.Future[None]:
        """Close at once; the future is done when the socket is."""
        if self._transport is not None:
            # If its loop has ended, so has the connection, except for the socket's own end.
            with contextlib.suppress(RuntimeError):
                self._transport.abort()
        return self._lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        watch_peer(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            self.close()  # Nobody has asked for anything.
        elif self._exchange.feed(data):
            self.close()

    def eof_received(self) -> bool:
        if self._exchange is not None:
            self._exchange.end_of_file()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self._exchange is not None:
            self._exchange.fail(words_of(error) if error else "the connection is closed")
        if not self._lost.done():
            self._lost.set_result(None)


class _Exchange:
    """One request and its answer; the parser calls the `on_` methods."""

    def __init__(self, patience: Patience, *, body_bytes: int, is_head: bool) -> None:
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = loop.create_future()
        self.response = Response()
        self._is_head = is_head
        self._patience = patience
        self._parser = httptools.HttpResponseParser(self)
        self._headers_bytes = 0
        self._headers_are_in = False
        self._chunks: list[bytes] = []
        self._seconds = patience.seconds + patience.for_bytes(body_bytes)
        self._deadline = loop.call_later(self._seconds, self._expire)

    def feed(self, data: bytes) -> bool:
        """Take in what arrived. True if the connection is of no further use."""
        if self.done.done():
            return True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail("it changes the protocol")
        except httptools.HttpParserError as error:
            self.fail(f"it is not HTTP: {error}")
        else:
            return False
        return True

    def end(self) -> None:
        self._deadline.cancel()

    def fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(NoAnswer(why))

    def end_of_file(self) -> None:
        framed = {"content-length", "transfer-encoding"} & self.response.headers.keys()
        if self._headers_are_in and not framed:
            self._finish()
        self.fail("the connection was closed before the answer was complete")

    def on_message_begin(self) -> None:
        if self.done.done():
            # The parser stops here, before a second answer is written over the first.
            raise ValueError("more than one answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers_bytes += len(name) + len(value)
        if self._headers_bytes > _HEADERS_BYTES_MAX:
            raise ValueError("the headers are too long")
        self.response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.response.status = self._parser.get_status_code()
        self._headers_are_in = True
        if self._is_head and self.response.status >= 200:
            self._finish()  # Whatever length it announces, an answer to HEAD has no body.
            return
        length = self.response.headers.get("content-length", "")
        if length.isdecimal() and int(length) > _LARGE_BYTES:
            self._seconds += self._patience.for_bytes(int(length))
            self._deadline.cancel()
            self._deadline = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def on_body(self, chunk: bytes) -> None:
        if self.done.done():
            raise ValueError("a body of an answer that has none")
        self._chunks.append(chunk)

    def on_message_complete(self) -> None:
        if self.response.status < 200:
            # "Continue" and its like announce the answer; they are not it.
            self.response.headers = {}
            self._headers_are_in = False
        else:
            self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.response.body = b"".join(self._chunks)
            self.done.set_result(None)

    def _expire(self) -> None:
        self.fail(f"no answer within {self._seconds:.3g} s")


async def wait_for_all(pending: Sequence[asyncio.Future[None]], *, seconds: float) -> None:
    """Wait until all of this loop's are done, but not longer than this."""
    loop = asyncio.get_running_loop()
    if ours := [one for one in pending if one.get_loop() is loop]:
        await asyncio.wait(ours, timeout=seconds)


def words_of(error: Exception) -> str:
    """What the system says, without its numbers."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    if isinstance(error, socket.gaierror):
        return str(error.strerror).lower()
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__


def tls_context(*, ca_bundle: str) -> ssl.SSLContext:
    """What TLS needs to know. Raises `InvalidInput` if the bundle is of no use."""
    try:
        context = ssl.create_default_context(cafile=ca_bundle or None)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"The certificates for TLS cannot be used ({words_of(error)}).",
            hint="AWS_CA_BUNDLE must name a file of certificates in PEM form."
            if ca_bundle
            else "Install the system's CA certificates, or set AWS_CA_BUNDLE.",
        ) from error
    context.set_alpn_protocols(["http/1.1"])
    return context
