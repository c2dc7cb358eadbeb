"""The alert evaluator: asks what is wrong, and opens, updates and resolves alerts.

Three steps, the first two pure:

- `findings_of` makes findings of the rows of a rule's question. Their text stays the same while
  nothing changes: it holds times, never ages. Text of tasks and users is cut to one line.
- `decide` compares findings with open alerts. An alert whose rule does not hold is clear, and
  over
  after `CLEAR_SECONDS`, so what flaps is sent once. A rule opens `SUBJECTS_MAX` alerts at most; how
  many more there would be is an alert of its own.
- `AlertEvaluator.turn` writes the result with the notices, in one transaction under a named lock
  that is only tried; the dispatcher that evaluated last goes on. Old alerts are removed in passing.

A crash leaves a turn done or not done; one whose commit was not answered is found done by the
next. Called by a loop of the dispatcher.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import quote, urlencode

from psycopg.types.json import Jsonb

from penstock.dispatcher.alerts.rules import ABSENCE, AlertRule, AlertSettings, RuleKind
from penstock.dispatcher.database.pool import Connection, Database, fetch_rows, query
from penstock.dispatcher.tasks.rows import storable
from penstock.kernel.units import duration_text
from penstock.protocol.base import TaskStatus

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
class AlertFinding:
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


def statement_of(rule: AlertRule, *, unserved: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
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
        case RuleKind.TABLE_BEHIND:
            return "tables_behind", long


def findings_of(rule: AlertRule, rows: Sequence[Row], *, is_quiet: bool) -> list[AlertFinding]:
    """What the rows of a rule's question say. Quiet is the time after an outage of our own."""
    found: dict[str, AlertFinding] = {}
    for row in rows:
        each = _MADE[rule.kind](rule, row)
        # Of several rows about one subject the first counts.
        if each is not None and rule.is_about(each.subject) and each.subject not in found:
            found[each.subject] = each
    if not is_quiet or rule.kind not in ABSENCE:
        return list(found.values())
    return [replace(each, is_sure=False) for each in found.values()]


def _finding(
    rule: AlertRule,
    subject: str,
    summary: str,
    *,
    path: str,
    detail: Mapping[str, Any],
    is_sure: bool = True,
) -> AlertFinding:
    return AlertFinding(
        rule=rule.name,
        kind=rule.kind.value,
        subject=subject,
        summary=summary,
        path=path,
        detail=detail,
        is_sure=is_sure,
    )


def _dead_tasks(rule: AlertRule, row: Row) -> AlertFinding:
    job, count, reason = row["subject"], row["count"], one_line(row["reason"])
    many = f"{count:,}{' or more' if count >= DEAD_COUNTED_MAX else ''}"
    which = f"{many} task of job {job} is" if count == 1 else f"{many} tasks of job {job} are"
    last = "" if count == 1 else ", the last one"
    path = f"/tasks?{urlencode({'status': TaskStatus.FAILED.value, 'job': job})}"
    said = {"dead": count, "task_id": row["task_id"], "reason": reason}
    return _finding(rule, job, f"{which} dead{last}: {reason}", path=path, detail=said)


def _stale(rule: AlertRule, row: Row) -> AlertFinding | None:
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


def _silent(rule: AlertRule, row: Row) -> AlertFinding | None:
    if not row["is_silent"]:
        return None
    name, long, last = row["subject"], _long(rule), row["at"]
    path = f"/jobs/{quote(name, safe='')}"
    if last is None:
        made = moment(row["made_at"])
        summary = f"Source {name} is there since {made}, and has never sent an event."
    else:
        summary = f"Source {name} has sent no event since {moment(last)}, for over {long}."
    said = {"last_at": moment(last) if last else None, "longer_than": long}
    # A source that is paused was asked to be silent.
    return _finding(rule, name, summary, path=path, detail=said, is_sure=not row["is_paused"])


def _dead_source(rule: AlertRule, row: Row) -> AlertFinding:
    job, task_id, reason = row["subject"], row["task_id"], one_line(row["reason"])
    summary = f"The always-on source {job} has died: {reason}"
    said = {"task_id": task_id, "reason": reason}
    return _finding(rule, job, summary, path=f"/tasks/{task_id}", detail=said)


def _pressure(rule: AlertRule, row: Row) -> AlertFinding:
    job, reason, since = row["subject"], one_line(row["reason"]), moment(row["since"])
    summary = f"The queue of job {job} has exceeded its limits since {since}: {reason}"
    said = {"since": since, "reason": reason}
    return _finding(rule, job, summary, path=f"/jobs/{quote(job, safe='')}", detail=said)


def _no_workers(rule: AlertRule, row: Row) -> AlertFinding:
    last = row["at"]
    since = f"since {moment(last)}" if last is not None else "yet"
    summary = f"No worker was seen {since}, and the DAG has jobs that need one."
    said = {"last_at": moment(last) if last else None}
    if operator := row.get("operator"):
        summary = f"No worker that takes tasks of {operator} was seen {since}, and some are queued."
        said["operator"] = operator
    return _finding(rule, WORKERS, summary, path="/operations", detail=said)


def _failure_rate(rule: AlertRule, row: Row) -> AlertFinding:
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


def _parked(rule: AlertRule, row: Row) -> AlertFinding:
    count, reason = row["count"], one_line(row["reason"])
    many = f"{count:,}{' or more' if count >= DEAD_COUNTED_MAX else ''}"
    which = "message of the outbox is" if count == 1 else "messages of the outbox are"
    last = "" if count == 1 else ", the last one"
    summary = f"{many} {which} parked{last} to {one_line(row['target'])}: {reason}"
    said = {"parked": count, "kind": row["kind"], "target": row["target"], "reason": reason}
    return _finding(rule, OUTBOX, summary, path="/operations#outbox", detail=said)


def _table_behind(rule: AlertRule, row: Row) -> AlertFinding:
    name, long = row["subject"], _long(rule)
    why = one_line(row["problem"] or "what is published is not loaded yet.")
    summary = f"The table of dataset {name} has been behind for over {long}: {why}"
    said = {"longer_than": long, "events": row["events"], "problem": row["problem"]}
    return _finding(rule, name, summary, path=f"/datasets/{quote(name, safe='')}", detail=said)


_MADE: Final[Mapping[RuleKind, Callable[[AlertRule, Row], AlertFinding | None]]] = {
    RuleKind.DEAD_TASKS: _dead_tasks,
    RuleKind.STALE_DATASET: _stale,
    RuleKind.PRESSURE: _pressure,
    RuleKind.SILENT_SOURCE: _silent,
    RuleKind.DEAD_SOURCE: _dead_source,
    RuleKind.NO_WORKERS: _no_workers,
    RuleKind.FAILURE_RATE: _failure_rate,
    RuleKind.PARKED_OUTBOX: _parked,
    RuleKind.TABLE_BEHIND: _table_behind,
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


def _long(rule: AlertRule) -> str:
    return duration_text(round(rule.longer_than_seconds * 1000))


CLEAR_SECONDS: Final = 60.0
SUBJECTS_MAX: Final = 50
REST: Final = "*"
"""The subject of the alert that stands for those that are too many."""
NO_RULE: Final = "The rule was removed."
_AGAIN: Final[Mapping[RuleKind, str]] = {
    RuleKind.DEAD_TASKS: "The tasks were replayed, or are no longer counted.",
    RuleKind.STALE_DATASET: "There is a publication again, or it was removed from the DAG.",
    RuleKind.PRESSURE: "The queue is short enough again, or has no limits any more.",
    RuleKind.SILENT_SOURCE: "It sent an event again, or was removed from the DAG.",
    RuleKind.DEAD_SOURCE: "It runs again, or was removed from the DAG.",
    RuleKind.NO_WORKERS: "A worker was seen again, or none is needed any more.",
    RuleKind.FAILURE_RATE: "Fewer attempts fail, or too few have ended to compute a rate.",
    RuleKind.PARKED_OUTBOX: "The messages were sent, or are tried again.",
    RuleKind.TABLE_BEHIND: "It has what is published, or the dataset has no table any more.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAlert:
    """An alert that is open."""

    id: int
    rule: str
    subject: str
    summary: str
    path: str
    detail: Mapping[str, Any]
    clear_since: datetime | None


@dataclass(slots=True)
class AlertDecision:
    """What is to be written."""

    opened: list[AlertFinding] = field(default_factory=list)
    changed: list[tuple[int, AlertFinding]] = field(default_factory=list)
    """Still or again open, in other words than before."""
    cleared: list[int] = field(default_factory=list)
    ended: list[tuple[int, str]] = field(default_factory=list)
    """Those that are over, and why."""


def decide(
    rules: Sequence[AlertRule],
    found: Iterable[AlertFinding],
    standing: Sequence[OpenAlert],
    *,
    now: datetime,
) -> AlertDecision:
    """What becomes of alerts."""
    open_before = {(each.rule, each.subject): each for each in standing}
    kinds = {each.name: each.kind for each in rules}
    findings = {(each.rule, each.subject): each for each in _bounded(found, open_before)}
    decision = AlertDecision()
    for key, finding in findings.items():
        before = open_before.get(key)
        if not finding.is_sure:
            continue
        if before is None:
            decision.opened.append(finding)
        elif before.clear_since is not None or _words(before) != _words(finding):
            decision.changed.append((before.id, finding))
    for key, each in open_before.items():
        if key in findings:
            continue
        kind = kinds.get(each.rule)
        if kind is None:
            decision.ended.append((each.id, NO_RULE))
        elif each.clear_since is None:
            decision.cleared.append(each.id)
        elif each.clear_since <= now - timedelta(seconds=CLEAR_SECONDS):
            decision.ended.append((each.id, _AGAIN[kind]))
    return decision


def _bounded(
    found: Iterable[AlertFinding], open_before: Mapping[tuple[str, str], OpenAlert]
) -> list[AlertFinding]:
    """The findings, with one for all of a rule that are too many."""
    by_rule: dict[str, list[AlertFinding]] = {}
    for each in found:
        by_rule.setdefault(each.rule, []).append(each)
    kept: list[AlertFinding] = []
    for rule, some in by_rule.items():
        # Those that are open stay so, whoever comes before them in the alphabet.
        some.sort(key=lambda each: ((each.rule, each.subject) not in open_before, each.subject))
        kept += some[:SUBJECTS_MAX]
        if rest := some[SUBJECTS_MAX:]:
            kept.append(_rest(rule, rest))
    return kept


def _rest(rule: str, some: Sequence[AlertFinding]) -> AlertFinding:
    count = len(some)
    more = "1 more" if count == 1 else f"{count:,} more"
    return AlertFinding(
        rule=rule,
        kind=some[0].kind,
        subject=REST,
        summary=f"The rule {rule} holds for {more}, such as {some[0].subject}.",
        path="/alerts",
        detail={"more": count},
        is_sure=any(each.is_sure for each in some),
    )


def _words(said: OpenAlert | AlertFinding) -> tuple[str, str, Mapping[str, Any]]:
    return said.summary, said.path, dict(said.detail)


_log = logging.getLogger(__name__)

EVALUATION_PACE_SECONDS: Final = 20.0
AWAY_SECONDS: Final = 65.0
"""After so long without a turn of the judge another dispatcher is the judge."""
OUTAGE_SECONDS: Final = 90.0
"""After so long without any judge, others could not be heard either."""
QUIET_SECONDS: Final = 120.0
"""How long after an outage nothing is opened that is about silence."""
GIVE_UP_SECONDS: Final = 86_400.0
FORGET_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What a turn has done."""

    is_judge: bool
    opened: Sequence[AlertFinding] = ()
    ended: int = 0
    notices: int = 0


class AlertEvaluator:
    """One dispatcher's judge; of any number, one judges."""

    def __init__(
        self,
        database: Database,
        settings: AlertSettings,
        *,
        name: str,
        days: float,
        unserved: Sequence[str] = (),
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """`unserved` are runtimes that need no workers; `told` is called when notices are due."""
        self._database = database
        self._settings = settings
        self._name = name
        self._unserved = ("dispatcher", *unserved)
        self._days = days
        self._told = told

    async def turn(self) -> float | None:
        """Judge, unless another dispatcher does."""
        turned = await self._database.transact(self._judge)
        for each in turned.opened:
            _log.warning("alert: %s", each.summary)
        if turned.ended:
            _log.info("%d alerts resolved", turned.ended)
        if turned.notices:
            self._told()
        return None

    async def _judge(self, connection: Connection) -> EvaluationResult:
        (lock,) = await fetch_rows(connection, "take_alert_lock")
        if not lock["is_ours"]:
            return EvaluationResult(is_judge=False)
        turn = await fetch_rows(connection, "take_alert_turn", **self._turn())
        if not turn:
            return EvaluationResult(is_judge=False)
        now, is_quiet = turn[0]["now"], turn[0]["is_quiet"]
        found: list[AlertFinding] = []
        for rule in self._settings.rules:
            statement, asked = statement_of(rule, unserved=self._unserved)
            rows = await fetch_rows(connection, statement, **asked)
            found += findings_of(rule, rows, is_quiet=is_quiet)
        standing = [OpenAlert(**row) for row in await fetch_rows(connection, "standing_alerts")]
        decision = decide(self._settings.rules, found, standing, now=now)
        return await self._write(connection, decision)

    def _turn(self) -> dict[str, Any]:
        said = {
            "rules": [{"name": each.name, "words": each.words} for each in self._settings.rules],
            "destinations": list(self._settings.destinations),
        }
        return {
            "name": self._name,
            "said": Jsonb(said),
            "away_seconds": AWAY_SECONDS,
            "outage_seconds": OUTAGE_SECONDS,
            "quiet_seconds": QUIET_SECONDS,
        }

    async def _write(self, connection: Connection, decision: AlertDecision) -> EvaluationResult:
        destinations = list(self._settings.destinations)
        if decision.opened:
            rows = [_row(each, rule=each.rule, subject=each.subject) for each in decision.opened]
            await connection.execute(query("open_alerts"), {"alerts": Jsonb(rows)})
        if decision.changed:
            rows = [_row(each, id=number) for number, each in decision.changed]
            await connection.execute(query("change_alerts"), {"alerts": Jsonb(rows)})
        if decision.cleared:
            await connection.execute(query("clear_alerts"), {"alerts": decision.cleared})
        ended = [number for number, _ in decision.ended]
        made = await fetch_rows(connection, "tell_of_opened", destinations=destinations)
        if ended:
            whys = [why for _, why in decision.ended]
            await connection.execute(query("end_alerts"), {"alerts": ended, "whys": whys})
            made += await fetch_rows(
                connection, "tell_of_over", alerts=ended, destinations=destinations
            )
        orphans = {"destinations": destinations, "give_up_seconds": GIVE_UP_SECONDS}
        await connection.execute(query("give_up_orphans"), orphans)
        old = {"days": self._days, "limit": FORGET_MAX}
        await connection.execute(query("forget_alerts"), old)
        return EvaluationResult(
            is_judge=True, opened=decision.opened, ended=len(ended), notices=len(made)
        )


def _row(finding: AlertFinding, **more: object) -> dict[str, Any]:
    detail = {
        name: storable(value) if isinstance(value, str) else value
        for name, value in finding.detail.items()
    }
    return {
        "kind": finding.kind,
        "summary": storable(finding.summary),
        "path": finding.path,
        "detail": detail,
        **more,
    }
