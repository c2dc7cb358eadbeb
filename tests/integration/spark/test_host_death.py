"""Hosts and JVMs that die: only what was in them fails, and the next work runs in a new one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.kernel.errors import WorkReleased
from penstock.testing.runtime_contract import PipeWatch
from tests.integration.spark.trial import (
    ENGINE,
    Trial,
    a_work,
    at_once,
    is_running,
    spark_runtime,
    spark_settings,
    until,
    until_gone,
)

_WORKER = """
import asyncio, sys
import msgspec
from penstock.runtimes.base import AttemptWork
from penstock.runtimes.spark.runtime import SparkRuntime
from penstock.runtimes.spark.settings import SparkSettings
from penstock.testing.runtime_contract import RecordingReporter

async def main(settings, engine, work):
    async with SparkRuntime(msgspec.json.decode(settings, type=SparkSettings), engine=engine) as it:
        await it.run(msgspec.json.decode(work, type=AttemptWork), RecordingReporter())

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    runtime = spark_runtime(tmp_path)
    with asyncio.Runner() as runner:
        runner.run(runtime.start())
        try:
            yield Trial(tmp_path, runner, runtime)
        finally:
            runner.run(runtime.stop())


@pytest.mark.timeout(400)
def test_each_death_fails_what_was_there_and_the_next_work_runs(trial: Trial) -> None:
    """One test, because each new JVM costs seconds: every death is followed by work that runs."""

    async def test() -> None:
        await _killed(trial, lambda: trial.runtime.jvms[0], "The JVM of Spark was killed by")
        await _killed(trial, lambda: trial.runtime.pids[0], "The process of Spark was killed by")
        for do, words in (
            ("exhaust", "The JVM of Spark ran out of memory: its heap is 600m"),
            ("stop session", "The session of Spark was stopped"),
        ):
            failure = await trial.failure(trial.work(do))
            assert failure.is_retried
            assert failure.message.startswith(words)
            assert failure.runs_alone
            assert not isinstance(failure, WorkReleased), "it was alone, so it was its fault"
        assert (await trial.run(trial.work("count", rows=10))).metrics["rows"] == 10

    trial.now(test(), seconds=300)


async def _killed(trial: Trial, whom: Callable[[], int], words: str) -> None:
    """Two tasks run; what they run in is killed; both fail with these words, and all is gone."""
    works = [trial.work("long"), trial.work("stubborn")]
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(trial.failure(work)) for work in works]
        await at_once(*(trial.said("begun", work) for work in works))
        processes = (*trial.runtime.pids, *trial.runtime.jvms)
        os.kill(whom(), signal.SIGKILL)
        failures = await at_once(*running)
    for failure in failures:
        assert isinstance(failure, WorkReleased), "it was not alone, so nobody is charged"
        assert failure.runs_alone
        assert failure.message.startswith(words)
    await at_once(*(until_gone(process) for process in processes))


def test_nothing_outlives_a_worker_that_is_killed(tmp_path: Path) -> None:
    """Neither the host nor the JVM, nor a worker of Spark that runs a user's Python."""

    async def test() -> None:
        watch = PipeWatch(tmp_path)
        settings = msgspec.json.encode(spark_settings(tmp_path))
        work = msgspec.json.encode(a_work(1, "udf", tmp_path, pipe=str(watch.path)))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _WORKER, settings, ENGINE, work
        )
        try:
            # A machine that is busy takes its time to start Spark.
            await until(tmp_path / "warm-1")
            await watch.begun()
            family = _family(process.pid)
        finally:
            process.kill()
            await process.wait()
        try:
            await watch.gone()
        finally:
            watch.close()
        # The host, its JVM, the guard, and Spark's daemon with a worker.
        assert len(family) >= 5
        await at_once(*(until_gone(each) for each in family))

    asyncio.run(test())


def _family(parent: int) -> list[int]:
    """All processes below this one."""
    parents = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit() and is_running(int(each.name)):
            words = (each / "stat").read_text().rpartition(")")[2].split()
            parents[int(each.name)] = int(words[1])
    found = [process for process, its in parents.items() if its == parent]
    return [*found, *(below for process in found for below in _family(process))]
