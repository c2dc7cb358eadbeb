"""Stores on a real S3 server: opened, refused, with TLS, and by a machine whose clock is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import new_id, system_entropy
from penstock.kernel.errors import (
    BucketNotFound,
    InvalidInput,
    NotFound,
    PenstockError,
    Refused,
    Unavailable,
    VersionConflict,
)
from penstock.store.base import CREATE, Object, ObjectStore, Swap
from penstock.store.opening import Opening, open_store
from penstock.store.retrying import Retries
from penstock.store.s3.backend import S3Store
from penstock.store.s3.config import s3_config
from penstock.store.s3.local import LocalS3
from penstock.store.s3.signing import Credentials
from penstock.store.s3.transport import TransportLimits
from tests.integration.asking import run

_ONCE = Retries(tries_max=1)


def some_place(server: LocalS3, *, endpoint: str = "", bucket: str = "penstock") -> str:
    """The URL of an empty prefix of its own."""
    prefix = new_id(system_entropy())
    return f"s3://{bucket}/{prefix}?endpoint={endpoint or server.endpoint}"


def opening(server: LocalS3) -> Opening:
    return Opening(credentials=server.credentials, environment={}, retries=_ONCE)


def refusal(url: str, how: Opening) -> PenstockError:
    """The error with which a store is not opened."""
    caught: list[PenstockError] = []

    async def check() -> None:
        with pytest.raises(PenstockError) as raised:
            await open_store(url, how)
        caught.append(raised.value)

    run(check())
    assert caught[0].message.endswith(".")
    assert caught[0].hint
    return caught[0]


async def exercise(store: ObjectStore) -> None:
    """A little of everything."""
    first = await store.put("a/b", b"one", CREATE, metadata={"owner": "worker 7; a=b"})
    second = await store.put("a/b", b"two", Swap(first))
    with pytest.raises(VersionConflict):
        await store.put("a/b", b"three", Swap(first))
    touched = await store.touch("a/b", version=second, metadata={"owner": "you"})
    found = await store.get("a/b")
    assert isinstance(found, Object)
    assert (found.body, dict(found.metadata)) == (b"two", {"owner": "you"})
    assert [entry.key for entry in (await store.list()).entries] == ["a/b"]
    await store.delete("a/b", version=touched)
    with pytest.raises(NotFound):
        await store.head("a/b")


def test_a_store_is_opened_and_used(local_s3: LocalS3) -> None:
    async def check() -> None:
        store = await open_store(some_place(local_s3), opening(local_s3))
        await exercise(store)
        await store.close()

    run(check())


def test_credentials_come_from_the_environment_given(local_s3: LocalS3) -> None:
    environment = {
        "AWS_ACCESS_KEY_ID": local_s3.credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": local_s3.credentials.secret_key,
        "AWS_ENDPOINT_URL": f"{local_s3.endpoint}/",
        "AWS_REGION": "eu-north-1",
    }

    async def check() -> None:
        url = some_place(local_s3).partition("?")[0]
        store = await open_store(url, Opening(environment=environment))
        await exercise(store)
        await store.close()

    run(check())


def test_a_missing_bucket_is_not_made(local_s3: LocalS3) -> None:
    url = some_place(local_s3, bucket="no-such-bucket")
    for _ in range(2):
        error = refusal(url, opening(local_s3))
        assert type(error) is BucketNotFound
        assert error.message == "The bucket 'no-such-bucket' does not exist."
        assert error.hint.startswith("Create it, or check its name")


def test_a_wrong_secret(local_s3: LocalS3) -> None:
    wrong = replace(local_s3.credentials, secret_key="wrong")
    error = refusal(some_place(local_s3), replace(opening(local_s3), credentials=wrong))
    assert type(error) is Refused
    assert "The credentials for bucket 'penstock' are wrong (403 SignatureDoesNotMatch" in str(
        error
    )
    assert error.hint.startswith("Check the access key")


def test_an_unknown_access_key(local_s3: LocalS3) -> None:
    wrong = Credentials("AKIDNOBODY", local_s3.credentials.secret_key)
    error = refusal(some_place(local_s3), replace(opening(local_s3), credentials=wrong))
    assert type(error) is Refused
    assert "for bucket 'penstock' are wrong (403 InvalidAccessKeyId" in error.message
    assert error.hint.startswith("Check the access key")


def test_no_credentials(local_s3: LocalS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    error = refusal(some_place(local_s3), replace(opening(local_s3), credentials=None))
    assert type(error) is Refused
    assert error.message.startswith("There are no credentials for bucket 'penstock' (")
    assert "AWS_ACCESS_KEY_ID" in error.hint


def test_nobody_listens(local_s3: LocalS3) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = some_place(local_s3, endpoint=f"http://127.0.0.1:{port}")
    error = refusal(url, opening(local_s3))
    assert type(error) is Unavailable
    assert f"http://127.0.0.1:{port} cannot be reached (connection refused)" in str(error)


@pytest.mark.parametrize(
    "url",
    [
        "bucket",
        "http://127.0.0.1/bucket",
        "s3:bucket",
        "s3://",
        "s3://Bucket",
        "s3://bucket?endpiont=http://127.0.0.1",
        "s3://bucket?style=virtuel",
        "s3://bucket?endpoint=127.0.0.1:8333",
    ],
)
def test_a_wrong_url(url: str) -> None:
    assert type(refusal(url, Opening())) is InvalidInput


class DayOff(SystemClock):
    """A machine whose wall clock is wrong by this much."""

    def __init__(self, off_seconds: float) -> None:
        self.off_seconds = off_seconds

    def wall(self) -> float:
        return super().wall() + self.off_seconds


@pytest.mark.parametrize("off", [-86_400.0, 86_400.0])
def test_a_machine_whose_clock_is_wrong_by_a_day(local_s3: LocalS3, off: float) -> None:
    async def check() -> None:
        clock = DayOff(off)
        how = replace(opening(local_s3), clock=clock)
        store = await open_store(some_place(local_s3), how)
        await exercise(store)
        now = await store.now()
        right = clock.wall() - off
        assert now.earliest - 2 <= right <= now.latest + 2
        await store.close()

    run(check())


def test_a_large_object(local_s3: LocalS3) -> None:
    async def check() -> None:
        store = await open_store(some_place(local_s3), opening(local_s3))
        body = bytes(range(256)) * 4 * 8192
        version = await store.put("large", body, metadata={"two-spaces": "a  b", "none": "x"})
        found = await store.get("large")
        assert isinstance(found, Object)
        assert found.body == body
        assert found.version == version
        assert dict(found.metadata) == {"two-spaces": "a  b", "none": "x"}
        await store.put("large", body[:-1], Swap(version))
        assert (await store.head("large")).size == 8 * 1024 * 1024 - 1
        await store.delete("large")
        await store.close()

    run(check())


@dataclass(frozen=True)
class Certificate:
    """Made for localhost and signed by itself."""

    public: Path
    private: Path


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    folder = tmp_path_factory.mktemp("certificate")
    made = Certificate(folder / "public.pem", folder / "private.pem")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now = datetime.fromtimestamp(SystemClock().wall(), tz=UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    made.public.write_bytes(certificate.public_bytes(pem))
    made.private.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made


@dataclass
class Proxy:
    """Speaks TLS, and passes everything on to the port of a server."""

    server_port: int
    port: int = 0
    handshakes: int = 0
    _busy: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        self.handshakes += 1
        inside = await asyncio.open_connection("127.0.0.1", self.server_port)
        await asyncio.gather(_copy(reader, inside[1]), _copy(inside[0], writer))
        self._busy.discard(task)

    async def drain(self) -> None:
        if self._busy:
            await asyncio.wait(self._busy, timeout=10)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    target.close()


@asynccontextmanager
async def tls_before(server: LocalS3, certificate: Certificate) -> AsyncIterator[Proxy]:
    """A proxy that runs before the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.public, certificate.private)
    proxy = Proxy(int(server.endpoint.rpartition(":")[2]))
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, ssl=context)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        await proxy.drain()
        await listener.wait_closed()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_tls_is_accepted_from_whom_the_bundle_names(
    local_s3: LocalS3, certificate: Certificate, host: str
) -> None:
    async def check() -> None:
        async with tls_before(local_s3, certificate) as proxy:
            url = some_place(local_s3, endpoint=f"https://{host}:{proxy.port}")
            environment = {"AWS_CA_BUNDLE": str(certificate.public)}
            store = await open_store(url, replace(opening(local_s3), environment=environment))
            await exercise(store)
            await store.close()

    run(check())


def test_tls_is_refused_from_strangers(local_s3: LocalS3, certificate: Certificate) -> None:
    async def check() -> None:
        async with tls_before(local_s3, certificate) as proxy:
            url = some_place(local_s3, endpoint=f"https://localhost:{proxy.port}")
            config = s3_config(url, environment={}, credentials=local_s3.credentials)
            store = S3Store(
                config, clock=SystemClock(), limits=TransportLimits(connect_seconds=0.5)
            )
            with pytest.raises(Unavailable) as caught:
                await store.put("k", b"")
            assert (
                "cannot be reached (its certificate is not trusted: self-signed certificate)"
                in caught.value.message
            )
            assert "AWS_CA_BUNDLE" in caught.value.hint
            await store.close()
            assert proxy.handshakes == 0

    run(check())


def test_plain_text_to_a_tls_port(local_s3: LocalS3, certificate: Certificate) -> None:
    async def check() -> None:
        async with tls_before(local_s3, certificate) as proxy:
            url = some_place(local_s3, endpoint=f"http://localhost:{proxy.port}")
            with pytest.raises(Unavailable, match="did not answer"):
                await open_store(url, opening(local_s3))

    run(check())


def test_tls_to_a_plain_port(local_s3: LocalS3) -> None:
    url = some_place(local_s3, endpoint=local_s3.endpoint.replace("http:", "https:"))
    error = refusal(url, opening(local_s3))
    assert type(error) is Unavailable
    assert "cannot be reached" in error.message
