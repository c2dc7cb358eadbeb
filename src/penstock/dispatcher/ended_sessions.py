"""Sessions of the console that people have signed out of, for every dispatcher.

A session is a signed cookie that is stored nowhere; signing out writes a row with its id, which
proves nothing to anybody. The row is removed when the cookie has long expired, by whoever signs
out next, so there are as many rows as recent sign-outs. A crash leaves a session ended or not
ended; ending it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from penstock.dispatcher.database.pool import Connection, Database, query

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
