"""The tasks, the latest first, by job, status and partition; a page of them at a time.

What the list leaves out and takes in is what the API does with the same parameters. Dead tasks can
be replayed all at once: those that the filters name, in rounds, so that what dies again meanwhile
is not taken twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from penstock.console.pages.base import Action, Asked, Done, Missing, Page
from penstock.console.rendering import number
from penstock.dispatcher.api.endpoints import Call, Reply
from penstock.dispatcher.api.looking import tasks as list_tasks
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.problems import not_as_declared
from penstock.dispatcher.api.steering import replay_tasks
from penstock.dispatcher.wire.asking import TasksParams, TaskStatus
from penstock.dispatcher.wire.problem import Problem
from penstock.dispatcher.wire.steering import JobAnswer, TaskIdsAsk, TasksAnswer
from penstock.dispatcher.wire.work import ResultsAnswer

_PAGE: Final = 50
_ROUND: Final = 1000
_ROUNDS_MAX: Final = 20
_MANY: Final = 10_000
_FIELDS: Final = {"job": "job", "status": "status", "partition": "partition_key"}


async def _load(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
    params = _params(asked, limit=_PAGE)
    if isinstance(params, Problem):
        return Missing(params.title, "Take the filters away, and look at all tasks.")
    found = await list_tasks(parts, Call(params=params))
    if not isinstance(found, TasksAnswer):
        title = found.title if isinstance(found, Problem) else "There are no such tasks."
        return Missing(title, "The list of all tasks has the names of all jobs.")
    overall = await parts.views.overall()
    jobs = {each.name for each in overall.jobs}
    if params.job is not None:
        # It may be one that the DAG in force has not.
        jobs.add(params.job)
    chosen = [each for each in overall.jobs if params.job in (None, each.name)]
    kept = {name: asked.query[name] for name in _FIELDS if asked.query.get(name)}
    return {
        "tasks": found.tasks,
        "jobs": sorted(jobs),
        "job": params.job,
        "status": params.status.value if params.status is not None else "",
        "partition": params.partition_key,
        "is_first": params.before is None,
        "older": _link(kept, before=found.before) if found.before is not None else "",
        "newest": _link(kept),
        "tabs": _tabs(kept, chosen),
        "is_filtered": bool(kept),
        "page": _PAGE,
    }


def _params(asked: Asked, *, limit: int) -> TasksParams | Problem:
    said: dict[str, object] = {"limit": limit}
    for name, field in _FIELDS.items():
        if (value := asked.query.get(name, "")).strip():
            said[field] = value
    if before := asked.query.get("before"):
        said["before"] = before
    try:
        return msgspec.convert(said, TasksParams, strict=False)
    except msgspec.ValidationError as error:
        return not_as_declared(error, kind=TasksParams)


def _link(kept: Mapping[str, str], **more: object) -> str:
    said = {**kept, **more}
    return f"/tasks?{urlencode(said)}" if said else "/tasks"


def _tabs(kept: Mapping[str, str], jobs: list[JobAnswer]) -> list[tuple[str, str, str, str]]:
    """The statuses: the name, where it leads, the value, and how many if that is known."""
    counts = {
        "running": sum(each.running for each in jobs),
        "dead": sum(each.dead for each in jobs),
    }
    rest = {name: value for name, value in kept.items() if name != "status"}
    # What a partition has of them is not counted.
    shown = {} if "partition" in kept else counts
    return [
        ("All", _link(rest), "", ""),
        *(
            (
                each.value.capitalize(),
                _link({**rest, "status": each.value}),
                each.value,
                number(shown[each.value], most=_MANY) if shown.get(each.value) else "",
            )
            for each in TaskStatus
        ),
    ]


async def _replay(parts: Parts, asked: Asked, to: str) -> Done:
    """Queue all dead tasks of a job, or of all, again."""
    params = _params(asked, limit=_ROUND)
    if isinstance(params, Problem):
        return Done(params.title, to, is_well=False)
    params.status = TaskStatus.DEAD
    replayed = 0
    for _ in range(_ROUNDS_MAX):
        found = await list_tasks(parts, Call(params=params))
        if not isinstance(found, TasksAnswer):
            title = found.title if isinstance(found, Problem) else "Nothing was replayed."
            return Done(title, to, is_well=False)
        ids = [each.id for each in found.tasks]
        if ids:
            answer = await replay_tasks(parts, Call(ask=TaskIdsAsk(tasks=ids)))
            body = answer.body if isinstance(answer, Reply) else answer
            if isinstance(body, ResultsAnswer):
                replayed += sum(each.status < 400 for each in body.results)
        if found.before is None:
            break
        params.before = found.before
    if not replayed:
        return Done("No task is dead; nothing was replayed.", to)
    told = "1 task is" if replayed == 1 else f"{number(replayed)} tasks are"
    return Done(f"{told} queued again.", to)


PAGE: Final = Page(
    "/tasks",
    "tasks",
    _load,
    live=("tabs", "list"),
    query=("job", "status", "partition", "before"),
)
ACTIONS: Final = (Action("/tasks/replay", _replay, fields=("job", "partition")),)
