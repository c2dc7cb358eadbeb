"""Work of a stand-in engine in a real host, on one session for all tests of this file.

What tests wait for are files that the work makes, so nothing depends on how quick the machine is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.runtimes.spark.runtime import SparkRuntime
from penstock.testing.runtime_contract import RecordingReporter
from tests.integration.spark.trial import (
    SECONDS,
    Trial,
    a_moment,
    at_once,
    cancelled,
    is_running,
    spark_runtime,
    until_gone,
)


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    folder = tmp_path_factory.mktemp("host")
    runtime = spark_runtime(folder)
    with asyncio.Runner() as runner:
        runner.run(_begun(runtime))
        try:
            yield Trial(folder, runner, runtime)
        finally:
            processes = (*runtime.pids, *runtime.jvms)
            runner.run(runtime.stop())
        assert processes
        assert not [process for process in processes if is_running(process)]
        assert not list((folder / "data" / "spark" / "hosts").iterdir())


def test_work_runs_and_says_what_it_took(trial: Trial) -> None:
    async def test() -> None:
        work = trial.work("count", rows=1000)
        finished = await trial.run(work)
        assert [made.location for made in finished.made] == [work.outputs["out"].location]
        assert finished.metrics["rows"] == 1000
        assert finished.metrics["zone"] == "UTC"
        assert finished.metrics["jobs"] >= 1
        assert finished.metrics["stages"] >= 2
        assert finished.metrics["shuffle_write_bytes"] > 0
        assert "spill_disk_bytes" not in finished.metrics

    trial.now(test())


def test_cancelling_one_interrupts_its_spark_job_and_no_other(trial: Trial) -> None:
    async def test() -> None:
        long, other = trial.work("long"), trial.work("batch")
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(trial.run(work)) for work in (long, other)]
            await at_once(trial.said("begun", long), trial.said("begun", other))
            hosts = trial.runtime.pids
            await cancelled(running[0])
            (trial.folder / "go").touch()
            assert (await running[1]).metrics["batch"] == 1
        assert (await trial.run(trial.work("active"))).metrics["active"] == 0
        assert trial.runtime.pids == hosts
        (trial.folder / "go").unlink()

    trial.now(test())


def test_progress_is_told_while_a_spark_job_runs(trial: Trial) -> None:
    async def test() -> None:
        long = trial.work("long")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(trial.run(long))
            ear = await _ear(trial, long.task_id)
            while not any(said["tasks"] for said in ear.said):
                await a_moment()
            await cancelled(running)
        names = {"phase", "stages", "stages_done", "tasks", "tasks_done"}
        assert set(ear.said[-1]) == names

    trial.now(test())


def test_python_that_catches_errors_is_interrupted(trial: Trial) -> None:
    async def test() -> None:
        looping = trial.work("looping")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(trial.run(looping))
            await trial.said("begun", looping)
            hosts = trial.runtime.pids
            await cancelled(running)
        await trial.said("interrupted", looping)
        assert trial.runtime.pids == hosts

    trial.now(test())


def test_what_two_tasks_print_side_by_side_goes_to_two_logs(trial: Trial) -> None:
    async def test() -> None:
        works = [trial.work("print"), trial.work("print")]
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(trial.run(work)) for work in works]
            for number in range(3):
                (trial.folder / f"go-{number}").touch()
                # Both print a line, then both the next one.
                await at_once(*(trial.said(f"printed-{number}", work) for work in works))
            await at_once(*running)
        for work in works:
            printed = [line for line in trial.log(work).splitlines() if line.startswith("line")]
            logged = [line for line in trial.log(work).splitlines() if "logged" in line]
            assert printed == [f"line {number} of {work.task_id}" for number in range(3)]
            assert len(logged) == 3
            assert all(line.endswith(f"of {work.task_id}") for line in logged)

    trial.now(test())


def test_a_batch_is_one_run_and_a_member_is_dropped_alone(trial: Trial) -> None:
    async def test() -> None:
        works = [trial.work("batch", batch="b", batch_size=3) for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(trial.run(work)) for work in works]
            await trial.said("begun", works[0])
            await cancelled(running[1])
            (trial.folder / "go").touch()
            for each in (running[0], running[2]):
                finished = await each
                assert finished.metrics["batch"] == 3
                assert finished.metrics["shared_by"] == 3
        (trial.folder / "go").unlink()

    trial.now(test())


def test_a_member_that_runs_singly_is_cancelled_alone(trial: Trial) -> None:
    async def test() -> None:
        works = [trial.work("singly", batch="s", batch_size=2) for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(trial.run(work)) for work in works]
            await trial.said("begun", works[0])
            await cancelled(running[0])
            assert (await running[1]).made

    trial.now(test())


def test_a_task_finds_nothing_of_an_earlier_one_in_its_session(trial: Trial) -> None:
    async def test() -> None:
        for _ in range(3):
            found = (await trial.run(trial.work("leave view"))).metrics
            assert (found["seen"], found["zone"]) == (0, "UTC")

    trial.now(test())


def test_a_failure_says_why_and_the_log_of_the_jvm_names_the_task(trial: Trial) -> None:
    async def test() -> None:
        failure = await trial.failure(trial.work("fail"))
        assert failure.is_retried
        assert failure.message.startswith("ValueError: The number is wrong.")
        work = trial.work("bad udf")
        failure = await trial.failure(work)
        assert (failure.message, failure.is_retried) == ("bad luck", False)
        [log] = (trial.folder / "data" / "logs").iterdir()
        assert f"[task {work.task_id}] Exception in task" in log.read_text()

    trial.now(test())


@pytest.mark.timeout(300)
def test_what_does_not_let_go_retires_its_host_and_neighbours_go_on(trial: Trial) -> None:
    async def test() -> None:
        stubborn = trial.work("stubborn", grace_seconds=0.5)
        neighbour = trial.work("batch")
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(trial.run(work)) for work in (stubborn, neighbour)]
            await at_once(trial.said("begun", stubborn), trial.said("begun", neighbour))
            [old] = trial.runtime.pids
            [jvm] = trial.runtime.jvms
            await cancelled(running[0])
            # What comes now runs in another host, beside the neighbour in the old one.
            assert (await trial.run(trial.work("count", rows=10))).metrics["rows"] == 10
            assert is_running(old)
            assert len(trial.runtime.pids) == 2
            (trial.folder / "go").touch()
            assert (await running[1]).made
        await at_once(until_gone(old), until_gone(jvm))
        (trial.folder / "go").unlink()

    # Two JVMs start in it, one after the other.
    trial.now(test(), seconds=3 * SECONDS)


async def _begun(runtime: SparkRuntime) -> None:
    await runtime.start()
    runtime.expect()


async def _ear(trial: Trial, task_id: int) -> RecordingReporter:
    while task_id not in trial.ears:
        await a_moment()
    return trial.ears[task_id]


def test_the_log_of_a_host_is_below_the_data_folder(trial: Trial) -> None:
    logs = trial.folder / "data" / "logs"
    assert all(Path(each).name.startswith("spark-host-") for each in logs.iterdir())
