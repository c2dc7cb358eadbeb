"""Every kind of job as a client of a Connect server, over a bucket: what it makes and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import AttemptWork, ProducedOutput, WorkResult
from penstock.runtimes.spark.result_size import gathered, is_beyond
from penstock.runtimes.spark.runtime import SparkRuntime
from penstock.testing.runtime_contract import RecordingReporter
from tests.integration.spark.bench import Bench, part
from tests.integration.spark.test_access import CLUSTER, bench_at, bucket
from tests.integration.spark.test_host_connect import Server, server
from tests.integration.spark.test_merging import BY_VERSION, values
from tests.integration.spark.test_partition_by import work_of
from tests.integration.spark.test_rewriter import anew
from tests.integration.spark.trial import at_once, spark_settings

__all__ = ["bucket", "server"]

NUMBERS = {"n": list(range(20)), "v": [each % 3 for each in range(20)]}
HERE = "tests.integration.spark.test_connect"

Run = Callable[..., list[WorkResult]]


@pytest.fixture
def by_connect(server: Server, bucket: str, tmp_path: Path) -> Iterator[Run]:
    """What runs works at once as a client of a Connect server, which has no files of ours."""
    # One after the other: a task has ended a moment before what it has cached is dropped.
    settings = spark_settings(tmp_path, master=server.url, store_url="s3://penstock", parallel=1)
    runtime = SparkRuntime(settings)

    async def all_of(works: tuple[AttemptWork, ...]) -> list[WorkResult]:
        return await at_once(*(runtime.run(each, RecordingReporter()) for each in works))

    with asyncio.Runner() as runner:
        runner.run(runtime.start())
        try:
            yield lambda *works: runner.run(all_of(works))
        finally:
            runner.run(runtime.stop())


@pytest.fixture
def bench(bucket: str, tmp_path: Path) -> Bench:
    return bench_at(None, bucket, tmp_path, master=CLUSTER)


def one(by_connect: Run, work: AttemptWork) -> ProducedOutput:
    [finished] = by_connect(work)
    [made] = finished.made
    return made


@pytest.mark.timeout(400)
def test_partitions_are_divided_expected_and_rewritten(bench: Bench, by_connect: Run) -> None:
    numbers = bench.publish(NUMBERS, key=None)
    expect: list[Any] = [{"check": "n < 19", "at_most": 1}, {"unique": ["n"]}]
    [finished] = by_connect(work_of(bench, numbers, "v", "SELECT * FROM trips", expect=expect))
    found = {each.partition_key: [row["n"] for row in bench.rows(each)] for each in finished.made}
    assert {key: sorted(rows) for key, rows in found.items()} == {
        str(v): list(range(v, 20, 3)) for v in range(3)
    }
    wrong = work_of(bench, numbers, "v", "SELECT * FROM trips", expect=[{"check": "n < 18"}])
    with pytest.raises(WorkFailed, match=r"'n < 18' fails for 2 of 20 rows"):
        by_connect(wrong)
    # Its texts have a collation, which do not leave through Arrow: Spark writes them.
    sql = "SELECT n, CAST(n % 7 AS STRING) COLLATE UTF8_LCASE AS c FROM r"
    config = {"sql": sql, "cluster_by": ["n"], "expect": [{"check": "n >= 0"}]}
    clustered = one(by_connect, bench.work("spark.sql", config, inputs={"r": [numbers]}))
    again = one(by_connect, anew(bench, clustered, sort_by=["n"]))
    for made in (clustered, again):
        assert [row["n"] for row in bench.rows(made)] == NUMBERS["n"]


@pytest.mark.timeout(400)
def test_what_a_server_sends_is_cut_at_the_bound(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PySpark sets it, and whatever this process starts later would be a client as well.
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    session = SparkSession.builder.remote(server.url).create()
    frame = session.range(0, 40_000, 1, 40).selectExpr("id", "repeat('x', 92) AS text")
    whole = gathered(frame, task_bytes_max=2**20, bytes_max=40_000 * 108)
    assert whole.equals(frame.toArrow())
    with pytest.raises(OverflowError) as caught:
        gathered(frame, task_bytes_max=2**20, bytes_max=40_000 * 108 - 1)
    assert is_beyond(caught.value)
    assert gathered(session.range(0), task_bytes_max=1, bytes_max=1).num_rows == 0
    session.stop()


@pytest.mark.timeout(400)
def test_what_two_tasks_have_made_is_merged(bench: Bench, by_connect: Run) -> None:
    first = values((1, 10, "old"), (2, 20, "kept"), (3, 1, "gone"))
    later = values((1, 20, "new"), (2, 10, "late"), (3, 2, "d"))
    made: ProducedOutput | None = None
    for sql in (first, later):
        work = bench.work("spark.sql", {"sql": sql}, merge=BY_VERSION)
        current = () if made is None else (part(made),)
        outputs = {"out": replace(work.outputs["out"], current=current)}
        made = one(by_connect, replace(work, outputs=outputs))
    assert made is not None
    assert {row["id"]: row["op"] for row in bench.rows(made)} == {1: "new", 2: "kept"}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("is_wise", [False, True], ids=["a plan each", "one plan"])
def test_tasks_that_are_coalesced_make_their_own(
    bench: Bench, by_connect: Run, is_wise: bool
) -> None:
    keys = ("a", "b", "c")
    columns = "_partition, n" if is_wise else "n"
    config = {"sql": f"SELECT {columns} FROM r WHERE n > 0", "partition_wise": is_wise}
    works = [
        bench.work(
            "spark.sql",
            config,
            inputs={"r": [bench.publish({"n": [0, place + 1]}, key=key)]},
            key=key,
            batch="one",
            batch_size=len(keys),
        )
        for place, key in enumerate(keys)
    ]
    made = [each.made[0] for each in by_connect(*works)]
    assert [each.partition_key for each in made] == [*keys]
    assert [[row["n"] for row in bench.rows(each)] for each in made] == [[1], [2], [3]]


def leaves(inputs: Any, context: Any) -> Any:
    """A transform that leaves something of each kind."""
    del inputs
    session = context.session
    session.range(3).createOrReplaceTempView("theirs")
    session.sql("CREATE TEMPORARY FUNCTION twice(x INT) RETURNS INT RETURN 2 * x").collect()
    session.udf.register("thrice", lambda x: 3 * x, "int")
    session.sql("DECLARE VARIABLE secret INT DEFAULT 42").collect()
    session.conf.set("spark.sql.shuffle.partitions", "17")
    session.range(11).selectExpr("id + 1 AS more").cache().count()
    session.sql("CACHE TABLE cached AS SELECT id + 2 AS more FROM range(12)").collect()
    SparkSession.builder.getOrCreate().range(1).createOrReplaceTempView("v2")
    return finds(None, context)


def finds(inputs: Any, context: Any) -> Any:
    """A transform that says what there is of that."""
    del inputs
    session = context.session
    attempts: dict[str, Callable[[], Any]] = {
        "view": lambda: session.table("theirs").collect(),
        "function": lambda: session.sql("SELECT twice(1)").collect(),
        "registered function": lambda: session.sql("SELECT thrice(1)").collect(),
        "variable": lambda: session.sql("SELECT secret").collect(),
        "cached view": lambda: session.table("cached").collect(),
        "view by the builder": lambda: session.table("v2").collect(),
    }
    found = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception:  # noqa: BLE001 - it is not there
            continue
        found.append(name)
    facts = {
        "setting": session.conf.get("spark.sql.shuffle.partitions") == "17",
        "cache": session.range(11).selectExpr("id + 1 AS more").storageLevel.useMemory,
        "cache by name": session.sql("SELECT id + 2 AS more FROM range(12)").storageLevel.useMemory,
    }
    found += [name for name, is_there in facts.items() if is_there]
    return session.createDataFrame([(each,) for each in found], "found string")


def shares(inputs: Any, context: Any) -> Any:
    """A transform that would make something for everybody."""
    del inputs
    context.session.range(1).createOrReplaceGlobalTempView("everybodys")


@pytest.mark.timeout(400)
def test_a_task_finds_nothing_that_another_has_left(bench: Bench, by_connect: Run) -> None:
    def found(transform: str) -> set[str]:
        work = bench.work("spark.python", {"transform": f"{HERE}:{transform}"})
        return {row["found"] for row in bench.rows(one(by_connect, work))}

    assert len(found("leaves")) == 9, "what is looked for below can be found"
    assert found("finds") == set()
    with pytest.raises(WorkFailed, match="createOrReplaceGlobalTempView would change what other"):
        by_connect(bench.work("spark.python", {"transform": f"{HERE}:shares"}))
