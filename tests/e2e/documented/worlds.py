"""The few worlds that commands of the pages are run in, each with facts to fill in.

The pipeline is what docs/pipeline.md says to type first, with some jobs more: one whose tasks die,
one that is paused, and one that was edited so that it waits to be cut over. The queue is the one of
docs/queue.md with a task in each state. Nowhere is an empty folder.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psycopg

from penstock import Polling, Queue, Retry, TaskContext, TaskFailed, Worker, WorkerSettings
from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.kernel.ports import free_port
from tests.architecture.source import ROOT
from tests.e2e.command import PENSTOCK
from tests.e2e.documented.forked import Forked
from tests.e2e.documented.plan import Planned
from tests.e2e.reader import CLOCK, PAUSE, PORTS, SECONDS_MAX, Reader, a_reader, section

SECRET = "the secret of the workers in a test of pages"
_FACT = re.compile(r"<(\w+)>")

JOBS = """
  delivered: {activation: source, source: {kind: manual}, outputs: [days]}
  posted: {activation: source, source: {kind: webhook, path: /orders}, outputs: [posts]}
  orders: {runtime: process, operator: "shop:orders", inputs: [delivered.days], outputs: [orders]}
  broken:
    runtime: process
    operator: shop:broken
    inputs: [delivered.days]
    outputs: [nothing]
    max_attempts: 1
  later: {runtime: process, operator: "shop:later", inputs: [delivered.days], outputs: [late]}
"""
MODULE = """
import pyarrow
import pyarrow.parquet


def orders(task):
    print("counting the orders of", task.partition_key)
    rows = pyarrow.table({"shop": ["north", "south"], "amount": [12.5, 3.0]})
    pyarrow.parquet.write_table(rows, task.outputs["orders"].path / "orders.parquet")


def later(task):
    pass


def broken(task):
    raise ValueError("there is no file of the day")
"""


@dataclass
class World:
    """A folder, an environment, and what is there to be named."""

    folder: Path
    environment: Mapping[str, str]
    ours: Forked
    facts: dict[str, str] = field(default_factory=dict)
    begun: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    """What takes long and was started before its turn, by its line."""

    def run(self, planned: Planned) -> subprocess.CompletedProcess[str]:
        """Run a line to its end."""
        if planned.line in self.begun:
            ran = self._end(self.begun.pop(planned.line))
        elif planned.words:
            words = [*map(self.with_facts, planned.words)]
            ran = self.ours.run(words, folder=self.folder, environment=self.environment)
        else:
            ran = self._end(self.start(planned))
        if planned.saved:
            place = self.folder / planned.saved
            place.parent.mkdir(exist_ok=True)
            place.write_text(ran.stdout)
        return ran

    def _end(self, begun: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        with begun as running:
            try:
                out, errors = running.communicate(timeout=SECONDS_MAX)
            finally:
                running.kill()
        return subprocess.CompletedProcess(running.args, running.returncode, out, errors)

    def start(self, planned: Planned, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._words(planned),
            cwd=self.folder,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def stay(self, planned: Planned, said: str) -> tuple[int, str]:
        """Start a line, wait until it says that it is ready, and end it as an operator does."""
        home = self.folder / "staying"
        home.mkdir(exist_ok=True)
        own = {f"PENSTOCK_{name}": str(free_port()) for name in PORTS}
        own |= {"PENSTOCK_DATA": str(home), "PYTHONUNBUFFERED": "1"}
        heard = home / "said.log"
        with heard.open("wb") as out:
            running = subprocess.Popen(
                self._words(planned),
                cwd=self.folder,
                env={**self.environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            _until(lambda: said in heard.read_text() or running.poll() is not None, heard)
            running.send_signal(signal.SIGTERM)
            return running.wait(SECONDS_MAX), heard.read_text()
        finally:
            running.kill()
            running.wait(SECONDS_MAX)

    def _words(self, planned: Planned) -> list[str]:
        if planned.words:
            return [str(PENSTOCK), *map(self.with_facts, planned.words)]
        return ["bash", "-euo", "pipefail", "-c", self.with_facts(planned.line)]

    def with_facts(self, text: str) -> str:
        return _FACT.sub(lambda found: self.facts[found[1]], text)


def _until(holds: Callable[[], object], log: Path) -> None:
    deadline = CLOCK.monotonic() + SECONDS_MAX
    while not holds():
        assert CLOCK.monotonic() < deadline, log.read_text()
        PAUSE.wait(0.1)


def _outside() -> dict[str, str]:
    """The environment of somebody who has set nothing."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    return {**own, "PATH": f"{PENSTOCK.parent}{os.pathsep}{os.environ['PATH']}"}


def nowhere(folder: Path, ours: Forked) -> World:
    return World(folder, _outside(), ours, {"bucket": f"file://{folder}/bucket"})


@contextmanager
def a_pipeline(folder: Path, ours: Forked) -> Iterator[World]:
    """The pipeline of docs/pipeline.md, as it says to start it and to try it, and more jobs."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    jobs = (folder / "examples" / "five_jobs.yaml").read_text()
    edited = jobs.replace('not glob "test-*"', 'not glob "2026-*"') + JOBS
    (folder / "examples" / "shop.py").write_text(MODULE)
    (folder / "shop.yaml").write_text(edited)
    (folder / "next.yaml").write_text(edited.replace("currency: EUR", "currency: CHF"))
    (folder / "keys.txt").write_text("2026-01-01T00\n")
    (folder / "payload.json").write_text('{"file": "a.csv"}')
    (folder / "keys.txt").write_text("2026-01-01T02\n2026-01-01T03\n")
    with a_reader(folder) as reader:
        # On loopback nobody has to bring a token.
        reader.environment |= {"PENSTOCK_API_TOKEN": "", "PENSTOCK_WORKER_SECRET": SECRET}
        start, tried = (
            each.text for each in section("docs/pipeline.md", "Five minutes") if each.is_typed
        )
        reader.type(start)
        reader.hears("Penstock is up")
        # The last line of it lists what is published of the report.
        assert "2026-01-01T00" in reader.type(tried).rpartition("location")[2]
        _run_the_program(reader)
        yield World(folder, reader.environment, ours, _steered(reader))


def _run_the_program(reader: Reader) -> None:
    """What docs/pipeline.md has for those who steer from Python."""
    (program,) = [
        each.text for each in section("docs/pipeline.md", "Steering") if each.language == "python"
    ]
    port = reader.environment["PENSTOCK_PORT"]
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program.replace(":7070", f":{port}")],
        cwd=reader.folder,
        env=reader.environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def _steered(reader: Reader) -> dict[str, str]:
    """Have something dead, something that waits and something that failed; the facts."""
    reader.type("penstock dag apply shop.yaml\npenstock pause later")
    for day in ("2026-01-01", "2026-01-02"):
        reader.type(f"penstock trigger delivered --partition {day}")
    public, internal, webhooks = (
        f"http://127.0.0.1:{reader.environment[f'PENSTOCK_{name}']}" for name in PORTS
    )
    found: dict[tuple[str, str], list[int]] = {}

    def is_so() -> bool:
        answer = httpx.get(f"{public}/v1/tasks?limit=1000", timeout=SECONDS_MAX)
        found.clear()
        for each in answer.json()["tasks"]:
            found.setdefault((each["job"], each["status"]), []).append(each["id"])
        wanted = [("orders", "completed"), ("broken", "dead"), ("later", "queued")]
        return all(len(found.get(each, ())) == 2 for each in wanted)

    _until(is_so, reader.log)
    dsn = LocalPostgres(reader.folder / "penstock-data" / "postgres").dsn
    with psycopg.connect(dsn) as connection:
        parked = connection.execute(
            "INSERT INTO outbox (kind, target, parked_at, last_error)"
            " VALUES ('wake', 'orders', penstock_now(), 'the bucket is away') RETURNING id"
        ).fetchone()
    assert parked is not None
    return {
        "url": public,
        "internal": internal,
        "webhooks": webhooks,
        "dsn": dsn,
        "store": f"file://{reader.folder}/penstock-data/store",
        "completed": str(found["orders", "completed"][0]),
        "dead": str(found["broken", "dead"][0]),
        "waiting": str(found["later", "queued"][0]),
        "parked": str(parked[0]),
        "kid": httpx.get(f"{public}/v1/keys", timeout=SECONDS_MAX).json()["keys"][0]["kid"],
    }


@contextmanager
def a_queue(folder: Path, ours: Forked, *, early: Callable[[World], None]) -> Iterator[World]:
    """The queue of docs/queue.md, with its module, and a task in each state."""
    url = f"file://{folder}/bucket"
    module = next(
        each.text for each in section("docs/queue.md", "Five minutes") if each.language == "python"
    )
    (folder / "lines.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (folder / "resize.json").write_text('{"type": ["object", "null"]}')
    (folder / "images.py").write_text(module.replace("file:///tmp/bucket", url))
    facts = asyncio.run(_filled_queue(url))
    there = {"PENSTOCK_STORE": url, "PENSTOCK_QUEUE": "images"}
    world = World(folder, {**_outside(), **there}, ours, {**facts, "bucket": url})
    early(world)
    try:
        yield world
    finally:
        for each in world.begun.values():
            each.kill()
            each.communicate(timeout=SECONDS_MAX)


async def _filled_queue(url: str) -> dict[str, str]:
    async with await Queue.open(url, name="images") as queue:
        quick = WorkerSettings(polling=Polling(min_seconds=0.1, max_seconds=0.2))
        worker = Worker(queue, settings=quick)

        @worker.handler("resize", retry=Retry(attempts=1))
        async def resize(task: TaskContext) -> object:
            return {"ok": task.input["n"]}

        prod = {"env": "prod"}
        async with asyncio.TaskGroup() as group:
            running = group.create_task(worker.run())
            well = await queue.submit("resize", {"n": 1})
            ill = await queue.submit("resize", {}, tags=prod)
            batch = await queue.batch("resize", [{"n": 2}, {"n": 3}])
            await well.result(timeout=SECONDS_MAX)
            with suppress(TaskFailed):
                await ill.result(timeout=SECONDS_MAX)
            await batch.wait(timeout=SECONDS_MAX)
            worker.stop()
            await running
        # Nobody has a handler for these.
        ready = await queue.submit("report", {"of": "day"})
        await queue.submit("report", {"of": "month"}, tags=prod)
        await queue.submit("report", {"of": "year"}, delay=3600)
    async with await Queue.open(url, name="empty"):
        pass
    return {
        "succeeded": well.id,
        "failed": ill.id,
        "batch": batch.id,
        "ready": ready.id,
    }
