"""Attempts on a time line: on one scale, in their order, always to be seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.console.charts import TIMELINE_WIDTH, Timeline, TimelineSpan, timeline

lengths = st.floats(min_value=0, max_value=10**7, allow_nan=False)


def drawn(*pairs: tuple[float, float], begins_at: float = 0.0, ends_at: float) -> Timeline:
    spans = [TimelineSpan(started_at=start, ended_at=end) for start, end in pairs]
    return timeline(spans, begins_at=begins_at, ends_at=ends_at)


def test_one_attempt_follows_the_time_that_was_waited_for_it() -> None:
    line = drawn((5, 10), ends_at=10)
    (lane,) = line.lanes
    assert (lane.wait.x, lane.wait.width) == (0, 500)
    assert (lane.bar.x, lane.bar.width) == (500, 500)
    assert (line.breaks, line.after, line.seconds) == ([], None, 10)


def test_attempts_are_on_one_scale() -> None:
    line = drawn((0, 2), (4, 8), ends_at=10)
    first, second = line.lanes
    assert (first.bar.x, first.bar.width) == (0, 200)
    assert (second.wait.x, second.wait.width) == (200, 200)
    assert (second.bar.x, second.bar.width) == (400, 400)
    assert line.after is not None
    assert (line.after.x, line.after.width) == (800, 200)


def test_a_replay_after_days_leaves_the_attempts_to_be_seen() -> None:
    days = 3 * 86_400.0
    line = drawn((0, 10), (days, days + 10), ends_at=days + 10)
    (gap,) = line.breaks
    assert gap.seconds == days - 10
    assert gap.width == pytest.approx(TIMELINE_WIDTH * 40 / 60)
    assert [lane.bar.width for lane in line.lanes] == [pytest.approx(TIMELINE_WIDTH * 10 / 60)] * 2
    assert line.seconds == days + 10


def test_an_attempt_that_took_no_time_is_seen_and_does_not_stick_out() -> None:
    line = drawn((1, 1), ends_at=1)
    (lane,) = line.lanes
    assert lane.bar.width > 1
    assert lane.bar.x + lane.bar.width <= TIMELINE_WIDTH


def test_nothing_was_tried_and_no_time_has_passed() -> None:
    assert drawn(ends_at=0).lanes == []
    assert drawn((0, 0), ends_at=0).lanes[0].bar.width > 0


def test_times_that_go_backwards_are_no_times() -> None:
    line = drawn((5, 3), (1, 2), begins_at=10, ends_at=0)
    assert all(lane.bar.width >= 0 and lane.wait.width >= 0 for lane in line.lanes)


@given(st.lists(st.tuples(lengths, lengths), max_size=30), lengths)
def test_everything_is_within_the_scale_and_in_order(
    pairs: list[tuple[float, float]], rest: float
) -> None:
    at, spans = 0.0, []
    for pause, work in pairs:
        spans.append(TimelineSpan(started_at=at + pause, ended_at=at + pause + work))
        at += pause + work
    line = timeline(spans, begins_at=0.0, ends_at=at + rest)
    assert len(line.lanes) == len(spans)
    slack = 1e-6 * TIMELINE_WIDTH
    places = [lane.wait.x + lane.wait.width for lane in line.lanes]
    assert places == sorted(places)
    for lane in line.lanes:
        assert -slack <= lane.wait.x
        assert -slack <= lane.bar.x
        assert lane.bar.x + lane.bar.width <= TIMELINE_WIDTH + slack
        assert lane.bar.width > 1
    for gap in line.breaks:
        assert gap.x + gap.width <= TIMELINE_WIDTH + slack
