"""Parts of a generation whose columns became wider are read together, on every way."""

from __future__ import annotations

from contextlib import ExitStack
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from penstock.datasets.snapshot import files, read
from penstock.runtimes.base import WorkInput
from penstock.runtimes.spark.access.base import DataAccess, FileSlice
from penstock.runtimes.spark.access.folder import FolderAccess
from penstock.runtimes.spark.access.remote import RemoteAccess
from penstock.runtimes.spark.input_reader import _columns
from tests.integration.spark.bench import Bench

NARROW = {
    "k": pa.array([1, 2]),
    "tiny": pa.array([1, None], pa.int8()),
    "whole": pa.array([-5, 2**31 - 1], pa.int32()),
    "part": pa.array([0.5, float("nan")], pa.float32()),
    "money": pa.array([Decimal("1.10"), Decimal("-99.99")], pa.decimal128(4, 2)),
    "inner": pa.array([{"x": 1}, None], pa.struct([("x", pa.int32())])),
    "many": pa.array([[{"x": 1}], []], pa.list_(pa.struct([("x", pa.int32())]))),
    "by": pa.array([[("a", 0.5)], None], pa.map_(pa.string(), pa.float32())),
}
POINT = pa.struct([("x", pa.int64()), ("y", pa.string())])
WIDE = {
    "k": pa.array([3]),
    "tiny": pa.array([2**15 - 1], pa.int16()),
    "whole": pa.array([2**60], pa.int64()),
    "part": pa.array([0.1], pa.float64()),
    "money": pa.array([Decimal("123456789012345678.123456")], pa.decimal128(24, 6)),
    "inner": pa.array([{"x": 9, "y": "z"}], POINT),
    "many": pa.array([[{"x": 9, "y": "z"}]], pa.list_(POINT)),
    "by": pa.array([[("a", 0.1)]], pa.map_(pa.string(), pa.float64())),
}
FOUND = [
    "1|1|-5|0.5|1.100000|{1, null}|[{1, null}]|{a -> 0.5}",
    "2|null|2147483647|NaN|-99.990000|null|[]|null",
    "3|32767|1152921504606846976|0.1|123456789012345678.123456|{9, z}|[{9, z}]|{a -> 0.1}",
]
TYPES = [
    "bigint",
    "smallint",
    "bigint",
    "double",
    "decimal(24,6)",
    "struct<x:bigint,y:string>",
    "array<struct<x:bigint,y:string>>",
    "map<string,double>",
]


@pytest.mark.timeout(600)
def test_wider_columns_are_read_with_narrower_ones(bench: Bench, spark: Any) -> None:
    parts = (bench.publish(NARROW, key="x"), bench.publish(WIDE, key="y"))
    contents = read(parts, bench.transfer)
    given = WorkInput(dataset="raw", generation="g", parts=parts)
    for order in (contents, contents[::-1]):
        columns = _columns("raw", given, order)
        assert columns is not None
        assert [each.type for each in columns] == TYPES
        spelt = (f"coalesce(string({each.name}), 'null')" for each in columns)
        line = f"concat_ws('|', {', '.join(spelt)}) AS line"
        # Spark has two readers: by columns and, for what these do not know, by rows.
        ways: list[tuple[DataAccess, str]] = [
            (FolderAccess(bench.transfer), "true"),
            (FolderAccess(bench.transfer), "false"),
            (RemoteAccess(bench.transfer), "true"),
        ]
        for access, by_columns in ways:
            spark.conf.set("spark.sql.parquet.enableVectorizedReader", by_columns)
            with ExitStack() as held:
                frame = access.frame(spark, [FileSlice(files=files(order))], columns, held)
                found = [row.line for row in frame.orderBy("k").selectExpr(line).collect()]
                assert found == FOUND, (access.name, by_columns)
                few = frame.where("whole > 0 AND inner.x IS NOT NULL").selectExpr("k").collect()
                assert [row.k for row in few] == [3], access.name
