"""Authentication: who calls, and by which proof, before a request is carried out.

| proof | judged | refused with |
|---|---|---|
| the API's token | before the body is read | 401; 403 for that of viewers |
| that, or the token of viewers | before the body is read | 401 |
| that, or a token for reading tables | before the body is read | 401 |
| the API, if it has none | before the body is read | 403 for another site's page, or its name |
| a worker's name and token | before the body is read | 401 without, 403 for another's |
| that, or the token of webhooks | before the body is read | 401 without, 403 for another's |
| an invocation's token | before the body is read; its task by the handler | 403 |
| the token of somebody's query | before the body is read, with `exp` | 401 without, 403 |
| an attempt's token, in the header | before the body is read, with `exp` | 401 without, 403 |
| an attempt's token, in each entry | by the handler, without `exp` | the entry's own 401 or 403 |

A token is proof of one `(task_id, attempt)`, and nothing that a body says makes it one of
another. It is no proof that the attempt still runs: that is in Postgres, and the statement that
changes something looks there, by the fence. So the token of an attempt that was reaped is worth
nothing at once, and one that has expired while its heartbeats got no answer is worth what the
fence is. The digest of the grants that were issued is in Postgres too: a token with others is
refused, whoever has signed it. So who has stolen a key can widen nothing; and an attempt whose
token is of a key that was revoked since gets its next one by its lease and this digest
(decision 0032).

Whoever is refused leaves a note in the audit, with the task that is proved. What a caller says
of itself or of tasks without proof is in the details of one note for the whole call, never who
it is: thousands of made-up tasks are no more than one.

Costs no request: keys are held in memory, and read again only for a `kid` that is not known,
with a floor on how often (`penstock.tokens.verifier`). A signature takes about a tenth of a
millisecond to verify, so others are let in between a few of them, the same token is verified
once a call, and after `WRONG_MAX` wrong ones a call has no more of them verified: made-up
tokens, however many, cost less than a millisecond a call. Called by the application and by
handlers.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall, RequiredProof
from penstock.dispatcher.api.problems import problem_of, token_result
from penstock.dispatcher.api.requests import (
    Headers,
    credentials,
    is_of_another_site,
    is_of_this_machine,
    task_token,
)
from penstock.dispatcher.catalog.read_tokens import READ_PREFIX
from penstock.dispatcher.tasks.model import Refusal, TaskRefusalReason
from penstock.dispatcher.tasks.rows import storable
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import PenstockError, TokenRefused
from penstock.protocol.base import TASK_HEADER, WORKER_HEADER
from penstock.protocol.identity import NAME_CHARACTERS_MAX, WEBHOOK, Identified
from penstock.protocol.problem import Problem
from penstock.protocol.work import TaskResult
from penstock.tokens.claims import INVOKE_AUDIENCE, QUERY_AUDIENCE, TASK_AUDIENCE, Claims

Found = TypeVar("Found")

_log = logging.getLogger(__name__)

IN_A_ROW_MAX: Final = 32
"""How many tokens are verified before others are let in: a few milliseconds."""
WRONG_MAX: Final = 8
"""How many wrong tokens of one call are verified; those that follow are refused unseen."""
_CHEAP: Final = frozenset({"missing", "malformed", "unknown key"})
"""What is wrong with tokens that no signature was verified for."""
_OUTDATED: Final = frozenset(
    {TaskRefusalReason.STALE, TaskRefusalReason.OVER, TaskRefusalReason.DIFFERENT}
)
EXPIRED: Final = "expired"
_NAMED_MAX: Final = 10
"""How many of the tasks that somebody without proof has named are in a note."""
_ANOTHER_SITE: Final = Problem(
    type="forbidden",
    title="Cross-site requests are refused.",
    status=403,
    detail="Without a token the API answers to 127.0.0.1 and localhost alone. Set"
    " PENSTOCK_API_TOKEN, and have the caller bring it.",
)
_NO_API_TOKEN: Final = Problem(
    type="unauthorized",
    title="`Authorization: Bearer` must carry the API token.",
    status=401,
    detail="It is the dispatcher's PENSTOCK_API_TOKEN; to look, its PENSTOCK_VIEWER_TOKEN will do.",
)
_NO_READ_TOKEN: Final = Problem(
    type="unauthorized",
    title="The read token is invalid or has expired.",
    status=401,
    detail="Create one with 'penstock token create'.",
)
_ONLY_LOOKING: Final = Problem(
    type="forbidden",
    title="The viewer token is read-only.",
    status=403,
    detail="Use the dispatcher's PENSTOCK_API_TOKEN.",
)
_ONLY_WEBHOOKS: Final = Problem(
    type="forbidden",
    title="The webhook token may only send events of webhook sources.",
    status=403,
)
_NOT_OURS: Final = "PENSTOCK_WORKER_SECRET, or --data, is not that of the dispatcher."
_NO_TOKEN: Final = (
    f"`{TASK_HEADER}` must carry the capability token of the attempt, or `token` in its entry."
)
_UNSEEN: Final = (
    f"{WRONG_MAX} tokens of this request are invalid; the token of this entry was not checked."
)
_clock = SystemClock()


class AttemptEntry(Protocol):
    """An entry of a call about several attempts."""

    task_id: int
    attempt: int
    token: str | None


class Authenticator:
    """Judges the proofs that requests bring in their headers."""

    def __init__(self, parts: ApiContext) -> None:
        self._parts = parts
        self._api_token = parts.api_token.encode() if parts.api_token is not None else None
        self._viewer_token = (parts.viewer_token or "").encode()

    async def refusal(
        self, proof: RequiredProof, headers: Headers, call: ApiCall
    ) -> Problem | None:
        """Why this caller may not go on; None if it may, and then `call` says who it is.

        Raises what `problems.problem_of` knows if the keys cannot be read.
        """
        call.token = task_token(headers)
        refusal = await self._refusal(proof, headers, call)
        if proof not in (RequiredProof.NONE, RequiredProof.EACH_TASK):
            call.is_known = refusal is None
        call.is_limited = call.is_webhook or (
            call.claims is not None and not self._is_worker(headers)
        )
        return refusal

    async def _refusal(
        self, proof: RequiredProof, headers: Headers, call: ApiCall
    ) -> Problem | None:
        match proof:
            case RequiredProof.NONE:
                return None
            case RequiredProof.EACH_TASK:
                call.is_known = await self._is_known(headers, call)
                return None
            case RequiredProof.API_TOKEN | RequiredProof.LOOKING:
                return self._api_refusal(headers, call, is_looking=proof is RequiredProof.LOOKING)
            case RequiredProof.READING:
                return await self._reading_refusal(headers, call)
            case RequiredProof.WORKER | RequiredProof.SOURCE:
                return self._worker_refusal(headers, call, is_source=proof is RequiredProof.SOURCE)
            case RequiredProof.WORKER_OR_INVOCATION:
                if not call.token:
                    return self._worker_refusal(headers, call)
                return await self._token_refusal(call, audience=INVOKE_AUDIENCE)
            case RequiredProof.TASK:
                return await self._token_refusal(call, audience=TASK_AUDIENCE)
            case RequiredProof.QUERY | RequiredProof.QUERY_END:
                is_judged = proof is RequiredProof.QUERY
                return await self._query_refusal(headers, call, is_expiry_judged=is_judged)

    async def _is_known(self, headers: Headers, call: ApiCall) -> bool:
        """Whether a caller whose body has the proofs has shown in its headers who it is.

        That decides whose places it takes. What a worker may besides, it has proved as everywhere.
        """
        if self._is_worker(headers):
            call.worker, _ = credentials(headers)
            return True
        try:
            call.claims = await _verified(
                self._parts, call.token, audience=TASK_AUDIENCE, is_expiry_judged=False
            )
        except PenstockError:
            # Not known, or not to be known now: its entries are told which.
            return False
        return True

    def _is_worker(self, headers: Headers) -> bool:
        return self._parts.identities.judge(*credentials(headers)) is Identified.KNOWN

    def _api_refusal(self, headers: Headers, call: ApiCall, *, is_looking: bool) -> Problem | None:
        if self._api_token is None:
            # Any page that somebody looks at can have their browser ask what is on this machine,
            # without a question first if it sends no content type that is out of the ordinary; and
            # as one of this site, if the name that it came from leads here since.
            if is_of_this_machine(headers) and not is_of_another_site(headers):
                return None
            note_refused(self._parts, call, reason="another site")
            return _ANOTHER_SITE
        worker, bearer = credentials(headers)
        # Both are compared, so that the time tells nothing.
        is_viewer = hmac.compare_digest(bearer.encode(), self._viewer_token)
        if hmac.compare_digest(bearer.encode(), self._api_token):
            return None
        if is_viewer and self._viewer_token:
            if is_looking:
                call.is_viewer = True
                return None
            note_refused(self._parts, call, reason="viewer token", said_name=worker)
            return _ONLY_LOOKING
        reason = "wrong api token" if bearer else "no api token"
        note_refused(self._parts, call, reason=reason, said_name=worker)
        return _NO_API_TOKEN

    async def _reading_refusal(self, headers: Headers, call: ApiCall) -> Problem | None:
        _, bearer = credentials(headers)
        if not bearer.startswith(READ_PREFIX):
            return self._api_refusal(headers, call, is_looking=True)
        reader = await self._parts.readers.find(bearer)
        if reader is None:
            note_refused(self._parts, call, reason="wrong read token")
            return _NO_READ_TOKEN
        call.reader, call.tables = reader.name, reader.tables
        return None

    def _worker_refusal(
        self, headers: Headers, call: ApiCall, *, is_source: bool = False
    ) -> Problem | None:
        worker, bearer = credentials(headers)
        match self._parts.identities.judge(worker, bearer):
            case Identified.KNOWN:
                call.worker = worker
                return None
            case Identified.WEBHOOK:
                call.worker, call.is_webhook = WEBHOOK, True
                if is_source:
                    return None
                note_refused(self._parts, call, reason="webhook token")
                return _ONLY_WEBHOOKS
            case Identified.WRONG:
                note_refused(self._parts, call, reason="wrong identity", said_name=worker)
                title = f"The token is not the one of {worker}."
                return Problem(type="forbidden", title=title, status=403, detail=_NOT_OURS)
            case Identified.MISSING:
                note_refused(self._parts, call, reason="no identity", said_name=worker)
                title = f"`{WORKER_HEADER}` and `Authorization: Bearer` must identify the caller."
                return Problem(type="unauthorized", title=title, status=401)

    async def _query_refusal(
        self, headers: Headers, call: ApiCall, *, is_expiry_judged: bool
    ) -> Problem | None:
        audience = TASK_AUDIENCE if call.token else QUERY_AUDIENCE
        call.token = call.token or credentials(headers)[1]
        return await self._token_refusal(call, audience=audience, is_expiry_judged=is_expiry_judged)

    async def _token_refusal(
        self, call: ApiCall, *, audience: str, is_expiry_judged: bool = True
    ) -> Problem | None:
        try:
            call.claims = await _verified(
                self._parts, call.token, audience=audience, is_expiry_judged=is_expiry_judged
            )
        except TokenRefused as error:
            claims: Claims | None = None
            if error.kind == EXPIRED:
                # It is signed by us all the same, so it is known whose it is.
                claims = await _verified(
                    self._parts, call.token, audience=audience, is_expiry_judged=False
                )
            note_refused(self._parts, call, reason=error.kind, claims=claims)
            return problem_of(error)
        return None


async def prove_each(
    parts: ApiContext, call: ApiCall, entries: Sequence[AttemptEntry]
) -> Sequence[Claims | TaskResult]:
    """What the token of each entry says; where it proves nothing, the answer of that entry.

    A call about one task may have its token in the header.
    """
    found: list[Claims | TaskResult] = []
    unproved: dict[str, list[AttemptEntry]] = {}
    seen = {} if call.claims is None else {call.token: call.claims}
    wrong = 0
    for place, entry in enumerate(entries):
        if place and place % IN_A_ROW_MAX == 0:
            await _clock.sleep(0)
        token = entry.token or (call.token if len(entries) == 1 else "")
        claims: Claims | None = None
        try:
            claims = await _verified_once(parts, token, seen, wrong=wrong)
            of_attempt(claims, task_id=entry.task_id, attempt=entry.attempt)
        except TokenRefused as error:
            wrong += error.kind not in _CHEAP
            if claims is None:
                unproved.setdefault(error.kind, []).append(entry)
            else:
                asked = (entry.task_id, entry.attempt)
                note_refused(parts, call, reason=error.kind, claims=claims, asked=asked)
            found.append(token_result(entry.task_id, error))
        else:
            found.append(claims)
    for reason, those in unproved.items():
        named = [_named(each.task_id, each.attempt) for each in those[:_NAMED_MAX]]
        note_refused(parts, call, reason=reason, detail={"asked": named, "entries": len(those)})
    return found


def proved(
    found: Iterable[Claims | TaskResult], each: Iterable[Found]
) -> list[tuple[Found, Claims]]:
    """Those of `each` whose entries are proved, with their proofs."""
    return [
        (one, claims) for one, claims in zip(each, found, strict=True) if isinstance(claims, Claims)
    ]


def answered(
    found: Iterable[Claims | TaskResult], results: Iterable[TaskResult]
) -> list[TaskResult]:
    """The answers in the places of their entries: `results` are of those that are proved."""
    told = iter(results)
    return [next(told) if isinstance(each, Claims) else each for each in found]


def of_attempt(claims: Claims, *, task_id: int, attempt: int) -> None:
    """Raise `TokenRefused` if a token is of another attempt than the one that is named."""
    if claims.task_id != task_id:
        raise TokenRefused(f"The token is not one of task {task_id}.", kind="another attempt")
    if claims.attempt != attempt:
        told = f"The token is not the one of attempt {attempt} of task {task_id}."
        kind = "former attempt" if claims.attempt < attempt else "another attempt"
        raise TokenRefused(told, kind=kind)


def require_attempt(parts: ApiContext, call: ApiCall, *, task_id: int, attempt: int) -> Claims:
    """What the token of the header says; raises `TokenRefused` if it is of another attempt."""
    assert call.claims is not None, "the endpoint's proof is TASK"
    try:
        of_attempt(call.claims, task_id=task_id, attempt=attempt)
    except TokenRefused as error:
        asked = (task_id, attempt)
        note_refused(parts, call, reason=error.kind, claims=call.claims, asked=asked)
        raise
    return call.claims


def require_grants(parts: ApiContext, call: ApiCall, claims: Claims, *, has_grants: bool) -> None:
    """Raise `TokenRefused` if a token grants anything else than it was issued with.

    One of our keys has signed it: so somebody else has that key.
    """
    if has_grants:
        return
    note_refused(parts, call, reason="other grants", claims=claims)
    _log.error("a validly signed token of task %d has unexpected grants", claims.task_id)
    told = f"The token has other grants than attempt {claims.attempt} of task {claims.task_id}."
    raise TokenRefused(told, kind="other grants")


def require_invoked(parts: ApiContext, call: ApiCall, *, task_id: int | None) -> None:
    """Raise `TokenRefused` if who calls was invoked for another task than the one it claims."""
    if call.claims is None or call.claims.task_id == task_id:
        return
    asked = None if task_id is None else (task_id, 0)
    note_refused(parts, call, reason="another task", claims=call.claims, asked=asked)
    raise TokenRefused(
        f"The token of this invocation allows to claim task {call.claims.task_id} alone.",
        kind="another attempt",
    )


def note_refused(
    parts: ApiContext,
    call: ApiCall,
    *,
    reason: str,
    claims: Claims | None = None,
    asked: tuple[int, int] | None = None,
    said_name: str = "",
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Note a refusal: of whom a token proves, if it does. What was asked for is a detail."""
    more = dict(detail or {})
    if asked is not None and (claims is None or asked != (claims.task_id, claims.attempt)):
        more["asked"] = _named(*asked)
    if said_name:
        more["said"] = storable(said_name[:NAME_CHARACTERS_MAX])
    parts.audit.note(
        what=call.what,
        outcome="refused",
        task_id=None if claims is None else claims.task_id,
        attempt=None if claims is None else claims.attempt,
        caller=call.worker if claims is None else claims.sub,
        address=call.address,
        reason=reason,
        detail=more,
    )


def _named(task_id: int, attempt: int) -> str:
    return f"task:{task_id}:{attempt}"


def note_fenced(parts: ApiContext, call: ApiCall, found: Iterable[tuple[object, Claims]]) -> None:
    """Note those whose tokens are good and whose attempts are over.

    A heartbeat that was under way while its own attempt was ended is nothing to look at.
    """
    for answer, claims in found:
        if isinstance(answer, Refusal) and answer.why in _OUTDATED and not answer.is_late:
            note_refused(parts, call, reason=answer.why.value, claims=claims)


async def _verified_once(
    parts: ApiContext, token: str, seen: dict[str, Claims], *, wrong: int
) -> Claims:
    """What the token of an entry says; `seen` are those of the call that are right so far."""
    if wrong >= WRONG_MAX:
        raise TokenRefused(_UNSEEN, kind="not verified")
    if token not in seen:
        seen[token] = await _verified(parts, token, audience=TASK_AUDIENCE, is_expiry_judged=False)
    return seen[token]


async def _verified(
    parts: ApiContext, token: str, *, audience: str, is_expiry_judged: bool = True
) -> Claims:
    if not token:
        raise TokenRefused(_NO_TOKEN, kind="missing")
    return await parts.issuer.verify(token, audience=audience, is_expiry_judged=is_expiry_judged)
