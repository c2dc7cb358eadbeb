"""Tasks a second and requests a task: Penstock's queue and `buquet` 0.1.0, on one server.

Starts one SeaweedFS and runs the peer and then Penstock on it, each phase in processes of its own:
submitting one by one (so many submits in flight), submitting in bulk, and processing what was
submitted with 1, 4 and 8 worker processes whose handlers do nothing. Both sides are timed by the
same code, that of `benchmarks.peer_buquet`, and requests are those that the server itself counts
between the start and the end of a phase, polling and lost races included; connecting is not in it.

Processing is timed from the release of the connected workers: for the peer to its last settlement,
for Penstock until all workers have stopped by themselves, so that the settlements are written and
the leases given back (a little longer than to the last settlement). The peer's worker runs one
task at a time and has no setting for more; Penstock's runs `--concurrency` of them.

The peer gets a virtual environment in the user's cache folder; Penstock never depends on it.
The goals are printed and nothing is asserted. On a small machine clients and server share the
cores, so compare the ratios of one run, not the rates of two; on one that does other things too,
the CPU time a task of clients and server together, and the ratio by that.
`python -m benchmarks.queue --help`.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a file, this one would be taken for the standard library's `queue`: its folder goes last.
sys.path.sort(key=str(Path(__file__).parent).__eq__)
sys.path.append(str(Path(__file__).parents[1]))

import argparse
import asyncio
import json
import os
import platform
import socket
import subprocess
import tempfile
import venv
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

from benchmarks.peer_buquet import (
    ENDED,
    METRICS_VARIABLE,
    READY,
    SETTLED,
    process,
    reported,
    submit_singly,
)
from penstock import Queue, Worker
from penstock.store.s3.local import LocalS3

_FOLDER = Path(__file__).parent
PEER = "buquet"
PEER_VERSION = "0.1.0"
WORKERS = (1, 4, 8)
BATCH = 1000
_URL_VARIABLE = "BENCH_STORE_URL"
_PHASE_SECONDS_MAX = 900
_INSTALL_SECONDS_MAX = 300
_SINGLY = "submit one by one"
_SPLIT = f"  {PEER}'s shards split by hand"
_BULK = f"submit in bulk, {BATCH:,} a call"


def _row(kind: str, workers: int) -> str:
    return f"process {kind}, {workers} worker{'s' if workers > 1 else ''}"


GOALS: Mapping[str, float] = {
    _BULK: 20,
    _row("singles", 1): 6,
    _row("singles", 8): 3,
    _row("batches", 1): 100,
    _row("batches", 4): 75,
    _row("batches", 8): 75,
}
"""How many times the peer's rate Penstock should reach."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One phase, or several of the same kind together."""

    tasks: int = 0
    seconds: float = 0.0
    requests: Mapping[str, int] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    server_cpu_seconds: float = 0.0

    def __add__(self, other: Figure) -> Figure:
        # A plain dict: `asdict` would count the pairs of a Counter.
        requests = dict(Counter(self.requests) + Counter(other.requests))
        return Figure(
            self.tasks + other.tasks,
            self.seconds + other.seconds,
            requests,
            self.cpu_seconds + other.cpu_seconds,
            self.server_cpu_seconds + other.server_cpu_seconds,
        )

    @property
    def per_second(self) -> float:
        return self.tasks / self.seconds

    @property
    def requests_per_task(self) -> float:
        return sum(self.requests.values()) / self.tasks

    @property
    def cpu_ms_per_task(self) -> float:
        """CPU of clients and server: where it is all that there is, its inverse is the rate."""
        return 1000 * (self.cpu_seconds + self.server_cpu_seconds) / self.tasks


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two queues: how its phases are started, and how much it is given to do."""

    command: Sequence[str]
    environment: Mapping[str, str]
    singles: int
    in_bulk: int
    splits: bool = False

    def run(self, phase: str, **options: int | bool) -> Figure:
        """Run one phase in a process of its own."""
        words = [phase]
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        ended = subprocess.run(
            [*self.command, *words],
            env=self.environment,
            cwd=_FOLDER.parent,
            stdout=subprocess.PIPE,
            timeout=_PHASE_SECONDS_MAX,
            check=True,
        )
        line = json.loads(ended.stdout.splitlines()[-1])
        return Figure(**{each.name: line[each.name] for each in fields(Figure)})

    def measure(self, *, in_flight: int) -> dict[str, Figure]:
        """All phases, in turn."""
        # A first round warms the server's volumes and caches, and is not counted.
        self.run("submit", tasks=100, in_flight=in_flight)
        self.run("process", tasks=100, workers=1)
        figures: dict[str, Figure] = {_SINGLY: Figure(), _BULK: Figure()}
        for workers in WORKERS:
            figures[_SINGLY] += self.run("submit", tasks=self.singles, in_flight=in_flight)
            done = self.run("process", tasks=self.singles, workers=workers)
            figures[_row("singles", workers)] = done
        if self.splits:
            self.run("submit", tasks=self.singles, in_flight=in_flight)
            done = self.run("process", tasks=self.singles, workers=WORKERS[-1], split=True)
            figures[_SPLIT] = done
        for workers in WORKERS:
            figures[_BULK] += self.run("submit_many", tasks=self.in_bulk, batch=BATCH)
            done = self.run("process", tasks=self.in_bulk, workers=workers)
            figures[_row("batches", workers)] = done
        return figures


async def _queue() -> Queue:
    return await Queue.open(os.environ[_URL_VARIABLE], name="bench")


async def _submit(words: argparse.Namespace) -> None:
    queue = await _queue()

    def submit(number: int) -> Awaitable[object]:
        return queue.submit("noop", {"n": number})

    await submit_singly(submit, tasks=words.tasks, in_flight=words.in_flight)
    await queue.close()


async def _submit_many(words: argparse.Namespace) -> None:
    queue = await _queue()
    with reported("submit_many", tasks=words.tasks, batch=words.batch):
        for first in range(0, words.tasks, words.batch):
            numbers = range(first, min(first + words.batch, words.tasks))
            await queue.submit_many("noop", [{"n": number} for number in numbers])
    await queue.close()


async def _process(words: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "benchmarks.queue", "--phase", "worker"]
    commands = [[*command, "--concurrency", str(words.concurrency)]] * words.workers
    process(commands, tasks=words.tasks, until_ended=True)


async def _worker(words: argparse.Namespace) -> None:
    """One worker process; what it reads and prints is said at `peer_buquet.process`."""
    queue = await _queue()
    worker = Worker(queue, concurrency=words.concurrency, mode="leased")

    @worker.handler("noop")
    async def noop(_task: object) -> None:
        os.write(1, SETTLED)

    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(0)
        worker.stop()

    os.write(1, READY)
    if os.read(0, 16):
        loop.add_reader(0, stop)
        await worker.run()
        os.write(1, ENDED)
    await queue.close()


PHASES = {
    "submit": _submit,
    "submit_many": _submit_many,
    "process": _process,
    "worker": _worker,
}


def peer_python() -> Path:
    """The interpreter of an environment that has the peer, made if there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = ".".join(platform.python_version_tuple()[:2])
    folder = cache / "penstock" / f"{PEER}-{PEER_VERSION}-python{version}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        venv.create(folder, clear=True, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*install, f"{PEER}=={PEER_VERSION}"],
            check=True,
            timeout=_INSTALL_SECONDS_MAX,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        complete.touch()
    return python


def _environment(server: LocalS3, *, metrics_url: str) -> dict[str, str]:
    """What both sides are told; each reads its own part."""
    url = server.url.replace("?", "/bench?", 1)
    return {
        **os.environ,
        _URL_VARIABLE: url,
        METRICS_VARIABLE: metrics_url,
        "AWS_ACCESS_KEY_ID": server.credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": server.credentials.secret_key,
        "AWS_REGION": "us-east-1",
        "S3_ENDPOINT": server.endpoint,
        "S3_BUCKET": url.removeprefix("s3://").partition("/")[0],
        "S3_REGION": "us-east-1",
        "BUQUET_ALLOW_NO_VERSIONING": "1",
    }


def _measure_peer(environment: Mapping[str, str], words: argparse.Namespace) -> dict[str, Figure]:
    """The peer's figures; none, and a sentence on stderr, if it cannot be had."""
    try:
        command = [str(peer_python()), "-I", str(_FOLDER / "peer_buquet.py")]
        side = Side(command, environment, words.tasks, words.tasks, splits=True)
        return side.measure(in_flight=words.in_flight)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").splitlines()
        reason = said[-1] if said else str(error)
        print(f"{PEER} {PEER_VERSION} cannot be had and is left out: {reason}", file=sys.stderr)
        return {}


async def measure(words: argparse.Namespace) -> dict[str, dict[str, Figure]]:
    """Both sides, in turn, on one server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # The server takes what its command line does not say from variables of the option's name.
    os.environ["METRICSPORT"] = str(port)
    figures: dict[str, dict[str, Figure]] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        async with LocalS3(Path(folder), grace_seconds=2) as server:
            environment = _environment(server, metrics_url=f"http://127.0.0.1:{port}/metrics")
            if words.side in ("both", "peer"):
                figures[PEER] = await asyncio.to_thread(_measure_peer, environment, words)
            if words.side in ("both", "penstock"):
                command = [sys.executable, "-m", "benchmarks.queue"]
                command += ["--concurrency", str(words.concurrency), "--phase"]
                ours = Side(command, environment, words.tasks, words.tasks_in_bulk)
                figures["penstock"] = await asyncio.to_thread(
                    ours.measure, in_flight=words.in_flight
                )
    return figures


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return f"{'-':>10}{'-':>10}{'-':>10}"
    requests = f"{figure.requests_per_task:.3g}" if figure.requests else "-"
    return f"{figure.per_second:>10,.0f}{requests:>10}{figure.cpu_ms_per_task:>10.3g}"


def _show(figures: Mapping[str, Mapping[str, Figure]]) -> None:
    ours, theirs = figures.get("penstock", {}), figures.get(PEER, {})
    sides = f"{'penstock':>30}{f'{PEER} {PEER_VERSION}':>30}"
    print(f"{'':34}{sides}{'ratio':>10}{'by CPU':>8}{'goal':>6}")
    print(f"{'':34}" + f"{'tasks/s':>10}{'req/task':>10}{'CPU ms':>10}" * 2)
    for row in theirs or ours:
        # The peer's shards split by hand: a rate of its own, beside the same one of ours.
        mine, other = (
            ours.get(_row("singles", WORKERS[-1]) if row == _SPLIT else row),
            theirs.get(row),
        )
        ratio = by_cpu = "-"
        if mine and other:
            ratio = f"{mine.per_second / other.per_second:.1f}"
            by_cpu = f"{other.cpu_ms_per_task / mine.cpu_ms_per_task:.1f}"
        goal = f"{GOALS[row]:g}" if row in GOALS else "-"
        print(f"{row:34}{_cell(mine)}{_cell(other)}{ratio:>10}{by_cpu:>8}{goal:>6}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--side", choices=("both", "peer", "penstock"), default="both")
    parser.add_argument("--tasks", type=int, default=1000, help="tasks of a phase")
    parser.add_argument(
        "--tasks-in-bulk", type=int, default=20 * BATCH, help="the same, for Penstock's batches"
    )
    parser.add_argument("--in-flight", type=int, default=32, help="single submits at once")
    parser.add_argument("--concurrency", type=int, default=32, help="handlers of a worker of ours")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    # What the benchmark calls itself with.
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=BATCH, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.phase:
        asyncio.run(PHASES[words.phase](words))
        return
    try:
        figures = asyncio.run(measure(words))
    except subprocess.SubprocessError as error:
        raise SystemExit(f"A phase of Penstock's failed, as said above: {error}") from None
    if words.json:
        named = {
            side: {row: asdict(each) for row, each in rows.items()}
            for side, rows in figures.items()
        }
        print(json.dumps(named, indent=2))
    else:
        _show(figures)


if __name__ == "__main__":
    main()
