"""What sources and tasks tell the dispatcher, and what they are told."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta

from penstock.dispatcher.wire.base import (
    HELD,
    Answer,
    Ask,
    AttemptNumber,
    EventId,
    LeaseToken,
    Name,
    Number,
    PartitionKey,
    Payload,
    TaskNumber,
    Uuid,
)


class EventAsk(Ask):
    """A dataset has moved on: by its uuid and version, or by its name for all that are live."""

    event_id: EventId
    """The source's own name for it: the same id again is the same event again."""
    dataset_uuid: Uuid | None = None
    dataset_version: Uuid | None = None
    dataset: Name | None = None
    cursor: Number | None = None
    partition_key: PartitionKey | None = None
    start: Number | None = None
    end: Number | None = None
    payload: Payload | None = None
    """What the jobs that read the dataset are told with it. Of an event that is known already it
    is not looked at."""


class EventsAsk(Ask):
    events: Annotated[list[EventAsk], Meta(min_length=1, max_length=10_000)]


class TaskEventsAsk(Ask):
    """Events of a task about its own outputs; `dataset` names them, and there is no uuid."""

    task_id: TaskNumber
    attempt: AttemptNumber
    lease_token: LeaseToken
    events: Annotated[list[EventAsk], Meta(min_length=1, max_length=1000)]


class EventResult(Answer):
    """What became of an event. `outcome` is new, duplicate, audited, or refused."""

    outcome: str
    seq: int | None = None
    why: str | None = None
    """Why it was audited or refused."""
    paused: str | None = None
    """Why its source should send nothing more for now."""


class EventsAnswer(Answer):
    """In the order of the request; several of one event where a name stands for two generations."""

    results: list[EventResult]


class AuthAnswer(Answer):
    """What requests to a webhook have to show."""

    type: str
    secrets: list[str]
    """Where whoever serves the webhook finds the secret; either of two will do."""
    tolerance_seconds: float = 300.0
    header: str = ""
    """Where the signature is, of the type `hmac`."""


class SourceAnswer(Answer):
    """A source of the DAG in force."""

    job: str
    kind: str
    datasets: dict[str, str]
    """The uuids of its outputs, by name."""
    cron: str | None = None
    time_zone: str = "UTC"
    emits: str = "cursor"
    """Of cron sources: `cursor`, or `interval` for the time since the one before."""
    catch_up: bool = True
    """Of cron sources: whether times that were missed are made up for."""
    path: str | None = None
    auth: AuthAnswer | None = None
    """Of webhooks: null if nobody has to prove anything."""
    last_cursor: int | None = None
    """The highest cursor of its events so far."""
    last_end: int | None = None
    """Of cron sources that emit intervals: the end of the last one."""
    paused: str | None = None


class SourcesAnswer(Answer):
    sources: list[SourceAnswer]
    now: datetime
    is_open: bool = False
    """Whether this installation is one without tokens, as on a laptop: webhooks without `auth` are
    for such alone."""


class RefusalAsk(Ask):
    """Requests to a webhook that it has refused."""

    job: Name
    reason: Name
    address: Annotated[str, Meta(max_length=200, pattern=HELD)] = ""
    times: Annotated[int, Meta(ge=1, le=10**6)] = 1


class RefusalsAsk(Ask):
    refusals: Annotated[list[RefusalAsk], Meta(min_length=1, max_length=1000)]


class RefusalsAnswer(Answer):
    noted: int
