"""The queries of the API on the state as a whole: status, tasks, datasets, partitions, sources.

Each is one short transaction, and its answer is what goes over HTTP. Nothing is counted without
an end, and every list has a bound. Called by the dispatcher's API.

Workers, sources and alerts, for people who operate an installation.

Each query is one short transaction. Workers are those of the last day, some at most. When a
source was last seen is found by the indexes of cursors and intervals, and in the latest
thousands of events; what is older and has neither is reported as not found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec

from penstock.dispatcher.dag.model import AuthType, SourceKind, WebhookAuth
from penstock.dispatcher.database.pool import Connection, Database, fetch_rows, query
from penstock.kernel.units import duration_ms
from penstock.protocol.datasets import HotTableAnswer
from penstock.protocol.events import AuthAnswer, SourceAnswer, SourcesAnswer
from penstock.protocol.steering import (
    AlertAnswer,
    AlertsAnswer,
    AlertState,
    AttemptAnswer,
    ConsumedAnswer,
    DatasetAnswer,
    DatasetsAnswer,
    JobAnswer,
    NoticeAnswer,
    NoticeState,
    PartitionAnswer,
    PartitionsAnswer,
    PauseAnswer,
    RuleAnswer,
    TaskAnswer,
    TasksAnswer,
    TaskSummary,
)
from penstock.protocol.work import PublishedAnswer


@dataclass(frozen=True, slots=True)
class LiveGeneration:
    """A generation of a dataset that events are routed for."""

    dataset: str
    generation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerTarget:
    """A job that a trigger names, with one of its datasets and a live generation of that."""

    job: str
    is_source: bool | None
    dataset: str | None
    generation: str | None
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverallStatus:
    """What the views know of everything."""

    dag_version: int | None
    now: datetime
    jobs: list[JobAnswer]
    events_pending: int
    workers: int
    tables: list[HotTableAnswer]


_ID_MAX: Final = 2**63 - 1

Row = dict[str, Any]


class StatusViews:
    """The questions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def now(self) -> datetime:
        """The database's time: that it answers is what the caller wants to know."""
        (row,) = await self._ask("what_time")
        now: datetime = row["now"]
        return now

    async def job_id(self, name: str) -> int | None:
        """The number of a job that is or was in the DAG."""
        for row in await self._ask("find_job", name=name):
            found: int = row["id"]
            return found
        return None

    async def live(
        self, names: Iterable[str], *, of_webhooks: bool = False
    ) -> Mapping[str, Sequence[LiveGeneration]]:
        """The generations that events of these datasets are for: of all, or those of webhooks."""
        found: dict[str, list[LiveGeneration]] = {}
        asked = {"names": sorted(names), "of_webhooks": of_webhooks}
        for row in await self._ask("live_generations", **asked):
            found.setdefault(row["name"], []).append(
                LiveGeneration(row["dataset"], row["generation"])
            )
        return found

    async def targets(self, *, job: str | None, dataset: str | None) -> Sequence[TriggerTarget]:
        """What a trigger is about; nothing if the DAG in force has no such job or dataset."""
        rows = await self._ask("trigger_targets", job=job, dataset=dataset)
        return [TriggerTarget(**row) for row in rows]

    async def sources(self) -> SourcesAnswer:
        """The sources of the DAG in force."""

        async def work(connection: Connection) -> SourcesAnswer:
            found = await fetch_rows(connection, "sources_in_force")
            (clock,) = await fetch_rows(connection, "what_time")
            return SourcesAnswer(sources=[_source(row) for row in found], now=clock["now"])

        return await self._database.transact(work)

    async def overall(self) -> OverallStatus:
        """The state of everything that the views see, on one page."""

        async def work(connection: Connection) -> OverallStatus:
            (row,) = await fetch_rows(connection, "overall")
            jobs = await fetch_rows(connection, "jobs_in_force")
            tables = msgspec.convert(
                await fetch_rows(connection, "hot_status", dataset=None), list[HotTableAnswer]
            )
            return OverallStatus(
                jobs=[JobAnswer(**each) for each in jobs],
                tables=[x for x in tables if x.behind or x.problem or not x.is_served],
                **row,
            )

        return await self._database.transact(work)

    async def pauses(self, job: str) -> list[PauseAnswer]:
        """Why a job is paused."""
        return [PauseAnswer(**row) for row in await self._ask("job_pauses", job=job)]

    async def tasks(
        self,
        *,
        job_id: int | None,
        status: str | None,
        before: int | None,
        limit: int,
        partition_key: str | None = None,
    ) -> TasksAnswer:
        """Tasks, the latest first."""
        asked: dict[str, object] = {
            "job": job_id,
            "status": status,
            "before": before or _ID_MAX,
            "limit": limit + 1,
        }
        if partition_key is None:
            rows = await self._ask("list_tasks", **asked)
        else:
            rows = await self._ask("list_tasks_of_partition", **asked, partition=partition_key)
        tasks = [TaskSummary(**row) for row in rows[:limit]]
        return TasksAnswer(tasks=tasks, before=tasks[-1].id if len(rows) > limit else None)

    async def task(self, task_id: int) -> TaskAnswer | None:
        """Everything about one task."""

        async def work(connection: Connection) -> TaskAnswer | None:
            found = await fetch_rows(connection, "one_task", task=task_id)
            if not found:
                return None
            attempts = await fetch_rows(connection, "attempts_of_task", task=task_id)
            consumed = await fetch_rows(connection, "consumption_of_task", task=task_id)
            return _task(found[0], attempts[::-1], consumed)

        return await self._database.transact(work)

    async def datasets(self) -> DatasetsAnswer:
        """All datasets and their generations."""
        rows = await self._ask("list_datasets")
        return DatasetsAnswer(datasets=msgspec.convert(rows, list[DatasetAnswer]))

    async def partitions(
        self, name: str, *, generation: str | None, after: str | None, limit: int
    ) -> PartitionsAnswer | None:
        """What is published of a dataset, by key; None if there is no such generation."""

        async def work(connection: Connection) -> PartitionsAnswer | None:
            found = await fetch_rows(
                connection, "find_generation", name=name, generation=generation
            )
            if not found or found[0]["generation"] is None:
                return None
            rows = await fetch_rows(
                connection, "list_partitions", **found[0], after=after, limit=limit + 1
            )
            partitions = [PartitionAnswer(**row) for row in rows[:limit]]
            last = partitions[-1].partition_key if len(rows) > limit else None
            return PartitionsAnswer(
                generation=found[0]["generation"], partitions=partitions, after=last
            )

        return await self._database.transact(work)

    async def _ask(self, statement: str, /, **asked: object) -> list[Row]:
        return await self._database.rows(statement, **asked)


def _source(row: Row) -> SourceAnswer:
    source = row["source"]
    # What has its default is not stored.
    path = f"/{row['job']}" if source["kind"] == SourceKind.WEBHOOK else None
    return SourceAnswer(
        job=row["job"],
        kind=source["kind"],
        datasets=row["datasets"],
        cron=source.get("cron"),
        time_zone=source.get("time_zone", "UTC"),
        emits=source.get("emits", "cursor"),
        catch_up=source.get("catch_up", True),
        path=source.get("path", path),
        auth=_auth(source["auth"]) if "auth" in source else None,
        last_cursor=row["last_cursor"],
        last_end=row["last_end"],
        paused=row["paused"],
    )


def _auth(said: Mapping[str, Any]) -> AuthAnswer:
    secret = said["secret"]
    default = WebhookAuth(type=AuthType(said["type"]), secrets=())
    tolerance = said.get("tolerance")
    tolerance_ms = default.tolerance_ms if tolerance is None else duration_ms(tolerance)
    return AuthAnswer(
        type=default.type.value,
        secrets=[secret] if isinstance(secret, str) else secret,
        tolerance_seconds=tolerance_ms / 1000,
        header=said.get("header", default.header),
    )


def _task(row: Row, attempts: Sequence[Row], consumed: Sequence[Row]) -> TaskAnswer:
    payload = row.pop("payload")
    published = [one for each in attempts for one in each.pop("published") or ()]
    omitted = sum(each.pop("omitted") for each in attempts)
    return TaskAnswer(
        task=TaskSummary(**row),
        payload=payload,
        attempts=[AttemptAnswer(**each) for each in attempts],
        published=msgspec.convert(published, list[PublishedAnswer]),
        omitted=omitted,
        consumed=[ConsumedAnswer(**each) for each in consumed],
    )


NEWS_MAX: Final = 5_000
"""How many of the latest events are looked at for news of sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A worker that was heard of in the last day."""

    name: str
    operators: Sequence[str]
    about: Mapping[str, Any]
    """What it has said of itself: its runtimes, how many tasks it takes, and more."""
    first_seen_at: datetime
    last_seen_at: datetime
    is_heard: bool
    """Whether it was heard of in the last 90 seconds, and has not left."""
    is_gone: bool
    """Whether it has said that it leaves."""
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceActivity:
    """When a source was last heard of."""

    job: str
    heard_at: datetime | None
    lately: int
    """How many of the latest events are its, and of the last hour."""


class OperationViews:
    """The questions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def workers(self, *, limit: int) -> Sequence[WorkerRow]:
        """Those that were heard of lately come first."""

        async def work(connection: Connection) -> Sequence[WorkerRow]:
            found = await connection.execute(query("shown_workers"), {"limit": limit})
            return [WorkerRow(**row) for row in await found.fetchall()]

        return await self._database.transact(work)

    async def news(self) -> Mapping[str, SourceActivity]:
        """When each source of the DAG in force was last heard of, by job."""

        async def work(connection: Connection) -> Mapping[str, SourceActivity]:
            found = await connection.execute(query("source_news"), {"window": NEWS_MAX})
            return {row["job"]: SourceActivity(**row) for row in await found.fetchall()}

        return await self._database.transact(work)


class AlertViews:
    """The questions. Each is one short transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def alerts(
        self, *, state: AlertState | None = None, before: int | None = None, limit: int = 100
    ) -> AlertsAnswer:
        """Alerts, the newest first."""
        is_open = None if state is None else state is AlertState.OPEN
        asked = {"is_open": is_open, "before": before, "limit": limit}

        async def work(connection: Connection) -> AlertsAnswer:
            rows = await fetch_rows(connection, "list_alerts", asked)
            ids = {"alerts": [row["id"] for row in rows]}
            notices: dict[int, list[NoticeAnswer]] = {}
            for row in await fetch_rows(connection, "notices_of_alerts", ids):
                notices.setdefault(row.pop("alert_id"), []).append(_notice(row))
            judge = await fetch_rows(connection, "alert_judge", {})
            said: Mapping[str, Any] = judge[0]["said"] if judge else {}
            return AlertsAnswer(
                alerts=[_alert(row, notices.get(row["id"], [])) for row in rows],
                before=rows[-1]["id"] if len(rows) == limit else None,
                rules=[RuleAnswer(**each) for each in said.get("rules", [])],
                destinations=list(said.get("destinations", [])),
                judged_at=judge[0]["ran_at"] if judge else None,
            )

        return await self._database.transact(work)

    async def open_count(self) -> int:
        """How many are open and hold, to a thousand."""

        async def work(connection: Connection) -> int:
            (row,) = await fetch_rows(connection, "count_open_alerts", {})
            count: int = row["count"]
            return count

        return await self._database.transact(work)


def _alert(row: Mapping[str, Any], notices: list[NoticeAnswer]) -> AlertAnswer:
    state = AlertState.OPEN if row["over_at"] is None else AlertState.OVER
    return AlertAnswer(**row, state=state, notices=notices)


def _notice(row: Mapping[str, Any]) -> NoticeAnswer:
    said = dict(row)
    state = NoticeState.DUE
    if row["sent_at"] is not None:
        state = NoticeState.SENT
    elif row["given_up_at"] is not None:
        state = NoticeState.GIVEN_UP
    if state is not NoticeState.DUE:
        said["due_at"] = None
    return NoticeAnswer(**said, state=state)
