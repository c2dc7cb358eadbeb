"""Who may read tables and do nothing else: tokens for programs that need no more.

A token is random; the database has its digest, and for which datasets it is. It is shown once, when
it is made. It opens the catalog and `/v1/query` and nothing else of a dispatcher, so that nobody
has to write the operator's token into the configuration of a query engine. What is taken back is
refused within `REMEMBERED_SECONDS`, everywhere. Called by the API.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, new_id

READ_PREFIX: Final = "read."
"""How these tokens begin."""
REMEMBERED_SECONDS: Final = 5.0
READERS_MAX: Final = 1000
_REMEMBERED_MAX: Final = 1000
_CHARACTERS: Final = 40


@dataclass(frozen=True, slots=True)
class CatalogReader:
    """Somebody who may read."""

    name: str
    tables: frozenset[str] | None
    """None is all."""


class ReadTokens:
    """Makes and judges tokens for reading."""

    def __init__(self, database: Database, *, entropy: Entropy, clock: Clock | None = None) -> None:
        self._database = database
        self._entropy = entropy
        self._clock = clock or SystemClock()
        self._known: dict[str, tuple[float, CatalogReader | None]] = {}

    async def find(self, token: str) -> CatalogReader | None:
        """Whose token it is; None if it is nobody's."""
        name, now = _digest(token), self._clock.monotonic()
        known = self._known.get(name)
        if known is not None and now - known[0] < REMEMBERED_SECONDS:
            return known[1]
        rows = await self._ask("find_reader", digest=name)
        reader = None
        if rows:
            datasets = rows[0]["datasets"]
            reader = CatalogReader(rows[0]["name"], frozenset(datasets) if datasets else None)
        if len(self._known) >= _REMEMBERED_MAX:
            self._known.clear()
        self._known[name] = (now, reader)
        return reader

    async def make(
        self, name: str, *, datasets: Sequence[str], seconds: float | None
    ) -> str | None:
        """A token for these datasets, or all; None if there is one of this name."""
        token = f"{READ_PREFIX}{new_id(self._entropy, characters=_CHARACTERS)}"
        rows = await self._ask(
            "add_reader",
            name=name,
            digest=_digest(token),
            datasets=list(datasets),
            seconds=seconds,
        )
        return token if rows else None

    async def every(self) -> Sequence[dict[str, Any]]:
        """All of them, without the tokens."""
        return await self._ask("list_readers", limit=READERS_MAX)

    async def remove(self, name: str) -> bool:
        """Take a token back; False if there is none of this name."""
        self._known.clear()
        return bool(await self._ask("remove_reader", name=name))

    async def _ask(self, statement: str, **asked: object) -> list[dict[str, Any]]:
        async def work(connection: Connection) -> list[dict[str, Any]]:
            return await (await connection.execute(query(statement), asked)).fetchall()

        return await self._database.transact(work)


def _digest(token: str) -> str:
    return hashlib.sha256(b"penstock read\x00" + token.encode("utf-8", "replace")).hexdigest()
