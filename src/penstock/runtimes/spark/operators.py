"""The operators: from the inputs of one task, or of many, to the DataFrames of its outputs.

For one task its inputs are frames, and the operator makes frames of them. For many tasks at
once (`many`) there is one plan: the rows of each input that is a slice of the task's partition
have the column `_partition`, and so must the rows of the result; inputs that all tasks share
have it not. Small inputs are read as one Spark partition. Then nothing is shuffled in the whole
plan, and a task of a few thousand rows is one stage instead of several. Files in which a query
can find no row are pruned before (`input_reader`).

A transform is a user's function of inputs and a context:

    def clean(inputs, context):
        flights = inputs["flights"]
        return flights.where(flights.day == context.partition_key)

`inputs` has a DataFrame for each input. One of which nothing is published for this partition is
not `in` it, and asking for it fails the task with a sentence. Transforms are found by name,
loaded once, and again when their files have changed. They are called here, in the driver. What
they hand to executors (functions of a `udf`, or of `mapInArrow`) goes there by value, with what
it uses of users' modules: executors have no such modules, and one that had would keep what it
has imported first, whatever has changed since.

Tasks of a batch share a Spark job (`tasks_by_job`) if their inputs have the same columns, so
that their results have too, and if all that they read together is small enough to leave Spark
through Arrow. A task that is larger than that gains nothing from company, and runs by itself.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.schema import Column
from penstock.datasets.snapshot import DataFile
from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.runtimes.base import AttemptWork
from penstock.runtimes.secrets import Secrets
from penstock.runtimes.spark.access.base import FileSlice
from penstock.runtimes.spark.access.choosing import AccessSelector
from penstock.runtimes.spark.columns import quoted
from penstock.runtimes.spark.errors import in_field, relation_not_found
from penstock.runtimes.spark.input_reader import (
    FILES_MIN,
    InputFiles,
    filters_of,
    missing,
    needed,
    pruned,
)
from penstock.runtimes.spark.job_config import MARKERS, PARTITION, JobConfig, names, sql_tokens
from penstock.runtimes.user_code import FunctionReference, LoadedCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition that a transform is called for."""

    key: str
    start: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A task, as a transform sees it."""

    session: Any
    """The session of this task alone. What a transform makes in it is gone after the task."""
    task_id: int
    attempt: int
    job: str
    generation: str
    partition_key: str | None = None
    """None as well while one plan is made for many partitions (`partition_wise`)."""
    partitions: tuple[Partition, ...] = ()
    """All partitions that this call is for: its own, or with `partition_wise` one or more."""
    start: int | None = None
    end: int | None = None
    cursor: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What the job's config says under `parameters`."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What came with the event."""
    outputs: tuple[str, ...] = ()
    scratch: str = ""
    """A location that only this attempt writes to, and that is swept after it."""
    secrets: Mapping[str, str] = field(default_factory=Secrets)
    """The values of the job's `secrets`, by name. Use them here, in the driver: what is put into a
    DataFrame or a query is part of its plan, which Spark shows and logs."""


class Inputs(Mapping[str, DataFrame]):
    """The inputs as DataFrames, each made when it is asked for."""

    def __init__(
        self, there: Mapping[str, Callable[[], DataFrame]], refuse: Callable[[str], Exception]
    ) -> None:
        self._there = there
        self._refuse = refuse
        self._made: dict[str, DataFrame] = {}

    def __getitem__(self, name: str) -> DataFrame:
        if name not in self._there:
            raise self._refuse(name)
        if name not in self._made:
            self._made[name] = self._there[name]()
        return self._made[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The input, or the default if nothing is published of it."""
        return self[name] if name in self._there else default

    def __contains__(self, name: object) -> bool:
        return name in self._there

    def __iter__(self) -> Iterator[str]:
        return iter(self._there)

    def __len__(self) -> int:
        return len(self._there)


class TransformLoader:
    """The transforms that are loaded. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._code = LoadedCode()
        self._modules: set[str] = set()

    def function(self, wanted: FunctionReference) -> Callable[..., Any]:
        """The function. Raises `WorkFailed` if there is none, or its module does not import."""
        with self._lock:
            if self._code.is_stale():
                self._forget()
            before = set(sys.modules)
            try:
                return self._code.function(str(wanted))
            except WorkReleased:
                raise
            except WorkFailed as error:
                raise WorkFailed(error.message, is_retried=False) from error
            except (Exception, SystemExit) as error:
                raise WorkFailed(_unimportable(wanted, error), is_retried=False) from error
            finally:
                self._keep(set(sys.modules) - before)

    def _keep(self, names: set[str]) -> None:
        """Remember what was imported for users, and have it travel by value."""
        theirs = {name for name in names if _is_theirs(name)}
        self._modules |= theirs
        register: Any = cloudpickle.register_pickle_by_value
        for name in theirs:
            register(sys.modules[name])

    def _forget(self) -> None:
        """Drop what was imported for users, so that it is imported as it is now."""
        for name in self._modules:
            sys.modules.pop(name, None)
        self._modules = set()
        self._code = LoadedCode()


def call(
    function: Callable[..., Any], inputs: Inputs, context: Context, *, name: str
) -> dict[str, DataFrame]:
    """What a transform returns, by the names of outputs."""
    try:
        returned = function(inputs, context)
    except SystemExit as error:
        # It would end the thread, and with it the other tasks of a batch.
        raise WorkFailed(f"{name} ended by SystemExit: {error.code!r}.") from error
    if isinstance(returned, DataFrame):
        if len(context.outputs) != 1:
            raise WorkFailed(
                f"{name} returned one DataFrame, and the job has {_these(context.outputs)};"
                " return a dict of outputs to DataFrames.",
                is_retried=False,
            )
        return {context.outputs[0]: returned}
    if not isinstance(returned, Mapping):
        raise WorkFailed(
            f"{name} returned {_kind(returned)}; it has to return a DataFrame of Spark, or a dict"
            " of outputs to DataFrames.",
            is_retried=False,
        )
    for output, frame in returned.items():
        if output not in context.outputs:
            raise WorkFailed(
                f"{name} returned something for {output!r}, and the job has"
                f" {_these(context.outputs)}.",
                is_retried=False,
            )
        if not isinstance(frame, DataFrame):
            raise WorkFailed(
                f"{name} returned {_kind(frame)} for {output!r}; it has to be a DataFrame of"
                " Spark.",
                is_retried=False,
            )
    missing = [output for output in context.outputs if output not in returned]
    if missing:
        raise WorkFailed(f"{name} returned nothing for {missing[0]!r}.", is_retried=False)
    return dict(returned)


def _unimportable(wanted: FunctionReference, error: BaseException) -> str:
    said = str(error) or type(error).__name__
    where = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if Path(file).exists() and _is_user_file(file):
            where = f" ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        said, where = error.msg, f" ({error.filename}, line {error.lineno})"
    return f"The module {wanted.module} does not import: {type(error).__name__}: {said}{where}"


def _is_theirs(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and _is_user_file(file)


def _is_user_file(file: str) -> bool:
    ours = str(Path(__file__).parents[2])
    installed = (sys.prefix, sys.base_prefix, ours)
    return not file.startswith(installed) and "site-packages" not in file


def _kind(value: object) -> str:
    kind = type(value)
    named = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return "None" if value is None else f"a {named}"


def _these(outputs: tuple[str, ...]) -> str:
    return f"the outputs {', '.join(outputs)}" if outputs else "no outputs"


_NAMED: Final = re.compile(rf"\b{PARTITION}\b", re.IGNORECASE)
SMALL_BYTES_MAX: Final = 8 * 2**20
"""What a task reads in one Spark partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTask:
    """A task that is to be run, alone or with others."""

    work: AttemptWork
    config: JobConfig
    inputs: Mapping[str, InputFiles] = field(default_factory=dict)

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


class PlanBuilder:
    """Makes plans in a session. What their files need is held until `held` is closed."""

    def __init__(
        self, session: Any, accesses: AccessSelector, transforms: TransformLoader, held: ExitStack
    ) -> None:
        self._session = session
        self._accesses = accesses
        self._transforms = transforms
        self._held = held
        self._shared: dict[tuple[str, ...], DataFrame] = {}
        self._views: dict[str, DataFrame] = {}

    def pruned(self, members: Sequence[PlannedTask]) -> list[PlannedTask]:
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

    def one(self, member: PlannedTask) -> dict[str, DataFrame]:
        """The outputs of one task."""
        is_small = member.bytes_in <= SMALL_BYTES_MAX
        made = {
            name: partial(self._frame, each, tag=_tag(member, each), is_small=is_small)
            for name, each in member.inputs.items()
            if each.given.is_there
        }
        return self._outputs([member], made, parameters=_markers(member.work))

    def many(self, members: Sequence[PlannedTask]) -> dict[str, DataFrame]:
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

    def _frame(self, given: InputFiles, *, tag: _Tag, is_small: bool) -> DataFrame:
        # The same frame wherever it is used: Spark sees that it is the same, and reads it once.
        known = (given.name, repr(tag), *(each.location for each in given.files))
        if known not in self._shared:
            access = self._accesses.to(given.place)
            slices = tag.slices(given.files)
            frame = access.frame(self._session, slices, given.columns, self._held)
            self._shared[known] = frame.coalesce(1) if is_small else frame
        return self._shared[known]

    def _frames(self, members: Sequence[PlannedTask], name: str, *, is_small: bool) -> DataFrame:
        first = members[0].inputs[name]
        slices = [FileSlice(files=each.inputs[name].files, tag=each.key) for each in members]
        access = self._accesses.to(first.place)
        frame = access.frame(self._session, slices, first.columns, self._held)
        return frame.coalesce(1) if is_small else frame

    def _outputs(
        self,
        members: Sequence[PlannedTask],
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
        member: PlannedTask,
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
        members: Sequence[PlannedTask],
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


def _partition(work: AttemptWork) -> Partition:
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

    def slices(self, files: Sequence[DataFile]) -> list[FileSlice]:
        if not self.is_own_key or not files:
            return [FileSlice(files=files, tag="" if self.is_own_key else self.text)]
        return [
            FileSlice(files=tuple(some), tag=key)
            for key, some in groupby(files, lambda each: each.partition_key)
        ]


def _tag(member: PlannedTask, given: InputFiles) -> _Tag:
    config = member.config
    if config.partition_wise:
        return _Tag(member.key if given.is_own else None)
    has_keys = all(part.partition_key is not None for part in given.given.parts)
    is_taken = any(each.name.casefold() == PARTITION for each in given.columns or ())
    is_named = config.operator == "spark.sql" and _names_partition(config.sql)
    return _Tag(is_own_key=is_named and has_keys and not is_taken)


def _names_partition(sql: str) -> bool:
    """Whether a query names the column `_partition`; what its comments say is nothing to it."""
    tokens = sql_tokens(sql)
    return any(map(_NAMED.search, (sql,) if tokens is None else tokens))


def _used(config: JobConfig, markers: Mapping[str, Any]) -> dict[str, Any] | None:
    """The parameters that a query names; None if it names none."""
    every = {**config.parameters, **markers}
    return {name: value for name, value in every.items() if f":{name}" in config.sql} or None


def _markers(work: AttemptWork) -> dict[str, Any]:
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


MEMBER: Final = "_penstock_member"
"""The column that tells tasks apart. Its values are texts: a number would be part of the code that
Spark generates, which would then be compiled for every task anew."""


def tasks_by_job(members: Sequence[PlannedTask], *, bytes_max: int) -> list[list[PlannedTask]]:
    """The tasks that share a job, in their order."""
    alike: dict[object, list[PlannedTask]] = {}
    for member in members:
        alike.setdefault(_likeness(member), []).append(member)
    made: list[list[PlannedTask]] = []
    for some in alike.values():
        size, bundle = 0, list[PlannedTask]()
        for member in some:
            if bundle and size + member.bytes_in > bytes_max:
                made.append(bundle)
                size, bundle = 0, []
            bundle.append(member)
            size += member.bytes_in
        made.append(bundle)
    return made


def _likeness(member: PlannedTask) -> object:
    """What is equal for tasks whose results have the same columns."""
    columns = tuple((name, each.columns) for name, each in sorted(member.inputs.items()))
    if any(each.columns is None for each in member.inputs.values()):
        return member.work.task_id
    return columns


def share_files(members: Sequence[PlannedTask]) -> bool:
    """Whether a file is of several of these partitions, as a day is of its month and its year.

    Then no plan can serve all: each row is of one partition there.
    """
    read = [
        (name, file.location)
        for member in members
        for name, given in member.inputs.items()
        if given.is_own
        for file in given.files
    ]
    return len(set(read)) < len(read)


def union_of_members(frames: Sequence[DataFrame]) -> DataFrame:
    """The rows of all frames, each with its place in the column `MEMBER`.

    Raises `WorkFailed` if their columns differ. A union goes by position, and what a function
    returns, or a query reads by a parameter (`csv.` and the path of a day), may have other columns
    for each task, or the same ones in another order.
    """
    first = _signature(frames[0])
    if any(_signature(each) != first for each in frames[1:]):
        raise WorkFailed("The tasks of a batch returned different columns.")
    tagged = [
        frame.select("*", F.lit(str(place)).alias(MEMBER)) for place, frame in enumerate(frames)
    ]
    # In pairs: a chain of unions as long as the batch would be as deep, too.
    while len(tagged) > 1:
        pairs = zip(tagged[::2], tagged[1::2], strict=False)
        odd = tagged[-1:] if len(tagged) % 2 else []
        tagged = [*(one.unionAll(other) for one, other in pairs), *odd]
    return tagged[0]


def split_rows(table: Any, column: str, wanted: Collection[str]) -> Mapping[str, Any]:
    """The rows of each value of a column, without that column, in the order they had."""
    rest = table.drop_columns([column])
    if not table.num_rows:
        return dict.fromkeys(wanted, rest)
    found = table.column(column).combine_chunks().dictionary_encode()
    values = found.dictionary.to_pylist()
    unknown = [value for value in values if value not in wanted]
    if unknown or found.null_count:
        what = repr(unknown[0]) if unknown else "null"
        raise WorkFailed(
            f"The result has rows whose {column} is {what}, which is none of the partitions that"
            " were to be made.",
            is_retried=False,
        )
    places = found.indices.to_numpy(zero_copy_only=False)
    if np.any(np.diff(places) < 0):
        order = np.argsort(places, kind="stable")
        rest, places = rest.take(order), places[order]
    bounds = np.searchsorted(places, np.arange(len(values) + 1))
    pieces = {
        value: rest.slice(int(bounds[place]), int(bounds[place + 1] - bounds[place]))
        for place, value in enumerate(values)
    }
    return {value: pieces.get(value, rest.slice(0, 0)) for value in wanted}


def _signature(frame: DataFrame) -> list[tuple[str, str]]:
    return frame.dtypes
