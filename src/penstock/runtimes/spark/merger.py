"""Merges what a task has made with what is published of its partition (upsert by key).

Of the rows with one key, the one with the higher version is there afterwards (`version_by`, as
Spark orders its type); without versions, and of equal ones, that of the later task. So the
order in which tasks merge makes no difference, and neither does merging what is there already:
the rule is the highest of all, and each row says what it is the highest of. The version is a
column of the data; the task is one that only merges read:

| in a file | is |
|---|---|
| `_penstock_task` | the number of the task that has made the row |
| `_deleted/part-*.parquet` | the keys, versions and tasks of rows that were deleted (tombstones) |

A row for which `delete_when` is true deletes what has its key, and leaves its key behind: a row
that is older than that, and comes later, stays away. Deleted keys are in no file of rows, so
nobody has to know of them to read. Rows are replaced as a whole: a column that the new row does
not have is null. Neither the hidden column nor deleted keys are in the schema of a dataset.

What was made has to have the key and the version in every row, and each key once, which is
checked like any other expectation. So it is written to the scratch folder on the way, computed
once, and only then merged. If others have published meanwhile, it is merged again with what
they have, by a run that is given what this one has kept (`Staged`), and computes nothing.

Where the output has `partition_by`, the runs of an attempt are these:

| run | does | and reports |
|---|---|---|
| the first | computes and checks the result, finds the keys of its partitions | these keys |
| the next | merges with what is published of them, in one pass; a manifest for each | all of them |
| others | the same, while some of them were published by others meanwhile | all of them |

A row is known by its key and its partition together. A key that has moved to another partition
is in both, until a row of the old one deletes it there: a result may have one key in several
partitions, and so do both at once. Each partition has the keys that were deleted from it. One
that has no rows any more is published without rows, for these keys. A result without rows is of
no partition. A crash leaves what is swept with the attempt.

Called by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, Protocol

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Window, types
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.layout import DELETED, part
from penstock.datasets.manifest import File
from penstock.datasets.schema import TASK_COLUMN, Column, evolve, is_hidden
from penstock.datasets.snapshot import DataFile
from penstock.kernel.errors import SchemaRefused, WorkFailed
from penstock.runtimes.base import NOT_READ, Merge, ProducedOutput, Staged, WorkInput, WorkOutput
from penstock.runtimes.spark.access.base import FileSlice, PartitionedFiles, WriteTarget
from penstock.runtimes.spark.access.choosing import AccessSelector
from penstock.runtimes.spark.columns import columns_of, quoted
from penstock.runtimes.spark.engine_protocol import PhaseTimer
from penstock.runtimes.spark.errors import in_field, is_too_large
from penstock.runtimes.spark.input_reader import InputFiles, InputReader
from penstock.runtimes.spark.job_config import (
    PARTITION,
    Expectation,
    JobConfig,
    RowCheck,
    UniqueCheck,
    names,
)
from penstock.runtimes.spark.operators import SMALL_BYTES_MAX, PlannedTask, split_rows
from penstock.runtimes.spark.output_writer import (
    OutputShape,
    OutputWriter,
    data_file,
    divide,
    publishable,
    shape_of,
    too_many,
)
from penstock.runtimes.spark.partition_keys import KEY, keyed
from penstock.runtimes.spark.result_size import is_beyond

TASK: Final = TASK_COLUMN.name
KEY_COLUMN: Final = Column(KEY, "string")
_DELETED: Final = "_penstock_deleted"
_IS_NEW: Final = "_penstock_is_new"
_RANK: Final = "_penstock_rank"

_VERSIONS: Final = (types.NumericType, types.StringType, types.DateType, types.BooleanType)
_MOMENTS: Final = (types.TimestampType, types.TimestampNTZType)
_FRACTIONS: Final = (types.FloatType, types.DoubleType)


class OutputProducer(Protocol):
    """Computes, checks and writes one output of one task."""

    def __call__(
        self,
        session: Any,
        member: PlannedTask,
        output: str,
        *,
        frame: DataFrame,
        shape: OutputShape,
        phases: PhaseTimer,
    ) -> tuple[File, ...]: ...


@dataclass(frozen=True, slots=True)
class MergeTask:
    """An output of a task that is to be merged with what is published."""

    member: PlannedTask
    output: str
    _: KW_ONLY
    session: Any
    phases: PhaseTimer
    held: ExitStack

    @property
    def place(self) -> WorkOutput:
        return self.member.work.outputs[self.output]

    @property
    def merge(self) -> Merge:
        assert self.member.work.merge is not None
        return self.member.work.merge


class Merger:
    """Merges outputs, by what reads and writes any others."""

    def __init__(
        self,
        reader: InputReader,
        writer: OutputWriter,
        accesses: AccessSelector,
        *,
        write_files: OutputProducer,
        collected: Callable[[DataFrame, JobConfig], Any],
        partitions_max: int,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._accesses = accesses
        self._write_files = write_files
        self._collected = collected
        self._partitions_max = partitions_max

    def stage(self, merging: MergeTask, *, frame: DataFrame, shape: OutputShape) -> Staged:
        """Compute and check what was made, and keep it for as long as the attempt runs."""
        place, merge = merging.place, merging.merge
        if not place.partition_by:
            current, _ = self._reader.published(place, merging.member.work)
            _fitting(current, merge, place=place, new=shape.columns)
            merging.phases.enter("running")
            return self._staged(merging, frame=frame, shape=shape, expect=expected(merge))
        _refuse_tag(frame.schema)
        keys = keyed(merging.session, frame, place.partition_by, output=merging.output)
        merging.phases.enter("running")
        staged = self._staged(
            merging,
            frame=keys.frame,
            shape=shape_of(keys.frame, _plain(merging.member.config)),
            expect=expected(merge, is_divided=True),
        )
        found = self._keys(merging, staged)
        return replace(
            staged,
            columns=shape.columns,
            keys=tuple((key, *(keys.range_of(key) or (None, None))) for key in found),
        )

    def merge(self, merging: MergeTask, staged: Staged) -> Callable[[], list[ProducedOutput]]:
        """Merge what is kept with what is published, and write that. What writes the manifests."""
        if merging.place.partition_by:
            return self._merge_many(merging, staged)
        place, merge = merging.place, merging.merge
        result = _input(merging, staged)
        rows, whole, columns = self._rows(merging, result, place, merge, staged.columns)
        files = self._files(merging, whole, live(rows))
        aside: tuple[File, ...] = ()
        if merge.delete_when:
            away = elsewhere(whole, merging.output, f"{place.location}/{DELETED}")
            aside = self._files(merging, _plainly(away), gone(rows, merge))
        base = place.current[0].revision if place.current else 0
        merging.phases.enter("writing")
        return lambda: [
            replace(
                self._writer.manifest(
                    merging.member, merging.output, columns, files, deleted=aside
                ),
                base_revision=base,
            )
        ]

    def _merge_many(self, merging: MergeTask, staged: Staged) -> Callable[[], list[ProducedOutput]]:
        ranges = {key: (start, end) for key, start, end in staged.keys}
        if not ranges:
            return list
        touched = tuple(
            each for each in merging.place.current if (each.partition_key or "") in ranges
        )
        place = replace(merging.place, current=touched)
        merge = replace(merging.merge, key=(KEY, *merging.merge.key))
        result = replace(_input(merging, staged), columns=(*staged.columns, KEY_COLUMN))
        rows, whole, columns = self._rows(merging, result, place, merge, staged.columns)
        lively = live(rows)
        divided = divide(
            self._writer,
            lively,
            shape_of(lively, whole.config, without=(KEY,)),
            whole,
            merging.output,
            access=self._accesses.to(place.location),
            partitions_max=self._partitions_max,
        )
        aside: PartitionedFiles = {}
        if merge.delete_when:
            aside = self._deleted(merging, whole, gone(rows, merge), keys=tuple(ranges))
        bases = {each.partition_key: each.revision for each in touched}
        merging.phases.enter("writing")
        return lambda: [
            replace(each, base_revision=bases.get(each.partition_key, 0))
            for each in publishable(
                self._writer,
                merging.member,
                merging.output,
                # Also of those that have no rows any more.
                {key: divided.get(key, ()) for key in ranges},
                columns=columns,
                range_of=ranges.__getitem__,
                deleted=aside,
            )
        ]

    def _rows(
        self,
        merging: MergeTask,
        result: InputFiles,
        place: WorkOutput,
        merge: Merge,
        new: Sequence[Column],
    ) -> tuple[DataFrame, PlannedTask, tuple[Column, ...]]:
        """What there is after the merge; the task as one that reads that, and the columns."""
        current, deleted = self._reader.published(place, merging.member.work)
        columns = _fitting(current, merging.merge, place=place, new=new)
        merging.phases.enter("merging")
        # All are read as what they become: Spark puts no two maps together whose values differ.
        held = _as_in(columns, current.columns or ())
        seen = (*held, TASK_COLUMN)
        dead = gone_columns(held, merging.merge)
        assert result.columns is not None
        rows = merged(
            self._frame(merging, result, _as_in(columns, result.columns)),
            merge,
            task_id=merging.member.work.task_id,
            current=self._published(merging, current, seen),
            deleted=self._published(merging, deleted, dead),
            columns=(*columns, *([KEY_COLUMN] if KEY in merge.key else [])),
            is_small=result.bytes + current.bytes + deleted.bytes <= SMALL_BYTES_MAX,
        )
        inputs = {each.name: each for each in (result, current, deleted)}
        config = replace(merging.member.config, expect=())
        return rows, replace(merging.member, config=config, inputs=inputs), columns

    def _staged(
        self,
        merging: MergeTask,
        *,
        frame: DataFrame,
        shape: OutputShape,
        expect: Sequence[Expectation],
    ) -> Staged:
        """What a task has made, checked, in files of its scratch folder."""
        member = merging.member
        location = f"{member.work.scratch or merging.place.location}/result/{merging.output}"
        staged = _plainly(elsewhere(member, merging.output, location))
        config = replace(staged.config, expect=(*expect, *member.config.expect))
        files = self._write_files(
            merging.session,
            replace(staged, config=config),
            merging.output,
            frame=frame,
            shape=replace(shape, order=(), ties=()),
            phases=merging.phases,
        )
        # It goes through the worker to the next run, which reads all of it.
        small = tuple(msgspec.structs.replace(each, bounds={}) for each in files)
        return Staged(location=location, files=small, columns=shape.columns)

    def _keys(self, merging: MergeTask, staged: Staged) -> list[str]:
        """The keys of the partitions that rows were made of."""
        if not staged.files:
            return []
        frame = self._frame(merging, _input(merging, staged), staged.columns)
        rows = frame.select(KEY).distinct().limit(self._partitions_max + 1).collect()
        if len(rows) > self._partitions_max:
            raise too_many(
                merging.output, f"more than {self._partitions_max:,}", self._partitions_max
            )
        return sorted(row[0] for row in rows)

    def _deleted(
        self, merging: MergeTask, whole: PlannedTask, frame: DataFrame, *, keys: Sequence[str]
    ) -> PartitionedFiles:
        """The keys of deleted rows, written to the folders of their partitions.

        They are gathered and written here, for these folders are inside of what one pass of Spark
        writes. Where they are too many for that, or are texts with a collation, they are written
        aside, by partition, and each of those that have any is a pass over that.
        """
        output, location = merging.output, merging.place.location
        away = _plainly(whole)
        shape = shape_of(frame, away.config, without=(KEY,))
        access = self._accesses.to(location)
        try:
            gathered = self._collected(frame, away.config) if shape.is_for_arrow else None
        except Exception as error:
            if not is_too_large(error) and not is_beyond(error):
                raise
            gathered = None
        if gathered is None:
            kept = self._kept(merging, away, frame)
            return {
                key: self._files(
                    merging,
                    elsewhere(away, output, f"{location}/{part(key)}/{DELETED}"),
                    kept.where(F.col(KEY) == key).drop(KEY),
                )
                for (key,) in kept.select(KEY).distinct().sort(KEY).collect()
            }
        found = split_rows(gathered, KEY, keys)
        file_bytes = self._writer.file_bytes(away.config)
        return {
            key: self._writer.table(
                rows, shape, f"{location}/{part(key)}/{DELETED}", access, file_bytes=file_bytes
            )
            for key, rows in found.items()
        }

    def _kept(self, merging: MergeTask, member: PlannedTask, frame: DataFrame) -> DataFrame:
        """The rows of partitions, computed once, from files that are sorted by key."""
        location = merging.place.location
        scratch = f"{member.work.scratch or location}/deleted/{merging.output}"
        target = WriteTarget(
            location=f"{scratch}/kept",
            staging=scratch,
            file_bytes=self._writer.file_bytes(member.config),
        )
        access = self._accesses.to(location)
        files = access.write(frame.hint("rebalance", KEY).sortWithinPartitions(KEY), target)
        there = [data_file(target.location, each) for each in files]
        columns = columns_of(frame.schema)
        return access.frame(merging.session, [FileSlice(files=there)], columns, merging.held)

    def _files(self, merging: MergeTask, member: PlannedTask, frame: DataFrame) -> tuple[File, ...]:
        return self._write_files(
            merging.session,
            member,
            merging.output,
            frame=frame,
            shape=shape_of(frame, member.config),
            phases=merging.phases,
        )

    def _published(
        self, merging: MergeTask, given: InputFiles, columns: Sequence[Column]
    ) -> DataFrame | None:
        return self._frame(merging, given, columns) if given.files else None

    def _frame(self, merging: MergeTask, given: InputFiles, columns: Sequence[Column]) -> DataFrame:
        """The rows of files; those that are of a partition have its key."""
        access = self._accesses.to(merging.place.location)
        if not merging.place.partition_by or any(each.name == KEY for each in columns):
            slices = [FileSlice(files=given.files)]
            return access.frame(merging.session, slices, columns, merging.held)
        some: dict[str, list[DataFile]] = {}
        for each in given.files:
            some.setdefault(each.partition_key or "", []).append(each)
        slices = [FileSlice(files=files, tag=key) for key, files in some.items()]
        frame = access.frame(merging.session, slices, columns, merging.held)
        return frame.withColumnRenamed(PARTITION, KEY)


def asked(merging: MergeTask, staged: Staged) -> list[ProducedOutput]:
    """What says which partitions a result is of, to be told what is published of them."""
    place, payload = merging.place, merging.member.work.payload
    if not place.partition_by:
        of = {name: payload.get(name) for name in ("partition_key", "start", "end")}
        return [
            ProducedOutput(
                output=merging.output, location=place.location, base_revision=NOT_READ, **of
            )
        ]
    return [
        ProducedOutput(
            output=merging.output,
            location=f"{place.location}/{part(key)}",
            partition_key=key,
            start=start,
            end=end,
            base_revision=NOT_READ,
        )
        for key, start, end in staged.keys
    ]


def _input(merging: MergeTask, staged: Staged) -> InputFiles:
    return InputFiles(
        name="the result",
        given=WorkInput(dataset=merging.place.dataset, generation=merging.member.work.generation),
        files=tuple(data_file(staged.location, each) for each in staged.files),
        columns=staged.columns,
        is_own=True,
    )


def _fitting(
    current: InputFiles, merge: Merge, *, place: WorkOutput, new: Sequence[Column]
) -> tuple[Column, ...]:
    """The columns after a merge. Raises `WorkFailed` if what is published cannot be merged with."""
    if place.current:
        refuse_published(current.columns, merge)
    return merged_columns(current.columns, new)


def _as_in(whole: Sequence[Column], some: Sequence[Column]) -> tuple[Column, ...]:
    """Some of the columns of a whole, in its types."""
    known = {each.name: each for each in whole}
    return tuple(known.get(each.name, each) for each in some)


def _plain(config: JobConfig) -> JobConfig:
    """For what is neither expected nor ordered."""
    return replace(config, expect=(), sort_by=(), cluster_by=())


def _plainly(member: PlannedTask) -> PlannedTask:
    return replace(member, config=_plain(member.config))


def _refuse_tag(schema: types.StructType) -> None:
    """Raise `WorkFailed` for a column that says elsewhere which partition a row is of."""
    if any(name.casefold() == PARTITION for name in schema.names):
        raise WorkFailed(
            f"The result has the column {PARTITION}, and is merged into partitions that have that"
            " name for their keys; give it another one.",
            is_retried=False,
        )


def elsewhere(member: PlannedTask, output: str, location: str) -> PlannedTask:
    """The task, as if this output lay in another place."""
    work = member.work
    place = replace(work.outputs[output], location=location)
    scratch = work.scratch and f"{work.scratch}/{location.rpartition('/')[2]}"
    return replace(member, work=replace(work, outputs={output: place}, scratch=scratch))


def refuse_result(schema: types.StructType, merge: Merge) -> None:
    """Raise `WorkFailed` if a result of this schema cannot be merged."""
    hidden = [name for name in schema.names if is_hidden(name)]
    if hidden:
        raise WorkFailed(
            f"The result has the column {hidden[0]!r}: names that begin so are kept for what merges"
            " need to know; give it another one.",
            is_retried=False,
        )
    for field, said in (("unique_key", merge.key), ("version_by", (merge.version_by,))):
        for name in filter(None, said):
            if name not in schema.names:
                raise WorkFailed(
                    f"{field}: the result has no column {name!r}; it has {names(schema.names)}.",
                    is_retried=False,
                )
            kind = schema[name].dataType
            is_key = field == "unique_key"
            is_fit = isinstance(kind, (*_VERSIONS, *_MOMENTS))
            if not is_fit or (is_key and isinstance(kind, _FRACTIONS)):
                why = "what identifies rows" if is_key else "what orders rows"
                raise WorkFailed(
                    f"{field}: the column {name!r} is {kind.simpleString()}, which cannot be {why};"
                    " name one of whole numbers, decimals, texts, dates or timestamps.",
                    is_retried=False,
                )


def merged_columns(held: Sequence[Column] | None, new: Sequence[Column]) -> tuple[Column, ...]:
    """The columns of what is published after a merge. Raises `WorkFailed` if they do not fit."""
    try:
        return evolve(held or (), new)
    except SchemaRefused as error:
        raise WorkFailed(f"{error.message} {error.hint}".strip(), is_retried=False) from error


def refuse_published(columns: Sequence[Column] | None, merge: Merge) -> None:
    """Raise `WorkFailed` if what is published, as by an earlier job, has no keys."""
    there = {each.name for each in columns or ()}
    missing = [name for name in (*merge.key, merge.version_by) if name and name not in there]
    if missing:
        raise WorkFailed(
            f"What is published of the partition has no column {missing[0]!r}, so nothing can be"
            " merged with it; make it anew without what was kept of an earlier generation.",
            is_retried=False,
        )


def expected(merge: Merge, *, is_divided: bool = False) -> tuple[Expectation, ...]:
    """What has to be true of a result, besides what its job expects."""
    once = f"each {', '.join(merge.key)} once"
    if is_divided:
        once += " in a partition"
    present = [*merge.key, *([merge.version_by] if merge.version_by else [])]
    return (
        *(
            RowCheck(sql=f"{quoted(name)} IS NOT NULL", name=f"{name} is not null")
            for name in present
        ),
        UniqueCheck(
            columns=(*((KEY,) if is_divided else ()), *merge.key), name=f"{once} (unique_key)"
        ),
    )


def merged(
    made: DataFrame,
    merge: Merge,
    *,
    task_id: int,
    current: DataFrame | None,
    deleted: DataFrame | None,
    columns: Sequence[Column],
    is_small: bool,
) -> DataFrame:
    """One row for each key, also of deleted ones: `live` and `gone` tell them apart.

    What is small is one Spark partition, and nothing is shuffled.
    """
    every = _with_flags(made, task=F.lit(task_id).cast("bigint"), gone=is_gone(made, merge))
    every = every.withColumn(_IS_NEW, F.lit(1))
    # What was kept of a job that did not merge is of no task that anybody knows.
    task = F.coalesce(F.col(TASK), F.lit(0).cast("bigint"))
    for held, gone in ((current, False), (deleted, True)):
        if held is not None:
            more = _with_flags(held, task=task, gone=F.lit(gone)).withColumn(_IS_NEW, F.lit(0))
            every = every.unionByName(more, allowMissingColumns=True)
    every = every.coalesce(1) if is_small else every
    order = [F.col(TASK).desc(), F.col(_IS_NEW).desc()]
    if merge.version_by:
        order.insert(0, F.col(quoted(merge.version_by)).desc_nulls_last())
    keys = [F.col(quoted(name)) for name in merge.key]
    ranked = every.withColumn(_RANK, F.row_number().over(Window.partitionBy(*keys).orderBy(*order)))
    shown = [F.col(quoted(each.name)) for each in columns]
    return ranked.where(F.col(_RANK) == 1).select(*shown, TASK, _DELETED)


def live(rows: DataFrame) -> DataFrame:
    """The rows that there are after a merge, with their tasks."""
    return rows.where(~F.col(_DELETED)).drop(_DELETED)


def gone(rows: DataFrame, merge: Merge) -> DataFrame:
    """The keys of those that were deleted, with their versions and tasks."""
    known = [*merge.key, *([merge.version_by] if merge.version_by else []), TASK]
    return rows.where(F.col(_DELETED)).select(*(F.col(quoted(name)) for name in known))


def gone_columns(columns: Sequence[Column], merge: Merge) -> tuple[Column, ...]:
    """The columns of the keys of deleted rows."""
    known = {*merge.key, merge.version_by}
    return (*(each for each in columns if each.name in known), TASK_COLUMN)


def _with_flags(frame: DataFrame, *, task: Any, gone: Any) -> DataFrame:
    return frame.withColumn(TASK, task).withColumn(_DELETED, gone)


def is_gone(made: DataFrame, merge: Merge) -> Any:
    """Whether a row deletes what has its key. Raises `WorkFailed` if that cannot be told."""
    if not merge.delete_when:
        return F.lit(False)  # noqa: FBT003 - a value, no option
    said = F.coalesce(F.expr(f"({merge.delete_when}\n)").cast("boolean"), F.lit(False))  # noqa: FBT003
    try:
        _ = made.select(said).schema
    except PySparkException as error:
        raise in_field(error, "delete_when") from error
    return said
