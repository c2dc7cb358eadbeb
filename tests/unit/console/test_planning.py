"""The form of a backfill."""

from __future__ import annotations

import pytest

from penstock.console.pages.backfill import backfill_ask, keys_of, way_of
from penstock.dispatcher.backfills import BackfillPlan, plan_of
from penstock.kernel.errors import InvalidInput
from penstock.protocol.steering import BackfillAsk


def test_a_list_of_keys() -> None:
    fields = {"job": "totals", "by": "keys", "keys": " a \r\nb\n\n", "concurrency": "7"}
    ask = backfill_ask(fields, request_id="r")
    assert ask == BackfillAsk(job="totals", keys=["a", "b"], concurrency=7, request_id="r")


def test_days_are_keys_over_the_end_of_a_month() -> None:
    fields = {"job": "totals", "first_day": "2024-02-28", "last_day": "2024-03-01"}
    assert backfill_ask(fields).keys == ["2024-02-28", "2024-02-29", "2024-03-01"]
    assert backfill_ask({**fields, "last_day": ""}).keys == ["2024-02-28"]


def test_ranges() -> None:
    ask = backfill_ask({"job": "totals", "by": "ranges", "start": "0", "end": "25", "step": "10"})
    assert (ask.start, ask.end, ask.step, ask.keys) == (0, 25, 10, [])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"by": "keys", "keys": "a"}, "Choose the job"),
        ({"job": "j", "by": "keys", "keys": " \n"}, "Name at least one partition"),
        ({"job": "j", "keys": "k\n" * 10_001}, "20,000 characters at most"),
        ({"job": "j", "by": "ranges", "start": "1", "end": "2"}, "Ranges need a step"),
        ({"job": "j", "by": "ranges", "start": "x", "end": "2", "step": "1"}, "The start has to"),
        ({"job": "j", "by": "days", "first_day": "soon"}, "The first day must be a date"),
        (
            {"job": "j", "by": "days", "first_day": "2026-01-02", "last_day": "2026-01-01"},
            "The first day has to be before the last",
        ),
        (
            {"job": "j", "by": "days", "first_day": "0001-01-01", "last_day": "9999-12-31"},
            "3,652,059 days; the maximum is 100,000",
        ),
        ({"job": "j", "keys": "a", "concurrency": "0"}, "Concurrency has to be 1 or more"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(fields: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        backfill_ask(fields)


def test_how_partitions_are_named_is_guessed_of_links() -> None:
    assert way_of({}) == way_of({"by": "what"}) == "keys"
    assert way_of({"start": "1"}) == "ranges"
    assert way_of({"first_day": "2026-01-01"}) == "days"
    assert way_of({"by": "keys", "start": "1"}) == "keys"


def _plan(**fields: object) -> BackfillPlan:
    plan = plan_of(BackfillAsk(job="j", **fields))  # type: ignore[arg-type] # of many types
    assert isinstance(plan, BackfillPlan)
    return plan


def test_the_first_keys_and_the_last() -> None:
    few = keys_of(_plan(keys=["a", "b", "c"]))
    assert (few.first, few.last) == (["a", "b", "c"], "")
    many = keys_of(_plan(keys=list("abcdef")))
    assert (many.first, many.last) == (["a", "b", "c"], "f")
    ranges = keys_of(_plan(start=0, end=10**9, step=3))
    assert (ranges.first[:2], ranges.last) == (["0-3", "3-6"], "999999999-1000000000")
    assert keys_of(_plan(start=5, end=6, step=10)).first == ["5-6"]
