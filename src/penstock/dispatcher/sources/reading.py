"""What a request to a webhook says: the query steers, the body is the payload. Pure.

- The query may have `event_id`, `partition_key`, `start`, `end` and `cursor`, each once, and
  nothing else.
- Without `event_id` in the query, the first header of `ID_HEADERS` that is there is the event's id.
  Where the time is signed, the id is what is signed with it, and neither of these: see `auth`.
- A body that is a JSON object is the payload as it is, whatever it is called. No field of it steers
  anything: senders give their own fields any name. No body is no payload.
- Any other body is `{"body": text, "content_type": …}`; one that is no text in UTF-8 is in base64
  and has `"encoding": "base64"` besides. But what calls itself JSON has to be JSON.

Every function returns what it has read, or the reply that refuses it. Called by `receiving`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from penstock.dispatcher.payloads import payload_fault
from penstock.dispatcher.wire.base import Ask, EventId, Number, PartitionKey
from penstock.dispatcher.wire.problem import Problem
from penstock.kernel.shapes import wrong_shape

BODY_BYTES_MAX: Final = 64 * 1024
ID_HEADERS: Final = ("Idempotency-Key", "X-GitHub-Delivery", "Webhook-Id", "X-Request-Id")
_PARAMETERS_MAX: Final = 100
_EVENT_ID_MAX: Final = 900


@dataclass(frozen=True, slots=True)
class Request:
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
class Reply:
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
) -> Reply:
    """An answer that is not a success. `at` is the part of the request that is wrong."""
    body = Problem(type=kind, title=title, status=status, detail=detail, field=at)
    told = {"content-type": "application/problem+json", **(headers or {})}
    return Reply(status, msgspec.json.encode(body), told)


def parameters_of(request: Request, *, is_id_signed: bool = False) -> WebhookParams | Reply:
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


def _id_header(request: Request) -> tuple[str, str]:
    """The first header that names the event, and what it says; empty if there is none."""
    for header in ID_HEADERS:
        if text := request.headers.get(header.lower(), "").strip():
            return header, text
    return "", ""


def payload_of(request: Request) -> dict[str, Any] | Reply | None:
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


def too_large() -> Reply:
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
