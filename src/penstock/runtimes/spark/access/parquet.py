"""The Parquet files that a write leaves: settled footers, bounds, and a folder for each partition.

Equal rows are made equal bytes where Spark's writer does not, and columns have ids
(`penstock.datasets.parquet_footer`). This is done to what Spark has committed, before its sum is
taken.

Bounds are read from the footer, of columns at the top that are numbers, dates, timestamps in
microseconds, doubles, decimals or texts (`penstock.datasets.parquet_child`).

One pass may write many partitions. Spark's own writer makes a folder `COLUMN=KEY` for each
value of a column, which is then in no file (`left_by_keys`). Where executors write through
Arrow, rows come sorted by key, and each run of one key is a file of its own
(`PartitionedTaskWriter`). Either way a file is in the folder of its partition, as
`penstock.datasets.layout.part` writes the key, below the location that only this attempt writes
to.

Arrow makes a row group of whatever it is given at a time, and Spark gives 10,000 rows. So tasks
write through a `TaskFile`, which keeps rows back until a group of them is large: readers skip, and
fetch, by row groups.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet
from pyspark import TaskContext
from pyspark.sql import DataFrame

from penstock.datasets.bounds import COLUMNS_MAX, Bound, bound_values
from penstock.datasets.layout import part
from penstock.datasets.manifest import File
from penstock.datasets.parquet_child import ends
from penstock.datasets.parquet_footer import columns_in, identify_file, settle_file
from penstock.datasets.schema import Column
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.access.base import (
    PartitionedFiles,
    WriteTarget,
    opened_writer,
    storable,
)


def _columns(path: Path) -> Sequence[Column]:
    return columns_in(parquet.read_metadata(path).schema.to_arrow_schema())


def file_bounds(path: Path | Any) -> dict[str, Bound]:
    """The bounds of a file, by column."""
    return bounds_of(parquet.read_metadata(path))


def bounds_of(metadata: Any) -> dict[str, Bound]:
    """The bounds that a footer tells, by column."""
    return bound_values(ends(metadata, columns_max=COLUMNS_MAX))


SUCCESS: Final = "_SUCCESS"


def left_by_spark(folder: Path) -> Iterator[tuple[Path, int]]:
    """The files that Spark has committed, in order, and how many rows each has; no empty ones."""
    if not (folder / SUCCESS).exists():
        raise WorkFailed("Spark's writer ended and has not committed what it wrote.")
    for path in sorted(folder.glob("part-*.parquet")):
        rows = parquet.read_metadata(path).num_rows
        if rows:
            settle_file(path, _columns(path))
            yield path, rows


REPORT: Final = "key string, name string, rows bigint, bytes bigint, sha256 string, bounds string"
_bounds: Final = msgspec.json.Decoder(dict[str, Bound])
AT_ONCE: Final = 8
_ESCAPED: Final = re.compile("%([0-9A-Fa-f]{2})")

PlaceFile = Callable[[Path, str, int], File]
"""Brings a file that Spark has left to a location, and says what it is; the last are its rows."""


def left_by_keys(folder: Path, column: str, *, location: str, place: PlaceFile) -> PartitionedFiles:
    """The files that Spark has committed, of each key, brought to where they belong."""
    if not (folder / SUCCESS).exists():
        raise WorkFailed("Spark's writer ended and has not committed what it wrote.")
    homes = {
        _unescaped(each.name.removeprefix(f"{column}=")): each
        for each in folder.iterdir()
        if each.name.startswith(f"{column}=")
    }

    def bring(key: str) -> tuple[File, ...]:
        made = []
        for number, path in enumerate(sorted(homes[key].glob("part-*.parquet"))):
            rows = parquet.read_metadata(path).num_rows
            settle_file(path, _columns(path))
            to = f"{location}/{part(key)}/part-{number:05}.parquet"
            made.append(place(path, to, rows))
        return tuple(made)

    every = sorted(homes)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="penstock-keys") as pool:
        return dict(zip(every, pool.map(bring, every), strict=True))


def reported(rows: Sequence[Any]) -> PartitionedFiles:
    """What tasks of Spark have reported, by key."""
    found: dict[str, list[File]] = {}
    for each in sorted(rows, key=lambda one: (one.key, one.name)):
        file = File(
            name=each.name,
            rows=each.rows,
            bytes=each.bytes,
            sha256=each.sha256,
            bounds=_bounds.decode(each.bounds),
        )
        found.setdefault(each.key, []).append(file)
    return {key: tuple(files) for key, files in found.items()}


_GROUP_ROWS_MAX: Final = 2**20
_GROUP_BYTES_MAX: Final = 64 * 2**20
"""In memory, where Spark's own writer has twice that; in a file it is less."""


class TaskFile:
    """A file that a Spark task writes batch by batch, in row groups whose size is not theirs."""

    def __init__(self, path: Path, schema: pa.Schema, target: WriteTarget) -> None:
        self._path = path
        self._schema = schema
        self._writer = opened_writer(path, schema)
        self._file_bytes = target.file_bytes
        # A file is cut between groups: where files are small, so are these.
        self._group_bytes = min(_GROUP_BYTES_MAX, target.file_bytes // 2)
        self._held: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def write(self, rows: pa.RecordBatch) -> None:
        """Add rows. A batch is never cut."""
        rows = storable(rows)
        if self._rows + rows.num_rows > _GROUP_ROWS_MAX:
            self._end_group()
        self._held.append(rows)
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        if self._bytes >= self._group_bytes:
            self._end_group()

    def is_full(self) -> bool:
        """Whether what comes next belongs into another file."""
        return self._path.stat().st_size >= self._file_bytes

    def send(self, transfer: Transfer, location: str) -> dict[str, list[Any]]:
        """Complete the file and bring it to a location; what is reported of it, by column."""
        self._end_group()
        self._writer.close()
        identify_file(self._path, columns_in(self._schema))
        footer = parquet.read_metadata(self._path)
        sent = transfer.send(self._path, f"{location}/{self._path.name}")
        self._path.unlink()
        return {
            "name": [self._path.name],
            "rows": [footer.num_rows],
            "bytes": [sent.bytes],
            "sha256": [sent.sha256],
            "bounds": [msgspec.json.encode(bounds_of(footer)).decode()],
        }

    def _end_group(self) -> None:
        if self._held:
            group = pa.Table.from_batches(self._held, self._schema)
            self._writer.write_table(group, row_group_size=group.num_rows)
            self._held, self._rows, self._bytes = [], 0, 0


def renamed(frame: DataFrame) -> DataFrame:
    """A frame that `mapInArrow` takes: it reads a dot or a backtick in a name as its own syntax.

    What is mapped gets these names, and has to know the others.
    """
    return frame.toDF(*(f"c{place}" for place in range(len(frame.columns))))


class PartitionedTaskWriter:
    """What a Spark task does to write rows that are sorted by key. Travels to executors."""

    def __init__(
        self, transfer: Transfer, target: WriteTarget, column: str, names: Sequence[str]
    ) -> None:
        """`names` are those of all columns of what is mapped, `renamed`."""
        self._transfer = transfer
        self._target = target
        self._column = column
        self._names = list(names)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        stem = f"part-{context.partitionId():05}-{context.taskAttemptId()}"
        number, held, file = 0, "", None
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            named = (each.rename_columns(self._names) for each in batches)
            for key, rows in _runs(named, self._column):
                if file is not None and (key != held or file.is_full()):
                    yield self._sent(file, held)
                    file = None
                if file is None:
                    path = Path(folder, f"{stem}-{number:05}.parquet")
                    file, held = TaskFile(path, rows.schema, self._target), key
                    number += 1
                file.write(rows)
            if file is not None:
                yield self._sent(file, held)

    def _sent(self, file: TaskFile, key: str) -> pa.RecordBatch:
        sent = file.send(self._transfer, f"{self._target.location}/{part(key)}")
        return pa.RecordBatch.from_pydict({"key": [key], **sent})


def _runs(batches: Iterable[pa.RecordBatch], column: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Rows of one key at a time, without it, of batches whose rows are sorted by it."""
    for batch in batches:
        if not batch.num_rows:
            continue
        place = batch.schema.get_field_index(column)
        ends = pc.run_end_encode(batch.column(place))
        rest = batch.remove_column(place)
        start = 0
        for key, end in zip(ends.values.to_pylist(), ends.run_ends.to_pylist(), strict=True):
            yield key, rest.slice(start, end - start)
            start = end


def _unescaped(name: str) -> str:
    """A value as it was before Spark made the name of a folder of it."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), name)
