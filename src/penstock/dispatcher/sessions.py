"""Sessions of the console that people have ended: what makes signing out true for every dispatcher.

A session is a signed cookie that nobody stores; that it was ended is a row with its number, which
proves nothing to anybody. A row is written once, and removed when the cookie has long been too old:
whoever ends a session takes away some that are. So there are as many as people have signed out
lately. A crash leaves a session ended or not ended; to end it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query

_FORGOTTEN_MAX: Final = 1000
"""How many rows one turn takes away."""


class EndedSessions:
    """Those that people have ended. Each operation is one short transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def end(self, number: str, *, seconds: float) -> None:
        """End a session, whose cookie would be good for so many seconds at most."""

        async def work(connection: Connection) -> None:
            await connection.execute(query("end_session"), {"number": number, "seconds": seconds})
            await connection.execute(query("forget_ended_sessions"), {"limit": _FORGOTTEN_MAX})

        await self._database.transact(work)

    async def among(self, numbers: Collection[str]) -> frozenset[str]:
        """Which of these are ended."""
        if not numbers:
            return frozenset()

        async def work(connection: Connection) -> frozenset[str]:
            asked = {"numbers": list(numbers)}
            rows = await (await connection.execute(query("ended_sessions"), asked)).fetchall()
            return frozenset(row["number"] for row in rows)

        return await self._database.transact(work)
