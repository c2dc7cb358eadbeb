"""Nothing that a test has started outlives the run: not after Ctrl-C, not after `kill -9`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.leftovers import VARIABLE

ROOT = Path(__file__).parents[2]
HANGS = """
import os, pathlib, subprocess, sys, tempfile, time
from tests.conftest import RUN

def test_it_hangs():
    own = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = subprocess.Popen(sleeper, env=own, start_new_session=True)
    folder = tempfile.mkdtemp(dir=RUN)
    pathlib.Path("said").write_text(f"{started.pid} {folder}")
    time.sleep(600)
"""


def _until(holds: Callable[[], bool], otherwise: str) -> None:
    for _ in range(600):
        if holds():
            return
        threading.Event().wait(0.1)
    pytest.fail(otherwise)


def _lives(number: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2][:2]
    except OSError:
        return False


@contextmanager
def _hanging(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """A run whose test hangs, what it has started, and a folder that it has made."""
    folder.mkdir()
    (folder / "test_hanging.py").write_text(HANGS)
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    words = ("-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "test_hanging.py")
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "--rootdir", folder, "-c", "/dev/null", *words],
        cwd=folder,
        env={**variables, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        said = folder / "said"
        _until(lambda: said.exists() and bool(said.read_text()), "the run did not begin")
        number, made = said.read_text().split()
        yield run, int(number), Path(made)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at /proc")
def test_nothing_outlives_a_run_that_is_ended(tmp_path: Path) -> None:
    with (
        _hanging(tmp_path / "one") as (interrupted, number, folder),
        _hanging(tmp_path / "two") as (killed, other_number, other_folder),
    ):
        left = ((number, folder), (other_number, other_folder))
        assert all(_lives(number) for number, _ in left)
        interrupted.send_signal(signal.SIGINT)
        killed.send_signal(signal.SIGKILL)
        _until(lambda: not any(_lives(number) for number, _ in left), "a process outlives its run")
        _until(lambda: not any(made.exists() for _, made in left), "a folder outlives its run")
