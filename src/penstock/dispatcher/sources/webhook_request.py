"""Requests to a webhook: what they say, and whether they are their sender's. Pure.

- The query may have `event_id`, `partition_key`, `start`, `end` and `cursor`, each once, and
  nothing else.
- Without `event_id` in the query, the first header of `ID_HEADERS` that is there is the event's
  id.
  Where the time is signed, the id is what is signed with it, and neither of these: see below.
- A body that is a JSON object is the payload as it is, whatever it is called. No field of it
  steers
  anything: senders give their own fields any name. No body is no payload.
- Any other body is `{"body": text, "content_type": …}`; one that is no text in UTF-8 is in
  base64
  and has `"encoding": "base64"` besides. But what calls itself JSON has to be JSON.

| type | header | what is signed with HMAC-SHA256 |
|---|---|---|
| `bearer` | `Authorization: Bearer SECRET` | nothing |
| `hmac` | the one that the source names, `HEX` or `sha256=HEX` | the body |
| `github` | `X-Hub-Signature-256: sha256=HEX` | the body |
| `stripe` | `Stripe-Signature: t=SECONDS,v1=HEX`, several `v1` | `SECONDS.` and the body |
| `slack` | `X-Slack-Signature: v0=HEX`, `X-Slack-Request-Timestamp` | `v0:SECONDS:` and the body |

The body is taken as its bytes came. Every comparison takes the same time, and all secrets are
tried. Where the time is signed, a request may be as old, or as much ahead, as the source
tolerates; and the event's id has to be signed too, or whoever has recorded a request could make
many events of it: the sender's own id where the body has one, else a digest of what was signed.
GitHub and `hmac` sign neither a time nor an id, so there the id is the one of the headers.

Every function returns what it has read, or the reply that refuses it; a refusal is a word or two
for the audit and repeats nothing of the request. Called by `webhook`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from penstock.dispatcher.dag.model import AuthType
from penstock.kernel.validation import wrong_shape
from penstock.protocol.base import Ask, EventId, Number, PartitionKey
from penstock.protocol.events import AuthAnswer, payload_fault
from penstock.protocol.problem import Problem

BODY_BYTES_MAX: Final = 64 * 1024
ID_HEADERS: Final = ("Idempotency-Key", "X-GitHub-Delivery", "Webhook-Id", "X-Request-Id")
_PARAMETERS_MAX: Final = 100
_EVENT_ID_MAX: Final = 900


@dataclass(frozen=True, slots=True)
class WebhookRequest:
    """What a server has been asked. The names of headers are in small letters."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    query: str = ""
    """As it stands in the address, without its question mark."""
    address: str = ""
    """Where it comes from."""


@dataclass(frozen=True, slots=True)
class WebhookReply:
    """What it answers."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class WebhookParams(Ask):
    """What the query may say."""

    event_id: EventId | None = None
    cursor: Number | None = None
    partition_key: PartitionKey | None = None
    start: Number | None = None
    end: Number | None = None


_NAMES: Final = WebhookParams.__struct_fields__


def problem(
    status: int,
    kind: str,
    title: str,
    *,
    detail: str = "",
    at: str = "",
    headers: Mapping[str, str] | None = None,
) -> WebhookReply:
    """An answer that is not a success. `at` is the part of the request that is wrong."""
    body = Problem(type=kind, title=title, status=status, detail=detail, field=at)
    told = {"content-type": "application/problem+json", **(headers or {})}
    return WebhookReply(status, msgspec.json.encode(body), told)


def parameters_of(
    request: WebhookRequest, *, is_id_signed: bool = False
) -> WebhookParams | WebhookReply:
    """What the query says, with the event's id, if the request has one at all.

    Where the id is signed with the body, neither the query nor a header may say another.
    """
    try:
        pairs = parse_qsl(
            request.query, keep_blank_values=True, max_num_fields=_PARAMETERS_MAX, errors="strict"
        )
    except ValueError:
        return problem(422, "malformed", "The query cannot be read.", detail=_allowed())
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in _NAMES:
            title = f"The query has a parameter {name!r} that no webhook knows."
            return problem(422, "malformed", title, detail=_allowed(), at=name)
        if name in found:
            return problem(422, "malformed", f"The query has {name!r} twice.", at=name)
        found[name] = value
    if "event_id" in found and is_id_signed:
        title = "The id of this webhook's events is what is signed; the query cannot say another."
        return problem(422, "malformed", title, at="event_id")
    if "event_id" not in found and not is_id_signed:
        header, text = _id_header(request)
        if len(text) > _EVENT_ID_MAX:
            title = f"{header} has {_EVENT_ID_MAX} characters at most."
            return problem(422, "malformed", title, at=header)
        found |= {"event_id": text} if text else {}
    try:
        return msgspec.convert(found, WebhookParams, strict=False)
    except msgspec.ValidationError as error:
        at, words = wrong_shape(error)
        return problem(422, "malformed", f"{at!r} in the query {words}.", at=at)


def _id_header(request: WebhookRequest) -> tuple[str, str]:
    """The first header that names the event, and what it says; empty if there is none."""
    for header in ID_HEADERS:
        if text := request.headers.get(header.lower(), "").strip():
            return header, text
    return "", ""


def payload_of(request: WebhookRequest) -> dict[str, Any] | WebhookReply | None:
    """What comes with the event."""
    if len(request.body) > BODY_BYTES_MAX:
        return too_large()
    if not request.body.strip():
        return None
    content_type = request.headers.get("content-type", "")
    try:
        found = msgspec.json.decode(request.body)
    except RecursionError:
        return problem(422, "malformed", "The body is nested too deeply.")
    except (msgspec.DecodeError, UnicodeDecodeError):
        if _is_json(content_type):
            detail = "Send JSON, or say by Content-Type what it is."
            return problem(400, "not JSON", "The body is not JSON.", detail=detail)
        found = None
    payload = found if isinstance(found, dict) else _wrapped(request.body, content_type)
    fault = payload_fault(payload)
    if fault is None:
        return payload
    if fault.is_too_large:
        return problem(413, "too large", fault.why)
    return problem(422, "malformed", fault.why)


def too_large() -> WebhookReply:
    return problem(413, "too large", f"A body has {BODY_BYTES_MAX} bytes at most.")


def _wrapped(body: bytes, content_type: str) -> dict[str, Any]:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = "\0"
    # Postgres has no NUL, so text that has one is no text to us.
    if "\0" not in text:
        return {"body": text, "content_type": content_type}
    encoded = base64.b64encode(body).decode()
    return {"body": encoded, "content_type": content_type, "encoding": "base64"}


def _is_json(content_type: str) -> bool:
    media = content_type.partition(";")[0].strip().lower()
    return media == "application/json" or media.endswith("+json")


def _allowed() -> str:
    return f"The query may have {', '.join(_NAMES)}; everything else goes into the body."


_SECONDS = re.compile(r"[0-9]{1,12}")
_SIGNATURES_MAX: Final = 10
_ID_CHARACTERS_MAX: Final = 200
_IDS: Final = {AuthType.STRIPE: "id", AuthType.SLACK: "event_id"}


@dataclass(frozen=True, slots=True)
class WebhookProof:
    """What a request has proved."""

    why_not: str = ""
    """Why it is refused; empty if it is not."""
    digest: str = ""
    """Of all that was signed, where a time is among it."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a request shows: signatures, any of which may be right, and what they are of."""

    signatures: Sequence[str]
    message: bytes
    seconds: int | None = None


def prove(
    auth: AuthAnswer, request: WebhookRequest, secrets: Sequence[str], *, now: float
) -> WebhookProof:
    """Judge a request; `now` is the time in seconds since 1970."""
    kind = AuthType(auth.type)
    if kind is AuthType.BEARER:
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        shown = shown.strip() if scheme.lower() == "bearer" else ""
        if not _is_one_of([shown], secrets):
            return WebhookProof("wrong token" if shown else "no token")
        return WebhookProof()
    found = _shown(kind, auth, request)
    if found is None or not found.signatures:
        return WebhookProof("no signature")
    right = [hmac.new(each.encode(), found.message, hashlib.sha256).hexdigest() for each in secrets]
    if not _is_one_of(found.signatures, right):
        return WebhookProof("wrong signature")
    if found.seconds is None:
        return WebhookProof()
    if abs(now - found.seconds) > auth.tolerance_seconds:
        return WebhookProof("too old" if found.seconds < now else "ahead of time")
    return WebhookProof(digest=f"signed:{hashlib.sha256(found.message).hexdigest()}")


def signed_id(
    auth: AuthAnswer, proof: WebhookProof, payload: Mapping[str, Any] | None
) -> str | None:
    """What names the event among what was signed; None where headers and the query do."""
    if not proof.digest:
        return None
    said = (payload or {}).get(_IDS[AuthType(auth.type)])
    is_id = isinstance(said, str) and 0 < len(said) <= _ID_CHARACTERS_MAX and said.isprintable()
    return said if is_id else proof.digest


def challenge_of(auth: AuthAnswer, payload: Mapping[str, Any] | None) -> str | None:
    """What Slack wants to have repeated before it sends anything; None if it asks for nothing."""
    if auth.type != AuthType.SLACK or (payload or {}).get("type") != "url_verification":
        return None
    said = (payload or {}).get("challenge")
    return said if isinstance(said, str) else None


def _shown(kind: AuthType, auth: AuthAnswer, request: WebhookRequest) -> _Shown | None:
    headers, body = request.headers, request.body
    match kind:
        case AuthType.STRIPE:
            said = [each.strip().partition("=") for each in _header(headers, "stripe-signature")]
            times = [text for name, _, text in said if name == "t"]
            seconds = times[0] if len(times) == 1 else ""
            message = f"{seconds}.".encode("utf-8", "replace") + body
            signatures = [text for name, _, text in said if name == "v1"]
        case AuthType.SLACK:
            seconds = headers.get("x-slack-request-timestamp", "").strip()
            message = f"v0:{seconds}:".encode("utf-8", "replace") + body
            signatures = _prefixed(headers.get("x-slack-signature", ""), "v0=")
        case AuthType.GITHUB:
            return _Shown(_prefixed(headers.get("x-hub-signature-256", ""), "sha256="), body)
        case _:
            said_once = headers.get(auth.header.lower(), "").strip()
            return _Shown([said_once.removeprefix("sha256=")] if said_once else [], body)
    if not _SECONDS.fullmatch(seconds):
        return None
    return _Shown(signatures[:_SIGNATURES_MAX], message, int(seconds))


def _header(headers: Mapping[str, str], name: str) -> list[str]:
    return headers.get(name, "").split(",")[: 2 * _SIGNATURES_MAX]


def _prefixed(text: str, prefix: str) -> list[str]:
    text = text.strip()
    return [text.removeprefix(prefix)] if text.startswith(prefix) else []


def _is_one_of(shown: Sequence[str], right: Sequence[str]) -> bool:
    """Whether any of these is one of those; all are compared, so that the time tells nothing."""
    found = [
        hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))
        for one in shown
        for other in right
    ]
    return any(found)
