"""The pages of sources: the state of each, its last event, and the form that triggers it.

The state of a source depends on its kind. An always-on source has a task that must run, watched
by the source monitor. A cron source is late when one of its times has passed without an event.
Of the others nobody knows when an event is due, so only the last one is shown.

| source | the form has | the event has |
|---|---|---|
| cron, of cursors | a time, or nothing for now | the time in milliseconds |
| cron, of intervals | two times | a partition named by the first, its range in seconds |
| any other | a partition or a number, or nothing for now; a range | the same |

All have a payload, which is JSON, and an id, which makes sending twice one event. Times are in
UTC, as a browser's field for them writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import quote

from penstock.console.pages.base import (
    ActionResult,
    ConsolePage,
    FormAction,
    PageNotFound,
    PageRequest,
    call_api,
    parse_form,
    parse_json_object,
)
from penstock.console.pages.events import rows_of
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.event_endpoints import trigger
from penstock.dispatcher.sources.cron import cron_of, left_off, milliseconds
from penstock.dispatcher.sources.monitor import SourceMonitor, SourceStatus
from penstock.dispatcher.views.events import EventRow, EventSearch, EventViews
from penstock.dispatcher.views.status import OperationViews, SourceActivity
from penstock.kernel.cron import next_after
from penstock.kernel.entropy import new_id
from penstock.kernel.errors import InvalidInput
from penstock.protocol.events import SourceAnswer
from penstock.protocol.steering import TriggerAnswer, TriggerAsk

FIELDS: Final = (
    *("partition_key", "cursor", "start", "end"),
    *("time", "from", "until", "payload", "event_id", "request_id"),
)
_FIELD_NAMES: Final = {
    "job": "The source",
    "partition_key": "The partition",
    "cursor": "The number",
    "start": "The start",
    "end": "The end",
    "event_id": "The id",
}


def kind_of(source: SourceAnswer) -> str:
    """Which form a source has: `time`, `interval` or `any`."""
    if source.kind != "cron":
        return "any"
    return "interval" if source.emits == "interval" else "time"


def trigger_ask(job: str, fields: Mapping[str, str]) -> TriggerAsk:
    """What the API is asked; `InvalidInput` with a sentence about a field that is wrong."""
    said: dict[str, object] = {"job": job}
    for name in ("partition_key", "cursor", "start", "end", "event_id"):
        said[name] = fields.get(name, "")
    # The same form sent twice is one event.
    said["event_id"] = said["event_id"] or fields.get("request_id", "")
    if time := fields.get("time", "").strip():
        said["cursor"] = milliseconds(time_of(time, name="The time"))
    begin, end = fields.get("from", "").strip(), fields.get("until", "").strip()
    if begin or end:
        said |= _interval(begin, end)
    said["payload"] = parse_json_object(fields.get("payload", ""), name="The payload")
    ask = parse_form(TriggerAsk, said, names=_FIELD_NAMES)
    if ask.partition_key is not None and ask.cursor is not None:
        raise InvalidInput("An event has a partition or a cursor; leave one of them empty.")
    if ask.partition_key is None and (ask.start is not None or ask.end is not None):
        raise InvalidInput("A start and an end need a partition; set it too.")
    return ask


def _interval(begin: str, end: str) -> dict[str, object]:
    if not (begin and end):
        raise InvalidInput("An interval needs both times, from and until.")
    first, last = time_of(begin, name="From"), time_of(end, name="Until")
    if first >= last:
        raise InvalidInput("An interval begins before it ends; change one of its times.")
    # As cron sources name theirs, so that one is made up for under its own name.
    return {
        "partition_key": f"{first:%Y-%m-%dT%H:%MZ}",
        "start": milliseconds(first) // 1000,
        "end": milliseconds(last) // 1000,
    }


def time_of(text: str, *, name: str) -> datetime:
    """A time as a form has it, in UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"{name} must be a time such as 2026-01-31T06:00.") from None
    return found.astimezone(UTC) if found.tzinfo is not None else found.replace(tzinfo=UTC)


def triggered(answer: TriggerAnswer) -> str:
    """What became of a trigger."""
    outcomes = [each.outcome for each in answer.results]
    paused = next((each.paused for each in answer.results if each.paused), None)
    also = f" The source is paused, though: {paused}" if paused else ""
    if not outcomes:
        return f"The source has no dataset, so no event was ingested.{also}"
    if "new" in outcomes:
        return f"The event {answer.event_id} was ingested; its tasks are being created.{also}"
    if "duplicate" in outcomes:
        return f"The event {answer.event_id} was a duplicate; no tasks were created.{also}"
    why = next((each.why for each in answer.results if each.why), "")
    return f"The event {answer.event_id} was stored, and creates no tasks. {why}{also}".strip()


PATH: Final = "/operations/sources"
SHOWN_MAX: Final = 200
EVENTS_MAX: Final = 10
_DATASETS_MAX: Final = 3
"""How many datasets of a source are looked at for its events."""
_LATE: Final = timedelta(minutes=2)
_KINDS: Final = {
    "cron": "emits events on a cron schedule",
    "webhook": "emits events for webhook requests",
    "manual": "triggered by people and programs",
    "always_on": "a task that runs continuously",
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


async def _load(parts: ApiContext, _: PageRequest) -> Mapping[str, Any] | PageNotFound:
    rows = await _rows(parts)
    return {"rows": rows[:SHOWN_MAX], "more": max(0, len(rows) - SHOWN_MAX)}


async def _rows(parts: ApiContext, job: str | None = None) -> Sequence[_Row]:
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
    said: SourceAnswer, news: SourceActivity | None, standing: SourceStatus | None, *, now: datetime
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
            return "pending", "Its task is about to be created."
        ended = f"Started {standing.restarts + 1} times." if standing.restarts else ""
        return standing.state.value, f"{ended} {standing.reason or ''}".strip()
    if is_late:
        return "late", "A scheduled time was missed. Is `penstock source cron` running?"
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


async def _load_one(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    job = asked.path["job"]
    found = await _rows(parts, job)
    if not found:
        hint = "The list of sources shows all of the DAG in force."
        return PageNotFound(f"There is no source {job[:100]}.", hint)
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


async def _events(parts: ApiContext, datasets: Sequence[str]) -> Sequence[EventRow]:
    """The latest events of a source."""
    views = EventViews(parts.database)
    found: list[EventRow] = []
    for each in datasets[:_DATASETS_MAX]:
        found += (await views.search(EventSearch(dataset=each), limit=EVENTS_MAX)).events
    return sorted(found, key=lambda each: -each.seq)[:EVENTS_MAX]


async def _trigger(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    ask = trigger_ask(asked.query.get("job", ""), asked.query)
    return await call_api(parts, trigger, to, ask=ask, told=triggered)


PAGES: Final = (
    ConsolePage(PATH, "sources", _load, live=("list",), section="operations"),
    ConsolePage(
        f"{PATH}/{{job:path}}",
        "source",
        _load_one,
        live=("standing", "events"),
        section="operations",
    ),
)
ACTIONS: Final = (FormAction("/operations/trigger", _trigger, fields=("job", *FIELDS)),)
