"""What workers ask: hello, wait, claim, heartbeat, complete.

Who claims has to say who it is, or brings the token of its invocation. A claim and its capability
tokens are one: if nothing can be signed, nothing is claimed, and no attempt is spent.

Who holds an attempt proves it by its capability token and its fence, and needs nothing else: a lost
identity never costs work that is done. A heartbeat brings the next token, which is signed after the
lease was extended: if that fails the lease holds all the same, and the next heartbeat brings one.
So a lost answer costs nothing: for these two calls the fence decides, never how old the token is.

What an attempt publishes lies in the folders that its own token grants, or nothing is published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from penstock.datasets.layout import attempt_name
from penstock.datasets.schema import Column
from penstock.dispatcher.api.endpoints import Call, Reply
from penstock.dispatcher.api.locations import canonical, misplaced
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.problems import (
    conflict,
    malformed,
    refusal_problem,
    refused_result,
    results_answer,
    unknown,
)
from penstock.dispatcher.api.proving import (
    answered,
    note_fenced,
    note_refused,
    prove_each,
    proved,
    require_invoked,
)
from penstock.dispatcher.tasks.ending import Saying
from penstock.dispatcher.tasks.lifecycle import BATCH_MAX
from penstock.dispatcher.tasks.rows import storable, without_twins
from penstock.dispatcher.tasks.values import (
    Claimed,
    Completion,
    Ended,
    Extended,
    Failure,
    Fence,
    Output,
    Published,
    Refusal,
    Release,
    Why,
)
from penstock.dispatcher.wire.base import Answer
from penstock.dispatcher.wire.work import (
    Assignment,
    ClaimAnswer,
    ClaimAsk,
    ColumnAnswer,
    CompleteAsk,
    EndAsk,
    FactsAsk,
    HeartbeatAsk,
    HeldAsk,
    HelloAsk,
    InputAnswer,
    PartAnswer,
    PublishedAnswer,
    TaskResult,
    WaitAnswer,
    WaitAsk,
    WakeUpAnswer,
)
from penstock.runtimes.base import Facts
from penstock.tokens.claims import Claims

_SHOWN_MAX: Final = 500


async def hello(parts: Parts, call: Call) -> Answer:
    """A worker is there, and learns what to serve."""
    ask: HelloAsk = call.ask
    return await parts.views.hello(call.worker, ask)


async def wait(parts: Parts, call: Call) -> Answer:
    """A worker waits until one of its operators has work, and tells what became of earlier ones."""
    ask: WaitAsk = call.ask
    if parts.broker is None:
        told = "This dispatcher does not send wake-ups by long poll."
        hint = "Set `wakeups` of dispatchers and workers to the same."
        return conflict("other wake-ups", told, detail=hint)
    found = await parts.broker.wait(
        f"{call.worker}/{ask.listener}",
        ask.operators,
        seconds=ask.seconds,
        answered=ask.answered,
        returned=ask.returned,
        held=ask.held,
    )
    return WaitAnswer(
        wake_ups=[
            WakeUpAnswer(id=each.id, operator=each.channel.operator, priority=each.channel.priority)
            for each in found
        ]
    )


async def claim(parts: Parts, call: Call) -> Answer:
    """One task by its number, or the next ones of an operator."""
    ask: ClaimAsk = call.ask
    require_invoked(parts, call, task_id=ask.task_id)
    if (ask.task_id is None) == (ask.operator is None):
        return malformed("A claim names a task or an operator, and not both.", field="task_id")
    if ask.task_id is not None:
        if ask.job is not None or ask.limit != 1 or ask.in_batches:
            told = "`job`, `limit` and `in_batches` are for claims of an operator."
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
            if found.why is Why.STALE:
                note_refused(parts, call, reason=found.why.value, claims=call.claims)
            return refusal_problem(found)
        return ClaimAnswer(tasks=[_assignment(found, parts)])
    assert ask.operator is not None, "looked at above"
    if ask.job is None and not ask.in_batches and 1 <= ask.limit <= BATCH_MAX:
        gathered = await parts.claim(ask.operator, worker=call.worker, limit=ask.limit)
        return ClaimAnswer(tasks=[_assignment(each, parts) for each in gathered])
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
    )
    return ClaimAnswer(tasks=[_assignment(each, parts) for each in claimed])


async def heartbeat(parts: Parts, call: Call) -> Answer | Reply:
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
    return Reply(body, status)


async def complete(parts: Parts, call: Call) -> Answer | Reply:
    """End attempts: those that have succeeded, those that have failed, and those handed back."""
    ask: CompleteAsk = call.ask
    for place, each in enumerate(ask.tasks):
        if each.failure is not None and each.release is not None:
            field = f"tasks[{place}].release"
            return malformed("An attempt has failed or is handed back, not both.", field=field)
        if each.outputs and (each.failure is not None or each.release is not None):
            field = f"tasks[{place}].outputs"
            what = "has failed" if each.failure is not None else "is handed back"
            return malformed(f"An attempt that {what} has no outputs.", field=field)
    without_twins([each.task_id for each in ask.tasks], most=BATCH_MAX)
    proofs = await prove_each(parts, call, ask.tasks)
    held = proved(proofs, ask.tasks)
    sayings = [_saying(each, claims, _why_not(parts, call, each, claims)) for each, claims in held]
    found = await parts.end(sayings) if held else ()
    note_fenced(parts, call, zip(found, (claims for _, claims in held), strict=True))
    if held:
        (parts.kick_after_ends or parts.kick)()
    body, status = results_answer(answered(proofs, [_end(each) for each in found]))
    return Reply(body, status)


async def _renewed(
    parts: Parts, judged: Sequence[tuple[Extended | Refusal, Claims]]
) -> Mapping[int, str]:
    """The next tokens, by task; none of those that could not be signed now."""
    extended = [(one, claims) for one, claims in judged if isinstance(one, Extended)]
    return await parts.issuer.renewed(extended) if extended else {}


def _why_not(parts: Parts, call: Call, ask: EndAsk, claims: Claims) -> str:
    """Why the outputs of an attempt may not be published; empty if they may."""
    if (found := misplaced(ask.outputs, claims.grants)) is None:
        return ""
    output, why = found
    said = {"dataset": output.dataset, "location": storable(output.location[:_SHOWN_MAX])}
    note_refused(parts, call, reason="outside of its grants", claims=claims, detail=said)
    return why


def _assignment(claimed: Claimed, parts: Parts) -> Assignment:
    return Assignment(
        task_id=claimed.task_id,
        attempt=claimed.attempt,
        lease_token=claimed.lease_token,
        lease_expires_at=claimed.lease_expires_at,
        heartbeat_seconds=claimed.heartbeat_ms / 1000,
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
        columns=msgspec.convert(claimed.columns, dict[str, list[ColumnAnswer]]),
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


def _saying(ask: EndAsk, claims: Claims, why_not: str) -> Saying:
    fence = _fence(ask, claims)
    if ask.release is not None:
        release = ask.release
        return Release(
            fence, release.reason, release.is_delayed, ask.log, ask.metrics, release.runs_alone
        )
    if ask.failure is not None:
        failure = ask.failure
        return Failure(
            fence, failure.reason, failure.is_retried, ask.log, ask.metrics, failure.runs_alone
        )
    outputs = tuple(
        Output(
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


def _beat(found: Extended | Refusal, tokens: Mapping[int, str]) -> TaskResult:
    if isinstance(found, Refusal):
        return refused_result(found)
    return TaskResult(
        task_id=found.task_id,
        status=200,
        lease_expires_at=found.lease_expires_at,
        cancel_asked=found.cancel_asked,
        token=tokens.get(found.task_id, ""),
    )


def _end(found: Ended | Refusal) -> TaskResult:
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


def _published(found: Published) -> PublishedAnswer:
    return PublishedAnswer(
        dataset=found.dataset,
        partition_key=found.partition_key,
        outcome=found.outcome.value,
        revision=found.revision,
        event_seq=found.event_seq,
    )
