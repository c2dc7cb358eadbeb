"""Removes what is old and of no use any more: events, settled tasks, workers that are gone, audit.

A pass goes through all old events, then tasks, then notes of the audit, in the order of numbers,
some thousand rows a transaction; between them it lets others work. Once in an hour one dispatcher,
of any number, makes a pass. A crash ends a pass where it is, and what it has removed was useless.

What is kept, however old:
- the latest event of every partition and range of every generation, and the highest cursor of those
  without partitions: what is built anew is built of these. Of earlier updates it can then not be,
  and a job that appends is not cut over without somebody's word: see `deployment`;
- the events of what is being built, and the tasks of the jobs that build it: by those it is judged;
- an event as long as a task made of it waits, runs, or is dead and may still be replayed, or as
  long as a backfill is open that may read it;
- a task as long as one of its events is there. Otherwise a rollback would find an event without
  a task, and make it again. So the number of tasks that are kept grows with the partitions that
  there are, not with the time;
- a task of an open backfill; a dead one for `dead_days`; the last one of an always-on source.

Publications stay, and what they are made of, for they carry all that readers need. An event that is
sent again after it was removed is news. Called by a loop of the dispatcher.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.metrics.reading import take_turn
from penstock.kernel.errors import InvalidInput

_log = logging.getLogger(__name__)

DAYS: Final = 30.0
DEAD_DAYS: Final = 90.0
PASS_SECONDS: Final = 3600.0
ROWS_MAX: Final = 2000
_BETWEEN_SECONDS: Final = 0.05
_TURN: Final = "retention"
_STEPS: Final = ("forget_events", "forget_tasks", "forget_audit")


@dataclass(frozen=True, slots=True)
class _Window:
    """What one statement has done."""

    reached: int
    """The number of the last row that it looked at."""
    is_more: bool
    gone: int


class Retention:
    """Removes what is older than so many days, dead tasks after others."""

    def __init__(
        self,
        database: Database,
        *,
        days: float = DAYS,
        dead_days: float | None = None,
        rows_max: int = ROWS_MAX,
    ) -> None:
        if not 0 < days <= 36_500:
            raise InvalidInput(f"What is over is kept for 0 to 36500 days, not for {days:g}.")
        self._database = database
        self._days = days
        self._dead_days = max(days, DEAD_DAYS if dead_days is None else dead_days)
        self._rows_max = rows_max
        self._steps: list[str] = []
        """What is left to do of a pass; empty between passes."""
        self._after = 0
        self._gone: dict[str, int] = {}

    async def turn(self) -> float | None:
        """Look at some rows; the seconds until the next ones should be looked at."""
        if not self._steps:
            if not await take_turn(self._database, _TURN, seconds=PASS_SECONDS):
                return PASS_SECONDS / 4
            self._steps, self._after, self._gone = list(_STEPS), 0, {}
        step = self._steps[0]
        window = await self._database.transact(lambda connection: self._look(connection, step))
        self._gone[step] = self._gone.get(step, 0) + window.gone
        self._after = window.reached
        if window.is_more:
            return _BETWEEN_SECONDS
        self._steps, self._after = self._steps[1:], 0
        if self._steps:
            return _BETWEEN_SECONDS
        await self._forget_workers()
        events, tasks = self._gone["forget_events"], self._gone["forget_tasks"]
        if events or tasks:
            _log.info("removed %d events and %d tasks that are over", events, tasks)
        return PASS_SECONDS

    async def _look(self, connection: Connection, step: str) -> _Window:
        asked = {
            "after": self._after,
            "limit": self._rows_max,
            "days": self._days,
            "dead_days": self._dead_days,
        }
        row = await (await connection.execute(query(step), asked)).fetchone()
        assert row is not None, "the statement has one row"
        return _Window(row["reached"] or self._after, bool(row["is_more"]), row["gone"])

    async def _forget_workers(self) -> None:
        async def work(connection: Connection) -> None:
            await connection.execute(query("forget_workers"), {"days": self._days})

        await self._database.transact(work)
