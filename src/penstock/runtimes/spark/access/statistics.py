"""Bounds of columns from the footer of a Parquet file that Spark or pyarrow has just written.

Of columns at the top that are numbers, dates, timestamps in microseconds, doubles, decimals or
texts. What a footer leaves out of one row group, nobody knows of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from pyarrow import parquet

from penstock.datasets.bounds import COLUMNS_MAX, Bound, Value, bound_of, with_room

_RAW: Final = ("DATE", "INT", "NONE", "TIMESTAMP")
_LEGACY: Final = b"org.apache.spark.legacy"
"""How keys of a footer begin if Spark was told to write dates as its earliest releases did."""
_ROW_GROUPS_MAX: Final = 10_000


def file_bounds(path: Path | Any) -> dict[str, Bound]:
    """The bounds of a file, by column."""
    return bounds_of(parquet.read_metadata(path))


def bounds_of(metadata: Any) -> dict[str, Bound]:
    """The bounds that a footer tells, by column."""
    if metadata.num_row_groups > _ROW_GROUPS_MAX:
        return {}
    return with_room(_bounds(metadata), columns_max=COLUMNS_MAX)


def _bounds(metadata: Any) -> Iterator[tuple[str, Bound]]:
    # Days before 1582 are then stored as others than they are.
    is_shifted = any(each.startswith(_LEGACY) for each in metadata.metadata or ())
    for place in range(metadata.num_columns):
        column = metadata.schema.column(place)
        if is_shifted and column.logical_type.type in ("DATE", "TIMESTAMP"):
            continue
        is_top = column.max_repetition_level == 0 and column.max_definition_level <= 1
        # The path of a field inside of a struct has a dot too.
        if is_top and "." not in column.path and _is_ordered(column):
            yield column.name, _bound(metadata, place, column)


def _is_ordered(column: Any) -> bool:
    logical = column.logical_type.type
    match column.physical_type:
        case "DOUBLE":
            return bool(logical == "NONE")
        case "INT32" | "INT64" if logical in _RAW:
            said = json.loads(column.logical_type.to_json())
            is_signed = said.get("isSigned", True)
            return bool(is_signed and said.get("timeUnit", "microseconds") == "microseconds")
        case "BYTE_ARRAY":
            return logical in ("STRING", "DECIMAL")
    return bool(logical == "DECIMAL")


def _bound(metadata: Any, place: int, column: Any) -> Bound:
    low: Any = None
    high: Any = None
    nulls: int | None = 0
    is_known = True
    for number in range(metadata.num_row_groups):
        chunk = metadata.row_group(number).column(place)
        said = chunk.statistics
        if said is None or not said.has_null_count:
            nulls = None
        elif nulls is not None:
            nulls += said.null_count
        if said is not None and said.has_null_count and said.null_count == chunk.num_values:
            continue
        ends = None if said is None or not said.has_min_max else _ends(said, column)
        if ends is None:
            is_known = False
            continue
        low = ends[0] if low is None else min(low, ends[0])
        high = ends[1] if high is None else max(high, ends[1])
    return bound_of(low, high, nulls) if is_known else bound_of(None, None, nulls)


def _ends(said: Any, column: Any) -> tuple[Value, Value] | None:
    try:
        if column.physical_type == "DOUBLE":
            low, high = said.min, said.max
            # A writer that puts NaN into its statistics says nothing about the other values.
            return (low, high) if low == low and high == high else None  # noqa: PLR0124 - NaN
        if column.logical_type.type == "STRING":
            low, high = said.min, said.max
            return (low, high) if isinstance(low, str) and isinstance(high, str) else None
        if column.logical_type.type == "DECIMAL":
            low, high = said.min, said.max
            is_decimal = isinstance(low, Decimal) and isinstance(high, Decimal)
            return (low, high) if is_decimal else None
        return int(said.min_raw), int(said.max_raw)
    except (ValueError, OverflowError, UnicodeDecodeError, NotImplementedError):
        return None
