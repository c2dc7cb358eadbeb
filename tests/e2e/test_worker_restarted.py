"""A worker that is killed with `kill -9` and started again goes on at once.

Its leases last an hour, so that nothing is taken over because one has ended; those of tasks are
short where a task ends every worker, since then they are the pause between its attempts.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.kernel.process_locks import LOCAL_FILE_SYSTEMS, file_system
from penstock.queue.client import Queue
from penstock.queue.task_views import TaskView

HOURS = {
    "PENSTOCK_WORKER_LEASE_TTL_SECS": "3600",
    "PENSTOCK_WORKER_LEASE_RENEW_SECS": "1000",
    "PENSTOCK_WORKER_TASK_LEASE_SECONDS": "3600",
    "PENSTOCK_WORKER_LEASE_DURATION_SECS": "3600",
    "PENSTOCK_WORKER_LEASE_RENEWAL_INTERVAL_SECS": "1000",
}

HANDLERS = """
import time

def wait(task):
    print("began", task.input, task.attempt, flush=True)
    if task.attempt == 1 and task.input == "hang":
        time.sleep(3600)
    print("ended", task.input, task.attempt, flush=True)
"""

SCRIPT = """
import logging, sys
from handlers import wait
from penstock.sync import Queue, Worker

logging.basicConfig(level=logging.INFO)
url, mode, *inputs = sys.argv[1:]
queue = Queue(url, name="q")
worker = Worker(queue, mode=mode, concurrency=2, name="same")
worker.handler("wait", isolate=True)(wait)
for each in inputs:
    queue.submit("wait", each)
worker.start()
sys.stdin.readline()
# Nothing is closed: the end of the process does that.
"""

POISONED = """
import asyncio, os, sys
from penstock import Polling, Queue, Worker, WorkerSettings

queue = Queue(sys.argv[1], name="q")
worker = Worker(
    queue,
    mode=sys.argv[2],
    concurrency=8,
    settings=WorkerSettings(polling=Polling(min_seconds=0.1, max_seconds=0.2)),
)

@worker.handler("work")
def work(task):
    if task.input == 77:
        print("poison", flush=True)
        os._exit(9)
    return task.input

asyncio.run(worker.run(until_empty=True))
"""


class Stage:
    """A folder with a store, a module and locks."""

    def __init__(self, folder: Path, mode: str) -> None:
        (folder / "handlers.py").write_text(HANDLERS)
        (folder / "script.py").write_text(SCRIPT)
        (folder / "poisoned.py").write_text(POISONED)
        (folder / "locks").mkdir(mode=0o700)
        self._folder = folder
        self._mode = mode
        self.url = f"file://{folder}/store"
        self._environment = {
            **os.environ,
            **HOURS,
            "PENSTOCK_WORKER_LOCK_FOLDER": f"{folder}/locks",
        }

    def run_poisoned(self) -> int:
        """Run a worker until nothing is left; its exit code."""
        ran = subprocess.run(
            [sys.executable, "poisoned.py", self.url, self._mode],
            cwd=self._folder,
            env={**self._environment, "PENSTOCK_WORKER_TASK_LEASE_SECONDS": "2"},
            timeout=300,
            check=False,
        )
        return ran.returncode

    @contextmanager
    def worker(self, *inputs: str) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            [sys.executable, "script.py", self.url, self._mode, *inputs],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as running:
            try:
                yield running
            finally:
                running.kill()


def _until(running: subprocess.Popen[str], *words: str) -> None:
    """Read what it logs until all these words have come."""
    assert running.stderr is not None
    missing, said = set(words), []
    for line in running.stderr:
        said.append(line)
        missing -= {each for each in missing if each in line}
        if not missing:
            return
    raise AssertionError(f"it ended, and never said {missing}: {''.join(said)}")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    with (tmp_path / "probe").open("w") as probe:
        if file_system(probe.fileno()) not in LOCAL_FILE_SYSTEMS:
            pytest.skip("the folder of the tests is not on a local file system")
    return tmp_path


@pytest.mark.parametrize("mode", ["leased", "direct"])
def test_a_worker_that_was_killed_is_followed_at_once(local: Path, mode: str) -> None:
    stage = Stage(local, mode)
    with stage.worker("hang") as first:
        _until(first, "began hang 1")
        first.kill()
        first.wait()
    with stage.worker("quick") as second:
        _until(second, "ended quick 1", "ended hang 2")


STARTS_MAX = 10
"""Halves of the 16 that a worker of 8 slots claims, three attempts, one lease more, and the end."""


def test_of_a_pack_with_a_task_that_ends_each_worker_only_that_one_fails(local: Path) -> None:
    """200 tasks in one pack, the default retry, and whoever runs the worker restarts it at once."""
    stage = Stage(local, "leased")

    async def submit() -> list[str]:
        async with await Queue.open(stage.url, name="q") as queue:
            return [task.id for task in await queue.submit_many("work", list(range(200)))]

    async def outcomes(ids: list[str]) -> list[TaskView]:
        async with await Queue.open(stage.url, name="q") as queue:
            return [await queue.get(each) for each in ids]

    ids = asyncio.run(submit())
    codes: list[int] = []
    while not codes or codes[-1]:
        assert len(codes) < STARTS_MAX, "what ends each worker fails after so many leases"
        codes.append(stage.run_poisoned())
    assert set(codes[:-1]) == {9}
    views = asyncio.run(outcomes(ids))
    failed = [(view.input, view.error) for view in views if view.status == "failed"]
    assert failed == [(77, "LeaseExpired")]
    rest = [view for view in views if view.input != 77]
    assert [(view.status, view.result) for view in rest] == [
        ("succeeded", view.input) for view in rest
    ]


def test_a_script_that_closes_nothing_lets_go_at_its_end(local: Path) -> None:
    stage = Stage(local, "leased")
    with stage.worker("quick") as first:
        _until(first, "ended quick 1")
        assert first.stdin is not None
        first.stdin.close()
        first.wait(timeout=60)
        assert first.returncode == 0
    assert list((local / "locks").glob("*.lock")) == [], "it has ended in order"
    with stage.worker("another") as second:
        _until(second, "ended another 1")
