"""Datasets and their partitions as people look at them: what is there, what is missing, and why.

Each question is one short transaction, and has a bound. Partitions without a key have the empty
one, as in the database. Called by the console.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query

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
class Place:
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
class Sums:
    """How much is published; of very many partitions, of so many as are summed up."""

    partitions: int
    files: int = 0
    rows: int = 0
    bytes: int = 0
    unknown: int = 0
    published_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How many tasks are in a state, and the latest of them."""

    status: str
    tasks: int
    latest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A partition that is published, or that a source has told of."""

    partition_key: str
    start: int | None
    end: int | None
    rows: int | None
    published_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocking:
    """A task that stands between a partition and what it should be."""

    partition_key: str | None
    start: int | None
    end: int | None
    id: int
    status: str
    attempt: int
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """A partition that inputs have, and that is not published here and has no task."""

    partition_key: str
    start: int | None
    end: int | None
    inputs: Sequence[str]
    """The inputs that have nothing for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    partition_key: str
    task_id: int
    attempt: int
    revision: int
    published_at: datetime
    files: int | None
    rows: int | None
    bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
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
class Piece:
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
class InputNow:
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
class TaskRow:
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
    pieces: Sequence[Piece] = ()
    inputs: Sequence[InputNow] = ()
    history: Sequence[TaskRow] = field(default_factory=list)


class PartitionViews:
    """The questions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def datasets(self, text: str) -> Sequence[DatasetRow]:
        """Datasets whose name has this text; one more than may be shown, if there are more."""
        rows = await self._ask("partition_datasets", text=text, limit=DATASETS_MAX + 1)
        return [DatasetRow(**each) for each in rows]

    async def place(self, name: str, generation: str | None) -> Place | None:
        """A dataset, by its name; None if there is none."""
        rows = await self._ask("partition_place", name=name, generation=generation)
        return Place(**rows[0]) if rows else None

    async def generations(self, place: Place) -> Sequence[GenerationRow]:
        """Those that are live, and the last that were."""
        rows = await self._ask("partition_generations", dataset=place.dataset)
        return [GenerationRow(**each) for each in rows]

    async def sums(self, place: Place) -> Sums:
        """How much there is of a generation."""
        asked: dict[str, Any] = {**_of(place), "limit": COUNTED_MAX}
        if place.is_told:
            (told,) = await self._ask("partition_told_sums", **asked)
            return Sums(partitions=told["events"], published_at=told["received_at"])
        (row,) = await self._ask("partition_sums", **asked)
        return Sums(**row)

    async def work(self, place: Place) -> Sequence[Work]:
        """Tasks of the generation that wait, run or are dead, by state."""
        rows = await self._ask("partition_work", **_of(place), job=place.job_id, limit=WORK_MAX)
        return [Work(**each) for each in rows]

    async def cells(self, place: Place) -> Sequence[Cell]:
        """The newest partitions; more than may be shown, if there are more."""
        statement = "partition_told" if place.is_told else "partition_cells"
        rows = await self._ask(statement, **_of(place), limit=CELLS_MAX + 1)
        return [Cell(**each) for each in rows]

    async def blocking(self, place: Place, *, limit: int = WORK_MAX) -> Sequence[Blocking]:
        """Tasks that stand between partitions and what they should be; dead ones first."""
        rows = await self._ask("partition_tasks", **_of(place), job=place.job_id, limit=limit)
        return [Blocking(**each) for each in rows]

    async def lacking(self, place: Place) -> Sequence[Lacking]:
        """What inputs have, and what has neither been made of it nor has a task."""
        if not (place.is_live and place.is_per_partition) or place.is_ranges or place.is_told:
            return ()
        asked = {**_of(place), "job": place.job_id, "limit": MISSING_MAX, "looked": LOOKED_MAX}
        return [Lacking(**each) for each in await self._ask("partition_missing", **asked)]

    async def recent(self, place: Place, *, limit: int) -> Sequence[Recent]:
        """What was published last."""
        rows = await self._ask("partition_recent", **_of(place), limit=limit)
        return [Recent(**each) for each in rows]

    async def columns(self, place: Place) -> Sequence[dict[str, Any]]:
        """The columns of a generation, as its manifests have them."""
        rows = await self._ask("columns_of_generation", **_of(place))
        return rows[0]["columns"] if rows else []

    async def about(self, name: str) -> dict[str, Any]:
        """What is kept of a dataset, and whether readers without Postgres are told all of it."""
        rows = await self._ask("show_dataset", name=name)
        return rows[0] if rows else {}

    async def lineage(self) -> Sequence[Link]:
        """Who reads and writes what, in the DAG in force."""
        return [Link(**each) for each in await self._ask("partition_lineage")]

    async def one(self, place: Place, key: str) -> OnePartition:
        """Everything about one partition, whether it is published or not."""

        async def work(connection: Connection) -> OnePartition:
            asked: dict[str, Any] = {**_of(place), "key": key, "job": place.job_id}
            found = await _rows(connection, "partition_one", **asked)
            publication = Publication(**found[0]) if found else None
            asked |= {"start": None, "end": None}
            if publication is not None:
                asked |= {"start": publication.start, "end": publication.end}
            pieces = await _rows(connection, "partition_pieces", **asked, limit=_PIECES_SHOWN)
            history = "partition_history" if key else "partition_history_whole"
            tasks = await _rows(connection, history, **asked, limit=_TASKS_SHOWN)
            inputs = await _rows(connection, "partition_inputs", **asked) if place.job_id else []
            gone = await _rows(connection, "partition_removed", **asked)
            return OnePartition(
                publication=publication,
                removed_at=gone[0]["removed_at"] if gone else None,
                pieces=[Piece(**each) for each in pieces],
                inputs=[InputNow(**each) for each in inputs],
                history=[TaskRow(**each) for each in tasks],
            )

        return await self._database.transact(work)

    async def _ask(self, statement: str, /, **asked: object) -> list[dict[str, Any]]:
        return await self._database.transact(
            lambda connection: _rows(connection, statement, **asked)
        )


def _of(place: Place) -> dict[str, Any]:
    return {"dataset": place.dataset, "generation": place.generation}


async def _rows(connection: Connection, statement: str, /, **asked: object) -> list[dict[str, Any]]:
    return await (await connection.execute(query(statement), asked)).fetchall()
