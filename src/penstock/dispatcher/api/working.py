"""What workers ask: hello, claim, heartbeat, complete.

Who claims has to say who it is. Who holds an attempt proves it by its fence, and needs nothing
else: a lost identity never costs work that is done.
"""

from __future__ import annotations

import msgspec

from penstock.datasets.schema import Column
from penstock.dispatcher.api.endpoints import Call, Reply
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.problems import (
    malformed,
    refusal_problem,
    refused_result,
    results_answer,
    unknown,
)
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
)
from penstock.dispatcher.wire.base import Answer
from penstock.dispatcher.wire.work import (
    Assignment,
    ClaimAnswer,
    ClaimAsk,
    CompleteAsk,
    EndAsk,
    FactsAsk,
    HeartbeatAsk,
    HelloAsk,
    InputAnswer,
    PublishedAnswer,
    TaskResult,
)
from penstock.runtimes.base import Facts


async def hello(parts: Parts, call: Call) -> Answer:
    """A worker is there, and learns what to serve."""
    ask: HelloAsk = call.ask
    return await parts.views.hello(call.worker, ask)


async def claim(parts: Parts, call: Call) -> Answer:
    """One task by its number, or the next ones of an operator."""
    ask: ClaimAsk = call.ask
    if (ask.task_id is None) == (ask.operator is None):
        return malformed("A claim names a task or an operator, and not both.", field="task_id")
    if ask.task_id is not None:
        if ask.job is not None or ask.limit != 1 or ask.in_batches:
            told = "`job`, `limit` and `in_batches` are for claims of an operator."
            return malformed(told, field="task_id")
        found = await parts.tasks.claim(ask.task_id, worker=call.worker)
        if isinstance(found, Refusal):
            return refusal_problem(found)
        return ClaimAnswer(tasks=[_assignment(found)])
    assert ask.operator is not None, "looked at above"
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
    )
    return ClaimAnswer(tasks=[_assignment(each) for each in claimed])


async def heartbeat(parts: Parts, call: Call) -> Answer | Reply:
    """Extend leases, and learn what is to be cancelled."""
    ask: HeartbeatAsk = call.ask
    fences = [Fence(each.task_id, each.attempt, each.lease_token) for each in ask.tasks]
    progress = {each.task_id: each.progress for each in ask.tasks if each.progress is not None}
    found = await parts.tasks.heartbeat(fences, progress=progress)
    body, status = results_answer([_beat(each) for each in found])
    return Reply(body, status)


async def complete(parts: Parts, call: Call) -> Answer | Reply:
    """End attempts: those that have succeeded and those that have failed."""
    ask: CompleteAsk = call.ask
    for place, each in enumerate(ask.tasks):
        if each.failure is not None and each.outputs:
            field = f"tasks[{place}].outputs"
            return malformed("An attempt that has failed has no outputs.", field=field)
    found = await parts.end([_saying(each) for each in ask.tasks])
    parts.kick()
    body, status = results_answer([_end(each) for each in found])
    return Reply(body, status)


def _assignment(claimed: Claimed) -> Assignment:
    return Assignment(
        task_id=claimed.task_id,
        attempt=claimed.attempt,
        lease_token=claimed.lease_token,
        lease_expires_at=claimed.lease_expires_at,
        heartbeat_seconds=claimed.heartbeat_ms / 1000,
        timeout_seconds=claimed.timeout_ms / 1000,
        job=claimed.job,
        operator=claimed.operator,
        runtime=claimed.runtime,
        generation=claimed.generation,
        definition=dict(claimed.definition),
        payload=dict(claimed.payload),
        inputs=msgspec.convert(claimed.inputs, dict[str, InputAnswer]),
        batch=claimed.batch,
    )


def _saying(ask: EndAsk) -> Completion | Failure:
    fence = Fence(ask.task_id, ask.attempt, ask.lease_token)
    if ask.failure is not None:
        failure = ask.failure
        return Failure(fence, failure.reason, failure.is_retried, ask.log, ask.metrics)
    outputs = tuple(
        Output(
            dataset=each.dataset,
            location=each.location,
            partition_key=each.partition_key,
            start=each.start,
            end=each.end,
            cursor=each.cursor,
            append_key=each.append_key,
            facts=None if each.facts is None else _facts(each.facts),
        )
        for each in ask.outputs
    )
    return Completion(fence, outputs, ask.log, ask.metrics)


def _facts(ask: FactsAsk) -> Facts:
    return Facts(
        manifest=ask.manifest,
        files=ask.files,
        rows=ask.rows,
        bytes=ask.bytes,
        columns=tuple(Column(each.name, each.type, each.is_nullable) for each in ask.columns),
    )


def _beat(found: Extended | Refusal) -> TaskResult:
    if isinstance(found, Refusal):
        return refused_result(found)
    return TaskResult(
        task_id=found.task_id,
        status=200,
        lease_expires_at=found.lease_expires_at,
        cancel_asked=found.cancel_asked,
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
    )


def _published(found: Published) -> PublishedAnswer:
    return PublishedAnswer(
        dataset=found.dataset,
        partition_key=found.partition_key,
        outcome=found.outcome.value,
        revision=found.revision,
        event_seq=found.event_seq,
    )
