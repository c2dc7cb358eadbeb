"""The contract of what signs tokens: a key in a file, and KMS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.aws import aws_client
from penstock.kernel.clock import SystemClock
from penstock.tokens.kms import KmsSigner
from penstock.tokens.signer import SUFFIX, PemSigner, Signer
from tests.contract.signer_contract import SIGNER_CHECKS, SignerBench
from tests.integration.aws_server import AwsServer


def _file(path: Path) -> Callable[[], AbstractAsyncContextManager[Signer]]:
    @asynccontextmanager
    async def open_signer() -> AsyncIterator[Signer]:
        yield PemSigner.read(path)

    return open_signer


@pytest.mark.parametrize("name", SIGNER_CHECKS)
def test_a_key_in_a_file(name: str, tmp_path: Path) -> None:
    one, other = (tmp_path / f"{PemSigner.make_in(tmp_path).kid}{SUFFIX}" for _ in range(2))
    asyncio.run(SIGNER_CHECKS[name](SignerBench(open=_file(one), open_other=_file(other))))


class _Clock(SystemClock):
    """Its monotonic clock can be moved on."""

    ahead_seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_seconds


class _Kms:
    """Two keys of a KMS server, of which one has an alias."""

    def __init__(self, server: AwsServer) -> None:
        self._server = server
        self.clock = _Clock()
        self.client = aws_client("kms", aws=server.aws)
        self.keys = [self._make(), self._make()]

    def _make(self) -> str:
        made = self.client.create_key(KeySpec="ECC_NIST_P256", KeyUsage="SIGN_VERIFY")
        return str(made["KeyMetadata"]["KeyId"])

    def open(self, key: str) -> Callable[[], AbstractAsyncContextManager[Signer]]:
        @asynccontextmanager
        async def open_signer() -> AsyncIterator[Signer]:
            signer = await KmsSigner.open(key, aws=self._server.aws, clock=self.clock)
            try:
                yield signer
            finally:
                await signer.close()

        return open_signer

    @asynccontextmanager
    async def away(self, signer: Signer) -> AsyncIterator[None]:
        assert isinstance(signer, KmsSigner)
        calls = signer._calls
        client, calls._client = calls._client, _Refusing()
        yield
        calls._client = client
        self.clock.ahead_seconds += 1


class _Refusing:
    """A client of a server that is not there."""

    def sign(self, **_: Any) -> Any:
        raise ConnectionRefusedError("nobody listens")


@pytest.mark.parametrize("name", SIGNER_CHECKS)
def test_kms(name: str, aws_server: AwsServer) -> None:
    kms = _Kms(aws_server)
    one, other = kms.keys
    bench = SignerBench(open=kms.open(one), open_other=kms.open(other), is_slow=True, away=kms.away)
    try:
        asyncio.run(SIGNER_CHECKS[name](bench))
    finally:
        kms.client.close()
