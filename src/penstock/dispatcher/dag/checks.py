"""The rules between fields and between jobs of a DAG: what no single field can be blamed for.

`complaints` is a pure function of the model and of the runtimes there are. A `RuleViolation`
names a job, the field at which it is reported, and the fields that it was concluded from: where
one of those could not be read, `parser` leaves it out, for it would blame a job for a default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from penstock.dispatcher.dag.model import (
    DISPATCHER_RUNTIME,
    SINK_OPERATOR,
    Activation,
    Dag,
    Graph,
    InputCondition,
    Job,
    OutputSpec,
    OutputStorage,
    PlatformOperator,
    Priority,
    ReadMode,
    Runtimes,
    SourceKind,
    UpdateMode,
    WebhookSource,
)
from penstock.kernel.text import listed, nearest, shown
from penstock.kernel.units import duration_text

HEARTBEAT_MS_MAX: Final = 86_400_000
"""A worker that may be silent for longer than a day would leave its task alone for as long."""
_SEVERAL: Final = 2
_VIEW_CHARACTERS_MAX: Final = 63
_SYSTEM_COLUMNS: Final = frozenset({"cmax", "cmin", "ctid", "tableoid", "xmax", "xmin"})
"""Columns that each table of Postgres has, besides its own."""
"""How like another a name is that was meant to be that one."""


@dataclass(frozen=True, slots=True)
class RuleViolation:
    """A rule that a job breaks. `field` and `reads` are paths inside the job."""

    job: str
    field: str
    message: str
    reads: tuple[str, ...] = ()
    reads_of_all: tuple[str, ...] = ()
    """Fields of whichever job: one that cannot be read is enough to say nothing."""


def complaints(dag: Dag, runtimes: Runtimes | None) -> Iterator[RuleViolation]:
    """Everything that is wrong with a DAG; without runtimes their names are not judged."""
    for job in dag.jobs:
        yield from _activation(job)
        yield from _inputs(job)
        yield from _outputs(job)
        yield from _thresholds(job)
        yield from _untrusted(job)
        if job.runs:
            yield from _runtime(job, runtimes)
    yield from _cycles(dag)
    yield from _bulk(dag)
    yield from _paths(dag)
    yield from _windows(dag)
    yield from _buffers(dag)


def _activation(job: Job) -> Iterator[RuleViolation]:
    reads = ("activation", "source", "inputs", "outputs")
    if job.activation is Activation.REACTIVE:
        if job.source is not None:
            message = "A reactive job has no `source`; write activation: source, or take it out."
            yield RuleViolation(job.name, "source", message, reads)
        elif not job.inputs and not job.is_sink:
            message = (
                "A reactive job has no inputs; give it `inputs`,"
                " or write activation: source and a `source`."
            )
            yield RuleViolation(job.name, "inputs", message, reads)
        return
    if job.source is None:
        kinds = " or ".join(SourceKind)
        message = f"A source job needs a `source` with its kind: {kinds}."
        yield RuleViolation(job.name, "source", message, reads)
    if job.inputs:
        message = (
            "A source job has no inputs; take them out, or write activation: reactive"
            " and take `source` out."
        )
        yield RuleViolation(job.name, "inputs", message, ("activation",))
    if not job.outputs:
        message = "A source job needs an output, the dataset that its events are of; give it one."
        yield RuleViolation(job.name, "outputs", message, reads)


def _inputs(job: Job) -> Iterator[RuleViolation]:
    triggers = [each for each in job.inputs if each.is_trigger]
    if job.inputs and not triggers:
        message = (
            "Nothing makes the job run, for all of its inputs have trigger: false; take that out of"
            " one of them."
        )
        yield RuleViolation(job.name, "inputs", message, ("inputs",))
    elif (
        job.when is InputCondition.ALL
        and len(triggers) < _SEVERAL
        and job.runtime != DISPATCHER_RUNTIME
    ):
        message = (
            "when: all waits for several inputs, and one input alone makes this job run;"
            " take it out."
        )
        yield RuleViolation(job.name, "when", message, ("inputs", "when"))
    for each in job.inputs:
        if each.where is not None and not each.is_trigger:
            message = (
                f"A filter says which events make the job run, and with trigger: false those of"
                f" {each.name} make none; take one of the two out."
            )
            yield RuleViolation(job.name, "inputs", message, ("inputs",))
    yield from _looking_back(job)
    changing = [each.name for each in job.inputs if each.reads is ReadMode.CHANGES]
    if not changing or job.runtime == DISPATCHER_RUNTIME:
        return
    for field, value in (("max_concurrency", job.max_concurrency), ("coalesce", job.coalesce)):
        if value != 1:
            message = (
                f"A job that reads changes ({changing[0]}) runs one task at a time, so that none"
                f" is read twice; take `{field}` out."
            )
            yield RuleViolation(job.name, field, message, ("inputs", field))


def _looking_back(job: Job) -> Iterator[RuleViolation]:
    back = [each.name for each in job.inputs if each.lookback_ms is not None]
    if not back or job.runtime == DISPATCHER_RUNTIME:
        return
    for each in job.inputs:
        if each.name in back and each.reads is not ReadMode.PARTITION:
            message = (
                f"`lookback` widens what a task reads of its partition, and with read: {each.reads}"
                f" it reads something else of {each.name}; take one of the two out."
            )
            yield RuleViolation(job.name, "inputs", message, ("inputs",))
    if job.update is UpdateMode.APPEND:
        message = (
            f"A partition is made again when something changes that it looks back at ({back[0]}),"
            " and update: append would add its rows once more; write update: replace."
        )
        yield RuleViolation(job.name, "update", message, ("inputs", "update"))
    if job.config.get("partition_wise"):
        message = (
            "`partition_wise` takes a row as one of a single partition, and with `lookback` it is"
            f" one of several ({back[0]}); take one of the two out."
        )
        yield RuleViolation(job.name, "config.partition_wise", message, ("inputs", "config"))


def _windows(dag: Dag) -> Iterator[RuleViolation]:
    """Inputs that look back at what has no data, or are to read changes of it."""
    told = {
        output.dataset
        for job in dag.jobs
        if not job.runs or job.runtime == DISPATCHER_RUNTIME
        for output in job.outputs
    }
    reads = ("activation", "source", "runtime", "inputs", "outputs")
    for job in dag.jobs:
        for each in job.inputs:
            if each.lookback_ms is not None and each.dataset in told:
                message = (
                    f"{each.dataset} only carries events, and has no data to look"
                    " back at; write `lookback` at an input that is read."
                )
                yield RuleViolation(job.name, "inputs", message, (), reads)
            if each.reads is ReadMode.CHANGES and each.dataset in told:
                message = (
                    f"{each.dataset} only carries events, and has no data that could"
                    " change; write read: changes at an input that is read."
                )
                yield RuleViolation(job.name, "inputs", message, (), reads)


def _outputs(job: Job) -> Iterator[RuleViolation]:
    if not job.runs and any(each.keep is not None for each in job.outputs):
        message = (
            "A source that only emits events has no data to keep; write `keep` where the data is"
            " made."
        )
        yield RuleViolation(job.name, "outputs", message, ("outputs", "activation", "source"))
    if any(each.partition_by for each in job.outputs):
        yield from _partition_by(job)
    yield from _maintained(job)
    yield from _merged(job)
    yield from _declared(job)
    yield from _sinks(job)


def _declared(job: Job) -> Iterator[RuleViolation]:
    """What cannot be kept of `columns` and `storage`."""
    for each in job.outputs:
        said = "storage" if each.storage is OutputStorage.POSTGRES else "columns"
        if not (each.columns or said == "storage"):
            continue
        if not job.runs or job.runtime == DISPATCHER_RUNTIME:
            message = f"It makes no rows; write `{said}` where the data is made."
            reads = ("outputs", "activation", "source", "runtime")
            yield RuleViolation(job.name, "outputs", message, reads)
        elif not each.columns:
            message = (
                f"The table of {each.name} in Postgres needs `columns`: write the names and types,"
                " as in columns: {id: bigint}."
            )
            yield RuleViolation(job.name, "outputs", message, ("outputs",))
        elif said == "storage" and len(each.dataset) > _VIEW_CHARACTERS_MAX:
            message = (
                f"Names in Postgres have {_VIEW_CHARACTERS_MAX} characters at most; give"
                f" {each.name} a shorter `dataset`."
            )
            yield RuleViolation(job.name, "outputs", message, ("outputs",))
        elif said == "storage" and (
            taken := [c.name for c in each.columns if c.name in _SYSTEM_COLUMNS]
        ):
            message = (
                f"Postgres has columns of its own called {listed(taken)}; give those of"
                f" {each.name} other names."
            )
            yield RuleViolation(job.name, "outputs", message, ("outputs",))
        elif missing := [key for key in _keys(job) if key not in {c.name for c in each.columns}]:
            message = (
                f"The `columns` of {each.name} lack {listed(missing)}, which the job merges by;"
                " add what is missing."
            )
            reads = ("outputs", "update", "unique_key", "version_by")
            yield RuleViolation(job.name, "outputs", message, reads)


def _keys(job: Job) -> tuple[str, ...]:
    """The columns that merges go by, and need."""
    return (*job.unique_key, *filter(None, [job.version_by]))


_SINK_COLUMNS: Final = "a sink checks every row against `columns`; declare them at the output"


def _sinks(job: Job) -> Iterator[RuleViolation]:
    """What a job needs that writes a buffered dataset, and may not have."""
    reads = ("outputs", "operator", "runtime", "inputs", "update", "config")
    buffered = [each for each in job.outputs if each.buffered]
    if not buffered and job.operator != SINK_OPERATOR:
        return
    if not buffered or job.operator != SINK_OPERATOR or job.source is not None:
        message = (
            f"A buffered dataset is written by a sink, and a sink writes nothing else: write"
            f" runtime: sink, operator: {SINK_OPERATOR}, and buffered: true at one of its outputs."
        )
        yield RuleViolation(job.name, "outputs", message, reads)
        return
    if len(job.outputs) != _SEVERAL or len(buffered) != 1:
        message = (
            "A sink has two outputs: one with buffered: true, and one for the rows that do not fit,"
            f" as in outputs: [{{name: {buffered[0].name}, buffered: true}},"
            f" {buffered[0].name}_rejected]."
        )
        yield RuleViolation(job.name, "outputs", message, reads)
        return
    yield from _sink_outputs(job, buffered[0], reads)
    if job.inputs:
        message = "A sink reads what is published into its dataset; take `inputs` out."
        yield RuleViolation(job.name, "inputs", message, reads)
    if job.update is UpdateMode.REPLACE:
        message = "A sink adds rows; write update: append, or update: merge with a unique_key."
        yield RuleViolation(job.name, "update", message, reads)
    if job.delete_when:
        message = "A sink deletes no rows; take `delete_when` out."
        yield RuleViolation(job.name, "delete_when", message, ("delete_when",))


def _sink_outputs(
    job: Job, buffered: OutputSpec, reads: tuple[str, ...]
) -> Iterator[RuleViolation]:
    (aside,) = (each for each in job.outputs if not each.buffered)
    if not buffered.columns:
        message = f"The dataset {buffered.dataset} needs `columns`, for {_SINK_COLUMNS}."
        yield RuleViolation(job.name, "outputs", message, reads)
    if aside.columns or aside.storage is not OutputStorage.FILES:
        message = f"The columns of rejected rows are fixed; take them out of {aside.name}."
        yield RuleViolation(job.name, "outputs", message, reads)
    if any(each.maintain is not None or each.partition_by for each in job.outputs):
        message = (
            "A sink writes partitions as they are published, and rewrites none: take"
            " `partition_by` and `maintain` out."
        )
        yield RuleViolation(job.name, "outputs", message, reads)
    expect = job.config.get("expect")
    names = {each.name for each in buffered.columns}
    unknown = [each for each in expect if each not in names] if isinstance(expect, Mapping) else []
    if unknown and names:
        message = f"There is no column {shown(unknown[0])} in {buffered.dataset}."
        yield RuleViolation(job.name, "config.expect", message, reads)
    nested = {each.name for each in buffered.columns if "<" in each.type}
    for name in nested.intersection({*job.unique_key, job.version_by}):
        message = f"Rows are merged by plain columns, and {shown(name)} is nested; take another."
        yield RuleViolation(job.name, "unique_key", message, (*reads, "unique_key", "version_by"))


def _buffers(dag: Dag) -> Iterator[RuleViolation]:
    """Where jobs publish batches: into buffered datasets, and not upstream of themselves."""
    sinks = {each.dataset: job.name for job in dag.jobs for each in job.outputs if each.buffered}
    graph = Graph(dag, by_triggers=True)
    for job in dag.jobs:
        for dataset in job.buffers:
            sink = sinks.get(dataset)
            if sink is None:
                message = (
                    f"The dataset {dataset} is not buffered; write buffered: true at it, or take it"
                    " out."
                )
                yield RuleViolation(job.name, "buffers", message, ("buffers",), ("outputs",))
            elif sink == job.name or job.name in graph.downstream(sink):
                message = (
                    f"What is published into {dataset} would make this job run again, without end:"
                    " read it with trigger: false, or publish elsewhere."
                )
                reads = ("inputs", "outputs", "buffers")
                yield RuleViolation(job.name, "buffers", message, (), reads)


def _maintained(job: Job) -> Iterator[RuleViolation]:
    if not any(each.maintain is not None for each in job.outputs):
        return
    if not job.runs or job.runtime == DISPATCHER_RUNTIME:
        message = "It has no files to maintain; write `maintain` where the data is made."
        reads = ("outputs", "activation", "source", "runtime")
        yield RuleViolation(job.name, "outputs", message, reads)
    if job.update is UpdateMode.APPEND and any(
        each.maintain is not None and each.maintain.compact is None for each in job.outputs
    ):
        message = (
            "Of what is appended, files are cut by ranges where they are put together; write"
            " compact: true beside cluster."
        )
        yield RuleViolation(job.name, "outputs", message, ("outputs", "update"))


def _merged(job: Job) -> Iterator[RuleViolation]:
    reads = ("update", "unique_key", "version_by")
    if job.update is UpdateMode.MERGE:
        if not job.unique_key:
            message = (
                "Merging needs a `unique_key`: name the columns that identify a row, as in"
                " unique_key: [id]."
            )
            yield RuleViolation(job.name, "update", message, reads)
        if job.version_by in job.unique_key:
            message = (
                f"The column {job.version_by} is part of the `unique_key`, so no two rows that are"
                " compared differ in it; name another, or take it out."
            )
            yield RuleViolation(job.name, "version_by", message, reads)
        if job.runs and job.runtime == DISPATCHER_RUNTIME:
            message = "A range has no rows to merge; take `update` out."
            yield RuleViolation(job.name, "update", message, (*reads, "runtime"))
        return
    # What was appended had a key that nobody used: see `jobs` for new texts.
    if job.update is UpdateMode.REPLACE and job.unique_key:
        message = "A `unique_key` is for update: merge only; write that, or take it out."
        yield RuleViolation(job.name, "unique_key", message, reads)
    for field in ("version_by", "delete_when"):
        if getattr(job, field):
            message = f"A `{field}` is for update: merge only; write that, or take it out."
            yield RuleViolation(job.name, field, message, (*reads, field))


def _partition_by(job: Job) -> Iterator[RuleViolation]:
    if not job.runs or job.runtime == DISPATCHER_RUNTIME:
        message = "It makes no rows that `partition_by` could divide; take that out."
        reads = ("outputs", "activation", "source", "runtime")
        yield RuleViolation(job.name, "outputs", message, reads)
    if job.coalesce > 1:
        message = (
            "A task whose output has `partition_by` makes many partitions by itself, and is not"
            " run as one with others; take `coalesce` or `partition_by` out."
        )
        yield RuleViolation(job.name, "coalesce", message, ("outputs", "coalesce"))


def _thresholds(job: Job) -> Iterator[RuleViolation]:
    depth, age = job.resume_queue_depth, job.resume_queue_age_ms
    yield from _threshold(job, "depth", resume=depth, pause=job.max_queue_depth, show=str)
    yield from _threshold(job, "age", resume=age, pause=job.max_queue_age_ms, show=duration_text)
    if job.heartbeat_timeout_ms > HEARTBEAT_MS_MAX:
        said = duration_text(job.heartbeat_timeout_ms)
        message = f"A worker may be silent for a day at most, not {said}; write 1d or less."
        yield RuleViolation(job.name, "heartbeat_timeout", message, ("heartbeat_timeout",))
    if job.retry.first_ms > job.retry.max_ms:
        message = (
            f"The first pause, {duration_text(job.retry.first_ms)}, is longer than the longest,"
            f" {duration_text(job.retry.max_ms)}; make `first` shorter or `max` longer."
        )
        yield RuleViolation(job.name, "retry", message, ("retry",))


def _threshold(
    job: Job, what: str, *, resume: int | None, pause: int | None, show: Callable[[int], str]
) -> Iterator[RuleViolation]:
    low, high = f"resume_queue_{what}", f"max_queue_{what}"
    if resume is None:
        return
    if pause is None:
        message = f"It needs a `{high}`, at which there is pressure; write one, or take it out."
        yield RuleViolation(job.name, low, message, (low, high))
    elif resume >= pause:
        message = (
            f"Pressure begins at {show(pause)} and would never end at {show(resume)};"
            f" make it less than `{high}`."
        )
        yield RuleViolation(job.name, low, message, (low, high))


def _untrusted(job: Job) -> Iterator[RuleViolation]:
    if job.untrusted and job.coalesce > 1:
        message = (
            "Tasks that run as one share their credentials, and untrusted code gets those of its"
            " own task alone; take `coalesce` or `untrusted` out."
        )
        yield RuleViolation(job.name, "coalesce", message, ("untrusted", "coalesce"))


def _runtime(job: Job, runtimes: Runtimes | None) -> Iterator[RuleViolation]:
    kind = ("activation", "source")
    if not job.runtime:
        known = listed(sorted({*runtimes.names(), DISPATCHER_RUNTIME})) if runtimes else "process"
        message = f"It is missing; write where the job runs, as in {known}."
        yield RuleViolation(job.name, "runtime", message, (*kind, "runtime"))
    if not job.operator:
        message = "It is missing; write what the job runs."
        yield RuleViolation(job.name, "operator", message, (*kind, "operator"))
    if not job.runtime or not job.operator:
        return
    if job.runtime == DISPATCHER_RUNTIME:
        yield from _platform(job)
    elif runtimes is not None:
        yield from _registered(job, runtimes)


def _platform(job: Job) -> Iterator[RuleViolation]:
    reads = ("activation", "source", "runtime", "operator")
    names = " and ".join(PlatformOperator)
    if job.operator not in list(PlatformOperator):
        message = (
            f"The runtime dispatcher runs {names} and nobody's code; write another runtime for"
            f" {shown(job.operator)}."
        )
        yield RuleViolation(job.name, "operator", message, reads)
        return
    if job.activation is Activation.SOURCE:
        message = f"{job.operator} reads ranges and cannot be a source; give it inputs."
        yield RuleViolation(job.name, "operator", message, reads)
        return
    if job.operator == PlatformOperator.RANGE_SPLIT and len(job.inputs) > 1:
        message = f"range_split cuts one input, not {len(job.inputs)}; make a job for each."
        yield RuleViolation(job.name, "inputs", message, (*reads, "inputs"))
    if len(job.outputs) != 1:
        message = f"{job.operator} has one output, not {len(job.outputs)}."
        yield RuleViolation(job.name, "outputs", message, (*reads, "outputs"))
    yield from _of_ranges(job, reads)


def _of_ranges(job: Job, reads: tuple[str, ...]) -> Iterator[RuleViolation]:
    """What has no meaning for ranges, which are told and never read."""
    if any(
        not each.is_trigger or each.reads is not ReadMode.PARTITION or each.lookback_ms is not None
        for each in job.inputs
    ):
        message = (
            f"{job.operator} goes by the events of its inputs and reads no data;"
            " take `trigger`, `read` and `lookback` out."
        )
        yield RuleViolation(job.name, "inputs", message, (*reads, "inputs"))
    if any(each.keep is not None for each in job.outputs):
        message = "A range has no data of its own; write `keep` where the data is made."
        yield RuleViolation(job.name, "outputs", message, (*reads, "outputs"))
    if job.when is InputCondition.ALL:
        waits = "waits for all of its inputs anyway" if len(job.inputs) > 1 else "has one input"
        message = f"{job.operator} {waits}; take it out."
        yield RuleViolation(job.name, "when", message, (*reads, "inputs", "when"))
    if job.untrusted:
        message = f"{job.operator} is the dispatcher's own code; take it out."
        yield RuleViolation(job.name, "untrusted", message, (*reads, "untrusted"))
    if job.secrets:
        message = f"{job.operator} runs inside the dispatcher and uses no secrets; take them out."
        yield RuleViolation(job.name, "secrets", message, (*reads, "secrets"))
    if job.coalesce > 1:
        message = f"{job.operator} runs inside the dispatcher, one task by itself; take it out."
        yield RuleViolation(job.name, "coalesce", message, (*reads, "coalesce"))


def _registered(job: Job, runtimes: Runtimes) -> Iterator[RuleViolation]:
    reads = ("activation", "source", "runtime", "operator")
    known = sorted({*runtimes.names(), DISPATCHER_RUNTIME})
    if job.runtime not in known:
        message = (
            f"There is no runtime {shown(job.runtime)}; there are {listed(known)}."
            f"{_ask(job.runtime, known)} Register it in the settings, or write another."
        )
        yield RuleViolation(job.name, "runtime", message, reads)
        return
    operators = runtimes.operators(job.runtime)
    if operators is not None and job.operator not in operators:
        message = (
            f"The runtime {job.runtime} has no operator {shown(job.operator)};"
            f" it has {listed(sorted(operators))}.{_ask(job.operator, operators)}"
        )
        yield RuleViolation(job.name, "operator", message, reads)
        return
    for fault in runtimes.faults(job):
        field = fault.field.partition(".")[0]
        yield RuleViolation(job.name, fault.field, fault.message, (*reads, field))


def _ask(word: str, names: Collection[str]) -> str:
    meant = nearest(word, names)
    return f" Did you mean {meant}?" if meant else ""


def _cycles(dag: Dag) -> Iterator[RuleViolation]:
    writers = Counter(output.dataset for job in dag.jobs for output in job.outputs)
    # Of a dataset that two jobs write it is not known who feeds whom; that alone is complained of.
    clear = Dag(
        tuple(
            replace(job, inputs=tuple(each for each in job.inputs if writers[each.dataset] <= 1))
            for job in dag.jobs
        )
    )
    for cycle in Graph(clear).cycles():
        way = " -> ".join([*cycle, cycle[0]])
        message = (
            f"The DAG has a cycle: {way}; remove one of these inputs."
            if len(cycle) > 1
            else f"The job {cycle[0]} reads its own output; take this input out."
        )
        yield RuleViolation(cycle[0], "inputs", message)


def _bulk(dag: Dag) -> Iterator[RuleViolation]:
    graph = Graph(dag)
    for job in dag.jobs:
        if job.priority is Priority.BULK and not graph.readers[job.name]:
            message = (
                "A bulk job gives way to the jobs downstream of it, and no job reads from this one;"
                " write priority: normal, or let a job read its outputs."
            )
            yield RuleViolation(job.name, "priority", message, ("priority",), ("inputs", "outputs"))


def _paths(dag: Dag) -> Iterator[RuleViolation]:
    first: dict[str, str] = {}
    for job in dag.jobs:
        if not isinstance(job.source, WebhookSource):
            continue
        other = first.setdefault(job.source.path, job.name)
        if other != job.name:
            message = f"The path {job.source.path} is already that of {other}; write another."
            yield RuleViolation(job.name, "source.path", message, ("source",))
