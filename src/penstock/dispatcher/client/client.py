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
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, overload
from urllib.parse import quote

from penstock.dispatcher.client.files import dag_source
from penstock.dispatcher.client.opening import connect
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
from penstock.dispatcher.dag.names import is_name, is_operator, shown
from penstock.dispatcher.wire.dags import (
    AppliedAnswer,
    ApplyAsk,
    CutOverAnswer,
    CutOverAsk,
    DagAnswer,
    RollbackAsk,
    VersionsAnswer,
)
from penstock.dispatcher.wire.steering import (
    BackfillAnswer,
    BackfillAsk,
    BackfillsAnswer,
    DatasetsAnswer,
    JobPausesAnswer,
    OperatorLimitAnswer,
    OperatorLimitAsk,
    OperatorsAnswer,
    OutboxAnswer,
    OutboxRetryAnswer,
    OutboxRetryAsk,
    PartitionsAnswer,
    PauseAsk,
    PressuresAnswer,
    StatusAnswer,
    TaskAnswer,
    TaskIdsAsk,
    TasksAnswer,
    TriggerAnswer,
    TriggerAsk,
)
from penstock.dispatcher.wire.work import ResultsAnswer, TaskResult
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import InvalidInput

if TYPE_CHECKING:
    import httpx

    from penstock.dispatcher.client.connection import Connection

URL: Final = "http://127.0.0.1:7070"
_IDS_MAX: Final = 1000
_WHERE_MAX: Final = 1000


class Client:
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
        self._url = url
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
        where: str | None = None,
    ) -> AppliedAnswer:
        """Put a DAG in force: a file by its name, or YAML text, which has more than one line.

        `where` is what messages call it. Raises `DagError` with all that is wrong with it, and
        `DispatcherRefused` of the kind `breaks` if work that waits or runs would become useless,
        unless `force`.
        """
        text, name = await asyncio.to_thread(dag_source, source, where)
        ask = ApplyAsk(source=text, where=name[-_WHERE_MAX:], force=force)
        return await self._connection.send("/v1/dag", AppliedAnswer, ask, where=name)

    async def dag(self) -> DagAnswer:
        """The DAG in force, with its text."""
        return await self._connection.get("/v1/dag", DagAnswer)

    async def versions(self) -> VersionsAnswer:
        """The versions of the DAG, the newest first."""
        return await self._connection.get("/v1/dag/versions", VersionsAnswer)

    async def rollback(self, version: int | None = None) -> AppliedAnswer:
        """Put an earlier version in force, by default the one before that which is in force."""
        ask = RollbackAsk(version=version)
        # To go one back twice is to go two back.
        is_repeatable = version is not None
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
    ) -> TriggerAnswer:
        """Tell that a source has something new, by its job or by one of its datasets.

        The same `event_id` again is the same event again. Without a partition and a cursor, the
        cursor is the database's time.
        """
        ask = TriggerAsk(
            job=job,
            dataset=dataset,
            event_id=event_id or f"trigger:{new_id(self._entropy)}",
            cursor=cursor,
            partition_key=partition_key,
            start=start,
            end=end,
        )
        return await self._connection.send("/v1/trigger", TriggerAnswer, ask)

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
        limit: int | None = None,
        before: int | None = None,
    ) -> TasksAnswer:
        """Tasks, the newest first; `before` is the answer's, for the next page."""
        asked = {"job": job, "status": status, "limit": limit, "before": before}
        return await self._connection.get("/v1/tasks", TasksAnswer, asked=asked)

    async def task(self, id: int) -> TaskAnswer:
        """Everything about one task."""
        return await self._connection.get(f"/v1/tasks/{id}", TaskAnswer)

    async def cancel(self, ids: Sequence[int], *, reason: str | None = None) -> ResultsAnswer:
        """Cancel tasks that wait, and ask those that run to stop. Each has its own answer."""
        return await self._each("cancel", ids, reason=reason, is_repeatable=True)

    async def replay(self, ids: Sequence[int]) -> ResultsAnswer:
        """Queue dead tasks again. Each has its own answer."""
        # A task that was just replayed is not dead, and would be refused.
        return await self._each("replay", ids, reason=None, is_repeatable=False)

    async def _each(
        self, verb: str, ids: Sequence[int], *, reason: str | None, is_repeatable: bool
    ) -> ResultsAnswer:
        results: list[TaskResult] = []
        for first in range(0, len(ids), _IDS_MAX):
            ask = TaskIdsAsk(tasks=list(ids[first : first + _IDS_MAX]))
            if reason is not None:
                ask.reason = reason
            results += await self._connection.send_tasks(
                f"/v1/tasks/{verb}", ask, is_repeatable=is_repeatable
            )
        return ResultsAnswer(results=results)

    # Watching and steering ------------------------------------------------------------------

    async def status(self) -> StatusAnswer:
        """Everything on one page."""
        return await self._connection.get("/v1/status", StatusAnswer)

    async def pressure(self) -> PressuresAnswer:
        """The queues that have limits, and what is paused because of them."""
        return await self._connection.get("/v1/pressure", PressuresAnswer)

    async def pause(self, job: str, *, reason: str | None = None) -> JobPausesAnswer:
        """Start nothing of a job until it is resumed; what runs goes on."""
        ask = PauseAsk() if reason is None else PauseAsk(reason=reason)
        path = f"/v1/jobs/{_name(job, 'job')}/pause"
        return await self._connection.send(path, JobPausesAnswer, ask)

    async def resume(self, job: str) -> JobPausesAnswer:
        """Take back what `pause` did; a pause because of pressure stays."""
        path = f"/v1/jobs/{_name(job, 'job')}/resume"
        return await self._connection.send(path, JobPausesAnswer)

    async def operators(self) -> OperatorsAnswer:
        """What runs and waits of each operator, for autoscalers."""
        return await self._connection.get("/v1/operators", OperatorsAnswer)

    async def limit_operator(self, operator: str, in_flight_max: int | None) -> OperatorLimitAnswer:
        """How many tasks of an operator may run at a time; None is as many as there are."""
        if not is_operator(operator):
            raise InvalidInput(f"{shown(operator)} is not the name of an operator.")
        ask = OperatorLimitAsk(in_flight_max=in_flight_max)
        path = f"/v1/operators/{operator}"
        return await self._connection.send(path, OperatorLimitAnswer, ask, method="PUT")

    async def outbox(self) -> OutboxAnswer:
        """The messages that could not be sent, and are not tried any more."""
        return await self._connection.get("/v1/outbox", OutboxAnswer)

    async def retry_outbox(self, ids: Sequence[int]) -> OutboxRetryAnswer:
        """Try messages again that are not tried any more."""
        ask = OutboxRetryAsk(ids=list(ids))
        return await self._connection.send("/v1/outbox/retry", OutboxRetryAnswer, ask)

    async def datasets(self) -> DatasetsAnswer:
        """Datasets and their generations."""
        return await self._connection.get("/v1/datasets", DatasetsAnswer)

    async def partitions(
        self,
        dataset: str,
        *,
        generation: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> PartitionsAnswer:
        """What is published of a dataset, by default of its current generation."""
        asked = {"generation": generation, "after": after, "limit": limit}
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/partitions"
        return await self._connection.get(path, PartitionsAnswer, asked=asked)

    async def cut_over(self, dataset: str, *, force: bool = False) -> CutOverAnswer:
        """Have readers read the generation that is being built.

        That happens by itself when it has all partitions of the current one; with `force` they
        may be missing.
        """
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/cut-over"
        # Whoever is heard a second time would be told that there is nothing to cut over.
        return await self._connection.send(
            path, CutOverAnswer, CutOverAsk(force=force), is_repeatable=False
        )

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
    async def wait(self, *, timeout_seconds: float = ...) -> StatusAnswer: ...

    async def wait(
        self,
        *,
        backfill: int | None = None,
        task: int | None = None,
        timeout_seconds: float = WAIT_SECONDS,
        told: Callable[[BackfillAnswer], None] | None = None,
    ) -> BackfillAnswer | TaskAnswer | StatusAnswer:
        """Wait until a backfill or a task is over, or until there is nothing left to do.

        Over is over, also if tasks are dead: look at the answer. `told` is called with each state
        of the backfill. Raises `NotSettled`, which is a `TimeoutError`, when the time is up.
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
            clock=clock, entropy=entropy, timeout_seconds=timeout_seconds
        )


def _name(word: str, noun: str) -> str:
    """A name as a part of a path."""
    if not is_name(word):
        raise InvalidInput(f"{shown(word)} is not the name of a {noun}.")
    return quote(word, safe="")
