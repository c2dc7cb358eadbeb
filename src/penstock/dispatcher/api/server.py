"""The HTTP server: listeners that serve ASGI applications, from `start` to `stop`.

Each listener is a server of uvicorn's on a socket of ours, all in the event loop of the caller.
It takes no signals: who owns the process decides when to stop. `stop` takes no more
connections, ends streams of events, lets other requests that have begun end within a bound, and
interrupts the rest; a transaction that is interrupted is undone. Called by the wiring of the
dispatcher and of webhook sources.

The bounds of a body are the application's. Those of what is around it are kept here, where
uvicorn has none: a connection is closed that says nothing, that never ends its headers in time
or in size, that goes on sending a body after it was answered, or that does not read its
answers.

Half of the connections of a listener are for authenticated callers, which the application tells
by `requests.be_known`, and a quarter for those of them that hold no more than the token of an
attempt, or of webhooks. All begin in the last quarter, and when one of these is full, the one
that has stood longest without a request is closed for the new one. So whoever opens
connections, however many and however often, closes its own, and no worker waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.dispatcher.api.requests import KNOWN
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import InvalidInput
from penstock.kernel.ports import watch_peer
from penstock.kernel.service import Service

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]

_log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_START_SECONDS_MAX: Final = 10.0
_START_LOOK_SECONDS: Final = 0.01
_KEEP_ALIVE_SECONDS: Final = 75
CONNECTIONS_MAX: Final = 2_000
"""How many connections a listener has, of all kinds of callers, unless it says otherwise."""
_OTHER_FILES: Final = 256
"""How many files a process has open besides its connections."""
_GRACE_SECONDS: Final = 5
_HEADERS_SECONDS_MAX: Final = 10.0
_HEADERS_BYTES_MAX: Final = 64 * 2**10
_REST_SECONDS_MAX: Final = 10.0
"""How long the rest of a body may come that was answered before its end."""
_UNREAD_SECONDS_MAX: Final = 30.0
"""How long a caller may leave its answer unread."""
_STREAM: Final = b"text/event-stream"
# What uvicorn takes for its own pauses, on top of the grace.
_STOP_SECONDS_MAX: Final = _GRACE_SECONDS + 5.0


@dataclass(frozen=True, slots=True)
class HttpListener:
    """An application and the address that it answers on. Port 0 is any that is free."""

    name: str
    app: AsgiApp
    host: str
    port: int
    connections_max: int = CONNECTIONS_MAX
    descriptor: int | None = None
    """A socket that listens there already, which this process was given."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connections:
    """Connections of one kind, the one that has gone longest without a request first."""

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        self._held: dict[_Connection, None] = {}

    def add(self, connection: _Connection) -> None:
        """Hold one more; if it is one too many, the first is closed."""
        self._held[connection] = None
        if len(self._held) > self._connections_max:
            first = next(iter(self._held))
            del self._held[first]
            first.transport.abort()

    def discard(self, connection: _Connection) -> None:
        self._held.pop(connection, None)


class _Config(uvicorn.Config):
    """A listener's configuration, with its connections."""

    def __init__(self, app: AsgiApp, *, connections_max: int, **settings: Any) -> None:
        super().__init__(app, **settings)
        self.known = _Connections(connections_max // 2)
        self.limited = _Connections(max(1, connections_max // 4))
        self.anonymous = _Connections(max(1, connections_max // 4))

    def discard(self, connection: _Connection) -> None:
        """Hold a connection no more."""
        for each in (self.known, self.limited, self.anonymous):
            each.discard(connection)


class _Connection(HttpToolsProtocol):
    """A connection whose requests have to begin and end in time and in size."""

    config: _Config
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _headers_bytes: int | None = None
    """How much of headers that have not ended was heard; None if none are awaited."""
    _is_message_open: bool = False
    """Whether a request has begun whose body has not ended."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as it is there
        super().connection_made(transport)
        self._await_headers()
        self.config.anonymous.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_headers()
        self._have_read()
        self.config.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._headers_bytes is not None:
            self._headers_bytes += len(data)
        super().data_received(data)
        # What has ended with this piece is in the hands of the application.
        if (self._headers_bytes or 0) > _HEADERS_BYTES_MAX and not self.transport.is_closing():
            self._have_headers()
            self.send_400_response("The headers are too long.")
        self._await_rest()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][KNOWN] = self._be_known
        self._is_message_open = True
        self._await_headers()

    def on_headers_complete(self) -> None:
        self._have_headers()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_message_open = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_rest()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._have_read()
        self._unread = self.loop.call_later(_UNREAD_SECONDS_MAX, self.transport.abort)

    def resume_writing(self) -> None:
        self._have_read()
        super().resume_writing()

    def shutdown(self) -> None:
        # There is none before the first request, whatever its type says.
        cycle = getattr(self, "cycle", None)
        if cycle is not None and not cycle.response_complete and _is_stream(cycle.scope):
            # It would never end by itself; who reads it comes back.
            self.transport.close()
            return
        super().shutdown()

    def _be_known(self, *, is_limited: bool) -> None:
        """Who calls is known: hold the connection among those of its kind, as the latest."""
        self.config.discard(self)
        if not self.transport.is_closing():
            (self.config.limited if is_limited else self.config.known).add(self)

    def _await_headers(self) -> None:
        self._have_headers()
        self._headers_bytes = 0
        self._late = self.loop.call_later(_HEADERS_SECONDS_MAX, self._give_up)

    def _await_rest(self) -> None:
        """After the last answer: have the rest of its request end, or another one begin.

        uvicorn waits for the next request, but no longer once anything has come: what is left of a
        body that nobody reads, or an end of line.
        """
        cycle = getattr(self, "cycle", None)
        is_timed = self._late is not None or (
            self.timeout_keep_alive_task is not None and not self._is_message_open
        )
        if cycle is None or not cycle.response_complete or is_timed or self.transport.is_closing():
            return
        self._late = self.loop.call_later(_REST_SECONDS_MAX, self._give_up)

    def _have_headers(self) -> None:
        self._headers_bytes = None
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _have_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _give_up(self) -> None:
        # There is none before the first request, whatever its type says.
        cycle = getattr(self, "cycle", None)
        if cycle is not None and not cycle.response_complete:
            # An earlier request of the connection is being answered.
            self._late = self.loop.call_later(_HEADERS_SECONDS_MAX, self._give_up)
        elif not self.transport.is_closing():
            self.transport.close()


class HttpServer(Service):
    """Listeners that are started and stopped together."""

    def __init__(self, listeners: Sequence[HttpListener], *, clock: Clock | None = None) -> None:
        self._listeners = listeners
        self._clock = clock or SystemClock()
        self._ports: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._running: list[tuple[_Server, asyncio.Task[None]]] = []

    def port(self, name: str) -> int:
        """The port that a listener answers on."""
        return self._ports[name]

    def connections_max(self, name: str) -> int:
        """How many connections a listener has at most, by the files of this process too."""
        return self._most[name]

    def url(self, name: str) -> str:
        """The address of a listener as this machine reaches it."""
        (host,) = [each.host for each in self._listeners if each.name == name]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - looked for
        return _url(host, self._ports[name])

    def bound(self, name: str) -> str:
        """The address that a listener has taken, which may be all of this machine's."""
        (host,) = [each.host for each in self._listeners if each.name == name]
        return _url(host, self._ports[name])

    async def start(self) -> None:
        with contextlib.ExitStack() as stack:
            # All addresses first: who cannot have one of them takes none.
            sockets = [stack.enter_context(_bound(each)) for each in self._listeners]
            stack.pop_all()
        loop = asyncio.get_running_loop()
        most = connections_within_files([each.connections_max for each in self._listeners])
        for each, opened, connections_max in zip(self._listeners, sockets, most, strict=True):
            server = _Server(_config(each.app, connections_max=connections_max))
            task = loop.create_task(server.serve([opened]), name=f"listener {each.name}")
            self._most[each.name] = connections_max
            self._ports[each.name] = opened.getsockname()[1]
            self._running.append((server, task))
        async with asyncio.timeout(_START_SECONDS_MAX):
            while not all(server.started for server, _ in self._running):
                await self._clock.sleep(_START_LOOK_SECONDS)
        for each in self._listeners:
            _log.info("the %s listener is ready on %s", each.name, self.bound(each.name))

    async def stop(self) -> None:
        running, self._running = self._running, []
        for server, _ in running:
            server.should_exit = True
        tasks = [task for _, task in running]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=_STOP_SECONDS_MAX)
        for task in late:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                _log.error("a listener has failed", exc_info=ended)
        # uvicorn leaves open what it has not told to end: who was let in at the very moment, and
        # who was not done when its patience was.
        for server, _ in running:
            for connection in list(server.server_state.connections):
                connection.transport.abort()
        await self._clock.sleep(0)


def _is_stream(scope: Any) -> bool:
    """Whether a request is one of a page that is told of news for as long as it is open."""
    accepted = (value for name, value in scope["headers"] if name == b"accept")
    return any(_STREAM in value for value in accepted)


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _bound(listener: HttpListener) -> socket.socket:
    if listener.descriptor is not None:
        return socket.socket(fileno=listener.descriptor)
    family = socket.AF_INET6 if ":" in listener.host else socket.AF_INET
    # The protocol is said, as asyncio sends small answers at once only where it reads TCP there.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        watch_peer(opened)
        opened.bind((listener.host, listener.port))
        opened.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        opened.close()
        raise InvalidInput(
            f"The {listener.name} listener cannot have {listener.host}:{listener.port}: {error}.",
            hint="Is another dispatcher running there? Choose another port.",
        ) from error
    return opened


def connections_within_files(wanted: Sequence[int]) -> Sequence[int]:
    """How many connections listeners may have that want so many, by the files of the process.

    As many as are wanted are asked for first. More connections than files would stop all of them,
    and the database with them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _OTHER_FILES + sum(wanted)
    if soft != resource.RLIM_INFINITY and soft < files:
        soft = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= files:
        return wanted
    return [max(2, (soft - _OTHER_FILES) * each // sum(wanted)) for each in wanted]


def _config(app: AsgiApp, *, connections_max: int) -> _Config:
    return _Config(
        app,
        connections_max=connections_max,
        http=_Connection,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
