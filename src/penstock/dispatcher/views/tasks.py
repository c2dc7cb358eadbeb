"""One task as people look at it: what it was made of, why it waits, what it reads, who reads it.

What programs are told of a task is `Views.task`; this is what a page says besides. One short
transaction of four statements, each of which looks up few rows by an index; lists have bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query

PARTITIONS_MAX: Final = 1000
"""How far the partitions of an input are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """An input, and what is published of it for the task now."""

    input: str
    dataset: str
    writer: str | None
    reads: str
    """`partition`, `all` or `changes`."""
    is_trigger: bool
    has_data: bool
    """Whether there can be something to read: a source that only tells has nothing."""
    partition_key: str | None
    """Of the one partition that is read; empty for a dataset without partitions, None if none or
    several are."""
    published_at: datetime | None
    rows: int | None
    bytes: int | None
    task_id: int | None
    """The task that made it."""
    partitions: int
    """How many partitions are read, counted to a thousand."""
    changed: int | None
    """Of an input that is read by its changes, how many partitions the latest attempt was given."""
    missed: int | None
    """How many were removed before they were read."""
    is_consumed: bool | None
    """Whether they count as read: the attempt has completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """An output, and by whom the partition of the task was last made."""

    dataset: str
    uuid: str
    published_at: datetime | None
    rows: int | None
    bytes: int | None
    task_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A job that reads what the task writes."""

    job: str
    dataset: str
    is_trigger: bool
    task_id: int | None
    """Its latest task for the same partition that came after this one."""
    status: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a page says of a task besides `TaskAnswer`."""

    runtime: str
    max_attempts: int
    timeout_seconds: float
    cancel_asked: bool
    backfill_id: int | None
    now: datetime
    event_seq: int | None
    event_id: str | None
    """What the event is called by whoever sent it; None if it is not kept any more."""
    event_at: datetime | None
    event_task: int | None
    """The task whose publication the event tells of."""
    event_dataset: str | None
    generation_state: str | None
    is_in_dag: bool
    """Whether the DAG in force has the job."""
    is_in_force: bool
    """Whether it has the job as the task was made for it."""
    paused: Sequence[str]
    operator_max: int | None
    job_max: int | None
    is_operator_full: bool
    is_job_full: bool
    workers: int
    """How many workers serve its operator that were heard of in the last minute."""
    later_task: int | None
    """The latest task of the job for the same partition, if it is another."""
    later_status: str | None
    inputs: Sequence[Reads] = ()
    outputs: Sequence[Writes] = ()
    readers: Sequence[Reader] = ()


class TaskViews:
    """The questions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def is_of_host(self, worker: str, host: str) -> bool:
        """Whether a worker runs on a machine of this name, as far as it says so."""

        async def work(connection: Connection) -> bool:
            asked = {"worker": worker, "host": host}
            found = await connection.execute(query("is_worker_of_host"), asked)
            return any(row["is_here"] for row in await found.fetchall())

        return await self._database.transact(work)

    async def about(self, task_id: int) -> About | None:
        """What there is to say of a task; None if there is none."""

        async def work(connection: Connection) -> About | None:
            found = await _rows(connection, "about_task", task_id)
            if not found:
                return None
            return About(
                **found[0],
                inputs=[Reads(**row) for row in await _rows(connection, "inputs_of_task", task_id)],
                outputs=[
                    Writes(**row) for row in await _rows(connection, "outputs_of_task", task_id)
                ],
                readers=[
                    Reader(**row) for row in await _rows(connection, "readers_of_task", task_id)
                ],
            )

        return await self._database.transact(work)


async def _rows(connection: Connection, statement: str, task_id: int) -> list[dict[str, Any]]:
    return await (await connection.execute(query(statement), {"task": task_id})).fetchall()
