"""Sums up what Spark says of jobs and stages. Pure.

Jobs and stages are as Spark's own REST interface has them. A stage that was made by an earlier job
is skipped by later ones: it counts once. `progress` is for jobs that run, `metrics` for those that
have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

_SUMS: Final = {
    "executor_run_ms": ("executorRunTime", 1),
    "executor_cpu_ms": ("executorCpuTime", 1_000_000),
    "gc_ms": ("jvmGcTime", 1),
    "input_bytes": ("inputBytes", 1),
    "input_rows": ("inputRecords", 1),
    "output_bytes": ("outputBytes", 1),
    "output_rows": ("outputRecords", 1),
    "shuffle_read_bytes": ("shuffleReadBytes", 1),
    "shuffle_write_bytes": ("shuffleWriteBytes", 1),
    "spill_memory_bytes": ("memoryBytesSpilled", 1),
    "spill_disk_bytes": ("diskBytesSpilled", 1),
}
_ALWAYS: Final = ("executor_run_ms", "shuffle_read_bytes", "shuffle_write_bytes")


def progress_of(jobs: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How far jobs are. What is skipped is neither to be done nor done."""
    said = dict.fromkeys(("stages", "stages_done", "tasks", "tasks_done"), 0)
    for job in jobs:
        said["stages"] += len(job["stageIds"]) - int(job["numSkippedStages"])
        said["stages_done"] += int(job["numCompletedStages"])
        said["tasks"] += int(job["numTasks"]) - int(job["numSkippedTasks"])
        said["tasks_done"] += int(job["numCompletedTasks"])
    return said


def metrics_of(jobs: int, stages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What this many jobs, of these stages, took. Spilling nothing is not worth a word."""
    ran = [stage for stage in stages if stage["status"] != "SKIPPED"]
    said: dict[str, Any] = {
        "jobs": jobs,
        "stages": len(ran),
        "tasks": sum(int(stage["numCompleteTasks"]) for stage in ran),
    }
    for name, (field, unit) in _SUMS.items():
        total = sum(int(stage[field]) for stage in ran) // unit
        if total or name in _ALWAYS:
            said[name] = total
    return said
