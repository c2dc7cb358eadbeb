"""Which generation each job gets, and what becomes of the ones that are there. Pure.

A generation is `building` until it is cut over, and `current` from the start where there was none.
A dataset has at most one of each. Leaving the DAG, what was current is `retired` and what was being
built is `abandoned`; coming back, the first is current at once, if it lacks nothing that readers
have, and the second is built on.
Called by `penstock.dispatcher.deployment.moves`, which holds the locks and does what is said here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.deployment.values import GenerationState


@dataclass(frozen=True, slots=True)
class Standing:
    """A job of some version, as it stands in the database."""

    job: str
    generation: str
    lineage: str
    old_key: Sequence[str] = ()
    """The `unique_key` of a job that appends, which earlier releases asked for."""


@dataclass(frozen=True, slots=True)
class Held:
    """A generation of a dataset, as it stands in the database."""

    dataset: str
    writer: str | None
    """The job that writes the dataset now; None for one from outside."""
    version: str
    state: GenerationState
    lineage: str


@dataclass(frozen=True, slots=True)
class Retired:
    """A generation of a job that was current, as it stands in the database."""

    job: str
    version: str
    lineage: str
    fed: tuple[str, ...]
    """The generations that it was built of."""


@dataclass(frozen=True, slots=True)
class Move:
    """A generation of a dataset that gets this state; it may be new."""

    dataset: str
    version: str
    state: GenerationState


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to generations. Those that leave do so before others take their place."""

    leaving: tuple[Move, ...]
    entering: tuple[Move, ...]
    useless: frozenset[str]
    """Versions whose waiting tasks nobody needs any more."""


def kept_generations(
    lineages: Mapping[str, str], *, standing: Iterable[Standing], held: Iterable[Held]
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
    retired: Iterable[Retired],
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


def served_generations(standing: Iterable[Standing], held: Iterable[Held]) -> frozenset[str]:
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
    held: Iterable[Held],
    behind: frozenset[str] = frozenset(),
) -> Plan:
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
    leaving: list[Move] = []
    entering: list[Move] = []
    for dataset in sorted({*states, *written}):
        found = states.get(dataset, {})
        target = targets[written[dataset]] if dataset in written else None
        before = by_version.get((dataset, target)) if target is not None else None
        is_back_at_once = before is GenerationState.RETIRED and target not in behind
        building = found.get(GenerationState.BUILDING)
        if building is not None and building != target:
            leaving.append(Move(dataset, building, GenerationState.ABANDONED))
        current = found.get(GenerationState.CURRENT)
        if current is not None and is_back_at_once:
            leaving.append(Move(dataset, current, GenerationState.RETIRED))
        if target is None or before in (GenerationState.CURRENT, GenerationState.BUILDING):
            continue
        is_current = is_back_at_once or current is None
        state = GenerationState.CURRENT if is_current else GenerationState.BUILDING
        entering.append(Move(dataset, target, state))
    useless |= {move.version for move in leaving}
    return Plan(tuple(leaving), tuple(entering), frozenset(useless - set(targets.values())))
