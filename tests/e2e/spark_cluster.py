"""A standalone cluster of Spark from the installed package: a master and workers of one core each.

They listen on loopback, on free ports, and know nothing of whoever uses them: their working folder
is their own, their environment has no path of modules and no keys. Each is leashed to the tests,
so none outlives them. A Connect server may be had on top, as somebody who runs one would.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.kernel.child_process import ChildProcess
from penstock.kernel.ports import free_port
from penstock.kernel.service import Service
from penstock.runtimes.spark.java import find_java, packaged_java, spark_home_of
from tests.e2e.fleet import CLOCK
from tests.e2e.spark_fleet import below
from tests.leftovers import VARIABLE

LOOPBACK = "127.0.0.1"
START_SECONDS_MAX = 240.0
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"
_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
_CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"


class SparkCluster(Service):
    """A master and its workers, below a folder."""

    def __init__(self, folder: Path, *, workers: int = 2, memory: str = "1g") -> None:
        self.folder = folder
        self._workers = workers
        self._memory = memory
        self._port, self._shown_port = free_port(), free_port()
        self._live: list[ChildProcess] = []

    @property
    def url(self) -> str:
        """What Penstock is told."""
        return f"spark://{LOOPBACK}:{self._port}"

    async def start(self) -> None:
        ports = ("--port", str(self._port), "--webui-port", str(self._shown_port))
        await self._begin("master", "spark-class", _MASTER, "--host", LOOPBACK, *ports)
        await _until(self._is_master_there, f"no master came; see {self.folder}")
        for number in range(self._workers):
            name = f"worker-{number}"
            room = ("--cores", "1", "--memory", self._memory)
            where = ("--host", LOOPBACK, "--webui-port", "0", "--work-dir", str(self.folder / name))
            await self._begin(name, "spark-class", _WORKER, *where, *room, self.url)
        await self.until_workers(self._workers)

    async def stop(self) -> None:
        while self._live:
            await self._live.pop().stop()

    @asynccontextmanager
    async def connect_server(self) -> AsyncIterator[str]:
        """A Connect server whose executors are this cluster's, for the block; its address."""
        port = free_port()
        said = {
            "spark.connect.grpc.binding.address": LOOPBACK,
            "spark.connect.grpc.binding.port": str(port),
            "spark.driver.bindAddress": LOOPBACK,
            "spark.driver.host": LOOPBACK,
            "spark.ui.enabled": "false",
        }
        words = [word for name, value in said.items() for word in ("--conf", f"{name}={value}")]
        submit = ("spark-submit", "--class", _CONNECT, "--master", self.url)

        async def answers() -> bool:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(LOOPBACK, port)
                writer.close()
                return True
            return False

        leashed = self._leashed("connect", *submit, *words, "spark-internal", memory="600m")
        async with leashed:
            await _until(answers, f"no Connect server came; see {self.folder}")
            yield f"sc://{LOOPBACK}:{port}"

    def kill_worker(self) -> None:
        """Kill a worker that runs an executor, and that with it, as `kill -9` does."""
        every = below(os.getpid())
        mine = [each for each in every if {_WORKER, self.url} <= set(every[each])]
        # A leash has the same words as what it holds.
        workers = [each for each in mine if Path(every[each][0]).name == "java"]
        busy = [each for each in workers if below(each)]
        assert busy, f"none of the {len(workers)} workers has an executor"
        # It is the head of its group, which its executors are in.
        os.killpg(busy[0], signal.SIGKILL)

    def kill_executor(self) -> None:
        """Kill one executor, as `kill -9` does; its worker starts another."""
        mine = self.executors()
        assert mine, "there is no executor"
        os.kill(mine[0], signal.SIGKILL)

    def executors(self) -> list[int]:
        """The processes of all executors."""
        every = below(os.getpid())
        mine = [each for each in every if {_WORKER, self.url} <= set(every[each])]
        return sorted(
            {each for one in mine for each, said in below(one).items() if _EXECUTOR in said}
        )

    @contextmanager
    def frozen(self, executors: Sequence[int]) -> Iterator[None]:
        """Within this, executors stand still; then they go on as if nothing had been."""
        for each in executors:
            os.kill(each, signal.SIGSTOP)
        try:
            yield
        finally:
            for each in executors:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGCONT)

    async def until_workers(self, count: int) -> None:
        """Until the master knows so many workers that live."""

        async def is_so() -> bool:
            return bool((await asyncio.to_thread(self.state))["aliveworkers"] == count)

        await _until(is_so, f"there were never {count} workers; see {self.folder}")

    def state(self) -> dict[str, Any]:
        """What the master says of its workers and applications."""
        address = f"http://{LOOPBACK}:{self._shown_port}/json/"
        with urllib.request.urlopen(address, timeout=10) as answer:
            said: dict[str, Any] = json.load(answer)
        return said

    async def _is_master_there(self) -> bool:
        with suppress(OSError, ValueError):
            return str((await asyncio.to_thread(self.state))["status"]) == "ALIVE"
        return False

    async def _begin(self, name: str, program: str, *words: str) -> None:
        leashed = self._leashed(name, program, *words)
        self._live.append(leashed)
        await leashed.start()

    def _leashed(self, name: str, program: str, *words: str, memory: str = "256m") -> ChildProcess:
        home = self.folder / name
        home.mkdir(parents=True)
        found = find_spec("pyspark")
        assert found is not None
        assert found.origin is not None
        spark = Path(found.origin).parent
        java = spark_home_of(find_java("", os.environ, packaged=packaged_java()), home)
        return ChildProcess(
            [str(spark / "bin" / program), *words],
            log=home / "log",
            folder=home,
            environment={
                "PATH": os.environ.get("PATH", os.defpath),
                VARIABLE: os.environ[VARIABLE],
                "HOME": str(home),
                "JAVA_HOME": str(java),
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_HOME": str(spark),
                "SPARK_LOCAL_IP": LOOPBACK,
                "SPARK_LOCAL_DIRS": str(home),
                "SPARK_DAEMON_MEMORY": memory,
                "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            },
            grace_seconds=5,
        )


async def _until(holds: Callable[[], Awaitable[bool]], otherwise: str) -> None:
    deadline = CLOCK.monotonic() + START_SECONDS_MAX
    while not await holds():
        assert CLOCK.monotonic() < deadline, otherwise
        await CLOCK.sleep(0.1)
