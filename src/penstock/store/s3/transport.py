"""Signed HTTP requests to one S3 endpoint.

Owns the connections, the signatures and the time limits; knows nothing of buckets or keys. One
`send` is one request: nothing is repeated here, except that a request which the server refused
because this machine's clock is wrong is signed again with the server's time (it was not carried
out, and its answer told the time).

`send` returns the answer whatever its status, or raises `NotSent` or `NoAnswer` (see
`connection`), which differ in what they mean for a write.

Connections are kept while idle for a few seconds, and are closed instead of reused after
anything unusual, cancellation included. `close` ends what is in flight: its senders get
`NoAnswer` at once, and those who wait for a connection get `Closed`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Final

from penstock.store.s3.connection import (
    HttpConnection,
    NotSent,
    Patience,
    Response,
    tls_context,
    wait_for_all,
)
from penstock.store.s3.signing import (
    Keyring,
    SignedRequest,
    encoded_path,
    encoded_query,
    signed_headers,
)
from penstock.store.time import StoreClock, TimeSample

SKEW_SECONDS_MAX: Final = 240.0
"""Servers refuse a signature that is 5 to 15 minutes off."""

DATE_RESOLUTION_SECONDS: Final = 1.0
CLOSING_SECONDS_MAX: Final = 2.0
_YEARS: Final = range(2000, 2200)
"""A date outside of these is no clock's."""


class Closed(NotSent):
    """The transport has been closed by its owner."""


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """How long and how many. The defaults are what production uses."""

    connect_seconds: float = 5.0
    answer_seconds: float = 15.0
    queue_seconds: float = 60.0
    """How long a request may wait for one of the connections."""
    idle_seconds: float = 10.0
    bytes_per_second_min: int = 256 * 1024
    connections_max: int = 64


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """Where requests go. `host` is a name or an address, an IPv6 address without brackets."""

    host: str
    port: int
    tls: bool
    region: str
    ca_bundle: str = ""

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.tls else 80
        return host if self.port == default else f"{host}:{self.port}"

    @property
    def is_amazon(self) -> bool:
        """Whether this is AWS itself."""
        return self.host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


class S3Transport:
    """Connections to one endpoint, used by one event loop."""

    def __init__(
        self,
        endpoint: S3Endpoint,
        *,
        keyring: Keyring,
        clock: StoreClock,
        limits: TransportLimits | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._host = endpoint.host_header
        self._keyring = keyring
        self._clock = clock
        self._limits = limits or TransportLimits()
        self._patience = Patience(self._limits.answer_seconds, self._limits.bytes_per_second_min)
        self._slots = asyncio.Semaphore(self._limits.connections_max)
        self._idle: deque[HttpConnection] = deque()
        self._busy: set[HttpConnection] = set()
        self._closed = False
        self._tls = tls_context(ca_bundle=endpoint.ca_bundle) if endpoint.tls else None

    async def send(self, request: SignedRequest) -> Response:
        """The answer to this request, whatever its status."""
        await self._take_slot()
        try:
            signed_at = self._signing_time()
            response = await self._exchange(request, signed_at)
            if response.status == 403:
                # The refusal is dated, so the signing time is right from now on.
                corrected = self._signing_time()
                if abs(corrected - signed_at) > SKEW_SECONDS_MAX:
                    response = await self._exchange(request, corrected)
            return response
        finally:
            self._slots.release()

    def _signing_time(self) -> float:
        known = self._clock.estimate()
        return self._clock.machine.wall() if known is None else known.middle

    async def _take_slot(self) -> None:
        """Wait for our turn to use a connection."""
        if not self._slots.locked():
            await self._slots.acquire()
            return
        try:
            async with asyncio.timeout(self._limits.queue_seconds):
                await self._slots.acquire()
        except TimeoutError as error:
            raise NotSent(f"all {self._limits.connections_max} connections are busy") from error

    async def _exchange(self, request: SignedRequest, signed_at: float) -> Response:
        if self._closed:
            raise Closed
        head = await self._signed_head(request, signed_at)
        connection = await self._connection()
        self._busy.add(connection)
        try:
            sent = self._clock.machine.monotonic()
            response = await connection.exchange(
                head, request.body, is_head=request.method == "HEAD", patience=self._patience
            )
            received = self._clock.machine.monotonic()
        finally:
            self._busy.discard(connection)
        self._keep(connection, response, received)
        response.sample = self._observe(response, sent, received)
        return response

    async def _signed_head(self, request: SignedRequest, signed_at: float) -> bytes:
        """The request line and all headers."""
        credentials = await self._keyring.credentials(
            self._clock.machine, seconds=self._limits.answer_seconds
        )
        headers = signed_headers(
            request,
            host=self._host,
            region=self._endpoint.region,
            credentials=credentials,
            at=signed_at,
        )
        if request.body or request.method == "PUT":
            headers.append(("content-length", str(len(request.body))))
        query = encoded_query(request.query)
        target = encoded_path(request.path) + (f"?{query}" if query else "")
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
        return f"{request.method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")

    async def _connection(self) -> HttpConnection:
        now = self._clock.machine.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < self._limits.idle_seconds:
                return connection
            connection.close()
        opened = await HttpConnection.open(
            host=self._endpoint.host,
            port=self._endpoint.port,
            tls=self._tls,
            seconds=self._limits.connect_seconds,
        )
        if self._closed:
            opened.close()
            raise Closed
        return opened

    def _keep(self, connection: HttpConnection, response: Response, now: float) -> None:
        last = "close" in response.headers.get("connection", "").lower()
        if last or response.status >= 500 or self._closed:
            connection.close()
            return
        connection.idle_since = now
        self._idle.append(connection)
        # The oldest are at the other end; when few are needed, nobody else would look at them.
        while self._idle and now - self._idle[0].idle_since >= self._limits.idle_seconds:
            self._idle.popleft().close()

    def _observe(self, response: Response, sent: float, received: float) -> TimeSample | None:
        # A cache between us and the store would answer with an old date, and says so with `Age`;
        # a proxy that cannot reach the store dates its 5xx by a clock of its own.
        stamp = epoch_of(response.headers.get("date", ""))
        if stamp is None or "age" in response.headers or response.status >= 500:
            return None
        sample = TimeSample(
            stamp=stamp, resolution=DATE_RESOLUTION_SECONDS, sent=sent, received=received
        )
        self._clock.observe(sample)
        return sample

    async def close(self) -> None:
        """Close all connections, also those in use, and wait a moment until they are."""
        self._closed = True
        closing = [connection.close() for connection in (*self._idle, *self._busy)]
        self._idle.clear()
        await wait_for_all(closing, seconds=CLOSING_SECONDS_MAX)


@lru_cache(maxsize=64)
def epoch_of(date: str) -> float | None:
    """A date of HTTP in seconds since the epoch; None if it is none."""
    try:
        parsed = parsedate_to_datetime(date)
        if parsed.year not in _YEARS:
            return None
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
