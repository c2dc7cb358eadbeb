"""What everything that signs tokens must do, as checks that run on any of them.

A check is given a `SignerBench`, and raises `AssertionError` where a promise of
`penstock.tokens.signer` does not hold. Signatures are verified by the library `cryptography` alone
wherever the question is whether others can verify them. No test framework is needed; with pytest:

    @pytest.mark.parametrize("name", SIGNER_CHECKS)
    def test_my_signer(name):
        asyncio.run(SIGNER_CHECKS[name](bench))
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from penstock.kernel.errors import SignerUnavailable, TokenRefused
from penstock.tokens.claims import (
    TASK_AUDIENCE,
    Claims,
    Grants,
    WriteGrant,
    decode,
    encode,
    public_key,
)
from penstock.tokens.signer import PublicKey, Signer

OpenSigner = Callable[[], AbstractAsyncContextManager[Signer]]

_MESSAGES: Final = (b"", b"\x00", b"one", "¿qué?".encode(), bytes(range(256)) * 64)
# Leading zeros of r or s are one in 256 each: enough signatures to have met them.
_MANY: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class SignerBench:
    """How signers are had."""

    open: OpenSigner
    """A signer of one key, the same each time."""
    open_other: OpenSigner
    """A signer of another key."""
    is_slow: bool = False
    """Whether a signature takes a request."""
    away: Callable[[Signer], AbstractAsyncContextManager[None]] | None = None
    """While it lasts, what signs cannot be reached; None for what is always there."""

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[Signer, Signer]]:
        async with AsyncExitStack() as stack:
            signer = await stack.enter_async_context(self.open())
            yield signer, await stack.enter_async_context(self.open_other())


Check = Callable[[SignerBench], Coroutine[Any, Any, None]]


def claims_of_task(task_id: int = 7, *, attempt: int = 2) -> Claims:
    """Claims as a dispatcher makes them."""
    return Claims(
        iss="penstock/default",
        aud=TASK_AUDIENCE,
        sub=f"task:{task_id}:{attempt}",
        iat=1_700_000_000,
        nbf=1_700_000_000,
        exp=1_700_000_060,
        jti="0123456789abcdefghjkmnpq",
        org="default",
        task_id=task_id,
        attempt=attempt,
        grants=Grants(
            write=(WriteGrant(dataset="trips", version="1", prefix="s3://lake/trips/7-2-x/"),),
            scratch="s3://lake/scratch/7-2-x/",
        ),
    )


def is_verified_elsewhere(message: bytes, *, signature: bytes, jwk: Mapping[str, str]) -> bool:
    """Whether a library that knows nothing of Penstock finds the signature right."""
    x, y = (int.from_bytes(_unpadded(jwk[name]), "big") for name in ("x", "y"))
    key = ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
    try:
        key.verify(encode_dss_signature(r, s), message, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


async def _signatures_verify_elsewhere(bench: SignerBench) -> None:
    async with bench.pair() as (signer, other):
        for message in _MESSAGES:
            signature = await signer.sign(message)
            assert len(signature) == 64, "a signature has 64 bytes"
            assert is_verified_elsewhere(message, signature=signature, jwk=signer.jwk)
            for wrong, jwk in ((message + b"\x00", signer.jwk), (message, other.jwk)):
                assert not is_verified_elsewhere(wrong, signature=signature, jwk=jwk)


async def _signatures_keep_their_leading_zeros(bench: SignerBench) -> None:
    async with bench.open() as signer:
        many = 40 if bench.is_slow else _MANY
        for number in range(many):
            message = str(number).encode()
            signature = await signer.sign(message)
            assert len(signature) == 64, "a signature has 64 bytes, with leading zeros too"
            assert is_verified_elsewhere(message, signature=signature, jwk=signer.jwk)


async def _the_public_half_is_a_plain_jwk(bench: SignerBench) -> None:
    async with bench.open() as signer:
        jwk = signer.jwk
        assert set(jwk) == {"kty", "crv", "x", "y", "kid", "alg", "use"}, "nothing else is said"
        said = tuple(jwk[name] for name in ("kty", "crv", "alg", "use"))
        assert said == ("EC", "P-256", "ES256", "sig")
        assert all(len(_unpadded(jwk[name])) == 32 for name in ("x", "y"))
        public_key(jwk)
        json.dumps(dict(jwk))


async def _a_key_is_named_by_its_thumbprint(bench: SignerBench) -> None:
    async with bench.pair() as (signer, other):
        jwk = signer.jwk
        # RFC 7638: the required members, sorted, without spaces.
        members = json.dumps({name: jwk[name] for name in ("crv", "kty", "x", "y")})
        digest = hashlib.sha256(members.replace(" ", "").encode()).digest()
        assert signer.kid == base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        assert jwk["kid"] == signer.kid
        assert signer.kid != other.kid
        async with bench.open() as again:
            assert (again.kid, again.jwk) == (signer.kid, signer.jwk), "one key has one name"


async def _tokens_are_decoded_by_their_own_key_only(bench: SignerBench) -> None:
    async with bench.pair() as (signer, other):
        claims = claims_of_task()
        token = await encode(claims, signer)
        keys = {each.kid: public_key(each.jwk) for each in (signer, other)}
        assert decode(token, keys) == claims
        for wrong, kind in (
            ({other.kid: keys[other.kid]}, "unknown key"),
            ({signer.kid: keys[other.kid]}, "bad signature"),
        ):
            said = _refusal(token, wrong)
            assert said == kind, f"{said} is said, and {kind} is meant"


async def _many_may_sign_at_once(bench: SignerBench) -> None:
    async with bench.open() as signer:
        messages = [str(number).encode() for number in range(20)]
        signed = await asyncio.gather(*map(signer.sign, messages))
        for message, signature in zip(messages, signed, strict=True):
            assert is_verified_elsewhere(message, signature=signature, jwk=signer.jwk)


async def _a_cancelled_signature_costs_no_other(bench: SignerBench) -> None:
    async with bench.open() as signer:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(signer.sign(b"given up"))
            group.create_task(signer.sign(b"kept"))
            task.cancel()
        signature = await signer.sign(b"after")
        assert is_verified_elsewhere(b"after", signature=signature, jwk=signer.jwk)


async def _the_private_half_is_never_shown(bench: SignerBench) -> None:
    async with bench.open() as signer:
        for shown in (repr(signer), str(signer), repr(signer.jwk)):
            assert "PRIVATE" not in shown
            assert "secret" not in shown.lower()
        assert "d" not in signer.jwk, "the private half is published"
        signer_jwk = dict(signer.jwk)
        signer_jwk["kid"] = "changed"
        assert signer.jwk["kid"] == signer.kid, "what is given away is a copy"


async def _who_is_away_says_so_and_comes_back(bench: SignerBench) -> None:
    if bench.away is None:
        return
    async with bench.open() as signer:
        async with bench.away(signer):
            for _ in range(2):
                said = ""
                try:
                    await signer.sign(b"message")
                except SignerUnavailable as error:
                    said = error.message
                assert said, "who is away says so"
        signature = await signer.sign(b"message")
        assert is_verified_elsewhere(b"message", signature=signature, jwk=signer.jwk)


def _refusal(token: str, keys: Mapping[str, PublicKey]) -> str:
    try:
        decode(token, keys)
    except TokenRefused as refusal:
        return refusal.kind
    return "nothing"


def _unpadded(text: str) -> bytes:
    assert "=" not in text, "base64url has no padding here"
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


SIGNER_CHECKS: Final[Mapping[str, Check]] = {
    check.__name__.removeprefix("_"): check
    for check in (
        _signatures_verify_elsewhere,
        _signatures_keep_their_leading_zeros,
        _the_public_half_is_a_plain_jwk,
        _a_key_is_named_by_its_thumbprint,
        _tokens_are_decoded_by_their_own_key_only,
        _many_may_sign_at_once,
        _a_cancelled_signature_costs_no_other,
        _the_private_half_is_never_shown,
        _who_is_away_says_so_and_comes_back,
    )
}
"""All checks, by name."""
