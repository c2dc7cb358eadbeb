"""The pipeline: a DAG on a Postgres, a dispatcher and a worker, of which two are killed."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from penstock.cli.installation import wiring
from penstock.dispatcher.client import Client
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import DispatcherUnavailable
from penstock.settings import Settings

_PARTITIONS: Final = 30
_WAIT_SECONDS_MAX: Final = 90.0
_DAG: Final = """\
jobs:
  ingest: {activation: source, source: {kind: manual}, outputs: [hours]}
  clean: {runtime: process, operator: "demo_jobs:clean", inputs: [hours], outputs: [sales],
          heartbeat_timeout: 4s, retry: {first: 1s}}
  totals: {runtime: process, operator: "demo_jobs:totals", inputs: [sales], outputs: [totals],
           heartbeat_timeout: 4s, retry: {first: 1s}}
"""
_MODULE: Final = """\
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
    (folder / "demo_jobs.py").write_text(_MODULE.format(pids=str(pids)))
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
        await _show_outcome(client)


async def _show_outcome(client: Client) -> None:
    await client.wait(timeout_seconds=_WAIT_SECONDS_MAX)
    tasks = (await client.tasks(limit=1000)).tasks
    again = sum(each.attempt > 1 for each in tasks)
    published = (await client.partitions("totals", limit=1000)).partitions
    done = sum(each.status == "completed" for each in tasks)
    click.echo(
        f"   {done} of {len(tasks)} tasks are completed, each once; {again} had to run again."
    )
    once = sum(each.revision == 1 for each in published)
    click.echo(f"   {once} of {_PARTITIONS} partitions of the result are published, each once.")


async def _until_ready(client: Client, clock: Clock) -> None:
    until = clock.monotonic() + _WAIT_SECONDS_MAX
    while clock.monotonic() < until:
        with suppress(DispatcherUnavailable):
            await client.status()
            return
        await clock.sleep(0.1)
    raise TimeoutError("the dispatcher has not begun in time")


async def _worker(pids: Path, clock: Clock) -> int:
    """The process of the worker, once it runs a task."""
    until = clock.monotonic() + _WAIT_SECONDS_MAX
    while clock.monotonic() < until:
        for name in os.listdir(pids):  # noqa: PTH208 - a name is enough
            return int(name)
        await clock.sleep(0.02)
    raise TimeoutError("no worker has begun in time")
