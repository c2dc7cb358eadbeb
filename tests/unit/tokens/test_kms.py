"""KMS, as far as no server is needed: what it is asked, and what is made of its failures."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.kernel.aws import Aws
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import InvalidInput, SignerUnavailable
from penstock.tokens.kms import QUIET_SECONDS, KmsSigner
from tests.contract.signer_contract import is_verified_elsewhere

ARN = "arn:aws:kms:us-east-1:123456789012:key/1234"


class Answered(Exception):
    """As boto3 tells what AWS has answered."""

    def __init__(self, code: str) -> None:
        super().__init__(f"An error occurred ({code}): arn of the caller")
        self.response = {"Error": {"Code": code}}


class Kms:
    """A client of KMS with one key, which may be out of order."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.spec, self.usage = "ECC_NIST_P256", "SIGN_VERIFY"
        self.asked: list[dict[str, Any]] = []
        self.failure: Callable[[], None] | None = None
        self.is_hashed_again = False
        self.is_closed = False

    def get_public_key(self, **asked: Any) -> dict[str, Any]:
        self.asked.append(asked)
        self._fail()
        public = self.key.public_key()
        return {
            "KeyId": ARN,
            "KeySpec": self.spec,
            "KeyUsage": self.usage,
            "PublicKey": public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        }

    def sign(self, **asked: Any) -> dict[str, Any]:
        self.asked.append(asked)
        self._fail()
        how = SHA256() if self.is_hashed_again else Prehashed(SHA256())
        return {"Signature": self.key.sign(asked["Message"], ec.ECDSA(how))}

    def close(self) -> None:
        self.is_closed = True

    def _fail(self) -> None:
        if self.failure is not None:
            self.failure()


class Clock(SystemClock):
    """It stands until it is moved on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


async def _open(kms: Kms, **how: Any) -> KmsSigner:
    return await KmsSigner.open("alias/penstock", aws=Aws(), make_client=lambda: kms, **how)


def _raise(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_kms_is_asked_for_a_digest_by_the_key_itself() -> None:
    async def main() -> None:
        kms = Kms()
        signer = await _open(kms)
        signature = await signer.sign(b"message")
        assert is_verified_elsewhere(b"message", signature=signature, jwk=signer.jwk)
        assert signer.arn == ARN
        assert kms.asked == [
            {"KeyId": "alias/penstock"},
            {
                "KeyId": ARN,
                "Message": hashlib.sha256(b"message").digest(),
                "MessageType": "DIGEST",
                "SigningAlgorithm": "ECDSA_SHA_256",
            },
        ]
        await signer.close()
        assert kms.is_closed
        with pytest.raises(SignerUnavailable):
            await signer.sign(b"message")

    asyncio.run(main())


@pytest.mark.parametrize(
    "code",
    ["ThrottlingException", "KMSInternalException", "DisabledException", "NotFoundException"],
)
def test_a_failure_is_remembered_for_a_moment(code: str) -> None:
    async def main() -> None:
        kms, clock = Kms(), Clock()
        signer = await _open(kms, clock=clock)
        kms.failure = _raise(Answered(code))
        with pytest.raises(SignerUnavailable, match=code) as first:
            await signer.sign(b"message")
        assert "arn of the caller" not in first.value.message
        kms.failure = None
        clock.now += QUIET_SECONDS * 0.9
        for _ in range(5):
            with pytest.raises(SignerUnavailable) as again:
                await signer.sign(b"message")
            assert again.value.message == first.value.message
        assert len(kms.asked) == 2
        clock.now += QUIET_SECONDS * 0.2
        await signer.sign(b"message")
        await signer.sign(b"message")
        assert len(kms.asked) == 4
        await signer.close()

    asyncio.run(main())


def test_who_does_not_answer_is_given_up() -> None:
    async def main() -> None:
        kms, hangs = Kms(), threading.Event()
        signer = await _open(kms, seconds_max=0.05)
        kms.failure = lambda: assert_set(hangs)
        try:
            with pytest.raises(SignerUnavailable, match=r"within 0\.05 s"):
                await signer.sign(b"message")
            with pytest.raises(SignerUnavailable, match=r"within 0\.05 s"):
                await signer.sign(b"message")
            assert len(kms.asked) == 2
        finally:
            hangs.set()
            await signer.close()

    def assert_set(event: threading.Event) -> None:
        assert event.wait(timeout=60)

    asyncio.run(main())


@pytest.mark.parametrize("spoil", ["hashed again", "another key", "no der"])
def test_a_signature_that_nobody_can_verify_is_a_failure(spoil: str) -> None:
    async def main() -> None:
        kms = Kms()
        signer = await _open(kms)
        if spoil == "hashed again":
            kms.is_hashed_again = True
        elif spoil == "another key":
            kms.key = ec.generate_private_key(ec.SECP256R1())
        else:
            kms.sign = lambda **_: {"Signature": b"x"}  # type: ignore[method-assign] # a stand-in
        with pytest.raises(SignerUnavailable):
            await signer.sign(b"message")
        await signer.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("spec", "usage"),
    [
        ("ECC_NIST_P384", "SIGN_VERIFY"),
        ("RSA_2048", "SIGN_VERIFY"),
        ("ECC_NIST_P256", "KEY_AGREEMENT"),
    ],
)
def test_a_key_for_something_else_is_refused(spec: str, usage: str) -> None:
    kms = Kms()
    kms.spec, kms.usage = spec, usage
    with pytest.raises(InvalidInput, match=f"one of {spec} for {usage}"):
        asyncio.run(_open(kms))
    assert kms.is_closed


def test_a_key_that_is_not_there_is_told() -> None:
    kms = Kms()
    kms.failure = _raise(Answered("NotFoundException"))
    with pytest.raises(InvalidInput, match="no such key") as caught:
        asyncio.run(_open(kms))
    assert "create-key" in caught.value.hint


@pytest.mark.parametrize(
    "error", [Answered("AccessDeniedException"), OSError("no route"), ValueError()]
)
def test_kms_that_is_away_at_the_start_is_told(error: Exception) -> None:
    kms = Kms()
    kms.failure = _raise(error)
    with pytest.raises(SignerUnavailable, match="KMS cannot sign now"):
        asyncio.run(_open(kms))
    assert kms.is_closed
