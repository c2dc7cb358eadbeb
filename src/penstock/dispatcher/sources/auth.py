"""Whether a request to a webhook is its sender's: the secret itself, or what was signed with it.

| type | header | what is signed with HMAC-SHA256 |
|---|---|---|
| `bearer` | `Authorization: Bearer SECRET` | nothing |
| `hmac` | the one that the source names, `HEX` or `sha256=HEX` | the body |
| `github` | `X-Hub-Signature-256: sha256=HEX` | the body |
| `stripe` | `Stripe-Signature: t=SECONDS,v1=HEX`, several `v1` | `SECONDS.` and the body |
| `slack` | `X-Slack-Signature: v0=HEX`, `X-Slack-Request-Timestamp` | `v0:SECONDS:` and the body |

The body is taken as its bytes came. Every comparison takes the same time, whatever is shown, and
all secrets are tried. Where the time is signed, a request may be as old, or as much ahead, as the
source tolerates; and what names the event has to be signed too, or whoever has recorded a request
could make many events of it. That is the sender's own id where it has one in the body, else a
digest of what was signed: the same request again is the same event again, whichever process gets
it. GitHub and `hmac` sign neither a time nor an id, so there the id is the one of the headers.

Pure. A refusal is a word or two for the audit; nothing of a request is repeated in it. Called by
`receiving`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.dispatcher.dag.model import AuthType
from penstock.dispatcher.sources.reading import Request
from penstock.dispatcher.wire.events import AuthAnswer

_SECONDS = re.compile(r"[0-9]{1,12}")
_SIGNATURES_MAX: Final = 10
_ID_CHARACTERS_MAX: Final = 200
_IDS: Final = {AuthType.STRIPE: "id", AuthType.SLACK: "event_id"}


@dataclass(frozen=True, slots=True)
class Proof:
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


def prove(auth: AuthAnswer, request: Request, secrets: Sequence[str], *, now: float) -> Proof:
    """Judge a request; `now` is the time in seconds since 1970."""
    kind = AuthType(auth.type)
    if kind is AuthType.BEARER:
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        shown = shown.strip() if scheme.lower() == "bearer" else ""
        if not _is_one_of([shown], secrets):
            return Proof("wrong token" if shown else "no token")
        return Proof()
    found = _shown(kind, auth, request)
    if found is None or not found.signatures:
        return Proof("no signature")
    right = [hmac.new(each.encode(), found.message, hashlib.sha256).hexdigest() for each in secrets]
    if not _is_one_of(found.signatures, right):
        return Proof("wrong signature")
    if found.seconds is None:
        return Proof()
    if abs(now - found.seconds) > auth.tolerance_seconds:
        return Proof("too old" if found.seconds < now else "ahead of time")
    return Proof(digest=f"signed:{hashlib.sha256(found.message).hexdigest()}")


def signed_id(auth: AuthAnswer, proof: Proof, payload: Mapping[str, Any] | None) -> str | None:
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


def _shown(kind: AuthType, auth: AuthAnswer, request: Request) -> _Shown | None:
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
