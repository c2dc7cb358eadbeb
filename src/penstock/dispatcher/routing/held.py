"""Queues with a limit are filled in windows.

An event that leads to a job with `max_queue_depth` is not routed by whoever has brought it: a
router, or a task that has published. It is held, and held events are routed in the order in which
they came, as many as all such jobs that read the dataset have room for. A job has room for its
limit and one window of half the limit (`penstock_depth_max`), so that a queue at its limit is seen
to be over it, and what is normal presses after what is bulk.

- One router at a time does so, under a lock that is only tried. So a count of the queue, once it
  has the lock, holds all that was routed before. Jobs without limits are never asked for the lock.
- Every event of such a dataset is held first, also while there is room: else one could overtake
  those that wait. It reaches all that read its dataset at once, those without limits too.
- Counts are kept in `queue_room`, less what was made since. Tasks that leave the queue make that
  too low, never too high; tasks that come back to it (a retry, a replay) are in the next count.
- A change of the DAG makes what is held pending again, under the locks of all generations, so that
  it is held or not as the DAG then in force says. A router that has picked it before finds it so.

A crash leaves events held; the next turn of any router goes on. Called by `router`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.database.queries import query


@dataclass(frozen=True, slots=True)
class Picked:
    """The next events to route, and the room that jobs have before that."""

    events: Sequence[Mapping[str, Any]] = ()
    rooms: Sequence[Mapping[str, Any]] = ()


async def pick_held(connection: Connection, *, limit: int) -> Picked:
    """What there is room for. Nothing while another router is at it."""
    (lock,) = await _rows(connection, "take_window_lock")
    if not lock["is_ours"]:
        return Picked()
    rooms = await _rows(connection, "queue_rooms")
    asked = {
        "jobs": [row["job_id"] for row in rooms],
        "limits": [row["max_queue_depth"] for row in rooms],
        "rooms": [row["room"] for row in rooms],
        "limit": limit,
    }
    return Picked(await _rows(connection, "pick_held", **asked), rooms)


async def write_rooms(connection: Connection, picked: Picked) -> None:
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


async def _rows(connection: Connection, name: str, **asked: object) -> list[dict[str, Any]]:
    return await (await connection.execute(query(name), asked)).fetchall()
