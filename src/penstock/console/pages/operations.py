"""The pages of operations and of alerts.

Operations: pauses, workers, operators with their limits, parked rows of the outbox.

Pausing and resuming everything is one call each; the sentence afterwards says what it did.
Sources, backfills, events, keys and the audit have tabs, and modules, of their own. A load is
six short statements; lists are cut, with a sentence.

Alerts: open ones up to a bound, past ones a page at a time, the rules, and the notices that were
sent. Rules and destinations are those of the dispatcher that evaluates alerts, which writes them
down with every turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.console.pages.base import (
    ActionResult,
    ConsolePage,
    FormAction,
    PageNotFound,
    PageRequest,
    call_api,
    parse_form,
    split_lines,
)
from penstock.console.renderer import number
from penstock.dispatcher.api import control_endpoints
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.control_endpoints import (
    limit_operator,
    pause_job,
    resume_job,
    retry_outbox,
)
from penstock.dispatcher.views.status import AlertViews, OperationViews, WorkerRow
from penstock.protocol.base import NameParams
from penstock.protocol.steering import (
    AlertState,
    EverythingAnswer,
    JobPausesAnswer,
    NoticeAnswer,
    NoticeState,
    OperatorLimitAnswer,
    OperatorLimitAsk,
    OutboxRetryAnswer,
    OutboxRetryAsk,
    PauseAnswer,
    PauseAsk,
)

WORKERS_MAX: Final = 100
PAUSES_MAX: Final = 50
OPERATORS_MAX: Final = 100
PARKED_MAX: Final = 50
_RETRY_MAX: Final = 1000
_BY_PEOPLE: Final = "operator"
_MANY: Final = 10_000
_OPEN_ALERTS_MAX: Final = 200
_ALERTS_PAGE: Final = 50
_BEFORE_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _AWorker:
    """A worker, as it is shown."""

    said: WorkerRow
    state: str
    runtimes: str
    concurrency: int | None
    operators: Sequence[str]
    more: int
    """How many operators are not shown."""


async def _load(parts: ApiContext, _: PageRequest) -> Mapping[str, Any] | PageNotFound:
    overall = await parts.views.overall()
    workers = await OperationViews(parts.database).workers(limit=WORKERS_MAX + 1)
    operators = (await parts.metrics.operators()).operators
    pressures = await parts.pressures.answer()
    parked = (await parts.outbox.parked()).parked
    counts = await parts.outbox.counts()
    by_people = {each.job for each in pressures.pauses if each.cause == _BY_PEOPLE}
    jobs = [each.name for each in overall.jobs]
    return {
        "workers": [_worker(each) for each in workers[:WORKERS_MAX]],
        "workers_more": len(workers) > WORKERS_MAX,
        "workers_heard": overall.workers,
        "operators": operators[:OPERATORS_MAX],
        "operators_more": max(0, len(operators) - OPERATORS_MAX),
        "full": sum(_is_full(each.in_flight, each.in_flight_max) for each in operators),
        "pauses": [_pause(each) for each in pressures.pauses[:PAUSES_MAX]],
        "pauses_more": max(0, len(pressures.pauses) - PAUSES_MAX),
        "paused_jobs": len({each.job for each in pressures.pauses}),
        "by_people": len(by_people),
        "jobs": jobs,
        "not_paused": sum(each not in by_people for each in jobs),
        "parked": parked[:PARKED_MAX],
        "parked_ids": [each.id for each in parked[:_RETRY_MAX]],
        "outbox_pending": counts.pending,
        "outbox_parked": counts.parked,
        "many": _MANY,
    }


def _worker(said: WorkerRow) -> _AWorker:
    runtimes = said.about.get("runtimes")
    concurrency = said.about.get("concurrency")
    return _AWorker(
        said=said,
        state="ok" if said.is_heard else "stopped" if said.is_gone else "silent",
        runtimes=", ".join(str(each) for each in runtimes) if isinstance(runtimes, list) else "",
        concurrency=concurrency if isinstance(concurrency, int) else None,
        operators=said.operators[:3],
        more=max(0, len(said.operators) - 3),
    )


def _is_full(in_flight: int, most: int | None) -> bool:
    return most is not None and in_flight >= most


def _pause(said: PauseAnswer) -> tuple[PauseAnswer, bool]:
    """A pause, and whether a person has made it."""
    return said, said.cause == _BY_PEOPLE


async def _pause_everything(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    reason = asked.query.get("reason", "").strip() or "All jobs were paused in the console."
    ask = parse_form(PauseAsk, {"reason": reason}, names={"reason": "The reason"})
    return await call_api(parts, control_endpoints.pause_everything, to, ask=ask, told=_all_paused)


def _all_paused(answer: EverythingAnswer) -> str:
    before = answer.paused_by_people - len(answer.jobs)
    if not answer.paused_by_people:
        return "There is no job to pause."
    if not answer.jobs:
        return f"{_jobs(before)} already paused; nothing was changed."
    also = f" {_jobs(before, was=True)} already paused." if before else ""
    return f"{_jobs(len(answer.jobs))} paused now.{also} Running tasks finish."


async def _resume_everything(parts: ApiContext, _: PageRequest, to: str) -> ActionResult:
    return await call_api(parts, control_endpoints.resume_everything, to, told=_all_resumed)


def _all_resumed(answer: EverythingAnswer) -> str:
    left = answer.paused_by_pressure
    also = f" {_jobs(left)} still paused by backpressure." if left else ""
    if not answer.jobs:
        return f"No job was paused manually; nothing was changed.{also}"
    return f"{_jobs(len(answer.jobs))} resumed.{also}"


def _jobs(count: int, *, was: bool = False) -> str:
    verbs = ("was", "were") if was else ("is", "are")
    return f"1 job {verbs[0]}" if count == 1 else f"{number(count)} jobs {verbs[1]}"


async def _pause_job(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    params = _job_of(asked)
    reason = asked.query.get("reason", "").strip() or "Paused in the console."
    ask = parse_form(PauseAsk, {"reason": reason}, names={"reason": "The reason"})
    told = f"{params.name} is paused. Running tasks finish."
    return await call_api(parts, pause_job, to, ask=ask, params=params, told=told)


async def _resume_job(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    return await call_api(parts, resume_job, to, params=_job_of(asked), told=_resumed)


def _job_of(asked: PageRequest) -> NameParams:
    return parse_form(NameParams, {"name": asked.query.get("job", "")}, names={"name": "The job"})


def _resumed(answer: JobPausesAnswer) -> str:
    if answer.pauses:
        return f"{answer.job} is resumed, and still paused by backpressure."
    return f"{answer.job} is resumed."


async def _limit(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    params = parse_form(
        NameParams, {"name": asked.query.get("operator", "")}, names={"name": "The operator"}
    )
    said = asked.query.get("in_flight_max", "").strip()
    names = {"in_flight_max": "The limit"}
    # Nothing is no limit, which the API wants to be said.
    ask = parse_form(OperatorLimitAsk, {"in_flight_max": said}, names=names) if said else None
    ask = ask or OperatorLimitAsk(in_flight_max=None)
    return await call_api(parts, limit_operator, to, ask=ask, params=params, told=_limited)


def _limited(answer: OperatorLimitAnswer) -> str:
    if answer.in_flight_max is None:
        return f"{answer.name} has no limit now."
    if answer.in_flight_max == 1:
        return f"One task of {answer.name} runs at a time now."
    return f"At most {number(answer.in_flight_max)} tasks of {answer.name} run at a time now."


async def _retry(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    ids = split_lines(asked.query.get("ids", "").replace(",", "\n"))
    ask = parse_form(OutboxRetryAsk, {"ids": ids}, names={"ids": "The messages to retry"})
    return await call_api(parts, retry_outbox, to, ask=ask, told=_retried)


def _retried(answer: OutboxRetryAnswer) -> str:
    if not answer.retried:
        return "No longer parked; nothing was changed."
    which = "One is" if answer.retried == 1 else f"{number(answer.retried)} are"
    return f"{which} being retried."


async def _load_alerts(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    said = asked.query.get("before", "")
    before = int(said) if said.isascii() and said.isdecimal() and len(said) < 20 else None
    if said and (before is None or not 0 < before <= _BEFORE_MAX):
        return PageNotFound("There is no such page of alerts.", "The first page has the latest.")
    views = AlertViews(parts.database)
    found = await views.alerts(state=AlertState.OPEN, limit=_OPEN_ALERTS_MAX)
    past = await views.alerts(state=AlertState.OVER, before=before, limit=_ALERTS_PAGE)
    return {
        "open": found.alerts,
        "is_cut": found.before is not None,
        "past": past.alerts,
        "older": f"/alerts?before={past.before}" if past.before is not None else "",
        "is_first": before is None,
        "rules": found.rules,
        "destinations": found.destinations,
        "judged_at": found.judged_at,
        "told_of": {each.id: _notices_told(each.notices) for each in (*found.alerts, *past.alerts)},
        "lost": [
            (alert, each)
            for alert in (*found.alerts, *past.alerts)
            for each in alert.notices
            if each.state is NoticeState.GIVEN_UP
        ],
    }


def _notices_told(notices: Sequence[NoticeAnswer]) -> Sequence[tuple[str, str]]:
    """What has become of notices: words, and the class that they are shown in."""
    shown: list[tuple[str, str]] = []
    for each in notices:
        what = "" if each.what == "opened" else ", resolved"
        match each.state:
            case NoticeState.SENT:
                shown.append((f"{each.destination}{what}", "quiet"))
            case NoticeState.DUE:
                why = f": {each.last_error}" if each.last_error else ""
                shown.append((f"{each.destination}{what}: pending{why}", ""))
            case NoticeState.GIVEN_UP:
                why = each.last_error or "unknown reason"
                shown.append((f"{each.destination}{what}: failed: {why}", "wrong"))
    return shown


PAGE: Final = ConsolePage(
    "/operations",
    "operations",
    _load,
    live=("figures", "levers", "pauses", "workers", "operators", "outbox"),
)
ALERTS_PAGE: Final = ConsolePage(
    "/alerts", "alerts", _load_alerts, live=("standing", "past", "rules"), query=("before",)
)
ACTIONS: Final = (
    FormAction("/operations/pause-everything", _pause_everything, fields=("reason",)),
    FormAction("/operations/resume-everything", _resume_everything),
    FormAction("/operations/pause", _pause_job, fields=("job", "reason")),
    FormAction("/operations/resume", _resume_job, fields=("job",)),
    FormAction("/operations/limit", _limit, fields=("operator", "in_flight_max")),
    FormAction("/operations/outbox/retry", _retry, fields=("ids",)),
)
