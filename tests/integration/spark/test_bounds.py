"""What is small leaves through the driver; what turns out to be large is never gathered there."""

from __future__ import annotations

import datetime as dt
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from penstock.datasets.layout import path_of
from penstock.runtimes.base import ProducedOutput, WorkResult
from penstock.runtimes.spark.result_size import bounded, gathered, is_beyond
from penstock.runtimes.spark.settings import heap_bytes
from tests.integration.spark.bench import Bench

MOMENT = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
EXPLODED = "SELECT explode(sequence(1, 20000)) AS number, id FROM raw"


@pytest.mark.parametrize(
    ("value", "width"),
    [
        ("id", 8),
        ("repeat('x', 92) AS text", 100),
        ("named_struct('a', 1, 'b', repeat('ü', 44)) AS nested", 100),
        ("array_repeat(repeat('x', 12), 5) AS texts", 108),
        ("sequence(1, 23) AS numbers", 100),
        ("map('k', array_repeat(1L, 10)) AS entries", 105),
        ("CAST(NULL AS array<string>) AS nothing", 8),
    ],
)
def test_a_partition_is_cut_at_its_bound(spark: Any, value: str, width: int) -> None:
    frame = spark.range(200, numPartitions=2).selectExpr(value)

    assert bounded(frame, bytes_max=100 * width).toArrow().num_rows == 200
    with pytest.raises(Exception, match="BEYOND") as caught:
        bounded(frame, bytes_max=100 * width - 1).toArrow()
    assert is_beyond(caught.value)


def test_a_large_result_of_a_small_input_is_written_by_spark(spark: Any, tmp_path: Path) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=300_000)
    raw = bench.publish({"id": list(range(10))})

    made = bench.made(bench.work("spark.sql", {"sql": EXPLODED}, inputs={"raw": [raw]}))

    assert made.facts is not None
    assert made.facts.rows == 200_000
    assert writer_of(bench, made) == {"parquet-mr"}, "it went through the driver"


def writer_of(bench: Bench, made: ProducedOutput) -> set[str]:
    """What has written the files of an output: Spark, or we through Arrow."""
    found = set()
    for file in bench.manifest(made).files:
        with bench.transfer.open(f"{made.location}/{file.name}") as opened:
            found.add(parquet.ParquetFile(opened).metadata.created_by.partition(" ")[0])
    return found


MANY = """
    SELECT explode(sequence(1, 2000)) AS number, id, repeat('x', 10) AS text
    FROM (SELECT /*+ REPARTITION(40) */ id FROM raw)
"""


def test_many_tasks_of_spark_together_are_cut_at_the_bound(jvm: Any, tmp_path: Path) -> None:
    """Each makes less than a task may, and all of them much more than may be collected."""

    def one(place: int) -> set[str]:
        session = jvm.fresh()
        try:
            folder = tmp_path / str(place)
            bench = Bench(session, folder / "root", folder, arrow_bytes_max=800_000)
            raw = bench.publish({"id": list(range(200))})
            made = bench.made(bench.work("spark.sql", {"sql": MANY}, inputs={"raw": [raw]}))
            assert made.facts is not None
            assert made.facts.rows == 400_000
            return writer_of(bench, made)
        finally:
            jvm.leave(session)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(4))) == [{"parquet-mr"}] * 4


def test_what_is_gathered_ends_with_the_batch_that_is_too_much(spark: Any) -> None:
    frame = spark.range(0, 4_000, 1, 40).selectExpr("id", "repeat('x', 92) AS text")
    whole = gathered(frame, task_bytes_max=2**20, bytes_max=4_000 * 108)
    assert whole.column_names == ["id", "text"]
    assert whole.column("id").to_pylist() == list(range(4_000))

    with pytest.raises(OverflowError) as caught:
        gathered(frame, task_bytes_max=2**20, bytes_max=4_000 * 108 - 1)
    assert is_beyond(caught.value)

    # The tasks that have not begun never do.
    slow = frame.selectExpr(
        "id", "IF(id < 200, id, reflect('java.lang.Thread', 'sleep', 100L)) AS t"
    )
    jobs = spark.sparkContext.statusTracker()
    with pytest.raises(OverflowError):
        gathered(slow, task_bytes_max=2**20, bytes_max=1_000)
    assert not jobs.getActiveJobsIds()
    assert gathered(spark.range(3), task_bytes_max=2**20, bytes_max=24).num_rows == 3


def test_sorted_bytes_do_not_depend_on_what_a_task_of_spark_may_gather(
    spark: Any, tmp_path: Path
) -> None:
    """That depends on cores, and on the order in which rows come."""
    sums = []
    for memory in ("2m", "1g"):
        bench = Bench(spark, tmp_path / memory, tmp_path, arrow_bytes_max=2**20)
        bench.engine._collected_max = 2**20
        bench.engine._gathered_max = heap_bytes(memory) // 64
        raw = bench.publish({"id": list(range(1_000)), "at": [MOMENT] * 1_000})
        sql = "SELECT id, at, repeat('x', id % 50) AS text, -0.0D AS f FROM raw"
        expect: list[Any] = [{"check": "id >= 0"}, {"unique": ["id"]}]
        config = {"sql": sql, "sort_by": ["text", "id"], "expect": expect}
        made = bench.made(bench.work("spark.sql", config, inputs={"raw": [raw]}))
        sums.append([each.sha256 for each in bench.manifest(made).files])
        assert writer_of(bench, made) == {"parquet-cpp-arrow"}
        folder = path_of(made.location)
        assert {each.suffix for each in folder.iterdir()} == {".parquet", ".json"}
        assert len(list(folder.glob("*.parquet"))) == len(sums[-1])
    assert sums[0] == sums[1]


def test_tasks_of_a_batch_with_a_large_result_run_one_by_one(spark: Any, tmp_path: Path) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=300_000)
    works = [
        bench.work(
            "spark.sql",
            {"sql": EXPLODED},
            inputs={"raw": [bench.publish({"id": [number]}, key=f"p{number}")]},
            key=f"p{number}",
        )
        for number in range(3)
    ]

    ended = bench.ended(*works)

    assert all(isinstance(each, WorkResult) for each in ended.values()), ended
    assert [len(each) for each in bench.told.begun] == [3, 1, 1, 1]
