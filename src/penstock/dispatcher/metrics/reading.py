"""Reads figures from the tables, and sets the limits of operators.

Owns the table `operator`. Reading changes nothing and waits for nobody. A limit that is raised or
taken away makes tasks claimable, so it writes their wake-ups in its own transaction; one that is
lowered ends nothing that runs. Called by the dispatcher's API and by `cloudwatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.dispatcher.dag.names import queue_of
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.metrics.counters import Counters
from penstock.dispatcher.metrics.exposition import exposition
from penstock.dispatcher.metrics.figures import Figures, JobFigures
from penstock.dispatcher.pressure.pressures import wake_jobs
from penstock.dispatcher.tasks.rows import storable
from penstock.dispatcher.tasks.values import Status
from penstock.dispatcher.wire.steering import OperatorLoad, OperatorsAnswer

_SETTLED = (Status.COMPLETED, Status.DEAD, Status.CANCELLED)


class Metrics:
    """The figures of all dispatchers that share a database."""

    def __init__(self, database: Database, *, counters: Counters | None = None) -> None:
        self._database = database
        self.counters = counters or Counters()
        """Those of this dispatcher alone."""

    async def figures(self) -> Figures:
        """One look at everything."""
        return await self._database.transact(_figures)

    async def text(self) -> str:
        """The figures in the text format of Prometheus."""
        return exposition(await self.figures(), self.counters)

    async def operators(self) -> OperatorsAnswer:
        """What runs and waits for each operator, and how much should run."""

        async def work(connection: Connection) -> OperatorsAnswer:
            loads = [OperatorLoad(**row) for row in await _rows(connection, "operator_loads")]
            return OperatorsAnswer(operators=loads, queues=await _queues(connection, loads))

        return await self._database.transact(work)

    async def limit_operator(self, name: str, in_flight_max: int | None) -> bool:
        """Let so many tasks of an operator run at a time; None is any number.

        False if no job has ever had this operator.
        """
        asked = {"name": storable(name), "in_flight_max": in_flight_max}

        async def work(connection: Connection) -> bool:
            if not await _rows(connection, "limit_operator", **asked):
                return False
            jobs = await _rows(connection, "jobs_of_operator", name=asked["name"])
            await wake_jobs(connection, [row["job_id"] for row in jobs])
            return True

        return await self._database.transact(work)


async def take_turn(database: Database, name: str, *, seconds: float) -> bool:
    """Whether it is ours to do what one dispatcher does for all, once in so many seconds."""

    async def work(connection: Connection) -> bool:
        return bool(await _rows(connection, "take_turn", name=name, seconds=seconds))

    return await database.transact(work)


async def _figures(connection: Connection) -> Figures:
    (overall,) = await _rows(connection, "overall_figures")
    settled = {row["status"]: row["count"] for row in await _rows(connection, "settled_figures")}
    loads = [OperatorLoad(**row) for row in await _rows(connection, "operator_loads")]
    jobs = await _rows(connection, "job_figures")
    return Figures(
        **overall,
        operators=tuple(loads),
        queues=await _queues(connection, loads),
        jobs=tuple(JobFigures(**row) for row in jobs),
        settled_last_minute={status.value: settled.get(status, 0) for status in _SETTLED},
    )


async def _queues(connection: Connection, loads: Sequence[OperatorLoad]) -> dict[str, int]:
    # A queue that has no job any more is told as 0: its workers are to be scaled in.
    wanted = {queue_of(row["name"]): 0 for row in await _rows(connection, "operator_names")}
    for each in loads:
        wanted[queue_of(each.name)] += each.desired
    return wanted


async def _rows(connection: Connection, statement: str, /, **asked: object) -> list[dict[str, Any]]:
    return await (await connection.execute(query(statement), asked)).fetchall()
