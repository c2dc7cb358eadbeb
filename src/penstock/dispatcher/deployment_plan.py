"""The plan of a DAG change: what it comes to, read under the locks, before anything is written.

A generation is `building` until it is cut over, and `current` from the start where there was
none; a dataset has at most one of each. When it leaves the DAG, a current one is `retired` and
one that was being built is `abandoned`; when it comes back, the first is current at once if it
lacks nothing that readers have, and the second is built on. `plan_moves` decides that as a pure
function.

A `DagChangeIntent` is which generation each job gets, what becomes of those there are, and what
comes back. `deployment` carries it out; `foreseen` only reports it. The caller holds the
deployment lock; the live generations are locked here, so what is read stays true until the
transaction ends. A refused change is a value too, with the list of what it would break.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from penstock.dispatcher.dag.canonical import lineage_hashes, with_sql_of
from penstock.dispatcher.dag.model import Dag, UpdateMode
from penstock.dispatcher.database.pool import Connection, query


class GenerationState(StrEnum):
    """What a generation of a dataset is."""

    BUILDING = "building"
    """It takes the place of the current one when it covers it."""
    CURRENT = "current"
    """The one that readers read."""
    RETIRED = "retired"
    """It was current; a rollback makes it so again."""
    ABANDONED = "abandoned"
    """It was being built when the DAG moved on."""


@dataclass(frozen=True, slots=True)
class DagVersion:
    """A version of the DAG."""

    id: int
    hash: str
    created_at: datetime
    is_current: bool
    since: datetime | None = None
    """When it was put in force last."""


@dataclass(frozen=True, slots=True)
class DagVersionText:
    """What was applied as a version: the DAG, and the files that it names, by their names."""

    source: str
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeployedJob:
    """A job of the DAG that is in force."""

    name: str
    job_id: int
    definition_id: int
    generation: str
    outputs: Mapping[str, str]
    """The datasets that it writes: the uuid by the name."""
    is_building: bool
    """Whether readers are still served an earlier generation of an output."""


@dataclass(frozen=True, slots=True)
class DeployedDag:
    """The current DAG."""

    version: DagVersion
    text: DagVersionText
    since: datetime
    jobs: tuple[DeployedJob, ...]


@dataclass(frozen=True, slots=True)
class ObsoletedWork:
    """Work of one job and one generation that a change would make useless."""

    job: str
    generation: str
    waiting: int
    running: int
    backfills: int


@dataclass(frozen=True, slots=True)
class UnrebuildableParts:
    """What a rebuild cannot make again of a dataset that is appended to: retention has removed the
    events, or the inputs were replaced since."""

    dataset: str
    job: str
    publications: int
    """How many the current generation has."""
    lost: int
    """How many of them would be missing."""


@dataclass(frozen=True, slots=True)
class DagApplied:
    """The DAG is in force."""

    version_id: int
    hash: str
    is_changed: bool
    """False if it was in force already."""
    building: tuple[str, ...] = ()
    """The jobs of which readers are served an earlier generation until the cut-over."""
    cancelled: int = 0
    """How many waiting tasks were cancelled."""
    before: int | None = None
    """The version that was in force until then; None if this is the first."""
    returned: tuple[str, ...] = ()
    """The jobs whose earlier generation is served again at once."""
    resumed: tuple[str, ...] = ()
    """Those that are built on from their earlier generation, which lacks something."""
    losses: tuple[UnrebuildableParts, ...] = ()
    """What cannot be built anew, for which the cut-over waits."""


@dataclass(frozen=True, slots=True)
class DagPreview:
    """What a change of the DAG would do. Nothing was changed."""

    version_id: int | None
    """None for one that was never in force, which would get a number."""
    hash: str
    is_changed: bool
    building: tuple[str, ...] = ()
    before: int | None = None
    breaks: tuple[ObsoletedWork, ...] = ()
    returned: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    losses: tuple[UnrebuildableParts, ...] = ()
    replaced: tuple[str, ...] = ()
    """The generations that readers have until others take their place, at once or when built."""
    others: tuple[str, ...] = ()


class WhyNotApplied(StrEnum):
    """Why a change of the DAG was refused."""

    BREAKS = "breaks"
    """It makes work useless that waits or runs; force does it all the same."""
    UNKNOWN = "unknown"
    """There is no such version."""
    FIRST = "first version"
    """No other version was in force before."""
    NONE = "none"
    """No version is in force."""


@dataclass(frozen=True, slots=True)
class DagNotApplied:
    """A change of the DAG that changed nothing."""

    why: WhyNotApplied
    breaks: tuple[ObsoletedWork, ...] = ()


class CutOverOutcome(StrEnum):
    """What became of a cut-over."""

    DONE = "done"
    NOTHING = "nothing"
    """No generation of this dataset is being built."""
    UNCOVERED = "uncovered"
    """The current generation has a partition, or a part of one that is appended to, that the one
    being built does not have. `force` lets it be missing."""
    UPSTREAM = "upstream"
    """That is so of a generation that this one is built of. `force` lets it be missing."""
    BACKFILL = "backfill"
    """A backfill of the generation being built is not over."""
    CHANGES = "changes"
    """What appends changes keeps nothing: it reads all anew, and would have it twice."""
    COMPACTED = "compacted"
    """What would be kept was put together in files with parts that were made anew."""
    UNKNOWN = "unknown"
    """There is no such dataset."""


@dataclass(frozen=True, slots=True)
class PartsKept:
    """What could not be built anew is part of the generation that is being built, as it was."""

    publications: int


@dataclass(frozen=True, slots=True)
class PartsNotKept:
    """Nothing of the current generation was kept in the one that is being built."""

    why: CutOverOutcome | None
    """None if it has other columns."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job of some version, as it stands in the database."""

    job: str
    generation: str
    lineage: str
    old_key: Sequence[str] = ()
    """The `unique_key` of a job that appends, which earlier releases asked for."""


@dataclass(frozen=True, slots=True)
class StoredGeneration:
    """A generation of a dataset, as it stands in the database."""

    dataset: str
    writer: str | None
    """The job that writes the dataset now; None for one from outside."""
    version: str
    state: GenerationState
    lineage: str


@dataclass(frozen=True, slots=True)
class RetiredGeneration:
    """A generation of a job that was current, as it stands in the database."""

    job: str
    version: str
    lineage: str
    fed: tuple[str, ...]
    """The generations that it was built of."""


@dataclass(frozen=True, slots=True)
class GenerationMove:
    """A generation of a dataset that gets this state; it may be new."""

    dataset: str
    version: str
    state: GenerationState


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What happens to generations. Those that leave do so before others take their place."""

    leaving: tuple[GenerationMove, ...]
    entering: tuple[GenerationMove, ...]
    useless: frozenset[str]
    """Versions whose waiting tasks nobody needs any more."""


def kept_generations(
    lineages: Mapping[str, str], *, standing: Iterable[StoredJob], held: Iterable[StoredGeneration]
) -> Mapping[str, str]:
    """The generations that jobs keep, by job: of the same lineage, in the DAG or current."""
    found = {
        each.writer: each.version
        for each in held
        if each.writer is not None
        and each.state is GenerationState.CURRENT
        and lineages.get(each.writer) == each.lineage
    }
    in_force = {
        each.job: each.generation for each in standing if lineages.get(each.job) == each.lineage
    }
    return {**found, **in_force}


def returning_generations(
    dag: Dag,
    lineages: Mapping[str, str],
    *,
    kept: Mapping[str, str],
    retired: Iterable[RetiredGeneration],
) -> Mapping[str, str]:
    """The generations that jobs go back to: of the same lineage, and built of what feeds them now.

    `retired` has the one to be preferred first.
    """
    written, retired = writers(dag), tuple(retired)
    read = {
        job.name: {written[each.dataset] for each in job.inputs if each.dataset in written}
        for job in dag.jobs
    }
    found: dict[str, str] = {}
    for _ in dag.jobs:
        targets = {**found, **kept}
        more = {
            each.job: each.version
            for each in reversed(retired)
            if each.job in read
            and each.job not in targets
            and lineages[each.job] == each.lineage
            and set(each.fed) == {targets.get(writer) for writer in read[each.job]}
        }
        if not more:
            break
        found |= more
    return found


def with_downstream(behind: Iterable[str], reads: Iterable[tuple[str, str]]) -> frozenset[str]:
    """These jobs, and all that read of them; `reads` has readers and writers."""
    reads, found = tuple(reads), set(behind)
    for _ in reads:
        more = {reader for reader, writer in reads if writer in found} - found
        if not more:
            break
        found |= more
    return frozenset(found)


def served_generations(
    standing: Iterable[StoredJob], held: Iterable[StoredGeneration]
) -> frozenset[str]:
    """What has had all of its events routed to it until now.

    That is what the DAG names, and what is current until something that the DAG names is built.
    """
    held = tuple(held)
    in_force = frozenset(each.generation for each in standing)
    built = {
        each.dataset
        for each in held
        if each.state is GenerationState.BUILDING and each.version in in_force
    }
    replaced = {
        each.version
        for each in held
        if each.state is GenerationState.CURRENT and each.dataset in built
    }
    # A job that has lost a dataset to another is not served as it was.
    by_writer = {(each.version, each.writer) for each in held if each.version in replaced}
    split = {version for version, count in Counter(v for v, _ in by_writer).items() if count > 1}
    return in_force | (replaced - split)


def writers(dag: Dag) -> Mapping[str, str]:
    """The job that writes each dataset, by the names of both."""
    return {output.dataset: job.name for job in dag.jobs for output in job.outputs}


def plan_moves(
    targets: Mapping[str, str],
    *,
    written: Mapping[str, str],
    held: Iterable[StoredGeneration],
    behind: frozenset[str] = frozenset(),
) -> GenerationPlan:
    """What to do so that each job has its generation. `targets` are by job.

    Those that are `behind` lack something that readers have now, and are built on first.
    """
    states: dict[str, dict[GenerationState, str]] = {}
    by_version: dict[tuple[str, str], GenerationState] = {}
    useless: set[str] = set()
    for each in held:
        states.setdefault(each.dataset, {})[each.state] = each.version
        by_version[each.dataset, each.version] = each.state
        is_live = each.state in (GenerationState.BUILDING, GenerationState.CURRENT)
        if is_live and each.writer != written.get(each.dataset, each.writer):
            # Tasks of the earlier writer may not publish it any more.
            useless.add(each.version)
    leaving: list[GenerationMove] = []
    entering: list[GenerationMove] = []
    for dataset in sorted({*states, *written}):
        found = states.get(dataset, {})
        target = targets[written[dataset]] if dataset in written else None
        before = by_version.get((dataset, target)) if target is not None else None
        is_back_at_once = before is GenerationState.RETIRED and target not in behind
        building = found.get(GenerationState.BUILDING)
        if building is not None and building != target:
            leaving.append(GenerationMove(dataset, building, GenerationState.ABANDONED))
        current = found.get(GenerationState.CURRENT)
        if current is not None and is_back_at_once:
            leaving.append(GenerationMove(dataset, current, GenerationState.RETIRED))
        if target is None or before in (GenerationState.CURRENT, GenerationState.BUILDING):
            continue
        is_current = is_back_at_once or current is None
        state = GenerationState.CURRENT if is_current else GenerationState.BUILDING
        entering.append(GenerationMove(dataset, target, state))
    useless |= {move.version for move in leaving}
    return GenerationPlan(
        tuple(leaving), tuple(entering), frozenset(useless - set(targets.values()))
    )


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """What is in force before a move."""

    version_id: int | None
    standing: tuple[StoredJob, ...]
    held: tuple[StoredGeneration, ...]
    limits: Mapping[int, int | None]
    """How many tasks of a job may run at a time, by job."""


@dataclass(frozen=True, slots=True)
class DagChangeIntent:
    """A change that could be made."""

    state: DeploymentState
    targets: Mapping[str, str]
    """The generation that each job gets."""
    plan: GenerationPlan
    back: Sequence[str]
    """The generations that were not served before, and are again."""
    lineages: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of a DAG that was never in force: by job."""
    defined_by: Dag | None = None
    """The same DAG with the texts of queries that the lineages are of."""


async def to_new(connection: Connection, dag: Dag) -> DagChangeIntent:
    """To a DAG that was never in force, which may bring generations back."""
    state = await read_state(connection)
    known = await fetch_rows(connection, "known_queries")
    dag = with_sql_of(dag, ((row["job"], row["sql"]) for row in known))
    lineages = lineage_hashes(dag)
    earlier = lineage_hashes(_with_old_keys(dag, state.standing))
    kept = {
        **kept_generations(earlier, standing=state.standing, held=state.held),
        **kept_generations(lineages, standing=state.standing, held=state.held),
    }
    rows = await fetch_rows(connection, "retired_generations")
    retired = [RetiredGeneration(**{**row, "fed": tuple(row["fed"])}) for row in rows]
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
    return DagChangeIntent(state, targets, plan, back, lineages, dag)


def _with_old_keys(dag: Dag, standing: Sequence[StoredJob]) -> Dag:
    """The DAG with the keys that earlier releases asked of jobs that append, and did not use.

    Who takes one out keeps what was appended.
    """
    keys = {each.job: tuple(each.old_key) for each in standing if each.old_key}
    jobs = (
        replace(job, unique_key=keys[job.name])
        if job.name in keys and job.update is UpdateMode.APPEND
        else job
        for job in dag.jobs
    )
    return replace(dag, jobs=tuple(jobs))


async def to_earlier(
    connection: Connection, version_id: int, *, is_at_once: bool
) -> DagChangeIntent:
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
    return DagChangeIntent(state, targets, plan, back)


def served(state: DeploymentState) -> frozenset[str]:
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


async def earlier_version(connection: Connection, to: int | None) -> dict[str, Any] | DagNotApplied:
    """The version to go back to."""
    if to is None:
        if await fetch_row(connection, "current_version") is None:
            return DagNotApplied(WhyNotApplied.NONE)
        before = await fetch_row(connection, "previous_version")
        if before is None:
            return DagNotApplied(WhyNotApplied.FIRST)
        to = before["id"]
    found = await fetch_row(connection, "find_version", hash=None, id=to)
    return DagNotApplied(WhyNotApplied.UNKNOWN) if found is None else found


async def foreseen_return(
    connection: Connection, version: Mapping[str, Any], *, is_at_once: bool = False
) -> DagPreview:
    """What going back to a version would do."""
    version_id, digest = version["id"], version["hash"]
    current = await fetch_row(connection, "current_version")
    if current is not None and current["id"] == version_id:
        return DagPreview(version_id, digest, is_changed=False, before=version_id)
    intent = await to_earlier(connection, version_id, is_at_once=is_at_once)
    return await foreseen(connection, intent, digest, version_id=version_id)


async def foreseen(
    connection: Connection, intent: DagChangeIntent, digest: str, *, version_id: int | None = None
) -> DagPreview:
    """What a change would do."""
    places: tuple[StoredGeneration | GenerationMove, ...] = (
        *intent.plan.entering,
        *intent.state.held,
    )
    built = {each.version for each in places if each.state is GenerationState.BUILDING}
    built &= set(intent.targets.values())
    returned = returned_jobs(intent, GenerationState.CURRENT)
    others = built | {intent.targets[job] for job in returned}
    datasets = {each.dataset for each in places if each.version in others}
    return DagPreview(
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


def returned_jobs(intent: DagChangeIntent, state: GenerationState) -> tuple[str, ...]:
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


async def read_state(connection: Connection) -> DeploymentState:
    """Lock what is live, and see what it is: a statement after the lock sees all before it."""
    await connection.execute(query("lock_live_generations"))
    current = await fetch_row(connection, "current_version")
    version_id = current["id"] if current is not None else None
    standing = await fetch_rows(connection, "standing_jobs", version=version_id)
    held = await fetch_rows(connection, "held_generations")
    return DeploymentState(
        version_id,
        tuple(StoredJob(**row) for row in standing),
        tuple(StoredGeneration(**{**row, "state": GenerationState(row["state"])}) for row in held),
        await job_limits(connection),
    )


async def job_limits(connection: Connection) -> Mapping[int, int | None]:
    rows = await fetch_rows(connection, "job_limits")
    return {row["id"]: row["max_concurrency"] for row in rows}


async def find_breaks(
    connection: Connection, plan: GenerationPlan, targets: Mapping[str, str]
) -> tuple[ObsoletedWork, ...]:
    scope = {"useless": sorted(plan.useless), "jobs": sorted(targets)}
    return tuple(
        ObsoletedWork(**row) for row in await fetch_rows(connection, "broken_work", **scope)
    )


async def fetch_rows(connection: Connection, name: str, **asked: object) -> list[dict[str, Any]]:
    return await (await connection.execute(query(name), asked)).fetchall()


async def fetch_row(connection: Connection, name: str, **asked: object) -> dict[str, Any] | None:
    return await (await connection.execute(query(name), asked)).fetchone()
