"""Signs with a private key in a file: `{folder}/{kid}.pem`, PKCS #8, for its owner's eyes only.

A key file appears whole, by a rename, on the disk, and never changes. The folder is made 0700 and
the file 0600, whatever the umask; a file that others may read is refused, as `ssh` does. A crash
leaves no file, or a hidden one beside it that nobody reads (`.` and ending in `.new`). Any number
of processes may make keys in one folder at once: each makes a key, no two have one name.

Signing takes tens of microseconds of this process, no request, and does not fail.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from penstock.kernel.errors import InvalidInput
from penstock.tokens.signing import jwk_of, raw_of_der

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
                f"{where} holds no private key in PEM that is readable without a password.",
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
