"""How fast datasets are as tables: snapshots, loading, planning, and what publishing pays for them.

A dataset of so many partitions, each with a manifest of one file, in a Postgres of its own and a
store in memory whose requests are counted: what a bucket adds is its time for each. Times are
medians, beside the CPU of this process and the statements that were sent to Postgres.

- *publishing*: partitions that are replaced, with the log of publications and without it.
- *at once*: publishers that replace partitions of one table at a time, ten of them each, while
  snapshots are made: what they have lost, and what is shown in another order than it was published.
- *a snapshot* after one publication: seconds, and objects that are written for it.
- *loading* the table, and *planning* a scan of one partition and of a span of thirty, over HTTP;
  also by the first who does it after a publication, for whom the snapshot is made.
- *one by one*: a partition that is replaced, its snapshot and its manifests, and then the next;
  beside it *PyIceberg*, where it is installed, that commits as many to a table of as many files and
  partitions in its own catalog in SQLite: partitions that are new, and such that are replaced.
- *a sink*: rows a second of batches of JSON lines in the store to a published file, appended and
  merged by a key, beside pyarrow alone that reads the same lines and writes the same rows.

Run `python -m benchmarks.tables --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psycopg
from tests.integration.dispatcher.api.stage import parts_of
from tests.integration.dispatcher.world import World

from penstock.datasets.manifest import File, Manifest, digest, encode
from penstock.datasets.schema import Column
from penstock.dispatcher.api.catalog_endpoints import CatalogApplication
from penstock.dispatcher.catalog.metadata_writer import MetadataWriter
from penstock.dispatcher.catalog.scan_planner import ScanPlanner
from penstock.dispatcher.catalog.snapshots import Snapshots
from penstock.dispatcher.catalog.tables import Tables
from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.dispatcher.database.migrations import migrate
from penstock.dispatcher.database.pool import Connection, Database
from penstock.protocol.events import BATCH_BYTES_MAX
from penstock.runtimes.base import AttemptWork, Merge, WorkOutput
from penstock.runtimes.sink import OPERATOR, SinkRuntime, SinkSettings
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.opening import open_store
from penstock.testing.runtime_contract import RecordingReporter

NAME = "totals"
GENERATION = "11111111-1111-4111-8111-111111111111"
ROOT = "s3://bench/root"
ATTEMPT = "0123456789abcdefghijklmn"
COLUMNS = '[{"name": "x", "type": "bigint"}, {"name": "day", "type": "date"}]'


FIGURES: dict[str, float] = {}


def tell(name: str, value: float, unit: str) -> None:
    FIGURES[name] = value
    print(f"{name:<58} {value:>12,.1f} {unit}", flush=True)


def manifest(partition: str, task: int) -> bytes:
    """What a task says of the one file that it has made of a partition."""
    sha = hashlib.sha256(partition.encode()).hexdigest()
    return encode(
        Manifest(
            dataset=NAME,
            generation=GENERATION,
            job=NAME,
            task_id=task,
            attempt=1,
            partition_key=partition,
            rows=1000,
            bytes=20_000,
            columns=(Column("x", "bigint"), Column("day", "date")),
            files=(File(name="part-0.parquet", rows=1000, bytes=20_000, sha256=sha),),
        )
    )


class Bench:
    """A dataset and its catalog."""

    def __init__(self, database: Database, store: Any, root: str, partitions: int) -> None:
        self.database = database
        self.store = store
        self.root = root
        self.keys = [f"p-{number:06}" for number in range(partitions)]
        self.tables = Tables(database, root=root, snapshots=Snapshots(database, pace_seconds=0))
        self.writer = MetadataWriter(database, store, self.tables, ScanPlanner(database, store))
        self.dataset = ""
        self.task = 0

    async def ask(self, statement: str, *values: object) -> list[dict[str, Any]]:
        async def work(connection: Connection) -> list[dict[str, Any]]:
            found = await connection.execute(statement.encode(), values)
            return await found.fetchall() if found.description else []

        return await self.database.transact(work)

    async def begin(self) -> None:
        """Publish all partitions."""
        (row,) = await self.ask("INSERT INTO dataset (name) VALUES (%s) RETURNING id::text", NAME)
        self.dataset = row["id"]
        await self.ask(
            "INSERT INTO generation (dataset_id, version, state, lineage)"
            " VALUES (%s, %s, 'current', 'x')",
            self.dataset,
            GENERATION,
        )
        await self.ask(
            "INSERT INTO generation_schema (dataset_id, version, columns) VALUES (%s, %s, %s)",
            *(self.dataset, GENERATION, COLUMNS),
        )
        gate = asyncio.Semaphore(32)

        async def wrote(key: str) -> tuple[str, str]:
            async with gate:
                return await self.wrote(key, 1)

        made = await asyncio.gather(*(wrote(key) for key in self.keys))
        self.task = 1
        await self.ask(
            "INSERT INTO publication (dataset_id, generation, partition_key, mode, task_id,"
            " attempt, location, manifest, files, rows, bytes)"
            " SELECT %s, %s, said.key, 'replace', 1, 1, said.location, said.manifest, 1, 1000,"
            " 20000 FROM unnest(%s::text[], %s::text[], %s::text[])"
            " AS said(key, location, manifest)",
            *(self.dataset, GENERATION, self.keys),
            *([each[0] for each in made], [each[1] for each in made]),
        )

    async def wrote(self, key: str, task: int) -> tuple[str, str]:
        """Write the manifest of a partition; returns where, and its sum."""
        folder = f"datasets/{NAME}/{GENERATION}/{key}/{task}-1-{ATTEMPT}"
        body = manifest(key, task)
        await self.store.put(f"{folder}/manifest.json", body)
        return f"{self.root}/{folder}", digest(body)

    async def replace(self, key: str) -> None:
        """Write a partition and publish it again."""
        self.task += 1
        await self.move(key, *await self.wrote(key, self.task))

    async def move(self, key: str, location: str, sha: str) -> None:
        self.task += 1
        await self.ask(
            "UPDATE publication SET task_id = %s, location = %s, manifest = %s,"
            " revision = revision + 1 WHERE dataset_id = %s AND partition_key = %s"
            # The later task wins.
            " AND task_id < %s",
            *(self.task, location, sha, self.dataset, key, self.task),
        )


async def seconds(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


class Spent:
    """What doing something took, each time: seconds, of CPU too, statements and objects written."""

    sent = 0
    """Statements of this process."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._found: list[tuple[float, ...]] = []

    def _now(self) -> tuple[float, ...]:
        return time.perf_counter(), time.process_time(), Spent.sent, requests(self._store)

    async def on(self, work: Callable[[], Awaitable[object]]) -> None:
        before = self._now()
        await work()
        self._found.append(tuple(now - then for now, then in zip(self._now(), before, strict=True)))

    def tell(self, name: str) -> None:
        wall, cpu, statements, puts = zip(*self._found, strict=True)
        tell(f"{name}: time", 1000 * statistics.median(wall), "ms")
        tell(f"{name}: CPU", 1000 * statistics.median(cpu), "ms")
        tell(f"{name}: statements, at most", max(statements), "")
        tell(f"{name}: objects written, at most", max(puts), "")


def count_statements() -> None:
    execute = psycopg.AsyncConnection.execute

    async def counted(self: Any, *asked: Any, **more: Any) -> Any:
        Spent.sent += 1
        return await execute(self, *asked, **more)

    psycopg.AsyncConnection.execute = counted  # type: ignore[method-assign]


async def publishing(bench: Bench, times: int) -> None:
    async def replaced() -> None:
        for key in bench.keys[:times]:
            await bench.move(key, f"{bench.root}/{bench.task}", "0")

    rates: dict[str, list[float]] = {"ENABLE": [], "DISABLE": []}
    for _ in range(5):
        for word, found in rates.items():
            await bench.ask(f"ALTER TABLE publication {word} TRIGGER publication_moved_logged")
            found.append(times / await seconds(replaced))
    logged, bare = (statistics.median(rates[word]) for word in ("ENABLE", "DISABLE"))
    tell("publishing: transactions a second, with the log", logged, "/s")
    tell("publishing: without it", bare, "/s")


async def at_once(bench: Bench, publishers: int) -> None:
    few = bench.keys[: max(1, publishers // 10)]
    keys = [few[number % len(few)] for number in range(publishers)]
    is_over = asyncio.Event()

    async def snapshotting() -> int:
        made = 0
        while not is_over.is_set():
            made += len(await bench.tables.snapshots.make(bench.dataset))
            await asyncio.sleep(0.05)
        return made

    maker = asyncio.create_task(snapshotting())
    took = await seconds(lambda: asyncio.gather(*(bench.replace(key) for key in keys)))
    is_over.set()
    made = await maker
    await bench.tables.snapshots.make(bench.dataset)
    (row,) = await bench.ask(
        "SELECT count(*) AS lost FROM publication FULL JOIN ("
        "  SELECT partition_key, location FROM table_part WHERE gone IS NULL) AS shown"
        " USING (partition_key, location)"
        " WHERE publication.dataset_id IS NULL OR shown.location IS NULL"
    )
    tell(f"at once: {publishers} publishers, publications a second", publishers / took, "/s")
    tell("at once: snapshots made meanwhile", made, "")
    tell("at once: publications that the last snapshot lacks", row["lost"], "")
    # From one part of a partition to the next there is no snapshot without one or with two.
    (row,) = await bench.ask(
        "SELECT count(*) AS wrong FROM ("
        "  SELECT task_id, gone, lead(task_id) OVER moves AS next_task,"
        "         lead(came) OVER moves AS next_came"
        "  FROM table_part WINDOW moves AS (PARTITION BY partition_key ORDER BY came)) AS shown"
        " WHERE next_task <= task_id OR gone IS DISTINCT FROM next_came"
    )
    tell("at once: parts that are shown in another order, or not one at a time", row["wrong"], "")


async def snapshots(bench: Bench, times: int) -> None:
    first = await seconds(lambda: bench.tables.snapshots.make(bench.dataset))
    tell("the snapshot before: seconds", first, "s")
    took = await seconds(partial(bench.writer.written, NAME, is_waited=False))
    tell("writing all manifests: seconds", took, "s")
    making, writing = Spent(bench.store), Spent(bench.store)
    every = 0.0
    for number in range(times):
        key = bench.keys[number * len(bench.keys) // times]
        every += await seconds(partial(bench.replace, key))
        began = time.perf_counter()
        await making.on(lambda: bench.tables.snapshots.make(bench.dataset))
        await writing.on(partial(bench.writer.written, NAME, is_waited=False))
        every += time.perf_counter() - began
    making.tell("a snapshot after one publication")
    writing.tell("its manifests")
    tell("one by one: publications with all that", times / every, "/s")


def requests(store: Any) -> int:
    """How many objects were written."""
    meter: Meter = store.meter
    return meter.requests(kind=Kind.PUT)


async def reading(bench: Bench, times: int) -> None:
    world = World("", bench.database, None)  # type: ignore[arg-type]
    parts = parts_of(world, store=bench.store, root=bench.root)
    parts.tables.snapshots = bench.tables.snapshots
    transport = httpx.ASGITransport(CatalogApplication(parts))
    path = f"/iceberg/v1/namespaces/penstock/tables/{NAME}"
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        loading, planning, spanning = (Spent(bench.store) for _ in range(3))
        for number in range(times):

            async def loaded() -> None:
                answer = await client.get(path)
                assert answer.json()["metadata"]["snapshots"], answer.text

            await loading.on(loaded)
            key = bench.keys[number * 7919 % len(bench.keys)]
            wanted = {"type": "eq", "term": "partition_key", "value": key}

            async def planned(wanted: object = wanted) -> None:
                answer = await client.post(f"{path}/plan", json={"filter": wanted})
                assert len(answer.json()["file-scan-tasks"]) == 1, answer.text

            await planning.on(planned)
            first = number * len(bench.keys) // times
            some = bench.keys[first : first + 30]
            least = {"type": "gt-eq", "term": "partition_key", "value": some[0]}
            most = {**least, "type": "lt-eq", "value": some[-1]}
            both = {"type": "and", "left": least, "right": most}

            async def spanned(wanted: object = both, count: int = len(some)) -> None:
                answer = await client.post(f"{path}/plan", json={"filter": wanted})
                assert len(answer.json()["file-scan-tasks"]) == count, answer.text

            await spanning.on(spanned)
        await changing(bench, client, path, times)
    loading.tell("loading the table")
    planning.tell("planning a scan of one partition")
    spanning.tell("planning a scan of a span of thirty")


async def changing(bench: Bench, client: httpx.AsyncClient, path: str, times: int) -> None:
    """What the first reader waits for after a publication: the snapshot is made for it."""
    loading, planning = Spent(bench.store), Spent(bench.store)
    last = 0
    for number in range(times):
        key = bench.keys[number * 6007 % len(bench.keys)]
        await bench.replace(key)
        made: list[int] = []

        async def loaded(made: list[int] = made) -> None:
            answer = await client.get(path)
            made.append(answer.json()["metadata"]["current-snapshot-id"])

        await loading.on(loaded)
        assert made[0] > last, "the answer has what was published"
        last = made[0]
        await bench.replace(key)
        wanted = {"type": "eq", "term": "partition_key", "value": key}

        async def planned(made: list[int] = made, wanted: object = wanted) -> None:
            answer = await client.post(f"{path}/plan", json={"filter": wanted})
            assert len(answer.json()["file-scan-tasks"]) == 1, answer.text
            made.append(int(answer.json()["plan-id"]))

        await planning.on(planned)
        assert made[1] > last, "the plan is of what was published"
    loading.tell("loading the table after a publication")
    planning.tell("planning a scan of one partition after a publication")


def beside(folder: Path, partitions: int, times: int) -> None:
    """PyIceberg, which commits one file after the other to a table of as many of its own."""
    if find_spec("pyiceberg") is None or find_spec("sqlalchemy") is None:
        print("PyIceberg and SQLAlchemy are not installed: nothing to compare with.")
        return
    pa, pq = import_module("pyarrow"), import_module("pyarrow.parquet")
    types = import_module("pyiceberg.types")
    specs = import_module("pyiceberg.partitioning")
    equals = import_module("pyiceberg.expressions").EqualTo
    schema = import_module("pyiceberg.schema").Schema(
        types.NestedField(1, "key", types.StringType(), required=False),
        types.NestedField(2, "x", types.LongType(), required=False),
    )
    identity = import_module("pyiceberg.transforms").IdentityTransform()
    spec = specs.PartitionSpec(specs.PartitionField(1, 1000, identity, "key"))
    made = import_module("pyiceberg.catalog.sql").SqlCatalog
    catalog = made("peer", uri=f"sqlite:///{folder}/peer.db", warehouse=f"file://{folder}")
    catalog.create_namespace("bench")
    table = catalog.create_table("bench.totals", schema=schema, partition_spec=spec)

    def wrote(key: str, number: int) -> str:
        path = f"{folder}/peer-{key}-{number}.parquet"
        rows = {"key": pa.array([key]), "x": pa.array([number], pa.int64())}
        pq.write_table(pa.table(rows), path)
        return path

    keys = [f"p-{number:06}" for number in range(partitions)]
    table.add_files([wrote(key, 0) for key in keys], check_duplicate_files=False)
    every = [keys[number * len(keys) // times] for number in range(times)]
    ready = [[wrote(f"q-{number:06}", 1)] for number in range(times)]
    began, used = time.perf_counter(), time.process_time()
    for paths in ready:
        table.add_files(paths, check_duplicate_files=False)
    _tell_peer("adds", times, time.perf_counter() - began, time.process_time() - used)
    ready = [[wrote(key, 2)] for key in every]
    began, used = time.perf_counter(), time.process_time()
    for key, paths in zip(every, ready, strict=True):
        with table.transaction() as changes:
            changes.delete(equals("key", key))
            changes.add_files(paths, check_duplicate_files=False)
    _tell_peer("replaces", times, time.perf_counter() - began, time.process_time() - used)


def _tell_peer(what: str, times: int, took: float, used: float) -> None:
    tell(f"one by one: partitions that PyIceberg {what}", times / took, "/s")
    tell(f"one by one: its CPU for each that it {what}", 1000 * used / times, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast datasets are as tables.")
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--publishers", type=int, default=1000)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--sink-rows", type=int, default=200_000)
    parser.add_argument("--only-sinks", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-sinks-") as name:
        asyncio.run(sinks(Path(name), asked.sink_rows))
    if not asked.only_sinks:
        asyncio.run(measure(asked))


async def sinks(folder: Path, rows: int) -> None:
    """What a task of a sink takes for so many rows, and pyarrow alone for the same."""
    lines = [
        b'{"id":"row-%d","sensor":"s%d","level":"warning","value":%d.5}' % (n, n % 97, n)
        for n in range(rows)
    ]
    some = BATCH_BYTES_MAX // (len(lines[-1]) + 1)
    bodies = [b"\n".join(lines[at : at + some]) for at in range(0, rows, some)]
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    read = import_module("pyarrow.json").read_json
    began, cpu = time.perf_counter(), time.process_time()
    tables = [read(arrow.BufferReader(body)) for body in bodies]
    parquet.write_table(arrow.concat_tables(tables), folder / "bare.parquet", compression="zstd")
    tell("a sink: pyarrow alone", rows / (time.perf_counter() - began), "rows/s")
    tell("a sink: pyarrow alone, CPU of 100,000", 1e5 / rows * (time.process_time() - cpu), "s")
    batches = []
    for number, body in enumerate(bodies, start=1):
        path = folder / f"batch-{number}"
        path.write_bytes(body)
        sha256 = hashlib.sha256(body).hexdigest()
        said = {"sequence": number, "batch": str(number), "task": 1, "format": "jsonl"}
        batches.append({**said, "location": path.as_uri(), "sha256": sha256})
    columns = [["id", "string"], ["sensor", "string"], ["level", "string"], ["value", "double"]]
    outputs = {"output": "rows", "rejected": "aside"}
    for what, merge in (("appends", None), ("merges", Merge(key=("id",)))):
        work = AttemptWork(
            task_id=1,
            attempt=1,
            job="sink",
            operator=OPERATOR,
            generation=GENERATION,
            config={"expect": {"id": {"required": True}, "value": {"min": 0}}},
            payload={"buffer": {**outputs, "columns": columns, "batches": batches}},
            outputs={
                each: WorkOutput(dataset=each, uuid=each, location=(folder / what / each).as_uri())
                for each in outputs.values()
            },
            merge=merge,
        )
        async with SinkRuntime(SinkSettings(store_url=f"{folder.as_uri()}?fsync=off")) as runtime:
            began = time.perf_counter()
            done = await runtime.run(work, RecordingReporter())
            tell(f"a sink that {what}", rows / (time.perf_counter() - began), "rows/s")
            assert done.metrics["rows"] == rows


async def measure(asked: argparse.Namespace) -> dict[str, float]:
    count_statements()
    with tempfile.TemporaryDirectory(prefix="penstock-tables-") as name:
        folder = Path(name)
        async with LocalPostgres(folder / "postgres") as postgres:
            await migrate(postgres.dsn)
            store = MeteredStore(await open_store("memory://tables"), Meter())
            async with Database(postgres.dsn, connections_max=20) as database:
                bench = Bench(database, store, ROOT, asked.partitions)
                await bench.begin()
                await snapshots(bench, asked.times)
                await reading(bench, asked.times)
                await at_once(bench, asked.publishers)
                await publishing(bench, 10 * asked.times)
            await store.close()
        beside(folder, asked.partitions, asked.times)
    return FIGURES


if __name__ == "__main__":
    main()
