"""A worker that is killed with `kill -9` and started again goes on at once.

Its leases last an hour, so that nothing is taken over because one has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.kernel.process_locks import LOCAL_FILE_SYSTEMS, file_system

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


class Stage:
    """A folder with a store, a module and locks."""

    def __init__(self, folder: Path, mode: str) -> None:
        (folder / "handlers.py").write_text(HANDLERS)
        (folder / "script.py").write_text(SCRIPT)
        (folder / "locks").mkdir(mode=0o700)
        self._folder = folder
        self._mode = mode

    @contextmanager
    def worker(self, *inputs: str) -> Iterator[subprocess.Popen[str]]:
        folder = str(self._folder)
        environment = {**os.environ, **HOURS, "PENSTOCK_WORKER_LOCK_FOLDER": f"{folder}/locks"}
        with subprocess.Popen(
            [sys.executable, "script.py", f"file://{folder}/store", self._mode, *inputs],
            cwd=folder,
            env=environment,
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
