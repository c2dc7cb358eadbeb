"""Data files of a table, from the manifests of publications, and as scan tasks. Pure.

A file's figures are what Penstock's manifest says: its rows and bytes, and of its first columns at
the top the counts of nulls and the bounds. All else is left out, which readers take as not known.
A partition's value is an identity: all rows of the file have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final

from penstock.datasets.bounds import ColumnKind
from penstock.datasets.iceberg.schemas import SchemaField, TableSchema
from penstock.datasets.iceberg.values import (
    TableValue,
    kind_in,
    to_bytes,
    to_json,
)
from penstock.datasets.manifest import File, Unfit

_UNFIT: Final = {
    Unfit.FIELD_IDS: (
        "field ids of another table, which a library has copied; write it without"
        " (in pyarrow: without the metadata of its fields)"
    ),
    Unfit.UNSIGNED: "unsigned numbers of 32 or 64 bits, which Iceberg does not have",
}
PARTITION_ID_MIN: Final = 1000
"""Where Iceberg begins to count partition fields."""


@dataclass(frozen=True, slots=True)
class PartitionField:
    """A column whose value is one in each file: always by identity."""

    source: SchemaField
    id: int
    """Of the partition field, from `PARTITION_ID_MIN` up; never another field's."""


@dataclass(frozen=True, slots=True)
class PartitionSpec:
    """How a table is partitioned; without fields, it is not."""

    spec_id: int = 0
    fields: tuple[PartitionField, ...] = ()


@dataclass(frozen=True)
class TableFile:
    """A data file. Figures are by field id; what is not there is not known."""

    location: str
    rows: int
    size_bytes: int
    partition: tuple[TableValue | None, ...] = ()
    """A value for each field of the spec."""
    nulls: Mapping[int, int] = field(default_factory=dict)
    nans: Mapping[int, int] = field(default_factory=dict)
    values: Mapping[int, int] = field(default_factory=dict)
    lows: Mapping[int, bytes] = field(default_factory=dict)
    highs: Mapping[int, bytes] = field(default_factory=dict)


def unreadable(file: File) -> str | None:
    """Why a file of a manifest is no file of a table; None if it is one."""
    if file.rows is None:
        return f"The file {file.name!r} is no Parquet."
    if file.unfit is None:
        return None
    return f"The file {file.name!r} has {_UNFIT[file.unfit]}."


def table_file(
    file: File, location: str, schema: TableSchema, *, partition: Sequence[TableValue | None] = ()
) -> TableFile:
    """A Parquet file of a manifest, at its location, as one of a table with this schema.

    `unreadable` has to be None for it.
    """
    assert file.rows is not None
    fields = schema.by_name()
    known = [(fields[name], each) for name, each in file.bounds.items() if name in fields]
    lows, highs = {}, {}
    for each, bound in known:
        low = _end(bound.low, each)
        high = _end(bound.high, each)
        if low is not None:
            lows[each.id] = low
        if high is not None:
            highs[each.id] = high
    nulls = {each.id: bound.nulls for each, bound in known if bound.nulls is not None}
    return TableFile(
        location=location,
        rows=file.rows,
        size_bytes=file.bytes,
        partition=tuple(partition),
        nulls=nulls,
        values=dict.fromkeys(nulls, file.rows),
        lows=lows,
        highs=highs,
    )


def scan_task_json(file: TableFile, spec: PartitionSpec, *, residual: Any = True) -> dict[str, Any]:
    """A file to be scanned, in the REST protocol's JSON. The residual too is in JSON.

    The protocol has no null in a partition: a file of the one without a name is told as of no
    partition.
    """
    if None in file.partition:
        return scan_task_json(replace(file, partition=()), PartitionSpec(), residual=residual)
    values = zip(file.partition, spec.fields, strict=True)
    partition = [
        to_json(value, str(each.source.type)) for value, each in values if value is not None
    ]
    return {
        "data-file": {
            "content": "data",
            "file-path": file.location,
            "file-format": "parquet",
            "spec-id": spec.spec_id,
            "partition": partition,
            "file-size-in-bytes": file.size_bytes,
            "record-count": file.rows,
        },
        "residual-filter": residual,
    }


def _end(said: float | str | None, field: SchemaField) -> bytes | None:
    """One end of a bound as bytes.

    Of fractions there is none: readers disagree on NaN, and on the two zeros.
    """
    kind = kind_in(field.type)
    if said is None or kind is None or kind is ColumnKind.DOUBLE:
        return None
    try:
        value = Decimal(said) if kind is ColumnKind.DECIMAL and isinstance(said, str) else said
    except ArithmeticError:
        return None
    return to_bytes(value, str(field.type))
