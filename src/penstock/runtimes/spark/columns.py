"""Columns in Spark's words, and what may leave Spark through Arrow.

Every column is nullable to readers, whatever Spark concluded from one query: files say nothing that
Spark would believe when it reads them, and two plans of one job may conclude different things.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

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


def columns_of(schema: types.StructType) -> tuple[Column, ...]:
    """The columns of a result. Raises `WorkFailed` where they cannot be those of a dataset."""
    seen: dict[str, str] = {}
    for field in schema.fields:
        other = seen.get(field.name.casefold())
        if other is not None:
            which = repr(field.name) if other == field.name else f"{other!r} and {field.name!r}"
            raise WorkFailed(
                f"The result has the column {which} twice, or as good as twice to Spark;"
                " give one another name.",
                is_retried=False,
            )
        seen[field.name.casefold()] = field.name
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


def _has_void(said: types.DataType) -> bool:
    match said:
        case types.ArrayType():
            return _has_void(said.elementType)
        case types.MapType():
            return _has_void(said.keyType) or _has_void(said.valueType)
        case types.StructType():
            return any(_has_void(each.dataType) for each in said.fields)
    return isinstance(said, types.NullType)


def _name(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else quoted(text)
