"""Backfills for the console: what one is made of and where it stands, and what one would do.

Programs are answered by `Backfills`; this is what a page shows besides. One short transaction
each. Running and dead tasks are found by the index of their backfill, and some of them are
listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from penstock.dispatcher.backfills import BackfillKind, BackfillPlan
from penstock.dispatcher.database.pool import Connection, Database, fetch_rows

LISTED_MAX: Final = 50
"""How many dead tasks, and how many that run, are listed."""
THERE_MAX: Final = 100_000
"""How far partitions of ranges are counted that are there already."""
LACKING_MAX: Final = 10_000
"""For how many keys of a plan it is looked whether their inputs are there."""
_NAMED_MAX: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadTask:
    """A task of a backfill that will not be tried again by itself."""

    id: int
    partition_key: str | None
    attempt: int
    reason: str | None
    settled_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTask:
    """A task of a backfill that runs."""

    id: int
    partition_key: str | None
    attempt: int
    worker: str
    claimed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutBackfill:
    """What a page says of a backfill besides `BackfillAnswer`."""

    plan: Mapping[str, Any]
    """Its kind and, of ranges, their start, end and step."""
    settled_at: datetime | None
    request_id: str | None
    update_mode: str
    runtime: str
    now: datetime
    generation_state: str | None
    outputs: Sequence[str]
    running: int
    first_key: str | None
    """Of a list of keys."""
    last_key: str | None
    paused: Sequence[str]
    """Why its job is paused."""
    dead: Sequence[DeadTask] = ()
    at_work: Sequence[RunningTask] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingInputs:
    """Partitions of a plan whose tasks would have nothing to read."""

    count: int
    keys: Sequence[str] = ()
    """The first of them."""
    inputs: Sequence[str] = ()
    """Some of the datasets that have nothing for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillTarget:
    """Where a backfill of a job would write."""

    generation: str
    generation_state: str | None
    update_mode: str
    runtime: str
    operator: str
    execution: str
    outputs: Sequence[str]
    paused: Sequence[str]
    there: int
    """How many of its partitions all outputs have; of ranges, counted to `THERE_MAX`."""
    lacking: MissingInputs
    """Of a list of keys, and of the first `LACKING_MAX` of those. Nobody knows it of ranges."""


class BackfillViews:
    """The questions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def about(self, backfill_id: int) -> AboutBackfill | None:
        """What there is to say of a backfill; None if there is none."""

        async def work(connection: Connection) -> AboutBackfill | None:
            found = await fetch_rows(connection, "about_backfill", backfill=backfill_id)
            if not found:
                return None
            asked = {"backfill": backfill_id, "limit": LISTED_MAX}
            dead = await fetch_rows(connection, "dead_of_backfill", **asked)
            running = await fetch_rows(connection, "running_of_backfill", **asked)
            return AboutBackfill(
                **found[0],
                dead=[DeadTask(**row) for row in dead],
                at_work=[RunningTask(**row) for row in running],
            )

        return await self._database.transact(work)

    async def dead(self, backfill_id: int, *, limit: int) -> Sequence[int]:
        """Dead tasks of a backfill, the oldest first."""

        async def work(connection: Connection) -> Sequence[int]:
            asked = {"backfill": backfill_id, "limit": limit}
            return [row["id"] for row in await fetch_rows(connection, "dead_of_backfill", **asked)]

        return await self._database.transact(work)

    async def place(self, job: str, plan: BackfillPlan) -> BackfillTarget | None:
        """Where a plan would write, and what is there; None if the DAG has no such job."""

        async def work(connection: Connection) -> BackfillTarget | None:
            found = await fetch_rows(connection, "backfill_place", job=job)
            if not found:
                return None
            generation = found[0]["generation"]
            return BackfillTarget(
                **found[0],
                there=await _there(connection, generation, plan),
                lacking=await _lacking(connection, job, generation, plan),
            )

        return await self._database.transact(work)


async def _there(connection: Connection, generation: str, plan: BackfillPlan) -> int:
    asked: dict[str, object] = {"generation": generation}
    if plan.kind is BackfillKind.KEYS:
        rows = await fetch_rows(connection, "count_keys_there", **asked, keys=list(plan.keys))
    else:
        asked |= {"start": plan.start, "end": plan.end, "step": plan.step, "limit": THERE_MAX}
        rows = await fetch_rows(connection, "count_ranges_there", **asked)
    there: int = rows[0]["there"]
    return there


async def _lacking(
    connection: Connection, job: str, generation: str, plan: BackfillPlan
) -> MissingInputs:
    if plan.kind is not BackfillKind.KEYS:
        return MissingInputs(count=0)
    asked = {"job": job, "generation": generation, "keys": list(plan.keys[:LACKING_MAX])}
    (row,) = await fetch_rows(connection, "keys_without_input", **asked, limit=_NAMED_MAX)
    return MissingInputs(**row)
