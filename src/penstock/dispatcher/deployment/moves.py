"""Which DAG is in force, and which generation of every dataset is current.

Owns versions of the DAG (immutable, named by their content), the generations of datasets, and the
moves between them: `apply`, `rollback` and `cut_over`. Each is one transaction; those that change
the DAG come one after the other by a named lock. A crash leaves a move done or not done.

Invariants:
- A job keeps its generation as long as its definition and everything upstream are the same, and
  goes back to one that was retired if they are the same again; so one generation of a job is always
  fed by the same generations of its inputs.
- A dataset has at most one current generation and one that is being built. Until the cut-over both
  are served: the earlier definition of an edited job goes on, beside the new one.
- Routing holds the generation of its events FOR SHARE. Apply and rollback hold all live ones, a
  cut-over those of its job, FOR UPDATE. So an event is routed wholly before a move or after it.
- Jobs that were removed keep their data: the current generation stays what it is.
- Every time that a version is put in force is noted: a rollback goes back by time, not by number.
- Nothing that waits or runs is made useless by `apply` unless it is forced. `rollback` says what
  it abandons by being a rollback.
- What comes back has all events routed to it that it has no task for: those it has missed, and
  those whose partitions a backfill has built; of a partition the latest, if it works by partitions
  and replaces them. Those that were routed before reach nothing else (`event.replayed_to`). Events
  may therefore not be kept for longer than the tasks that were made of them.
- To go back by applying a text serves retired generations at once if they are whole, that is, lack
  nothing that readers have now. One that lacks something, and all downstream of it, is built on
  beside what is served, and cut over. A rollback serves them at once all the same, and they catch
  up. What was dropped is abandoned, and built anew.
- What is new, begins to be built, or is built on, gets a rebuild in the same transaction: a plan
  for the events of its inputs up to now, if there are any. Those that come later are routed to it.
  `backfills` carries it out, and `building` cuts over.

What is being built covers what readers have (`penstock_lacking` in the schema):
- of a partition that is replaced, if it has published the partition;
- of one that is appended to, if each part has a counterpart there: a part with the same key, or one
  by a task that was made of the same news (`penstock_counterparts`), also where upstream was made
  anew. A rebuild therefore makes a task of every event, and of every task of a backfill;
- and if the same is so of everything upstream that is being built too. Where an input lacks a part,
  a partition that was computed of the rest would count as covered.

What comes while it is built is routed to both, and counts as soon as readers have it. A part has no
counterpart, and never will, if retention has removed its event, if what the event told of was
replaced or removed since, or if an edited filter leaves it out; a dead task may still be replayed.
Nobody but a person decides then: `cut_over` with `force` lets it be missing, `keep` makes what has
no task part of the new generation as it is, where the columns allow it, and what is downstream is
computed again, or, where that appends, kept in the same way. Each is one transaction.

Called by the dispatcher's API and by `building`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

import psycopg

from penstock.dispatcher.dag.canonical import content_hash, lineage_hashes
from penstock.dispatcher.dag.checks import HEARTBEAT_MS_MAX
from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.deployment.intents import (
    Intent,
    State,
    earlier_version,
    fetch_row,
    fetch_rows,
    find_breaks,
    foreseen,
    foreseen_return,
    job_limits,
    returned_jobs,
    to_earlier,
    to_new,
)
from penstock.dispatcher.deployment.plan import Plan, writers
from penstock.dispatcher.deployment.values import (
    Applied,
    CutOver,
    Deployed,
    DeployedJob,
    Foreseen,
    GenerationState,
    Kept,
    Loss,
    NotApplied,
    NotKept,
    Version,
    VersionText,
    WhyNotApplied,
)
from penstock.dispatcher.deployment.writing import write_version
from penstock.dispatcher.pressure.pressures import wake_jobs
from penstock.dispatcher.routing.ranging import range_looked_at
from penstock.dispatcher.tasks.schemas import grow_schema
from penstock.kernel.errors import InvalidInput, SchemaRefused

REBUILD_CONCURRENCY: Final = 500
"""How many tasks of a rebuild wait or run at a time."""
LEFT: Final = "Its generation is not served any more."
"""The reason of tasks that were cancelled here. A rollback finds them by it."""
VERSIONS_MAX: Final = 1000
PUBLISHING_MAX: Final = timedelta(minutes=10)
"""How much older than its end a transaction that publishes may be."""


class Deployment:
    """The operations on the DAG that is in force."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def apply(
        self, dag: Dag, source_text: str, *, force: bool = False
    ) -> Applied | NotApplied:
        """Put a DAG in force. One that was in force before is gone back to."""
        _check(dag)
        digest = content_hash(dag)

        async def work(connection: Connection) -> Applied | NotApplied:
            await connection.execute(query("take_deployment_lock"))
            earlier = await fetch_row(connection, "find_version", hash=digest, id=None)
            if earlier is not None:
                return await _return_to(connection, earlier["id"], force=force)
            return await _put_in_force(connection, dag, source_text, force=force)

        found = await self._database.transact(work)
        if isinstance(found, NotApplied) or not found.building:
            return found
        return replace(found, losses=await self._losses())

    async def foresee(self, dag: Dag) -> Foreseen:
        """What `apply` would do. Nothing is changed."""
        _check(dag)
        digest = content_hash(dag)

        async def work(connection: Connection) -> Foreseen:
            await connection.execute(query("take_deployment_lock"))
            earlier = await fetch_row(connection, "find_version", hash=digest, id=None)
            if earlier is not None:
                return await foreseen_return(connection, earlier)
            return await foreseen(connection, await to_new(connection, dag), digest)

        return await self._with_losses(await self._database.transact(work))

    async def rollback(self, to: int | None = None) -> Applied | NotApplied:
        """Go back to an earlier version; what waits for abandoned generations is cancelled.

        Without a version, to the one that was in force before; so twice is there and back.
        """

        async def work(connection: Connection) -> Applied | NotApplied:
            await connection.execute(query("take_deployment_lock"))
            found = await earlier_version(connection, to)
            if isinstance(found, NotApplied):
                return found
            return await _return_to(connection, found["id"], force=True, is_at_once=True)

        return await self._database.transact(work)

    async def foresee_rollback(self, to: int | None = None) -> Foreseen | NotApplied:
        """What `rollback` would do. Nothing is changed."""

        async def work(connection: Connection) -> Foreseen | NotApplied:
            await connection.execute(query("take_deployment_lock"))
            found = await earlier_version(connection, to)
            if isinstance(found, NotApplied):
                return found
            return await foreseen_return(connection, found, is_at_once=True)

        found = await self._database.transact(work)
        return found if isinstance(found, NotApplied) else await self._with_losses(found)

    async def previous(self) -> int | None:
        """The version that was in force before the one that is; None if there was none."""

        async def work(connection: Connection) -> int | None:
            row = await fetch_row(connection, "previous_version")
            return None if row is None else row["id"]

        return await self._database.transact(work)

    async def text(self, version_id: int) -> VersionText | None:
        """The text of a version; None if there is no such version."""

        async def work(connection: Connection) -> VersionText | None:
            row = await fetch_row(connection, "version_source", id=version_id)
            return None if row is None else VersionText(**row)

        return await self._database.transact(work)

    async def cut_over(
        self,
        dataset: str,
        *,
        force: bool = False,
        version: str | None = None,
        judged_at: datetime | None = None,
    ) -> CutOver:
        """Make the generation that is being built the current one, if it covers that.

        All datasets of the same job move with this one. `force` lets be missing what the current
        generation has. With `version`, only that generation is cut over. With `judged_at`, only
        what was published since `judge` is looked at, for the locks are held meanwhile.
        """
        return await self._database.transact(
            lambda connection: _cut_over(
                connection, dataset, force=force, version=version, judged_at=judged_at
            )
        )

    async def judge(self, version: str) -> datetime | None:
        """When a generation that is being built covered what readers have; None if it does not.

        Without locks: what is published at this moment may not be seen.
        """

        async def work(connection: Connection) -> datetime | None:
            asked = {"version": version, "since": None}
            (found,) = await fetch_rows(connection, "cut_over_obstacles", **asked)
            if found["is_uncovered"] or found["is_upstream_uncovered"]:
                return None
            judged_at: datetime = found["judged_at"]
            return judged_at

        return await self._database.transact(work)

    async def keep(self, dataset: str) -> Kept | NotKept:
        """Make what readers have, and could not be built anew, part of what is being built.

        That is of all datasets of the same job. What has a task there, which may be dead, is not.
        """
        return await self._database.transact(lambda connection: _keep(connection, dataset))

    async def is_awaited(self, dataset: str) -> bool:
        """Whether a job downstream of a dataset is being built, and is cut over first."""

        async def work(connection: Connection) -> bool:
            rows = await fetch_rows(connection, "building_jobs")
            version = await fetch_rows(connection, "find_building", dataset=dataset)
            named = {row["version"] for row in version}
            return any(row["version"] in named and not row["is_last"] for row in rows)

        return await self._database.transact(work)

    async def current(self) -> Deployed | None:
        """The DAG that is in force; None before the first."""

        async def work(connection: Connection) -> Deployed | None:
            row = await fetch_row(connection, "current_version")
            if row is None:
                return None
            version = Version(
                row["id"], row["hash"], row["created_at"], is_current=True, since=row["since"]
            )
            jobs = await fetch_rows(connection, "deployed_jobs", version=row["id"])
            found = tuple(DeployedJob(**each) for each in jobs)
            text = VersionText(row["source"], row["files"])
            return Deployed(version, text, row["since"], found)

        return await self._database.transact(work)

    async def versions(self, *, limit: int = 100) -> tuple[Version, ...]:
        """The versions that have been in force, the latest first."""
        if not 1 <= limit <= VERSIONS_MAX:
            raise InvalidInput(f"1 to {VERSIONS_MAX} versions can be asked for, not {limit}.")

        async def work(connection: Connection) -> tuple[Version, ...]:
            return tuple(
                Version(**row) for row in await fetch_rows(connection, "dag_versions", limit=limit)
            )

        return await self._database.transact(work)

    async def _losses(
        self, versions: Sequence[str] = (), targets: Sequence[str] = ()
    ) -> tuple[Loss, ...]:
        """What could not be built anew of what these hold; of all that are being replaced.

        After the locks of the change, for it looks at every publication.
        """

        async def work(connection: Connection) -> tuple[Loss, ...]:
            asked = {"versions": list(versions), "targets": list(targets)}
            if not versions:
                rows = await fetch_rows(connection, "replaced_generations")
                asked = {
                    "versions": [row["version"] for row in rows],
                    "targets": [row["next"] for row in rows],
                }
            found = await fetch_rows(connection, "foreseen_losses", **asked)
            return tuple(Loss(**row) for row in found)

        return await self._database.transact(work)

    async def _with_losses(self, found: Foreseen) -> Foreseen:
        if not found.replaced:
            return found
        return replace(found, losses=await self._losses(found.replaced, found.others))


def _check(dag: Dag) -> None:
    for job in dag.jobs:
        if job.heartbeat_timeout_ms > HEARTBEAT_MS_MAX:
            raise InvalidInput(f"The heartbeat_timeout of {job.name} is longer than a day.")


async def _put_in_force(
    connection: Connection, dag: Dag, source_text: str, *, force: bool
) -> Applied | NotApplied:
    intent = await to_new(connection, dag)
    if not force and (breaks := await find_breaks(connection, intent.plan, intent.targets)):
        return NotApplied(WhyNotApplied.BREAKS, breaks)
    lineages = lineage_hashes(dag)
    version_id = await write_version(
        connection, dag, source_text, lineages=lineages, generations=intent.targets
    )
    by_dataset = {dataset: lineages[job] for dataset, job in writers(dag).items()}
    await _move_generations(connection, intent.state, intent.plan, lineages=by_dataset)
    return await _finish(connection, intent, version_id=version_id)


async def _return_to(
    connection: Connection, version_id: int, *, force: bool, is_at_once: bool = False
) -> Applied | NotApplied:
    current = await fetch_row(connection, "current_version")
    if current is not None and current["id"] == version_id:
        return await _applied(connection, version_id, before=version_id, is_changed=False)
    intent = await to_earlier(connection, version_id, is_at_once=is_at_once)
    if not force and (breaks := await find_breaks(connection, intent.plan, intent.targets)):
        return NotApplied(WhyNotApplied.BREAKS, breaks)
    await connection.execute(query("restore_version"), {"version": version_id})
    await _move_generations(connection, intent.state, intent.plan, lineages={})
    return await _finish(connection, intent, version_id=version_id)


async def _move_generations(
    connection: Connection, state: State, plan: Plan, *, lineages: Mapping[str, str]
) -> None:
    known = {(each.dataset, each.version): each.lineage for each in state.held}
    for moves in (plan.leaving, plan.entering):
        if not moves:
            continue
        asked = {
            "datasets": [move.dataset for move in moves],
            "versions": [move.version for move in moves],
            "states": [move.state.value for move in moves],
            "lineages": [
                known.get((move.dataset, move.version)) or lineages[move.dataset] for move in moves
            ],
        }
        await connection.execute(query("move_generations"), asked)


async def _finish(connection: Connection, intent: Intent, *, version_id: int) -> Applied:
    """Point at the version, end what is useless now, and have what is back catch up."""
    state, plan, targets, back = intent.state, intent.plan, intent.targets, intent.back
    scope = {"useless": sorted(plan.useless), "jobs": sorted(targets), "reason": LEFT}
    (row,) = await fetch_rows(connection, "cancel_useless", **scope)
    await connection.execute(query("point_at_version"), {"version": version_id})
    await range_looked_at(connection)
    await connection.execute(query("release_held"))
    rebuilt = sorted(
        {
            move.version
            for move in plan.entering
            if move.state is GenerationState.BUILDING or move.version not in back
        }
    )
    if back:
        returning = {
            "version": version_id,
            "versions": list(back),
            "rebuilt": rebuilt,
            "reason": LEFT,
        }
        for step in ("resume_running", "forget_cancelled", "replay_events"):
            await connection.execute(query(step), returning)
    if rebuilt:
        planned = {
            "version": version_id,
            "versions": rebuilt,
            "concurrency": REBUILD_CONCURRENCY,
        }
        for step in ("plan_rebuilds", "plan_leftovers"):
            await connection.execute(query(step), planned)
    # A limit that was raised lets tasks be claimed that nobody would be told of.
    limits = await job_limits(connection)
    moved = [job for job, limit in limits.items() if state.limits.get(job, limit) != limit]
    await wake_jobs(connection, moved)
    done = await _applied(
        connection, version_id, before=state.version_id, cancelled=row["cancelled"]
    )
    return replace(
        done,
        returned=returned_jobs(intent, GenerationState.CURRENT),
        resumed=returned_jobs(intent, GenerationState.BUILDING),
    )


async def _applied(
    connection: Connection,
    version_id: int,
    *,
    before: int | None,
    is_changed: bool = True,
    cancelled: int = 0,
) -> Applied:
    (version,) = await fetch_rows(connection, "find_version", hash=None, id=version_id)
    jobs = await fetch_rows(connection, "deployed_jobs", version=version_id)
    building = tuple(each["name"] for each in jobs if each["is_building"])
    return Applied(version_id, version["hash"], is_changed, building, cancelled, before)


async def _cut_over(
    connection: Connection,
    dataset: str,
    *,
    force: bool,
    version: str | None,
    judged_at: datetime | None,
) -> CutOver:
    locked = await fetch_rows(connection, "lock_cut_over", dataset=dataset)
    building = {row["dataset"]: row["version"] for row in locked if row["state"] == "building"}
    if dataset not in building or version not in (None, building[dataset]):
        return await _nothing(connection, dataset)
    since = None if judged_at is None else judged_at - PUBLISHING_MAX
    asked = {"version": building[dataset], "since": since}
    (found,) = await fetch_rows(connection, "cut_over_obstacles", **asked)
    if found["is_backfilled"]:
        return CutOver.BACKFILL
    if found["is_uncovered"] and not force:
        return CutOver.UNCOVERED
    if found["is_upstream_uncovered"] and not force:
        return CutOver.UPSTREAM
    moving = {"datasets": sorted(building)}
    retired = await fetch_rows(connection, "retire_generations", **moving)
    await connection.execute(query("promote_generations"), moving)
    left = sorted({row["version"] for row in retired})
    await connection.execute(query("cancel_waiting"), {"versions": left, "reason": LEFT})
    return CutOver.DONE


async def _nothing(connection: Connection, dataset: str) -> CutOver:
    known = await fetch_rows(connection, "is_dataset", dataset=dataset)
    return CutOver.NOTHING if known else CutOver.UNKNOWN


async def _keep(connection: Connection, dataset: str) -> Kept | NotKept:
    """As a publication does it: schemas are locked, then partitions."""
    await connection.execute(query("share_deployment_lock"))
    building = await fetch_rows(connection, "find_building", dataset=dataset)
    if not building:
        return NotKept(await _nothing(connection, dataset))
    version = building[0]["version"]
    asked = {"version": version, "since": None}
    (found,) = await fetch_rows(connection, "cut_over_obstacles", **asked)
    if found["is_upstream_uncovered"] or found["is_upstream_backfilled"]:
        return NotKept(CutOver.UPSTREAM)
    if found["is_backfilled"]:
        return NotKept(CutOver.BACKFILL)
    if building[0]["appends_changes"]:
        # Its next task is given all that there is, also what was kept upstream.
        return NotKept(CutOver.CHANGES)
    try:
        # All of them or none.
        async with connection.transaction() as whole:
            for row in building:
                await grow_schema(
                    connection, row["dataset"], generation=version, columns=row["columns"] or []
                )
            (row,) = await fetch_rows(connection, "keep_publications", version=version)
            if row["is_torn"]:
                raise psycopg.Rollback(whole)
    except SchemaRefused as error:
        return NotKept(None, error.message)
    if row["is_torn"]:
        return NotKept(CutOver.COMPACTED)
    if row["kept"] and row["readers"]:
        # They have no news of it by themselves, and are not cut over before they have seen it.
        datasets = [each["dataset"] for each in building]
        await connection.execute(query("forget_computed"), {"datasets": datasets})
        planned = {
            "version": row["version"],
            "versions": row["readers"],
            "concurrency": REBUILD_CONCURRENCY,
        }
        await connection.execute(query("plan_rebuilds"), planned)
    return Kept(row["kept"])
