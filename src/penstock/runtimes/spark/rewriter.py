"""Rewrites what is published of a partition: the same rows, in fewer files or clustered by range.

The work reads nothing else than what it is given (`WorkOutput.current`): a publication, or
several parts of one that is appended to, which become one. It writes that as any other output,
by the job's own `sort_by`, `cluster_by` and `target_file_bytes`, or by the ranges that
maintenance asks for. Nothing of what the rows are may change, so all is carried over:

| of the old manifest | in the new one |
|---|---|
| columns | as they were, not as Spark sees them; of several parts, what holds all of them |
| what was read to make it | as it was: nothing else was; of several parts, what any has read |
| rows | as many, or the work has failed |
| `_penstock_task` of what is merged (`merger`) | read and written with the rows |
| keys of rows that were deleted | written anew, as many |

Nobody knows of the new files before the dispatcher has put them in the place of the old ones.
Called by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from msgspec import UNSET
from pyspark.sql import DataFrame

from penstock.datasets.layout import DELETED
from penstock.datasets.manifest import (
    LISTED_MAX,
    File,
    InputTotal,
    Manifest,
    ManifestInput,
    digest,
    sums,
)
from penstock.datasets.schema import TASK_COLUMN, Column
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import AttemptWork, ProducedOutput
from penstock.runtimes.spark.access.base import FileSlice
from penstock.runtimes.spark.access.choosing import AccessSelector
from penstock.runtimes.spark.engine_protocol import PhaseTimer
from penstock.runtimes.spark.input_reader import InputFiles, InputReader
from penstock.runtimes.spark.job_config import names
from penstock.runtimes.spark.merger import OutputProducer, elsewhere, gone_columns
from penstock.runtimes.spark.operators import PlannedTask
from penstock.runtimes.spark.output_writer import OutputWriter, Read, shape_of


@dataclass(frozen=True, slots=True)
class RewriteTask:
    """An output of a task whose published files are to be written anew."""

    member: PlannedTask
    output: str
    _: KW_ONLY
    session: Any
    phases: PhaseTimer
    held: ExitStack


class Rewriter:
    """Writes what is published anew, by what reads and writes any other output."""

    def __init__(
        self,
        reader: InputReader,
        writer: OutputWriter,
        accesses: AccessSelector,
        write_files: OutputProducer,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._accesses = accesses
        self._write_files = write_files

    def inputs(self, work: AttemptWork) -> dict[str, InputFiles]:
        """What such work reads, by the names of its outputs."""
        return {
            name: self._reader.published(place, work)[0]
            for name, place in work.outputs.items()
            if place.current
        }

    def rewrite(self, rewriting: RewriteTask) -> ProducedOutput | None:
        """Write what is published of an output; None if nothing is. Raises `WorkFailed`."""
        work = rewriting.member.work
        place, merge = work.outputs[rewriting.output], work.merge
        if not place.current:
            return None
        manifests = [self._reader.manifest(part) for part in place.current]
        old = [each for each in manifests if each is not None and each.rows is not None]
        rows, deleted = self._reader.published(place, work)
        columns = rows.columns
        if columns is None or len(old) < len(manifests):
            raise WorkFailed("What is published has no rows that are known.", is_retried=False)
        _refuse_unknown(rewriting.member.config.ordered_by, columns)
        rewriting.phases.enter("running")
        hidden = (TASK_COLUMN,) if merge is not None else ()
        files = self._files(rewriting, rewriting.member, rows, (*columns, *hidden))
        aside: tuple[File, ...] = ()
        gone = [each for one in old for each in one.deleted]
        if merge is not None and gone:
            away = elsewhere(rewriting.member, rewriting.output, f"{place.location}/{DELETED}")
            plain = replace(away.config, sort_by=(), cluster_by=())
            keys = gone_columns(columns, merge)
            aside = self._files(rewriting, replace(away, config=plain), deleted, keys)
        there = [each for one in old for each in one.files]
        for new, before in ((files, there), (aside, gone)):
            if sums(new).rows != sums(before).rows:
                raise WorkFailed(
                    f"{sums(before).rows:,} rows were read, and {sums(new).rows:,} written."
                )
        rewriting.phases.enter("writing")
        return replace(
            self._writer.manifest(
                rewriting.member,
                rewriting.output,
                columns,
                files,
                read=_read(old),
                deleted=aside,
            ),
            base_revision=place.current[-1].revision,
        )

    def _files(
        self,
        rewriting: RewriteTask,
        member: PlannedTask,
        given: InputFiles,
        columns: Sequence[Column],
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

    def _frame(
        self, rewriting: RewriteTask, given: InputFiles, columns: Sequence[Column]
    ) -> DataFrame:
        access = self._accesses.to(rewriting.member.work.outputs[rewriting.output].location)
        slices = [FileSlice(files=given.files)]
        return access.frame(rewriting.session, slices, columns, rewriting.held)


def _read(manifests: Sequence[Manifest]) -> Read:
    """What was read to make any of these."""
    if len(manifests) == 1:
        return manifests[0].inputs, manifests[0].input_totals
    listed: dict[str, dict[ManifestInput, None]] = {}
    totals: dict[str, list[InputTotal]] = {}
    for manifest in manifests:
        for each in manifest.inputs:
            listed.setdefault(each.input, {})[each] = None
        for total in () if manifest.input_totals is UNSET else manifest.input_totals:
            totals.setdefault(total.input, []).append(total)
    found = {name: list(parts) for name, parts in listed.items()}
    more = tuple(
        _total(parts, totals.get(name, ()))
        for name, parts in found.items()
        if len(parts) > LISTED_MAX or name in totals
    )
    return tuple(each for parts in found.values() for each in parts[:LISTED_MAX]), more or UNSET


def _total(parts: Sequence[ManifestInput], totals: Sequence[InputTotal]) -> InputTotal:
    """Of an input that is not listed whole: the digest is that of what is known of it."""
    lines = [f"{each.location}\t{each.manifest or ''}" for each in parts]
    lines += [each.digest for each in totals]
    return InputTotal(
        input=parts[0].input,
        dataset=parts[0].dataset,
        generation=parts[0].generation,
        parts=len(parts) + sum(each.parts - LISTED_MAX for each in totals),
        digest=digest("".join(f"{each}\n" for each in lines).encode()),
    )


def _refuse_unknown(wanted: Sequence[str], columns: Sequence[Column]) -> None:
    there = [each.name for each in columns]
    missing = [name for name in wanted if name not in there]
    if missing:
        raise WorkFailed(
            f"maintain.cluster: the dataset has no column {missing[0]!r}; it has {names(there)}.",
            is_retried=False,
        )
