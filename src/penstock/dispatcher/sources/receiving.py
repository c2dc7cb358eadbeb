"""A request to a webhook becomes an event, or a problem that says why not.

What `webhook` and `functions` share, without the servers around it. The dispatcher says which paths
there are; that is asked again every few seconds, and at once for a path that is not known, but not
more than once a second. `202` means that the event is kept. The body may be empty or JSON:

    {"event_id": "…", "partition_key": "2030-01-01", "start": 0, "end": 10}

`event_id`, or the header `Idempotency-Key`, makes a repeated request the same event; without one
each request is an event. Without a cursor and a partition the cursor is the dispatcher's time in
milliseconds. A source that is paused is told so, with `Retry-After`; its event is kept all the
same. Nothing is kept here: a crash loses requests that were not answered.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

import msgspec

from penstock.dispatcher.sources.client import SourceClient, why_paused, why_refused
from penstock.dispatcher.sources.schedule import milliseconds
from penstock.dispatcher.wire.base import Answer, Ask, EventId, Number, PartitionKey
from penstock.dispatcher.wire.events import EventAsk, EventResult, EventsAsk, SourceAnswer
from penstock.dispatcher.wire.problem import Problem
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import DispatcherError

BODY_BYTES_MAX: Final = 64 * 1024
PAUSED_SECONDS: Final = 30
UNAVAILABLE_SECONDS: Final = 5
_FRESH_SECONDS: Final = 5.0
_ASK_AGAIN_SECONDS: Final = 1.0
_EVENT_ID_MAX: Final = 900


class WebhookAsk(Ask):
    """The body of a request."""

    event_id: EventId | None = None
    cursor: Number | None = None
    partition_key: PartitionKey | None = None
    start: Number | None = None
    end: Number | None = None


class WebhookAnswer(Answer):
    """An event that is kept."""

    event_id: str
    results: list[EventResult]
    paused: str | None = None
    """Why nothing more should be sent for now."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a server has been asked. The names of headers are in small letters."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """What it answers."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Known:
    """The webhook sources by path, as they were told at a moment."""

    sources: Mapping[str, SourceAnswer]
    now: datetime
    heard_at: float


class Receiver:
    """Turns requests into events. With a token, callers have to show it."""

    def __init__(
        self, client: SourceClient, *, clock: Clock, entropy: Entropy, token: str | None = None
    ) -> None:
        self._client = client
        self._clock = clock
        self._entropy = entropy
        self._token = token
        self._known: _Known | None = None

    async def receive(self, request: Request) -> Reply:
        """Answer a request."""
        if self._token is not None and not _is_shown(self._token, request):
            return problem(
                401,
                "unidentified",
                "This webhook needs a token.",
                detail="Send it as `Authorization: Bearer …`.",
                headers={"www-authenticate": "Bearer"},
            )
        try:
            source = await self._source(request.path)
            if source is None:
                return problem(404, "unknown", "No webhook source of the DAG has this path.")
            if request.method != "POST":
                headers = {"allow": "POST"}
                return problem(405, "method", "A webhook takes POST.", headers=headers)
            return await self._accept(source, request)
        except DispatcherError as error:
            return problem(
                503,
                "unavailable",
                "The dispatcher does not take events now.",
                detail=error.message,
                headers={"retry-after": str(UNAVAILABLE_SECONDS)},
            )

    async def _source(self, path: str) -> SourceAnswer | None:
        known = await self._fresh(_FRESH_SECONDS)
        if path not in known.sources:
            known = await self._fresh(_ASK_AGAIN_SECONDS)
        return known.sources.get(path)

    async def _fresh(self, seconds: float) -> _Known:
        """What is known of sources, not older than this."""
        known = self._known
        if known is None or self._clock.monotonic() - known.heard_at > seconds:
            answer = await self._client.sources()
            sources = {
                each.path: each
                for each in answer.sources
                if each.kind == "webhook" and each.path is not None
            }
            known = self._known = _Known(sources, answer.now, self._clock.monotonic())
        return known

    async def _accept(self, source: SourceAnswer, request: Request) -> Reply:
        asked = _read(request)
        if isinstance(asked, Reply):
            return asked
        event_id = asked.event_id or new_id(self._entropy)
        cursor = asked.cursor
        if cursor is None and asked.partition_key is None:
            cursor = await self._now_ms()
        events = [
            EventAsk(
                event_id=event_id,
                dataset=dataset,
                cursor=cursor,
                partition_key=asked.partition_key,
                start=asked.start,
                end=asked.end,
            )
            for dataset in sorted(source.datasets)
        ]
        answer = await self._client.events(EventsAsk(events=events))
        if why := why_refused(answer.results):
            return problem(422, "malformed", "The dispatcher has refused the event.", detail=why)
        paused = why_paused(answer.results) or None
        told = WebhookAnswer(event_id=event_id, results=answer.results, paused=paused)
        headers = {"content-type": "application/json"}
        if paused is not None:
            headers["retry-after"] = str(PAUSED_SECONDS)
        return Reply(202, msgspec.json.encode(told), headers)

    async def _now_ms(self) -> int:
        known = await self._fresh(_FRESH_SECONDS)
        passed = timedelta(seconds=self._clock.monotonic() - known.heard_at)
        return milliseconds(known.now + passed)


def problem(
    status: int,
    kind: str,
    title: str,
    *,
    detail: str = "",
    at: str = "",
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """An answer that is not a success. `at` is the field of the request that is wrong."""
    body = Problem(type=kind, title=title, status=status, detail=detail, field=at)
    told = {"content-type": "application/problem+json", **(headers or {})}
    return Reply(status, msgspec.json.encode(body), told)


def too_large() -> Reply:
    return problem(413, "too large", f"A body has {BODY_BYTES_MAX} bytes at most.")


def _is_shown(token: str, request: Request) -> bool:
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    is_equal = hmac.compare_digest(shown.strip().encode("utf-8", "replace"), token.encode())
    return scheme.lower() == "bearer" and is_equal


def _read(request: Request) -> WebhookAsk | Reply:
    if len(request.body) > BODY_BYTES_MAX:
        return too_large()
    try:
        asked = msgspec.json.decode(request.body.strip() or b"{}", type=WebhookAsk)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        return problem(
            422, "malformed", f"The body is wrong: {message}.", at=path.rstrip("`").lstrip(".")
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return problem(400, "not JSON", "The body is not JSON.", detail="Send JSON, or nothing.")
    key = request.headers.get("idempotency-key", "").strip()
    if len(key) > _EVENT_ID_MAX:
        return problem(422, "malformed", "Idempotency-Key is too long.", at="Idempotency-Key")
    if key and asked.event_id not in (None, key):
        return problem(
            422,
            "malformed",
            "The body and Idempotency-Key give the event different ids.",
            detail="Leave one of them out.",
            at="event_id",
        )
    return msgspec.structs.replace(asked, event_id=key) if key else asked
