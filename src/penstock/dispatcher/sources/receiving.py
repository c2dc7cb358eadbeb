"""A request to a webhook becomes an event, or a problem that says why not.

What `webhook` and `functions` share, without the servers around it. The dispatcher says which paths
there are; that is asked again every few seconds, and at once for a path that is not known, but not
more than once a second. `202` means that the event is kept. `reading` says what a request may say:

    POST /orders?partition_key=2030-01-01
    Idempotency-Key: order-7

    {"id": 7, "amount": 12.5}

The id makes a repeated request the same event; without one each request is an event, and the answer
tells the id that was made. Without a cursor and a partition the cursor is the dispatcher's time in
milliseconds. A source that is paused is told so, with `Retry-After`; its event is kept all the
same. Nothing is kept here: a crash loses requests that were not answered.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import msgspec

from penstock.dispatcher.sources.client import SourceClient, why_paused, why_refused
from penstock.dispatcher.sources.reading import (
    Reply,
    Request,
    parameters_of,
    payload_of,
    problem,
)
from penstock.dispatcher.sources.schedule import milliseconds
from penstock.dispatcher.wire.base import Answer
from penstock.dispatcher.wire.events import EventAsk, EventResult, EventsAsk, SourceAnswer
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import DispatcherError

PAUSED_SECONDS: Final = 30
UNAVAILABLE_SECONDS: Final = 5
_FRESH_SECONDS: Final = 5.0
_ASK_AGAIN_SECONDS: Final = 1.0


class WebhookAnswer(Answer):
    """An event that is kept."""

    event_id: str
    is_id_made: bool
    """Whether the request had none, so that the same request again would be another event."""
    results: list[EventResult]
    paused: str | None = None
    """Why nothing more should be sent for now."""


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
        asked, payload = parameters_of(request), payload_of(request)
        if isinstance(asked, Reply):
            return asked
        if isinstance(payload, Reply):
            return payload
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
                payload=payload,
            )
            for dataset in sorted(source.datasets)
        ]
        answer = await self._client.events(EventsAsk(events=events))
        if why := why_refused(answer.results):
            return problem(422, "malformed", "The dispatcher has refused the event.", detail=why)
        paused = why_paused(answer.results) or None
        told = WebhookAnswer(
            event_id=event_id,
            is_id_made=asked.event_id is None,
            results=answer.results,
            paused=paused,
        )
        headers = {"content-type": "application/json"}
        if paused is not None:
            headers["retry-after"] = str(PAUSED_SECONDS)
        return Reply(202, msgspec.json.encode(told), headers)

    async def _now_ms(self) -> int:
        known = await self._fresh(_FRESH_SECONDS)
        passed = timedelta(seconds=self._clock.monotonic() - known.heard_at)
        return milliseconds(known.now + passed)


def _is_shown(token: str, request: Request) -> bool:
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    is_equal = hmac.compare_digest(shown.strip().encode("utf-8", "replace"), token.encode())
    return scheme.lower() == "bearer" and is_equal
