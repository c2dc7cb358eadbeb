"""Stores of private signing keys: a folder of this machine, or KMS.

A `KeyStore` makes keys and opens signers for them; which key is published, signs or is retired
is decided by `signing_keys`, in Postgres, where only public halves are.

**A folder**, `{data}/keys`, mode 0700:

    holder          its random name, which is the holder of its keys in Postgres
    {kid}.pem       a key: see `penstock.tokens.signer`
    lock            is locked by whoever makes a key, until it is published

Several dispatchers on one folder share its keys: one makes a key and publishes it under the
lock, the others find both. A crash between the two leaves a file that nobody signs with; a file
is left over, too, if Postgres has lost the row of its key. Both are reported as lost, and are
removed when they are a day old, under the lock. The file of a retired key is removed at once:
what it has signed is verified by the public half. A file that is damaged, or readable by
others, is an `InvalidInput` that says what to do. One that is gone is made anew, unless
somebody else is seen to sign with it: then the folder is a copy of another's, and both would go
on retiring each other's keys.

**KMS**: the holder is what the settings, or the last rotation, call the key; its reference is
the ARN that this was found to mean. It is looked up when a dispatcher starts and at every
rotation, so an alias that is moved takes effect then, and never between two signatures. Until
the new key signs, the old one does, by its ARN.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import stat
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.kernel.aws import Aws
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, system_entropy
from penstock.kernel.errors import InvalidInput, SignerUnavailable
from penstock.protocol.identity import secret_of
from penstock.tokens.kms import KmsSigner
from penstock.tokens.signer import SUFFIX, PemSigner, Signer
from penstock.tokens.verifier import RETIRED_AT

_LOCK_SECONDS_MAX: Final = 10.0
_LOCK_LOOK_SECONDS: Final = 0.05
_FORGOTTEN_SECONDS: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """A key as Postgres has it."""

    kid: str
    signer: str
    holder: str
    reference: str
    jwk: dict[str, Any]
    rotation: int
    created_at: datetime
    signs_from: datetime
    seen_at: datetime
    retired_at: datetime | None
    may_sign: bool
    """Whether its time has come, and it is not retired."""
    is_tended: bool
    """Whether it is not retired, and was looked after not long ago."""
    is_live: bool
    """Whether it is not retired, and somebody who has it was heard of a moment ago."""
    is_told: bool
    """Whether others are told of it: not if it was revoked, or retired for longer than a token
    lives."""
    revoked_at: datetime | None

    @property
    def is_useless(self) -> bool:
        """Whether nobody needs the private half: it signs no more, and was not just found again."""
        was_lost = self.retired_at == self.created_at
        return self.revoked_at is not None or (self.retired_at is not None and not was_lost)

    @property
    def public(self) -> dict[str, Any]:
        """The public half, with since when it signs no more."""
        if self.retired_at is None:
            return self.jwk
        return {**self.jwk, RETIRED_AT: math.floor(self.retired_at.timestamp())}


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """The last rotation that was asked for."""

    number: int = 0
    asked_at: datetime | None = None
    kms_key: str | None = None


@dataclass(frozen=True, slots=True)
class KeyTable:
    """What Postgres says of all keys, the newest first."""

    rows: Sequence[KeyRow]
    rotation: KeyRotation

    def of(self, holder: str) -> list[KeyRow]:
        """The keys of a holder that are not retired."""
        return [row for row in self.rows if row.holder == holder and row.retired_at is None]


@dataclass(frozen=True, slots=True)
class HeldKeys:
    """What a holder could sign with."""

    holder: str
    kids: Collection[str]
    is_new_wanted: bool
    """Whether it has to make a key, and publish it."""
    lost: Sequence[tuple[Signer, str]] = ()
    """Keys that it has and Postgres has not, with the references to them."""


class KeyStore(Protocol):
    """Has private halves."""

    kind: str

    async def look(self, book: KeyTable) -> HeldKeys:
        """What it holds of these keys. Raises `InvalidInput` for what a person has to mend."""
        ...

    def alone(self) -> AbstractAsyncContextManager[None]:
        """While in here, no other holder of the same name makes a key."""
        ...

    async def make(self, book: KeyTable) -> tuple[Signer, str]:
        """The signer of a new key, and the reference to it."""
        ...

    async def signer(self, row: KeyRow) -> Signer:
        """The signer of a key that it holds."""
        ...

    async def tidy(self, book: KeyTable) -> None:
        """Remove the private halves of keys that sign no more. Called alone."""
        ...

    async def check(self, kms_key: str | None) -> str | None:
        """The name of the key to rotate to; raises `InvalidInput` if it could not be this one."""
        ...

    async def close(self) -> None: ...


class PemKeyStore:
    """Keys in files of a folder."""

    kind = "pem"

    def __init__(
        self, folder: Path, *, clock: Clock | None = None, entropy: Entropy | None = None
    ) -> None:
        self._folder = folder
        self._clock = clock or SystemClock()
        self._entropy = entropy or system_entropy()
        self._signers: dict[str, PemSigner] = {}

    async def look(self, book: KeyTable) -> HeldKeys:
        holder, kids = await asyncio.to_thread(self._listed)
        own = book.of(holder)
        mine = [row for row in own if row.kid in kids]
        if not mine and any(row.is_live for row in own):
            raise InvalidInput(
                f"The key {own[0].kid} of the folder {self._folder} is not in it, and is in use.",
                hint="If the folder is a copy of another dispatcher's, remove it. If the file was"
                " just moved away, wait half a minute.",
            )
        newest = max((row.rotation for row in mine), default=-1)
        stray = kids - {row.kid for row in book.rows}
        lost = await asyncio.to_thread(self._lost, stray) if stray else ()
        return HeldKeys(holder, kids, is_new_wanted=newest < book.rotation.number, lost=lost)

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        lock = await asyncio.to_thread(self._open_lock)
        try:
            for _ in range(int(_LOCK_SECONDS_MAX / _LOCK_LOOK_SECONDS)):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                await self._clock.sleep(_LOCK_LOOK_SECONDS)
            else:
                raise SignerUnavailable(f"Another process is making a key in {self._folder}.")
            yield
        finally:
            # The lock is gone with what holds it, also when the process dies.
            os.close(lock)

    async def make(self, book: KeyTable) -> tuple[Signer, str]:
        del book
        signer = await asyncio.to_thread(PemSigner.make_in, self._folder)
        self._signers[signer.kid] = signer
        return signer, f"{signer.kid}{SUFFIX}"

    async def signer(self, row: KeyRow) -> Signer:
        if row.kid not in self._signers:
            self._signers[row.kid] = await asyncio.to_thread(self._read, row.kid)
        return self._signers[row.kid]

    async def tidy(self, book: KeyTable) -> None:
        await asyncio.to_thread(self._remove_useless, {row.kid: row for row in book.rows})

    async def check(self, kms_key: str | None) -> str | None:
        if kms_key is not None:
            raise InvalidInput(
                "This dispatcher signs with keys in files, and not with KMS.",
                hint="Set signer to kms and kms_key to the key, and start it again.",
            )
        return None

    async def close(self) -> None:
        self._signers.clear()

    def _listed(self) -> tuple[str, set[str]]:
        self._ready_folder()
        name = self._folder / "holder"
        holder = secret_of(name, entropy=self._entropy)
        if not holder.isalnum():
            raise InvalidInput(
                f"{name} does not hold the name of its folder.",
                hint=f"Remove the folder {self._folder}: new keys are made in its place.",
            )
        return holder, {each.stem for each in self._folder.glob(f"*{SUFFIX}")}

    def _ready_folder(self) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            if not self._folder.is_dir():
                raise InvalidInput(
                    f"{self._folder} is no folder, and keys belong there.", hint="Move it away."
                ) from None
        if stat.S_IMODE(self._folder.stat().st_mode) & 0o077:
            raise InvalidInput(
                f"The folder {self._folder} is open to others than its owner.",
                hint=f"chmod 700 {self._folder}",
            )

    def _open_lock(self) -> int:
        self._ready_folder()
        return os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _read(self, kid: str) -> PemSigner:
        path = self._folder / f"{kid}{SUFFIX}"
        signer = PemSigner.read(path)
        if signer.kid != kid:
            raise InvalidInput(
                f"{path} holds another key than the one of its name.",
                hint="Move the file away: a new key is made in its place.",
            )
        return signer

    def _lost(self, kids: Collection[str]) -> list[tuple[Signer, str]]:
        """The keys of these files, of those that can be read and are not forgotten."""
        found: list[tuple[Signer, str]] = []
        for kid in sorted(kids):
            with contextlib.suppress(InvalidInput, OSError):
                if self._age_seconds(self._folder / f"{kid}{SUFFIX}") <= _FORGOTTEN_SECONDS:
                    found.append((self._read(kid), f"{kid}{SUFFIX}"))
        return found

    def _age_seconds(self, path: Path) -> float:
        return self._clock.wall() - path.stat().st_mtime

    def _remove_useless(self, rows: dict[str, KeyRow]) -> None:
        for path in self._folder.glob(f"*{SUFFIX}"):
            row = rows.get(path.stem)
            if row is not None and row.retired_at is None:
                continue
            # A dispatcher that was killed before it could publish the key, long ago; or else one
            # of another database, which has been given the same folder.
            is_useless = row is not None and row.is_useless
            with contextlib.suppress(FileNotFoundError):
                if is_useless or self._age_seconds(path) > _FORGOTTEN_SECONDS:
                    path.unlink()
                    self._signers.pop(path.stem, None)


class KmsKeyStore:
    """Keys of AWS KMS; `name` is what the settings say."""

    kind = "kms"

    def __init__(self, name: str, *, aws: Aws, clock: Clock | None = None) -> None:
        if not name:
            raise InvalidInput(
                "KMS is to sign, and kms_key does not say with which key.",
                hint="Set PENSTOCK_KMS_KEY to an id, an ARN or an alias.",
            )
        self._name = name
        self._aws = aws
        self._clock = clock or SystemClock()
        self._signers: dict[str, KmsSigner] = {}
        """By their ARNs."""
        self._found: tuple[str, int, str] | None = None
        """A name, when it was looked up, by the rotation, and the ARN that it meant then."""
        self._known: tuple[str, int, str] | None = None
        """What of that was seen to be published: it is published once, and not again later."""

    async def look(self, book: KeyTable) -> HeldKeys:
        name = book.rotation.kms_key or self._name
        signer = await self._meant(name, book.rotation.number)
        # Any may be signed with until the one that is meant signs.
        kids = {
            row.kid
            for row in book.rows
            if row.retired_at is None and row.signer == self.kind
            if row.holder == name or book.rotation.kms_key is not None
        }
        own = book.of(name)
        newest = max((row.rotation for row in own), default=-1)
        if any(row.kid == signer.kid for row in book.rows):
            self._known = self._found
        is_new_wanted = newest < book.rotation.number or self._known != self._found
        return HeldKeys(name, kids, is_new_wanted=is_new_wanted)

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        # Nothing is made: what two look up at once is one key.
        yield

    async def make(self, book: KeyTable) -> tuple[Signer, str]:
        name = book.rotation.kms_key or self._name
        signer = await self._meant(name, book.rotation.number)
        return signer, signer.arn

    async def signer(self, row: KeyRow) -> Signer:
        signer = await self._opened(row.reference)
        if signer.kid != row.kid:
            raise InvalidInput(f"The KMS key {row.reference} is not the one that was published.")
        return signer

    async def tidy(self, book: KeyTable) -> None:
        used = {row.reference for row in book.rows if row.retired_at is None}
        meant = self._found[2] if self._found is not None else ""
        for arn in [each for each in self._signers if each not in used and each != meant]:
            await self._signers.pop(arn).close()

    async def check(self, kms_key: str | None) -> str | None:
        if kms_key is None:
            return None
        signer = await KmsSigner.open(kms_key, aws=self._aws, clock=self._clock)
        await signer.close()
        return signer.kid

    async def close(self) -> None:
        signers, self._signers = self._signers, {}
        for each in signers.values():
            await each.close()

    async def _meant(self, name: str, rotation: int) -> KmsSigner:
        """What a name means, or meant when it was last looked up for this rotation."""
        if self._found is not None and self._found[:2] == (name, rotation):
            return await self._opened(self._found[2])
        signer = await KmsSigner.open(name, aws=self._aws, clock=self._clock)
        earlier = self._signers.get(signer.arn)
        if earlier is not None:
            await signer.close()
        else:
            self._signers[signer.arn] = signer
        self._found = (name, rotation, signer.arn)
        return self._signers[signer.arn]

    async def _opened(self, arn: str) -> KmsSigner:
        if arn not in self._signers:
            self._signers[arn] = await KmsSigner.open(arn, aws=self._aws, clock=self._clock)
        return self._signers[arn]
