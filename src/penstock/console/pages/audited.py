"""What stands in the audit, in words. Pure.

The audit has short words, which programs know and people look for; here is what they mean. What
has no words of ours is shown as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.dispatcher.api.table import INTERNAL, PUBLIC
from penstock.dispatcher.tasks.values import Why

_CALLS: Final[Mapping[str, str]] = {
    **{f"{each.method} {each.path}": each.summary for each in (*INTERNAL, *PUBLIC)},
    "POST /v1/task/heartbeat": "A heartbeat of an attempt",
    "POST /v1/task/complete": "The end of an attempt",
    "POST /sign-in": "Sign in to the console",
}
_REASONS: Final[Mapping[str, str]] = {
    Why.OVER: "Its attempt had ended",
    Why.STALE: "Another attempt has taken its place",
    Why.DIFFERENT: "Its attempt had ended in another way",
    Why.UNKNOWN: "There is no such task",
    Why.OUTPUTS: "It wrote where it may not",
    Why.SCHEMA: "Its columns do not fit the dataset",
    Why.MOVED: "It was merged with what was not published any more",
    "former attempt": "It belongs to an earlier attempt",
    "another attempt": "It belongs to another attempt",
    "another task": "It was invoked for another task",
    "another site": "It came from another site",
    "cancelled": "Its task was asked to stop",
    "expired": "Its token is too old",
    "not yet valid": "Its token does not hold yet; do the clocks agree?",
    "missing": "It has no token",
    "malformed": "It is not readable",
    "unreadable": "Its token is not readable",
    "bad signature": "Its token was changed, or is signed by somebody else",
    "unknown key": "Its token is signed by a key that is not known",
    "retired key": "Its token is signed by a key that signed no more by then",
    "revoked key": "Its token is signed by a key that was revoked",
    "other grants": "Its token grants what was never granted: somebody else has a signing key",
    "wrong audience": "Its token is for something else",
    "wrong issuer": "Its token is from somebody else",
    "not granted": "It asked for more than it was granted",
    "too many folders": "It asked for too many folders at once",
    "unavailable": "There were no credentials to be had",
    "minted": "Credentials were given out",
    "wrong api token": "The token is not the one of the API",
    "no api token": "There is no token of the API",
    "wrong identity": "The token is not the one of this worker",
    "no identity": "It does not say which worker it is",
    "webhook token": "The token is the one of webhooks, which opens nothing else",
    "no auth": "The webhook has no secret, and is asked from elsewhere",
    "another name": "It asked for this machine by another name",
    "no secret": "The secret of the webhook could not be had",
    "no token": "It has no token",
    "wrong token": "The token is not the one of the webhook",
    "no signature": "It is not signed",
    "wrong signature": "It is signed with another secret, or was changed",
    "too old": "It was signed too long ago",
    "ahead of time": "It was signed in the future; do the clocks agree?",
    "revocation": "It is revoked",
    "revoked before": "It was revoked before",
    "rotation": "They are made now",
    "the same rotation": "They had been asked for a moment before",
}


def call_of(what: str) -> str:
    """What was asked for; empty if there are no words for it."""
    return _CALLS.get(what, "")


def reason_of(reason: str) -> str:
    """Why it was refused, or what was done; empty if there are no words for it."""
    return _REASONS.get(reason, "")
