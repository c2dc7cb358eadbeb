"""What signs tokens, and how keys and signatures are written.

A `Signer` has one key of the curve P-256, whose name is the thumbprint of its public half (RFC
7638): the same key has the same name everywhere, two keys never share one, and it can be the name
of a file. `sign` is ECDSA with SHA-256 over the message, as the 64 bytes `r || s` of RFC 7518; KMS
and most libraries write signatures in DER, so there is a translation, which is strict.

A signer that cannot sign now raises `SignerUnavailable`; what it was asked for was not done and may
be asked for again. It never gives its private key away: not in a repr, an error or a log.

Implementations: `PemSigner` here, and `kms`. The suite that both pass is
`tests/contract/signer_contract.py`.

`PemSigner` has a private key in a file: `{folder}/{kid}.pem`, PKCS #8, for its owner's eyes only. A
key file appears whole, by a rename, on the disk, and never changes. The folder is made 0700 and the
file 0600, whatever the umask; a file that others may read is refused, as `ssh` does. A crash leaves
no file, or a hidden one beside it that nobody reads (`.` and ending in `.new`). Any number of
processes may make keys in one folder at once: each makes a key, no two have one name.

Signing takes tens of microseconds of this process, no request, and does not fail.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol, Self

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

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
        raise ValueError("not base64url") from error
    # Decoders skip what they do not know, and bits at the end: many texts would be one token.
    if to_base64url(data) != text:
        raise ValueError("not canonical base64url")
    return data


SUFFIX: Final = ".pem"

_FILE_BYTES_MAX: Final = 64 * 1024
_REMAKE: Final = "Move the file away: a new key is made in its place."


class PemSigner:
    """A key in the memory of this process."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self._jwk = jwk_of(key.public_key())

    def __repr__(self) -> str:
        return f"PemSigner({self.kid})"

    @classmethod
    def new(cls) -> Self:
        """A new key, of the operating system's randomness; nothing is written."""
        return cls(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def make_in(cls, folder: Path) -> Self:
        """A new key in a file of this folder, which is made if it is not there."""
        signer = cls.new()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            _write(folder / f"{signer.kid}{SUFFIX}", signer.to_pem())
        except OSError as error:
            raise InvalidInput(
                f"No key can be kept in {folder}: {error.strerror}.",
                hint="Let the dispatcher write there, or sign with KMS.",
            ) from error
        return signer

    @classmethod
    def read(cls, path: Path) -> Self:
        """The key in a file. Raises `InvalidInput` if there is none that can be used."""
        return cls.from_pem(_read(path), where=str(path))

    @classmethod
    def from_pem(cls, text: bytes, *, where: str = "the key") -> Self:
        """The key of a PEM text."""
        try:
            key = load_pem_private_key(text, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            # What the library says may quote the key.
            raise InvalidInput(
                f"{where} holds no private key in PEM without a password.",
                hint=_REMAKE,
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InvalidInput(f"{where} holds a key of another kind than P-256.", hint=_REMAKE)
        if not isinstance(key.curve, ec.SECP256R1):
            raise InvalidInput(f"{where} holds a key of another curve than P-256.", hint=_REMAKE)
        return cls(key)

    def to_pem(self) -> bytes:
        """The private key. It belongs into a file of mode 0600 and nowhere else."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def kid(self) -> str:
        return self._jwk["kid"]

    @property
    def jwk(self) -> Mapping[str, str]:
        return dict(self._jwk)

    async def sign(self, message: bytes) -> bytes:
        return raw_of_der(self._key.sign(message, ec.ECDSA(SHA256())))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise InvalidInput(f"The key {path} cannot be read: {error.strerror}.") from error
    if stat.S_IMODE(mode) & 0o077:
        raise InvalidInput(
            f"The key {path} can be read by others than its owner.",
            hint=f"If nobody has: chmod 600 {path}. Else: penstock keys rotate, and remove it.",
        )
    return text


def _write(path: Path, text: bytes) -> None:
    # A file of mkstemp is 0600 from its first moment on.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).rename(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
