"""The interface through which Spark reads and writes data. `choosing` selects an implementation.

An access makes a DataFrame of files that are named, each with its sum, and brings the rows of a
DataFrame into files below a location that only this attempt writes to. It says which files
those are: the ones that Spark's own commit has left there, or that its tasks have reported. It
writes no manifest, and publishes nothing.

Readers skip row groups by the least and the greatest value in a footer, and by dictionaries. Of
columns of fractions Spark cannot trust these:

- Arrow's writer leaves NaN out of least and greatest. To Spark NaN is greater than all numbers,
  and
  it would skip `f > 0.5` over 0.1 and NaN. So files that are written here through Arrow say nothing
  of such columns (`told_columns`). Spark's own writer does the same where there is a NaN.
- A dictionary that has -0.0 has no 0.0, which to Spark are equal: it would skip `f = 0.0`, in
  files
  of its own too. So dictionaries are not looked at where there are such columns (`READ_WITHOUT`).

All that writes Parquet through Arrow uses `opened_writer` or `told_columns`.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import DataFrame, types
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.iceberg.schemas import ListType, MapType, SchemaField, fields_of, inner_of
from penstock.datasets.manifest import File
from penstock.datasets.schema import Column
from penstock.datasets.snapshot import DataFile
from penstock.kernel.errors import InvalidInput, WorkFailed
from penstock.runtimes.spark.access.frame_metadata import tagged
from penstock.runtimes.spark.columns import ddl, quoted, words
from penstock.runtimes.spark.job_config import PARTITION

READ_WITHOUT: Final = "parquet.filter.dictionary.enabled"
"""The option of Spark's reader that has it look at dictionaries; "false" for not."""
_FRACTION: Final = re.compile(r"\b(?:float|double)\b")
_FRACTIONS: Final = ("FLOAT", "DOUBLE")


def has_fractions(columns: Iterable[Column] | None) -> bool:
    """Whether there are, or may be, columns of fractions, nested ones too."""
    return columns is None or any(_FRACTION.search(each.type) for each in columns)


@lru_cache(maxsize=256)
def told_columns(schema: pa.Schema) -> list[str]:
    """The columns of which a file written through Arrow says least and greatest, by their paths."""
    sink = pa.BufferOutputStream()
    with parquet.ParquetWriter(sink, schema):
        pass
    leaves: Any = parquet.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    every = (leaves.column(place) for place in range(len(leaves.names)))
    return [each.path for each in every if each.physical_type not in _FRACTIONS]


def opened_writer(path: Any, schema: pa.Schema) -> Any:
    """A writer that says what it should of columns, and has checksums of pages as Spark's has.

    Without Arrow's own schema: readers in Rust take it for the file's, and it has no field ids.
    """
    return parquet.ParquetWriter(
        path,
        schema,
        write_statistics=told_columns(schema),
        write_page_checksum=True,
        store_schema=False,
    )


def storable(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of Spark's as Parquet takes it.

    Of a `variant` that is null, Spark gives nulls inside too, in fields that are declared to have
    none.
    """
    torn = [place for place, each in enumerate(batch.columns) if _is_torn(each)]
    for place in torn:
        array = batch.column(place)
        # Built anew, a null has empty values inside.
        whole = pa.array(array.to_pylist(), type=array.type)
        batch = batch.set_column(place, batch.schema.field(place), whole)
    return batch


def _is_torn(array: Any) -> bool:
    kind = array.type
    if pa.types.is_struct(kind):
        inner = [(kind.field(place), array.field(place)) for place in range(kind.num_fields)]
        return any((not of.nullable and each.null_count) or _is_torn(each) for of, each in inner)
    if pa.types.is_map(kind):
        return _is_torn(array.keys) or _is_torn(array.items)
    return pa.types.is_list(kind) and _is_torn(array.values)


FIELD_ID: Final = "parquet.field.id"
"""What Spark's writer takes for the id of a field, in the metadata of a column."""


def identified(frame: DataFrame, key: str = "") -> DataFrame:
    """A frame of which Spark's writer gives its columns their field ids, or none of them any.

    It has none for what is in lists and maps, and ids of a part are worse than none; and what it
    knows of columns that were renamed since they were read is wrong. `key` is in no file.
    """
    every = frame.schema.fields
    ids = _ids_at_hand([each for each in every if each.name != key])
    wanted = [each if each.name == key else _field_with(each, (), ids) for each in every]
    if wanted == every:
        return frame
    return frame.select(
        *(
            F.col(quoted(each.name)).cast(to.dataType).alias(each.name, metadata=to.metadata)
            for each, to in zip(every, wanted, strict=True)
        )
    )


def _ids_at_hand(fields: Sequence[types.StructField]) -> Mapping[tuple[str, ...], int]:
    """The ids of fields by their paths; none if not all of them can be given."""
    try:
        made = fields_of(tuple(Column(each.name, words(each.dataType)) for each in fields))
    except InvalidInput:
        return {}
    found: dict[tuple[str, ...], int] = {}
    waiting: list[tuple[tuple[str, ...], SchemaField]] = [((), each) for each in made]
    while waiting:
        above, each = waiting.pop()
        if isinstance(each.type, ListType | MapType):
            return {}
        path = (*above, each.name)
        found[path] = each.id
        waiting += [(path, one) for one in inner_of(each.type)]
    return found


def _field_with(
    field: types.StructField, above: tuple[str, ...], ids: Mapping[tuple[str, ...], int]
) -> types.StructField:
    path = (*above, field.name)
    said = {name: value for name, value in (field.metadata or {}).items() if name != FIELD_ID}
    if path in ids:
        said[FIELD_ID] = ids[path]
    kind = _type_with(field.dataType, path, ids)
    return types.StructField(field.name, kind, field.nullable, said)


def _type_with(
    kind: types.DataType, path: tuple[str, ...], ids: Mapping[tuple[str, ...], int]
) -> types.DataType:
    match kind:
        case types.StructType():
            return types.StructType([_field_with(each, path, ids) for each in kind.fields])
        case types.ArrayType():
            inner = _type_with(kind.elementType, (*path, ""), ids)
            return types.ArrayType(inner, kind.containsNull)
        case types.MapType():
            key = _type_with(kind.keyType, (*path, ""), ids)
            value = _type_with(kind.valueType, (*path, ""), ids)
            return types.MapType(key, value, kind.valueContainsNull)
    return kind


_WILD: Final = re.compile(r"[\[\]{}*?\\]")
"""What is a pattern to Spark, and may be in the name of somebody's folder."""
_READERS_MAX: Final = 16
WHOLE_BYTES_MAX: Final = 32 * 2**20
"""What a frame reads of files that are compared whole; of more, each page is when it is read."""
CHECKED: Final = {"parquet.page.verify-checksum.enabled": "true"}

PartitionedFiles = Mapping[str, tuple[File, ...]]
"""The files of each partition, by key, in the order of the keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSlice:
    """Some files. With a tag, each of their rows has it in the column `_partition`."""

    files: Sequence[DataFile]
    tag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTarget:
    """Where rows go."""

    location: str
    staging: str
    """A location that only this attempt writes to, for what is on its way."""
    file_bytes: int
    first: int = 0
    """The number of the first file, where files have numbers: those before it are there."""


class DataAccess(Protocol):
    """A way of access. Its methods may be called from several threads at once."""

    name: str
    """In a few words, for the log."""

    def frame(
        self,
        session: Any,
        slices: Sequence[FileSlice],
        columns: Sequence[Column] | None,
        held: ExitStack,
    ) -> DataFrame:
        """The rows of these files. What has to stay while they are read is put into `held`."""
        ...

    def write(self, frame: DataFrame, target: WriteTarget) -> tuple[File, ...]:
        """Write all rows of a frame; returns the files, without empty ones."""
        ...

    def write_keys(self, frame: DataFrame, column: str, target: WriteTarget) -> PartitionedFiles:
        """Write all rows of a frame that is sorted by this column, which has the keys of partitions
        and is in no file; the files of each lie in its folder below the target's location."""
        ...

    def wrote(self, location: str, file: File) -> None:
        """A file was written there by this process, which knows its sum."""
        ...


def nothing_inside(session: Any, columns: Sequence[Column] | None, *, is_tagged: bool) -> DataFrame:
    """A frame without rows."""
    if columns is None:
        raise WorkFailed(
            "An input has neither a manifest nor a Parquet file, so its columns are unknown.",
            is_retried=False,
        )
    frame: DataFrame = session.createDataFrame([], ddl(columns))
    return frame.withColumn(PARTITION, F.lit("")) if is_tagged else frame


class PathReader:
    """Reads files that Spark opens itself. For any number of sessions, each in its own thread."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        """`options` are Spark's and Parquet's own, for every file that is read."""
        self._options = dict(options or {})
        self._readers: OrderedDict[Any, tuple[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def frame(
        self,
        session: Any,
        paths: Sequence[tuple[str, str | None]],
        columns: Sequence[Column] | None,
        *,
        listed: str = "",
    ) -> DataFrame:
        """The rows of these files, each with its tag, if there are any.

        `listed` is a folder in which Spark finds just these files, where there is one.
        """
        _refuse_hidden(paths)
        reader = self._reader(session, columns)
        named = [listed] if listed else [path for path, _ in paths]
        frame: DataFrame = reader.parquet(*(_WILD.sub(r"\\\g<0>", path) for path in named))
        tags = {tag for _, tag in paths}
        if tags == {None}:
            return frame
        if len(tags) == 1:
            return frame.withColumn(PARTITION, F.lit(tags.pop()))
        return tagged(frame, paths)

    def _reader(self, session: Any, columns: Sequence[Column] | None) -> Any:
        # Asking Spark for a reader is a third of what a small file takes, and a batch has many.
        said = "" if columns is None else ddl(columns)
        with self._lock:
            known, reader = self._readers.get(session, (None, None))
        if known != said:
            # Otherwise a folder that is called `day=1` would be a column.
            reader = session.read.option("recursiveFileLookup", "true").options(**self._options)
            reader = reader.schema(said) if said else reader.option("mergeSchema", "true")
            if has_fractions(columns):
                reader = reader.option(READ_WITHOUT, "false")
            with self._lock:
                self._readers[session] = said, reader
                # A reader keeps its session: those that nobody uses any more have to go.
                while len(self._readers) > _READERS_MAX:
                    self._readers.popitem(last=False)
        return reader


def _refuse_hidden(paths: Sequence[tuple[str, str | None]]) -> None:
    """Spark leaves such files out without a word, and a manifest that names one means its rows."""
    for path, _ in paths:
        name = path.rpartition("/")[2]
        if name.startswith(("_", ".")) or name.endswith("._COPYING_"):
            raise WorkFailed(
                f"Spark would leave out {path}: names that begin with _ or . are no data to it.",
                is_retried=False,
                hint="Make the partition again, with another name for the file.",
            )
