"""The webhook source: a small server that turns requests into events.

`POST` to the path of a webhook source is an event of it; `GET /healthz` says that the process
is there. The dispatcher says which paths there are; that is asked again every few seconds, and
for an unknown path at once, but not more than once a second. `202` means that the event is
kept:

    POST /orders?partition_key=2030-01-01
    Idempotency-Key: order-7

    {"id": 7, "amount": 12.5}

The id makes a repeated request the same event; without one each request is an event. Without a
cursor and a partition the cursor is the dispatcher's time in milliseconds. A paused source
answers with `Retry-After`, and keeps its event. A crash loses requests that were not answered.

A source with `auth` takes what is proved (`webhook_request.prove`). One without is for a
laptop: it is served on loopback, without tokens, to no page of another site. All else is
refused with 401 or 403 without details and noted in the audit: counted in a bounded memory and
sent by `note`, which a loop calls. Callers without a secret can make this process ask for
nothing more often: sources and secrets are asked for by one request at a time and shared. A
request has a place, and its connection is kept over others, once it is proved (`judge`, then
`accept`).

Any number may run behind a load balancer. The process faces the internet: it has the token of
webhooks (`protocol.identity`) and the secrets of its sources, and neither the API's token nor
the secret of workers. `WebhookReceiver` is shared with `aws_lambda`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Generic, TypeVar

import msgspec

from penstock.dispatcher.api.requests import (
    Message,
    Receive,
    RequestAdmission,
    RequestLimits,
    be_known,
    is_of_another_site,
    is_of_this_machine,
)
from penstock.dispatcher.sources.client import WebhookClient, why_paused, why_refused
from penstock.dispatcher.sources.cron import milliseconds
from penstock.dispatcher.sources.webhook_request import (
    BODY_BYTES_MAX,
    WebhookParams,
    WebhookProof,
    WebhookReply,
    WebhookRequest,
    challenge_of,
    parameters_of,
    payload_of,
    problem,
    prove,
    signed_id,
)
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    DispatcherError,
    DispatcherUnavailable,
    InvalidInput,
    SecretUnavailable,
)
from penstock.protocol.base import Answer
from penstock.protocol.events import (
    AuthAnswer,
    EventAsk,
    EventResult,
    EventsAsk,
    RefusalAsk,
    RefusalsAsk,
    SourceAnswer,
    SourcesAnswer,
)
from penstock.protocol.problem import Problem

_log = logging.getLogger(__name__)

Found = TypeVar("Found")
FindSecret = Callable[[str], Awaitable[str]]
"""The secret that is at a place; `SecretUnavailable` if it cannot be had."""

PAUSED_SECONDS: Final = 30
UNAVAILABLE_SECONDS: Final = 5
_FRESH_SECONDS: Final = 5.0
_ASK_AGAIN_SECONDS: Final = 1.0
SECRET_CHARACTERS_MIN: Final = 16
_SECRETS_MAX: Final = 1000
REFUSALS_MAX: Final = 1000
"""How many different refusals wait to be noted; of more, only the reason is."""
_FORBIDDEN: Final = "Without `auth` this webhook answers to programs of this machine alone."


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
    received_at: float
    is_open: bool


@dataclass(frozen=True, slots=True)
class AuthenticatedRequest:
    """A request that its source takes."""

    source: SourceAnswer
    request: WebhookRequest
    proof: WebhookProof


class _Asked(Generic[Found]):
    """Something that one request asks for; those that want it meanwhile share what comes of it."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, Found]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[Found] | None = None

    async def answer(self) -> Found:
        if self._asking is None:
            # Not in a group: it is everybody's who waits, and outlives the one who began it.
            self._asking = asyncio.get_running_loop().create_task(self._ask())
            self._asking.add_done_callback(self._ended)
        return await asyncio.shield(self._asking)

    def _ended(self, ended: asyncio.Task[Found]) -> None:
        self._asking = None
        if not ended.cancelled():
            # Seen, also if nobody waits any more.
            ended.exception()


@dataclass(slots=True)
class _Secrets:
    """What the places of a source had, at a moment."""

    asked: _Asked[Sequence[str]]
    found: Sequence[str] = field(default=(), repr=False)
    at: float | None = None


class WebhookReceiver:
    """Turns requests into events.

    `secret` finds what sources name. `is_loopback` says that only this machine can call.
    """

    def __init__(
        self,
        client: WebhookClient,
        *,
        clock: Clock,
        entropy: Entropy,
        secret: FindSecret,
        is_loopback: bool,
    ) -> None:
        self._client = client
        self._clock = clock
        self._entropy = entropy
        self._secret = secret
        self._is_loopback = is_loopback
        self._known: _Known | None = None
        self._sources = _Asked(self._ask)
        self._secrets: dict[tuple[str, ...], _Secrets] = {}
        self._refused: Counter[tuple[str, str, str]] = Counter()

    async def receive(self, request: WebhookRequest) -> WebhookReply:
        """Answer a request."""
        judged = await self.judge(request)
        return judged if isinstance(judged, WebhookReply) else await self.accept(judged)

    async def judge(self, request: WebhookRequest) -> AuthenticatedRequest | WebhookReply:
        """Whether a request may be an event; else what it is answered."""
        try:
            source = await self._source(request.path)
            if source is None:
                return problem(404, "unknown", "No webhook source of the DAG has this path.")
            if request.method != "POST":
                headers = {"allow": "POST"}
                return problem(405, "method", "A webhook takes POST.", headers=headers)
            if source.auth is None:
                if why := self._why_closed(request):
                    return self._forbidden(source, request, why)
                return AuthenticatedRequest(source, request, WebhookProof())
            return await self._proved(source, source.auth, request)
        except DispatcherError as error:
            return _unavailable(error)

    async def accept(self, judged: AuthenticatedRequest) -> WebhookReply:
        """Send the event of a request, and answer it."""
        try:
            return await self._accept(judged.source, judged.request, judged.proof)
        except DispatcherError as error:
            return _unavailable(error)

    async def note(self) -> float | None:
        """Have it noted whom we have refused. What cannot be noted now is, the next time."""
        waiting, self._refused = self._refused, Counter()
        try:
            while waiting:
                some = dict(itertools.islice(waiting.items(), REFUSALS_MAX))
                asked = [
                    RefusalAsk(job=job, reason=reason, address=address, times=min(times, 10**6))
                    for (job, reason, address), times in some.items()
                ]
                await self._client.webhook_refusals(RefusalsAsk(refusals=asked))
                for each in some:
                    del waiting[each]
        except DispatcherUnavailable:
            newer, self._refused = self._refused, waiting
            for same, times in newer.items():
                self._add(same, times)
            raise
        return None

    async def _proved(
        self, source: SourceAnswer, auth: AuthAnswer, request: WebhookRequest
    ) -> AuthenticatedRequest | WebhookReply:
        secrets = await self._found(source.job, auth)
        if not secrets:
            self._count(source, request, "no secret")
            return problem(
                503,
                "unavailable",
                "This webhook cannot verify requests now; its log says why.",
                headers={"retry-after": str(UNAVAILABLE_SECONDS)},
            )
        proof = prove(auth, request, secrets, now=await self._now_ms() / 1000)
        if not proof.why_not:
            return AuthenticatedRequest(source, request, proof)
        self._count(source, request, proof.why_not)
        return problem(
            401,
            "unidentified",
            "This webhook needs its secret, or a signature with it.",
            detail="The documentation of webhooks says what each type of `auth` takes.",
            headers={"www-authenticate": "Bearer"} if auth.type == "bearer" else None,
        )

    async def _found(self, job: str, auth: AuthAnswer) -> Sequence[str]:
        """The secrets of a source that can be had, as of some seconds ago."""
        places = tuple(auth.secrets)
        if places not in self._secrets:
            if len(self._secrets) >= _SECRETS_MAX:
                self._secrets.clear()
            asked = _Asked(lambda: self._find_secrets(job, places))
            self._secrets[places] = _Secrets(asked)
        held = self._secrets[places]
        if held.at is None or self._clock.monotonic() - held.at > _FRESH_SECONDS:
            held.found = await held.asked.answer()
            held.at = self._clock.monotonic()
        return held.found

    async def _find_secrets(self, job: str, places: Sequence[str]) -> Sequence[str]:
        """The same, as of now; why one cannot be had is in the log."""
        found: list[str] = []
        for place in places:
            try:
                secret = await self._secret(place)
            except SecretUnavailable as error:
                _log.error(
                    "cannot read the secret of webhook %s (%s): %s", job, place, error.message
                )
                continue
            if len(secret) < SECRET_CHARACTERS_MIN:
                told = "the secret of webhook %s (%s) has fewer than %d characters"
                _log.error(told, job, place, SECRET_CHARACTERS_MIN)
                continue
            found.append(secret)
        return found

    def _why_closed(self, request: WebhookRequest) -> str:
        """Why a source without `auth` does not take this request; empty if it does."""
        headers = [(name.encode(), text.encode()) for name, text in request.headers.items()]
        if not self._is_loopback:
            return "no auth"
        if self._known is None or not self._known.is_open:
            return "no auth, and the API has a token"
        site = request.headers.get("sec-fetch-site", "none").strip().lower()
        # A page of another site can send a form, and as one of this site if its name leads here.
        if is_of_another_site(headers) or site not in ("none", "same-origin"):
            return "another site"
        return "" if is_of_this_machine(headers) else "another name"

    def _forbidden(self, source: SourceAnswer, request: WebhookRequest, why: str) -> WebhookReply:
        self._count(source, request, why)
        detail = "Give the source an `auth` in the DAG, with a secret that whoever calls has."
        return problem(403, "forbidden", _FORBIDDEN, detail=detail)

    def _count(self, source: SourceAnswer, request: WebhookRequest, reason: str) -> None:
        self._add((source.job, reason, request.address), 1)

    def _add(self, same: tuple[str, str, str], times: int) -> None:
        if same not in self._refused and len(self._refused) >= REFUSALS_MAX:
            same = (*same[:2], "")
        self._refused[same] += times

    async def _source(self, path: str) -> SourceAnswer | None:
        known = await self._fresh(_FRESH_SECONDS)
        if path not in known.sources:
            known = await self._fresh(_ASK_AGAIN_SECONDS)
        return known.sources.get(path)

    async def _fresh(self, seconds: float) -> _Known:
        """What is known of sources, not older than this."""
        known = self._known
        if known is None or self._clock.monotonic() - known.received_at > seconds:
            known = await self._sources.answer()
        return known

    async def _ask(self) -> _Known:
        answer = await self._client.sources()
        sources = {
            each.path: each
            for each in answer.sources
            if each.kind == "webhook" and each.path is not None
        }
        received_at = self._clock.monotonic()
        self._known = _Known(sources, answer.now, received_at, answer.is_open)
        return self._known

    async def _accept(
        self, source: SourceAnswer, request: WebhookRequest, proof: WebhookProof
    ) -> WebhookReply:
        asked = parameters_of(request, is_id_signed=bool(proof.digest))
        payload = payload_of(request)
        if isinstance(asked, WebhookReply):
            return asked
        if isinstance(payload, WebhookReply):
            return payload
        known_id = asked.event_id
        if source.auth is not None:
            if (challenge := challenge_of(source.auth, payload)) is not None:
                return WebhookReply(200, challenge.encode(), {"content-type": "text/plain"})
            known_id = signed_id(source.auth, proof, payload) or known_id
        return await self._send(source, asked, payload, known_id)

    async def _send(
        self,
        source: SourceAnswer,
        asked: WebhookParams,
        payload: dict[str, Any] | None,
        known_id: str | None,
    ) -> WebhookReply:
        event_id = known_id or new_id(self._entropy)
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
            return problem(422, "malformed", "The dispatcher rejected the event.", detail=why)
        paused = why_paused(answer.results) or None
        told = WebhookAnswer(
            event_id=event_id,
            is_id_made=known_id is None,
            results=answer.results,
            paused=paused,
        )
        headers = {"content-type": "application/json"}
        if paused is not None:
            headers["retry-after"] = str(PAUSED_SECONDS)
        return WebhookReply(202, msgspec.json.encode(told), headers)

    async def _now_ms(self) -> int:
        known = await self._fresh(_FRESH_SECONDS)
        passed = timedelta(seconds=self._clock.monotonic() - known.received_at)
        return milliseconds(known.now + passed)


def _unavailable(error: DispatcherError) -> WebhookReply:
    return problem(
        503,
        "unavailable",
        "The dispatcher cannot accept events now.",
        detail=error.message,
        headers={"retry-after": str(UNAVAILABLE_SECONDS)},
    )


def check_open(answer: SourcesAnswer) -> None:
    """Raise `InvalidInput` if others than this machine could post without a proof.

    Asked when a webhook starts on such an address; a source that comes later is refused by itself.
    """
    bare = [each.job for each in answer.sources if each.kind == "webhook" and each.auth is None]
    check_proved(bare)


def check_proved(bare: Sequence[str]) -> None:
    """The same, of the webhook sources that have no `auth`."""
    if bare:
        raise InvalidInput(
            f"Webhooks without `auth` are taken on loopback alone: {', '.join(bare[:10])}.",
            hint="Give each an `auth` in the DAG, or set PENSTOCK_WEBHOOK_HOST to 127.0.0.1.",
        )


Send = Callable[[Message], Awaitable[None]]

_LIMITS: Final = RequestLimits(body_bytes_max=BODY_BYTES_MAX)
_HEALTHY: Final = WebhookReply(200, b"ok\n", {"content-type": "text/plain"})


class WebhookApp:
    """The server's ASGI application."""

    def __init__(self, receiver: WebhookReceiver) -> None:
        self._admission = RequestAdmission(_LIMITS, requests_max=_LIMITS.requests_max)
        self._receiver = receiver

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if (scope["method"], scope["path"]) == ("GET", "/healthz"):
            await _send(send, _HEALTHY)
            return
        body = await self._admission.body(scope["headers"], receive)
        if body is not None:
            await _send(send, await self._reply(scope, body))

    async def _reply(self, scope: Any, body: bytes | Problem) -> WebhookReply:
        if isinstance(body, Problem):
            return _refused(body)
        headers = {
            name.decode("latin-1").lower(): text.decode("utf-8", "replace")
            for name, text in scope["headers"]
        }
        query = scope["query_string"].decode("latin-1")
        address = (scope.get("client") or ("",))[0]
        asked = WebhookRequest(scope["method"], scope["path"], headers, body, query, address)
        judged = await self._receiver.judge(asked)
        if isinstance(judged, WebhookReply):
            return judged
        be_known(scope)
        with self._admission.place() as busy:
            return await self._receiver.accept(judged) if busy is None else _refused(busy)


def _refused(why: Problem) -> WebhookReply:
    headers = {"retry-after": "1"} if why.status == 503 else None
    return problem(why.status, why.type, why.title, detail=why.detail, headers=headers)


async def _send(send: Send, reply: WebhookReply) -> None:
    headers = [(name.lower().encode(), text.encode()) for name, text in reply.headers.items()]
    headers.append((b"content-length", str(len(reply.body)).encode()))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
