"""Filters that Spark pushes to a Python data source, as far as bounds can tell of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

from pyspark.sql import datasource, types

from penstock.datasets.bounds import (
    Bound,
    Compared,
    Every,
    Filter,
    Nullness,
    Prefixed,
    Sign,
    Some,
    Unknown,
    kind_of,
    may_hold,
)
from penstock.datasets.snapshot import DataFile
from penstock.runtimes.spark.configs import PARTITION

_SIGNS: Final[Mapping[type[Any], Sign]] = {
    datasource.EqualTo: Sign.EQUAL,
    datasource.EqualNullSafe: Sign.EQUAL,
    datasource.LessThan: Sign.LESS,
    datasource.LessThanOrEqual: Sign.AT_MOST,
    datasource.GreaterThan: Sign.GREATER,
    datasource.GreaterThanOrEqual: Sign.AT_LEAST,
}
_FIRST_DAY: Final = date(1970, 1, 1)


def wanted(pushed: Iterable[datasource.Filter]) -> Filter:
    """What rows have to be like, all of these together."""
    return Every(tuple(map(_one, pushed)))


def may_have(
    file: DataFile, rows_like: Filter, schema: types.StructType, *, tag: str | None
) -> bool:
    """Whether a file, whose rows have this tag as `_partition`, may have such a row."""
    kinds = {
        each.name: kind
        for each in schema.fields
        if (kind := kind_of(each.dataType.simpleString())) is not None
    }
    bounds = dict(file.bounds)
    if tag is not None:
        bounds[PARTITION] = Bound(tag, tag, 0)
    return may_hold(rows_like, bounds, kinds, rows=file.rows)


def _one(pushed: datasource.Filter) -> Filter:
    attribute: tuple[str, ...] = getattr(pushed, "attribute", ())
    if len(attribute) != 1:
        return Unknown()
    column = attribute[0]
    match pushed:
        case datasource.IsNull() | datasource.IsNotNull():
            return Nullness(column, isinstance(pushed, datasource.IsNull))
        case datasource.StringStartsWith():
            return Prefixed(column, pushed.value)
        case datasource.In():
            return Some(tuple(_compared(column, Sign.EQUAL, each) for each in pushed.value))
    sign = _SIGNS.get(type(pushed))
    return Unknown() if sign is None else _compared(column, sign, getattr(pushed, "value", None))


def _compared(column: str, sign: Sign, value: Any) -> Filter:
    match value:
        case bool() | datetime():
            return Unknown()  # of moments nobody says in which zone they are
        case date():
            return Compared(column, sign, (value - _FIRST_DAY).days)
        case int() | float() | str() | Decimal():
            return Compared(column, sign, value)
    return Unknown()
