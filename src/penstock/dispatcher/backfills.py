"""Backfills: plans of partitions to compute, and how much of them has become tasks.

A plan names its partitions by ranges (from start to end by step, one row however many) or by a
list of keys. The rebuild of a new generation is planned by `deployment` and follows events
instead.

| state | means | moved by |
|---|---|---|
| running | tasks are made while too few are open | `turn` → done; `pause`; `cancel` |
| paused | no more tasks are made; those that are there go on | `resume`; `cancel` |
| done | every partition was planned, and none of its tasks is open | nobody |
| cancelled | what waited is cancelled, what ran was asked to stop | nobody |

Invariants:
- A plan is one row with a cursor, so that a million partitions are planned at once. Tasks are
  made in the transaction that moves the cursor: a crash makes neither, and none is made twice.
- At most `concurrency` tasks of a backfill are open, so that the queues stay short however long
  a
  plan is. The tasks are bulk, and do not count as pressure.
- One dispatcher at a time moves a backfill: it holds the row, and others pass by.
- Everything here holds the deployment's lock, shared, and first: a change of the DAG comes
  wholly
  before it or after it, and cancels all of the plans and tasks that it makes useless.
- A plan of ranges or keys is walked by position: the task of position 7 has the key
  `backfill:{id}:7`.
- A rebuild is walked by the events of the job's inputs in their order, up to the newest at
  planning
  time. A job that replaces partitions needs only the latest event of each; otherwise every event
  counts, except for what is published of an input that was replaced since. Each becomes the task
  that routing would have made, with the same key, so nothing is made twice.
- The later task of a partition wins. A task of a plan must not get a higher number than one
  that is
  being routed: a lock of the job. A task of an old event must not get a higher number than one of a
  newer event that is being published: the publications are locked and the events read again. These
  locks come before those of generations, which a publication takes after that of its partition.

Called by the API, and by a loop (`turn`) of every dispatcher. A crash undoes the open
transaction.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from psycopg.types.json import Jsonb

from penstock.dispatcher.dag.model import DISPATCHER_RUNTIME, SourceKind
from penstock.dispatcher.database.pool import Connection, Database, fetch_rows, query
from penstock.dispatcher.events import key_ranges
from penstock.dispatcher.ranges import Range
from penstock.dispatcher.router import route_again, share_publications
from penstock.dispatcher.tasks.rows import announce
from penstock.kernel.errors import InvalidInput
from penstock.protocol.steering import BackfillAnswer, BackfillAsk, BackfillsAnswer

PARTITIONS_MAX: Final = 1_000_000_000
KEY_BYTES_MAX: Final = 500


class BackfillKind(StrEnum):
    """How the partitions of a plan are found."""

    RANGES = "ranges"
    KEYS = "keys"
    REBUILD = "rebuild"


class BackfillRefusalReason(StrEnum):
    """Why a backfill was not made, or not moved."""

    INVALID = "invalid"
    """What was asked for makes no sense."""
    UNKNOWN_JOB = "unknown job"
    """The DAG in force has no such job."""
    NOT_RUN = "not run"
    """The job computes no partitions."""
    OVER = "over"
    """The backfill is done or cancelled."""


@dataclass(frozen=True, slots=True)
class BackfillRefused:
    """A call that changed nothing."""

    why: BackfillRefusalReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillPlan:
    """The partitions to compute."""

    kind: BackfillKind
    partitions: int
    start: int = 0
    end: int = 0
    step: int = 1
    keys: tuple[str, ...] = ()

    @property
    def stored(self) -> dict[str, Any]:
        """What is stored of it; keys have a table of their own."""
        if self.kind is BackfillKind.KEYS:
            return {"kind": self.kind.value}
        return {"kind": self.kind.value, "start": self.start, "end": self.end, "step": self.step}


def plan_of(ask: BackfillAsk) -> BackfillPlan | BackfillRefused:
    """The plan that a call asks for, or what is wrong with it."""
    has_range = any(value is not None for value in (ask.start, ask.end, ask.step))
    if ask.keys and has_range:
        return _invalid("A backfill has keys, or a start, an end and a step; leave one out.")
    if ask.keys:
        return _keys(ask.keys)
    if ask.start is None or ask.end is None or ask.step is None:
        return _invalid("A backfill needs keys, or a start, an end and a step; give one of them.")
    if ask.start >= ask.end:
        return _invalid(f"The start, {ask.start}, must be lower than the end, {ask.end}.")
    partitions = -(-(ask.end - ask.start) // ask.step)
    if partitions > PARTITIONS_MAX:
        return _invalid(
            f"That is {partitions:,} partitions, and {PARTITIONS_MAX:,} are the most;"
            " make the step larger, or several backfills."
        )
    return BackfillPlan(
        kind=BackfillKind.RANGES, partitions=partitions, start=ask.start, end=ask.end, step=ask.step
    )


def _keys(keys: list[str]) -> BackfillPlan | BackfillRefused:
    # Each once, in the order in which they were named.
    distinct = tuple(dict.fromkeys(keys))
    for key in distinct:
        if not _is_storable(key):
            return _invalid(
                f"The key of a partition has 1 to {KEY_BYTES_MAX} bytes that can be stored,"
                f" and {key[:50]!r} has not."
            )
    return BackfillPlan(kind=BackfillKind.KEYS, partitions=len(distinct), keys=distinct)


def _is_storable(key: str) -> bool:
    try:
        return "\x00" not in key and 1 <= len(key.encode()) <= KEY_BYTES_MAX
    except UnicodeEncodeError:
        return False


def _invalid(detail: str) -> BackfillRefused:
    return BackfillRefused(BackfillRefusalReason.INVALID, detail)


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
    held = await fetch_rows(connection, "hold_backfill", backfill=backfill_id)
    if not held:
        return False
    (row,) = await fetch_rows(connection, "backfill_room", backfill=backfill_id)
    room = _room(row["concurrency_max"], row["open"])
    if row["kind"] == BackfillKind.REBUILD:
        is_planned, made = await _walk_events(connection, row, room=room)
    else:
        made = min(room, row["partitions"] - row["position"])
        if made > 0:
            await connection.execute(query("lock_reader"), {"definition": row["definition_id"]})
            asked = {"backfill": backfill_id, "count": made}
            tasks = await fetch_rows(connection, f"make_{BackfillKind(row['kind'])}", **asked)
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
    picked = await fetch_rows(connection, "pick_rebuild", **asked, among=None)
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
    return [
        event["seq"] for event in await fetch_rows(connection, "pick_rebuild", **asked, among=among)
    ]


LIST_MAX: Final = 1000
CANCELLED: Final = "Its backfill was cancelled."
_TURN_MAX: Final = 1000
_BUSY_SECONDS: Final = 0.2
"""How soon to look again at a backfill that has no room now."""


class Backfills:
    """The operations on backfills. None stands for one that is not known."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, ask: BackfillAsk) -> BackfillAnswer | BackfillRefused:
        """Plan partitions of a job of the DAG in force. The same request again is the same plan."""
        plan = plan_of(ask)
        if isinstance(plan, BackfillRefused):
            return plan

        async def work(connection: Connection) -> BackfillAnswer | BackfillRefused:
            await connection.execute(query("share_deployment_lock"))
            return await _create(connection, ask, plan)

        return await self._database.transact(work)

    async def foresee(self, ask: BackfillAsk) -> BackfillPlan | BackfillRefused:
        """What `create` would plan; nothing is written."""
        plan = plan_of(ask)
        if isinstance(plan, BackfillRefused):
            return plan

        async def work(connection: Connection) -> BackfillPlan | BackfillRefused:
            found = await _job(connection, ask, plan)
            if isinstance(found, BackfillRefused):
                return found
            ranges = await _key_ranges(connection, found, plan)
            return ranges if isinstance(ranges, BackfillRefused) else plan

        return await self._database.transact(work)

    async def get(self, backfill_id: int) -> BackfillAnswer | None:
        """One backfill, and how far it is."""
        return await self._database.transact(lambda connection: _answer(connection, backfill_id))

    async def list(self, *, limit: int = 100) -> BackfillsAnswer:
        """The latest backfills, the newest first."""
        if not 1 <= limit <= LIST_MAX:
            raise InvalidInput(f"1 to {LIST_MAX} backfills can be asked for, not {limit}.")

        async def work(connection: Connection) -> BackfillsAnswer:
            rows = await fetch_rows(connection, "show_backfills", backfill=None, limit=limit)
            return BackfillsAnswer(backfills=[BackfillAnswer(**row) for row in rows])

        return await self._database.transact(work)

    async def pause(self, backfill_id: int) -> BackfillAnswer | BackfillRefused | None:
        """Make no more tasks of it for now."""
        return await self._move(backfill_id, "paused")

    async def resume(self, backfill_id: int) -> BackfillAnswer | BackfillRefused | None:
        """Go on with it."""
        return await self._move(backfill_id, "running")

    async def cancel(self, backfill_id: int) -> BackfillAnswer | BackfillRefused | None:
        """End it: what waits is cancelled, what runs is asked to stop."""
        return await self._move(backfill_id, "cancelled")

    async def turn(self) -> float | None:
        """Make tasks of the running backfills, as far as there is room; the oldest first."""

        async def look(connection: Connection) -> list[dict[str, Any]]:
            return await fetch_rows(connection, "running_backfills", limit=_TURN_MAX)

        rows = await self._database.transact(look)
        has_more = False
        for row in rows:
            if row["is_movable"]:
                one = functools.partial(advance, backfill_id=row["id"])
                has_more |= await self._database.transact(one)
        if has_more:
            return 0.0
        return _BUSY_SECONDS if rows else None

    async def _move(self, backfill_id: int, to: str) -> BackfillAnswer | BackfillRefused | None:
        async def work(connection: Connection) -> BackfillAnswer | BackfillRefused | None:
            await connection.execute(query("share_deployment_lock"))
            held = await fetch_rows(connection, "lock_backfill", backfill=backfill_id)
            if not held:
                return None
            state = held[0]["state"]
            if state != to:
                if state in ("done", "cancelled"):
                    return BackfillRefused(
                        BackfillRefusalReason.OVER, f"Backfill {backfill_id} is {state}."
                    )
                await connection.execute(
                    query("move_backfill"), {"backfill": backfill_id, "to": to}
                )
                if to == "cancelled":
                    # A statement after the lock sees every task that was made before it.
                    asked = {"backfill": backfill_id, "reason": CANCELLED}
                    await connection.execute(query("cancel_backfill_tasks"), asked)
            return await _answer(connection, backfill_id)

        return await self._database.transact(work)


async def _create(
    connection: Connection, ask: BackfillAsk, plan: BackfillPlan
) -> BackfillAnswer | BackfillRefused:
    job = await _job(connection, ask, plan)
    if isinstance(job, BackfillRefused):
        return job
    ranges = await _key_ranges(connection, job, plan)
    if isinstance(ranges, BackfillRefused):
        return ranges
    asked = {
        "definition": job["definition_id"],
        "generation": job["generation"],
        "plan": Jsonb(plan.stored),
        "partitions": plan.partitions,
        "concurrency": ask.concurrency,
        "request": ask.request_id,
    }
    made = await fetch_rows(connection, "write_backfill", **asked)
    if not made:
        # A statement of its own, which sees what somebody else has just made.
        made = await fetch_rows(connection, "find_request", request=ask.request_id)
    elif plan.keys:
        keys = {
            "backfill": made[0]["id"],
            "keys": list(plan.keys),
            "starts": [ranges.get(key, (None, None))[0] for key in plan.keys],
            "ends": [ranges.get(key, (None, None))[1] for key in plan.keys],
        }
        await connection.execute(query("write_backfill_keys"), keys)
    answer = await _answer(connection, made[0]["id"])
    assert answer is not None, "it was just made or found"
    return answer


async def _job(
    connection: Connection, ask: BackfillAsk, plan: BackfillPlan
) -> dict[str, Any] | BackfillRefused:
    """The job of a plan, as the DAG in force has it."""
    found = await fetch_rows(connection, "find_backfill_job", job=ask.job)
    if not found:
        return BackfillRefused(
            BackfillRefusalReason.UNKNOWN_JOB, f"The DAG in force has no job {ask.job}."
        )
    return _problem(ask.job, found[0], plan) or found[0]


async def _key_ranges(
    connection: Connection, job: dict[str, Any], plan: BackfillPlan
) -> Mapping[str, Range] | BackfillRefused:
    if not plan.keys:
        return {}
    found = await key_ranges(connection, plan.keys, job=job)
    return (
        BackfillRefused(BackfillRefusalReason.INVALID, found) if isinstance(found, str) else found
    )


def _problem(name: str, job: dict[str, Any], plan: BackfillPlan) -> BackfillRefused | None:
    source = job["source"]
    if source == SourceKind.ALWAYS_ON:
        return BackfillRefused(
            BackfillRefusalReason.NOT_RUN,
            f"The job {name} is always on, and not run for a partition.",
        )
    if source is not None:
        return BackfillRefused(
            BackfillRefusalReason.NOT_RUN,
            f"The job {name} only emits events, and nothing is run for it; trigger it, or name a"
            " job downstream.",
        )
    if job["runtime"] == DISPATCHER_RUNTIME and plan.kind is BackfillKind.KEYS:
        return BackfillRefused(
            BackfillRefusalReason.INVALID,
            f"The job {name} works on ranges; give a start, an end and a step.",
        )
    return None


async def _answer(connection: Connection, backfill_id: int) -> BackfillAnswer | None:
    rows = await fetch_rows(connection, "show_backfills", backfill=backfill_id, limit=1)
    return BackfillAnswer(**rows[0]) if rows else None
