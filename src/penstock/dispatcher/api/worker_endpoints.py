"""The worker endpoints: hello, wait, claim, heartbeat, complete, credentials.

A claim needs the identity of a worker or the token of an invocation. A claim and its capability
tokens are one: if nothing can be signed, nothing is claimed, and no attempt is spent. An
attempt is proved by its token and its fence and needs nothing else: a lost identity never costs
finished work. A heartbeat brings the next token, signed after the lease was extended; if that
fails the lease holds all the same. For heartbeat and complete the fence decides, never how old
the token is.

Outputs: every location has to be the folder that the attempt's own token grants for that
dataset, or below it, or nothing is published. Both are compared as canonical scopes
(`penstock.tokens.scopes`), so `..`, an escape, an empty part or a wildcard is no location; the
canonical spelling is published, since the sweeper looks for folders by it. A task may have made
ten thousand partitions, so what is spelt plainly below its folder is not taken apart.

Credentials: the token names the attempt and has not expired; Postgres is asked before STS, so
that nothing is minted for an attempt that is over, and after it, so that nothing is given to
one that has ended meanwhile. Everything minted or refused leaves an audit note without the
credentials.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from penstock.datasets.layout import attempt_name
from penstock.datasets.schema import Column
from penstock.dispatcher.api.auth import (
    answered,
    note_fenced,
    note_refused,
    prove_each,
    proved,
    require_grants,
    require_invoked,
)
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall, HttpReply
from penstock.dispatcher.api.problems import (
    conflict,
    malformed,
    refusal_problem,
    refused_result,
    results_answer,
    unknown,
)
from penstock.dispatcher.capabilities.credentials import MintedCredentials
from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.tasks.completion import UNACKNOWLEDGED_SECONDS, AttemptReport
from penstock.dispatcher.tasks.lifecycle import BATCH_MAX
from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    ClaimedTask,
    Completion,
    ExtendedLease,
    Failure,
    Fence,
    PublishedOutput,
    Refusal,
    Release,
    TaskOutput,
    TaskRefusalReason,
)
from penstock.dispatcher.tasks.rows import refusal, storable, task_states, without_twins
from penstock.dispatcher.wakeups.base import TaskCounts, WakeUpChannel
from penstock.kernel.errors import (
    CredentialsRefused,
    CredentialsUnavailable,
    InvalidInput,
    PenstockError,
    TokenRefused,
)
from penstock.protocol.base import Answer
from penstock.protocol.problem import Problem
from penstock.protocol.work import (
    Assignment,
    ClaimAnswer,
    ClaimAsk,
    CompleteAsk,
    CredentialsAnswer,
    CredentialsAsk,
    EndAsk,
    FactsAsk,
    HeartbeatAsk,
    HeldAsk,
    HelloAsk,
    InputAnswer,
    InputColumnAnswer,
    OutputAsk,
    PartAnswer,
    PublishedAnswer,
    ResultsAnswer,
    TaskResult,
    WaitAnswer,
    WaitAsk,
    WakeUpAnswer,
)
from penstock.runtimes.base import Facts
from penstock.tokens.claims import Claims, Grants
from penstock.tokens.scopes import PREFIX_BYTES_MAX, Scope, scope_of_location

_log = logging.getLogger(__name__)

_SCHEMES: Final = ("s3", "file")
_PART: Final = r"[A-Za-z0-9_=~-](?:[A-Za-z0-9_=~-]|\.(?!\.)){0,254}"
_PLAINLY_BELOW: Final = re.compile(rf"{_PART}(?:/{_PART})*")


def misplaced(outputs: Iterable[OutputAsk], grants: Grants) -> tuple[OutputAsk, str] | None:
    """The first output that lies where it may not, and why it may not; None if there is none."""
    allowed = {each.dataset: each.prefix for each in grants.write}
    for each in outputs:
        if (prefix := allowed.get(each.dataset)) is None:
            return each, f"Dataset {each.dataset} is not an output of this task."
        if not (_is_plain(each.location, prefix) or _lies_in(each.location, prefix)):
            return each, (
                f"An output of dataset {each.dataset} does not lie in the folder of this attempt,"
                f" {prefix}."
            )
    return None


def canonical(location: str, grants: Grants) -> str:
    """The one spelling of a location that is not misplaced, without a slash at its end."""
    if any(_is_plain(location, each.prefix) for each in grants.write):
        return location
    return str(scope_of_location(location)).removesuffix("/")


def _is_plain(location: str, prefix: str) -> bool:
    """Whether a location is a folder below a granted one, and has no other spelling."""
    return (
        location.startswith(prefix)
        and len(location) < PREFIX_BYTES_MAX
        and _PLAINLY_BELOW.fullmatch(location, len(prefix)) is not None
        and _is_canonical(prefix)
    )


@functools.lru_cache(maxsize=1_000)
def _is_canonical(prefix: str) -> bool:
    try:
        return str(Scope.parse(prefix, schemes=_SCHEMES)) == prefix
    except InvalidInput:
        return False


def _lies_in(location: str, prefix: str) -> bool:
    try:
        return Scope.parse(prefix, schemes=_SCHEMES).covers(scope_of_location(location))
    except InvalidInput:
        return False


_SHOWN_MAX: Final = 500


async def hello(parts: ApiContext, call: ApiCall) -> Answer:
    """Register a worker; the answer has the operators to serve."""
    ask: HelloAsk = call.ask
    return await parts.presence.hello(call.worker, ask)


async def wait(parts: ApiContext, call: ApiCall) -> Answer:
    """A worker waits until one of its operators has work, and tells what became of earlier ones."""
    ask: WaitAsk = call.ask
    if parts.broker is None:
        told = "This dispatcher does not use long-poll wake-ups."
        hint = "Set `wakeups` to the same value on dispatchers and workers."
        return conflict("other wake-ups", told, detail=hint)
    seconds, operators = ask.seconds, None
    if ask.hello is not None:
        served = (await parts.presence.hello(call.worker, ask.hello, is_waiting=True)).operators
        if {each.name for each in served} != set(ask.operators):
            seconds, operators = 0.0, served
    with parts.presence.waiting(call.worker):
        found = await parts.broker.wait(
            f"{call.worker}/{ask.listener}",
            ask.operators,
            seconds=seconds,
            answered=ask.answered,
            returned=ask.returned,
            held=ask.held,
        )
    return WaitAnswer(
        operators=operators,
        wake_ups=[
            WakeUpAnswer(id=each.id, operator=each.channel.operator, priority=each.channel.priority)
            for each in found
        ],
    )


async def claim(parts: ApiContext, call: ApiCall) -> Answer:
    """One task by its number, or the next ones of an operator."""
    ask: ClaimAsk = call.ask
    require_invoked(parts, call, task_id=ask.task_id)
    if (ask.task_id is None) == (ask.operator is None):
        return malformed("A claim names a task or an operator, and not both.", field="task_id")
    if ask.task_id is not None:
        if ask.job is not None or ask.limit != 1 or ask.in_batches or ask.claim_id is not None:
            told = "`job`, `limit`, `in_batches` and `claim_id` are for claims of an operator."
            return malformed(told, field="task_id")
        # A function has the name of its operator.
        worker = None if call.claims is not None else call.worker
        found = await parts.tasks.claim(
            ask.task_id,
            worker=worker,
            attempt=call.claims.attempt if call.claims is not None else None,
            issue=parts.issuer.tokens_for,
        )
        if isinstance(found, Refusal):
            if found.why is TaskRefusalReason.STALE:
                note_refused(parts, call, reason=found.why.value, claims=call.claims)
            return refusal_problem(found)
        return ClaimAnswer(tasks=[_assignment(found, parts)])
    assert ask.operator is not None, "looked at above"
    if ask.job is None and not ask.in_batches and 1 <= ask.limit <= BATCH_MAX:
        gathered = await parts.claim(
            ask.operator, worker=call.worker, limit=ask.limit, claim_id=ask.claim_id
        )
        return ClaimAnswer(tasks=_assignments(gathered, parts, claim_id=ask.claim_id))
    job_id = None
    if ask.job is not None:
        job_id = await parts.views.job_id(ask.job)
        if job_id is None:
            return unknown(f"There is no job {ask.job!r}.")
    claimed = await parts.tasks.claim_next(
        ask.operator,
        worker=call.worker,
        limit=ask.limit,
        job_id=job_id,
        in_batches=ask.in_batches,
        issue=parts.issuer.tokens_for,
        tasks_max=parts.issuer.claims_max,
        claim_id=ask.claim_id,
    )
    return ClaimAnswer(tasks=_assignments(claimed, parts, claim_id=ask.claim_id))


async def heartbeat(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """Extend leases, and learn what is to be cancelled."""
    ask: HeartbeatAsk = call.ask
    without_twins([each.task_id for each in ask.tasks], most=BATCH_MAX)
    proofs = await prove_each(parts, call, ask.tasks)
    held = proved(proofs, ask.tasks)
    fences = [_fence(each, claims) for each, claims in held]
    progress = {each.task_id: each.progress for each, _ in held if each.progress is not None}
    found = await parts.tasks.heartbeat(fences, progress=progress) if held else ()
    judged = list(zip(found, (claims for _, claims in held), strict=True))
    note_fenced(parts, call, judged)
    tokens = await _renewed(parts, judged)
    body, status = results_answer(answered(proofs, [_beat(each, tokens) for each in found]))
    return HttpReply(body, status)


async def complete(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """End attempts: succeeded, failed or released ones."""
    ask: CompleteAsk = call.ask
    for place, each in enumerate(ask.tasks):
        if each.failure is not None and each.release is not None:
            field = f"tasks[{place}].release"
            return malformed("An attempt is failed or released, not both.", field=field)
        if each.outputs and (each.failure is not None or each.release is not None):
            field = f"tasks[{place}].outputs"
            what = "has failed" if each.failure is not None else "was released"
            return malformed(f"An attempt that {what} has no outputs.", field=field)
    without_twins([each.task_id for each in ask.tasks], most=BATCH_MAX)
    proofs = await prove_each(parts, call, ask.tasks)
    held = proved(proofs, ask.tasks)
    reports = [_report(each, claims, _why_not(parts, call, each, claims)) for each, claims in held]
    found = await parts.end(reports) if held else ()
    note_fenced(parts, call, zip(found, (claims for _, claims in held), strict=True))
    if held:
        (parts.kick_after_ends or parts.kick)()
    body, status = results_answer(answered(proofs, [_end(each) for each in found]))
    if isinstance(body, ResultsAnswer):
        is_again = any(isinstance(each, AttemptEnd) and each.is_again for each in found)
        claimed = (await _claimed_before(parts, call, ask)) if is_again else ("", [])
        body.claimed_of, body.claimed = (
            claimed if claimed[0] else await _claim_next(parts, call, ask)
        )
    return HttpReply(body, status)


async def _claimed_before(
    parts: ApiContext, call: ApiCall, ask: CompleteAsk
) -> tuple[str, list[Assignment]]:
    """What the same report has claimed, if its answer was lost."""
    if ask.claim_id is None or not call.worker:
        return "", []
    try:
        found = await parts.tasks.claim_again(
            ask.claim_id, worker=call.worker, issue=parts.issuer.tokens_for
        )
    except PenstockError as error:
        _log.warning("ends were taken, and what was claimed with them is not known: %s", error)
        return "", []
    operator = found[0].operator if found else ""
    return operator, _assignments(found, parts, claim_id=ask.claim_id)


async def _claim_next(
    parts: ApiContext, call: ApiCall, ask: CompleteAsk
) -> tuple[str, list[Assignment]]:
    """Of what these ends have made, as much as the worker has room for; others hear of the rest.

    A claim by itself, after the commit of the ends: if it fails, the ends are told all the same.
    """
    if parts.announcer is None:
        return "", []
    limits = {each.operator: each.limit for each in ask.next} if call.worker else {}
    taken = parts.announcer.take(limits)
    wanted = [each.operator for each in ask.next if each.is_wanted and limits]
    operator = next((each.operator for each in taken), next(iter(wanted), ""))
    if not operator:
        return "", []
    try:
        found = await parts.claim(
            operator, worker=call.worker, limit=limits[operator], claim_id=ask.claim_id
        )
        taken = _left(taken, len(found))
        return operator, _assignments(found, parts, claim_id=ask.claim_id)
    except PenstockError as error:
        _log.warning("failed to claim tasks with accepted completions: %s", error)
        return "", []
    finally:
        parts.announcer.give_back(taken)


def _left(taken: TaskCounts, claimed: int) -> TaskCounts:
    """What a claim has left of these tasks, the highest priority first."""
    left: dict[WakeUpChannel, int] = {}
    for channel in sorted(taken, key=lambda each: list(Priority).index(each.priority)):
        tasks = taken[channel] - claimed
        claimed = max(0, -tasks)
        if tasks > 0:
            left[channel] = tasks
    return left


async def _renewed(
    parts: ApiContext, judged: Sequence[tuple[ExtendedLease | Refusal, Claims]]
) -> Mapping[int, str]:
    """The next tokens, by task; none of those that could not be signed now."""
    extended = [(one, claims) for one, claims in judged if isinstance(one, ExtendedLease)]
    return await parts.issuer.renewed(extended) if extended else {}


def _why_not(parts: ApiContext, call: ApiCall, ask: EndAsk, claims: Claims) -> str:
    """Why the outputs of an attempt may not be published; empty if they may."""
    if (found := misplaced(ask.outputs, claims.grants)) is None:
        return ""
    output, why = found
    said = {"dataset": output.dataset, "location": storable(output.location[:_SHOWN_MAX])}
    note_refused(parts, call, reason="outside of its grants", claims=claims, detail=said)
    return why


def _assignments(
    claimed: Iterable[ClaimedTask], parts: ApiContext, *, claim_id: str | None
) -> list[Assignment]:
    seconds = 0.0 if claim_id is None else UNACKNOWLEDGED_SECONDS
    return [_assignment(each, parts, acknowledge_seconds=seconds) for each in claimed]


def _assignment(
    claimed: ClaimedTask, parts: ApiContext, *, acknowledge_seconds: float = 0.0
) -> Assignment:
    return Assignment(
        task_id=claimed.task_id,
        attempt=claimed.attempt,
        lease_token=claimed.lease_token,
        lease_expires_at=claimed.lease_expires_at,
        heartbeat_seconds=claimed.heartbeat_ms / 1000,
        acknowledge_seconds=min(acknowledge_seconds, claimed.heartbeat_ms / 1000),
        was_lost=claimed.was_lost,
        timeout_seconds=claimed.timeout_ms / 1000,
        job=claimed.job,
        # What is run; what it is claimed as has the queue in its name too.
        operator=claimed.definition.get("operator") or claimed.operator,
        claimed_as=claimed.operator,
        runs_alone=claimed.runs_alone,
        runtime=claimed.runtime,
        generation=claimed.generation,
        definition=dict(claimed.definition),
        payload=dict(claimed.payload),
        inputs=msgspec.convert(claimed.inputs, dict[str, InputAnswer]),
        current=msgspec.convert(claimed.current, dict[str, list[PartAnswer]] | None),
        columns=msgspec.convert(claimed.columns, dict[str, list[InputColumnAnswer]]),
        batch=claimed.batch,
        root=parts.root,
        token=claimed.token,
        mints=parts.minter.mints,
        folder=attempt_name(
            task_id=claimed.task_id, attempt=claimed.attempt, lease_token=claimed.lease_token
        ),
    )


def _fence(ask: HeldAsk | EndAsk, claims: Claims) -> Fence:
    """The proof of an attempt: its lease, and the grants that were issued to it."""
    return Fence(ask.task_id, ask.attempt, ask.lease_token, claims.grants.digest)


def _report(ask: EndAsk, claims: Claims, why_not: str) -> AttemptReport:
    fence = _fence(ask, claims)
    if ask.release is not None:
        release = ask.release
        return Release(
            fence,
            release.reason,
            release.is_delayed,
            ask.log,
            ask.metrics,
            release.runs_alone,
            release.is_lost,
        )
    if ask.failure is not None:
        failure = ask.failure
        return Failure(
            fence,
            failure.reason,
            failure.is_retried,
            ask.log,
            ask.metrics,
            failure.runs_alone,
            failure.is_lost,
        )
    outputs = tuple(
        TaskOutput(
            dataset=each.dataset,
            location=each.location if why_not else canonical(each.location, claims.grants),
            partition_key=each.partition_key,
            start=each.start,
            end=each.end,
            cursor=each.cursor,
            append_key=each.append_key,
            facts=None if each.facts is None else _facts(each.facts),
            base_revision=each.base_revision,
        )
        for each in ask.outputs
    )
    return Completion(fence, outputs, ask.log, ask.metrics, why_not)


def _facts(ask: FactsAsk) -> Facts:
    return Facts(
        manifest=ask.manifest,
        files=ask.files,
        rows=ask.rows,
        bytes=ask.bytes,
        columns=tuple(Column(each.name, each.type, each.is_nullable) for each in ask.columns),
    )


def _beat(found: ExtendedLease | Refusal, tokens: Mapping[int, str]) -> TaskResult:
    if isinstance(found, Refusal):
        return refused_result(found)
    return TaskResult(
        task_id=found.task_id,
        status=200,
        lease_expires_at=found.lease_expires_at,
        cancel_asked=found.cancel_asked,
        token=tokens.get(found.task_id, ""),
    )


def _end(found: AttemptEnd | Refusal) -> TaskResult:
    if isinstance(found, Refusal):
        return refused_result(found)
    return TaskResult(
        task_id=found.task_id,
        status=200,
        task_status=found.status.value,
        due_at=found.due_at,
        published=[_published(each) for each in found.published],
        omitted=found.omitted,
    )


def _published(found: PublishedOutput) -> PublishedAnswer:
    return PublishedAnswer(
        dataset=found.dataset,
        partition_key=found.partition_key,
        outcome=found.outcome.value,
        revision=found.revision,
        event_seq=found.event_seq,
    )


_CANCELLED = "cancelled"


async def credentials(parts: ApiContext, call: ApiCall) -> Answer:
    """Credentials for the folders that the token grants, or for fewer of them."""
    ask: CredentialsAsk = call.ask
    claims = call.claims
    assert claims is not None, "the endpoint's proof is TASK"
    if (problem := await not_running(parts, call, claims)) is not None:
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
    if (problem := await not_running(parts, call, claims)) is not None:
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


async def not_running(parts: ApiContext, call: ApiCall, claims: Claims) -> Problem | None:
    """Why an attempt has no credentials any more; None if it may have some."""
    asked = {
        "task": claims.task_id,
        "attempt": claims.attempt,
        "grants": claims.grants.digest,
    }
    for row in await parts.database.fetch("running_attempt", asked):
        require_grants(parts, call, claims, has_grants=row["has_grants"])
        if row["cancel_asked"]:
            return conflict(_CANCELLED, f"Task {claims.task_id} was asked to stop.")
        return None

    async def work(connection: Connection) -> Problem:
        states = await task_states(connection, [claims.task_id])
        return refusal_problem(refusal(claims.task_id, states.get(claims.task_id)))

    return await parts.database.transact(work)


def _noted(parts: ApiContext, call: ApiCall, claims: Claims, problem: Problem) -> Problem:
    note_refused(parts, call, reason=problem.type, claims=claims)
    return problem


def _answer(minted: MintedCredentials) -> CredentialsAnswer:
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
