"""Every way in and out: files of this machine, a bucket fetched from, one that executors use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.sql import datasource
from pyspark.sql.types import StructType

from penstock.datasets.snapshot import DataFile
from penstock.datasets.transfer import Transfer
from penstock.kernel.entropy import new_id, system_entropy
from penstock.runtimes.spark.access.choosing import Accesses
from penstock.runtimes.spark.access.source import FileReader, TaggedFile
from penstock.store.s3.local import LocalS3
from tests.integration.spark.bench import Bench, part, settings_of
from tests.integration.spark.test_batches import COUNT, WISE, days, made_of, works

CLUSTER = "spark://nowhere:7077"
"""An engine that is told so takes the way of clusters; the session of the tests is local anyway."""


@pytest.fixture
def bucket(local_s3: LocalS3, monkeypatch: pytest.MonkeyPatch) -> str:
    """A root in a bucket of its own, and the keys to it in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", local_s3.credentials.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", local_s3.credentials.secret_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", local_s3.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://penstock/{new_id(system_entropy())}"


def bench_at(spark: Any, bucket: str, tmp_path: Path, **more: Any) -> Bench:
    return Bench(spark, bucket, tmp_path, store_url="s3://penstock", **more)


@pytest.mark.parametrize("master", ["local[2]", CLUSTER])
@pytest.mark.parametrize("arrow_bytes_max", [2**26, 0])
def test_a_bucket_is_read_and_written(
    spark: Any, bucket: str, tmp_path: Path, master: str, arrow_bytes_max: int
) -> None:
    bench = bench_at(spark, bucket, tmp_path, master=master, arrow_bytes_max=arrow_bytes_max)
    parts = [
        bench.publish({"a": [1, 2, 3], "b": ["x", None, "z"]}, key="1"),
        bench.publish({"a": [4]}, key="2"),
    ]
    config = {
        "sql": "SELECT a, b, a > 2 AS big FROM raw WHERE a >= 2",
        "sort_by": ["a"],
        "expect": [{"check": "a > 1"}],
    }
    made = bench.made(bench.work("spark.sql", config, inputs={"raw": parts}))
    assert made.location.startswith(bucket)
    assert bench.rows(made) == [
        {"a": 2, "b": None, "big": False},
        {"a": 3, "b": "z", "big": True},
        {"a": 4, "b": None, "big": True},
    ]
    manifest = bench.manifest(made)
    names = {each.name for each in bench.transfer.list(made.location)}
    assert names == {"manifest.json", *(each.name for each in manifest.files)}
    by_tasks = [each.name.count("-") == 3 for each in manifest.files]
    assert all(by_tasks) == (master == CLUSTER and not arrow_bytes_max)
    for file in manifest.files:
        sent = bench.transfer.sum(f"{made.location}/{file.name}")
        assert (sent.sha256, sent.bytes) == (file.sha256, file.bytes)
    again = bench.work("rollup", {"measures": {"n": "sum(a)"}}, inputs={"raw": [part(made)]})
    assert bench.rows(bench.made(again)) == [{"n": 9}]


@pytest.mark.parametrize("master", ["local[2]", CLUSTER])
def test_batches_work_in_a_bucket(spark: Any, bucket: str, tmp_path: Path, master: str) -> None:
    bench = bench_at(spark, bucket, tmp_path, master=master)
    parts = days(bench, [3, 0, 5])
    counted = made_of(bench, works(bench, "spark.sql", COUNT, parts))
    assert [bench.rows(each)[0]["n"] for each in counted] == [3, 0, 5]
    wise = made_of(bench, works(bench, "spark.sql", WISE, parts))
    assert [sum(row["n"] for row in bench.rows(each)) for each in wise] == [3, 0, 5]
    assert len(bench.told.begun) == 2


def test_equal_files_are_one_in_the_cache_and_two_in_the_result(
    spark: Any, bucket: str, tmp_path: Path
) -> None:
    bench = bench_at(spark, bucket, tmp_path)
    twins = [bench.publish({"k": [1], "v": [1]}, key=key) for key in ("one", "two")]
    both = bench.work("spark.sql", {"sql": "SELECT count(*) AS n FROM raw"}, inputs={"raw": twins})
    assert bench.rows(bench.made(both)) == [{"n": 2}]
    assert len(list((tmp_path / "spark" / "cache").glob("files-*/*.parquet"))) == 1
    wise = made_of(bench, works(bench, "spark.sql", WISE, twins))
    assert [bench.rows(each) for each in wise] == [[{"k": 1, "n": 1}]] * 2


@pytest.mark.parametrize("master", ["local[2]", CLUSTER])
def test_damage_in_a_bucket_is_found(spark: Any, bucket: str, tmp_path: Path, master: str) -> None:
    bench = bench_at(spark, bucket, tmp_path, master=master)
    raw = bench.publish({"a": [1, 2, 3]})
    where = f"{raw.location}/part-00000.parquet"
    bench.transfer.write_bytes(where, bench.transfer.read_bytes(where)[:-1] + b"!")
    work = bench.work("spark.sql", {"sql": "SELECT * FROM raw"}, inputs={"raw": [raw]})
    failure = bench.failure(work)
    assert failure.reason.startswith("The file s3://")
    assert "is not what its manifest says" in failure.reason
    assert not failure.is_retried


def test_a_zombie_in_a_bucket_changes_nothing_that_a_reader_sees(
    spark: Any, bucket: str, tmp_path: Path
) -> None:
    bench = bench_at(spark, bucket, tmp_path, arrow_bytes_max=0)
    raw = bench.publish({"a": [1, 2, 3]})
    zombie, successor = (
        bench.work(
            "spark.sql",
            {"sql": "SELECT a, :by AS by FROM raw", "parameters": {"by": by}},
            inputs={"raw": [raw]},
        )
        for by in ("zombie", "successor")
    )
    published = bench.made(successor)
    before = sorted(each.name for each in bench.transfer.list(published.location))
    late = bench.made(zombie)
    assert late.location != published.location
    assert {row["by"] for row in bench.rows(published)} == {"successor"}
    assert sorted(each.name for each in bench.transfer.list(published.location)) == before


def test_the_way_is_chosen_by_what_is_there_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    transfer = Transfer("file:///")
    loader = SimpleNamespace(getResource=lambda name: "jar" if "s3a" in name else None)
    thread = SimpleNamespace(getContextClassLoader=lambda: loader)
    java = SimpleNamespace(
        lang=SimpleNamespace(Thread=SimpleNamespace(currentThread=lambda: thread))
    )
    with_jars = SimpleNamespace(_jvm=SimpleNamespace(java=java))
    without = SimpleNamespace()
    chosen = [
        type(Accesses(settings_of(tmp_path, master=master), transfer, session).to(where)).__name__
        for master, session, where in [
            ("local[2]", with_jars, "s3://b/x"),
            ("spark://h:7077", with_jars, "s3://b/x"),
            ("spark://h:7077", without, "s3://b/x"),
            ("sc://h", without, "s3://b/x"),
            ("sc://h", without, "file:///x"),
        ]
    ]
    assert chosen == ["Fetched", "S3a", "Remote", "Remote", "Native"]
    assert "data at s3:// is reached through s3a:// for reading" in caplog.text


def test_s3a_reads_the_same_objects_by_their_other_name(tmp_path: Path) -> None:
    from penstock.runtimes.spark.access.base import Slice  # noqa: PLC0415
    from penstock.runtimes.spark.access.remote import S3a  # noqa: PLC0415

    asked: list[str] = []
    reader = SimpleNamespace(parquet=lambda *paths: asked.extend(paths))
    reader.option = reader.schema = lambda *_: reader
    session = Mock(read=reader)
    files = [DataFile(location="s3://bucket/a/part-0.parquet", bytes=1)]
    S3a(Transfer("s3://bucket")).frame(session, [Slice(files=files)], (), None)  # type: ignore[arg-type]
    assert asked == ["s3a://bucket/a/part-0.parquet"]


def test_the_source_reads_what_filters_leave(tmp_path: Path) -> None:
    table = pa.table({"a": list(range(100)), "b": [f"b{each}" for each in range(100)]})
    path = tmp_path / "file.parquet"
    parquet.write_table(table, path, row_group_size=10)
    sent = Transfer("file:///").sum(path.as_uri())
    file = DataFile(location=path.as_uri(), bytes=sent.bytes, sha256=sent.sha256)
    schema = StructType.fromJson(
        {
            "type": "struct",
            "fields": [
                {"name": name, "type": kind, "nullable": True, "metadata": {}}
                for name, kind in [("a", "long"), ("_partition", "string"), ("new", "string")]
            ],
        }
    )
    reader = FileReader(Transfer("file:///"), [TaggedFile(file, "day")], schema)
    filters: list[datasource.Filter] = [
        datasource.GreaterThan(("a",), 90),
        datasource.EqualTo(("_partition",), "day"),
        datasource.IsNotNull(("a",)),
    ]
    assert list(reader.pushFilters(filters)) == filters
    (place,) = reader.partitions()
    rows = [row for batch in reader.read(place) for row in batch.to_pylist()]
    assert [row["a"] for row in rows] == list(range(91, 100))
    assert rows[0] == {"a": 91, "_partition": "day", "new": None}
