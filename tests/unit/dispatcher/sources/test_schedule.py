"""Which times are due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dispatcher.dag.cron import next_after, parse_cron
from penstock.dispatcher.sources.schedule import (
    Due,
    due_times,
    events_at,
    milliseconds,
    time_of,
)
from tests.unit.dispatcher.sources.scripted import BEGIN, cron_source

CRONS = ["0 * * * *", "*/20 8-9 * * *", "30 2 * * sun", "5,6 0 1 * *"]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(CRONS),
    st.sampled_from(["UTC", "Europe/Zurich"]),
    st.integers(0, 400 * 24 * 60),
    st.integers(1, 20 * 24 * 60),
    st.integers(1, 12),
)
def test_the_latest_of_all_times_in_between(
    text: str, zone: str, begin: int, minutes: int, most: int
) -> None:
    cron = parse_cron(text)
    after = BEGIN + timedelta(minutes=begin)
    until = after + timedelta(minutes=minutes)
    every = []
    time = next_after(cron, after, time_zone=zone)
    while time is not None and time <= until:
        every.append(time)
        time = next_after(cron, time, time_zone=zone)
    found = due_times(cron, after=after, until=until, time_zone=zone, most=most)
    assert found == Due(tuple(every[-most:]), len(every) > most, time)


def test_nothing_is_due_when_no_time_has_passed() -> None:
    cron = parse_cron("* * * * *")
    soon = BEGIN + timedelta(minutes=1)
    later = soon + timedelta(minutes=1)
    none = due_times(cron, after=BEGIN, until=BEGIN, time_zone="UTC")
    assert none == Due((), is_cut=False, following=soon)
    earlier = BEGIN - timedelta(days=1)
    assert due_times(cron, after=BEGIN, until=earlier, time_zone="UTC").times == ()
    one = due_times(cron, after=BEGIN, until=soon, time_zone="UTC")
    assert one == Due((soon,), is_cut=False, following=later)


def test_years_are_a_hundred_times() -> None:
    cron = parse_cron("*/20 * * * *")
    long_ago = BEGIN - timedelta(days=3000)
    found = due_times(cron, after=long_ago, until=BEGIN, time_zone="UTC")
    assert found.times[0] == BEGIN - timedelta(minutes=20 * 99)
    assert found.times[-1] == BEGIN
    assert (len(found.times), found.is_cut) == (100, True)


def test_an_event_is_named_by_its_time() -> None:
    source = cron_source(datasets={"b": "2", "a": "1"})
    one, two = events_at(source, (BEGIN,))
    assert (one.event_id, one.dataset, one.cursor) == (
        "cron:2030-01-01T00:00:00+00:00",
        "a",
        1_893_456_000_000,
    )
    assert (two.dataset, two.event_id) == ("b", one.event_id)


@pytest.mark.parametrize("cursor", [-1, milliseconds(BEGIN), 2**62])
def test_a_cursor_that_is_no_time_begins_now(cursor: int) -> None:
    assert time_of(cursor, latest=BEGIN) == BEGIN


def test_a_cursor_is_a_time() -> None:
    assert time_of(1000, latest=BEGIN) == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
