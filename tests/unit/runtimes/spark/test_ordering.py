"""Rows that left Spark are compared as Spark compares them."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.datasets.schema import Column
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.access.base import has_fractions, told_columns
from penstock.runtimes.spark.columns import in_sparks_order, more_than_once
from penstock.runtimes.spark.expectations import checked_table
from penstock.runtimes.spark.job_config import UniqueCheck

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_null_is_first_and_nan_is_last(kind: pa.DataType) -> None:
    chunks = [[NAN, None, 1.0], [INF, -1.5, -INF, None]]
    table = pa.table({"f": pa.chunked_array(chunks, kind), "n": [7, 2, 4, 5, 3, 6, 1]})
    rows = in_sparks_order(table, ["f", "n"]).to_pylist()
    assert [row["n"] for row in rows] == [1, 2, 6, 3, 4, 5, 7]
    texts = in_sparks_order(pa.table({"s": ["b", None, "a"]}), ["s"])
    assert texts.column("s").to_pylist() == [None, "a", "b"]


def test_zeros_are_equal_until_nothing_else_decides() -> None:
    table = pa.table({"f": [0.0, -0.0, 0.0], "n": [1, 2, 2]})
    for some in (table, table.take([2, 1, 0])):
        rows = in_sparks_order(some, ["f", "n"]).to_pylist()
        assert [(str(row["f"]), row["n"]) for row in rows] == [("0.0", 1), ("-0.0", 2), ("0.0", 2)]


def test_rows_that_are_equal_in_what_is_sorted_by_have_one_order_too() -> None:
    maps = pa.array([[("a", 0.0)], None, [("a", -0.0)], [("b", 1.0)]], pa.map_("string", "double"))
    table = pa.table({"n": [1, 1, 1, 0], "m": maps})
    turned = table.take([2, 0, 3, 1])
    one, other = (in_sparks_order(each, ["n"], ties=["m"]) for each in (table, turned))
    assert str(one.to_pylist()) == str(other.to_pylist())


def test_what_is_there_more_than_once_is_what_spark_groups() -> None:
    other_nan = pa.array([0x7FF8000000000001], pa.int64()).view(pa.float64())[0]
    table = pa.table({"f": pa.array([NAN, other_nan.as_py(), 0.0, -0.0, 1.0, None, None])})
    assert [row["count"] for row in more_than_once(table, ["f"]).to_pylist()] == [2, 2, 2]
    nested = pa.table({"o": [{"x": [0.0]}, {"x": [-0.0]}, {"x": None}, None]})
    assert more_than_once(nested, ["o"]).to_pylist() == [{"o": {"x": [0.0]}, "count": 2}]
    entries = [[("a", 0.0), ("b", 1.0)], [("b", 1.0), ("a", -0.0)], [("a", 1.0)]]
    maps = pa.table({"m": pa.array(entries, pa.map_(pa.string(), pa.float64()))})
    assert more_than_once(maps, ["m"]).to_pylist() == [{"m": entries[0], "count": 2}]
    with pytest.raises(WorkFailed, match=r"1 values are there .*: \{f=0\.0, count=2\}"):
        checked_table(pa.table({"f": [0.0, -0.0]}), [UniqueCheck(columns=("f",))], output="out")


def test_files_say_nothing_of_fractions_by_which_spark_would_skip_nan() -> None:
    point = pa.struct([("x", pa.float64()), ("y", pa.string())])
    schema = pa.schema(
        [("a", pa.int64()), ("f", pa.float32()), ("o", point), ("l", pa.list_(pa.float64()))]
    )
    assert told_columns(schema) == ["a", "o.y"]
    sink = pa.BufferOutputStream()
    table = pa.table({"a": [1, 2], "f": [NAN, 0.1]})
    parquet.write_table(table, sink, write_statistics=told_columns(table.schema))
    group = parquet.ParquetFile(pa.BufferReader(sink.getvalue())).metadata.row_group(0)
    assert group.column(0).statistics.max == 2
    assert group.column(1).statistics is None
    assert told_columns(pa.schema([("f", pa.float64())])) == []


def test_fractions_are_seen_wherever_they_are() -> None:
    assert has_fractions(None)
    assert has_fractions([Column("o", "struct<x:array<double>>")])
    assert not has_fractions([Column("double", "decimal(10,2)"), Column("a", "struct<floaty:int>")])
