"""The page of the signing keys and of the audit: what was refused, and what was allowed.

Rotating has every dispatcher make a new key; the page shows how each comes into use. Revoking
ends one key at once. The audit is read a page at a time, by task and outcome. Its short words,
which programs know and people search for, are explained in sentences here; an unknown word is
shown as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import Any, Final
from urllib.parse import urlencode

from penstock.console.pages.base import (
    ActionResult,
    ConsolePage,
    FormAction,
    PageNotFound,
    PageRequest,
    call_api,
    parse_form,
)
from penstock.console.pages.tasks import as_json
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.key_endpoints import revoke, rotate
from penstock.dispatcher.api.routes import INTERNAL, PUBLIC
from penstock.dispatcher.tasks.model import TaskRefusalReason
from penstock.kernel.errors import InvalidInput
from penstock.protocol.keys import (
    AuditOutcome,
    AuditParams,
    RevokeAnswer,
    RevokeAsk,
    RotateAnswer,
    RotateAsk,
)

_CALLS: Final[Mapping[str, str]] = {
    **{f"{each.method} {each.path}": each.summary for each in (*INTERNAL, *PUBLIC)},
    "POST /v1/task/heartbeat": "A heartbeat of an attempt",
    "POST /v1/task/complete": "The completion of an attempt",
    "POST /sign-in": "Sign in to the console",
}
_REASONS: Final[Mapping[str, str]] = {
    TaskRefusalReason.OVER: "Its attempt had ended",
    TaskRefusalReason.STALE: "Another attempt has replaced it",
    TaskRefusalReason.DIFFERENT: "Its attempt had ended with another outcome",
    TaskRefusalReason.UNKNOWN: "There is no such task",
    TaskRefusalReason.OUTPUTS: "It wrote outside its prefix",
    TaskRefusalReason.SCHEMA: "Its columns do not fit the dataset",
    TaskRefusalReason.UNDECLARED: "Its columns are not those that the DAG declares",
    TaskRefusalReason.MOVED: "It was merged into an outdated version",
    "former attempt": "It belongs to an earlier attempt",
    "another attempt": "It belongs to another attempt",
    "another task": "It was invoked for another task",
    "another site": "Cross-site request",
    "cancelled": "The task was asked to stop",
    "expired": "Token expired",
    "not yet valid": "Token not valid yet; check clock skew",
    "missing": "No token",
    "malformed": "Not readable",
    "unreadable": "Malformed token",
    "bad signature": "Bad token signature",
    "unknown key": "Token signed by an unknown key",
    "retired key": "Token signed by a retired key",
    "revoked key": "Token signed by a revoked key",
    "other grants": "Token has grants that were never issued: a signing key may be compromised",
    "wrong audience": "Token has the wrong audience",
    "wrong issuer": "Token has the wrong issuer",
    "not granted": "It requested more than it was granted",
    "too many folders": "It requested too many folders at once",
    "unavailable": "No credentials were available",
    "minted": "Credentials issued",
    "wrong api token": "Wrong API token",
    "no api token": "No API token is configured",
    "wrong identity": "The token belongs to another worker",
    "no identity": "No worker identity",
    "webhook token": "A webhook token is not valid for this request",
    "no auth": "The webhook has no secret and accepts only local requests",
    "another name": "The request has another host name",
    "no secret": "Failed to read the secret of the webhook",
    "no token": "No token",
    "wrong token": "Wrong webhook token",
    "no signature": "No signature",
    "wrong signature": "Wrong signature",
    "too old": "Signature expired",
    "ahead of time": "Signed in the future; check clock skew",
    "revocation": "It is revoked",
    "revoked before": "It was revoked before",
    "rotation": "Rotation started",
    "the same rotation": "Rotation was requested a moment before",
}


def describe_call(what: str) -> str:
    """What was asked for; empty if there are no words for it."""
    return _CALLS.get(what, "")


def describe_reason(reason: str) -> str:
    """Why it was refused, or what was done; empty if there are no words for it."""
    return _REASONS.get(reason, "")


PATH: Final = "/operations/keys"
KEYS_MAX: Final = 50
NOTES_MAX: Final = 50
_NAMES: Final = {
    "task": "The number of the task",
    "outcome": "The outcome",
    "kms_key": "The key",
    "kid": "The key",
}


async def _load(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    fields = {name: asked.query.get(name, "") for name in ("task", "outcome", "before")}
    wrong = ""
    try:
        params = parse_form(AuditParams, {**fields, "limit": NOTES_MAX}, names=_NAMES)
    except InvalidInput as error:
        wrong, params = error.message, AuditParams(limit=NOTES_MAX)
    keys = await parts.keys.listed()
    found = await parts.audit.listed(
        task_id=params.task, outcome=params.outcome, before=params.before, limit=NOTES_MAX
    )
    kept = {name: value for name in ("task", "outcome") if (value := fields[name].strip())}
    return {
        "keys": keys.keys[:KEYS_MAX],
        "keys_more": max(0, len(keys.keys) - KEYS_MAX),
        "rotation": keys.rotation,
        "asked_at": keys.asked_at,
        "is_kms": any(each.signer == "kms" for each in keys.keys),
        "notes": [(each, as_json(each.detail) if each.detail else "") for each in found.notes],
        "task": fields["task"].strip(),
        "outcome": params.outcome.value if params.outcome is not None else "",
        "outcomes": [each.value for each in AuditOutcome],
        "is_filtered": bool(kept),
        "is_first": params.before is None,
        "older": _link({**kept, "before": found.before}) if found.before is not None else "",
        "newest": _link(kept),
        "call_of": describe_call,
        "reason_of": describe_reason,
        "wrong": wrong,
        "path": PATH,
    }


def _link(said: Mapping[str, object]) -> str:
    return f"{PATH}?{urlencode(said)}#audit" if said else f"{PATH}#audit"


async def _rotate(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    ask = parse_form(RotateAsk, {"kms_key": asked.query.get("kms_key", "")}, names=_NAMES)
    return await call_api(parts, rotate, to, ask=ask, told=_rotated)


def _rotated(answer: RotateAnswer) -> str:
    at = f"{answer.signs_from.astimezone(UTC):%H:%M:%S} UTC"
    if not answer.is_new:
        return f"A rotation was already requested; its keys sign from about {at}."
    return f"Every dispatcher creates a new key, which signs from about {at}."


async def _revoke(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    ask = parse_form(RevokeAsk, {"kid": asked.query.get("kid", "")}, names=_NAMES)
    return await call_api(parts, revoke, to, ask=ask, told=_revoked)


def _revoked(answer: RevokeAnswer) -> str:
    return f"The key {answer.kid} {'is' if answer.is_new else 'was'} revoked."


PAGE: Final = ConsolePage(
    PATH,
    "keys",
    _load,
    live=("keys", "notes"),
    section="operations",
    query=("task", "outcome", "before"),
)
ACTIONS: Final = (
    FormAction("/operations/keys/rotate", _rotate, fields=("kms_key",)),
    FormAction("/operations/keys/revoke", _revoke, fields=("kid",)),
)
