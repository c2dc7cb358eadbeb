"""A bucket and Spark that nobody can ask for jars, a Connect server: executors use it from Python.

Reading is a Python data source (`source`). Writing is a map over Arrow batches: each Spark task
writes Parquet to a temporary file, sends it under a name that no other task has, and reports it. A
file counts only if the task that reported it succeeded: what a failed or a second attempt of a task
has sent lies there and is not named. Executors need Penstock and its requirements for Spark.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyarrow import parquet
from pyspark import TaskContext
from pyspark.sql import DataFrame

from penstock.datasets.bounds import Bound
from penstock.datasets.manifest import File
from penstock.datasets.schema import Column
from penstock.datasets.transfer import Transfer
from penstock.kernel.entropy import new_id, system_entropy
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.access.base import (
    Divided,
    Slice,
    Target,
    nothing_inside,
)
from penstock.runtimes.spark.access.divided import REPORT, WritingKeys, reported
from penstock.runtimes.spark.access.fractions import opened_writer
from penstock.runtimes.spark.access.source import TaggedFile, source_of
from penstock.runtimes.spark.access.statistics import bounds_of
from penstock.runtimes.spark.columns import ddl
from penstock.runtimes.spark.configs import PARTITION
from penstock.runtimes.spark.sizes import OUR_SOURCES

_bounds: Final = msgspec.json.Decoder(dict[str, Bound])
_REPORT: Final = "name string, rows bigint, bytes bigint, sha256 string, bounds string"


class Remote:
    """Executors read and write the bucket."""

    name = "a data source that executors fetch files with, and an Arrow map that writes them"

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def frame(
        self,
        session: Any,
        slices: Sequence[Slice],
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
                "An input has no manifest, so nobody knows its columns here: on a cluster without"
                " s3a, inputs have to be made by Penstock's Spark jobs.",
                is_retried=False,
            )
        name = f"{OUR_SOURCES}{new_id(system_entropy(), characters=12)}"
        session.dataSource.register(source_of(name, self._transfer, files))
        tag = [Column(PARTITION, "string")] if is_tagged else []
        frame: DataFrame = session.read.format(name).schema(ddl([*columns, *tag])).load()
        return frame

    def write(self, frame: DataFrame, target: Target) -> tuple[File, ...]:
        reported = frame.mapInArrow(_Writing(self._transfer, target), _REPORT).collect()
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

    def write_keys(self, frame: DataFrame, column: str, target: Target) -> Divided:
        writing = WritingKeys(self._transfer, target, column)
        return reported(frame.mapInArrow(writing, REPORT).collect())

    def wrote(self, location: str, file: File) -> None:
        del location, file  # executors fetch it like any other


class _Writing:
    """What a Spark task does to write its rows. Travels to executors."""

    def __init__(self, transfer: Transfer, target: Target) -> None:
        self._transfer = transfer
        self._target = target

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        stem = f"part-{context.partitionId():05}-{context.taskAttemptId()}"
        number, writer, path = 0, None, Path()
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            for batch in batches:
                if not batch.num_rows:
                    continue
                if writer is None:
                    path = Path(folder, f"{stem}-{number:03}.parquet")
                    writer = opened_writer(path, batch.schema)
                    number += 1
                writer.write_batch(batch)
                if path.stat().st_size >= self._target.file_bytes:
                    yield self._sent(path, writer)
                    writer = None
            if writer is not None:
                yield self._sent(path, writer)

    def _sent(self, path: Path, writer: Any) -> pa.RecordBatch:
        writer.close()
        footer = parquet.read_metadata(path)
        sent = self._transfer.send(path, f"{self._target.location}/{path.name}")
        path.unlink()
        report = {
            "name": [path.name],
            "rows": [footer.num_rows],
            "bytes": [sent.bytes],
            "sha256": [sent.sha256],
            "bounds": [msgspec.json.encode(bounds_of(footer)).decode()],
        }
        return pa.RecordBatch.from_pydict(report)
