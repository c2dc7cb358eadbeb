"""Backfills: plans of partitions to compute, and how much of them has become tasks.

| state | means | moved by |
|---|---|---|
| running | tasks are made while too few are open | `turn` → done; `pause`; `cancel` |
| paused | no more tasks are made; those that are there go on | `resume`; `cancel` |
| done | every partition was planned, and none of its tasks is open | nobody |
| cancelled | what waited is cancelled, what ran was asked to stop | nobody |

Invariants:
- A plan is one row with a cursor, so that a million partitions are planned at once. Tasks are
  made in the transaction that moves the cursor: a crash makes neither, and none is made twice.
- At most `concurrency` tasks of a backfill are open, so that the queues stay short however long a
  plan is. The tasks are bulk, and do not count as pressure.
- One dispatcher at a time moves a backfill: it holds the row, and others pass by.
- Everything here holds the deployment's lock, shared, and first: a change of the DAG comes wholly
  before it or after it, and cancels all of the plans and tasks that it makes useless.
- The rebuild of a new generation is planned by `deployment`, and made of events by `advancing`.

Called by the dispatcher's API, and by a loop (`turn`) in every dispatcher.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

from psycopg.types.json import Jsonb

from penstock.dispatcher.backfills.advancing import advance
from penstock.dispatcher.backfills.plans import Kind, Plan, Refused, WhyRefused, plan_of
from penstock.dispatcher.dag.model import DISPATCHER_RUNTIME, SourceKind
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.ranges.cutting import Range
from penstock.dispatcher.routing.ranging import key_ranges
from penstock.dispatcher.wire.steering import BackfillAnswer, BackfillAsk, BackfillsAnswer
from penstock.kernel.errors import InvalidInput

LIST_MAX: Final = 1000
CANCELLED: Final = "Its backfill was cancelled."
_TURN_MAX: Final = 1000
_BUSY_SECONDS: Final = 0.2
"""How soon to look again at a backfill that has no room now."""


class Backfills:
    """The operations on backfills. None stands for one that is not known."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, ask: BackfillAsk) -> BackfillAnswer | Refused:
        """Plan partitions of a job of the DAG in force. The same request again is the same plan."""
        plan = plan_of(ask)
        if isinstance(plan, Refused):
            return plan

        async def work(connection: Connection) -> BackfillAnswer | Refused:
            await connection.execute(query("share_deployment_lock"))
            return await _create(connection, ask, plan)

        return await self._database.transact(work)

    async def foresee(self, ask: BackfillAsk) -> Plan | Refused:
        """What `create` would plan; nothing is written."""
        plan = plan_of(ask)
        if isinstance(plan, Refused):
            return plan

        async def work(connection: Connection) -> Plan | Refused:
            found = await _job(connection, ask, plan)
            if isinstance(found, Refused):
                return found
            ranges = await _key_ranges(connection, found, plan)
            return ranges if isinstance(ranges, Refused) else plan

        return await self._database.transact(work)

    async def get(self, backfill_id: int) -> BackfillAnswer | None:
        """One backfill, and how far it is."""
        return await self._database.transact(lambda connection: _answer(connection, backfill_id))

    async def list(self, *, limit: int = 100) -> BackfillsAnswer:
        """The latest backfills, the newest first."""
        if not 1 <= limit <= LIST_MAX:
            raise InvalidInput(f"1 to {LIST_MAX} backfills can be asked for, not {limit}.")

        async def work(connection: Connection) -> BackfillsAnswer:
            rows = await _rows(connection, "show_backfills", backfill=None, limit=limit)
            return BackfillsAnswer(backfills=[BackfillAnswer(**row) for row in rows])

        return await self._database.transact(work)

    async def pause(self, backfill_id: int) -> BackfillAnswer | Refused | None:
        """Make no more tasks of it for now."""
        return await self._move(backfill_id, "paused")

    async def resume(self, backfill_id: int) -> BackfillAnswer | Refused | None:
        """Go on with it."""
        return await self._move(backfill_id, "running")

    async def cancel(self, backfill_id: int) -> BackfillAnswer | Refused | None:
        """End it: what waits is cancelled, what runs is asked to stop."""
        return await self._move(backfill_id, "cancelled")

    async def turn(self) -> float | None:
        """Make tasks of the running backfills, as far as there is room; the oldest first."""

        async def look(connection: Connection) -> list[dict[str, Any]]:
            return await _rows(connection, "running_backfills", limit=_TURN_MAX)

        rows = await self._database.transact(look)
        has_more = False
        for row in rows:
            if row["is_movable"]:
                one = functools.partial(advance, backfill_id=row["id"])
                has_more |= await self._database.transact(one)
        if has_more:
            return 0.0
        return _BUSY_SECONDS if rows else None

    async def _move(self, backfill_id: int, to: str) -> BackfillAnswer | Refused | None:
        async def work(connection: Connection) -> BackfillAnswer | Refused | None:
            await connection.execute(query("share_deployment_lock"))
            held = await _rows(connection, "lock_backfill", backfill=backfill_id)
            if not held:
                return None
            state = held[0]["state"]
            if state != to:
                if state in ("done", "cancelled"):
                    return Refused(WhyRefused.OVER, f"Backfill {backfill_id} is {state}.")
                await connection.execute(
                    query("move_backfill"), {"backfill": backfill_id, "to": to}
                )
                if to == "cancelled":
                    # A statement after the lock sees every task that was made before it.
                    asked = {"backfill": backfill_id, "reason": CANCELLED}
                    await connection.execute(query("cancel_backfill_tasks"), asked)
            return await _answer(connection, backfill_id)

        return await self._database.transact(work)


async def _create(connection: Connection, ask: BackfillAsk, plan: Plan) -> BackfillAnswer | Refused:
    job = await _job(connection, ask, plan)
    if isinstance(job, Refused):
        return job
    ranges = await _key_ranges(connection, job, plan)
    if isinstance(ranges, Refused):
        return ranges
    asked = {
        "definition": job["definition_id"],
        "generation": job["generation"],
        "plan": Jsonb(plan.stored),
        "partitions": plan.partitions,
        "concurrency": ask.concurrency,
        "request": ask.request_id,
    }
    made = await _rows(connection, "write_backfill", **asked)
    if not made:
        # A statement of its own, which sees what somebody else has just made.
        made = await _rows(connection, "find_request", request=ask.request_id)
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


async def _job(connection: Connection, ask: BackfillAsk, plan: Plan) -> dict[str, Any] | Refused:
    """The job of a plan, as the DAG in force has it."""
    found = await _rows(connection, "find_backfill_job", job=ask.job)
    if not found:
        return Refused(WhyRefused.UNKNOWN_JOB, f"The DAG in force has no job {ask.job}.")
    return _problem(ask.job, found[0], plan) or found[0]


async def _key_ranges(
    connection: Connection, job: dict[str, Any], plan: Plan
) -> Mapping[str, Range] | Refused:
    if not plan.keys:
        return {}
    found = await key_ranges(connection, plan.keys, job=job)
    return Refused(WhyRefused.INVALID, found) if isinstance(found, str) else found


def _problem(name: str, job: dict[str, Any], plan: Plan) -> Refused | None:
    source = job["source"]
    if source == SourceKind.ALWAYS_ON:
        return Refused(
            WhyRefused.NOT_RUN, f"The job {name} is always on, and not run for a partition."
        )
    if source is not None:
        return Refused(
            WhyRefused.NOT_RUN,
            f"The job {name} only emits events, and nothing is run for it; trigger it, or name a"
            " job downstream.",
        )
    if job["runtime"] == DISPATCHER_RUNTIME and plan.kind is Kind.KEYS:
        return Refused(
            WhyRefused.INVALID,
            f"The job {name} works on ranges; give a start, an end and a step.",
        )
    return None


async def _answer(connection: Connection, backfill_id: int) -> BackfillAnswer | None:
    rows = await _rows(connection, "show_backfills", backfill=backfill_id, limit=1)
    return BackfillAnswer(**rows[0]) if rows else None


async def _rows(connection: Connection, name: str, **asked: object) -> list[dict[str, Any]]:
    return await (await connection.execute(query(name), asked)).fetchall()
