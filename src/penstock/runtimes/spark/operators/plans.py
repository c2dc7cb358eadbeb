"""From the inputs of one task, or of many, to the DataFrames of its outputs.

For one task its inputs are frames, and the operator makes frames of them. For many tasks at once
(`many`) there is one plan: the rows of each input that is a slice of the task's partition have the
column `_partition`, and so must the rows of the result; inputs that all tasks share have it not.

Small inputs are read as one Spark partition. Then nothing is shuffled in the whole plan, and a task
of a few thousand rows is one stage instead of several. Files in which a query can find no row are
left out before (`pruned`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.schema import Column
from penstock.datasets.snapshot import DataFile
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import Work
from penstock.runtimes.secrets import Secrets
from penstock.runtimes.spark.access.base import Slice
from penstock.runtimes.spark.access.choosing import Accesses
from penstock.runtimes.spark.columns import quoted
from penstock.runtimes.spark.configs import MARKERS, PARTITION, JobConfig, names
from penstock.runtimes.spark.context import Context, Inputs, Partition
from penstock.runtimes.spark.errors import in_field, relation_not_found
from penstock.runtimes.spark.operators.transforms import Transforms, call
from penstock.runtimes.spark.pruning import FILES_MIN, filters_of, pruned
from penstock.runtimes.spark.reading import Input, missing, needed

_NAMED: Final = re.compile(rf"\b{PARTITION}\b", re.IGNORECASE)
SMALL_BYTES_MAX: Final = 8 * 2**20
"""What a task reads in one Spark partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A task that is to be run, alone or with others."""

    work: Work
    config: JobConfig
    inputs: Mapping[str, Input] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its partition."""
        return self.work.payload.get("partition_key") or ""

    @property
    def bytes_in(self) -> int:
        return sum(each.bytes for each in self.inputs.values())

    @property
    def rows_in(self) -> int:
        return sum(each.rows for each in self.inputs.values())


class Plans:
    """Makes plans in a session. What their files need is held until `held` is closed."""

    def __init__(
        self, session: Any, accesses: Accesses, transforms: Transforms, held: ExitStack
    ) -> None:
        self._session = session
        self._accesses = accesses
        self._transforms = transforms
        self._held = held
        self._shared: dict[tuple[str, ...], DataFrame] = {}
        self._views: dict[str, DataFrame] = {}

    def pruned(self, members: Sequence[Member]) -> list[Member]:
        """Members of one plan, without the files in which their query can find no row."""
        first = members[0]
        config = first.config
        there = {name: each for name, each in first.inputs.items() if each.given.is_there}
        counts = [len(each.files) for member in members for each in member.inputs.values()]
        if config.operator != "spark.sql" or sum(counts) < FILES_MIN:
            return list(members)
        columns: dict[str, tuple[Column, ...]] = {}
        for name, each in there.items():
            if each.columns is None:
                return list(members)
            is_tagged = _tag(first, each).is_there
            columns[name] = (*each.columns, *([Column(PARTITION, "string")] if is_tagged else []))
        markers = _markers(first.work) if len(members) == 1 else {}
        filters = filters_of(self._session, config.sql, _used(config, markers), columns)
        # There are other views of these names now.
        self._views.clear()
        return [
            replace(
                member,
                inputs={
                    name: pruned(each, filters.get(name), _tag(member, each).of)
                    for name, each in member.inputs.items()
                },
            )
            for member in members
        ]

    def one(self, member: Member) -> dict[str, DataFrame]:
        """The outputs of one task."""
        is_small = member.bytes_in <= SMALL_BYTES_MAX
        made = {
            name: partial(self._frame, each, tag=_tag(member, each), is_small=is_small)
            for name, each in member.inputs.items()
            if each.given.is_there
        }
        return self._outputs([member], made, parameters=_markers(member.work))

    def many(self, members: Sequence[Member]) -> dict[str, DataFrame]:
        """The outputs of many tasks in one plan; each has the column `_partition`."""
        first = members[0]
        is_small = sum(member.bytes_in for member in members) <= SMALL_BYTES_MAX
        made: dict[str, Callable[[], DataFrame]] = {}
        for name, each in first.inputs.items():
            if not each.given.is_there:
                continue
            every = [member.inputs[name] for member in members]
            if not any(one.given.is_there for one in every):
                continue
            if all(one.is_own for one in every):
                made[name] = partial(self._frames, members, name, is_small=is_small)
            elif all(one.given.parts == each.given.parts for one in every):
                made[name] = partial(self._frame, each, tag=_Tag(), is_small=is_small)
            else:
                raise WorkFailed(f"The tasks do not read the same of the input {name}.")
        return self._outputs(members, made, parameters={})

    def _frame(self, given: Input, *, tag: _Tag, is_small: bool) -> DataFrame:
        # The same frame wherever it is used: Spark sees that it is the same, and reads it once.
        known = (given.name, repr(tag), *(each.location for each in given.files))
        if known not in self._shared:
            access = self._accesses.to(given.place)
            slices = tag.slices(given.files)
            frame = access.frame(self._session, slices, given.columns, self._held)
            self._shared[known] = frame.coalesce(1) if is_small else frame
        return self._shared[known]

    def _frames(self, members: Sequence[Member], name: str, *, is_small: bool) -> DataFrame:
        first = members[0].inputs[name]
        slices = [Slice(files=each.inputs[name].files, tag=each.key) for each in members]
        access = self._accesses.to(first.place)
        frame = access.frame(self._session, slices, first.columns, self._held)
        return frame.coalesce(1) if is_small else frame

    def _outputs(
        self,
        members: Sequence[Member],
        made: Mapping[str, Callable[[], DataFrame]],
        *,
        parameters: Mapping[str, Any],
    ) -> dict[str, DataFrame]:
        member = members[0]
        config = member.config
        if config.operator == "spark.python":
            return self._python(members, made, parameters)
        if config.operator != "spark.sql":
            needed(member.inputs.values(), member.work)
        outputs = tuple(member.work.outputs)
        if config.operator != "integrity_check" and len(outputs) != 1:
            raise WorkFailed(
                f"{config.operator} makes one output, and the job has {len(outputs)}.",
                is_retried=False,
            )
        if config.operator == "spark.sql":
            frame = self._sql(member, made, _used(config, parameters))
        else:
            frame = _built_in(config, _only(made, config.operator)())
        return {outputs[0] if outputs else "": frame}

    def _sql(
        self,
        member: Member,
        made: Mapping[str, Callable[[], DataFrame]],
        arguments: Mapping[str, Any] | None,
    ) -> DataFrame:
        config = member.config
        for name in member.inputs.keys() - made.keys():
            # What only makes the job run, as the days of a source, has nothing to read; and a view
            # of this name would be another task's.
            self._session.catalog.dropTempView(name)
            self._views.pop(name, None)
        for name, make in made.items():
            frame = make()
            if self._views.get(name) is not frame:
                frame.createOrReplaceTempView(quoted(name))
                self._views[name] = frame
        try:
            frame = self._session.sql(config.sql, args=arguments)
            # Not `columns`, which asks the JVM again each time.
            columns = frame.schema.names
        except PySparkException as error:
            named = relation_not_found(error)
            if named in member.inputs and named not in made:
                raise missing(member.inputs[named], member.work) from error
            raise
        if not columns:
            where = config.sql_file or "config.sql"
            raise WorkFailed(f"{where} is no query: it gives no columns.", is_retried=False)
        return frame  # type: ignore[no-any-return]  # a session may be of two kinds

    def _python(
        self,
        members: Sequence[Member],
        made: Mapping[str, Callable[[], DataFrame]],
        parameters: Mapping[str, Any],
    ) -> dict[str, DataFrame]:
        member = members[0]
        work, wanted = member.work, member.config.transform
        assert wanted is not None
        context = Context(
            session=self._session,
            partitions=tuple(_partition(each.work) for each in members if each.key),
            task_id=work.task_id,
            attempt=work.attempt,
            job=work.job,
            generation=work.generation,
            parameters=member.config.parameters,
            payload=work.payload.get("payload") or {},
            outputs=tuple(work.outputs),
            scratch=work.scratch,
            secrets=Secrets(work.secrets),
            **parameters,
        )

        def refuse(name: str) -> Exception:
            if name in member.inputs:
                return missing(member.inputs[name], work)
            there = f"it has {names(member.inputs)}" if member.inputs else "it has none"
            return WorkFailed(f"The job has no input {name!r}; {there}.", is_retried=False)

        function = self._transforms.function(wanted)
        return call(function, Inputs(made, refuse), context, name=str(wanted))


def is_wise(config: JobConfig) -> bool:
    """Whether one plan can serve many partitions."""
    if config.operator == "rollup":
        # Without groups there is one row for each partition, also for an empty one.
        return bool(config.by) or not config.measures
    return config.partition_wise or config.operator in ("compact", "integrity_check")


def _partition(work: Work) -> Partition:
    key, start, end = (work.payload.get(name) for name in ("partition_key", "start", "end"))
    return Partition(key=str(key), start=start, end=end)


@dataclass(frozen=True, slots=True)
class _Tag:
    """What rows of an input have as `_partition`: one text, or the partition of their own part."""

    text: str | None = None
    is_own_key: bool = False

    @property
    def is_there(self) -> bool:
        return self.is_own_key or self.text is not None

    def of(self, file: DataFile) -> str | None:
        return file.partition_key if self.is_own_key else self.text

    def slices(self, files: Sequence[DataFile]) -> list[Slice]:
        if not self.is_own_key or not files:
            return [Slice(files=files, tag="" if self.is_own_key else self.text)]
        return [
            Slice(files=tuple(some), tag=key)
            for key, some in groupby(files, lambda each: each.partition_key)
        ]


def _tag(member: Member, given: Input) -> _Tag:
    config = member.config
    if config.partition_wise:
        return _Tag(member.key if given.is_own else None)
    has_keys = all(part.partition_key is not None for part in given.given.parts)
    is_taken = any(each.name.casefold() == PARTITION for each in given.columns or ())
    is_named = config.operator == "spark.sql" and _NAMED.search(config.sql) is not None
    return _Tag(is_own_key=is_named and has_keys and not is_taken)


def _used(config: JobConfig, markers: Mapping[str, Any]) -> dict[str, Any] | None:
    """The parameters that a query names; None if it names none."""
    every = {**config.parameters, **markers}
    return {name: value for name, value in every.items() if f":{name}" in config.sql} or None


def _markers(work: Work) -> dict[str, Any]:
    return {name: work.payload.get(name) for name in MARKERS}


def _only(made: Mapping[str, Callable[[], DataFrame]], operator: str) -> Callable[[], DataFrame]:
    if len(made) != 1:
        raise WorkFailed(
            f"{operator} reads one input, and the job has {len(made)}.", is_retried=False
        )
    return next(iter(made.values()))


def _built_in(config: JobConfig, frame: DataFrame) -> DataFrame:
    if config.operator != "rollup" or not config.measures:
        return frame
    by = [name for name in (PARTITION,) if name in frame.columns] + list(config.by)
    unknown = [name for name in by if name not in frame.columns]
    if unknown:
        raise WorkFailed(
            f"config.by: the input has no column {unknown[0]!r}; it has {names(frame.columns)}.",
            is_retried=False,
        )
    measures = []
    for name, text in config.measures.items():
        try:
            measure = F.expr(text).alias(name)
            frame.agg(measure)
        except PySparkException as error:
            raise in_field(error, f"config.measures.{name}") from error
        measures.append(measure)
    return frame.groupBy(*(F.col(quoted(name)) for name in by)).agg(*measures)
