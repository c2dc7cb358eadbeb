"""What a pipeline costs in requests to its bucket, counted by the S3 server itself.

Everything that asks the bucket is in it: the dispatcher, workers, and Spark, which no store of ours
sees. Dollars are those of S3 Standard.
Run `make bench`, or `python -m benchmarks.pipeline_cost --help`.

- *flights*: the demo's pipeline, sixteen jobs on Spark for so many days.
- *functions*: so many events through one job that is a Python function, which itself asks nothing.
- *idle*: each of these installations while it has nothing to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from benchmarks.pipeline import DAILY, FLIGHTS, MONTHLY, event_of, installed, published, trigger_all
from penstock.dispatcher.client import Client
from penstock.store.metered import Kind, Prices
from penstock.store.s3.local import LocalS3

FUNCTIONS = """
jobs:
  told: {activation: source, source: {kind: manual}, outputs: [keys]}
  small: {runtime: process, operator: "small:work", inputs: [told.keys], outputs: [small]}
"""
MONTH_SECONDS = 30 * 24 * 3600
_COUNT = re.compile(
    r'^SeaweedFS_s3_request_total\{.*code="(\d+)",type="(\w+)"\} (\d+)$', re.MULTILINE
)
_KINDS = {"GET": Kind.GET, "HEAD": Kind.HEAD, "LIST": Kind.LIST, "DELETE": Kind.DELETE}

Counts = Counter[Kind]


def asked(server: LocalS3) -> Counts:
    """How many requests the server has answered. Errors of its own are not billed."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
        text = answer.read().decode()
    counts: Counts = Counter()
    for code, kind, count in _COUNT.findall(text):
        if int(code) < 500:
            # What makes, copies and completes objects has one price.
            counts[_KINDS.get(kind, Kind.PUT)] += int(count)
    return counts


def dollars(counts: Counts) -> float:
    """What requests cost at S3 Standard's prices."""
    return sum(count * Prices().of(kind) for kind, count in counts.items())


def tell(figures: dict[str, Any], name: str, counts: Counts, **per: int) -> None:
    """Print requests by kind, and what they cost, per this and that."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
    print(f"{name}: {counts.total():,} requests ({kinds})", flush=True)
    figures[name] = {"requests": dict(counts), "dollars": dollars(counts), **per}
    for what, count in per.items():
        each = f"{counts.total() / count:.1f} requests a {what[:-1]}"
        print(f"  {each}, ${1000 * dollars(counts) / count:.3f} for 1,000 {what}", flush=True)


async def _idle(server: LocalS3, seconds: float, figures: dict[str, Any], name: str) -> None:
    before = asked(server)
    await asyncio.sleep(seconds)
    counts = asked(server) - before
    month = dollars(counts) * MONTH_SECONDS / seconds
    figures[name] = {"requests": dict(counts), "seconds": seconds, "dollars_a_month": month}
    print(f"{name}: {counts.total():,} requests in {seconds:.0f} s, ${month:.2f} a month")


async def _fly(client: Client, days: int) -> None:
    every = [date(2013, 1, 1) + timedelta(days=each) for each in range(days)]
    months = sum((each + timedelta(days=1)).day == 1 for each in every)
    await trigger_all(client, "register", [{"event_id": "register"}])
    await trigger_all(client, "calendar", [event_of(each) for each in every])
    tables = dict.fromkeys(("airlines", "airports", "planes"), 1)
    expected = {**tables, **dict.fromkeys(DAILY, days), **dict.fromkeys(MONTHLY, months)}
    await published(client, {name: count for name, count in expected.items() if count})


async def _call(client: Client, count: int) -> None:
    events = [{"event_id": f"p{each}", "partition_key": f"p{each:05}"} for each in range(count)]
    await trigger_all(client, "told", events)
    await published(client, {"small": count})


async def _measured(
    folder: Path, name: str, dag: Path, work: Callable[[Client], Awaitable[None]], idle: float
) -> dict[str, Any]:
    """One installation on a server of its own, while it works and while it does not."""
    figures: dict[str, Any] = {}
    async with LocalS3(folder / "server", counts=True) as server:
        os.environ["AWS_ACCESS_KEY_ID"] = server.credentials.access_key
        os.environ["AWS_SECRET_ACCESS_KEY"] = server.credentials.secret_key
        async with installed(folder / "data", dag, store=server.url) as client:
            before = asked(server)
            await work(client)
            counts = asked(server) - before
            tasks = len((await client.tasks(status="completed", limit=1000)).tasks)
            found = (await client.datasets()).datasets
            partitions = sum(each.partitions for one in found for each in one.generations)
            tell(figures, name, counts, tasks=tasks, partitions=partitions)
            await _idle(server, idle, figures, f"{name}, idle")
    return figures


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the sections in turn."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        if "functions" in options.sections:
            (folder / "small.yaml").write_text(FUNCTIONS)
            (folder / "small.py").write_text("def work(task):\n    return None\n")
            figures |= await _measured(
                folder / "functions",
                "functions",
                folder / "small.yaml",
                lambda client: _call(client, options.events),
                options.idle_seconds,
            )
        if "flights" in options.sections:
            figures |= await _measured(
                folder / "flights",
                "flights",
                FLIGHTS / "flights.yaml",
                lambda client: _fly(client, options.days),
                options.idle_seconds,
            )
    return figures


def main() -> None:
    """Measure, print, and perhaps write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    sections = ("functions", "flights")
    parser.add_argument("sections", nargs="*", default=sections, help=", ".join(sections))
    parser.add_argument("--days", type=int, default=31, help="for flights")
    parser.add_argument("--events", type=int, default=500, help="for functions; 1,000 at most")
    parser.add_argument("--idle-seconds", type=float, default=60, help="for idle")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = asyncio.run(measure(options))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
