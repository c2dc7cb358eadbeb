"""The reconciler: no task waits for a word that was lost.

Words are lost: a wake-up that nobody answered, one that is parked, a function that was invoked and
never claimed, or came when a limit or a pause was in its way. So whatever could be claimed and has
waited for too long is announced again, by a wake-up in the outbox, at most once in that time for an
operator and priority, however many dispatchers look. Where tasks just wait for their turn, that is
one word too many and nothing else. For functions, the carrier of wake-ups makes invocations of it.
Nor do readers without Postgres: a projection that was parked is tried again every few minutes.

One short transaction a turn; a crash leaves it done or not done. Called by a `Loop`.
"""

from __future__ import annotations

import logging
from typing import Final

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query

_log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 10.0
"""How often to look while anything waits: three times in the time that a task may wait."""
PARKED_SECONDS: Final = 300.0
"""How long a projection that was parked is left alone."""


class Reconciler:
    """Wakes operators whose tasks wait too long."""

    def __init__(self, database: Database, *, waited_seconds: float = 30.0) -> None:
        self._database = database
        self._waited_seconds = waited_seconds

    async def turn(self) -> None:
        """Look once."""

        async def work(connection: Connection) -> list[str]:
            asked = {"waited_seconds": self._waited_seconds}
            found = await connection.execute(query("reconcile"), asked)
            targets = [row["target"] for row in await found.fetchall()]
            await connection.execute(query("drop_parked_invocations"))
            await connection.execute(query("retry_projections"), {"parked_seconds": PARKED_SECONDS})
            return targets

        targets = await self._database.transact(work)
        if targets:
            what = "tasks of %s have waited for %g s: woken again"
            _log.info(what, ", ".join(targets), self._waited_seconds)
