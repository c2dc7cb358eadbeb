"""PyIceberg, DuckDB and Polars read tables that are written here, over files as they are: with ids
or without, other columns in each, types that have grown, and a partition that no file has.
"""

from __future__ import annotations

import datetime as dt
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import parquet
from pyiceberg.catalog.rest.scan_planning import PlanCompleted, PlanTableScanRequest
from pyiceberg.expressions import BooleanExpression
from pyiceberg.table import StaticTable

from penstock.datasets.bounds import bound_values
from penstock.datasets.iceberg.files import (
    PartitionField,
    PartitionSpec,
    TableFile,
    scan_task_json,
    table_file,
    unreadable,
)
from penstock.datasets.iceberg.filters import Pruning, as_json, parsed
from penstock.datasets.iceberg.manifests import (
    EntryStatus,
    ManifestEntry,
    ManifestFile,
    entries_of,
    manifest_file,
    planned,
    read_manifest,
    write_manifest,
    write_manifest_list,
)
from penstock.datasets.iceberg.metadata import (
    MAIN,
    Operation,
    TableMetadata,
    TableRef,
    TableSnapshot,
    metadata_json,
)
from penstock.datasets.iceberg.schemas import TableSchema, misread, partition_field, schema_of
from penstock.datasets.manifest import File
from penstock.datasets.parquet import footers
from penstock.datasets.parquet_child import ends
from penstock.datasets.parquet_footer import columns_in, identify_file
from penstock.datasets.schema import TASK_COLUMN, Column, evolve

pe: Any = importlib.import_module("pyiceberg.expressions")
KEY = partition_field("partition_key")
SPEC = PartitionSpec(0, (PartitionField(KEY, 1000),))
ZONED = dt.datetime(2013, 7, 4, 12, 30, 0, 123456, dt.UTC)
MOMENT = ZONED.replace(tzinfo=None)


@dataclass
class Written:
    """A table below a folder, as snapshots are made of it."""

    folder: Path
    columns: tuple[Column, ...] = ()
    schemas: list[TableSchema] = field(default_factory=list)
    snapshots: list[TableSnapshot] = field(default_factory=list)
    held: list[ManifestFile] = field(default_factory=list)
    there: dict[str, list[TableFile]] = field(default_factory=dict)
    are_identified: bool = True
    """Whether files have the ids of their columns; some may, and others not."""

    def publish(self, **tables: pa.Table | None) -> int:
        """Put these in place of what is published of their partitions; the snapshot."""
        number = len(self.snapshots) + 1
        made: dict[str, list[File]] = {key: [] for key in tables}
        for key, table in tables.items():
            for each in [] if table is None else [table]:
                name = f"{key}-{number}.parquet"
                path = self.folder / name
                parquet.write_table(each, path, row_group_size=2)
                if self.are_identified:
                    identify_file(path, columns_in(each.schema))
                with path.open("rb") as opened:
                    (footer,) = footers([opened], seconds_max=60, is_trusted=True)
                assert footer is not None
                seen = [one for one in footer.columns if one != TASK_COLUMN]
                self.columns = evolve(self.columns, seen)
                made[key].append(
                    File(
                        name=name,
                        rows=footer.rows,
                        bytes=path.stat().st_size,
                        sha256="0" * 64,
                        bounds=bound_values(ends(parquet.read_metadata(path), columns_max=32)),
                    )
                )
        made_schema = schema_of(
            self.columns, schema_id=len(self.schemas), extra=[KEY], earlier=self.schemas
        )
        if not self.schemas or self.schemas[-1].fields != made_schema.fields:
            self.schemas.append(made_schema)
        gone = {one.location for key in tables for one in self.there.get(key, [])}
        for key, files in made.items():
            self.there[key] = [
                table_file(one, self._at(one.name), self.schemas[-1], partition=(key,))
                for one in files
            ]
        self._snapshot(number, gone, [one for key in tables for one in self.there[key]])
        return number

    def _snapshot(self, number: int, gone: set[str], added: Sequence[TableFile]) -> None:
        read = {each.location: self._read(each) for each in self.held}
        losing = {
            location: [
                one.file.location
                for one in entries
                if one.status is not EntryStatus.DELETED and one.file.location in gone
            ]
            for location, entries in read.items()
        }
        plan = planned(self.held, losing, added)
        self.held = list(plan.kept)
        for place, write in enumerate(plan.writes):
            entries = entries_of(write, read, spec=SPEC, snapshot_id=number, sequence_number=number)
            body = write_manifest(entries, schema=self.schemas[-1], spec=SPEC)
            name = f"m-{number}-{place}.avro"
            (self.folder / name).write_bytes(body)
            self.held.append(
                manifest_file(
                    self._at(name),
                    body,
                    entries,
                    spec=SPEC,
                    snapshot_id=number,
                    sequence_number=number,
                )
            )
        listed = write_manifest_list(
            self.held,
            snapshot_id=number,
            parent_id=number - 1 or None,
            sequence_number=number,
        )
        (self.folder / f"l-{number}.avro").write_bytes(listed)
        self.snapshots.append(
            TableSnapshot(
                snapshot_id=number,
                sequence_number=number,
                timestamp_ms=1_700_000_000_000 + number,
                manifest_list=self._at(f"l-{number}.avro"),
                schema_id=self.schemas[-1].schema_id,
                operation=Operation.OVERWRITE,
                parent_id=number - 1 or None,
            )
        )

    def _read(self, manifest: ManifestFile) -> list[ManifestEntry]:
        return read_manifest((self.folder / Path(manifest.location).name).read_bytes(), SPEC)

    def _at(self, name: str) -> str:
        return (self.folder / name).as_uri()

    def metadata(self) -> str:
        """Where the table's metadata is."""
        made = TableMetadata(
            uuid="2f0dc1ab-6f2c-4c7c-8f7b-0f6a3c1f9e11",
            location=self.folder.as_uri(),
            updated_ms=0,
            schemas=self.schemas,
            current_schema_id=self.schemas[-1].schema_id,
            spec=SPEC,
            snapshots=self.snapshots,
            refs={
                MAIN: TableRef(self.snapshots[-1].snapshot_id),
                "first": TableRef(1, is_tag=True),
            },
            main_log=[(each.timestamp_ms, each.snapshot_id) for each in self.snapshots],
        )
        path = self.folder / "v1.metadata.json"
        path.write_text(json.dumps(metadata_json(made)))
        return path.as_uri()


Rows = list[dict[str, Any]]


def by_pyiceberg(table: Written, at: int | None = None, where: str = "") -> Rows:
    scan = StaticTable.from_metadata(table.metadata()).scan(snapshot_id=at)
    found: Rows = (scan.filter(where) if where else scan).to_arrow().to_pylist()
    return found


def by_duckdb(table: Written, at: int | None = None, where: str = "") -> Rows:
    connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
    for name in ("avro", "iceberg"):
        module = importlib.import_module(f"duckdb_extension_{name}")
        (path,) = Path(str(module.__file__)).parent.glob(f"extensions/*/{name}.duckdb_extension")
        connection.execute(f"LOAD '{path}'")
    connection.execute("SET timezone = 'UTC'")
    asked = "" if at is None else f", snapshot_from_id = {at}"
    said = f"SELECT * FROM iceberg_scan('{table.metadata()}'{asked}) {where and 'WHERE ' + where}"
    found: Rows = connection.execute(said).to_arrow_table().to_pylist()
    return found


def by_polars(table: Written, at: int | None = None, where: str = "") -> Rows:
    frame = pl.scan_iceberg(table.metadata(), snapshot_id=at)
    found: Rows = frame.sql(f"SELECT * FROM self {where and 'WHERE ' + where}").collect().to_dicts()
    return found


READERS = pytest.mark.parametrize("read", [by_pyiceberg, by_duckdb, by_polars])
pytestmark = pytest.mark.filterwarnings("ignore:Iceberg scan planning with the polars_iceberg")


def first_rows() -> pa.Table:
    """Every kind of column, as the first publications had them; a merge has written it."""
    kinds = {
        "id": pa.int32(),
        "small": pa.int8(),
        "ratio": pa.float32(),
        "amount": pa.decimal128(8, 2),
        "large": pa.decimal128(38, 6),
        "text": pa.string(),
        "raw": pa.binary(),
        "ok": pa.bool_(),
        "day": pa.date32(),
        "at": pa.timestamp("us", "UTC"),
        "local": pa.timestamp("us"),
        "tags": pa.list_(pa.string()),
        "deep": pa.struct([("x", pa.int32()), ("l", pa.list_(pa.struct([("z", pa.string())])))]),
        "by": pa.map_(pa.string(), pa.struct([("n", pa.int32())])),
        TASK_COLUMN.name: pa.int64(),
    }
    rows = [
        {
            "id": 1,
            "small": -5,
            "ratio": 0.5,
            "amount": Decimal("1.25"),
            "large": Decimal("12345678901234567890.123456"),
            "text": "ü" * 40,
            "raw": b"\x00\xff",
            "ok": True,
            "day": MOMENT.date(),
            "at": ZONED,
            "local": MOMENT,
            "tags": ["a", None],
            "deep": {"x": 1, "l": [{"z": "q"}]},
            "by": [("k", {"n": 1})],
            TASK_COLUMN.name: 7,
        },
        dict.fromkeys(kinds),
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema(list(kinds.items())))


def plain(value: Any) -> Any:
    """A map as a dictionary, whichever way a reader has it."""
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return {name: plain(each) for name, each in value}
    if (
        isinstance(value, list)
        and value
        and isinstance(value[0], dict)
        and set(value[0]) == {"key", "value"}
    ):
        return {each["key"]: plain(each["value"]) for each in value}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


@READERS
@pytest.mark.parametrize("ids", ["in all files", "in later ones", "in none"])
def test_every_type_and_what_became_of_it(read: Any, ids: str, tmp_path: Path) -> None:
    table = Written(tmp_path, are_identified=ids == "in all files")
    first = table.publish(a=first_rows(), empty=None)
    table.are_identified = ids != "in none"
    later = pa.table(
        {
            "new": pa.array(["later"]),
            "id": pa.array([2**40], pa.int64()),
            "small": pa.array([300], pa.int16()),
            "ratio": pa.array([0.1], pa.float64()),
            "amount": pa.array([Decimal("123456789.75")], pa.decimal128(20, 2)),
            "deep": pa.array(
                [{"x": 2**40, "y": "new"}], pa.struct([("x", pa.int64()), ("y", pa.string())])
            ),
            "by": pa.array(
                [[("k", {"n": 2**40})]], pa.map_(pa.string(), pa.struct([("n", pa.int64())]))
            ),
        }
    )
    last = table.publish(b=later)
    table.publish(c=None)
    rows = {each["partition_key"]: each for each in read(table) if each["id"] is not None}
    nulls = [each for each in read(table) if each["id"] is None]
    assert [each["partition_key"] for each in nulls] == ["a"]
    # PyIceberg makes an empty map of none.
    assert {name for name, value in nulls[0].items() if value not in (None, [])} == {
        "partition_key"
    }
    wanted = first_rows().to_pylist()[0]
    del wanted[TASK_COLUMN.name]
    wanted["deep"] = {"x": 1, "l": [{"z": "q"}], "y": None}
    found = {name: plain(each) for name, each in rows["a"].items()}
    assert found == {**wanted, "by": {"k": {"n": 1}}, "new": None, "partition_key": "a"}
    b = rows["b"]
    assert (b["id"], b["small"], b["ratio"], b["amount"]) == (
        2**40,
        300,
        0.1,
        Decimal("123456789.75"),
    )
    assert (b["new"], b["text"], b["tags"]) == ("later", None, None)
    assert plain(b["deep"]) == {"x": 2**40, "l": None, "y": "new"}
    assert plain(b["by"]) == {"k": {"n": 2**40}}
    # What was, is still there, with the columns that it had.
    before = read(table, at=first)
    assert [each["id"] for each in before] in ([1, None], [None, 1])
    assert "new" not in before[0]
    assert len(read(table, at=last)) == 3


@READERS
@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ("partition_key = 'b'", [3, 4]),
        ("partition_key > 'a' AND id < 4", [3]),
        ("id = 4", [4]),
        ("text = 'ab'", [2]),
        ("text IS NULL", [4]),
        ("day >= '2013-07-05'", [3, 4]),
    ],
)
def test_rows_and_partitions_are_found(
    read: Any, where: str, ids: list[int], tmp_path: Path
) -> None:
    table = Written(tmp_path)
    days = [dt.date(2013, 7, day) for day in (3, 4, 5, 6)]
    rows = {"id": [1, 2, 3, 4], "text": ["a", "ab", "b" * 40, None], "day": days}
    whole = pa.table(rows)
    table.publish(a=whole.slice(0, 2))
    table.publish(b=whole.slice(2, 2))
    assert sorted(each["id"] for each in read(table, where=where)) == ids


def test_files_of_other_partitions_are_not_read(tmp_path: Path) -> None:
    """Neither they, nor what a bound rules out: they could not even be opened."""
    table = Written(tmp_path)
    table.publish(a=pa.table({"id": [1, 2]}), b=pa.table({"id": [3, 4]}))
    (tmp_path / "a-1.parquet").write_bytes(b"no Parquet any more")
    for read in (by_pyiceberg, by_duckdb, by_polars):
        for where in ("partition_key = 'b'", "id > 2"):
            assert sorted(each["id"] for each in read(table, where=where)) == [3, 4]


def test_a_partition_that_is_replaced_or_goes_is_so_to_all(tmp_path: Path) -> None:
    table = Written(tmp_path)
    table.publish(a=pa.table({"id": [1]}), b=pa.table({"id": [2]}))
    table.publish(a=pa.table({"id": [10]}))
    table.publish(b=None)
    for read in (by_pyiceberg, by_duckdb, by_polars):
        for at, ids in ((1, [1, 2]), (2, [2, 10]), (3, [10]), (None, [10])):
            assert sorted(each["id"] for each in read(table, at=at)) == ids


def test_files_that_would_be_misread_are_known(tmp_path: Path) -> None:
    """A function reads a file with ids, and renames its columns: pyarrow keeps their ids."""
    fields = [pa.field(name, pa.int64(), metadata={"PARQUET:field_id": name}) for name in "12"]
    parquet.write_table(pa.table([[1], [2]], schema=pa.schema(fields)), tmp_path / "in.parquet")
    renamed = parquet.read_table(tmp_path / "in.parquet").rename_columns(["2", "1"])
    parquet.write_table(renamed, tmp_path / "out.parquet")
    with (tmp_path / "out.parquet").open("rb") as opened:
        (footer,) = footers([opened], seconds_max=60, is_trusted=True)
    assert footer is not None
    file = File(name="out.parquet", rows=1, bytes=9, sha256="0" * 64, unfit=footer.unfit)
    assert "field ids" in str(unreadable(file))
    # And a type that grew where Iceberg's cannot.
    held = evolve([Column("d", "decimal(5,2)")], [Column("d", "decimal(6,4)")])
    assert misread([Column("d", "decimal(5,2)")], schema_of(held, schema_id=0)) is not None


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (pe.EqualTo("id", 3), [3, 4]),
        (pe.In("id", {1, 9}), [1, 2]),
        (pe.GreaterThan("day", dt.date(2013, 7, 4)), [3, 4]),
        (pe.LessThan("at", dt.datetime(2013, 7, 4, 12, tzinfo=dt.UTC)), [1, 2]),
        (pe.LessThan("at", "2013-07-04T12:00:00+00:00"), [1, 2]),
        (pe.GreaterThanOrEqual("amount", Decimal("3.00")), [3, 4]),
        (pe.And(pe.NotNull("id"), pe.StartsWith("partition_key", "a")), [1, 2]),
        (pe.Not(pe.Or(pe.EqualTo("partition_key", "a"), pe.IsNull("id"))), [3, 4]),
        (pe.NotIn("id", {1, 2}), [1, 2, 3, 4]),
        (pe.AlwaysTrue(), [1, 2, 3, 4]),
    ],
)
def test_what_pyiceberg_asks_and_what_it_is_answered(
    wanted: BooleanExpression, ids: list[int], tmp_path: Path
) -> None:
    """As it sends a filter with a scan, and takes the tasks."""
    table = Written(tmp_path)
    days = [dt.date(2013, 7, day) for day in (3, 4, 5, 6)]
    rows = {
        "id": [1, 2, 3, 4],
        "day": days,
        "at": [dt.datetime.combine(day, dt.time(11), dt.UTC) for day in days],
        "amount": [Decimal(f"{each}.00") for each in (1, 2, 3, 4)],
    }
    whole = pa.table(rows)
    table.publish(a=whole.slice(0, 2), b=whole.slice(2, 2))
    sent = json.loads(PlanTableScanRequest(filter=wanted).model_dump_json(by_alias=True))
    pruning = Pruning(parsed(sent["filter"], table.schemas[-1]), SPEC)
    files = [one for each in table.there.values() for one in each if pruning.may_hold(one)]
    found = [
        each for one in files for each in parquet.read_table(one.location[7:])["id"].to_pylist()
    ]
    assert found == ids
    tasks = [
        scan_task_json(one, SPEC, residual=as_json(pruning.residual(one.partition)))
        for one in files
    ]
    answer = PlanCompleted.model_validate({"status": "completed", "file-scan-tasks": tasks})
    assert [each.data_file.partition for each in answer.file_scan_tasks] == [
        [one.partition[0]] for one in files
    ]
