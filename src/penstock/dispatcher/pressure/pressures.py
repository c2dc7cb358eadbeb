"""Measures queues, and pauses what feeds those that are too long or too old.

Owns the table `pressure` and the pauses whose cause begins with `pressure:` or is `operator`. One
turn measures, decides (`deciding`) and writes, in one transaction and under one named lock, which
is only tried: while one dispatcher measures, the others have nothing to do. A job is paused as long
as it has a row in `pause`, whoever has written it. What is paused is not claimed, and a source that
is paused is told so in the answer to its events, which are kept all the same.

Whatever a turn unpauses gets its wake-ups in the same transaction. A crash leaves a turn done or
not done; the next one, anywhere, goes on from the tables. While no dispatcher measures, everything
stays paused or not as it was. Called by the dispatcher's loop (`turn`) and its API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.dag.parsing import parse_stored
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.pressure.deciding import decide, depth_counted_max, has_limits
from penstock.dispatcher.pressure.values import CAUSE, Decision, Measure, Scope, State
from penstock.dispatcher.tasks.rows import storable
from penstock.dispatcher.wire.steering import PauseAnswer, PressureAnswer, PressuresAnswer

PAUSES_SHOWN_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class _InForce:
    """The DAG in force, read once a version."""

    version_id: int
    dag: Dag


class Pressures:
    """The operations on pressure and pauses."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: _InForce | None = None

    async def turn(self) -> float | None:
        """Measure, decide and write, unless another dispatcher is at it."""
        known = await self._in_force()
        if known is None:
            return None
        return await self._database.transact(lambda connection: _turn(connection, known))

    async def answer(self) -> PressuresAnswer:
        """Who is pressed and who is paused, for people. At most 10,000 pauses are shown."""
        known = await self._in_force()

        async def work(connection: Connection) -> PressuresAnswer:
            pressures = await _rows(connection, "shown_pressure")
            pauses = await _rows(connection, "shown_pauses", limit=PAUSES_SHOWN_MAX)
            return _answer(known.dag if known is not None else Dag(()), pressures, pauses)

        return await self._database.transact(work)

    async def pause(self, job: str, reason: str) -> bool:
        """Have a job start nothing until it is resumed. False if there is no such job."""
        asked = {"job": storable(job), "reason": storable(reason)}

        async def work(connection: Connection) -> bool:
            return bool(await _rows(connection, "pause_job", **asked))

        return await self._database.transact(work)

    async def resume(self, job: str) -> bool:
        """End the pause that a person has made; what pressure has paused stays so.

        False if there is no such job. One that was not paused is left as it is.
        """
        asked = {"job": storable(job)}

        async def work(connection: Connection) -> bool:
            resumed = await _rows(connection, "resume_job", **asked)
            await wake_jobs(connection, [row["job_id"] for row in resumed])
            return bool(resumed or await _rows(connection, "job_of_name", **asked))

        return await self._database.transact(work)

    async def _in_force(self) -> _InForce | None:
        async def work(connection: Connection) -> dict[str, Any] | None:
            return await (await connection.execute(query("current_version"))).fetchone()

        row = await self._database.transact(work)
        if row is None:
            return None
        if self._known is None or self._known.version_id != row["id"]:
            # A large DAG takes its time to read; nobody else should wait for it.
            dag = await asyncio.to_thread(
                parse_stored, row["source"], "the DAG in force", files=row["files"]
            )
            self._known = _InForce(row["id"], dag)
        return self._known


async def wake_jobs(connection: Connection, job_ids: Iterable[int]) -> None:
    """Write the wake-ups of what can be claimed of these jobs, in the caller's transaction."""
    if jobs := sorted(set(job_ids)):
        await connection.execute(query("wake_jobs"), {"jobs": jobs})


async def _turn(connection: Connection, known: _InForce) -> float | None:
    (lock,) = await _rows(connection, "take_pressure_lock")
    if not lock["is_ours"]:
        return None
    current = await _rows(connection, "current_version")
    if not current or current[0]["id"] != known.version_id:
        return 0.0
    limited = [job for job in known.dag.jobs if has_limits(job)]
    rows = await _rows(
        connection,
        "measure_queues",
        version=known.version_id,
        jobs=[job.name for job in limited],
        depths_max=[depth_counted_max(job) for job in limited],
    )
    measures = {
        row["name"]: Measure(row["depth"], row["oldest_seconds"], row["has_bulk"]) for row in rows
    }
    before = {
        row["name"]: State(Scope(row["scope"]) if row["scope"] else None, row["reason"])
        for row in await _rows(connection, "pressure_before")
    }
    decision = decide(known.dag, measures, before)
    await _write(connection, decision, measures, ids={row["name"]: row["job_id"] for row in rows})
    return None


async def _write(
    connection: Connection,
    decision: Decision,
    measures: dict[str, Measure],
    *,
    ids: dict[str, int],
) -> None:
    jobs = list(decision.states)
    states = [decision.states[job] for job in jobs]
    pressure = {
        "jobs": [ids[job] for job in jobs],
        "scopes": [state.scope for state in states],
        "depths": [measures[job].depth for job in jobs],
        "ages": [measures[job].oldest_seconds for job in jobs],
        "reasons": [state.reason for state in states],
    }
    await connection.execute(query("forget_pressure"), {"jobs": pressure["jobs"]})
    await connection.execute(query("write_pressure"), pressure)
    wanted = sorted(decision.pauses)
    pauses = {
        "jobs": [ids[each.job] for each in wanted],
        "causes": [each.cause for each in wanted],
        "scopes": [each.scope for each in wanted],
        "reasons": [each.reason for each in wanted],
    }
    await connection.execute(query("write_pauses"), pauses)
    ended = await _rows(connection, "end_pauses", jobs=pauses["jobs"], causes=pauses["causes"])
    await wake_jobs(connection, [row["job_id"] for row in ended])


def _answer(
    dag: Dag, pressures: list[dict[str, Any]], pauses: list[dict[str, Any]]
) -> PressuresAnswer:
    limits = {job.name: job for job in dag.jobs if has_limits(job)}
    paused_by: dict[str, list[str]] = {}
    for row in pauses:
        if row["cause"].startswith(CAUSE):
            paused_by.setdefault(row["cause"].removeprefix(CAUSE), []).append(row["job"])
    return PressuresAnswer(
        jobs=[
            PressureAnswer(
                **row,
                max_queue_depth=job.max_queue_depth,
                max_queue_age_seconds=(
                    job.max_queue_age_ms / 1000 if job.max_queue_age_ms is not None else None
                ),
                pauses=paused_by.get(job.name, []),
            )
            for row in pressures
            if (job := limits.get(row["job"])) is not None
        ],
        pauses=[PauseAnswer(**row) for row in pauses],
    )


async def _rows(connection: Connection, name: str, **asked: object) -> list[dict[str, Any]]:
    return await (await connection.execute(query(name), asked)).fetchall()
