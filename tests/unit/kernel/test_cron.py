"""Cron expressions: what they name, what is none, and when they come next."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.cron import (
    _times,
    is_time_zone,
    next_after,
    parse_cron,
    previous_before,
)
from tests.sizes import some


def test_fields_are_lists_of_ranges_with_steps() -> None:
    cron = parse_cron("*/20  0,12-14 1-10/4 jan-Mar,DEC mon-fri")
    assert cron.expression == "*/20 0,12-14 1-10/4 jan-mar,dec mon-fri"
    assert cron.minutes == (0, 20, 40)
    assert cron.hours == (0, 12, 13, 14)
    assert cron.days == (1, 5, 9)
    assert cron.months == (1, 2, 3, 12)
    assert cron.weekdays == (1, 2, 3, 4, 5)
    assert cron.is_either_day


@pytest.mark.parametrize(
    ("text", "weekdays"),
    [
        ("0", (0,)),
        ("7", (0,)),
        ("sun", (0,)),
        ("sat-sun", (0, 6)),
        ("5-7", (0, 5, 6)),
        ("*", (0, 1, 2, 3, 4, 5, 6)),
        ("*/2", (0, 2, 4, 6)),
    ],
)
def test_sunday_is_both_ends_of_the_week(text: str, weekdays: tuple[int, ...]) -> None:
    assert parse_cron(f"0 0 * * {text}").weekdays == weekdays


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has 0 fields where a cron expression has five"),
        ("* * * *", "has 4 fields"),
        ("0 * * * * *", "has 6 fields"),
        ("@often", "is not known; write five fields, or one of @annually, @daily"),
        ("60 * * * *", "has 60 as its minute; write 0 to 59"),
        ("* 24 * * *", "has 24 as its hour; write 0 to 23"),
        ("* * 0 * *", "has 0 as its day of month; write 1 to 31"),
        ("* * * 13 *", "has 13 as its month; write 1 to 12"),
        ("* * * * 8", "has 8 as its day of week; write 0 to 7"),
        ("* * * foo *", "has 'foo' in its month; write numbers or jan, feb"),
        ("mon * * * *", "has 'mon' in its minute; write numbers, `*`, lists"),
        ("* * L * *", "has 'l' in its day of month"),
        ("1,,2 * * * *", "has '' in its minute"),
        ("-1 * * * *", "has '' in its minute"),
        ("10-5 * * * *", "has a range from 10 down to 5 in its minute"),
        ("* * * * fri-mon", "has a range from 5 down to 1 in its day of week"),
        ("*/0 * * * *", "has a step of 0 in its minute; write 1 to 59"),
        ("*/99 * * * *", "has a step of 99 in its minute"),
        ("*/ * * * *", "has '' in its minute"),
        ("5/10 * * * *", "has a step without a range in its minute; write */10 or 5-59/10"),
        ("٣ * * * *", "in its minute"),
        ("0 0 30 2 *", "never comes: no such month has a day 30"),
        ("0 0 31 feb,apr,jun *", "never comes: no such month has a day 31"),
        ("0 " * 200, "is longer than 200 characters"),
    ],
)
def test_what_is_no_expression(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_cron(text)
    assert words in str(caught.value)


def _local(zone: str, *clock: int) -> datetime:
    return datetime(*clock, tzinfo=ZoneInfo(zone))  # type: ignore[misc,arg-type]  # of star arguments


def _coming(expression: str, zone: str, after: datetime, *, count: int) -> list[str]:
    cron = parse_cron(expression)
    found = []
    for _ in range(count):
        coming = next_after(cron, after, time_zone=zone)
        assert coming is not None
        assert coming.tzinfo is UTC
        after = coming
        found.append(f"{after.astimezone(ZoneInfo(zone)):%Y-%m-%d %H:%M %Z}")
    return found


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("*/30 * * * *", ["2023-02-28 12:30 UTC", "2023-02-28 13:00 UTC"]),
        ("0 12 * * *", ["2023-03-01 12:00 UTC", "2023-03-02 12:00 UTC"]),
        ("@monthly", ["2023-03-01 00:00 UTC", "2023-04-01 00:00 UTC"]),
        ("0 0 29 2 *", ["2024-02-29 00:00 UTC", "2028-02-29 00:00 UTC"]),
        ("0 0 31 * *", ["2023-03-31 00:00 UTC", "2023-05-31 00:00 UTC"]),
        ("0 0 13 * fri", ["2023-03-03 00:00 UTC", "2023-03-10 00:00 UTC", "2023-03-13 00:00 UTC"]),
        ("0 0 */31 2 mon", ["2027-02-01 00:00 UTC", "2038-02-01 00:00 UTC"]),
        ("0 0 29 2 */7", ["2032-02-29 00:00 UTC", "2060-02-29 00:00 UTC"]),
    ],
)
def test_the_next_times(expression: str, expected: list[str]) -> None:
    after = datetime(2023, 2, 28, 12, 0, tzinfo=UTC)
    assert _coming(expression, "UTC", after, count=len(expected)) == expected


def test_a_time_that_is_skipped_is_moved_on() -> None:
    after = _local("Europe/Zurich", 2024, 3, 30, 12, 0)
    assert _coming("30 2 * * *", "Europe/Zurich", after, count=2) == [
        "2024-03-31 03:30 CEST",
        "2024-04-01 02:30 CEST",
    ]


def test_a_time_that_comes_twice_counts_once() -> None:
    after = _local("Europe/Zurich", 2024, 10, 26, 12, 0)
    assert _coming("30 2 * * *", "Europe/Zurich", after, count=2) == [
        "2024-10-27 02:30 CEST",
        "2024-10-28 02:30 CET",
    ]


def test_every_hour_is_every_hour_whatever_clocks_do() -> None:
    back = _local("Europe/Zurich", 2024, 10, 27, 1, 30)
    assert _coming("0 * * * *", "Europe/Zurich", back, count=3) == [
        "2024-10-27 02:00 CEST",
        "2024-10-27 02:00 CET",
        "2024-10-27 03:00 CET",
    ]
    forward = _local("Europe/Zurich", 2024, 3, 31, 0, 30)
    assert _coming("0 * * * *", "Europe/Zurich", forward, count=3) == [
        "2024-03-31 01:00 CET",
        "2024-03-31 03:00 CEST",
        "2024-03-31 04:00 CEST",
    ]


def test_a_day_that_does_not_exist_is_no_obstacle() -> None:
    # Samoa had no 30 December 2011.
    after = _local("Pacific/Apia", 2011, 12, 29, 12, 0)
    assert _coming("0 9 * * *", "Pacific/Apia", after, count=2) == [
        "2011-12-31 09:00 +14",
        "2012-01-01 09:00 +14",
    ]


def test_a_day_that_does_not_exist_is_moved_on_as_a_time_is() -> None:
    after = _local("Pacific/Apia", 2011, 12, 31, 8, 0)
    assert _coming("0 9 30 12 *", "Pacific/Apia", after, count=2) == [
        "2011-12-31 09:00 +14",
        "2012-12-30 09:00 +14",
    ]


def test_the_calendar_ends() -> None:
    end = datetime(9999, 12, 31, 23, 59, tzinfo=UTC)
    assert next_after(parse_cron("@daily"), end, time_zone="UTC") is None


@given(
    st.sampled_from(["*/7 * * * *", "15 2,3 * * *", "0 0 1 * *", "59 23 * * sun", "0 */5 * * *"]),
    st.sampled_from(["UTC", "Europe/Zurich", "America/New_York", "Australia/Lord_Howe"]),
    st.datetimes(datetime(2000, 1, 1), datetime(2035, 1, 1)),  # noqa: DTZ001 - hypothesis wants naive ones
)
@settings(deadline=None, max_examples=some(100))
def test_nothing_is_passed_over(expression: str, zone: str, naive: datetime) -> None:
    cron = parse_cron(expression)
    after = naive.replace(tzinfo=UTC)
    coming = next_after(cron, after, time_zone=zone)
    assert coming is not None
    assert coming > after
    # Whatever lies between finds the same time.
    between = after + (coming - after) / 2
    assert next_after(cron, between, time_zone=zone) == coming
    assert next_after(cron, coming - timedelta(seconds=1), time_zone=zone) == coming
    # And backwards it is the same.
    past = previous_before(cron, coming, time_zone=zone)
    assert past is not None
    assert past <= after
    assert next_after(cron, past, time_zone=zone) == coming
    assert previous_before(cron, coming + timedelta(seconds=1), time_zone=zone) == coming


def test_clocks_that_are_put_back_past_midnight() -> None:
    # At one minute past midnight it became one minute past eleven of the day before.
    zone, cron = "America/St_Johns", parse_cron("*/30 * * * *")
    time = datetime(2010, 11, 7, 1, 45, tzinfo=UTC)
    first = time - timedelta(minutes=15)
    times: list[datetime] = []
    for _ in range(5):
        coming = next_after(cron, time, time_zone=zone)
        assert coming is not None
        assert [previous_before(cron, coming, time_zone=zone)] == (times or [first])[-1:]
        times.append(coming)
        time = coming
    assert [f"{each.astimezone(ZoneInfo(zone)):%d %H:%M %Z}" for each in times] == [
        "06 23:30 NDT",
        "07 00:00 NDT",
        "06 23:30 NST",
        "07 00:00 NST",
        "07 00:30 NST",
    ]


def test_the_calendar_begins() -> None:
    begin = datetime(1, 1, 1, 0, 0, tzinfo=UTC)
    assert previous_before(parse_cron("@daily"), begin, time_zone="UTC") is None


def test_a_day_is_looked_at_once_however_many_times_it_has() -> None:
    cron, time = parse_cron("* * * * *"), datetime(2031, 5, 6, 7, 8, tzinfo=UTC)
    before = _times.cache_info().misses
    for _ in range(500):
        coming = next_after(cron, time, time_zone="Asia/Tokyo")
        assert coming == time + timedelta(minutes=1)
        time = coming
    assert _times.cache_info().misses - before <= 4


def test_time_zones_are_known_by_name_and_no_file_is() -> None:
    assert is_time_zone("UTC")
    assert is_time_zone("Europe/Zurich")
    for name in ("", "Europe", "../etc/passwd", "/etc/passwd", "Zurich", "\0"):
        assert not is_time_zone(name)
