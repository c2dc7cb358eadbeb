"""What becomes of alerts: pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatcher.alerts.evaluator import (
    CLEAR_SECONDS,
    NO_RULE,
    REST,
    SUBJECTS_MAX,
    AlertDecision,
    AlertFinding,
    OpenAlert,
    decide,
    findings_of,
    one_line,
)
from penstock.dispatcher.alerts.rules import AlertRule, RuleKind

NOW = datetime(2030, 1, 1, tzinfo=UTC)
RULE = AlertRule(name="r", kind=RuleKind.DEAD_TASKS)


def finding(subject: str = "job", **fields: Any) -> AlertFinding:
    said: dict[str, Any] = {"rule": "r", "kind": "dead_tasks", "summary": "so", "path": "/x"}
    return AlertFinding(**{**said, "subject": subject, **fields})


def standing(subject: str = "job", *, id: int = 1, **fields: Any) -> OpenAlert:
    said: dict[str, Any] = {"rule": "r", "summary": "so", "path": "/x", "detail": {}}
    return OpenAlert(**{**said, "id": id, "subject": subject, "clear_since": None, **fields})


def decided(found: list[AlertFinding], before: list[OpenAlert], *rules: AlertRule) -> AlertDecision:
    return decide(rules or (RULE,), found, before, now=NOW)


def test_what_is_found_is_opened_once() -> None:
    assert decided([finding()], []).opened == [finding()]
    assert decided([finding()], [standing()]) == AlertDecision()


def test_new_words_are_written_and_not_told_again() -> None:
    other = finding(summary="so and so")
    assert decided([other], [standing()]) == AlertDecision(changed=[(1, other)])


def test_what_is_not_found_is_clear_and_then_over() -> None:
    assert decided([], [standing()]) == AlertDecision(cleared=[1])
    long = NOW - timedelta(seconds=CLEAR_SECONDS)
    short = long + timedelta(seconds=1)
    assert decided([], [standing(clear_since=short)]) == AlertDecision()
    ((number, why),) = decided([], [standing(clear_since=long)]).ended
    assert number == 1
    assert "replayed" in why
    # Back before that, it goes on.
    assert decided([finding()], [standing(clear_since=long)]).changed == [(1, finding())]


def test_what_cannot_be_said_changes_nothing() -> None:
    unsure = finding(is_sure=False)
    assert decided([unsure], []) == AlertDecision()
    for clear_since in (None, NOW - timedelta(days=1)):
        assert decided([unsure], [standing(clear_since=clear_since)]) == AlertDecision()


def test_a_rule_that_is_gone_ends_its_alerts_at_once() -> None:
    found = decided([], [standing()], replace(RULE, name="other"))
    assert found == AlertDecision(ended=[(1, NO_RULE)])


def test_too_many_are_one_more_alert_and_those_that_are_open_stay() -> None:
    many = [finding(f"job {number:03}") for number in range(SUBJECTS_MAX + 7)]
    opened = decided(many, []).opened
    assert len(opened) == SUBJECTS_MAX + 1
    assert (opened[-1].subject, opened[-1].detail) == (REST, {"more": 7})
    last = standing(many[-1].subject)
    kept = decided(many, [last])
    assert not kept.ended
    assert not kept.cleared
    assert len(kept.opened) == SUBJECTS_MAX
    assert {each.subject for each in kept.opened} >= {REST, "job 000"}


_subjects = st.lists(st.sampled_from("abcd"), unique=True)


@given(found=_subjects, unsure=_subjects, before=_subjects)
def test_every_alert_has_one_fate(found: list[str], unsure: list[str], before: list[str]) -> None:
    findings = [finding(each, is_sure=each not in unsure) for each in found]
    old = [standing(each, id=number) for number, each in enumerate(before, start=1)]
    decision = decided(findings, old)
    sure = set(found) - set(unsure)
    assert {each.subject for each in decision.opened} == sure - set(before)
    names = {each.id: each.subject for each in old}
    assert {names[number] for number in decision.cleared} == set(before) - set(found)
    assert not decision.ended
    assert not decision.changed


def test_after_an_outage_silence_is_not_believed_and_what_is_written_is() -> None:
    workers = AlertRule(name="w", kind=RuleKind.NO_WORKERS, longer_than_seconds=60)
    (found,) = findings_of(workers, [{"at": None}], is_quiet=True)
    assert not found.is_sure
    row = {"subject": "job", "count": 1, "task_id": 7, "reason": None}
    (found,) = findings_of(RULE, [row], is_quiet=True)
    assert found.is_sure
    assert found.summary == "1 task of job job is dead: no reason was given."


def test_many_dead_tasks_are_counted_to_a_bound() -> None:
    row = {"subject": "a b&c", "count": 10_000, "task_id": 7, "reason": "x"}
    (found,) = findings_of(RULE, [row], is_quiet=False)
    assert found.summary.startswith("10,000 or more tasks of job a b&c are dead")
    assert found.path == "/tasks?status=dead&job=a+b%26c"


def test_somebodys_words_are_one_line() -> None:
    assert one_line("  a\x1b[0m\tb \nc") == "a [0m b"
    assert one_line("\n\n") == "no reason was given."
    assert len(one_line("x" * 1000)) == 300
