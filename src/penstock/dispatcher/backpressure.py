"""Backpressure: measures queues, decides who is over a limit, and pauses what feeds them.

`decide` is a pure function of the DAG, the measures and the state before. A job with limits is

| state | becomes | when |
|---|---|---|
| calm | pressed, bulk | over a limit, and something upstream is bulk |
| calm | pressed, all | over a limit by half or more, or nothing upstream is bulk |
| pressed, bulk | pressed, all | as above: shedding bulk was not enough, or there is none left |
| pressed, either | calm | at or below every threshold of resuming |

Between the thresholds nothing moves: that is the hysteresis. From `all` nothing goes back to
`bulk`, so a queue that swings about one and a half times its limit does not make its upstream
stop and go. A pressed job pauses everything upstream along all edges: by `all` every job, by
`bulk` those that are bulk or have bulk tasks. It never pauses itself, and as there is no cycle,
the furthest downstream can always work.

`Backpressure` owns the table `pressure` and the pauses whose cause begins with `pressure:` or is
`operator`. A turn measures, decides and writes in one transaction under one named lock, which is
only tried. A job is paused while it has a row in `pause`, whoever wrote it: its tasks are not
claimed, and a paused source is told so in the answer to its events, which are kept. What a turn
unpauses gets its wake-ups in the same transaction.

`pause_everything` and `resume_everything` are one statement each and may be repeated; the
pauses are those of `Backpressure.pause`. Resuming everything ends all pauses made by people;
what pressure holds back stays. A job that a later DAG brings is not paused.

A crash leaves a turn done or not done; without a dispatcher everything stays as it was. Called
by a loop of the dispatcher (`turn`) and its API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from penstock.dispatcher.dag.model import Dag, Graph, Job, Priority
from penstock.dispatcher.dag.parser import parse_stored
from penstock.dispatcher.database.pool import Connection, Database, fetch_rows, query
from penstock.dispatcher.tasks.rows import storable, wake
from penstock.kernel.units import duration_text
from penstock.protocol.steering import PauseAnswer, PressureAnswer, PressuresAnswer

CAUSE = "pressure:"
"""What the cause of a pause begins with if a job downstream is pressed; its name follows."""


class PauseScope(StrEnum):
    """What of a job is paused."""

    BULK = "bulk"
    """Its bulk tasks."""
    ALL = "all"


@dataclass(frozen=True, slots=True)
class QueueMeasure:
    """What a job's queue is at one moment. Tasks of backfills are neither counted nor timed."""

    depth: int = 0
    """Waiting tasks, counted to a bound that is above every threshold of the job."""
    oldest_seconds: float = 0.0
    """How long the oldest task that is due has waited."""
    has_bulk: bool = False
    """Whether bulk tasks of the job wait or run, whatever the priority of the job."""


@dataclass(frozen=True, slots=True)
class PressureState:
    """Whether a job with limits is pressed, and what its upstream gives way by."""

    scope: PauseScope | None = None
    """What is paused upstream; None if the job is not pressed."""
    reason: str | None = None
    """Why; it stands as long as the scope does."""

    @property
    def is_pressed(self) -> bool:
        return self.scope is not None


@dataclass(frozen=True, slots=True, order=True)
class PressurePause:
    """A job that is to start nothing, or nothing that is bulk, because of one downstream."""

    job: str
    cause: str
    scope: PauseScope
    reason: str


@dataclass(frozen=True, slots=True)
class PressureDecision:
    """Who is pressed, of all jobs with limits, and who pauses for it."""

    states: dict[str, PressureState]
    pauses: frozenset[PressurePause]


ALL_FROM: Final = 1.5
"""At this many times its limit a queue makes all of its upstream pause, not only what is bulk.
Routing fills it no further: see `penstock_depth_max`."""
DEPTH_SHOWN_MAX: Final = 10_000


def has_limits(job: Job) -> bool:
    """Whether a job can be pressed."""
    return job.max_queue_depth is not None or job.max_queue_age_ms is not None


def depth_counted_max(job: Job) -> int:
    """To where the depth of a job has to be counted for a decision."""
    if job.max_queue_depth is None:
        return DEPTH_SHOWN_MAX
    return max(DEPTH_SHOWN_MAX, int(job.max_queue_depth * ALL_FROM) + 1)


def decide(
    dag: Dag, measures: Mapping[str, QueueMeasure], before: Mapping[str, PressureState]
) -> PressureDecision:
    """What is so now. Jobs without a measure have empty queues; those without a state are calm."""
    # What is only read fills no queue: pausing it would help nobody.
    graph = Graph(dag, by_triggers=True, by_buffers=True)
    bulk = {
        job.name
        for job in dag.jobs
        if job.priority is Priority.BULK or measures.get(job.name, QueueMeasure()).has_bulk
    }
    states: dict[str, PressureState] = {}
    pauses: set[PressurePause] = set()
    for job in dag.jobs:
        if not has_limits(job):
            continue
        upstream = graph.upstream(job.name)
        measure = measures.get(job.name, QueueMeasure())
        state = _state(
            job,
            measure,
            before.get(job.name, PressureState()),
            has_bulk_upstream=not bulk.isdisjoint(upstream),
        )
        states[job.name] = state
        if state.scope is not None and state.reason is not None:
            paused = upstream if state.scope is PauseScope.ALL else upstream & bulk
            pauses |= {
                PressurePause(each, CAUSE + job.name, state.scope, state.reason) for each in paused
            }
    return PressureDecision(states, frozenset(pauses))


def _state(
    job: Job, measure: QueueMeasure, before: PressureState, *, has_bulk_upstream: bool
) -> PressureState:
    highest = max((share for share, _ in _over(job, measure)), default=0.0)
    if highest <= 1:
        return before if before.is_pressed and not _is_calm(job, measure) else PressureState()
    scope = PauseScope.BULK if has_bulk_upstream and highest < ALL_FROM else PauseScope.ALL
    if before.scope in (scope, PauseScope.ALL):
        return before
    return PressureState(scope, " ".join(said for share, said in _over(job, measure) if share > 1))


def _over(job: Job, measure: QueueMeasure) -> Iterator[tuple[float, str]]:
    """How many times its limits each measure is, and what to say of it."""
    if (limit := job.max_queue_depth) is not None:
        share = measure.depth / limit
        yield share, f"{measure.depth:,} tasks of {job.name} are queued; the limit is {limit:,}."
    if (limit_ms := job.max_queue_age_ms) is not None:
        waited = duration_text(int(measure.oldest_seconds) * 1000)
        allowed = duration_text(limit_ms)
        share = measure.oldest_seconds * 1000 / limit_ms
        said = f"The oldest task of {job.name} has waited for {waited}; the limit is {allowed}."
        yield share, said


def _is_calm(job: Job, measure: QueueMeasure) -> bool:
    depth, age_ms = job.resumes_at_depth, job.resumes_at_age_ms
    return (depth is None or measure.depth <= depth) and (
        age_ms is None or measure.oldest_seconds * 1000 <= age_ms
    )


PAUSES_SHOWN_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class _InForce:
    """The DAG in force, read once a version."""

    version_id: int
    dag: Dag


class Backpressure:
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
            pressures = await fetch_rows(connection, "shown_pressure")
            pauses = await fetch_rows(connection, "shown_pauses", limit=PAUSES_SHOWN_MAX)
            return _answer(known.dag if known is not None else Dag(()), pressures, pauses)

        return await self._database.transact(work)

    async def pause(self, job: str, reason: str) -> bool:
        """Have a job start nothing until it is resumed. False if there is no such job."""
        asked = {"job": storable(job), "reason": storable(reason)}

        async def work(connection: Connection) -> bool:
            return bool(await fetch_rows(connection, "pause_job", **asked))

        return await self._database.transact(work)

    async def resume(self, job: str) -> bool:
        """End the pause that a person has made; what pressure has paused stays so.

        False if there is no such job. One that was not paused is left as it is.
        """
        asked = {"job": storable(job)}

        async def work(connection: Connection) -> bool:
            resumed = await fetch_rows(connection, "resume_job", **asked)
            await wake_jobs(connection, [row["job_id"] for row in resumed])
            return bool(resumed or await fetch_rows(connection, "job_of_name", **asked))

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
    """Announce what can be claimed of these jobs, by the caller's transaction."""
    if jobs := sorted(set(job_ids)):
        await wake(connection, "wake_jobs", jobs=jobs)


async def _turn(connection: Connection, known: _InForce) -> float | None:
    (lock,) = await fetch_rows(connection, "take_pressure_lock")
    if not lock["is_ours"]:
        return None
    current = await fetch_rows(connection, "current_version")
    if not current or current[0]["id"] != known.version_id:
        return 0.0
    limited = [job for job in known.dag.jobs if has_limits(job)]
    rows = await fetch_rows(
        connection,
        "measure_queues",
        version=known.version_id,
        jobs=[job.name for job in limited],
        depths_max=[depth_counted_max(job) for job in limited],
    )
    measures = {
        row["name"]: QueueMeasure(row["depth"], row["oldest_seconds"], row["has_bulk"])
        for row in rows
    }
    before = {
        row["name"]: PressureState(
            PauseScope(row["scope"]) if row["scope"] else None, row["reason"]
        )
        for row in await fetch_rows(connection, "pressure_before")
    }
    decision = decide(known.dag, measures, before)
    await _write(connection, decision, measures, ids={row["name"]: row["job_id"] for row in rows})
    return None


async def _write(
    connection: Connection,
    decision: PressureDecision,
    measures: dict[str, QueueMeasure],
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
    ended = await fetch_rows(connection, "end_pauses", jobs=pauses["jobs"], causes=pauses["causes"])
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedJobs:
    """What pausing or resuming everything has done."""

    jobs: list[str]
    """The jobs that were paused or resumed by it, by name."""
    by_people: int
    """How many jobs are paused by people afterwards."""
    by_pressure: int
    """How many are paused by pressure."""


async def pause_everything(database: Database, reason: str) -> PausedJobs:
    """Have no job start anything until it is resumed. What runs goes on to its end."""

    async def work(connection: Connection) -> PausedJobs:
        rows = await _job_rows(connection, "pause_everything", reason=storable(reason))
        return await _moved(connection, rows)

    return await database.transact(work)


async def resume_everything(database: Database) -> PausedJobs:
    """End all pauses that people have made."""

    async def work(connection: Connection) -> PausedJobs:
        rows = await _job_rows(connection, "resume_everything")
        await wake_jobs(connection, [row["job_id"] for row in rows])
        return await _moved(connection, rows)

    return await database.transact(work)


async def _moved(connection: Connection, rows: list[dict[str, Any]]) -> PausedJobs:
    (left,) = await _job_rows(connection, "count_paused")
    return PausedJobs(jobs=sorted(row["name"] for row in rows), **left)


async def _job_rows(connection: Connection, name: str, **asked: object) -> list[Any]:
    return await (await connection.execute(query(name), asked)).fetchall()
