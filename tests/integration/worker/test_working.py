"""The real worker against the real API on a real Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from penstock.dispatcher.tasks.model import Fence
from penstock.runtimes.base import (
    AttemptWork,
    ProducedOutput,
    Runtime,
    RuntimeFault,
    WorkReporter,
    WorkResult,
)
from penstock.runtimes.process import process
from tests.integration.dispatcher.world import failed
from tests.integration.worker.site import Site, play

CODE = """
from pathlib import Path

def clean(task):
    print("cleaning", task.partition_key)
    Path(task.outputs["tidy"].path, "part.txt").write_text(task.partition_key.upper())

def report(task):
    text = Path(task.inputs["tidy"].path, "part.txt").read_text()
    if text == "BROKEN":
        raise ValueError("no report of this")
    Path(task.outputs["daily"].path, "part.txt").write_text(f"report of {text}")
"""
DAG = """
jobs:
  feed:
    activation: source
    source: {kind: manual}
    outputs: [raw]
  clean:
    runtime: process
    operator: CODE:clean
    inputs: [raw]
    outputs: [tidy]
    heartbeat_timeout: HEARTBEAT
  report:
    runtime: process
    operator: CODE:report
    max_attempts: 1
    inputs: [tidy]
    outputs: [daily]
"""


def dag(*, module: str = "a", heartbeat: str = "30s") -> str:
    return DAG.replace("CODE", module).replace("HEARTBEAT", heartbeat)


class Waiting(Runtime):
    """Runs until it is told to go on."""

    name = "process"

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.running: list[AttemptWork] = []
        self.cancelled: list[int] = []

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        assert not self.running

    def operators(self) -> Collection[str] | None:
        return None

    def faults(
        self, operator: str, *, config: Mapping[str, Any], resources: Mapping[str, Any]
    ) -> Iterable[RuntimeFault]:
        return ()

    async def run(self, work: AttemptWork, reporter: WorkReporter) -> WorkResult:
        self.running.append(work)
        reporter.progress({"step": 1})
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.append(work.task_id)
            raise
        finally:
            self.running.remove(work)
        key = work.payload.get("partition_key")
        made = tuple(
            ProducedOutput(output=name, location=place.location, partition_key=key)
            for name, place in work.outputs.items()
        )
        return WorkResult(made=made)


def file_of(location: str) -> Path:
    return Path(unquote(urlsplit(location).path))


def printed(log: str) -> str:
    return Path(log).read_text() if Path(log).exists() else ""


def test_a_pipeline_runs_in_child_processes_to_its_end(dsn: str, tmp_path: Path) -> None:
    module = f"code_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(CODE)
    keys = [*(f"day/{number:02d}" for number in range(30)), "broken"]

    async def story(site: Site) -> None:
        runtime = process({"path": [str(tmp_path)]})
        async with site.working(runtime, concurrency=4):
            await site.pipeline.send(*keys)
            await site.until_all(completed=61, dead=1)
        rows = await site.world.rows(
            "SELECT dataset.name, partition_key, location FROM publication"
            " JOIN dataset ON dataset.id = dataset_id"
        )
        found = {
            (row["name"], row["partition_key"]): (file_of(row["location"]) / "part.txt").read_text()
            for row in rows
        }
        assert found == {
            **{("tidy", key): key.upper() for key in keys},
            **{("daily", key): f"report of {key.upper()}" for key in keys[:-1]},
        }
        (dead,) = await site.world.rows("SELECT id, reason FROM task WHERE status = 'dead'")
        assert "ValueError: no report of this" in dead["reason"]
        attempts = await site.world.rows("SELECT task_id, number, worker, log FROM attempt")
        assert {row["number"] for row in attempts} == {1}
        assert {row["worker"] for row in attempts} == {"worker-1"}
        assert sum(printed(row["log"]).count("cleaning") for row in attempts) == 31
        assert "ValueError" in (tmp_path / "logs" / f"{dead['id']}-1.log").read_text()

    play(dsn, tmp_path, dag(module=module), story)


def test_an_outage_costs_nothing_but_time(dsn: str, tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        runtime = Waiting()
        async with site.working(runtime):
            await site.pipeline.send("x", "y")
            await site.until(lambda: _is(len(runtime.running) == 2))
            await site.down()
            # Longer than the lease.
            await site.world.rows(
                "UPDATE task SET lease_expires_at = penstock_now() - interval '1 hour'"
                " WHERE status = 'running'"
            )
            runtime.go_on.set()
            await site.until(lambda: _is(not runtime.running))
            await site.up()
            await site.until_all(completed=4)
        assert await site.world.value("SELECT max(attempt) FROM task") == 1
        assert runtime.cancelled == []

    play(dsn, tmp_path, dag(), story)


async def _is(value: bool) -> bool:
    # Others run while the event loop waits for something.
    await asyncio.get_running_loop().run_in_executor(None, int)
    return value


def test_what_is_cancelled_or_taken_over_is_interrupted(dsn: str, tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        runtime = Waiting()
        async with site.working(runtime, concurrency=2):
            await site.pipeline.send("x", "y")
            await site.until(lambda: _is(len(runtime.running) == 2))
            first, second = sorted(work.task_id for work in runtime.running)

            async def is_progress_seen() -> bool:
                rows = await site.world.rows("SELECT progress FROM attempt")
                return all(row["progress"] == {"step": 1} for row in rows)

            await site.until(is_progress_seen)
            await site.world.tasks.cancel([first])
            await site.until_all(cancelled=1, running=1)
            # Somebody ends the other, as the reaper would, and its worker is told so.
            token = await site.world.value("SELECT lease_token FROM task WHERE id = %s", second)
            await site.world.tasks.fail(failed(Fence(second, 1, token), is_retried=False))
            await site.until(lambda: _is(not runtime.running))
            assert sorted(runtime.cancelled) == [first, second]
        assert await site.statuses() == {"cancelled": 1, "dead": 1}
        assert await site.world.value("SELECT count(*) FROM publication") == 0

    play(dsn, tmp_path, dag(heartbeat="1s"), story)


def test_a_worker_without_the_module_leaves_the_task_to_one_that_has_it(
    dsn: str, tmp_path: Path
) -> None:
    module = f"code_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(CODE)

    async def story(site: Site) -> None:
        async def is_handed_back() -> bool:
            rows = await site.world.rows("SELECT outcome FROM attempt WHERE outcome IS NOT NULL")
            return [row["outcome"] for row in rows] == ["released"]

        async with site.working(process({}), look_seconds=1.0):
            await site.pipeline.send("x")
            await site.until(is_handed_back)
            runtime = process({"path": [str(tmp_path)]})
            async with site.working(runtime, name="worker-2", look_seconds=1.0):
                await site.until_all(completed=2)
        rows = await site.world.rows("SELECT DISTINCT worker, outcome, reason FROM attempt")
        found = {(row["worker"], row["outcome"]) for row in rows}
        assert found == {("worker-1", "released"), ("worker-2", "completed")}
        reasons = [row["reason"] for row in rows if row["outcome"] == "released"]
        assert all(each.startswith(f"There is no module {module} for ") for each in reasons)

    once = dag(module=module).replace("inputs: [raw]", "inputs: [raw]\n    max_attempts: 1")
    play(dsn, tmp_path, once, story)


def test_a_worker_that_is_stopped_gives_back_what_runs(dsn: str, tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        runtime = Waiting()
        async with site.working(runtime, concurrency=1, stop_seconds=0.0):
            await site.pipeline.send("x")
            await site.until(lambda: _is(len(runtime.running) == 1))
        rows = await site.world.rows("SELECT status, reason FROM task")
        assert [tuple(row.values()) for row in rows] == [("queued", "The worker was stopped.")]
        assert await site.world.value("SELECT outcome FROM attempt") == "released"

    once = dag().replace("inputs: [raw]", "inputs: [raw]\n    max_attempts: 1")
    play(dsn, tmp_path, once, story)


def test_a_worker_of_a_queue_runs_the_tasks_of_that_queue_alone(dsn: str, tmp_path: Path) -> None:
    module = f"code_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(CODE)
    both = dag(module=module).replace("max_attempts: 1", "resources: {queue: gpu}")
    keys = [f"day/{number}" for number in range(8)]

    async def story(site: Site) -> None:
        def runtime() -> Runtime:
            return process({"path": [str(tmp_path)]})

        async with site.working(runtime(), name="plain", queues=("default",)):
            await site.pipeline.send(*keys)
            await site.until_all(completed=8, queued=8)
            async with site.working(runtime(), name="gpu", queues=("gpu",)):
                await site.until_all(completed=16)
                # One that comes when its worker is there is woken for, and not found by looking.
                await site.pipeline.send("later")
                await site.until_all(completed=18)
        rows = await site.world.rows(
            "SELECT DISTINCT job.name AS job, attempt.worker FROM attempt"
            " JOIN task ON task.id = attempt.task_id JOIN job ON job.id = task.job_id"
        )
        found = {(row["job"], row["worker"]) for row in rows}
        assert found == {("clean", "plain"), ("report", "gpu")}

    play(dsn, tmp_path, both, story)
