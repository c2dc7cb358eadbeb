"""Cron expressions: five fields, and the times that they name in a time zone.

`minute hour day-of-month month day-of-week`, each a list of `*`, a value, a range `a-b`, with a
step `/n`; months and days of the week also by their first three letters; 0 and 7 are Sunday;
`@hourly`, `@daily`, `@weekly`, `@monthly` and `@yearly` stand for whole expressions. As
everywhere, when both day fields are restricted (neither begins with `*`), a day that fits one of
them is enough.

When clocks are put forward, a time that does not exist is moved on by the length of the jump;
when they are put back, a time that comes twice counts once, at its first coming. An hour that
begins with `*` means the passing of time rather than a time of day, so there nothing is moved and
all counts.

Pure functions, but for the machine's time zone files. A text that is no expression is a
`ValueError`. The times of a few days are kept, for whoever asks for the next time asks again.
"""

from __future__ import annotations

import zoneinfo
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache, lru_cache
from typing import Final

from penstock.kernel.text import listed, shown

CHARACTERS_MAX: Final = 200
DAYS_AHEAD_MAX: Final = 41 * 366
"""No two times of an expression that has any are further apart than leap days on a weekday."""

_DAYS_KEPT: Final = 64
"""Of how many days the times are kept: a day has 1,440 at most, or 1,500 when clocks go back."""

_MACROS: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_MONTHS: Final = (
    "jan",
    "feb",
    "mar",
    "apr",
    "may",
    "jun",
    "jul",
    "aug",
    "sep",
    "oct",
    "nov",
    "dec",
)
_WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_DAY: Final = timedelta(days=1)
_LONGEST: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    least: int
    most: int
    words: tuple[str, ...] = ()


_FIELDS: Final = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of month", 1, 31),
    _Field("month", 1, 12, _MONTHS),
    _Field("day of week", 0, 7, _WEEKDAYS),
)


@dataclass(frozen=True, slots=True)
class Cron:
    """The values of each field, in order; days of the week are counted from Sunday as 0."""

    expression: str
    """As it was written, with single spaces and in small letters."""
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]
    is_any_hour: bool
    is_either_day: bool
    """Whether a day fits by its number or by its weekday, rather than by both."""

    def has(self, day: date) -> bool:
        """Whether some time of this day is named."""
        if day.month not in self.months:
            return False
        by_number = day.day in self.days
        by_weekday = day.isoweekday() % 7 in self.weekdays
        return by_number or by_weekday if self.is_either_day else by_number and by_weekday


def parse_cron(text: str) -> Cron:
    """The values that an expression names."""
    if len(text) > CHARACTERS_MAX:
        raise ValueError(f"is longer than {CHARACTERS_MAX} characters")
    expression = " ".join(text.lower().split())
    if expression.startswith("@") and expression not in _MACROS:
        raise ValueError(f"is not known; write five fields, or one of {listed(sorted(_MACROS))}")
    parts = _MACROS.get(expression, expression).split(" ")
    if len(parts) != len(_FIELDS):
        found = len(parts) if expression else 0
        raise ValueError(
            f"has {found} field{'s' if found != 1 else ''} where a cron expression has five:"
            " minute, hour, day of month, month and day of week"
        )
    minutes, hours, days, months, weekdays = map(_values, _FIELDS, parts)
    cron = Cron(
        expression=expression,
        minutes=minutes,
        hours=hours,
        days=days,
        months=months,
        weekdays=tuple(sorted({day % 7 for day in weekdays})),
        is_any_hour=parts[1].startswith("*"),
        is_either_day=not parts[2].startswith("*") and not parts[4].startswith("*"),
    )
    if not cron.is_either_day and not any(days[0] <= _LONGEST[month - 1] for month in months):
        raise ValueError(f"never comes: no such month has a day {days[0]}")
    return cron


def is_time_zone(name: str) -> bool:
    """Whether this machine knows a time zone of this name."""
    return name in time_zones()


@cache
def time_zones() -> frozenset[str]:
    """The names of all time zones; read once, for it means to look through folders."""
    return frozenset(zoneinfo.available_timezones()) | {"UTC"}


def next_after(cron: Cron, after: datetime, *, time_zone: str) -> datetime | None:
    """The first time that is later than `after`, which knows its zone; the answer is in UTC.

    None only at the end of the calendar.
    """
    zone = zoneinfo.ZoneInfo(time_zone)
    found: datetime | None = None
    try:
        # Clocks jump by a day at most, so what is later than `after` begins no earlier than this.
        first = after.astimezone(zone).date() - _DAY
        for ahead in range(DAYS_AHEAD_MAX):
            day = first + ahead * _DAY
            times = _times(cron, day, time_zone) if cron.has(day) else ()
            place = bisect_right(times, after)
            # The day after that is looked at too: where clocks are put back past midnight, its
            # first time is earlier than the last of the day before.
            if found is not None:
                return min((found, *times[place : place + 1]))
            found = times[place] if place < len(times) else None
    except OverflowError:
        return found
    return found


def previous_before(cron: Cron, before: datetime, *, time_zone: str) -> datetime | None:
    """The last time that is earlier than `before`, as `next_after` has them."""
    zone = zoneinfo.ZoneInfo(time_zone)
    found: datetime | None = None
    try:
        last = before.astimezone(zone).date() + _DAY
        for back in range(DAYS_AHEAD_MAX):
            day = last - back * _DAY
            times = _times(cron, day, time_zone) if cron.has(day) else ()
            place = bisect_left(times, before)
            if found is not None:
                return max((found, *times[:place][-1:]))
            found = times[place - 1] if place > 0 else None
    except OverflowError:
        return found
    return found


@lru_cache(maxsize=_DAYS_KEPT)
def _times(cron: Cron, day: date, time_zone: str) -> tuple[datetime, ...]:
    """All times of a day, in UTC and in order."""
    return tuple(sorted(_unordered(cron, day, zoneinfo.ZoneInfo(time_zone))))


def _unordered(cron: Cron, day: date, zone: zoneinfo.ZoneInfo) -> Iterator[datetime]:
    for hour in cron.hours:
        for minute in cron.minutes:
            local = datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone)
            first = local.astimezone(UTC)
            if not cron.is_any_hour:
                yield first
                continue
            # One time, but two where clocks are put back.
            for time in {first, local.replace(fold=1).astimezone(UTC)}:
                if time.astimezone(zone).replace(tzinfo=None) == local.replace(tzinfo=None):
                    yield time


def _values(field: _Field, text: str) -> tuple[int, ...]:
    values: set[int] = set()
    for part in text.split(","):
        values.update(_range(field, part))
    return tuple(sorted(values))


def _range(field: _Field, text: str) -> range:
    span, slash, step_text = text.partition("/")
    step = _number(field, step_text) if slash else 1
    if step < 1 or step > field.most:
        raise ValueError(f"has a step of {step} in its {field.name}; write 1 to {field.most}")
    if span == "*":
        # The seventh day is Sunday again.
        return range(field.least, (6 if field.words is _WEEKDAYS else field.most) + 1, step)
    first_text, dash, last_text = span.partition("-")
    first = _value(field, first_text)
    last = _value(field, last_text) if dash else first
    if slash and not dash:
        raise ValueError(
            f"has a step without a range in its {field.name}; write */{step_text}"
            f" or {first_text}-{field.most}/{step_text}"
        )
    if last < first:
        # "sat-sun" is a range to the seventh day.
        if field.words is not _WEEKDAYS or last != 0:
            raise ValueError(f"has a range from {first} down to {last} in its {field.name}")
        last = 7
    return range(first, last + 1, step)


def _value(field: _Field, text: str) -> int:
    if text in field.words:
        return field.words.index(text) + field.least
    value = _number(field, text)
    if not field.least <= value <= field.most:
        raise ValueError(f"has {value} as its {field.name}; write {field.least} to {field.most}")
    return value


def _number(field: _Field, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        names = f" or {listed(field.words)}" if field.words else ""
        raise ValueError(
            f"has {shown(text)} in its {field.name}; write numbers{names},"
            " `*`, lists, ranges and steps"
        )
    return int(text)
