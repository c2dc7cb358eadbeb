"""Datasets, their partitions and their snapshots: what is there, what is missing and why.

Each query is one short transaction and has a bound. A snapshot is one statement, so it is of
one moment, whatever is published or cut over meanwhile. Partitions without a key have the empty
one, as in the database. `DatasetViews` answers the API, `PartitionViews` and `SnapshotViews` the
console.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import msgspec

from penstock.dispatcher.catalog.scan_planner import PartRow
from penstock.dispatcher.database.pool import Connection, Database, fetch_rows
from penstock.protocol.datasets import (
    SNAPSHOT_PARTS_MAX,
    BufferAnswer,
    ColumnAnswer,
    DatasetDetail,
    GenerationDetail,
    HotTableAnswer,
    KeepAnswer,
    MaintainedAnswer,
    SnapshotAnswer,
    SnapshotPart,
)


class DatasetViews:
    """The questions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def show(self, name: str) -> DatasetDetail | None:
        """Everything about a dataset; None if there is none of this name."""

        async def work(connection: Connection) -> DatasetDetail | None:
            found = await fetch_rows(connection, "show_dataset", name=name)
            if not found:
                return None
            row = found[0]
            generations = await fetch_rows(connection, "show_generations", dataset=row["uuid"])
            keep, maintain = row.pop("keep"), row.pop("maintain")
            tables = await fetch_rows(connection, "hot_status", dataset=row["uuid"])
            return DatasetDetail(
                **row,
                keep=None if keep is None else msgspec.convert(keep, KeepAnswer),
                generations=msgspec.convert(generations, list[GenerationDetail]),
                maintain=None if maintain is None else msgspec.convert(maintain, MaintainedAnswer),
                table=msgspec.convert(tables[0], HotTableAnswer) if tables else None,
            )

        return await self._database.transact(work)

    async def exists(self, name: str) -> bool:
        """Whether there is a dataset of this name."""

        async def work(connection: Connection) -> bool:
            return bool(await fetch_rows(connection, "find_generation", name=name, generation=None))

        return await self._database.transact(work)

    async def snapshot(
        self, name: str, *, generation: str | None, partition_key: str | None
    ) -> SnapshotAnswer | None:
        """All that is published; None if there is no such dataset or generation.

        Has one part more than it may have if there are more.
        """

        async def work(connection: Connection) -> SnapshotAnswer | None:
            found = await fetch_rows(
                connection, "find_generation", name=name, generation=generation
            )
            if not found or found[0]["generation"] is None:
                return None
            place = found[0]
            rows = await fetch_rows(
                connection,
                "snapshot",
                **place,
                partition_key=partition_key,
                limit=SNAPSHOT_PARTS_MAX + 1,
            )
            found = await fetch_rows(connection, "columns_of_generation", **place)
            columns = found[0]["columns"] if found else []
            return SnapshotAnswer(
                dataset=name,
                generation=place["generation"],
                columns=msgspec.convert(columns, list[ColumnAnswer]),
                parts=msgspec.convert(rows, list[SnapshotPart]),
            )

        return await self._database.transact(work)


CELLS_MAX: Final = 10_000
"""The most partitions that are shown at once."""
COUNTED_MAX: Final = 100_000
"""The most partitions of a generation that are summed up."""
WORK_MAX: Final = 10_000
MISSING_MAX: Final = 1_000
LOOKED_MAX: Final = 20_000
"""How many partitions of each input are compared to find what is missing."""
DATASETS_MAX: Final = 500
_TASKS_SHOWN: Final = 20
_PIECES_SHOWN: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    """A dataset in the list of all."""

    name: str
    job: str | None
    is_written: bool
    """Whether a job of the DAG in force writes it."""
    is_told: bool
    """Whether it is a source's, which tells of partitions and publishes nothing."""
    is_ranges: bool
    """Whether it has ranges, and no data."""
    state: str | None
    is_building: bool
    partitions: int
    published_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationView:
    """A generation of a dataset, and how it is made."""

    dataset: str
    name: str
    job_id: int | None
    job: str | None
    generation: str | None
    """None for a dataset without any, and where the one that was asked for is not there."""
    state: str | None
    created_at: datetime | None
    changed_at: datetime | None
    is_told: bool
    is_ranges: bool
    is_per_partition: bool
    is_all: bool
    """Whether its job waits for all of its inputs."""
    mode: str
    is_in_force: bool

    @property
    def is_live(self) -> bool:
        return self.state in ("current", "building")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRow:
    version: str
    state: str
    created_at: datetime
    changed_at: datetime
    is_dropped: bool
    partitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSums:
    """How much is published; of very many partitions, of so many as are summed up."""

    partitions: int
    files: int = 0
    rows: int = 0
    bytes: int = 0
    unknown: int = 0
    published_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionWork:
    """How many tasks are in a state, and the latest of them."""

    status: str
    tasks: int
    latest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCell:
    """A partition that is published, or that a source has told of."""

    partition_key: str
    start: int | None
    end: int | None
    rows: int | None
    published_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingTask:
    """A task that stands between a partition and what it should be."""

    partition_key: str | None
    start: int | None
    end: int | None
    id: int
    status: str
    attempt: int
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingPartition:
    """A partition that inputs have, and that is not published here and has no task."""

    partition_key: str
    start: int | None
    end: int | None
    inputs: Sequence[str]
    """The inputs that have nothing for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentPublication:
    partition_key: str
    task_id: int
    attempt: int
    revision: int
    published_at: datetime
    files: int | None
    rows: int | None
    bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetLink:
    """A job writes a dataset, or reads it."""

    job: str
    dataset: str
    is_written: bool
    is_trigger: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What a partition is now, and who has made it."""

    partition_key: str
    start: int | None
    end: int | None
    mode: str
    task_id: int
    attempt: int
    location: str
    revision: int
    published_at: datetime
    files: int | None
    rows: int | None
    bytes: int | None
    manifest: str | None
    is_projected: bool
    worker: str | None
    started_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPart:
    """A part of a partition that is appended to."""

    append_key: str
    task_id: int
    attempt: int
    location: str
    appended_at: datetime
    files: int | None
    rows: int | None
    bytes: int | None
    manifest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentInput:
    """What a task of a partition would read of an input now."""

    input: str
    dataset: str
    generation: str
    is_trigger: bool
    reads: str
    revision: int | None
    parts: int | None
    partition_key: str | None
    """Of the one part that it is; None if it is another number of them."""
    is_passed: bool
    """Whether the filter lets the partition pass."""
    is_told: bool
    """Whether there was an event for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTask:
    id: int
    status: str
    attempt: int
    attempt_limit: int
    reason: str | None
    created_at: datetime
    settled_at: datetime | None
    generation: str
    backfill_id: int | None
    is_shown: bool
    """Whether it is of the generation that is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePartition:
    """Everything about one partition."""

    publication: Publication | None
    removed_at: datetime | None
    pieces: Sequence[PartitionPart] = ()
    inputs: Sequence[CurrentInput] = ()
    history: Sequence[PartitionTask] = field(default_factory=list)


class PartitionViews:
    """The questions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def datasets(self, text: str) -> Sequence[DatasetRow]:
        """Datasets whose name has this text; one more than may be shown, if there are more."""
        rows = await self._ask("partition_datasets", text=text, limit=DATASETS_MAX + 1)
        return [DatasetRow(**each) for each in rows]

    async def place(self, name: str, generation: str | None) -> GenerationView | None:
        """A dataset, by its name; None if there is none."""
        rows = await self._ask("partition_place", name=name, generation=generation)
        return GenerationView(**rows[0]) if rows else None

    async def generations(self, place: GenerationView) -> Sequence[GenerationRow]:
        """Those that are live, and the last that were."""
        rows = await self._ask("partition_generations", dataset=place.dataset)
        return [GenerationRow(**each) for each in rows]

    async def sums(self, place: GenerationView) -> PublishedSums:
        """How much there is of a generation."""
        asked: dict[str, Any] = {**_of(place), "limit": COUNTED_MAX}
        if place.is_told:
            (told,) = await self._ask("partition_told_sums", **asked)
            return PublishedSums(partitions=told["events"], published_at=told["received_at"])
        (row,) = await self._ask("partition_sums", **asked)
        return PublishedSums(**row)

    async def work(self, place: GenerationView) -> Sequence[PartitionWork]:
        """Tasks of the generation that wait, run or are dead, by state."""
        rows = await self._ask("partition_work", **_of(place), job=place.job_id, limit=WORK_MAX)
        return [PartitionWork(**each) for each in rows]

    async def cells(self, place: GenerationView) -> Sequence[PartitionCell]:
        """The newest partitions; more than may be shown, if there are more."""
        statement = "partition_told" if place.is_told else "partition_cells"
        rows = await self._ask(statement, **_of(place), limit=CELLS_MAX + 1)
        return [PartitionCell(**each) for each in rows]

    async def blocking(
        self, place: GenerationView, *, limit: int = WORK_MAX
    ) -> Sequence[BlockingTask]:
        """Tasks that stand between partitions and what they should be; dead ones first."""
        rows = await self._ask("partition_tasks", **_of(place), job=place.job_id, limit=limit)
        return [BlockingTask(**each) for each in rows]

    async def lacking(self, place: GenerationView) -> Sequence[MissingPartition]:
        """What inputs have, and what has neither been made of it nor has a task."""
        if not (place.is_live and place.is_per_partition) or place.is_ranges or place.is_told:
            return ()
        asked = {**_of(place), "job": place.job_id, "limit": MISSING_MAX, "looked": LOOKED_MAX}
        return [MissingPartition(**each) for each in await self._ask("partition_missing", **asked)]

    async def recent(self, place: GenerationView, *, limit: int) -> Sequence[RecentPublication]:
        """What was published last."""
        rows = await self._ask("partition_recent", **_of(place), limit=limit)
        return [RecentPublication(**each) for each in rows]

    async def columns(self, place: GenerationView) -> Sequence[dict[str, Any]]:
        """The columns of a generation, as its manifests have them."""
        rows = await self._ask("columns_of_generation", **_of(place))
        return rows[0]["columns"] if rows else []

    async def about(self, name: str) -> dict[str, Any]:
        """What is kept of a dataset, and whether readers without Postgres are told all of it."""
        rows = await self._ask("show_dataset", name=name)
        return rows[0] if rows else {}

    async def buffer(self, name: str) -> BufferAnswer | None:
        """What waits for the sink of a dataset; None if the DAG in force does not buffer it."""
        rows = await self._ask("show_buffers", dataset=name)
        return BufferAnswer(**rows[0]) if rows else None

    async def table(self, place: GenerationView) -> HotTableAnswer | None:
        """How far the table of a dataset is in Postgres; None if it has none."""
        rows = await self._ask("hot_status", dataset=place.dataset)
        return msgspec.convert(rows[0], HotTableAnswer) if rows else None

    async def lineage(self) -> Sequence[DatasetLink]:
        """Who reads and writes what, in the DAG in force."""
        return [DatasetLink(**each) for each in await self._ask("partition_lineage")]

    async def one(self, place: GenerationView, key: str) -> OnePartition:
        """Everything about one partition, whether it is published or not."""

        async def work(connection: Connection) -> OnePartition:
            asked: dict[str, Any] = {**_of(place), "key": key, "job": place.job_id}
            found = await fetch_rows(connection, "partition_one", **asked)
            publication = Publication(**found[0]) if found else None
            asked |= {"start": None, "end": None}
            if publication is not None:
                asked |= {"start": publication.start, "end": publication.end}
            pieces = await fetch_rows(connection, "partition_pieces", **asked, limit=_PIECES_SHOWN)
            history = "partition_history" if key else "partition_history_whole"
            tasks = await fetch_rows(connection, history, **asked, limit=_TASKS_SHOWN)
            inputs = (
                await fetch_rows(connection, "partition_inputs", **asked) if place.job_id else []
            )
            gone = await fetch_rows(connection, "partition_removed", **asked)
            return OnePartition(
                publication=publication,
                removed_at=gone[0]["removed_at"] if gone else None,
                pieces=[PartitionPart(**each) for each in pieces],
                inputs=[CurrentInput(**each) for each in inputs],
                history=[PartitionTask(**each) for each in tasks],
            )

        return await self._database.transact(work)

    async def _ask(self, statement: str, /, **asked: object) -> list[dict[str, Any]]:
        return await self._database.rows(statement, **asked)


def _of(place: GenerationView) -> dict[str, Any]:
    return {"dataset": place.dataset, "generation": place.generation}


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFacts:
    """A snapshot that is kept. Sums are of all that it shows."""

    id: int
    dataset: str
    generation: str
    branch: str
    operation: str
    added: int
    removed: int
    partitions: int
    parts: int
    files: int | None
    rows: int | None
    bytes: int | None
    made_at: datetime
    state: str
    base: int
    """The one before it of the same generation; 0 if there is none."""
    before: int | None
    """The one before it of the same branch."""


class SnapshotViews:
    """The questions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def about(self, name: str, snapshot: int) -> SnapshotFacts | None:
        """A snapshot; None if it is not there, or not any more."""
        rows = await self._database.rows("about_snapshot", {"name": name, "id": snapshot})
        return SnapshotFacts(**rows[0]) if rows else None

    async def added(self, about: SnapshotFacts, *, limit: int) -> Sequence[PartRow]:
        """Parts that the one before it does not show."""
        return await self._parts("parts_added", about, limit=limit)

    async def removed(self, about: SnapshotFacts, *, limit: int) -> Sequence[PartRow]:
        """Parts that the one before it shows, and it does not."""
        return await self._parts("parts_removed", about, limit=limit)

    async def shown(
        self, about: SnapshotFacts, *, after: tuple[str, str], limit: int
    ) -> Sequence[PartRow]:
        """Parts that it shows, after one by its partition and location."""
        more = {"after_key": after[0], "after_location": after[1], "low": None, "high": None}
        return await self._parts("parts_of_snapshot", about, limit=limit, **more)

    async def _parts(
        self, statement: str, about: SnapshotFacts, **more: object
    ) -> Sequence[PartRow]:
        asked = {
            "dataset": about.dataset,
            "generation": about.generation,
            "snapshot": about.id,
            "base": about.base,
            **more,
        }
        return msgspec.convert(await self._database.rows(statement, asked), list[PartRow])
