"""Backfills: all of them, the form and what it would do, and one as it goes on.

A form is sent with GET to the same page, which then shows what the backfill would create, or what
is wrong with a field. Only the button below that starts it; its form has a request id that was made
with the page, so that sending it twice is one backfill. Nothing is kept in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from penstock.console.pages.acting import act, asked_as, number_of
from penstock.console.pages.base import Action, Asked, Done, Missing, Page
from penstock.console.pages.outcome import computed, ended, sentence_of, word_of
from penstock.console.pages.planning import (
    FIELDS,
    KEYS_CHARACTERS_MAX,
    Keys,
    backfill_ask,
    keys_of,
    range_key,
    way_of,
)
from penstock.console.rendering import counted, plural
from penstock.dispatcher.api.endpoints import Call, Handler, Reply
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.steering import (
    cancel_backfill,
    create_backfill,
    pause_backfill,
    replay_tasks,
    resume_backfill,
)
from penstock.dispatcher.backfills.plans import Plan, Refused
from penstock.dispatcher.views.backfills import (
    LISTED_MAX,
    THERE_MAX,
    AboutBackfill,
    BackfillViews,
    Place,
)
from penstock.dispatcher.wire.asking import NumberParams
from penstock.dispatcher.wire.base import Answer
from penstock.dispatcher.wire.problem import Problem
from penstock.dispatcher.wire.steering import BackfillAnswer, BackfillAsk, TaskIdsAsk
from penstock.dispatcher.wire.work import ResultsAnswer
from penstock.kernel.entropy import new_id
from penstock.kernel.errors import InvalidInput

PATH: Final = "/operations/backfills"
NEW: Final = f"{PATH}/new"
SHOWN_MAX: Final = 100
_ROUND: Final = 1000
_ROUNDS_MAX: Final = 20
_PACE_MIN: Final = 5
"""After how many tasks the time that is left is guessed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preview:
    """What a backfill would create."""

    job: str
    plan: Plan
    keys: Keys
    place: Place
    is_counted: bool
    """Whether what is there was counted to its end."""
    new: int
    concurrency: int
    request_id: str


async def _load_all(parts: Parts, _: Asked) -> Mapping[str, Any] | Missing:
    found = await parts.backfills.list(limit=SHOWN_MAX + 1)
    overall = await parts.views.overall()
    return {
        "rows": [(each, word_of(each), ended(each)) for each in found.backfills[:SHOWN_MAX]],
        "is_cut": len(found.backfills) > SHOWN_MAX,
        "shown_max": SHOWN_MAX,
        "has_jobs": any(each.activation != "source" for each in overall.jobs),
        "new": NEW,
    }


async def _load_new(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
    overall = await parts.views.overall()
    fields = {name: asked.query.get(name, "") for name in FIELDS}
    said: dict[str, Any] = {
        "jobs": [each.name for each in overall.jobs if each.activation != "source"],
        "fields": fields,
        "by": way_of(fields),
        "characters_max": KEYS_CHARACTERS_MAX,
        "wrong": "",
        "preview": None,
        "path": PATH,
        "new": NEW,
    }
    if not asked.query.get("preview"):
        return said
    try:
        preview = await _preview(parts, backfill_ask(fields))
    except InvalidInput as error:
        return {**said, "wrong": f"{error.message} {error.hint}".strip()}
    if isinstance(preview, str):
        return {**said, "wrong": preview}
    kept = {name: value for name, value in fields.items() if value}
    return {**said, "preview": preview, "kept": kept, "back": f"{NEW}?{urlencode(kept)}"}


async def _preview(parts: Parts, ask: BackfillAsk) -> _Preview | str:
    """What a backfill would do, or why there can be none."""
    plan = await parts.backfills.foresee(ask)
    if isinstance(plan, Refused):
        return plan.detail
    place = await BackfillViews(parts.database).place(ask.job, plan)
    if place is None:
        return f"The DAG in force has no job {ask.job}."
    return _Preview(
        job=ask.job,
        plan=plan,
        keys=keys_of(plan),
        place=place,
        is_counted=place.there < THERE_MAX,
        new=max(0, plan.partitions - place.there),
        concurrency=ask.concurrency,
        request_id=f"console:{new_id(parts.entropy)}",
    )


async def _load_one(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
    backfill_id = number_of(asked.path["id"])
    found = await parts.backfills.get(backfill_id) if backfill_id else None
    about = await BackfillViews(parts.database).about(backfill_id) if found else None
    if found is None or about is None:
        hint = "The list of backfills has the latest of them."
        return Missing(f"There is no backfill {asked.path['id'][:40]}.", hint)
    over = ended(found)
    return {
        "backfill": found,
        "about": about,
        "word": word_of(found),
        "sentence": sentence_of(found),
        "ended": over,
        "computed": computed(found),
        "waiting": max(0, found.open - about.running),
        "left": max(0, found.partitions - found.planned),
        "is_going": found.state in ("running", "paused"),
        "first": _first(about),
        "last": _last(found, about),
        "seconds_left": _seconds_left(found, about, over),
        "dead_more": max(0, found.dead - LISTED_MAX),
        "running_more": max(0, about.running - LISTED_MAX),
        "path": PATH,
    }


def _first(about: AboutBackfill) -> str:
    if about.plan.get("kind") == "ranges":
        return range_key(about.plan["start"], about.plan["end"], about.plan["step"], place=0)
    return about.first_key or ""


def _last(found: BackfillAnswer, about: AboutBackfill) -> str:
    if about.plan.get("kind") == "ranges":
        place = -(-(about.plan["end"] - about.plan["start"]) // about.plan["step"]) - 1
        return range_key(about.plan["start"], about.plan["end"], about.plan["step"], place=place)
    return about.last_key or "" if found.partitions > 1 else ""


def _seconds_left(found: BackfillAnswer, about: AboutBackfill, over: int) -> float | None:
    """How long it goes on at the pace that it had so far; None if nobody can tell."""
    if found.state != "running" or over < _PACE_MIN or about.paused or over >= found.partitions:
        return None
    so_far = (about.now - found.created_at).total_seconds()
    return so_far / over * (found.partitions - over)


async def _start(parts: Parts, asked: Asked, to: str) -> Done:
    request_id = asked.query.get("request_id", "").strip() or None
    ask = backfill_ask(asked.query, request_id=request_id)
    answer = await create_backfill(parts, Call(ask=ask))
    if isinstance(answer, BackfillAnswer):
        count = counted(answer.partitions, "partition")
        return Done(f"The backfill of {count} has started.", f"/backfills/{answer.id}")
    title = answer.title if isinstance(answer, Problem) else "It was not started."
    return Done(title, to, is_well=False)


async def _pause(parts: Parts, asked: Asked, to: str) -> Done:
    told = "The backfill is paused: no more tasks are made, and those that are there go on."
    return await _steer(parts, asked, to, pause_backfill, told)


async def _resume(parts: Parts, asked: Asked, to: str) -> Done:
    return await _steer(parts, asked, to, resume_backfill, "The backfill goes on.")


async def _cancel(parts: Parts, asked: Asked, to: str) -> Done:
    told = "The backfill is cancelled: what waited is cancelled, and what runs was asked to stop."
    return await _steer(parts, asked, to, cancel_backfill, told)


async def _steer(parts: Parts, asked: Asked, to: str, handler: Handler, told: str) -> Done:
    params = asked_as(NumberParams, {"id": asked.path["id"]}, names={"id": "The backfill"})
    return await act(parts, handler, to, params=params, told=told)


async def _replay(parts: Parts, asked: Asked, to: str) -> Done:
    """Queue the dead tasks of a backfill again, in rounds."""
    params = asked_as(NumberParams, {"id": asked.path["id"]}, names={"id": "The backfill"})
    views, replayed = BackfillViews(parts.database), 0
    for _ in range(_ROUNDS_MAX):
        ids = await views.dead(params.id, limit=_ROUND)
        if not ids:
            break
        answer = await replay_tasks(parts, Call(ask=TaskIdsAsk(tasks=list(ids))))
        body = answer.body if isinstance(answer, Reply) else answer
        if isinstance(body, Problem):
            return Done(f"{body.title} {body.detail}".strip(), to, is_well=False)
        queued = _queued(body)
        replayed += queued
        # What was refused stays dead, and would be found again.
        if queued < _ROUND:
            break
    if not replayed:
        return Done("No task of it is dead; nothing was replayed.", to)
    verb = plural(replayed, "is", "are")
    return Done(f"{counted(replayed, 'task')} {verb} queued again.", to)


def _queued(body: Answer | bytes) -> int:
    """How many of a round are queued again; somebody may have replayed some before."""
    if not isinstance(body, ResultsAnswer):
        return 0
    return sum(each.status < 400 for each in body.results)


PAGES: Final = (
    Page(PATH, "backfills", _load_all, live=("list",), section="operations"),
    Page(NEW, "backfill_new", _load_new, section="operations", query=(*FIELDS, "preview")),
    Page(
        "/backfills/{id:path}",
        "backfill",
        _load_one,
        live=("head", "progress", "dead", "running", "beside"),
        section="operations",
    ),
)
ACTIONS: Final = (
    Action("/operations/backfills/start", _start, fields=(*FIELDS, "request_id")),
    Action("/backfills/{id}/pause", _pause),
    Action("/backfills/{id}/resume", _resume),
    Action("/backfills/{id}/cancel", _cancel),
    Action("/backfills/{id}/replay", _replay),
)
