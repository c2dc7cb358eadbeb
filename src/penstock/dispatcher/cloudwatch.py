"""The figures of the dispatcher in CloudWatch, in the AWS profile.

Any number of dispatchers may run this: once a period one of them takes the turn, in the database,
and sends. Who takes it and dies has sent nothing: a gap of one period. What CloudWatch does not
take is lost too, and said once; figures are of the moment, so nothing is kept to be sent later.
boto3 is imported at the first turn and runs in threads. Called by a loop of the dispatcher.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.metrics import MetricsReader, MetricsSnapshot, take_turn
from penstock.kernel.aws import Aws, aws_client

_log = logging.getLogger(__name__)

NAMESPACE: Final = "Penstock"
DESIRED: Final = "Desired"
PERIOD_SECONDS: Final = 60.0
DATA_MAX: Final = 500
"""How many figures go into one request; the service takes 1,000, and a megabyte."""
_DIMENSION_CHARACTERS_MAX: Final = 1024
_TURN: Final = "cloudwatch"

Datum = Mapping[str, Any]


class CloudWatch:
    """Sends figures to CloudWatch. Without a client one is made, of `aws`."""

    def __init__(
        self,
        database: Database,
        *,
        namespace: str = NAMESPACE,
        aws: Aws | None = None,
        client: Any = None,
    ) -> None:
        self._database = database
        self._namespace = namespace
        self._aws = aws or Aws()
        self._client = client
        self._is_failing = False

    async def turn(self) -> float | None:
        """Send the figures if it is time and nobody else has."""
        if not await take_turn(self._database, _TURN, seconds=PERIOD_SECONDS):
            return PERIOD_SECONDS / 4
        data = list(metric_data(await MetricsReader(self._database).figures()))
        problem = await asyncio.to_thread(self._put, data)
        if problem and not self._is_failing:
            _log.warning("failed to send metrics to CloudWatch; retrying: %s", problem)
        elif self._is_failing and not problem:
            _log.info("sending metrics to CloudWatch works again")
        self._is_failing = bool(problem)
        return PERIOD_SECONDS

    def _put(self, data: list[Datum]) -> str:
        """Send all; what is wrong if that failed."""
        if self._client is None:
            self._client = aws_client("cloudwatch", aws=self._aws, connections_max=1)
        errors = importlib.import_module("botocore.exceptions")
        try:
            for first in range(0, len(data), DATA_MAX):
                self._client.put_metric_data(
                    Namespace=self._namespace, MetricData=data[first : first + DATA_MAX]
                )
        except (errors.BotoCoreError, errors.ClientError) as error:
            return str(error)
        return ""


def metric_data(figures: MetricsSnapshot) -> Iterator[Datum]:
    """The figures as CloudWatch takes them. Pure."""
    now = figures.now
    yield _datum("EventsPending", figures.events_pending, now=now)
    yield _datum("EventsOldest", figures.events_oldest_seconds, now=now, unit="Seconds")
    yield _datum("EventsReceived", figures.events_last_minute, now=now)
    yield _datum("OutboxPending", figures.outbox_pending, now=now)
    yield _datum("OutboxParked", figures.outbox_parked, now=now)
    yield _datum("Workers", figures.workers, now=now)
    for status, count in figures.settled_last_minute.items():
        yield _datum("TasksSettled", count, now=now, Status=status)
    for load in figures.operators:
        yield _datum("Waiting", load.waiting, now=now, Operator=load.name)
        yield _datum("InFlight", load.in_flight, now=now, Operator=load.name)
        yield _datum(DESIRED, load.desired, now=now, Operator=load.name)
    for queue, desired in figures.queues.items():
        yield _datum(DESIRED, desired, now=now, Queue=queue)
    for job in figures.jobs:
        yield _datum("QueueDepth", job.normal + job.bulk, now=now, Job=job.name)
        yield _datum("QueueAge", job.oldest_seconds, now=now, unit="Seconds", Job=job.name)
        yield _datum("Running", job.running, now=now, Job=job.name)
        yield _datum("Dead", job.dead, now=now, Job=job.name)
        yield _datum("Paused", int(job.is_paused), now=now, Job=job.name)
        yield _datum("Pressed", int(job.is_pressed), now=now, Job=job.name)


def _datum(
    name: str, value: float, *, now: datetime, unit: str = "Count", **dimensions: str
) -> Datum:
    return {
        "MetricName": name,
        "Timestamp": now,
        "Value": float(value),
        "Unit": unit,
        "Dimensions": [
            {"Name": each, "Value": _dimension(text)} for each, text in dimensions.items()
        ],
    }


def _dimension(text: str) -> str:
    """CloudWatch takes ASCII only, not all blank, and no colon at the beginning."""
    kept = text.encode("ascii", "replace").decode()[:_DIMENSION_CHARACTERS_MAX].strip()
    return f"_{kept}" if not kept or kept.startswith(":") else kept
