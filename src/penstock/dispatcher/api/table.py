"""All endpoints, and the two applications that they make.

The internal listener has what workers and sources need; the public one what people and their
programs do. Neither has anything of the other's but the probes and its own OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from penstock.dispatcher.api import (
    alerts,
    credentials,
    datasets,
    deploying,
    keys,
    looking,
    pausing,
    steering,
    telling,
    working,
)
from penstock.dispatcher.api.application import Application
from penstock.dispatcher.api.endpoints import Call, Endpoint, Proof, Reply
from penstock.dispatcher.api.openapi import document
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.requests import Limits
from penstock.dispatcher.wire import asking, dags, events, health, work
from penstock.dispatcher.wire import credentials as creds
from penstock.dispatcher.wire import steering as steer
from penstock.kernel.clock import Clock

_APPLY_SECONDS_MAX: Final = 60.0
_WAITED_SECONDS_MORE: Final = 5.0

PROBES: Final = (
    Endpoint(
        "GET",
        "/healthz",
        "Whether this process answers",
        looking.healthz,
        answer=health.HealthAnswer,
        proof=Proof.NONE,
        is_probe=True,
    ),
    Endpoint(
        "GET",
        "/readyz",
        "Whether this process can serve",
        looking.readyz,
        answer=health.HealthAnswer,
        problems=(503,),
        proof=Proof.NONE,
        is_probe=True,
    ),
)

INTERNAL: Final = (
    *keys.INTERNAL,
    Endpoint(
        "POST",
        "/internal/hello",
        "A worker is there",
        working.hello,
        ask=work.HelloAsk,
        answer=work.HelloAnswer,
        proof=Proof.WORKER,
    ),
    Endpoint(
        "POST",
        "/internal/wait",
        "Wait until an operator has work",
        working.wait,
        ask=work.WaitAsk,
        answer=work.WaitAnswer,
        problems=(409,),
        proof=Proof.WORKER,
        request_seconds_max=work.WAIT_SECONDS_MAX + _WAITED_SECONDS_MORE,
        is_wait=True,
    ),
    Endpoint(
        "POST",
        "/internal/task-claim",
        "Begin attempts",
        working.claim,
        ask=work.ClaimAsk,
        answer=work.ClaimAnswer,
        problems=(404, 409),
        proof=Proof.WORKER_OR_INVOCATION,
    ),
    Endpoint(
        "POST",
        "/internal/events",
        "Tell of news",
        telling.events,
        ask=events.EventsAsk,
        answer=events.EventsAnswer,
        proof=Proof.SOURCE,
    ),
    Endpoint(
        "GET",
        "/internal/sources",
        "The sources of the DAG in force",
        telling.sources,
        answer=events.SourcesAnswer,
        proof=Proof.SOURCE,
    ),
    Endpoint(
        "POST",
        "/internal/webhook-refusals",
        "Note requests that a webhook has refused",
        telling.webhook_refusals,
        ask=events.RefusalsAsk,
        answer=events.RefusalsAnswer,
        proof=Proof.SOURCE,
    ),
    Endpoint(
        "POST",
        "/v1/task/heartbeat",
        "Extend leases",
        working.heartbeat,
        # Twice what workers send: what tasks say of themselves is decoded before they are proved.
        body_bytes_max=2**20,
        ask=work.HeartbeatAsk,
        answer=work.ResultsAnswer,
        is_several=True,
        problems=(404, 409),
        proof=Proof.EACH_TASK,
    ),
    Endpoint(
        "POST",
        "/v1/task/complete",
        "End attempts",
        working.complete,
        ask=work.CompleteAsk,
        answer=work.ResultsAnswer,
        is_several=True,
        problems=(404, 409),
        proof=Proof.EACH_TASK,
    ),
    Endpoint(
        "POST",
        "/v1/task/events",
        "Tell of news of a task",
        telling.task_events,
        ask=events.TaskEventsAsk,
        answer=events.EventsAnswer,
        problems=(404, 409),
        proof=Proof.TASK,
    ),
    Endpoint(
        "POST",
        "/v1/task/credentials",
        "Have credentials for the folders of a task",
        credentials.credentials,
        ask=creds.CredentialsAsk,
        answer=creds.CredentialsAnswer,
        problems=(404, 409),
        may_omit_body=True,
        proof=Proof.TASK,
    ),
)

_DAG: Final = (
    Endpoint(
        "GET",
        "/v1/dag",
        "The DAG that is in force",
        deploying.dag,
        answer=dags.DagAnswer,
        problems=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/dag",
        "Put a DAG in force",
        deploying.apply,
        ask=dags.ApplyAsk,
        answer=dags.AppliedAnswer,
        problems=(409,),
        request_seconds_max=_APPLY_SECONDS_MAX,
    ),
    Endpoint(
        "GET",
        "/v1/dag/versions",
        "The versions of the DAG",
        deploying.versions,
        params=asking.LimitParams,
        answer=dags.VersionsAnswer,
    ),
    Endpoint(
        "POST",
        "/v1/dag/rollback",
        "Go back to an earlier version",
        deploying.rollback,
        ask=dags.RollbackAsk,
        answer=dags.AppliedAnswer,
        problems=(404, 409),
        may_omit_body=True,
        request_seconds_max=_APPLY_SECONDS_MAX,
    ),
    Endpoint(
        "POST",
        "/v1/trigger",
        "Tell of news of a source",
        telling.trigger,
        ask=steer.TriggerAsk,
        answer=steer.TriggerAnswer,
        problems=(404, 409),
    ),
    Endpoint(
        "POST",
        "/v1/triggers",
        "Tell of much news of a source",
        telling.triggers,
        ask=steer.TriggersAsk,
        answer=steer.TriggersAnswer,
        problems=(404, 409),
    ),
)

_CUT_OVER: Final = Endpoint(
    "POST",
    "/v1/datasets/{name}/cut-over",
    "Have readers read what is being built",
    deploying.cut_over,
    ask=dags.CutOverAsk,
    params=asking.NameParams,
    answer=dags.CutOverAnswer,
    problems=(404, 409),
    may_omit_body=True,
)

_TASKS: Final = (
    Endpoint(
        "GET",
        "/v1/tasks",
        "Tasks, the latest first",
        looking.tasks,
        params=asking.TasksParams,
        answer=steer.TasksAnswer,
        problems=(404,),
    ),
    Endpoint(
        "GET",
        "/v1/tasks/{id}",
        "Everything about one task",
        looking.task,
        params=asking.NumberParams,
        answer=steer.TaskAnswer,
        problems=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/tasks/cancel",
        "Cancel tasks",
        steering.cancel_tasks,
        ask=steer.TaskIdsAsk,
        answer=work.ResultsAnswer,
        is_several=True,
        problems=(404, 409),
    ),
    Endpoint(
        "POST",
        "/v1/tasks/replay",
        "Queue dead tasks again",
        steering.replay_tasks,
        ask=steer.TaskIdsAsk,
        answer=work.ResultsAnswer,
        is_several=True,
        problems=(404, 409),
    ),
)

_BACKFILLS: Final = (
    Endpoint(
        "GET",
        "/v1/backfills",
        "Backfills, the latest first",
        looking.backfills,
        params=asking.LimitParams,
        answer=steer.BackfillsAnswer,
    ),
    Endpoint(
        "POST",
        "/v1/backfills",
        "Plan partitions to compute",
        steering.create_backfill,
        ask=steer.BackfillAsk,
        answer=steer.BackfillAnswer,
        problems=(404, 409),
    ),
    Endpoint(
        "GET",
        "/v1/backfills/{id}",
        "One backfill",
        looking.backfill,
        params=asking.NumberParams,
        answer=steer.BackfillAnswer,
        problems=(404,),
    ),
    *(
        Endpoint(
            "POST",
            f"/v1/backfills/{{id}}/{verb}",
            f"{verb.capitalize()} a backfill",
            handler,
            params=asking.NumberParams,
            answer=steer.BackfillAnswer,
            problems=(404, 409),
        )
        for verb, handler in (
            ("pause", steering.pause_backfill),
            ("resume", steering.resume_backfill),
            ("cancel", steering.cancel_backfill),
        )
    ),
)

_STEERING: Final = (
    Endpoint(
        "POST",
        "/v1/jobs/{name}/pause",
        "Pause a job",
        steering.pause_job,
        ask=steer.PauseAsk,
        params=asking.NameParams,
        answer=steer.JobPausesAnswer,
        problems=(404,),
        may_omit_body=True,
    ),
    Endpoint(
        "POST",
        "/v1/jobs/{name}/resume",
        "Resume a job",
        steering.resume_job,
        params=asking.NameParams,
        answer=steer.JobPausesAnswer,
        problems=(404,),
    ),
    Endpoint(
        "PUT",
        "/v1/operators/{name:path}",
        "Limit an operator",
        steering.limit_operator,
        ask=steer.OperatorLimitAsk,
        params=asking.NameParams,
        answer=steer.OperatorLimitAnswer,
        problems=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/outbox/retry",
        "Try parked side effects again",
        steering.retry_outbox,
        ask=steer.OutboxRetryAsk,
        answer=steer.OutboxRetryAnswer,
    ),
)

_LOOKING: Final = (
    Endpoint(
        "GET",
        "/v1/datasets/{name}/partitions",
        "What is published of a dataset",
        looking.partitions,
        params=asking.PartitionsParams,
        answer=steer.PartitionsAnswer,
        problems=(404,),
    ),
    *(
        Endpoint("GET", path, summary, handler, answer=answer)
        for path, summary, handler, answer in (
            ("/v1/status", "The state of everything", looking.status, steer.StatusAnswer),
            ("/v1/pressure", "Who is pressed, and paused", looking.pressure, steer.PressuresAnswer),
            ("/v1/operators", "The load of operators", looking.operators, steer.OperatorsAnswer),
            ("/v1/datasets", "All datasets", looking.datasets, steer.DatasetsAnswer),
            ("/v1/outbox", "What could not be carried out", looking.outbox, steer.OutboxAnswer),
        )
    ),
    Endpoint("GET", "/metrics", "Figures for Prometheus", looking.metrics, answer=None),
)

_ALL: Final = (
    *(*_DAG, _CUT_OVER, *_TASKS, *_BACKFILLS, *_STEERING, *_LOOKING),
    *datasets.ENDPOINTS,
    *pausing.ENDPOINTS,
    *keys.PUBLIC,
    *alerts.PUBLIC,
)
# Who may look at the console may ask for the same: whatever is asked by GET changes nothing.
PUBLIC: Final = tuple(
    replace(each, proof=Proof.LOOKING)
    if (each.method, each.proof) == ("GET", Proof.API_TOKEN)
    else each
    for each in _ALL
)


def internal_app(
    parts: Parts, *, limits: Limits | None = None, clock: Clock | None = None
) -> Application:
    """The application of the internal listener."""
    endpoints = _documented("Penstock, internal", (*INTERNAL, *PROBES), Proof.NONE)
    return Application(
        "internal", endpoints, parts, counters=parts.metrics.counters, limits=limits, clock=clock
    )


def public_app(
    parts: Parts, *, limits: Limits | None = None, clock: Clock | None = None
) -> Application:
    """The application of the public listener."""
    endpoints = _documented("Penstock", (*PUBLIC, *PROBES), Proof.LOOKING)
    return Application(
        "public", endpoints, parts, counters=parts.metrics.counters, limits=limits, clock=clock
    )


def _documented(title: str, endpoints: Sequence[Endpoint], proof: Proof) -> Sequence[Endpoint]:
    """The endpoints, and one more with their document."""
    encoded = msgspec.json.encode(document(title, endpoints))

    async def openapi(_parts: Parts, _: Call) -> Reply:
        return Reply(encoded)

    described = Endpoint("GET", "/openapi.json", "This document", openapi, answer=None, proof=proof)
    return (*endpoints, described)
