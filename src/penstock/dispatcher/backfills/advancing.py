"""Makes tasks of one backfill, as many as it has room for, and moves its cursor with them.

A plan of ranges or keys is walked by position: the task of position 7 has the key
`backfill:{id}:7`.

A rebuild is walked by the events of the job's inputs, in their order, up to the one that was the
newest when it was planned. Of a partition that came more than once the latest event is enough, if
the job works by partitions and replaces them; else every event counts, but for what is published of
an input that was replaced since: what a task of it would append was never there. Each becomes the
task that routing would have made of it, by the same key, so that what was routed in the meantime is
not made twice. An event
that has a later one of the same partition is passed by whether or not that is part of the rebuild:
a later one was routed to the new generation when it came.

The later task of a partition wins. So one that is made here of a plan must not get a higher number
than one that is just being routed to the job, whose event it would not see: a lock of the job. And
one that is made of an old event must not get a higher number than one that a publication is just
making of a newer event: the publications of the partitions in hand are locked, and then the events
looked at again. That comes before the locks of generations, which a publication takes after that of
its partition.

Called by `penstock.dispatcher.backfills.backfills`, in a transaction. A crash leaves it undone.
"""

from __future__ import annotations

from typing import Any, Final

from penstock.dispatcher.backfills.plans import Kind
from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.routing.router import route_again, share_publications
from penstock.dispatcher.tasks.rows import announce

BATCH_MAX: Final = 5_000
"""How many tasks one transaction makes."""
WALK_MAX: Final = 50_000
"""How many events one transaction looks at."""
COUNT_MAX: Final = 200_000
"""How many events one transaction counts; more than it looks at, so that counting stays ahead."""


async def advance(connection: Connection, backfill_id: int) -> bool:
    """Make tasks of a backfill. Whether there is more to do at once.

    One that another dispatcher has in hand is left to it.
    """
    await connection.execute(query("share_deployment_lock"))
    held = await _rows(connection, "hold_backfill", backfill=backfill_id)
    if not held:
        return False
    (row,) = await _rows(connection, "backfill_room", backfill=backfill_id)
    room = _room(row["concurrency_max"], row["open"])
    if row["kind"] == Kind.REBUILD:
        is_planned, made = await _walk_events(connection, row, room=room)
    else:
        made = min(room, row["partitions"] - row["position"])
        if made > 0:
            await connection.execute(query("lock_reader"), {"definition": row["definition_id"]})
            asked = {"backfill": backfill_id, "count": made}
            tasks = await _rows(connection, f"make_{Kind(row['kind'])}", **asked)
            await announce(connection, [task["id"] for task in tasks])
        is_planned = row["position"] + made == row["partitions"]
    if is_planned and made == 0 and row["open"] == 0:
        await connection.execute(query("end_backfill"), {"backfill": backfill_id})
    return room > 0 and not is_planned and row["open"] + made < row["concurrency_max"]


def _room(concurrency_max: int, open_tasks: int) -> int:
    """How many tasks to make now: none until a quarter of them is missing, and then many at once.

    Making one whenever one ends would cost as much as running them.
    """
    room = max(0, concurrency_max - open_tasks)
    return min(room, BATCH_MAX) if 4 * room >= concurrency_max else 0


async def _walk_events(
    connection: Connection, row: dict[str, Any], *, room: int
) -> tuple[bool, int]:
    """Make tasks of the next events. Whether those were the last, and how many were taken."""
    backfill_id, upto = row["id"], row["upto"]
    if row["walked"] >= upto:
        return True, 0
    if row["counted"] < upto:
        asked = {"backfill": backfill_id, "most": COUNT_MAX}
        await connection.execute(query("count_rebuild"), asked)
    if room == 0:
        return False, 0
    asked = {"backfill": backfill_id, "most": WALK_MAX, "limit": room}
    picked = await _rows(connection, "pick_rebuild", **asked, among=None)
    # As far as it has looked, or to the last one that there was room for.
    walked = min(upto, row["walked"] + WALK_MAX)
    if len(picked) == room:
        walked = picked[-1]["seq"]
    latest = await _settle_publications(connection, asked, picked)
    if latest:
        await route_again(connection, latest, generation=row["generation"], backfill_id=backfill_id)
    moved = {"backfill": backfill_id, "walked": walked, "taken": len(latest)}
    await connection.execute(query("move_rebuild"), moved)
    return walked == upto, len(latest)


async def _settle_publications(
    connection: Connection, asked: dict[str, Any], picked: list[dict[str, Any]]
) -> list[int]:
    """Wait for publications that are under way; the events that are still the latest after it."""
    if not await share_publications(connection, picked):
        return [event["seq"] for event in picked]
    among = [event["seq"] for event in picked]
    return [event["seq"] for event in await _rows(connection, "pick_rebuild", **asked, among=among)]


async def _rows(connection: Connection, name: str, **asked: object) -> list[dict[str, Any]]:
    return await (await connection.execute(query(name), asked)).fetchall()
