"""Keys of dispatchers that the tests make: in memory, and one holder for all of a world's.

A key is made when something is first signed, for no loop runs that would do so.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from penstock.dispatcher.capabilities.key_store import HeldKeys, KeyRow, KeyTable
from penstock.dispatcher.capabilities.signing_keys import SigningKeys
from penstock.dispatcher.database.pool import Connection, Database
from penstock.kernel.errors import InvalidInput
from penstock.tokens.signer import PemSigner, Signer


class MemoryHolding:
    """Keys that no file has."""

    kind = "pem"

    def __init__(self, holder: str = "stage") -> None:
        self.holder = holder
        self.signers: dict[str, PemSigner] = {}

    async def look(self, book: KeyTable) -> HeldKeys:
        mine = [row.rotation for row in book.of(self.holder) if row.kid in self.signers]
        wanted = max(mine, default=-1) < book.rotation.number
        return HeldKeys(self.holder, list(self.signers), is_new_wanted=wanted)

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        yield

    async def make(self, book: KeyTable) -> tuple[Signer, str]:
        signer = PemSigner.new()
        self.signers[signer.kid] = signer
        return signer, "memory"

    async def signer(self, row: KeyRow) -> Signer:
        return self.signers[row.kid]

    async def tidy(self, book: KeyTable) -> None:
        for row in book.rows:
            if row.retired_at is not None:
                self.signers.pop(row.kid, None)

    async def check(self, kms_key: str | None) -> None:
        if kms_key is not None:
            raise InvalidInput("This dispatcher signs with keys in files, and not with KMS.")

    async def close(self) -> None: ...


SHARED = MemoryHolding()
"""Several dispatchers of one world are as several on one folder."""


class StageKeys(SigningKeys):
    """Keys that are made when they are first needed."""

    def __init__(self, database: Database, holding: MemoryHolding = SHARED) -> None:
        super().__init__(database, holding)
        self._is_made = False

    async def signer(self, *, connection: Connection | None = None) -> Signer:
        if not self._is_made:
            await self.turn()
            self._is_made = True
        return await super().signer(connection=connection)
