"""The deployer: which DAG is in force, and which generation of every dataset is current.

Owns the versions of the DAG (immutable, named by content), their jobs, edges and definitions,
the generations of datasets, and the moves between them: `apply`, `rollback` and `cut_over`.
Each is one transaction; changes of the DAG are serialized by a named lock. A crash leaves a
move done or not.

Invariants:
- A job keeps its generation as long as its definition and everything upstream are the same, and
  goes back to one that was retired if they are the same again; so one generation of a job is always
  fed by the same generations of its inputs.
- A dataset has at most one current generation and one that is being built (PUBLISH-12). Until the
  cut-over both are served: the earlier definition of an edited job goes on, beside the new one.
- Routing holds the generation of its events FOR SHARE. Apply and rollback hold all live ones, a
  cut-over those of its job, FOR UPDATE. So an event is routed wholly before a move or after it.
- Jobs that were removed keep their data: the current generation stays what it is.
- Every time that a version is put in force is noted: a rollback goes back by time, not by
  number.
- Nothing that waits or runs is made useless by `apply` unless it is forced. `rollback` says
  what
  it abandons by being a rollback.
- What comes back has all events routed to it that it has no task for: those it has missed, and
  those whose partitions a backfill has built; of a partition the latest, if it works by partitions
  and replaces them. Those that were routed before reach nothing else (`event.replayed_to`). Events
  may therefore not be kept for longer than the tasks that were made of them.
- To go back by applying a text serves retired generations at once if they are whole, that is,
  lack
  nothing that readers have now. One that lacks something, and all downstream of it, is built on
  beside what is served, and cut over. A rollback serves them at once all the same, and they catch
  up. What was dropped is abandoned, and built anew.
- What is new, begins to be built, or is built on, gets a rebuild in the same transaction: a plan
  for the events of its inputs up to now, if there are any. Those that come later are routed to it.
  `backfills` carries it out, and `CutOverController` cuts over.

What is being built covers what readers have (`penstock_lacking` in the schema): - of a
partition that is replaced, if it has published the partition; - of one that is appended to, if
each part has a counterpart there: a part with the same key, or one
  by a task that was made of the same news (`penstock_counterparts`), also where upstream was made
  anew. A rebuild therefore makes a task of every event, and of every task of a backfill;
- and if the same is so of everything upstream that is being built too. Where an input lacks a
  part,
  a partition that was computed of the rest would count as covered.

New data during a build is routed to both. A part never gets a counterpart if retention has
removed its event, if its event's data was replaced or removed since, or if an edited filter
leaves it out. Then a person decides: `cut_over` with `force` lets it be missing; `keep` makes
what has no task part of the new generation as it is, where the columns allow it, and what is
downstream is computed again or, where that appends, kept in the same way.

`CutOverController` finishes builds: a loop of every dispatcher looks for generations that may
be ready, downstream first, since the earlier generation of a job is fed by earlier generations
of its inputs. A job is not cut over while a job downstream of it is being built. One that is
never covered stays, visibly, until somebody replays a task, keeps what there was or forces the
cut-over.

Definitions are shared by versions that say the same of a job; the lineage is part of a
definition.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

import psycopg
from psycopg.types.json import Jsonb

from penstock.datasets.schema import refuse_undeclared
from penstock.dispatcher.backpressure import wake_jobs
from penstock.dispatcher.dag.canonical import content_hash, defining_sql, encoded, plain_job
from penstock.dispatcher.dag.checks import HEARTBEAT_MS_MAX
from penstock.dispatcher.dag.files import texts
from penstock.dispatcher.dag.filters import stored_filter
from penstock.dispatcher.dag.model import (
    Dag,
    Job,
    OutputStorage,
    RangeAggregate,
    UpdateMode,
    in_queue,
)
from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.dispatcher.deployment_plan import (
    CutOverOutcome,
    DagApplied,
    DagChangeIntent,
    DagNotApplied,
    DagPreview,
    DagVersion,
    DagVersionText,
    DeployedDag,
    DeployedJob,
    DeploymentState,
    GenerationPlan,
    GenerationState,
    PartsKept,
    PartsNotKept,
    UnrebuildableParts,
    WhyNotApplied,
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
    writers,
)
from penstock.dispatcher.events import range_looked_at
from penstock.dispatcher.tasks.schemas import grow_schema, stored_columns
from penstock.kernel.errors import InvalidInput, SchemaRefused
from penstock.runtimes import DEFAULT_QUEUE


async def write_version(
    connection: Connection,
    dag: Dag,
    source_text: str,
    *,
    intent: DagChangeIntent,
) -> int:
    """Write a version that is new, and return its number."""
    names = [job.name for job in dag.jobs]
    limits = [job.max_concurrency for job in dag.jobs]
    await connection.execute(query("write_jobs"), {"names": names, "limits": limits})
    written = writers(dag)
    datasets = {"datasets": list(written), "writers": list(written.values())}
    await connection.execute(query("write_datasets"), datasets)
    asked = {"hash": content_hash(dag), "source": source_text, "files": Jsonb(texts(dag))}
    row = await (await connection.execute(query("write_version"), asked)).fetchone()
    assert row is not None, "an insert returns its row"
    version: int = row["id"]
    defined_by = intent.defined_by or dag
    queries = {job.name: defining_sql(job) for job in defined_by.jobs}
    jobs = [
        {
            **_definition(job, lineage=intent.lineages[job.name], sql=queries[job.name]),
            "generation": intent.targets[job.name],
        }
        for job in dag.jobs
    ]
    described = {"version": version, "jobs": Jsonb(jobs)}
    await connection.execute(query("write_definitions"), described)
    await connection.execute(query("write_dag_jobs"), described)
    edges = [
        {
            "job": job.name,
            "dataset": each.dataset,
            "input": each.name,
            "filter": stored_filter(each.where) if each.where is not None else None,
            "is_trigger": each.is_trigger,
            "reads": each.reads.value,
            "lookback": each.lookback_ms and each.lookback_ms // 1000,
        }
        for job in dag.jobs
        for each in job.inputs
    ]
    await connection.execute(query("write_edges"), {"version": version, "edges": Jsonb(edges)})
    return version


def _definition(job: Job, *, lineage: str, sql: str | None) -> dict[str, Any]:
    body = {**plain_job(job), "lineage": lineage}
    if sql != defining_sql(job):
        body["defining_sql"] = sql
    read = {each.dataset for each in job.inputs}
    written = {each.dataset for each in job.outputs}
    return {
        "job": job.name,
        "hash": hashlib.sha256(encoded(body)).hexdigest(),
        "body": body,
        "datasets": sorted({*read, *written, *job.buffers}),
        "runtime": job.runtime,
        "operator": in_queue(job.operator, str(job.resources.get("queue", DEFAULT_QUEUE))),
        "priority": job.priority.value,
        "update_mode": _update_mode(job).value,
        "max_attempts": job.max_attempts,
        "timeout_ms": job.timeout_ms,
        "heartbeat_ms": job.heartbeat_timeout_ms,
        "retry_first_ms": job.retry.first_ms,
        "retry_max_ms": job.retry.max_ms,
        "retry_backoff": job.retry.backoff,
    }


def _update_mode(job: Job) -> UpdateMode:
    """How outputs are published. Ranges that say the same news again are one publication."""
    return UpdateMode.APPEND if isinstance(job.ranges, RangeAggregate) else job.update


REBUILD_CONCURRENCY: Final = 500
"""How many tasks of a rebuild wait or run at a time."""
LEFT: Final = "Its generation is not served any more."
"""The reason of tasks that were cancelled here. A rollback finds them by it."""
VERSIONS_MAX: Final = 1000
PUBLISHING_MAX: Final = timedelta(minutes=10)
"""How much older than its end a transaction that publishes may be."""


class Deployer:
    """The operations on the DAG that is in force."""

    def __init__(self, database: Database, *, why_not_hot: str = "") -> None:
        self._database = database
        self._why_not_hot = why_not_hot
        """Why no dataset can have a table of Postgres data."""

    async def apply(
        self, dag: Dag, source_text: str, *, force: bool = False
    ) -> DagApplied | DagNotApplied:
        """Put a DAG in force. One that was in force before is gone back to."""
        self._check(dag)
        digest = content_hash(dag)

        async def work(connection: Connection) -> DagApplied | DagNotApplied:
            await connection.execute(query("take_deployment_lock"))
            earlier = await fetch_row(connection, "find_version", hash=digest, id=None)
            if earlier is not None:
                return await _return_to(connection, earlier["id"], force=force)
            return await _put_in_force(connection, dag, source_text, force=force)

        found = await self._database.transact(work)
        if isinstance(found, DagNotApplied) or not found.building:
            return found
        return replace(found, losses=await self._losses())

    async def foresee(self, dag: Dag) -> DagPreview:
        """What `apply` would do. Nothing is changed."""
        self._check(dag)
        digest = content_hash(dag)

        async def work(connection: Connection) -> DagPreview:
            await connection.execute(query("take_deployment_lock"))
            earlier = await fetch_row(connection, "find_version", hash=digest, id=None)
            if earlier is not None:
                return await foreseen_return(connection, earlier)
            intent = await to_new(connection, dag)
            await _refuse_unbuildable(connection, intent)
            return await foreseen(connection, intent, digest)

        return await self._with_losses(await self._database.transact(work))

    async def rollback(self, to: int | None = None) -> DagApplied | DagNotApplied:
        """Go back to an earlier version; what waits for abandoned generations is cancelled.

        Without a version, to the one that was in force before; so twice is there and back.
        """

        async def work(connection: Connection) -> DagApplied | DagNotApplied:
            await connection.execute(query("take_deployment_lock"))
            found = await earlier_version(connection, to)
            if isinstance(found, DagNotApplied):
                return found
            return await _return_to(connection, found["id"], force=True, is_at_once=True)

        return await self._database.transact(work)

    async def foresee_rollback(self, to: int | None = None) -> DagPreview | DagNotApplied:
        """What `rollback` would do. Nothing is changed."""

        async def work(connection: Connection) -> DagPreview | DagNotApplied:
            await connection.execute(query("take_deployment_lock"))
            found = await earlier_version(connection, to)
            if isinstance(found, DagNotApplied):
                return found
            return await foreseen_return(connection, found, is_at_once=True)

        found = await self._database.transact(work)
        return found if isinstance(found, DagNotApplied) else await self._with_losses(found)

    async def previous(self) -> int | None:
        """The version that was in force before the one that is; None if there was none."""

        async def work(connection: Connection) -> int | None:
            row = await fetch_row(connection, "previous_version")
            return None if row is None else row["id"]

        return await self._database.transact(work)

    async def text(self, version_id: int) -> DagVersionText | None:
        """The text of a version; None if there is no such version."""

        async def work(connection: Connection) -> DagVersionText | None:
            row = await fetch_row(connection, "version_source", id=version_id)
            return None if row is None else DagVersionText(**row)

        return await self._database.transact(work)

    async def cut_over(
        self,
        dataset: str,
        *,
        force: bool = False,
        version: str | None = None,
        judged_at: datetime | None = None,
    ) -> CutOverOutcome:
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

    async def keep(self, dataset: str) -> PartsKept | PartsNotKept:
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

    async def current(self) -> DeployedDag | None:
        """The DAG that is in force; None before the first."""

        async def work(connection: Connection) -> DeployedDag | None:
            row = await fetch_row(connection, "current_version")
            if row is None:
                return None
            version = DagVersion(
                row["id"], row["hash"], row["created_at"], is_current=True, since=row["since"]
            )
            jobs = await fetch_rows(connection, "deployed_jobs", version=row["id"])
            found = tuple(DeployedJob(**each) for each in jobs)
            text = DagVersionText(row["source"], row["files"])
            return DeployedDag(version, text, row["since"], found)

        return await self._database.transact(work)

    async def versions(self, *, limit: int = 100) -> tuple[DagVersion, ...]:
        """The versions that have been in force, the latest first."""
        if not 1 <= limit <= VERSIONS_MAX:
            raise InvalidInput(f"1 to {VERSIONS_MAX} versions can be asked for, not {limit}.")

        async def work(connection: Connection) -> tuple[DagVersion, ...]:
            return tuple(
                DagVersion(**row)
                for row in await fetch_rows(connection, "dag_versions", limit=limit)
            )

        return await self._database.transact(work)

    async def _losses(
        self, versions: Sequence[str] = (), targets: Sequence[str] = ()
    ) -> tuple[UnrebuildableParts, ...]:
        """What could not be built anew of what these hold; of all that are being replaced.

        After the locks of the change, for it looks at every publication.
        """

        async def work(connection: Connection) -> tuple[UnrebuildableParts, ...]:
            asked = {"versions": list(versions), "targets": list(targets)}
            if not versions:
                rows = await fetch_rows(connection, "replaced_generations")
                asked = {
                    "versions": [row["version"] for row in rows],
                    "targets": [row["next"] for row in rows],
                }
            found = await fetch_rows(connection, "foreseen_losses", **asked)
            return tuple(UnrebuildableParts(**row) for row in found)

        return await self._database.transact(work)

    def _check(self, dag: Dag) -> None:
        for job in dag.jobs:
            if job.heartbeat_timeout_ms > HEARTBEAT_MS_MAX:
                raise InvalidInput(f"The heartbeat_timeout of {job.name} is longer than a day.")
            hot = [x.name for x in job.outputs if x.storage is OutputStorage.POSTGRES]
            if hot and self._why_not_hot:
                raise InvalidInput(
                    f"The output {hot[0]} of {job.name} has storage: postgres. {self._why_not_hot}",
                    hint="See docs/hot-tables.md.",
                )

    async def _with_losses(self, found: DagPreview) -> DagPreview:
        if not found.replaced:
            return found
        return replace(found, losses=await self._losses(found.replaced, found.others))


async def _put_in_force(
    connection: Connection, dag: Dag, source_text: str, *, force: bool
) -> DagApplied | DagNotApplied:
    intent = await to_new(connection, dag)
    await _refuse_misdeclared(connection, dag, intent)
    await _refuse_unbuildable(connection, intent)
    if not force and (breaks := await find_breaks(connection, intent.plan, intent.targets)):
        return DagNotApplied(WhyNotApplied.BREAKS, breaks)
    version_id = await write_version(connection, dag, source_text, intent=intent)
    by_dataset = {dataset: intent.lineages[job] for dataset, job in writers(dag).items()}
    await _move_generations(connection, intent.state, intent.plan, lineages=by_dataset)
    return await _finish(connection, intent, version_id=version_id)


async def _refuse_misdeclared(connection: Connection, dag: Dag, intent: DagChangeIntent) -> None:
    """Raise `InvalidInput` if what is published, and kept, has other columns than are declared."""
    outputs = [(job, each) for job in dag.jobs for each in job.outputs if each.columns]
    declared = {each.dataset: (job, each.columns) for job, each in outputs}
    versions = sorted({intent.targets[job.name] for job, _ in declared.values()})
    for row in await fetch_rows(connection, "held_columns", versions=versions) if versions else ():
        if row["dataset"] not in declared:
            continue
        job, columns = declared[row["dataset"]]
        try:
            refuse_undeclared(columns, stored_columns(row["columns"]))
        except SchemaRefused as error:
            raise InvalidInput(
                f"What {row['dataset']} has published does not fit its `columns`. {error.message}",
                hint=f"Declare it as it is, or change the `config` of {job.name} too, which makes a"
                " new generation.",
            ) from error


async def _refuse_unbuildable(connection: Connection, intent: DagChangeIntent) -> None:
    """Raise `InvalidInput` if another generation would take the place of rows that a sink wrote."""
    asked = {
        "datasets": [each.dataset for each in intent.plan.entering],
        "versions": [each.version for each in intent.plan.entering],
    }
    for row in await fetch_rows(connection, "rows_of_sinks", **asked):
        raise InvalidInput(
            f"The sink {row['job']} has accepted rows for {row['dataset']}, and no other generation"
            " of it can be built of them.",
            hint="Leave `update`, `unique_key`, `version_by` and `outputs` as they are, or write"
            " a sink of another name with outputs of other names.",
        )


async def _return_to(
    connection: Connection, version_id: int, *, force: bool, is_at_once: bool = False
) -> DagApplied | DagNotApplied:
    current = await fetch_row(connection, "current_version")
    if current is not None and current["id"] == version_id:
        return await _applied(connection, version_id, before=version_id, is_changed=False)
    intent = await to_earlier(connection, version_id, is_at_once=is_at_once)
    await _refuse_unbuildable(connection, intent)
    if not force and (breaks := await find_breaks(connection, intent.plan, intent.targets)):
        return DagNotApplied(WhyNotApplied.BREAKS, breaks)
    await connection.execute(query("restore_version"), {"version": version_id})
    await _move_generations(connection, intent.state, intent.plan, lineages={})
    return await _finish(connection, intent, version_id=version_id)


async def _move_generations(
    connection: Connection,
    state: DeploymentState,
    plan: GenerationPlan,
    *,
    lineages: Mapping[str, str],
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


async def _finish(
    connection: Connection, intent: DagChangeIntent, *, version_id: int
) -> DagApplied:
    """Point at the version, end what is useless now, and have what is back catch up."""
    state, plan, targets, back = intent.state, intent.plan, intent.targets, intent.back
    scope = {"useless": sorted(plan.useless), "jobs": sorted(targets), "reason": LEFT}
    (row,) = await fetch_rows(connection, "cancel_useless", **scope)
    await connection.execute(query("point_at_version"), {"version": version_id})
    await _declare_hot(connection, version_id)
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


async def _declare_hot(connection: Connection, version_id: int) -> None:
    """Note which generations have tables that follow them, and of what columns."""
    await connection.execute(query("declare_hot"), {"version": version_id})
    for step in ("begin_hot", "await_serving"):
        await connection.execute(query(step))


async def _applied(
    connection: Connection,
    version_id: int,
    *,
    before: int | None,
    is_changed: bool = True,
    cancelled: int = 0,
) -> DagApplied:
    (version,) = await fetch_rows(connection, "find_version", hash=None, id=version_id)
    jobs = await fetch_rows(connection, "deployed_jobs", version=version_id)
    building = tuple(each["name"] for each in jobs if each["is_building"])
    return DagApplied(version_id, version["hash"], is_changed, building, cancelled, before)


async def _cut_over(
    connection: Connection,
    dataset: str,
    *,
    force: bool,
    version: str | None,
    judged_at: datetime | None,
) -> CutOverOutcome:
    locked = await fetch_rows(connection, "lock_cut_over", dataset=dataset)
    building = {row["dataset"]: row["version"] for row in locked if row["state"] == "building"}
    if dataset not in building or version not in (None, building[dataset]):
        return await _nothing(connection, dataset)
    since = None if judged_at is None else judged_at - PUBLISHING_MAX
    asked = {"version": building[dataset], "since": since}
    (found,) = await fetch_rows(connection, "cut_over_obstacles", **asked)
    if found["is_backfilled"]:
        return CutOverOutcome.BACKFILL
    if found["is_uncovered"] and not force:
        return CutOverOutcome.UNCOVERED
    if found["is_upstream_uncovered"] and not force:
        return CutOverOutcome.UPSTREAM
    moving = {"datasets": sorted(building)}
    retired = await fetch_rows(connection, "retire_generations", **moving)
    await connection.execute(query("promote_generations"), moving)
    await connection.execute(query("await_serving"))
    left = sorted({row["version"] for row in retired})
    await connection.execute(query("cancel_waiting"), {"versions": left, "reason": LEFT})
    return CutOverOutcome.DONE


async def _nothing(connection: Connection, dataset: str) -> CutOverOutcome:
    known = await fetch_rows(connection, "is_dataset", dataset=dataset)
    return CutOverOutcome.NOTHING if known else CutOverOutcome.UNKNOWN


async def _keep(connection: Connection, dataset: str) -> PartsKept | PartsNotKept:
    """As a publication does it: schemas are locked, then partitions."""
    await connection.execute(query("share_deployment_lock"))
    building = await fetch_rows(connection, "find_building", dataset=dataset)
    if not building:
        return PartsNotKept(await _nothing(connection, dataset))
    version = building[0]["version"]
    asked = {"version": version, "since": None}
    (found,) = await fetch_rows(connection, "cut_over_obstacles", **asked)
    if found["is_upstream_uncovered"] or found["is_upstream_backfilled"]:
        return PartsNotKept(CutOverOutcome.UPSTREAM)
    if found["is_backfilled"]:
        return PartsNotKept(CutOverOutcome.BACKFILL)
    if building[0]["appends_changes"]:
        # Its next task is given all that there is, also what was kept upstream.
        return PartsNotKept(CutOverOutcome.CHANGES)
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
        return PartsNotKept(None, error.message)
    if row["is_torn"]:
        return PartsNotKept(CutOverOutcome.COMPACTED)
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
    return PartsKept(row["kept"])


_ROUNDS_MAX: Final = 1000
_BUILDING_SECONDS: Final = 1.0
"""How soon to look again while something is being built."""
_LACKING_SECONDS: Final = 5.0
"""How soon to look again at what is built, and lacks something: every look compares all of it."""


class CutOverController:
    """Looks for generations that are built, and cuts them over."""

    def __init__(self, database: Database, deployment: Deployer) -> None:
        self._database = database
        self._deployment = deployment

    async def turn(self) -> float | None:
        """Cut over all that is ready, each after what is downstream of it."""
        for _ in range(_ROUNDS_MAX):
            rows = await self._database.transact(_building)
            if not rows:
                return None
            ready = [row for row in rows if row["is_last"] and row["is_ready"]]
            done = [await self._try(row) for row in ready]
            if not any(done):
                return _LACKING_SECONDS if ready else _BUILDING_SECONDS
        return 0.0

    async def _try(self, row: dict[str, Any]) -> bool:
        judged_at = await self._deployment.judge(row["version"])
        if judged_at is None:
            return False
        found = await self._deployment.cut_over(
            row["dataset"], version=row["version"], judged_at=judged_at
        )
        return found is CutOverOutcome.DONE


async def _building(connection: Connection) -> list[dict[str, Any]]:
    return await (await connection.execute(query("building_jobs"))).fetchall()
