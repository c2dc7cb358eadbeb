"""One task: why it failed or waits, its attempts on a time line, its log, what it reads and writes.

The reason of a failure comes first, then what was tried, and the button that tries again. The log
is of the last attempt, or of the one that `attempt` names. A look costs seven short statements and,
for the log, at most 64 KiB of a file.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from penstock.console.drawing.timeline import Lane, Span, Timeline, timeline
from penstock.console.logs import tail_of, would_be_here
from penstock.console.pages.acting import act, number_of
from penstock.console.pages.base import Action, Asked, Done, Missing, Page
from penstock.console.pages.measured import as_json, groups, progress
from penstock.console.pages.paths import partition_path
from penstock.console.pages.standing import standing
from penstock.dispatcher.api.endpoints import Handler
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.steering import cancel_tasks, replay_tasks
from penstock.dispatcher.views.pipeline import PipelineViews
from penstock.dispatcher.views.tasks import PARTITIONS_MAX, About, TaskViews
from penstock.dispatcher.wire.steering import AttemptAnswer, TaskAnswer, TaskIdsAsk
from penstock.dispatcher.wire.work import ResultsAnswer, TaskResult

_SHOWN_MAX: Final = 25
"""How many attempts, and how many publications, are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """An attempt, as it is shown."""

    said: AttemptAnswer
    state: str
    seconds: float
    lane: Lane
    told: str


async def _load(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
    task_id = number_of(asked.path["id"])
    answer = await parts.views.task(task_id) if task_id else None
    about = await TaskViews(parts.database).about(task_id) if answer is not None else None
    if answer is None or about is None:
        hint = "Tasks that are over are kept for the days that `retention_days` says."
        return Missing(f"There is no task {asked.path['id'][:40]}.", hint)
    chosen = _chosen(answer, asked.query.get("attempt", ""))
    tail = None
    if chosen is not None:
        tail = await asyncio.to_thread(
            tail_of, parts.logs, task_id=task_id, attempt=chosen.number, said=chosen.log
        )
    is_silent = tail is None and chosen is not None and await _is_silent(parts, task_id, chosen)
    line, rows = _attempts(answer, about)
    running = answer.attempts[-1] if answer.task.status == "running" else None
    return {
        "task": answer.task,
        "about": about,
        "standing": standing(answer, about),
        "rows": rows,
        "line": line,
        "chosen": chosen,
        "tail": tail,
        "is_silent": is_silent,
        "is_over": answer.task.settled_at is not None,
        "progress": progress(running.progress) if running and running.progress else None,
        "groups": groups(chosen.metrics, runtime=about.runtime)
        if chosen and chosen.metrics
        else [],
        "payload": as_json(answer.payload),
        "published": answer.published[:_SHOWN_MAX],
        "published_more": max(0, len(answer.published) - _SHOWN_MAX) + answer.omitted,
        "further": await _further(parts, answer, about),
        "partitions_max": PARTITIONS_MAX,
        "partition_path": partition_path,
    }


def _chosen(answer: TaskAnswer, number: str) -> AttemptAnswer | None:
    """The attempt whose log is shown."""
    for each in answer.attempts:
        if str(each.number) == number:
            return each
    return answer.attempts[-1] if answer.attempts else None


async def _is_silent(parts: Parts, task_id: int, attempt: AttemptAnswer) -> bool:
    """Whether an attempt without a log here has printed nothing, for its worker is here too."""
    if parts.logs is None or not await asyncio.to_thread(
        would_be_here, parts.logs, task_id=task_id, attempt=attempt.number, said=attempt.log
    ):
        return False
    return await TaskViews(parts.database).is_of_host(attempt.worker, platform.node())


def _attempts(answer: TaskAnswer, about: About) -> tuple[Timeline, Sequence[_Row]]:
    """The latest attempts with their lanes, the latest first."""
    shown = answer.attempts[-_SHOWN_MAX:]
    spans = [_span(each, now=about.now) for each in shown]
    is_whole = len(shown) == answer.task.attempt or not spans
    begins_at = answer.task.created_at.timestamp() if is_whole else spans[0].started_at
    ends_at = (answer.task.settled_at or about.now).timestamp()
    line = timeline(spans, begins_at=begins_at, ends_at=ends_at)
    rows = [
        _row(each, span, lane) for each, span, lane in zip(shown, spans, line.lanes, strict=True)
    ]
    return line, rows[::-1]


def _span(attempt: AttemptAnswer, *, now: datetime) -> Span:
    ended = attempt.ended_at or max(now, attempt.started_at)
    return Span(started_at=attempt.started_at.timestamp(), ended_at=ended.timestamp())


def _row(attempt: AttemptAnswer, span: Span, lane: Lane) -> _Row:
    state = attempt.outcome or "running"
    seconds = span.ended_at - span.started_at
    return _Row(
        said=attempt,
        state=state,
        seconds=seconds,
        lane=lane,
        told=f"Attempt {attempt.number}, {state}, on the time line",
    )


async def _further(parts: Parts, answer: TaskAnswer, about: About) -> Sequence[str]:
    """The jobs that follow those that read what a dead task should have made."""
    if answer.task.status != "dead" or not about.readers:
        return []
    after: dict[str, set[str]] = {}
    for each in await PipelineViews(parts.database).readings():
        after.setdefault(each.writer, set()).add(each.reader)
    near = {each.job for each in about.readers}
    found, left = set(near), list(near)
    while left:
        new = after.get(left.pop(), set()) - found
        found |= new
        left.extend(new)
    return sorted(found - near - {answer.task.job})


async def _replay(parts: Parts, asked: Asked, to: str) -> Done:
    return await _steer(parts, asked, to, replay_tasks, lambda _: "is queued again")


async def _cancel(parts: Parts, asked: Asked, to: str) -> Done:
    return await _steer(parts, asked, to, cancel_tasks, _cancelled)


def _cancelled(result: TaskResult) -> str:
    if result.task_status == "cancelled":
        return "is cancelled"
    return "was asked to stop; it ends as soon as its worker hears of it"


async def _steer(
    parts: Parts, asked: Asked, to: str, handler: Handler, done: Callable[[TaskResult], str]
) -> Done:
    task_id = number_of(asked.path["id"])
    if not task_id:
        return Done("There is no such task.", to, is_well=False)
    ask = TaskIdsAsk(tasks=[task_id], reason="It was cancelled in the console.")

    def told(answer: ResultsAnswer) -> str:
        return f"Task {task_id} {done(answer.results[0])}."

    return await act(parts, handler, to, ask=ask, told=told)


PAGE: Final = Page(
    "/tasks/{id:path}",
    "task",
    _load,
    live=("head", "standing", "attempts", "log", "beside"),
    section="tasks",
    query=("attempt",),
)
ACTIONS: Final = (
    Action("/tasks/{id}/replay", _replay),
    Action("/tasks/{id}/cancel", _cancel),
)
