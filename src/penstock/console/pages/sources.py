"""Sources: how each is doing, when it was last heard of, and the form that triggers one.

How a source is doing depends on its kind. An always-on source has a task that must run, watched by
the source monitor. A cron source is late when a time of its own has passed and nobody has told of
it. Of the others nobody knows when they should be heard of, so only when they were is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import quote

from penstock.console.pages.acting import act
from penstock.console.pages.base import Action, Asked, Done, Missing, Page
from penstock.console.pages.events import rows_of
from penstock.console.pages.triggering import FIELDS, kind_of, trigger_ask, triggered
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.telling import trigger
from penstock.dispatcher.sources.monitor import SourceMonitor, SourceStatus
from penstock.dispatcher.sources.schedule import cron_of, left_off
from penstock.dispatcher.views.events import Event, EventViews, Search
from penstock.dispatcher.views.operations import News, OperationViews
from penstock.dispatcher.wire.events import SourceAnswer
from penstock.kernel.cron import next_after
from penstock.kernel.entropy import new_id

PATH: Final = "/operations/sources"
SHOWN_MAX: Final = 200
EVENTS_MAX: Final = 10
_DATASETS_MAX: Final = 3
"""How many datasets of a source are looked at for its events."""
_LATE: Final = timedelta(minutes=2)
_KINDS: Final = {
    "cron": "told by a clock",
    "webhook": "told by calls from outside",
    "manual": "told by people and programs",
    "always_on": "a task that always runs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A source, as it is shown."""

    said: SourceAnswer
    state: str
    told: str
    """How it is doing, in a sentence; empty if there is nothing to add."""
    next_at: datetime | None
    heard_at: datetime | None
    lately: int
    task_id: int | None
    href: str
    kind: str


async def _load(parts: Parts, _: Asked) -> Mapping[str, Any] | Missing:
    rows = await _rows(parts)
    return {"rows": rows[:SHOWN_MAX], "more": max(0, len(rows) - SHOWN_MAX)}


async def _rows(parts: Parts, job: str | None = None) -> Sequence[_Row]:
    answer = await parts.views.sources()
    news = await OperationViews(parts.database).news()
    standing: Sequence[SourceStatus] = ()
    if any(each.kind == "always_on" for each in answer.sources):
        standing = await SourceMonitor(parts.database, parts.tasks).status()
    latest = {each.job: each for each in standing}
    return [
        _row(each, news.get(each.job), latest.get(each.job), now=answer.now)
        for each in answer.sources
        if job in (None, each.job)
    ]


def _row(
    said: SourceAnswer, news: News | None, standing: SourceStatus | None, *, now: datetime
) -> _Row:
    next_at, is_late = _times(said, now)
    state, told = _state(said, standing, is_late=is_late)
    return _Row(
        said=said,
        state=state,
        told=told,
        next_at=None if said.paused else next_at,
        heard_at=news.heard_at if news is not None else None,
        lately=news.lately if news is not None else 0,
        task_id=standing.task_id if standing is not None else None,
        href=f"{PATH}/{quote(said.job, safe='')}",
        kind=_KINDS.get(said.kind, ""),
    )


def _state(said: SourceAnswer, standing: SourceStatus | None, *, is_late: bool) -> tuple[str, str]:
    """How a source is doing: a word, and a sentence where there is something to say."""
    if said.paused:
        return "paused", said.paused
    if said.kind == "always_on":
        if standing is None:
            return "pending", "Its task is made in a moment."
        ended = f"It was started {standing.restarts + 1} times." if standing.restarts else ""
        return standing.state.value, f"{ended} {standing.reason or ''}".strip()
    if is_late:
        return "late", "A time of its own has passed. Is `penstock source cron` running?"
    return "ready", ""


def _times(said: SourceAnswer, now: datetime) -> tuple[datetime | None, bool]:
    """When a cron source is next due, and whether it is late."""
    if said.kind != "cron":
        return None, False
    try:
        cron = cron_of(said)
    except ValueError:
        return None, False
    following = next_after(cron, now, time_zone=said.time_zone)
    last = left_off(said, latest=now)
    missed = next_after(cron, last, time_zone=said.time_zone) if last is not None else None
    return following, missed is not None and missed < now - _LATE


async def _load_one(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
    job = asked.path["job"]
    found = await _rows(parts, job)
    if not found:
        hint = "The list of sources has all of the DAG in force."
        return Missing(f"There is no source {job[:100]}.", hint)
    (row,) = found
    return {
        "row": row,
        "source": row.said,
        "job": row.said.job,
        "form_kind": kind_of(row.said),
        "request_id": f"console:{new_id(parts.entropy)}",
        "datasets": sorted(row.said.datasets),
        "events": rows_of(await _events(parts, sorted(row.said.datasets))),
        "path": PATH,
    }


async def _events(parts: Parts, datasets: Sequence[str]) -> Sequence[Event]:
    """The latest events of a source."""
    views = EventViews(parts.database)
    found: list[Event] = []
    for each in datasets[:_DATASETS_MAX]:
        found += (await views.search(Search(dataset=each), limit=EVENTS_MAX)).events
    return sorted(found, key=lambda each: -each.seq)[:EVENTS_MAX]


async def _trigger(parts: Parts, asked: Asked, to: str) -> Done:
    ask = trigger_ask(asked.query.get("job", ""), asked.query)
    return await act(parts, trigger, to, ask=ask, told=triggered)


PAGES: Final = (
    Page(PATH, "sources", _load, live=("list",), section="operations"),
    Page(
        f"{PATH}/{{job:path}}",
        "source",
        _load_one,
        live=("standing", "events"),
        section="operations",
    ),
)
ACTIONS: Final = (Action("/operations/trigger", _trigger, fields=("job", *FIELDS)),)
