"""What Spark writes: computed once, in files that follow the result, by hash, by range or as is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, datasource
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.iceberg.schemas import ids_of
from penstock.datasets.layout import path_of
from penstock.datasets.manifest import File, sums
from penstock.datasets.parquet_child import field_ids
from penstock.runtimes.spark.access.base import DataAccess, WriteTarget
from penstock.runtimes.spark.access.folder import FolderAccess, JarFolderAccess
from penstock.runtimes.spark.access.parquet import TaskFile
from penstock.runtimes.spark.access.remote import RemoteAccess
from penstock.runtimes.spark.columns import columns_of
from penstock.runtimes.spark.job_config import read_config
from penstock.runtimes.spark.operators import PlannedTask
from penstock.runtimes.spark.output_writer import OutputWriter, shape_of
from penstock.runtimes.spark.result_size import UNKNOWN_BYTES
from tests.integration.spark.bench import Bench

LARGE = 2**27
SMALL_FILES = "64KiB"
WAYS: Sequence[Mapping[str, Any]] = ({}, {"sort_by": ["k"]}, {"cluster_by": ["k"]})


def names(way: Mapping[str, Any]) -> str:
    return next(iter(way), "as is")


def written(
    bench: Bench, frame: DataFrame, way: Mapping[str, Any], *, size: int = LARGE
) -> tuple[list[File], list[pa.Table]]:
    """The files that a frame becomes, and what is in each; nothing else is there."""
    config = {"sql": "SELECT 1", **way}
    work = bench.work("spark.sql", config)
    member = PlannedTask(work=work, config=read_config("spark.sql", config))
    writer = OutputWriter(bench.transfer, target_file_bytes=LARGE)
    access = FolderAccess(bench.transfer)
    shape = shape_of(frame, member.config)
    files = writer.frame(frame, shape, member, "out", access, size=size)
    folder = path_of(work.outputs["out"].location)
    assert {each.name for each in folder.iterdir()} == {each.name for each in files}
    return list(files), [parquet.read_table(folder / each.name) for each in files]


def source_of(log: Path) -> type[datasource.DataSource]:
    """Like a database: nobody knows how large it is, and each read of it is written down."""

    class Counted(datasource.DataSource):
        @classmethod
        def name(cls) -> str:
            return "counted"

        def schema(self) -> str:
            return "k bigint, v bigint"

        def reader(self, schema: Any) -> datasource.DataSourceReader:
            del schema

            class Reader(datasource.DataSourceReader):
                def partitions(self) -> Sequence[datasource.InputPartition]:
                    return [datasource.InputPartition(each) for each in range(2)]

                def read(self, partition: datasource.InputPartition) -> Iterator[tuple[int, int]]:
                    with log.open("a") as file:
                        file.write(f"{partition.value}\n")
                    start = partition.value * 1000
                    return ((each, each % 7) for each in range(start, start + 1000))

            return Reader()

    return Counted


@pytest.mark.parametrize("way", WAYS, ids=names)
def test_a_source_of_unknown_size_is_read_once(
    spark: Any, tmp_path: Path, way: Mapping[str, Any]
) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path)
    spark.dataSource.register(source_of(tmp_path / "log"))
    spark.read.format("counted").load().createOrReplaceTempView("db")
    expect = [{"check": "v < 7"}, {"unique": ["k"]}, {"rows": {"min": 2000}}]
    config = {"sql": "SELECT k, v FROM db", "expect": expect, **way}
    made = bench.made(bench.work("spark.sql", config))
    assert sorted(row["k"] for row in bench.rows(made)) == list(range(2000))
    assert sorted((tmp_path / "log").read_text().split()) == ["0", "1"]
    for file in bench.manifest(made).files:
        # Not through the driver, which it might not fit into: then it would be read again.
        path = path_of(f"{made.location}/{file.name}")
        assert "parquet-mr" in parquet.read_metadata(path).created_by


@pytest.mark.parametrize("way", WAYS, ids=names)
def test_many_tasks_with_few_rows_leave_few_files(bench: Bench, way: Mapping[str, Any]) -> None:
    frame = bench.session.range(0, 400, 1, 40).selectExpr("id AS k", "id % 3 AS v")
    # As if so much had been read that the cut is into 40 files, all of them splinters.
    files, tables = written(bench, frame, way, size=40 * LARGE)
    assert len(files) == 1
    (table,) = tables
    assert sorted(table.column("k").to_pylist()) == list(range(400))
    assert not way or table.column("k").to_pylist() == list(range(400))


def test_what_is_large_enough_stays_as_tasks_wrote_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise files would have to be of hundreds of megabytes.
    monkeypatch.setattr("penstock.runtimes.spark.output_writer._READ_BYTES", 0)
    large = bench.session.range(0, 120_000, 1, 4).selectExpr("xxhash64(id) AS k")
    frame = large.unionAll(bench.session.range(0, 40, 1, 20).selectExpr("id AS k"))
    files, tables = written(bench, frame, {"target_file_bytes": "256KiB"})
    assert [each.name for each in files[:4]] == [f"part-0000{each}.parquet" for each in range(4)]
    assert [each.rows for each in files] == [30_000] * 4 + [40]
    assert sorted(tables[4]["k"].to_pylist()) == list(range(40))


@pytest.mark.parametrize("size", [2**19, UNKNOWN_BYTES])
def test_sorted_files_are_equal_whoever_cuts_them_and_however_frequent_a_value_is(
    bench: Bench, size: int
) -> None:
    way = {"sort_by": ["k"], "target_file_bytes": SMALL_FILES}
    rows = bench.session.range(0, 60_000, 1, 3).selectExpr(
        "IF(id % 10 < 8, 'often', CAST(id % 100 AS STRING)) AS k", "xxhash64(id) AS v"
    )
    one, tables = written(bench, rows, way, size=size)
    turned = rows.repartition(5, "v").sortWithinPartitions(F.desc("v"))
    other, _ = written(bench, turned, way, size=size)
    assert [each.sha256 for each in one] == [each.sha256 for each in other]
    sizes = [each.bytes for each in one]
    assert len(sizes) > 4
    assert max(sizes) < 2 * min(sizes)
    assert all(table.column("k").to_pylist() == sorted(table["k"].to_pylist()) for table in tables)


def test_sorted_files_follow_the_result_and_not_what_was_read(bench: Bench) -> None:
    way = {"sort_by": ["k"], "target_file_bytes": SMALL_FILES}
    rows = bench.session.range(0, 60_000, 1, 3).selectExpr("id % 100 AS k", "xxhash64(id) AS v")
    one, tables = written(bench, rows, way, size=1)
    other, _ = written(bench, rows.repartition(5, "v"), way, size=1)
    assert [each.sha256 for each in one] == [each.sha256 for each in other]
    assert len(one) > 4
    assert max(each.bytes for each in one) < 4 * 2**16
    assert all(table.column("k").to_pylist() == sorted(table["k"].to_pylist()) for table in tables)


def test_what_one_task_writes_far_too_much_of_is_cut(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtimes.spark.output_writer._READ_BYTES", 0)
    large = bench.session.range(0, 60_000, 1, 1).selectExpr("xxhash64(id) AS k")
    frame = large.unionAll(bench.session.range(0, 9_000, 1, 2).selectExpr("xxhash64(id) AS k"))
    files, tables = written(bench, frame, {"target_file_bytes": SMALL_FILES})
    assert [each.rows for each in files[:2]] == [4_500] * 2, "what is about right stays"
    assert len(files) > 5
    assert max(each.bytes for each in files) < 4 * 2**16
    assert sum(table.num_rows for table in tables) == 69_000


def test_nested_values_are_sorted_as_spark_does_and_equal_keys_have_one_order(bench: Bench) -> None:
    rows = (
        "SELECT array(id % 12) AS a, IF(id % 2 = 0, -0.0D, 0.0D) AS f, map('k', id) AS m,"
        " IF(id % 3 = 0, 'x', 'X') COLLATE UTF8_LCASE AS c FROM range(0, 60, 1, 3) DISTRIBUTE BY "
    )
    made = [
        bench.made(bench.work("spark.sql", {"sql": f"{rows}{by}", "sort_by": ["a", "c"]}))
        for by in ("xxhash64(id)", "hash(id % 7) SORT BY id DESC")
    ]
    one, other = ([each.sha256 for each in bench.manifest(some).files] for some in made)
    assert one == other
    # By their values and not by their texts, in which 10 comes before 2.
    assert [row["a"][0] for row in bench.rows(made[0])] == sorted(5 * list(range(12)))
    failure = bench.failure(bench.work("spark.sql", {"sql": f"{rows}id", "sort_by": ["m"]}))
    assert "config.sort_by: nothing can be sorted by the column 'm'" in failure.reason


def test_clustered_files_hold_ranges_that_do_not_overlap(bench: Bench) -> None:
    way = {"cluster_by": ["k", "v"], "target_file_bytes": SMALL_FILES}
    frame = bench.session.range(0, 60_000, 1, 4).selectExpr(
        "IF(id % 2 = 0, 7, id % 1000) AS k", "xxhash64(id) AS v"
    )
    files, tables = written(bench, frame, way)
    assert sums(files).rows == 60_000
    bounds = sorted(
        (rows[0], rows[-1])
        for table in tables
        if (rows := list(zip(table["k"].to_pylist(), table["v"].to_pylist(), strict=True)))
    )
    assert len(bounds) > 4
    assert all(before[1] <= after[0] for before, after in pairwise(bounds))
    sizes = [each.bytes for each in files]
    assert max(sizes) < 3 * min(sizes)


def test_a_small_input_with_a_large_result_is_cut(spark: Any, tmp_path: Path) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=0)
    raw = bench.publish({"a": list(range(100))})
    before = spark.conf.getAll
    config = {
        "sql": "SELECT xxhash64(a, b) AS h FROM (SELECT a, explode(sequence(1, 600)) AS b FROM r)",
        "target_file_bytes": SMALL_FILES,
    }
    made = bench.made(bench.work("spark.sql", config, inputs={"r": [raw]}))
    assert made.facts is not None
    assert made.facts.rows == 60_000
    assert made.facts.files > 1
    # What was set for the cut is not left in the session.
    assert spark.conf.getAll == before


def test_a_column_to_cluster_by_has_to_be_there(bench: Bench) -> None:
    config = {"sql": "SELECT 1 AS a", "cluster_by": ["b"]}
    failure = bench.failure(bench.work("spark.sql", config))
    assert failure.reason == "config.cluster_by: the result has no column 'b'; it has a."


@pytest.mark.parametrize("is_counted", [True, False], ids=["counted", "not counted"])
def test_checks_are_counted_while_rows_are_written_and_else_in_the_files(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_counted: bool
) -> None:
    if not is_counted:
        refusal = Mock(side_effect=AnalysisException("no such metric"))
        monkeypatch.setattr("penstock.runtimes.spark.expectations.observed", refusal)
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=0)
    raw = bench.publish({"a": list(range(100))})
    config = {"sql": "SELECT a FROM r", "sort_by": ["a"]}
    right = {**config, "expect": [{"check": "a >= 0"}, {"rows": {"max": 100}}]}
    bench.made(bench.work("spark.sql", right, inputs={"r": [raw]}))
    assert ("checking" in bench.told.phases) is not is_counted
    wrong = {**config, "expect": [{"check": "a > 1", "at_most": 1}, {"check": "a < 100"}]}
    failure = bench.failure(bench.work("spark.sql", wrong, inputs={"r": [raw]}))
    assert "'a > 1' fails for 2 of 100 rows, and at most 1 may: {a=0}, {a=1}." in failure.reason
    unknown = {**config, "expect": [{"check": "nope > 1"}]}
    failure = bench.failure(bench.work("spark.sql", unknown, inputs={"r": [raw]}))
    assert failure.reason.startswith("config.expect: ")
    assert "nope" in failure.reason


def test_a_column_that_must_be_unique_may_be_called_count(spark: Any, tmp_path: Path) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=0)
    sql = "SELECT * FROM VALUES (1, 'a'), (2, 'b') AS t(count, v)"
    config = {"sql": sql, "expect": [{"unique": ["count"]}]}
    assert len(bench.rows(bench.made(bench.work("spark.sql", config)))) == 2


FLAT = "SELECT a AS b, b AS a, named_struct('x', c) AS s, c AS `c d`, '1' AS key FROM read"
DEEP = (
    "SELECT a AS b, array(named_struct('x', c)) AS l, map(c, array(b)) AS m, '1' AS key FROM read"
)


@pytest.mark.parametrize(("sql", "by_jar"), [(FLAT, True), (DEEP, False)], ids=["flat", "deep"])
def test_columns_have_their_ids_whoever_writes_them(
    bench: Bench, tmp_path: Path, sql: str, *, by_jar: bool
) -> None:
    """Also those that were renamed since they were read. Spark has none inside of lists and maps;
    where its files come by here they are added, and elsewhere there are none at all."""
    session = bench.session
    part = bench.publish({"a": [1], "b": ["x"], "c": [2.5]})
    (source,) = path_of(part.location).glob("*.parquet")
    shutil.copy(source, tmp_path / "read.parquet")
    session.read.parquet(f"file://{tmp_path}/read.parquet").createOrReplaceTempView("read")
    frame = session.sql(sql)
    wanted = list(ids_of(columns_of(frame.drop("key").schema)))
    ways: list[DataAccess] = [
        FolderAccess(bench.transfer),
        RemoteAccess(bench.transfer),
        JarFolderAccess(bench.transfer, session),
    ]
    for number, access in enumerate(ways):
        folder = f"{bench.root}/{number}"
        plain = access.write(
            frame.drop("key"),
            WriteTarget(location=f"{folder}/a", staging=f"{folder}/b", file_bytes=LARGE),
        )
        keyed = access.write_keys(
            frame,
            "key",
            WriteTarget(location=f"{folder}/c", staging=f"{folder}/d", file_bytes=LARGE),
        )
        names = [f"a/{each.name}" for each in plain] + [f"c/1/{each.name}" for each in keyed["1"]]
        assert len(names) == 2
        for name in names:
            file = path_of(f"{folder}/{name}")
            found = field_ids(parquet.read_schema(file))
            has_ids = by_jar or not isinstance(access, JarFolderAccess)
            assert found == (wanted if has_ids else [None] * len(wanted)), access.name
            rows = parquet.read_table(file, partitioning=None).to_pylist()
            assert rows == frame.drop("key").toArrow().to_pylist()


def test_tasks_that_write_through_arrow_make_row_groups_of_a_size_and_not_of_each_batch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark hands them 10,000 rows at a time, and readers skip and fetch by row groups."""
    access = RemoteAccess(bench.transfer)
    frame = bench.session.range(0, 90_000, 1, 1).selectExpr(
        "xxhash64(id) AS h", "cast(id div 45000 AS string) AS k"
    )

    def target(name: str, *, file_bytes: int = LARGE) -> WriteTarget:
        return WriteTarget(location=f"{bench.root}/{name}", staging="", file_bytes=file_bytes)

    def groups(location: str, name: str) -> list[int]:
        footer = parquet.read_metadata(path_of(f"{location}/{name}"))
        return [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]

    def written_to(to: WriteTarget) -> list[list[int]]:
        files = access.write(frame.drop("k"), to)
        return [groups(to.location, each.name) for each in files]

    assert written_to(target("whole")) == [[90_000]]
    keyed = access.write_keys(frame, "k", target("keys"))
    assert [groups(f"{bench.root}/keys/{key}", some[0].name) for key, some in keyed.items()] == [
        [45_000],
        [45_000],
    ]
    # Files are cut between groups: where those are small, these are.
    assert written_to(target("small", file_bytes=2**18)) == [[20_000] * 2] * 2 + [[10_000]]

    monkeypatch.setattr("penstock.runtimes.spark.access.parquet._GROUP_ROWS_MAX", 30_000)
    file = TaskFile(path_of(f"{bench.root}/a"), pa.schema([("id", pa.int64())]), target("rows"))
    for start in range(0, 70_000, 10_000):
        file.write(pa.record_batch({"id": pa.array(range(start, start + 10_000), pa.int64())}))
    file.send(bench.transfer, target("rows").location)
    assert groups(f"{bench.root}/rows", "a") == [30_000, 30_000, 10_000]
