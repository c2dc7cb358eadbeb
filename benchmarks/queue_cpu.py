"""CPU time a task of the queue, by phase, on a store in memory: what Python itself costs.

Wall time says little on a machine that others use too; the CPU time of one process says the same
on a busy one. One process submits tasks one by one, runs them, submits as many in packs of 1,000,
and runs those, with handlers that do nothing. Looks, leases and everything else that a worker does
beside its tasks are in the figures, as are the requests, which a store in memory answers at once.

`--features` prints what each part of the queue takes of a task that does not use it: a sample of
the stack every millisecond of CPU time, counted for the innermost line of Penstock's own, which
costs nearly nothing; and the requests by what they were for. `--profile` prints the functions that
the CPU time goes to, by phase; profiling itself makes every call dearer, so its seconds are shares,
not costs. `--url` runs it on another store. Nothing is asserted.
`python -m benchmarks.queue_cpu --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Final

from penstock import Queue, Worker
from penstock.store.metered import Meter
from penstock.store.opening import Opening

_URL = "memory://"
BATCH = 1000
CONCURRENCY = 32
_IN_FLIGHT = 32
_SHOWN = 40
_SAMPLE_SECONDS = 0.001
_OURS = "/penstock/"
_LOOP = "the event loop"

FEATURES: Final[Mapping[str, str]] = {
    "suspects and windows": r"transitions\.py (chosen|window_of|needs_exclusive|lost|_exclusive)"
    r"|ExclusiveMode|_exclusive$|needs_exclusive",
    "pause and limits": r"queue/(limits|control|execution/(gates|limit_gate))\.py|Waitlist",
    "metrics, hooks, tracing": r"queue/(metrics|tracing|execution/observer)\.py",
    "progress": r"Progress|_said|_on_progress",
    "large inputs and results": r"queue/payloads\.py|PayloadTransfer",
    "schemas and options of a submit": r"queue/(submit_options|context)\.py .*check|check_inputs",
    "doorbell": r"queue/doorbell\.py",
    "incarnation": r"queue/incarnation\.py|_watch_neighbours",
    "schedules and batches": r"queue/(schedules|batch\w*)\.py",
    "archive and retention": r"queue/(archive\w*|retention|maintenance)\.py",
    "shard leases": r"queue/shards/",
    "finding packs": r"queue/(discovery/|execution/pack_memory\.py)|_could_use|_take_in|_look",
    "room and priorities": r"execution/capacity\.py",
    "the store's time": r"store/time\.py|kernel/clock\.py",
    "documents as JSON": r"document_format\.py|queue/pack\.py",
    "the store's client": r"penstock/store/(?!cell)",
    "claims and settlements": r"queue/(transitions|ledger|pack_session|attempt_outcomes)\.py"
    r"|cell\.py",
    "running the handler": r"execution/(attempt|handlers|handler_processes)\.py",
    "submitting": r"queue/(submitter|client)\.py",
    "names, and the rest of the worker": r"",
}
"""What parts of the code are for: the first pattern that is found in `file.py function` counts."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase, measured."""

    name: str
    tasks: int
    cpu_seconds: float
    samples: Counter[str] = field(default_factory=Counter)
    """How often the stack was in each feature."""
    requests: Counter[str] = field(default_factory=Counter)

    @property
    def microseconds(self) -> float:
        """CPU time a task."""
        return self.cpu_seconds / self.tasks * 1e6


def _place(frame: FrameType | None) -> str:
    """The innermost function of Penstock's own."""
    while frame is not None:
        file, _, _ = frame.f_code.co_filename.partition(".py")
        if _OURS in file:
            return f"penstock/{file.rpartition(_OURS)[2]}.py {frame.f_code.co_qualname}"
        frame = frame.f_back
    return ""


def _feature(place: str) -> str:
    if not place:
        return _LOOP
    return next(name for name, pattern in FEATURES.items() if re.search(pattern, place))


@contextmanager
def _sampled(samples: Counter[str]) -> Iterator[None]:
    """Count where the CPU time goes."""

    def sample(_signal: int, frame: FrameType | None) -> None:
        samples[_place(frame)] += 1

    before = signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, _SAMPLE_SECONDS, _SAMPLE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


async def _measured(
    name: str,
    tasks: int,
    work: Callable[[], Awaitable[None]],
    *,
    profile: bool,
    meter: Meter,
) -> Phase:
    gc.collect()
    samples: Counter[str] = Counter()
    profiler = cProfile.Profile(time.process_time) if profile else None
    before = meter.billed.copy()
    began = time.process_time()
    with _sampled(samples):
        if profiler:
            profiler.enable()
        await work()
        if profiler:
            profiler.disable()
    seconds = time.process_time() - began
    if profiler:
        print(f"\n== {name}")
        pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(_SHOWN)
    requests: Counter[str] = Counter()
    for (label, kind), count in (meter.billed - before).items():
        requests[f"{label}: {kind.value}"] += count
    features: Counter[str] = Counter()
    for place, count in samples.items():
        features[_feature(place)] += count
    return Phase(name, tasks, seconds, features, requests)


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
    opening = Opening()
    async with await Queue.open(url, name="cpu", opening=opening) as queue:

        async def run(name: str, tasks: int, work: Callable[[Queue, int], Awaitable[None]]) -> None:
            measured = await _measured(
                name, tasks, lambda: work(queue, tasks), profile=profile, meter=opening.meter
            )
            phases.append(measured)

        # What is imported, compiled and cached at first use is not a task's cost.
        await _submit_singly(queue, 10)
        await _work(queue, 10)
        await run("submit one by one", singles, _submit_singly)
        await run("process singles", singles, _work)
        await run(f"submit in packs of {BATCH:,}", in_packs, _submit_many)
        await run(f"process packs of {BATCH:,}", in_packs, _work)
    return phases


def _show_features(phases: Sequence[Phase]) -> None:
    """What each feature takes of a task that does not use it, by phase."""
    names = [*FEATURES, _LOOP]
    print("| CPU us a task |" + "".join(f" {each.name} |" for each in phases))
    print("|---|" + "---|" * len(phases))
    for name in names:
        shares = [each.samples[name] / max(1, each.samples.total()) for each in phases]
        cells = [each.microseconds * share for each, share in zip(phases, shares, strict=True)]
        print(f"| {name} |" + "".join(f" {cell:,.2f} |" for cell in cells))
    print("| **all** |" + "".join(f" **{each.microseconds:,.1f}** |" for each in phases))
    print("\n| requests for 1,000 tasks |" + "".join(f" {each.name} |" for each in phases))
    print("|---|" + "---|" * len(phases))
    for what in sorted({what for each in phases for what in each.requests}):
        counts = [1000 * each.requests[what] / each.tasks for each in phases]
        print(f"| {what} |" + "".join(f" {count:,.2f} |" for count in counts))


def _least(rounds: Sequence[Sequence[Phase]]) -> Iterator[Phase]:
    """Each phase as it was in its best round, with the samples of all."""
    for of_a_phase in zip(*rounds, strict=True):
        least = min(of_a_phase, key=lambda each: each.cpu_seconds)
        yield replace(least, samples=sum((each.samples for each in of_a_phase), Counter()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default=_URL, help="the store (default: %(default)s)")
    parser.add_argument(
        "--singles", type=int, default=2000, help="tasks that are packs of their own"
    )
    parser.add_argument("--packs", type=int, default=20, help=f"packs of {BATCH:,} tasks")
    parser.add_argument("--rounds", type=int, default=3, help="the least of so many rounds counts")
    parser.add_argument("--features", action="store_true", help="print what each feature takes")
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
    phases = list(_least(rounds))
    if words.features:
        _show_features(phases)
        return
    print(f"{'':28}{'CPU us/task':>14}{'CPU s':>10}{'tasks':>10}")
    for each in phases:
        print(
            f"{each.name:28}{each.microseconds:>14,.1f}{each.cpu_seconds:>10.3f}{each.tasks:>10,}"
        )


if __name__ == "__main__":
    main()
