"""Runs Spark jobs: reads what a task is given, runs its operator, checks and writes what comes out.

A task goes through four phases: `reading` (manifests, files, sums, the plan and what is refused
of it), `running` (Spark computes; what is small leaves through Arrow), `checking`
(expectations), `writing` (files, and the manifest last). Until its manifest is written there is
nothing, and nobody reads it before the dispatcher has published it: a crash, or an attempt that
was given up, leaves files that are swept.

All that the plan of a result tells is checked for all outputs before the first is computed:

| what | is refused if |
|---|---|
| the columns | they cannot become those of the generation, by `penstock.datasets.schema` |
| `expect` | it names a column that there is not, or is no SQL over the columns |
| `unique_key`, `version_by`, `delete_when` | likewise, or the type of a column does not serve |
| `partition_by` | likewise |
| `sort_by`, `cluster_by` | it names a column that there is not (`output_writer.shape_of`) |

Only what is certain is refused (`refuse_for_good`): the columns of a generation are those of the
claim, and may have grown when the task publishes. The publication judges everything once more.

A batch runs as few Spark jobs as its tasks allow (`operators.tasks_by_job`). If such a job
fails, its tasks run one by one within the same attempts, each with an outcome of its own, which
is reported when it is there: a crash costs those that have not ended yet. Tasks that are
dropped on the way are not written.

A task that maintains a dataset runs nothing of its job: what is published of a partition is
rewritten, as it is (`rewriter`). What a job merges is computed and checked by itself, then
merged with what is published of the partition (`merger`), which is one more phase, and one more
that is written. Its tasks run one by one.

Called by the host, in several threads at once, each with a session of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.manifest import File, sums
from penstock.datasets.schema import refuse_for_good
from penstock.datasets.transfer import Transfer
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import MAINTAIN, AttemptWork, ProducedOutput, WorkResult
from penstock.runtimes.spark.access.base import FileSlice
from penstock.runtimes.spark.access.choosing import AccessSelector
from penstock.runtimes.spark.engine_protocol import (
    PhaseTimer,
    RunReporter,
    WorkFailure,
    WorkOutcome,
)
from penstock.runtimes.spark.errors import failed, in_field, is_too_large
from penstock.runtimes.spark.expectations import (
    ViolationCounter,
    check_frame,
    checked_table,
    refuse_unknown,
    with_checks,
)
from penstock.runtimes.spark.input_reader import InputReader, needed
from penstock.runtimes.spark.job_config import PARTITION, Expectation, JobConfig, read_config
from penstock.runtimes.spark.merger import Merger, MergeTask, asked, is_gone, refuse_result
from penstock.runtimes.spark.operators import (
    MEMBER,
    SMALL_BYTES_MAX,
    PlanBuilder,
    PlannedTask,
    TransformLoader,
    is_wise,
    share_files,
    split_rows,
    tasks_by_job,
    union_of_members,
)
from penstock.runtimes.spark.output_writer import (
    OutputShape,
    OutputWriter,
    data_file,
    divide,
    publishable,
    shape_of,
    written_files,
)
from penstock.runtimes.spark.partition_keys import keyed
from penstock.runtimes.spark.result_size import (
    UNKNOWN_BYTES,
    collected_bytes_max,
    estimated_bytes,
    gathered,
    gathered_bytes_max,
    is_beyond,
    least_bytes,
    total_bytes,
)
from penstock.runtimes.spark.rewriter import Rewriter, RewriteTask
from penstock.runtimes.spark.settings import SparkSettings
from penstock.runtimes.task import Stopped


def shapes_of(
    session: Any,
    member: PlannedTask,
    results: Mapping[str, DataFrame],
    *,
    without: Sequence[str] = (),
) -> dict[str, OutputShape]:
    """What the outputs of a task look like, `without` some columns.

    Raises `SchemaRefused` or `WorkFailed` if it is certain that one cannot be published.
    """
    shapes: dict[str, OutputShape] = {}
    for output, frame in results.items():
        shapes[output] = shape_of(frame, member.config, without=without)
        _refuse(session, member, output, frame=frame, shape=shapes[output])
    return shapes


def _refuse(
    session: Any, member: PlannedTask, output: str, *, frame: DataFrame, shape: OutputShape
) -> None:
    try:
        refuse_unknown(frame, member.config.expect)
    except PySparkException as error:
        raise in_field(error, "config.expect") from error
    if not output:
        return
    work, place = member.work, member.work.outputs[output]
    refuse_for_good(place.columns, shape.columns)
    if work.merge is not None:
        refuse_result(frame.schema, work.merge)
        is_gone(frame, work.merge)
    if place.partition_by:
        keyed(session, frame, place.partition_by, output=output)


_log = logging.getLogger(__name__)

_WRITES_AT_ONCE: Final = 4
_ADAPTIVE: Final = "spark.sql.adaptive.enabled"


class Engine:
    """The engine of one host."""

    def __init__(
        self, settings: SparkSettings, session: Any, *, clock: Clock | None = None
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        transfer = Transfer(settings.store_url)
        self._accesses = AccessSelector(settings, transfer, session)
        self._reader = InputReader(transfer)
        self._writer = OutputWriter(
            transfer,
            target_file_bytes=settings.target_file_bytes,
            is_apart=not settings.is_one_jvm,
        )
        self._transforms = TransformLoader()
        self._gathered_max = gathered_bytes_max(settings, cores=_cores(settings, session))
        self._collected_max = collected_bytes_max(settings)
        self._merger = Merger(
            self._reader,
            self._writer,
            self._accesses,
            write_files=self._files,
            collected=self._collected,
            partitions_max=settings.partitions_max,
        )
        self._rewriter = Rewriter(self._reader, self._writer, self._accesses, self._files)

    def run(self, session: Any, works: Sequence[AttemptWork], tell: RunReporter) -> None:
        """Run these, which are of one job and generation, and tell how each has ended."""
        members: list[PlannedTask] = []
        tell.phase("reading")
        self._reader.prepare(works)
        for work in works:
            try:
                members.append(self._member(work))
            except Exception as error:  # noqa: BLE001 - it is told as the task's failure
                tell.end(work.task_id, failed(error))
        for bundle in self._bundles(members):
            self._together(session, bundle, tell)

    def _member(self, work: AttemptWork) -> PlannedTask:
        config = read_config(work.operator, work.config)
        if config.operator == MAINTAIN:
            given = self._rewriter.inputs(work)
            return PlannedTask(work=work, config=config, inputs=given)
        member = PlannedTask(work=work, config=config, inputs=self._reader.inputs(work))
        if config.operator not in ("spark.python", "spark.sql"):
            needed(member.inputs.values(), work)
        return member

    def _bundles(self, members: Sequence[PlannedTask]) -> list[list[PlannedTask]]:
        # A Connect server looks views up when a query runs, so one name means one thing there.
        is_apart = self._settings.is_connect and not all(is_wise(each.config) for each in members)
        bytes_max = -1 if is_apart else self._settings.arrow_bytes_max
        return tasks_by_job(members, bytes_max=bytes_max)

    def _together(self, session: Any, members: Sequence[PlannedTask], tell: RunReporter) -> None:
        """Run tasks as one job, and if that fails one by one."""
        wanted = [each for each in members if not tell.is_dropped(each.work.task_id)]
        if not wanted:
            return
        # Each is merged with what is published of its own partition.
        is_apart = _is_divided(wanted[0]) or wanted[0].work.merge is not None
        if len(wanted) > 1 and not is_apart:
            tell.begin([each.work.task_id for each in wanted])
            try:
                with ExitStack() as held:
                    ended = self._batch(session, wanted, tell, held)
            except Exception as error:  # noqa: BLE001 - whose failure it is, is found below
                said = failed(error, wanted[0].config)
                _log.warning(
                    "a batch of %s tasks of %s runs one by one, because it failed: %s",
                    len(wanted),
                    wanted[0].work.job,
                    said.reason,
                )
            else:
                for task_id, each in ended.items():
                    tell.end(task_id, each)
                return
        for member in wanted:
            if not tell.is_dropped(member.work.task_id):
                tell.begin([member.work.task_id])
                tell.end(member.work.task_id, self._alone(session, member, tell))

    def _alone(self, session: Any, member: PlannedTask, tell: RunReporter) -> WorkOutcome:
        try:
            with ExitStack() as held:
                return self._single(session, member, tell, held)
        except Stopped:
            if not tell.is_dropped(member.work.task_id):
                raise
            return WorkFailure(reason="It was stopped.")
        except Exception as error:  # noqa: BLE001 - it is told as the task's failure
            return failed(error, member.config)

    def _merged(
        self, session: Any, member: PlannedTask, tell: RunReporter, held: ExitStack
    ) -> WorkResult:
        """Compute what is to be merged, if it is not there; merge it, if it is known with what."""
        phases = PhaseTimer(tell, self._clock)
        phases.enter("reading")
        is_known = bool(member.work.staged) or not _is_divided(member)
        staged = dict(member.work.staged)
        results: Mapping[str, DataFrame] = {}
        shapes: Mapping[str, OutputShape] = {}
        if not staged:
            member, results = self._planned(session, member, held)
            shapes = shapes_of(session, member, results)
        mergings = {
            output: MergeTask(member, output, session=session, phases=phases, held=held)
            for output in results or staged
        }
        made: list[ProducedOutput] = []
        for output, merging in mergings.items():
            if output in results:
                staged[output] = self._merger.stage(
                    merging, frame=results[output], shape=shapes[output]
                )
            if not is_known:
                made += asked(merging, staged[output])
                continue
            written = self._merger.merge(merging, staged[output])
            if not tell.is_dropped(member.work.task_id):
                made += written()
        return replace(_finished(member, made, phases.seconds()), staged=staged)

    def _rewritten(
        self, session: Any, member: PlannedTask, tell: RunReporter, held: ExitStack
    ) -> WorkResult:
        """Write what is published anew, in other files."""
        phases = PhaseTimer(tell, self._clock)
        phases.enter("reading")
        rewritten = [
            self._rewriter.rewrite(
                RewriteTask(member, output, session=session, phases=phases, held=held)
            )
            for output in member.work.outputs
        ]
        anew = [each for each in rewritten if each is not None]
        return _finished(member, anew, phases.seconds())

    def _planned(
        self, session: Any, member: PlannedTask, held: ExitStack
    ) -> tuple[PlannedTask, Mapping[str, DataFrame]]:
        """A task with what it needs of its inputs, and the plans of its outputs."""
        plans = PlanBuilder(session, self._accesses, self._transforms, held)
        (member,) = plans.pruned([member])
        results = plans.one(member)
        if member.config.partition_wise:
            results = {
                name: _of_one(_of_partitions(each), member.key) for name, each in results.items()
            }
        return member, results

    def _single(
        self, session: Any, member: PlannedTask, tell: RunReporter, held: ExitStack
    ) -> WorkResult:
        if member.config.operator == MAINTAIN:
            return self._rewritten(session, member, tell, held)
        if member.work.merge is not None and member.work.outputs:
            return self._merged(session, member, tell, held)
        phases = PhaseTimer(tell, self._clock)
        phases.enter("reading")
        member, results = self._planned(session, member, held)
        made: list[ProducedOutput] = []
        for output, shape in shapes_of(session, member, results).items():
            result = results[output]
            phases.enter("running")
            if output and member.work.outputs[output].partition_by:
                made += self._divided(
                    session, member, output, frame=result, shape=shape, phases=phases
                )
                continue
            files = self._files(session, member, output, frame=result, shape=shape, phases=phases)
            if output and not tell.is_dropped(member.work.task_id):
                phases.enter("writing")
                made.append(self._writer.manifest(member, output, shape.columns, files))
        return _finished(member, made, phases.seconds())

    def _files(
        self,
        session: Any,
        member: PlannedTask,
        output: str,
        *,
        frame: DataFrame,
        shape: OutputShape,
        phases: PhaseTimer,
    ) -> tuple[File, ...]:
        """Compute, check and write one output of one task."""
        config = member.config
        if not output:
            phases.enter("checking")
            _explained_check(frame, config.expect, output=output)
            return ()
        bytes_max = self._settings.arrow_bytes_max
        size = member.bytes_in
        if size <= bytes_max:
            size = max(size, estimated_bytes(frame, enough=bytes_max))
        is_tried = shape.is_for_arrow and size <= bytes_max
        if is_tried:
            small = self._through_arrow(
                session, member, output, frame=frame, shape=shape, phases=phases
            )
            if small is not None:
                return small
            size = UNKNOWN_BYTES
        location = member.work.outputs[output].location
        access = self._accesses.to(location)
        watch = ViolationCounter(config.expect)
        files = self._writer.frame(
            frame, shape, member, output, access, size=size, watched=partial(_watched, watch)
        )
        left = watch.left(rows=sums(files).rows)
        if left:
            phases.enter("checking")
            again = [data_file(location, each) for each in files]
            with ExitStack() as held:
                slices = [FileSlice(files=again)]
                written = access.frame(session, slices, shape.columns, held)
                _explained_check(written, left, output=output)
        if is_tried and config.sort_by:
            return self._by_data(session, member, output, files=files, shape=shape)
        return files

    def _through_arrow(
        self,
        session: Any,
        member: PlannedTask,
        output: str,
        *,
        frame: DataFrame,
        shape: OutputShape,
        phases: PhaseTimer,
    ) -> tuple[File, ...] | None:
        """The same, of what can be gathered; None for what cannot."""
        config = member.config
        try:
            with self._plain(session, is_small=member.bytes_in <= SMALL_BYTES_MAX):
                table = self._collected(frame, config)
        except Exception as error:
            if not is_too_large(error) and not is_beyond(error):
                raise
            _log.info("the result of task %s is too large for Arrow", member.work.task_id)
            return None
        if config.expect:
            phases.enter("checking")
        table = checked_table(table, config.expect, output=output)
        phases.enter("writing")
        return self._write_table(member, output, table, shape)

    def _by_data(
        self,
        session: Any,
        member: PlannedTask,
        output: str,
        *,
        files: tuple[File, ...],
        shape: OutputShape,
    ) -> tuple[File, ...]:
        """What was sorted and written by Spark, or the same through Arrow if it is small.

        A task of Spark may have made too much of it on this machine, and on another with fewer
        cores, or with its rows in another order, it would not have: bytes do not depend on that.
        """
        location = member.work.outputs[output].location
        slices = [FileSlice(files=[data_file(location, each) for each in files])]
        with ExitStack() as held:
            frame = self._accesses.to(location).frame(session, slices, shape.columns, held)
            least = least_bytes(frame) * sums(files).rows
            if least > self._collected_max or total_bytes(frame) > self._collected_max:
                return files
            bound = self._collected_max
            table = gathered(frame, task_bytes_max=UNKNOWN_BYTES, bytes_max=bound)
        self._writer.remove(location, files)
        return self._write_table(member, output, table, shape)

    def _collected(self, frame: DataFrame, config: JobConfig) -> Any:
        """What is gathered, as a table. What goes beyond the bound raises, and is not."""

        def checked(measured: DataFrame) -> DataFrame:
            try:
                return with_checks(measured, config.expect)
            except PySparkException as error:
                raise in_field(error, "config.expect") from error

        return gathered(
            frame, checked, task_bytes_max=self._gathered_max, bytes_max=self._collected_max
        )

    def _divided(
        self,
        session: Any,
        member: PlannedTask,
        output: str,
        *,
        frame: DataFrame,
        shape: OutputShape,
        phases: PhaseTimer,
    ) -> list[ProducedOutput]:
        """Compute, write and check one output of one task, partition by partition."""
        config, place = member.config, member.work.outputs[output]
        keys = keyed(session, frame, place.partition_by, output=output)
        access = self._accesses.to(place.location)
        watch = ViolationCounter(config.expect)
        divided = divide(
            self._writer,
            keys.frame,
            shape,
            member,
            output,
            access=access,
            partitions_max=self._settings.partitions_max,
            watched=partial(_watched, watch),
        )
        files = written_files(member, output, divided)
        left = watch.left(rows=sums(file for _, file in files).rows)
        if left:
            phases.enter("checking")
            again = [data_file(folder, file) for folder, file in files]
            with ExitStack() as held:
                written = access.frame(session, [FileSlice(files=again)], shape.columns, held)
                _explained_check(written, left, output=output)
        phases.enter("writing")
        return publishable(
            self._writer, member, output, divided, columns=shape.columns, range_of=keys.range_of
        )

    @contextmanager
    def _plain(self, session: Any, *, is_small: bool = True) -> Iterator[None]:
        """Within this, plans of little data are not adapted while they run: that costs more."""
        if not is_small or _ADAPTIVE in self._settings.conf:
            yield
            return
        session.conf.set(_ADAPTIVE, "false")
        try:
            yield
        finally:
            session.conf.unset(_ADAPTIVE)

    def _write_table(
        self, member: PlannedTask, output: str, table: Any, shape: OutputShape
    ) -> tuple[File, ...]:
        if not output:
            return ()
        location = member.work.outputs[output].location
        access = self._accesses.to(location)
        file_bytes = self._writer.file_bytes(member.config)
        return self._writer.table(table, shape, location, access, file_bytes=file_bytes)

    def _batch(
        self, session: Any, members: Sequence[PlannedTask], tell: RunReporter, held: ExitStack
    ) -> Mapping[int, WorkOutcome]:
        """Run tasks as one job. Raises if the job fails; a task of which only the rows are not as
        expected fails alone."""
        config = members[0].config
        phases = PhaseTimer(tell, self._clock)
        phases.enter("reading")
        plans = PlanBuilder(session, self._accesses, self._transforms, held)
        if _is_one_plan(members):
            members = plans.pruned(members)
            column, tags = PARTITION, [each.key for each in members]
            frames = {name: _of_partitions(each) for name, each in plans.many(members).items()}
        else:
            members = [one for each in members for one in plans.pruned([each])]
            column, tags = MEMBER, [str(place) for place in range(len(members))]
            made = _united(members, [plans.one(each) for each in members])
            # Every task of Spark is sent the plan of all members: as few of them as keep the
            # cores busy, or that alone takes longer than the work.
            shares = session.sparkContext.defaultParallelism
            frames = {name: each.coalesce(shares) for name, each in made.items()}
        shapes = shapes_of(session, members[0], frames, without=(column, PARTITION))
        phases.enter("running")
        tables: dict[str, tuple[OutputShape, Mapping[str, Any]]] = {}
        for output, frame in frames.items():
            if not shapes[output].is_for_arrow:
                raise WorkFailed("The result has types that do not leave Spark through Arrow.")
            # Of what was given the size is known. Spark's own estimate would count what all members
            # share as often as there are members.
            bytes_max = self._settings.arrow_bytes_max
            if not any(each.bytes_in for each in members) and (
                estimated_bytes(frame, enough=bytes_max) > bytes_max
            ):
                raise WorkFailed("What the tasks read by themselves is large, or of no known size.")
            with self._plain(session):
                table = self._collected(frame, config)
            tables[output] = shapes[output], split_rows(table, column, tags)
        phases.enter("writing")
        seconds = {**phases.seconds(), "batched": len(members)}

        def end(place: int) -> WorkOutcome:
            parts = {name: (shape, some[tags[place]]) for name, (shape, some) in tables.items()}
            return self._end(members[place], parts, seconds)

        kept = [
            place for place, each in enumerate(members) if not tell.is_dropped(each.work.task_id)
        ]
        with ThreadPoolExecutor(_WRITES_AT_ONCE, thread_name_prefix="penstock-write") as pool:
            return {
                members[place].work.task_id: each
                for place, each in zip(kept, pool.map(end, kept), strict=True)
            }

    def _end(
        self,
        member: PlannedTask,
        tables: Mapping[str, tuple[OutputShape, Any]],
        seconds: Mapping[str, Any],
    ) -> WorkOutcome:
        """Check and write what a batch has made for one task."""
        try:
            made: list[ProducedOutput] = []
            for output, (shape, table) in tables.items():
                rows = checked_table(table, member.config.expect, output=output)
                files = self._write_table(member, output, rows, shape)
                if output:
                    made.append(self._writer.manifest(member, output, shape.columns, files))
            return _finished(member, made, seconds)
        except Exception as error:  # noqa: BLE001 - it is told as the task's failure
            return failed(error, member.config)


def _is_one_plan(members: Sequence[PlannedTask]) -> bool:
    """Whether one plan can make the partitions of all of these."""
    is_each_named = all(each.key for each in members)
    return is_wise(members[0].config) and is_each_named and not share_files(members)


def _is_divided(member: PlannedTask) -> bool:
    """Whether a task finds its partitions by itself: no job is of several of them."""
    return any(each.partition_by for each in member.work.outputs.values())


def _united(
    members: Sequence[PlannedTask], outputs: Sequence[Mapping[str, DataFrame]]
) -> dict[str, DataFrame]:
    is_tagged = members[0].config.partition_wise
    return {
        name: union_of_members(
            [
                _of_one(_of_partitions(each[name]), member.key) if is_tagged else each[name]
                for member, each in zip(members, outputs, strict=True)
            ]
        )
        for name in outputs[0]
    }


def _of_partitions(frame: DataFrame) -> DataFrame:
    if PARTITION not in frame.columns:
        raise WorkFailed(
            f"The job is partition_wise, and its result has no column {PARTITION}: take it along"
            " from the input, and group by it.",
            is_retried=False,
        )
    return frame


def _of_one(frame: DataFrame, key: str) -> DataFrame:
    """The rows without their partition, which has to be this one."""
    column = F.col(PARTITION)
    said = F.concat(
        F.lit(f"The result has rows whose {PARTITION} is '"),
        F.coalesce(column.cast("string"), F.lit("null")),
        F.lit("', which is none of the partitions that were to be made"),
    )
    return frame.where(F.assert_true(column.eqNullSafe(key), said).isNull()).drop(PARTITION)


def _cores(settings: SparkSettings, session: Any) -> int:
    return int(session.sparkContext.defaultParallelism) if settings.is_one_jvm else 1


def _watched(watch: ViolationCounter, frame: DataFrame) -> DataFrame:
    try:
        return watch.over(frame)
    except PySparkException as error:
        raise in_field(error, "config.expect") from error


def _explained_check(frame: DataFrame, expect: Sequence[Expectation], *, output: str) -> None:
    try:
        check_frame(frame, expect, output=output)
    except PySparkException as error:
        raise in_field(error, "config.expect") from error


def _finished(
    member: PlannedTask, made: Sequence[ProducedOutput], seconds: Mapping[str, Any]
) -> WorkResult:
    facts = [each.facts for each in made if each.facts is not None]
    metrics = {
        "rows_in": member.rows_in,
        "bytes_in": member.bytes_in,
        "rows_out": sum(each.rows or 0 for each in facts),
        "bytes_out": sum(each.bytes for each in facts),
        "files_out": sum(each.files for each in facts),
        **seconds,
    }
    return WorkResult(made=tuple(made), metrics=metrics)
