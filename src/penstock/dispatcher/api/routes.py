"""The routes: all endpoints, and the two applications that they make.

The internal listener has what workers and sources need; the public one what people and their
programs do. Neither has anything of the other's but the probes and its own OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from penstock.dispatcher.api import (
    buffer_endpoints,
    catalog_endpoints,
    control_endpoints,
    dag_endpoints,
    dataset_endpoints,
    event_endpoints,
    key_endpoints,
    query_endpoints,
    read_endpoints,
    worker_endpoints,
)
from penstock.dispatcher.api.application import Application
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import (
    ApiCall,
    ApiEndpoint,
    HttpReply,
    RequiredProof,
    document,
)
from penstock.dispatcher.api.requests import RequestLimits
from penstock.kernel.clock import Clock
from penstock.kernel.units import WAIT_SECONDS_MAX
from penstock.protocol import base, dags, events, work
from penstock.protocol import steering as steer
from penstock.protocol import work as creds

_APPLY_SECONDS_MAX: Final = 60.0
_WAITED_SECONDS_MORE: Final = 5.0

PROBES: Final = (
    ApiEndpoint(
        "GET",
        "/healthz",
        "Liveness probe",
        read_endpoints.healthz,
        answer=base.HealthAnswer,
        proof=RequiredProof.NONE,
        is_probe=True,
    ),
    ApiEndpoint(
        "GET",
        "/readyz",
        "Readiness probe: whether the database answers",
        read_endpoints.readyz,
        answer=base.HealthAnswer,
        problems=(503,),
        proof=RequiredProof.NONE,
        is_probe=True,
    ),
)

INTERNAL: Final = (
    *key_endpoints.INTERNAL,
    *query_endpoints.INTERNAL,
    *buffer_endpoints.INTERNAL,
    ApiEndpoint(
        "POST",
        "/internal/hello",
        "Register a worker, or report that it leaves",
        worker_endpoints.hello,
        ask=work.HelloAsk,
        answer=work.HelloAnswer,
        proof=RequiredProof.WORKER,
    ),
    ApiEndpoint(
        "POST",
        "/internal/wait",
        "Wait until an operator has work",
        worker_endpoints.wait,
        ask=work.WaitAsk,
        answer=work.WaitAnswer,
        problems=(409,),
        proof=RequiredProof.WORKER,
        request_seconds_max=WAIT_SECONDS_MAX + _WAITED_SECONDS_MORE,
        is_wait=True,
    ),
    ApiEndpoint(
        "POST",
        "/internal/task-claim",
        "Claim tasks",
        worker_endpoints.claim,
        ask=work.ClaimAsk,
        answer=work.ClaimAnswer,
        problems=(404, 409),
        proof=RequiredProof.WORKER_OR_INVOCATION,
    ),
    ApiEndpoint(
        "POST",
        "/internal/events",
        "Ingest events",
        event_endpoints.events,
        ask=events.EventsAsk,
        answer=events.EventsAnswer,
        proof=RequiredProof.SOURCE,
    ),
    ApiEndpoint(
        "GET",
        "/internal/sources",
        "List the sources of the current DAG",
        event_endpoints.sources,
        answer=events.SourcesAnswer,
        proof=RequiredProof.SOURCE,
    ),
    ApiEndpoint(
        "POST",
        "/internal/webhook-refusals",
        "Record requests that a webhook source refused",
        event_endpoints.webhook_refusals,
        ask=events.RefusalsAsk,
        answer=events.RefusalsAnswer,
        proof=RequiredProof.SOURCE,
    ),
    ApiEndpoint(
        "POST",
        "/v1/task/heartbeat",
        "Send heartbeats, which extend leases",
        worker_endpoints.heartbeat,
        # Twice what workers send: what tasks say of themselves is decoded before they are proved.
        body_bytes_max=2**20,
        ask=work.HeartbeatAsk,
        answer=work.ResultsAnswer,
        is_several=True,
        problems=(404, 409),
        proof=RequiredProof.EACH_TASK,
    ),
    ApiEndpoint(
        "POST",
        "/v1/task/complete",
        "Complete, fail or release attempts",
        worker_endpoints.complete,
        ask=work.CompleteAsk,
        answer=work.ResultsAnswer,
        is_several=True,
        problems=(404, 409),
        proof=RequiredProof.EACH_TASK,
    ),
    ApiEndpoint(
        "POST",
        "/v1/task/events",
        "Ingest events from a running task",
        event_endpoints.task_events,
        ask=events.TaskEventsAsk,
        answer=events.EventsAnswer,
        problems=(404, 409),
        proof=RequiredProof.TASK,
    ),
    ApiEndpoint(
        "POST",
        "/v1/task/credentials",
        "Get storage credentials for a task",
        worker_endpoints.credentials,
        ask=creds.CredentialsAsk,
        answer=creds.CredentialsAnswer,
        problems=(404, 409),
        may_omit_body=True,
        proof=RequiredProof.TASK,
    ),
)

_DAG: Final = (
    ApiEndpoint(
        "GET",
        "/v1/dag",
        "Get the current DAG",
        dag_endpoints.dag,
        answer=dags.DagAnswer,
        problems=(404,),
    ),
    ApiEndpoint(
        "POST",
        "/v1/dag",
        "Apply a DAG",
        dag_endpoints.apply,
        ask=dags.ApplyAsk,
        answer=dags.AppliedAnswer,
        problems=(409,),
        request_seconds_max=_APPLY_SECONDS_MAX,
    ),
    ApiEndpoint(
        "GET",
        "/v1/dag/versions",
        "List the versions of the DAG",
        dag_endpoints.versions,
        params=base.LimitParams,
        answer=dags.VersionsAnswer,
    ),
    ApiEndpoint(
        "POST",
        "/v1/dag/rollback",
        "Roll back to an earlier version of the DAG",
        dag_endpoints.rollback,
        ask=dags.RollbackAsk,
        answer=dags.AppliedAnswer,
        problems=(404, 409),
        may_omit_body=True,
        request_seconds_max=_APPLY_SECONDS_MAX,
    ),
    ApiEndpoint(
        "POST",
        "/v1/trigger",
        "Trigger a source with an event",
        event_endpoints.trigger,
        ask=steer.TriggerAsk,
        answer=steer.TriggerAnswer,
        problems=(404, 409),
    ),
    ApiEndpoint(
        "POST",
        "/v1/triggers",
        "Trigger a source with several events",
        event_endpoints.triggers,
        ask=steer.TriggersAsk,
        answer=steer.TriggersAnswer,
        problems=(404, 409),
    ),
)

_CUT_OVER: Final = ApiEndpoint(
    "POST",
    "/v1/datasets/{name}/cut-over",
    "Cut over to the generation that is being built",
    dag_endpoints.cut_over,
    ask=dags.CutOverAsk,
    params=base.NameParams,
    answer=dags.CutOverAnswer,
    problems=(404, 409),
    may_omit_body=True,
)

_TASKS: Final = (
    ApiEndpoint(
        "GET",
        "/v1/tasks",
        "List tasks, newest first",
        read_endpoints.tasks,
        params=base.TasksParams,
        answer=steer.TasksAnswer,
        problems=(404,),
    ),
    ApiEndpoint(
        "GET",
        "/v1/tasks/{id}",
        "Get a task",
        read_endpoints.task,
        params=base.NumberParams,
        answer=steer.TaskAnswer,
        problems=(404,),
    ),
    ApiEndpoint(
        "POST",
        "/v1/tasks/cancel",
        "Cancel tasks",
        control_endpoints.cancel_tasks,
        ask=steer.TaskIdsAsk,
        answer=work.ResultsAnswer,
        is_several=True,
        problems=(404, 409),
    ),
    ApiEndpoint(
        "POST",
        "/v1/tasks/replay",
        "Replay dead tasks",
        control_endpoints.replay_tasks,
        ask=steer.TaskIdsAsk,
        answer=work.ResultsAnswer,
        is_several=True,
        problems=(404, 409),
    ),
)

_BACKFILLS: Final = (
    ApiEndpoint(
        "GET",
        "/v1/backfills",
        "List backfills, newest first",
        read_endpoints.backfills,
        params=base.LimitParams,
        answer=steer.BackfillsAnswer,
    ),
    ApiEndpoint(
        "POST",
        "/v1/backfills",
        "Create a backfill",
        control_endpoints.create_backfill,
        ask=steer.BackfillAsk,
        answer=steer.BackfillAnswer,
        problems=(404, 409),
    ),
    ApiEndpoint(
        "GET",
        "/v1/backfills/{id}",
        "Get a backfill",
        read_endpoints.backfill,
        params=base.NumberParams,
        answer=steer.BackfillAnswer,
        problems=(404,),
    ),
    *(
        ApiEndpoint(
            "POST",
            f"/v1/backfills/{{id}}/{verb}",
            f"{verb.capitalize()} a backfill",
            handler,
            params=base.NumberParams,
            answer=steer.BackfillAnswer,
            problems=(404, 409),
        )
        for verb, handler in (
            ("pause", control_endpoints.pause_backfill),
            ("resume", control_endpoints.resume_backfill),
            ("cancel", control_endpoints.cancel_backfill),
        )
    ),
)

_STEERING: Final = (
    ApiEndpoint(
        "POST",
        "/v1/jobs/{name}/pause",
        "Pause a job",
        control_endpoints.pause_job,
        ask=steer.PauseAsk,
        params=base.NameParams,
        answer=steer.JobPausesAnswer,
        problems=(404,),
        may_omit_body=True,
    ),
    ApiEndpoint(
        "POST",
        "/v1/jobs/{name}/resume",
        "Resume a job",
        control_endpoints.resume_job,
        params=base.NameParams,
        answer=steer.JobPausesAnswer,
        problems=(404,),
    ),
    ApiEndpoint(
        "PUT",
        "/v1/operators/{name:path}",
        "Set the concurrency limit of an operator",
        control_endpoints.limit_operator,
        ask=steer.OperatorLimitAsk,
        params=base.NameParams,
        answer=steer.OperatorLimitAnswer,
        problems=(404,),
    ),
    ApiEndpoint(
        "POST",
        "/v1/outbox/retry",
        "Retry parked outbox entries",
        control_endpoints.retry_outbox,
        ask=steer.OutboxRetryAsk,
        answer=steer.OutboxRetryAnswer,
    ),
)

_LOOKING: Final = (
    ApiEndpoint(
        "GET",
        "/v1/datasets/{name}/partitions",
        "List the published partitions of a dataset",
        read_endpoints.partitions,
        params=base.PartitionsParams,
        answer=steer.PartitionsAnswer,
        problems=(404,),
    ),
    *(
        ApiEndpoint("GET", path, summary, handler, answer=answer)
        for path, summary, handler, answer in (
            ("/v1/status", "Get the overall status", read_endpoints.status, steer.StatusAnswer),
            (
                "/v1/pressure",
                "List jobs under backpressure, and what is paused",
                read_endpoints.pressure,
                steer.PressuresAnswer,
            ),
            (
                "/v1/operators",
                "List operators with their load",
                read_endpoints.operators,
                steer.OperatorsAnswer,
            ),
            ("/v1/datasets", "List datasets", read_endpoints.datasets, steer.DatasetsAnswer),
            (
                "/v1/outbox",
                "List parked outbox entries",
                read_endpoints.outbox,
                steer.OutboxAnswer,
            ),
        )
    ),
    ApiEndpoint("GET", "/metrics", "Prometheus metrics", read_endpoints.metrics, answer=None),
)

_ALL: Final = (
    *(*_DAG, _CUT_OVER, *_TASKS, *_BACKFILLS, *_STEERING, *_LOOKING),
    *dataset_endpoints.ENDPOINTS,
    *control_endpoints.ENDPOINTS,
    *key_endpoints.PUBLIC,
    *read_endpoints.PUBLIC,
    *query_endpoints.PUBLIC,
    *buffer_endpoints.PUBLIC,
)
# Who may look at the console may ask for the same: whatever is asked by GET changes nothing.
PUBLIC: Final = tuple(
    replace(each, proof=RequiredProof.LOOKING)
    if (each.method, each.proof) == ("GET", RequiredProof.API_TOKEN)
    else each
    for each in _ALL
)


def internal_app(
    parts: ApiContext, *, limits: RequestLimits | None = None, clock: Clock | None = None
) -> Application:
    """The application of the internal listener."""
    endpoints = _documented("Penstock, internal", (*INTERNAL, *PROBES), RequiredProof.NONE)
    return Application(
        "internal", endpoints, parts, counters=parts.metrics.counters, limits=limits, clock=clock
    )


def public_app(
    parts: ApiContext, *, limits: RequestLimits | None = None, clock: Clock | None = None
) -> Application:
    """The application of the public listener."""
    endpoints = _documented("Penstock", (*PUBLIC, *PROBES), RequiredProof.LOOKING)
    return Application(
        "public",
        endpoints,
        parts,
        counters=parts.metrics.counters,
        limits=limits,
        clock=clock,
        under={catalog_endpoints.PREFIX: catalog_endpoints.CatalogApplication(parts, clock=clock)},
    )


def _documented(
    title: str, endpoints: Sequence[ApiEndpoint], proof: RequiredProof
) -> Sequence[ApiEndpoint]:
    """The endpoints, and one more with their document."""
    encoded = msgspec.json.encode(document(title, endpoints))

    async def openapi(_parts: ApiContext, _: ApiCall) -> HttpReply:
        return HttpReply(encoded)

    described = ApiEndpoint(
        "GET", "/openapi.json", "This OpenAPI document", openapi, answer=None, proof=proof
    )
    return (*endpoints, described)
