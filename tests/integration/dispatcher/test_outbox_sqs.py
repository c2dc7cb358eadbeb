"""Wake-ups through SQS where SQS is away, or loses a queue."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections import Counter

import pytest

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import WakeUpChannel
from penstock.dispatcher.wakeups.sqs import SqsListener, SqsSender, SqsSettings
from penstock.kernel.aws import aws_client
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import new_id, system_entropy
from tests.integration.aws_server import AwsServer

NORMAL = WakeUpChannel("etl:run", Priority.NORMAL)
BULK = WakeUpChannel("etl:run", Priority.BULK)


def settings() -> SqsSettings:
    prefix = f"{new_id(system_entropy(), characters=12)}-"
    return SqsSettings(prefix=prefix, wait_seconds=1, visibility_seconds=2)


def test_a_server_that_is_away_fails_each_channel(
    aws_server: AwsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # boto3's own pauses between tries are not what is tested.
    monkeypatch.setattr("penstock.kernel.aws._TRIES_MAX", 1)
    with socket.create_server(("127.0.0.1", 0)) as held:
        endpoint = f"http://127.0.0.1:{held.getsockname()[1]}"
    away = dataclasses.replace(aws_server.aws, endpoint=endpoint)

    async def main() -> None:
        async with SqsSender(away, settings=settings()) as sender:
            failed = await sender.send(Counter([NORMAL, BULK]))
            assert set(failed) == {NORMAL, BULK}
            assert all("Could not connect" in why for why in failed.values())

    asyncio.run(main())


def test_a_queue_that_was_deleted_is_made_again(aws_server: AwsServer) -> None:
    here = settings()
    client = aws_client("sqs", aws=aws_server.aws)

    def delete() -> None:
        for url in client.list_queues(QueueNamePrefix=here.prefix)["QueueUrls"]:
            client.delete_queue(QueueUrl=url)

    async def main() -> None:
        heard: asyncio.Queue[WakeUpChannel] = asyncio.Queue()
        listener = SqsListener(heard.put, aws=aws_server.aws, settings=here, clock=SystemClock())
        async with SqsSender(aws_server.aws, settings=here) as sender:
            assert await sender.send(Counter([NORMAL])) == {}
            await asyncio.to_thread(delete)
            assert await sender.send(Counter([NORMAL])) == {}
            listener.listen_to([NORMAL.operator])
            async with listener, asyncio.timeout(30):
                assert await heard.get() == NORMAL
                await asyncio.to_thread(delete)
                assert await sender.send(Counter([BULK])) == {}
                assert await heard.get() == BULK

    asyncio.run(main())
    attributes = client.get_queue_attributes(
        QueueUrl=client.list_queues(QueueNamePrefix=here.prefix)["QueueUrls"][0],
        AttributeNames=["MessageRetentionPeriod"],
    )["Attributes"]
    assert attributes == {"MessageRetentionPeriod": "600"}
    client.close()
