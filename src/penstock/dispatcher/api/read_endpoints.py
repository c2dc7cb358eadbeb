"""The read endpoints: status, tasks, datasets, pressure, metrics, alerts, and the probes.

Alert rules and destinations are settings and not part of the API.
"""

from __future__ import annotations

import asyncio
from typing import Final

from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall, ApiEndpoint, HttpReply
from penstock.dispatcher.api.problems import unknown
from penstock.dispatcher.views.status import AlertViews
from penstock.kernel.errors import DatabaseUnavailable
from penstock.protocol.base import (
    Answer,
    HealthAnswer,
    LimitParams,
    NumberParams,
    PartitionsParams,
    TasksParams,
)
from penstock.protocol.problem import Problem
from penstock.protocol.steering import AlertsAnswer, AlertsParams, StatusAnswer

_READY_SECONDS_MAX: Final = 3.0
_OPEN: Final = ("running", "paused")
_PROMETHEUS: Final = b"text/plain; version=0.0.4; charset=utf-8"


async def status(parts: ApiContext, _: ApiCall) -> Answer:
    """The state of everything, on one page."""
    seen = await parts.views.overall()
    pending, parked = await parts.outbox.counts()
    plans = await parts.backfills.list(limit=100)
    return StatusAnswer(
        dag_version=seen.dag_version,
        now=seen.now,
        jobs=seen.jobs,
        events_pending=seen.events_pending,
        outbox_pending=pending,
        outbox_parked=parked,
        workers=seen.workers,
        backfills=[each for each in plans.backfills if each.state in _OPEN],
        tables=seen.tables,
    )


async def tasks(parts: ApiContext, call: ApiCall) -> Answer:
    """Tasks, the latest first."""
    params: TasksParams = call.params
    job_id = None
    if params.job is not None:
        job_id = await parts.views.job_id(params.job)
        if job_id is None:
            return unknown(f"There is no job {params.job!r}.")
    return await parts.views.tasks(
        job_id=job_id,
        status=params.status,
        before=params.before,
        limit=params.limit,
        partition_key=params.partition_key,
    )


async def task(parts: ApiContext, call: ApiCall) -> Answer:
    """Everything about one task."""
    params: NumberParams = call.params
    found = await parts.views.task(params.id)
    return found if found is not None else unknown(f"There is no task {params.id}.")


async def backfills(parts: ApiContext, call: ApiCall) -> Answer:
    """Backfills, the latest first."""
    params: LimitParams = call.params
    return await parts.backfills.list(limit=params.limit)


async def backfill(parts: ApiContext, call: ApiCall) -> Answer:
    """One backfill."""
    params: NumberParams = call.params
    found = await parts.backfills.get(params.id)
    return found if found is not None else unknown(f"There is no backfill {params.id}.")


async def pressure(parts: ApiContext, _: ApiCall) -> Answer:
    """Which jobs are pressed, and who is paused."""
    return await parts.pressures.answer()


async def operators(parts: ApiContext, _: ApiCall) -> Answer:
    """What an autoscaler needs to know."""
    return await parts.metrics.operators()


async def datasets(parts: ApiContext, _: ApiCall) -> Answer:
    """All datasets and their generations."""
    return await parts.views.datasets()


async def partitions(parts: ApiContext, call: ApiCall) -> Answer:
    """What is published of a dataset."""
    params: PartitionsParams = call.params
    found = await parts.views.partitions(
        params.name, generation=params.generation, after=params.after, limit=params.limit
    )
    if found is not None:
        return found
    which = f"has no generation {params.generation}" if params.generation else "is not there"
    return unknown(f"The dataset {params.name!r} {which}.")


async def outbox(parts: ApiContext, _: ApiCall) -> Answer:
    """What is parked."""
    return await parts.outbox.parked()


async def metrics(parts: ApiContext, _: ApiCall) -> HttpReply:
    """Metrics in the Prometheus format."""
    text = await parts.metrics.text()
    return HttpReply(text.encode(), content_type=_PROMETHEUS)


async def healthz(_parts: ApiContext, _: ApiCall) -> Answer:
    """Whether this process answers."""
    return HealthAnswer(status="ok")


async def readyz(parts: ApiContext, _: ApiCall) -> Answer:
    """Whether this process can serve: its database answers, soon."""
    try:
        async with asyncio.timeout(_READY_SECONDS_MAX):
            await parts.readiness.look()
    except (DatabaseUnavailable, TimeoutError):
        title = "The database does not answer."
        return Problem(type="unavailable", title=title, status=503)
    return HealthAnswer(status="ready")


async def alerts(parts: ApiContext, call: ApiCall) -> Answer:
    """Open and past alerts, with their notifications."""
    params: AlertsParams = call.params
    return await AlertViews(parts.database).alerts(
        state=params.state, before=params.before, limit=params.limit
    )


PUBLIC: Final = (
    ApiEndpoint(
        "GET",
        "/v1/alerts",
        "List alerts and their notifications",
        alerts,
        params=AlertsParams,
        answer=AlertsAnswer,
    ),
)
