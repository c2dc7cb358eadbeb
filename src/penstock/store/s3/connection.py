"""One HTTP connection of Amazon's C runtime (awscrt), as an event loop sees it.

Owns what crosses between awscrt's threads and asyncio, and the names for what goes wrong there.
awscrt's callbacks only collect bytes and hand results over to the loop. Called by `transport`,
which decides what is sent and which connection is kept.

What can go wrong is told apart by what it means for a write:
- `NotSent`: the request did not leave this machine.
- `NoAnswer`: it left, or part of it, and no complete answer came back in time.

Whoever gives up, by a time limit or by cancellation, leaves nothing open: a connection that is
made too late is closed, and one whose exchange did not end is closed instead of used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from awscrt.exceptions import AwsCrtError
from awscrt.http import HttpClientConnection, HttpRequest
from awscrt.io import (
    ClientBootstrap,
    ClientTlsContext,
    SocketOptions,
    TlsConnectionOptions,
    TlsContextOptions,
)

from penstock.kernel.errors import InvalidInput
from penstock.store.time import TimeSample

CRT_ERRORS: Final = (
    AwsCrtError,
    OSError,
    ValueError,
    OverflowError,
    IndexError,
    NotImplementedError,
)
"""awscrt turns a few of its errors into Python's own, a broken pipe for one."""

_LARGE_BYTES: Final = 1024 * 1024
"""An answer that announces more than this gets more time than others."""

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


class Connection:
    """A connection that is open, or was."""

    def __init__(self, opened: HttpClientConnection) -> None:
        self._opened = opened
        self.idle_since = 0.0

    @classmethod
    async def open(
        cls, *, host: str, port: int, tls: TlsConnectionOptions | None, seconds: float
    ) -> Connection:
        """Connect: so many seconds for TCP, as many for names and TLS. Raises `NotSent`."""
        options = SocketOptions()
        options.connect_timeout_ms = max(1, int(seconds * 1000))
        opening = HttpClientConnection.new(
            host_name=host,
            port=port,
            bootstrap=ClientBootstrap.get_or_create_static_default(),
            socket_options=options,
            tls_connection_options=tls,
        )
        try:
            async with asyncio.timeout(2 * seconds):
                return cls(await result_of(opening))
        except TimeoutError as error:
            opening.add_done_callback(_close_late)
            raise NotSent("the connection was not made in time") from error
        except CRT_ERRORS as error:
            raise NotSent(words_of(error)) from error
        except BaseException:
            opening.add_done_callback(_close_late)
            raise

    @property
    def is_open(self) -> bool:
        return bool(self._opened.is_open())

    async def exchange(
        self, request: HttpRequest, *, body_bytes: int, patience: Patience
    ) -> Response:
        """Send this and receive the whole answer. Closed afterwards, unless that went well."""
        exchange = _Exchange(asyncio.get_running_loop(), patience)
        seconds = patience.seconds + patience.for_bytes(body_bytes)
        try:
            async with asyncio.timeout(seconds) as deadline:
                response = await exchange.run(self._opened, request, deadline)
        except TimeoutError as error:
            raise NoAnswer(f"no answer within {seconds:.3g} s") from error
        except CRT_ERRORS as error:
            raise NoAnswer(words_of(error)) from error
        finally:
            exchange.deadline = None
            if not exchange.complete:
                self.close()
        return response

    def close(self) -> Future[None]:
        """Begin to close; the future is done when that has ended, with an error or without."""
        closing: Future[None] = self._opened.close()
        return closing


class _Exchange:
    """One request and its answer, from awscrt's threads to an asyncio future."""

    def __init__(self, loop: asyncio.AbstractEventLoop, patience: Patience) -> None:
        self.complete = False
        self.deadline: asyncio.Timeout | None = None
        self._patience = patience
        self._loop = loop
        self._done: asyncio.Future[None] = loop.create_future()
        self._response = Response()
        self._chunks: list[bytes] = []

    async def run(
        self, connection: HttpClientConnection, request: HttpRequest, deadline: asyncio.Timeout
    ) -> Response:
        self.deadline = deadline
        try:
            stream = connection.request(request, self._on_response, self._on_body)
            stream.completion_future.add_done_callback(self._on_complete)
            stream.activate()
        except CRT_ERRORS as error:
            # The connection had been closed before, or the request is not HTTP.
            raise NotSent(words_of(error)) from error
        await self._done
        self.complete = True
        self._response.body = b"".join(self._chunks)
        return self._response

    def _on_response(self, *, status_code: int, headers: Headers, **_: object) -> None:
        self._response.status = status_code
        self._response.headers = {name.lower(): value for name, value in headers}
        length = self._response.headers.get("content-length", "")
        if length.isdecimal() and int(length) > _LARGE_BYTES:
            seconds = self._patience.for_bytes(int(length))
            _tell(self._loop, lambda: self._extend(seconds))

    def _extend(self, seconds: float) -> None:
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule((self.deadline.when() or self._loop.time()) + seconds)

    def _on_body(self, *, chunk: bytes, **_: object) -> None:
        self._chunks.append(chunk)

    def _on_complete(self, completed: Future[Any]) -> None:
        _hand_over(self._loop, self._done, completed)


async def result_of(pending: Future[Any]) -> Any:
    """The result of a future of awscrt; at once if it is already there."""
    if pending.done():
        return pending.result()
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[Any] = loop.create_future()
    pending.add_done_callback(lambda done: _hand_over(loop, waiting, done))
    return await waiting


async def wait_for_all(pending: Sequence[Future[Any]], *, seconds: float) -> None:
    """Wait until all are done, with an error or without, but not longer than this."""
    loop = asyncio.get_running_loop()
    all_done = loop.create_future()
    left = len(pending)

    def count_down() -> None:
        nonlocal left
        left -= 1
        if left == 0 and not all_done.done():
            all_done.set_result(None)

    for one in pending:
        one.add_done_callback(lambda _: _tell(loop, count_down))
    if pending:
        await asyncio.wait([all_done], timeout=seconds)


def words_of(error: Exception) -> str:
    """What awscrt says, without its names and full stops."""
    said = error.message if isinstance(error, AwsCrtError) else str(error)
    if isinstance(error, BrokenPipeError):
        said = "the connection is closed"
    return str(said or type(error).__name__).rstrip(". ")


def tls_options(host: str, *, ca_bundle: str) -> TlsConnectionOptions:
    """What TLS needs to know. Raises `InvalidInput` if the bundle is of no use."""
    context = TlsContextOptions()
    context.alpn_list = ["http/1.1"]
    try:
        if ca_bundle:
            context.override_default_trust_store_from_path(None, ca_bundle)
        options = ClientTlsContext(context).new_connection_options()
        options.set_server_name(host)
    except CRT_ERRORS as error:
        raise InvalidInput(
            f"The certificates for TLS cannot be used ({words_of(error)}).",
            hint="AWS_CA_BUNDLE must name a file of certificates in PEM form."
            if ca_bundle
            else "Install the system's CA certificates, or set AWS_CA_BUNDLE.",
        ) from error
    return options


def _close_late(opening: Future[Any]) -> None:
    if opening.exception() is None:
        opening.result().close()


def _hand_over(
    loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[Any], done: Future[Any]
) -> None:
    """From awscrt's thread: settle an asyncio future, unless nobody waits any more."""

    def settle() -> None:
        if waiting.done():
            return
        error = done.exception()
        if error is not None:
            waiting.set_exception(error)
        else:
            waiting.set_result(done.result())

    _tell(loop, settle)


def _tell(loop: asyncio.AbstractEventLoop, what: Any) -> None:
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:
        return  # The loop has ended, and with it whoever waited.
