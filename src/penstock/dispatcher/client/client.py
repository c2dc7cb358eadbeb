"""`Client`: one method for each request to the public listener of a dispatcher.

    async with Client("http://127.0.0.1:7070") as client:
        await client.apply("pipeline.yaml")
        await client.trigger("ingest", partition_key="2026-01-01T00")
        await client.wait()                       # until there is nothing left to do
        print(await client.status())

Answers are the structs of `penstock.protocol`; what goes wrong is `DispatcherUnavailable`,
`DispatcherRefused`, or `InvalidInput` for invalid arguments. A request that makes
something is given an id of its own here, so that it may be repeated when its answer is lost.

What sends requests is loaded when a client is opened. Many events of one source are sent in few
requests (`chunks_of`), each within what the dispatcher reads.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, overload
from urllib.parse import quote

import msgspec

from penstock.dispatcher.client.dag_files import dag_source
from penstock.dispatcher.client.waiter import (
    WAIT_SECONDS,
    IdleCheck,
    Wait,
    backfill_is_over,
    backfill_left,
    idle_left,
    task_is_over,
    task_left,
)
from penstock.dispatcher.dag.model import is_name, is_operator, queue_of
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import DispatcherRefused, InvalidInput
from penstock.kernel.text import shown
from penstock.protocol.dags import (
    AppliedAnswer,
    ApplyAsk,
    CutOverAnswer,
    CutOverAsk,
    DagAnswer,
    RollbackAsk,
    VersionsAnswer,
)
from penstock.protocol.datasets import (
    BuffersAnswer,
    DatasetChangesAnswer,
    DatasetDetail,
    MaintainAnswer,
    MaintainAsk,
    PurgeAnswer,
    PurgeAsk,
    ReadTokenAnswer,
    ReadTokenAsk,
    ReadTokensAnswer,
    RebuildTableAnswer,
    RefreshAnswer,
    RefreshAsk,
    RejectedAnswer,
    RejectedAsk,
    RejectedDoneAnswer,
    RejectedPlace,
    RemoveTokenAnswer,
    RemoveTokenAsk,
    SnapshotAnswer,
    SnapshotsAnswer,
    SweepAnswer,
    SweepAsk,
)
from penstock.protocol.events import payload_fault
from penstock.protocol.keys import (
    AuditAnswer,
    KeysAnswer,
    RevokeAnswer,
    RevokeAsk,
    RotateAnswer,
    RotateAsk,
)
from penstock.protocol.queries import QueriesAnswer, QueryAsk
from penstock.protocol.steering import (
    TRIGGERS_MAX,
    AlertsAnswer,
    BackfillAnswer,
    BackfillAsk,
    BackfillsAnswer,
    DatasetsAnswer,
    EverythingAnswer,
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
    TriggerEvent,
    TriggersAnswer,
    TriggersAsk,
)
from penstock.protocol.work import ResultsAnswer, TaskResult

if TYPE_CHECKING:
    from penstock.dispatcher.client.connection import DispatcherConnection
    from penstock.protocol.client import DispatcherTransport


_BYTES_MAX: Final = 4 * 2**20
"""Of one request; a dispatcher reads twice that."""
_PLACE: Final = re.compile(r"events\[(\d+)\]")


def trigger_events(
    events: Iterable[str | Mapping[str, Any]], entropy: Entropy
) -> list[TriggerEvent]:
    """Each with an id, so that it may be sent again. Raises `InvalidInput` for the first wrong."""
    return [_event(each, place, entropy) for place, each in enumerate(events, start=1)]


def _event(said: str | Mapping[str, Any], place: int, entropy: Entropy) -> TriggerEvent:
    fields = {"partition_key": said} if isinstance(said, str) else dict(said)
    try:
        found = msgspec.convert(
            {"event_id": f"trigger:{new_id(entropy)}", **fields}, type=TriggerEvent
        )
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidInput(
            f"Event {place:,} cannot be read: {error}.",
            hint="Its fields are partition_key, start, end, cursor, payload and event_id.",
        ) from error
    fault = payload_fault(found.payload) if found.payload else None
    if fault is not None:
        raise InvalidInput(f"Event {place:,}: {fault.why}")
    return found


def chunks_of(events: Iterable[TriggerEvent]) -> Iterator[list[TriggerEvent]]:
    """The same in their order, in pieces that one request may bring."""
    some: list[TriggerEvent] = []
    size = 0
    for each in events:
        bytes_ = len(msgspec.json.encode(each)) + 1
        if some and (len(some) == TRIGGERS_MAX or size + bytes_ > _BYTES_MAX):
            yield some
            some, size = [], 0
        some.append(each)
        size += bytes_
    if some:
        yield some


def refused_event(error: DispatcherRefused, *, before: int) -> DispatcherRefused:
    """The refusal with the event that it is about, if it is about one, and with what was taken."""
    found = _PLACE.match(error.field)
    told = f"Event {before + int(found[1]) + 1:,}: " if found else ""
    taken = f" The {before:,} events before that were sent first are taken." if before else ""
    message = error.message.removesuffix(f" (in {error.field})") if found else error.message
    return DispatcherRefused(
        f"{told}{message}{taken}",
        status=error.status,
        kind=error.kind,
        field=error.field,
        hint=error.hint,
    )


@dataclass(frozen=True, slots=True)
class DatasetTable:
    """A dataset, as a client reads it at different moments."""

    client: ClientOperations
    dataset: str

    async def snapshot(
        self, at: int | str | datetime | None = None, *, partition_key: str | None = None
    ) -> SnapshotAnswer:
        """All that is published now; or was, at a time or in the snapshot of an id."""
        return await self.client.snapshot(self.dataset, partition_key=partition_key, at=at)

    async def snapshots(self) -> SnapshotsAnswer:
        """Those that are kept, the newest first."""
        return await self.client.snapshots(self.dataset)

    async def changes(
        self, *, since: int | str | datetime, until: int | str | datetime
    ) -> DatasetChangesAnswer:
        """What has changed from one to another."""
        return await self.client.changes(self.dataset, since=since, until=until)


class ClientOperations:
    """The requests of `Client` that are about how things are, and how they shall be."""

    @property
    def _connection(self) -> DispatcherConnection:
        raise NotImplementedError

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

    async def pause_all(self, *, reason: str | None = None) -> EverythingAnswer:
        """Start nothing of any job until it is resumed; a job that comes later is not paused."""
        ask = PauseAsk() if reason is None else PauseAsk(reason=reason)
        return await self._connection.send("/v1/pause", EverythingAnswer, ask)

    async def resume_all(self) -> EverythingAnswer:
        """End all pauses that people have made; those because of pressure stay."""
        return await self._connection.send("/v1/resume", EverythingAnswer)

    async def operators(self) -> OperatorsAnswer:
        """What runs and waits of each operator, for autoscalers."""
        return await self._connection.get("/v1/operators", OperatorsAnswer)

    async def limit_operator(self, operator: str, in_flight_max: int | None) -> OperatorLimitAnswer:
        """How many tasks of an operator may run at a time; None is as many as there are."""
        if not is_operator(operator.partition("@")[0]) or not is_name(queue_of(operator)):
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

    async def buffers(self) -> BuffersAnswer:
        """The buffered datasets, and what waits for their sinks."""
        return await self._connection.get("/v1/buffers", BuffersAnswer)

    async def rejected(self, dataset: str, *, limit: int = 100) -> RejectedAnswer:
        """Rows that the sink of a buffered dataset has rejected, the last ones first."""
        path = f"/v1/buffers/{_name(dataset, 'dataset')}/rejected"
        return await self._connection.get(path, RejectedAnswer, asked={"limit": limit})

    async def give_back(
        self, dataset: str, rows: Sequence[RejectedPlace], *, is_dropped: bool = False
    ) -> RejectedDoneAnswer:
        """Give rejected rows back to the buffer, mended or as they were, or drop them."""
        path = f"/v1/buffers/{_name(dataset, 'dataset')}/rejected"
        ask = RejectedAsk(rows=list(rows), is_dropped=is_dropped)
        return await self._connection.send(path, RejectedDoneAnswer, ask)

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

    async def dataset(self, dataset: str) -> DatasetDetail:
        """Everything about one dataset: its generations, their columns and how much they hold."""
        path = f"/v1/datasets/{_name(dataset, 'dataset')}"
        return await self._connection.get(path, DatasetDetail)

    async def snapshot(
        self,
        dataset: str,
        *,
        generation: str | None = None,
        partition_key: str | None = None,
        at: int | str | datetime | None = None,
    ) -> SnapshotAnswer:
        """All that is published of a dataset at one moment, or of one partition of it.

        With `at`, which is the id of a snapshot or a time, as it was then. The files stay for at
        least as long as the dispatcher keeps what nobody needs any more.
        """
        asked = {"generation": generation, "partition_key": partition_key, "at": _moment(at)}
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/snapshot"
        return await self._connection.get(path, SnapshotAnswer, asked=asked)

    def table(self, dataset: str) -> DatasetTable:
        """A dataset, to be read as it is and as it was."""
        return DatasetTable(self, dataset)

    @asynccontextmanager
    async def query(self, ask: QueryAsk) -> AsyncIterator[AsyncIterator[bytes]]:
        """The pieces of a query's result, in the format that was asked for.

        Leaving cancels the query. A result that breaks off is `DispatcherUnavailable`.
        """
        async with self._connection.stream("/v1/query", ask) as pieces:
            yield pieces

    async def queries(self, *, limit: int = 100, before: int | None = None) -> QueriesAnswer:
        """Queries that were begun or refused, the newest first."""
        asked = {"limit": limit, "before": before}
        return await self._connection.get("/v1/queries", QueriesAnswer, asked=asked)

    async def snapshots(self, dataset: str) -> SnapshotsAnswer:
        """The snapshots of a dataset that are kept, the newest first."""
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/snapshots"
        return await self._connection.get(path, SnapshotsAnswer)

    async def changes(
        self, dataset: str, *, since: int | str | datetime, until: int | str | datetime
    ) -> DatasetChangesAnswer:
        """What has changed in a dataset from one snapshot, or time, to another."""
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/changes"
        asked = {"since": _moment(since), "until": _moment(until)}
        return await self._connection.get(path, DatasetChangesAnswer, asked=asked)

    async def make_read_token(
        self, name: str, *, datasets: Sequence[str] = (), days: float | None = None
    ) -> ReadTokenAnswer:
        """Make a token for reading these datasets as tables, or all."""
        ask = ReadTokenAsk(name=name, datasets=list(datasets), days=days)
        return await self._connection.send("/v1/read-tokens", ReadTokenAnswer, ask)

    async def read_tokens(self) -> ReadTokensAnswer:
        """The tokens for reading tables."""
        return await self._connection.get("/v1/read-tokens", ReadTokensAnswer)

    async def remove_read_token(self, name: str) -> RemoveTokenAnswer:
        """Take a token for reading tables back."""
        ask = RemoveTokenAsk(name=name)
        return await self._connection.send("/v1/read-tokens/remove", RemoveTokenAnswer, ask)

    async def sweep(
        self,
        dataset: str | None = None,
        *,
        grace_seconds: float | None = None,
        dry_run: bool = False,
    ) -> SweepAnswer:
        """Remove files that nobody can be reading any more, for a while; ask until it is over.

        With `dry_run` nothing is removed; the answer has what would be.
        """
        ask = SweepAsk(grace_seconds=grace_seconds, dry_run=dry_run)
        path = "/v1/sweep" if dataset is None else f"/v1/datasets/{_name(dataset, 'dataset')}/sweep"
        return await self._connection.send(path, SweepAnswer, ask)

    async def refresh(self, dataset: str, *, after: str = "") -> RefreshAnswer:
        """Have every `current.json` say what is published; ask with `after` until that is None."""
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/refresh"
        return await self._connection.send(path, RefreshAnswer, RefreshAsk(after=after))

    async def rebuild_table(self, dataset: str) -> RebuildTableAnswer:
        """Have the table of a dataset in Postgres loaded anew from what is published."""
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/rebuild-table"
        return await self._connection.send(path, RebuildTableAnswer)

    async def purge(
        self, dataset: str, *, partition_keys: Sequence[str] = (), is_current: bool = False
    ) -> PurgeAnswer:
        """Forget what a dataset was, or some partitions of it; with `is_current` these as they are.

        Nothing brings it back. Files go with the next sweep that finds that nobody reads them.
        """
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/purge"
        ask = PurgeAsk(partition_keys=list(partition_keys), is_current=is_current)
        return await self._connection.send(path, PurgeAnswer, ask)

    async def maintain(self, dataset: str, *, partition_key: str | None = None) -> MaintainAnswer:
        """Make tasks that rewrite the files of a dataset, or of one partition, in place."""
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/maintain"
        ask = MaintainAsk(partition_key=partition_key)
        # Whoever is heard a second time would be told that there is nothing to make.
        return await self._connection.send(path, MaintainAnswer, ask, is_repeatable=False)

    async def cut_over(
        self, dataset: str, *, force: bool = False, keep: bool = False
    ) -> CutOverAnswer:
        """Have readers read the generation that is being built.

        That happens by itself when it has all that the current one has; with `force` something
        may be missing, and with `keep` what cannot be built anew is taken over as it is.
        """
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/cut-over"
        # Whoever is heard a second time would be told that there is nothing to cut over.
        return await self._connection.send(
            path, CutOverAnswer, CutOverAsk(force=force, keep=keep), is_repeatable=False
        )

    async def keys(self) -> KeysAnswer:
        """The keys that sign capability tokens, the newest first."""
        return await self._connection.get("/v1/keys", KeysAnswer)

    async def rotate_keys(self, *, kms_key: str | None = None) -> RotateAnswer:
        """Have every dispatcher sign with a new key, in about a minute.

        Asked again before that, it is the same rotation. `kms_key` names the key that signs from
        then on, where KMS does.
        """
        ask = RotateAsk(kms_key=kms_key)
        return await self._connection.send("/v1/keys/rotate", RotateAnswer, ask)

    async def revoke_key(self, kid: str) -> RevokeAnswer:
        """End a key at once: what it has signed proves nothing from then on."""
        return await self._connection.send("/v1/keys/revoke", RevokeAnswer, RevokeAsk(kid=kid))

    async def alerts(
        self, *, state: str | None = None, limit: int | None = None, before: int | None = None
    ) -> AlertsAnswer:
        """What is the matter (`state="open"`), what was (`over`), and who was told.

        The newest first; `before` is the answer's.
        """
        asked = {"state": state, "limit": limit, "before": before}
        return await self._connection.get("/v1/alerts", AlertsAnswer, asked=asked)

    async def audit(
        self,
        *,
        task: int | None = None,
        outcome: str | None = None,
        limit: int | None = None,
        before: int | None = None,
    ) -> AuditAnswer:
        """Who was refused, and what was allowed, the newest first; `before` is the answer's."""
        asked = {"task": task, "outcome": outcome, "limit": limit, "before": before}
        return await self._connection.get("/v1/audit", AuditAnswer, asked=asked)


def _name(word: str, noun: str) -> str:
    """A name as a part of a path."""
    if not is_name(word):
        raise InvalidInput(f"{shown(word)} is not the name of a {noun}.")
    return quote(word, safe="")


def _moment(at: int | str | datetime | None) -> str | None:
    if isinstance(at, datetime):
        return at.isoformat()
    return None if at is None else str(at)


URL: Final = "http://127.0.0.1:7070"
_IDS_MAX: Final = 1000
_WHERE_MAX: Final = 1000


class Client(ClientOperations):
    """A dispatcher, for people and their programs. Use it as an async context manager."""

    def __init__(
        self,
        url: str = URL,
        token: str | None = None,
        *,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        transport: DispatcherTransport | None = None,
    ) -> None:
        self._url = url
        self._token = token
        self._clock = clock or SystemClock()
        self._entropy = entropy or system_entropy()
        self._transport = transport
        self._opened: DispatcherConnection | None = None

    async def __aenter__(self) -> Self:
        # Imported here: it takes its time, and who imports `penstock` for a queue needs none of it.
        module = import_module("penstock.dispatcher.client.connection")
        self._opened = module.DispatcherConnection(
            self._url,
            token=self._token,
            clock=self._clock,
            entropy=self._entropy,
            transport=self._transport,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()

    @property
    def _connection(self) -> DispatcherConnection:
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
        """Send many events of one source, in few requests.

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
        """Replay dead tasks. Each has its own answer."""
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
        return await Wait(self.status, IdleCheck(), idle_left).run(
            clock=clock, entropy=entropy, timeout_seconds=timeout_seconds, told=told
        )
