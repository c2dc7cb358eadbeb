"""Rows that left Spark, compared as Spark compares them: which is first, and which are equal.

Arrow's order is another one: null comes last there and NaN beside it, where Spark has null first
and NaN after all numbers; and groups tell -0.0 from 0.0, which are equal to Spark. So fractions are
compared by whole numbers that are made of their bits (`_ranks`). Pure; called by `writing` and
`expectations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_KEY: Final = "_penstock_key_"


def in_sparks_order(table: Any, names: Sequence[str]) -> Any:
    """The rows of a table sorted by these columns, as `ORDER BY` does it.

    -0.0 and 0.0 are equal, so the columns that come later decide; if none does, -0.0 is first:
    equal rows always have one order.
    """
    columns = [table.column(name) for name in names]
    keys = []
    for column in columns:
        if column.null_count:
            keys.append(column.is_valid())
        keys.append(_comparable(column))
    keys += [_ranks(each, is_signed=True) for each in columns if pa.types.is_floating(each.type)]
    compared = pa.table({f"{_KEY}{place}": key for place, key in enumerate(keys)})
    order = [(name, "ascending") for name in compared.column_names]
    return table.take(pc.sort_indices(compared, sort_keys=order))


def more_than_once(table: Any, names: Sequence[str]) -> Any:
    """The values of these columns that several rows have, as `GROUP BY` finds them, and `count`."""
    keys = {f"{_KEY}{place}": _comparable(table.column(name)) for place, name in enumerate(names)}
    row = pa.array(np.arange(table.num_rows))
    groups = pa.table({**keys, "row": row}).group_by(list(keys))
    counted = groups.aggregate([("row", "min"), ("row", "count")])
    doubled = counted.filter(pc.greater(counted.column("row_count"), 1))
    found = table.select(list(names)).take(doubled.column("row_min"))
    return found.append_column("count", doubled.column("row_count"))


def _comparable(column: Any) -> Any:
    """A column whose values are ordered, and equal, in Arrow as those of this one are in Spark."""
    if pa.types.is_nested(column.type):
        # Nothing is sorted by it; and what is equal is written alike.
        written = (None if each is None else repr(_plain(each)) for each in column.to_pylist())
        return pa.chunked_array([pa.array(written, pa.string())])
    return _ranks(column, is_signed=False) if pa.types.is_floating(column.type) else column


def _plain(value: Any) -> Any:
    match value:
        case float():
            return value + 0.0
        case dict():
            return {name: _plain(each) for name, each in value.items()}
        case list():
            return [_plain(each) for each in value]
    return value


def _ranks(column: Any, *, is_signed: bool) -> Any:
    """For fractions whole numbers in Spark's order; zeros are equal unless they are signed."""
    whole = column.combine_chunks()
    is_null = whole.is_null().to_numpy(zero_copy_only=False)
    values = whole.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
    values = np.where(np.isnan(values), np.nan, values if is_signed else values + 0.0)
    bits = values.view(np.int64)
    # The bits of negative numbers grow as these become smaller.
    ranks = np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits)
    return pa.chunked_array([pa.array(ranks, mask=is_null)])
