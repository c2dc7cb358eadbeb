"""The DAG: which is in force, which were, and how another takes its place."""

from __future__ import annotations

import asyncio
from typing import Final

from penstock.dispatcher.api.endpoints import Call
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.problems import conflict, unknown
from penstock.dispatcher.dag.parsing import parse
from penstock.dispatcher.deployment.moves import VERSIONS_MAX
from penstock.dispatcher.deployment.values import (
    Applied,
    CutOver,
    NotApplied,
    Version,
    WhyNotApplied,
)
from penstock.dispatcher.wire.asking import LimitParams, NameParams
from penstock.dispatcher.wire.base import Answer
from penstock.dispatcher.wire.dags import (
    AppliedAnswer,
    ApplyAsk,
    BreakAnswer,
    CutOverAnswer,
    CutOverAsk,
    DagAnswer,
    RollbackAsk,
    VersionAnswer,
    VersionsAnswer,
)


async def dag(parts: Parts, _: Call) -> Answer:
    """The DAG that is in force."""
    found = await parts.deployment.current()
    if found is None:
        return unknown("No DAG is in force.", detail="Apply one.")
    return DagAnswer(version=_version(found.version), source=found.source, since=found.since)


async def apply(parts: Parts, call: Call) -> Answer:
    """Put a DAG in force."""
    ask: ApplyAsk = call.ask
    # A large file takes seconds to read, in which workers have to be heard.
    read = await asyncio.to_thread(parse, ask.source, ask.where, runtimes=parts.runtimes)
    found = await parts.deployment.apply(read, ask.source, force=ask.force)
    return _moved(parts, found)


async def versions(parts: Parts, call: Call) -> Answer:
    """The versions that have been in force."""
    params: LimitParams = call.params
    found = await parts.deployment.versions(limit=params.limit)
    return VersionsAnswer(versions=[_version(each) for each in found])


async def rollback(parts: Parts, call: Call) -> Answer:
    """Go back to an earlier version."""
    ask: RollbackAsk = call.ask
    to = ask.version
    if to is None:
        known = await parts.deployment.versions(limit=VERSIONS_MAX)
        current = next((each.id for each in known if each.is_current), None)
        if current is None:
            return unknown("No DAG is in force.", detail="Apply one.")
        to = next((each.id for each in known if each.id < current), None)
        if to is None:
            title = f"There is no version before {current}."
            return conflict("first version", title, detail="Name the version to go to.")
    found = await parts.deployment.rollback(to)
    if isinstance(found, NotApplied) and found.why is WhyNotApplied.UNKNOWN:
        return unknown(f"There is no version {to} of the DAG.")
    return _moved(parts, found)


_NOT_CUT_OVER: Final = {
    CutOver.NOTHING: "No generation of it is being built.",
    CutOver.BACKFILL: "A backfill or rebuild of the new generation is not over.",
    CutOver.UNCOVERED: "The new generation does not have all partitions of the current one.",
}


async def cut_over(parts: Parts, call: Call) -> Answer:
    """Have readers read the generation that is being built."""
    params: NameParams = call.params
    ask: CutOverAsk = call.ask
    named = await parts.views.live([params.name])
    if params.name not in named:
        return unknown(f"There is no dataset {params.name!r} that is written now.")
    dataset = named[params.name][0].dataset
    found = await parts.deployment.cut_over(dataset, force=ask.force)
    if found in _NOT_CUT_OVER:
        is_forcible = found is CutOver.UNCOVERED and not ask.force
        detail = "With force they may be missing." if is_forcible else ""
        return conflict(found.value, _NOT_CUT_OVER[found], detail=detail)
    parts.kick()
    (now,) = (await parts.views.live([params.name]))[params.name]
    return CutOverAnswer(dataset=params.name, generation=now.generation)


def _moved(parts: Parts, found: Applied | NotApplied) -> Answer:
    if isinstance(found, NotApplied):
        problem = conflict(
            found.why.value,
            "The change makes work useless that waits or runs.",
            detail="Wait for it to end, or apply with force, which cancels it.",
        )
        problem.breaks = [
            BreakAnswer(
                job=each.job,
                generation=each.generation,
                waiting=each.waiting,
                running=each.running,
                backfills=each.backfills,
            )
            for each in found.breaks
        ]
        return problem
    parts.kick()
    return AppliedAnswer(
        version=found.version_id,
        hash=found.hash,
        is_changed=found.is_changed,
        building=list(found.building),
        cancelled=found.cancelled,
    )


def _version(found: Version) -> VersionAnswer:
    return VersionAnswer(
        id=found.id, hash=found.hash, created_at=found.created_at, is_current=found.is_current
    )
