"""Events on their way in: their values, and the range that each one gets.

An event of a partition without a range is given

1. the range that the partition had last, in what came before of the same dataset, earlier in the
   same call or in the generations that are live;
2. or else the one that its key implies by a rule of the DAG: an interval of its cron source, a
part
   of the calendar or a range by its ends where a range operator downstream cuts by such, or a part
   of the calendar where a job downstream looks back.

An event that has none then, and leads to a range operator or a job with a lookback, is refused:
its tasks could only die. So is one without a partition. Where a function in between may publish
ranges of its own, or a filter stops what has none, it is accepted. An event with the id of an
earlier one is that one again: it is never refused for its range, and its range is not changed.
`range_looked_at` gives earlier events the range that their key implies when a DAG comes into
force.

Costs no statement where no range matters, one where all are known, two otherwise. Called by
`router` in the transaction that keeps events, by `backfills` and by `deployment`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import msgspec
from psycopg.types.json import Jsonb

from penstock.dispatcher.dag.model import Emits
from penstock.dispatcher.database.pool import Connection, query
from penstock.dispatcher.ranges import Range, calendar_range, named
from penstock.kernel.cron import next_after, parse_cron, previous_before


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """A dataset has moved on: to a cursor, or in one partition, which may be a range.

    An event with the id of an earlier one, of the same dataset and generation, is that one again.
    """

    dataset: str
    generation: str
    event_id: str
    """The source's own name for it."""
    cursor: int | None = None
    partition_key: str | None = None
    start: int | None = None
    end: int | None = None
    payload: Mapping[str, Any] | None = None
    """What comes with it: see `penstock.protocol.events`."""
    task_id: int | None = None
    """The task that sends it, if it is one."""


class Acceptance(StrEnum):
    """What became of an event."""

    NEW = "new"
    DUPLICATE = "duplicate"
    AUDITED = "audited"
    """It is kept, and no task is made of it."""


@dataclass(frozen=True, slots=True)
class AcceptedEvent:
    """An event that is kept."""

    seq: int
    outcome: Acceptance
    why_not: str | None = None
    """Why it was only audited."""
    paused: str | None = None
    """Why its source should send nothing more for now; None if it may."""
    is_routed: bool = False
    """Whether its tasks are made already; else a router makes them next."""


class EventRefusalReason(StrEnum):
    """Why an event was not kept."""

    UNKNOWN_DATASET = "unknown dataset"
    MALFORMED = "malformed"
    NO_RANGE = "no range"
    """It leads to a job that works on ranges, and has none."""


@dataclass(frozen=True, slots=True)
class RefusedEvent:
    """An event that was not kept."""

    why: EventRefusalReason
    detail: str = ""
    place: int | None = None
    """Which one of several was refused, where that refuses all of them."""


class EventStatus(StrEnum):
    """What an event is that is to be routed."""

    PENDING = "pending"
    HELD = "held"
    """It waits for room in a queue with a limit."""


@dataclass(frozen=True, slots=True)
class RoutingResult:
    """What one turn of routing has done."""

    routed: int
    """Events that have reached all who read their dataset."""
    audited: int
    """Events of generations that have left in the meantime."""
    tasks: int
    """Tasks that were not there before."""

    def __add__(self, other: RoutingResult) -> RoutingResult:
        return RoutingResult(
            self.routed + other.routed, self.audited + other.audited, self.tasks + other.tasks
        )


_KEYS_MAX: Final = 10_000
_INTERVAL_KEY: Final = "%Y-%m-%dT%H:%MZ"


class RangeReader(msgspec.Struct, frozen=True):
    """A range operator, or a job that looks back, that an event leads to."""

    job: str
    operator: str
    size: int | str
    """A number, or a part of the calendar."""
    is_sure: bool
    """Whether what reaches it of the event has the event's own range, or none."""


@dataclass(slots=True)
class RangedEvents:
    """Events with the ranges that were found for them, and those that need one and have none."""

    events: dict[int, NewEvent]
    refused: dict[int, str] = field(default_factory=dict)


async def with_ranges(
    connection: Connection, events: Mapping[int, NewEvent], *, prefix: str
) -> RangedEvents:
    """Events by their places, each with its range. `prefix` is how the ids of events are kept."""
    ranged = RangedEvents(dict(events))
    lacking = _of_this_call(ranged)
    asked = [_row(each, place=place, prefix=prefix) for place, each in lacking.items()]
    kept: set[int] = set()
    for row in await _rows(connection, "known_ranges", asked):
        if row["is_kept"]:
            kept.add(row["place"])
        if row["start"] is not None:
            _give(ranged, row["place"], (row["start"], row["end"]))
    left = {place: ranged.events[place] for place in lacking if place not in kept}
    left = {place: each for place, each in left.items() if each.start is None}
    asked = [_row(each, place=place, prefix=prefix) for place, each in left.items()]
    for row in await _rows(connection, "range_readers", asked):
        event, place = left[row["place"]], row["place"]
        readers = msgspec.convert(row["readers"] or [], list[RangeReader])
        if found := implied(event.partition_key, source=row["source"] or {}, readers=readers):
            _give(ranged, place, found)
        elif told := lack(event, readers):
            del ranged.events[place]
            ranged.refused[place] = told
    return ranged


async def range_looked_at(connection: Connection) -> None:
    """Give days, weeks, months and years that jobs look back at their ranges, where they have none.

    They came when nothing in the DAG worked on ranges. Events, publications and open tasks get it,
    of all that leads there. Called under the locks of who has put a DAG in force.
    """
    found = await (await connection.execute(query("looked_at"))).fetchall()
    datasets = [row["dataset_id"] for row in found]
    after = ""
    while datasets:
        asked = {"datasets": datasets, "after": after, "limit": _KEYS_MAX}
        rows = await (await connection.execute(query("unranged_looked_at"), asked)).fetchall()
        keys = [row["partition_key"] for row in rows]
        ranges = {key: range_ for key in keys if (range_ := calendar_range(key))}
        given = {
            "datasets": datasets,
            "keys": list(ranges),
            "starts": [start for start, _ in ranges.values()],
            "ends": [end for _, end in ranges.values()],
        }
        await connection.execute(query("range_looked_at"), given)
        if len(keys) < _KEYS_MAX:
            return
        after = keys[-1]


def implied(
    key: str | None, *, source: Mapping[str, Any], readers: Iterable[RangeReader]
) -> Range | None:
    """The range that a key has by a rule of the DAG; None if there is none."""
    if key is None:
        return None
    if source.get("emits") == Emits.INTERVAL:
        return _interval(key, source)
    found = None
    for reader in readers:
        by_its_size = calendar_range if isinstance(reader.size, str) else named
        found = found or by_its_size(key)
    return found


async def key_ranges(
    connection: Connection, keys: Sequence[str], *, job: Mapping[str, Any]
) -> Mapping[str, Range] | str:
    """Ranges for keys of a job that nothing was ever told of, as a backfill computes them.

    The one that the key implies by an interval source that the job reads, or by a range operator
    downstream. A sentence if a key has none, and needs one: what a task of Spark makes has the
    range of the task, and no other. `job` is a row of `find_backfill_job`.
    """
    places = [*job["inputs"], *job["outputs"]]
    asked = [_place(dataset, place=n, key=None) for n, dataset in enumerate(places)]
    about = {places[row["place"]]: row for row in await _rows(connection, "range_readers", asked)}
    sources = [
        source
        for dataset in job["inputs"]
        if (source := about[dataset]["source"] or {}).get("emits") == Emits.INTERVAL
    ]
    ranged = [dataset for dataset in job["outputs"] if about[dataset]["readers"]]
    if job["looks_back"]:
        # The job itself works on ranges, and is a reader of its inputs.
        ranged += job["inputs"]
    if not sources and not ranged:
        return {}
    wanted = {"job": job["job_id"], "generation": job["generation"], "keys": list(keys)}
    found = await (await connection.execute(query("unranged_keys"), wanted)).fetchall()
    unknown = [row["partition_key"] for row in found]
    pairs = [(key, dataset) for key in unknown for dataset in ranged]
    asked = [_place(dataset, place=n, key=key) for n, (key, dataset) in enumerate(pairs)]
    readers: dict[str, list[RangeReader]] = {key: [] for key in unknown}
    for row in await _rows(connection, "range_readers", asked):
        readers[pairs[row["place"]][0]] += msgspec.convert(row["readers"] or [], list[RangeReader])
    ranges: dict[str, Range] = {}
    for key in unknown:
        said = (implied(key, source=each, readers=()) for each in sources)
        range_ = next(filter(None, said), None) or implied(key, source={}, readers=readers[key])
        if range_:
            ranges[key] = range_
        elif job["runtime"] == "spark" and (sure := _sure(readers[key])):
            return (
                f"No range of the partition {key!r} is known, and {sure};"
                " give a start, an end and a step."
            )
    return ranges


def lack(event: NewEvent, readers: Sequence[RangeReader]) -> str:
    """What to send with an event that needs a range and has none; empty if it needs none."""
    if not (who := _sure(readers)):
        return ""
    if event.partition_key is None:
        return f"This event has no partition, and {who}; send a partition, with a start and an end."
    return (
        f"No range of the partition {event.partition_key!r} is known, and {who}; send a start and"
        " an end with it."
    )


def _sure(readers: Sequence[RangeReader]) -> str:
    """Who works on ranges, of those that get none otherwise; empty if nobody does."""
    sure = next((each for each in readers if each.is_sure), None)
    if sure is None:
        return ""
    return f"the job {sure.job!r} downstream ({sure.operator}) works on ranges"


def _interval(key: str, source: Mapping[str, Any]) -> Range | None:
    """The interval of a cron source that begins where its key says."""
    try:
        begin = datetime.strptime(key, _INTERVAL_KEY).replace(tzinfo=UTC)
        cron = parse_cron(str(source.get("cron")))
    except ValueError:
        return None
    if f"{begin:{_INTERVAL_KEY}}" != key:
        return None
    zone = str(source.get("time_zone", "UTC"))
    end = next_after(cron, begin, time_zone=zone)
    if end is None or previous_before(cron, end, time_zone=zone) != begin:
        return None
    return int(begin.timestamp()), int(end.timestamp())


def _of_this_call(ranged: RangedEvents) -> Mapping[int, NewEvent]:
    """Those without a range after what others of the same call have said of their partitions."""
    said: dict[tuple[str, str, str], Range] = {}
    lacking: dict[int, NewEvent] = {}
    for place, each in sorted(ranged.events.items()):
        if each.partition_key is None:
            lacking[place] = each
            continue
        where = (each.dataset, each.generation, each.partition_key)
        if each.start is not None and each.end is not None:
            said[where] = (each.start, each.end)
        elif where in said:
            _give(ranged, place, said[where])
        else:
            lacking[place] = each
    return lacking


def _give(ranged: RangedEvents, place: int, found: Range) -> None:
    start, end = found
    ranged.events[place] = replace(ranged.events[place], start=start, end=end)


def _row(event: NewEvent, *, place: int, prefix: str) -> dict[str, Any]:
    return {
        "place": place,
        "dataset_id": event.dataset,
        "generation": event.generation,
        "partition_key": event.partition_key,
        "cursor": event.cursor,
        "dedupe": prefix + event.event_id,
    }


def _place(dataset: str, *, place: int, key: str | None) -> dict[str, Any]:
    return {"place": place, "dataset_id": dataset, "partition_key": key, "cursor": None}


async def _rows(
    connection: Connection, name: str, asked: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    if not asked:
        return []
    return await (await connection.execute(query(name), {"events": Jsonb(asked)})).fetchall()
