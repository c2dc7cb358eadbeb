"""The pipeline with its wake-ups in SQS: real processes, and a server that speaks SQS."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.dispatcher.client import Client
from penstock.kernel.errors import DispatcherUnavailable
from penstock.settings import Wakeups
from tests.e2e.fleet import CLOCK, Fleet, fleet_of
from tests.integration.aws_server import AwsServer

MODULE = """
def note(task):
    (task.outputs["sales"].path / "made.txt").write_text(task.partition_key)
"""
DAG = """
jobs:
  ingest: {activation: source, source: {kind: manual}, outputs: [hours]}
  clean: {runtime: process, operator: "noting:note", inputs: [ingest.hours], outputs: [sales]}
"""


async def _connected(fleet: Fleet, client: Client) -> None:
    for _ in range(600):
        try:
            await client.status()
        except DispatcherUnavailable:
            await CLOCK.sleep(0.1)
        else:
            return
    raise AssertionError(fleet.said("dispatcher-0"))


@pytest.mark.timeout(300)
def test_wake_ups_go_through_sqs(tmp_path: Path, aws_server: AwsServer) -> None:
    told = {
        "wakeups": Wakeups.SQS,
        "aws_endpoint": aws_server.endpoint,
        "aws_region": "us-east-1",
        "sqs_prefix": "pipeline-test",
    }
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtest"}
    modules = {"noting.py": MODULE}

    async def main() -> None:
        async with fleet_of(
            tmp_path, dispatchers=1, workers=1, modules=modules, told=told, variables=keys
        ) as fleet:
            async with Client(fleet.public_urls()[0]) as client:
                await _connected(fleet, client)
                await client.apply(DAG)
                for wave in range(3):
                    for number in range(5):
                        await client.trigger("ingest", partition_key=f"p{wave}-{number}")
                    await client.wait(timeout_seconds=60)
                found = await client.partitions("sales")
                assert len(found.partitions) == 15
            for name in fleet.names():
                assert await fleet.stop(name) == 0, fleet.said(name)

    asyncio.run(main())
