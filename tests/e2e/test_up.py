"""`penstock up`: everything in one command, whatever of it is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.ports import free_port
from tests.architecture.source import ROOT
from tests.e2e.command import PENSTOCK, penstock

CLOCK = SystemClock()
PAUSE = threading.Event()
EXAMPLE = ROOT / "examples" / "five_jobs.yaml"
SECONDS_MAX = 90.0
JOBS = ("clean", "totals", "outliers", "report")


@dataclass
class Up:
    """An installation that runs."""

    process: subprocess.Popen[str]
    url: str
    data: Path
    said: Path

    def ask(self, *words: str, seconds: float = SECONDS_MAX) -> str:
        done = penstock(*words, environment={"PENSTOCK_URL": self.url}, seconds=seconds)
        assert done.returncode == 0, f"{words}: {done.stderr} {self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(
            f"== {log.name}\n{log.read_text()[-1500:]}"
            for log in sorted((self.data / "logs").glob("[a-z]*.log"))
        )

    def tasks(self) -> list[Mapping[str, object]]:
        found: list[Mapping[str, object]] = json.loads(
            self.ask("task", "list", "--limit", "1000", "--json")
        )["tasks"]
        return found


SECRETS = {
    "PENSTOCK_WORKER_SECRET": "hunter2-of-the-workers",
}


def _processes() -> dict[int, tuple[int, str]]:
    """All processes: their parents and their command lines, by their numbers."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            )
        except (OSError, IndexError):
            continue
        found[int(folder.name)] = (parent, command)
    return found


def _below(root: int) -> dict[int, str]:
    """What a process has started, and what that has."""
    every = _processes()
    found: dict[int, str] = {}
    waiting = [root]
    while waiting:
        parent = waiting.pop()
        for number, (above, command) in every.items():
            if above == parent and number not in found:
                found[number] = command
                waiting.append(number)
    return found


@contextmanager
def _up(folder: Path, *words: str) -> Iterator[Up]:
    port, said = free_port(), folder / "up.err"
    with said.open("w") as stderr:
        ports = ("--internal-port", str(free_port()), "--webhook-port", str(free_port()))
        process = subprocess.Popen(
            [PENSTOCK, "up", *words, "--data", str(folder / "data"), "--port", str(port), *ports],
            stderr=stderr,
            text=True,
            start_new_session=True,
            env={**os.environ, **SECRETS},
        )
    try:
        up = Up(process, f"http://127.0.0.1:{port}", folder / "data", said)
        _until(lambda: "Penstock is up" in said.read_text(), up)
        yield up
    finally:
        below = _below(process.pid)
        if process.poll() is None:
            process.kill()
        process.wait(30)
        # What is leashed ends by itself when its parent has gone.
        deadline = CLOCK.monotonic() + 60
        while below.keys() & _processes().keys() and CLOCK.monotonic() < deadline:
            PAUSE.wait(0.1)


def _until(holds: Callable[[], object], up: Up) -> None:
    deadline = CLOCK.monotonic() + SECONDS_MAX
    while not holds():
        assert up.process.poll() is None, up.said.read_text()
        assert CLOCK.monotonic() < deadline, f"{up.said.read_text()} {up.logs()}"
        PAUSE.wait(0.05)


def _kill(up: Up, words: str, *, is_leash: bool) -> None:
    """Kill what runs these words, or the leash that holds it, and wait until it is gone.

    What fell with another that was killed before it may still be on its way back.
    """

    def found() -> list[int]:
        return [
            number
            for number, command in _below(up.process.pid).items()
            if words in command and ("kernel.parent_watch" in command) is is_leash
        ]

    numbers: list[int] = []

    def is_there() -> bool:
        numbers[:] = found()
        return bool(numbers)

    _until(is_there, up)
    number = numbers[0]
    os.kill(number, signal.SIGKILL)
    _until(lambda: number not in _below(up.process.pid), up)


def _run_partition(up: Up, key: str) -> None:
    """Tell of a partition and wait until all of its tasks are completed."""
    told = {"job": "ingest", "partition_key": key, "event_id": key}
    _until(lambda: _asked(up, "POST", "/v1/trigger", told) is not None, up)

    def is_done() -> bool:
        found = _asked(up, "GET", "/v1/tasks?limit=1000", None)
        tasks = found["tasks"] if found is not None else []
        mine = [each for each in tasks if each["partition_key"] == key]
        statuses = {(each["job"], each["status"]) for each in mine}
        return statuses == {(job, "completed") for job in JOBS}

    _until(is_done, up)


def _asked(up: Up, method: str, path: str, body: object) -> Any:
    """What the dispatcher answers; None if none does now."""
    try:
        answer = httpx.request(method, up.url + path, json=body, timeout=10)
    except httpx.TransportError:
        return None
    return answer.json() if answer.status_code == 200 else None


@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at /proc")
def test_up_survives_the_death_of_every_process_and_stops_cleanly(tmp_path: Path) -> None:
    with _up(tmp_path, str(EXAMPLE)) as up:
        _run_partition(up, "2026-01-01T00")
        # Every user of the machine can read the arguments of all processes.
        assert "hunter2" not in str(_below(up.process.pid))
        kinds = {
            "postgres": "/postgres -D",
            "dispatcher": "penstock dispatcher",
            "worker": "penstock worker",
            "webhook": "penstock source webhook",
        }
        for kind, words in kinds.items():
            _kill(up, words, is_leash=False)
            _run_partition(up, f"after-{kind}")
        # Now the leashes that hold them.
        for words in kinds.values():
            _kill(up, words, is_leash=True)
        _run_partition(up, "after-leashes")
        tasks = up.tasks()
        assert {each["status"] for each in tasks} == {"completed"}
        below = _below(up.process.pid)
        # What may face the internet holds a token of its own, and nothing that opens more.
        (secret,) = SECRETS.values()
        for number, command in below.items():
            if kinds["webhook"] in command:
                held = Path(f"/proc/{number}/environ").read_bytes().decode().split("\0")
                ours = {each.partition("=")[0] for each in held if each.startswith("PENSTOCK_")}
                assert "PENSTOCK_WEBHOOK_TOKEN" in ours
                assert not ours & {f"PENSTOCK_{name}" for name in ("POSTGRES", "DATA", "API_TOKEN")}
                assert secret not in "".join(held)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(90) == 0, up.said.read_text()
        assert "Stopped" in up.said.read_text()
        left = below.keys() & _processes().keys()
        assert not left, {number: below[number] for number in left}


def test_a_port_that_is_taken_is_told_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = penstock("up", "--data", str(tmp_path / "data"), "--port", str(port))
    assert done.returncode == 2
    assert f"Cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--internal-port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_webhook_that_others_could_post_to_is_told_before_anything_is_made(
    tmp_path: Path,
) -> None:
    (tmp_path / "dag.yaml").write_text(
        "jobs:\n  orders: {activation: source, source: {kind: webhook}, outputs: [orders]}\n"
    )
    words = ("up", str(tmp_path / "dag.yaml"), "--data", str(tmp_path / "data"))
    done = penstock(*words, environment={"PENSTOCK_WEBHOOK_HOST": "0.0.0.0"})
    assert done.returncode == 2
    assert "Webhooks without `auth` are taken on loopback alone: orders." in done.stderr
    assert not (tmp_path / "data").exists()


def test_what_is_wrong_is_told_before_anything_is_made(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("jobs:\n  a:\n    runtime: process\n    operator: nonsense\n")
    data = ("--data", str(tmp_path / "data"))
    done = penstock("up", str(wrong), *data)
    assert done.returncode == 2
    assert "wrong.yaml:4: jobs.a.operator: " in done.stderr
    done = penstock("up", "--port", "7979", "--internal-port", "7979", *data)
    assert (done.returncode, "port and internal_port are both 7979" in done.stderr) == (2, True)
    done = penstock("up", "--force", *data)
    assert (done.returncode, "--force is about FILE" in done.stderr) == (2, True)
    assert [each.name for each in tmp_path.iterdir()] == ["wrong.yaml"]
    ports = ("--port", "0", "--internal-port", "0", "--webhook-port", "0")
    done = penstock("up", "--data", "/dev/null/x", *ports)
    assert (done.returncode, "/dev/null/x" in done.stderr) == (1, True)
    prot = {"PENSTOCK_PROT": "1"}
    done = penstock("up", "--postgres", "no dsn", *data, environment=prot)
    assert "Unknown setting PENSTOCK_PROT; did you mean PENSTOCK_PORT?" in done.stderr


def test_a_process_that_does_not_start_ends_up_with_its_own_sentence(tmp_path: Path) -> None:
    ports = ("--port", "0", "--internal-port", "0", "--webhook-port", "0")
    dsn = f"host=127.0.0.1 port={free_port()} dbname=x"
    done = penstock("up", "--data", str(tmp_path / "data"), "--postgres", dsn, *ports, seconds=90)
    assert done.returncode == 1
    assert "The dispatcher exited during startup: Postgres does not answer" in done.stderr
    assert "Is it running, and reachable?" in done.stderr
    assert "Penstock is up" not in done.stderr


@pytest.mark.timeout(400)
def test_up_that_is_killed_goes_on_and_refuses_a_file_that_would_break_work(tmp_path: Path) -> None:
    with _up(tmp_path, str(EXAMPLE)) as up:
        # A worker is there from the first moment, and so is the webhook.
        assert json.loads(up.ask("status", "--json"))["workers"] == 1
        assert "for webhooks at http://127.0.0.1:" in up.said.read_text()
        _run_partition(up, "2026-01-01T00")
    # The block has killed it with SIGKILL.
    with _up(tmp_path, str(EXAMPLE)) as up:
        assert "is already in force" in up.said.read_text()
        # The report may have run twice: once for each of its inputs.
        assert {(each["job"], each["status"]) for each in up.tasks()} == {
            (job, "completed") for job in JOBS
        }
        _run_partition(up, "2026-01-01T01")
        before = len(up.tasks())
        up.ask("pause", "clean")
        up.ask("trigger", "ingest", "--partition", "2026-01-01T02")
        _until(lambda: len(up.tasks()) > before, up)
    text = EXAMPLE.read_text()
    shorter = tmp_path / "shorter.yaml"
    shorter.write_text(text[: text.index("  clean:")])
    ports = ("--port", "0", "--internal-port", "0", "--webhook-port", "0")
    done = penstock("up", str(shorter), "--data", str(tmp_path / "data"), *ports, seconds=90)
    assert done.returncode == 1, done.stderr
    told, _, after = done.stderr.partition("Stopping ...")
    assert "clean: 1 waiting" in told
    assert "--force" in told
    assert "penstock:" not in after
    with _up(tmp_path, str(shorter), "--force") as up:
        assert "Removed: clean, " in up.said.read_text()
