"""`Client`: one method for each request to the public listener of a dispatcher.

    async with Client("http://127.0.0.1:7070") as client:
        await client.apply("pipeline.yaml")
        await client.trigger("ingest", partition_key="2026-01-01T00")
        await client.wait()                       # until there is nothing left to do
        print(await client.status())

Answers are the structs of `penstock.dispatcher.wire`; what goes wrong is `DispatcherUnavailable`,
`DispatcherRefused`, or `InvalidInput` for words that cannot be right. A request that makes
something is given an id of its own here, so that it may be repeated when its answer is lost.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, overload

from penstock.dispatcher.client.opening import checked_url, connect
from penstock.dispatcher.client.sending import dag_source
from penstock.dispatcher.client.triggering import chunks_of, refused_event, trigger_events
from penstock.dispatcher.client.waiting import (
    WAIT_SECONDS,
    Idle,
    Wait,
    backfill_is_over,
    backfill_left,
    idle_left,
    task_is_over,
    task_left,
)
from penstock.dispatcher.client.watching import Watching
from penstock.dispatcher.payloads import payload_fault
from penstock.dispatcher.wire.dags import (
    AppliedAnswer,
    ApplyAsk,
    DagAnswer,
    RollbackAsk,
    VersionsAnswer,
)
from penstock.dispatcher.wire.steering import (
    BackfillAnswer,
    BackfillAsk,
    BackfillsAnswer,
    StatusAnswer,
    TaskAnswer,
    TaskIdsAsk,
    TasksAnswer,
    TriggerAnswer,
    TriggerAsk,
    TriggersAnswer,
    TriggersAsk,
)
from penstock.dispatcher.wire.work import ResultsAnswer, TaskResult
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import DispatcherRefused, InvalidInput

if TYPE_CHECKING:
    import httpx

    from penstock.dispatcher.client.connection import Connection

URL: Final = "http://127.0.0.1:7070"
_IDS_MAX: Final = 1000
_WHERE_MAX: Final = 1000


class Client(Watching):
    """A dispatcher, for people and their programs. Use it as an async context manager."""

    def __init__(
        self,
        url: str = URL,
        token: str | None = None,
        *,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = checked_url(url)
        self._token = token
        self._clock = clock or SystemClock()
        self._entropy = entropy or system_entropy()
        self._transport = transport
        self._opened: Connection | None = None

    async def __aenter__(self) -> Self:
        self._opened = connect(self._url, self._token, self._clock, self._entropy, self._transport)
        await self._opened.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.__aexit__(kind, error, trace)

    @property
    def _connection(self) -> Connection:
        if self._opened is None:
            raise InvalidInput("The client is not open.", hint="Write: async with Client(…) as …")
        return self._opened

    def now(self) -> float:
        """The dispatcher's time by its last answer, for showing how long ago something was."""
        return self._connection.now()

    # The DAG --------------------------------------------------------------------------------

    async def apply(
        self,
        source: str | os.PathLike[str],
        *,
        force: bool = False,
        dry_run: bool = False,
        where: str | None = None,
        files: Mapping[str, str] | None = None,
    ) -> AppliedAnswer:
        """Put a DAG in force: a file by its name, or YAML text, which has more than one line.

        The files that it names are read with it, from its folder; those that a text names are given
        as `files`, by their names. `where` is what messages call it. Raises `DagError` with all
        that is wrong with it, and `DispatcherRefused` of the kind `breaks` if work that waits or
        runs would become useless, unless `force`. With `dry_run` nothing is changed: the answer has
        what would happen, and what it would break.
        """
        read = await asyncio.to_thread(dag_source, source, where)
        ask = ApplyAsk(
            source=read.text,
            where=read.where[-_WHERE_MAX:],
            files={**read.files, **(files or {})},
            force=force,
            dry_run=dry_run,
        )
        return await self._connection.send("/v1/dag", AppliedAnswer, ask, where=read.where)

    async def dag(self) -> DagAnswer:
        """The DAG in force, with its text."""
        return await self._connection.get("/v1/dag", DagAnswer)

    async def versions(self) -> VersionsAnswer:
        """The versions of the DAG, the newest first."""
        return await self._connection.get("/v1/dag/versions", VersionsAnswer)

    async def rollback(self, version: int | None = None, *, dry_run: bool = False) -> AppliedAnswer:
        """Put an earlier version in force, by default the one that was in force before this one.

        So without a version, twice is there and back.
        """
        ask = RollbackAsk(version=version, dry_run=dry_run)
        is_repeatable = version is not None or dry_run
        return await self._connection.send(
            "/v1/dag/rollback", AppliedAnswer, ask, is_repeatable=is_repeatable
        )

    # Work -----------------------------------------------------------------------------------

    async def trigger(
        self,
        job: str | None = None,
        *,
        dataset: str | None = None,
        event_id: str | None = None,
        cursor: int | None = None,
        partition_key: str | None = None,
        start: int | None = None,
        end: int | None = None,
        payload: Mapping[str, Any] | None = None,
    ) -> TriggerAnswer:
        """Tell that a source has something new, by its job or by one of its datasets.

        The same `event_id` again is the same event again. Without a partition and a cursor, the
        cursor is the database's time. The `payload`, a JSON object of 64 KiB at most, is what the
        functions that follow find in `task.payload`.
        """
        fault = payload_fault(payload) if payload else None
        if fault is not None:
            raise InvalidInput(fault.why)
        ask = TriggerAsk(
            job=job,
            dataset=dataset,
            event_id=event_id or f"trigger:{new_id(self._entropy)}",
            cursor=cursor,
            partition_key=partition_key,
            start=start,
            end=end,
            payload=dict(payload) if payload else None,
        )
        return await self._connection.send("/v1/trigger", TriggerAnswer, ask)

    async def trigger_many(
        self,
        job: str | None = None,
        *,
        dataset: str | None = None,
        events: Iterable[str | Mapping[str, Any]],
    ) -> list[TriggerAnswer]:
        """Tell of much news of one source, in few requests.

        An event is the key of a partition, or what `trigger` takes by name: `partition_key`,
        `start`, `end`, `cursor`, `payload`, `event_id`. They are taken by the thousand, each
        thousand whole or not at all; the error says which event is wrong, and what was taken.
        """
        asked = trigger_events(events, self._entropy)
        told: list[TriggerAnswer] = []
        for some in chunks_of(asked):
            ask = TriggersAsk(job=job, dataset=dataset, events=some)
            try:
                answer = await self._connection.send("/v1/triggers", TriggersAnswer, ask)
            except DispatcherRefused as error:
                raise refused_event(error, before=len(told)) from error
            told += answer.events
        return told

    async def backfill(
        self,
        job: str,
        *,
        keys: Sequence[str] = (),
        start: int | None = None,
        end: int | None = None,
        step: int | None = None,
        concurrency: int = 100,
        request_id: str | None = None,
    ) -> BackfillAnswer:
        """Compute partitions of a job: these keys, or the ranges from start to end by step.

        The same `request_id` again is the same backfill.
        """
        ask = BackfillAsk(
            job=job,
            keys=list(keys),
            start=start,
            end=end,
            step=step,
            concurrency=concurrency,
            request_id=request_id or f"client:{new_id(self._entropy)}",
        )
        return await self._connection.send("/v1/backfills", BackfillAnswer, ask)

    async def backfills(self, *, limit: int | None = None) -> BackfillsAnswer:
        """The latest backfills, the newest first."""
        return await self._connection.get("/v1/backfills", BackfillsAnswer, asked={"limit": limit})

    async def find_backfill(self, id: int) -> BackfillAnswer:
        """One backfill, and how far it is."""
        return await self._connection.get(f"/v1/backfills/{id}", BackfillAnswer)

    async def pause_backfill(self, id: int) -> BackfillAnswer:
        """Make no more tasks of a backfill for now; those that there are go on."""
        return await self._connection.send(f"/v1/backfills/{id}/pause", BackfillAnswer)

    async def resume_backfill(self, id: int) -> BackfillAnswer:
        return await self._connection.send(f"/v1/backfills/{id}/resume", BackfillAnswer)

    async def cancel_backfill(self, id: int) -> BackfillAnswer:
        """End a backfill: what waits is cancelled, what runs is asked to stop."""
        return await self._connection.send(f"/v1/backfills/{id}/cancel", BackfillAnswer)

    async def tasks(
        self,
        *,
        job: str | None = None,
        status: str | None = None,
        partition_key: str | None = None,
        limit: int | None = None,
        before: int | None = None,
    ) -> TasksAnswer:
        """Tasks, the newest first; `before` is the answer's, for the next page."""
        asked = {
            "job": job,
            "status": status,
            "partition_key": partition_key,
            "limit": limit,
            "before": before,
        }
        return await self._connection.get("/v1/tasks", TasksAnswer, asked=asked)

    async def task(self, id: int) -> TaskAnswer:
        """Everything about one task."""
        return await self._connection.get(f"/v1/tasks/{id}", TaskAnswer)

    async def cancel(self, ids: int | Sequence[int], *, reason: str | None = None) -> ResultsAnswer:
        """Cancel tasks that wait, and ask those that run to stop. Each has its own answer."""
        return await self._each("cancel", ids, reason=reason, is_repeatable=True)

    async def replay(self, ids: int | Sequence[int]) -> ResultsAnswer:
        """Queue dead tasks again. Each has its own answer."""
        # A task that was just replayed is not dead, and would be refused.
        return await self._each("replay", ids, reason=None, is_repeatable=False)

    async def _each(
        self, verb: str, ids: int | Sequence[int], *, reason: str | None, is_repeatable: bool
    ) -> ResultsAnswer:
        ids = [ids] if isinstance(ids, int) else ids
        results: list[TaskResult] = []
        for first in range(0, len(ids), _IDS_MAX):
            ask = TaskIdsAsk(tasks=list(ids[first : first + _IDS_MAX]))
            if reason is not None:
                ask.reason = reason
            results += await self._connection.send_tasks(
                f"/v1/tasks/{verb}", ask, is_repeatable=is_repeatable
            )
        return ResultsAnswer(results=results)

    # Waiting --------------------------------------------------------------------------------

    @overload
    async def wait(
        self,
        *,
        backfill: int,
        timeout_seconds: float = ...,
        told: Callable[[BackfillAnswer], None] | None = ...,
    ) -> BackfillAnswer: ...

    @overload
    async def wait(self, *, task: int, timeout_seconds: float = ...) -> TaskAnswer: ...

    @overload
    async def wait(
        self,
        *,
        timeout_seconds: float = ...,
        told: Callable[[StatusAnswer], None] | None = ...,
    ) -> StatusAnswer: ...

    async def wait(
        self,
        *,
        backfill: int | None = None,
        task: int | None = None,
        timeout_seconds: float = WAIT_SECONDS,
        told: Callable[[Any], None] | None = None,
    ) -> BackfillAnswer | TaskAnswer | StatusAnswer:
        """Wait until a backfill or a task is over, or until there is nothing left to do.

        Over is over, also if tasks are dead: look at the answer. `told` is called with each state
        of the backfill, or of everything. Raises `NotSettled`, which is a `TimeoutError`, when the
        time is up.
        """
        clock, entropy = self._clock, self._entropy
        if backfill is not None and task is not None:
            raise InvalidInput("Wait for a backfill or for a task, not for both.")
        if backfill is not None:
            number = backfill
            return await Wait(
                lambda: self.find_backfill(number), backfill_is_over, backfill_left
            ).run(clock=clock, entropy=entropy, timeout_seconds=timeout_seconds, told=told)
        if task is not None:
            number = task
            return await Wait(lambda: self.task(number), task_is_over, task_left).run(
                clock=clock, entropy=entropy, timeout_seconds=timeout_seconds
            )
        return await Wait(self.status, Idle(), idle_left).run(
            clock=clock, entropy=entropy, timeout_seconds=timeout_seconds, told=told
        )
