"""Whether the queue stays what it is when it grows: requests and memory a task, and a late backlog.

Each measurement runs in a process of its own, on a `file://` store of its own without fsync, with
one producer and one worker in that process, so that its memory is that of both.

- **Growth**: 10,000, 100,000 and 1,000,000 tasks are submitted in batches of 1,000 and run by a
  handler that does nothing, batch after batch while the worker runs. Requests a task, by kind, and
  the peak of the memory must stay flat from the first size to the last.
- **Backlog**: the same single tasks with and without 1,000,000 others that become due tomorrow,
  in turns. Requests a task, and the median time from submit to start, are compared; the goal is a
  ratio below 1.1.

The goals are printed and nothing is asserted. `python -m benchmarks.queue_scale --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock import Polling, Queue, Worker, WorkerSettings
from penstock.kernel.clock import SystemClock
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.settings import DiscoveryMode
from penstock.store import Kind, Meter, Opening
from penstock.testing.cost import Workload, run_backlog

_FOLDER = Path(__file__).parent
SIZES = (10_000, 100_000, 1_000_000)
SAMPLED_BACKLOGS = (1_000, 10_000, 100_000)
BATCH = 1000
WAITING_MAX = 20
"""So many batches are submitted ahead of the worker."""
ROUNDS = 3
PACED_SECONDS = 0.02
DAY_SECONDS = 86_400.0
_CHILD_SECONDS_MAX = 3600


@dataclass(frozen=True, slots=True)
class Figure:
    """What one process has measured."""

    tasks: int
    requests: dict[str, int]
    peak_mib: float
    seconds: float
    start_seconds: float = 0.0
    """The median time from the answer to a submit to the start of its handler."""

    @property
    def requests_per_task(self) -> float:
        return sum(self.requests.values()) / self.tasks


async def grow(url: str, *, tasks: int) -> Figure:
    """Submit so many tasks in batches, and run them."""
    meter, clock = Meter(), SystemClock()
    queue = await Queue.open(url, name="scale", opening=Opening(meter=meter))
    worker = Worker(queue, concurrency=32, settings=_eager())
    done = 0
    ended = asyncio.Event()

    @worker.handler("work")
    async def work(_task: TaskContext) -> None:
        nonlocal done
        done += 1
        ended.set()

    began = clock.monotonic()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(worker.run(signals=False))
        for sent in range(0, tasks, BATCH):
            while sent - done >= WAITING_MAX * BATCH:
                ended.clear()
                await ended.wait()
            await queue.submit_many("work", range(sent, min(sent + BATCH, tasks)))
        while done < tasks:
            ended.clear()
            await ended.wait()
        worker.stop()
        await running
    await queue.close()
    return _figure(meter, tasks, seconds=clock.monotonic() - began)


async def backlog(url: str, *, tasks: int, delayed: int) -> Figure:
    """Run single tasks, one after the other, beside so many that are due tomorrow."""
    meter, clock = Meter(), SystemClock()
    queue = await Queue.open(url, name="scale", opening=Opening(meter=meter))
    for sent in range(0, delayed, 10 * BATCH):
        # In small packs over a thousand minutes: many objects and many folders.
        await asyncio.gather(
            *(
                queue.submit_many("later", range(BATCH // 10), delay=DAY_SECONDS + 60 * number)
                for number in range(sent // 1000, sent // 1000 + 100)
            )
        )
    worker = Worker(queue, concurrency=32, settings=_eager())
    answered: dict[int, float] = {}
    started: dict[int, float] = {}
    all_started = asyncio.Event()

    @worker.handler("now")
    async def now(task: TaskContext) -> None:
        started[task.input] = clock.monotonic()
        if len(started) == tasks:
            all_started.set()

    async with asyncio.TaskGroup() as group:
        running = group.create_task(worker.run(signals=False))
        first = await queue.submit("now", -1)
        await first.result(timeout=60)
        started.clear()
        before = meter.billed.copy()
        began = clock.monotonic()
        for number in range(tasks):
            await queue.submit("now", number)
            answered[number] = clock.monotonic()
            await clock.sleep(PACED_SECONDS)
        await all_started.wait()
        worker.stop()
        await running
    await queue.close()
    meter.billed.subtract(before)
    waits = [max(0.0, started[number] - answered[number]) for number in range(tasks)]
    return _figure(
        meter, tasks, seconds=clock.monotonic() - began, start_seconds=statistics.median(waits)
    )


def sampled_claims(backlogs: Sequence[int] = SAMPLED_BACKLOGS) -> dict[int, float]:
    """Requests to find and claim a task in mode `sampled`, by how many wait; in virtual time.

    Four workers take some 300 of them, one by one. The goal is that it stays flat.
    """
    load = Workload(workers=4, concurrency=4, tasks_per_day=1, mode=DiscoveryMode.SAMPLED)
    runs = {backlog: run_backlog(load, backlog=backlog) for backlog in backlogs}
    return {
        backlog: sum(run.bill.requests(cause=each) for each in ("discovery", "claim")) / run.tasks
        for backlog, run in runs.items()
    }


def _eager() -> WorkerSettings:
    return WorkerSettings(polling=Polling(min_seconds=0.2, max_seconds=0.5))


def _figure(meter: Meter, tasks: int, *, seconds: float, start_seconds: float = 0.0) -> Figure:
    requests = {
        kind.value: sum(count for (_, its), count in meter.billed.items() if its is kind)
        for kind in Kind
    }
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Figure(tasks, requests, peak_mib, seconds, start_seconds)


def _in_a_process(*words: str) -> Figure:
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.queue_scale", *words, "--folder", folder],
            cwd=_FOLDER.parent,
            stdout=subprocess.PIPE,
            timeout=_CHILD_SECONDS_MAX,
            check=True,
        )
    return Figure(**json.loads(ended.stdout))


def show_growth(sizes: Sequence[int]) -> None:
    """Print how requests and memory grow with the number of tasks."""
    print(f"{'tasks':>10} {'requests/task':>14} {'peak MiB':>9} {'tasks/s':>9}")
    figures = []
    for size in sizes:
        figure = _in_a_process("grow", "--tasks", str(size))
        figures.append(figure)
        rate = size / figure.seconds
        print(
            f"{size:>10,} {figure.requests_per_task:>14.5f} {figure.peak_mib:>9.0f} {rate:>9,.0f}"
        )
    first, last = figures[0], figures[-1]
    print(
        f"From {first.tasks:,} to {last.tasks:,} tasks: requests a task"
        f" x {last.requests_per_task / first.requests_per_task:.2f},"
        f" memory x {last.peak_mib / first.peak_mib:.2f} (goal: flat)."
    )


def show_backlog(*, tasks: int, delayed: int, rounds: int) -> None:
    """Print what a backlog of delayed tasks does to those that are ready."""
    measured: dict[int, list[Figure]] = {0: [], delayed: []}
    for _ in range(rounds):
        for number, figures in measured.items():
            words = ("backlog", "--tasks", str(tasks), "--delayed", str(number))
            figures.append(_in_a_process(*words))
    requests = [
        statistics.median(each.requests_per_task for each in figures)
        for figures in measured.values()
    ]
    starts = [
        statistics.median(each.start_seconds for each in figures) for figures in measured.values()
    ]
    print(f"{'':>24} {'nothing else':>14} {f'{delayed:,} later':>18} {'ratio':>7}")
    for name, (without, beside) in (("requests a task", requests), ("start after, s", starts)):
        print(f"{name:>24} {without:>14.4f} {beside:>18.4f} {beside / without:>7.2f} (goal 1.1)")


def main() -> None:
    """Measure everything, or what a process of this benchmark is told to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "what", nargs="?", default="all", choices=("all", "grow", "backlog", "sampled")
    )
    parser.add_argument("--tasks", type=int, default=0)
    parser.add_argument("--delayed", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--folder", help="Measure once, in this folder, and print JSON.")
    said = parser.parse_args()
    if said.folder:
        url = f"file://{said.folder}/bucket?fsync=off"
        figure = (
            grow(url, tasks=said.tasks)
            if said.what == "grow"
            else backlog(url, tasks=said.tasks, delayed=said.delayed)
        )
        print(json.dumps(asdict(asyncio.run(figure))))
        return
    if said.what in ("all", "grow"):
        show_growth(said.sizes)
    if said.what in ("all", "sampled"):
        for waiting, requests in sampled_claims().items():
            print(f"sampled, {waiting:>7,} waiting: {requests:.2f} requests to find and claim one")
    if said.what in ("all", "backlog"):
        show_backlog(tasks=said.tasks or 500, delayed=said.delayed, rounds=said.rounds)


if __name__ == "__main__":
    main()
