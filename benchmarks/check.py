"""`make bench-check`: has anything become slower or dearer since its ratio was accepted?

Each benchmark has a short form here, all of them together a few minutes. Its figures are costs
relative to something in the same run: CPU time against that of boto3 or of plain Python, time
against bare Postgres, bare Spark, a peer or the empty page, or requests a task. So less is better,
and another machine changes them little.

The accepted ones stand in `benchmarks/ratios.json`, each with a line that says why it is what it
is. What moved by more than a fifth is measured once more, the lesser counts, and both values are
printed; what is worse makes this fail. What was accepted and could not be measured here, such as
the ratio to a peer that does not install, is named and fails nothing. To accept a figure:

    make bench-check ARGS="--why 'Every claim reads the limits first.' --accept 'queue CPU: '"

which takes every figure whose name begins so. Nothing is accepted without a reason.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

from benchmarks import (
    console,
    dispatcher,
    light,
    pipeline,
    pipeline_cost,
    queue,
    queue_cpu,
    queue_scale,
    tables,
    waiting,
)
from benchmarks import store as of_store

ACCEPTED: Final = Path(__file__).with_name("ratios.json")
MOVED: Final = 1.2
Figures = dict[str, float]


def store() -> Figures:
    """CPU time of our S3 client, as a ratio to boto3's."""
    results = asyncio.run(of_store.measure(count=1500, in_flight=32))
    cpu = {(each.client, each.kind): each.cpu_seconds_per_1000 for each in results}
    return {
        f"store: CPU of a {kind}, boto3 1": cpu["penstock", kind] / cpu["boto3", kind]
        for kind in of_store.KINDS
    }


def queue_in_memory() -> Figures:
    """CPU time a task, as a ratio to a little plain Python; and requests, where they could grow."""
    phases = [
        asyncio.run(queue_cpu.measure("memory://", singles=1000, in_packs=5000, profile=False))
        for _ in range(3)
    ]
    plain = min(asyncio.run(_plain(2000)) for _ in range(3))
    figures: Figures = {}
    for rounds in zip(*phases, strict=True):
        least = min(each.microseconds for each in rounds)
        figures[f"queue CPU: {rounds[0].name}, plain Python 1"] = least / plain
    for backlog, requests in queue_scale.sampled_claims((1_000, 10_000)).items():
        figures[f"queue: requests of a sampled claim, {backlog:,} waiting"] = requests
    return figures


async def _plain(count: int) -> float:
    """Microseconds of CPU for what any task costs in Python: a document, a hash, a turn."""
    began = time.process_time()
    for number in range(count):
        text = json.dumps({"id": number, "args": {"path": "a/b/c", "sizes": list(range(20))}})
        json.loads(text)
        hashlib.sha256(text.encode()).hexdigest()
        await asyncio.sleep(0)
    return (time.process_time() - began) / count * 1e6


def queue_on_s3() -> Figures:
    """CPU time a task, of clients and server, as a ratio to the peer's; and requests a task.

    Not the rates: on a machine that does other things they move by half from run to run, since the
    peer mostly waits and we mostly compute. `python -m benchmarks.queue` prints both.
    """
    words = argparse.Namespace(
        side="both", tasks=200, tasks_in_bulk=4000, in_flight=32, concurrency=32
    )
    return figures_on_s3(asyncio.run(queue.measure(words)))


def figures_on_s3(measured: Mapping[str, Mapping[str, queue.Figure]]) -> Figures:
    """The figures of both sides; of ours alone if the peer cannot be had."""
    theirs = measured.get(queue.PEER, {})
    figures: Figures = {}
    for row, figure in measured["penstock"].items():
        figures[f"queue on S3: requests a task, {row}"] = figure.requests_per_task
        if row in theirs:
            ratio = figure.cpu_ms_per_task / theirs[row].cpu_ms_per_task
            figures[f"queue on S3: CPU of {row}, {queue.PEER} 1"] = ratio
    return figures


def of_dispatcher() -> Figures:
    """Time of an event and of a task, as a ratio to commits of one row by eight writers."""
    options = argparse.Namespace(sections=("routing", "http"), events=3000, tasks=1000)
    measured = asyncio.run(dispatcher.measure(options))
    commits = measured["baseline: commits of one row, 8 at once"]
    return {
        f"dispatcher: time of {name}, a commit 1": commits / rate
        for name, rate in measured.items()
        if not name.startswith("baseline") and ": CPU of " not in name
    }


def of_console() -> Figures:
    """Pages, as ratios to the empty one."""
    options = argparse.Namespace(partitions=2000, rounds=8)
    return {
        f"console: {name}": value
        for name, value in asyncio.run(console.measure(options)).items()
        if name.endswith("ratio to the empty page")
    }


def of_pipeline() -> Figures:
    """A short flight against the plain script, and requests of functions that do nothing."""
    with_spark = asyncio.run(pipeline.measure(argparse.Namespace(sections=("flights",), days=14)))
    calls = argparse.Namespace(sections=("functions",), events=200, idle_seconds=20)
    each = asyncio.run(pipeline_cost.measure(calls))["functions"]
    requests = float(sum(each["requests"].values()))
    return {
        "pipeline: time of 14 days, bare PySpark 1": with_spark["flights: ratio"],
        "pipeline: requests a function": requests / each["tasks"],
    }


def of_tables() -> Figures:
    """What a snapshot writes and asks; its times say how busy the machine is."""
    options = argparse.Namespace(partitions=1000, publishers=100, times=5)
    measured = asyncio.run(tables.measure(options))
    return {
        f"tables: {name}": value
        for name, value in measured.items()
        if name.endswith(("objects written, at most", "statements, at most")) and value
    }


def of_waiting() -> Figures:
    """Statements of an installation that has nothing to do."""
    options = argparse.Namespace(sections=("idle",), workers=1, seconds=30.0)
    return {
        f"waiting: {name}": each for name, each in asyncio.run(waiting.measure(options)).items()
    }


def of_light() -> Figures:
    """CPU time of a trivial function, with all that an installation does for it."""
    options = argparse.Namespace(sections=("chain",), partitions=(50,), turns=2)
    measured = asyncio.run(light.measure(options))
    plain = min(asyncio.run(_plain(2000)) for _ in range(3))
    spent = min(value for name, value in measured.items() if name.endswith("CPU a task"))
    return {"light: CPU of a function, plain Python 1": 1000 * spent / plain}


SHORT: Final[Mapping[str, Callable[[], Figures]]] = {
    "store": store,
    "queue": queue_in_memory,
    "queue-on-s3": queue_on_s3,
    "dispatcher": of_dispatcher,
    "console": of_console,
    "pipeline": of_pipeline,
    "tables": of_tables,
    "waiting": of_waiting,
    "light": of_light,
}


def _measured(name: str) -> Figures:
    began = time.monotonic()
    with redirect_stdout(sys.stderr):
        figures = SHORT[name]()
    print(f"{name}: {len(figures)} figures in {time.monotonic() - began:.0f} s", flush=True)
    return figures


def _moved(now: float, accepted: Mapping[str, Any] | None) -> bool:
    before = accepted["ratio"] if accepted else now
    return max(now, before) > MOVED * min(now, before)


def unmeasured(now: Figures, accepted: Mapping[str, Any]) -> list[str]:
    """What was accepted of the areas that were measured, and is not among their figures."""
    areas = {_area(name) for name in now}
    return [name for name in accepted if _area(name) in areas and name not in now]


def _name_absent(names: Sequence[str]) -> None:
    if names:
        print(f"{len(names)} accepted ratios could not be measured here: {', '.join(names)}")


def _area(name: str) -> str:
    return name.partition(":")[0]


def main() -> int:
    """Measure, compare, print what moved."""
    parser = argparse.ArgumentParser(prog="make bench-check", description=__doc__)
    parser.add_argument("sections", nargs="*", help=", ".join(SHORT))
    parser.add_argument("--accept", help="what the names of the figures to accept begin with")
    parser.add_argument("--why", help="one sentence, kept with them")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SHORT):
        parser.error(f"there is no {min(unknown)}; there are {', '.join(SHORT)}")
    if (options.accept is None) != (options.why is None):
        parser.error("--accept needs --why, and --why needs --accept")
    accepted: dict[str, dict[str, Any]] = (
        json.loads(ACCEPTED.read_text()) if ACCEPTED.exists() else {}
    )
    now: Figures = {}
    for section in options.sections or SHORT:
        figures = _measured(section)
        if any(_moved(value, accepted.get(name)) for name, value in figures.items()):
            again = _measured(section)
            figures = {name: min(value, again.get(name, value)) for name, value in figures.items()}
        now |= figures
    worse = 0
    _name_absent(unmeasured(now, accepted))
    for name, value in now.items():
        if options.accept is not None and name.startswith(options.accept):
            accepted[name] = {"ratio": round(value, 3), "why": options.why}
        elif name not in accepted:
            worse += 1
            print(f"{name}: {value:.3g}, and nothing was accepted before")
        elif _moved(value, accepted[name]):
            before = accepted[name]["ratio"]
            worse += value > before
            print(f"{name}: {value:.3g}, {'worse' if value > before else 'better'} than {before:g}")
    if options.accept is not None:
        ACCEPTED.write_text(json.dumps(dict(sorted(accepted.items())), indent=1) + "\n")
    print(f"{len(now)} ratios, {worse} worse.")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
