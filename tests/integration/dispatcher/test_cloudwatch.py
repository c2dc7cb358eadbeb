"""Figures in CloudWatch: against a server that speaks its protocol, and one that is not there."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.dispatcher.cloudwatch import DATA_MAX, PERIOD_SECONDS, CloudWatch, metric_data
from penstock.dispatcher.metrics import MetricsReader, MetricsSnapshot
from penstock.kernel.aws import aws_client
from penstock.protocol.steering import OperatorLoad
from tests.integration.aws_server import AwsServer
from tests.integration.dispatcher.test_deployment import Pipeline, chain
from tests.integration.dispatcher.test_pressure import fill
from tests.integration.dispatcher.world import Play, World

NOW = datetime(2030, 1, 1, tzinfo=UTC)


class Recording:
    """A client that keeps what it is asked to send."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def put_metric_data(self, **asked: Any) -> None:
        self.calls.append(asked)


def by_name(data: list[dict[str, Any]]) -> dict[str, float]:
    return {
        "/".join([each["MetricName"], *[one["Value"] for one in each["Dimensions"]]]): each["Value"]
        for each in data
    }


def test_the_figures_arrive(play: Play, aws_server: AwsServer) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await fill(pipeline, "clean", 3)
        await pipeline.tasks.claim_next("a:clean", worker="w")
        namespace = "Penstock/arrive"
        cloudwatch = CloudWatch(world.database, namespace=namespace, aws=aws_server.aws)
        assert await cloudwatch.turn() == PERIOD_SECONDS
        now = (await MetricsReader(world.database).figures()).now
        client = await asyncio.to_thread(aws_client, "cloudwatch", aws=aws_server.aws)

        def value(name: str, dimension: str, what: str) -> float:
            found = client.get_metric_statistics(
                Namespace=namespace,
                MetricName=name,
                Dimensions=[{"Name": dimension, "Value": what}],
                StartTime=now - timedelta(minutes=5),
                EndTime=now + timedelta(minutes=5),
                Period=60,
                Statistics=["Maximum"],
            )
            (point,) = found["Datapoints"]
            assert point["Timestamp"] == now
            return float(point["Maximum"])

        assert await asyncio.to_thread(value, "Waiting", "Operator", "a:clean") == 2
        assert await asyncio.to_thread(value, "InFlight", "Operator", "a:clean") == 1
        assert await asyncio.to_thread(value, "Desired", "Operator", "a:clean") == 3
        assert await asyncio.to_thread(value, "QueueDepth", "Job", "clean") == 2
        listed = await asyncio.to_thread(lambda: client.list_metrics(Namespace=namespace))
        names = {each["MetricName"] for each in listed["Metrics"]}
        assert {"EventsPending", "OutboxParked", "TasksSettled", "QueueAge", "Paused"} <= names

    play(story)


def test_one_dispatcher_sends_once_a_minute(play: Play) -> None:
    async def story(world: World) -> None:
        client = Recording()
        several = [CloudWatch(world.database, client=client) for _ in range(4)]
        pauses = await asyncio.gather(*[each.turn() for each in several])
        assert sorted(filter(None, pauses)) == [PERIOD_SECONDS / 4] * 3 + [PERIOD_SECONDS]
        assert len(client.calls) == 1
        assert client.calls[0]["Namespace"] == "Penstock"
        world.later(PERIOD_SECONDS)
        for each in several:
            await each.turn()
        assert len(client.calls) == 2

    play(story)


def test_a_server_that_is_not_there_is_said_once(
    play: Play, aws_server: AwsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        nowhere = dataclasses.replace(aws_server.aws, endpoint="http://127.0.0.1:1")
        cloudwatch = CloudWatch(world.database, aws=nowhere)
        with caplog.at_level(logging.INFO, logger="penstock"):
            for _ in range(2):
                assert await cloudwatch.turn() == PERIOD_SECONDS
                world.later(PERIOD_SECONDS)
            assert caplog.text.count("failed to send metrics to CloudWatch") == 1
            cloudwatch._client = Recording()
            await cloudwatch.turn()
            assert "sending metrics to CloudWatch works again" in caplog.text

    play(story)


def figures(*operators: str) -> MetricsSnapshot:
    loads = tuple(
        OperatorLoad(name=name, in_flight=1, in_flight_max=None, waiting=2, desired=3)
        for name in operators
    )
    return MetricsSnapshot(
        now=NOW,
        operators=loads,
        jobs=(),
        events_pending=4,
        events_oldest_seconds=1.5,
        events_last_minute=5,
        outbox_pending=6,
        outbox_parked=7,
        hot_tables_behind=0,
        hot_tables_behind_seconds=0.0,
        workers=8,
        settled_last_minute={"completed": 9},
    )


def test_names_that_cloudwatch_takes() -> None:
    data = list(metric_data(figures(":a", "\u00fc", " ", "x" * 2000)))
    names = [one["Value"] for each in data for one in each["Dimensions"] if one["Name"] != "Status"]
    assert set(names) == {"_:a", "?", "_", "x" * 1024}
    told = by_name([dict(each) for each in data])
    assert told["EventsPending"] == 4
    assert told["EventsOldest"] == 1.5
    assert told["TasksSettled/completed"] == 9
    assert told["Desired/_:a"] == 3
    assert {each["Unit"] for each in data} == {"Count", "Seconds"}


def test_many_figures_are_several_requests(play: Play) -> None:
    async def story(world: World) -> None:
        client = Recording()
        for number in range(DATA_MAX // 3):
            await world.job(f"job{number}", operator=f"operator{number}")
        await world.rows("INSERT INTO operator SELECT operator, 1 FROM job_definition")
        await CloudWatch(world.database, client=client).turn()
        sizes = [len(each["MetricData"]) for each in client.calls]
        assert sizes[0] == DATA_MAX
        assert len(sizes) == 2
        told = by_name([one for each in client.calls for one in each["MetricData"]])
        assert len(told) == sum(sizes)

    play(story)
