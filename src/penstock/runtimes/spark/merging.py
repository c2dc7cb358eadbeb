"""How what a task has made is merged with what is published of its partition.

Of the rows with one key, the one with the higher version is there afterwards (`version_by`, as
Spark orders its type); without versions, and of equal ones, that of the later task. So the order in
which tasks merge makes no difference, and neither does merging what is there already: the rule is
the highest of all, and each row says what it is the highest of. The version is a column of the
data; the task is one that only merges read:

| in a file | is |
|---|---|
| `_penstock_task` | the number of the task that has made the row |
| `_deleted/part-*.parquet` | the keys, versions and tasks of rows that were deleted |

A row for which `delete_when` is true deletes what has its key, and leaves its key behind: a row
that is older than that, and comes later, stays away. Deleted keys are in no file of rows, so nobody
has to know of them to read. Rows are replaced as a whole: a column that the new row does not have
is null. Neither the hidden column nor deleted keys are in the schema of a dataset.

What was made has to have the key and the version in every row, and each key once, which is checked
like any other expectation. So it is written to the scratch folder on the way, computed once, and
only then merged. Called by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, Protocol

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Window, types
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.layout import DELETED
from penstock.datasets.manifest import File
from penstock.datasets.schema import Column, evolve, is_hidden
from penstock.datasets.snapshot import DataFile
from penstock.kernel.errors import SchemaRefused, WorkFailed
from penstock.runtimes.base import Given, Made, Merge, Place
from penstock.runtimes.spark.access.base import Slice
from penstock.runtimes.spark.access.choosing import Accesses
from penstock.runtimes.spark.columns import quoted
from penstock.runtimes.spark.configs import names
from penstock.runtimes.spark.errors import in_field
from penstock.runtimes.spark.expecting import Check, Expectation, Unique
from penstock.runtimes.spark.operators.plans import SMALL_BYTES_MAX, Member
from penstock.runtimes.spark.phases import Phases
from penstock.runtimes.spark.reading import Input, Reader
from penstock.runtimes.spark.writing import Shape, Writer, shape_of

TASK: Final = "_penstock_task"
TASK_COLUMN: Final = Column(TASK, "bigint")
_DELETED: Final = "_penstock_deleted"
_IS_NEW: Final = "_penstock_is_new"
_RANK: Final = "_penstock_rank"

_VERSIONS: Final = (types.NumericType, types.StringType, types.DateType, types.BooleanType)
_MOMENTS: Final = (types.TimestampType, types.TimestampNTZType)
_FRACTIONS: Final = (types.FloatType, types.DoubleType)


class Files(Protocol):
    """Computes, checks and writes one output of one task."""

    def __call__(
        self,
        session: Any,
        member: Member,
        output: str,
        *,
        frame: DataFrame,
        shape: Shape,
        phases: Phases,
    ) -> tuple[File, ...]: ...


@dataclass(frozen=True, slots=True)
class Merging:
    """An output of a task that is to be merged with what is published."""

    member: Member
    output: str
    _: KW_ONLY
    session: Any
    phases: Phases
    held: ExitStack

    @property
    def place(self) -> Place:
        return self.member.work.outputs[self.output]

    @property
    def merge(self) -> Merge:
        assert self.member.work.merge is not None
        return self.member.work.merge


class Merger:
    """Merges outputs, by what reads and writes any others."""

    def __init__(
        self, reader: Reader, writer: Writer, accesses: Accesses, write_files: Files
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._accesses = accesses
        self._write_files = write_files

    def merge(self, merging: Merging, *, frame: DataFrame, shape: Shape) -> Callable[[], Made]:
        """Compute and check what was made, merge it with what is published, and write that.

        Returns what writes the manifest.
        """
        place, merge = merging.place, merging.merge
        current, deleted = self._reader.published(place, merging.member.work)
        if place.current:
            refuse_published(current.columns, merge)
        columns = merged_columns(current.columns, shape.columns)
        merging.phases.enter("running")
        result = self._staged(merging, frame=frame, shape=shape)
        merging.phases.enter("merging")
        seen = (*(current.columns or ()), TASK_COLUMN)
        dead = gone_columns(current.columns or (), merge)
        rows = merged(
            self._frame(merging, result, shape.columns),
            merge,
            task_id=merging.member.work.task_id,
            current=self._frame(merging, current, seen) if current.files else None,
            deleted=self._frame(merging, deleted, dead) if deleted.files else None,
            columns=columns,
            is_small=result.bytes + current.bytes + deleted.bytes <= SMALL_BYTES_MAX,
        )
        inputs = {each.name: each for each in (result, current, deleted)}
        config = replace(merging.member.config, expect=())
        whole = replace(merging.member, config=config, inputs=inputs)
        files = self._files(merging, whole, live(rows))
        aside: tuple[File, ...] = ()
        if merge.delete_when:
            away = _elsewhere(whole, merging.output, f"{place.location}/{DELETED}")
            away = replace(away, config=replace(config, sort_by=(), cluster_by=()))
            aside = self._files(merging, away, gone(rows, merge))
        base = place.current[0].revision if place.current else 0
        merging.phases.enter("writing")
        return lambda: replace(
            self._writer.manifest(merging.member, merging.output, columns, files, deleted=aside),
            base_revision=base,
        )

    def _staged(self, merging: Merging, *, frame: DataFrame, shape: Shape) -> Input:
        """What a task has made, checked, in files of its scratch folder."""
        member = merging.member
        location = f"{member.work.scratch or merging.place.location}/result/{merging.output}"
        expect = (*expected(merging.merge), *member.config.expect)
        staged = _elsewhere(member, merging.output, location)
        plain = replace(member.config, expect=expect, sort_by=(), cluster_by=())
        staged = replace(staged, config=plain)
        files = self._write_files(
            merging.session,
            staged,
            merging.output,
            frame=frame,
            shape=replace(shape, order=()),
            phases=merging.phases,
        )
        return Input(
            name="the result",
            given=Given(dataset=merging.place.dataset, generation=member.work.generation),
            files=tuple(
                DataFile(
                    location=f"{location}/{each.name}",
                    bytes=each.bytes,
                    rows=each.rows,
                    sha256=each.sha256,
                )
                for each in files
            ),
            columns=shape.columns,
            is_own=True,
        )

    def _files(self, merging: Merging, member: Member, frame: DataFrame) -> tuple[File, ...]:
        return self._write_files(
            merging.session,
            member,
            merging.output,
            frame=frame,
            shape=shape_of(frame, member.config),
            phases=merging.phases,
        )

    def _frame(self, merging: Merging, given: Input, columns: Sequence[Column]) -> DataFrame:
        access = self._accesses.to(merging.place.location)
        slices = [Slice(files=given.files)]
        return access.frame(merging.session, slices, columns, merging.held)


def _elsewhere(member: Member, output: str, location: str) -> Member:
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


def expected(merge: Merge) -> tuple[Expectation, ...]:
    """What has to be true of a result, besides what its job expects."""
    present = [*merge.key, *([merge.version_by] if merge.version_by else [])]
    return (
        *(Check(sql=f"{quoted(name)} IS NOT NULL", name=f"{name} is not null") for name in present),
        Unique(columns=merge.key, name=f"each {', '.join(merge.key)} once (unique_key)"),
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
