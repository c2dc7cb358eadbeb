"""Rows of a user's function as a Parquet file with the columns that the DAG declares.

Called by `task.write_rows`, in the process of the function. Field ids are set afterwards by
whoever collects what was made (`output_collector`), as in every Parquet file of a function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.datasets.schema import Column, field_of, parts_of
from penstock.kernel.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

Rows = Iterable[Mapping[str, Any]]

_SIMPLE: Final = {
    "boolean": "bool_",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "string": "string",
    "binary": "binary",
    "date": "date32",
}


def arrow_type(word: str) -> pa.DataType:
    """The type of Arrow's for a declared one."""
    pyarrow = import_module("pyarrow")
    kind, inner = parts_of(word)
    match kind:
        case "array":
            return pyarrow.list_(arrow_type(inner[0]))
        case "map":
            return pyarrow.map_(arrow_type(inner[0]), arrow_type(inner[1]))
        case "struct":
            fields = (field_of(each) for each in inner)
            return pyarrow.struct([(name, arrow_type(each)) for name, each in fields])
        case "timestamp":
            return pyarrow.timestamp("us", tz="UTC")
        case "timestamp_ntz":
            return pyarrow.timestamp("us")
    if kind in _SIMPLE:
        return getattr(pyarrow, _SIMPLE[kind])()
    digits, scale = word.removeprefix("decimal(").removesuffix(")").split(",")
    return pyarrow.decimal128(int(digits), int(scale))


def write_rows(path: Path, columns: Sequence[Column], rows: Rows | pa.Table) -> int:
    """Write a file with exactly these columns; returns how many rows it has.

    A column that the rows do not have is null. Raises `InvalidInput` for one that is not declared,
    and for a value that its type does not hold.
    """
    pyarrow = import_module("pyarrow")
    schema = pyarrow.schema([(each.name, arrow_type(each.type)) for each in columns])
    try:
        if isinstance(rows, pyarrow.Table):
            table = _fitted(rows, schema)
        else:
            listed = list(rows)
            _refuse_unknown({name for row in listed for name in row}, schema.names)
            table = pyarrow.Table.from_pylist(listed, schema=schema)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError, TypeError) as error:
        told = str(error).splitlines()[0]
        raise InvalidInput(
            f"The rows do not fit the `columns` of the output: {told}",
            hint="Give values of the declared types.",
        ) from error
    import_module("pyarrow.parquet").write_table(table, path)
    return int(table.num_rows)


def _fitted(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    _refuse_unknown(set(rows.column_names), schema.names)
    pyarrow = import_module("pyarrow")
    arrays = [
        rows.column(field.name).cast(field.type)
        if field.name in rows.column_names
        else pyarrow.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pyarrow.Table.from_arrays(arrays, schema=schema)


def _refuse_unknown(names: set[str], declared: Sequence[str]) -> None:
    unknown = sorted(map(str, names - set(declared)))
    if unknown:
        raise InvalidInput(
            f"The column {unknown[0]!r} is not among the `columns` of the output:"
            f" {', '.join(declared)}.",
            hint="Add it to `columns` in the DAG, or leave it out.",
        )
