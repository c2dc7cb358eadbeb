"""What the keys of `partition_by` stand for: the same parts of the calendar as everywhere."""

from __future__ import annotations

import pytest

from penstock.dispatcher.ranges import calendar_range
from penstock.runtimes.spark.partition_keys import Grain, grain_of, key_range


@pytest.mark.parametrize(
    ("by", "grain"),
    [
        ("date_trunc('month', ts)", Grain.MONTH),
        ('date_trunc("month", ts)', Grain.MONTH),
        ('trunc(ts, "year")', Grain.YEAR),
        ("date_trunc('month\", ts)", None),
        (" DATE_TRUNC( 'MM' , coalesce(a, (b)) ) ", Grain.MONTH),
        ("trunc(day, 'YEAR')", Grain.YEAR),
        ("date_trunc('second', ts)", None),
        ("date_trunc(unit, ts)", None),
        ("date_trunc('month', ts) + make_interval(1)", None),
        ("date_trunc('month', a) || date_trunc('day', b)", None),
        ("date_trunc('day', to_timestamp(x, ')('))", Grain.DAY),
        ("my_trunc('day', ts)", None),
        ("ts", None),
    ],
)
def test_the_grain_is_that_of_a_call_and_of_nothing_around_it(by: str, grain: Grain | None) -> None:
    assert grain_of(by) == grain


@pytest.mark.parametrize(
    ("key", "grain"),
    [
        *(("2026", Grain.YEAR), ("2024", Grain.YEAR), ("0001", Grain.YEAR)),
        *(("2026-01", Grain.MONTH), ("2025-12", Grain.MONTH), ("2024-02", Grain.MONTH)),
        *(("2026-W01", Grain.WEEK), ("2020-W53", Grain.WEEK)),
        *(("2024-02-29", Grain.DAY), ("1969-12-31", Grain.DAY)),
    ],
)
def test_a_key_has_the_range_that_range_operators_give_it(key: str, grain: Grain) -> None:
    assert key_range(key, grain) == calendar_range(key)


def test_hours_and_minutes_have_theirs_and_the_end_of_time_has_none() -> None:
    assert key_range("1970-01-01T01:00Z", Grain.HOUR) == (3600, 7200)
    assert key_range("1970-01-01T00:01Z", Grain.MINUTE) == (60, 120)
    assert key_range("2026-Q1", Grain.QUARTER) is None
    assert key_range("anything", None) is None
    for key, grain in (("9999", Grain.YEAR), ("9999-12", Grain.MONTH), ("9999-12-31", Grain.DAY)):
        assert key_range(key, grain) is None
