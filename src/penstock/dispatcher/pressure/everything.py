"""Pausing and resuming all jobs at once: for a person who needs everything to hold still.

Both are one statement, so that a crash leaves all of it or nothing, and both may be repeated. The
pauses are those of `Pressures.pause`: each job can be resumed by itself, and resuming everything
ends all pauses that people have made, also those from before; what pressure holds back stays held
back. A job that a DAG brings later is not paused. Whatever can be claimed again is told to workers
in the same transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.pressure.pressures import wake_jobs
from penstock.dispatcher.tasks.rows import storable


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What pausing or resuming everything has done."""

    jobs: list[str]
    """The jobs that were paused or resumed by it, by name."""
    by_people: int
    """How many jobs are paused by people afterwards."""
    by_pressure: int
    """How many are paused by pressure."""


async def pause_everything(database: Database, reason: str) -> Moved:
    """Have no job start anything until it is resumed. What runs goes on to its end."""

    async def work(connection: Connection) -> Moved:
        rows = await _rows(connection, "pause_everything", reason=storable(reason))
        return await _moved(connection, rows)

    return await database.transact(work)


async def resume_everything(database: Database) -> Moved:
    """End all pauses that people have made."""

    async def work(connection: Connection) -> Moved:
        rows = await _rows(connection, "resume_everything")
        await wake_jobs(connection, [row["job_id"] for row in rows])
        return await _moved(connection, rows)

    return await database.transact(work)


async def _moved(connection: Connection, rows: list[dict[str, Any]]) -> Moved:
    (left,) = await _rows(connection, "count_paused")
    return Moved(jobs=sorted(row["name"] for row in rows), **left)


async def _rows(connection: Connection, name: str, **asked: object) -> list[Any]:
    return await (await connection.execute(query(name), asked)).fetchall()
