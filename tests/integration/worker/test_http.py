"""Requests to dispatchers over real connections: which are kept, and what ends them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from base64 import b64encode
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock import Client
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import DispatcherUnavailable, InvalidInput
from penstock.protocol.base import PROTOCOL, PROTOCOL_HEADER
from penstock.protocol.client import check_url
from penstock.protocol.identity import Identity
from penstock.worker.client import InternalClient

SOURCES = b'{"sources":[],"now":"2026-01-01T00:00:00Z","backfills":[]}'


class Server:
    """Answers every request alike, and notes which connection each came over."""

    def __init__(self, *, answers_max: int = 1_000, header: str = "x: y") -> None:
        self._answers_max = answers_max
        self._header = header
        self.connections: list[int] = []
        self.heads: list[str] = []
        self.tasks: list[asyncio.Task[None] | None] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.current_task())
        number = max(self.connections, default=0) + 1
        try:
            for _ in range(self._answers_max):
                head = await reader.readuntil(b"\r\n\r\n")
                self.connections.append(number)
                self.heads.append(head.decode())
                lines = f"content-length: {len(SOURCES)}\r\n{self._header}\r\n\r\n"
                writer.write(f"HTTP/1.1 200 OK\r\n{lines}".encode() + SOURCES)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            await _close(writer)


def _story(server: Server, story: Callable[[InternalClient], Awaitable[None]]) -> None:
    async def main() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        async with listening:
            client = InternalClient(
                [f"http://127.0.0.1:{port}/below/"],
                Identity("w", "t"),
                clock=SystemClock(),
                entropy=seeded_entropy(1),
            )
            async with client:
                await story(client)

    asyncio.run(main())


async def _ask_thrice(client: InternalClient) -> None:
    for _ in range(3):
        await client.sources()


def test_a_connection_is_kept_and_who_asks_is_told() -> None:
    server = Server()
    _story(server, _ask_thrice)
    assert server.connections == [1, 1, 1]
    assert server.heads[0].startswith("GET /below/internal/sources HTTP/1.1\r\nhost: 127.0.0.1:")
    assert "Authorization: Bearer t\r\n" in server.heads[0]
    assert f"{PROTOCOL_HEADER}: {PROTOCOL}\r\n" in server.heads[0]


@pytest.mark.parametrize("server", [Server(answers_max=1), Server(header="connection: close")])
def test_a_connection_that_the_other_side_closes_costs_no_request(server: Server) -> None:
    _story(server, _ask_thrice)
    assert server.connections == [1, 2, 3]


def test_whom_nobody_reaches_is_told_with_the_reason() -> None:
    async def story(client: InternalClient) -> None:
        client._caller.urls = ["http://127.0.0.1:1"]
        with pytest.raises(DispatcherUnavailable, match="connection refused"):
            await client.sources()

    _story(Server(), story)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:y", "http://a b", "http://x\n"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="not the URL of a dispatcher"):
        check_url(url)


class Proxy:
    """Notes what it is asked for; a tunnel leads to `to`, and everything else is answered here."""

    def __init__(self, to: int, *, refuses: bool = False) -> None:
        self._to = to
        self._refuses = refuses
        self.heads: list[str] = []
        self.tasks: list[asyncio.Task[None] | None] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            if self._refuses:
                writer.write(b"HTTP/1.1 407 No\r\ncontent-length: 0\r\n\r\n")
            elif self.heads[-1].startswith("CONNECT "):
                writer.write(b"HTTP/1.1 200 Established\r\n\r\n")
                inside = await asyncio.open_connection("127.0.0.1", self._to)
                await asyncio.gather(_copy(reader, inside[1]), _copy(inside[0], writer))
            else:
                length = f"content-length: {len(SOURCES)}\r\n\r\n".encode()
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + length + SOURCES)
        await _close(writer)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65536):
            target.write(data)
    await _close(target)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()


def _certified(folder: Path) -> Path:
    """A certificate of dispatcher.test, with its key, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dispatcher.test")])
    now = datetime.fromtimestamp(SystemClock().wall(), tz=UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("dispatcher.test")]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    file = folder / "both.pem"
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    file.write_bytes(made.public_bytes(pem) + private)
    return file


def _by_proxy(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False
) -> tuple[Proxy, Server]:
    """Ask for backfills twice, where the environment names a proxy."""
    file = _certified(folder)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    inside = Server()

    async def main() -> Proxy:
        behind = await asyncio.start_server(inside.serve, "127.0.0.1", 0, ssl=context)
        proxy = Proxy(behind.sockets[0].getsockname()[1], refuses=refuses)
        before = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        port = before.sockets[0].getsockname()[1]
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://me:p%40ss@127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "inside.test")
        async with behind, before:
            try:
                async with Client(url) as client:
                    for _ in range(2):
                        assert (await client.backfills()).backfills == []
            finally:
                serving = [each for each in (*proxy.tasks, *inside.tasks) if each is not None]
                if serving:
                    await asyncio.wait(serving, timeout=30)
        return proxy

    return asyncio.run(main()), inside


PROOF = f"proxy-authorization: Basic {b64encode(b'me:p@ss').decode()}\r\n"


def test_a_client_goes_by_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, _ = _by_proxy("http://dispatcher.test:70/below", tmp_path, monkeypatch)
    assert [each.split("\r\n")[0] for each in proxy.heads] == [
        "GET http://dispatcher.test:70/below/v1/backfills HTTP/1.1"
    ] * 2
    assert PROOF in proxy.heads[0]


def test_tls_goes_through_the_proxy_and_is_checked_by_the_name_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, inside = _by_proxy("https://dispatcher.test", tmp_path, monkeypatch)
    (head,) = proxy.heads
    assert head.startswith("CONNECT dispatcher.test:443 HTTP/1.1\r\n")
    assert PROOF in head
    assert inside.connections == [1, 1]
    assert "proxy-authorization" not in inside.heads[0]
    with pytest.raises(DispatcherUnavailable, match="certificate is not trusted"):
        _by_proxy("https://another.test", tmp_path, monkeypatch)


def test_a_proxy_that_refuses_is_named_and_one_that_is_not_for_it_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DispatcherUnavailable, match="the proxy answered 407"):
        _by_proxy("https://dispatcher.test", tmp_path, monkeypatch, refuses=True)
    with pytest.raises(
        DispatcherUnavailable, match=r"No dispatcher answers at http://inside\.test"
    ):
        _by_proxy("http://inside.test", tmp_path, monkeypatch)
    with pytest.raises(DispatcherUnavailable, match="No dispatcher answers"):
        _by_proxy("http://127.0.0.1:1", tmp_path, monkeypatch)
