"""A way to a server on which a test can keep one request back, and do its worst meanwhile.

Bytes go through as they are. A request that is held is not sent on, nor what follows it on its
connection; the connections beside it go on. It is let go by the test, or goes down with the server
or the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field

from penstock.kernel.service import Service

LOOPBACK = "127.0.0.1"
_PIECE = 64 * 2**10
_LINE_MAX = 2_000
"""How long the line of a request may be that is found where two pieces meet."""


@dataclass(slots=True)
class HeldRequest:
    """The first request, or a later one, whose line fits a pattern."""

    pattern: re.Pattern[bytes]
    number: int = 1
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    _found: int = 0

    def is_in(self, before: bytes, piece: bytes) -> bool:
        """Whether it begins in this piece, or ends in it."""
        if self.reached.is_set():
            return False
        found = self.pattern.finditer(before + piece)
        self._found += sum(1 for each in found if each.end() > len(before))
        return self._found >= self.number


class HoldingProxy(Service):
    """In front of the port of a server, which may come and go."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._held: list[HeldRequest] = []

    @property
    def endpoint(self) -> str:
        assert self._server is not None
        return f"http://{LOOPBACK}:{self._server.sockets[0].getsockname()[1]}"

    def hold(self, line: str, *, number: int = 1) -> HeldRequest:
        """Hold the request of this number whose first line fits."""
        made = HeldRequest(re.compile(line.encode()), number)
        self._held.append(made)
        return made

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)

    async def stop(self) -> None:
        for each in self._held:
            each.released.set()
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(back):
            server, there = await asyncio.open_connection(LOOPBACK, self._port)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(client, there, back, is_asking=True))
                group.create_task(self._pump(server, back, there, is_asking=False))

    async def _pump(
        self,
        source: asyncio.StreamReader,
        to: asyncio.StreamWriter,
        other: asyncio.StreamWriter,
        *,
        is_asking: bool,
    ) -> None:
        """Until one side ends; then both connections do."""
        before = b""
        with contextlib.closing(to), contextlib.closing(other), contextlib.suppress(OSError):
            while piece := await source.read(_PIECE):
                for each in self._held if is_asking else ():
                    if each.is_in(before, piece):
                        each.reached.set()
                        await each.released.wait()
                before = (before + piece)[-_LINE_MAX:]
                to.write(piece)
                await to.drain()
