"""Every answer that is not a success."""

from __future__ import annotations

from penstock.dispatcher.wire.base import Answer
from penstock.dispatcher.wire.dags import BreakAnswer, DagProblem
from penstock.dispatcher.wire.work import TaskResult, TaskStateAnswer


class Problem(Answer):
    """Every answer that is not a success, as RFC 9457 has it."""

    type: str
    """Which kind of problem, for programs: a word such as `stale` or `malformed`."""
    title: str
    """What is wrong, in one sentence."""
    status: int
    detail: str = ""
    """What to do, if there is something."""
    field: str = ""
    """The field of the request that is wrong."""
    state: TaskStateAnswer | None = None
    """What the task is now, where the problem is about one."""
    breaks: list[BreakAnswer] = []
    """What a DAG would break."""
    problems: list[DagProblem] = []
    """What is wrong with a DAG, by line."""
    results: list[TaskResult] = []
    """The answers one by one, where the call was about several tasks."""
