"""The cron and webhook sources as functions of AWS Lambda.

A function's module says which dispatcher it talks to, and Lambda calls the result:

    handler = cron_handler(connect)      # a rule of EventBridge, by the minute or as the job
    handler = webhook_handler(connect)   # API Gateway (both formats) or a function URL

`connect` gives the client of a dispatcher as an asynchronous context manager. Both keep nothing
between calls: EventBridge and gateways may call twice, and the ids of events make them one. An
event of EventBridge may name one `job`; without one all cron sources are looked at. What the
dispatcher does not take is raised, so that Lambda calls again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from penstock.dispatcher.sources.client import SourceClient, WebhookClient, why_refused
from penstock.dispatcher.sources.cron import cron_of, due_times, events_at, left_off, most_of
from penstock.dispatcher.sources.webhook import FindSecret, WebhookReceiver
from penstock.dispatcher.sources.webhook_request import WebhookReply, WebhookRequest, problem
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, system_entropy
from penstock.kernel.errors import DispatcherError, InvalidInput
from penstock.protocol.events import EventsAsk, SourceAnswer

Connect = Callable[[], AbstractAsyncContextManager[SourceClient]]
ConnectWebhook = Callable[[], AbstractAsyncContextManager[WebhookClient]]
Event = Mapping[str, Any]
Handler = Callable[[Event, object], dict[str, Any]]

RULE_LATENESS: Final = timedelta(minutes=1)
"""How long after the time of a rule EventBridge calls."""
_YEAR_MIN: Final = 1971


def cron_handler(connect: Connect) -> Handler:
    """A function that EventBridge calls."""

    def handler(event: Event, _context: object) -> dict[str, Any]:
        return asyncio.run(_emit(connect, event))

    return handler


def webhook_handler(
    connect: ConnectWebhook,
    *,
    secret: FindSecret,
    clock: Clock | None = None,
    entropy: Entropy | None = None,
) -> Handler:
    """A function behind API Gateway or a function URL; `secret` finds those of its sources."""

    async def receive(event: Event) -> WebhookReply:
        async with connect() as client:
            receiver = WebhookReceiver(
                client,
                clock=clock or SystemClock(),
                entropy=entropy or system_entropy(),
                secret=secret,
                is_loopback=False,
            )
            request = _request(event)
            if isinstance(request, WebhookReply):
                return request
            reply = await receiver.receive(request)
            with suppress(DispatcherError):
                await receiver.note()
            return reply

    def handler(event: Event, _context: object) -> dict[str, Any]:
        reply = asyncio.run(receive(event))
        return {
            "statusCode": reply.status,
            "headers": dict(reply.headers),
            "body": reply.body.decode(),
            "isBase64Encoded": False,
        }

    return handler


async def _emit(connect: Connect, event: Event) -> dict[str, Any]:
    until = _time(event)
    job = event.get("job")
    sent: dict[str, int] = {}
    async with connect() as client:
        answer = await client.sources()
        sources = [each for each in answer.sources if each.kind == "cron"]
        if job is not None:
            sources = [each for each in sources if each.job == job]
            if not sources:
                raise InvalidInput(f"The DAG has no cron source {job!r}.")
        for source in sources:
            if not source.paused:
                sent[source.job] = await _send(client, source, min(until, answer.now))
    return {"sent": sent}


async def _send(client: SourceClient, source: SourceAnswer, until: datetime) -> int:
    """Emit what is due of a source; how many times that were."""
    after = until - RULE_LATENESS
    if (last := left_off(source, latest=until)) is not None:
        after = min(after, last)
    due = due_times(
        cron_of(source),
        after=after,
        until=until,
        time_zone=source.time_zone,
        most=most_of(source),
    )
    if events := events_at(source, due.times):
        answer = await client.events(EventsAsk(events=events))
        if why := why_refused(answer.results):
            raise InvalidInput(f"Events of {source.job} were refused: {why}")
    return len(due.times)


def _time(event: Event) -> datetime:
    said = event.get("time")
    try:
        time = datetime.fromisoformat(said) if isinstance(said, str) else None
    except ValueError:
        time = None
    if time is None or time.year < _YEAR_MIN:
        raise InvalidInput(
            "The event has no `time`.", hint="Call this function by a rule of EventBridge."
        )
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _request(event: Event) -> WebhookRequest | WebhookReply:
    """What API Gateway or a function URL was asked."""
    context = event.get("requestContext") or {}
    http = context.get("http") or {}
    path = str(event.get("rawPath") or event.get("path") or "/")
    stage = context.get("stage")
    # The second format has the stage in the path, the first has not.
    if "rawPath" in event and stage and stage != "$default":
        path = path.removeprefix(f"/{stage}") or "/"
    headers = {str(name).lower(): str(text) for name, text in (event.get("headers") or {}).items()}
    try:
        body = _body(event)
    except (ValueError, binascii.Error):
        return problem(400, "not JSON", "The body is not what its encoding says.")
    method = str(http.get("method") or event.get("httpMethod") or "GET")
    address = http.get("sourceIp") or (context.get("identity") or {}).get("sourceIp") or ""
    return WebhookRequest(method, path, headers, body, _query(event), str(address))


def _query(event: Event) -> str:
    """The query as it stood in the address; the first format has taken it apart."""
    if "rawQueryString" in event:
        return str(event["rawQueryString"] or "")
    several = event.get("multiValueQueryStringParameters") or {}
    single = event.get("queryStringParameters") or {}
    return urlencode(several or single, doseq=True)


def _body(event: Event) -> bytes:
    body = event.get("body") or ""
    if event.get("isBase64Encoded"):
        return base64.b64decode(body, validate=True)
    return str(body).encode()
