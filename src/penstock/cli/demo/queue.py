"""The queue: three workers in processes of their own, and one of them is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import click

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.leash import Leashed
from penstock.queue.client import Queue, Task
from penstock.queue.views import TaskEvent

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
            worker = Leashed(command, log=log, environment=environment, grace_seconds=15)
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
