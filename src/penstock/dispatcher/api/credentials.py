"""Credentials of an attempt, for the store and for its own folders: see `capabilities.minting`.

The token says which attempt asks, and is not expired; Postgres says whether that attempt is the
running one and is not to stop. It is asked before STS is, so that nothing is minted for an attempt
that is over, and once more after it, so that nothing is given to one that has ended meanwhile: so
credentials that anybody holds were made while their attempt ran.

Everything that is minted and everything that is refused leaves a note in the audit, without the
credentials. Two short reads of Postgres and a request to STS; a call that is lost may be repeated.
"""

from __future__ import annotations

from penstock.dispatcher.api.endpoints import Call
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.problems import conflict, refusal_problem
from penstock.dispatcher.api.proving import note_refused, require_grants
from penstock.dispatcher.capabilities.minting import Minted
from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.tasks.rows import refusal, task_states
from penstock.dispatcher.wire.base import Answer
from penstock.dispatcher.wire.credentials import CredentialsAnswer, CredentialsAsk
from penstock.dispatcher.wire.problem import Problem
from penstock.kernel.errors import (
    CredentialsRefused,
    CredentialsUnavailable,
    InvalidInput,
    TokenRefused,
)
from penstock.tokens.claims import Claims

_CANCELLED = "cancelled"


async def credentials(parts: Parts, call: Call) -> Answer:
    """Credentials for the folders that the token grants, or for fewer of them."""
    ask: CredentialsAsk = call.ask
    claims = call.claims
    assert claims is not None, "the endpoint's proof is TASK"
    if (problem := await _not_running(parts, call, claims)) is not None:
        return _noted(parts, call, claims, problem)
    try:
        minted = await parts.minter.mint(claims, read=ask.read, write=ask.write)
    except (CredentialsRefused, TokenRefused) as error:
        detail = {"why": error.message}
        note_refused(parts, call, reason=error.kind, claims=claims, detail=detail)
        raise
    except (CredentialsUnavailable, InvalidInput) as error:
        reason = "malformed" if isinstance(error, InvalidInput) else "unavailable"
        detail = {"why": error.message}
        note_refused(parts, call, reason=reason, claims=claims, detail=detail)
        raise
    if (problem := await _not_running(parts, call, claims)) is not None:
        return _noted(parts, call, claims, problem)
    parts.audit.note(
        what=call.what,
        outcome="allowed",
        task_id=claims.task_id,
        attempt=claims.attempt,
        caller=claims.sub,
        address=call.address,
        reason="minted",
        detail={"read": len(minted.read), "write": len(minted.write)},
    )
    return _answer(minted)


async def _not_running(parts: Parts, call: Call, claims: Claims) -> Problem | None:
    """Why an attempt has no credentials any more; None if it may have some."""
    asked = {
        "task": claims.task_id,
        "attempt": claims.attempt,
        "grants": claims.grants.digest,
    }

    async def work(connection: Connection) -> Problem | None:
        row = await (await connection.execute(query("running_attempt"), asked)).fetchone()
        if row is None:
            states = await task_states(connection, [claims.task_id])
            return refusal_problem(refusal(claims.task_id, states.get(claims.task_id)))
        require_grants(parts, call, claims, has_grants=row["has_grants"])
        if row["cancel_asked"]:
            return conflict(_CANCELLED, f"Task {claims.task_id} was asked to stop.")
        return None

    return await parts.database.transact(work)


def _noted(parts: Parts, call: Call, claims: Claims, problem: Problem) -> Problem:
    note_refused(parts, call, reason=problem.type, claims=claims)
    return problem


def _answer(minted: Minted) -> CredentialsAnswer:
    return CredentialsAnswer(
        access_key=minted.access_key,
        secret_key=minted.secret_key,
        session_token=minted.session_token,
        expires_at=minted.expires_at,
        region=minted.region,
        endpoint=minted.endpoint,
        read=list(minted.read),
        write=list(minted.write),
    )
