"""Dead tasks, with those that have died of the same together. Pure.

Two of a job have died of the same if the first lines of their reasons are the same but for the
partition and figures. The latest stands for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.dispatcher.wire.steering import TaskSummary

_FIGURES: Final = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """What tasks of a job have died of."""

    job: str
    cause: str
    """The first line of the reason of the latest; empty if it has none."""
    latest: TaskSummary
    count: int
    is_alike: bool
    """Whether the reasons of others differ from it, in the partition or in figures."""


def together(dead: Sequence[TaskSummary]) -> list[Failing]:
    """What they have died of, in the order of the first of each, which stands for it."""
    found: dict[tuple[str, str], list[TaskSummary]] = {}
    for each in dead:
        found.setdefault((each.job, _kind(each)), []).append(each)
    return [
        Failing(
            job=tasks[0].job,
            cause=_cause(tasks[0]),
            latest=tasks[0],
            count=len(tasks),
            is_alike=len({_cause(each) for each in tasks}) > 1,
        )
        for tasks in found.values()
    ]


def _cause(task: TaskSummary) -> str:
    return (task.reason or "").partition("\n")[0]


def _kind(task: TaskSummary) -> str:
    cause = _cause(task)
    if task.partition_key:
        cause = cause.replace(task.partition_key, "\0")
    return _FIGURES.sub("0", cause)
