"""What stands in the audit, in words."""

from __future__ import annotations

from penstock.console.pages.audited import call_of, reason_of
from penstock.dispatcher.api.table import INTERNAL, PUBLIC
from penstock.dispatcher.tasks.values import Why


def test_every_call_has_words() -> None:
    for each in (*INTERNAL, *PUBLIC):
        assert call_of(f"{each.method} {each.path}")
    assert call_of("POST /v1/task/heartbeat") == "A heartbeat of an attempt"
    assert call_of("GET /made/up") == ""


def test_what_tokens_and_attempts_are_refused_for_has_words() -> None:
    assert reason_of("over") == "Its attempt had ended"
    for each in (Why.OVER, Why.STALE, Why.DIFFERENT, Why.OUTPUTS, Why.SCHEMA):
        assert reason_of(each.value)
    assert reason_of("something new") == ""
