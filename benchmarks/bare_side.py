"""How `benchmarks.pipeline` drives the other side, `benchmarks.bare`: a step whenever it asks."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.runtimes.spark.settings import SparkSettings, classic_conf

ROOT = Path(__file__).resolve().parents[1]
WAIT_SECONDS_MAX = 1800.0
STOP_SECONDS_MAX = 60.0


class BareSide:
    """A process of `benchmarks.bare`, which does one step after the other when it is asked to."""

    def __init__(self, process: asyncio.subprocess.Process, errors: Path) -> None:
        self.start: dict[str, float] = {}
        self._process = process
        self._errors = errors

    async def step(self) -> dict[str, float]:
        """Have it do its next step; what that took."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return await self.told()

    async def told(self) -> dict[str, float]:
        """The next line that it says."""
        assert self._process.stdout is not None
        said = await asyncio.wait_for(self._process.stdout.readline(), WAIT_SECONDS_MAX)
        if not said:
            raise RuntimeError(self._errors.read_text()[-3000:])
        found: dict[str, float] = json.loads(said)
        return found


@asynccontextmanager
async def beside(
    *words: str, to: Path, folders: Mapping[str, str] | None = None
) -> AsyncIterator[BareSide]:
    """Bare PySpark with its session started, until the block ends."""
    more = ("--to", str(to), "--conf", json.dumps(spark_conf(to)))
    named = () if folders is None else ("--folders", json.dumps(folders))
    errors = to.with_name(f"{to.name}.err")
    to.parent.mkdir(parents=True, exist_ok=True)
    with errors.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "benchmarks.bare", *words, *named, *more),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=said,
        )
    side = BareSide(process, errors)
    try:
        side.start = await side.told()
        yield side
    finally:
        # It ends with its input, and the JVM with it.
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS_MAX)
        except TimeoutError:
            process.kill()
            await process.wait()


async def bare(*words: str, to: Path) -> dict[str, float]:
    """What `benchmarks.bare` measures in one step, with what its start took."""
    async with beside(*words, to=to) as side:
        return {**side.start, **await side.step()}


def spark_conf(folder: Path) -> dict[str, str]:
    """The settings that a worker gives to Spark."""
    return dict(classic_conf(SparkSettings(), folder=str(folder), cores=os.cpu_count() or 1))
