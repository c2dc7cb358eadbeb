"""The values of the task lifecycle: what goes into its operations and what comes out.

Every answer about a task is one of these, also when the answer is no: a `Refusal` says why and
what the task is now, so that a caller can tell its worker. Times are the database's.

`Completion`, `Failure` and `Release` keep their names: a digest of what ended an attempt is
stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from penstock.dispatcher.dag.model import Priority
from penstock.protocol.base import TaskStatus
from penstock.runtimes.base import Facts

PUBLISHED_MAX: Final = 1_000
"""How many of its outputs are named in the answer to the end of an attempt, which is kept."""


class TaskRefusalReason(StrEnum):
    """Why a call was refused."""

    UNKNOWN = "unknown"
    """There is no such task."""
    RUNNING = "running"
    """Claim: another attempt holds it."""
    OVER = "over"
    """It is completed, dead or cancelled; the state says which."""
    NOT_DUE = "not due"
    PAUSED = "paused"
    FULL = "full"
    """As many tasks of its operator, or of its job, are running as may run at a time."""
    STALE = "stale"
    """The caller's attempt is not the current one, or its lease or its grants are not."""
    DIFFERENT = "different"
    """This attempt has ended, with something else than what the caller says now."""
    OUTPUTS = "outputs"
    """The outputs are not ones that this task may publish."""
    SCHEMA = "schema"
    """The columns of an output are not ones that its dataset can take."""
    UNDECLARED = "undeclared"
    """They are not those that the DAG declares."""
    MOVED = "moved"
    """What an output was merged with is not what is published any more; see `tasks.completion`."""
    NOT_DEAD = "not dead"
    """Replay: it is not dead."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The proof of one attempt."""

    task_id: int
    attempt: int
    lease_token: str = field(repr=False)
    grants: str | None = None
    """The digest of the grants that the token of the attempt says it has; None without a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTask:
    """A task to be made, unless one with its job, generation and key is there."""

    definition_id: int
    generation: str
    dedupe_key: str
    payload: Mapping[str, Any]
    delay_ms: int = 0
    priority: Priority | None = None
    """None is the one of the job."""
    event_seq: int | None = None
    backfill_id: int | None = None


@dataclass(frozen=True, slots=True)
class TaskSnapshot:
    """The current state of a task."""

    task_id: int
    status: TaskStatus
    attempt: int
    worker: str | None
    """Who holds it, while it is running."""
    lease_expires_at: datetime | None
    due_at: datetime
    cancel_asked: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that changed nothing. `state` is None for a task that is not known."""

    task_id: int
    why: TaskRefusalReason
    state: TaskSnapshot | None
    detail: str = ""
    is_late: bool = False
    """Whether it is a heartbeat of an attempt that its holder has just ended by itself."""
    current: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    """Of what has moved: what is published now of the task's outputs, by the names of datasets, to
    merge with; None to wait, and say the same again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedTask:
    """An attempt that has begun: what to do, until when, and the proof that it is ours."""

    task_id: int
    attempt: int
    lease_token: str = field(repr=False)
    lease_expires_at: datetime
    heartbeat_ms: int
    timeout_ms: int
    job: str
    operator: str
    runtime: str
    generation: str
    definition_id: int
    definition: Mapping[str, Any]
    payload: Mapping[str, Any]
    inputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What it reads, by the names of the inputs: `dataset`, `uuid`, `generation` and, if something
    is published for the task, `location` and `revision` of the only part or the first, and all
    `parts`; see `penstock.runtimes.base.WorkInput`."""
    current: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    """What is published of its own partition, by the names of datasets, if its job merges, or
    if it is to be rewritten."""
    columns: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """The columns that its generation has so far, by the names of the datasets that it writes."""
    batch: str = ""
    """Attempts of one claim with the same batch are to be run as one; empty for one by itself."""
    token: str = field(default="", repr=False)
    """The capability token of the attempt, if whoever claims needs one."""
    waited_seconds: float = 0.0
    """How long it was due before it was claimed."""
    runs_alone: bool = False
    """Whether nothing else may run in its process."""
    was_lost: bool = False
    """Whether an attempt of it was taken back, or given up, uncounted, as not begun."""

    @property
    def fence(self) -> Fence:
        return Fence(self.task_id, self.attempt, self.lease_token)


@dataclass(frozen=True, slots=True)
class ExtendedLease:
    """A lease that goes on."""

    task_id: int
    attempt: int
    lease_expires_at: datetime
    cancel_asked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutput:
    """Something that a task has made, to be published.

    Of a dataset without partitions it has a cursor, or nothing; otherwise a key, and a range from
    `start` up to but without `end` if the partitions are ranges.
    """

    dataset: str
    location: str
    partition_key: str | None = None
    start: int | None = None
    end: int | None = None
    cursor: int | None = None
    append_key: str | None = None
    """What makes it unique, if the job appends; None is the task itself."""
    facts: Facts | None = None
    """What its manifest says; None for what has none."""
    base_revision: int | None = None
    """The revision of the partition that it was merged with, 0 for nothing; None if it was not."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an attempt says when it has succeeded."""

    fence: Fence
    outputs: tuple[TaskOutput, ...] = ()
    log: str | None = None
    """Where the log of the attempt is."""
    metrics: Mapping[str, Any] | None = None
    """What the attempt took, for people to see."""
    why_not: str = ""
    """Why its outputs may not be published, if that is known already; empty if it is not."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What an attempt says when it has failed."""

    fence: Fence
    reason: str
    is_retried: bool = True
    log: str | None = None
    metrics: Mapping[str, Any] | None = None
    runs_alone: bool = False
    """Whether its process has died: later attempts run with nothing beside them."""
    is_lost: bool = False
    """Whether its worker was killed while it ran: the next attempt begins at once."""


@dataclass(frozen=True, slots=True)
class Release:
    """What an attempt says that is handed back: it is not counted, and the task is queued again."""

    fence: Fence
    reason: str
    is_delayed: bool = False
    """Whether the next attempt waits, longer each time: this worker could not run the task."""
    log: str | None = None
    metrics: Mapping[str, Any] | None = None
    runs_alone: bool = False
    """As of a failure. Counted if the task was to run alone before: one such death is free."""
    is_lost: bool = False
    """Whether its worker was killed before it began: not counted, but a few times only."""


class PublishOutcome(StrEnum):
    """What became of an output."""

    PUBLISHED = "published"
    SUPERSEDED = "superseded"
    """A later task has published this partition already."""
    DUPLICATE = "duplicate"
    """Its key is there already."""
    REWRITTEN = "rewritten"
    """Its files are in the place of others with the same rows; see `tasks.rewrites`."""


@dataclass(frozen=True, slots=True)
class PublishedOutput:
    """One output after its task was completed. Only what was published has the last two."""

    dataset: str
    partition_key: str | None
    outcome: PublishOutcome
    revision: int | None
    event_seq: int | None


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """What an attempt's end has made of its task. The same call again gets the same value."""

    task_id: int
    attempt: int
    status: TaskStatus
    due_at: datetime | None = None
    """When the next attempt may begin, if there is one."""
    published: tuple[PublishedOutput, ...] = ()
    """At most `PUBLISHED_MAX`: what was not published comes first."""
    omitted: int = 0
    """How many more there are."""
    is_again: bool = field(default=False, compare=False)
    """Whether it had ended before this call: the first answer may have been lost."""

    def bounded(self) -> AttemptEnd:
        """The same as it is kept and told, however many partitions a task has made."""
        more = len(self.published) - PUBLISHED_MAX
        if more <= 0:
            return self
        # It is for people to see which ones were superseded; the others are as they expect.
        told = sorted(self.published, key=lambda one: one.outcome is PublishOutcome.PUBLISHED)
        return replace(self, published=tuple(told[:PUBLISHED_MAX]), omitted=more)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptMeasure:
    """What an attempt that has ended now is counted as."""

    job: str
    outcome: str
    seconds: float
    """How long it ran."""
    published_rows: int = 0
    published_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReapedAttempt:
    """An attempt that nobody was heard of in time, and what its task is now."""

    task_id: int
    attempt: int
    worker: str
    status: TaskStatus


@dataclass(frozen=True, slots=True)
class ReaperPass:
    """What one look at the leases has done."""

    reaped: tuple[ReapedAttempt, ...]
    measured: tuple[AttemptMeasure, ...] = ()
    quiet_until: datetime | None = None
    """Until when no lease is ended, because workers could not be heard for a while."""
