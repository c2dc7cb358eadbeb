"""One job as people look at it: what it is, what keeps it, what it reads and writes, what ended.

A look is one short transaction of six statements. Lists and counts have bounds; of what has ended,
the newest attempts of all jobs are looked at, and how far back that goes is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query

SLICE_SECONDS: Final = 120
"""How long a slice of the last hour is."""
LENGTHS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0)
"""The seconds by which attempts are told apart: below the first, from each, from the last."""
WINDOW: Final = 10_000
"""How many attempts of all jobs are looked at for what has ended."""
CAUSES_MAX: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
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
class Ended:
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
class Cause:
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
    """How many workers serve its operator that were heard of in the last minute."""
    counts: Counts
    inputs: Sequence[JobInput]
    outputs: Sequence[JobOutput]
    ended: Sequence[Ended]
    causes: Sequence[Cause]


class JobViews:
    """The question."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def about(self, name: str) -> AboutJob | None:
        """What there is to say of a job; None if no DAG has ever had one of this name."""

        async def work(connection: Connection) -> AboutJob | None:
            found = await _rows(connection, "about_job", job=name)
            if not found:
                return None
            (row,) = found
            job, version = row["job_id"], row["version"]
            (counts,) = await _rows(connection, "tasks_of_job", job=job)
            read = await _rows(connection, "inputs_of_job", job=job, version=version)
            written = await _rows(
                connection, "written_by_job", generation=row["generation"], version=version
            )
            ended = await _rows(
                connection,
                "endings_of_job",
                job=job,
                window=WINDOW,
                slice_seconds=SLICE_SECONDS,
                lengths=list(LENGTHS),
            )
            causes = await _rows(
                connection, "failures_of_job", job=job, window=WINDOW, limit=CAUSES_MAX
            )
            return AboutJob(
                **row,
                counts=Counts(**counts),
                inputs=[JobInput(**each) for each in read],
                outputs=[JobOutput(**each) for each in written],
                ended=[Ended(**each) for each in ended],
                causes=[Cause(**each) for each in causes],
            )

        return await self._database.transact(work)


async def _rows(connection: Connection, statement: str, /, **asked: object) -> list[dict[str, Any]]:
    return await (await connection.execute(query(statement), asked)).fetchall()
