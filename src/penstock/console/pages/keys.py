"""The keys that sign capability tokens, and the audit: who was refused, and what was allowed.

Rotating has every dispatcher make a new key; the page shows how each comes into use. Revoking ends
one key at once. The audit is
read by pages, by task and outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import Any, Final
from urllib.parse import urlencode

from penstock.console.pages.acting import act, asked_as
from penstock.console.pages.audited import call_of, reason_of
from penstock.console.pages.base import Action, Asked, Done, Missing, Page
from penstock.console.pages.measured import as_json
from penstock.dispatcher.api.keys import revoke, rotate
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.wire.keys import (
    AuditOutcome,
    AuditParams,
    RevokeAnswer,
    RevokeAsk,
    RotateAnswer,
    RotateAsk,
)
from penstock.kernel.errors import InvalidInput

PATH: Final = "/operations/keys"
KEYS_MAX: Final = 50
NOTES_MAX: Final = 50
_NAMES: Final = {
    "task": "The number of the task",
    "outcome": "The outcome",
    "kms_key": "The key",
    "kid": "The key",
}


async def _load(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
    fields = {name: asked.query.get(name, "") for name in ("task", "outcome", "before")}
    wrong = ""
    try:
        params = asked_as(AuditParams, {**fields, "limit": NOTES_MAX}, names=_NAMES)
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
        "call_of": call_of,
        "reason_of": reason_of,
        "wrong": wrong,
        "path": PATH,
    }


def _link(said: Mapping[str, object]) -> str:
    return f"{PATH}?{urlencode(said)}#audit" if said else f"{PATH}#audit"


async def _rotate(parts: Parts, asked: Asked, to: str) -> Done:
    ask = asked_as(RotateAsk, {"kms_key": asked.query.get("kms_key", "")}, names=_NAMES)
    return await act(parts, rotate, to, ask=ask, told=_rotated)


def _rotated(answer: RotateAnswer) -> str:
    at = f"{answer.signs_from.astimezone(UTC):%H:%M:%S} UTC"
    if not answer.is_new:
        return f"A rotation was asked for a moment ago; its keys sign from about {at} on."
    return f"Every dispatcher makes a new key now, which signs from about {at} on."


async def _revoke(parts: Parts, asked: Asked, to: str) -> Done:
    ask = asked_as(RevokeAsk, {"kid": asked.query.get("kid", "")}, names=_NAMES)
    return await act(parts, revoke, to, ask=ask, told=_revoked)


def _revoked(answer: RevokeAnswer) -> str:
    return f"The key {answer.kid} {'is' if answer.is_new else 'was'} revoked."


PAGE: Final = Page(
    PATH,
    "keys",
    _load,
    live=("keys", "notes"),
    section="operations",
    query=("task", "outcome", "before"),
)
ACTIONS: Final = (
    Action("/operations/keys/rotate", _rotate, fields=("kms_key",)),
    Action("/operations/keys/revoke", _revoke, fields=("kid",)),
)
