"""What is the matter, by one rule: the rows of its question to findings in words. Pure.

The words of a finding are the same as long as nothing changes: times stand in them, never ages.
What tasks and users have said comes in as one line, and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

from penstock.dispatcher.alerts.rules import ABSENCE, Rule, RuleKind
from penstock.dispatcher.dag.units import duration_text

STEADY_SECONDS: Final = 60.0
"""How long an always-on source has to run before it is well again."""
DEAD_COUNTED_MAX: Final = 10_000
WORKERS: Final = "workers"
"""The subject of the rule on workers, which is about all of them."""
OUTBOX: Final = "outbox"
"""The subject of the rule on the outbox."""
_REASON_CHARACTERS_MAX: Final = 300

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule holds for a subject, or it cannot be said now whether it does."""

    rule: str
    kind: str
    subject: str
    summary: str
    path: str
    """Where the console shows it."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    is_sure: bool = True
    """False leaves an alert as it is: open if it is open."""


def statement_of(rule: Rule, *, unserved: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """The question of a rule, and what with. `unserved` are runtimes that need no workers."""
    long = {"longer_than": rule.longer_than_seconds}
    match rule.kind:
        case RuleKind.DEAD_TASKS:
            asked = {"within": rule.within_seconds, "at_least": rule.at_least}
            return "dead_tasks_of_jobs", asked
        case RuleKind.STALE_DATASET:
            return "ages_of_datasets", long
        case RuleKind.PRESSURE:
            return "lasting_pressure", long
        case RuleKind.SILENT_SOURCE:
            return "ages_of_sources", long
        case RuleKind.DEAD_SOURCE:
            return "deaths_of_sources", {"steady": STEADY_SECONDS}
        case RuleKind.NO_WORKERS:
            others = {"others": list(unserved), "if_waiting": rule.if_waiting}
            return "missing_workers", {**long, **others}
        case RuleKind.FAILURE_RATE:
            asked = {"within": rule.within_seconds, "at_least": rule.at_least}
            return "failure_rates_of_jobs", {**asked, "percent": rule.percent}
        case RuleKind.PARKED_OUTBOX:
            return "parked_messages", {"at_least": rule.at_least}


def findings_of(rule: Rule, rows: Sequence[Row], *, is_quiet: bool) -> list[Finding]:
    """What the rows of a rule's question say. Quiet is the time after an outage of our own."""
    found: dict[str, Finding] = {}
    for row in rows:
        each = _MADE[rule.kind](rule, row)
        # Of several rows about one subject the first counts.
        if each is not None and rule.is_about(each.subject) and each.subject not in found:
            found[each.subject] = each
    if not is_quiet or rule.kind not in ABSENCE:
        return list(found.values())
    return [replace(each, is_sure=False) for each in found.values()]


def _finding(
    rule: Rule,
    subject: str,
    summary: str,
    *,
    path: str,
    detail: Mapping[str, Any],
    is_sure: bool = True,
) -> Finding:
    return Finding(
        rule=rule.name,
        kind=rule.kind.value,
        subject=subject,
        summary=summary,
        path=path,
        detail=detail,
        is_sure=is_sure,
    )


def _dead_tasks(rule: Rule, row: Row) -> Finding:
    job, count, reason = row["subject"], row["count"], one_line(row["reason"])
    many = f"{count:,}{' or more' if count >= DEAD_COUNTED_MAX else ''}"
    which = f"{many} task of job {job} is" if count == 1 else f"{many} tasks of job {job} are"
    last = "" if count == 1 else ", the last one"
    path = f"/tasks?{urlencode({'status': 'dead', 'job': job})}"
    said = {"dead": count, "task_id": row["task_id"], "reason": reason}
    return _finding(rule, job, f"{which} dead{last}: {reason}", path=path, detail=said)


def _stale(rule: Rule, row: Row) -> Finding | None:
    if not row["is_stale"]:
        return None
    name, long = row["subject"], _long(rule)
    path = f"/datasets/{quote(name, safe='')}"
    last = row["at"]
    if last is None:
        made = moment(row["made_at"])
        summary = f"Dataset {name} is there since {made}, and nothing was ever published of it."
    else:
        summary = f"Nothing was published of dataset {name} since {moment(last)}, for over {long}."
    said = {"last_at": moment(last) if last else None, "longer_than": long}
    return _finding(rule, name, summary, path=path, detail=said)


def _silent(rule: Rule, row: Row) -> Finding | None:
    if not row["is_silent"]:
        return None
    name, long, last = row["subject"], _long(rule), row["at"]
    path = f"/jobs/{quote(name, safe='')}"
    if last is None:
        made = moment(row["made_at"])
        summary = f"Source {name} is there since {made}, and has never told of anything."
    else:
        summary = f"Source {name} has told of nothing since {moment(last)}, for over {long}."
    said = {"last_at": moment(last) if last else None, "longer_than": long}
    # A source that is paused was asked to be silent.
    return _finding(rule, name, summary, path=path, detail=said, is_sure=not row["is_paused"])


def _dead_source(rule: Rule, row: Row) -> Finding:
    job, task_id, reason = row["subject"], row["task_id"], one_line(row["reason"])
    summary = f"The always-on source {job} has died: {reason}"
    said = {"task_id": task_id, "reason": reason}
    return _finding(rule, job, summary, path=f"/tasks/{task_id}", detail=said)


def _pressure(rule: Rule, row: Row) -> Finding:
    job, reason, since = row["subject"], one_line(row["reason"]), moment(row["since"])
    summary = f"The queue of job {job} is over its limits since {since}: {reason}"
    said = {"since": since, "reason": reason}
    return _finding(rule, job, summary, path=f"/jobs/{quote(job, safe='')}", detail=said)


def _no_workers(rule: Rule, row: Row) -> Finding:
    last = row["at"]
    since = f"since {moment(last)}" if last is not None else "yet"
    summary = f"No worker was heard of {since}, and the DAG has jobs that need one."
    said = {"last_at": moment(last) if last else None}
    if operator := row.get("operator"):
        summary = f"No worker that takes tasks of {operator} was heard of {since}, and some wait."
        said["operator"] = operator
    return _finding(rule, WORKERS, summary, path="/operations", detail=said)


def _failure_rate(rule: Rule, row: Row) -> Finding:
    job, reason = row["subject"], one_line(row["reason"])
    within = duration_text(round((rule.within_seconds or 0) * 1000))
    # In steps of ten, so that not every attempt that ends changes the words.
    percent = max(rule.percent, row["failed"] * 100 // row["count"] // 10 * 10)
    summary = (
        f"{percent}% or more of the attempts of job {job} failed within {within}, the last one:"
        f" {reason}"
    )
    said = {"percent": percent, "within": within, "task_id": row["task_id"], "reason": reason}
    return _finding(rule, job, summary, path=f"/jobs/{quote(job, safe='')}", detail=said)


def _parked(rule: Rule, row: Row) -> Finding:
    count, reason = row["count"], one_line(row["reason"])
    many = f"{count:,}{' or more' if count >= DEAD_COUNTED_MAX else ''}"
    which = "message of the outbox is" if count == 1 else "messages of the outbox are"
    last = "" if count == 1 else ", the last one"
    summary = f"{many} {which} parked{last} to {one_line(row['target'])}: {reason}"
    said = {"parked": count, "kind": row["kind"], "target": row["target"], "reason": reason}
    return _finding(rule, OUTBOX, summary, path="/operations#outbox", detail=said)


_MADE: Final[Mapping[RuleKind, Callable[[Rule, Row], Finding | None]]] = {
    RuleKind.DEAD_TASKS: _dead_tasks,
    RuleKind.STALE_DATASET: _stale,
    RuleKind.PRESSURE: _pressure,
    RuleKind.SILENT_SOURCE: _silent,
    RuleKind.DEAD_SOURCE: _dead_source,
    RuleKind.NO_WORKERS: _no_workers,
    RuleKind.FAILURE_RATE: _failure_rate,
    RuleKind.PARKED_OUTBOX: _parked,
}


def moment(at: datetime) -> str:
    """A time in words."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def one_line(text: str | None) -> str:
    """The first line of somebody's words, cut, without what a terminal would obey."""
    first = (text or "").strip().partition("\n")[0]
    shown = "".join(each if each.isprintable() else " " for each in first).strip()
    shown = shown or "no reason was given."
    if len(shown) <= _REASON_CHARACTERS_MAX:
        return shown
    return f"{shown[: _REASON_CHARACTERS_MAX - 1]}…"


def _long(rule: Rule) -> str:
    return duration_text(round(rule.longer_than_seconds * 1000))
