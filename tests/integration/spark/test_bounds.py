"""What is small leaves through the driver; what turns out to be large is never gathered there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from penstock.runtimes.base import WorkResult
from penstock.runtimes.spark.result_size import bounded, is_beyond
from tests.integration.spark.bench import Bench

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

    (file,) = bench.manifest(made).files
    with bench.transfer.open(f"{made.location}/{file.name}") as opened:
        metadata = parquet.ParquetFile(opened).metadata
    assert metadata.num_rows == 200_000
    assert metadata.created_by.startswith("parquet-mr"), "it went through the driver"


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
