"""The router: accepts events, and makes tasks of them in one statement.

An event is pending until a router has made its tasks; then it is routed, or audited with the
reason why there are none.

Invariants:
- Events may come twice, late and in any order. The unique key (dataset, generation, and the id of
  the source or of the publication) makes them one (FENCE-17).
- An event is a task of every job that reads its dataset, if the filter of an input lets it pass:
  one for the generation that the DAG names, and one for the current generation while that is being
  replaced. With `per_update` each event is a task. With `per_partition` what one task has published
  of one partition, in several datasets, is one task; else each event is one, for a partition that
  comes again is news.
- An event of a partition whose range is known, or implied, has that range: see `events`.
- Only inputs that trigger count; what is only read makes no task. A job with `when: all` gets
  its
  task when all of those have something for the partition, or for all partitions: the last to be
  routed makes it, and every one after that makes another. What has no partition counts for all of
  them, and the first of it makes the tasks of all partitions that have waited for it.
- Of a job that merges updates, an event becomes part of the task that waits for the same
  partition, or for the same dataset's cursor, if that is the newest of its kind and was never
  attempted. Whoever is claiming it at that moment wins: then the event makes a task of its own.
  The table `coalesced` has the events that have become part of a task which another has made.
- A job that looks back (`lookback` of an input) reads what lies before its partition too. So an
  event is late for later partitions, those that the job has a task of already and whose window
  has it: it makes a task of each, which is one with what waits for that partition. Whoever
  routes to such a job does so alone, so a partition is made before the event is routed, and is
  found, or after it, and reads it.
- A task is told what came with its event: of several that have become one, with the latest.
- Tasks of one job and partition are numbered in the order in which they are committed, so that the
  one with the highest number, whose output counts, sees what led to all others (FENCE-18).
- What a paused source has sent stays pending until it is resumed: no tasks are made of it.
- Tasks, wake-ups and the mark on the event are one statement. A crash leaves an event pending,
  with no task, or routed, with all. A few events that come alone are routed in the transaction
  that keeps them, after all locks of keeping them were taken; the answer to whoever sent them then
  comes after both.
- Any number of routers may run: each takes events that no other has in hand. What comes later
  of a
  partition that another has in hand waits for it.

Jobs with `max_queue_depth`: their events are held and routed in windows, in the order in which
they came. A job has room for its limit and one window of half the limit (`penstock_depth_max`).

- One router at a time does so, under a lock that is only tried. So a count of the queue, once it
  has the lock, holds all that was routed before. Jobs without limits are never asked for the lock.
- Every event of such a dataset is held first, also while there is room: else one could overtake
  those that wait. It reaches all that read its dataset at once, those without limits too.
- Counts are kept in `queue_room`, less what was made since. Tasks that leave the queue make that
  too low, never too high; tasks that come back to it (a retry, a replay) are in the next count.
- A change of the DAG makes what is held pending again, under the locks of all generations, so
  that
  it is held or not as the DAG then in force says. A router that has picked it before finds it so.

A crash leaves events pending or held; the next turn of any router continues. Called by the API
(`accept`), the router loop (`route`), completion (`route_events`) and rebuilds (`route_again`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from psycopg.types.json import Jsonb

from penstock.dispatcher.database.pool import Connection, Database, fetch_rows, query
from penstock.dispatcher.events import (
    Acceptance,
    AcceptedEvent,
    EventRefusalReason,
    EventStatus,
    NewEvent,
    RefusedEvent,
    RoutingResult,
    with_ranges,
)
from penstock.kernel.errors import InvalidInput
from penstock.protocol.events import payload_fault


@dataclass(frozen=True, slots=True)
class HeldEvents:
    """The next events to route, and the room that jobs have before that."""

    events: Sequence[Mapping[str, Any]] = ()
    rooms: Sequence[Mapping[str, Any]] = ()


async def pick_held(connection: Connection, *, limit: int) -> HeldEvents:
    """What there is room for. Nothing while another router is at it."""
    (lock,) = await fetch_rows(connection, "take_window_lock")
    if not lock["is_ours"]:
        return HeldEvents()
    rooms = await fetch_rows(connection, "queue_rooms")
    asked = {
        "jobs": [row["job_id"] for row in rooms],
        "limits": [row["max_queue_depth"] for row in rooms],
        "rooms": [row["room"] for row in rooms],
        "limit": limit,
    }
    return HeldEvents(await fetch_rows(connection, "pick_held", **asked), rooms)


async def write_rooms(connection: Connection, picked: HeldEvents) -> None:
    """Keep what is left of the room."""
    spent: Counter[int] = Counter()
    for event in picked.events:
        for job_id, weight in event["weights"].items():
            spent[int(job_id)] += weight
    if moved := [row for row in picked.rooms if row["is_new"] or spent[row["job_id"]]]:
        asked = {
            "jobs": [row["job_id"] for row in moved],
            "limits": [row["max_queue_depth"] for row in moved],
            "rooms": [row["room"] - spent[row["job_id"]] for row in moved],
            "counted": [row["job_id"] for row in moved if row["is_new"]],
        }
        await connection.execute(query("write_rooms"), asked)


BATCH_MAX: Final = 10_000
"""How many events one call may bring, or route."""
AT_ONCE_MAX: Final = 100
"""How many events are routed in the transaction that keeps them."""
ID_BYTES_MAX: Final = 900
PARTITION_BYTES_MAX: Final = 500

_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# So that no source can take the place of a publication.
_FROM_SOURCE: Final = "source:"


class Router:
    """The operations on events."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._accepting = 0

    async def accept(
        self, events: Sequence[NewEvent], *, all_or_none: bool = False, at_once: bool = False
    ) -> tuple[AcceptedEvent | RefusedEvent, ...]:
        """Keep events, each with its own answer. They are tasks after the next `route`.

        Of several that are one to whoever sends them, none is kept if one is refused: then that
        is the answer of all. `at_once` routes a few events in the same transaction, where work is
        announced and no other call of this dispatcher is under way: of many calls one router makes
        the tasks together, and none of them waits for the locks of another.
        """
        if len(events) > BATCH_MAX:
            raise InvalidInput(f"One call brings {BATCH_MAX} events at most, not {len(events)}.")

        async def work(connection: Connection) -> tuple[AcceptedEvent | RefusedEvent, ...]:
            answers = await accept_events(connection, events, all_or_none=all_or_none)
            is_alone = self._accepting == 1 and len(events) <= AT_ONCE_MAX
            # Else the router's loop has to be kicked anyway, for the relay follows it.
            is_announced = connection.woken is not None
            if at_once and is_alone and is_announced:
                return await _routed(connection, answers)
            return answers

        self._accepting += 1
        try:
            return await self._database.transact(work)
        finally:
            self._accepting -= 1

    async def route(self, *, limit: int = 1000) -> RoutingResult:
        """Make tasks of pending events, the oldest first, and of held ones that there is room for.

        All zero means that none was free.
        """
        if not 1 <= limit <= BATCH_MAX:
            raise InvalidInput(f"One call routes 1 to {BATCH_MAX} events, not {limit}.")

        async def work(connection: Connection) -> tuple[RoutingResult, bool]:
            rows = await fetch_rows(connection, "take_pending", limit=limit)
            routed = await _settle_and_route(connection, rows, EventStatus.PENDING)
            (held,) = await fetch_rows(connection, "is_held")
            return routed, held["is_held"]

        async def window(connection: Connection) -> RoutingResult:
            picked = await pick_held(connection, limit=limit)
            routed = await _settle_and_route(connection, picked.events, EventStatus.HELD)
            await write_rooms(connection, picked)
            return routed

        routed, is_held = await self._database.transact(work)
        return routed + await self._database.transact(window) if is_held else routed


async def _routed(
    connection: Connection, answers: Sequence[AcceptedEvent | RefusedEvent]
) -> tuple[AcceptedEvent | RefusedEvent, ...]:
    """Route what these have brought, if no source of them is paused, or has a limit behind it."""
    accepted = [each for each in answers if isinstance(each, AcceptedEvent)]
    new = [each.seq for each in accepted if each.outcome is Acceptance.NEW]
    if not new or any(each.paused for each in accepted):
        return tuple(answers)
    routed = await _route(connection, new)
    if routed.routed + routed.audited < len(new):
        return tuple(answers)
    return tuple(
        replace(each, is_routed=True) if isinstance(each, AcceptedEvent) else each
        for each in answers
    )


async def _settle_and_route(
    connection: Connection, rows: Sequence[Mapping[str, Any]], status: EventStatus
) -> RoutingResult:
    if not rows:
        return RoutingResult(0, 0, 0)
    # Of a publication that is routed again: see the order of tasks above.
    await share_publications(connection, rows)
    await _share(connection, {(row["dataset"], row["generation"]) for row in rows})
    return await _route(connection, [row["seq"] for row in rows], status=status)


async def route_events(connection: Connection, events: Sequence[int]) -> None:
    """Make tasks of events that the caller's transaction has made: the hook of `Tasks`."""
    await connection.execute(query("share_generations_of_events"), {"events": list(events)})
    await _route(connection, events)


async def route_again(
    connection: Connection, events: Sequence[int], *, generation: str, backfill_id: int
) -> RoutingResult:
    """Make the tasks that events are in one generation, as routing would have made them.

    They are tasks of the backfill. What is there already is left alone, and so are the events.
    """
    await connection.execute(query("share_generations_of_events"), {"events": list(events)})
    return await _route(connection, events, only=generation, backfill=backfill_id)


async def share_publications(connection: Connection, events: Sequence[Mapping[str, Any]]) -> bool:
    """Wait for publications under way of what these events tell of. Whether any is published.

    Comes before the locks of generations, which a publication takes after that of its partition.
    """
    published = [event for event in events if event["is_published"]]
    if published:
        places = {
            "datasets": [event["dataset"] for event in published],
            "generations": [event["generation"] for event in published],
            "keys": [event["partition_key"] for event in published],
        }
        await connection.execute(query("share_publications"), places)
    return bool(published)


async def _route(
    connection: Connection,
    events: Sequence[int],
    *,
    status: EventStatus = EventStatus.PENDING,
    only: str | None = None,
    backfill: int | None = None,
) -> RoutingResult:
    left = list(events)
    reached = await fetch_rows(connection, "lock_readers", events=left)
    limited = {each for row in reached for each in row["limited"] or ()}
    if limited and status is EventStatus.PENDING and only is None:
        asked = {"events": left, "datasets": sorted(limited)}
        held = {row["seq"] for row in await fetch_rows(connection, "hold_events", **asked)}
        left = [seq for seq in left if seq not in held]
        if not left:
            return RoutingResult(0, 0, 0)
    (row,) = await fetch_rows(
        connection,
        "route",
        events=left,
        status=status,
        only=only,
        backfill=backfill,
        by_rows=connection.woken is None,
    )
    if connection.woken is not None:
        for operator, priority, tasks in row["woken"]:
            connection.woken[operator, priority] += tasks
    return RoutingResult(row["routed"], row["audited"], row["tasks"])


async def accept_events(
    connection: Connection, events: Sequence[NewEvent], *, all_or_none: bool = False
) -> tuple[AcceptedEvent | RefusedEvent, ...]:
    """Keep events inside the caller's transaction: those of a task, while its attempt is held."""
    answers: dict[int, AcceptedEvent | RefusedEvent] = {
        place: RefusedEvent(EventRefusalReason.MALFORMED, problem)
        for place, each in enumerate(events)
        if (problem := _problem(each))
    }
    places = {(e.dataset, e.generation) for n, e in enumerate(events) if n not in answers}
    await _share(connection, places)
    rows = await fetch_rows(connection, "judge_datasets", **_arrays(places))
    judged = {(row["dataset"], row["generation"]): row for row in rows}
    kept: dict[int, NewEvent] = {}
    for place, each in enumerate(events):
        if place in answers:
            continue
        if (each.dataset, each.generation) in judged:
            kept[place] = each
        else:
            answers[place] = RefusedEvent(
                EventRefusalReason.UNKNOWN_DATASET, f"There is no dataset {each.dataset}."
            )
    kept, lacking = await _ranged(connection, kept, judged)
    answers |= lacking
    if all_or_none and answers:
        first = min(answers)
        refused = answers[first]
        assert isinstance(refused, RefusedEvent), "nothing is kept yet"
        return (replace(refused, place=first),) * len(events)
    answers |= await _keep(connection, kept, judged)
    return tuple(answers[place] for place in range(len(events)))


async def _ranged(
    connection: Connection,
    events: Mapping[int, NewEvent],
    judged: Mapping[tuple[str, str], Mapping[str, Any]],
) -> tuple[dict[int, NewEvent], Mapping[int, RefusedEvent]]:
    """Events with their ranges, and the answers of those that need one and have none."""
    of_interest = {}
    for place, each in events.items():
        about = judged[each.dataset, each.generation]
        # What becomes no task needs no range.
        if about["is_ranged"] and about["why_not"] is None:
            of_interest[place] = each
    if all(each.start is not None for each in of_interest.values()):
        return dict(events), {}
    found = await with_ranges(connection, of_interest, prefix=_FROM_SOURCE)
    refused = {
        place: RefusedEvent(EventRefusalReason.NO_RANGE, told)
        for place, told in found.refused.items()
    }
    kept = {place: each for place, each in events.items() if place not in refused}
    return {**kept, **found.events}, refused


async def _keep(
    connection: Connection,
    events: Mapping[int, NewEvent],
    judged: Mapping[tuple[str, str], Mapping[str, Any]],
) -> Mapping[int, AcceptedEvent]:
    if not events:
        return {}
    asked = [
        _event_row(each, place=place, why_not=judged[each.dataset, each.generation]["why_not"])
        for place, each in events.items()
    ]
    new = {row["seq"] for row in await fetch_rows(connection, "keep_events", events=Jsonb(asked))}
    # A statement of its own, which sees what others have brought while we waited for them.
    found = await fetch_rows(
        connection,
        "find_events",
        places=[row["place"] for row in asked],
        datasets=[row["dataset_id"] for row in asked],
        generations=[row["generation"] for row in asked],
        dedupes=[row["dedupe"] for row in asked],
    )
    answers: dict[int, AcceptedEvent] = {}
    for row in sorted(found, key=lambda row: int(row["place"])):
        each = events[row["place"]]
        about = judged[each.dataset, each.generation]
        why_not, seq = about["why_not"], row["seq"]
        outcome = Acceptance.NEW if why_not is None else Acceptance.AUDITED
        if seq not in new:
            outcome = Acceptance.DUPLICATE
        # The second of two equal ones in one call is a duplicate of the first.
        new.discard(seq)
        answers[row["place"]] = AcceptedEvent(seq, outcome, why_not, about["paused"])
    return answers


async def _share(connection: Connection, places: Iterable[tuple[str, str]]) -> None:
    await connection.execute(query("share_generations"), _arrays(places))


def _arrays(places: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    ordered = sorted(places)
    return {
        "datasets": [dataset for dataset, _ in ordered],
        "generations": [generation for _, generation in ordered],
    }


def _event_row(event: NewEvent, *, place: int, why_not: str | None) -> dict[str, Any]:
    return {
        "place": place,
        "dataset_id": event.dataset,
        "generation": event.generation,
        "cursor": event.cursor,
        "partition_key": event.partition_key,
        "range_start": event.start,
        "range_end": event.end,
        "dedupe": _FROM_SOURCE + event.event_id,
        "task_id": event.task_id,
        "why_not": why_not,
        "payload": event.payload or None,
    }


def _problem(event: NewEvent) -> str:
    """What is wrong with an event; empty if nothing is."""
    if not _UUID.fullmatch(event.dataset) or not _UUID.fullmatch(event.generation):
        return "A dataset and its generation are named by their uuids."
    if (event.cursor is None) == (event.partition_key is None):
        return "An event has a cursor or a partition, and not both."
    is_range = event.start is not None and event.end is not None
    if (event.start is None) != (event.end is None):
        return "A range has a start and an end."
    if is_range and event.partition_key is None:
        return "A range needs the key of its partition."
    numbers = (event.start, event.end, event.cursor, event.task_id)
    if any(number is not None and not -(2**63) <= number < 2**63 for number in numbers):
        return "A range, a cursor or a task is a number of 64 bits."
    if event.start is not None and event.end is not None and event.start >= event.end:
        return "A range needs a start that is lower than its end."
    for what, text, bytes_max in (
        ("The id of an event", event.event_id, ID_BYTES_MAX),
        ("The key of a partition", event.partition_key, PARTITION_BYTES_MAX),
    ):
        if text is not None and not _is_storable(text, bytes_max=bytes_max):
            return f"{what} has 1 to {bytes_max} bytes that can be stored."
    fault = payload_fault(event.payload) if event.payload else None
    return fault.why if fault is not None else ""


def _is_storable(text: str, *, bytes_max: int) -> bool:
    if "\x00" in text:
        return False
    try:
        return 1 <= len(text.encode()) <= bytes_max
    except UnicodeEncodeError:
        return False
