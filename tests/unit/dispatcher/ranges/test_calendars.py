"""Days, weeks, months and years as ranges."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatcher.dag.model import Calendar
from penstock.dispatcher.ranges import (
    FIRST,
    LAST,
    PIECES_MAX,
    calendar_key,
    calendar_range,
    calendar_windows,
)

DAY = 86_400
YEAR_2013 = 1_356_998_400
INSTANTS = st.integers(FIRST, LAST - 1)


def at(year: int, month: int, day: int) -> int:
    return int(datetime(year, month, day, tzinfo=UTC).timestamp())


def keys(start: int, end: int, size: Calendar) -> list[str]:
    found = calendar_windows(start, end, size=size)
    assert found is not None
    return [calendar_key(each[0], size=size) for each in found]


@pytest.mark.parametrize(
    ("size", "start", "end", "key"),
    [
        (Calendar.DAY, at(2013, 1, 1), at(2013, 1, 2), "2013-01-01"),
        (Calendar.WEEK, at(2013, 1, 28), at(2013, 2, 4), "2013-W05"),
        (Calendar.MONTH, at(2013, 1, 1), at(2013, 2, 1), "2013-01"),
        (Calendar.YEAR, at(2013, 1, 1), at(2014, 1, 1), "2013"),
        # Years of 53 weeks, weeks of another year, leap days, and what was before 1970.
        (Calendar.WEEK, at(2020, 12, 28), at(2021, 1, 4), "2020-W53"),
        (Calendar.WEEK, at(2012, 12, 31), at(2013, 1, 7), "2013-W01"),
        (Calendar.MONTH, at(2024, 2, 1), at(2024, 3, 1), "2024-02"),
        (Calendar.MONTH, at(1969, 12, 1), at(1970, 1, 1), "1969-12"),
        (Calendar.YEAR, at(900, 1, 1), at(901, 1, 1), "0900"),
    ],
)
def test_a_part_and_its_name(size: Calendar, start: int, end: int, key: str) -> None:
    for inside in (start, start + DAY // 2, end - 1):
        assert calendar_windows(inside, inside + 1, size=size) == ((start, end),)
    assert calendar_key(start, size=size) == key


def test_a_range_that_reaches_several() -> None:
    day = YEAR_2013 + 30 * DAY
    assert keys(day, day + 2 * DAY, Calendar.MONTH) == ["2013-01", "2013-02"]
    assert keys(day, day + DAY, Calendar.MONTH) == ["2013-01"]
    assert keys(day - 1, day + DAY + 1, Calendar.DAY) == ["2013-01-30", "2013-01-31", "2013-02-01"]
    assert keys(day, day + 400 * DAY, Calendar.YEAR) == ["2013", "2014"]


def test_too_many_and_too_far() -> None:
    assert calendar_windows(0, PIECES_MAX * DAY, size=Calendar.DAY) is not None
    assert calendar_windows(0, PIECES_MAX * DAY + 1, size=Calendar.DAY) is None
    for size in Calendar:
        assert calendar_windows(FIRST - 1, FIRST, size=size) is None
        assert calendar_windows(LAST, LAST + 1, size=size) is None
        assert calendar_windows(FIRST, FIRST + 1, size=size) is not None
        assert calendar_windows(LAST - 1, LAST, size=size) is not None


@given(INSTANTS, st.integers(1, 400 * DAY), st.sampled_from(Calendar))
def test_parts_lie_end_to_end_around_the_range(start: int, length: int, size: Calendar) -> None:
    end = min(start + length, LAST)
    found = calendar_windows(start, end, size=size)
    assert found
    assert found[0][0] <= start < found[0][1]
    assert found[-1][0] < end <= found[-1][1]
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
    names = [calendar_key(each[0], size=size) for each in found]
    assert names == sorted(set(names))
    # A name tells its range again, but for the week that ends after the calendar.
    told = [(calendar_range(name), each) for name, each in zip(names, found, strict=True)]
    assert all(back == each for back, each in told if each[1] <= LAST)


@pytest.mark.parametrize(
    "key",
    [
        *("", "x", "13", "2013-", "2013-1", "2013-01-05T00:00Z", "2013-01-05\n", " 2013"),
        *("2013-00", "2013-13", "2013-02-29", "2013-W00", "2013-W53", "0000", "9999"),
        "2013-2014",
    ],
)
def test_what_is_no_name_of_a_part(key: str) -> None:
    assert calendar_range(key) is None
