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

from penstock.console.pages.acting import act, asked_as, number_of, sentence_of
from penstock.console.pages.base import Action, Asked, Done, Missing, Page
from penstock.console.rendering import number
from penstock.dispatcher.api.deploying import rollback
from penstock.dispatcher.api.endpoints import Call, Reply
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.wire.base import Answer
from penstock.dispatcher.wire.dags import AppliedAnswer, RollbackAsk
from penstock.dispatcher.wire.problem import Problem

PATH: Final = "/operations/versions"
BEFORE: Final = "before"
VERSIONS_MAX: Final = 50
_JOBS_SHOWN: Final = 20


async def _load(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
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
    version = None if wanted == BEFORE else number_of(wanted)
    if version == 0:
        return {**said, "wrong": "That is not the number of a version."}
    ask = RollbackAsk(version=version, dry_run=True)
    answer = _body(await rollback(parts, Call(ask=ask)))
    if isinstance(answer, Problem):
        return {**said, "wrong": sentence_of(answer)}
    assert isinstance(answer, AppliedAnswer), "a rollback has no other answer"
    return {**said, "foreseen": answer, "effects": tuple(effects(answer))}


def _body(answer: Answer | Reply) -> Answer | bytes:
    return answer.body if isinstance(answer, Reply) else answer


def effects(answer: AppliedAnswer) -> Iterator[tuple[str, str]]:
    """What becomes of the jobs, each with a name for it."""
    changes = answer.changes
    if changes is None:
        yield "Jobs", "This release cannot read what is in force, and so cannot compare."
    else:
        for name, jobs in (
            ("Jobs that come back", changes.added),
            ("Jobs as they were before", [*changes.changed]),
            ("Jobs that go; what they have made stays", changes.removed),
        ):
            if jobs:
                yield name, _listed(jobs)
    if answer.building:
        yield "Jobs that are built, and served as now until then", _listed(answer.building)
    for loss in answer.losses:
        yield (
            f"Publications of {loss.dataset} that readers would miss",
            f"{number(loss.lost)} of {number(loss.publications)}: they cannot be built anew",
        )
    for each in answer.breaks:
        counts = {"waiting": each.waiting, "running": each.running, "backfills": each.backfills}
        work = ", ".join(f"{number(count)} {what}" for what, count in counts.items() if count)
        yield f"Work of {each.job} that nobody needs then", f"{work}: is cancelled"


def _listed(jobs: list[str]) -> str:
    more = f" and {number(len(jobs) - _JOBS_SHOWN)} more" if len(jobs) > _JOBS_SHOWN else ""
    return f"{', '.join(jobs[:_JOBS_SHOWN])}{more}"


async def _roll_back(parts: Parts, asked: Asked, to: str) -> Done:
    names = {"version": "The version"}
    ask = asked_as(RollbackAsk, {"version": asked.query.get("version", "")}, names=names)
    if ask.version is None:
        return Done("Say to which version.", to, is_well=False)
    present = await parts.deployment.current()
    if present is not None and present.version.id not in (
        ask.version,
        number_of(asked.query.get("present", "")),
    ):
        told = f"Version {present.version.id} is in force by now. Look again what going back does."
        return Done(told, f"{PATH}?version={ask.version}", is_well=False)
    return await act(parts, rollback, PATH, ask=ask, told=_told)


def _told(answer: AppliedAnswer) -> str:
    if not answer.is_changed:
        return f"Version {answer.version} is in force already."
    said = f"Version {answer.version} of the DAG is in force."
    if answer.cancelled:
        said += (
            f" Tasks that nobody needs any more, and were cancelled: {number(answer.cancelled)}."
        )
    return said


PAGE: Final = Page(PATH, "versions", _load, section="operations", query=("version",))
ACTIONS: Final = (Action(f"{PATH}/roll-back", _roll_back, fields=("version", "present")),)
