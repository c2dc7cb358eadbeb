"""What is known of the values in a file without opening it, and whether a filter can find any.

A manifest may say of a file, for each of its first columns, the least and the greatest value and
how many nulls there are. `may_hold` says whether a filter could be true for one row of such a file;
where it says no, the file need not be read. It never says no of a file that has such a row:

- a bound may be less, or greater, than any value that is there. Long texts are cut so: downwards as
  a least value, and upwards, to the next text that is not longer, as a greatest one;
- texts are compared by their code points, which is the order of their UTF-8, and so of Spark's
  texts without a collation. Columns of all other texts have no bounds;
- NaN is greater than everything in Spark, and in no bound: nobody asks a column of doubles whether
  it has values above something. The two zeros are equal, here as there;
- what has no bound, no count of nulls or no known type, and filters of any other kind, may hold.

Numbers and days, and moments in microseconds, both since 1970, are JSON numbers; decimals and texts
are JSON texts. The type of the column in the manifest says which it is: `kind_of`. Pure; bounds are
taken from the footers of what Spark jobs have written, and used before the next job is planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

CHARACTERS_MAX: Final = 32
"""How much of a text is kept."""
COLUMNS_MAX: Final = 32
"""How many columns of a file have bounds: its first ones."""
_CODE_POINT_MAX: Final = 0x10FFFF
_SURROGATES: Final = range(0xD800, 0xE000)
_NUMBERS: Final = ("tinyint", "smallint", "int", "bigint")


class Bound(msgspec.Struct, frozen=True, array_like=True):
    """Of one column of one file. What is None is not known."""

    low: int | float | str | None = None
    high: int | float | str | None = None
    nulls: Annotated[int, Meta(ge=0)] | None = None


class ColumnKind(StrEnum):
    """How the values of a column are compared."""

    NUMBER = "number"
    DAY = "day"
    MOMENT = "moment"
    LOCAL_MOMENT = "local moment"
    DOUBLE = "double"
    DECIMAL = "decimal"
    TEXT = "text"


Value: TypeAlias = int | float | str | Decimal


class Sign(StrEnum):
    """How a column is compared with a value."""

    LESS = "<"
    AT_MOST = "<="
    EQUAL = "="
    AT_LEAST = ">="
    GREATER = ">"


@dataclass(frozen=True, slots=True)
class Compared:
    """A column against a value, which is not null; of doubles, a finite one."""

    column: str
    sign: Sign
    value: Value


@dataclass(frozen=True, slots=True)
class Prefixed:
    """A text that begins so."""

    column: str
    prefix: str


@dataclass(frozen=True, slots=True)
class Nullness:
    """That a column is null, or is not."""

    column: str
    is_null: bool


@dataclass(frozen=True, slots=True)
class Conjunction:
    """All of these."""

    parts: tuple[Filter, ...]


@dataclass(frozen=True, slots=True)
class Disjunction:
    """At least one of these; without any, nothing."""

    parts: tuple[Filter, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """Anything else."""


Filter: TypeAlias = Compared | Prefixed | Nullness | Conjunction | Disjunction | Unknown


def kind_of(column_type: str) -> ColumnKind | None:
    """How a column of a type, in Spark's words, is compared; None if it has no bounds."""
    if column_type in _NUMBERS:
        return ColumnKind.NUMBER
    if column_type.startswith("decimal("):
        return ColumnKind.DECIMAL
    return {
        "date": ColumnKind.DAY,
        "timestamp": ColumnKind.MOMENT,
        "timestamp_ntz": ColumnKind.LOCAL_MOMENT,
        "double": ColumnKind.DOUBLE,
        "string": ColumnKind.TEXT,
    }.get(column_type)


def bound_of(low: Value | None, high: Value | None, nulls: int | None) -> Bound:
    """A bound of values that were seen: texts are cut, and what cannot be told is left out."""
    if low is None or high is None or not (_is_finite(low) and _is_finite(high)):
        return Bound(nulls=nulls)
    if isinstance(low, str) and isinstance(high, str):
        return Bound(low[:CHARACTERS_MAX], _raised(high), nulls)
    return Bound(_plain(low), _plain(high), nulls)


def bound_values(said: Iterable[tuple[str, Any, Any, int | None, bool]]) -> dict[str, Bound]:
    """Bounds by column, from what `parquet_child.ends` has read. Raises `ArithmeticError`."""
    found = []
    for name, low, high, nulls, is_decimal in said:
        if is_decimal and low is not None and high is not None:
            found.append((name, bound_of(Decimal(low), Decimal(high), nulls)))
        else:
            found.append((name, bound_of(low, high, nulls)))
    return with_room(found, columns_max=COLUMNS_MAX)


def may_hold(
    wanted: Filter,
    bounds: Mapping[str, Bound],
    kinds: Mapping[str, ColumnKind],
    *,
    rows: int | None,
) -> bool:
    """Whether a file may have a row for which the filter is true. `kinds` are of its columns."""
    match wanted:
        case Conjunction(parts):
            return all(may_hold(each, bounds, kinds, rows=rows) for each in parts)
        case Disjunction(parts):
            return any(may_hold(each, bounds, kinds, rows=rows) for each in parts)
        case Unknown():
            return True
    bound, kind = bounds.get(wanted.column), kinds.get(wanted.column)
    if bound is None or kind is None:
        return True
    if isinstance(wanted, Nullness) and wanted.is_null:
        return bound.nulls != 0
    if rows is not None and bound.nulls == rows:
        return False  # nothing but nulls, for which no comparison is true
    low, high = (_value(each, kind) for each in (bound.low, bound.high))
    match wanted:
        case Compared():
            return _may_compare(wanted, kind, low, high)
        case Prefixed(_, prefix) if kind is ColumnKind.TEXT:
            is_below = isinstance(high, str) and high < prefix
            is_above = isinstance(low, str) and low[: len(prefix)] > prefix
            return not (is_below or is_above)
    return True


def with_room(bounds: Iterable[tuple[str, Bound]], *, columns_max: int) -> dict[str, Bound]:
    """The first of these that say something."""
    said = [(name, each) for name, each in bounds if each != Bound()]
    return dict(said[: max(0, min(columns_max, COLUMNS_MAX))])


def _may_compare(wanted: Compared, kind: ColumnKind, low: Any, high: Any) -> bool:
    value = wanted.value
    if not _is_of(value, kind):
        return True
    is_below = high is not None and high < value
    is_above = low is not None and low > value
    match wanted.sign:
        case Sign.EQUAL:
            return not (is_below or is_above)
        case Sign.LESS:
            return not (is_above or low == value)
        case Sign.AT_MOST:
            return not is_above
        case Sign.AT_LEAST:
            return kind is ColumnKind.DOUBLE or not is_below
        case Sign.GREATER:
            return kind is ColumnKind.DOUBLE or not (is_below or high == value)


def _is_of(value: Value, kind: ColumnKind) -> bool:
    match kind:
        case ColumnKind.TEXT:
            return isinstance(value, str)
        case ColumnKind.DECIMAL:
            return isinstance(value, Decimal) and value.is_finite()
        case ColumnKind.DOUBLE:
            return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _value(said: float | str | None, kind: ColumnKind) -> Value | None:
    """A bound as a value of its kind; None for one of which nobody can tell."""
    if kind is ColumnKind.DECIMAL:
        try:
            return Decimal(said) if isinstance(said, str) else None
        except ArithmeticError:
            return None
    return said if said is not None and _is_of(said, kind) else None


def _plain(value: Value) -> int | float | str:
    return str(value) if isinstance(value, Decimal) else value


def _is_finite(value: Value) -> bool:
    return isinstance(value, str) or math.isfinite(value)


def _raised(text: str) -> str | None:
    """A text that is not longer than allowed, and not less than this one; None if there is none."""
    if len(text) <= CHARACTERS_MAX:
        return text
    kept = text[:CHARACTERS_MAX]
    while kept:
        following = ord(kept[-1]) + 1
        if following in _SURROGATES:
            following = _SURROGATES.stop
        if following <= _CODE_POINT_MAX:
            return kept[:-1] + chr(following)
        kept = kept[:-1]
    return None
