"""A runtime with the stand-in engine, work for it, and files by which tests and work meet."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import AttemptWork, WorkOutput, WorkResult
from penstock.runtimes.spark.runtime import SparkRuntime
from penstock.runtimes.spark.settings import SparkSettings
from penstock.testing.runtime_contract import RecordingReporter

ENGINE = "tests.integration.spark.standin:Engine"
SECONDS = 90.0
"""How long anything may take, on a machine that others use too."""


@dataclass
class Trial:
    """A runtime whose loop lives from test to test."""

    folder: Path
    runner: asyncio.Runner
    runtime: SparkRuntime
    number: int = 0
    ears: dict[int, RecordingReporter] = field(default_factory=dict)

    def work(self, do: str, **more: Any) -> AttemptWork:
        self.number += 1
        return a_work(self.number, do, self.folder, **more)

    def log(self, work: AttemptWork) -> str:
        return Path(work.log).read_text()

    async def run(self, work: AttemptWork) -> WorkResult:
        ear = self.ears.setdefault(work.task_id, RecordingReporter())
        return await self.runtime.run(work, ear)

    async def failure(self, work: AttemptWork) -> WorkFailed:
        with pytest.raises(WorkFailed) as caught:
            await self.run(work)
        return caught.value

    async def said(self, word: str, work: AttemptWork) -> None:
        """Until work has said this."""
        await until(self.folder / f"{word}-{work.task_id}")

    def now(self, test: Coroutine[Any, Any, None], *, seconds: float = SECONDS) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(seconds):
                await test

        self.runner.run(bounded())


def a_work(
    task_id: int, do: str, folder: Path, *, grace_seconds: float = 60.0, **more: Any
) -> AttemptWork:
    """Work for the stand-in."""
    batch = {name: more.pop(name) for name in ("batch", "batch_size") if name in more}
    at = (folder / f"out-{task_id}").as_uri()
    return AttemptWork(
        task_id=task_id,
        attempt=1,
        job="trial",
        operator="spark.sql",
        generation="first",
        config={"do": do, "folder": str(folder), **more},
        outputs={"out": WorkOutput(dataset="out", uuid="0", location=at)},
        grace_seconds=grace_seconds,
        log=str(folder / f"{task_id}.log"),
        **batch,
    )


def spark_settings(folder: Path, **settings: Any) -> SparkSettings:
    said = {"data": str(folder / "data"), "driver_memory": "600m", "archive": False, **settings}
    return SparkSettings(**said)


def spark_runtime(folder: Path, **settings: Any) -> SparkRuntime:
    return SparkRuntime(spark_settings(folder, **settings), engine=ENGINE)


async def until(file: Path) -> None:
    """Until a file is there. There is nothing else by which another process could call."""
    await _until(file.exists, f"{file} never came")


async def until_gone(process: int) -> None:
    await _until(lambda: not is_running(process), f"the process {process} is still there")


async def a_moment() -> None:
    """Let other processes run: there are things that nobody calls out."""
    loop = asyncio.get_running_loop()
    waiting = loop.create_future()
    loop.call_later(0.05, waiting.set_result, None)
    await waiting


async def _until(is_so: Callable[[], bool], otherwise: str) -> None:
    for _ in range(int(SECONDS / 0.05)):
        if is_so():
            return
        await a_moment()
    raise AssertionError(otherwise)


def is_running(process: int) -> bool:
    """Whether it is there, and no zombie that nobody has waited for."""
    with suppress(OSError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return not Path("/proc").is_dir()


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def at_once(*works: Awaitable[Any]) -> list[Any]:
    return list(await asyncio.gather(*works))
