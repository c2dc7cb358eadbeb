"""What workers and the dispatcher exchange: hello, claim, heartbeat, complete, credentials."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

from msgspec import Meta

from penstock.kernel.units import WAIT_SECONDS_MAX
from penstock.protocol.base import (
    HELD,
    Answer,
    Ask,
    AttemptNumber,
    Capability,
    LeaseToken,
    Name,
    Number,
    PartitionKey,
    TaskNumber,
    Uuid,
)


class HelloAsk(Ask):
    """Register a worker, or report that it leaves. Repeated every few seconds while it runs."""

    runtimes: Annotated[list[Name], Meta(max_length=100)]
    concurrency: Annotated[int, Meta(ge=1, le=10_000)] = 1
    about: dict[str, str] = {}
    queues: Annotated[list[Name], Meta(max_length=100)] = []
    """The queues that it serves; empty for all queues."""
    is_leaving: bool = False
    """The final hello of a worker that is shutting down: it serves nothing from now on."""


class OperatorAnswer(Answer):
    """An operator of the DAG in force, or one that tasks still wait for."""

    name: str
    runtime: str


class HelloAnswer(Answer):
    """What a worker of these runtimes should serve."""

    operators: list[OperatorAnswer]
    now: datetime


Receipts = Annotated[list[Annotated[int, Meta(ge=0, le=2**63 - 1)]], Meta(max_length=1000)]


class WaitAsk(Ask):
    """Wait until an operator has work; also acknowledges earlier wake-ups."""

    listener: Name
    """The id of the waiting listener; a worker may have several."""
    operators: Annotated[list[Name], Meta(max_length=10_000)]
    seconds: Annotated[float, Meta(ge=0, le=WAIT_SECONDS_MAX)] = 0.0
    """How long to wait; 0 only acknowledges."""
    answered: Receipts = []
    """Wake-ups after which a claim was made."""
    returned: Receipts = []
    """Wake-ups that another worker has to answer."""
    held: Receipts = []
    """Wake-ups that are still being answered."""
    hello: HelloAsk | None = None
    """A hello of the waiting worker, which then needs no other one meanwhile. The request is
    answered at once if `operators` are not those that the worker should serve."""


class WakeUpAnswer(Answer):
    """An operator has work of some priority."""

    id: int
    operator: str
    priority: str


class WaitAnswer(Answer):
    """Empty if there was no work in that time."""

    wake_ups: list[WakeUpAnswer]
    operators: list[OperatorAnswer] | None = None
    """What to serve, if the request had a `hello` and other `operators`."""


ClaimId = Annotated[str, Meta(min_length=16, max_length=64, pattern="^[!-~]*$")]


class ClaimAsk(Ask):
    """One task by its number, or the next ones of an operator."""

    task_id: TaskNumber | None = None
    operator: Name | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 1
    job: Name | None = None
    """Only of this job."""
    in_batches: bool = False
    """Whether tasks of jobs that coalesce may come in batches, so more of them than `limit`."""
    claim_id: ClaimId | None = None
    """Chosen by the worker for one claim. The same again, because its answer was lost, has the same
    answer, also at another dispatcher; and what it brings is to be acknowledged."""


class PartAnswer(Answer, omit_defaults=True):
    """Something that is published: see `runtimes.base.Part`."""

    location: str
    partition_key: str | None = None
    start: int | None = None
    end: int | None = None
    revision: int | None = None
    append_key: str | None = None
    manifest: str | None = None
    rows: int | None = None
    bytes: int | None = None


class InputColumnAnswer(Answer, omit_defaults=True):
    """A column of what is published; see `penstock.datasets.schema`."""

    name: str
    type: str
    is_nullable: bool = True


class InputAnswer(Answer):
    """What is published of an input for the partition of a task, if anything is."""

    dataset: str
    uuid: str
    generation: str
    location: str | None = None
    revision: int | None = None
    parts: list[PartAnswer] = []
    has_data: bool = True
    """Whether there can be something to read: not of sources that only tell, and not of ranges."""
    columns: list[InputColumnAnswer] = []
    """Those of its dataset, where nothing has changed that it could be read by."""
    missed: int = 0
    """Partitions with changes that were removed before they were read."""


class Assignment(Answer):
    """A task that was claimed: a new attempt, with its lease."""

    task_id: int
    attempt: int
    lease_token: str
    lease_expires_at: datetime
    heartbeat_seconds: float
    timeout_seconds: float
    job: str
    operator: str
    runtime: str
    generation: str
    definition: dict[str, Any]
    """The job as the DAG has it, and `datasets`: the uuids of what it reads and writes, by name."""
    payload: dict[str, Any]
    inputs: dict[str, InputAnswer] = {}
    current: dict[str, list[PartAnswer]] | None = None
    """What is published of its own partition, by the names of its datasets, if its job merges."""
    columns: dict[str, list[InputColumnAnswer]] = {}
    """The columns that its generation has so far, by the names of its datasets: what does not fit
    them now never will, and need not be computed. None for what has none yet."""
    batch: str = ""
    """Assignments of one claim with the same batch are to be run as one, and take one place."""
    root: str = ""
    """The URL below which the attempt writes, without a slash at its end."""
    folder: str = ""
    """The name of the attempt's own folders: see `penstock.datasets.layout.attempt_name`."""
    token: str = ""
    """The capability token of the attempt; a heartbeat brings the next one."""
    mints: bool = False
    """Whether the dispatcher issues storage credentials for the token."""
    claimed_as: str = ""
    """The name under which it was queued: its operator, and its queue if not the default."""
    runs_alone: bool = False
    """Whether nothing else may run in its process, since a process that it ran in died."""
    acknowledge_seconds: float = 0.0
    """Within how long a heartbeat, or the end, has to say that the claim was answered: until then
    the lease lasts no longer, and the attempt is not counted. 0 if the claim had no id."""
    was_lost: bool = False
    """Whether an attempt of it was taken back uncounted: it may have begun all the same, so this
    one begins only when it is acknowledged."""


class ClaimAnswer(Answer):
    """The claimed tasks; empty if none can be claimed now."""

    tasks: list[Assignment]


class HeldAsk(Ask):
    """The fence of an attempt, and its progress."""

    task_id: TaskNumber
    attempt: AttemptNumber
    lease_token: LeaseToken
    token: Capability | None = None
    """The capability token of the attempt; in a call about one task the header may have it."""
    progress: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatPolicy:
    """How long a worker may be silent, and how often it says in that time that it lives.

    The timeout only decides where a whole machine is gone, or a worker that nobody starts again:
    what was killed elsewhere is given up at once (`penstock.worker.recovery`). So it is as long
    as what a worker has to survive: a dispatcher that hangs answers nothing for 25 s, a Postgres
    that fails over is away for half a minute, a laptop's network for less. Three beats fit into it,
    so that two may be lost in a row; more would cost a statement each and save no attempt.
    """

    timeout_ms: int
    beats: int

    def pause_seconds(self, timeout_seconds: float) -> float:
        """How long a worker waits between two beats of a job with this timeout."""
        return timeout_seconds / self.beats


HEARTBEATS: Final = HeartbeatPolicy(timeout_ms=60_000, beats=3)


class HeartbeatAsk(Ask):
    tasks: Annotated[list[HeldAsk], Meta(min_length=1, max_length=1000)]


class ColumnAsk(Ask):
    """A column of what was made; see `penstock.datasets.schema`."""

    name: Annotated[str, Meta(min_length=1, max_length=1000, pattern=HELD)]
    type: Annotated[str, Meta(min_length=1, max_length=10_000, pattern=HELD)]
    is_nullable: bool = True


class FactsAsk(Ask):
    """What a manifest says: see `runtimes.base.Facts`."""

    manifest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    files: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    rows: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None
    bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    columns: Annotated[list[ColumnAsk], Meta(max_length=10_000)] = []


class OutputAsk(Ask):
    """An output to publish. `dataset` is a uuid."""

    dataset: Uuid
    location: Annotated[str, Meta(min_length=1, max_length=10_000)]
    partition_key: PartitionKey | None = None
    start: Number | None = None
    end: Number | None = None
    cursor: Number | None = None
    append_key: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    facts: FactsAsk | None = None
    base_revision: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    """The revision of its partition that it was merged with, 0 for nothing; none if it was not."""


class FailureAsk(Ask):
    """Why an attempt has failed."""

    reason: Annotated[str, Meta(max_length=100_000)]
    is_retried: bool = True
    runs_alone: bool = False
    """Whether the process that it ran in has died: later attempts run with nothing beside them."""
    is_lost: bool = False
    """Whether its worker was killed while it ran: the next attempt begins at once."""


class ReleaseAsk(Ask):
    """Why an attempt is released: its worker stops, or cannot run the task. Not counted."""

    reason: Annotated[str, Meta(max_length=100_000)]
    is_delayed: bool = False
    """Whether the next attempt waits, longer each time: this worker could not run the task."""
    runs_alone: bool = False
    """As of a failure. Counted if the task was to run alone before: one such death is free."""
    is_lost: bool = False
    """Whether its worker was killed before it began: that is not counted a few times only."""


class EndAsk(Ask):
    """The end of an attempt: outputs if it has succeeded, a failure or a release if it has not."""

    task_id: TaskNumber
    attempt: AttemptNumber
    lease_token: LeaseToken
    token: Capability | None = None
    """As in a heartbeat."""
    outputs: Annotated[list[OutputAsk], Meta(max_length=10_000)] = []
    failure: FailureAsk | None = None
    release: ReleaseAsk | None = None
    log: Annotated[str, Meta(max_length=1000)] | None = None
    """Where the log of the attempt is."""
    metrics: dict[str, Any] | None = None
    """Resource usage of the attempt: figures by name, for display."""


class NextClaim(Ask):
    """What a worker has room for."""

    operator: Name
    limit: Annotated[int, Meta(ge=1, le=1000)]
    is_wanted: bool = False
    """Whether to claim for it whatever the ends of the call have made."""


class CompleteAsk(Ask):
    tasks: Annotated[list[EndAsk], Meta(min_length=1, max_length=1000)]
    next: Annotated[list[NextClaim], Meta(max_length=100)] = []
    """What a worker that says who it is would claim next: of one of these operators the answer has
    tasks: one that the ends of this call have made work of, or else the first that is wanted."""
    claim_id: ClaimId | None = None
    """Of the claim for `next`, as in a claim: a report that is repeated brings the same tasks."""


class TaskStateAnswer(Answer):
    """The current state of a task."""

    task_id: int
    status: str
    attempt: int
    worker: str | None = None
    lease_expires_at: datetime | None = None
    due_at: datetime | None = None
    cancel_asked: bool = False
    reason: str | None = None


class PublishedAnswer(Answer):
    dataset: str
    partition_key: str | None
    outcome: str
    revision: int | None = None
    event_seq: int | None = None


class TaskResult(Answer):
    """The result for one task of a request. `status` is what a request for it alone would get."""

    task_id: int
    status: int
    why: str = ""
    """Why it was refused: a value of `dispatcher.tasks.model.TaskRefusalReason`."""
    detail: str = ""
    state: TaskStateAnswer | None = None
    """The current state of the task, if the request was refused."""
    lease_expires_at: datetime | None = None
    cancel_asked: bool = False
    token: str = ""
    """Of a heartbeat: the next capability token; empty if there is none yet."""
    task_status: str = ""
    """What the task is after its attempt has ended: completed, queued, retrying, dead or
    cancelled."""
    due_at: datetime | None = None
    published: list[PublishedAnswer] = []
    omitted: int = 0
    """How many more outputs there are than `published` names, all of them published unless those
    that are named were not."""
    current: dict[str, list[PartAnswer]] | None = None
    """Of an end that was refused as moved: what to merge with, by the names of the task's datasets;
    none to say the same again after a while."""


class ResultsAnswer(Answer, omit_defaults=True):
    """The answers of a call about several tasks, in its order.

    The status of the call is theirs if they share one, else 207.
    """

    results: list[TaskResult]
    claimed: list[Assignment] = []
    """Tasks that the call has claimed; only where it says what it has room for."""
    claimed_of: str = ""
    """The operator that it has claimed for, if it has for any."""


Folder = Annotated[str, Meta(min_length=1, max_length=2_000, pattern=HELD)]
Folders = Annotated[list[Folder], Meta(max_length=100)]


class CredentialsAsk(Ask):
    """Storage credentials for folders that the token grants, or for folders below those.

    A missing field means everything that the token grants; an empty list means nothing.
    """

    read: Folders | None = None
    write: Folders | None = None


class CredentialsAnswer(Answer):
    """Session credentials that are limited to these folders."""

    access_key: str
    secret_key: str
    session_token: str
    expires_at: datetime
    """They are valid for 15 minutes, even if the attempt ends. Request new ones in time."""
    region: str
    read: list[str]
    write: list[str]
    endpoint: str = ""
    """The address of the store, if it is not AWS's own."""

    def __repr__(self) -> str:
        # Neither a log line nor a traceback is to have the secrets.
        return f"CredentialsAnswer(access_key={self.access_key!r}, expires_at={self.expires_at!r})"
