"""A Python data source for files of a bucket, and the filters that reach it. Runs on executors.

Each file is one partition: it is fetched to a temporary file, its sum is verified, and the columns
that are wanted are read in batches. Classes are made for one read and travel by value with what
they need, so that no key of a bucket is ever part of a plan that people look at.

Filters that Spark pushes skip row groups and rows; Spark applies them again, so here they are only
an economy: one that is left out costs time, one that Arrow understands otherwise than Spark costs
rows. So a filter is used only where both order all values alike (`_is_alike`): whole numbers, days,
instants, local times and texts without a collation, compared with a value of just that kind. Not
fractions, where NaN is larger than all numbers to Spark and equal to none to Arrow, nor decimals,
whose scales differ, nor what is nested.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import dataset as arrow_dataset
from pyspark.sql import datasource, types

from penstock.datasets.snapshot import DataFile
from penstock.datasets.transfer import Transfer
from penstock.runtimes.spark.access.pushed import may_have, wanted
from penstock.runtimes.spark.configs import PARTITION
from penstock.runtimes.spark.internals import arrow_schema

_ROWS_MAX: Final = 50_000
# Spark's own writer has instants as INT96: in nanoseconds, those after 2262 would be others.
_FORMAT: Final = arrow_dataset.ParquetFileFormat(coerce_int96_timestamp_unit="us")
_PUSHED: Final[Mapping[type[Any], Callable[[Any, Any], Any]]] = {
    datasource.EqualTo: lambda field, value: field == value,
    datasource.GreaterThan: lambda field, value: field > value,
    datasource.GreaterThanOrEqual: lambda field, value: field >= value,
    datasource.LessThan: lambda field, value: field < value,
    datasource.LessThanOrEqual: lambda field, value: field <= value,
}


@dataclass(frozen=True, slots=True)
class TaggedFile:
    """A file, and what its rows have in the column `_partition`."""

    file: DataFile
    tag: str | None


class FilePartition(datasource.InputPartition):
    """The file of one task."""

    def __init__(self, tagged: TaggedFile) -> None:
        self.value = tagged


class FileReader(datasource.DataSourceReader):
    """Reads files with a schema: columns that a file lacks are null."""

    def __init__(
        self, transfer: Transfer, files: Sequence[TaggedFile], schema: types.StructType
    ) -> None:
        self._transfer = transfer
        self._files = tuple(files)
        self._schema = schema
        self._filters: list[tuple[type[Any], str, Any]] = []
        self._wanted = wanted(())

    def pushFilters(  # noqa: N802 - the name is Spark's
        self, filters: list[datasource.Filter]
    ) -> Iterable[datasource.Filter]:
        self._wanted = wanted(filters)
        for each in filters:
            attribute: tuple[str, ...] = getattr(each, "attribute", ())
            value = getattr(each, "value", None)
            # A text with a collation has a type of its own, and is not equal to `StringType()`.
            if type(each) in _PUSHED and len(attribute) == 1 and self._is_known(attribute[0]):
                self._filters.append((type(each), attribute[0], value))
            # Spark applies them all the same.
            yield each

    def _is_known(self, name: str) -> bool:
        if name == PARTITION or name not in self._schema.names:
            return False
        said = self._schema[name].dataType
        return not isinstance(said, types.StringType) or said == types.StringType()

    def partitions(self) -> Sequence[datasource.InputPartition]:
        return [
            FilePartition(replace(each, file=replace(each.file, bounds={})))
            for each in self._files
            if may_have(each.file, self._wanted, self._schema, tag=each.tag)
        ]

    def read(self, partition: datasource.InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, FilePartition):
            return  # Spark's own: where no file is left, it has one all the same.
        schema = arrow_schema(self._schema)
        yield from read_file(self._transfer, partition.value, schema, self._filters)


def read_file(
    transfer: Transfer,
    tagged: TaggedFile,
    schema: pa.Schema,
    filters: Sequence[tuple[type[Any], str, Any]] = (),
) -> Iterator[pa.RecordBatch]:
    """The rows of a file in batches, as the schema says."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder, "file.parquet")
        transfer.fetch(tagged.file.location, path, sha256=tagged.file.sha256)
        held = arrow_dataset.dataset(str(path), format=_FORMAT)
        names = [name for name in schema.names if name in held.schema.names]
        wanted = _expression(filters, schema, held.schema)
        scanner = held.scanner(columns=names, filter=wanted, batch_size=_ROWS_MAX)
        for batch in scanner.to_batches():
            if batch.num_rows:
                yield _fitted(batch, schema, tagged.tag)


def source_of(
    name: str, transfer: Transfer, files: Sequence[TaggedFile]
) -> type[datasource.DataSource]:
    """A data source of this name that has these files."""

    class Files(datasource.DataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def reader(self, schema: types.StructType) -> datasource.DataSourceReader:
            return FileReader(transfer, files, schema)

    return Files


def _expression(
    filters: Sequence[tuple[type[Any], str, Any]], schema: pa.Schema, held: pa.Schema
) -> Any:
    found = None
    for kind, name, value in filters:
        if name not in held.names or not _is_alike(held.field(name).type, value):
            continue
        if schema.field(name).type == held.field(name).type:
            one = _PUSHED[kind](arrow_dataset.field(name), pa.scalar(value))
            found = one if found is None else found & one
    return found


def _is_alike(kind: pa.DataType, value: object) -> bool:
    """Whether Arrow and Spark agree on how all values of a type compare with this one."""
    match value:
        case bool():
            return False
        case int():
            return bool(pa.types.is_signed_integer(kind))
        case dt.datetime():
            zone = None if value.tzinfo is None else "UTC"
            return bool(kind == pa.timestamp("us", zone))
        case dt.date():
            return bool(kind == pa.date32())
        case str():
            return bool(kind == pa.string())
    return False


def _fitted(batch: pa.RecordBatch, schema: pa.Schema, tag: str | None) -> pa.RecordBatch:
    """A batch with just the columns of a schema."""
    columns = []
    for field in schema:
        if field.name == PARTITION and tag is not None:
            columns.append(pa.array([tag] * batch.num_rows, field.type))
        elif field.name in batch.schema.names:
            columns.append(batch.column(field.name).cast(field.type))
        else:
            columns.append(pa.nulls(batch.num_rows, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
