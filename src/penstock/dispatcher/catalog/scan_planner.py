"""Which files a scan reads: from a snapshot and a filter to file scan tasks.

A scan is planned of what a snapshot shows. Parts are asked of the database by partition, where the
filter names partitions, and page by page; of each part the manifest says which files there are, and
what is in them. A file is left out only if no row of it can match. One page is one answer: what
comes after it is named by a *plan task*, a text that has all that is needed to go on, so nothing is
remembered between requests and any dispatcher can answer.

Manifests never change, so those that were read last are remembered by their sums. Two statements
and at most `PARTS_MAX` small reads a page. Called by the API.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from penstock.datasets.iceberg.files import TableFile, scan_task_json, table_file, unreadable
from penstock.datasets.iceberg.filters import (
    TESTS_MAX,
    Pruning,
    TableFilter,
    as_json,
    parsed,
    partition_span,
    partition_values,
    size_of,
)
from penstock.datasets.iceberg.schemas import TableSchema, misread
from penstock.datasets.layout import (
    DATASETS,
    HIDDEN_MANIFEST,
    MANIFEST,
    location_below,
    place_of,
)
from penstock.datasets.manifest import Manifest, decode, digest
from penstock.dispatcher.catalog.tables import NO_COLUMNS, CatalogTable, MadeSnapshot
from penstock.dispatcher.database.pool import Connection, Database, fetch_rows, query
from penstock.kernel.errors import Damaged, InvalidInput
from penstock.store.base import ObjectStore, find

PARTS_MAX: Final = 500
"""How many parts a page of a plan looks at; fewer, if the filter is large."""
TOLD_MAX: Final = 20 * TESTS_MAX
"""How much filter one page tells of, with all of its files."""
_AT_ONCE: Final = 16
_HELD_MAX: Final = 4096
_HELD_FILES_MAX: Final = 64
"""A manifest with more files is read again."""


class Unreadable(InvalidInput):
    """What is published is nothing that can be read as a table, and never will be."""


class PartRow(msgspec.Struct, frozen=True, kw_only=True):
    """A part that a snapshot shows."""

    partition_key: str
    location: str
    manifest: str | None
    task_id: int | None
    files: int | None
    rows: int | None
    bytes: int | None
    came: int
    entries: tuple[str, ...] = ()


class ScanAsk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is scanned, as a plan task has it."""

    snapshot: int
    schema: int
    table: str = ""
    """Its UUID; empty in what a dispatcher of the release before has given out."""
    filter: Any = None
    is_case_sensitive: bool = True
    after_key: str = ""
    after_location: str = ""


@dataclass(frozen=True, slots=True)
class ScanPage:
    """Some of the files of a scan, and where it goes on."""

    tasks: list[dict[str, Any]]
    next: str | None


@dataclass
class Manifests:
    """The manifests of parts, from the store."""

    store: ObjectStore
    _held: OrderedDict[str, Manifest] = field(default_factory=OrderedDict)

    async def read(self, parts: Sequence[PartRow]) -> list[Manifest]:
        """Those of these parts, in their order. Raises `Damaged`, or `Unreadable` for none."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(part: PartRow) -> Manifest:
            async with gate:
                return await self._read(part)

        try:
            async with asyncio.TaskGroup() as group:
                reading = [group.create_task(one(each)) for each in parts]
        except ExceptionGroup as errors:
            # One is enough to say that it cannot be read, and why.
            raise errors.exceptions[0] from errors
        return [each.result() for each in reading]

    async def _read(self, part: PartRow) -> Manifest:
        if part.manifest is not None and (held := self._held.get(part.manifest)) is not None:
            self._held.move_to_end(part.manifest)
            return held
        place = place_of(part.location)
        if part.manifest is None or place is None:
            raise Unreadable(
                f"What is published at {part.location} has no manifest: its files are not known.",
                hint="Only what jobs write as Parquet can be read as a table.",
            )
        for name in (MANIFEST, HIDDEN_MANIFEST):
            found = await find(self.store, f"{DATASETS}{place}/{name}")
            if found is not None and digest(found.body) == part.manifest:
                made = decode(found.body, where=found.key)
                self._keep(part.manifest, made)
                return made
        raise Damaged(
            f"The manifest of {part.location} is missing, or is not what was published.",
            hint="Make the partition again: a backfill of it writes new files.",
        )

    def _keep(self, name: str, made: Manifest) -> None:
        if len(made.files) > _HELD_FILES_MAX:
            return
        self._held[name] = made
        while len(self._held) > _HELD_MAX:
            self._held.popitem(last=False)


class ScanPlanner:
    """Plans scans."""

    def __init__(self, database: Database, store: ObjectStore) -> None:
        self._database = database
        self.manifests = Manifests(store)

    async def plan(self, table: CatalogTable, ask: ScanAsk) -> ScanPage:
        """The next page of a scan. Raises `InvalidInput` for a filter that is none."""
        made = table.snapshot(ask.snapshot)
        schema = table.schema(ask.schema)
        wanted = parsed(ask.filter, schema, is_case_sensitive=ask.is_case_sensitive)
        keys: list[str] | None = None
        span: tuple[str | None, str | None] = (None, None)
        if table.partition is not None:
            values = partition_values(wanted, table.partition.id)
            keys = None if values is None else [str(each) for each in values]
            span = partition_span(wanted, table.partition.id)
        after = (ask.after_key, ask.after_location)
        # Each file comes with what is left of the filter.
        size = size_of(wanted)
        parts_max = max(1, min(PARTS_MAX, TESTS_MAX // size))
        rows = await self.parts(table, made, keys=keys, span=span, after=after, limit=parts_max + 1)
        pruning = Pruning(wanted, table.spec)
        # What the partition rules out is not read.
        may_hold = await asyncio.to_thread(_within, rows[:parts_max], pruning, table)
        shown = await self.owned(table, table.schema(made.schema_id), may_hold)
        if len(shown) * size > TOLD_MAX:
            raise InvalidInput(
                f"The filter is too large for a partition of {len(shown)} files.",
                hint="Ask for fewer values at a time.",
            )
        # Large filters take a while: other requests go on meanwhile.
        tasks = await asyncio.to_thread(_tasks, shown, pruning, table)
        if len(rows) <= parts_max:
            return ScanPage(tasks, None)
        last = rows[parts_max - 1]
        following = msgspec.structs.replace(
            ask, after_key=last.partition_key, after_location=last.location
        )
        return ScanPage(tasks, encoded(following))

    async def parts(
        self,
        table: CatalogTable,
        made: MadeSnapshot,
        *,
        keys: Sequence[str] | None = None,
        span: tuple[str | None, str | None] = (None, None),
        after: tuple[str, str] = ("", ""),
        limit: int = PARTS_MAX + 1,
    ) -> list[PartRow]:
        """What a snapshot shows, in order: so many parts after this one.

        Of these partitions alone, or of those within a span and the one without a name.
        """
        asked: Mapping[str, object] = {
            "dataset": table.uuid,
            "generation": made.generation,
            "snapshot": made.id,
            "keys": keys,
            "low": span[0],
            "high": span[1],
            "after_key": after[0],
            "after_location": after[1],
            "limit": limit,
        }

        async def work(connection: Connection) -> list[dict[str, Any]] | None:
            statement = "parts_of_snapshot" if keys is None else "parts_of_partitions"
            rows = await (await connection.execute(query(statement), asked)).fetchall()
            # It may have been purged since it was found: then these are not all.
            (kept,) = await fetch_rows(connection, "is_snapshot_kept", asked)
            return rows if kept["is_kept"] else None

        rows = await self._database.transact(work)
        if rows is None:
            raise table.not_kept(made.id)
        return msgspec.convert(rows, list[PartRow])

    async def owned(
        self, table: CatalogTable, schema: TableSchema, rows: Sequence[PartRow]
    ) -> list[tuple[PartRow, TableFile]]:
        """The data files of these parts, as files of the table, with their parts."""
        known = [each for each in rows if each.files != 0]
        read = zip(known, await self.manifests.read(known), strict=True)
        return [
            (row, file) for row, manifest in read for file in files_of(row, manifest, schema, table)
        ]


def files_of(
    row: PartRow, manifest: Manifest, schema: TableSchema, table: CatalogTable
) -> list[TableFile]:
    """The data files of a part. Raises `Unreadable` if they are none of a table."""
    if (why := misread(manifest.columns, table.current)) is not None:
        raise Unreadable(f"The snapshot cannot be read: {why}")
    if not manifest.columns and any(each.rows for each in manifest.files):
        # A file with a column that nobody is told of makes clients fail on all of the table.
        raise Unreadable(
            f"The columns of the files at {row.location} are not known.", hint=NO_COLUMNS
        )
    partition = _partition(row, table)
    made = []
    for each in manifest.files:
        if (why := unreadable(each)) is not None:
            raise Unreadable(
                f"The dataset {table.name!r} cannot be read as a table: {why}",
                hint="What engines read as a table is Parquet, without ids of another table.",
            )
        if each.rows:
            location = location_below(row.location, each.name)
            made.append(table_file(each, location, schema, partition=partition))
    return made


def _within(rows: Sequence[PartRow], pruning: Pruning, table: CatalogTable) -> list[PartRow]:
    """The parts that their partition does not rule out."""
    return [each for each in rows if pruning.residual(_partition(each, table)) is not False]


def _tasks(
    shown: Sequence[tuple[PartRow, TableFile]], pruning: Pruning, table: CatalogTable
) -> list[dict[str, Any]]:
    tasks = []
    told: tuple[TableFilter, Any] = (True, True)
    for _, file in shown:
        if pruning.may_hold(file):
            residual = pruning.residual(file.partition)
            if residual is not told[0]:
                told = (residual, as_json(residual))
            tasks.append(scan_task_json(file, table.spec, residual=told[1]))
    return tasks


def _partition(row: PartRow, table: CatalogTable) -> tuple[str | None, ...]:
    return () if table.partition is None else (row.partition_key or None,)


def encoded(ask: ScanAsk) -> str:
    """A plan task."""
    return base64.urlsafe_b64encode(msgspec.json.encode(ask)).decode()


def decoded(task: str) -> ScanAsk:
    """What a plan task says. Raises `InvalidInput`."""
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(task), type=ScanAsk)
    except (msgspec.DecodeError, binascii.Error, ValueError, RecursionError) as error:
        raise InvalidInput("Unknown plan task.") from error
