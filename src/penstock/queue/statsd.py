"""A worker's figures for StatsD: sent over UDP every ten seconds, and once more at its end.

They are those of `Worker.metrics`, read from that very text, so that both tell the same. Counters,
and the sums and counts of histograms, are sent as what was added since the last time, gauges as
they are. Labels are sent as tags, in the form that DogStatsD, Telegraf and the exporter of
Prometheus take. What is lost on the way is lost: nothing waits for an answer, and nothing fails.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from penstock.kernel.clock import Clock
from penstock.kernel.errors import InvalidInput
from penstock.kernel.service import Service

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
                f"Figures cannot be sent to {host}:{port}: {error.strerror or error}.",
                hint="--statsd takes HOST:PORT.",
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
