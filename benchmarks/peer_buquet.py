"""The other side of `benchmarks.queue`: `buquet` 0.1.0, a task queue that lives in a bucket too.

Run with an interpreter that has `buquet`, and with `-I`, or this folder's `queue.py` takes the
place of the standard library's. The server is named by `S3_ENDPOINT`, `S3_BUCKET`, `S3_REGION`,
`AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`; `BUQUET_ALLOW_NO_VERSIONING=1` lets it use a
bucket without versioning, where it writes the same requests. Each phase prints one JSON line:

    submit --tasks N --in-flight K          {"what": "submit", "tasks": N, "seconds": s, ...}
    submit_many --tasks N --batch B         {"what": "submit_many", ...}
    process --tasks N --workers W [--split] {"what": "process", "workers": W, ...}

`process` empties what the submits before it have left, with W worker processes that are connected
before they are released together. Its seconds run from that release to the last settlement: the
peer calls `on_success` once the task's completion is written. The workers have the settings that
the peer ships with; they all look at all shards, or with `--split` each only at its own, as a
careful user would deal them out by hand. The peer's worker runs one task at a time.

`benchmarks.queue` measures Penstock with the same `reported` and `process` as here, so that
neither side has a stopwatch of its own. Hence this file imports nothing beyond the standard
library until it has to, and nothing of Penstock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import re
import selectors
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

METRICS_VARIABLE = "BENCH_METRICS_URL"
"""Where the server's own counts of requests are read. Without it they are not reported."""

READY, SETTLED, ENDED = b"R", b".", b"E"
"""What a worker process prints: it can be released, a task is done, it has ended by itself."""

_SECONDS_MAX = 300.0
_NAP_SECONDS = 0.005
"""Between two looks at the workers, so that counting their tasks takes no time from them."""

_REQUESTS = re.compile(r'SeaweedFS_s3_request_total\{[^}]*type="([A-Z]+)"[^}]*\} (\S+)')
_SERVER_CPU = re.compile(r"^process_cpu_seconds_total (\S+)", re.MULTILINE)


def server_so_far() -> tuple[Counter[str], float]:
    """The requests that the server has answered, by kind, and its CPU seconds.

    Nothing if nobody said where to ask.
    """
    url = os.environ.get(METRICS_VARIABLE)
    counts: Counter[str] = Counter()
    if not url:
        return counts, 0.0
    with urllib.request.urlopen(url, timeout=10) as answer:
        told = answer.read().decode()
    for kind, count in _REQUESTS.findall(told):
        counts[kind] += int(float(count))
    cpu = _SERVER_CPU.search(told)
    return counts, float(cpu[1]) if cpu else 0.0


def cpu_of(process: int) -> float:
    """The CPU seconds of a process, which may have ended as long as nobody has waited for it."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def reported(
    what: str, *, tasks: int, cpu: Callable[[], float] = time.process_time, **more: object
) -> Iterator[None]:
    """Measure the block and print it as a JSON line; `cpu` gives the CPU seconds of the clients.

    CPU seconds hardly depend on what else the machine does, as the others do.
    """
    (requests, server_cpu), client_cpu, began = server_so_far(), cpu(), time.monotonic()
    yield
    seconds, client_cpu = time.monotonic() - began, cpu() - client_cpu
    later, later_cpu = server_so_far()
    line = {
        "what": what,
        "tasks": tasks,
        "seconds": seconds,
        "requests": later - requests,
        "cpu_seconds": client_cpu,
        "server_cpu_seconds": later_cpu - server_cpu,
        **more,
    }
    print(json.dumps(line), flush=True)


async def submit_singly(
    submit: Callable[[int], Awaitable[object]], *, tasks: int, in_flight: int
) -> None:
    """One call a task, from so many submitters at once."""
    numbers = iter(range(tasks))

    async def one() -> None:
        for number in numbers:
            await submit(number)

    with reported("submit", tasks=tasks):
        await asyncio.gather(*(one() for _ in range(in_flight)))


def process(commands: Sequence[Sequence[str]], *, tasks: int, until_ended: bool) -> None:
    """Run these workers until they have done all tasks, and report how long that took.

    A worker prints `READY`, waits for a line, then prints `SETTLED` for each task. With
    `until_ended` that may come before the task's settlement is written: the workers are then asked
    to stop, by the end of their input, and the clock runs until the last has stopped and said
    `ENDED`, when everything is written. Without it they are killed when they have done all.
    """
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        for command in commands
    ]
    try:
        with selectors.DefaultSelector() as outputs:
            for worker in workers:
                assert worker.stdout is not None
                outputs.register(worker.stdout, selectors.EVENT_READ)
            _count(outputs, READY, len(workers))

            def cpu() -> float:
                return sum(cpu_of(worker.pid) for worker in workers)

            with reported("process", tasks=tasks, workers=len(workers), cpu=cpu):
                for worker in workers:
                    assert worker.stdin is not None
                    worker.stdin.write(b"go\n")
                _count(outputs, SETTLED, tasks)
                if until_ended:
                    for worker in workers:
                        assert worker.stdin is not None
                        worker.stdin.close()
                    _count(outputs, ENDED, len(workers))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()


def _count(outputs: selectors.BaseSelector, sign: bytes, count: int) -> None:
    """Wait until the workers together have printed this sign so often."""
    seen = 0
    deadline = time.monotonic() + _SECONDS_MAX
    while seen < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"The workers printed {sign!r} {seen} times, not {count}, in time.")
        for key, _ in outputs.select(1.0):
            said = os.read(key.fd, 65536)
            if not said:
                # A worker that has said that it ends may close its output; no other may.
                outputs.unregister(key.fileobj)
                if sign != ENDED or not outputs.get_map():
                    raise SystemExit("A worker ended before the tasks did.")
            seen += said.count(sign)
        if seen < count:
            time.sleep(_NAP_SECONDS)


def _buquet() -> Any:
    return importlib.import_module("buquet")


async def _submit(words: argparse.Namespace) -> None:
    queue = await _buquet().connect()

    def submit(number: int) -> Awaitable[object]:
        submitted: Awaitable[object] = queue.submit("noop", {"n": number})
        return submitted

    await submit_singly(submit, tasks=words.tasks, in_flight=words.in_flight)


async def _submit_many(words: argparse.Namespace) -> None:
    queue = await _buquet().connect()
    with reported("submit_many", tasks=words.tasks, batch=words.batch):
        for first in range(0, words.tasks, words.batch):
            numbers = range(first, min(first + words.batch, words.tasks))
            await queue.submit_many([("noop", {"n": number}) for number in numbers])


async def _process(words: argparse.Namespace) -> None:
    queue = await _buquet().connect()
    shards = queue.all_shards()
    command = [sys.executable, "-I", __file__, "worker", "--shards"]
    commands = [
        [*command, ",".join(shards[number :: words.workers] if words.split else shards)]
        for number in range(words.workers)
    ]
    process(commands, tasks=words.tasks, until_ended=False)


async def _worker(words: argparse.Namespace) -> None:
    queue = await _buquet().connect()
    worker = _buquet().Worker(queue, f"worker-{os.getpid()}", words.shards.split(","))

    async def noop(_input: object) -> None:
        return None

    async def settled(_task: object) -> None:
        os.write(1, SETTLED)

    worker.task("noop")(noop)
    worker.on_success(settled)
    os.write(1, READY)
    if os.read(0, 16):
        await worker.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    phases = {
        "submit": _submit,
        "submit_many": _submit_many,
        "process": _process,
        "worker": _worker,
    }
    parser.add_argument("phase", choices=phases)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--in-flight", type=int, default=32, help="submits at once")
    parser.add_argument("--batch", type=int, default=1000, help="tasks in a bulk call")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--split", action="store_true", help="each worker has its own shards")
    parser.add_argument("--shards", default="", help="those of this worker")
    words = parser.parse_args()
    asyncio.run(phases[words.phase](words))


if __name__ == "__main__":
    main()
