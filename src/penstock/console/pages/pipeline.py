"""The page of the pipeline: the current DAG drawn, job states, backpressure, and recent failures.

A job is drawn in its worst state (`job_state`). An edge is busy while its reader has work,
pressed while its reader's queue is over its limit, and held while its writer is paused because
of a queue further downstream; that is explained at the edge, in its title, and below the
drawing. The layout is computed once for each shape of the DAG. A DAG that is too large to be
readable is not drawn: the table of jobs has it.

Dead tasks of one cause are grouped: tasks of a job whose reasons have the same first line, but
for the partition and figures. The latest stands for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

from penstock.console.dag_layout import DagDrawing, LayoutSizes, Point, curve, layout_dag
from penstock.console.pages.base import ConsolePage, PageNotFound, PageRequest
from penstock.console.pages.jobs import BY_PEOPLE, MANY, STATES, state_of
from penstock.console.renderer import length, number
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.views.jobs import RECENT_MINUTES, DagEdge, PipelineViews, RecentOutcomes
from penstock.protocol.base import TaskStatus
from penstock.protocol.steering import JobAnswer, PressureAnswer, PressuresAnswer, TaskSummary

_FIGURES: Final = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """What tasks of a job have died of."""

    job: str
    cause: str
    """The first line of the reason of the latest; empty if it has none."""
    latest: TaskSummary
    count: int
    is_alike: bool
    """Whether the reasons of others differ from it, in the partition or in figures."""


def group_failures(dead: Sequence[TaskSummary]) -> list[FailureGroup]:
    """What they have died of, in the order of the first of each, which stands for it."""
    found: dict[tuple[str, str], list[TaskSummary]] = {}
    for each in dead:
        found.setdefault((each.job, _kind(each)), []).append(each)
    return [
        FailureGroup(
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


_SIZES: Final = LayoutSizes(width=200.0, between_layers=66.0)
_MARGIN: Final = 24.0
_NAME_CHARACTERS_MAX: Final = 20
_DEAD_MAX: Final = 100
"""How many dead tasks are looked at, to show what they have died of."""
_FAILING_MAX: Final = 5
DRAWN_MAX: Final = 300
"""How many jobs are drawn; nobody can read more of them in a drawing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A job, as it is drawn."""

    name: str
    shown: str
    kind: str
    state: str
    x: float
    y: float
    lines: Sequence[tuple[str, str]]
    """Texts below the name, each with the class that it is drawn in."""
    told: str
    """All of it in words, for those who do not see it."""
    pressure: str
    """What stands above it, where its edges come in; empty if it is not pressed."""
    href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edge:
    path: str
    state: str
    told: str


async def _load(parts: ApiContext, _: PageRequest) -> Mapping[str, Any] | PageNotFound:
    views = PipelineViews(parts.database)
    overall = await parts.views.overall()
    readings = await views.readings()
    endings = await views.endings()
    pressures = await parts.pressures.answer()
    operators = await parts.metrics.operators()
    pending, parked = await parts.outbox.counts()
    plans = await parts.backfills.list(limit=100)
    dead = []
    if any(each.dead for each in overall.jobs):
        page = await parts.views.tasks(
            job_id=None, status=TaskStatus.FAILED, before=None, limit=_DEAD_MAX
        )
        dead = page.tasks
    failing = group_failures(dead)
    jobs = {each.name: each for each in overall.jobs}
    is_drawn = len(jobs) <= DRAWN_MAX
    nodes, edges, width, height = _graph(jobs if is_drawn else {}, readings, endings, pressures)
    return {
        "overall": overall,
        "jobs": overall.jobs,
        "is_drawn": is_drawn,
        "states": STATES,
        "nodes": nodes,
        "edges": edges,
        "width": width + 2 * _MARGIN,
        "height": height + 2 * _MARGIN,
        "margin": _MARGIN,
        "sizes": _SIZES,
        "dead_max": _DEAD_MAX,
        "failing": failing[:_FAILING_MAX],
        "failing_more": len(failing) > _FAILING_MAX or len(dead) >= _DEAD_MAX,
        "pressures": [each for each in pressures.jobs if each.pressed],
        "paused_by_people": [each for each in pressures.pauses if each.cause == BY_PEOPLE],
        "operators": [each for each in operators.operators if each.in_flight or each.waiting],
        "outbox_pending": pending,
        "outbox_parked": parked,
        "backfills": [each for each in plans.backfills if each.state in ("running", "paused")],
        "totals": {
            name: sum(getattr(each, name) for each in overall.jobs)
            for name in ("queued", "running", "dead")
        },
        "completed": sum(each.completed for each in endings.values()),
        "failed": sum(each.failed for each in endings.values()),
        "endings": endings,
        "minutes": RECENT_MINUTES,
        "many": MANY,
    }


def _graph(
    jobs: Mapping[str, JobAnswer],
    readings: Sequence[DagEdge],
    endings: Mapping[str, RecentOutcomes],
    pressures: PressuresAnswer,
) -> tuple[list[_Node], list[_Edge], float, float]:
    pairs = {(each.writer, each.reader): each for each in readings}
    drawing = _drawing(tuple(sorted(jobs)), tuple(sorted(pairs)))
    pressed = {each.job: each for each in pressures.jobs if each.pressed}
    held: dict[str, set[str]] = {}
    for job in pressed.values():
        for name in job.pauses:
            held.setdefault(name, set()).add(job.job)
    nodes = [
        _node(jobs[name], point, endings.get(name), pressed.get(name))
        for name, point in sorted(drawing.nodes.items(), key=lambda item: (item[1].x, item[1].y))
    ]
    edges = [
        _edge(
            pairs[writer, reader],
            points,
            jobs[reader],
            pressed=pressed.get(reader),
            held_for=held.get(writer, set()) & {reader, *held.get(reader, ())},
        )
        for (writer, reader), points in drawing.edges.items()
    ]
    return nodes, edges, drawing.width, drawing.height


@lru_cache(maxsize=4)
def _drawing(jobs: tuple[str, ...], pairs: tuple[tuple[str, str], ...]) -> DagDrawing:
    """Where everything stands: the same as long as the DAG has the same shape."""
    return layout_dag(list(jobs), pairs, _SIZES)


def _edge(
    reading: DagEdge,
    points: Sequence[Point],
    reader: JobAnswer,
    *,
    pressed: PressureAnswer | None,
    held_for: set[str],
) -> _Edge:
    """An edge. `held_for` are the jobs whose queues make its writer pause along it."""
    state = "" if reading.is_trigger else "read"
    told = f"{reading.reader} reads {reading.dataset} of {reading.writer}"
    # What is only read fills no queue.
    if pressed is not None and reading.is_trigger:
        state, told = "pressed", f"{told}, and its queue exceeds its limit: {pressed.reason or ''}"
        if reading.writer in pressed.pauses:
            told = f"{told} {reading.writer} is paused until it is shorter."
    elif held_for and reading.is_trigger:
        state = "held"
        told = f"{told}; {reading.writer} is paused for the queue of {', '.join(sorted(held_for))}"
    elif reader.running:
        state = f"{state} busy".strip()
    return _Edge(path=curve(points), state=state, told=told)


def _pressure(pressed: PressureAnswer) -> str:
    most, age = pressed.max_queue_depth, pressed.max_queue_age_seconds
    if most is not None and pressed.depth > most:
        return f"{number(pressed.depth, most=MANY)} waiting, limit {number(most)}"
    if age is not None and pressed.oldest_seconds > age:
        return f"waiting for {_roughly(pressed.oldest_seconds)}, limit {_roughly(age)}"
    # Below the limit, and not yet where it is over.
    return f"{number(pressed.depth, most=MANY)} waiting, draining"


def _roughly(seconds: float) -> str:
    """A length in its largest unit: there is little room."""
    return " ".join(length(seconds).split()[:2])


def _node(
    job: JobAnswer, point: Point, ended: RecentOutcomes | None, pressed: PressureAnswer | None
) -> _Node:
    state = state_of(job, ended, is_pressed=pressed is not None)
    lines: list[tuple[str, str]] = []
    if job.running:
        lines.append((f"{number(job.running, most=MANY)} running", "running-text"))
    if job.queued:
        lines.append((f"{number(job.queued, most=MANY)} waiting", ""))
        if job.oldest_seconds >= 60 and not job.running:
            lines.append((f"for {_roughly(job.oldest_seconds)}", ""))
    if job.dead:
        lines.append((f"{number(job.dead, most=MANY)} dead", "dead-text"))
    if job.paused:
        lines.append(("paused", ""))
    if not lines and ended is not None and ended.completed:
        lines.append((f"{number(ended.completed)} done in {RECENT_MINUTES} min", ""))
    kind = job.operator or job.activation
    shown = job.name
    if len(shown) > _NAME_CHARACTERS_MAX:
        shown = f"{shown[: _NAME_CHARACTERS_MAX - 1]}…"
    told = ", ".join([f"Job {job.name}", state, *(text for text, _ in lines), *job.paused])
    return _Node(
        name=job.name,
        shown=shown,
        kind=kind if len(kind) <= 26 else f"{kind[:25]}…",
        state=state,
        x=point.x,
        y=point.y,
        lines=lines[:2],
        told=told,
        pressure=_pressure(pressed) if pressed is not None else "",
        href=f"/jobs/{quote(job.name, safe='')}",
    )


PAGE: Final = ConsolePage("/", "pipeline", _load, live=("figures", "graph", "beside"))
