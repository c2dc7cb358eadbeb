"""`penstock queue worker --metrics-port`: figures over HTTP, for as long as the worker runs."""

from __future__ import annotations

import re
import signal
import subprocess
import urllib.request
from pathlib import Path

from tests.e2e.command import PENSTOCK

MODULE = """
from penstock import Queue, Worker
queue = Queue("file://{folder}/bucket", name="q")
worker = Worker(queue)

@worker.handler("t")
def handle(task): pass
"""


def test_a_worker_shows_its_figures_while_it_runs(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(MODULE.format(folder=tmp_path))
    with subprocess.Popen(
        [PENSTOCK, "queue", "worker", "theirs:worker", "--metrics-port", "0"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            found = None
            for line in process.stderr:
                found = re.search(r"metrics are at (http://127\.0\.0\.1:\d+/metrics)\.", line)
                if found:
                    break
            assert found is not None
            text = ""
            # Once it looks for work it has heard of signals, too.
            while 'cause="discovery"' not in text:
                with urllib.request.urlopen(found[1], timeout=30) as answer:
                    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                    text = answer.read().decode()
            assert "# TYPE penstock_queue_tasks_total counter" in text
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_port_that_cannot_be_had_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(MODULE.format(folder=tmp_path))
    where = ("--metrics-port", "1", "--metrics-host", "192.0.2.1")
    ran = subprocess.run(
        [PENSTOCK, "queue", "worker", "theirs:worker", *where],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode != 0
    assert "Failed to serve metrics on 192.0.2.1:1" in ran.stderr
    assert "Traceback" not in ran.stderr
