"""The form that triggers a source."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from penstock.console.pages.sources import kind_of, trigger_ask, triggered
from penstock.dispatcher.sources.cron import events_at
from penstock.kernel.errors import InvalidInput
from penstock.protocol.events import EventResult, SourceAnswer
from penstock.protocol.steering import TriggerAnswer, TriggerAsk


def test_an_empty_form_is_now() -> None:
    fields = dict.fromkeys(("partition_key", "cursor", "time", "payload", "event_id"), "")
    assert trigger_ask("feed", fields) == TriggerAsk(job="feed")


def test_a_partition_with_its_range_payload_and_id() -> None:
    fields = {
        "partition_key": "p",
        "start": "1",
        "end": "5",
        "payload": '{"rows": 3}',
        "event_id": "mine",
    }
    assert trigger_ask("feed", fields) == TriggerAsk(
        job="feed", partition_key="p", start=1, end=5, payload={"rows": 3}, event_id="mine"
    )


def test_an_interval_is_named_as_cron_sources_name_theirs() -> None:
    source = SourceAnswer(job="tick", kind="cron", cron="0 * * * *", emits="interval", datasets={})
    source.datasets = {"ticks": "x"}
    (event,) = events_at(source, (datetime(2026, 1, 31, 7, tzinfo=UTC),))
    ask = trigger_ask("tick", {"from": "2026-01-31T06:00", "until": "2026-01-31T07:00"})
    assert (ask.partition_key, ask.start, ask.end) == (event.partition_key, event.start, event.end)
    assert kind_of(source) == "interval"


def test_a_time_is_a_cursor_as_cron_sources_send_it() -> None:
    source = SourceAnswer(job="tick", kind="cron", cron="0 * * * *", datasets={"ticks": "x"})
    (event,) = events_at(source, (datetime(2026, 1, 31, 7, tzinfo=UTC),))
    assert trigger_ask("tick", {"time": "2026-01-31T07:00"}).cursor == event.cursor
    assert trigger_ask("tick", {"time": "2026-01-31T08:00:00+01:00"}).cursor == event.cursor
    assert kind_of(source) == "time"
    assert kind_of(SourceAnswer(job="a", kind="webhook", datasets={})) == "any"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"partition_key": "p", "cursor": "1"}, "a partition or a cursor; leave one"),
        ({"start": "1", "end": "2"}, "need a partition; set it"),
        ({"cursor": "x"}, "The number has to be a whole number"),
        ({"payload": "[]"}, "The payload must be a JSON object"),
        ({"time": "noon"}, "The time must be a time"),
        ({"from": "2026-01-31T06:00"}, "needs both times"),
        ({"from": "2026-01-31T06:00", "until": "2026-01-31T06:00"}, "begins before it ends"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(fields: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        trigger_ask("feed", fields)


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([], "no event was ingested"),
        ([EventResult(outcome="duplicate"), EventResult(outcome="new")], "was ingested"),
        ([EventResult(outcome="duplicate")], "was a duplicate"),
        ([EventResult(outcome="audited", why="No job writes it.")], "No job writes it."),
        ([EventResult(outcome="new", paused="Too much.")], "is paused, though: Too much."),
    ],
)
def test_what_became_of_it(results: list[EventResult], words: str) -> None:
    assert words in triggered(TriggerAnswer(event_id="e", results=results))
