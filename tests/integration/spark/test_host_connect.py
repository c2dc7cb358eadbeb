"""The same host as a client of a Connect server, which outlives it and what it leaves there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.runtimes.spark.java import find_java, packaged_java, spark_home_of
from tests.integration.spark.trial import (
    SECONDS,
    Trial,
    a_moment,
    at_once,
    cancelled,
    spark_runtime,
)


@dataclass
class Server:
    """A Connect server of the Spark that is installed, and its own account of jobs."""

    url: str
    address: str

    def running_jobs(self) -> int:
        with urllib.request.urlopen(
            f"{self.address}/api/v1/applications", timeout=SECONDS
        ) as answer:
            [application] = json.load(answer)
        jobs = f"{self.address}/api/v1/applications/{application['id']}/jobs?status=running"
        with urllib.request.urlopen(jobs, timeout=SECONDS) as answer:
            return len(json.load(answer))

    async def until_running(self, jobs: int) -> None:
        for _ in range(int(SECONDS / 0.05)):
            if await asyncio.to_thread(self.running_jobs) == jobs:
                return
            await a_moment()
        raise AssertionError(f"{self.running_jobs()} jobs run on the server, not {jobs}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pyspark = pytest.importorskip("pyspark")
    folder = tmp_path_factory.mktemp("server")
    port, shown = _free_port(), _free_port()
    conf = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.port": str(shown),
        "spark.driver.memory": "600m",
    }
    said = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
    home = Path(pyspark.__file__).parent
    java = spark_home_of(find_java("", os.environ, packaged=packaged_java()), folder)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                home / "bin" / "spark-submit",
                "--class",
                "org.apache.spark.sql.connect.service.SparkConnectServer",
                *("--master", "local[2]", *said, "spark-internal"),
            ],
            stdout=log,
            stderr=log,
            cwd=folder,
            env={
                **os.environ,
                "JAVA_HOME": str(java),
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_IP": "127.0.0.1",
            },
            start_new_session=True,
        )
    try:
        _wait_for(port)
        yield Server(f"sc://127.0.0.1:{port}", f"http://127.0.0.1:{shown}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def trial(server: Server, tmp_path: Path) -> Iterator[Trial]:
    runtime = spark_runtime(tmp_path, master=server.url)
    with asyncio.Runner() as runner:
        runner.run(runtime.start())
        try:
            yield Trial(tmp_path, runner, runtime)
        finally:
            runner.run(runtime.stop())
    # Every session was ended, and is not looked for again.
    assert not list((tmp_path / "data" / "spark" / "connect").iterdir())


@pytest.mark.timeout(300)
def test_work_runs_is_cancelled_alone_and_ended_after_a_killed_host(
    trial: Trial, server: Server
) -> None:
    async def test() -> None:
        finished = await trial.run(trial.work("count", rows=1000))
        assert finished.metrics["rows"] == 1000
        assert finished.metrics["jobs"] >= 1

        long, other = trial.work("long"), trial.work("batch")
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(trial.run(work)) for work in (long, other)]
            await at_once(trial.said("begun", long), trial.said("begun", other))
            await server.until_running(1)
            await cancelled(running[0])
            await server.until_running(0)
            (trial.folder / "go").touch()
            assert (await running[1]).made

        again = trial.work("long")
        async with asyncio.TaskGroup() as group:
            failing = group.create_task(trial.failure(again))
            await trial.said("begun", again)
            await server.until_running(1)
            os.kill(trial.runtime.pids[0], signal.SIGKILL)
            assert (await failing).is_retried
        # The server knows nothing of that, until the next host is there.
        assert (await trial.run(trial.work("count", rows=10))).metrics["rows"] == 10
        await server.until_running(0)

    trial.now(test(), seconds=280)


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


def _wait_for(port: int) -> None:
    async def test() -> None:
        for _ in range(int(SECONDS / 0.05)):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await a_moment()
                continue
            writer.close()
            return
        raise AssertionError("the Connect server never came")

    asyncio.run(test())
