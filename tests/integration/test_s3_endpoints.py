"""Endpoints in every form, credentials that are missing or lost, certificates of no use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from awscrt.auth import AwsCredentialsProvider

from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import InvalidInput, Refused, Unavailable
from penstock.store.s3.backend import S3Store
from penstock.store.s3.config import s3_config
from penstock.store.s3.signing import Keyring
from tests.integration.asking import READS, WRITES, error_of, run
from tests.integration.scripted import KEYS, ScriptedServer, fine_object


def test_an_ipv6_endpoint() -> None:
    async def check() -> None:
        async with ScriptedServer(fine_object(), host="::1") as server:
            store = server.store()
            await store.get("k")
            assert server.calls[0].headers["host"] == f"[::1]:{server.port}"
            assert "host" in server.calls[0].headers["authorization"]
            await store.close()

    run(check())


def test_virtual_style_names_the_bucket_in_the_host() -> None:
    async def check() -> None:
        async with ScriptedServer(fine_object()) as server:
            # A bucket 127 at the host 0.0.1 is a name that resolves without a name server.
            url = f"s3://127/base?style=virtual&endpoint=http://0.0.1:{server.port}"
            config = s3_config(url, environment={}, credentials=KEYS)
            store = S3Store(config, clock=SystemClock())
            await store.get("k")
            await error_of(store.list())
            one, two = server.calls
            assert one.headers["host"] == f"127.0.0.1:{server.port}"
            assert (one.path, two.path) == ("/base/k", "/")
            assert two.query["prefix"] == "base/"
            await store.close()

    run(check())


@pytest.fixture
def from_environment(monkeypatch: pytest.MonkeyPatch) -> AwsCredentialsProvider:
    """Credentials that are read anew for each signature, and are not there yet."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return AwsCredentialsProvider.new_environment()


def signing_with(provider: AwsCredentialsProvider, server: ScriptedServer) -> S3Store:
    url = f"s3://bucket?endpoint={server.endpoint}"
    config = s3_config(url, environment={}, credentials=KEYS)
    return S3Store(
        replace(config, keyring=Keyring(provider, ask_again_seconds=0)), clock=SystemClock()
    )


def test_credentials_that_cannot_be_had(from_environment: AwsCredentialsProvider) -> None:
    async def check() -> None:
        async with ScriptedServer(fine_object()) as server:
            store = signing_with(from_environment, server)
            for ask in (*READS.values(), *WRITES.values()):
                error = await error_of(ask(store))
                assert type(error) is Refused
                assert "There are no credentials for bucket 'bucket'" in error.message
                assert "AWS_ACCESS_KEY_ID" in error.hint
            assert server.connections == 0
            await store.close()

    run(check())


def test_credentials_that_cannot_be_renewed_just_now(
    from_environment: AwsCredentialsProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with ScriptedServer(fine_object()) as server:
            store = signing_with(from_environment, server)
            for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
                monkeypatch.setenv(f"AWS_{name}", f"some-{name}")
            await store.get("k")
            assert server.calls[0].headers["x-amz-security-token"] == "some-SESSION_TOKEN"
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
            for ask in (*READS.values(), *WRITES.values()):
                error = await error_of(ask(store))
                assert type(error) is Unavailable
                assert "no new credentials" in error.message
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
            await store.get("k")
            assert len(server.calls) == 2
            await store.close()

    run(check())


def test_a_ca_bundle_of_no_use_is_refused(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    for content in (None, b"", b"no certificate"):
        if content is not None:
            bundle.write_bytes(content)
        config = s3_config(
            "s3://bucket", environment={"AWS_CA_BUNDLE": str(bundle)}, credentials=KEYS
        )
        with pytest.raises(InvalidInput, match="The certificates for TLS cannot be used"):
            S3Store(config, clock=SystemClock())
