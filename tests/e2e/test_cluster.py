"""Spark on a cluster: the pipeline of flights while a worker dies, a bucket, and users' functions.

The cluster knows nothing of Penstock's worker: executors start in folders of their own, and have
neither the user's modules nor keys of the bucket.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import signal
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import botocore.exceptions
import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.cli.demo import pipeline_folder
from penstock.cli.demo.run import DAG, checksums, days_of, differences, read_datasets, stages_of
from penstock.datasets.transfer import Transfer
from penstock.dispatcher.client import Client
from penstock.kernel.entropy import new_id, system_entropy
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import AttemptWork, Merge, Part, ProducedOutput
from penstock.runtimes.spark.runtime import SparkRuntime
from penstock.runtimes.spark.settings import SparkSettings
from penstock.store.s3.local import LocalS3
from penstock.testing.runtime_contract import RecordingReporter
from tests.conftest import Background
from tests.e2e.fleet import CLOCK, until
from tests.e2e.holding_proxy import HoldingProxy
from tests.e2e.short_sessions import short_sessions
from tests.e2e.spark_cluster import SparkCluster
from tests.e2e.spark_fleet import kill_server_in
from tests.e2e.test_up import Up, _below, _up
from tests.integration.minting_place import seaweedfs_place
from tests.integration.spark.bench import Bench, part
from tests.integration.spark.trial import is_running
from tests.sizes import SEED, SIZES

_log = logging.getLogger(__name__)
_log.setLevel(logging.INFO)

DAYS = 2
SECONDS_MAX = 300.0
FIRST, DAY_SECONDS = 1_356_998_400, 86_400
"""The first second of 2013, and how many a day has."""

MODULES = {
    "greeting.py": """
import pyarrow as pa
from pyspark.sql.functions import udf

import words


def greet(inputs, context):
    people = inputs["people"].select("id", udf(words.hello, "string")("name").alias("said"))
    return people.mapInArrow(loud, people.schema)


def loud(batches):
    for batch in batches:
        said = [words.Word(each).loud() for each in batch.column("said").to_pylist()]
        yield pa.RecordBatch.from_arrays([batch.column("id"), pa.array(said)], ["id", "said"])
""",
    "words.py": """
from dataclasses import dataclass

HELLO = "hello"


def hello(name):
    return f"{HELLO} {name or 'you'}"


@dataclass
class Word:
    text: str

    def loud(self):
        return self.text.upper()
""",
}

WHERE = """
import os

from pyspark.sql.functions import udf


def where(inputs, context):
    return inputs["raw"].select("id", udf(lambda: os.environ.get("PACKED"))().alias("packed"))
"""

HELD = """
from pathlib import Path
from threading import Event

from pyspark import TaskContext


def hold(inputs, context):
    folder, batches = Path(context.parameters["folder"]), context.parameters["batches"]

    def held(every):
        for number, batch in enumerate(every):
            yield batch
            if number == batches:
                (folder / f"held-{TaskContext.get().taskAttemptId()}").touch()
                while not (folder / "go").exists():
                    Event().wait(0.05)

    return inputs["raw"].mapInArrow(held, inputs["raw"].schema)
"""
"""A task that stands still when it has read and written a part of its rows, until it may go on."""
ROWS_OF_A_PART, PARTS = 100_000, 4
HELD_AT = 29
"""Batches of 10,000 rows: 19 MB are written by then, parts of them sent, and 6 not yet read."""
IN_SMALL_GROUPS = {
    "spark.hadoop.parquet.block.size": str(2**20),
    # All parts in one task.
    "spark.sql.files.minPartitionNum": "1",
}
"""So that what is written is sent while more is written."""
SESSION_SECONDS = 8

Sums = Mapping[tuple[str, str], tuple[str, ...]]


@pytest.fixture(scope="module")
def cluster(
    background: Background, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkCluster]:
    made = SparkCluster(tmp_path_factory.mktemp("cluster"))
    try:
        background.run(made.start())
        yield made
    finally:
        background.run(made.stop())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_connect", [False, True], ids=["classic", "connect"])
def test_executors_use_a_bucket_and_run_what_users_wrote(
    tmp_path: Path,
    cluster: SparkCluster,
    local_s3: LocalS3,
    monkeypatch: pytest.MonkeyPatch,
    is_connect: bool,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", local_s3.credentials.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", local_s3.credentials.secret_key)
    root = f"s3://penstock/{new_id(system_entropy())}"
    bench = Bench(None, root, tmp_path, store_url=local_s3.url, master=cluster.url)
    code = tmp_path / "code"
    code.mkdir()
    for name, text in MODULES.items():
        (code / name).write_text(text)

    async def test() -> None:
        async with _master(cluster, is_connect=is_connect) as master:
            settings = SparkSettings(
                master=master,
                data=str(tmp_path / "data"),
                store_url=local_s3.url,
                path=(str(code),),
                driver_memory="600m",
                # So that nothing leaves through the driver.
                arrow_bytes_max=0,
                archive=False,
            )
            async with SparkRuntime(settings) as runtime:
                made = await _select(bench, runtime)
                # A name that a task on an executor has given.
                (file,) = bench.manifest(made).files
                assert file.name.count("-") == 3
                await _greet(bench, runtime, made)
                # A disk that all share, and Spark's own writer.
                shared = Bench(None, tmp_path / "root", tmp_path, master=cluster.url)
                await _select(shared, runtime)

    asyncio.run(test())


@pytest.mark.timeout(600)
def test_a_job_brings_its_python_and_gives_its_executors_back(
    tmp_path: Path, cluster: SparkCluster, local_s3: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", local_s3.credentials.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", local_s3.credentials.secret_key)
    root = f"s3://penstock/{new_id(system_entropy())}"
    bench = Bench(None, root, tmp_path, store_url=local_s3.url, master=cluster.url)
    code = tmp_path / "code"
    (code / "bin").mkdir(parents=True)
    (code / "where.py").write_text(WHERE)
    # What a packed environment looks like to Spark.
    python = code / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPACKED="$0" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with tarfile.open(code / "env.tar.gz", "w:gz") as packed:
        packed.add(code / "bin", "bin")
    settings = SparkSettings(
        master=cluster.url,
        data=str(tmp_path / "data"),
        store_url=local_s3.url,
        path=(str(code),),
        driver_memory="600m",
        arrow_bytes_max=0,
        archive=False,
        conf={
            "spark.dynamicAllocation.executorIdleTimeout": "2s",
            "spark.dynamicAllocation.shuffleTracking.timeout": "5s",
        },
    )
    resources = {"python": "env.tar.gz"}

    def running() -> int:
        return sum(int(each["coresused"]) for each in cluster.state()["workers"])

    async def test() -> None:
        async with SparkRuntime(settings) as runtime:
            raw = bench.publish({"id": [1, 2, 3], "name": ["Ada", "a/b", "ü"]}, key=None)
            config = {"transform": "where:where", "sort_by": ["id"]}
            work = bench.work("spark.python", config, inputs={"raw": [raw]}, resources=resources)
            made = bench.rows(await _run(work, runtime))
            assert {row["packed"] for row in made} == {"./penstock_python/bin/python"}
            # By Spark's own writer, with a shuffle, whose files the executors keep.
            sql = {"sql": "SELECT * FROM raw"}
            work = bench.work("spark.sql", sql, inputs={"raw": [raw]}, key=None)
            out = work.outputs["out"]
            many = out.location.replace("/~all/", "/~many/")
            place = replace(out, partition_by="name", location=many)
            divided = (
                await runtime.run(replace(work, outputs={"out": place}), RecordingReporter())
            ).made
            assert [each.partition_key for each in divided] == ["Ada", "a/b", "ü"]
            assert len(cluster.state()["activeapps"]) == 2
            # What they keep of a shuffle holds them for so long, and not until a JVM collects it.
            await until(lambda: not running(), seconds=150)

    asyncio.run(test())


@pytest.mark.proof
@pytest.mark.timeout(1200 * SIZES.faults_of_a_job)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at /proc")
def test_what_dies_in_the_middle_of_a_read_or_an_upload_costs_time_and_no_byte(
    tmp_path: Path, cluster: SparkCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with _stormy(tmp_path, cluster, monkeypatch) as storm, storm.runtime() as runtime:
            calm = await storm.run(storm.work("sorted"), runtime)
            await _lose_the_driver(cluster, runtime, storm.work("sorted"))
            for number, kind in enumerate(KINDS):
                for more in range(SIZES.faults_of_a_job):
                    fault = list(Fault)[(SEED + number + more) % len(Fault)]
                    _log.info("%s: %s", kind, fault)
                    made = await storm.struck(storm.work(kind), runtime, fault)
                    storm.check(made)
                    if kind == "sorted":
                        assert storm.sums(made) == storm.sums(calm)

    asyncio.run(test())


class Fault(StrEnum):
    """What is killed, and when."""

    SERVER_READ = "the S3 server, while a file is read"
    SERVER_UPLOAD = "the S3 server, while a file is uploaded"
    EXECUTORS_READ = "the executors, while a file is read"
    EXECUTORS_UPLOAD = "the executors, while a file is uploaded"

    @property
    def is_read(self) -> bool:
        return self in (Fault.SERVER_READ, Fault.EXECUTORS_READ)

    @property
    def is_of_server(self) -> bool:
        return self in (Fault.SERVER_READ, Fault.SERVER_UPLOAD)


KINDS: Mapping[str, Mapping[str, object]] = {
    "sorted": {"sort_by": ["id"]},
    "divided": {},
    "merged": {},
    "clustered": {"cluster_by": ["id"]},
}
"""Jobs by what becomes of their rows, with what their config says of it."""


@dataclass(slots=True)
class Storm:
    """Rows in a bucket behind a proxy, jobs that bring them to another place, and what dies."""

    folder: Path
    cluster: SparkCluster
    server: LocalS3
    proxy: HoldingProxy
    bench: Bench
    rows: pa.Table
    parts: Sequence[Part]

    def runtime(self) -> SparkRuntime:
        return SparkRuntime(
            SparkSettings(
                master=self.cluster.url,
                data=str(self.folder / "data"),
                store_url=f"s3://penstock?endpoint={self.proxy.endpoint}",
                driver_memory="600m",
                start_seconds=300.0,
                arrow_bytes_max=0,
                archive=False,
            )
        )

    def work(self, kind: str) -> AttemptWork:
        config = {"sql": "SELECT id, noise FROM raw", **KINDS[kind]}
        merge = Merge(key=("id",)) if kind == "merged" else None
        work = self.bench.work("spark.sql", config, inputs={"raw": self.parts}, merge=merge)
        if kind != "divided":
            return work
        out = work.outputs["out"]
        many = out.location.replace("/2013-01-01/", "/~many/")
        place = replace(out, partition_by="if(id % 10 = 0, 'few', 'most')", location=many)
        return replace(work, outputs={"out": place})

    async def run(self, work: AttemptWork, runtime: SparkRuntime) -> Sequence[ProducedOutput]:
        return (await runtime.run(work, RecordingReporter())).made

    async def struck(
        self, work: AttemptWork, runtime: SparkRuntime, fault: Fault
    ) -> Sequence[ProducedOutput]:
        """Run it; it is held in the middle of what the fault is about, and goes on without it."""
        out = re.escape(work.outputs["out"].location.removeprefix("s3:/"))
        held = (
            self.proxy.hold(r"GET /penstock/\S*/part-\d/\S*\.parquet ", number=3)
            if fault.is_read
            else self.proxy.hold(rf"PUT {out}/\S*\.parquet(\?partNumber=2&| )")
        )
        async with asyncio.timeout(2 * SECONDS_MAX), asyncio.TaskGroup() as group:
            running = group.create_task(self.run(work, runtime))
            reached = group.create_task(held.reached.wait())
            await asyncio.wait([running, reached], return_when=asyncio.FIRST_COMPLETED)
            assert reached.done(), "it ended before it was in the middle of that"
            if fault.is_of_server:
                kill_server_in(self.folder)
                await self.server.stop()
                held.released.set()
                await self.server.start()
            else:
                executors = self.cluster.executors()
                assert executors
                for each in executors:
                    os.kill(each, signal.SIGKILL)
                held.released.set()
        return running.result()

    def check(self, every: Sequence[ProducedOutput]) -> None:
        """All rows are there, in files that are what their manifest says, and beside no other."""
        assert _table(self.bench, *every) == self.rows
        keys = [each.partition_key for each in every]
        assert keys in (["2013-01-01"], ["few", "most"])
        for made in every:
            there = {each.name for each in self.bench.transfer.list(made.location)}
            named = {each.name for each in self.bench.manifest(made).files}
            assert there == {"manifest.json", *named}

    def sums(self, every: Sequence[ProducedOutput]) -> list[str]:
        return [file.sha256 for each in every for file in self.bench.manifest(each).files]


@asynccontextmanager
async def _stormy(
    folder: Path, cluster: SparkCluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Storm]:
    # Spark and the worker wait for it a minute at most, and it takes seconds to start.
    server = LocalS3(folder / "s3")
    async with server, HoldingProxy(int(server.endpoint.rpartition(":")[2])) as proxy:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.credentials.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.credentials.secret_key)
        where = "s3://penstock/storm"
        bench = Bench(None, where, folder, store_url=server.url, master=cluster.url)
        rows = dict(list(_raw_rows().items())[:3])
        parts = [bench.publish(some, key=key) for key, some in rows.items()]
        whole = pa.concat_tables(map(pa.table, rows.values())).combine_chunks()
        yield Storm(folder, cluster, server, proxy, bench, whole, parts)


@pytest.mark.timeout(600)
def test_keys_that_expire_while_an_executor_reads_and_uploads_are_renewed(
    tmp_path: Path, cluster: SparkCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LocalS3(tmp_path / "s3", mints=True)
    code = tmp_path / "code"
    code.mkdir()
    (code / "held.py").write_text(HELD)
    config = {
        "transform": "held:hold",
        "parameters": {"folder": str(tmp_path), "batches": HELD_AT},
    }

    async def test() -> None:
        async with server:
            place = seaweedfs_place(server, tmp_path / "s3")
            where = place.url("data")
            owner = Bench(None, where, tmp_path, store_url=server.url, master=cluster.url)
            owner.transfer = Transfer(server.url, server.credentials, environment={})
            rows = _raw_rows()
            parts = [owner.publish(some, key=key) for key, some in rows.items()]
            with short_sessions(place, "data/", seconds=SESSION_SECONDS) as sessions:
                for name in [each for each in os.environ if each.startswith("AWS_")]:
                    monkeypatch.delenv(name)
                monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", sessions.url)
                settings = SparkSettings(
                    master=cluster.url,
                    data=str(tmp_path / "data"),
                    store_url=server.url,
                    path=(str(code),),
                    driver_memory="600m",
                    arrow_bytes_max=0,
                    archive=False,
                    conf=IN_SMALL_GROUPS,
                )

                async def expire() -> None:
                    await until(lambda: any(tmp_path.glob("held-*")), seconds=SECONDS_MAX)
                    uploads = place.client().list_multipart_uploads(Bucket=place.bucket)
                    assert len(uploads["Uploads"]) == 1
                    # Whatever the executor signs with has been given before.
                    given = list(sessions.given)
                    await until(lambda: all(each.is_over for each in given), seconds=60)
                    with pytest.raises(botocore.exceptions.ClientError):
                        sessions.client(given[-1]).list_objects_v2(Bucket=place.bucket)
                    (tmp_path / "go").touch()

                async with SparkRuntime(settings) as runtime:
                    work = owner.work("spark.python", config, inputs={"raw": parts})
                    made, _ = await asyncio.gather(_run(work, runtime), expire())
            assert _table(owner, made) == pa.concat_tables(map(pa.table, rows.values()))

    asyncio.run(test())
    # It was not done by another attempt of the task.
    assert len(list(tmp_path.glob("held-*"))) == 1


def _raw_rows() -> dict[str, Mapping[str, object]]:
    """Rows that no compression makes smaller, by part."""
    found: dict[str, Mapping[str, object]] = {}
    for number in range(PARTS):
        noise = hashlib.shake_256(str(number).encode()).digest(64 * ROWS_OF_A_PART)
        ids = range(number * ROWS_OF_A_PART, (number + 1) * ROWS_OF_A_PART)
        texts = [noise[64 * place : 64 * (place + 1)] for place in range(ROWS_OF_A_PART)]
        found[f"part-{number}"] = {"id": list(ids), "noise": texts}
    return found


def _table(bench: Bench, *made: ProducedOutput) -> pa.Table:
    """What was made, by `id`."""
    tables = []
    for each in made:
        for file in bench.manifest(each).files:
            sent = bench.transfer.sum(f"{each.location}/{file.name}")
            assert (sent.bytes, sent.sha256) == (file.bytes, file.sha256)
            with bench.transfer.open(f"{each.location}/{file.name}") as opened:
                tables.append(parquet.ParquetFile(opened).read(columns=["id", "noise"]))
    return pa.concat_tables(tables).sort_by("id").combine_chunks()


async def _lose_the_driver(cluster: SparkCluster, runtime: SparkRuntime, work: AttemptWork) -> None:
    """Kill the driver of a job whose tasks its executors have, which find that out later."""
    ear = RecordingReporter()
    executors = cluster.executors()
    (driver,) = runtime.jvms

    async def kill() -> None:
        await until(lambda: any(each.get("tasks") for each in ear.said), seconds=150)
        os.kill(driver, signal.SIGKILL)

    async def fail() -> None:
        with pytest.raises(WorkFailed, match="JVM of Spark was killed") as caught:
            await runtime.run(work, ear)
        assert caught.value.is_retried

    with cluster.frozen(executors):
        await asyncio.gather(fail(), kill())
    await until(lambda: not any(map(is_running, executors)), seconds=150)


async def _select(bench: Bench, runtime: SparkRuntime) -> ProducedOutput:
    raw = bench.publish({"id": [1, 2, 3], "name": ["Ada", "Bo", None]})
    query = {"sql": "SELECT id, name FROM raw WHERE id > 1", "sort_by": ["id"]}
    made = await _run(bench.work("spark.sql", query, inputs={"raw": [raw]}), runtime)
    assert bench.rows(made) == [{"id": 2, "name": "Bo"}, {"id": 3, "name": None}]
    return made


async def _greet(bench: Bench, runtime: SparkRuntime, people: ProducedOutput) -> None:
    config = {"transform": "greeting:greet", "sort_by": ["id"]}
    work = bench.work("spark.python", config, inputs={"people": [part(people)]})
    said = bench.rows(await _run(work, runtime))
    assert said == [{"id": 2, "said": "HELLO BO"}, {"id": 3, "said": "HELLO YOU"}]


async def _run(work: AttemptWork, runtime: SparkRuntime) -> ProducedOutput:
    (made,) = (await runtime.run(work, RecordingReporter())).made
    return made


@asynccontextmanager
async def _master(cluster: SparkCluster, *, is_connect: bool) -> AsyncIterator[str]:
    if not is_connect:
        yield cluster.url
        return
    async with cluster.connect_server() as address:
        yield address


@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at /proc")
def test_a_cluster_that_loses_a_worker_publishes_the_same_bytes(
    tmp_path: Path, background: Background, cluster: SparkCluster
) -> None:
    def lose_a_worker() -> None:
        cluster.kill_worker()
        background.run(cluster.until_workers(1))

    before = cluster.state()
    known = len(before["completedapps"]) + len(before["activeapps"])
    there = _flown(tmp_path / "there", cluster.url, lose_a_worker)
    state = cluster.state()
    # There was one application more, which has said goodbye.
    assert (len(state["completedapps"]), state["activeapps"]) == (known + 1, [])
    here = _flown(tmp_path / "here", "local[2]", lambda: None)
    assert len(here) == sum(each.partitions for each in stages_of(DAYS))
    assert not differences(here, there)


def _flown(folder: Path, spark: str, midway: Callable[[], None]) -> Sums:
    """Run the pipeline for some days; what it has published."""
    folder.mkdir()
    with _up(folder, str(pipeline_folder() / DAG), "--spark", spark) as up:
        try:
            found = asyncio.run(_fly(up, midway))
        except BaseException as error:
            error.add_note(up.logs())
            raise
        below = _below(up.process.pid)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(90) == 0, up.said.read_text()
        asyncio.run(until(lambda: not any(map(is_running, below)), seconds=20))
    return found


async def _fly(up: Up, midway: Callable[[], None]) -> Sums:
    async with Client(up.url) as client:
        await client.trigger("register", event_id="register")
        await _until_published(client, "planes")
        *early, late = range(DAYS)
        for day in early:
            await _tell_of(client, day)
        # Some of these days is done, and the rest of them runs.
        await _until_published(client, "raw_flights")
        await asyncio.to_thread(midway)
        await _tell_of(client, late)
        await client.wait(timeout_seconds=SECONDS_MAX)
        tasks = (await client.tasks(limit=1000)).tasks
        assert {each.status for each in tasks} == {"completed"}, tasks
        datasets = await read_datasets(client, [each.dataset for each in stages_of(DAYS)])
        return checksums(datasets)


async def _tell_of(client: Client, day: int) -> None:
    key, start = days_of(DAYS)[day].isoformat(), FIRST + day * DAY_SECONDS
    await client.trigger(
        "calendar", event_id=key, partition_key=key, start=start, end=start + DAY_SECONDS
    )


async def _until_published(client: Client, dataset: str) -> None:
    deadline = CLOCK.monotonic() + SECONDS_MAX
    while not (await client.partitions(dataset)).partitions:
        dead = (await client.tasks(status="dead")).tasks
        assert not dead, dead
        assert CLOCK.monotonic() < deadline, f"nothing of {dataset} was published"
        await CLOCK.sleep(0.1)
