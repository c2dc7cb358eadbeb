"""What is said of Spark jobs, of what Spark says of them."""

from __future__ import annotations

from typing import Any

from penstock.runtimes.spark.classic import metrics_of, progress_of


def _job(**more: int) -> dict[str, Any]:
    names = ("numSkippedStages", "numCompletedStages", "numTasks", "numSkippedTasks")
    return {**dict.fromkeys((*names, "numCompletedTasks"), 0), "stageIds": [1, 2], **more}


def _stage(status: str = "COMPLETE", **more: int) -> dict[str, Any]:
    names = (
        "executorRunTime",
        "executorCpuTime",
        "jvmGcTime",
        "inputBytes",
        "inputRecords",
        "outputBytes",
        "outputRecords",
        "shuffleReadBytes",
        "shuffleWriteBytes",
        "memoryBytesSpilled",
        "diskBytesSpilled",
        "numCompleteTasks",
    )
    return {**dict.fromkeys(names, 0), "status": status, **more}


def test_what_is_skipped_is_neither_to_be_done_nor_done() -> None:
    jobs = [
        _job(numTasks=5, numCompletedTasks=3, numCompletedStages=1),
        _job(numTasks=9, numSkippedTasks=4, numSkippedStages=1, numCompletedTasks=5),
    ]
    assert progress_of(jobs) == {"stages": 3, "stages_done": 1, "tasks": 10, "tasks_done": 8}
    assert progress_of([]) == {"stages": 0, "stages_done": 0, "tasks": 0, "tasks_done": 0}


def test_stages_are_summed_and_nothing_is_no_word() -> None:
    stages = [
        _stage(executorRunTime=5, executorCpuTime=2_500_000, numCompleteTasks=2, inputRecords=7),
        _stage(executorRunTime=6, executorCpuTime=1_500_000, numCompleteTasks=1),
        _stage("SKIPPED", executorRunTime=100, numCompleteTasks=100),
    ]
    assert metrics_of(2, stages) == {
        "jobs": 2,
        "stages": 2,
        "tasks": 3,
        "executor_run_ms": 11,
        "executor_cpu_ms": 4,
        "input_rows": 7,
        "shuffle_read_bytes": 0,
        "shuffle_write_bytes": 0,
    }
    assert metrics_of(1, [_stage(diskBytesSpilled=8)])["spill_disk_bytes"] == 8
