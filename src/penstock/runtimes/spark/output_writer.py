"""From the DataFrame of an output to files and manifests in the attempt's own folder.

What is small leaves Spark through Arrow: it is collected, sorted and written here, mostly as
one file. What is large, or of a size that nobody knows, is written by Spark
(`DataAccess.write`), which computes it once: whatever comes after that reads the files.

Spark's tasks write as they are, each a file or several. Only where what was given says nothing
of how much there is to write, or where files are to be smaller than what a task reads, the rows
are shuffled once more and cut adaptively (`rebalance`). If there are many small files in the
end, they are put together, from what was written (`result_size`): that reads and writes little,
or it is not done. `cluster_by` always takes that second step: ranges need a sample of all rows
first, and the rows are written, into the attempt's scratch, before it is taken. Files that came out
far too large are cut in the same way.

Equal rows give equal bytes if the job has `sort_by`: rows go to files by a hash of all of their
columns, are sorted by all of them, and the number of files is made of bytes that were given and
written. Elsewhere the same rows may be cut and ordered in another way by the next attempt.

The manifest is written last: until then there is nothing, and afterwards nothing changes. With
`partition_by` a result is divided by its keys in one pass, and each part is an output:

| state | what a crash leaves |
|---|---|
| Spark writes: one job, which brings the rows of a key together | files in scratch |
| files are brought to `~many/ATTEMPT/KEY/`, several at a time | folders without manifests |
| manifests are written, several at a time | some partitions that are whole, and nobody's |
| one completion has all of them, under one fence | all are published, or none is |

Whatever a crash leaves is swept with the attempt, partition by partition; the next attempt has
a folder of its own and may find other keys. A completion whose answer was lost is reported
again, and has the same answer. Expectations are checked over all rows before there is a
manifest. Without `sort_by` the rows of a key that are many become several files, as adaptive
execution cuts them; with it a partition is one sorted file at first. Where these are far from the
target size, or of `cluster_by` several, those of the key are written again. A result without rows
has no partitions, and publishes nothing. Columns are reported with the first partition only: all
have the same.

Called by the engine, and by `merger` and `rewriter`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, types
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.layout import MANIFEST, part
from penstock.datasets.manifest import (
    File,
    InputTotal,
    Manifest,
    ManifestInput,
    encode,
    sums,
    with_bounds,
)
from penstock.datasets.parquet_footer import columns_in, identified_file
from penstock.datasets.schema import Column
from penstock.datasets.snapshot import DataFile
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import (
    MAINTAIN,
    AttemptWork,
    ProducedOutput,
    facts_of,
    manifest_inputs,
    manifest_totals,
)
from penstock.runtimes.spark.access.base import (
    DataAccess,
    FileSlice,
    PartitionedFiles,
    WriteTarget,
    opened_writer,
)
from penstock.runtimes.spark.access.parquet import file_bounds
from penstock.runtimes.spark.columns import (
    columns_of,
    in_sparks_order,
    is_ambiguous,
    is_for_arrow,
    is_orderable,
    is_sortable,
    quoted,
)
from penstock.runtimes.spark.internals import arrow_schema
from penstock.runtimes.spark.job_config import JobConfig, names
from penstock.runtimes.spark.operators import SMALL_BYTES_MAX, PlannedTask
from penstock.runtimes.spark.partition_keys import KEY
from penstock.runtimes.spark.result_size import (
    UNKNOWN_BYTES,
    files_for,
    misfits,
    oversized,
)
from penstock.runtimes.spark.settings import ADVISORY, SHUFFLED_BYTES_MIN, SHUFFLED_MIN, heap_bytes

_log = logging.getLogger(__name__)

Read = tuple[tuple[ManifestInput, ...], tuple[InputTotal, ...] | msgspec.UnsetType]
"""What manifests say of what was read."""

_DASHES: Final = 3
_SPLIT_FROM: Final = 1.5
"""How many times the target a file may be before it becomes several."""
_READ_BYTES: Final = 128 * 2**20
"""What a task of Spark reads of a large file."""
_SAME_ROWS: Final = ("compact", "integrity_check", MAINTAIN)
"""Operators whose results are as large as what they read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputShape:
    """What an output looks like: its columns, the same in Arrow, and how it is sorted."""

    columns: tuple[Column, ...]
    is_for_arrow: bool
    arrow: Any
    order: tuple[str, ...]
    """All columns by which its rows are sorted; empty if they are not."""
    ties: tuple[str, ...] = ()
    """Columns whose texts order rows that these leave equal."""


def shape_of(frame: DataFrame, config: JobConfig, *, without: Sequence[str] = ()) -> OutputShape:
    """The shape of a result. Raises `WorkFailed` if it cannot be that of a dataset."""
    fields = [field for field in frame.schema.fields if field.name not in without]
    schema = types.StructType(fields)
    if not fields:
        whose = (
            f"{config.sql_file or 'config.sql'} is no query"
            if config.sql
            else "The result is empty"
        )
        raise WorkFailed(f"{whose}: it has no columns.", is_retried=False)
    what, by = ("cluster_by" if config.cluster_by else "sort_by"), config.ordered_by
    unknown = [name for name in by if name not in schema.names]
    if unknown:
        raise WorkFailed(
            f"config.{what}: the result has no column {unknown[0]!r}; it has"
            f" {names(schema.names)}.",
            is_retried=False,
        )
    for name in by:
        if not is_sortable(schema[name].dataType):
            kind = schema[name].dataType.simpleString()
            raise WorkFailed(
                f"config.{what}: nothing can be sorted by the column {name!r}, which is {kind}.",
                is_retried=False,
            )
    rest = (field.name for field in fields if field.name not in by and is_orderable(field.dataType))
    # Arrow orders what is nested otherwise than Spark.
    passes = is_for_arrow(schema) and all(is_orderable(schema[name].dataType) for name in by)
    return OutputShape(
        columns=columns_of(schema),
        is_for_arrow=passes,
        arrow=arrow_schema(_nullable(schema)) if passes else None,
        order=(*by, *rest) if by else (),
        ties=tuple(each.name for each in fields if is_ambiguous(each.dataType)) if by else (),
    )


class OutputWriter:
    """Writes outputs of attempts."""

    def __init__(
        self, transfer: Transfer, *, target_file_bytes: int, is_apart: bool = False
    ) -> None:
        """`is_apart` if executors are other processes than that of the session."""
        self._transfer = transfer
        self._target_file_bytes = target_file_bytes
        self._is_apart = is_apart

    def file_bytes(self, config: JobConfig) -> int:
        """How large the files of a job should become."""
        return config.target_file_bytes or self._target_file_bytes

    def table(
        self, table: Any, shape: OutputShape, location: str, access: DataAccess, *, file_bytes: int
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
        shape: OutputShape,
        member: PlannedTask,
        output: str,
        access: DataAccess,
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
        target = WriteTarget(location=location, staging=scratch, file_bytes=file_bytes)
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
        return self.fitted(session, files, shape, config=config, access=access, target=target)

    def fitted(
        self,
        session: Any,
        files: tuple[File, ...],
        shape: OutputShape,
        *,
        config: JobConfig,
        access: DataAccess,
        target: WriteTarget,
    ) -> tuple[File, ...]:
        """Files that were written there, and others for those that are far from the target size.

        What is clustered is written again also where it is several files: they hold no ranges.
        """
        gone = misfits(files, file_bytes=target.file_bytes, is_sorted=bool(config.ordered_by))
        if config.cluster_by and len(files) > 1:
            gone = files
        if not gone:
            return files
        after = replace(target, first=len(files))
        made = self._again(
            session, gone, shape, config=config, access=access, source=target, target=after
        )
        self.remove(target.location, gone)
        return (*(each for each in files if each not in gone), *made)

    def _again(
        self,
        session: Any,
        files: Sequence[File],
        shape: OutputShape,
        *,
        config: JobConfig,
        access: DataAccess,
        source: WriteTarget,
        target: WriteTarget,
    ) -> tuple[File, ...]:
        """Write files again, as fewer or more, or by range."""
        if not files:
            return ()
        count = files_for(sums(files).bytes, file_bytes=target.file_bytes)
        with ExitStack() as held:
            there = [data_file(source.location, each) for each in files]
            frame = access.frame(session, [FileSlice(files=there)], shape.columns, held)
            if config.cluster_by:
                spread = _ranged(frame, shape, count)
            elif config.sort_by:
                spread = _sorted(frame, shape, count)
            elif oversized(files, file_bytes=target.file_bytes):
                spread = frame.repartition(count)
            else:
                spread = frame.coalesce(count)
            return access.write(spread, target)

    def manifest(
        self,
        member: PlannedTask,
        output: str,
        columns: Sequence[Column],
        files: Sequence[File],
        *,
        location: str = "",
        slice_: Mapping[str, Any] | None = None,
        read: Read | None = None,
        deleted: Sequence[File] = (),
    ) -> ProducedOutput:
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
        if slice_ is None:
            self.tidy(home, {each.name for each in files})
        self._transfer.write_bytes(f"{home}/{MANIFEST}", body)
        facts = facts_of(manifest, body)
        return ProducedOutput(
            output=output,
            location=home,
            facts=facts,
            **(_slice(work) if slice_ is None else slice_),
        )

    def remove(self, location: str, files: Sequence[File]) -> None:
        """Remove files for which others are there, or will be."""
        self._transfer.delete(f"{location}/{each.name}" for each in files)

    def tidy(self, location: str, named: Collection[str]) -> None:
        """Remove files of Spark tasks that no manifest will name.

        An executor that is killed leaves them, whole or half. Who reads what is published as a
        folder, as functions do, would take their rows for data. Elsewhere a task removes its own.
        """
        if not self._is_apart or not any(map(_is_of_a_task, named)):
            return
        depths = {name.count("/") for name in named}
        strays = [
            each.name
            for each in self._transfer.list(location)
            if _is_of_a_task(each.name)
            and each.name.count("/") in depths
            and each.name not in named
        ]
        if strays:
            _log.info("removed %s files of lost executors", len(strays))
            self._transfer.delete(f"{location}/{name}" for name in strays)


def _is_of_a_task(name: str) -> bool:
    """Whether a task on an executor has given the name: `part-TASK-ATTEMPT-FILE.parquet`."""
    return name.rpartition("/")[2].count("-") == _DASHES


def read_of(work: AttemptWork) -> Read:
    """What manifests say of what was read."""
    return manifest_inputs(work.inputs), manifest_totals(work.inputs)


def data_file(location: str, file: File) -> DataFile:
    """A file that was written, to be read."""
    return DataFile(
        location=f"{location}/{file.name}", bytes=file.bytes, rows=file.rows, sha256=file.sha256
    )


def _sorted(frame: DataFrame, shape: OutputShape, count: int) -> DataFrame:
    """Rows by a hash of all that can be sorted by: no value is too frequent for one file."""
    order = [F.col(quoted(name)) for name in shape.order]
    return frame.repartition(count, *order).sortWithinPartitions(*order, *_ties(shape))


def _ties(shape: OutputShape) -> Iterator[Any]:
    """What orders rows that are equal in all that they are sorted by, and that are not equal."""
    return (F.col(quoted(name)).cast("string") for name in shape.ties)


def _ranged(frame: DataFrame, shape: OutputShape, count: int) -> DataFrame:
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


def _slice(work: AttemptWork) -> Mapping[str, Any]:
    """The partition of the task, or its cursor if it has none."""
    payload = work.payload
    if payload.get("partition_key") is None:
        return {"cursor": payload.get("cursor")}
    return {name: payload.get(name) for name in ("partition_key", "start", "end")}


def _arranged(table: Any, shape: OutputShape) -> Any:
    """Rows in their order and columns in their types, in one piece, so that bytes are the same."""
    if shape.order:
        table = in_sparks_order(table, shape.order, ties=shape.ties)
    return table.select(shape.arrow.names).cast(shape.arrow).combine_chunks()


def _encoded(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with opened_writer(sink, table.schema) as writer:
        writer.write_table(table)
    return identified_file(sink.getvalue().to_pybytes(), columns_in(table.schema))


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


_MANIFESTS_AT_ONCE: Final = 32
_SHUFFLED_BYTES_MIN: Final = "1b"
"""What a task that writes partitions gets at least."""


def divide(
    writer: OutputWriter,
    frame: DataFrame,
    shape: OutputShape,
    member: PlannedTask,
    output: str,
    *,
    access: DataAccess,
    partitions_max: int,
    watched: Callable[[DataFrame], DataFrame] = lambda frame: frame,
) -> PartitionedFiles:
    """Write the rows of each key of a frame as files of its own; `WorkFailed` for too many keys.

    `watched` gets what is written, where each row comes by once.
    """
    work, config, session = member.work, member.config, frame.sparkSession
    location, staging = work.outputs[output].location, work.scratch
    file_bytes = writer.file_bytes(config)
    target = WriteTarget(
        location=location, staging=f"{staging or location}/{output}", file_bytes=file_bytes
    )
    with _cut_by(session, file_bytes), _on_all_cores(session):
        spread = _spread(frame, shape, watched, is_one=bool(config.sort_by))
        divided = access.write_keys(spread, KEY, target)
    if len(divided) > partitions_max:
        raise too_many(output, f"{len(divided):,}", partitions_max)

    def fitted(key: str) -> tuple[File, ...]:
        home = replace(target, location=f"{location}/{part(key)}")
        return writer.fitted(
            session, divided[key], shape, config=config, access=access, target=home
        )

    return {key: fitted(key) for key in divided}


def too_many(output: str, count: str, partitions_max: int) -> WorkFailed:
    """That a result has more partitions than a task may make."""
    return WorkFailed(
        f"partition_by of the output {output} has made {count} partitions of the"
        f" result, and {partitions_max:,} are allowed (partitions_max in the settings of the"
        " runtime spark).",
        is_retried=False,
        hint="Divide it more coarsely, or have a task make less at a time.",
    )


def written_files(
    member: PlannedTask, output: str, divided: PartitionedFiles
) -> list[tuple[str, File]]:
    """All files and the folders that they are in."""
    location = member.work.outputs[output].location
    return [(f"{location}/{part(key)}", file) for key, files in divided.items() for file in files]


def publishable(
    writer: OutputWriter,
    member: PlannedTask,
    output: str,
    divided: PartitionedFiles,
    *,
    columns: Sequence[Column],
    range_of: Callable[[str], tuple[int | None, int | None] | None],
    deleted: PartitionedFiles | None = None,
) -> list[ProducedOutput]:
    """Write the manifests, and say what was made. `deleted` are the keys of deleted rows."""
    aside = deleted or {}
    location = member.work.outputs[output].location
    read = read_of(member.work)
    writer.tidy(
        location, {f"{part(key)}/{file.name}" for key, some in divided.items() for file in some}
    )

    def manifest(key: str) -> ProducedOutput:
        start, end = range_of(key) or (None, None)
        return writer.manifest(
            member,
            output,
            columns,
            divided[key],
            location=f"{location}/{part(key)}",
            slice_={"partition_key": key, "start": start, "end": end},
            read=read,
            deleted=aside.get(key, ()),
        )

    with ThreadPoolExecutor(_MANIFESTS_AT_ONCE, thread_name_prefix="penstock-manifest") as pool:
        made = list(pool.map(manifest, divided))
    return [*made[:1], *(_without_columns(each) for each in made[1:])]


def _spread(
    frame: DataFrame,
    shape: OutputShape,
    watched: Callable[[DataFrame], DataFrame],
    *,
    is_one: bool,
) -> DataFrame:
    """The rows of a key together and in order, as the writer wants them; a file for each of them if
    there is to be one.

    They are watched below the sort, so that Spark's writer sees the order that it relies on.
    """
    every = [F.col(quoted(name)) for name in shape.order]
    every += _ties(shape)
    spread = frame.repartition(F.col(KEY)) if is_one else frame.hint("rebalance", KEY)
    return watched(spread).sortWithinPartitions(KEY, *every)


@contextmanager
def _on_all_cores(session: Any) -> Iterator[None]:
    """Within this, adaptive execution joins little data to no fewer tasks than there are cores.

    Elsewhere a task has some megabytes at least. Here what it costs is files, not bytes: thousands
    of small ones, one after the other, take minutes.
    """
    before = session.conf.getAll.get(SHUFFLED_MIN)
    session.conf.set(SHUFFLED_MIN, _SHUFFLED_BYTES_MIN)
    try:
        yield
    finally:
        if before is None:
            session.conf.unset(SHUFFLED_MIN)
        else:
            session.conf.set(SHUFFLED_MIN, before)


def _without_columns(made: ProducedOutput) -> ProducedOutput:
    assert made.facts is not None
    return replace(made, facts=replace(made.facts, columns=()))
