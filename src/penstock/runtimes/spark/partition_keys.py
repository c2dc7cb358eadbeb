"""The keys of the partitions that a result is divided into by `partition_by`.

An output's `partition_by` is an SQL expression over the columns of the result. Each of its
values is a partition, whose key is a text:

| type of the value | key |
|---|---|
| text, whole number, boolean | as Spark writes it |
| date | `2026-01-31` |
| timestamp | `2026-01-31T05:00Z`; with seconds if it has any |
| `date_trunc('month', …)`, `trunc(…, 'month')` | `2026-01`: as long as what it was cut to |

So the keys of years, months, ISO weeks (`2026-W05`), days and hours are those of the calendar
that range operators cut by and cron sources emit. They have its ranges too, in seconds since
1970: the next job may read by range. Quarters are `2026-Q1`. All of it is in UTC, the session's
time zone. In a session of another zone, years to days are those of that zone and have no
ranges; what says `Z` is in UTC there too, where each hour of a day that has one twice is a
partition.

No key is NULL, empty, longer than `KEY_BYTES_MAX` bytes, or has control characters: such a row
ends the task, with a sentence that has the row in it. What is computed here is a column;
nothing is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, types
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.columns import quoted
from penstock.runtimes.spark.errors import in_field

KEY: Final = "_penstock_key"
"""The column that has the key while rows are written; it is in no file."""
KEY_BYTES_MAX: Final = 80
"""Escaped, as the name of a folder, it has three times as many at most."""
_SHOWN_COLUMNS: Final = 8
_SHOWN_CHARACTERS: Final = 500
_SHOWN: Final = (
    types.StringType,
    types.BooleanType,
    types.IntegralType,
    types.DecimalType,
    types.FloatType,
    types.DoubleType,
    types.DateType,
    types.TimestampType,
    types.TimestampNTZType,
)
_UTC: Final = ("UTC", "GMT", "Z", "Etc/UTC", "+00:00")
_ZONE: Final = "spark.sql.session.timeZone"


class Grain(StrEnum):
    """What a time was cut to."""

    YEAR = "year"
    QUARTER = "quarter"
    MONTH = "month"
    WEEK = "week"
    DAY = "day"
    HOUR = "hour"
    MINUTE = "minute"


_UNITS: Final[Mapping[str, Grain]] = {
    **{each.value: each for each in Grain},
    **dict.fromkeys(("yyyy", "yy"), Grain.YEAR),
    **dict.fromkeys(("mon", "mm"), Grain.MONTH),
    "dd": Grain.DAY,
}
_FORMATS: Final[Mapping[Grain, str]] = {
    Grain.YEAR: "yyyy",
    Grain.MONTH: "yyyy-MM",
    Grain.DAY: "yyyy-MM-dd",
    Grain.HOUR: "yyyy-MM-dd'T'HH:mm'Z'",
    Grain.MINUTE: "yyyy-MM-dd'T'HH:mm'Z'",
}
_WITH_SECONDS: Final = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'"
_CALL: Final = re.compile(r"(date_trunc|trunc)\s*\((.*)\)", re.IGNORECASE | re.DOTALL)
_LAST: Final = re.compile(r".*,\s*(['\"])([a-z]+)\1\s*", re.IGNORECASE | re.DOTALL)
_FIRST: Final = re.compile(r"\s*(['\"])([a-z]+)\1\s*,.*", re.IGNORECASE | re.DOTALL)
_QUOTED: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`")

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class KeyedResult:
    """A result with its keys, and what the keys stand for."""

    frame: DataFrame
    """It has the column `KEY` besides its own."""
    range_of: Callable[[str], Range | None]
    """The range that a key stands for, in seconds since 1970; None if it stands for none."""


def keyed(session: Any, frame: DataFrame, by: str, *, output: str) -> KeyedResult:
    """The frame with the keys of an output; `WorkFailed` if the expression makes none."""
    where = f"partition_by of the output {output}"
    if any(name.casefold() == KEY for name in frame.columns):
        raise WorkFailed(f"The result has a column {KEY}; rename it.", is_retried=False)
    try:
        value = F.expr(by)
        kind = frame.select(value).schema.fields[0].dataType
        grain = _grain(by, kind)
        is_utc = session.conf.get(_ZONE) in _UTC
        text = _text(value, kind, grain, is_utc=is_utc)
        if text is None:
            raise WorkFailed(
                f"{where}: {by} is of the type {kind.simpleString()}; write an expression that is a"
                " date, a timestamp, a text or a whole number.",
                is_retried=False,
            )
        made = frame.withColumn(KEY, _judged(text, frame, where=where))
        made.schema  # noqa: B018 - Connect looks at the expression now
    except PySparkException as error:
        raise in_field(error, where) from error
    is_ranged = grain is not None and is_utc
    return KeyedResult(made, (lambda key: key_range(key, grain)) if is_ranged else lambda _: None)


def key_range(key: str, grain: Grain | None) -> Range | None:
    """The range of a key that was cut to a part of the calendar; None for what has none there."""
    match grain:
        case Grain.YEAR:
            begin = datetime.strptime(key, "%Y").replace(tzinfo=UTC)
            end = _later(_later(begin, days=366), first=True)
            end = None if end is None else end.replace(month=1)
        case Grain.MONTH:
            begin = datetime.strptime(key, "%Y-%m").replace(tzinfo=UTC)
            end = _later(_later(begin, days=31), first=True)
        case Grain.WEEK:
            begin = datetime.strptime(f"{key}-1", "%G-W%V-%u").replace(tzinfo=UTC)
            end = _later(begin, days=7)
        case Grain.DAY:
            begin = datetime.strptime(key, "%Y-%m-%d").replace(tzinfo=UTC)
            end = _later(begin, days=1)
        case Grain.HOUR | Grain.MINUTE:
            begin = datetime.strptime(key, "%Y-%m-%dT%H:%MZ").replace(tzinfo=UTC)
            end = _later(begin, minutes=60 if grain is Grain.HOUR else 1)
        case _:
            return None
    # The last moments of the calendar have no end.
    return None if end is None else (_seconds(begin), _seconds(end))


def grain_of(by: str) -> Grain | None:
    """What an expression cuts a time to, if all of it is a call that does so."""
    found = _CALL.fullmatch(by.strip())
    if found is None or not _is_one_call(by.strip()):
        return None
    unit = (_FIRST if found[1].lower() == "date_trunc" else _LAST).fullmatch(found[2])
    return None if unit is None else _UNITS.get(unit[2].lower())


def _grain(by: str, kind: types.DataType) -> Grain | None:
    match kind:
        case types.DateType():
            return grain_of(by) or Grain.DAY
        case types.TimestampType() | types.TimestampNTZType():
            return grain_of(by)
    return None


def _is_one_call(text: str) -> bool:
    """Whether the first bracket of a text is closed by its last character."""
    plain = _QUOTED.sub(lambda found: "x" * len(found[0]), text)
    depth = 0
    for place, letter in enumerate(plain):
        depth += (letter == "(") - (letter == ")")
        if letter == ")" and depth == 0:
            return place == len(plain) - 1
    return False


def _text(
    value: Column, kind: types.DataType, grain: Grain | None, *, is_utc: bool
) -> Column | None:
    match kind:
        case types.StringType() | types.IntegralType() | types.BooleanType():
            return value.cast("string")
        case types.TimestampType() if not is_utc and grain in (None, Grain.HOUR, Grain.MINUTE):
            return F.when(F.year(value).between(1, 9999), _instant(value))
        case types.DateType() | types.TimestampType() | types.TimestampNTZType():
            text = _time(value, grain)
            is_known = F.year(value).between(1, 9999)
            return F.when(is_known, text)
    return None


def _time(value: Column, grain: Grain | None) -> Column:
    match grain:
        case Grain.WEEK:
            year = F.lpad(F.date_part(F.lit("YEAROFWEEK"), value).cast("string"), 4, "0")
            week = F.lpad(F.weekofyear(value).cast("string"), 2, "0")
            return F.concat(year, F.lit("-W"), week)
        case Grain.QUARTER:
            quarter = F.quarter(value).cast("string")
            return F.concat(F.date_format(value, "yyyy"), F.lit("-Q"), quarter)
        case None:
            is_even = F.date_trunc("minute", value) == value
            short = F.date_format(value, _FORMATS[Grain.MINUTE])
            return F.when(is_even, short).otherwise(F.date_format(value, _WITH_SECONDS))
    return F.date_format(value, _FORMATS[grain])


def _instant(value: Column) -> Column:
    """An instant in UTC, as `_time` writes it where that is the session's time zone.

    Its text is that of a time without a zone: `date_format` knows no zone but the session's.
    """
    epoch = F.lit("1970-01-01 00:00:00").cast("timestamp_ntz")
    text = F.timestamp_add("MICROSECOND", F.unix_micros(value), epoch).cast("string")
    day, clock = F.substring(text, 1, 10), F.substring(text, 12, 15)
    seconds = F.when(F.length(clock) == 8, F.concat(clock, F.lit("."))).otherwise(clock)
    is_even = F.substring(clock, 6, 10) == ":00"
    shown = F.when(is_even, F.substring(clock, 1, 5)).otherwise(F.rpad(seconds, 15, "0"))
    return F.concat(day, F.lit("T"), shown, F.lit("Z"))


def _judged(text: Column, frame: DataFrame, *, where: str) -> Column:
    """The keys; a row that has none which can be used ends the task, and is told."""
    shown = [
        F.col(quoted(field.name)).cast("string").alias(field.name)
        for field in frame.schema.fields
        if isinstance(field.dataType, _SHOWN)
    ][:_SHOWN_COLUMNS]
    row = F.to_json(F.struct(*shown), {"ignoreNullFields": "false"}) if shown else F.lit("{}")
    said = F.concat(
        F.lit(f"{where} is "),
        F.coalesce(F.concat(F.lit("'"), F.substring(text, 1, 200), F.lit("'")), F.lit("NULL")),
        F.lit(
            f" for a row, and the key of a partition has 1 to {KEY_BYTES_MAX} bytes without control"
            " characters. Filter such rows, or give them a key by coalesce. The row: "
        ),
        F.substring(row, 1, _SHOWN_CHARACTERS),
    )
    is_usable = F.octet_length(text).between(1, KEY_BYTES_MAX) & ~text.rlike(r"[\x00-\x1f\x7f]")
    return F.when(is_usable, text).otherwise(F.raise_error(said).cast("string"))


def _later(
    moment: datetime | None, *, days: int = 0, minutes: int = 0, first: bool = False
) -> datetime | None:
    if moment is None:
        return None
    try:
        found = moment + timedelta(days=days, minutes=minutes)
    except OverflowError:
        return None
    return found.replace(day=1) if first else found


def _seconds(moment: datetime) -> int:
    return int((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds())
