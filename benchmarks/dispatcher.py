"""How fast the dispatcher is, on a Postgres of its own and over HTTP, and how that scales.

Every figure stands beside a baseline of the same run: how many transactions a second this Postgres
commits that insert one row, one after the other and eight at once. So a slow machine shows in both.
The dispatcher is a process of its own, started with the installed command; so are its workers where
they talk HTTP. Run `make bench`, or `python -m benchmarks.dispatcher --help`.

- *routing*: partition events into a DAG of five jobs, set-based: tasks a second.
- *wake-ups*: events at a steady rate; from the answer to the event until the wake-up is heard.
- *http*: claim and complete over HTTP, eight workers: tasks a second.
- *history*: the same, of partitions that were published before, with the log of publications that
  snapshots are made of and without it, round by round in turn.
- *many*: a task that publishes ten thousand partitions at once, and what others wait meanwhile.
- *backfill*: a million partitions planned, and claiming while they drain against claiming without.
- *curve*: claim and complete with more and more finished tasks in the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
from psycopg.rows import dict_row

from penstock.dispatcher.dag.parser import parse
from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.dispatcher.database.migrations import migrate
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.deployment import Deployer
from penstock.dispatcher.router import Router, route_events
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.kernel.ports import free_port
from penstock.protocol.base import WORKER_HEADER
from penstock.protocol.identity import Identities
from penstock.runtimes.base import AttemptPaths
from penstock.settings import Settings, variables_of

SECRET = "the secret of a benchmark"
FIVE_JOBS = """
jobs:
  ingest: {activation: source, source: {kind: manual}, outputs: [hours]}
  clean: {runtime: process, operator: bench:clean, inputs: [ingest.hours], outputs: [sales]}
  totals: {runtime: process, operator: bench:totals, inputs: [clean.sales], outputs: [totals]}
  outliers: {runtime: process, operator: bench:outliers, inputs: [clean.sales], outputs: [odd]}
  report: {runtime: process, operator: bench:report, inputs: [totals.totals], outputs: [report]}
"""
FAN_OUT = """
jobs:
  ingest: {activation: source, source: {kind: manual}, outputs: [hours]}
  a: {runtime: process, operator: bench:a, inputs: [ingest.hours], outputs: [a]}
  b: {runtime: process, operator: bench:b, inputs: [ingest.hours], outputs: [b]}
  c: {runtime: process, operator: bench:c, inputs: [ingest.hours], outputs: [c]}
  d: {runtime: process, operator: bench:d, inputs: [ingest.hours], outputs: [d]}
"""


@dataclass
class Bench:
    """A Postgres, perhaps a dispatcher, and what was measured."""

    folder: Path
    postgres: LocalPostgres
    figures: dict[str, Any]

    def tell(self, name: str, value: float | str, unit: str = "") -> None:
        self.figures[name] = value
        shown = f"{value:,.1f}" if isinstance(value, float) else f"{value}"
        print(f"{name:<58} {shown:>12} {unit}", flush=True)

    async def database(self, name: str) -> str:
        """The address of a new database with our schema."""
        async with await psycopg.AsyncConnection.connect(
            self.postgres.dsn, autocommit=True
        ) as connection:
            await connection.execute(f"CREATE DATABASE {name}".encode())
        dsn = self.postgres.dsn.replace("dbname=penstock", f"dbname={name}")
        await migrate(dsn)
        return dsn


# The baseline -----------------------------------------------------------------------------------


async def baseline(bench: Bench) -> None:
    """Transactions that insert one row."""
    async with await psycopg.AsyncConnection.connect(bench.postgres.dsn) as connection:
        await connection.execute("CREATE TABLE IF NOT EXISTS baseline (said text)")
        await connection.commit()
    for writers in (1, 8):
        counts = await asyncio.gather(*(_insert(bench.postgres.dsn, 3.0) for _ in range(writers)))
        bench.tell(f"baseline: commits of one row, {writers} at once", sum(counts) / 3.0, "/s")


async def _insert(dsn: str, seconds: float) -> int:
    count, until = 0, time.monotonic() + seconds
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        while time.monotonic() < until:
            await connection.execute("INSERT INTO baseline VALUES ('x')")
            await connection.commit()
            count += 1
    return count


# Routing ----------------------------------------------------------------------------------------


async def routing(bench: Bench, *, events: int) -> None:
    """Accept and route events into a DAG of five jobs, and run it to its end set by set."""
    dsn = await bench.database("routing")
    async with Database(dsn, connections_max=10) as database:
        await Deployer(database).apply(parse(FAN_OUT, where="bench"), FAN_OUT)
        async with dispatcher_over(bench, dsn) as urls, _client(urls[1]) as client:
            began = time.monotonic()
            for first in range(0, events, 1000):
                some = range(first, min(events, first + 1000))
                await _post(client, "/internal/events", {"events": [_event(n) for n in some]})
            accepted = time.monotonic() - began
            await _until(dsn, f"SELECT count(*) >= {4 * events} AS holds FROM task")
            took = time.monotonic() - began
    bench.tell("routing: events accepted over HTTP, in calls of 1,000", events / accepted, "/s")
    bench.tell(f"routing: tasks made of {events:,} events, 5 jobs", 4 * events / took, "/s")


def _event(number: int) -> dict[str, object]:
    return {"event_id": f"e{number}", "dataset": "hours", "partition_key": f"p{number}"}


# Wake-ups ---------------------------------------------------------------------------------------

NOTED = """
    CREATE TABLE noted (seconds double precision);
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO noted VALUES (extract(epoch FROM clock_timestamp() - OLD.created_at));
        RETURN OLD;
    END $$;
    CREATE TRIGGER note BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION note();
"""


async def wakeups(bench: Bench, *, per_second: int, seconds: float) -> None:
    """From the beginning of the transaction that writes a wake-up until it is noted as sent."""
    dsn = await bench.database("wakeups")
    async with Database(dsn, connections_max=10) as database:
        await Deployer(database).apply(parse(FIVE_JOBS, where="bench"), FIVE_JOBS)
        for statement in NOTED.split(";\n    CREATE"):
            text = statement if statement.lstrip().startswith("CREATE") else f"CREATE{statement}"
            await _query(database, text)
    async with dispatcher_over(bench, dsn) as urls, _client(urls[1]) as client:
        began = time.monotonic()
        for number in range(int(per_second * seconds)):
            await asyncio.sleep(max(0.0, began + number / per_second - time.monotonic()))
            await _post(client, "/internal/events", {"events": [_event(number)]})
        sent = time.monotonic() - began
        await _until(dsn, "SELECT count(*) = 0 AS holds FROM outbox")
    rows = await _all(dsn, "SELECT seconds FROM noted ORDER BY seconds")
    took = [1000 * float(row["seconds"]) for row in rows]
    bench.tell("wake-ups: events sent one by one", per_second * seconds / sent, "/s")
    for share in (50, 99):
        value = statistics.quantiles(took, n=100)[share - 1]
        bench.tell(f"wake-ups: commit to wake-up, p{share}", value, "ms")


# HTTP -------------------------------------------------------------------------------------------


async def http(bench: Bench, *, tasks: int, workers: int, batch: int) -> None:
    """Claim and complete over HTTP."""
    dsn = await bench.database(f"http{batch}")
    async with Database(dsn, connections_max=10) as database:
        await _queued(database, tasks)
        async with dispatcher_over(bench, dsn) as urls:
            before = _cpu(f"http{batch}")
            took = await _drained(urls[1], workers=workers, batch=batch)
            after = _cpu(f"http{batch}")
    name = f"http: claim + complete, {workers} workers, {batch} at a time"
    bench.tell(name, tasks / took, "tasks/s")
    # Wall time on a machine that does other things says little; this does.
    for who, seconds in after.items():
        bench.tell(f"{name}: CPU of {who}", 1000 * (seconds - before[who]) / tasks, "ms a task")


def _cpu(database: str) -> dict[str, float]:
    """The CPU seconds of our dispatcher, of the connections of a database, and of ourselves."""
    found = {"the dispatcher": 0.0, "Postgres": 0.0, "the clients": 0.0}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(os.getpid()) and "penstock dispatcher" in words:
                found["the dispatcher"] += _busy(place)
            elif words.startswith("postgres: ") and f" {database} " in words:
                found["Postgres"] += _busy(place)
            elif place.name == str(os.getpid()):
                found["the clients"] += _busy(place)
    return found


def _busy(process: Path) -> float:
    """The seconds that the threads of a process have run, finer than by ticks."""
    threads = process.glob("task/*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


async def _drained(url: str, *, workers: int, batch: int) -> float:
    """How long it takes until nothing is left to claim."""

    async def one(number: int) -> None:
        async with _client(url, name=f"worker-{number}") as client:
            while True:
                # As workers do: an answer that is lost is asked for again.
                claim_id = os.urandom(12).hex()
                ask = {"operator": "bench:clean", "limit": batch, "claim_id": claim_id}
                found = (await _post(client, "/internal/task-claim", ask))["tasks"]
                if not found:
                    return
                ends = [_end(each) for each in found]
                await _post(client, "/v1/task/complete", {"tasks": ends})

    began = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(workers)))
    return time.monotonic() - began


def _end(task: dict[str, Any]) -> dict[str, Any]:
    location = AttemptPaths(task["root"]).output(
        "sales",
        generation=task["generation"],
        payload=task["payload"],
        attempt_id=task["folder"],
    )
    output = {
        "dataset": task["definition"]["datasets"]["sales"],
        "location": location,
        "partition_key": task["payload"]["partition_key"],
    }
    return {
        "task_id": task["task_id"],
        "attempt": task["attempt"],
        "lease_token": task["lease_token"],
        "token": task["token"],
        "outputs": [output],
    }


async def _queued(database: Database, tasks: int, *, first: int = 0, told: str = "") -> None:
    """Tasks of the first job, through events; `told` differs where partitions come again."""
    dag = FIVE_JOBS.partition("  totals:")[0]
    await Deployer(database).apply(parse(dag, where="bench"), dag)
    (row,) = await _query(
        database,
        "SELECT dataset_id::text AS dataset, version::text AS generation FROM generation"
        " JOIN dataset ON dataset.id = dataset_id WHERE dataset.name = 'hours'",
    )
    dedupe = f"source:{told}{first}-"
    values = (row["dataset"], row["generation"], dedupe, first, first + tasks - 1)
    await _query(
        database,
        "INSERT INTO event (dataset_id, generation, partition_key, dedupe)"
        " SELECT %s, %s, 'p' || n, %s || n FROM generate_series(%s::bigint, %s::bigint) AS n",
        *values,
    )
    router = Router(database)
    while (await router.route(limit=10_000)).routed:
        pass


# The log of publications -------------------------------------------------------------------------

HISTORY_TASKS = 128
"""In a round."""
LOGGED = ("publication_put_logged", "publication_moved_logged", "publication_left_logged")


async def history(bench: Bench, *, pairs: int) -> None:
    """Claim and complete over HTTP, with and without the triggers that write the log.

    In turn, a few tasks at a time: what else the machine does is then beside both alike.
    """
    dsn = await bench.database("history")
    figures: dict[str, list[float]] = {
        "claim + complete, ms a task": [],
        "CPU of Postgres, ms a task": [],
        "CPU of Postgres and the dispatcher, ms a task": [],
    }
    async with Database(dsn, connections_max=10) as database, dispatcher_over(bench, dsn) as urls:
        # So each round replaces what another has published: of that the log has two rows.
        for number in range(2 + 2 * pairs):
            verb = "ENABLE" if number % 4 in (0, 3) else "DISABLE"
            changes = ", ".join(f"{verb} TRIGGER {each}" for each in LOGGED)
            await _query(database, f"ALTER TABLE publication {changes}")
            await _queued(database, HISTORY_TASKS, told=f"{number}-")
            before = _cpu("history")
            took = await _drained(urls[1], workers=2, batch=16)
            spent = {who: seconds - before[who] for who, seconds in _cpu("history").items()}
            both = spent["Postgres"] + spent["the dispatcher"]
            for found, value in zip(figures.values(), (took, spent["Postgres"], both), strict=True):
                found.append(1000 * value / HISTORY_TASKS)
    for name, found in figures.items():
        what, _, unit = name.partition(", ")
        # The first two have made the partitions. Of four rounds the first and the last are logged.
        told = [found[at : at + 2][:: 1 if at % 4 == 0 else -1] for at in range(2, len(found), 2)]
        logged, bare = (statistics.median(each) for each in zip(*told, strict=True))
        bench.tell(f"history: {what}, with the log", f"{logged:.3f}", unit)
        bench.tell(f"history: {what}, without it", f"{bare:.3f}", unit)
        ratio = statistics.median(one / other for one, other in told)
        bench.tell(f"history: {what}, ratio", f"{ratio:.3f}")


# Many partitions --------------------------------------------------------------------------------


async def many(bench: Bench, *, partitions: int, seconds: float) -> None:
    """How long completions of others take, without and beside one of so many partitions."""
    dsn = await bench.database("many")
    async with Database(dsn, connections_max=10) as database:
        await _queued(database, 20_000)
        async with dispatcher_over(bench, dsn) as urls, _client(urls[1], name="large") as client:
            ask = {"operator": "bench:clean", "limit": 1}
            (task,) = (await _post(client, "/internal/task-claim", ask))["tasks"]
            end = _end(task)
            (made,) = end["outputs"]
            facts = {"manifest": "a" * 64, "files": 1, "rows": 1, "bytes": 1}
            end["outputs"] = [
                {
                    **made,
                    "location": f"{made['location']}/m{number}",
                    "partition_key": f"m{number}",
                    "facts": facts,
                }
                for number in range(partitions)
            ]
            before = await _latencies(urls[1], seconds=seconds)

            async def publish() -> float:
                began = time.monotonic()
                await _post(client, "/v1/task/complete", {"tasks": [end]})
                return time.monotonic() - began

            during, took = await asyncio.gather(_latencies(urls[1], seconds=seconds), publish())
    bench.tell(f"many: {partitions:,} partitions published", took, "s")
    for name, found in (("without", before), ("beside", during)):
        bench.tell(f"many: completions of others {name} it, median", statistics.median(found), "ms")
        worst = statistics.quantiles(found, n=100, method="inclusive")[98]
        bench.tell(f"many: completions of others {name} it, p99", worst, "ms")
        bench.tell(f"many: completions of others {name} it, longest", max(found), "ms")


async def _latencies(url: str, *, seconds: float, workers: int = 4) -> list[float]:
    """How many milliseconds completions of one task each take, for so long."""
    until = time.monotonic() + seconds
    found: list[float] = []

    async def one(number: int) -> None:
        async with _client(url, name=f"worker-{number}") as client:
            while time.monotonic() < until:
                ask = {"operator": "bench:clean", "limit": 1}
                for task in (await _post(client, "/internal/task-claim", ask))["tasks"]:
                    began = time.monotonic()
                    await _post(client, "/v1/task/complete", {"tasks": [_end(task)]})
                    found.append((time.monotonic() - began) * 1000)

    await asyncio.gather(*(one(number) for number in range(workers)))
    return found


# Backfill ---------------------------------------------------------------------------------------


async def backfill(bench: Bench, *, partitions: int, seconds: float) -> None:
    """Plan a backfill, and claim other tasks while it drains."""
    dsn = await bench.database("backfill")
    async with Database(dsn, connections_max=10) as database:
        await _queued(database, 20_000)
        async with dispatcher_over(bench, dsn) as urls, _client(urls[0]) as client:
            before = await _rate(urls[1], seconds=seconds)
            began = time.monotonic()
            ask = {"job": "clean", "start": 0, "end": partitions, "step": 1, "concurrency": 1000}
            await _post(client, "/v1/backfills", ask)
            planned = time.monotonic() - began
            await asyncio.sleep(1)
            during = await _rate(urls[1], seconds=seconds)
    bench.tell(f"backfill: {partitions:,} partitions planned", planned * 1000, "ms")
    bench.tell("backfill: claim + complete without it", before, "tasks/s")
    bench.tell("backfill: claim + complete while it drains", during, "tasks/s")
    bench.tell("backfill: ratio", during / before, "(goal 0.8)")


async def _rate(url: str, *, seconds: float, workers: int = 8, batch: int = 16) -> float:
    """Claims and completions a second, for so long."""
    until = time.monotonic() + seconds
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        async with _client(url, name=f"worker-{number}") as client:
            while time.monotonic() < until:
                ask = {"operator": "bench:clean", "limit": batch}
                found = (await _post(client, "/internal/task-claim", ask))["tasks"]
                if found:
                    ends = [_end(each) for each in found]
                    await _post(client, "/v1/task/complete", {"tasks": ends})
                    done += len(found)

    await asyncio.gather(*(one(number) for number in range(workers)))
    return done / seconds


# The curve --------------------------------------------------------------------------------------


async def curve(bench: Bench, *, steps: tuple[int, ...], sample: int) -> None:
    """Claim and complete a sample with more and more finished tasks in the tables."""
    dsn = await bench.database("curve")
    async with Database(dsn, connections_max=10) as database:
        await _queued(database, 1)
        tasks = Tasks(database, route=route_events)
        (claimed,) = await tasks.claim_next("bench:clean", worker="filler")
        before = 0
        for step in steps:
            await fill(database, claimed.definition_id, claimed.generation, before, step)
            before = step
            took: list[float] = []
            async with dispatcher_over(bench, dsn) as urls:
                for run in range(5):
                    await _queued(database, sample, first=100_000_000 + 10 * step + run * sample)
                    took.append(await _drained(urls[1], workers=8, batch=16))
            name = f"curve: claim + complete with {step:,} finished tasks"
            bench.tell(name, 1000 * statistics.median(took) / sample, "ms a task")


async def fill(database: Database, definition: int, generation: str, begin: int, end: int) -> None:
    """Finished tasks with their attempts, events and publications, as months of work leave them."""
    for first in range(begin, end, 100_000):
        last = min(end, first + 100_000) - 1
        await _query(
            database,
            """
            WITH made AS (
                INSERT INTO task (job_id, definition_id, generation, dedupe_key, operator, priority,
                    payload, attempt, attempt_limit, due_at, status, settled_at)
                SELECT definition.job_id, definition.id, %s::uuid, 'filled:' || n, 'bench:clean',
                    'normal', jsonb_build_object('partition_key', 'f' || n), 1, 3, penstock_now(),
                    'completed', penstock_now()
                FROM generate_series(%s::bigint, %s::bigint) AS n,
                     (SELECT * FROM job_definition WHERE id = %s) AS definition
                RETURNING id, payload
            ), tried AS (
                INSERT INTO attempt (task_id, number, worker, lease_token, started_at, ended_at,
                    outcome, said, answer)
                SELECT id, 1, 'filler', 'token', penstock_now(), penstock_now(), 'completed', 'x',
                    '{}'
                FROM made
            ), published AS (
                INSERT INTO publication (dataset_id, generation, partition_key, mode, task_id,
                    attempt, location)
                SELECT dataset.id, %s::uuid, made.payload ->> 'partition_key', 'replace', made.id,
                    1, 'file:///filled'
                FROM made, dataset WHERE dataset.name = 'sales'
            )
            INSERT INTO event (dataset_id, generation, partition_key, dedupe, task_id, revision,
                routed)
            SELECT dataset.id, %s::uuid, made.payload ->> 'partition_key',
                'publication:' || made.id || ':0', made.id, 1, 'routed'
            FROM made, dataset WHERE dataset.name = 'sales'
            """,
            generation,
            first,
            last,
            definition,
            generation,
            generation,
        )
    # As autovacuum and the checkpointer would have done in the months between.
    async with database.transaction() as connection:
        dsn = connection.info.dsn
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute("VACUUM ANALYZE")
        await connection.execute("CHECKPOINT")


# What all of them need --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def dispatcher_over(
    bench: Bench, dsn: str, *, store: str = ""
) -> AsyncIterator[tuple[str, str]]:
    """A dispatcher in a process of its own; its public and its internal address."""
    settings = Settings(
        data=bench.folder / "data",
        postgres=dsn,
        store=store,
        port=free_port(),
        internal_port=free_port(),
        worker_secret=SECRET,
    )
    with (bench.folder / "dispatcher.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock",
            "dispatcher",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **variables_of(settings)},
        )
    public = f"http://127.0.0.1:{settings.port}"
    try:
        async with httpx.AsyncClient() as client:
            for _ in range(300):
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{public}/readyz")).status_code == 200:
                        break
                await asyncio.sleep(0.1)
        yield public, settings.dispatcher_urls[0]
    finally:
        process.terminate()
        await process.wait()


def _client(url: str, *, name: str = "bench") -> httpx.AsyncClient:
    identity = Identities(SECRET).identity(name)
    headers = {WORKER_HEADER: identity.name, "Authorization": f"Bearer {identity.token}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=60)


async def _post(client: httpx.AsyncClient, path: str, body: object) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    if answer.status_code >= 300:
        raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
    found: dict[str, Any] = answer.json()
    return found


async def _query(database: Database, statement: str, *values: object) -> list[dict[str, Any]]:
    async with database.transaction() as connection:
        found = await connection.execute(statement.encode(), values or None)
        return await found.fetchall() if found.description else []


async def _until(dsn: str, statement: str) -> None:
    """Wait until the database says that it `holds`."""
    for _ in range(10_000):
        if (await _all(dsn, statement))[0]["holds"]:
            return
        await asyncio.sleep(0.02)
    raise RuntimeError(f"it never held: {statement}")


async def _all(dsn: str, statement: str) -> list[dict[str, Any]]:
    async with await psycopg.AsyncConnection.connect(dsn, row_factory=dict_row) as connection:
        return await (await connection.execute(statement.encode())).fetchall()


SECTIONS = ("routing", "wakeups", "http", "history", "many", "backfill", "curve")


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the sections that were asked for, on one Postgres."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        async with LocalPostgres(folder / "postgres") as postgres:
            bench = Bench(folder, postgres, {})
            await baseline(bench)
            if "routing" in options.sections:
                await routing(bench, events=options.events)
            if "wakeups" in options.sections:
                await wakeups(bench, per_second=100, seconds=15.0)
            if "http" in options.sections:
                for batch in (1, 16):
                    await http(bench, tasks=options.tasks, workers=8, batch=batch)
            if "history" in options.sections:
                await history(bench, pairs=options.pairs)
            if "many" in options.sections:
                await many(bench, partitions=10_000, seconds=10.0)
            if "backfill" in options.sections:
                await backfill(bench, partitions=1_000_000, seconds=8.0)
            if "curve" in options.sections:
                await curve(bench, steps=(10_000, 100_000, options.most), sample=2000)
            return bench.figures


def main() -> None:
    """Measure, print, and perhaps write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("sections", nargs="*", default=SECTIONS, help=", ".join(SECTIONS))
    parser.add_argument("--events", type=int, default=10_000, help="for routing")
    parser.add_argument("--tasks", type=int, default=4_000, help="for http")
    parser.add_argument("--pairs", type=int, default=40, help="of rounds, for history")
    parser.add_argument("--most", type=int, default=1_000_000, help="finished tasks of the curve")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = asyncio.run(measure(options))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
