"""Requests to dispatchers: one transport for `penstock.Client`, workers, sources and functions.

`DispatcherCaller` sends a request to whichever dispatcher answers. There may be several, all equal:
it goes to the one that answered last, and to the next when that does not answer or cannot serve
now. A dispatcher that does not serve our release (426) is passed over like one that is down, since
a fleet in the middle of an upgrade has others; if none of the others answers, that is the answer.
Otherwise it is `NoReply`, with what became of each try: whether the request was carried out is then
unknown. Who calls, and which protocol it speaks, stands in the headers of every request.

What is typed, and what is repeated and for how long, is of those who call: `worker.client`,
`dispatcher.client.connection` and `runtimes.deployed`. What a refusal means is said once, by
`refusal`.

HTTP/1.1 over connections that are kept alive (`penstock.store.s3.connection`): a worker calls a
dispatcher several times a task, so the cost of a request is the cost of a task. Bounded are
connections to all dispatchers together, how long an idle one is kept, and each request by its own
timeout. A connection whose exchange failed is closed. Where `uses_proxies` is said, requests go by
the proxies that the environment names, as other programs' do; not those to this machine.

The only state is which dispatcher answered last, so a crash leaves nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import ssl
from base64 import b64encode
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import Final, Protocol
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from penstock.kernel.clock import Clock
from penstock.kernel.document_format import UNREADABLE
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DispatcherRefused, InvalidInput
from penstock.protocol.base import PROTOCOL, PROTOCOL_HEADER
from penstock.protocol.problem import Problem
from penstock.store.s3.connection import (
    HttpConnection,
    NoAnswer,
    NotSent,
    Patience,
    Response,
    tls_context,
    wait_for_all,
)

CONNECT_SECONDS: Final = 3.0
# Shorter than a dispatcher keeps idle connections, so that hardly a request meets a closed one.
_IDLE_SECONDS: Final = 30.0
_CONNECTIONS_MAX: Final = 16
_CLOSING_SECONDS_MAX: Final = 2.0
_BYTES_PER_SECOND_MIN: Final = 64 * 1024
_AWAY_SECONDS: Final = 60.0
UNSERVED: Final = 426
"""The status of a dispatcher that does not serve callers of our release."""
_NOT_NOW: Final = frozenset({408, 425, 429})
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
_PATH: Final = re.compile(r"[!-~]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherRequest:
    """One request. The path begins with a slash, and has its query."""

    method: str
    url: str
    """Of the dispatcher, as it was checked by `check_url`."""
    path: str
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    seconds: float


class DispatcherTransport(Protocol):
    """What sends requests."""

    async def send(self, request: DispatcherRequest) -> Response:
        """The answer; `NotSent` or `NoAnswer` (`penstock.store.s3.connection`)."""

    async def close(self) -> None:
        """End what is in flight."""


@dataclass(frozen=True, slots=True)
class DispatcherReply:
    """An answer, and whose it is."""

    url: str
    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def problem(self) -> Problem | None:
        """The problem that it is, if a dispatcher says so."""
        try:
            return msgspec.json.decode(self.body, type=Problem)
        except UNREADABLE:
            return None

    @property
    def named(self) -> str:
        """The status, with its name."""
        try:
            return f"{self.status} {HTTPStatus(self.status).phrase}"
        except ValueError:
            return str(self.status)


class MissKind(Enum):
    """Why there is no answer of a dispatcher."""

    NOBODY = "nobody"
    """Nobody is there: the request was not sent."""
    SILENT = "silent"
    """It did not answer in time."""
    LOST = "lost"
    """The connection was lost."""
    NOT_NOW = "not now"
    """It cannot serve now."""


@dataclass(frozen=True, slots=True)
class DispatcherMiss:
    """A try without an answer that can be used."""

    url: str
    kind: MissKind
    why: str = ""
    reply: DispatcherReply | None = None
    """What was said, by one that cannot serve now."""


class NoReply(Exception):
    """No dispatcher answered; `misses` are the tries, one for each of them."""

    def __init__(self, misses: Sequence[DispatcherMiss]) -> None:
        super().__init__(misses)
        self.misses = misses


class DispatcherCaller:
    """Sends requests to whichever dispatcher answers."""

    def __init__(
        self,
        urls: Sequence[str],
        headers: Mapping[str, str],
        *,
        clock: Clock,
        entropy: Entropy,
        transport: DispatcherTransport | None = None,
        lost_tries: int = 2,
        connect_seconds: float = CONNECT_SECONDS,
        uses_proxies: bool = False,
    ) -> None:
        """`lost_tries` is how often a request is sent to one whose connection is lost: most likely
        it was kept, and the other side has just closed it. Once where twice is not once."""
        if not urls:
            raise InvalidInput("There is no URL of a dispatcher.", hint="Give one or more.")
        self.urls = [check_url(url) for url in urls]
        self.headers = {
            **headers,
            PROTOCOL_HEADER: str(PROTOCOL),
            "Content-Type": "application/json",
        }
        self._clock = clock
        self._lost_tries = lost_tries
        # Workers that start together do not all begin with the same dispatcher, and each goes
        # back to its own after a while: a dispatcher that is back gets its share again.
        self.home = self._preferred = entropy.randrange(len(self.urls))
        self._left_at = clock.monotonic()
        self._transport = transport or HttpTransport(
            clock, connect_seconds=connect_seconds, uses_proxies=uses_proxies
        )

    async def close(self) -> None:
        """End what is in flight."""
        await self._transport.close()

    async def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> DispatcherReply:
        """The first answer of a dispatcher that can serve; each has so many seconds."""
        count = len(self.urls)
        if self._clock.monotonic() - self._left_at >= _AWAY_SECONDS:
            self._preferred = self.home
        order = [(self._preferred + step) % count for step in range(count)]
        said = {**self.headers, **headers} if headers else self.headers
        misses: list[DispatcherMiss] = []
        unserved: DispatcherReply | None = None
        for number in order:
            request = DispatcherRequest(
                method=method,
                url=self.urls[number],
                path=path,
                headers=said,
                body=body,
                seconds=seconds,
            )
            found = await self._tried(request)
            if isinstance(found, DispatcherMiss):
                misses.append(found)
            elif found.status == UNSERVED:
                unserved = found
            else:
                self._prefer(number)
                return found
        # Whoever did not answer now is not the one to begin with next time.
        self._prefer(order[1 % count])
        if unserved is not None:
            return unserved
        raise NoReply(misses)

    def _prefer(self, number: int) -> None:
        if number != self._preferred:
            self._left_at = self._clock.monotonic()
            self._preferred = number

    async def _tried(self, request: DispatcherRequest) -> DispatcherReply | DispatcherMiss:
        url = request.url
        lost = ""
        for _ in range(self._lost_tries):
            try:
                async with asyncio.timeout(request.seconds):
                    answer = await self._transport.send(request)
            except TimeoutError:
                return DispatcherMiss(url, MissKind.SILENT)
            except NotSent as error:
                return DispatcherMiss(url, MissKind.NOBODY, str(error))
            except NoAnswer as error:
                lost = str(error)
            else:
                break
        else:
            return DispatcherMiss(url, MissKind.LOST, lost)
        reply = DispatcherReply(url, answer.status, answer.headers, answer.body)
        if reply.status >= 500 or reply.status in _NOT_NOW:
            return DispatcherMiss(url, MissKind.NOT_NOW, reply=reply)
        return reply


def refusal(reply: DispatcherReply, *, side: str) -> DispatcherRefused:
    """What an answer means that is a no; `side` is which side of a dispatcher was asked."""
    problem = reply.problem
    if problem is None:
        # Not our dispatcher's words: a proxy, or something else on that port.
        return DispatcherRefused(
            f"{reply.url} answered {reply.named}, which is not an answer of a dispatcher.",
            status=reply.status,
            kind="unreadable",
            hint=f"Check that this is the URL of a dispatcher's {side} side.",
        )
    field_ = problem.field if problem.field and problem.field not in problem.title else ""
    where = f" (in {field_})" if field_ else ""
    return DispatcherRefused(
        f"{problem.title}{where}",
        status=reply.status,
        kind=problem.type,
        field=problem.field,
        hint=problem.detail,
        position=problem.position,
    )


class HttpTransport:
    """Sends requests over connections of its own."""

    def __init__(
        self,
        clock: Clock,
        *,
        connect_seconds: float = CONNECT_SECONDS,
        uses_proxies: bool = False,
    ) -> None:
        self._clock = clock
        self._connect_seconds = connect_seconds
        self._uses_proxies = uses_proxies
        self._room = asyncio.Semaphore(_CONNECTIONS_MAX)
        self._idle: defaultdict[str, deque[HttpConnection]] = defaultdict(deque)
        self._busy: set[HttpConnection] = set()
        self._tls: ssl.SSLContext | None = None

    async def send(self, request: DispatcherRequest) -> Response:
        async with self._room:
            proxy = proxy_of(request.url) if self._uses_proxies else None
            connection = await self._connection(request, proxy)
            self._busy.add(connection)
            try:
                response = await connection.exchange(
                    _head(request, proxy),
                    request.body,
                    is_head=False,
                    # A little more than the caller's, who gives up by cancelling.
                    patience=Patience(request.seconds + 1.0, _BYTES_PER_SECOND_MIN),
                )
            finally:
                self._busy.discard(connection)
            if "close" in response.headers.get("connection", "").lower():
                connection.close()
            else:
                connection.idle_since = self._clock.monotonic()
                self._idle[request.url].append(connection)
            return response

    async def close(self) -> None:
        """End what is in flight, and wait a moment until everything is closed."""
        every = [*self._busy, *(each for idle in self._idle.values() for each in idle)]
        self._idle.clear()
        closing = [each.close() for each in every]
        await wait_for_all(closing, seconds=_CLOSING_SECONDS_MAX)

    async def _connection(
        self, request: DispatcherRequest, proxy: SplitResult | None
    ) -> HttpConnection:
        idle, now = self._idle[request.url], self._clock.monotonic()
        # The oldest are at the other end; when few are needed, nobody else would look at them.
        while idle and now - idle[0].idle_since >= _IDLE_SECONDS:
            idle.popleft().close()
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
            connection.close()
        parts = urlsplit(request.url)
        is_tls = parts.scheme == "https"
        if is_tls and self._tls is None:
            self._tls = tls_context(ca_bundle="")
        to = proxy or parts
        assert to.hostname is not None, "it was checked"
        assert parts.hostname is not None, "it was checked"
        port = parts.port or (443 if is_tls else 80)
        opened = await HttpConnection.open(
            host=to.hostname,
            port=(to.port or 80) if proxy else port,
            tls=self._tls if is_tls and proxy is None else None,
            seconds=self._connect_seconds,
        )
        if proxy is not None and is_tls and self._tls is not None:
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            await opened.tunnel(
                _lines("CONNECT", f"{host}:{port}", {"host": f"{host}:{port}", **_proof(proxy)}),
                host=parts.hostname,
                tls=self._tls,
                seconds=self._connect_seconds,
            )
        return opened


def check_url(url: str) -> str:
    """A URL of a dispatcher, without a slash at its end; `InvalidInput` if it is none."""
    hint = "Write it as http://HOST:PORT, such as http://127.0.0.1:7070."
    try:
        parts = urlsplit(url)
        host, port = _ascii(parts), parts.port
    except (ValueError, TypeError, AttributeError) as error:
        # What it is may have a password in it.
        raise InvalidInput("That is not the URL of a dispatcher.", hint=hint) from error
    if "@" in parts.netloc:
        raise InvalidInput("Credentials do not go into the URL; there is a token for them.")
    is_host = _HOST.fullmatch(host) is not None and parts.scheme in ("http", "https") and port != 0
    is_rest = _PATH.fullmatch(parts.path) is not None and not parts.query and not parts.fragment
    # Of ends of lines the parser says nothing.
    if not is_host or not is_rest or not url.isprintable():
        raise InvalidInput(f"{url!r:.200} is not the URL of a dispatcher.", hint=hint)
    return url.rstrip("/")


def _ascii(parts: SplitResult) -> str:
    """The host, as names are looked up and headers are written."""
    return (parts.hostname or "").encode("idna").decode()


def proxy_of(url: str) -> SplitResult | None:
    """The proxy that the environment names for a URL; this machine is reached without one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host == "localhost" or _is_loopback(host):
        return None
    proxies = getproxies()
    named = proxies.get(parts.scheme) or proxies.get("all")
    if not named or proxy_bypass(parts.netloc):
        return None
    proxy = urlsplit(named if "://" in named else f"http://{named}")
    if proxy.scheme != "http" or not proxy.hostname:
        raise InvalidInput(
            f"The proxy for {url} is one of the kind {proxy.scheme!r}, and http alone is known.",
            hint="Name an http:// proxy in HTTP_PROXY and HTTPS_PROXY, or the host in NO_PROXY.",
        )
    return proxy


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _proof(proxy: SplitResult) -> Mapping[str, str]:
    if proxy.username is None:
        return {}
    said = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"proxy-authorization": f"Basic {b64encode(said.encode()).decode()}"}


def _head(request: DispatcherRequest, proxy: SplitResult | None) -> bytes:
    parts = urlsplit(request.url)
    port = f":{parts.port}" if parts.port else ""
    netloc = parts.netloc if parts.netloc.isascii() else f"{_ascii(parts)}{port}"
    target = f"{parts.path}{request.path}"
    headers = {"host": netloc, "content-length": str(len(request.body)), **request.headers}
    if proxy is not None and parts.scheme == "http":
        return _lines(request.method, f"http://{netloc}{target}", {**headers, **_proof(proxy)})
    return _lines(request.method, target, headers)


def _lines(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    lines = [
        f"{method} {target} HTTP/1.1",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    if any("\r" in line or "\n" in line for line in lines):
        raise InvalidInput("A header of a request to the dispatcher would have several lines.")
    try:
        return "\r\n".join([*lines, "", ""]).encode("latin-1")
    except UnicodeEncodeError as error:
        raise InvalidInput("What was given has characters that are not text.") from error
