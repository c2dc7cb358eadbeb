"""The source monitor: every always-on source of the DAG has exactly one task that is not over.

An always-on source is a task like any other: a worker claims it, runs it, and says that it lives by
heartbeats; the reaper ends an attempt that nobody hears of, and retries follow the job's policy.
The monitor sees to it that there always is such a task:

| state | means | what the monitor does |
|---|---|---|
| pending | its task waits for a worker | nothing |
| running | a worker runs it | nothing |
| restarting | its task waits for the end of a pause, after a failure | nothing |
| dead | its task is over, however it ended | makes the next one, due after a pause |
| draining | it is asked to stop: not wanted any more, or not as it was | waits for its end |

Wanted is what the DAG in force says, and of a source that is being replaced also the earlier
definition, until the cut-over. A changed definition ends the task of the old one first. The pause
before a restart is the job's retry pause, and grows with each end within the last hour.

Tasks are numbered, and the number is their key: any number of monitors make one next task. Of two
that are open, because a dead one was replayed, the later goes on and the other is cancelled. A
crash leaves a task made or not made. Called by a loop of the dispatcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.dispatcher.deployment import LEFT
from penstock.dispatcher.tasks.lifecycle import BATCH_MAX, Tasks
from penstock.dispatcher.tasks.model import NewTask
from penstock.protocol.base import TaskStatus

KEY: Final = "source:"
DOUBLED: Final = "A later task of this source has taken its place."
"""The reason of tasks that somebody has replayed after the monitor had made the next one."""
_OVER: Final = (TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELLED)


class SourceState(StrEnum):
    """How an always-on source is doing."""

    PENDING = "pending"
    RUNNING = "running"
    RESTARTING = "restarting"
    FAILED = "dead"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """An always-on source of one generation."""

    job: str
    generation: str
    state: SourceState
    task_id: int | None
    attempt: int
    restarts: int
    """How many tasks it had before this one."""
    reason: str | None
    """Why it was ended last."""


class SourceMonitor:
    """Keeps always-on sources running."""

    def __init__(self, database: Database, tasks: Tasks) -> None:
        self._database = database
        self._tasks = tasks
        self._dag_version: int | None = None
        self._has_sources = True

    def is_due(self, dag_version: int | None) -> bool:
        """Whether a turn is worth it, as the poller asks before each: sources were found by the
        last one, or the DAG is another since."""
        is_new, self._dag_version = dag_version != self._dag_version, dag_version
        return is_new or self._has_sources

    async def turn(self) -> float | None:
        """Make the tasks that are missing, and ask those to stop that are not wanted."""
        standing, unwanted = await self._database.transact(_read)
        self._has_sources = bool(standing or unwanted)
        stop = [row for row in unwanted if not row["cancel_asked"]]
        for is_doubled, reason in ((False, LEFT), (True, DOUBLED)):
            if some := [row["task_id"] for row in stop if row["is_doubled"] is is_doubled]:
                await self._tasks.cancel(some, reason=reason)
        missing = [
            NewTask(
                definition_id=row["definition_id"],
                generation=row["generation"],
                dedupe_key=f"{KEY}{row['number'] + 1}",
                payload={},
                delay_ms=row["delay_ms"],
            )
            for row in standing
            if row["status"] is None or row["status"] in _OVER
        ]
        if missing:
            await self._tasks.create(missing)
        return 0.0 if stop or missing else None

    async def status(self) -> tuple[SourceStatus, ...]:
        """How every always-on source is doing, by job; those that are to stop are draining."""
        standing, unwanted = await self._database.transact(_read)
        draining = {row["task_id"] for row in unwanted}
        found = [
            _status(row, _state(row), restarts=max(0, row["number"] - 1))
            for row in standing
            if row["task_id"] not in draining
        ]
        found += [_status(row, SourceState.DRAINING, restarts=0) for row in unwanted]
        return tuple(sorted(found, key=lambda each: (each.job, each.task_id or 0)))


async def _read(connection: Connection) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    standing = await (await connection.execute(query("standing_sources"))).fetchall()
    found = await connection.execute(query("unwanted_sources"), {"limit": BATCH_MAX})
    return standing, await found.fetchall()


def _state(row: Mapping[str, Any]) -> SourceState:
    if row["cancel_asked"]:
        return SourceState.DRAINING
    match row["status"]:
        case None:
            return SourceState.PENDING
        case TaskStatus.RUNNING:
            return SourceState.RUNNING
        case TaskStatus.RETRYING:
            return SourceState.RESTARTING
        case TaskStatus.QUEUED:
            return SourceState.RESTARTING if row["is_early"] else SourceState.PENDING
        case _:
            return SourceState.FAILED


def _status(row: Mapping[str, Any], state: SourceState, *, restarts: int) -> SourceStatus:
    return SourceStatus(
        job=row["job"],
        generation=row["generation"],
        state=state,
        task_id=row["task_id"],
        attempt=row["attempt"] or 0,
        restarts=restarts,
        reason=row["reason"],
    )
