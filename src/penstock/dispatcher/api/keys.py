"""What is asked of keys and of the audit: the key set for those who verify, and what people see.

The key set is for everybody who reaches the internal listener: it is public by nature. It is told
from memory, some seconds old at most, so that it can be asked for as often as anybody likes. The
rest is for people, and their part of the table of the public listener.
"""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.dispatcher.api.endpoints import Call, Endpoint, Proof, Reply
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.problems import unknown
from penstock.dispatcher.wire.base import Answer
from penstock.dispatcher.wire.keys import (
    AuditAnswer,
    AuditParams,
    JwksAnswer,
    KeysAnswer,
    RevokeAnswer,
    RevokeAsk,
    RotateAnswer,
    RotateAsk,
)
from penstock.tokens.jwks import JWKS_PATH, document_of

JWKS_SECONDS: Final = 30
"""How long others may keep the key set; a key is in it for longer before it signs."""


async def jwks(parts: Parts, call: Call) -> Reply:
    """The public halves of all keys."""
    del call
    document = document_of((await parts.keys.published()).values())
    cached = (b"cache-control", b"public, max-age=%d" % JWKS_SECONDS)
    return Reply(msgspec.json.encode(document), headers=(cached,))


async def keys(parts: Parts, call: Call) -> Answer:
    """All keys, and where each is in its life."""
    del call
    return await parts.keys.listed()


async def rotate(parts: Parts, call: Call) -> Answer:
    """Have every dispatcher make a new key."""
    ask: RotateAsk = call.ask
    answer = await parts.keys.rotate(kms_key=ask.kms_key)
    parts.audit.note(
        what="POST /v1/keys/rotate",
        outcome="allowed",
        address=call.address,
        reason="rotation" if answer.is_new else "the same rotation",
        detail={"rotation": answer.rotation, **({"kms_key": ask.kms_key} if ask.kms_key else {})},
    )
    return answer


async def revoke(parts: Parts, call: Call) -> Answer:
    """End a key at once."""
    ask: RevokeAsk = call.ask
    answer = await parts.keys.revoke(ask.kid)
    if answer is None:
        return unknown(f"There is no key {ask.kid!r}.")
    parts.audit.note(
        what=call.what,
        outcome="allowed",
        address=call.address,
        reason="revocation" if answer.is_new else "revoked before",
        detail={"kid": answer.kid},
    )
    return answer


async def audit(parts: Parts, call: Call) -> Answer:
    """Who was refused, and what was allowed."""
    params: AuditParams = call.params
    return await parts.audit.listed(
        task_id=params.task, outcome=params.outcome, before=params.before, limit=params.limit
    )


INTERNAL: Final = (
    Endpoint(
        "GET",
        JWKS_PATH,
        "The keys that tokens are verified with",
        jwks,
        answer=JwksAnswer,
        proof=Proof.NONE,
    ),
)

PUBLIC: Final = (
    Endpoint("GET", "/v1/keys", "The keys that sign tokens", keys, answer=KeysAnswer),
    Endpoint(
        "POST",
        "/v1/keys/rotate",
        "Have every dispatcher sign with a new key",
        rotate,
        ask=RotateAsk,
        answer=RotateAnswer,
        may_omit_body=True,
    ),
    Endpoint(
        "POST",
        "/v1/keys/revoke",
        "End a key at once",
        revoke,
        ask=RevokeAsk,
        answer=RevokeAnswer,
        problems=(404,),
    ),
    Endpoint(
        "GET",
        "/v1/audit",
        "Who was refused, and what was allowed",
        audit,
        params=AuditParams,
        answer=AuditAnswer,
    ),
)
