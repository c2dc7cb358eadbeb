"""How fast pipelines on Spark are, against bare PySpark on the same machine in the same run.

Every figure stands beside its baseline, so compare ratios and not seconds. Each side has a JVM of
its own, with the same settings of Spark, started and used before the clock starts. What is asked
query by query (tpch, join, prune, cluster) is asked of both in turn, so that whatever else the
machine does is the same for both; the rest is one side after the other, and says little on a
machine that is busy. Times of Penstock are the database's: from the first event to the last
partition. Run `make bench`, or `python -m benchmarks.pipeline --help`.

- *flights*: the demo's pipeline for a year, with coalescing, against examples/flights/plain.py.
- *tpch*: five queries of TPC-H at scale factor 1 as `spark.sql` jobs, against the same queries.
- *join*: a join with two expectations, against the same written, read and checked by hand.
- *months*: files of many months that one task divides, and two jobs behind, against `partitionBy`.
- *files*: much that is computed of little, a source of no known size, and a small result that is
  sorted, against the same written by PySpark; times, and into how many files.
- *small*: a thousand small partitions, from the event to the publication, a second.
- *prune*: one month among 84 by its column and by `_partition`, against a layout of Hive's.
- *s3*: two months of flights with the data on an S3 server (SeaweedFS) against a folder, and a
  table that is written, and of which one column in ten is read, cold and warm.
- *cluster*: five queries of TPC-H on a standalone cluster of two workers, over an S3 server
  against bare PySpark over a folder on the same cluster, cold and warm, and writing the tables;
  of two applications a side, in turn, the better time of each query counts. Seconds of CPU, of the
  executors alone, are told as well: they say most where the machine does other work. The keys of
  the bucket are sessions of half a minute, so that they expire and are renewed meanwhile.

Cold is the first time in a session that has started and run something, warm the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.short_sessions import short_sessions
from tests.e2e.spark_cluster import SparkCluster
from tests.integration.minting_place import seaweedfs_place

from benchmarks.bare import BY_MONTH, CHECK, JOINED, SHOPS, UNIQUE, hashed
from benchmarks.bare_side import bare, beside
from benchmarks.parquet_sources import little, trips
from penstock.dispatcher.client import Client
from penstock.installation import Installation
from penstock.kernel.errors import DispatcherUnavailable
from penstock.settings import Settings
from penstock.store.s3.local import LocalS3

ROOT = Path(__file__).resolve().parents[1]
FLIGHTS = ROOT / "examples" / "flights"
TPCH = Path(__file__).resolve().parent / "tpch"
SECTIONS = ("flights", "tpch", "join", "months", "files", "small", "prune", "s3", "cluster")
DAILY = ("raw_flights", "raw_weather", "flights", "observed", "carrier_days", "airport_days")
MONTHLY = ("carrier_months", "airport_months", "carrier_report", "airport_report")
TABLES = ("customer", "lineitem", "nation", "orders", "region", "supplier")
READS = {
    "q1": ("lineitem",),
    "q3": ("customer", "orders", "lineitem"),
    "q5": ("customer", "orders", "lineitem", "supplier", "nation", "region"),
    "q10": ("customer", "orders", "lineitem", "nation"),
    "q18": ("customer", "orders", "lineitem"),
}
FILES = """
jobs:
  begun: {{activation: source, source: {{kind: manual}}, outputs: [begin]}}
  first:
    runtime: spark
    operator: spark.sql
    config: {{sql: "SELECT sum(id) AS total FROM range(1000)"}}
    inputs: [begun.begin]
    outputs: [first]
  ask_hashed: {{activation: source, source: {{kind: manual}}, outputs: [asked_hashed]}}
  hashed:
    runtime: spark
    operator: spark.sql
    config: {{sql: "{hashed}"}}
    inputs: [ask_hashed.asked_hashed]
    outputs: [result_hashed]
  ask_database: {{activation: source, source: {{kind: manual}}, outputs: [asked_database]}}
  database:
    runtime: spark
    operator: spark.python
    config: {{transform: "database:load", parameters: {{rows: {rows}}}}}
    inputs: [ask_database.asked_database]
    outputs: [result_database]
  ask_shops: {{activation: source, source: {{kind: manual}}, outputs: [asked_shops]}}
  shops:
    runtime: spark
    operator: spark.sql
    config: {{sql: "{shops}", sort_by: [shop]}}
    inputs: [ask_shops.asked_shops]
    outputs: [result_shops]
"""
SMALL = """
jobs:
  told: {activation: source, source: {kind: manual}, outputs: [keys]}
  small:
    runtime: spark
    operator: spark.sql
    config: {sql: "SELECT :partition_key AS key, id, id * 2 AS twice FROM range(100)"}
    inputs: [told.keys]
    outputs: [small]
    coalesce: 200
"""
SUMS = """
  sums:
    runtime: spark
    operator: spark.sql
    config:
      sql: "SELECT _partition, count(*) AS ids, sum(twice) AS total FROM small GROUP BY _partition"
      partition_wise: true
    inputs: [small.small]
    outputs: [sums]
    coalesce: 200
"""
MONTHS = """
jobs:
  begun: {{activation: source, source: {{kind: manual}}, outputs: [begin]}}
  first:
    runtime: spark
    operator: spark.sql
    config: {{sql: "SELECT sum(id) AS total FROM range(1000)"}}
    inputs: [begun.begin]
    outputs: [first]
  arrived: {{activation: source, source: {{kind: manual}}, outputs: [files]}}
  load:
    runtime: spark
    operator: spark.sql
    config: {{sql: "SELECT * FROM parquet.`{trips}`"}}
    inputs: [arrived.files]
    outputs: [{{name: trips, partition_by: "date_trunc('month', ts)"}}]
  daily:
    runtime: spark
    operator: spark.sql
    config: {{sql: "{daily}", partition_wise: true}}
    inputs: [load.trips]
    outputs: [daily]
    coalesce: 200
  zones:
    runtime: spark
    operator: spark.sql
    config: {{sql: "{zones}", partition_wise: true}}
    inputs: [load.trips]
    outputs: [zones]
    coalesce: 200
"""
WIDE = """
jobs:
  told: {{activation: source, source: {{kind: manual}}, outputs: [keys]}}
  wide:
    runtime: spark
    operator: spark.sql
    config: {{sql: "SELECT id, {columns} FROM range({rows})"}}
    inputs: [told.keys]
    outputs: [wide]
  ask_one: {{activation: source, source: {{kind: manual}}, outputs: [asked_one]}}
  one:
    runtime: spark
    operator: spark.sql
    config: {{sql: "SELECT sum(c1) AS total FROM wide"}}
    inputs: [ask_one.asked_one, {{from: wide.wide, trigger: false, read: all}}]
    outputs: [result_one]
"""
PRUNE = """
jobs:
  told: {activation: source, source: {kind: manual}, outputs: [keys]}
  sales:
    runtime: spark
    operator: spark.sql
    config:
      sql: "SELECT :partition_key AS month, id, id % 97 AS shop, rand(7) AS paid FROM range(20000)"
    inputs: [told.keys]
    outputs: [sales]
    coalesce: 84
"""
ASKED = """
  ask_{name}: {{activation: source, source: {{kind: manual}}, outputs: [asked_{name}]}}
  {name}:
    runtime: spark
    operator: spark.sql
    config:
      sql: "SELECT shop, count(*) AS n, sum(id) AS ids FROM sales WHERE {where} GROUP BY shop"
    inputs: [ask_{name}.asked_{name}, {{from: sales.sales, trigger: false, read: all}}]
    outputs: [result_{name}]
"""
PRUNED = {
    "column": "month = '2020-05'",
    "partition": "_partition = '2020-05'",
    "all": "month <> 'none'",
}
JOIN = """
jobs:
  told: {{activation: source, source: {{kind: manual}}, outputs: [keys]}}
  facts:
    runtime: spark
    operator: spark.sql
    config: {{sql: "SELECT id, id % 1000 AS shop, rand(7) * 100 AS paid FROM range({rows})"}}
    inputs: [told.keys]
    outputs: [facts]
  shops:
    runtime: spark
    operator: spark.sql
    config: {{sql: "SELECT id AS shop, id % 17 AS region, rand(8) AS rate FROM range(1000)"}}
    inputs: [told.keys]
    outputs: [shops]
  ask_join: {{activation: source, source: {{kind: manual}}, outputs: [asked_join]}}
  join:
    runtime: spark
    operator: spark.sql
    config:
      sql: "{joined}"
      expect: [{{check: "{check}"}}, {{unique: [{unique}]}}]
    inputs: [ask_join.asked_join, {{from: facts.facts, trigger: false, read: all}},
             {{from: shops.shops, trigger: false, read: all}}]
    outputs: [joined]
"""
WAIT_SECONDS_MAX = 1800.0


@dataclass
class Bench:
    """A folder, how much is to be done, and what was measured."""

    folder: Path
    options: argparse.Namespace
    figures: dict[str, Any]

    def tell(self, name: str, value: float, unit: str = "", *, goal: str = "") -> None:
        self.figures[name] = value
        print(f"{name:<62} {value:>10,.2f} {unit:<4} {goal}", flush=True)


# An installation --------------------------------------------------------------------------------


@asynccontextmanager
async def installed(
    folder: Path,
    dag: Path,
    *,
    store: str = "",
    tiny: bool = False,
    archive: bool = True,
    runtimes: str = "",
    **more: Any,
) -> AsyncIterator[Client]:
    """An installation with a DAG in force and a worker that was heard of.

    Without `archive` a host that is idle, while the other side works, does nothing. `runtimes` are
    further lines of its configuration.
    """
    settings = Settings(data=folder, store=store, port=0, internal_port=0, webhook_port=0, **more)
    file = dag.parent / "penstock.toml"
    spark = {"tiny": tiny, "archive": archive}
    lines = (f"{name} = {str(value).lower()}\n" for name, value in spark.items())
    file.write_text("[runtimes.spark]\n" + "".join(lines) + runtimes)
    installation = Installation(settings, code=dag.parent, file=file)
    async with installation, Client(installation.public_url) as client:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with suppress(DispatcherUnavailable):
                if (await client.status()).workers:
                    break
            if (failure := installation.failure()) is not None:
                raise failure
            await asyncio.sleep(0.2)
        await client.apply(dag)
        yield client


async def published(client: Client, expected: Mapping[str, int]) -> datetime:
    """Wait until there are so many partitions; returns when the last of them was published."""
    until = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < until:
        await asyncio.sleep(0.5)
        found = {
            dataset.name: max((each.partitions for each in dataset.generations), default=0)
            for dataset in (await client.datasets()).datasets
        }
        if all(found.get(name, 0) >= count for name, count in expected.items()):
            break
        dead = (await client.tasks(status="dead", limit=1)).tasks
        if dead:
            raise RuntimeError(f"{dead[0].job} {dead[0].partition_key}: {dead[0].reason}")
    else:
        raise TimeoutError(f"not all of {expected} was published")
    times = [
        each.published_at
        for name in expected
        for each in (await client.partitions(name, limit=1000)).partitions
    ]
    return max(times)


async def trigger_all(client: Client, job: str, events: Sequence[Mapping[str, Any]]) -> datetime:
    """Send events, sixteen at a time; returns the database's time before the first."""
    began = (await client.status()).now
    room = asyncio.Semaphore(16)

    async def send(event: Mapping[str, Any]) -> None:
        async with room:
            await client.trigger(job, **event)

    await asyncio.gather(*(send(each) for each in events))
    return began


# Flights ----------------------------------------------------------------------------------------


def event_of(day: date) -> dict[str, Any]:
    """The event of a day, as the demo sends it."""
    start = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())
    key = day.isoformat()
    return {"event_id": key, "partition_key": key, "start": start, "end": start + 86_400}


async def fly(folder: Path, days: int, *, store: str = "") -> float:
    """The demo's pipeline for so many days; seconds."""
    every = [date(2013, 1, 1) + timedelta(days=each) for each in range(days)]
    months = sum((each + timedelta(days=1)).day == 1 for each in every)
    expected = {**dict.fromkeys(DAILY, days), **dict.fromkeys(MONTHLY, months)}
    async with installed(folder, FLIGHTS / "flights.yaml", store=store) as client:
        # As on the other side, the small tables are what the session is used for before the clock.
        began = await trigger_all(client, "register", [{"event_id": "register"}])
        tables = await published(client, {"airlines": 1, "airports": 1, "planes": 1})
        reference_seconds = (tables - began).total_seconds()
        began = await trigger_all(client, "calendar", [event_of(each) for each in every])
        ended = await published(client, expected)
        print(f"  (small tables: {reference_seconds:.1f} s, not counted)")
        return (ended - began).total_seconds()


async def flights(bench: Bench) -> None:
    """A year, with coalescing, against the plain script."""
    days = bench.options.days
    ours = await fly(bench.folder / "flights", days)
    to = bench.folder / "plain"
    theirs = (await bare("flights", "--days", str(days), to=to))["flights"]
    bench.tell(f"flights: {days} days, bare PySpark", theirs, "s")
    bench.tell(f"flights: {days} days, Penstock", ours, "s")
    bench.tell("flights: ratio", ours / theirs, goal="goal: at most 1.3")


def _wide_dag(folder: Path, rows: int) -> Path:
    folder.mkdir()
    dag = folder / "wide.yaml"
    columns = ", ".join(f"rand({each}) AS c{each}" for each in range(1, 10))
    dag.write_text(WIDE.format(rows=rows, columns=columns))
    return dag


async def _wide(folder: Path, rows: int, *, store: str = "") -> dict[str, float]:
    """Write a table, and read a column of it, twice; seconds."""
    async with installed(folder / "data", _wide_dag(folder, rows), store=store) as client:
        # The session has started, and has written one before the clock does.
        await trigger_all(client, "told", [{"event_id": "w", "partition_key": "warm"}])
        await published(client, {"wide": 1})
        seconds = {}
        for turn, name in enumerate(("cold", "warm")):
            event = {"event_id": name, "partition_key": name}
            began = await trigger_all(client, "told", [event])
            ended = await published(client, {"wide": 2 + turn})
            seconds[f"a table written, {name}"] = (ended - began).total_seconds()
        for turn, name in enumerate(("cold", "warm")):
            seconds[f"one column in ten read, {name}"] = await _asked(client, "one", turn)
        return seconds


async def s3(bench: Bench) -> None:
    """Some days, and a table, on a folder and on an S3 server."""
    days, rows = bench.options.s3_days, bench.options.s3_rows
    on_folder = await fly(bench.folder / "on-folder", days)
    near = await _wide(bench.folder / "wide-folder", rows)
    async with LocalS3(bench.folder / "server") as server:
        os.environ["AWS_ACCESS_KEY_ID"] = server.credentials.access_key
        os.environ["AWS_SECRET_ACCESS_KEY"] = server.credentials.secret_key
        on_s3 = await fly(bench.folder / "on-s3", days, store=server.url)
        far = await _wide(bench.folder / "wide-s3", rows, store=server.url)
    bench.tell(f"s3: {days} days of flights, on file://", on_folder, "s")
    bench.tell(f"s3: {days} days of flights, on s3://", on_s3, "s")
    bench.tell("s3: ratio", on_s3 / on_folder, goal="goal: at most 1.5")
    for name in near:
        bench.tell(f"s3: {name}, {rows:,} rows, on file://", near[name], "s")
        bench.tell(f"s3: {name}, {rows:,} rows, on s3://", far[name], "s")
        bench.tell(f"s3: {name}: ratio", far[name] / near[name])


# TPC-H ------------------------------------------------------------------------------------------


def _generate(folder: Path, scale: str) -> None:
    generator = str(Path(sys.executable).parent / "tpchgen-cli")
    command = [generator, "parquet", "-s", scale, f"--output-dir={folder}"]
    subprocess.run(command, check=True, capture_output=True)


def _tpch_dag(folder: Path, data: Path) -> Path:
    """The folder of a DAG that loads the tables, and runs a query when it is asked to."""
    shutil.copytree(TPCH, folder)
    lines = [
        "jobs:",
        "  generated: {activation: source, source: {kind: manual}, outputs: [edition]}",
        "  load:",
        "    runtime: spark",
        "    operator: spark.python",
        f"    config: {{transform: 'tables:load', parameters: {{folder: '{data}'}}}}",
        "    inputs: [generated.edition]",
        f"    outputs: [{', '.join(TABLES)}]",
    ]
    for query, tables in READS.items():
        inputs = [f"{{from: load.{each}, trigger: false}}" for each in tables]
        lines += [
            f"  ask_{query}:",
            f"    {{activation: source, source: {{kind: manual}}, outputs: [asked_{query}]}}",
            f"  {query}:",
            "    runtime: spark",
            "    operator: spark.sql",
            f"    config: {{sql_file: {query}.sql}}",
            f"    inputs: [ask_{query}.asked_{query}, {', '.join(inputs)}]",
            f"    outputs: [result_{query}]",
        ]
    dag = folder / "tpch.yaml"
    dag.write_text("\n".join(lines) + "\n")
    return dag


async def _asked(client: Client, query: str, turn: int) -> float:
    """Run a query once; from the moment that its task was made until it was completed."""
    await client.trigger(f"ask_{query}", event_id=f"{query}-{turn}")
    until = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < until:
        await asyncio.sleep(0.2)
        tasks = (await client.tasks(job=query, limit=100)).tasks
        over = [each for each in tasks if each.settled_at is not None]
        if len(over) == turn + 1:
            last = over[0]
            if last.status != "completed":
                raise RuntimeError(f"{query}: {last.reason}")
            assert last.settled_at is not None
            return (last.settled_at - last.created_at).total_seconds()
    raise TimeoutError(query)


async def tpch(bench: Bench) -> None:
    """Five queries, each after the other and on both sides in turn, cold and warm."""
    data = bench.folder / "tpch-data"
    scale = f"{bench.options.scale:g}"
    await asyncio.to_thread(_generate, data, scale)
    dag = _tpch_dag(bench.folder / "tpch-dag", data)
    ours: dict[tuple[str, int], float] = {}
    theirs: dict[str, float] = {}
    async with installed(bench.folder / "tpch", dag, archive=False) as client:
        await client.trigger("generated", event_id="generated")
        await published(client, dict.fromkeys(TABLES, 1))
        folders = {
            each: urlsplit((await client.partitions(each)).partitions[0].location).path
            for each in TABLES
        }
        turns = ("--turns", str(bench.options.turns))
        async with beside("tpch", *turns, folders=folders, to=bench.folder / "tpch-bare") as side:
            for turn in range(bench.options.turns):
                for query in sorted(READS):
                    ours[query, turn] = await _asked(client, query, turn)
                    theirs |= await side.step()
    for turn, name in ((0, "cold"), (bench.options.turns - 1, "warm")):
        for query in READS:
            bench.tell(f"tpch: {query}, {name}, bare PySpark", theirs[f"{query}-{turn}"], "s")
            bench.tell(f"tpch: {query}, {name}, Penstock", ours[query, turn], "s")
        ratio = sum(ours[query, turn] for query in READS) / sum(
            theirs[f"{query}-{turn}"] for query in READS
        )
        what = f"tpch: five queries, scale {scale}, {name}: ratio"
        bench.tell(what, ratio, goal="goal: at most 1.1" if name == "warm" else "")


async def join(bench: Bench) -> None:
    """A join with two expectations, on both sides in turn; the better of each counts as warm."""
    folder, turns = bench.folder / "join", bench.options.turns
    folder.mkdir()
    dag = folder / "join.yaml"
    query = {"joined": JOINED, "check": CHECK, "unique": UNIQUE}
    dag.write_text(JOIN.format(rows=bench.options.join_rows, **query))
    ours: list[float] = []
    theirs: list[float] = []
    async with installed(folder / "data", dag, archive=False) as client:
        await client.trigger("told", event_id="told")
        await published(client, {"facts": 1, "shops": 1})
        folders = {
            each: urlsplit((await client.partitions(each)).partitions[0].location).path
            for each in ("facts", "shops")
        }
        words = ("join", "--turns", str(turns))
        async with beside(*words, folders=folders, to=folder / "bare") as side:
            for turn in range(turns):
                ours.append(await _asked(client, "join", turn))
                theirs += (await side.step()).values()
    for when, of in (("cold", slice(1)), ("warm", slice(1, None))):
        if not ours[of]:
            continue
        bench.tell(f"join: with two expectations, {when}, bare PySpark", min(theirs[of]), "s")
        bench.tell(f"join: with two expectations, {when}, Penstock", min(ours[of]), "s")
        ratio = min(ours[of]) / min(theirs[of])
        bench.tell(f"join: with two expectations, {when}: ratio", ratio, goal="goal: at most 1.1")


# Months -----------------------------------------------------------------------------------------


async def months(bench: Bench) -> None:
    """One task that makes all months, and two jobs that read each of them, cold and then warm."""
    count, folder = bench.options.months, bench.folder / "months"
    folder.mkdir()
    source = folder / "source"
    await asyncio.to_thread(trips, source, months=count, rows=bench.options.month_rows)
    dag = folder / "months.yaml"
    queries = {
        name: text.format(keys="_partition", trips="trips") for name, text in BY_MONTH.items()
    }
    dag.write_text(MONTHS.format(trips=source, **queries))
    ours: list[float] = []
    loaded: list[float] = []
    async with installed(folder / "data", dag) as client:
        # As on the other side, the session has started and run something before the clock does.
        began = await trigger_all(client, "begun", [{"event_id": "begun"}])
        started = (await _renewed(client, ("first",), 1, began) - began).total_seconds()
        for turn in range(2):
            began = await trigger_all(client, "arrived", [{"event_id": f"t{turn}"}])
            ended = await _renewed(client, ("trips", "daily", "zones"), count, began)
            ours.append((ended - began).total_seconds())
            loaded.append(
                (await _renewed(client, ("trips",), count, began) - began).total_seconds()
            )
    to = folder / "bare"
    theirs = await bare("months", "--source", str(source), to=to)
    bench.tell("months: a session and something small, bare PySpark", theirs["start"], "s")
    bench.tell("months: a session and something small, Penstock", started, "s")
    for turn, name in enumerate(("cold", "warm")):
        bench.tell(f"months: {count} loaded, bare PySpark, {name}", theirs[f"load-{turn}"], "s")
        bench.tell(f"months: {count} loaded, Penstock, {name}", loaded[turn], "s")
        bench.tell(f"months: and two jobs, bare PySpark, {name}", theirs[f"all-{turn}"], "s")
        bench.tell(f"months: and two jobs, Penstock, {name}", ours[turn], "s")
        ratio = ours[turn] / theirs[f"all-{turn}"]
        bench.tell(f"months: ratio, {name}", ratio, goal="goal: at most 1.2")


async def _renewed(
    client: Client, datasets: Sequence[str], count: int, began: datetime
) -> datetime:
    """Wait until all partitions were published since; returns when the last of them was."""
    until = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < until:
        times = [
            each.published_at
            for name in datasets
            for each in (await client.partitions(name, limit=1000)).partitions
        ]
        if len([each for each in times if each >= began]) >= count * len(datasets):
            return max(times)
        dead = (await client.tasks(status="dead", limit=1)).tasks
        if dead:
            raise RuntimeError(f"{dead[0].job} {dead[0].partition_key}: {dead[0].reason}")
        await asyncio.sleep(0.5)
    raise TimeoutError(f"not all of {datasets} was published")


# Files ------------------------------------------------------------------------------------------


async def files(bench: Bench) -> None:
    """Results that are not as large as what was read, cold and then warm."""
    folder, rows = bench.folder / "files", bench.options.file_rows
    folder.mkdir()
    source = folder / "source"
    await asyncio.to_thread(little, source, rows=rows)
    parts = f"parquet.`{source}`"
    shutil.copy(Path(__file__).parent / "database.py", folder)
    dag = folder / "files.yaml"
    dag.write_text(FILES.format(hashed=hashed(parts), shops=SHOPS.format(parts=parts), rows=rows))
    ours: dict[str, float] = {}
    async with installed(folder / "data", dag) as client:
        await trigger_all(client, "begun", [{"event_id": "begun"}])
        await published(client, {"first": 1})
        for turn in range(2):
            for name in ("hashed", "database", "shops"):
                ours[f"{name}-{turn}"] = await _asked(client, name, turn)
        for name in ("hashed", "database", "shops"):
            (made,) = (await client.partitions(f"result_{name}")).partitions
            ours[f"{name}-files"] = made.files or 0
    words = ("--source", str(source), "--rows", str(rows))
    theirs = await bare("files", *words, to=folder / "bare")
    named = {
        "hashed": "much computed of little",
        "database": "a source of no known size",
        "shops": "a small result, sorted",
    }
    for name, what in named.items():
        bench.tell(f"files: {what}, bare PySpark", theirs[f"{name}-files"], "files")
        bench.tell(f"files: {what}, Penstock", ours[f"{name}-files"], "files")
        for turn, when in enumerate(("cold", "warm")):
            bench.tell(f"files: {what}, {when}, bare PySpark", theirs[f"{name}-{turn}"], "s")
            bench.tell(f"files: {what}, {when}, Penstock", ours[f"{name}-{turn}"], "s")
            ratio = ours[f"{name}-{turn}"] / theirs[f"{name}-{turn}"]
            bench.tell(f"files: {what}, {when}: ratio", ratio)


# Small partitions -------------------------------------------------------------------------------


async def small(bench: Bench) -> None:
    """A thousand partitions of a hundred rows, through one job and through two."""
    count = bench.options.partitions
    for name, text in (("one job", SMALL), ("two jobs", SMALL + SUMS)):
        folder = bench.folder / name.replace(" ", "-")
        folder.mkdir()
        dag = folder / "small.yaml"
        dag.write_text(text)
        datasets = ["small"] if text == SMALL else ["small", "sums"]
        async with installed(folder / "data", dag, tiny=True) as client:
            await trigger_all(client, "told", [{"event_id": "w", "partition_key": "warm"}])
            await published(client, dict.fromkeys(datasets, 1))
            events = [
                {"event_id": f"p{each:04}", "partition_key": f"p{each:04}"} for each in range(count)
            ]
            began = await trigger_all(client, "told", events)
            ended = await published(client, dict.fromkeys(datasets, count + 1))
        seconds = (ended - began).total_seconds()
        goal = "goal: at least 40" if text == SMALL else ""
        bench.tell(f"small: {count:,} partitions through {name}", count / seconds, "/s", goal=goal)


# A cluster --------------------------------------------------------------------------------------


KEY_SECONDS = 30
"""How long the keys are good that a cluster reads and writes a bucket with."""


async def _side(*words: str, keys: str) -> str:
    """Run one application to its end, whose keys are to be had there; what it printed last."""
    command = [sys.executable, "-m", "benchmarks.cluster_side", *words]
    plain = {name: said for name, said in os.environ.items() if not name.startswith("AWS_")}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        env={**plain, "AWS_CONTAINER_CREDENTIALS_FULL_URI": keys},
    )
    said, _ = await asyncio.wait_for(process.communicate(), WAIT_SECONDS_MAX)
    if process.returncode:
        raise RuntimeError(f"{words[0]} ended with {process.returncode}")
    return (said.decode().strip().splitlines() or [""])[-1]


def _best(said: Sequence[Mapping[str, Any]], turn: int) -> dict[str, float]:
    """The shortest time of each query."""
    every = [each["seconds"][turn] for each in said]
    return {query: min(each[query] for each in every) for query in every[0]}


async def cluster(bench: Bench) -> None:
    """Five queries over a bucket and over a folder, on the same executors."""
    data = bench.folder / "cluster-data"
    await asyncio.to_thread(_generate, data, f"{bench.options.scale:g}")
    home = bench.folder / "cluster"
    home.mkdir()
    kept = bench.folder / "cluster-server"
    async with SparkCluster(home) as spark, LocalS3(kept, mints=True) as server:
        place = seaweedfs_place(server, kept)
        places = {"file": f"file://{home}/tables", "s3": place.url("tables")}
        loaded: dict[str, float] = {}
        asked: dict[str, list[Any]] = {side: [] for side in places}
        with short_sessions(place, "tables/", seconds=KEY_SECONDS) as sessions:
            for side, to in places.items():
                words = (spark.url, server.url, to, str(data), str(home / side))
                loaded[side] = float(await _side("load", *words, keys=sessions.url))
            # In turn, so that whatever else the machine does is the same for both.
            for side in (*places, *places):
                files = str(home / side)
                said = await _side("ask", spark.url, server.url, files, keys=sessions.url)
                asked[side].append(json.loads(said))
            expired = sum(each.is_over for each in sessions.given)
    if len({json.dumps(each["sums"]) for said in asked.values() for each in said}) > 1:
        raise RuntimeError(f"the results differ: {asked}")
    bench.tell("cluster: keys that expired meanwhile", float(expired))
    bench.tell("cluster: tables written, on file://", loaded["file"], "s")
    bench.tell("cluster: tables written, on s3://", loaded["s3"], "s")
    for turn, name in enumerate(("cold", "warm")):
        theirs, ours = (_best(asked[side], turn) for side in places)
        for query in theirs:
            bench.tell(f"cluster: {query}, {name}, bare PySpark on file://", theirs[query], "s")
            bench.tell(f"cluster: {query}, {name}, s3://", ours[query], "s")
        ratio = sum(ours.values()) / sum(theirs.values())
        bench.tell(f"cluster: five queries, {name}: ratio", ratio, goal="goal: at most 1.3")
        used = {side: min(each["cpu"][turn] for each in asked[side]) for side in places}
        bench.tell(f"cluster: CPU of executors, {name}, bare PySpark on file://", used["file"], "s")
        bench.tell(f"cluster: CPU of executors, {name}, s3://", used["s3"], "s")
        bench.tell(f"cluster: CPU of executors, {name}: ratio", used["s3"] / used["file"])


# One month among many ---------------------------------------------------------------------------


async def prune(bench: Bench) -> None:
    """One month's rows of 84 months, cold and warm; and all rows, which nothing prunes."""
    folder = bench.folder / "prune"
    folder.mkdir()
    dag = folder / "prune.yaml"
    asked = (ASKED.format(name=name, where=where) for name, where in PRUNED.items())
    dag.write_text(PRUNE + "".join(asked))
    months = [f"{2019 + each // 12}-{each % 12 + 1:02}" for each in range(84)]
    ours: dict[tuple[str, int], float] = {}
    theirs: dict[str, float] = {}
    async with installed(folder / "data", dag, archive=False) as client:
        events = [{"event_id": each, "partition_key": each} for each in months]
        await trigger_all(client, "told", events)
        await published(client, {"sales": len(months)})
        folders = {
            each.partition_key: urlsplit(each.location).path
            for each in (await client.partitions("sales", limit=1000)).partitions
        }
        turns = ("--turns", str(bench.options.turns))
        async with beside("prune", *turns, folders=folders, to=bench.folder / "prune-bare") as side:
            for turn in range(bench.options.turns):
                for name in PRUNED:
                    ours[name, turn] = await _asked(client, name, turn)
                    if name != "partition":
                        theirs |= await side.step()
    for turn, when in ((0, "cold"), (bench.options.turns - 1, "warm")):
        for name, figure in (("column", "one"), ("partition", "one"), ("all", "all")):
            layout = theirs[f"{figure}-{turn}"]
            bench.tell(f"prune: by {name}, {when}, bare PySpark on a Hive layout", layout, "s")
            bench.tell(f"prune: by {name}, {when}, Penstock", ours[name, turn], "s")
            bench.tell(f"prune: by {name}, {when}: ratio", ours[name, turn] / layout)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the sections in turn."""
    every = {
        "flights": flights,
        "tpch": tpch,
        "join": join,
        "months": months,
        "files": files,
        "small": small,
        "prune": prune,
        "s3": s3,
        "cluster": cluster,
    }
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        bench = Bench(Path(name), options, {})
        for section in options.sections:
            await every[section](bench)
        return bench.figures


def main() -> None:
    """Measure, print, and perhaps write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("sections", nargs="*", default=SECTIONS, help=", ".join(SECTIONS))
    parser.add_argument("--days", type=int, default=365, help="for flights")
    parser.add_argument("--scale", type=float, default=1, help="for tpch")
    parser.add_argument(
        "--turns", type=int, default=3, help="for tpch, prune and join: the last is warm"
    )
    parser.add_argument("--join-rows", type=int, default=5_000_000, help="for join")
    parser.add_argument("--months", type=int, default=24, help="for months")
    parser.add_argument("--month-rows", type=int, default=200_000, help="for months")
    parser.add_argument("--file-rows", type=int, default=1_000_000, help="for files")
    parser.add_argument("--partitions", type=int, default=1000, help="for small")
    parser.add_argument("--s3-days", type=int, default=59, help="for s3")
    parser.add_argument("--s3-rows", type=int, default=2_000_000, help="for s3")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = asyncio.run(measure(options))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
