"""A fleet that runs Spark jobs on a real S3 server, all of which a test may kill one by one.

Dispatchers, workers and a Postgres as in `fleet`, and SeaweedFS for the bucket. What is killed here
is started again after a while. What ends by itself, because the bucket is away when it starts, is
started again too, as `penstock up` or any other supervisor does; how often is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from psycopg.rows import dict_row

from penstock.datasets.transfer import Transfer
from penstock.dispatcher.client import Client
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DispatcherUnavailable, PenstockError
from penstock.store.s3.local import LocalS3
from tests.e2e.fleet import CLOCK, Fleet, fleet_of, until

Answer = TypeVar("Answer")

PATIENCE_SECONDS_MAX = 120.0
START_SECONDS_MAX = 60.0
STARTS_MAX = 5
ENDS_MAX = 20
"""How often a process may end by itself."""
HOST = "penstock.runtimes.spark.host"
"""The module of the process that a worker's Spark runs below."""


class Victim(StrEnum):
    """What can be killed."""

    WORKER = "worker"
    JVM = "jvm"
    DISPATCHER = "dispatcher"
    S3 = "s3"
    EXECUTORS = "executors"
    """All of them, where there is a cluster."""


@dataclass(slots=True)
class SparkFleet:
    """The processes of one installation, and its bucket."""

    fleet: Fleet
    server: LocalS3
    ended: Counter[str] = field(default_factory=Counter)
    """What has ended by itself, and how often."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    changing_server: asyncio.Lock = field(default_factory=asyncio.Lock)
    executors: Callable[[], Sequence[int]] | None = None
    """The executors of its cluster, if it has one."""

    @property
    def transfer(self) -> Transfer:
        """The way to the files of the bucket."""
        return Transfer(self.server.url, self.server.credentials, environment={})

    @property
    def bucket(self) -> str:
        return self.server.url.partition("?")[0]

    def client(self) -> Client:
        return Client(self.fleet.public_urls()[0])

    async def rows(self, statement: str, *values: object) -> list[dict[str, Any]]:
        """What the database has."""
        async with await psycopg.AsyncConnection.connect(
            self.fleet.postgres.dsn, row_factory=dict_row
        ) as connection:
            return await (await connection.execute(statement.encode(), values)).fetchall()

    async def kill(self, victim: Victim, entropy: Entropy) -> str:
        """As `kill -9` does, and start it again after a while; returns what it was."""
        match victim:
            case Victim.WORKER | Victim.DISPATCHER:
                return await self._kill_process(f"{victim}-", entropy)
            case Victim.JVM:
                return await self._kill_jvm(entropy)
            case Victim.S3:
                return await self._kill_server(entropy)
            case Victim.EXECUTORS:
                assert self.executors is not None
                _signal(self.executors(), signal.SIGKILL)
                return str(victim)

    def victims(self) -> list[Victim]:
        """What there is to kill."""
        has_executors = self.executors is not None
        return [each for each in Victim if has_executors or each is not Victim.EXECUTORS]

    async def freeze(self, entropy: Entropy, *, seconds: float) -> None:
        """Have a worker, its Spark and all below them stand still, and then go on as if nothing
        had been: what it has in hand is somebody else's by then."""
        names = [each for each in self.fleet.live if each.startswith("worker-")]
        if not names:
            return
        worker = self.fleet.live[entropy.choice(names)].pid
        every = [worker, *below(worker)]
        _signal(every, signal.SIGSTOP)
        try:
            await CLOCK.sleep(seconds)
        finally:
            _signal(every, signal.SIGCONT)

    async def _kill_process(self, prefix: str, entropy: Entropy) -> str:
        names = [each for each in self.fleet.names() if each.startswith(prefix)]
        name = entropy.choice(names)
        async with self.changing:
            process = self.fleet.live.get(name)
            if process is None or process.returncode is not None:
                return f"{name} (was gone)"
            await self.fleet.kill(name)
        await CLOCK.sleep(entropy.uniform(0.0, 1.5))
        await self.fleet.start(name)
        return name

    async def _kill_jvm(self, entropy: Entropy) -> str:
        """Of whichever worker, which makes a new one by itself."""
        await until(self.jvms, seconds=START_SECONDS_MAX)
        with contextlib.suppress(ProcessLookupError):
            os.kill(entropy.choice(self.jvms()), signal.SIGKILL)
        return str(Victim.JVM)

    async def _kill_server(self, entropy: Entropy) -> str:
        if self.changing_server.locked():
            return f"{Victim.S3} (was gone)"
        async with self.changing_server:
            kill_server_in(self.fleet.folder)
            await self.server.stop()
            await CLOCK.sleep(entropy.uniform(0.0, 3.0))
            await self._start_server()
        return str(Victim.S3)

    async def _start_server(self) -> None:
        for left in reversed(range(STARTS_MAX)):
            try:
                await self.server.start()
            except PenstockError:
                # A connection of somebody may have one of its ports at the moment.
                await self.server.stop()
                if not left:
                    raise
                await CLOCK.sleep(1.0)
            else:
                return

    def jvms(self) -> list[int]:
        """The JVMs of all workers, each below the host of its worker."""
        found: set[int] = set()
        for name, process in tuple(self.fleet.live.items()):
            if name.startswith("worker-"):
                hosts = (number for number, words in below(process.pid).items() if HOST in words)
                for host in hosts:
                    each = below(host).items()
                    found |= {number for number, words in each if Path(words[0]).name == "java"}
        return sorted(found)

    async def keep(self) -> None:
        """Start again what has ended by itself; until it is cancelled."""
        while True:
            await CLOCK.sleep(0.3)
            async with self.changing:
                for name, process in tuple(self.fleet.live.items()):
                    if process.returncode is not None:
                        del self.fleet.live[name]
                        self.ended[name] += 1
                        assert self.ended[name] <= ENDS_MAX, self.fleet.said(name)
                        await self.fleet.start(name)

    async def stop(self) -> None:
        """Stop everything but the bucket, and look that nothing is left of it."""
        async with self.changing:
            for name in reversed(self.fleet.names()):
                assert await self.fleet.stop(name) == 0, self.fleet.said(name)
        await until(lambda: not list(processes_in(self.fleet.folder)), seconds=10)


@contextlib.asynccontextmanager
async def spark_fleet_of(
    folder: Path,
    server: LocalS3,
    *,
    workers: int,
    spark: str,
    master: str = "local[*]",
    executors: Callable[[], Sequence[int]] | None = None,
) -> AsyncIterator[SparkFleet]:
    """A fleet that runs until the block ends; `spark` is what its settings say of the runtime."""
    settings = f"[runtimes.spark]\n{spark}"
    keys = {
        "AWS_ACCESS_KEY_ID": server.credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": server.credentials.secret_key,
    }
    async with fleet_of(
        folder,
        dispatchers=1,
        workers=workers,
        modules={"penstock.toml": settings},
        told={"store": server.url, "spark": master},
        variables=keys,
    ) as fleet:
        made = SparkFleet(fleet, server, executors=executors)
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(made.keep())
            try:
                yield made
            finally:
                keeping.cancel()


async def patiently(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Ask a dispatcher that is away now and then, until it answers."""
    began = CLOCK.monotonic()
    while True:
        try:
            return await ask()
        except DispatcherUnavailable:
            assert CLOCK.monotonic() - began < PATIENCE_SECONDS_MAX, "no dispatcher answers"
            await CLOCK.sleep(0.2)


def _signal(numbers: Iterable[int], signal_number: signal.Signals) -> None:
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal_number)


def below(number: int) -> Mapping[int, list[str]]:
    """The command lines of the processes that one has started, and those, and so on."""
    every = dict(_processes())
    found: set[int] = set()
    more = {number}
    while more:
        more = {each for each, (parent, _) in every.items() if parent in more} - found
        found |= more
    return {each: every[each][1] for each in found}


def kill_server_in(folder: Path) -> None:
    """Kill the S3 server that keeps its data below a folder, as `kill -9` does."""
    (number,) = [
        number
        for number, words in below(os.getpid()).items()
        if Path(words[0]).name == "weed" and any(str(folder) in word for word in words)
    ]
    os.kill(number, signal.SIGKILL)


def processes_in(folder: Path) -> Iterator[int]:
    """The processes whose working folder this is."""
    for number, _ in _processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{number}/cwd").readlink() == folder:
                yield number


def _processes() -> Iterator[tuple[int, tuple[int, list[str]]]]:
    """The parent and the command line of every process that has one, by its number."""
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((each / "stat").read_text().rpartition(") ")[2].split()[1])
            words = (each / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            if words[0]:
                yield int(each.name), (parent, words)
