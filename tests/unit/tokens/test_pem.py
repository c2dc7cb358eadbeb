"""Keys in files: who may read them, and what a crash leaves."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from penstock.kernel.errors import InvalidInput
from penstock.tokens.signer import PemSigner


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_key_is_for_its_owner_only_whatever_the_mask(tmp_path: Path, mask: int) -> None:
    if mask == 0o022:
        (tmp_path / "keys").mkdir(mode=0o755)
    before = os.umask(mask)
    try:
        signer = PemSigner.make_in(tmp_path / "keys")
    finally:
        os.umask(before)
    [path] = (tmp_path / "keys").iterdir()
    assert path.name == f"{signer.kid}.pem"
    assert (_mode(path), _mode(path.parent)) == (0o600, 0o700)
    assert PemSigner.read(path).jwk == signer.jwk


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o666, 0o610])
def test_a_key_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    signer = PemSigner.make_in(tmp_path)
    path = tmp_path / f"{signer.kid}.pem"
    path.chmod(mode)
    with pytest.raises(InvalidInput, match="by others") as caught:
        PemSigner.read(path)
    assert "chmod 600" in caught.value.hint


def test_many_make_keys_in_one_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: PemSigner.make_in(tmp_path / "keys"), range(16)))
    found = {PemSigner.read(path).kid for path in (tmp_path / "keys").iterdir()}
    assert found == {each.kid for each in made}
    assert len(found) == 16


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InvalidInput, match="No space left"):
        PemSigner.make_in(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="No key can be kept"):
        PemSigner.make_in(tmp_path / "file" / "keys")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        PemSigner.read(tmp_path / "x.pem")


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def test_other_keys_are_refused_and_not_repeated() -> None:
    right = ec.generate_private_key(ec.SECP256R1())
    texts = [
        *(b"", b"x", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"),
        _pem(right)[:120],
        _pem(ec.generate_private_key(ec.SECP384R1())),
        _pem(ec.generate_private_key(ec.SECP256K1())),
        _pem(ed25519.Ed25519PrivateKey.generate()),
        right.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")),
        right.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    ]
    for text in texts:
        with pytest.raises(InvalidInput) as caught:
            PemSigner.from_pem(text, where="/keys/a.pem")
        assert caught.value.message.startswith("/keys/a.pem holds")
        assert caught.value.__cause__ is None
        lines = [line for line in text.decode().splitlines() if len(line) > 40]
        assert not any(line in str(caught.value) for line in lines)


def test_other_forms_of_the_same_key_are_read() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    old = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    assert PemSigner.from_pem(old).kid == PemSigner.from_pem(_pem(key)).kid
