"""What a change of the DAG comes to, before it is made: read under the locks, nothing is written.

An `Intent` is which generation each job gets, what becomes of those that are there, and what comes
back. `moves` carries it out; `foreseen` only tells it. The caller holds the lock of the deployment;
here the live generations are locked too, so what is read stays true until the transaction ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.dispatcher.dag.canonical import lineage_hashes
from penstock.dispatcher.dag.model import Dag, Update
from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.deployment.plan import (
    Held,
    Move,
    Plan,
    Retired,
    Standing,
    kept_generations,
    plan_moves,
    returning_generations,
    served_generations,
    with_downstream,
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
    """To a DAG that was never in force, which may bring generations back."""
    state = await read_state(connection)
    lineages = lineage_hashes(dag)
    earlier = lineage_hashes(_with_old_keys(dag, state.standing))
    kept = {
        **kept_generations(earlier, standing=state.standing, held=state.held),
        **kept_generations(lineages, standing=state.standing, held=state.held),
    }
    rows = await fetch_rows(connection, "retired_generations")
    retired = [Retired(**{**row, "fed": tuple(row["fed"])}) for row in rows]
    returning = returning_generations(dag, lineages, kept=kept, retired=retired)
    fresh = [name for name in lineages if name not in kept and name not in returning]
    made = await fetch_rows(connection, "new_generations", count=len(fresh))
    new = {name: row["version"] for name, row in zip(fresh, made, strict=True)}
    targets = {**kept, **returning, **new}
    written = writers(dag)
    reads = [
        (job.name, written[each.dataset])
        for job in dag.jobs
        for each in job.inputs
        if each.dataset in written
    ]
    behind = frozenset[str]()
    if returning:
        behind = await _behind(connection, {**returning, **new}, reads)
    plan = plan_moves(targets, written=written, held=state.held, behind=behind)
    back = sorted({*kept.values(), *returning.values()} - served(state))
    return Intent(state, targets, plan, back)


def _with_old_keys(dag: Dag, standing: Sequence[Standing]) -> Dag:
    """The DAG with the keys that earlier releases asked of jobs that append, and did not use.

    Who takes one out keeps what was appended.
    """
    keys = {each.job: tuple(each.old_key) for each in standing if each.old_key}
    jobs = (
        replace(job, unique_key=keys[job.name])
        if job.name in keys and job.update is Update.APPEND
        else job
        for job in dag.jobs
    )
    return replace(dag, jobs=tuple(jobs))


async def to_earlier(connection: Connection, version_id: int, *, is_at_once: bool) -> Intent:
    """Back to a version that was in force. What lacks something is built on unless `is_at_once`."""
    state = await read_state(connection)
    rows = await fetch_rows(connection, "standing_jobs", version=version_id)
    targets = {row["job"]: row["generation"] for row in rows}
    found = await fetch_rows(connection, "written_datasets", version=version_id)
    written = {row["dataset"]: row["job"] for row in found}
    behind = frozenset[str]()
    if not is_at_once:
        rows = await fetch_rows(connection, "fed_jobs", version=version_id)
        behind = await _behind(connection, targets, [(row["job"], row["writer"]) for row in rows])
    plan = plan_moves(targets, written=written, held=state.held, behind=behind)
    back = sorted(set(targets.values()) - served(state))
    return Intent(state, targets, plan, back)


def served(state: State) -> frozenset[str]:
    """What has had all of its events routed to it until now."""
    return served_generations(state.standing, state.held)


async def _behind(
    connection: Connection, targets: Mapping[str, str], reads: Sequence[tuple[str, str]]
) -> frozenset[str]:
    """The generations that lack something that readers have, and those built of them."""
    rows = await fetch_rows(connection, "generations_behind", versions=sorted(targets.values()))
    lacking = {row["version"] for row in rows}
    jobs = with_downstream((job for job, each in targets.items() if each in lacking), reads)
    return frozenset(targets[job] for job in jobs if job in targets)


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


async def foreseen_return(
    connection: Connection, version: Mapping[str, Any], *, is_at_once: bool = False
) -> Foreseen:
    """What going back to a version would do."""
    version_id, digest = version["id"], version["hash"]
    current = await fetch_row(connection, "current_version")
    if current is not None and current["id"] == version_id:
        return Foreseen(version_id, digest, is_changed=False, before=version_id)
    intent = await to_earlier(connection, version_id, is_at_once=is_at_once)
    return await foreseen(connection, intent, digest, version_id=version_id)


async def foreseen(
    connection: Connection, intent: Intent, digest: str, *, version_id: int | None = None
) -> Foreseen:
    """What a change would do."""
    places: tuple[Held | Move, ...] = (*intent.plan.entering, *intent.state.held)
    built = {each.version for each in places if each.state is GenerationState.BUILDING}
    built &= set(intent.targets.values())
    returned = returned_jobs(intent, GenerationState.CURRENT)
    others = built | {intent.targets[job] for job in returned}
    datasets = {each.dataset for each in places if each.version in others}
    return Foreseen(
        version_id,
        digest,
        is_changed=True,
        building=tuple(sorted(job for job, each in intent.targets.items() if each in built)),
        before=intent.state.version_id,
        breaks=await find_breaks(connection, intent.plan, intent.targets),
        returned=returned,
        resumed=returned_jobs(intent, GenerationState.BUILDING),
        replaced=tuple(
            sorted(
                {
                    each.version
                    for each in intent.state.held
                    if each.state is GenerationState.CURRENT and each.dataset in datasets
                }
            )
        ),
        others=tuple(sorted(others)),
    )


def returned_jobs(intent: Intent, state: GenerationState) -> tuple[str, ...]:
    """The jobs whose generation was current once, and gets this state."""
    known = {
        (each.dataset, each.version)
        for each in intent.state.held
        if each.state is GenerationState.RETIRED
    }
    back = {
        each.version
        for each in intent.plan.entering
        if each.state is state and (each.dataset, each.version) in known
    }
    return tuple(sorted(job for job, version in intent.targets.items() if version in back))


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
