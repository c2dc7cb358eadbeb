"""A whole installation for the browser: `penstock up` over a Postgres of its own, with a pipeline.

The pipeline is `pipeline/browsed.yaml`. One installation serves all tests of this folder, so each
test has partitions of its own. There is also a dispatcher of it that wants tokens, and one that has
nothing yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg
from psycopg.conninfo import make_conninfo

from penstock.kernel.clock import SystemClock
from penstock.kernel.ports import free_port
from tests.e2e.command import PENSTOCK, penstock

CLOCK = SystemClock()
PAUSE = threading.Event()
PIPELINE = Path(__file__).parent / "pipeline" / "browsed.yaml"
SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 30.0
SCRIPT = "<script>window.attacked = 'said'</script>"
PLAIN, PICKY, RUDE = "2026-01-01", "picky-seeded", f"rude-{SCRIPT}"
ODD = 'odd/../key?a=b&c#d "e" %2F+ü <b>'
API_TOKEN, VIEWER_TOKEN = "the token of operators", "the token of viewers"


@dataclass
class Installation:
    """What runs, and how it is asked."""

    process: subprocess.Popen[str]
    url: str
    folder: Path
    dsn: str
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=20)

    @property
    def there(self) -> Path:
        """Where the files are that partitions of the job `picky` wait for."""
        return self.folder / "there"

    def trigger(self, key: str, **fields: Any) -> None:
        """Tell of a partition of the source."""
        told = {"job": "feed", "partition_key": key, "event_id": key, **fields}
        answer = self.client.post("/v1/trigger", json=told)
        assert answer.status_code == 200, answer.text

    def pause(self, job: str) -> None:
        """Pause a job, with a reason that a page must not believe."""
        why = {"reason": f"Nobody needs it. {SCRIPT}"}
        assert self.client.post(f"/v1/jobs/{job}/pause", json=why).status_code == 200

    def task(self, job: str, key: str, *statuses: str) -> int:
        """The task of a job for a partition, once it is in one of these states."""
        found: list[Mapping[str, Any]] = []

        def is_there() -> bool:
            asked = {"job": job, "partition_key": key, "limit": "1"}
            answer = self.client.get("/v1/tasks", params=asked)
            assert answer.status_code == 200, answer.text
            found[:] = answer.json()["tasks"]
            return bool(found) and (not statuses or found[0]["status"] in statuses)

        self.until(is_there)
        return int(found[0]["id"])

    def queued(self) -> str:
        """The id of a task in a queue of its own, with an input that a page must not believe."""
        store = f"file://{self.folder / 'data' / 'store'}"
        words = ("queue", "submit", "seen", json.dumps({SCRIPT: SCRIPT}), "--key", "one")
        ran = penstock(*words, "--store", store, "--queue", "seen")
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    def until(self, holds: Callable[[], object]) -> None:
        """Wait until something holds."""
        deadline = CLOCK.monotonic() + SECONDS_MAX
        while not holds():
            assert self.process.poll() is None, self.said()
            assert CLOCK.monotonic() < deadline, self.said()
            PAUSE.wait(0.05)

    def said(self) -> str:
        """What the processes have said, for a test that fails."""
        logs = [self.folder / "up.err", *sorted((self.folder / "data" / "logs").glob("[a-z]*.log"))]
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def kill_dispatcher(self) -> None:
        """End the dispatcher as a crash does; `up` starts it again."""
        for number, command in _children(self.process.pid):
            if "penstock dispatcher" in command:
                # The leash is the child, and its own child is the dispatcher.
                for below, _ in _children(number) or [(number, command)]:
                    os.kill(below, signal.SIGKILL)
                return
        raise AssertionError(f"No dispatcher runs: {_children(self.process.pid)}")


def _below(root: int) -> set[int]:
    found: set[int] = set()
    waiting = [root]
    while waiting:
        new = {number for number, _ in _children(waiting.pop())} - found
        found |= new
        waiting.extend(new)
    return found


def _children(parent: int) -> Sequence[tuple[int, str]]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            above = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, IndexError, UnicodeDecodeError):
            continue
        if above == parent:
            found.append((int(folder.name), command))
    return found


@contextlib.contextmanager
def installed(folder: Path, dsn: str) -> Iterator[Installation]:
    """Run `penstock up` with the pipeline, seeded."""
    port = free_port()
    ports = ("--internal-port", str(free_port()), "--webhook-port", str(free_port()))
    words = ("--postgres", dsn, "--data", str(folder / "data"), "--port", str(port), *ports)
    (folder / "there").mkdir()
    with (folder / "up.err").open("w") as said:
        process = subprocess.Popen(
            [PENSTOCK, "up", str(PIPELINE), "--concurrency", "4", *words],
            stderr=said,
            text=True,
            env={**os.environ, "BROWSED_THERE": str(folder / "there")},
        )
    installation = Installation(process, f"http://127.0.0.1:{port}", folder, dsn)
    try:
        installation.until(lambda: "Penstock is up" in (folder / "up.err").read_text())
        _seed(installation)
        yield installation
    finally:
        installation.client.close()
        # Nothing of it is needed any more, so nobody has to be waited for.
        below = _below(process.pid)
        process.kill()
        process.wait(STOP_SECONDS_MAX)
        for each in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


def _seed(installation: Installation) -> None:
    """Have something of every kind: done, dead, odd, rude, held back, told and planned."""
    for key in (PLAIN, ODD, PICKY, RUDE):
        installation.trigger(key, payload={SCRIPT: SCRIPT})
    ask = {"job": "quick", "keys": ["filled-1", "filled-2"], "request_id": SCRIPT}
    assert installation.client.post("/v1/backfills", json=ask).status_code == 200
    installation.pause("nightly")
    for key in (PLAIN, ODD):
        installation.task("-odd_-name-", key, "completed")
    installation.task("picky", PICKY, "dead")
    installation.task("rude", RUDE, "dead")
    rejected = "/v1/buffers/alerts/rejected"
    installation.until(lambda: installation.client.get(rejected).json()["rows"])


@contextlib.contextmanager
def dispatching(installation: Installation, name: str, **told: str) -> Iterator[str]:
    """The address of another dispatcher, with settings of its own."""
    port = free_port()
    variables = {
        "PENSTOCK_POSTGRES": installation.dsn,
        "PENSTOCK_DATA": str(installation.folder / "data"),
        "PENSTOCK_PORT": str(port),
        "PENSTOCK_INTERNAL_PORT": str(free_port()),
        **{f"PENSTOCK_{each.upper()}": value for each, value in told.items()},
    }
    log = installation.folder / f"{name}.err"
    with log.open("w") as said:
        process = subprocess.Popen(
            [PENSTOCK, "dispatcher"], stderr=said, text=True, env={**os.environ, **variables}
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/healthz", timeout=5).status_code == 200
        return False

    try:
        installation.until(answers)
        yield url
    finally:
        _stop(process)


def guarded(installation: Installation) -> contextlib.AbstractContextManager[str]:
    """The address of a dispatcher of the same installation that wants tokens."""
    return dispatching(installation, "guarded", api_token=API_TOKEN, viewer_token=VIEWER_TOKEN)


def bare(installation: Installation) -> contextlib.AbstractContextManager[str]:
    """The address of a dispatcher that has nothing: what somebody sees who begins."""
    with psycopg.connect(installation.dsn, autocommit=True) as connection:
        connection.execute("CREATE DATABASE bare")
    dsn = make_conninfo(installation.dsn, dbname="bare")
    return dispatching(installation, "bare", postgres=dsn, data=str(installation.folder / "bare"))


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS_MAX)
