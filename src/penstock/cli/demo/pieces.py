"""`penstock demo queue`: the parts below the pipeline, each by itself.

The store (can it be trusted, and what happens when a third of the requests fail), the queue
(three workers, one of which is killed), a pipeline without Spark whose worker and database are
killed, simulated worlds, and the price of a load.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import click

from penstock.cli.doctor import show_finding
from penstock.cli.installation import wiring
from penstock.dispatcher.client import Client
from penstock.kernel.child_process import ChildProcess
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import DispatcherUnavailable
from penstock.protocol.base import TaskStatus
from penstock.queue.client import Queue, Task
from penstock.queue.task_views import TaskEvent
from penstock.settings import Settings
from penstock.store.doctor import CheckMark, examine, open_patient
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.opening import Opening, open_backend
from penstock.store.races import count_race
from penstock.store.retrying import Retries, RetryingStore
from penstock.testing.cost import Workload, price
from penstock.testing.simulator.plans import WorkerModes
from penstock.testing.simulator.worlds import run_world

_FAULTS = FaultPlan(throttled=0.05, failed=0.05, lost_request=0.1, lost_answer=0.1)
_SHORT_PAUSES = Retries(tries_max=20, first_pause_seconds=0.001, pause_seconds_max=0.02)


async def show_trust(url: str) -> None:
    """Examine a store, as `penstock doctor` does."""
    async with open_patient(url, Opening()) as patient:
        report = await examine(patient, tell=lambda _: None)
    for finding in report.findings:
        if finding.mark is not CheckMark.GOOD:
            show_finding(finding)
    click.echo(f"   {len(report.findings)} rules tried, alone and in races of sixteen writers.")
    click.echo(f"   {report.verdict}")


async def show_lost_answers(url: str) -> None:
    """Update one object from many sides while requests and answers are lost."""
    writers, each = 16, 20
    click.echo(f"   {writers} writers add 1 to one object, {each} times each.")
    opening = Opening()
    faulty = [
        FaultyStore(await open_backend(url, opening), _FAULTS, entropy=opening.entropy)
        for _ in range(writers)
    ]
    stores = [
        RetryingStore(each_faulty, entropy=opening.entropy, retries=_SHORT_PAUSES)
        for each_faulty in faulty
    ]
    total = await count_race(stores, "counter", each=each, entropy=opening.entropy)
    injected = sum((each_faulty.injected for each_faulty in faulty), Counter[str]())
    for store in stores:
        await store.close()
    faults = ", ".join(f"{count} {fault}" for fault, count in sorted(injected.items()))
    click.echo(f"   met on the way: {faults}")
    click.echo(f"   {writers * each} additions were made, and the object says {total}.")


_WORKERS = 3
_BATCH, _SINGLES = 300, 20
_WAIT_SECONDS_MAX = 90.0
_MODULE = """\
import asyncio, os, pathlib
from penstock import Polling, Queue, Worker, WorkerSettings

settings = WorkerSettings(
    lease_ttl_secs=6, lease_renew_interval_secs=2, task_lease_seconds=4,
    polling=Polling(min_seconds=0.2, max_seconds=1.0),
)
queue = Queue({url!r}, name="demo")
worker = Worker(queue, concurrency=8, mode="shared", name="demo", settings=settings)

@worker.handler("resize", timeout=30)
async def resize(task):
    pathlib.Path({folder!r}, str(os.getpid())).touch()
    await asyncio.sleep(0.1)
    return {{"ok": task.input["n"], "by": os.getpid()}}
"""


async def show_queue(url: str, folder: Path) -> None:
    """Submit tasks, kill a worker while it runs some, and show that all are settled once."""
    pids = folder / "pids"
    pids.mkdir()
    (folder / "demo_tasks.py").write_text(_MODULE.format(url=url, folder=str(pids)))
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        queue = await stack.enter_async_context(await Queue.open(url, name="demo"))
        tasks = await queue.submit_many("resize", [{"n": n} for n in range(_BATCH)])
        tasks += [await queue.submit("resize", {"n": n}) for n in range(_SINGLES)]
        twice = [await queue.submit("resize", {"n": -1}, key="once") for _ in range(2)]
        assert twice[0].id == twice[1].id
        click.echo(
            f"   {_BATCH} tasks were submitted as one object, {_SINGLES} one by one,"
            " and one twice with the same key."
        )
        command = [sys.executable, "-m", "penstock", "queue", "worker", "demo_tasks:worker"]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        for number in range(_WORKERS):
            log = folder / f"worker-{number}.log"
            worker = ChildProcess(command, log=log, environment=environment, grace_seconds=15)
            await stack.enter_async_context(worker)
        click.echo(f"   {_WORKERS} workers run: penstock queue worker demo_tasks:worker")
        killed = await _killed(pids, clock)
        click.echo(f"   worker {killed} is killed with kill -9 while it runs some of them")
        await _show_outcome(queue, [*tasks, twice[0]], killed)


async def _killed(pids: Path, clock: Clock) -> int:
    """Kill the first worker that has begun a task; returns its process id."""
    until = clock.monotonic() + _WAIT_SECONDS_MAX
    while clock.monotonic() < until:
        running = [int(name) for name in os.listdir(pids)]  # noqa: PTH208 - a name is enough
        if running:
            os.kill(running[0], signal.SIGKILL)
            return running[0]
        await clock.sleep(0.02)
    raise TimeoutError("no worker has begun in time")


async def _show_outcome(queue: Queue, tasks: Sequence[Task], killed: int) -> None:
    async with asyncio.timeout(_WAIT_SECONDS_MAX):
        results = [await task.result() for task in tasks]
    histories = [await queue.history(task.id) for task in tasks]
    settled = [sum(event.what == "succeeded" for event in history) for history in histories]
    again = [history for history in histories if any(e.what == "lease expired" for e in history)]
    by_killed = sum(result["by"] == killed for result in results)
    click.echo(
        f"   {sum(settled)} of {len(tasks)} tasks are settled, each of them once:"
        f" {by_killed} by the dead worker before it died,"
    )
    click.echo(f"   and {len(again)} that died with it ran again. One of those:")
    _show_history(again[0] if again else histories[0])


def _show_history(history: Sequence[TaskEvent]) -> None:
    for event in history:
        attempt = f"attempt {event.attempt}" if event.attempt else ""
        since = event.at - history[0].at
        click.echo(f"     {since:6.1f} s  {event.what:14} {attempt:10} {event.who}")


_PARTITIONS: Final = 30
_PIPELINE_SECONDS_MAX: Final = 90.0
_DAG: Final = """\
jobs:
  ingest: {activation: source, source: {kind: manual}, outputs: [hours]}
  clean: {runtime: process, operator: "demo_jobs:clean", inputs: [hours], outputs: [sales],
          heartbeat_timeout: 4s, retry: {first: 1s}}
  totals: {runtime: process, operator: "demo_jobs:totals", inputs: [sales], outputs: [totals],
           heartbeat_timeout: 4s, retry: {first: 1s}}
"""
_PIPELINE_MODULE: Final = """\
import os, pathlib, time

def clean(task):
    pathlib.Path({pids!r}, str(os.getppid())).touch()
    time.sleep(0.2)
    (task.outputs["sales"].path / "sales.txt").write_text(f"sales of {{task.partition_key}}")

def totals(task):
    sales = (task.inputs["sales"].path / "sales.txt").read_text()
    (task.outputs["totals"].path / "totals.txt").write_text(str(len(sales)))
"""


async def show_pipeline(folder: Path) -> None:
    """Run a DAG, kill the worker and the database, and show that all is published once."""
    pids = folder / "workers"
    pids.mkdir()
    (folder / "demo_jobs.py").write_text(_PIPELINE_MODULE.format(pids=str(pids)))
    (folder / "demo.yaml").write_text(_DAG)
    clock = SystemClock()
    settings = Settings(data=folder / "pipeline", port=0, internal_port=0, webhook_port=0)
    # That processes end and are started again is told here, and not by the log.
    logging.getLogger("penstock").addHandler(logging.NullHandler())
    installation = wiring("penstock.installation").Installation(settings, code=folder)
    async with installation, Client(installation.public_url) as client:
        await _until_ready(client, clock)
        await client.apply(folder / "demo.yaml")
        click.echo("   a Postgres, a dispatcher and a worker run: penstock up demo.yaml")
        for number in [*range(_PARTITIONS), *range(_PARTITIONS)]:
            key = f"hour-{number:02d}"
            await client.trigger("ingest", partition_key=key, event_id=key)
        click.echo(f"   {_PARTITIONS} partitions are told of, each twice")
        killed = await _worker(pids, clock)
        os.kill(killed, signal.SIGKILL)
        click.echo(f"   worker {killed} is killed with kill -9 while it runs some of them")
        database = folder / "pipeline" / "postgres" / "data" / "postmaster.pid"
        os.kill(int(database.read_text().split()[0]), signal.SIGKILL)
        click.echo("   so is the database; both are started again")
        await _show_pipeline_outcome(client)


async def _show_pipeline_outcome(client: Client) -> None:
    await client.wait(timeout_seconds=_PIPELINE_SECONDS_MAX)
    tasks = (await client.tasks(limit=1000)).tasks
    again = sum(each.attempt > 1 for each in tasks)
    published = (await client.partitions("totals", limit=1000)).partitions
    done = sum(each.status == TaskStatus.SUCCEEDED for each in tasks)
    click.echo(
        f"   {done} of {len(tasks)} tasks are completed, each once; {again} had to run again."
    )
    once = sum(each.revision == 1 for each in published)
    click.echo(f"   {once} of {_PARTITIONS} partitions of the result are published, each once.")


async def _until_ready(client: Client, clock: Clock) -> None:
    until = clock.monotonic() + _PIPELINE_SECONDS_MAX
    while clock.monotonic() < until:
        with suppress(DispatcherUnavailable):
            await client.status()
            return
        await clock.sleep(0.1)
    raise TimeoutError("the dispatcher has not begun in time")


async def _worker(pids: Path, clock: Clock) -> int:
    """The process of the worker, once it runs a task."""
    until = clock.monotonic() + _PIPELINE_SECONDS_MAX
    while clock.monotonic() < until:
        for name in os.listdir(pids):  # noqa: PTH208 - a name is enough
            return int(name)
        await clock.sleep(0.02)
    raise TimeoutError("no worker has begun in time")


_WORLDS = 20


def show_worlds() -> None:
    """Simulate some worlds and say what the referee saw."""
    reports = [run_world(seed, fleet) for seed in range(_WORLDS) for fleet in WorkerModes]
    tasks = sum(report.tasks for report in reports)
    starts = sum(report.starts for report in reports)
    hours = sum(report.seconds for report in reports) / 3600
    broken = sum(len(report.violations) for report in reports)
    click.echo(f"   {len(reports)} worlds with crashes, pauses, lost answers and wrong clocks,")
    click.echo(f"   {hours:.0f} hours of virtual time:")
    click.echo(f"   {tasks} tasks, {starts} attempts, {broken} violations of the six invariants.")


def show_price() -> None:
    """Price a small fleet, one by one and in batches."""
    for batch in (1, 100):
        load = Workload(workers=5, tasks_per_day=20_000, batch=batch, days=1 / 24)
        figures = price(load)
        how = "one by one" if batch == 1 else f"in batches of {batch}"
        click.echo(
            f"   5 workers, 20,000 tasks a day, {how}: ${figures.dollars_per_month:.2f} a month,"
            f" {figures.start_seconds(50):.1f} s to start."
        )


def show_pieces() -> None:
    """Show tasks without Spark, the store and the queue, on a store in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as name, asyncio.Runner() as runner:
        # Everything that has to be cleaned up is there before the first word.
        runner.get_loop()
        click.secho(
            "What Penstock stands on: a Postgres and a bucket, and the bucket's own queue.",
            bold=True,
        )
        folder = Path(name)
        url = f"file://{folder}/bucket"
        _title(1, "A pipeline, and a worker and a database that die (penstock up)")
        runner.run(show_pipeline(folder))
        _title(2, f"Can this store be trusted? (penstock doctor {url})")
        runner.run(show_trust(url))
        _title(3, "One object, many writers, and a third of the requests go wrong")
        runner.run(show_lost_answers(url))
        _title(4, "A queue in that folder, and a worker that dies")
        runner.run(show_queue(url, folder))
    _title(5, "The same in simulated worlds, where everything goes wrong (penstock sim)")
    show_worlds()
    _title(6, "What it costs on S3, by the real code in virtual time (penstock cost)")
    show_price()
    click.echo(
        "\nGo on with docs/pipeline.md and docs/queue.md: five minutes each, from nothing to\n"
        "something of your own; or with your own bucket: penstock doctor s3://BUCKET/PREFIX"
    )


def _title(number: int, text: str) -> None:
    click.secho(f"\n{number}. {text}", bold=True)
