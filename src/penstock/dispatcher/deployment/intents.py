"""What a change of the DAG comes to, before it is made: read under the locks, nothing is written.

An `Intent` is which generation each job gets, what becomes of those that are there, and what comes
back. `moves` carries it out; `foreseen` only tells it. The caller holds the lock of the deployment;
here the live generations are locked too, so what is read stays true until the transaction ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.dispatcher.dag.canonical import lineage_hashes
from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.deployment.plan import (
    Held,
    Plan,
    Standing,
    kept_generations,
    plan_moves,
    served_generations,
    writers,
)
from penstock.dispatcher.deployment.values import (
    Break,
    Foreseen,
    GenerationState,
    NotApplied,
    WhyNotApplied,
)


@dataclass(frozen=True, slots=True)
class State:
    """What is in force before a move."""

    version_id: int | None
    standing: tuple[Standing, ...]
    held: tuple[Held, ...]
    limits: Mapping[int, int | None]
    """How many tasks of a job may run at a time, by job."""


@dataclass(frozen=True, slots=True)
class Intent:
    """A change that could be made."""

    state: State
    targets: Mapping[str, str]
    """The generation that each job gets."""
    plan: Plan
    back: Sequence[str]
    """The generations that were not served before, and are again."""


async def to_new(connection: Connection, dag: Dag) -> Intent:
    """To a DAG that was never in force."""
    state = await read_state(connection)
    lineages = lineage_hashes(dag)
    kept = kept_generations(lineages, standing=state.standing, held=state.held)
    fresh = [name for name in lineages if name not in kept]
    made = await fetch_rows(connection, "new_generations", count=len(fresh))
    new = {name: row["version"] for name, row in zip(fresh, made, strict=True)}
    targets = {**kept, **new}
    plan = plan_moves(targets, written=writers(dag), held=state.held)
    back = sorted(set(kept.values()) - served_generations(state.standing, state.held))
    return Intent(state, targets, plan, back)


async def to_earlier(connection: Connection, version_id: int) -> Intent:
    """Back to a version that was in force."""
    state = await read_state(connection)
    rows = await fetch_rows(connection, "standing_jobs", version=version_id)
    targets = {row["job"]: row["generation"] for row in rows}
    found = await fetch_rows(connection, "written_datasets", version=version_id)
    written = {row["dataset"]: row["job"] for row in found}
    plan = plan_moves(targets, written=written, held=state.held)
    back = sorted(set(targets.values()) - served_generations(state.standing, state.held))
    return Intent(state, targets, plan, back)


async def earlier_version(connection: Connection, to: int | None) -> dict[str, Any] | NotApplied:
    """The version to go back to."""
    if to is None:
        if await fetch_row(connection, "current_version") is None:
            return NotApplied(WhyNotApplied.NONE)
        before = await fetch_row(connection, "previous_version")
        if before is None:
            return NotApplied(WhyNotApplied.FIRST)
        to = before["id"]
    found = await fetch_row(connection, "find_version", hash=None, id=to)
    return NotApplied(WhyNotApplied.UNKNOWN) if found is None else found


async def foreseen_return(connection: Connection, version: Mapping[str, Any]) -> Foreseen:
    """What going back to a version would do."""
    version_id, digest = version["id"], version["hash"]
    current = await fetch_row(connection, "current_version")
    if current is not None and current["id"] == version_id:
        return Foreseen(version_id, digest, is_changed=False, before=version_id)
    intent = await to_earlier(connection, version_id)
    return await foreseen(connection, intent, digest, version_id=version_id)


async def foreseen(
    connection: Connection, intent: Intent, digest: str, *, version_id: int | None = None
) -> Foreseen:
    """What a change would do."""
    moved = [(each.version, each.state) for each in intent.plan.entering]
    held = [(each.version, each.state) for each in intent.state.held]
    built = {version for version, state in moved + held if state is GenerationState.BUILDING}
    return Foreseen(
        version_id,
        digest,
        is_changed=True,
        building=tuple(sorted(job for job, each in intent.targets.items() if each in built)),
        before=intent.state.version_id,
        breaks=await find_breaks(connection, intent.plan, intent.targets),
    )


async def read_state(connection: Connection) -> State:
    """Lock what is live, and see what it is: a statement after the lock sees all before it."""
    await connection.execute(query("lock_live_generations"))
    current = await fetch_row(connection, "current_version")
    version_id = current["id"] if current is not None else None
    standing = await fetch_rows(connection, "standing_jobs", version=version_id)
    held = await fetch_rows(connection, "held_generations")
    return State(
        version_id,
        tuple(Standing(**row) for row in standing),
        tuple(Held(**{**row, "state": GenerationState(row["state"])}) for row in held),
        await job_limits(connection),
    )


async def job_limits(connection: Connection) -> Mapping[int, int | None]:
    rows = await fetch_rows(connection, "job_limits")
    return {row["id"]: row["max_concurrency"] for row in rows}


async def find_breaks(
    connection: Connection, plan: Plan, targets: Mapping[str, str]
) -> tuple[Break, ...]:
    scope = {"useless": sorted(plan.useless), "jobs": sorted(targets)}
    return tuple(Break(**row) for row in await fetch_rows(connection, "broken_work", **scope))


async def fetch_rows(connection: Connection, name: str, **asked: object) -> list[dict[str, Any]]:
    return await (await connection.execute(query(name), asked)).fetchall()


async def fetch_row(connection: Connection, name: str, **asked: object) -> dict[str, Any] | None:
    return await (await connection.execute(query(name), asked)).fetchone()
