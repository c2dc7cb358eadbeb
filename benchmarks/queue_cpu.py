"""CPU time a task of the queue, by phase, on a store in memory: what Python itself costs.

Wall time says little on a machine that others use too; the CPU time of one process says the same
on a busy one. One process submits tasks one by one, runs them, submits as many in packs of 1,000,
and runs those, with handlers that do nothing. Looks, leases and everything else that a worker does
beside its tasks are in the figures, as are the requests, which a store in memory answers at once.

`--profile` prints the functions that the CPU time goes to, by phase; profiling itself makes every
call dearer, so its seconds are shares, not costs. `--url` runs it on another store. Nothing is
asserted. `python -m benchmarks.queue_cpu --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock import Queue, Worker

_URL = "memory://"
BATCH = 1000
CONCURRENCY = 32
_IN_FLIGHT = 32
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase, measured."""

    name: str
    tasks: int
    cpu_seconds: float

    @property
    def microseconds(self) -> float:
        """CPU time a task."""
        return self.cpu_seconds / self.tasks * 1e6


async def _measured(
    name: str, tasks: int, work: Callable[[], Awaitable[None]], *, profile: bool
) -> Phase:
    gc.collect()
    profiler = cProfile.Profile(time.process_time) if profile else None
    began = time.process_time()
    if profiler:
        profiler.enable()
    await work()
    if profiler:
        profiler.disable()
    seconds = time.process_time() - began
    if profiler:
        print(f"\n== {name}")
        pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(_SHOWN)
    return Phase(name, tasks, seconds)


async def _submit_singly(queue: Queue, tasks: int) -> None:
    numbers = iter(range(tasks))

    async def one() -> None:
        for number in numbers:
            await queue.submit("noop", {"n": number})

    await asyncio.gather(*(one() for _ in range(_IN_FLIGHT)))


async def _submit_many(queue: Queue, tasks: int) -> None:
    for first in range(0, tasks, BATCH):
        await queue.submit_many("noop", [{"n": number} for number in range(first, first + BATCH)])


async def _work(queue: Queue, tasks: int) -> None:
    worker = Worker(queue, concurrency=CONCURRENCY, mode="leased")
    done = 0

    @worker.handler("noop")
    async def noop(_task: object) -> None:
        nonlocal done
        done += 1
        if done == tasks:
            worker.stop()

    await worker.run()


async def measure(url: str, *, singles: int, in_packs: int, profile: bool) -> list[Phase]:
    """All phases, in turn, on one queue."""
    phases: list[Phase] = []
    async with await Queue.open(url, name="cpu") as queue:

        async def run(name: str, tasks: int, work: Callable[[Queue, int], Awaitable[None]]) -> None:
            measured = await _measured(name, tasks, lambda: work(queue, tasks), profile=profile)
            phases.append(measured)

        # What is imported, compiled and cached at first use is not a task's cost.
        await _submit_singly(queue, 10)
        await _work(queue, 10)
        await run("submit one by one", singles, _submit_singly)
        await run("process singles", singles, _work)
        await run(f"submit in packs of {BATCH:,}", in_packs, _submit_many)
        await run(f"process packs of {BATCH:,}", in_packs, _work)
    return phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default=_URL, help="the store (default: %(default)s)")
    parser.add_argument(
        "--singles", type=int, default=2000, help="tasks that are packs of their own"
    )
    parser.add_argument("--packs", type=int, default=20, help=f"packs of {BATCH:,} tasks")
    parser.add_argument("--rounds", type=int, default=3, help="the least of so many rounds counts")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    words = parser.parse_args()
    rounds = [
        asyncio.run(
            measure(
                words.url,
                singles=words.singles,
                in_packs=words.packs * BATCH,
                profile=words.profile,
            )
        )
        for _ in range(1 if words.profile else words.rounds)
    ]
    print(f"{'':28}{'CPU us/task':>14}{'CPU s':>10}{'tasks':>10}")
    for of_a_phase in zip(*rounds, strict=True):
        least = min(of_a_phase, key=lambda each: each.cpu_seconds)
        print(
            f"{least.name:28}{least.microseconds:>14,.1f}{least.cpu_seconds:>10.3f}{least.tasks:>10,}"
        )


if __name__ == "__main__":
    main()
