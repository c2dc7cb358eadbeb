"""What people steer: tasks, backfills, pauses, limits, the outbox."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.dispatcher.api.endpoints import Call, Reply
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.problems import (
    conflict,
    malformed,
    refused_result,
    results_answer,
    unknown,
)
from penstock.dispatcher.backfills.plans import Refused, WhyRefused
from penstock.dispatcher.tasks.values import Refusal, TaskState
from penstock.dispatcher.wire.asking import NameParams, NumberParams
from penstock.dispatcher.wire.base import Answer
from penstock.dispatcher.wire.steering import (
    BackfillAnswer,
    BackfillAsk,
    JobPausesAnswer,
    OperatorLimitAnswer,
    OperatorLimitAsk,
    OutboxRetryAnswer,
    OutboxRetryAsk,
    PauseAsk,
    TaskIdsAsk,
)
from penstock.dispatcher.wire.work import TaskResult


async def cancel_tasks(parts: Parts, call: Call) -> Answer | Reply:
    """Cancel what waits, and ask what runs to stop."""
    ask: TaskIdsAsk = call.ask
    return _results(await parts.tasks.cancel(ask.tasks, reason=ask.reason))


async def replay_tasks(parts: Parts, call: Call) -> Answer | Reply:
    """Queue dead tasks again."""
    ask: TaskIdsAsk = call.ask
    found = await parts.tasks.replay(ask.tasks)
    parts.kick()
    return _results(found)


async def create_backfill(parts: Parts, call: Call) -> Answer:
    """Plan partitions of a job to be computed."""
    ask: BackfillAsk = call.ask
    found = await parts.backfills.create(ask)
    if isinstance(found, BackfillAnswer):
        parts.kick()
        return found
    return _refused_plan(found)


async def pause_backfill(parts: Parts, call: Call) -> Answer:
    """Make no more tasks of a plan for now."""
    params: NumberParams = call.params
    return _plan(parts, params.id, await parts.backfills.pause(params.id))


async def resume_backfill(parts: Parts, call: Call) -> Answer:
    """Go on with a plan."""
    params: NumberParams = call.params
    return _plan(parts, params.id, await parts.backfills.resume(params.id))


async def cancel_backfill(parts: Parts, call: Call) -> Answer:
    """End a plan, and what waits of it."""
    params: NumberParams = call.params
    return _plan(parts, params.id, await parts.backfills.cancel(params.id))


async def pause_job(parts: Parts, call: Call) -> Answer:
    """Have a job start nothing until it is resumed."""
    params: NameParams = call.params
    ask: PauseAsk = call.ask
    return await _pauses(parts, params.name, await parts.pressures.pause(params.name, ask.reason))


async def resume_job(parts: Parts, call: Call) -> Answer:
    """End the pause that a person has made."""
    params: NameParams = call.params
    return await _pauses(parts, params.name, await parts.pressures.resume(params.name))


async def limit_operator(parts: Parts, call: Call) -> Answer:
    """Say how many tasks of an operator may run at a time."""
    params: NameParams = call.params
    ask: OperatorLimitAsk = call.ask
    if not await parts.metrics.limit_operator(params.name, ask.in_flight_max):
        return unknown(f"No job has ever had an operator {params.name!r}.")
    parts.kick()
    return OperatorLimitAnswer(name=params.name, in_flight_max=ask.in_flight_max)


async def retry_outbox(parts: Parts, call: Call) -> Answer:
    """Try parked rows again."""
    ask: OutboxRetryAsk = call.ask
    retried = await parts.outbox.retry(ask.ids)
    parts.kick()
    return OutboxRetryAnswer(retried=retried)


def _results(found: Iterable[TaskState | Refusal]) -> Reply:
    body, status = results_answer([_result(each) for each in found])
    return Reply(body, status)


def _result(found: TaskState | Refusal) -> TaskResult:
    if isinstance(found, Refusal):
        return refused_result(found)
    return TaskResult(
        task_id=found.task_id,
        status=200,
        task_status=found.status.value,
        cancel_asked=found.cancel_asked,
        due_at=found.due_at,
    )


def _plan(parts: Parts, backfill_id: int, found: BackfillAnswer | Refused | None) -> Answer:
    if found is None:
        return unknown(f"There is no backfill {backfill_id}.")
    if isinstance(found, BackfillAnswer):
        parts.kick()
        return found
    return _refused_plan(found)


def _refused_plan(found: Refused) -> Answer:
    match found.why:
        case WhyRefused.UNKNOWN_JOB:
            return unknown(found.detail)
        case WhyRefused.INVALID:
            return malformed(found.detail)
        case WhyRefused.NOT_RUN | WhyRefused.OVER:
            return conflict(found.why.value, found.detail)


async def _pauses(parts: Parts, job: str, is_known: bool) -> Answer:  # noqa: FBT001 - by name
    if not is_known:
        return unknown(f"There is no job {job!r}.")
    parts.kick()
    return JobPausesAnswer(job=job, pauses=await parts.views.pauses(job))
