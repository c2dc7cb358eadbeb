"""A result that is thousands of times its input, beside a task that must not notice it.

Both are in one JVM, whose heap has no place for the result, and neither may be tried twice: what is
gathered, or dies and is repeated, is seen.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.dispatcher.client import Client
from penstock.kernel.errors import DispatcherUnavailable
from tests.e2e.fleet import CLOCK, fleet_of, until

ROWS, TIMES = 4_000, 5_000
SECONDS = 400
MODULE = f"""
from pathlib import Path
from threading import Event

def linger(inputs, context):
    pause = Event()
    Path("begun").touch()
    for _ in range({SECONDS} * 10):
        if Path("over").exists():
            return context.session.range(7)
        pause.wait(0.1)
    raise TimeoutError("nobody said that it is over")
"""
DAG = f"""
jobs:
  tick: {{activation: source, source: {{kind: manual}}, outputs: [ticks]}}
  told: {{activation: source, source: {{kind: manual}}, outputs: [keys]}}
  linger:
    runtime: spark
    operator: spark.python
    config: {{transform: "innocent:linger"}}
    inputs: [tick.ticks]
    outputs: [lingered]
    max_attempts: 1
  little:
    runtime: spark
    operator: spark.sql
    config: {{sql: "SELECT id, uuid() AS text FROM range({ROWS})"}}
    inputs: [told.keys]
    outputs: [little]
  explode:
    runtime: spark
    operator: spark.sql
    config: {{sql: "SELECT id, explode(sequence(1, {TIMES})) AS number FROM little"}}
    inputs: [little]
    outputs: [much]
    max_attempts: 1
"""
SETTINGS = """
[runtimes.spark]
driver_memory = "600m"
parallel = 2
archive = false
"""


@pytest.mark.timeout(2 * SECONDS)
def test_a_task_beside_one_that_explodes_is_not_disturbed(tmp_path: Path) -> None:
    async def main() -> None:
        modules = {"innocent.py": MODULE, "penstock.toml": SETTINGS}
        async with (
            fleet_of(tmp_path, dispatchers=1, workers=1, modules=modules) as fleet,
            Client(fleet.public_urls()[0]) as client,
        ):
            for _ in range(600):
                with suppress(DispatcherUnavailable):
                    await client.apply(DAG)
                    break
                await CLOCK.sleep(0.1)
            await client.trigger("tick", event_id="t", partition_key="a")
            await until((tmp_path / "begun").exists, seconds=SECONDS)
            await client.trigger("told", event_id="e", partition_key="a")
            ended = await _ended(client, "explode")
            (tmp_path / "over").touch()
            assert (ended, await _ended(client, "linger")) == ("completed", "completed")
            (much,) = (await client.snapshot("much")).parts
            assert much.rows == ROWS * TIMES

    asyncio.run(main())


async def _ended(client: Client, job: str) -> str:
    """How the one task of a job has ended, or that it has not."""
    status = "missing"
    for _ in range(SECONDS * 5):
        for task in (await client.tasks(job=job)).tasks:
            status = task.status
        if status in ("completed", "dead", "cancelled"):
            break
        await CLOCK.sleep(0.2)
    return status
