"""The query endpoints: relay queries to the query service, begin and end them for it, list them.

People ask the public listener, tasks the internal one; both are relayed to the query service, which
holds no key of ours: a task's request goes on with its capability token, that of somebody with a
token for one query (`TokenIssuer.query`), made here of the proof that was shown. The service asks
with the same token what the query may read (`/internal/query/begin`), and says what became of it
(`/internal/query/end`). Of an attempt both look whether it runs, so a result counts only for one
that was running when it was whole.
"""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.dispatcher.api.auth import EXPIRED, note_refused
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall, ApiEndpoint, HttpReply, RequiredProof
from penstock.dispatcher.api.problems import conflict
from penstock.dispatcher.api.worker_endpoints import not_running
from penstock.kernel.errors import TokenRefused
from penstock.protocol.base import TASK_HEADER, Answer
from penstock.protocol.problem import Problem
from penstock.protocol.queries import (
    QUERY_SECONDS_MAX,
    QueriesAnswer,
    QueriesParams,
    QueryAsk,
    QueryBeginAnswer,
    QueryBeginAsk,
    QueryEndAnswer,
    QueryEndAsk,
    QueryOutcome,
)
from penstock.tokens.claims import TASK_AUDIENCE

PEOPLE_PATH: Final = "/v1/query"
TASK_PATH: Final = "/v1/task/query"
_BODY_BYTES_MAX: Final = 512 * 1024


async def run_query(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """Run a query for somebody."""
    who = f"reader {call.reader}" if call.reader else "viewer" if call.is_viewer else "api"
    return await relay_query(parts, call.ask, who=who, tables=call.tables)


async def relay_query(
    parts: ApiContext, ask: QueryAsk, *, who: str, tables: frozenset[str] | None
) -> Answer | HttpReply:
    """Run a query for somebody who has shown who it is; also called by the console."""
    if parts.relay is None:
        return _none()
    token = await parts.issuer.query(who, tables)
    return await _relayed(parts, PEOPLE_PATH, ask, {"Authorization": f"Bearer {token}"})


async def run_task_query(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """Run a query for an attempt."""
    assert call.claims is not None, "the endpoint's proof is TASK"
    if (problem := await not_running(parts, call, call.claims)) is not None:
        note_refused(parts, call, reason=problem.type, claims=call.claims)
        return problem
    if parts.relay is None:
        return _none()
    return await _relayed(parts, TASK_PATH, call.ask, {TASK_HEADER: call.token})


async def begin_query(parts: ApiContext, call: ApiCall) -> Answer:
    """Say what a query may read, and note it, also if its token has expired while it waited."""
    ask: QueryBeginAsk = call.ask
    claims = call.claims
    assert claims is not None, "the endpoint's proof is QUERY"
    try:
        await parts.issuer.verify(call.token, audience=claims.aud, is_expiry_judged=True)
    except TokenRefused as error:
        note_refused(parts, call, reason=error.kind, claims=claims)
        if error.kind == EXPIRED:
            reason = ask.refusal or error.message
            await parts.queries.refused(ask, claims, reason, is_expired=True)
        raise
    if (problem := await _over(parts, call)) is not None:
        await parts.queries.refused(ask, claims, ask.refusal or problem.title)
        return problem
    try:
        return await parts.queries.begin(ask, claims)
    except TokenRefused as error:
        note_refused(parts, call, reason=error.kind, claims=claims)
        raise


async def end_query(parts: ApiContext, call: ApiCall) -> Answer:
    """Note what became of a query. An attempt that is over is told so, and gets no result."""
    ask: QueryEndAsk = call.ask
    claims = call.claims
    assert claims is not None, "the endpoint's proof is QUERY"
    problem = await _over(parts, call)
    if problem is not None:
        outcome = QueryOutcome.CANCELLED
        ask = msgspec.structs.replace(ask, outcome=outcome, reason=problem.title)
    is_new = await parts.queries.end(ask, claims)
    return problem or QueryEndAnswer(is_new=is_new)


async def list_queries(parts: ApiContext, call: ApiCall) -> Answer:
    """The queries that were begun or refused."""
    params: QueriesParams = call.params
    return await parts.queries.listed(limit=params.limit, before=params.before)


async def _over(parts: ApiContext, call: ApiCall) -> Problem | None:
    """Why an attempt has no answers any more; None for people, and for one that runs."""
    claims = call.claims
    assert claims is not None, "the endpoint's proof is QUERY"
    if claims.aud != TASK_AUDIENCE:
        return None
    problem = await not_running(parts, call, claims)
    if problem is not None:
        note_refused(parts, call, reason=problem.type, claims=claims)
    return problem


async def _relayed(
    parts: ApiContext, path: str, ask: QueryAsk, headers: dict[str, str]
) -> HttpReply:
    assert parts.relay is not None, "looked at by the caller"
    found = await parts.relay.send(path, headers=headers, body=msgspec.json.encode(ask))
    return HttpReply(b"", status=found.status, content_type=found.content_type, stream=found.pieces)


def _none() -> Answer:
    title = "This dispatcher has no query service."
    return conflict("no query service", title, detail="Set `query_service` to its URL.")


def _query_endpoint(path: str, summary: str, proof: RequiredProof) -> ApiEndpoint:
    return ApiEndpoint(
        "POST",
        path,
        summary,
        run_query if path == PEOPLE_PATH else run_task_query,
        ask=QueryAsk,
        answer=None,
        problems=(404, 409),
        proof=proof,
        body_bytes_max=_BODY_BYTES_MAX,
        request_seconds_max=QUERY_SECONDS_MAX + 60,
        is_stream=True,
    )


INTERNAL: Final = (
    _query_endpoint(TASK_PATH, "Query what an attempt was given to read", RequiredProof.TASK),
    ApiEndpoint(
        "POST",
        "/internal/query/begin",
        "Begin a query: authorize it and list its files",
        begin_query,
        ask=QueryBeginAsk,
        answer=QueryBeginAnswer,
        problems=(404, 409),
        proof=RequiredProof.QUERY_END,
    ),
    ApiEndpoint(
        "POST",
        "/internal/query/end",
        "End a query: what became of it",
        end_query,
        ask=QueryEndAsk,
        answer=QueryEndAnswer,
        problems=(404, 409),
        proof=RequiredProof.QUERY_END,
    ),
)
PUBLIC: Final = (
    _query_endpoint(PEOPLE_PATH, "Query datasets by SQL", RequiredProof.READING),
    ApiEndpoint(
        "GET",
        "/v1/queries",
        "List queries, newest first",
        list_queries,
        params=QueriesParams,
        answer=QueriesAnswer,
    ),
)
