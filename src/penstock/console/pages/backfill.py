"""The pages of backfills: the list, the form with its preview, and the progress of one.

A form is sent with GET to the same page, which then shows what the backfill would create, or
what is wrong with a field. Only the button below that starts it; its form has a request id that
was made with the page, so that sending it twice is one backfill. Nothing is kept in between.

Partitions are a list of keys, days (each a key such as 2026-01-31), or ranges of numbers from a
start to an end by a step. The list has a bound, as it travels in the address of the preview;
longer ones are for the command line.

A backfill is done when all of its tasks have ended, in whatever way, so computed partitions are
counted apart from cancelled and dead ones. Only if all were computed is it shown as done;
otherwise it is incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from penstock.console.pages.base import (
    ActionResult,
    ConsolePage,
    FormAction,
    PageNotFound,
    PageRequest,
    call_api,
    parse_form,
    parse_id,
    split_lines,
)
from penstock.console.renderer import counted, number, plural, share
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.control_endpoints import (
    cancel_backfill,
    create_backfill,
    pause_backfill,
    replay_tasks,
    resume_backfill,
)
from penstock.dispatcher.api.endpoints import ApiCall, Handler, HttpReply
from penstock.dispatcher.backfills import BackfillKind, BackfillPlan, BackfillRefused
from penstock.dispatcher.views.backfills import (
    LISTED_MAX,
    THERE_MAX,
    AboutBackfill,
    BackfillTarget,
    BackfillViews,
)
from penstock.kernel.entropy import new_id
from penstock.kernel.errors import InvalidInput
from penstock.protocol.base import Answer, NumberParams
from penstock.protocol.problem import Problem
from penstock.protocol.steering import BackfillAnswer, BackfillAsk, TaskIdsAsk
from penstock.protocol.work import ResultsAnswer


def ended_count(found: BackfillAnswer) -> int:
    """How many of its partitions have a task that is over, well or not."""
    return max(0, found.planned - found.open)


def computed_count(found: BackfillAnswer) -> int:
    """How many of its partitions were computed."""
    return max(0, ended_count(found) - found.dead - found.cancelled)


def backfill_word(found: BackfillAnswer) -> str:
    """Its state; one that is over and has not computed everything is incomplete."""
    return (
        "incomplete" if found.state == "done" and (found.dead or found.cancelled) else found.state
    )


def backfill_sentence(found: BackfillAnswer) -> str:
    """How far it is, or what it has come to."""
    whole = found.partitions
    match found.state:
        case "done":
            if found.dead or found.cancelled:
                return f"Completed. Of {counted(whole, 'partition')} {_parts(found)}."
            return "No partitions to compute." if not whole else _all(whole)
        case "cancelled":
            return f"Cancelled. Of {counted(whole, 'partition')} {_parts(found)}."
    over = ended_count(found)
    lost = ", ".join(_lost(found))
    said = f"{number(over)} of {number(whole)} {plural(over, 'is', 'are')} settled"
    return f"{said}, {share(over, whole)}{f': {lost}' if lost else ''}."


def _all(count: int) -> str:
    return "Computed." if count == 1 else f"All {number(count)} computed."


def _parts(found: BackfillAnswer) -> str:
    done = computed_count(found)
    said = [f"{number(done)} {plural(done, 'was', 'were')} computed", *_lost(found)]
    if found.open:
        said.append(f"{number(found.open)} {plural(found.open, 'is', 'are')} not settled yet")
    if left := max(0, found.partitions - found.planned):
        said.append(f"{number(left)} {plural(left, 'was', 'were')} not started")
    return ", ".join(said)


def _lost(found: BackfillAnswer) -> list[str]:
    said = []
    if found.cancelled:
        said.append(f"{number(found.cancelled)} {plural(found.cancelled, 'was', 'were')} cancelled")
    if found.dead:
        said.append(f"{number(found.dead)} {plural(found.dead, 'is', 'are')} dead")
    return said


FIELDS: Final = (
    *("job", "by", "keys", "first_day", "last_day"),
    *("start", "end", "step", "concurrency"),
)
KEYS_CHARACTERS_MAX: Final = 20_000
DAYS_MAX: Final = 100_000
KEYS_SHOWN_MAX: Final = 3
"""How many of the first keys are shown."""
_NAMES: Final = {
    "job": "The job",
    "keys": "A key",
    "start": "The start",
    "end": "The end",
    "step": "The step",
    "concurrency": "Concurrency",
    "request_id": "The request",
}


@dataclass(frozen=True, slots=True)
class BackfillKeys:
    """Some of the partitions of a plan: the first ones, and the last."""

    first: list[str]
    last: str
    """Empty if it is one of the first."""


def way_of(fields: Mapping[str, str]) -> str:
    """How a form names its partitions: `keys`, `days` or `ranges`."""
    by = fields.get("by", "")
    if by in ("keys", "days", "ranges"):
        return by
    if fields.get("first_day"):
        return "days"
    return "ranges" if fields.get("start") else "keys"


def backfill_ask(fields: Mapping[str, str], *, request_id: str | None = None) -> BackfillAsk:
    """What the API is asked; `InvalidInput` with a sentence about a field that is wrong."""
    said: dict[str, object] = {
        "job": fields.get("job", ""),
        "concurrency": fields.get("concurrency", ""),
        "request_id": request_id,
    }
    match way_of(fields):
        case "days":
            said["keys"] = _days(fields)
        case "ranges":
            for name, shown in (("start", "a start"), ("end", "an end"), ("step", "a step")):
                said[name] = fields.get(name, "")
                if not fields.get(name, "").strip():
                    raise InvalidInput(f"Ranges need {shown}.")
        case _:
            said["keys"] = _keys(fields.get("keys", ""))
    if not fields.get("job", "").strip():
        raise InvalidInput("Choose the job that computes the partitions.")
    return parse_form(BackfillAsk, said, names=_NAMES)


def _keys(text: str) -> list[str]:
    if len(text) > KEYS_CHARACTERS_MAX:
        raise InvalidInput(
            f"A list in the console has {KEYS_CHARACTERS_MAX:,} characters at most.",
            hint="Use `penstock backfill start JOB --keys-file FILE` for a longer one.",
        )
    found = split_lines(text)
    if not found:
        raise InvalidInput("Name at least one partition, one per line.")
    return found


def _days(fields: Mapping[str, str]) -> list[str]:
    first = _day(fields.get("first_day", ""), name="The first day")
    # One day alone is its own last.
    last = _day(fields.get("last_day", "").strip() or first.isoformat(), name="The last day")
    count = (last - first).days + 1
    if count < 1:
        raise InvalidInput("The first day has to be before the last; change one of them.")
    if count > DAYS_MAX:
        raise InvalidInput(f"That is {count:,} days; the maximum is {DAYS_MAX:,}.")
    return [(first + timedelta(days=each)).isoformat() for each in range(count)]


def _day(text: str, *, name: str) -> date:
    try:
        return date.fromisoformat(text.strip())
    except ValueError:
        raise InvalidInput(f"{name} must be a date such as 2026-01-31.") from None


def keys_of(plan: BackfillPlan) -> BackfillKeys:
    """The first partitions of a plan, and the last."""
    if plan.kind is BackfillKind.KEYS:
        first, last = list(plan.keys[:KEYS_SHOWN_MAX]), plan.keys[-1]
    else:
        shown = range(min(KEYS_SHOWN_MAX, plan.partitions))
        first = [range_key(plan.start, plan.end, plan.step, place=each) for each in shown]
        last = range_key(plan.start, plan.end, plan.step, place=plan.partitions - 1)
    return BackfillKeys(first, "" if plan.partitions <= KEYS_SHOWN_MAX else last)


def range_key(start: int, end: int, step: int, *, place: int) -> str:
    """The key of the partition at a place of a plan of ranges."""
    begin = start + place * step
    return f"{begin}-{min(end, begin + step)}"


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
    plan: BackfillPlan
    keys: BackfillKeys
    place: BackfillTarget
    is_counted: bool
    """Whether what is there was counted to its end."""
    new: int
    concurrency: int
    request_id: str


async def _load_all(parts: ApiContext, _: PageRequest) -> Mapping[str, Any] | PageNotFound:
    found = await parts.backfills.list(limit=SHOWN_MAX + 1)
    overall = await parts.views.overall()
    return {
        "rows": [
            (each, backfill_word(each), ended_count(each)) for each in found.backfills[:SHOWN_MAX]
        ],
        "is_cut": len(found.backfills) > SHOWN_MAX,
        "shown_max": SHOWN_MAX,
        "has_jobs": any(each.activation != "source" for each in overall.jobs),
        "new": NEW,
    }


async def _load_new(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
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


async def _preview(parts: ApiContext, ask: BackfillAsk) -> _Preview | str:
    """What a backfill would do, or why there can be none."""
    plan = await parts.backfills.foresee(ask)
    if isinstance(plan, BackfillRefused):
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


async def _load_one(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    backfill_id = parse_id(asked.path["id"])
    found = await parts.backfills.get(backfill_id) if backfill_id else None
    about = await BackfillViews(parts.database).about(backfill_id) if found else None
    if found is None or about is None:
        hint = "The list of backfills shows the latest."
        return PageNotFound(f"There is no backfill {asked.path['id'][:40]}.", hint)
    over = ended_count(found)
    return {
        "backfill": found,
        "about": about,
        "word": backfill_word(found),
        "sentence": backfill_sentence(found),
        "ended": over,
        "computed": computed_count(found),
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


async def _start(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    request_id = asked.query.get("request_id", "").strip() or None
    ask = backfill_ask(asked.query, request_id=request_id)
    answer = await create_backfill(parts, ApiCall(ask=ask))
    if isinstance(answer, BackfillAnswer):
        count = counted(answer.partitions, "partition")
        return ActionResult(f"The backfill of {count} has started.", f"/backfills/{answer.id}")
    title = answer.title if isinstance(answer, Problem) else "The backfill was not started."
    return ActionResult(title, to, is_well=False)


async def _pause(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    told = "The backfill is paused: no more tasks are created; existing tasks continue."
    return await _steer(parts, asked, to, pause_backfill, told)


async def _resume(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    return await _steer(parts, asked, to, resume_backfill, "The backfill is resumed.")


async def _cancel(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    told = "The backfill and its waiting tasks are cancelled; running tasks were asked to stop."
    return await _steer(parts, asked, to, cancel_backfill, told)


async def _steer(
    parts: ApiContext, asked: PageRequest, to: str, handler: Handler, told: str
) -> ActionResult:
    params = parse_form(NumberParams, {"id": asked.path["id"]}, names={"id": "The backfill"})
    return await call_api(parts, handler, to, params=params, told=told)


async def _replay(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    """Queue the dead tasks of a backfill again, in rounds."""
    params = parse_form(NumberParams, {"id": asked.path["id"]}, names={"id": "The backfill"})
    views, replayed = BackfillViews(parts.database), 0
    for _ in range(_ROUNDS_MAX):
        ids = await views.dead(params.id, limit=_ROUND)
        if not ids:
            break
        answer = await replay_tasks(parts, ApiCall(ask=TaskIdsAsk(tasks=list(ids))))
        body = answer.body if isinstance(answer, HttpReply) else answer
        if isinstance(body, Problem):
            return ActionResult(f"{body.title} {body.detail}".strip(), to, is_well=False)
        queued = _queued(body)
        replayed += queued
        # What was refused stays dead, and would be found again.
        if queued < _ROUND:
            break
    if not replayed:
        return ActionResult("No dead tasks; nothing was replayed.", to)
    verb = plural(replayed, "is", "are")
    return ActionResult(f"{counted(replayed, 'task')} {verb} queued for replay.", to)


def _queued(body: Answer | bytes) -> int:
    """How many of a round are queued again; somebody may have replayed some before."""
    if not isinstance(body, ResultsAnswer):
        return 0
    return sum(each.status < 400 for each in body.results)


PAGES: Final = (
    ConsolePage(PATH, "backfills", _load_all, live=("list",), section="operations"),
    ConsolePage(NEW, "backfill_new", _load_new, section="operations", query=(*FIELDS, "preview")),
    ConsolePage(
        "/backfills/{id:path}",
        "backfill",
        _load_one,
        live=("head", "progress", "dead", "running", "beside"),
        section="operations",
    ),
)
ACTIONS: Final = (
    FormAction("/operations/backfills/start", _start, fields=(*FIELDS, "request_id")),
    FormAction("/backfills/{id}/pause", _pause),
    FormAction("/backfills/{id}/resume", _resume),
    FormAction("/backfills/{id}/cancel", _cancel),
    FormAction("/backfills/{id}/replay", _replay),
)
