"""What signs tokens, and how keys and signatures are written.

A `Signer` has one key of the curve P-256, whose name is the thumbprint of its public half (RFC
7638): the same key has the same name everywhere, two keys never share one, and it can be the name
of a file. `sign` is ECDSA with SHA-256 over the message, as the 64 bytes `r || s` of RFC 7518; KMS
and most libraries write signatures in DER, so there is a translation, which is strict.

A signer that cannot sign now raises `SignerUnavailable`; what it was asked for was not done and may
be asked for again. It never gives its private key away: not in a repr, an error or a log.

Implementations: `pem` (a file) and `kms`. The suite that both pass is
`penstock.testing.signer_contract`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.hashes import SHA256

from penstock.kernel.errors import InvalidInput

ALGORITHM: Final = "ES256"
SIGNATURE_BYTES: Final = 64
KID_CHARACTERS_MAX: Final = 200

_HALF: Final = SIGNATURE_BYTES // 2
# The order of the group of P-256 (FIPS 186-5): r and s are from 1 to one less.
_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_JWK_NAMES: Final = ("kty", "crv", "x", "y")

PublicKey = ec.EllipticCurvePublicKey
"""The public half of a key of P-256."""


class Signer(Protocol):
    """Signs with one key."""

    @property
    def kid(self) -> str:
        """The name of the key."""
        ...

    @property
    def jwk(self) -> Mapping[str, str]:
        """The public half, as a JSON Web Key with `kid`, `alg` and `use`."""
        ...

    async def sign(self, message: bytes) -> bytes:
        """The signature of a message: 64 bytes. Raises `SignerUnavailable`."""
        ...


def jwk_of(key: PublicKey) -> dict[str, str]:
    """A public key as a JSON Web Key, with the name that it has everywhere."""
    if not isinstance(key.curve, ec.SECP256R1):
        raise InvalidInput(f"The key is one of the curve {key.curve.name}, and not of P-256.")
    numbers = key.public_numbers()
    jwk = {
        "kty": "EC",
        "crv": "P-256",
        "x": to_base64url(numbers.x.to_bytes(_HALF, "big")),
        "y": to_base64url(numbers.y.to_bytes(_HALF, "big")),
    }
    return {**jwk, "kid": thumbprint(jwk), "alg": ALGORITHM, "use": "sig"}


def thumbprint(jwk: Mapping[str, str]) -> str:
    """The name of a key that follows from the key itself (RFC 7638)."""
    members = {name: jwk[name] for name in sorted(_JWK_NAMES)}
    return to_base64url(hashlib.sha256(msgspec.json.encode(members)).digest())


def is_signed(message: bytes, *, signature: bytes, key: PublicKey) -> bool:
    """Whether these 64 bytes are the key's signature of the message."""
    if len(signature) != SIGNATURE_BYTES:
        return False
    r, s = (int.from_bytes(each, "big") for each in (signature[:_HALF], signature[_HALF:]))
    # Libraries have forgotten this one: zeros would be a signature of everything (CVE-2022-21449).
    if not (0 < r < _ORDER and 0 < s < _ORDER):
        return False
    try:
        key.verify(encode_dss_signature(r, s), message, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def raw_of_der(signature: bytes) -> bytes:
    """The 64 bytes of a signature in DER. Raises `ValueError` for what is none."""
    r, s = decode_dss_signature(signature)
    if not (0 < r < _ORDER and 0 < s < _ORDER):
        raise ValueError("the numbers of the signature are out of range")
    return r.to_bytes(_HALF, "big") + s.to_bytes(_HALF, "big")


def to_base64url(data: bytes) -> str:
    """Bytes as base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_base64url(text: str) -> bytes:
    """The bytes of a base64url text. Raises `ValueError` for every spelling but the one."""
    try:
        data = base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except ValueError as error:
        raise ValueError("this is not base64url") from error
    # Decoders skip what they do not know, and bits at the end: many texts would be one token.
    if to_base64url(data) != text:
        raise ValueError("this is not the one spelling in base64url")
    return data
