"""What a dataset is as a table: its schemas, its snapshots and what names them.

A table is a dataset that readers read something of: its current generation has columns, and
Iceberg has types for them. Each generation's columns are schemas of the one table, by field ids
that mean the same for ever (`penstock.datasets.iceberg.schemas`). A schema that Iceberg does not
have hides the snapshots that have it, and no others; only where none is left there is no table, and
the reason is that of the newest. Files are read by the names of their columns, so snapshots in
which a name has another meaning are not told of either. The meaning that counts is that of the
newest snapshot of `main`, or, if that can be read by nobody, of the newest one that was written.

Where there are partitions, a column of its own tells which one a row is of: `partition_key`, which
is in no file and by which readers leave files out. A dataset that has such a column already calls
it `_partition_key`; of one that gets such a column later nothing newer is told.

Reading makes a snapshot of what is new first, so that a reader finds what it has just published,
unless one was made within the second. Each question is some short statements. Called by the API.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

import msgspec

from penstock.datasets.iceberg.files import PARTITION_ID_MIN, PartitionField, PartitionSpec
from penstock.datasets.iceberg.metadata import (
    MAIN,
    Operation,
    TableMetadata,
    TableRef,
    TableSnapshot,
)
from penstock.datasets.iceberg.schemas import (
    SchemaField,
    TableSchema,
    clash,
    partition_field,
    schema_of,
)
from penstock.datasets.layout import DATASETS, part
from penstock.datasets.schema import Column, is_hidden
from penstock.dispatcher.catalog.snapshots import Snapshots
from penstock.dispatcher.database.pool import Connection, Database, fetch_rows
from penstock.kernel.errors import InvalidInput

BUILDING: Final = "building"
NO_COLUMNS: Final = (
    "That is so of what is no Parquet, of types without an equal, such as a time of day or a"
    " duration, of more than 1,000 columns, and of files of one output whose columns do not fit."
)
SNAPSHOTS_MAX: Final = 1000
"""How many snapshots of a table are told of."""
_PAGE: Final = 1000
_PAGES_MAX: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeSnapshot:
    """A snapshot, as the database has it."""

    id: int
    generation: str
    branch: str
    operation: str
    schema_id: int
    added: int
    removed: int
    partitions: int
    parts: int
    files: int | None
    rows: int | None
    bytes: int | None
    made_at: datetime
    manifest_list: str | None
    unfit: str | None
    """Why it has no such list, and never will."""
    state: str
    is_dropped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogTable:
    """A dataset as a table, at one moment."""

    uuid: str
    name: str
    location: str
    schemas: Sequence[TableSchema]
    spec: PartitionSpec
    made: Sequence[MadeSnapshot]
    """All that are there, the newest first."""
    snapshots: Sequence[MadeSnapshot]
    """Of these what can be read as the table that it is now."""
    loaded_at: float
    """By the database's clock."""

    @property
    def main(self) -> MadeSnapshot:
        """What readers read who name none."""
        return next(each for each in self.snapshots if each.branch == MAIN)

    @property
    def current(self) -> TableSchema:
        """The schema of `main`, by whose names all files are read."""
        return self.schema(self.main.schema_id)

    def snapshot(self, wanted: int | None) -> MadeSnapshot:
        """The snapshot of an id; the one of `main` if none is named."""
        if wanted is None:
            return self.main
        found = next((each for each in self.snapshots if each.id == wanted), None)
        if found is None:
            raise self.not_kept(wanted)
        return found

    def not_kept(self, wanted: int) -> InvalidInput:
        """That there is no such snapshot, or not any more."""
        return InvalidInput(
            f"The table {self.name!r} has no snapshot {wanted}, or no longer keeps it.",
            hint="`keep: {history: …}` says how long snapshots are kept.",
        )

    @property
    def shown(self) -> MadeSnapshot | None:
        """The newest of `main` that clients can read who plan themselves."""
        return next((each for each in self._written() if each.branch == MAIN), None)

    def unwritten(self) -> list[MadeSnapshot]:
        """What is named, and may have files yet."""
        named = {each.snapshot_id for each in refs_of(self.snapshots).values()}
        return [
            each
            for each in self.snapshots
            if each.id in named and each.manifest_list is None and each.unfit is None
        ]

    def _written(self) -> list[MadeSnapshot]:
        return [each for each in self.snapshots if each.manifest_list is not None]

    def schema(self, schema_id: int) -> TableSchema:
        """The schema of an id."""
        found = next((each for each in self.schemas if each.schema_id == schema_id), None)
        if found is None:
            raise InvalidInput(f"The table {self.name!r} has no schema {schema_id}.")
        return found

    def spec_of(self, spec_id: int) -> PartitionSpec:
        """The spec of a manifest, which may be of before there were partitions."""
        return self.spec if spec_id == self.spec.spec_id else PartitionSpec()

    @property
    def partition(self) -> SchemaField | None:
        """The column that tells the partition, if there is one."""
        return self.spec.fields[0].source if self.spec.fields else None

    def metadata(self, main: MadeSnapshot, *, is_all: bool) -> TableMetadata:
        """The table as clients are told of it, with what is `shown` as `main`.

        Snapshots without files are told to nobody, and tags of them neither. Without `is_all`, of
        what is named alone, with the parents that they have among all.
        """
        written = self._written()
        tags = refs_of(self.made)
        refs = {
            name: each
            for name, each in refs_of(written).items()
            if not each.is_tag or tags.get(name) == each
        }
        named = {each.snapshot_id for each in refs.values()}
        told = [each for each in reversed(written) if is_all or each.id in named]
        schemas = {each.schema_id for each in told}
        shown = {each.id for each in told}
        return TableMetadata(
            uuid=self.uuid,
            location=self.location,
            updated_ms=written[0].id,
            schemas=[each for each in self.schemas if each.schema_id in schemas],
            current_schema_id=main.schema_id,
            spec=self.spec,
            snapshots=[each for each in _told(written[::-1]) if each.snapshot_id in shown],
            refs=refs,
            main_log=[(each.id, each.id) for each in told if each.branch == MAIN],
            properties={"penstock.dataset": self.name},
        )


def refs_of(snapshots: Sequence[MadeSnapshot]) -> dict[str, TableRef]:
    """The newest of the branches, and of generations that were left and are kept, as tags."""
    refs: dict[str, TableRef] = {}
    for each in snapshots:
        if each.branch == MAIN:
            refs.setdefault(MAIN, TableRef(each.id))
            if each.state != "current" and not each.is_dropped:
                refs.setdefault(each.generation, TableRef(each.id, is_tag=True))
        elif each.state == BUILDING:
            refs.setdefault(BUILDING, TableRef(each.id))
    return refs


class Tables:
    """Finds tables."""

    def __init__(
        self, database: Database, *, root: str, snapshots: Snapshots | None = None
    ) -> None:
        self._database = database
        self.root = root
        self.snapshots = snapshots or Snapshots(database)

    async def names(self, *, after: str, only: frozenset[str] | None, limit: int) -> Sequence[str]:
        """The names of tables, after this one; of what `load` would refuse by its schema none."""
        names: list[str] = []
        for _ in range(_PAGES_MAX):
            asked = {
                "after": after,
                "limit": _PAGE,
                "only": None if only is None else sorted(only),
            }
            rows = await self._database.transact(partial(_names, asked=asked))
            names += [each["name"] for each in rows if each["is_written"] or _is_table(each)]
            if len(rows) < _PAGE or len(names) >= limit:
                break
            after = rows[-1]["name"]
        return names[:limit]

    async def load(
        self, name: str, *, is_new: bool = True, snapshot: int | None = None
    ) -> CatalogTable | str:
        """The table of a dataset; or why it is none. `is_new` has what is new be part of it.

        A snapshot that is asked for is part of it as long as there is anything left of it.
        """
        found = await self._database.transact(
            lambda one: fetch_rows(one, "find_table", {"name": name})
        )
        if not found or not found[0]["is_live"]:
            return f"There is no table {name!r}."
        dataset = found[0]["uuid"]
        if is_new:
            await self.snapshots.make(dataset)

        async def work(connection: Connection) -> tuple[Any, Any]:
            asked = {"dataset": dataset, "limit": SNAPSHOTS_MAX, "asked": snapshot}
            return (
                await fetch_rows(connection, "table_schemas", asked),
                await fetch_rows(connection, "table_snapshots", asked),
            )

        schemas, snapshots = await self._database.transact(work)
        made = [MadeSnapshot(**row) for row in snapshots]
        of, spec, refused = _schemas(schemas)
        known = {each.schema_id: each for each in of}
        fit = [each for each in made if each.schema_id in known]
        main = next((each for each in fit if each.branch == MAIN), None)
        if main is None:
            newest = next((each for each in made if each.branch == MAIN), None)
            return _no_table(name, newest, refused)
        if main.unfit is not None:
            main = next((each for each in fit if each.branch == MAIN and each.manifest_list), main)
        # Files are read by the names of columns, and so by one meaning of a name.
        current = known[main.schema_id]
        unread = {each.schema_id for each in of if clash(each, current) is not None}
        return CatalogTable(
            uuid=dataset,
            name=name,
            location=f"{self.root}/{DATASETS}{part(name)}",
            schemas=of,
            spec=spec,
            made=made,
            snapshots=[each for each in fit if each.schema_id not in unread],
            loaded_at=float(found[0]["now_seconds"]),
        )


def _told(written: Sequence[MadeSnapshot]) -> Iterator[TableSnapshot]:
    """Snapshots as clients are told of them; each goes on from the one of its branch before it.

    Of `main` that is the last one, whatever its generation.
    """
    before: dict[str, int] = {}
    for made in written:
        assert made.manifest_list is not None
        line = MAIN if made.branch == MAIN else made.generation
        totals = {
            "total-data-files": made.files,
            "total-records": made.rows,
            "total-files-size": made.bytes,
            "penstock.partitions": made.partitions,
            "penstock.parts-added": made.added,
            "penstock.parts-removed": made.removed,
            "penstock.generation": made.generation,
        }
        yield TableSnapshot(
            snapshot_id=made.id,
            sequence_number=made.id,
            timestamp_ms=made.id,
            manifest_list=made.manifest_list,
            schema_id=made.schema_id,
            operation=Operation(made.operation),
            parent_id=before.get(line),
            summary={name: str(value) for name, value in totals.items() if value is not None},
        )
        before[line] = made.id


async def _names(connection: Connection, asked: Mapping[str, object]) -> Sequence[dict[str, Any]]:
    return await fetch_rows(connection, "table_names", asked)


def _is_table(row: Mapping[str, Any]) -> bool:
    return any(_schemas([each])[0] for each in row["schemas"])


def _no_table(name: str, newest: MadeSnapshot | None, refused: Mapping[int, str]) -> str:
    if newest is None or not (newest.files or newest.schema_id in refused):
        return f"The dataset {name!r} is no table yet: nothing with columns is published of it."
    why = refused.get(newest.schema_id, f"The columns of its files are not known. {NO_COLUMNS}")
    return f"The dataset {name!r} cannot be read as a table: {why}"


def _schemas(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[TableSchema], PartitionSpec, Mapping[int, str]]:
    """The schemas of a table that have columns, how it is partitioned, and why others are none."""
    made: list[TableSchema] = []
    refused: dict[int, str] = {}
    spec = PartitionSpec()
    for row in rows:
        every = msgspec.convert(row["columns"], list[Column])
        columns = [each for each in every if not is_hidden(each.name)]
        if not columns:
            continue
        extra = []
        if (name := row["partition_column"]) is not None:
            extra.append(partition_field(name, doc="The partition that the row is published in."))
        try:
            made.append(schema_of(columns, schema_id=row["id"], extra=extra, earlier=made))
        except InvalidInput as error:
            refused[row["id"]] = f"{error.message} {error.hint}".strip()
            continue
        if extra:
            spec = PartitionSpec(1, (PartitionField(extra[0], PARTITION_ID_MIN),))
    return made, spec, refused
