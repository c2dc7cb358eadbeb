"""From the DataFrame of an output to files and a manifest in the attempt's own folder.

What is small leaves Spark through Arrow: it is collected, sorted and written here, mostly as one
file. What is large, or of a size that nobody knows, is written by Spark (`Access.write`), which
computes it once: whatever comes after that reads the files.

Spark's tasks write as they are, each a file or several. Only where what was given says nothing of
how much there is to write, or where files are to be smaller than what a task reads, the rows are
shuffled once more and cut adaptively (`rebalance`). If there are many small files in the end, they
are put together, from what was written (`cutting`): that reads and writes little, or it is not
done. `cluster_by` always takes that second step: ranges need a sample of all rows first, and the
rows are written, into the attempt's scratch, before it is taken.

Equal rows give equal bytes if the job has `sort_by`: rows go to files by a hash of all of their
columns, are sorted by all of them, and the number of files is made of bytes that were given and
written. Elsewhere the same rows may be cut and ordered in another way by the next attempt.

The manifest is written last: until then there is nothing, and afterwards nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import DataFrame, types
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.layout import MANIFEST
from penstock.datasets.manifest import (
    File,
    InputTotal,
    Manifest,
    ManifestInput,
    encode,
    sums,
    with_bounds,
)
from penstock.datasets.schema import Column
from penstock.datasets.snapshot import DataFile
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import (
    MAINTAIN,
    Made,
    Work,
    facts_of,
    manifest_inputs,
    manifest_totals,
)
from penstock.runtimes.spark.access.base import Access, Slice, Target
from penstock.runtimes.spark.access.fractions import told_columns
from penstock.runtimes.spark.access.statistics import file_bounds
from penstock.runtimes.spark.columns import columns_of, is_for_arrow, is_orderable, quoted
from penstock.runtimes.spark.conf import ADVISORY, SHUFFLED_BYTES_MIN, SHUFFLED_MIN
from penstock.runtimes.spark.configs import JobConfig, names
from penstock.runtimes.spark.cutting import UNKNOWN_BYTES, files_for, splinters
from penstock.runtimes.spark.internals import arrow_schema
from penstock.runtimes.spark.operators.plans import SMALL_BYTES_MAX, Member
from penstock.runtimes.spark.ordering import in_sparks_order
from penstock.runtimes.spark.settings import heap_bytes

Read = tuple[tuple[ManifestInput, ...], tuple[InputTotal, ...] | msgspec.UnsetType]
"""What manifests say of what was read."""

_SPLIT_FROM: Final = 1.5
"""How many times the target a file may be before it becomes several."""
_READ_BYTES: Final = 128 * 2**20
"""What a task of Spark reads of a large file."""
_SAME_ROWS: Final = ("compact", "integrity_check", MAINTAIN)
"""Operators whose results are as large as what they read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What an output looks like: its columns, the same in Arrow, and how it is sorted."""

    columns: tuple[Column, ...]
    is_for_arrow: bool
    arrow: Any
    order: tuple[str, ...]
    """All columns by which its rows are sorted; empty if they are not."""


def shape_of(frame: DataFrame, config: JobConfig, *, without: Sequence[str] = ()) -> Shape:
    """The shape of a result. Raises `WorkFailed` if it cannot be that of a dataset."""
    fields = [field for field in frame.schema.fields if field.name not in without]
    schema = types.StructType(fields)
    if not fields:
        what = (
            f"{config.sql_file or 'config.sql'} is no query"
            if config.sql
            else "The result is empty"
        )
        raise WorkFailed(f"{what}: it has no columns.", is_retried=False)
    field, by = ("cluster_by" if config.cluster_by else "sort_by"), config.ordered_by
    unknown = [name for name in by if name not in schema.names]
    if unknown:
        raise WorkFailed(
            f"config.{field}: the result has no column {unknown[0]!r}; it has"
            f" {names(schema.names)}.",
            is_retried=False,
        )
    rest = (field.name for field in fields if field.name not in by and is_orderable(field.dataType))
    passes = is_for_arrow(schema)
    return Shape(
        columns=columns_of(schema),
        is_for_arrow=passes,
        arrow=arrow_schema(_nullable(schema)) if passes else None,
        order=(*by, *rest) if by else (),
    )


class Writer:
    """Writes outputs of attempts."""

    def __init__(self, transfer: Transfer, *, target_file_bytes: int) -> None:
        self._transfer = transfer
        self._target_file_bytes = target_file_bytes

    def file_bytes(self, config: JobConfig) -> int:
        """How large the files of a job should become."""
        return config.target_file_bytes or self._target_file_bytes

    def table(
        self, table: Any, shape: Shape, location: str, access: Access, *, file_bytes: int
    ) -> tuple[File, ...]:
        """Write a table, as one file or as several of about the target size."""
        if not table.num_rows:
            return ()
        table = _arranged(table, shape)
        body = _encoded(table)
        pieces = [(table, body)]
        if len(body) > _SPLIT_FROM * file_bytes:
            rows = math.ceil(table.num_rows / math.ceil(len(body) / file_bytes))
            cut = [table.slice(start, rows) for start in range(0, table.num_rows, rows)]
            pieces = [(each, _encoded(each)) for each in cut]
        made = []
        for number, (each, encoded) in enumerate(pieces):
            name = f"part-{number:05}.parquet"
            sent = self._transfer.write_bytes(f"{location}/{name}", encoded)
            file = File(
                name=name,
                rows=each.num_rows,
                bytes=sent.bytes,
                sha256=sent.sha256,
                bounds=file_bounds(pa.BufferReader(encoded)),
            )
            access.wrote(f"{location}/{name}", file)
            made.append(file)
        return tuple(made)

    def frame(
        self,
        frame: DataFrame,
        shape: Shape,
        member: Member,
        output: str,
        access: Access,
        *,
        size: int,
        watched: Callable[[DataFrame], DataFrame] = lambda frame: frame,
    ) -> tuple[File, ...]:
        """Have Spark write a frame, once, as files of about the target size.

        `size` is what it is made of, as far as that is known. `watched` gets what is written, where
        each row comes by once.
        """
        config, session = member.config, frame.sparkSession
        file_bytes = self.file_bytes(config)
        location = member.work.outputs[output].location
        scratch = f"{member.work.scratch or location}/{output}"
        target = Target(location=location, staging=scratch, file_bytes=file_bytes)
        if config.cluster_by:
            staged = replace(target, location=f"{scratch}/staged")
            files = access.write(watched(frame), staged)
            made = self._again(
                session, files, shape, config=config, access=access, source=staged, target=target
            )
            self._transfer.clear(staged.location)
            return made
        is_cut = False
        if config.sort_by:
            spread = _sorted(frame, shape, files_for(size, file_bytes=file_bytes))
        elif size <= SMALL_BYTES_MAX or size >= UNKNOWN_BYTES or file_bytes < _READ_BYTES:
            spread, is_cut = frame.hint("rebalance"), True
        elif config.operator in _SAME_ROWS:
            spread = frame.coalesce(files_for(size, file_bytes=file_bytes))
        else:
            spread = frame
        with _cut_by(session, file_bytes) if is_cut else ExitStack():
            files = access.write(watched(spread), target)
        small = splinters(files, file_bytes=file_bytes)
        if not small:
            return files
        # All that is sorted is cut anew: files then still are of a size.
        gone = files if config.sort_by else small
        after = replace(target, first=len(files))
        made = self._again(
            session, gone, shape, config=config, access=access, source=target, target=after
        )
        self._transfer.delete(f"{location}/{each.name}" for each in gone)
        return (*(each for each in files if each not in gone), *made)

    def _again(
        self,
        session: Any,
        files: Sequence[File],
        shape: Shape,
        *,
        config: JobConfig,
        access: Access,
        source: Target,
        target: Target,
    ) -> tuple[File, ...]:
        """Write files again, as fewer or by range."""
        if not files:
            return ()
        count = files_for(sums(files).bytes, file_bytes=target.file_bytes)
        with ExitStack() as held:
            there = [data_file(source.location, each) for each in files]
            frame = access.frame(session, [Slice(files=there)], shape.columns, held)
            if config.cluster_by:
                spread = _ranged(frame, shape, count)
            elif config.sort_by:
                spread = _sorted(frame, shape, count)
            else:
                spread = frame.coalesce(count)
            return access.write(spread, target)

    def manifest(
        self,
        member: Member,
        output: str,
        columns: Sequence[Column],
        files: Sequence[File],
        *,
        location: str = "",
        slice_: Mapping[str, Any] | None = None,
        read: Read | None = None,
        deleted: Sequence[File] = (),
    ) -> Made:
        """Write the manifest, and say what was made: the task's own partition, or this one."""
        work = member.work
        place = work.outputs[output]
        total = sums(files)
        of = work.payload if slice_ is None else slice_
        inputs, input_totals = read_of(work) if read is None else read
        manifest = Manifest(
            dataset=place.dataset,
            generation=work.generation,
            job=work.job,
            task_id=work.task_id,
            attempt=work.attempt,
            partition_key=of.get("partition_key"),
            start=of.get("start"),
            end=of.get("end"),
            rows=total.rows,
            bytes=total.bytes,
            columns=tuple(columns),
            files=with_bounds(files),
            deleted=tuple(deleted),
            inputs=inputs,
            input_totals=input_totals,
        )
        body = encode(manifest)
        home = location or place.location
        self._transfer.write_bytes(f"{home}/{MANIFEST}", body)
        facts = facts_of(manifest, body)
        return Made(
            output=output,
            location=home,
            facts=facts,
            **(_slice(work) if slice_ is None else slice_),
        )


def read_of(work: Work) -> Read:
    """What manifests say of what was read."""
    return manifest_inputs(work.inputs), manifest_totals(work.inputs)


def data_file(location: str, file: File) -> DataFile:
    """A file that was written, to be read."""
    return DataFile(
        location=f"{location}/{file.name}", bytes=file.bytes, rows=file.rows, sha256=file.sha256
    )


def _sorted(frame: DataFrame, shape: Shape, count: int) -> DataFrame:
    """Rows by a hash of all that can be sorted by: no value is too frequent for one file."""
    order = [F.col(quoted(name)) for name in shape.order]
    return frame.repartition(count, *order).sortWithinPartitions(*order)


def _ranged(frame: DataFrame, shape: Shape, count: int) -> DataFrame:
    """Rows by ranges; those of a frequent value by the columns after it."""
    order = [F.col(quoted(name)) for name in shape.order]
    spread = frame.repartitionByRange(count, *order) if count > 1 else frame.coalesce(1)
    return spread.sortWithinPartitions(*order)


@contextmanager
def _cut_by(session: Any, file_bytes: int) -> Iterator[None]:
    """Within this, what Spark cuts adaptively is cut for files of this size.

    Rows in a shuffle take more than in Parquet: files become smaller than said, and not larger.
    """
    before = session.conf.getAll
    said = {ADVISORY: f"{file_bytes}b"} if ADVISORY not in before else {}
    if before.get(SHUFFLED_MIN) == SHUFFLED_BYTES_MIN:
        said[SHUFFLED_MIN] = f"{min(heap_bytes(SHUFFLED_BYTES_MIN), file_bytes // 4)}b"
    for name, value in said.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name in said:
            if name in before:
                session.conf.set(name, before[name])
            else:
                session.conf.unset(name)


def _slice(work: Work) -> Mapping[str, Any]:
    """The partition of the task, or its cursor if it has none."""
    payload = work.payload
    if payload.get("partition_key") is None:
        return {"cursor": payload.get("cursor")}
    return {name: payload.get(name) for name in ("partition_key", "start", "end")}


def _arranged(table: Any, shape: Shape) -> Any:
    """Rows in their order and columns in their types, in one piece, so that bytes are the same."""
    if shape.order:
        table = in_sparks_order(table, shape.order)
    return table.select(shape.arrow.names).cast(shape.arrow).combine_chunks()


def _encoded(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    # Checksums as Spark's own writer has them, so that who reads parts of a file notices damage.
    parquet.write_table(
        table, sink, write_page_checksum=True, write_statistics=told_columns(table.schema)
    )
    body: bytes = sink.getvalue().to_pybytes()
    return body


def _nullable(said: types.StructType) -> types.StructType:
    """A schema in which everything may be null: what Spark concludes depends on the plan."""
    found = _loose(said)
    assert isinstance(found, types.StructType)
    return found


def _loose(said: types.DataType) -> types.DataType:
    match said:
        case types.StructType():
            return types.StructType(
                [types.StructField(each.name, _loose(each.dataType)) for each in said.fields]
            )
        case types.ArrayType():
            return types.ArrayType(_loose(said.elementType))
        case types.MapType():
            return types.MapType(_loose(said.keyType), _loose(said.valueType))
    return said
