"""How what is published of a partition is written anew: the same rows, in fewer files or by range.

The work reads nothing else than the publication that it is given (`Place.current`), and writes it
as any other output, by the job's own `sort_by`, `cluster_by` and `target_file_bytes`, or by the
ranges that maintenance asks for. Nothing of what the rows are may change, so all is carried over:

| of the old manifest | in the new one |
|---|---|
| columns | as they were, not as Spark sees them |
| what was read to make it | as it was: nothing else was |
| rows | as many, or the work has failed |
| `_penstock_task` of what is merged (`merging`) | read and written with the rows |
| keys of rows that were deleted | written anew, as many |

Nobody knows of the new files before the dispatcher has put them in the place of the old ones.
Called by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from pyspark.sql import DataFrame

from penstock.datasets.layout import DELETED
from penstock.datasets.manifest import File, sums
from penstock.datasets.schema import Column
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import Made, Work
from penstock.runtimes.spark.access.base import Slice
from penstock.runtimes.spark.access.choosing import Accesses
from penstock.runtimes.spark.configs import names
from penstock.runtimes.spark.merging import TASK_COLUMN, Files, elsewhere, gone_columns
from penstock.runtimes.spark.operators.plans import Member
from penstock.runtimes.spark.phases import Phases
from penstock.runtimes.spark.reading import Input, Reader
from penstock.runtimes.spark.writing import Writer, shape_of


@dataclass(frozen=True, slots=True)
class Rewriting:
    """An output of a task whose published files are to be written anew."""

    member: Member
    output: str
    _: KW_ONLY
    session: Any
    phases: Phases
    held: ExitStack


class Rewriter:
    """Writes what is published anew, by what reads and writes any other output."""

    def __init__(
        self, reader: Reader, writer: Writer, accesses: Accesses, write_files: Files
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._accesses = accesses
        self._write_files = write_files

    def inputs(self, work: Work) -> dict[str, Input]:
        """What such work reads, by the names of its outputs."""
        return {
            name: self._reader.published(place, work)[0]
            for name, place in work.outputs.items()
            if place.current
        }

    def rewrite(self, rewriting: Rewriting) -> Made | None:
        """Write what is published of an output; None if nothing is. Raises `WorkFailed`."""
        work = rewriting.member.work
        place, merge = work.outputs[rewriting.output], work.merge
        if not place.current:
            return None
        (part,) = place.current
        manifest = self._reader.manifest(part)
        rows, deleted = self._reader.published(place, work)
        if manifest is None or rows.columns is None or manifest.rows is None:
            raise WorkFailed("What is published has no rows that are known.", is_retried=False)
        _refuse_unknown(rewriting.member.config.ordered_by, manifest.columns)
        rewriting.phases.enter("running")
        hidden = (TASK_COLUMN,) if merge is not None else ()
        files = self._files(rewriting, rewriting.member, rows, (*manifest.columns, *hidden))
        aside: tuple[File, ...] = ()
        if merge is not None and manifest.deleted:
            away = elsewhere(rewriting.member, rewriting.output, f"{place.location}/{DELETED}")
            plain = replace(away.config, sort_by=(), cluster_by=())
            keys = gone_columns(manifest.columns, merge)
            aside = self._files(rewriting, replace(away, config=plain), deleted, keys)
        for new, old in ((files, manifest.files), (aside, manifest.deleted)):
            if sums(new).rows != sums(old).rows:
                raise WorkFailed(
                    f"{sums(old).rows:,} rows were read, and {sums(new).rows:,} written."
                )
        rewriting.phases.enter("writing")
        return replace(
            self._writer.manifest(
                rewriting.member,
                rewriting.output,
                manifest.columns,
                files,
                read=(manifest.inputs, manifest.input_totals),
                deleted=aside,
            ),
            base_revision=part.revision,
        )

    def _files(
        self, rewriting: Rewriting, member: Member, given: Input, columns: Sequence[Column]
    ) -> tuple[File, ...]:
        whole = replace(member, inputs={given.name: given})
        frame = self._frame(rewriting, given, columns)
        return self._write_files(
            rewriting.session,
            whole,
            rewriting.output,
            frame=frame,
            shape=shape_of(frame, member.config),
            phases=rewriting.phases,
        )

    def _frame(self, rewriting: Rewriting, given: Input, columns: Sequence[Column]) -> DataFrame:
        access = self._accesses.to(rewriting.member.work.outputs[rewriting.output].location)
        slices = [Slice(files=given.files)]
        return access.frame(rewriting.session, slices, columns, rewriting.held)


def _refuse_unknown(wanted: Sequence[str], columns: Sequence[Column]) -> None:
    there = [each.name for each in columns]
    missing = [name for name in wanted if name not in there]
    if missing:
        raise WorkFailed(
            f"maintain.cluster: the dataset has no column {missing[0]!r}; it has {names(there)}.",
            is_retried=False,
        )
