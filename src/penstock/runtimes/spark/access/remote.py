"""A bucket and Spark that takes no jars, as a Connect server: executors use it from Python.

Reading is a Python data source, which runs on executors. Each file is one partition: it is
fetched to a temporary file, its sum is verified, and the columns that are wanted are read in
batches. Classes are made for one read and travel by value with what they need, so that no key
of a bucket is ever part of a plan that people look at.

Filters that Spark pushes are used as far as bounds can tell of them, and skip files, row groups
and rows; Spark applies them again, so here they are only an economy: one that is left out costs
time, one that Arrow understands otherwise than Spark costs rows. So a filter is used only where
both order all values alike (`_is_alike`): whole numbers, days, instants, local times and texts
without a collation, compared with a value of just that kind. Not fractions, where NaN is larger
than all numbers to Spark and equal to none to Arrow, nor decimals, whose scales differ, nor
what is nested.

Writing is a map over Arrow batches: each Spark task writes Parquet to a temporary file, uploads
it under a name that no other task has, and reports it. A file counts only if the task that
reported it succeeded: what a failed or a second attempt of a task has uploaded lies there and
is not named. Executors need Penstock and its requirements for Spark.
"""

from __future__ import annotations

import datetime as dt
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyarrow import dataset as arrow_dataset
from pyspark import TaskContext
from pyspark.sql import DataFrame, datasource, types

from penstock.datasets.bounds import (
    Bound,
    Compared,
    Conjunction,
    Disjunction,
    Filter,
    Nullness,
    Prefixed,
    Sign,
    Unknown,
    kind_of,
    may_hold,
)
from penstock.datasets.manifest import File
from penstock.datasets.schema import Column
from penstock.datasets.snapshot import DataFile
from penstock.datasets.transfer import Transfer
from penstock.kernel.entropy import new_id, system_entropy
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.access.base import (
    FileSlice,
    PartitionedFiles,
    WriteTarget,
    nothing_inside,
)
from penstock.runtimes.spark.access.parquet import (
    REPORT,
    PartitionedTaskWriter,
    TaskFile,
    renamed,
    reported,
)
from penstock.runtimes.spark.columns import ddl, words
from penstock.runtimes.spark.internals import arrow_schema
from penstock.runtimes.spark.job_config import PARTITION
from penstock.runtimes.spark.result_size import OUR_SOURCES

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
    return Conjunction(tuple(map(_one, pushed)))


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
            return Disjunction(tuple(_compared(column, Sign.EQUAL, each) for each in pushed.value))
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


_NO_PYTHON: Final = re.compile(r"\binterval\b(?! (?:day|hour|minute|second)\b)")
"""Types that Spark cannot give to Python: of years and months, which have no fixed length."""
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


_bounds: Final = msgspec.json.Decoder(dict[str, Bound])
_REPORT: Final = "name string, rows bigint, bytes bigint, sha256 string, bounds string"


class RemoteAccess:
    """Executors read and write the bucket."""

    name = "a data source that executors fetch files with, and an Arrow map that writes them"

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def frame(
        self,
        session: Any,
        slices: Sequence[FileSlice],
        columns: Sequence[Column] | None,
        held: ExitStack,
    ) -> DataFrame:
        del held
        files = [TaggedFile(each, some.tag) for some in slices for each in some.files]
        is_tagged = any(some.tag is not None for some in slices)
        if not files:
            return nothing_inside(session, columns, is_tagged=is_tagged)
        if columns is None:
            raise WorkFailed(
                "An input has no manifest, so its columns are unknown here: on a cluster without"
                " s3a, inputs have to be made by Penstock's Spark jobs.",
                is_retried=False,
            )
        _refuse_intervals(columns)
        name = f"{OUR_SOURCES}{new_id(system_entropy(), characters=12)}"
        session.dataSource.register(source_of(name, self._transfer, files))
        tag = [Column(PARTITION, "string")] if is_tagged else []
        frame: DataFrame = session.read.format(name).schema(ddl([*columns, *tag])).load()
        return frame

    def write(self, frame: DataFrame, target: WriteTarget) -> tuple[File, ...]:
        _refuse_intervals(_columns(frame))
        writing = _Writing(self._transfer, target, frame.columns)
        reported = renamed(frame).mapInArrow(writing, _REPORT).collect()
        made = (
            File(
                name=each.name,
                rows=each.rows,
                bytes=each.bytes,
                sha256=each.sha256,
                bounds=_bounds.decode(each.bounds),
            )
            for each in reported
        )
        return tuple(sorted(made, key=lambda each: each.name))

    def write_keys(self, frame: DataFrame, column: str, target: WriteTarget) -> PartitionedFiles:
        _refuse_intervals(_columns(frame))
        writing = PartitionedTaskWriter(self._transfer, target, column, frame.columns)
        return reported(renamed(frame).mapInArrow(writing, REPORT).collect())

    def wrote(self, location: str, file: File) -> None:
        del location, file  # executors fetch it like any other


def _columns(frame: DataFrame) -> list[Column]:
    return [Column(each.name, words(each.dataType)) for each in frame.schema.fields]


def _refuse_intervals(columns: Iterable[Column]) -> None:
    for each in columns:
        if _NO_PYTHON.search(each.type):
            raise WorkFailed(
                f"The column {each.name!r} is {each.type}, and with Connect the files of a bucket"
                " are read and written in Python, which has no such type; make it a number of"
                " months, or a text.",
                is_retried=False,
            )


class _Writing:
    """What a Spark task does to write its rows. Travels to executors."""

    def __init__(self, transfer: Transfer, target: WriteTarget, names: Sequence[str]) -> None:
        """`names` are those of the columns of what is mapped, `renamed`."""
        self._transfer = transfer
        self._target = target
        self._names = list(names)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        stem = f"part-{context.partitionId():05}-{context.taskAttemptId()}"
        number, file = 0, None
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            for batch in batches:
                if not batch.num_rows:
                    continue
                rows = batch.rename_columns(self._names)
                if file is None:
                    path = Path(folder, f"{stem}-{number:03}.parquet")
                    file = TaskFile(path, rows.schema, self._target)
                    number += 1
                file.write(rows)
                if file.is_full():
                    yield self._sent(file)
                    file = None
            if file is not None:
                yield self._sent(file)

    def _sent(self, file: TaskFile) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict(file.send(self._transfer, self._target.location))
