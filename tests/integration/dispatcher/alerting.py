"""Places that notices are sent to, on this machine: a receiver of webhooks, and a mail server.

Both are real servers on loopback, with just enough of their protocols, and do as the test says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any

from penstock.dispatcher.alerts.evaluator import AlertEvaluator
from penstock.dispatcher.alerts.rules import read_alerts
from penstock.dispatcher.database.pool import Database
from tests.integration.dispatcher.world import World

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@dataclass
class Heard:
    """A request that came in."""

    headers: dict[str, str]
    body: bytes

    @property
    def said(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


@dataclass
class Receiver:
    """A receiver of webhooks; `status` is what it answers, and 0 is nothing at all."""

    url: str = ""
    status: int = 200
    location: str = ""
    heard: list[Heard] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = [line.partition(": ") for line in head.split("\r\n")[1:] if line]
        headers = {name.lower(): value for name, _, value in lines}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.heard.append(Heard(headers, body))
        self.came.set()
        if self.status == 0:
            await reader.read()
            return
        more = f"Location: {self.location}\r\n" if self.location else ""
        writer.write(f"HTTP/1.1 {self.status} So\r\n{more}Content-Length: 0\r\n\r\n".encode())
        await writer.drain()


@dataclass
class MailServer:
    """A mail server. `answers` are what it says to a command instead of yes, by its first word."""

    port: int = 0
    answers: dict[str, str] = field(default_factory=dict)
    offers: tuple[str, ...] = ()
    tls: ssl.SSLContext | None = None
    """For STARTTLS."""
    mails: list[EmailMessage] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    is_tls: list[bool] = field(default_factory=list)
    """Of each mail: whether it came over TLS."""
    came: asyncio.Event = field(default_factory=asyncio.Event)
    is_mute: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.came.set()
        if self.is_mute:
            await reader.read()
            return
        writer.write(b"220 here\r\n")
        while line := await reader.readline():
            words = line.decode().rstrip("\r\n")
            command = words.partition(" ")[0].upper()
            self.commands.append(words)
            if command in self.answers:
                writer.write(f"{self.answers[command]}\r\n".encode())
            elif command == "EHLO":
                said = ["250-here", *(f"250-{each}" for each in self.offers), "250 8BITMIME"]
                writer.write("\r\n".join([*said, ""]).encode())
            elif command == "STARTTLS":
                assert self.tls is not None
                writer.write(b"220 go\r\n")
                await writer.drain()
                await writer.start_tls(self.tls)
            elif command == "DATA":
                await self._data(reader, writer)
            else:
                yes = {"QUIT": b"221 bye\r\n", "AUTH": b"235 welcome\r\n"}
                writer.write(yes.get(command, b"250 yes\r\n"))
            await writer.drain()
            if command == "QUIT":
                return

    async def _data(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"354 go on\r\n")
        await writer.drain()
        text = await reader.readuntil(b"\r\n.\r\n")
        mail = message_from_bytes(text[:-3], policy=default)
        assert isinstance(mail, EmailMessage)
        self.mails.append(mail)
        self.is_tls.append(writer.get_extra_info("ssl_object") is not None)
        writer.write(self.answers.get("MAIL-END", "250 taken").encode() + b"\r\n")


@contextlib.asynccontextmanager
async def listening(serve: Serve, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Serve on a port of loopback."""

    serving: set[asyncio.Task[None] | None] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        try:
            with contextlib.suppress(OSError, EOFError):
                await serve(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await writer.wait_closed()

    server = await asyncio.start_server(one, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        begun = [each for each in serving if each is not None]
        if begun:
            _, late = await asyncio.wait(begun, timeout=1)
            for each in late:
                each.cancel()
            await asyncio.gather(*begun, return_exceptions=True)


@contextlib.asynccontextmanager
async def receiving(**fields: Any) -> AsyncIterator[Receiver]:
    receiver = Receiver(**fields)
    async with listening(receiver.serve) as port:
        receiver.url = f"http://127.0.0.1:{port}/hook/sesame"
        yield receiver


@contextlib.asynccontextmanager
async def mailing(*, is_tls: bool = False, **fields: Any) -> AsyncIterator[MailServer]:
    server = MailServer(**fields)
    async with listening(server.serve, tls=server.tls if is_tls else None) as port:
        server.port = port
        yield server


def judge_of(
    world: World,
    table: dict[str, Any] | None = None,
    *,
    name: str = "first",
    database: Database | None = None,
    days: float = 30,
    **fields: Any,
) -> AlertEvaluator:
    return AlertEvaluator(
        database or world.database, read_alerts(table or {}), name=name, days=days, **fields
    )


async def alerts(world: World) -> list[tuple[str, str, bool]]:
    """Rule, subject and whether it is open, of all alerts."""
    rows = await world.rows("SELECT rule, subject, over_at IS NULL AS open FROM alert ORDER BY id")
    return [(row["rule"], row["subject"], row["open"]) for row in rows]


async def notices(world: World) -> list[tuple[str, str, bool, int]]:
    """Destination, what, whether it was sent, and tries, of all notices."""
    rows = await world.rows(
        "SELECT destination, what, sent_at IS NOT NULL AS sent, tries FROM alert_notice"
        " ORDER BY alert_id, destination, what"
    )
    return [(row["destination"], row["what"], row["sent"], row["tries"]) for row in rows]
