"""The book of the sweeper, on Postgres: which folders of attempts nobody needs any more.

A folder is gone if all of this holds, in one statement and so at one moment:
- no publication and no appended part names it;
- its attempt is over for longer than the grace. That of a task which is forgotten is, if the number
  of the task was ever given out; else it is of another life of the database, and is kept;
- if it was published once: `current.json` is confirmed, for longer than the grace, to name
  something else, and no attempt runs that began before it left and reads its dataset.

That is final: what is over completes nothing any more, so nothing will name the folder again, and
who begins later is not given it. Whoever may publish the folder of somebody else is a reader of it,
and running. Any number of dispatchers may ask. Called by `penstock.datasets.sweeping`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.datasets.layout import attempt_of_place
from penstock.datasets.sweeping import Verdict
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query


class PostgresBook:
    """What is known of the folders of attempts."""

    def __init__(self, database: Database, *, grace_seconds: float) -> None:
        self._database = database
        self._grace_seconds = grace_seconds

    async def verdicts(self, places: Sequence[str]) -> Mapping[str, Verdict]:
        """What is to become of these folders; those that are not ours are kept."""
        named = {place: found for place in places if (found := attempt_of_place(place)) is not None}
        asked = {
            "places": list(named),
            "tasks": [each.task_id for each in named.values()],
            "attempts": [each.attempt for each in named.values()],
            "grace_seconds": self._grace_seconds,
        }

        async def work(connection: Connection) -> set[str]:
            found = await connection.execute(query("gone_places"), asked)
            return {row["place"] for row in await found.fetchall()}

        gone = await self._database.transact(work) if named else set()
        return {place: Verdict.GONE if place in gone else Verdict.KEEP for place in places}
