"""The model of a DAG: jobs, what they read and write, how they run; and the graph of its edges.

Values only. Times are whole milliseconds. What is a set in meaning (jobs, inputs, outputs) is
sorted by name, so files that differ in order alone give equal values. `config` and `resources`
hold what JSON holds and are not to be changed. A parsed job keeps every rule of `checks`; one
that is made in code is checked by `checks.complaints`. Defaults are here and nowhere else:
`canonical` leaves out what has its default, so a new field with a default changes no hash of a
DAG that does not use it.

`Graph` answers who feeds whom, in which order, and where there is a cycle, without recursion
and in a fixed order. `Runtimes` is what validation asks of a registry of runtimes, which is
made elsewhere; the runtime `dispatcher` is part of the platform.

How things in a DAG may be called.

Names of jobs, outputs, datasets and runtimes become parts of keys, table rows and URLs, so they are
plain. An operator may also name a Python callable, as in `my.module:function`.

Tasks wait, are claimed, counted and limited by operator and queue: `in_queue` is the name of both,
which is the operator's own in the default queue. See decision 0029.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from penstock.datasets.schema import Column
from penstock.dispatcher.dag.filters import Where
from penstock.kernel.cron import Cron
from penstock.protocol.work import HEARTBEATS
from penstock.runtimes import DEFAULT_QUEUE

NAME_CHARACTERS_MAX: Final = 64
OPERATOR_CHARACTERS_MAX: Final = 200
_QUEUE_SIGN: Final = "@"

_NAME = re.compile(rf"[a-z0-9_-]{{1,{NAME_CHARACTERS_MAX}}}")
_OPERATOR = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.:-]{{0,{OPERATOR_CHARACTERS_MAX - 1}}}")


def is_name(text: str) -> bool:
    """Whether a job, an output, a dataset, a runtime or a queue may be called so."""
    return _NAME.fullmatch(text) is not None


def is_operator(text: str) -> bool:
    """Whether an operator may be called so."""
    return _OPERATOR.fullmatch(text) is not None


def in_queue(operator: str, queue: str) -> str:
    """What tasks of an operator wait as in a queue.

    >>> in_queue("jobs:train", "gpu")
    'jobs:train@gpu'
    """
    return operator if queue == DEFAULT_QUEUE else f"{operator}{_QUEUE_SIGN}{queue}"


def queue_of(name: str) -> str:
    """The queue of what `in_queue` has named; no operator has an @ of its own."""
    return name.partition(_QUEUE_SIGN)[2] or DEFAULT_QUEUE


Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
"""What `config` may hold: what JSON can say, with lists and dicts."""

DISPATCHER_RUNTIME: Final = "dispatcher"
"""The runtime inside the dispatcher itself, for platform operators only."""
SQL_OPERATOR: Final = "spark.sql"
"""The operator whose text may stand in a file of its own: see `files`."""
SINK_OPERATOR: Final = "sink.write"
"""The operator of jobs that write buffered datasets."""


class Activation(StrEnum):
    """What makes a job go."""

    SOURCE = "source"
    REACTIVE = "reactive"


class SourceKind(StrEnum):
    """Where the events of a source job come from."""

    CRON = "cron"
    WEBHOOK = "webhook"
    MANUAL = "manual"
    ALWAYS_ON = "always_on"


class Emits(StrEnum):
    """What the events of a cron source tell of."""

    CURSOR = "cursor"
    """The time that has come."""
    INTERVAL = "interval"
    """The time from the one before until it: a partition with a range."""


class Execution(StrEnum):
    """What one task of a job stands for."""

    PER_UPDATE = "per_update"
    PER_PARTITION = "per_partition"


class UpdateMode(StrEnum):
    """What a task's output does to what was there."""

    REPLACE = "replace"
    APPEND = "append"
    """It is added, once for each task."""
    MERGE = "merge"
    """Its rows take the place of those with the same `unique_key`."""


class Priority(StrEnum):
    """Who gives way under pressure: `bulk` first."""

    NORMAL = "normal"
    BULK = "bulk"


class InputCondition(StrEnum):
    """How many of the inputs that make a job run have to be there for a partition."""

    ANY = "any"
    """Each of them makes a task, whatever the others have."""
    ALL = "all"
    """Only what all of them have something for becomes a task."""


class ReadMode(StrEnum):
    """What a task reads of an input."""

    PARTITION = "partition"
    """What belongs to the task's own partition or range."""
    ALL = "all"
    """Every partition that there is."""
    CHANGES = "changes"
    """What its job has not consumed yet of its partition; without one, of every partition."""


class Calendar(StrEnum):
    """A length of ranges that is no number: parts of the calendar, in UTC."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    YEAR = "year"


class PressureMode(StrEnum):
    """What pressure does to the producers upstream."""

    PAUSE = "pause"


class PlatformOperator(StrEnum):
    """The operators of the runtime `dispatcher`."""

    RANGE_AGGREGATE = "range_aggregate"
    RANGE_SPLIT = "range_split"


@dataclass(frozen=True, slots=True)
class CronSource:
    """Emits an event at every time that the expression names."""

    cron: Cron
    time_zone: str = "UTC"
    emits: Emits = Emits.CURSOR
    catch_up: bool = True
    """Whether times that were missed are made up for, and not the latest of them alone."""
    kind: SourceKind = SourceKind.CRON


class AuthType(StrEnum):
    """How whoever calls a webhook proves who it is."""

    BEARER = "bearer"
    """The secret itself, in `Authorization: Bearer`."""
    HMAC = "hmac"
    """An HMAC-SHA256 of the body in hexadecimal, in a header of its own."""
    GITHUB = "github"
    STRIPE = "stripe"
    SLACK = "slack"

    @property
    def is_dated(self) -> bool:
        """Whether the time of a request is signed with it."""
        return self in (AuthType.STRIPE, AuthType.SLACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookAuth:
    """How requests to a webhook are authenticated."""

    type: AuthType
    secrets: tuple[str, ...]
    """Where the secret is; two while it is being changed, of which either will do."""
    tolerance_ms: int = 300_000
    """How old a request may be, where its time is signed."""
    header: str = "X-Signature"
    """Where the signature is, of the type `hmac`."""


@dataclass(frozen=True, slots=True)
class WebhookSource:
    """Emits an event for every request to its path."""

    path: str
    auth: WebhookAuth | None = None
    kind: SourceKind = SourceKind.WEBHOOK


@dataclass(frozen=True, slots=True)
class ManualSource:
    """Emits an event when somebody says so."""

    kind: SourceKind = SourceKind.MANUAL


@dataclass(frozen=True, slots=True)
class AlwaysOnSource:
    """Runs for ever and emits events when it likes; watched, restarted and drained."""

    drain_timeout_ms: int = 30_000
    """How long it may finish its work when it is asked to stop."""
    kind: SourceKind = SourceKind.ALWAYS_ON


Source = CronSource | WebhookSource | ManualSource | AlwaysOnSource


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An edge: the events of a dataset that pass the filter reach the job."""

    name: str
    """What the operator calls it; the dataset's name unless the file says otherwise."""
    dataset: str
    where: Where | None = None
    is_trigger: bool = True
    """Whether its events make the job run; if not, it is only read."""
    reads: ReadMode = ReadMode.PARTITION
    lookback_ms: int | None = None
    """How far before its own range a task reads too; None is not at all."""


@dataclass(frozen=True, slots=True)
class KeepSpec:
    """How much of a dataset is kept; None is no bound."""

    partitions: int | None = None
    """Of the current generation: those of the highest ranges, or that were published last."""
    age_ms: int | None = None
    """How long ago a partition may have been published, or a generation have been left."""
    generations: int | None = None
    """How many there are with the current one; what is being built is not counted."""
    history_ms: int | None = None
    """How long what was replaced or removed can still be read as it was."""


@dataclass(frozen=True, slots=True)
class CompactSpec:
    """When the files of a partition are put together: so many, and so small on average."""

    files: int = 16
    below_bytes: int = 32 * 2**20


@dataclass(frozen=True, slots=True)
class MaintainSpec:
    """How the files of a dataset are looked after, in place."""

    compact: CompactSpec | None = None
    cluster: tuple[str, ...] = ()
    """The columns by whose ranges its files are cut."""
    after_ms: int = 600_000
    """How long nothing was published of a partition."""


class OutputStorage(StrEnum):
    """Where what is published of a dataset can be read."""

    FILES = "files"
    POSTGRES = "postgres"
    """In a table of Postgres data too, which follows the files: see docs/hot-tables.md."""


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """A dataset that a job, and no other, writes."""

    name: str
    dataset: str
    keep: KeepSpec | None = None
    partition_by: str = ""
    """An SQL expression, each of whose values is a partition; empty for the task's own."""
    maintain: MaintainSpec | None = None
    columns: tuple[Column, ...] = ()
    """The declared ones, in their order; all may be null. Empty: whatever is published."""
    storage: OutputStorage = OutputStorage.FILES
    buffered: bool = False
    """Whether others publish batches of rows into it, which the job, a sink, writes."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The pause before the next attempt: `first`, then `backoff` times the last, up to `max`."""

    first_ms: int = 10_000
    max_ms: int = 600_000
    backoff: float = 2.0


@dataclass(frozen=True, slots=True)
class RangeAggregate:
    """Emits a range of `size` when all inputs cover it; such ranges begin every `step`.

    Those of a calendar lie end to end and have no step.
    """

    size: int | Calendar
    step: int | None


@dataclass(frozen=True, slots=True)
class RangeSplit:
    """Cuts every range of its input at multiples of `size`."""

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A node of the DAG. See docs/dag.md for the meaning of each field."""

    name: str
    activation: Activation = Activation.REACTIVE
    runtime: str = ""
    """Empty for sources that run nothing: cron, webhook and manual ones."""
    operator: str = ""
    config: Mapping[str, Json] = field(default_factory=dict)
    inputs: tuple[InputSpec, ...] = ()
    outputs: tuple[OutputSpec, ...] = ()
    execution: Execution = Execution.PER_PARTITION
    when: InputCondition = InputCondition.ANY
    update: UpdateMode = UpdateMode.REPLACE
    unique_key: tuple[str, ...] = ()
    """The columns that identify a row of what is merged."""
    version_by: str = ""
    """The column that says which of two rows with one key is the later one; empty: the task."""
    delete_when: str = ""
    """A predicate of the operator's language: rows that satisfy it delete what has their key."""
    source: Source | None = None
    priority: Priority = Priority.NORMAL
    mode: PressureMode = PressureMode.PAUSE
    max_queue_depth: int | None = None
    resume_queue_depth: int | None = None
    """Where pressure ends; None is half of the maximum. Read it by `resumes_at_depth`."""
    max_queue_age_ms: int | None = None
    resume_queue_age_ms: int | None = None
    max_concurrency: int | None = None
    """So it is 1 wherever an input is read by its changes."""
    timeout_ms: int = 3_600_000
    heartbeat_timeout_ms: int = HEARTBEATS.timeout_ms
    max_attempts: int = 3
    retry: RetryPolicy = RetryPolicy()
    merge_updates: bool = False
    """Whether updates that come while a task for them waits become part of that task. So it is
    wherever an input looks back: several late days are one task."""
    coalesce: int = 1
    """How many waiting tasks may be claimed together and run as one."""
    untrusted: bool = False
    """Whether its code is kept from everything but its own inputs and outputs; see
    docs/security.md."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """What the operator calls a secret, and where the worker finds it, as in env:NAME."""
    buffers: tuple[str, ...] = ()
    """The buffered datasets into which it may publish batches: no edges, and no part of what
    decides which data it writes."""
    resources: Mapping[str, Json] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Whether there is something to execute: not in sources that only emit events."""
        return self.source is None or self.source.kind is SourceKind.ALWAYS_ON

    @property
    def is_sink(self) -> bool:
        """Whether it writes what others publish into a buffered dataset."""
        return any(each.buffered for each in self.outputs)

    @property
    def resumes_at_depth(self) -> int | None:
        """The depth at which pressure ends; None if depth never makes any."""
        if self.max_queue_depth is None or self.resume_queue_depth is not None:
            return self.resume_queue_depth
        return self.max_queue_depth // 2

    @property
    def resumes_at_age_ms(self) -> int | None:
        """The age of the oldest task at which pressure ends; None if age never makes any."""
        if self.max_queue_age_ms is None or self.resume_queue_age_ms is not None:
            return self.resume_queue_age_ms
        return self.max_queue_age_ms // 2

    @property
    def ranges(self) -> RangeAggregate | RangeSplit | None:
        """What a platform operator does; None for all other jobs."""
        if self.runtime != DISPATCHER_RUNTIME:
            return None
        size, step = self.config.get("size"), self.config.get("step")
        if self.operator == PlatformOperator.RANGE_AGGREGATE:
            if isinstance(size, str) and size in list(Calendar):
                return RangeAggregate(Calendar(size), None)
            if isinstance(size, int) and isinstance(step, int):
                return RangeAggregate(size, step)
        elif self.operator == PlatformOperator.RANGE_SPLIT and isinstance(size, int):
            return RangeSplit(size)
        return None


@dataclass(frozen=True, slots=True)
class Dag:
    """Jobs, sorted by name."""

    jobs: tuple[Job, ...]

    def job(self, name: str) -> Job:
        """The job of this name; a `KeyError` if there is none."""
        for job in self.jobs:
            if job.name == name:
                return job
        raise KeyError(name)


class Graph:
    """The edges between the jobs of a DAG. Only `order` needs a DAG without cycles.

    With `by_triggers`, an input that makes nothing run is no edge. With `by_buffers`, who publishes
    into a buffered dataset feeds the sink that writes it.
    """

    def __init__(self, dag: Dag, *, by_triggers: bool = False, by_buffers: bool = False) -> None:
        self.writers: Mapping[str, str] = {
            output.dataset: job.name for job in dag.jobs for output in job.outputs
        }
        """The job that writes each dataset."""
        fed_by: dict[str, set[str]] = {
            job.name: {
                self.writers[each.dataset]
                for each in job.inputs
                if each.dataset in self.writers and (each.is_trigger or not by_triggers)
            }
            for job in dag.jobs
        }
        for job in dag.jobs if by_buffers else ():
            for dataset in job.buffers:
                if dataset in self.writers:
                    fed_by[self.writers[dataset]].add(job.name)
        self.feeders: Mapping[str, tuple[str, ...]] = {
            name: tuple(sorted(found)) for name, found in fed_by.items()
        }
        """The jobs that each job reads from."""
        readers: dict[str, list[str]] = {job.name: [] for job in dag.jobs}
        for name in sorted(self.feeders):
            for feeder in self.feeders[name]:
                readers[feeder].append(name)
        self.readers: Mapping[str, tuple[str, ...]] = {
            name: tuple(found) for name, found in readers.items()
        }
        """The jobs that read from each job."""

    def upstream(self, job: str) -> frozenset[str]:
        """Every job from which there is a way to this one, which is not among them."""
        return _closure(self.feeders, job)

    def downstream(self, job: str) -> frozenset[str]:
        """Every job to which there is a way from this one, which is not among them."""
        return _closure(self.readers, job)

    def order(self) -> tuple[str, ...]:
        """All jobs, each after those that it reads from; by name where that leaves a choice."""
        order, left = _sorted(self.feeders, self.readers)
        assert not left, "the order of a DAG with a cycle was asked for"
        return order

    def cycles(self) -> tuple[tuple[str, ...], ...]:
        """Ways that come back to where they begin, so that every cycle shares a job with one.

        Each begins with its first name, and follows the data.
        """
        feeders = {name: set(found) for name, found in self.feeders.items()}
        cycles = []
        for _ in range(len(feeders)):
            readers: dict[str, set[str]] = {name: set() for name in feeders}
            for name, found in feeders.items():
                for feeder in found:
                    readers[feeder].add(name)
            _, left = _sorted(feeders, readers)
            if not left:
                break
            cycle = _walk_back(feeders, left)
            cycles.append(cycle)
            feeders = {
                name: found - set(cycle) for name, found in feeders.items() if name not in cycle
            }
        return tuple(cycles)


def _closure(edges: Mapping[str, tuple[str, ...]], start: str) -> frozenset[str]:
    found: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(edges[name])
    return frozenset(found - {start})


def _sorted(
    feeders: Mapping[str, tuple[str, ...] | set[str]],
    readers: Mapping[str, tuple[str, ...] | set[str]],
) -> tuple[tuple[str, ...], set[str]]:
    """The jobs in order, and those that are on a cycle or behind one."""
    missing = {name: len(found) for name, found in feeders.items()}
    ready = [name for name, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        name = heapq.heappop(ready)
        order.append(name)
        for reader in readers[name]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, reader)
    return tuple(order), set(feeders) - set(order)


def _walk_back(feeders: Mapping[str, set[str]], left: set[str]) -> tuple[str, ...]:
    """A cycle: every job that is left has a feeder that is left, so a walk back must repeat."""
    name = min(left)
    way: dict[str, None] = {}
    while name not in way:
        way[name] = None
        name = min(feeders[name] & left)
    names = list(way)
    cycle = names[names.index(name) :][::-1]
    first = cycle.index(min(cycle))
    return tuple(cycle[first:] + cycle[:first])


@dataclass(frozen=True, slots=True)
class JobFault:
    """Something in a job that its runtime does not accept."""

    field: str
    """The path inside the job, as in `config.sql` or `resources.memory`."""
    message: str
    """A sentence that says what is wrong and what to do."""


class Runtimes(Protocol):
    """The runtimes that a DAG may name, besides `dispatcher`."""

    def names(self) -> Collection[str]:
        """All runtimes."""
        ...

    def operators(self, runtime: str) -> Collection[str] | None:
        """The operators of a runtime; None if any operator may be the name of a user's code."""
        ...

    def faults(self, job: Job) -> Iterable[JobFault]:
        """What the job's runtime says against its config, resources and other fields."""
        ...

    def queued(self, dag: Dag) -> Dag:
        """The DAG, whose jobs say in which queue their tasks wait, unless it is the default."""
        ...
