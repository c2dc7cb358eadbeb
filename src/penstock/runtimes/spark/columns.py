"""Columns as Spark has them: their types and names, their order, and what may leave through Arrow.

Every column is nullable to readers, whatever Spark concluded from one query: files say nothing
that Spark would believe when it reads them, and two plans of one job may conclude different
things.

Rows that left Spark are compared as Spark compares them (`in_sparks_order`, `more_than_once`).
Arrow's order is another one: null comes last there and NaN beside it, where Spark has null
first and NaN after all numbers; and groups tell -0.0 from 0.0, which are equal to Spark. So
fractions are compared by whole numbers that are made of their bits (`_ranks`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types

from penstock.datasets.schema import Column
from penstock.kernel.errors import WorkFailed

_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_THROUGH_ARROW: Final = (
    types.BooleanType,
    types.ByteType,
    types.ShortType,
    types.IntegerType,
    types.LongType,
    types.FloatType,
    types.DoubleType,
    types.DecimalType,
    types.DateType,
    types.TimestampType,
    types.TimestampNTZType,
    types.BinaryType,
)
"""Types that mean the same in a file by pyarrow as in one by Spark; and texts without collation."""
_SORTABLE: Final = (types.StringType, types.DayTimeIntervalType, types.YearMonthIntervalType)


def columns_of(schema: types.StructType) -> tuple[Column, ...]:
    """The columns of a result. Raises `WorkFailed` where they cannot be those of a dataset."""
    _refuse_doubles(schema)
    for field in schema.fields:
        if _has_void(field.dataType):
            raise WorkFailed(
                f"The column {field.name!r} of the result has no type ({words(field.dataType)}): it"
                " is always null; cast it, as in CAST(NULL AS string).",
                is_retried=False,
            )
    return tuple(Column(field.name, words(field.dataType)) for field in schema.fields)


def words(said: types.DataType) -> str:
    """A type as Spark writes it, such that Spark can read it again.

    Of a type that users have defined, as the vectors of Spark's ML, it is what its values are made
    of: that is in the files, and Spark has no word for the other.
    """
    match said:
        case types.UserDefinedType():
            return words(said.sqlType())
        case types.ArrayType():
            return f"array<{words(said.elementType)}>"
        case types.MapType():
            return f"map<{words(said.keyType)},{words(said.valueType)}>"
        case types.StructType():
            inner = ",".join(f"{_name(each.name)}:{words(each.dataType)}" for each in said.fields)
            return f"struct<{inner}>"
    return said.simpleString()


def ddl(columns: Iterable[Column]) -> str:
    """Columns as a schema that Spark reads."""
    return ", ".join(f"{quoted(each.name)} {each.type}" for each in columns)


def quoted(name: str) -> str:
    """A name in SQL, whatever is in it."""
    return "`" + name.replace("`", "``") + "`"


def is_for_arrow(said: types.DataType) -> bool:
    """Whether values of this type may leave through Arrow into a file that Spark reads the same."""
    match said:
        case types.ArrayType():
            return is_for_arrow(said.elementType)
        case types.MapType():
            return is_for_arrow(said.keyType) and is_for_arrow(said.valueType)
        case types.StructType():
            return bool(said.fields) and all(is_for_arrow(each.dataType) for each in said.fields)
    return isinstance(said, _THROUGH_ARROW) or said == types.StringType()


def is_orderable(said: types.DataType) -> bool:
    """Whether Spark and pyarrow can both sort by it."""
    return is_for_arrow(said) and not isinstance(
        said, types.ArrayType | types.MapType | types.StructType
    )


def is_sortable(said: types.DataType) -> bool:
    """Whether Spark can sort by it."""
    match said:
        case types.ArrayType():
            return is_sortable(said.elementType)
        case types.StructType():
            return all(is_sortable(each.dataType) for each in said.fields)
    return isinstance(said, (*_THROUGH_ARROW, *_SORTABLE))


def is_ambiguous(said: types.DataType) -> bool:
    """Whether values that are equal where rows are sorted may differ, or are not compared at all;
    such that their texts tell them apart."""
    match said:
        case types.ArrayType() | types.MapType() | types.StructType():
            return True
        case types.FloatType() | types.DoubleType() | types.VariantType():
            return True
        case types.UserDefinedType():
            return True
    return isinstance(said, types.StringType) and said != types.StringType()


def _has_void(said: types.DataType) -> bool:
    match said:
        case types.ArrayType():
            return _has_void(said.elementType)
        case types.MapType():
            return _has_void(said.keyType) or _has_void(said.valueType)
        case types.StructType():
            return any(_has_void(each.dataType) for each in said.fields)
    return isinstance(said, types.NullType)


def _refuse_doubles(said: types.DataType) -> None:
    """Raise `WorkFailed` for names that Spark mixes up: it would not read the structs."""
    match said:
        case types.ArrayType():
            _refuse_doubles(said.elementType)
        case types.MapType():
            _refuse_doubles(said.keyType)
            _refuse_doubles(said.valueType)
        case types.StructType():
            seen: dict[str, str] = {}
            for field in said.fields:
                other = seen.get(field.name.casefold())
                if other is not None:
                    same = repr(field.name)
                    which = same if other == field.name else f"{other!r} and {same}"
                    raise WorkFailed(
                        f"The result has the column {which} twice, or in two spellings;"
                        " give one another name.",
                        is_retried=False,
                    )
                seen[field.name.casefold()] = field.name
                _refuse_doubles(field.dataType)


def _name(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else quoted(text)


_KEY: Final = "_penstock_key_"


def in_sparks_order(table: Any, names: Sequence[str], *, ties: Sequence[str] = ()) -> Any:
    """The rows of a table sorted by these columns, as `ORDER BY` does it.

    -0.0 and 0.0 are equal, so the columns that come later decide; if none does, -0.0 is first, and
    then the texts of `ties` decide: equal rows always have one order.
    """
    columns = [table.column(name) for name in names]
    keys = []
    for column in columns:
        if column.null_count:
            keys.append(column.is_valid())
        keys.append(_comparable(column))
    keys += [_ranks(each, is_signed=True) for each in columns if pa.types.is_floating(each.type)]
    compared = pa.table({f"{_KEY}{place}": key for place, key in enumerate(keys)})
    # Texts are slow to make, and mostly something before them differs.
    if ties and compared.group_by(compared.column_names).aggregate([]).num_rows < table.num_rows:
        for place, name in enumerate(ties):
            texts = pa.array(map(repr, table.column(name).to_pylist()), pa.string())
            compared = compared.append_column(f"{_KEY}tie_{place}", texts)
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
        case [tuple(), *_]:
            # A map: in whatever order its entries come, it is the same to Spark.
            return sorted(((_plain(key), _plain(each)) for key, each in value), key=repr)
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
