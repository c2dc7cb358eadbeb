"""Nothing that a test has started outlives the run: not after Ctrl-C, not after `kill -9`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
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


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_run_that_is_ended(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGS)
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    words = ("-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "test_hanging.py")
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "--rootdir", tmp_path, "-c", "/dev/null", *words],
        cwd=tmp_path,
        env={**variables, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        said = tmp_path / "said"
        _until(lambda: said.exists() and bool(said.read_text()), "the run did not begin")
        number, folder = said.read_text().split()
        assert _lives(int(number))
        run.send_signal(how)
        _until(lambda: not _lives(int(number)), "a process has outlived its run")
        _until(lambda: not Path(folder).exists(), "a folder has outlived its run")
