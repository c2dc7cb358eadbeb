"""What people see and control: tasks, backfills, pressure, pauses, datasets, the outbox, alerts."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final

from msgspec import Meta

from penstock.protocol.base import (
    Answer,
    Ask,
    EventId,
    Name,
    Number,
    Page,
    PartitionKey,
    Payload,
    TaskNumber,
)
from penstock.protocol.datasets import HotTableAnswer
from penstock.protocol.events import EventResult
from penstock.protocol.work import PublishedAnswer

TRIGGERS_MAX: Final = 1000
"""How many events one request may have."""


class TriggerEvent(Ask):
    """News of a source."""

    event_id: EventId | None = None
    """None makes one: the answer has it."""
    cursor: Number | None = None
    """None, without a partition, is the database's time in milliseconds."""
    partition_key: PartitionKey | None = None
    start: Number | None = None
    end: Number | None = None
    payload: Payload | None = None
    """What the jobs that read it are told with it."""


class TriggerAsk(TriggerEvent):
    """News for a source, by the name of its job or of one of its datasets."""

    job: Name | None = None
    dataset: Name | None = None


class TriggerAnswer(Answer):
    event_id: str
    results: list[EventResult]


class TriggersAsk(Ask):
    """Much news for one source: all of it is taken, or nothing."""

    events: Annotated[list[TriggerEvent], Meta(min_length=1, max_length=TRIGGERS_MAX)]
    job: Name | None = None
    dataset: Name | None = None


class TriggersAnswer(Answer):
    """In the order of the request."""

    events: list[TriggerAnswer]


class BackfillAsk(Ask):
    """Partitions of a job to compute: a list of keys, or the ranges from start to end by step."""

    job: Name
    keys: Annotated[list[PartitionKey], Meta(max_length=100_000)] = []
    start: Number | None = None
    end: Number | None = None
    step: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    concurrency: Annotated[int, Meta(ge=1, le=100_000)] = 100
    """How many of its tasks wait or run at a time."""
    request_id: EventId | None = None
    """The same id again is the same backfill."""


class BackfillAnswer(Answer):
    id: int
    job: str
    kind: str
    """`ranges`, `keys`, or `rebuild`, which a new generation gets by itself."""
    state: str
    partitions: int
    planned: int
    """How many have become tasks."""
    open: int
    """How many of those have not ended."""
    dead: int
    concurrency: int
    created_at: datetime
    cancelled: int = 0
    """How many of those that have ended were cancelled, and not computed."""


class BackfillsAnswer(Answer):
    backfills: list[BackfillAnswer]


class JobAnswer(Answer):
    """A job of the DAG in force, and how it is doing."""

    name: str
    activation: str
    runtime: str
    operator: str
    priority: str
    generation: str
    is_building: bool
    outputs: list[str]
    queued: int
    """Waiting tasks, counted to 10,000 at most."""
    running: int
    dead: int
    oldest_seconds: float
    """How long the oldest task that could run has waited."""
    paused: list[str]
    """Why it is paused; empty if it is not."""
    handed_back: str = ""
    """Why workers released its tasks, of one that waits; empty if none was released."""
    is_unserved: bool = False
    """Whether no worker that takes its tasks was heard of within a minute."""


class StatusAnswer(Answer):
    """The state of everything, on one page."""

    dag_version: int | None
    now: datetime
    jobs: list[JobAnswer]
    events_pending: int
    outbox_pending: int
    outbox_parked: int
    workers: int
    """Workers that were heard of in the last 90 seconds."""
    backfills: list[BackfillAnswer]
    tables: list[HotTableAnswer] = []
    """Those in Postgres that do not have what is published."""


class TaskSummary(Answer):
    id: int
    job: str
    operator: str
    generation: str
    status: str
    priority: str
    attempt: int
    attempt_limit: int
    partition_key: str | None
    worker: str | None
    reason: str | None
    created_at: datetime
    due_at: datetime
    settled_at: datetime | None
    releases: int = 0
    """How many of its attempts were released, which do not count against `max_attempts`."""
    runs_alone: bool = False
    """Whether its attempts run with nothing beside them, since a process died that it ran in."""

    @property
    def attempts(self) -> str:
        """Which attempt it is, of how many, for people."""
        uncounted = f", {self.releases} not counted" if self.releases else ""
        alone = ", runs alone" if self.runs_alone else ""
        return f"{self.attempt} of {self.attempt_limit}{uncounted}{alone}"


class TasksAnswer(Answer):
    tasks: list[TaskSummary]
    before: int | None
    """Ask with this `before` for the next page; None if there is none."""


class AttemptAnswer(Answer):
    number: int
    worker: str
    started_at: datetime
    ended_at: datetime | None
    outcome: str | None
    reason: str | None
    progress: dict[str, Any] | None
    log: str | None
    metrics: dict[str, Any] | None = None
    """What it took, if it has ended and said so: figures by name."""


class ConsumedAnswer(Answer):
    """What an attempt was given of what had changed in an input."""

    input: str
    attempt: int
    partitions: int
    parts: int
    missed: int
    """Partitions that were removed before their changes were read."""
    is_consumed: bool
    """Whether it counts: the attempt has completed, and what it made was published."""
    keys: list[str]
    """The first of the partitions; an empty text is a dataset without partitions."""


class TaskAnswer(Answer):
    """Everything about one task. Its lease token is nobody's but its worker's."""

    task: TaskSummary
    payload: dict[str, Any]
    attempts: list[AttemptAnswer]
    published: list[PublishedAnswer]
    omitted: int = 0
    """How many more outputs it has; what was not published is named first."""
    consumed: list[ConsumedAnswer] = []
    """What its latest attempt was given of the inputs that it reads by their changes."""


class TaskIdsAsk(Ask):
    tasks: Annotated[list[TaskNumber], Meta(min_length=1, max_length=1000)]
    reason: Annotated[str, Meta(min_length=1, max_length=1000)] = "It was cancelled."
    """For cancelling."""


class PauseAsk(Ask):
    reason: Annotated[str, Meta(min_length=1, max_length=1000)] = "Paused by an operator."


class JobPausesAnswer(Answer):
    """A job after somebody has paused or resumed it; others may have paused it as well."""

    job: str
    pauses: list[PauseAnswer]


class EverythingAnswer(Answer):
    """What pausing or resuming everything has done."""

    jobs: list[str]
    """The jobs that were paused or resumed by it."""
    paused_by_people: int
    """How many jobs are paused by people now."""
    paused_by_pressure: int


class PressureAnswer(Answer):
    """A job with limits on its queue, and what it makes of its upstream."""

    job: str
    pressed: bool
    depth: int
    oldest_seconds: float
    max_queue_depth: int | None
    max_queue_age_seconds: float | None
    reason: str | None
    since: datetime
    pauses: list[str]
    """The jobs that are paused because of it."""
    held: int = 0
    """Events that wait for room in its queue, or in another that reads the same; at most 10,000."""


class PauseAnswer(Answer):
    job: str
    cause: str
    scope: str
    reason: str
    since: datetime


class PressuresAnswer(Answer):
    jobs: list[PressureAnswer]
    pauses: list[PauseAnswer]


class GenerationAnswer(Answer):
    version: str
    state: str
    partitions: int
    created_at: datetime


class DatasetAnswer(Answer):
    name: str
    uuid: str
    job: str | None
    generations: list[GenerationAnswer]


class DatasetsAnswer(Answer):
    datasets: list[DatasetAnswer]


class PartitionAnswer(Answer):
    partition_key: str
    start: int | None
    end: int | None
    location: str
    task_id: int
    attempt: int
    revision: int
    published_at: datetime
    files: int | None = None
    rows: int | None = None
    bytes: int | None = None
    """What manifests say, together, of all that was appended; null where one does not."""


class PartitionsAnswer(Answer):
    generation: str
    partitions: list[PartitionAnswer]
    after: str | None
    """Ask with this `after` for the next page; None if there is none."""


class OutboxRow(Answer):
    id: int
    kind: str
    target: str
    tries: int
    last_error: str | None
    created_at: datetime
    parked_at: datetime | None


class OutboxAnswer(Answer):
    """Parked outbox entries, oldest first, at most a thousand."""

    parked: list[OutboxRow]


class OutboxRetryAsk(Ask):
    """Parked entries to retry at once."""

    ids: Annotated[list[TaskNumber], Meta(min_length=1, max_length=1000)]


class OutboxRetryAnswer(Answer):
    retried: int
    """How many of them were parked."""


class OperatorLimitAnswer(Answer):
    name: str
    in_flight_max: int | None


class OperatorLimitAsk(Ask):
    in_flight_max: Annotated[int, Meta(ge=1, le=1_000_000)] | None


class OperatorLoad(Answer):
    """The load of an operator, for autoscalers."""

    name: str
    in_flight: int
    in_flight_max: int | None
    waiting: int
    """Tasks that could run now, counted to 10,000 at most."""
    desired: int
    """How many tasks should run at once: what runs and waits, as far as the limits allow."""


class OperatorsAnswer(Answer):
    operators: list[OperatorLoad]
    queues: dict[str, int] = {}
    """How many tasks of each queue should run at once, over all of its operators."""


class AlertState(StrEnum):
    OPEN = "open"
    OVER = "over"


class NoticeState(StrEnum):
    """The delivery state of a notification."""

    DUE = "due"
    """It is being sent, or will be retried."""
    SENT = "sent"
    GIVEN_UP = "given up"
    """It failed for a day, and is no longer retried."""


class AlertsParams(Ask):
    state: AlertState | None = None
    """None is both."""
    limit: Page = 100
    before: TaskNumber | None = None
    """Only alerts with a lower number."""


class NoticeAnswer(Answer):
    """A notification about an alert, for one destination."""

    id: str
    """What a receiver knows it by."""
    what: str
    """`opened` or `over`."""
    destination: str
    state: NoticeState
    tries: int
    last_error: str | None
    created_at: datetime
    due_at: datetime | None
    """When it is tried next; null if it is not."""
    sent_at: datetime | None
    given_up_at: datetime | None


class AlertAnswer(Answer):
    """A condition that needs attention."""

    id: int
    rule: str
    kind: str
    subject: str
    """The job or the dataset that it is about."""
    state: AlertState
    summary: str
    path: str
    """Where the console shows what it is about."""
    detail: dict[str, Any]
    opened_at: datetime
    clear_since: datetime | None
    """Of one that is open: since when it is not so any more. When that has lasted, it is over."""
    over_at: datetime | None
    over_why: str | None
    notices: list[NoticeAnswer]


class RuleAnswer(Answer):
    name: str
    words: str
    """What it is about, as a sentence."""


class AlertsAnswer(Answer):
    """Alerts, newest first, and the rules."""

    alerts: list[AlertAnswer]
    before: int | None
    """Ask with this `before` for the next page; null if there is none."""
    rules: list[RuleAnswer]
    destinations: list[str]
    """Where notices are sent: `webhook`, `mail`."""
    judged_at: datetime | None
    """When the rules were last looked at; null if nobody has yet."""
