"""The page of events: which events came, who sent them, and the tasks that each created.

The latest come first, by dataset, partition and id. Those of a dataset are searched among the
latest thousands at a time; where a search has ended before it found enough, the page says so
and continues from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from penstock.console.pages.base import ConsolePage, PageNotFound, PageRequest, parse_id
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.views.events import WINDOW, EventRow, EventSearch, EventTask, EventViews

PATH: Final = "/operations/events"
SHOWN_MAX: Final = 50
MADE_MAX: Final = 5
"""How many tasks of one event are shown."""
_TEXT_MAX: Final = 1000
_FIELDS: Final = ("dataset", "partition", "id")
_WAYS: Final = {
    "console:": "in the console",
    "trigger:": "on the command line, or by a program",
    "cron:": "by its schedule",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedEvent:
    """An event, as it is shown."""

    said: EventRow
    id: str
    """What its source calls it; empty for a publication."""
    way: str
    """How it was told, if that is known and no task has told of it."""
    state: str
    made: Sequence[EventTask]
    more: int
    """How many tasks are not shown."""


async def _load(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    views = EventViews(parts.database)
    kept = {name: _text(asked.query.get(name, "")) for name in _FIELDS}
    kept = {name: value for name, value in kept.items() if value}
    before = parse_id(asked.query.get("before", ""))
    search = EventSearch(**kept, before=before or None)
    found = await views.search(search, limit=SHOWN_MAX)
    return {
        "rows": rows_of(found.events),
        "names": await views.datasets(),
        "dataset": kept.get("dataset", ""),
        "partition": kept.get("partition", ""),
        "event_id": kept.get("id", ""),
        "is_filtered": bool(kept),
        "is_first": not before,
        "is_cut": found.is_cut and bool(kept),
        "older": _link(kept, before=found.before) if found.before else "",
        "newest": _link(kept),
        "window": WINDOW,
        "path": PATH,
    }


def rows_of(events: Sequence[EventRow]) -> list[ListedEvent]:
    """Events, as they are shown."""
    return [_row(each) for each in events]


def _row(said: EventRow) -> ListedEvent:
    known_as = "" if said.revision is not None else said.dedupe.removeprefix("source:")
    return ListedEvent(
        said=said,
        id=known_as,
        way="" if said.task_id else way_of(known_as),
        state={"pending": "waiting", "routed": "routed"}.get(said.routed, "kept"),
        made=said.made[:MADE_MAX],
        more=max(0, len(said.made) - MADE_MAX),
    )


def way_of(event_id: str) -> str:
    """How an event was told, by the id that it was given; empty if somebody has chosen the id."""
    return next((way for begins, way in _WAYS.items() if event_id.startswith(begins)), "")


def _text(said: str) -> str:
    # Postgres has no NUL, so there is nothing that has one.
    return said.strip().replace("\x00", "\ufffd")[:_TEXT_MAX]


def _link(kept: Mapping[str, str], **more: object) -> str:
    said = {**kept, **more}
    return f"{PATH}?{urlencode(said)}" if said else PATH


_QUERY: Final = (*_FIELDS, "before")
PAGES: Final = tuple(
    # The short path is for links, and for people who type.
    ConsolePage(path, "events", _load, live=("list",), section="operations", query=_QUERY)
    for path in (PATH, "/events")
)
