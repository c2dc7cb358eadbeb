"""The operators on a real session: what they make of partitions, and what a reader sees of it."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.datasets.layout import path_of
from penstock.datasets.parquet import footers
from penstock.datasets.schema import Column
from penstock.runtimes.base import Part, WorkInput, WorkResult
from penstock.runtimes.spark.columns import columns_of
from tests.integration.spark.bench import Bench, part

FLIGHTS = {
    "carrier": ["UA", "AA", "UA", "B6"],
    "delay": [10.0, None, 30.0, 5.0],
    "distance": [100, 200, 300, 400],
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of a user, which a test fills."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "theirs.py"
    sys.modules.pop("theirs", None)


def test_sql_reads_inputs_as_views_and_knows_its_partition(bench: Bench) -> None:
    flights = bench.publish(FLIGHTS)
    names = bench.publish({"carrier": ["UA", "AA"], "name": ["United", "American"]}, key=None)
    sql = """
        SELECT name, count(*) AS flights, max(delay) AS worst, :partition_key AS day, :factor AS f
        FROM flights JOIN `carrier-names` USING (carrier) GROUP BY name
    """
    work = bench.work(
        "spark.sql",
        {"sql": sql, "parameters": {"factor": 3}, "sort_by": ["name"]},
        inputs={"flights": [flights], "carrier-names": [names]},
    )
    finished = bench.finished(work)
    (made,) = finished.made
    assert bench.rows(made) == [
        {"name": "American", "flights": 1, "worst": None, "day": "2013-01-01", "f": 3},
        {"name": "United", "flights": 2, "worst": 30.0, "day": "2013-01-01", "f": 3},
    ]
    assert made.partition_key == "2013-01-01"
    manifest = bench.manifest(made)
    assert [each.input for each in manifest.inputs] == ["flights", "carrier-names"]
    assert manifest.inputs[0].manifest == flights.manifest
    assert made.facts is not None
    assert made.facts.columns == manifest.columns
    assert manifest.columns[0] == Column("name", "string")
    assert finished.metrics["rows_in"] == 6
    assert finished.metrics["rows_out"] == 2
    assert {"reading_seconds", "running_seconds", "writing_seconds"} <= set(finished.metrics)
    assert bench.told.begun == [[work.task_id]]


def test_a_comment_adds_no_column(bench: Bench) -> None:
    raw = bench.publish({"a": [1]})
    for comment in ("-- without _partition", "/* nor `_partition` */"):
        work = bench.work(
            "spark.sql", {"sql": f"SELECT * FROM raw {comment}"}, inputs={"raw": [raw]}
        )
        assert bench.rows(bench.made(work)) == [{"a": 1}]
    named = bench.work(
        "spark.sql", {"sql": "SELECT _partition AS p FROM raw"}, inputs={"raw": [raw]}
    )
    assert bench.rows(bench.made(named)) == [{"p": "2013-01-01"}]


def test_a_task_without_a_partition_has_its_cursor(bench: Bench) -> None:
    made = bench.made(bench.work("spark.sql", {"sql": "SELECT :cursor AS at"}, key=None))
    assert made.cursor == 7
    assert made.partition_key is None
    assert bench.rows(made) == [{"at": 7}]


def test_parts_with_other_columns_are_read_together(bench: Bench) -> None:
    old = bench.publish({"a": [1]}, key="x")
    new = bench.publish({"b": ["two"], "a": [2]}, key="y")
    work = bench.work(
        "spark.sql", {"sql": "SELECT a, b FROM raw", "sort_by": ["a"]}, inputs={"raw": [old, new]}
    )
    assert bench.rows(bench.made(work)) == [{"a": 1, "b": None}, {"a": 2, "b": "two"}]


def test_an_input_of_which_nothing_has_changed_has_columns_and_no_rows(bench: Bench) -> None:
    carrier = WorkInput(dataset="carriers", generation="g", columns=(Column("carrier", "string"),))
    sql = "SELECT upper(carrier) AS carrier, count(*) AS n FROM new GROUP BY carrier"
    work = replace(bench.work("spark.sql", {"sql": sql}), inputs={"new": carrier})
    made = bench.made(work)
    assert bench.rows(made) == []
    assert made.facts is not None
    assert made.facts.columns == (Column("carrier", "string"), Column("n", "bigint"))
    # What joins it with something that is there has the rows of that.
    sql = "SELECT * FROM flights LEFT ANTI JOIN new USING (carrier)"
    work = bench.work("spark.sql", {"sql": sql}, inputs={"flights": [bench.publish(FLIGHTS)]})
    made = bench.made(replace(work, inputs={**work.inputs, "new": carrier}))
    assert len(bench.rows(made)) == 4


def test_a_window_over_days_is_one_frame(bench: Bench) -> None:
    days = [
        bench.publish({"day": [n], "total": [10.0 * n]}, key=f"2013-01-0{n}") for n in (1, 2, 3)
    ]
    sql = """
        SELECT day, average FROM (
            SELECT day, avg(total) OVER (ORDER BY day ROWS 2 PRECEDING) AS average FROM days
        ) WHERE day = 3
    """
    work = bench.work("spark.sql", {"sql": sql}, inputs={"days": days}, key="2013-01-03")
    made = bench.made(work)
    assert (made.partition_key, bench.rows(made)) == ("2013-01-03", [{"day": 3, "average": 20.0}])


def test_a_part_without_a_manifest_is_all_parquet_there(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "loose [x] day=1"
    folder.mkdir()
    pd.DataFrame({"a": [1, 2]}).to_parquet(folder / "one.parquet")
    pd.DataFrame({"a": [3]}).to_parquet(folder / "two.parquet")
    (folder / "_SUCCESS").touch()
    loose = Part(location=folder.as_uri(), partition_key="x")
    work = bench.work("spark.sql", {"sql": "SELECT sum(a) AS s FROM raw"}, inputs={"raw": [loose]})
    assert bench.rows(bench.made(work)) == [{"s": 6}]


def test_an_empty_result_is_a_partition_with_columns(bench: Bench) -> None:
    flights = bench.publish(FLIGHTS)
    sql = "SELECT carrier, distance FROM flights WHERE distance > 1000"
    made = bench.made(bench.work("spark.sql", {"sql": sql}, inputs={"flights": [flights]}))
    manifest = bench.manifest(made)
    assert manifest.files == ()
    assert manifest.columns == (Column("carrier", "string"), Column("distance", "bigint"))
    again = bench.work(
        "spark.sql", {"sql": "SELECT count(*) AS n FROM raw"}, inputs={"raw": [part(made)]}
    )
    assert bench.rows(bench.made(again)) == [{"n": 0}]


@pytest.mark.parametrize("arrow_bytes_max", [2**26, 0])
def test_types_are_the_same_on_both_ways_out(
    spark: Any, tmp_path: Path, arrow_bytes_max: int
) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=arrow_bytes_max)
    one = bench.publish({"a": [1]})
    sql = """
        SELECT CAST(1 AS tinyint) AS t, CAST(2.5 AS decimal(10,2)) AS d, DATE'2013-01-02' AS day,
          TIMESTAMP'2013-01-02 03:04:05' AS at, TIMESTAMP_NTZ'2013-01-02 03:04:05' AS wall,
          array(named_struct('a b', 1, 'c', 'x')) AS nested, map('k', 1.5D) AS m, X'00FF' AS b,
          CAST(NULL AS float) AS f, true AS yes
        FROM raw
    """
    made = bench.made(bench.work("spark.sql", {"sql": sql}, inputs={"raw": [one]}))
    said = {each.name: each.type for each in bench.manifest(made).columns}
    assert said["nested"] == "array<struct<`a b`:int,c:string>>"
    assert said["at"] == "timestamp"
    assert said["wall"] == "timestamp_ntz"
    again = bench.work("spark.sql", {"sql": "SELECT * FROM raw"}, inputs={"raw": [part(made)]})
    (row,) = bench.rows(bench.made(again))
    assert row["d"] == Decimal("2.50")
    assert row["day"] == dt.date(2013, 1, 2)
    assert row["at"] == dt.datetime(2013, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    assert row["wall"] == dt.datetime(2013, 1, 2, 3, 4, 5)  # noqa: DTZ001 - that is meant
    assert row["nested"] == [{"a b": 1, "c": "x"}]
    assert row["f"] is None


def test_a_transform_has_frames_and_a_context(bench: Bench, module: Path) -> None:
    module.write_text(
        "def clean(inputs, context):\n"
        "    assert 'later' not in inputs and inputs.get('later') is None\n"
        "    flights = inputs['flights']\n"
        "    kept = flights.where(flights.distance > context.parameters['miles'])\n"
        "    return {'far': kept, 'keys': context.session.createDataFrame(\n"
        "        [(context.partition_key, context.job)], 'key string, job string')}\n"
    )
    flights = bench.publish(FLIGHTS)
    work = bench.work(
        "spark.python",
        {"transform": "theirs:clean", "parameters": {"miles": 250}},
        inputs={"flights": [flights], "later": []},
        outputs=("far", "keys"),
    )
    made = {each.output: each for each in bench.finished(work).made}
    assert sorted(row["distance"] for row in bench.rows(made["far"])) == [300, 400]
    assert bench.rows(made["keys"]) == [{"key": "2013-01-01", "job": "job"}]


def test_a_transform_that_was_edited_is_loaded_anew(bench: Bench, module: Path) -> None:
    for answer in (1, 22):
        module.write_text(
            "def one(inputs, context):\n"
            f"    return context.session.range({answer}).withColumnRenamed('id', 'n')\n"
        )
        made = bench.made(bench.work("spark.python", {"transform": "theirs:one"}))
        assert len(bench.rows(made)) == answer


def test_compact_makes_files_of_the_target_size(bench: Bench) -> None:
    parts = [
        bench.publish({"a": list(range(each * 50_000, each * 50_000 + 50_000))}, key=f"{each}")
        for each in range(4)
    ]
    one = bench.made(bench.work("compact", {"sort_by": ["a"]}, inputs={"raw": parts}))
    assert one.facts is not None
    assert (one.facts.files, one.facts.rows) == (1, 200_000)
    config = {"sort_by": ["a"], "target_file_bytes": "256KiB"}
    many = bench.made(bench.work("compact", config, inputs={"raw": parts}))
    assert many.facts is not None
    assert many.facts.files > 2
    assert [row["a"] for row in bench.rows(many)] == list(range(200_000))


def test_a_rollup_groups_all_parts(bench: Bench) -> None:
    days = [
        bench.publish({"carrier": ["UA", "AA"], "flights": [each, 1]}, key=f"2013-01-0{each}")
        for each in (1, 2, 3)
    ]
    config = {
        "by": ["carrier"],
        "measures": {"flights": "sum(flights)", "days": "count(*)"},
        "sort_by": ["carrier"],
    }
    made = bench.made(bench.work("rollup", config, inputs={"daily": days}, key="2013-01"))
    assert bench.rows(made) == [
        {"carrier": "AA", "flights": 3, "days": 3},
        {"carrier": "UA", "flights": 6, "days": 3},
    ]
    union = bench.made(bench.work("rollup", {}, inputs={"daily": days}, key="2013-01"))
    assert len(bench.rows(union)) == 6


def test_an_integrity_check_passes_what_is_right(bench: Bench) -> None:
    flights = bench.publish(FLIGHTS)
    expect = [
        {"check": "distance > 0"},
        {"check": "delay IS NOT NULL", "at_most": "25%"},
        {"unique": ["carrier", "distance"]},
        {"rows": {"min": 1, "max": 10}},
    ]
    made = bench.made(bench.work("integrity_check", {"expect": expect}, inputs={"in": [flights]}))
    assert len(bench.rows(made)) == 4
    only = bench.work("integrity_check", {"expect": expect}, inputs={"in": [flights]}, outputs=())
    assert bench.finished(only).made == ()


@pytest.mark.parametrize("arrow_bytes_max", [2**26, 0])
def test_what_is_not_as_expected_is_not_published(
    spark: Any, tmp_path: Path, arrow_bytes_max: int
) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=arrow_bytes_max)
    flights = bench.publish(FLIGHTS)
    expect = [
        {"check": "delay < 20", "name": "no long delays", "at_most": 1},
        {"unique": ["carrier"]},
        {"rows": {"min": 5}},
        {"check": "distance > 0"},
    ]
    work = bench.work("integrity_check", {"expect": expect}, inputs={"in": [flights]})
    failure = bench.failure(work)
    assert not failure.is_retried
    assert "'no long delays' fails for 2 of 4 rows, and at most 1 may: {" in failure.reason
    assert "carrier=AA, delay=null, distance=200" in failure.reason
    assert "'unique carrier' fails: 1 values are there more than once" in failure.reason
    assert "{carrier=UA, count=2}" in failure.reason
    assert "'at least 5 rows' is expected, and there are 4" in failure.reason
    assert "distance > 0" not in failure.reason
    written = [each.name for each in bench.transfer.list(work.outputs["out"].location)]
    assert "manifest.json" not in written


@pytest.mark.parametrize("arrow_bytes_max", [2**26, 0])
def test_equal_work_has_equal_bytes(spark: Any, tmp_path: Path, arrow_bytes_max: int) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=arrow_bytes_max)
    rows: dict[str, list[Any]] = {
        "k": [each % 7 for each in range(5000)],
        "v": [float(each) for each in range(5000)],
    }
    turned = {name: values[::-1] for name, values in rows.items()}
    config = {"sql": "SELECT * FROM raw DISTRIBUTE BY v", "sort_by": ["k"]}
    sums = set()
    for each in (rows, turned):
        made = bench.made(bench.work("spark.sql", config, inputs={"raw": [bench.publish(each)]}))
        sums.add(tuple(file.sha256 for file in bench.manifest(made).files))
    assert len(sums) == 1


def test_others_read_what_a_manifest_names(spark: Any, tmp_path: Path) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path)
    made = bench.made(
        bench.work("compact", {"sort_by": ["distance"]}, inputs={"in": [bench.publish(FLIGHTS)]})
    )
    names = [f"{made.location}/{each.name}" for each in bench.manifest(made).files]
    paths = [str(path_of(each)) for each in names]
    query = "SELECT sum(distance) FROM read_parquet($1)"
    assert duckdb.execute(query, [paths]).fetchall() == [(1000,)]
    assert pd.read_parquet(paths).carrier.tolist() == FLIGHTS["carrier"]
    assert bench.session.read.parquet(*names).count() == 4


def test_a_zombie_changes_nothing_that_a_reader_sees(spark: Any, tmp_path: Path) -> None:
    """An attempt whose successor has published writes on, into its own folder."""
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=0)
    raw = bench.publish({"a": list(range(1000))})
    config = {"sql": "SELECT a, :by AS by FROM raw", "parameters": {"by": "zombie"}}
    zombie = bench.work("spark.sql", config, inputs={"raw": [raw]})
    successor = bench.work(
        "spark.sql", {**config, "parameters": {"by": "successor"}}, inputs={"raw": [raw]}
    )
    published = bench.made(successor)
    before = bench.rows(published)
    late = bench.made(zombie)
    assert late.location != published.location
    assert bench.rows(published) == before
    assert {row["by"] for row in before} == {"successor"}
    folder = path_of(published.location)
    assert sorted(each.name for each in folder.iterdir()) == [
        "manifest.json",
        *(each.name for each in bench.manifest(published).files),
    ]


@pytest.mark.parametrize("is_batch", [False, True])
def test_what_a_query_reads_by_itself_is_not_taken_for_small(
    spark: Any, tmp_path: Path, is_batch: bool
) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=10_000)
    folder = tmp_path / "delivered"
    spark.range(20_000).coalesce(1).write.parquet(folder.as_uri())
    query = {"sql": f"SELECT id FROM parquet.`{folder}`"}
    works = [bench.work("spark.sql", query, key=f"k{each}") for each in range(1 + is_batch)]
    for ended in bench.ended(*works).values():
        assert isinstance(ended, WorkResult), ended
        (made,) = ended.made
        (file,) = bench.manifest(made).files
        assert file.rows == 20_000
        path = f"{made.location}/{file.name}".removeprefix("file://")
        assert "parquet-mr" in parquet.read_metadata(path).created_by


def test_the_columns_of_a_function_are_called_as_spark_reads_them(
    spark: Any, tmp_path: Path
) -> None:
    kinds: dict[str, pa.DataType] = {
        **{name: getattr(pa, name)() for name in ("int8", "int16", "int32", "int64", "bool_")},
        **{name: getattr(pa, name)() for name in ("uint8", "uint16", "uint32", "uint64")},
        **{name: getattr(pa, name)() for name in ("float32", "float64", "date32", "binary")},
        **{name: getattr(pa, name)() for name in ("string", "large_string", "large_binary")},
        "small": pa.decimal128(9, 2),
        "large": pa.decimal128(38, 0),
        "utc": pa.timestamp("us", tz="UTC"),
        "there": pa.timestamp("ms", tz="Europe/Berlin"),
        "local": pa.timestamp("us"),
        "coded": pa.dictionary(pa.int32(), pa.string()),
        "list": pa.list_(pa.int32()),
        "map": pa.map_(pa.string(), pa.float64()),
        "struct": pa.struct({"a b": pa.int16(), "c": pa.list_(pa.struct({"d": pa.bool_()}))}),
    }
    table = pa.table({name: pa.nulls(1, kind) for name, kind in kinds.items()})
    path = tmp_path / "x.parquet"
    parquet.write_table(table, path)
    with path.open("rb") as file:
        (footer,) = footers([file], seconds_max=60, is_trusted=True)
    assert footer is not None
    assert footer.columns == columns_of(spark.read.parquet(str(path)).schema)
