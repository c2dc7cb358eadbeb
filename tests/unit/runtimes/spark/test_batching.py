"""How batches are cut and their rows told apart, and columns in Spark's words."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types

from penstock.datasets.schema import Column
from penstock.datasets.snapshot import DataFile
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import AttemptWork, WorkInput
from penstock.runtimes.spark.access.frame_metadata import _spellings
from penstock.runtimes.spark.columns import columns_of, ddl, is_for_arrow, words
from penstock.runtimes.spark.input_reader import InputFiles
from penstock.runtimes.spark.job_config import JobConfig
from penstock.runtimes.spark.operators import PlannedTask, split_rows, tasks_by_job


def member(number: int, size: int, columns: tuple[Column, ...] | None = ()) -> PlannedTask:
    file = DataFile(location="x", bytes=size)
    given_input = WorkInput(dataset="d", generation="g")
    one = InputFiles(name="raw", given=given_input, files=(file,), columns=columns, is_own=True)
    work = AttemptWork(task_id=number, attempt=1, job="j", operator="compact", generation="g")
    return PlannedTask(work=work, config=JobConfig(operator="compact"), inputs={"raw": one})


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(-1, 100))
def test_bundles_hold_every_task_once_and_no_more_than_fits(sizes: list[int], most: int) -> None:
    members = [member(place, size) for place, size in enumerate(sizes)]
    made = tasks_by_job(members, bytes_max=most)
    assert [each.work.task_id for some in made for each in some] == list(range(len(sizes)))
    assert all(len(some) == 1 or sum(each.bytes_in for each in some) <= most for some in made)


def test_tasks_whose_inputs_differ_run_apart() -> None:
    a, b = (Column("a", "int"),), (Column("b", "int"),)
    members = [member(0, 1, a), member(1, 1, b), member(2, 1, a), member(3, 1, None)]
    made = tasks_by_job(members, bytes_max=100)
    assert [[each.work.task_id for each in some] for some in made] == [[0, 2], [1], [3]]


@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_rows_are_told_apart_in_their_order(tags: list[str]) -> None:
    table = pa.table(
        {"tag": pa.array(tags, pa.string()), "n": pa.array(range(len(tags)), pa.int64())}
    )
    found = split_rows(table, "tag", list("abcd"))
    assert {tag: some.column("n").to_pylist() for tag, some in found.items()} == {
        tag: [place for place, each in enumerate(tags) if each == tag] for tag in "abcd"
    }


@pytest.mark.parametrize("tag", ["z", None])
def test_rows_of_nobody_are_refused(tag: str | None) -> None:
    table = pa.table({"tag": pa.array(["a", tag], pa.string()), "n": [1, 2]})
    with pytest.raises(WorkFailed, match="none of the partitions"):
        split_rows(table, "tag", ["a"])


def test_types_are_in_sparks_words() -> None:
    inner = types.StructType([types.StructField("a b", types.IntegerType(), nullable=False)])
    schema = types.StructType(
        [
            types.StructField("x", types.ArrayType(inner), nullable=False),
            types.StructField("`odd`", types.MapType(types.StringType(), types.LongType())),
        ]
    )
    columns = columns_of(schema)
    assert columns == (
        Column("x", "array<struct<`a b`:int>>"),
        Column("`odd`", "map<string,bigint>"),
    )
    assert ddl(columns) == "`x` array<struct<`a b`:int>>, ```odd``` map<string,bigint>"
    assert words(types.DecimalType(10, 2)) == "decimal(10,2)"


@pytest.mark.parametrize("names", [("a", "a"), ("a", "A")])
def test_columns_that_spark_mixes_up_are_refused(names: tuple[str, str]) -> None:
    schema = types.StructType([types.StructField(name, types.LongType()) for name in names])
    with pytest.raises(WorkFailed, match="twice"):
        columns_of(schema)
    inner = types.MapType(types.StringType(), types.ArrayType(schema))
    with pytest.raises(WorkFailed, match="twice"):
        columns_of(types.StructType([types.StructField("s", inner)]))


def test_only_types_that_mean_the_same_go_through_arrow() -> None:
    assert is_for_arrow(types.ArrayType(types.StringType()))
    assert not is_for_arrow(types.DayTimeIntervalType())
    assert not is_for_arrow(types.ArrayType(types.VariantType()))
    assert not is_for_arrow(types.StringType("UNICODE"))


def test_a_path_is_known_however_spark_spells_it() -> None:
    assert {"file:/a/b", "file:///a/b"} <= _spellings("file:///a/b")
    assert "file:/a%20b/%5Bx%5D/ü" in _spellings("file:///a b/[x]/ü")
    assert "s3a://bucket/a=1" in _spellings("s3a://bucket/a=1")
