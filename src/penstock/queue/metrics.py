"""A worker's metrics, and how they leave: Prometheus scrapes them, StatsD receives them.

Counters start at zero with the worker, in memory; they cost no requests. The cost of a task is
what this process has spent on requests, looks and leases included, divided by what it has
settled: over a fleet, divide the sum of the dollars by the sum of the tasks.

`MetricsServer` answers `GET /metrics` and nothing else, without a web framework: one request a
connection, at most `REQUEST_BYTES_MAX` of it within `REQUEST_SECONDS`, `CONNECTIONS_MAX` at a
time. It has no authentication, and listens on loopback unless told otherwise.

`StatsdPusher` sends the same figures, parsed from that text, over UDP every ten seconds and
once at the end: counters, and sums and counts of histograms, as increments; gauges as they are;
labels as tags, in the form that DogStatsD, Telegraf and the exporter of Prometheus take. A lost
datagram is lost: nothing waits for an answer, and nothing fails.
"""

from __future__ import annotations

import asyncio
import http
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final

from penstock.kernel.clock import Clock
from penstock.kernel.errors import InvalidInput
from penstock.kernel.prometheus import Family, Histogram, Labels, exposed
from penstock.kernel.service import Service
from penstock.store.base import ObjectStore, Wrapper
from penstock.store.metered import Meter, MeteredStore

HANDLER_SECONDS: Final = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600)
START_SECONDS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)


class WorkerMetrics:
    """The figures of one worker."""

    def __init__(self) -> None:
        self.tasks: Counter[tuple[str, str]] = Counter()
        """Tasks that this worker has settled, by type and status."""
        self.attempts: Counter[tuple[str, str]] = Counter()
        """Attempts that have ended here, by type and ending."""
        self.running: Counter[str] = Counter()
        self._handler: dict[str, Histogram] = {}
        self._start: dict[str, Histogram] = {}

    def note_start(self, type: str, seconds: float) -> None:
        """A first attempt starts, so long after its task could."""
        if type not in self._start:
            self._start[type] = Histogram(START_SECONDS)
        self._start[type].note(seconds)

    def note_end(self, type: str, ending: str, seconds: float) -> None:
        """A handler has ended, after so long."""
        self.attempts[type, ending] += 1
        if type not in self._handler:
            self._handler[type] = Histogram(HANDLER_SECONDS)
        self._handler[type].note(seconds)

    def text(self, meter: Meter | None) -> str:
        """As Prometheus reads it; with the requests on this meter."""
        families = [*self._work(), *(self._requests(meter) if meter else ())]
        return exposed(families)

    def _work(self) -> Iterator[Family]:
        yield Family(
            "penstock_queue_tasks_total",
            "Tasks that this worker has settled.",
            "counter",
            _by(("type", "outcome"), self.tasks.items()),
        )
        yield Family(
            "penstock_queue_attempts_total",
            "Attempts that have ended.",
            "counter",
            _by(("type", "ending"), self.attempts.items()),
        )
        yield Family(
            "penstock_queue_attempts_running",
            "Running handlers.",
            values=[({"type": kind}, count) for kind, count in sorted(self.running.items())],
        )
        yield Family(
            "penstock_queue_handler_seconds",
            "How long handlers run.",
            "histogram",
            histograms=[({"type": kind}, each) for kind, each in sorted(self._handler.items())],
        )
        yield Family(
            "penstock_queue_start_seconds",
            "How long a task waits from when it could start to its first attempt.",
            "histogram",
            histograms=[({"type": kind}, each) for kind, each in sorted(self._start.items())],
        )

    def _requests(self, meter: Meter) -> Iterator[Family]:
        requests = meter.billed + meter.unbilled
        yield Family(
            "penstock_queue_requests_total",
            "Requests to the store, by kind and by what they are for.",
            "counter",
            _by(("cause", "kind"), ((key, count) for key, count in requests.items())),
        )
        causes = [({"cause": each}, meter.dollars(label=each)) for each in meter.labels()]
        yield Family(
            "penstock_queue_dollars_total", "What the requests cost.", "counter", values=causes
        )
        settled = self.tasks.total()
        yield Family(
            "penstock_queue_dollars_per_task",
            "What the requests of this worker cost, for each task that it has settled.",
            values=[({}, meter.dollars() / settled)] if settled else [],
        )


def _by(
    names: tuple[str, str], counts: Iterable[tuple[tuple[str, str], int]]
) -> list[tuple[Labels, float]]:
    return [
        (dict(zip(names, map(str, key), strict=True)), float(count))
        for key, count in sorted(counts)
    ]


def meter_of(store: ObjectStore) -> Meter | None:
    """The meter that counts the requests of a store, if one does."""
    while isinstance(store, Wrapper):
        if isinstance(store, MeteredStore):
            return store.meter
        store = store.inner
    return None


REQUEST_BYTES_MAX: Final = 16 * 1024
REQUEST_SECONDS: Final = 5.0
CONNECTIONS_MAX: Final = 64
_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer(Service):
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
                f"Failed to serve metrics on {self._host}:{self._port}: {why}.",
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


PERIOD_SECONDS: Final = 10.0
DATAGRAM_BYTES_MAX: Final = 1400
"""What goes through most networks in one piece."""
_SAMPLE: Final = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_UNFIT: Final = re.compile(r"[^\w./-]")


class StatsdPusher(Service):
    """Sends what `text` gives, until it is stopped."""

    def __init__(self, text: Callable[[], str], *, host: str, port: int, clock: Clock) -> None:
        self._text = text
        self._address = (host, port)
        self._clock = clock
        self._last: dict[str, float] = {}
        self._transport: asyncio.DatagramTransport | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._transport, _ = await loop.create_datagram_endpoint(
                asyncio.DatagramProtocol, remote_addr=self._address
            )
        except OSError as error:
            host, port = self._address
            raise InvalidInput(
                f"Failed to send metrics to {host}:{port}: {error.strerror or error}.",
                hint="Name the host and port of a StatsD server: HOST:PORT.",
            ) from error
        self._task = loop.create_task(self._keep())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._send()
        if self._transport is not None:
            self._transport.close()

    async def _keep(self) -> None:
        while True:
            await self._clock.sleep(PERIOD_SECONDS)
            self._send()

    def _send(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        for datagram in datagrams(lines_of(self._text(), self._last)):
            self._transport.sendto(datagram)


def statsd_address(text: str, *, option: str = "statsd") -> tuple[str, int]:
    """The host and port that a text names, or `InvalidInput`."""
    host, _, port = str(text).rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise InvalidInput(f"{option} takes HOST:PORT, not {str(text)[:60]!r}.")
    return host.strip("[]"), int(port)


def lines_of(text: str, last: dict[str, float]) -> Iterator[str]:
    """Figures in the format of Prometheus, as lines of StatsD; `last` has what was told before."""
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            kinds[name] = kind
        found = _SAMPLE.fullmatch(line)
        if found is None:
            continue
        name, labels, value = found[1], found[2] or "", float(found[3])
        tags = ",".join(f"{each}:{_UNFIT.sub('_', said)}" for each, said in _LABEL.findall(labels))
        ending = f"|#{tags}" if tags else ""
        if kinds.get(name) == "gauge":
            yield f"{name}:{value:.12g}|g{ending}"
        elif not name.endswith("_bucket"):
            series = f"{name}{{{labels}}}"
            added = value - last.get(series, 0.0)
            last[series] = value
            if added:
                yield f"{name}:{added:.12g}|c{ending}"


def datagrams(lines: Iterator[str]) -> Iterator[bytes]:
    """Lines, as many in a datagram as go through in one piece."""
    body = b""
    for line in lines:
        more = line.encode()
        if body and len(body) + 1 + len(more) > DATAGRAM_BYTES_MAX:
            yield body
            body = b""
        body = body + b"\n" + more if body else more
    if body:
        yield body
