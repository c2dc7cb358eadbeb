"""Every way in and out: files of this machine, a bucket fetched from, one that executors use."""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from awscrt.exceptions import AwsCrtError
from py4j.protocol import Py4JJavaError
from pyarrow import parquet
from pyspark.sql import DataFrame, datasource
from pyspark.sql.types import StructType

from penstock.datasets import buckets
from penstock.datasets.layout import part as path_part
from penstock.datasets.snapshot import DataFile
from penstock.datasets.transfer import Transfer
from penstock.kernel.entropy import new_id, system_entropy
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.access import object_store
from penstock.runtimes.spark.access.base import FileSlice, PathReader, WriteTarget
from penstock.runtimes.spark.access.choosing import AccessSelector
from penstock.runtimes.spark.access.object_store import (
    BucketAccess,
    BucketCredentials,
    S3aAccess,
    registry_of,
)
from penstock.runtimes.spark.access.remote import FileReader, RemoteAccess, TaggedFile
from penstock.store.s3.local import LocalS3
from tests.integration.spark.bench import Bench, part, settings_of
from tests.integration.spark.test_batches import COUNT, WISE, days, made_of, works
from tests.integration.spark.test_partition_by import work_of

ALIAS = "penstock://renewed"
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
    assert all(by_tasks) == (not arrow_bytes_max)
    for file in manifest.files:
        sent = bench.transfer.sum(f"{made.location}/{file.name}")
        assert (sent.sha256, sent.bytes) == (file.sha256, file.bytes)
    again = bench.work("rollup", {"measures": {"n": "sum(a)"}}, inputs={"raw": [part(made)]})
    assert bench.rows(bench.made(again)) == [{"n": 9}]


@pytest.mark.parametrize("master", ["local[2]", CLUSTER])
def test_what_is_clustered_is_staged_in_the_bucket_and_nothing_of_that_stays(
    spark: Any, bucket: str, tmp_path: Path, master: str
) -> None:
    bench = bench_at(spark, bucket, tmp_path, master=master, arrow_bytes_max=0)
    raw = bench.publish({"a": [3, 1, 2], "b": ["x", None, "z"]})
    config = {"sql": "SELECT * FROM raw", "cluster_by": ["a"], "expect": [{"unique": ["a"]}]}
    work = bench.work("spark.sql", config, inputs={"raw": [raw]})
    made = bench.made(work)
    assert [row["a"] for row in bench.rows(made)] == [1, 2, 3]
    names = {each.name for each in bench.transfer.list(made.location)}
    assert names == {"manifest.json", *(each.name for each in bench.manifest(made).files)}
    assert not list(bench.transfer.list(f"{work.scratch}"))


@pytest.mark.parametrize("master", ["local[2]", CLUSTER])
def test_batches_work_in_a_bucket(spark: Any, bucket: str, tmp_path: Path, master: str) -> None:
    bench = bench_at(spark, bucket, tmp_path, master=master)
    parts = days(bench, [3, 0, 5])
    counted = made_of(bench, works(bench, "spark.sql", COUNT, parts))
    assert [bench.rows(each)[0]["n"] for each in counted] == [3, 0, 5]
    wise = made_of(bench, works(bench, "spark.sql", WISE, parts))
    assert [sum(row["n"] for row in bench.rows(each)) for each in wise] == [3, 0, 5]
    assert len(bench.told.begun) == 2


def test_much_is_read_in_parts_and_not_fetched(
    spark: Any, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_at(spark, bucket, tmp_path)
    parts = days(bench, [3, 5])
    monkeypatch.setattr(object_store, "WHOLE_BYTES_MAX", 0)
    wise = works(bench, "spark.sql", WISE, parts)
    assert [sum(row["n"] for row in bench.rows(each)) for each in made_of(bench, wise)] == [3, 5]
    assert not list((tmp_path / "spark").glob("cache/files-*/*.parquet"))


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


def test_a_damaged_page_is_found_where_files_are_too_large_to_be_compared(
    spark: Any, bucket: str, tmp_path: Path
) -> None:
    bench = bench_at(spark, bucket, tmp_path, master=CLUSTER)
    raw = bench.publish({"a": list(range(400_000))})
    where = f"{raw.location}/part-00000.parquet"
    body = bytearray(bench.transfer.read_bytes(where))
    assert len(body) > 2**20
    body[len(body) // 2] ^= 1
    bench.transfer.write_bytes(where, bytes(body))
    work = bench.work("spark.sql", {"sql": "SELECT sum(a) AS a FROM raw"}, inputs={"raw": [raw]})
    failure = bench.failure(work)
    assert failure.reason.startswith(f"The file {where} is damaged: a page")
    assert not failure.is_retried


def test_another_object_in_the_place_of_a_large_one_is_found(
    spark: Any, bucket: str, tmp_path: Path
) -> None:
    bench = bench_at(spark, bucket, tmp_path, master=CLUSTER)
    raw, other = (bench.publish({"a": list(range(many))}) for many in (400_000, 400_001))
    body = bench.transfer.read_bytes(f"{other.location}/part-00000.parquet")
    bench.transfer.write_bytes(f"{raw.location}/part-00000.parquet", body)
    work = bench.work("spark.sql", {"sql": "SELECT sum(a) AS a FROM raw"}, inputs={"raw": [raw]})
    failure = bench.failure(work)
    assert f"it has {len(body)} bytes, and should have" in failure.reason
    assert not failure.is_retried


def test_spark_writes_objects_in_parts_by_partition_with_their_sums(
    spark: Any, bucket: str, tmp_path: Path
) -> None:
    transfer = Transfer("s3://penstock")
    access = BucketAccess(transfer, spark)
    before = spark.conf.get("spark.sql.sources.commitProtocolClass")
    rows = 700_000
    frame = spark.range(0, rows, 1, 2).selectExpr(
        "id", "sha2(string(id), 256) AS text", "if(id % 1000 = 0, 'a/b', 'ü=%') AS half"
    )
    location = f"{bucket}/a b%3D#?/[x]"
    files = access.committed(spark, frame.write.partitionBy("half"), location)
    assert sum(each.rows or 0 for each in files) == rows
    # One was sent in parts, and its last bytes were held back until its footer was known.
    assert max(each.bytes for each in files) > 2 * 8 * 2**20
    assert {each.name.rpartition("/")[0] for each in files} == {"a~2Fb", "~C3~BC=~25"}
    found = {each.name: each.bytes for each in transfer.list(location)}
    assert found == {each.name: each.bytes for each in files}
    for each in files:
        sent = transfer.sum(f"{location}/{each.name}")
        assert (sent.bytes, sent.sha256) == (each.bytes, each.sha256)
        with transfer.open(f"{location}/{each.name}") as opened:
            footer = parquet.ParquetFile(opened).metadata
            assert footer.num_rows == each.rows
    assert spark.conf.get("spark.sql.sources.commitProtocolClass") == before
    wanted = [
        DataFile(location=f"{location}/{each.name}", bytes=each.bytes, sha256=each.sha256)
        for each in files
    ]
    with ExitStack() as held:
        read = access.frame(spark, [FileSlice(files=wanted)], None, held)
        assert read.selectExpr("count(text)", "sum(id)").collect() == [
            (rows, rows * (rows - 1) // 2)
        ]


KEYS = [
    *(
        "a/b",
        "ü",
        "a b=%",
        "~many",
        "..",
        "a..b",
        ".hidden",
        "%2F",
        "=",
        " x ",
        "k=v",
        "'\"#?*:[]{}^\\",
    ),
    *("\u2028", "\U0001f600", "long " * 16, "ß" * 40, "x" * 80, "__HIVE_DEFAULT_PARTITION__"),
]
"""Keys that somebody on the way could take for something else."""


@pytest.mark.parametrize("way", ["CachedBucketAccess", "BucketAccess", "RemoteAccess"])
def test_keys_divide_alike_on_every_way_to_a_bucket(
    spark: Any, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    master = "local[2]" if way == "CachedBucketAccess" else CLUSTER
    bench = bench_at(spark, bucket, tmp_path, master=master)
    raw = bench.publish({"key": KEYS * 2, "n": list(range(2 * len(KEYS)))}, key=None)
    if way == "RemoteAccess":
        monkeypatch.setattr(bench.engine._accesses, "to", lambda _: RemoteAccess(bench.transfer))
    elif way == "BucketAccess":
        # Nothing of ours is in the Python of executors, where there is any.
        monkeypatch.setattr(DataFrame, "mapInArrow", Mock(side_effect=AssertionError))
    assert type(bench.engine._accesses.to(bucket)).__name__ == way
    work = work_of(bench, raw, "key")
    made = bench.finished(work).made
    assert {each.partition_key: sorted(row["n"] for row in bench.rows(each)) for each in made} == {
        key: [place, place + len(KEYS)] for place, key in enumerate(KEYS)
    }
    base = work.outputs["out"].location
    there = {f"{base}/{each.name}" for each in bench.transfer.list(base)}
    named = set()
    for each in made:
        assert each.partition_key is not None
        assert each.location == f"{base}/{path_part(each.partition_key)}"
        named.add(f"{each.location}/manifest.json")
        for file in bench.manifest(each).files:
            named.add(f"{each.location}/{file.name}")
            sent = bench.transfer.sum(f"{each.location}/{file.name}")
            assert (sent.sha256, sent.bytes) == (file.sha256, file.bytes)
            rows = [row["n"] for row in bench.rows(each)]
            assert (file.bounds["n"].low, file.bounds["n"].high) == (min(rows), max(rows))
    assert there == named


ODD = """
SELECT id, id AS `a.b`, id AS `c``d`, struct(id AS `e.f`) AS `g h`,
       if(id = 1, parse_json('{"a": 1}'), NULL) AS v, array(parse_json('2'), NULL) AS w,
       if(id = 1, 'one', 'other') AS key
FROM VALUES (1), (2) AS t(id)
"""


@pytest.mark.parametrize("is_divided", [False, True])
def test_executors_write_odd_names_and_variants_that_are_null_from_python(
    spark: Any, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_divided: bool
) -> None:
    bench = bench_at(spark, bucket, tmp_path, master=CLUSTER, arrow_bytes_max=0)
    monkeypatch.setattr(bench.engine._accesses, "to", lambda _: RemoteAccess(bench.transfer))
    work = bench.work("spark.sql", {"sql": ODD})
    if is_divided:
        place = replace(work.outputs["out"], partition_by="key")
        work = replace(work, outputs={"out": place})
    parts = [part(each) for each in bench.finished(work).made]
    query = """
    SELECT `a.b`, `c``d`, `g h`.`e.f`, to_json(v) AS v, to_json(w[0]) AS w, w[1] IS NULL AS n
    FROM raw WHERE `c``d` > 0 ORDER BY `a.b`
    """
    again = bench.work("spark.sql", {"sql": query, "sort_by": ["a.b"]}, inputs={"raw": parts})
    assert [tuple(row.values()) for row in bench.rows(bench.made(again))] == [
        (1, 1, 1, '{"a":1}', "2", True),
        (2, 2, 2, None, "2", True),
    ]


def test_an_interval_of_months_is_refused_where_python_writes(
    spark: Any, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_at(spark, bucket, tmp_path, master=CLUSTER, arrow_bytes_max=0)
    monkeypatch.setattr(bench.engine._accesses, "to", lambda _: RemoteAccess(bench.transfer))
    days = bench.work("spark.sql", {"sql": "SELECT INTERVAL '1 02:03:04' DAY TO SECOND AS i"})
    assert bench.made(days).facts
    months = bench.work("spark.sql", {"sql": "SELECT INTERVAL '1-2' YEAR TO MONTH AS i"})
    failure = bench.failure(months)
    assert failure.reason.startswith("The column 'i' is interval year to month, and with Connect")
    assert not failure.is_retried


def test_a_write_that_fails_leaves_no_file_and_commits_none(
    spark: Any, bucket: str, tmp_path: Path
) -> None:
    transfer = Transfer("s3://penstock")
    access = BucketAccess(transfer, spark)
    frame = spark.range(0, 1000, 1, 2).selectExpr(
        "if(id < 900, id, raise_error('enough')) AS id", "1 AS one"
    )
    location = f"{bucket}/failed"
    with pytest.raises(Exception, match="enough"):
        access.write(frame, WriteTarget(location=location, staging=location, file_bytes=2**27))
    # The half that did not fail may have been written, and was told to nobody.
    assert [each for each in transfer.list(location) if "part-00001" in each.name] == []
    empty = access.write(
        frame.limit(0), WriteTarget(location=location, staging="", file_bytes=2**27)
    )
    assert empty == ()


def test_keys_are_in_no_plan_and_no_setting(
    spark: Any, bucket: str, local_s3: LocalS3, tmp_path: Path
) -> None:
    bench = bench_at(spark, bucket, tmp_path, master=CLUSTER)
    raw = bench.publish({"a": [1]})
    file = f"{raw.location}/part-00000.parquet"
    sent = bench.transfer.sum(file)
    with ExitStack() as held:
        access = BucketAccess(bench.transfer, spark)
        files = [DataFile(location=file, bytes=sent.bytes, sha256=sent.sha256)]
        frame = access.frame(spark, [FileSlice(files=files)], None, held)
        plan = frame._jdf.queryExecution().toString()
        assert frame.count() == 1
    assert "penstock://" in plan
    conf = spark.sparkContext.getConf().toDebugString()
    said = conf + spark._jsc.hadoopConfiguration().getPropsWithPrefix("").toString()
    assert "fs.penstock.impl" in said
    for secret in (local_s3.credentials.secret_key, local_s3.credentials.access_key):
        assert secret not in plan + said


def test_keys_that_are_no_longer_good_are_asked_for_again(
    spark: Any, bucket: str, local_s3: LocalS3
) -> None:
    Transfer("s3://penstock").write_bytes(f"{bucket}/file", b"five!")
    given = local_s3.credentials

    def tell(access_key: str, secret_key: str) -> None:
        # Another name for the bucket, of which nothing is known yet.
        registry_of(spark).reach(
            "renewed", local_s3.endpoint, "/penstock", "us-east-1", "", access_key, secret_key, ""
        )

    path = spark._jvm.org.apache.hadoop.fs.Path(f"{bucket}/file".replace("s3://penstock", ALIAS))
    files = path.getFileSystem(spark._jsc.hadoopConfiguration())
    tell("gone", "no-longer-a-secret")
    with pytest.raises(Py4JJavaError, match=r"refused with status 403 \(InvalidAccessKeyId\)"):
        files.getFileStatus(path)
    # Those that it has are a moment old, and would be used for a minute.
    tell(given.access_key, given.secret_key)
    assert files.getFileStatus(path).getLen() == 5


def test_keys_that_are_renewed_are_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter(["first", "second"])
    told: list[str] = []
    said = "the service that gives keys is away"
    away = [ConnectionResetError(said), AwsCrtError(1, "AWS_AUTH", said)]
    over = threading.Event()

    def provider() -> dict[str, Any]:
        if told == ["first"] and away:
            raise away.pop()
        return {"access_key_id": next(found, "last"), "secret_access_key": "-", "token": None}

    def reach(*said: str) -> None:
        told.append(said[5])
        if said[5] == "last":
            over.set()
            raise ConnectionError("the JVM has ended")

    monkeypatch.setattr(buckets, "Provider", lambda given: provider)
    transfer = Transfer("s3://bucket", environment={"AWS_REGION": "us-east-1"})
    BucketCredentials(transfer, SimpleNamespace(reach=reach), again_seconds=0.01).tell("bucket")
    assert over.wait(30)
    assert told == ["first", "second", "last"]


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


@pytest.mark.parametrize("name", ["_a.parquet", ".a.parquet", "a._COPYING_"])
def test_a_file_that_spark_would_leave_out_is_refused(name: str) -> None:
    with pytest.raises(WorkFailed, match=f"leave out file:///x/{name}"):
        PathReader().frame(Mock(), [("file:///x/b.parquet", ""), (f"file:///x/{name}", "")], None)


def test_the_way_is_chosen_by_what_is_there_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    transfer = Transfer("file:///")
    without = SimpleNamespace()

    def with_jars(*has: str) -> Any:
        session = Mock()
        loader = session._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        loader.getResource = lambda name: "jar" if any(each in name for each in has) else None
        return session

    def chosen(master: str, session: Any, where: str, *, s3a: bool = False) -> str:
        settings = settings_of(tmp_path, master=master, s3a=s3a)
        return type(AccessSelector(settings, transfer, session).to(where)).__name__

    both = with_jars("s3a", "penstock")
    assert chosen("local[2]", both, "s3://b/x") == "CachedBucketAccess"
    assert chosen("spark://h:7077", both, "s3://b/x") == "BucketAccess"
    assert "data at s3:// is reached through penstock://" in caplog.text
    assert chosen("spark://h:7077", both, "s3://b/x", s3a=True) == "S3aAccess"
    assert "data at s3:// is reached through s3a:// for reading" in caplog.text
    assert chosen("spark://h:7077", with_jars("s3a"), "s3://b/x") == "RemoteAccess"
    assert chosen("spark://h:7077", without, "s3://b/x") == "RemoteAccess"
    assert chosen("sc://h", without, "s3://b/x") == "RemoteAccess"
    assert chosen("sc://h", without, "file:///x") == "FolderAccess"
    for master, session in [("spark://h:7077", with_jars("penstock")), ("sc://h", without)]:
        with pytest.raises(WorkFailed, match="ask for s3a, and its driver has no"):
            chosen(master, session, "s3://b/x", s3a=True)


def test_s3a_reads_the_same_objects_by_their_other_name(tmp_path: Path) -> None:
    asked: list[str] = []
    said: dict[str, str] = {}
    reader = SimpleNamespace(parquet=lambda *paths: asked.extend(paths))
    reader.option = reader.schema = lambda *_: reader

    def options(**given: str) -> Any:
        said.update(given)
        return reader

    reader.options = options
    session = Mock(read=reader)
    files = [DataFile(location="s3://bucket/a/part-0.parquet", bytes=1)]
    S3aAccess(Transfer("s3://bucket"), session).frame(
        session, [FileSlice(files=files)], (), ExitStack()
    )
    assert asked == ["s3a://bucket/a/part-0.parquet"]
    assert said == {"parquet.page.verify-checksum.enabled": "true"}


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


@pytest.mark.parametrize("kind", ["float", "double"])
def test_a_pushed_filter_keeps_what_spark_takes_for_greater_than_all(
    tmp_path: Path, kind: str
) -> None:
    arrow = pa.float32() if kind == "float" else pa.float64()
    path = tmp_path / "file.parquet"
    parquet.write_table(pa.table({"x": pa.array([1.0, math.nan, 9.0], arrow)}), path)
    sent = Transfer("file:///").sum(path.as_uri())
    file = DataFile(location=path.as_uri(), bytes=sent.bytes, sha256=sent.sha256)
    field = {"name": "x", "type": kind, "nullable": True, "metadata": {}}
    schema = StructType.fromJson({"type": "struct", "fields": [field]})
    for pushed in (
        datasource.GreaterThan(("x",), 5.0),
        datasource.EqualTo(("x",), math.nan),
        datasource.GreaterThanOrEqual(("x",), math.nan),
    ):
        reader = FileReader(Transfer("file:///"), [TaggedFile(file, None)], schema)
        assert list(reader.pushFilters([pushed])) == [pushed]
        rows = [
            row["x"]
            for place in reader.partitions()
            for batch in reader.read(place)
            for row in batch.to_pylist()
        ]
        assert any(map(math.isnan, rows)), pushed
