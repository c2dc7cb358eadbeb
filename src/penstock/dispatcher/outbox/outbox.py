"""What people see of the outbox, and what they may do: look at what is parked, and try it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.wire.steering import OutboxAnswer, OutboxRow

SHOWN_MAX: Final = 1000


class Counts(NamedTuple):
    """How many rows there are."""

    pending: int
    parked: int


class Outbox:
    """The outbox, for the API and metrics."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def parked(self) -> OutboxAnswer:
        """What could not be carried out, the oldest first."""

        async def work(connection: Connection) -> OutboxAnswer:
            found = await connection.execute(query("parked_outbox"), {"limit": SHOWN_MAX})
            return OutboxAnswer(parked=[OutboxRow(**row) for row in await found.fetchall()])

        return await self._database.transact(work)

    async def retry(self, ids: Sequence[int]) -> int:
        """Have these tried again, as if they were new; returns how many of them were parked."""

        async def work(connection: Connection) -> int:
            found = await connection.execute(query("retry_outbox"), {"rows": list(ids)})
            return len(await found.fetchall())

        return await self._database.transact(work)

    async def counts(self) -> Counts:
        """How many rows wait or are in hand, and how many are parked."""

        async def work(connection: Connection) -> Counts:
            row = await (await connection.execute(query("count_outbox"))).fetchone()
            assert row is not None, "a count is always there"
            return Counts(row["pending"], row["parked"])

        return await self._database.transact(work)
