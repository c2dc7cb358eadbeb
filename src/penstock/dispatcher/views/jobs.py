"""Jobs for the console: the edges of the DAG in force, and one job with its state and recent ends.

A view of a job is one short transaction of six statements. Lists and counts have bounds; of what
has ended, the newest attempts of all jobs are read, and the answer says how far back that goes.

One task for the console: what it was made of, why it waits, what it reads, who reads it.

Programs are answered by `StatusViews.task`; this is what a page shows besides. One short
transaction of four statements, each of which looks up few rows by an index; lists have bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from penstock.dispatcher.database.pool import Connection, Database, fetch_rows, query

RECENT_MINUTES: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class DagEdge:
    """An edge: a job reads a dataset that another writes."""

    reader: str
    input: str
    dataset: str
    writer: str
    is_trigger: bool
    reads: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentOutcomes:
    """What has ended of a job in the last minutes; of very many, the latest."""

    job: str
    completed: int
    failed: int
    last_at: datetime


class PipelineViews:
    """The questions. Each is one short transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def readings(self) -> Sequence[DagEdge]:
        """All edges of the DAG in force."""

        async def work(connection: Connection) -> Sequence[DagEdge]:
            found = await connection.execute(query("edges_in_force"))
            return [DagEdge(**row) for row in await found.fetchall()]

        return await self._database.transact(work)

    async def endings(self) -> Mapping[str, RecentOutcomes]:
        """What has ended lately, by job."""

        async def work(connection: Connection) -> Mapping[str, RecentOutcomes]:
            found = await connection.execute(query("recent_endings"), {"minutes": RECENT_MINUTES})
            return {row["job"]: RecentOutcomes(**row) for row in await found.fetchall()}

        return await self._database.transact(work)


SLICE_SECONDS: Final = 120
"""How long a slice of the last hour is."""
LENGTHS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0)
"""The seconds by which attempts are told apart: below the first, from each, from the last."""
WINDOW: Final = 10_000
"""How many attempts of all jobs are looked at for what has ended."""
CAUSES_MAX: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCounts:
    """The tasks that are not over, or that are dead; each counted to 10,000."""

    queued: int
    retrying: int
    running: int
    dead: int
    oldest_seconds: float
    """How long the oldest that could run has waited."""
    next_due_at: datetime | None
    """When the next of those comes due that cannot run yet."""

    @property
    def waiting(self) -> int:
        return self.queued + self.retrying


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    """An edge to the job."""

    input: str
    dataset: str
    writer: str
    is_trigger: bool
    reads: str
    is_told: bool
    """Whether a source tells of it, and publishes nothing."""
    is_writer_paused: bool
    writer_dead: int
    published_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutput:
    """A dataset that the job writes."""

    dataset: str
    state: str
    partitions: int
    published_at: datetime | None
    readers: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOutcomes:
    """How many attempts ended, and how: of a slice of time, of a length, or of all."""

    slice: int | None
    """The number of the slice since the epoch."""
    length: int | None
    """The place among `LENGTHS`: 0 is below the first."""
    completed: int
    failed: int
    expired: int
    middle_seconds: float | None
    most_seconds: float | None
    """What nineteen of twenty stay below."""
    longest_seconds: float | None
    looked_at: int
    reaches_to: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCause:
    """Why attempts have failed: the first line of what they said, and the latest of them."""

    cause: str
    is_alike: bool
    """Whether others differ from it, in the partition or in figures."""
    times: int
    tasks: int
    last_at: datetime
    task_id: int
    attempt: int
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutJob:
    """What there is to say of a job."""

    job_id: int
    name: str
    version: int
    """The version of the DAG that it is shown as."""
    is_in_force: bool
    generation: str
    generation_state: str | None
    body: dict[str, Any]
    """The definition as the YAML has it, without what has its default."""
    runtime: str
    operator: str
    priority: str
    update_mode: str
    max_attempts: int
    timeout_seconds: float
    heartbeat_seconds: float
    retry_first_seconds: float
    retry_max_seconds: float
    retry_backoff: float
    max_concurrency: int | None
    now: datetime
    operator_max: int | None
    is_operator_full: bool
    is_job_full: bool
    workers: int
    """How many workers serve its operator that were heard of in the last 90 seconds."""
    counts: TaskCounts
    inputs: Sequence[JobInput]
    outputs: Sequence[JobOutput]
    ended: Sequence[AttemptOutcomes]
    causes: Sequence[FailureCause]


class JobViews:
    """The question."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def about(self, name: str) -> AboutJob | None:
        """What there is to say of a job; None if no DAG has ever had one of this name."""

        async def work(connection: Connection) -> AboutJob | None:
            found = await fetch_rows(connection, "about_job", job=name)
            if not found:
                return None
            (row,) = found
            job, version = row["job_id"], row["version"]
            (counts,) = await fetch_rows(connection, "tasks_of_job", job=job)
            read = await fetch_rows(connection, "inputs_of_job", job=job, version=version)
            written = await fetch_rows(
                connection, "written_by_job", generation=row["generation"], version=version
            )
            ended = await fetch_rows(
                connection,
                "endings_of_job",
                job=job,
                window=WINDOW,
                slice_seconds=SLICE_SECONDS,
                lengths=list(LENGTHS),
            )
            causes = await fetch_rows(
                connection, "failures_of_job", job=job, window=WINDOW, limit=CAUSES_MAX
            )
            return AboutJob(
                **row,
                counts=TaskCounts(**counts),
                inputs=[JobInput(**each) for each in read],
                outputs=[JobOutput(**each) for each in written],
                ended=[AttemptOutcomes(**each) for each in ended],
                causes=[FailureCause(**each) for each in causes],
            )

        return await self._database.transact(work)


PARTITIONS_MAX: Final = 1000
"""How far the partitions of an input are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadInput:
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
class WrittenOutput:
    """An output, and by whom the partition of the task was last made."""

    dataset: str
    uuid: str
    published_at: datetime | None
    rows: int | None
    bytes: int | None
    task_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingJob:
    """A job that reads what the task writes."""

    job: str
    dataset: str
    is_trigger: bool
    task_id: int | None
    """Its latest task for the same partition that came after this one."""
    status: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutTask:
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
    """How many workers serve its operator that were heard of in the last 90 seconds."""
    later_task: int | None
    """The latest task of the job for the same partition, if it is another."""
    later_status: str | None
    inputs: Sequence[ReadInput] = ()
    outputs: Sequence[WrittenOutput] = ()
    readers: Sequence[ReadingJob] = ()


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

    async def about(self, task_id: int) -> AboutTask | None:
        """What there is to say of a task; None if there is none."""

        async def work(connection: Connection) -> AboutTask | None:
            found = await fetch_rows(connection, "about_task", task=task_id)
            if not found:
                return None
            return AboutTask(
                **found[0],
                inputs=[
                    ReadInput(**row)
                    for row in await fetch_rows(connection, "inputs_of_task", task=task_id)
                ],
                outputs=[
                    WrittenOutput(**row)
                    for row in await fetch_rows(connection, "outputs_of_task", task=task_id)
                ],
                readers=[
                    ReadingJob(**row)
                    for row in await fetch_rows(connection, "readers_of_task", task=task_id)
                ],
            )

        return await self._database.transact(work)
