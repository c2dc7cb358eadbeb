"""The DAG endpoints: which DAG is in force, which were, and apply, rollback and cut-over.

What a change does to each job is told by comparing the texts of the two versions after the move;
each move says which version it has replaced, so the answer is what has happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall
from penstock.dispatcher.api.problems import conflict, unknown
from penstock.dispatcher.capabilities.tokens import check_outputs
from penstock.dispatcher.dag.canonical import diff
from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.dag.parser import parse, parse_stored
from penstock.dispatcher.deployment_plan import (
    CutOverOutcome,
    DagApplied,
    DagNotApplied,
    DagPreview,
    DagVersion,
    ObsoletedWork,
    PartsNotKept,
    WhyNotApplied,
)
from penstock.protocol.base import Answer, LimitParams, NameParams
from penstock.protocol.dags import (
    AppliedAnswer,
    ApplyAsk,
    BreakAnswer,
    ChangeAnswer,
    CutOverAnswer,
    CutOverAsk,
    DagAnswer,
    DagChangesAnswer,
    LossAnswer,
    RollbackAsk,
    VersionAnswer,
    VersionsAnswer,
)
from penstock.protocol.problem import DagError
from penstock.tokens.scopes import Root


async def dag(parts: ApiContext, _: ApiCall) -> Answer:
    """The current DAG."""
    found = await parts.deployment.current()
    if found is None:
        return unknown("No DAG is in force.", detail="Apply one.")
    return DagAnswer(
        version=_version(found.version),
        source=found.text.source,
        since=found.since,
        files=dict(found.text.files),
    )


async def apply(parts: ApiContext, call: ApiCall) -> Answer:
    """Put a DAG in force."""
    ask: ApplyAsk = call.ask
    # A large file takes seconds to read, in which workers have to be heard.
    read = await asyncio.to_thread(
        parse, ask.source, ask.where, runtimes=parts.runtimes, files=ask.files
    )
    if parts.runtimes is not None:
        read = parts.runtimes.queued(read)
    check_outputs(read, Root.parse(parts.root))
    found: DagApplied | DagPreview | DagNotApplied
    if ask.dry_run:
        found = await parts.deployment.foresee(read)
    else:
        found = await parts.deployment.apply(read, ask.source, force=ask.force)
    return await _moved(parts, found, read)


async def versions(parts: ApiContext, call: ApiCall) -> Answer:
    """The versions that have been in force."""
    params: LimitParams = call.params
    found = await parts.deployment.versions(limit=params.limit)
    return VersionsAnswer(versions=[_version(each) for each in found])


async def rollback(parts: ApiContext, call: ApiCall) -> Answer:
    """Go back to an earlier version."""
    ask: RollbackAsk = call.ask
    found: DagApplied | DagPreview | DagNotApplied
    if ask.dry_run:
        found = await parts.deployment.foresee_rollback(ask.version)
    else:
        found = await parts.deployment.rollback(ask.version)
    if isinstance(found, DagNotApplied):
        match found.why:
            case WhyNotApplied.UNKNOWN:
                return unknown(f"There is no version {ask.version} of the DAG.")
            case WhyNotApplied.NONE:
                return unknown("No DAG is in force.", detail="Apply one.")
            case WhyNotApplied.FIRST:
                title = "No other version was in force before this one."
                return conflict(found.why.value, title, detail="Name the version to go to.")
            case WhyNotApplied.BREAKS:
                pass
    return await _moved(parts, found)


_NOT_CUT_OVER: Final = {
    CutOverOutcome.NOTHING: "No generation of it is being built.",
    CutOverOutcome.BACKFILL: "A backfill or rebuild of the new generation is not over.",
    CutOverOutcome.UNCOVERED: "The new generation does not have all that the current one has.",
    CutOverOutcome.UPSTREAM: "What the new generation is built of is not complete.",
    CutOverOutcome.CHANGES: "Nothing of it is kept: it appends what it reads of changes.",
    CutOverOutcome.COMPACTED: "Nothing is kept: its files also hold rows that were built anew.",
}
_WAYS_OUT: Final = {
    CutOverOutcome.UNCOVERED: (
        'With "force": true it may be missing; with "keep": true what cannot be built anew is taken'
        " over from the current one."
    ),
    CutOverOutcome.UPSTREAM: (
        'Cut over the datasets upstream first; with "force": true it may be missing.'
    ),
    CutOverOutcome.CHANGES: (
        "The new generation reads everything that there is of its input once, also what was kept of"
        ' that, and would have it twice. With "force": true it is cut over as it is.'
    ),
    CutOverOutcome.COMPACTED: (
        "Maintenance has put parts together of which some could be built anew and others could not."
        ' With "force": true these may be missing.'
    ),
}


async def cut_over(parts: ApiContext, call: ApiCall) -> Answer:
    """Make the generation that is being built the current one."""
    params: NameParams = call.params
    ask: CutOverAsk = call.ask
    named = await parts.views.live([params.name])
    if params.name not in named:
        return unknown(f"There is no dataset {params.name!r} that is written now.")
    dataset = named[params.name][0].dataset
    kept = await parts.deployment.keep(dataset) if ask.keep else None
    if isinstance(kept, PartsNotKept):
        if kept.why is not None:
            return _not_cut_over(kept.why, ask)
        title = "What the current generation has does not fit the columns of the new one."
        return conflict("schema", title, detail=kept.detail)
    if kept is not None and not ask.force and await parts.deployment.is_awaited(dataset):
        found = CutOverOutcome.DONE
    else:
        found = await parts.deployment.cut_over(dataset, force=ask.force)
    if found in _NOT_CUT_OVER:
        return _not_cut_over(found, ask, kept=0 if kept is None else kept.publications)
    parts.kick()
    # The current one comes first.
    now = (await parts.views.live([params.name]))[params.name]
    return CutOverAnswer(
        dataset=params.name,
        generation=now[0].generation,
        kept=None if kept is None else kept.publications,
        is_waiting=len(now) > 1,
    )


def _not_cut_over(why: CutOverOutcome, ask: CutOverAsk, *, kept: int = 0) -> Answer:
    detail = "" if ask.force else _WAYS_OUT.get(why, "")
    if kept:
        detail = f"What was kept of it stays so ({kept} publications). {detail}".strip()
    return conflict(why.value, _NOT_CUT_OVER[why], detail=detail)


async def _moved(
    parts: ApiContext, found: DagApplied | DagPreview | DagNotApplied, after: Dag | None = None
) -> Answer:
    if isinstance(found, DagNotApplied):
        problem = conflict(
            found.why.value,
            "The change would invalidate tasks that wait or run.",
            detail='Wait for them to end, or send "force": true, which cancels it.',
        )
        problem.breaks = _breaks(found.breaks)
        return problem
    answer = AppliedAnswer(
        version=found.version_id,
        hash=found.hash,
        is_changed=found.is_changed,
        building=list(found.building),
        cancelled=0,
        before=found.before,
        returned=list(found.returned),
        resumed=list(found.resumed),
        losses=[
            LossAnswer(
                dataset=each.dataset, job=each.job, publications=each.publications, lost=each.lost
            )
            for each in found.losses
        ],
    )
    match found:
        case DagApplied():
            parts.kick()
            answer.cancelled = found.cancelled
        case DagPreview():
            answer.is_dry_run = True
            answer.breaks = _breaks(found.breaks)
    before = await _read(parts, found.before) if found.before is not None else Dag(())
    if after is None and found.version_id is not None:
        after = await _read(parts, found.version_id)
    if before is not None and after is not None:
        answer.changes = await asyncio.to_thread(_changes, before, after)
    return answer


async def _read(parts: ApiContext, version_id: int) -> Dag | None:
    """What a version says; None if an earlier release could read it, and this one cannot."""
    text = await parts.deployment.text(version_id)
    if text is None:
        return None
    try:
        return await asyncio.to_thread(
            parse_stored, text.source, f"version {version_id}", files=text.files
        )
    except DagError:
        return None


def _changes(before: Dag, after: Dag) -> DagChangesAnswer:
    found = diff(before, after)
    return DagChangesAnswer(
        added=list(found.added),
        removed=list(found.removed),
        changed={
            name: ChangeAnswer(fields=list(each.fields), keeps_generation=each.keeps_generation)
            for name, each in found.changed.items()
        },
        rebuilt=list(found.rebuilt),
    )


def _breaks(found: Sequence[ObsoletedWork]) -> list[BreakAnswer]:
    return [
        BreakAnswer(
            job=each.job,
            generation=each.generation,
            waiting=each.waiting,
            running=each.running,
            backfills=each.backfills,
        )
        for each in found
    ]


def _version(found: DagVersion) -> VersionAnswer:
    return VersionAnswer(
        id=found.id,
        hash=found.hash,
        created_at=found.created_at,
        is_current=found.is_current,
        since=found.since,
    )
