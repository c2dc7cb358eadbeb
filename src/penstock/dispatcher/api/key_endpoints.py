"""The key endpoints: the key set for verifiers, rotation and revocation, and the audit.

The key set is public by nature and for everybody who reaches the internal listener. It is
answered from memory, some seconds old at most. The rest is for people, on the public listener.
"""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall, ApiEndpoint, HttpReply, RequiredProof
from penstock.dispatcher.api.problems import unknown
from penstock.protocol.base import Answer
from penstock.protocol.keys import (
    AuditAnswer,
    AuditParams,
    JwksAnswer,
    KeysAnswer,
    RevokeAnswer,
    RevokeAsk,
    RotateAnswer,
    RotateAsk,
)
from penstock.tokens.verifier import JWKS_PATH, document_of

JWKS_SECONDS: Final = 30
"""How long others may keep the key set; a key is in it for longer before it signs."""


async def jwks(parts: ApiContext, call: ApiCall) -> HttpReply:
    """The public halves of all keys."""
    del call
    document = document_of((await parts.keys.published()).values())
    cached = (b"cache-control", b"public, max-age=%d" % JWKS_SECONDS)
    return HttpReply(msgspec.json.encode(document), headers=(cached,))


async def keys(parts: ApiContext, call: ApiCall) -> Answer:
    """All keys, and where each is in its life."""
    del call
    return await parts.keys.listed()


async def rotate(parts: ApiContext, call: ApiCall) -> Answer:
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


async def revoke(parts: ApiContext, call: ApiCall) -> Answer:
    """Revoke a signing key."""
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


async def audit(parts: ApiContext, call: ApiCall) -> Answer:
    """Who was refused, and what was allowed."""
    params: AuditParams = call.params
    return await parts.audit.listed(
        task_id=params.task, outcome=params.outcome, before=params.before, limit=params.limit
    )


INTERNAL: Final = (
    ApiEndpoint(
        "GET",
        JWKS_PATH,
        "JSON Web Key Set that verifies capability tokens",
        jwks,
        answer=JwksAnswer,
        proof=RequiredProof.NONE,
    ),
)

PUBLIC: Final = (
    ApiEndpoint("GET", "/v1/keys", "List signing keys", keys, answer=KeysAnswer),
    ApiEndpoint(
        "POST",
        "/v1/keys/rotate",
        "Rotate the signing key",
        rotate,
        ask=RotateAsk,
        answer=RotateAnswer,
        may_omit_body=True,
    ),
    ApiEndpoint(
        "POST",
        "/v1/keys/revoke",
        "Revoke a signing key",
        revoke,
        ask=RevokeAsk,
        answer=RevokeAnswer,
        problems=(404,),
    ),
    ApiEndpoint(
        "GET",
        "/v1/audit",
        "List audit records",
        audit,
        params=AuditParams,
        answer=AuditAnswer,
    ),
)
