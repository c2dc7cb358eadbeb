"""Many small files become few while everything runs, and nobody downstream hears of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import pytest

from penstock.dispatcher.client import Client
from penstock.kernel.errors import DispatcherUnavailable
from penstock.protocol.datasets import SnapshotPart
from tests.e2e.command import penstock
from tests.e2e.fleet import CLOCK, fleet_of

MODULE = """
def nothing(task):
    pass
"""
DAG = """
jobs:
  told: {activation: source, source: {kind: manual}, outputs: [orders]}
  tick: {activation: source, source: {kind: manual}, outputs: [ticks]}
  make:
    runtime: spark
    operator: spark.sql
    config: {sql: "SELECT id, xxhash64(id) AS hash FROM range(200000)"}
    inputs: [told.orders]
    outputs: [{name: numbers, MAINTAIN}]
  report: {runtime: process, operator: "quiet:nothing", inputs: [numbers]}
  delta:
    runtime: process
    operator: "quiet:nothing"
    inputs: [tick.ticks, {from: numbers, read: changes, trigger: false}]
"""
SETTINGS = """
[runtimes.spark]
driver_memory = "1g"
archive = false
"""
SMALL = 'target_file_bytes = "64KiB"\n'
RULE = "maintain: {compact: {files: 10, below: 1MiB}, after: 1s}"
SECONDS = 200


async def _apply(client: Client, maintain: str) -> None:
    for _ in range(600):
        with suppress(DispatcherUnavailable):
            await client.apply(DAG.replace("MAINTAIN", maintain))
            return
        await CLOCK.sleep(0.1)


async def _changes(client: Client, number: int) -> int:
    """How many parts the job that reads changes is given."""
    await client.trigger("tick", event_id=f"t{number}", cursor=number)
    await client.wait(timeout_seconds=SECONDS)
    (latest, *_) = (await client.tasks(job="delta")).tasks
    (consumed,) = (await client.task(latest.id)).consumed
    assert consumed.is_consumed
    return consumed.parts


async def _part(client: Client) -> SnapshotPart:
    (part,) = (await client.snapshot("numbers")).parts
    return part


def _rows(part: SnapshotPart) -> list[Any]:
    folder = part.location.removeprefix("file://")
    return duckdb.read_parquet(f"{folder}/*.parquet").order("id").fetchall()


@pytest.mark.timeout(600)
def test_many_small_files_become_few_and_nobody_hears_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        modules = {"quiet.py": MODULE, "penstock.toml": SETTINGS + SMALL}
        async with fleet_of(tmp_path, dispatchers=1, workers=1, modules=modules) as fleet:
            url = fleet.public_urls()[0]
            async with Client(url) as client:
                await _apply(client, "keep: {age: 365d}")
                await client.trigger("told", event_id="e", partition_key="a")
                await client.wait(timeout_seconds=SECONDS)
                assert await _changes(client, 1) == 1
                before = await _part(client)
                assert before.files is not None
                assert before.files >= 20
                rows = _rows(before)
                # Files are to be larger from now on, and nothing is made again for that.
                await fleet.stop("worker-0")
                (tmp_path / "penstock.toml").write_text(SETTINGS)
                await fleet.start("worker-0")
                await _apply(client, RULE)
                after = before
                for _ in range(SECONDS * 10):
                    after = await _part(client)
                    if after.location != before.location:
                        break
                    await CLOCK.sleep(0.1)
                assert (after.files, after.rows, after.revision) == (1, 200_000, 1)
                assert _rows(after) == rows
                assert await _changes(client, 2) == 0
                assert len((await client.tasks(job="report")).tasks) == 1
                assert not any(each.dead for each in (await client.status()).jobs)
            await asyncio.to_thread(_check, url)

    asyncio.run(main())


def _check(url: str) -> None:
    verified = penstock("dataset", "verify", "numbers", "--url", url)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    # It is in one file, and so cannot be in fewer.
    asked = penstock("dataset", "maintain", "numbers", "--url", url)
    assert asked.stdout == "Nothing to rewrite that has no task yet.\n", asked.stderr
