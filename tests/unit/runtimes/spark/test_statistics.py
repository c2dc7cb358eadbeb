"""Bounds from footers, and the files that a data source leaves out by them."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.sql import datasource, types

from penstock.datasets.bounds import CHARACTERS_MAX, COLUMNS_MAX, Bound
from penstock.datasets.snapshot import DataFile
from penstock.datasets.transfer import Transfer
from penstock.runtimes.spark.access.parquet import file_bounds
from penstock.runtimes.spark.access.remote import FilePartition, FileReader, TaggedFile

NAN = float("nan")
LONG = "x" * 3000
MOMENT = datetime(2020, 1, 1, tzinfo=UTC)
MICROS = 1577836800000000


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([3, None, 1], pa.int8(), Bound(1, 3, 1)),
        ([3, 1, 2], pa.uint32(), None),
        ([1.5, 0.0, 0.0], pa.float64(), Bound(-0.0, 1.5, 0)),
        ([1.5, NAN, 0.0], pa.float64(), Bound(None, None, 0)),  # of one row group nothing is known
        ([NAN, NAN, NAN], pa.float64(), Bound(None, None, 0)),
        ([float("inf"), 1.0, 2.0], pa.float64(), Bound(None, None, 0)),
        ([1.5, 2.5, 0.5], pa.float32(), None),
        ([None, None, None], pa.string(), Bound(None, None, 3)),
        (["b", LONG, "ü"], pa.string(), Bound("b", "ü", 0)),
        ([LONG, LONG, LONG], pa.string(), Bound("x" * 32, "x" * 31 + "y", 0)),
        ([b"a", b"b", b"c"], pa.binary(), None),
        ([date(1969, 12, 31), date(1970, 1, 2), None], pa.date32(), Bound(-1, 1, 1)),
        ([MOMENT, MOMENT, None], pa.timestamp("us", "UTC"), Bound(MICROS, MICROS, 1)),
        ([MOMENT, MOMENT, None], pa.timestamp("ms", "UTC"), None),
        ([Decimal("-1.50"), Decimal(2), None], pa.decimal128(10, 2), Bound("-1.50", "2.00", 1)),
        ([[1], [2], [3]], pa.list_(pa.int64()), None),
        ([{"a": 1}, {"a": 2}, None], pa.struct([("a", pa.int64())]), None),
    ],
)
def test_the_bounds_of_a_file(
    values: list[Any], kind: pa.DataType, expected: Bound | None, tmp_path: Path
) -> None:
    table = pa.table({"c": pa.array(values, kind), "with.dot": [1, 2, 3]})
    # Each row group has bounds of its own, and those of nulls alone have none.
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    bounds = file_bounds(tmp_path / "a.parquet")
    assert bounds == ({} if expected is None else {"c": expected})


def test_dates_of_the_julian_calendar_have_no_bounds(tmp_path: Path) -> None:
    table = pa.table({"d": [date(1500, 1, 1)], "n": [1]})
    said = table.replace_schema_metadata({"org.apache.spark.legacyDateTime": ""})
    parquet.write_table(said, tmp_path / "a.parquet")
    assert file_bounds(tmp_path / "a.parquet") == {"n": Bound(1, 1, 0)}


def test_bounds_are_few_and_short(tmp_path: Path) -> None:
    table = pa.table({f"c{place}": ["y" * 100] for place in range(COLUMNS_MAX + 5)})
    parquet.write_table(table, tmp_path / "a.parquet")
    bounds = file_bounds(tmp_path / "a.parquet")
    assert len(bounds) == COLUMNS_MAX
    assert {len(str(each.high)) for each in bounds.values()} == {CHARACTERS_MAX}


@pytest.mark.parametrize(
    ("pushed", "left"),
    [
        (datasource.EqualTo(("n",), 15), [1]),
        (datasource.In(("n",), (5, 25)), [0, 2]),
        (datasource.GreaterThan(("n",), 19), [2]),
        (datasource.EqualTo(("_partition",), "p1"), [1]),
        (datasource.IsNull(("n",)), []),
        (datasource.GreaterThanOrEqual(("f",), 9.0), [0, 1, 2]),
        (datasource.LessThan(("f",), 0.0), []),
        (datasource.EqualTo(("d",), date(1970, 1, 2)), [1]),
        (datasource.StringStartsWith(("s",), "s1"), [1]),
        (datasource.EqualTo(("n", "inner"), 15), [0, 1, 2]),
        (datasource.Not(datasource.EqualTo(("n",), 15)), [0, 1, 2]),
    ],
)
def test_a_source_leaves_files_out(pushed: datasource.Filter, left: list[int]) -> None:
    files = [
        DataFile(
            location=f"s3://bucket/{place}",
            bytes=1,
            rows=10,
            bounds={
                "n": Bound(10 * place, 10 * place + 9, 0),
                "f": Bound(0.0, 1.0, 0),
                "d": Bound(place, place, 0),
                "s": Bound(f"s{place}", f"s{place}z", 0),
            },
        )
        for place in range(3)
    ]
    schema = types.StructType(
        [
            types.StructField("n", types.LongType()),
            types.StructField("f", types.DoubleType()),
            types.StructField("d", types.DateType()),
            types.StructField("s", types.StringType()),
            types.StructField("_partition", types.StringType()),
        ]
    )
    tagged = [TaggedFile(each, f"p{place}") for place, each in enumerate(files)]
    reader = FileReader(Transfer("s3://bucket"), tagged, schema)
    assert list(reader.pushFilters([pushed])) == [pushed]
    found = [each for each in reader.partitions() if isinstance(each, FilePartition)]
    assert [int(each.value.file.location[-1]) for each in found] == left
    assert not any(each.value.file.bounds for each in found)
