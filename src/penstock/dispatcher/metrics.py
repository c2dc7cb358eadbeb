"""Metrics of the dispatcher: gauges from the tables, counters of the process, the Prometheus text.

- Gauges (`MetricsReader`) are read in one transaction, change nothing and wait for nobody. Any
  dispatcher gives the same: take the maximum over instances. What can be long is counted to 10,000.
- Counters (`Counters`) are of one process: each dispatcher counts what it has committed or
  answered
  itself, after the commit: scrape all and take the sum. A restart begins anew, and what was
  committed just before a kill is counted by nobody. Nothing is read from tables for them.
- Labels are bounded: `JOBS_MAX` jobs in the life of a process and `OTHERS` for all more; paths
  are
  those of the endpoints, and `OTHERS` for what is none.
- `MetricsReader` owns the table `operator` too. A limit that is raised or removed makes tasks
  claimable, so it writes their wake-ups in its own transaction; a lower one ends nothing that runs.
- `take_turn` gives periodic work to one dispatcher of all.

Called by the API, `tasks.lifecycle`, each listener's application and `cloudwatch`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from penstock.dispatcher.backpressure import wake_jobs
from penstock.dispatcher.dag.model import queue_of
from penstock.dispatcher.database.pool import Connection, Database, fetch_rows
from penstock.dispatcher.tasks.model import AttemptMeasure, ClaimedTask
from penstock.dispatcher.tasks.rows import storable
from penstock.kernel.prometheus import Family, Histogram, Labels, exposed
from penstock.protocol.base import TaskStatus
from penstock.protocol.steering import OperatorLoad, OperatorsAnswer

JOBS_MAX: Final = 1_000
OTHERS: Final = "(others)"
_TASK_SECONDS: Final = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400)
_CALL_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Counters:
    """The counters of one dispatcher."""

    def __init__(self) -> None:
        self._jobs: set[str] = set()
        self._attempts: Counter[tuple[str, str]] = Counter()
        self._ran: dict[str, Histogram] = {}
        self._waited: dict[str, Histogram] = {}
        self._published: dict[str, Counter[str]] = {"bytes": Counter(), "rows": Counter()}
        self._calls: Counter[tuple[str, str, str, str]] = Counter()
        self._took: dict[tuple[str, str, str], Histogram] = {}

    def note_begun(self, claimed: Iterable[ClaimedTask]) -> None:
        """Attempts have begun."""
        for each in claimed:
            _histogram(self._waited, self._job(each.job)).note(each.waited_seconds)

    def note_ended(self, measured: Iterable[AttemptMeasure]) -> None:
        """Attempts have ended."""
        for each in measured:
            job = self._job(each.job)
            self._attempts[job, each.outcome] += 1
            _histogram(self._ran, job).note(each.seconds)
            self._published["bytes"][job] += each.published_bytes
            self._published["rows"][job] += each.published_rows

    def note_call(
        self, *, listener: str, method: str, path: str, status: int, seconds: float
    ) -> None:
        """A call was answered. `path` is the one of the table of endpoints, if there is one."""
        method, path = (method, path) if path else (OTHERS, OTHERS)
        self._calls[listener, method, path, f"{status // 100}xx"] += 1
        if (found := self._took.get((listener, method, path))) is None:
            found = self._took[listener, method, path] = Histogram(_CALL_SECONDS)
        found.note(seconds)

    def families(self) -> Iterator[Family]:
        """All of it, for a scrape."""
        yield Family(
            "penstock_attempts_total",
            "Attempts ended, by job and outcome.",
            "counter",
            [
                ({"job": job, "outcome": outcome}, count)
                for (job, outcome), count in sorted(self._attempts.items())
            ],
        )
        for name, about, found in (
            ("attempt_seconds", "Duration of attempts, from claim to end.", self._ran),
            ("queue_seconds", "How long due tasks waited to be claimed.", self._waited),
        ):
            values = [({"job": job}, each) for job, each in sorted(found.items())]
            yield Family(f"penstock_{name}", about, "histogram", histograms=values)
        for unit, counts in self._published.items():
            yield Family(
                f"penstock_published_{unit}_total",
                f"{unit.title()} published, as manifests state them.",
                "counter",
                [({"job": job}, count) for job, count in sorted(counts.items())],
            )
        yield Family(
            "penstock_http_requests_total",
            "API requests answered, without probes.",
            "counter",
            [
                (dict(zip(("listener", "method", "path", "status"), key, strict=True)), count)
                for key, count in sorted(self._calls.items())
            ],
        )
        yield Family(
            "penstock_http_request_seconds",
            "Duration of API requests, bodies and answers included.",
            "histogram",
            histograms=[
                (dict(zip(("listener", "method", "path"), key, strict=True)), each)
                for key, each in sorted(self._took.items())
            ],
        )

    def _job(self, name: str) -> str:
        if name not in self._jobs:
            if len(self._jobs) >= JOBS_MAX:
                return OTHERS
            self._jobs.add(name)
        return name


def _histogram(held: dict[str, Histogram], job: str) -> Histogram:
    if (found := held.get(job)) is None:
        found = held[job] = Histogram(_TASK_SECONDS)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMetrics:
    """A job of the DAG in force that runs something."""

    name: str
    normal: int
    """Waiting tasks of normal priority."""
    bulk: int
    running: int
    dead: int
    oldest_seconds: float
    """How long the oldest task that is due has waited."""
    is_paused: bool
    is_pressed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """One look at everything."""

    now: datetime
    operators: tuple[OperatorLoad, ...]
    jobs: tuple[JobMetrics, ...]
    events_pending: int
    events_oldest_seconds: float
    events_last_minute: int
    outbox_pending: int
    """Rows that are due and not sent."""
    outbox_parked: int
    hot_tables_behind: int
    hot_tables_behind_seconds: float
    workers: int
    """Those seen in the last 90 seconds."""
    settled_last_minute: Mapping[str, int]
    """Tasks that have ended in the last minute, by their status."""
    queues: Mapping[str, int] = field(default_factory=dict)
    """How many tasks of each queue should run at once: what its workers are scaled by."""


QUEUE_DESIRED: Final = "penstock_queue_desired"


def _gauge(name: str, about: str, values: Sequence[tuple[Labels, float]]) -> Family:
    return Family(name, about, values=values)


def exposition(figures: MetricsSnapshot, counters: Counters) -> str:
    """The text that a scrape is answered."""
    gauges = (*_overall(figures), *_operators(figures), *_jobs(figures))
    return exposed((*gauges, *counters.families()))


def _overall(figures: MetricsSnapshot) -> Iterator[Family]:
    for name, about, value in (
        ("events_pending", "Events that are not routed yet.", figures.events_pending),
        (
            "events_oldest_seconds",
            "How long the oldest event has waited to be routed.",
            figures.events_oldest_seconds,
        ),
        (
            "events_last_minute",
            "Events that came in within the last minute.",
            figures.events_last_minute,
        ),
        ("outbox_pending", "Outbox entries due for delivery.", figures.outbox_pending),
        ("outbox_parked", "Outbox entries that are parked.", figures.outbox_parked),
        (
            "hot_tables_behind",
            "Tables in Postgres that do not have all that is published.",
            figures.hot_tables_behind,
        ),
        (
            "hot_tables_behind_seconds",
            "How long the first of them has been behind.",
            figures.hot_tables_behind_seconds,
        ),
        ("workers", "Workers seen within the last 90 seconds.", figures.workers),
    ):
        yield _gauge(f"penstock_{name}", about, [({}, value)])
    yield _gauge(
        "penstock_tasks_settled_last_minute",
        "Tasks that have ended within the last minute.",
        [({"status": status}, count) for status, count in figures.settled_last_minute.items()],
    )


def _operators(figures: MetricsSnapshot) -> Iterator[Family]:
    def gauge(name: str, about: str, values: Iterable[tuple[str, float]]) -> Family:
        told: list[tuple[Labels, float]] = [({"operator": each}, value) for each, value in values]
        return _gauge(f"penstock_operator_{name}", about, told)

    loads = figures.operators
    yield gauge("in_flight", "Tasks that run.", [(each.name, each.in_flight) for each in loads])
    yield gauge(
        "in_flight_max",
        "How many tasks may run at a time, where that is limited.",
        [(each.name, each.in_flight_max) for each in loads if each.in_flight_max is not None],
    )
    yield gauge(
        "waiting",
        "Tasks that could run now, counted to 10,000.",
        [(each.name, each.waiting) for each in loads],
    )
    yield gauge(
        "desired",
        "How many tasks should run at once, for autoscalers.",
        [(each.name, each.desired) for each in loads],
    )
    yield _gauge(
        QUEUE_DESIRED,
        "How many tasks of a queue should run at once, for autoscalers of its workers.",
        [({"queue": name}, desired) for name, desired in figures.queues.items()],
    )


def _jobs(figures: MetricsSnapshot) -> Iterator[Family]:
    yield _gauge(
        "penstock_job_waiting",
        "Tasks that wait, counted to 10,000.",
        [
            ({"job": job.name, "priority": priority}, count)
            for job in figures.jobs
            for priority, count in (("normal", job.normal), ("bulk", job.bulk))
        ],
    )
    for name, about, values in (
        ("running", "Tasks that run.", [job.running for job in figures.jobs]),
        ("dead", "Tasks that are dead, counted to 10,000.", [job.dead for job in figures.jobs]),
        (
            "oldest_seconds",
            "How long the oldest task that is due has waited.",
            [job.oldest_seconds for job in figures.jobs],
        ),
        ("paused", "Whether it is paused.", [job.is_paused for job in figures.jobs]),
        ("pressed", "Whether its queue exceeds its limits.", [j.is_pressed for j in figures.jobs]),
    ):
        told: list[tuple[Labels, float]] = [
            ({"job": job.name}, float(value))
            for job, value in zip(figures.jobs, values, strict=True)
        ]
        yield _gauge(f"penstock_job_{name}", about, told)


_SETTLED = (TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELLED)


class MetricsReader:
    """The figures of all dispatchers that share a database."""

    def __init__(self, database: Database, *, counters: Counters | None = None) -> None:
        self._database = database
        self.counters = counters or Counters()
        """Those of this dispatcher alone."""

    async def figures(self) -> MetricsSnapshot:
        """One look at everything."""
        return await self._database.transact(_figures)

    async def text(self) -> str:
        """The figures in the text format of Prometheus."""
        return exposition(await self.figures(), self.counters)

    async def operators(self) -> OperatorsAnswer:
        """What runs and waits for each operator, and how much should run."""

        async def work(connection: Connection) -> OperatorsAnswer:
            loads = [OperatorLoad(**row) for row in await fetch_rows(connection, "operator_loads")]
            return OperatorsAnswer(operators=loads, queues=await _queues(connection, loads))

        return await self._database.transact(work)

    async def limit_operator(self, name: str, in_flight_max: int | None) -> bool:
        """Let so many tasks of an operator run at a time; None is any number.

        False if no job has ever had this operator.
        """
        asked = {"name": storable(name), "in_flight_max": in_flight_max}

        async def work(connection: Connection) -> bool:
            if not await fetch_rows(connection, "limit_operator", **asked):
                return False
            jobs = await fetch_rows(connection, "jobs_of_operator", name=asked["name"])
            await wake_jobs(connection, [row["job_id"] for row in jobs])
            return True

        return await self._database.transact(work)


async def take_turn(database: Database, name: str, *, seconds: float) -> bool:
    """Whether it is ours to do what one dispatcher does for all, once in so many seconds."""
    return bool(await database.fetch("take_turn", {"name": name, "seconds": seconds}))


async def _figures(connection: Connection) -> MetricsSnapshot:
    (overall,) = await fetch_rows(connection, "overall_figures")
    settled = {
        row["status"]: row["count"] for row in await fetch_rows(connection, "settled_figures")
    }
    loads = [OperatorLoad(**row) for row in await fetch_rows(connection, "operator_loads")]
    jobs = await fetch_rows(connection, "job_figures")
    return MetricsSnapshot(
        **overall,
        operators=tuple(loads),
        queues=await _queues(connection, loads),
        jobs=tuple(JobMetrics(**row) for row in jobs),
        settled_last_minute={status.value: settled.get(status, 0) for status in _SETTLED},
    )


async def _queues(connection: Connection, loads: Sequence[OperatorLoad]) -> dict[str, int]:
    # A queue that has no job any more is told as 0: its workers are to be scaled in.
    wanted = {queue_of(row["name"]): 0 for row in await fetch_rows(connection, "operator_names")}
    for each in loads:
        wanted[queue_of(each.name)] += each.desired
    return wanted
