"""What stands in the audit, in words."""

from __future__ import annotations

from penstock.console.pages.keys import describe_call, describe_reason
from penstock.dispatcher.api.routes import INTERNAL, PUBLIC
from penstock.dispatcher.tasks.model import TaskRefusalReason


def test_every_call_has_words() -> None:
    for each in (*INTERNAL, *PUBLIC):
        assert describe_call(f"{each.method} {each.path}")
    assert describe_call("POST /v1/task/heartbeat") == "A heartbeat of an attempt"
    assert describe_call("GET /made/up") == ""


def test_what_tokens_and_attempts_are_refused_for_has_words() -> None:
    assert describe_reason("over") == "Its attempt had ended"
    for each in (
        TaskRefusalReason.OVER,
        TaskRefusalReason.STALE,
        TaskRefusalReason.DIFFERENT,
        TaskRefusalReason.OUTPUTS,
        TaskRefusalReason.SCHEMA,
    ):
        assert describe_reason(each.value)
    assert describe_reason("something new") == ""
