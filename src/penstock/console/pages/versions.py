"""The versions of the DAG: which is in force, which were, and going back to one of them.

Going back is two steps. The first names a version, or *before* for the one that was in force until
the present one, and shows what would become of the jobs; it asks what `penstock dag rollback
--dry-run` asks, and changes nothing. The second is a form with that version, and with the one that
was in force when somebody looked: if another is by now, nothing is done, and they look again. So a
form that is sent twice goes there, and not there and back.

The page is not live: comparing versions reads their texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.console.pages.base import (
    ActionResult,
    ConsolePage,
    FormAction,
    PageNotFound,
    PageRequest,
    call_api,
    parse_form,
    parse_id,
    problem_sentence,
)
from penstock.console.renderer import number
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.dag_endpoints import rollback
from penstock.dispatcher.api.endpoints import ApiCall, HttpReply
from penstock.protocol.base import Answer
from penstock.protocol.dags import AppliedAnswer, RollbackAsk
from penstock.protocol.problem import Problem

PATH: Final = "/operations/versions"
BEFORE: Final = "before"
VERSIONS_MAX: Final = 50
_JOBS_SHOWN: Final = 20


async def _load(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    versions = await parts.deployment.versions(limit=VERSIONS_MAX + 1)
    wanted = asked.query.get("version", "").strip()
    said: dict[str, Any] = {
        "versions": versions[:VERSIONS_MAX],
        "is_cut": len(versions) > VERSIONS_MAX,
        "foreseen": None,
        "effects": (),
        "wrong": "",
        "path": PATH,
        "before": BEFORE,
    }
    if not wanted:
        return said
    version = None if wanted == BEFORE else parse_id(wanted)
    if version == 0:
        return {**said, "wrong": "Not a version number."}
    ask = RollbackAsk(version=version, dry_run=True)
    answer = _body(await rollback(parts, ApiCall(ask=ask)))
    if isinstance(answer, Problem):
        return {**said, "wrong": problem_sentence(answer)}
    assert isinstance(answer, AppliedAnswer), "a rollback has no other answer"
    return {**said, "foreseen": answer, "effects": tuple(effects(answer))}


def _body(answer: Answer | HttpReply) -> Answer | bytes:
    return answer.body if isinstance(answer, HttpReply) else answer


def effects(answer: AppliedAnswer) -> Iterator[tuple[str, str]]:
    """What becomes of the jobs, each with a name for it."""
    changes = answer.changes
    if changes is None:
        yield "Jobs", "This release cannot read the DAG in force, so no comparison is possible."
    else:
        for name, jobs in (
            ("Restored jobs", changes.added),
            ("Reverted jobs", [*changes.changed]),
            ("Removed jobs; their data stays", changes.removed),
        ):
            if jobs:
                yield name, _listed(jobs)
    if answer.building:
        yield "Rebuilt jobs; readers see the current data until then", _listed(answer.building)
    for loss in answer.losses:
        yield (
            f"Publications of {loss.dataset} that readers would lose",
            f"{number(loss.lost)} of {number(loss.publications)}: they cannot be rebuilt",
        )
    for each in answer.breaks:
        counts = {"waiting": each.waiting, "running": each.running, "backfills": each.backfills}
        work = ", ".join(f"{number(count)} {what}" for what, count in counts.items() if count)
        yield f"Obsolete work of {each.job}", f"{work}: will be cancelled"


def _listed(jobs: list[str]) -> str:
    more = f" and {number(len(jobs) - _JOBS_SHOWN)} more" if len(jobs) > _JOBS_SHOWN else ""
    return f"{', '.join(jobs[:_JOBS_SHOWN])}{more}"


async def _roll_back(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    names = {"version": "The version"}
    ask = parse_form(RollbackAsk, {"version": asked.query.get("version", "")}, names=names)
    if ask.version is None:
        return ActionResult("Choose a version.", to, is_well=False)
    present = await parts.deployment.current()
    if present is not None and present.version.id not in (
        ask.version,
        parse_id(asked.query.get("present", "")),
    ):
        told = f"Version {present.version.id} is in force by now. Preview the rollback again."
        return ActionResult(told, f"{PATH}?version={ask.version}", is_well=False)
    return await call_api(parts, rollback, PATH, ask=ask, told=_told)


def _told(answer: AppliedAnswer) -> str:
    if not answer.is_changed:
        return f"Version {answer.version} is in force already."
    said = f"Version {answer.version} of the DAG is in force."
    if answer.cancelled:
        said += f" Obsolete tasks cancelled: {number(answer.cancelled)}."
    return said


PAGE: Final = ConsolePage(PATH, "versions", _load, section="operations", query=("version",))
ACTIONS: Final = (FormAction(f"{PATH}/roll-back", _roll_back, fields=("version", "present")),)
