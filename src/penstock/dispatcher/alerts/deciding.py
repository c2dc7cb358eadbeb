"""What is found and what is open, to what becomes of alerts. Pure.

An alert whose rule does not hold any more is clear; when that has lasted for `CLEAR_SECONDS` it is
over. So what comes and goes within that time is told once. One rule opens `SUBJECTS_MAX` alerts at
most; how many more there would be is an alert of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from penstock.dispatcher.alerts.findings import Finding
from penstock.dispatcher.alerts.rules import Rule, RuleKind

CLEAR_SECONDS: Final = 60.0
SUBJECTS_MAX: Final = 50
REST: Final = "*"
"""The subject of the alert that stands for those that are too many."""
NO_RULE: Final = "The rule is not set any more."
_AGAIN: Final[Mapping[RuleKind, str]] = {
    RuleKind.DEAD_TASKS: "The tasks were replayed, or nobody misses them any more.",
    RuleKind.STALE_DATASET: "There is a publication again, or the DAG has left it out.",
    RuleKind.PRESSURE: "The queue is short enough again, or has no limits any more.",
    RuleKind.SILENT_SOURCE: "It was heard of again, or the DAG has left it out.",
    RuleKind.DEAD_SOURCE: "It runs again, or the DAG has left it out.",
    RuleKind.NO_WORKERS: "A worker was heard of again, or none is needed any more.",
    RuleKind.FAILURE_RATE: "Fewer attempts fail, or too few have ended to tell.",
    RuleKind.PARKED_OUTBOX: "The messages were sent, or are tried again.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """An alert that is open."""

    id: int
    rule: str
    subject: str
    summary: str
    path: str
    detail: Mapping[str, Any]
    clear_since: datetime | None


@dataclass(slots=True)
class Decision:
    """What is to be written."""

    opened: list[Finding] = field(default_factory=list)
    changed: list[tuple[int, Finding]] = field(default_factory=list)
    """Still or again open, in other words than before."""
    cleared: list[int] = field(default_factory=list)
    ended: list[tuple[int, str]] = field(default_factory=list)
    """Those that are over, and why."""


def decide(
    rules: Sequence[Rule], found: Iterable[Finding], standing: Sequence[Standing], *, now: datetime
) -> Decision:
    """What becomes of alerts."""
    open_before = {(each.rule, each.subject): each for each in standing}
    kinds = {each.name: each.kind for each in rules}
    findings = {(each.rule, each.subject): each for each in _bounded(found, open_before)}
    decision = Decision()
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
    found: Iterable[Finding], open_before: Mapping[tuple[str, str], Standing]
) -> list[Finding]:
    """The findings, with one for all of a rule that are too many."""
    by_rule: dict[str, list[Finding]] = {}
    for each in found:
        by_rule.setdefault(each.rule, []).append(each)
    kept: list[Finding] = []
    for rule, some in by_rule.items():
        # Those that are open stay so, whoever comes before them in the alphabet.
        some.sort(key=lambda each: ((each.rule, each.subject) not in open_before, each.subject))
        kept += some[:SUBJECTS_MAX]
        if rest := some[SUBJECTS_MAX:]:
            kept.append(_rest(rule, rest))
    return kept


def _rest(rule: str, some: Sequence[Finding]) -> Finding:
    count = len(some)
    more = "1 more" if count == 1 else f"{count:,} more"
    return Finding(
        rule=rule,
        kind=some[0].kind,
        subject=REST,
        summary=f"The rule {rule} holds for {more}, such as {some[0].subject}.",
        path="/alerts",
        detail={"more": count},
        is_sure=any(each.is_sure for each in some),
    )


def _words(said: Standing | Finding) -> tuple[str, str, Mapping[str, Any]]:
    return said.summary, said.path, dict(said.detail)
