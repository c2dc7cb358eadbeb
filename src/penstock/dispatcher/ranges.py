"""Ranges as values: pieces, sliding windows, and parts of the calendar in UTC. Pure.

A range goes from its start up to, but without, its end. Pieces and windows lie on a grid that
does not depend on the range that asks, so every range that reaches a window names it alike.
Calendar parts are days, ISO weeks, months and years in seconds since 1970, without leap
seconds; they lie end to end, so every instant is in exactly one. Years are 1 to 9998; what lies
outside has no parts.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import Final

from penstock.dispatcher.dag.model import Calendar

PIECES_MAX: Final = 10_000
"""How many ranges one task may make; more than that is a mistake in the sizes."""

Range = tuple[int, int]

_RANGE_KEY: Final = re.compile(r"(-?[0-9]{1,19})-(-?[0-9]{1,19})", re.ASCII)


def pieces(start: int, end: int, *, size: int) -> tuple[Range, ...] | None:
    """The range, cut at the multiples of `size`; None if that makes too many pieces."""
    first, last = start // size, -(-end // size)
    if last - first > PIECES_MAX:
        return None
    return tuple(
        (max(start, place * size), min(end, (place + 1) * size)) for place in range(first, last)
    )


def windows(start: int, end: int, *, size: int, step: int) -> tuple[Range, ...] | None:
    """The windows of `size` that begin every `step` and overlap the range; None if too many."""
    first, last = (start - size) // step + 1, -(-end // step)
    if last - first > PIECES_MAX:
        return None
    return tuple((place * step, place * step + size) for place in range(first, last))


def key(piece: Range) -> str:
    """The name of the partition that is this range."""
    return f"{piece[0]}-{piece[1]}"


def named(partition_key: str) -> Range | None:
    """The range that is called so by `key`; None if none is."""
    if (found := _RANGE_KEY.fullmatch(partition_key)) is None:
        return None
    piece = int(found[1]), int(found[2])
    in_bits = -(2**63) <= piece[0] < piece[1] < 2**63
    return piece if in_bits and key(piece) == partition_key else None


_DAY_SECONDS: Final = 86_400
_EPOCH: Final = date(1970, 1, 1).toordinal()
FIRST: Final = (date(1, 1, 1).toordinal() - _EPOCH) * _DAY_SECONDS
LAST: Final = (date(9999, 1, 1).toordinal() - _EPOCH) * _DAY_SECONDS
_CALENDAR_KEY: Final = re.compile(
    r"([0-9]{4})(?:-W([0-9]{2})|-([0-9]{2})(?:-([0-9]{2}))?)?", re.ASCII
)


def calendar_windows(start: int, end: int, *, size: Calendar) -> tuple[Range, ...] | None:
    """The parts that overlap the range; None if they are too many, or not all in the calendar."""
    if start < FIRST or end > LAST:
        return None
    begin = _begin(_date(start), size)
    found: list[Range] = []
    for _ in range(PIECES_MAX + 1):
        if _seconds(begin) >= end:
            return tuple(found)
        following = _following(begin, size)
        found.append((_seconds(begin), _seconds(following)))
        begin = following
    return None


def calendar_key(start: int, *, size: Calendar) -> str:
    """The name of the partition that begins here: 2013-01-01, 2013-W05, 2013-01 or 2013."""
    day = _date(start)
    match size:
        case Calendar.DAY:
            return f"{day.year:04}-{day.month:02}-{day.day:02}"
        case Calendar.WEEK:
            named = day.isocalendar()
            return f"{named.year:04}-W{named.week:02}"
        case Calendar.MONTH:
            return f"{day.year:04}-{day.month:02}"
        case Calendar.YEAR:
            return f"{day.year:04}"


def calendar_range(key: str) -> Range | None:
    """The part of the calendar that is called so, by `calendar_key`; None if none is."""
    if (found := _CALENDAR_KEY.fullmatch(key)) is None:
        return None
    year, week, month, day = (None if each is None else int(each) for each in found.groups())
    assert year is not None, "the pattern has it"
    if not 1 <= year <= date.max.year - 1:
        return None
    try:
        if week is not None:
            begin, size = date.fromisocalendar(year, week, 1), Calendar.WEEK
        elif month is None:
            begin, size = date(year, 1, 1), Calendar.YEAR
        else:
            begin = date(year, month, 1 if day is None else day)
            size = Calendar.MONTH if day is None else Calendar.DAY
    except ValueError:
        return None
    return _seconds(begin), _seconds(_following(begin, size))


def _begin(day: date, size: Calendar) -> date:
    match size:
        case Calendar.DAY:
            return day
        case Calendar.WEEK:
            return day - timedelta(days=day.weekday())
        case Calendar.MONTH:
            return day.replace(day=1)
        case Calendar.YEAR:
            return day.replace(month=1, day=1)


def _following(begin: date, size: Calendar) -> date:
    match size:
        case Calendar.DAY:
            return begin + timedelta(days=1)
        case Calendar.WEEK:
            return begin + timedelta(days=7)
        case Calendar.MONTH:
            return (begin + timedelta(days=31)).replace(day=1)
        case Calendar.YEAR:
            return begin.replace(year=begin.year + 1)


def _date(seconds: int) -> date:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)).date()


def _seconds(day: date) -> int:
    return (day.toordinal() - _EPOCH) * _DAY_SECONDS
