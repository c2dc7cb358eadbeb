"""Rows of functions as Parquet files with declared columns."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.datasets.parquet import footers
from penstock.datasets.schema import Column
from penstock.kernel.errors import InvalidInput
from penstock.runtimes.base import AttemptWork, WorkOutput
from penstock.runtimes.row_writer import write_rows
from penstock.runtimes.task import FunctionTask

TYPES = {
    "id": "bigint",
    "small": "tinyint",
    "is": "boolean",
    "x": "double",
    "amount": "decimal(12,2)",
    "level": "string",
    "raw": "binary",
    "day": "date",
    "at": "timestamp",
    "local": "timestamp_ntz",
    "many": "array<int>",
    "named": "map<string,bigint>",
    "both": "struct<a:int,b:string>",
}
COLUMNS = tuple(Column(name, kind) for name, kind in TYPES.items())
ROW: dict[str, Any] = {
    "id": 2**40,
    "small": 7,
    "is": True,
    "x": 1.5,
    "amount": Decimal("1.20"),
    "level": "high",
    "raw": b"\0\xff",
    "day": date(2026, 1, 2),
    "at": datetime(2026, 1, 2, 3, tzinfo=UTC),
    "local": datetime(2026, 1, 2, 3),  # noqa: DTZ001 - it has none
    "many": [1, 2],
    "named": [("a", 1)],
    "both": {"a": 1, "b": "x"},
}


def test_a_file_has_the_declared_columns_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    assert write_rows(path, COLUMNS, [ROW, {"id": 1}]) == 2
    with path.open("rb") as file:
        (footer,) = footers([file], seconds_max=60, is_trusted=True)
    assert footer is not None
    assert footer.columns == COLUMNS
    assert parquet.read_table(path).to_pylist() == [ROW, {**dict.fromkeys(ROW), "id": 1}]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"id": 1, "other": 2}], "The column 'other' is not among the `columns`"),
        ([{"id": "one"}], "The rows do not fit the `columns` of the output"),
        ([{"small": 300}], "The rows do not fit the `columns` of the output"),
        (pa.table({"other": [1]}), "The column 'other' is not among the `columns`"),
        (pa.table({"small": [300]}), "The rows do not fit the `columns` of the output"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, rows: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        write_rows(tmp_path / "rows.parquet", COLUMNS, rows)


def test_each_call_of_a_task_is_a_file_more(tmp_path: Path) -> None:
    declared = (Column("id", "bigint"), Column("level", "string"))
    places = {
        "alerts": WorkOutput(
            dataset="alerts", uuid="u", location=tmp_path.as_uri(), declared=declared
        ),
        "bare": WorkOutput(dataset="bare", uuid="v", location=tmp_path.as_uri()),
    }
    task = FunctionTask(
        AttemptWork(task_id=1, attempt=1, job="j", operator="m:f", generation="g", outputs=places)
    )
    assert task.write_rows("alerts", [{"id": 1, "level": "a"}]) == 1
    assert task.write_rows("alerts", pa.table({"id": pa.array([2], pa.int32())})) == 1
    assert parquet.read_table(tmp_path).to_pylist() == [
        {"id": 1, "level": "a"},
        {"id": 2, "level": None},
    ]
    with pytest.raises(InvalidInput, match="The output bare declares no `columns`"):
        task.write_rows("bare", [])
