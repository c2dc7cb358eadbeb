"""A worker process that is meant to be killed. It writes down what it runs, in a file of its own.

killed_worker.py URL QUEUE MODE NUMBER LOG

The worker is called w{NUMBER}. For every attempt the log gets a line when its handler starts, and
one just before it returns; each is one write to a file that is only appended to, so that a kill
leaves whole lines. The process ends by SIGTERM, by `kill -9`, or with its standard input: it does
not outlive the test that has started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path

from penstock.kernel.clock import SystemClock
from penstock.queue.client import Queue
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.settings import Polling, WorkerSettings
from penstock.queue.worker import Worker

SETTINGS = WorkerSettings(
    lease_ttl_secs=3.0,
    lease_renew_interval_secs=1.0,
    task_lease_seconds=3.0,
    settle_seconds=0.2,
    stop_seconds=5.0,
    polling=Polling(min_seconds=0.1, max_seconds=0.5),
)
OFTEN = Retry(attempts=1000)
"""Every death costs an attempt; none of these tasks is to run out of them."""


def make_worker(queue: Queue, *, mode: str, number: int, log: Path) -> Worker:
    """A worker with two handlers: one runs on the loop, the other in threads."""
    worker = Worker(queue, concurrency=16, mode=mode, name=f"w{number}", settings=SETTINGS)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(task: TaskContext, what: str) -> None:
        line = json.dumps([what, task.id, task.attempt, number]) + "\n"
        assert os.write(file, line.encode()) == len(line)

    def ended(task: TaskContext) -> object:
        note(task, "end")
        return {"attempt": task.attempt, "worker": number}

    @worker.handler("async", timeout=30, retry=OFTEN)
    async def wait(task: TaskContext) -> object:
        note(task, "start")
        await SystemClock().sleep(task.input["seconds"])
        return ended(task)

    @worker.handler("plain", timeout=30, retry=OFTEN)
    def block(task: TaskContext) -> object:
        note(task, "start")
        threading.Event().wait(task.input["seconds"])
        return ended(task)

    return worker


def _end_with_standard_input() -> None:
    # Not through `sys.stdin`, whose lock would be in the way of an orderly end.
    os.read(0, 1)
    os._exit(1)


async def main(url: str, name: str, mode: str, number: str, log: str) -> None:
    async with await Queue.open(url, name=name, create=False) as queue:
        await make_worker(queue, mode=mode, number=int(number), log=Path(log)).run()


if __name__ == "__main__":
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    asyncio.run(main(*sys.argv[1:]))
