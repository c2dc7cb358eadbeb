"""A pipeline worker that is killed with `kill -9` gives up what it held at once.

Leases last ten minutes here, so nothing goes on because one has run out. How long it takes is
logged: three seconds are promised.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.kernel.process_locks import LOCAL_FILE_SYSTEMS, file_system
from penstock.kernel.settings_schema import FILE_VARIABLE
from tests.e2e import test_up
from tests.e2e.fleet import CLOCK, Fleet, fleet_of
from tests.e2e.test_up import Up
from tests.e2e.test_up import _asked as asked_of
from tests.e2e.test_up import _below as below_up
from tests.e2e.test_up import _kill as kill_of_up
from tests.e2e.test_up import _until as until_up
from tests.e2e.test_up import _up as up_of

_log = logging.getLogger(__name__)

MODULE = """
import os, pathlib, time

def first(task):
    noted = pathlib.Path(task.partition_key)
    before = noted.read_text().split() if noted.exists() else []
    with noted.open("a") as file:
        print(os.getpid(), file=file)
    if not before:
        time.sleep(3600)
    for number in set(before) - {str(os.getpid())}:
        assert not runs(number), "the first attempt still runs"
    write(task)

def gated(task):
    folder = pathlib.Path(task.config["folder"])
    with (folder / task.partition_key).open("a") as file:
        print(os.getpid(), file=file)
    while (folder / "gate").exists():
        time.sleep(0.02)
    write(task)

def runs(number):
    # What has ended stays a zombie until the machine's first process has looked.
    stat = pathlib.Path("/proc", number, "stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

def write(task):
    for output in task.outputs.values():
        (pathlib.Path(output.path) / "made.txt").write_text("made")
"""
DAG = """
jobs:
  ingest: {activation: source, source: {kind: manual}, outputs: [hours]}
  begins:
    {runtime: process, operator: chain:first, inputs: [ingest.hours], outputs: [begun],
     heartbeat_timeout: 10m}
  follows: {runtime: process, operator: chain:write, inputs: [begins.begun], outputs: [done]}
"""
GATED = """
jobs:
  ingest: {activation: source, source: {kind: manual}, outputs: [hours]}
  begins:
    {runtime: process, operator: chain:gated, config: {folder: "FOLDER"}, inputs: [ingest.hours],
     outputs: [begun], heartbeat_timeout: 10m}
  follows: {runtime: process, operator: chain:write, inputs: [begins.begun], outputs: [done]}
"""
SPARK = """
jobs:
  ingest: {activation: source, source: {kind: manual}, outputs: [hours]}
  begins:
    {runtime: spark, operator: spark.sql, config: {sql: "SELECT 1 AS one"}, inputs: [ingest.hours],
     outputs: [begun], heartbeat_timeout: 10m}
  follows: {runtime: process, operator: chain:write, inputs: [begins.begun], outputs: [done]}
"""
SPARK_SETTINGS = """
[runtimes.spark]
driver_memory = "1g"
parallel = 2
tiny = true
archive = false
"""
SPARK_HOST = "penstock.runtimes.spark.host"
SLOTS = 4
SECONDS_MAX = 30.0
"""Of three that are promised, on a machine that does many other things."""


async def _asked(fleet: Fleet, method: str, path: str, body: object = None) -> Any:
    async with httpx.AsyncClient(base_url=fleet.public_urls()[0], timeout=20) as client:
        for _ in range(1200):
            try:
                answer = await client.request(method, path, json=body)
            except httpx.TransportError:
                await CLOCK.sleep(0.1)
                continue
            assert answer.status_code == 200, answer.text
            return answer.json()
    raise AssertionError("no dispatcher answers")


async def _tasks(fleet: Fleet, key: str) -> Mapping[str, Any]:
    found = await _asked(fleet, "GET", "/v1/tasks?limit=100")
    return {each["job"]: each for each in found["tasks"] if each["partition_key"] == key}


async def _hangs(fleet: Fleet, key: str) -> Any:
    """Have a task run that does not end by itself."""
    told = {"job": "ingest", "partition_key": key, "event_id": key}
    await _asked(fleet, "POST", "/v1/trigger", told)
    async with asyncio.timeout(60):
        while not (fleet.folder / key).exists():
            await CLOCK.sleep(0.05)
    return (await _tasks(fleet, key))["begins"]


async def _goes_on(fleet: Fleet, key: str) -> float:
    """How long it takes until the chain has ended."""
    began = CLOCK.monotonic()
    async with asyncio.timeout(SECONDS_MAX):
        while (await _tasks(fleet, key)).get("follows", {}).get("status") != "completed":
            await CLOCK.sleep(0.05)
    task = (await _tasks(fleet, key))["begins"]
    found = await _asked(fleet, "GET", f"/v1/tasks/{task['id']}")
    ends = [(each["outcome"], each["reason"]) for each in found["attempts"]]
    assert sorted(ends, key=str) == [
        ("completed", None),
        ("failed", "Its worker was killed while it ran."),
    ]
    return CLOCK.monotonic() - began


def skip_unless_local(folder: Path) -> None:
    with (folder / "probe").open("w") as probe:
        if file_system(probe.fileno()) not in LOCAL_FILE_SYSTEMS:
            pytest.skip("the folder of the tests is not on a local file system")


@pytest.mark.timeout(200)
def test_what_a_killed_worker_held_goes_on_at_once(tmp_path: Path) -> None:
    skip_unless_local(tmp_path)

    async def main() -> None:
        modules = {"chain.py": MODULE}
        async with fleet_of(tmp_path, dispatchers=1, workers=1, modules=modules) as fleet:
            await _asked(fleet, "POST", "/v1/dag", {"source": DAG})
            await _hangs(fleet, "alone")
            await fleet.kill("worker-0")
            await fleet.start("worker-0")
            _log.info("started again: on after %.1f s", await _goes_on(fleet, "alone"))
            await fleet.start("worker-1")
            task = await _hangs(fleet, "beside")
            await fleet.kill(task["worker"])
            _log.info("beside another: on after %.1f s", await _goes_on(fleet, "beside"))

    asyncio.run(main())


@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at /proc")
def test_a_chain_goes_on_under_up_and_only_what_had_begun_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_local(tmp_path)
    (tmp_path / "chain.py").write_text(MODULE)
    (tmp_path / "dag.yaml").write_text(GATED.replace("FOLDER", str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_CONCURRENCY", str(SLOTS))
    with up_of(tmp_path, str(tmp_path / "dag.yaml")) as up:
        # Short tasks: from now on more of them are claimed than there are slots.
        _run(up, [f"short-{number}" for number in range(12)])
        gate, keys = tmp_path / "gate", [f"gated-{number}" for number in range(12)]
        gate.touch()
        _trigger(up, keys)
        until_up(lambda: len(_noted(tmp_path, keys)) == SLOTS, up)
        kill_of_up(up, "penstock worker", is_leash=False)
        killed_at, begun = CLOCK.monotonic(), _noted(tmp_path, keys)
        gate.unlink()
        _finish(up, keys)
        _log.info("under up: on after %.1f s", CLOCK.monotonic() - killed_at)
        lost = 0
        for key in keys:
            ends = {each["job"]: _attempts(up, each["id"]) for each in _of(up, key)}
            assert ends["follows"][0]["started_at"] >= ends["begins"][-1]["ended_at"]
            outcomes = [each["outcome"] for each in ends["begins"]]
            assert outcomes[-1] == "completed"
            assert outcomes.count("failed") == (key in begun), ends["begins"]
            lost += len(outcomes) - 1 - outcomes.count("failed")
        _log.info("%d attempts had not begun, and do not count", lost)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at /proc")
@pytest.mark.proof(meanwhile="test_a_chain_goes_on_under_up_and_only_what_had_begun_is_counted")
def test_a_spark_job_whose_host_was_starting_goes_on_under_up_and_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_local(tmp_path)
    (tmp_path / "chain.py").write_text(MODULE)
    (tmp_path / "dag.yaml").write_text(SPARK)
    (tmp_path / "penstock.toml").write_text(SPARK_SETTINGS)
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "penstock.toml"))
    # A host that starts beside much else takes its time.
    monkeypatch.setattr(test_up, "SECONDS_MAX", 300.0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with up_of(tmp_path, str(tmp_path / "dag.yaml")) as up:
        _trigger(up, ["a"])
        # Claimed, and its host is not ready yet.
        until_up(lambda: _hosts(up) and _is_held(up), up)
        old = _hosts(up)
        kill_of_up(up, "penstock worker", is_leash=False)
        killed_at = CLOCK.monotonic()
        until_up(lambda: not old & _hosts(up), up)
        _finish(up, ["a"])
        _log.info("under up, with Spark: on after %.1f s", CLOCK.monotonic() - killed_at)
        ends = {each["job"]: _attempts(up, each["id"]) for each in _of(up, "a")}
        # Its query had not begun: that it is tried again costs the task nothing.
        assert [each["outcome"] for each in ends["begins"]][1:] == ["completed"]
        assert ends["begins"][0]["outcome"] != "failed"
        assert ends["follows"][0]["started_at"] >= ends["begins"][-1]["ended_at"]


def _is_held(up: Up) -> bool:
    """Whether the worker has noted that it holds something."""
    return any(each.stat().st_size for each in (up.data / "workers").glob("*.held"))


def _hosts(up: Up) -> set[int]:
    """The hosts of Spark that run."""
    return {number for number, command in below_up(up.process.pid).items() if SPARK_HOST in command}


def _run(up: Up, keys: Sequence[str]) -> None:
    _trigger(up, keys)
    _finish(up, keys)


def _trigger(up: Up, keys: Sequence[str]) -> None:
    for key in keys:
        told = {"job": "ingest", "partition_key": key, "event_id": key}
        until_up(lambda: asked_of(up, "POST", "/v1/trigger", told) is not None, up)  # noqa: B023


def _finish(up: Up, keys: Sequence[str]) -> None:
    done = {("begins", "completed"), ("follows", "completed")}
    for key in keys:
        until_up(lambda: {(each["job"], each["status"]) for each in _of(up, key)} == done, up)  # noqa: B023


def _of(up: Up, key: str) -> list[Mapping[str, Any]]:
    """The tasks of a partition."""
    found = asked_of(up, "GET", "/v1/tasks?limit=1000", None) or {"tasks": []}
    return [each for each in found["tasks"] if each["partition_key"] == key]


def _attempts(up: Up, task: int) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = asked_of(up, "GET", f"/v1/tasks/{task}", None)["attempts"]
    return sorted(found, key=lambda each: each["number"])


def _noted(folder: Path, keys: Sequence[str]) -> set[str]:
    """Those whose function has begun."""
    return {key for key in keys if (folder / key).exists()}
