"""Which times are due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dispatcher.sources.cron import (
    DueTimes,
    cron_of,
    due_times,
    events_at,
    left_off,
    milliseconds,
    time_of,
)
from penstock.kernel.cron import next_after, parse_cron
from tests.unit.dispatcher.sources.scripted import BEGIN, cron_source

DAYS = timedelta(days=9)
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
    assert found == DueTimes(tuple(every[-most:]), len(every) > most, time)


def test_nothing_is_due_when_no_time_has_passed() -> None:
    cron = parse_cron("* * * * *")
    soon = BEGIN + timedelta(minutes=1)
    later = soon + timedelta(minutes=1)
    none = due_times(cron, after=BEGIN, until=BEGIN, time_zone="UTC")
    assert none == DueTimes((), is_cut=False, following=soon)
    earlier = BEGIN - timedelta(days=1)
    assert due_times(cron, after=BEGIN, until=earlier, time_zone="UTC").times == ()
    one = due_times(cron, after=BEGIN, until=soon, time_zone="UTC")
    assert one == DueTimes((soon,), is_cut=False, following=later)


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


def test_an_interval_is_the_time_since_the_one_before() -> None:
    source = cron_source(emits="interval", datasets={"b": "2", "a": "1"})
    one, two, *more = events_at(source, (BEGIN, BEGIN + timedelta(hours=1)))
    assert len(more) == 2
    assert (one.event_id, one.dataset, one.cursor) == ("cron:2030-01-01T00:00:00+00:00", "a", None)
    assert (one.partition_key, one.start, one.end) == (
        "2029-12-31T23:00Z",
        1_893_456_000 - 3600,
        1_893_456_000,
    )
    assert (two.dataset, two.partition_key, two.event_id) == (
        "b",
        one.partition_key,
        one.event_id,
    )
    assert (more[0].start, more[0].end) == (one.end, 1_893_456_000 + 3600)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([*CRONS, "0 0 * * *"]),
    st.sampled_from(["UTC", "Europe/Zurich", "Australia/Lord_Howe"]),
    st.integers(0, 400 * 24 * 60),
)
def test_intervals_lie_end_to_end(text: str, zone: str, begin: int) -> None:
    source = cron_source(cron=text, emits="interval", time_zone=zone)
    after = BEGIN + timedelta(minutes=begin)
    due = due_times(parse_cron(text), after=after, until=after + DAYS, time_zone=zone)
    events = events_at(source, due.times)
    assert [each.start for each in events[1:]] == [each.end for each in events[:-1]]
    assert all(each.start is not None and each.end is not None for each in events)
    assert len({each.partition_key for each in events}) == len(events)
    for each in events:
        assert each.partition_key is not None
        assert datetime.fromisoformat(each.partition_key).timestamp() == each.start


def test_a_day_on_which_clocks_change_is_a_longer_interval() -> None:
    source = cron_source(cron="0 0 * * *", emits="interval", time_zone="Europe/Zurich")
    (event,) = events_at(source, (datetime(2030, 10, 27, 23, 0, tzinfo=UTC),))
    assert event.partition_key == "2030-10-26T22:00Z"
    assert event.start is not None
    assert event.end == event.start + 25 * 3600


def test_where_a_source_goes_on() -> None:
    last = BEGIN - timedelta(hours=5)
    cursor, end = milliseconds(last), milliseconds(last) // 1000
    assert left_off(cron_source(), latest=BEGIN) is None
    assert left_off(cron_source(last_cursor=cursor, last_end=1), latest=BEGIN) == last
    interval = cron_source(emits="interval", last_cursor=5, last_end=end)
    assert left_off(interval, latest=BEGIN) == last
    assert left_off(cron_source(emits="interval", last_cursor=5), latest=BEGIN) is None
    assert left_off(cron_source(emits="interval", last_end=2**60), latest=BEGIN) == BEGIN


def test_what_a_later_release_emits_is_not_guessed_at() -> None:
    with pytest.raises(ValueError, match="emits 'week', which this release does not know"):
        cron_of(cron_source(emits="week"))


@pytest.mark.parametrize("cursor", [-1, milliseconds(BEGIN), 2**62])
def test_a_cursor_that_is_no_time_begins_now(cursor: int) -> None:
    assert time_of(cursor, latest=BEGIN) == BEGIN


def test_a_cursor_is_a_time() -> None:
    assert time_of(1000, latest=BEGIN) == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
