"""Events of sources and tasks and their answers; and what may come with an event as its payload.

A payload is a small JSON object; what is large belongs into a file that the payload names. It
has to come out of the database as it went in, so it has no NUL, which Postgres cannot store,
and no number that Postgres would write out at great length. `payload_fault` is called by
routing for every event, and by the webhook source, which answers its callers itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from math import isfinite
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from penstock.protocol.base import (
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
    """An event of a dataset: of one generation, or, by name, of all that are live."""

    event_id: EventId
    """The source's id of the event: an event with a known id is a duplicate."""
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


BATCH_BYTES_MAX: Final = 256 * 1024
"""How many bytes the rows of a batch may have that are sent inline."""
FILE_BYTES_MAX: Final = 64 * 2**20
"""How many the file of a batch may have."""
ROWS_MAX: Final = 100_000


class BatchFile(Ask):
    """A file in a folder of the attempt's own, which is not changed afterwards."""

    location: Annotated[str, Meta(min_length=1, max_length=2_000, pattern=HELD)]
    format: Literal["jsonl", "arrow", "parquet"]
    bytes: Annotated[int, Meta(ge=1, le=FILE_BYTES_MAX)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class BufferPublishAsk(Ask):
    """A batch of rows for a buffered dataset: as `rows`, as `arrow` or as a `file`."""

    dataset: Name
    batch: Annotated[str, Meta(min_length=1, max_length=400, pattern=HELD)]
    """The publisher's id of the batch: the same again is the same batch."""
    partition_key: Annotated[str, Meta(min_length=1, max_length=500, pattern=HELD)] | None = None
    rows: Annotated[list[msgspec.Raw], Meta(max_length=ROWS_MAX)] | None = None
    """JSON objects, each a row."""
    arrow: bytes | None = None
    """A stream of Arrow IPC, in base64."""
    file: BatchFile | None = None
    made_at: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    """When the rows were made, in milliseconds since 1970: of sources that are always on."""


class BufferPublishAnswer(Answer):
    """The batch is kept: as `held` until the attempt completes, or `released` already."""

    sequence: int
    state: str
    is_new: bool
    """Whether it was not there before."""


class EventResult(Answer):
    """The result for one event. `outcome` is new, duplicate, audited, or refused."""

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
    """How requests to a webhook are authenticated."""

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


PAYLOAD_BYTES_MAX: Final = 64 * 1024
"""As JSON without spaces, in UTF-8, with its numbers in full: 1e20 has 21 digits."""
DEPTH_MAX: Final = 64
DIGITS_MAX: Final = 320
"""How many a number may have: as many as the largest one of a floating-point number, and a few."""


@dataclass(frozen=True, slots=True)
class PayloadProblem:
    """What is wrong with a payload, as a sentence."""

    why: str
    is_too_large: bool = False


def payload_fault(payload: Mapping[str, Any]) -> PayloadProblem | None:
    """Why an event cannot have this payload; None if it can."""
    try:
        size = len(msgspec.json.encode(payload))
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return PayloadProblem("A payload must be valid JSON in UTF-8.")
    if size > PAYLOAD_BYTES_MAX:
        return _too_large(size)
    level: list[Any] = [payload]
    for _ in range(DEPTH_MAX):
        if why := next(filter(None, map(_wrong, level)), ""):
            return PayloadProblem(why)
        size += sum(_longer_by(each) for each in level if isinstance(each, float))
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return _too_large(size) if size > PAYLOAD_BYTES_MAX else None
    return PayloadProblem(f"A payload has {DEPTH_MAX} levels at most.")


def _inside(value: object) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return (*value, *value.values())
    return value if isinstance(value, list | tuple) else ()


def _wrong(value: object) -> str:
    """What is wrong with a value, whatever it holds; empty if nothing is."""
    if isinstance(value, str) and "\0" in value:
        return "A payload must not contain a NUL character, which cannot be stored."
    if isinstance(value, float) and not isfinite(value):
        return "A payload must not contain a number that is not finite: JSON has none."
    if isinstance(value, int) and abs(value) >= 10**DIGITS_MAX:
        return f"A number of a payload has {DIGITS_MAX} digits at most."
    return ""


def _too_large(size: int) -> PayloadProblem:
    return PayloadProblem(
        f"A payload has {PAYLOAD_BYTES_MAX:,} bytes at most as JSON, not {size:,}; what is larger"
        " goes into a file, of which the payload tells.",
        is_too_large=True,
    )


def _longer_by(number: float) -> int:
    """How many more characters a number has in full."""
    short = repr(number)
    return max(0, len(f"{Decimal(short):f}") - len(short))
