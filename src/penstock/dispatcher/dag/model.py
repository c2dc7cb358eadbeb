"""What a DAG is: jobs, what they read, what they write, and how they are run.

Values only. Times are whole milliseconds. Whatever is a set in meaning (jobs, inputs, outputs) is
kept sorted by name, so that two files that differ in order alone give equal values. `config` and
`resources` hold what JSON holds and are not to be changed. A job that was parsed keeps every rule
of `checks`; one that is made in code is checked by `checks.complaints`.

Defaults are here and nowhere else: `canonical` leaves out what has its default, so a new field with
a default changes no hash of a DAG that does not use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from penstock.dispatcher.dag.filters import Where
from penstock.kernel.cron import Cron

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
"""What `config` may hold: what JSON can say, with lists and dicts."""

DISPATCHER_RUNTIME: Final = "dispatcher"
"""The runtime inside the dispatcher itself, for platform operators only."""
SQL_OPERATOR: Final = "spark.sql"
"""The operator whose text may stand in a file of its own: see `files`."""


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


class Update(StrEnum):
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


class When(StrEnum):
    """How many of the inputs that make a job run have to be there for a partition."""

    ANY = "any"
    """Each of them makes a task, whatever the others have."""
    ALL = "all"
    """Only what all of them have something for becomes a task."""


class Reads(StrEnum):
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


class Mode(StrEnum):
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
    """What requests to a webhook have to show."""

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
class Input:
    """An edge: the events of a dataset that pass the filter reach the job."""

    name: str
    """What the operator calls it; the dataset's name unless the file says otherwise."""
    dataset: str
    where: Where | None = None
    is_trigger: bool = True
    """Whether its events make the job run; if not, it is only read."""
    reads: Reads = Reads.PARTITION
    lookback_ms: int | None = None
    """How far before its own range a task reads too; None is not at all."""


@dataclass(frozen=True, slots=True)
class Keep:
    """How much of a dataset is kept; None is no bound."""

    partitions: int | None = None
    """Of the current generation: those of the highest ranges, or that were published last."""
    age_ms: int | None = None
    """How long ago a partition may have been published, or a generation have been left."""
    generations: int | None = None
    """How many there are with the current one; what is being built is not counted."""


@dataclass(frozen=True, slots=True)
class Compact:
    """When the files of a partition are put together: so many, and so small on average."""

    files: int = 16
    below_bytes: int = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Maintain:
    """How the files of a dataset are looked after, in place."""

    compact: Compact | None = None
    cluster: tuple[str, ...] = ()
    """The columns by whose ranges its files are cut."""
    after_ms: int = 600_000
    """How long nothing was published of a partition."""


@dataclass(frozen=True, slots=True)
class Output:
    """A dataset that a job, and no other, writes."""

    name: str
    dataset: str
    keep: Keep | None = None
    partition_by: str = ""
    """An SQL expression, each of whose values is a partition; empty for the task's own."""
    maintain: Maintain | None = None


@dataclass(frozen=True, slots=True)
class Retry:
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
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    execution: Execution = Execution.PER_PARTITION
    when: When = When.ANY
    update: Update = Update.REPLACE
    unique_key: tuple[str, ...] = ()
    """The columns that identify a row of what is merged."""
    version_by: str = ""
    """The column that says which of two rows with one key is the later one; empty: the task."""
    delete_when: str = ""
    """A predicate of the operator's language: rows that satisfy it delete what has their key."""
    source: Source | None = None
    priority: Priority = Priority.NORMAL
    mode: Mode = Mode.PAUSE
    max_queue_depth: int | None = None
    resume_queue_depth: int | None = None
    """Where pressure ends; None is half of the maximum. Read it by `resumes_at_depth`."""
    max_queue_age_ms: int | None = None
    resume_queue_age_ms: int | None = None
    max_concurrency: int | None = None
    """So it is 1 wherever an input is read by its changes."""
    timeout_ms: int = 3_600_000
    heartbeat_timeout_ms: int = 60_000
    max_attempts: int = 3
    retry: Retry = Retry()
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
    resources: Mapping[str, Json] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Whether there is something to execute: not in sources that only emit events."""
        return self.source is None or self.source.kind is SourceKind.ALWAYS_ON

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
