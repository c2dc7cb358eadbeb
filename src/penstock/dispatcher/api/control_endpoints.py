"""The control endpoints: tasks, backfills, pauses of one job or all, limits, and the outbox."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from penstock.dispatcher import backpressure
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall, ApiEndpoint, HttpReply
from penstock.dispatcher.api.problems import (
    conflict,
    malformed,
    refused_result,
    results_answer,
    unknown,
)
from penstock.dispatcher.backfills import BackfillRefusalReason, BackfillRefused
from penstock.dispatcher.tasks.model import Refusal, TaskSnapshot
from penstock.protocol.base import Answer, NameParams, NumberParams
from penstock.protocol.steering import (
    BackfillAnswer,
    BackfillAsk,
    EverythingAnswer,
    JobPausesAnswer,
    OperatorLimitAnswer,
    OperatorLimitAsk,
    OutboxRetryAnswer,
    OutboxRetryAsk,
    PauseAsk,
    TaskIdsAsk,
)
from penstock.protocol.work import TaskResult


async def cancel_tasks(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """Cancel what waits, and ask what runs to stop."""
    ask: TaskIdsAsk = call.ask
    return _results(await parts.tasks.cancel(ask.tasks, reason=ask.reason))


async def replay_tasks(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """Replay dead tasks."""
    ask: TaskIdsAsk = call.ask
    found = await parts.tasks.replay(ask.tasks)
    parts.kick()
    return _results(found)


async def create_backfill(parts: ApiContext, call: ApiCall) -> Answer:
    """Plan partitions of a job to be computed."""
    ask: BackfillAsk = call.ask
    found = await parts.backfills.create(ask)
    if isinstance(found, BackfillAnswer):
        parts.kick()
        return found
    return _refused_plan(found)


async def pause_backfill(parts: ApiContext, call: ApiCall) -> Answer:
    """Make no more tasks of a plan for now."""
    params: NumberParams = call.params
    return _plan(parts, params.id, await parts.backfills.pause(params.id))


async def resume_backfill(parts: ApiContext, call: ApiCall) -> Answer:
    """Go on with a plan."""
    params: NumberParams = call.params
    return _plan(parts, params.id, await parts.backfills.resume(params.id))


async def cancel_backfill(parts: ApiContext, call: ApiCall) -> Answer:
    """End a plan, and what waits of it."""
    params: NumberParams = call.params
    return _plan(parts, params.id, await parts.backfills.cancel(params.id))


async def pause_job(parts: ApiContext, call: ApiCall) -> Answer:
    """Have a job start nothing until it is resumed."""
    params: NameParams = call.params
    ask: PauseAsk = call.ask
    return await _pauses(parts, params.name, await parts.pressures.pause(params.name, ask.reason))


async def resume_job(parts: ApiContext, call: ApiCall) -> Answer:
    """End the pause that a person has made."""
    params: NameParams = call.params
    return await _pauses(parts, params.name, await parts.pressures.resume(params.name))


async def limit_operator(parts: ApiContext, call: ApiCall) -> Answer:
    """Say how many tasks of an operator may run at a time."""
    params: NameParams = call.params
    ask: OperatorLimitAsk = call.ask
    if not await parts.metrics.limit_operator(params.name, ask.in_flight_max):
        return unknown(f"No job has ever had an operator {params.name!r}.")
    parts.kick()
    return OperatorLimitAnswer(name=params.name, in_flight_max=ask.in_flight_max)


async def retry_outbox(parts: ApiContext, call: ApiCall) -> Answer:
    """Try parked rows again."""
    ask: OutboxRetryAsk = call.ask
    retried = await parts.outbox.retry(ask.ids)
    parts.kick()
    return OutboxRetryAnswer(retried=retried)


def _results(found: Iterable[TaskSnapshot | Refusal]) -> HttpReply:
    body, status = results_answer([_result(each) for each in found])
    return HttpReply(body, status)


def _result(found: TaskSnapshot | Refusal) -> TaskResult:
    if isinstance(found, Refusal):
        return refused_result(found)
    return TaskResult(
        task_id=found.task_id,
        status=200,
        task_status=found.status.value,
        cancel_asked=found.cancel_asked,
        due_at=found.due_at,
    )


def _plan(
    parts: ApiContext, backfill_id: int, found: BackfillAnswer | BackfillRefused | None
) -> Answer:
    if found is None:
        return unknown(f"There is no backfill {backfill_id}.")
    if isinstance(found, BackfillAnswer):
        parts.kick()
        return found
    return _refused_plan(found)


def _refused_plan(found: BackfillRefused) -> Answer:
    match found.why:
        case BackfillRefusalReason.UNKNOWN_JOB:
            return unknown(found.detail)
        case BackfillRefusalReason.INVALID:
            return malformed(found.detail)
        case BackfillRefusalReason.NOT_RUN | BackfillRefusalReason.OVER:
            return conflict(found.why.value, found.detail)


async def _pauses(parts: ApiContext, job: str, is_known: bool) -> Answer:  # noqa: FBT001 - by name
    if not is_known:
        return unknown(f"There is no job {job!r}.")
    parts.kick()
    return JobPausesAnswer(job=job, pauses=await parts.views.pauses(job))


async def pause_everything(parts: ApiContext, call: ApiCall) -> Answer:
    """Have no job start anything until it is resumed."""
    ask: PauseAsk = call.ask
    return _answer(await backpressure.pause_everything(parts.database, ask.reason))


async def resume_everything(parts: ApiContext, _: ApiCall) -> Answer:
    """End all pauses that people have made."""
    found = await backpressure.resume_everything(parts.database)
    parts.kick()
    return _answer(found)


def _answer(found: backpressure.PausedJobs) -> EverythingAnswer:
    return EverythingAnswer(
        jobs=found.jobs, paused_by_people=found.by_people, paused_by_pressure=found.by_pressure
    )


ENDPOINTS: Final = (
    ApiEndpoint(
        "POST",
        "/v1/pause",
        "Pause all jobs",
        pause_everything,
        ask=PauseAsk,
        answer=EverythingAnswer,
        may_omit_body=True,
    ),
    ApiEndpoint(
        "POST", "/v1/resume", "Resume all jobs", resume_everything, answer=EverythingAnswer
    ),
)
