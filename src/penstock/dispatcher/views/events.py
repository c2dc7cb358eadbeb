"""Search for events, and the tasks that each has led to.

By its id or its partition an event is found by an index. Those of one dataset are found among
the latest of all, `WINDOW` at a look; a look says where the next one has to begin, so that
nothing is out of reach and no look is long. What an event has made is found by the keys that
routing gives to tasks, for the jobs of the latest `VERSIONS_MAX` versions of the DAG; tasks
that retention has removed are not there any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from penstock.dispatcher.database.pool import Connection, Database, fetch_rows

WINDOW: Final = 20_000
"""How many events one look for those of a dataset goes through."""
VERSIONS_MAX: Final = 50
TASKS_MAX: Final = 1_000
"""How many tasks are told of the events of one look, at most."""
NAMES_MAX: Final = 1_000
_ID_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTask:
    """A task that was made of an event."""

    task_id: int
    job: str
    status: str
    is_shared: bool
    """Whether it was made of another event, and this one has become part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """An event, and what became of it."""

    seq: int
    dataset: str
    job: str | None
    """The job that writes the dataset: the source, of an event that no task has told of."""
    generation_state: str | None
    cursor: int | None
    partition_key: str | None
    range_start: int | None
    range_end: int | None
    dedupe: str
    task_id: int | None
    """The task that has told of it."""
    revision: int | None
    """Of the publication that it tells of."""
    routed: str
    why_not: str | None
    received_at: datetime
    payload: str | None
    """What came with it, as JSON; the beginning."""
    made: Sequence[EventTask] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSearch:
    """What is looked for; None leaves it out."""

    dataset: str | None = None
    partition: str | None = None
    id: str | None = None
    """What a source calls it, or its number."""
    before: int | None = None
    """Only events with a lower number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """The latest events that a search has found."""

    events: Sequence[EventRow]
    before: int | None
    """Where the next look begins; None if there is nothing more."""
    is_cut: bool = False
    """Whether the look has ended before it found enough, at the end of its window."""


class EventViews:
    """The questions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def search(self, search: EventSearch, *, limit: int) -> EventPage:
        """The latest events, as a search says."""

        async def work(connection: Connection) -> EventPage:
            rows, floor = await _found(connection, search, limit=limit + 1)
            shown = rows[:limit]
            made = await _made(connection, [row["seq"] for row in shown])
            events = [EventRow(**row, made=made.get(row["seq"], ())) for row in shown]
            if len(rows) > limit:
                return EventPage(events=events, before=shown[-1]["seq"])
            return EventPage(events=events, before=floor, is_cut=floor is not None)

        return await self._database.transact(work)

    async def datasets(self) -> Sequence[str]:
        """The names of datasets, some at most."""

        async def work(connection: Connection) -> Sequence[str]:
            rows = await fetch_rows(connection, "names_of_datasets", limit=NAMES_MAX)
            return [row["name"] for row in rows]

        return await self._database.transact(work)


async def _found(
    connection: Connection, search: EventSearch, *, limit: int
) -> tuple[list[dict[str, Any]], int | None]:
    """What is found, and where a look that was cut has ended."""
    asked = {"dataset": search.dataset, "before": search.before or _ID_MAX, "limit": limit}
    if search.id is not None:
        number = int(search.id) if search.id.isascii() and search.id.isdecimal() else 0
        asked |= {"id": search.id, "number": min(number, _ID_MAX), "partition": search.partition}
        return await fetch_rows(connection, "events_of_id", **asked), None
    if search.partition is not None:
        asked["partition"] = search.partition
        return await fetch_rows(connection, "events_of_partition", **asked), None
    if search.dataset is None:
        return await fetch_rows(connection, "latest_events", **asked, floor=0), None
    floor = await fetch_rows(connection, "events_floor", before=asked["before"], window=WINDOW)
    lowest = floor[0]["seq"] if floor else None
    return await fetch_rows(connection, "latest_events", **asked, floor=lowest or 0), lowest


async def _made(connection: Connection, events: Sequence[int]) -> Mapping[int, list[EventTask]]:
    asked = {"events": list(events), "versions": VERSIONS_MAX, "limit": TASKS_MAX}
    found: dict[int, list[EventTask]] = {}
    for row in await fetch_rows(connection, "tasks_of_events", **asked):
        found.setdefault(row.pop("seq"), []).append(EventTask(**row))
    return found
