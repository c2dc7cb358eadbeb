"""A pipeline worker that is killed with `kill -9` gives up what it held at once.

Leases last ten minutes here, so nothing goes on because one has run out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.kernel.process_locks import LOCAL_FILE_SYSTEMS, file_system
from tests.e2e.fleet import CLOCK, Fleet, fleet_of

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


@pytest.mark.timeout(200)
def test_what_a_killed_worker_held_goes_on_at_once(tmp_path: Path) -> None:
    with (tmp_path / "probe").open("w") as probe:
        if file_system(probe.fileno()) not in LOCAL_FILE_SYSTEMS:
            pytest.skip("the folder of the tests is not on a local file system")

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
