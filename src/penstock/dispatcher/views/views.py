"""What is asked of the state and changes nothing of it, but for noting that a worker was heard.

Each question is one short transaction, and its answer is what goes over HTTP. Nothing is counted
without an end, and every list has a bound. Called by the dispatcher's API.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from psycopg.types.json import Jsonb

from penstock.dispatcher.dag.model import AuthType, SourceKind, WebhookAuth
from penstock.dispatcher.dag.names import queue_of
from penstock.dispatcher.dag.units import duration_ms
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.views.values import Live, Overall, Target
from penstock.dispatcher.wire.events import AuthAnswer, SourceAnswer, SourcesAnswer
from penstock.dispatcher.wire.steering import (
    AttemptAnswer,
    ConsumedAnswer,
    DatasetAnswer,
    DatasetsAnswer,
    JobAnswer,
    PartitionAnswer,
    PartitionsAnswer,
    PauseAnswer,
    TaskAnswer,
    TasksAnswer,
    TaskSummary,
)
from penstock.dispatcher.wire.work import HelloAnswer, HelloAsk, OperatorAnswer, PublishedAnswer

_ID_MAX: Final = 2**63 - 1

Row = dict[str, Any]


class Views:
    """The questions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def hello(self, worker: str, ask: HelloAsk) -> HelloAnswer:
        """Note that a worker is there, and tell it what it should serve."""

        async def work(connection: Connection) -> HelloAnswer:
            found = await _rows(connection, "operators_to_serve", runtimes=ask.runtimes)
            if ask.queues:
                found = [row for row in found if queue_of(row["name"]) in ask.queues]
            about = {"runtimes": ask.runtimes, "concurrency": ask.concurrency, "about": ask.about}
            if ask.is_leaving:
                # Who serves nothing is counted for no job; and it is told apart from the silent.
                served = [row["name"] for row in found]
                about, found = {**about, "has_left": True, "served": served}, []
            heard = {
                "name": worker,
                "operators": [row["name"] for row in found],
                "about": Jsonb(about),
            }
            await connection.execute(query("hear_worker"), heard)
            (clock,) = await _rows(connection, "what_time")
            operators = [OperatorAnswer(**row) for row in found]
            return HelloAnswer(operators=operators, now=clock["now"])

        return await self._database.transact(work)

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
    ) -> Mapping[str, Sequence[Live]]:
        """The generations that events of these datasets are for: of all, or those of webhooks."""
        found: dict[str, list[Live]] = {}
        asked = {"names": sorted(names), "of_webhooks": of_webhooks}
        for row in await self._ask("live_generations", **asked):
            found.setdefault(row["name"], []).append(Live(row["dataset"], row["generation"]))
        return found

    async def targets(self, *, job: str | None, dataset: str | None) -> Sequence[Target]:
        """What a trigger is about; nothing if the DAG in force has no such job or dataset."""
        rows = await self._ask("trigger_targets", job=job, dataset=dataset)
        return [Target(**row) for row in rows]

    async def sources(self) -> SourcesAnswer:
        """The sources of the DAG in force."""

        async def work(connection: Connection) -> SourcesAnswer:
            found = await _rows(connection, "sources_in_force")
            (clock,) = await _rows(connection, "what_time")
            return SourcesAnswer(sources=[_source(row) for row in found], now=clock["now"])

        return await self._database.transact(work)

    async def overall(self) -> Overall:
        """The state of everything that the views see, on one page."""

        async def work(connection: Connection) -> Overall:
            (row,) = await _rows(connection, "overall")
            jobs = await _rows(connection, "jobs_in_force")
            return Overall(jobs=[JobAnswer(**each) for each in jobs], **row)

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
            found = await _rows(connection, "one_task", task=task_id)
            if not found:
                return None
            attempts = await _rows(connection, "attempts_of_task", task=task_id)
            consumed = await _rows(connection, "consumption_of_task", task=task_id)
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
            found = await _rows(connection, "find_generation", name=name, generation=generation)
            if not found or found[0]["generation"] is None:
                return None
            rows = await _rows(
                connection, "list_partitions", **found[0], after=after, limit=limit + 1
            )
            partitions = [PartitionAnswer(**row) for row in rows[:limit]]
            last = partitions[-1].partition_key if len(rows) > limit else None
            return PartitionsAnswer(
                generation=found[0]["generation"], partitions=partitions, after=last
            )

        return await self._database.transact(work)

    async def _ask(self, statement: str, /, **asked: object) -> list[Row]:
        return await self._database.transact(
            lambda connection: _rows(connection, statement, **asked)
        )


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


async def _rows(connection: Connection, statement: str, /, **asked: object) -> list[Row]:
    return await (await connection.execute(query(statement), asked)).fetchall()
