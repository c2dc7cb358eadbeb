"""The same chain on Penstock and on its peers: three trivial functions for each partition.

Four run at a time, and each peer has a venv of its own, the same Postgres server with a database of
its own, and its defaults. The runs are interleaved, and their conditions printed. What is measured
of each:

- *tasks/s* from the first of so many partitions until the last task of the last chain has ended,
  with the peer's processes running and nothing else to do for it before;
- *CPU* of its processes in that time, sampled twice a second, and that of Postgres beside it;
- *lone chain*: one partition at a time, from telling of it until its third task has ended; the
  median of five;
- *idle*: the memory of its processes (PSS), and how many they are.

What each of them gives for that is not the same: Penstock runs each task in a process, fences its
attempts and publishes what it made by a transaction; Procrastinate runs functions in its one
process; Prefect maps over all partitions in one run. A peer that does not install, or does not end
within `--seconds-max`, is left out with its reason. Wall times hold on a quiet machine only; CPU
seconds are the safer figure. Run `python -m benchmarks.peers --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psycopg

from penstock.dispatcher.client.client import Client
from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.kernel.ports import free_port

AT_ONCE = 4
_LONE = 5
_MARK = "PENSTOCK_BENCHMARK_PEER"

PENSTOCK_DAG = """
jobs:
  ingest: {activation: source, source: {kind: manual}, outputs: [days]}
  first: {runtime: process, operator: chain:step, inputs: [ingest.days], outputs: [a]}
  second: {runtime: process, operator: chain:step, inputs: [first.a], outputs: [b]}
  third: {runtime: process, operator: chain:step, inputs: [second.b], outputs: [c]}
"""
PENSTOCK_STEP = """
def step(task):
    return None
"""
PROCRASTINATE = """
import asyncio, os, sys
from procrastinate import App, PsycopgConnector

app = App(connector=PsycopgConnector(conninfo=os.environ["DSN"]))

@app.task(name="third")
async def third(partition):
    return None

@app.task(name="second")
async def second(partition):
    await third.defer_async(partition=partition)

@app.task(name="first")
async def first(partition):
    await second.defer_async(partition=partition)

async def main(verb, *names):
    async with app.open_async():
        if verb == "schema":
            await app.schema_manager.apply_schema_async()
        elif verb == "defer":
            # It stays, so that telling of one more costs no start of Python.
            for line in sys.stdin:
                jobs = [{"partition": each} for each in line.split()]
                await first.batch_defer_async(*jobs)
        else:
            await app.run_worker_async(concurrency=4, install_signal_handlers=False)

asyncio.run(main(*sys.argv[1:]))
"""
PREFECT = """
import asyncio, sys
from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner

@task
def first(partition):
    return partition

@task
def second(partition):
    return partition

@task
def third(partition):
    return partition

@flow(task_runner=ThreadPoolTaskRunner(max_workers=4))
def chains(partitions):
    third.map(second.map(first.map(partitions))).wait()

for line in sys.stdin:
    chains(line.split())
    print("ended", flush=True)
"""


@dataclass
class Measured:
    """What was seen of one peer with so many partitions."""

    seconds: float
    cpu: float
    postgres_cpu: float


@dataclass
class Stage:
    folder: Path
    postgres: LocalPostgres
    dsn: str = ""
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def start(
        self,
        *command: str,
        folder: Path,
        variables: Mapping[str, str],
        talks: bool = False,
    ) -> asyncio.subprocess.Process:
        with (folder / "log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=folder,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else log,
                stderr=log,
                env={**os.environ, _MARK: str(folder), **variables},
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    async def stop(self) -> None:
        while self.processes:
            process = self.processes.pop()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                try:
                    await asyncio.wait_for(process.wait(), 30)
                except TimeoutError:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()

    async def value(self, statement: str) -> int:
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
            row = await (await connection.execute(statement.encode())).fetchone()
            return int(row[0]) if row else 0

    async def until(self, statement: str, least: int) -> None:
        while await self.value(statement) < least:  # noqa: ASYNC110 - it is another process's doing
            await asyncio.sleep(0.05)


class Peer:
    """One of them. `run` has chains run for these partitions, and returns when they have ended."""

    name = ""
    packages: tuple[str, ...] = ()

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage = stage
        self.folder = folder
        self.done = 0
        self.python = str(folder / "venv" / "bin" / "python")

    async def install(self) -> None:
        venv.create(self.folder / "venv", with_pip=True)
        pip = [self.python, "-m", "pip", "install", "-q", *self.packages]
        process = await asyncio.create_subprocess_exec(*pip, stderr=subprocess.PIPE)
        _, said = await process.communicate()
        if process.returncode:
            raise RuntimeError(said.decode().strip().splitlines()[-1])

    async def start(self) -> None:
        raise NotImplementedError

    async def run(self, partitions: Sequence[str]) -> None:
        raise NotImplementedError


class Penstock(Peer):
    name = "Penstock, `process`"

    async def install(self) -> None:
        self.python = sys.executable

    async def start(self) -> None:
        (self.folder / "dag.yaml").write_text(PENSTOCK_DAG)
        (self.folder / "chain.py").write_text(PENSTOCK_STEP)
        port, internal, webhook = free_port(), free_port(), free_port()
        await self.stage.start(
            *(self.python, "-m", "penstock", "up", "dag.yaml", "--data", "data"),
            *("--port", str(port), "--internal-port", str(internal)),
            *("--webhook-port", str(webhook)),
            folder=self.folder,
            variables={
                "PENSTOCK_POSTGRES": self.stage.dsn,
                "PENSTOCK_CONCURRENCY": str(AT_ONCE),
            },
        )
        self.url = f"http://127.0.0.1:{port}"
        counted = "SELECT count(*) FROM worker WHERE operators <> '{}'"
        for _ in range(1200):
            with contextlib.suppress(psycopg.Error):
                if await self.stage.value(counted):
                    return
            await asyncio.sleep(0.1)

    async def run(self, partitions: Sequence[str]) -> None:
        async with Client(self.url) as client:
            await client.trigger_many("ingest", events=partitions)
        self.done += 3 * len(partitions)
        completed = "SELECT count(*) FROM task WHERE status = 'completed'"
        await self.stage.until(completed, self.done)


class Procrastinate(Peer):
    name = "Procrastinate"
    packages = ("procrastinate==3.*", "psycopg[binary]")

    async def start(self) -> None:
        (self.folder / "app.py").write_text(PROCRASTINATE)
        schema = await self._started("schema")
        if await schema.wait():
            raise RuntimeError((self.folder / "log").read_text()[-300:])
        self.deferring = await self._started("defer", talks=True)
        await self._started("work")
        await asyncio.sleep(3.0)

    async def _started(self, verb: str, *, talks: bool = False) -> asyncio.subprocess.Process:
        return await self.stage.start(
            *(self.python, "app.py", verb),
            folder=self.folder,
            variables={"DSN": self.stage.dsn},
            talks=talks,
        )

    async def run(self, partitions: Sequence[str]) -> None:
        assert self.deferring.stdin is not None
        self.deferring.stdin.write(f"{' '.join(partitions)}\n".encode())
        self.done += 3 * len(partitions)
        ended = "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'"
        await self.stage.until(ended, self.done)


class Prefect(Peer):
    name = "Prefect, mapped in one run"
    packages = ("prefect==3.*", "asyncpg")

    async def start(self) -> None:
        (self.folder / "flow.py").write_text(PREFECT)
        said = psycopg.conninfo.conninfo_to_dict(self.stage.dsn)
        url = f"postgresql+asyncpg://{said['user']}@/{said['dbname']}?host={said['host']}"
        port = free_port()
        variables = {
            "PREFECT_HOME": str(self.folder / "home"),
            "PREFECT_API_DATABASE_CONNECTION_URL": url,
            "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "PREFECT_LOGGING_LEVEL": "WARNING",
        }
        await self.stage.start(
            *(self.python, "-m", "prefect", "server", "start", "--port", str(port)),
            folder=self.folder,
            variables=variables,
        )
        async with httpx.AsyncClient(timeout=10) as client:
            for _ in range(900):
                with contextlib.suppress(httpx.HTTPError):
                    answer = await client.get(f"http://127.0.0.1:{port}/api/health")
                    if answer.status_code == 200:
                        break
                await asyncio.sleep(0.1)
        self.running = await self.stage.start(
            self.python, "flow.py", folder=self.folder, talks=True, variables=variables
        )
        await self.run(["warm"])

    async def run(self, partitions: Sequence[str]) -> None:
        assert self.running.stdin is not None
        assert self.running.stdout is not None
        self.running.stdin.write(f"{' '.join(partitions)}\n".encode())
        while (line := await self.running.stdout.readline()) != b"ended\n":
            if not line:
                raise RuntimeError((self.folder / "log").read_text()[-300:])


PEERS = {"penstock": Penstock, "procrastinate": Procrastinate, "prefect": Prefect}


class Sampling:
    """The CPU seconds of processes that come and go."""

    def __init__(self, mark: str, postmaster: int) -> None:
        self._mark = f"{_MARK}={mark}".encode()
        self._postmaster = postmaster
        self._peers: dict[tuple[int, int], float] = {}
        self._postgres: dict[tuple[int, int], float] = {}
        self._known: dict[tuple[int, int], bool] = {}

    def look(self) -> tuple[float, float]:
        """CPU seconds so far: of the peer, and of Postgres."""
        tick = os.sysconf("SC_CLK_TCK")
        for place in Path("/proc").glob("[0-9]*"):
            try:
                fields = (place / "stat").read_text().rpartition(")")[2].split()
                key = (int(place.name), int(fields[19]))
                if key not in self._known:
                    self._known[key] = self._mark in (place / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            cpu = (int(fields[11]) + int(fields[12])) / tick
            if int(fields[1]) == self._postmaster or key[0] == self._postmaster:
                self._postgres[key] = cpu
            elif self._known[key]:
                self._peers[key] = cpu
        return sum(self._peers.values()), sum(self._postgres.values())

    def memory(self) -> tuple[float, int]:
        """Megabytes of the peer's processes, and how many they are."""
        self.look()
        found = []
        for (pid, _), is_ours in self._known.items():
            if is_ours:
                with contextlib.suppress(OSError):
                    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                    found.append(int(text.partition("Pss:")[2].split()[0]) / 1000)
        return sum(found), len(found)


async def _timed(peer: Peer, sampling: Sampling, partitions: Sequence[str]) -> Measured:
    before = sampling.look()
    began = time.monotonic()
    running = asyncio.get_running_loop().create_task(peer.run(partitions))
    while not running.done():
        await asyncio.wait({running}, timeout=0.5)
        sampling.look()
    running.result()
    seconds, after = time.monotonic() - began, sampling.look()
    return Measured(seconds, after[0] - before[0], after[1] - before[1])


@contextlib.asynccontextmanager
async def _standing(
    kind: type[Peer], stage: Stage, options: argparse.Namespace, *, name: str
) -> AsyncIterator[tuple[Peer, Sampling]]:
    """A peer that runs on a database of its own."""
    folder = stage.folder / name
    folder.mkdir(exist_ok=True)
    async with await psycopg.AsyncConnection.connect(
        stage.postgres.dsn, autocommit=True
    ) as connection:
        database = f"{name}_{time.monotonic_ns()}"
        await connection.execute(f"CREATE DATABASE {database}".encode())
    stage.dsn = stage.postgres.dsn.replace("dbname=penstock", f"dbname={database}")
    peer = kind(stage, folder)
    if not (folder / "venv").exists() or kind is Penstock:
        await peer.install()
    pid = (stage.folder / "postgres" / "data" / "postmaster.pid").read_text().split()[0]
    try:
        async with asyncio.timeout(options.seconds_max):
            await peer.start()
        yield peer, Sampling(str(folder), int(pid))
    finally:
        await stage.stop()


async def measure(options: argparse.Namespace) -> None:
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f} at the start,", end=" ")
    print(f"Python {platform.python_version()}, {options.rounds} rounds, {AT_ONCE} at a time")
    print("| | partitions | tasks/s | CPU s | of Postgres | lone chain | idle |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="penstock-peers-") as name:
        async with LocalPostgres(Path(name) / "postgres") as postgres:
            stage = Stage(Path(name), postgres)
            for number in range(options.rounds):
                for peer in options.peers:
                    try:
                        await _round(PEERS[peer], stage, options, name=peer, number=number)
                    except (RuntimeError, OSError, TimeoutError, psycopg.Error) as error:
                        print(f"| {peer} | left out: {type(error).__name__} {error} |", flush=True)


async def _round(
    kind: type[Peer], stage: Stage, options: argparse.Namespace, *, name: str, number: int
) -> None:
    async with _standing(kind, stage, options, name=name) as (peer, sampling):
        await asyncio.sleep(options.idle_seconds)
        megabytes, processes = sampling.memory()
        async with asyncio.timeout(options.seconds_max):
            lone = [
                (await _timed(peer, sampling, [f"lone-{number}-{each}"])).seconds
                for each in range(_LONE + 1)
            ]
        for count in options.partitions:
            async with asyncio.timeout(options.seconds_max):
                found = await _timed(
                    peer, sampling, [f"p-{number}-{count}-{each}" for each in range(count)]
                )
            print(
                f"| {peer.name} | {count} | {3 * count / found.seconds:.1f} | {found.cpu:.1f}"
                f" | {found.postgres_cpu:.1f} | {statistics.median(lone[1:]):.2f} s"
                f" | {megabytes:.0f} MB, {processes} processes |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("peers", nargs="*", default=list(PEERS), help=", ".join(PEERS))
    parser.add_argument("--partitions", type=int, nargs="*", default=[50, 200])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--seconds-max", type=float, default=300.0, help="for anything")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
