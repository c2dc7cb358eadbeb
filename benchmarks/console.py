"""How long the console's large pages take to be there first, as ratios to its empty page.

One dispatcher has no DAG, another has 60 jobs, one of whose datasets has 10,000 partitions. Pages
of both are asked for in turn, so that a slow machine shows in both. Over HTTP it is the time until
all of the HTML has come; in a Chromium, where there is one, the time until something is painted,
and until everything is there, with nothing kept from before. Run `make bench`, or
`python -m benchmarks.console --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from playwright.async_api import Browser, async_playwright, expect

from benchmarks.dispatcher import Bench, dispatcher_over, fill
from penstock.dispatcher.dag.parser import parse
from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.deployment import Deployer

JOBS = 60
DATASET = "sales"
"""What the job `j1` writes, and `fill` publishes."""
EMPTY = "no DAG"
_PAINTED = """
    () => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? performance.now()
"""


def sixty_jobs() -> str:
    """A source and what follows from it, in a drawing of some layers."""
    lines = [
        "jobs:",
        "  feed: {activation: source, source: {kind: manual}, outputs: [news]}",
        "  j1: {runtime: process, operator: bench:clean, inputs: [feed.news], outputs: [sales]}",
    ]
    for number in range(2, JOBS):
        inputs = {number // 2, max(1, number - 7)}
        read = ", ".join(DATASET if each == 1 else f"d{each}" for each in sorted(inputs))
        what = f"runtime: process, operator: bench:j{number}, inputs: [{read}]"
        lines.append(f"  j{number}: {{{what}, outputs: [d{number}]}}")
    return "\n".join(lines)


async def filled(dsn: str, *, partitions: int) -> None:
    """Put the jobs in force and publish the partitions of one."""
    text = sixty_jobs()
    async with Database(dsn, connections_max=10) as database:
        await Deployer(database).apply(parse(text, where="bench"), text)
        async with database.transaction() as connection:
            found = await connection.execute(
                b"SELECT definition.id, generation.version::text FROM job_definition AS definition"
                b" JOIN dataset ON dataset.job_id = definition.job_id"
                b" JOIN generation ON generation.dataset_id = dataset.id WHERE dataset.name = %s",
                [DATASET],
            )
            (row,) = await found.fetchall()
        definition, generation = row.values()
        await fill(database, definition, generation, 0, partitions)


async def over_http(bench: Bench, pages: Mapping[str, str], *, rounds: int) -> None:
    """The time until all of the HTML has come."""
    took: dict[str, list[float]] = {name: [] for name in pages}
    sizes: dict[str, int] = {}
    async with httpx.AsyncClient(timeout=60) as client:
        # The first round makes ready what is made once.
        for number in range(rounds + 1):
            for name, url in pages.items():
                began = time.monotonic()
                answer = await client.get(url)
                answer.raise_for_status()
                if number:
                    took[name].append(time.monotonic() - began)
                sizes[name] = len(answer.content)
    _tell(bench, "http", took)
    for name, size in sizes.items():
        bench.tell(f"http: {name}, size", size / 1024, "KiB")


async def in_a_browser(bench: Bench, pages: Mapping[str, str], *, rounds: int) -> None:
    """The time until something is painted, and until everything is there."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        print("chromium: there is none in PATH, so nothing is measured in it")
        return
    painted: dict[str, list[float]] = {name: [] for name in pages}
    whole: dict[str, list[float]] = {name: [] for name in pages}
    async with async_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = await playwright.chromium.launch(executable_path=found, args=flags)
        for number in range(rounds + 1):
            for name, url in pages.items():
                first, last = await _visited(browser, url)
                if number:
                    painted[name].append(first)
                    whole[name].append(last)
        await browser.close()
    _tell(bench, "chromium, first paint", painted)
    _tell(bench, "chromium, all is there", whole)


async def _visited(browser: Browser, url: str) -> tuple[float, float]:
    context = await browser.new_context(viewport={"width": 1440, "height": 900})
    page = await context.new_page()
    await page.goto(url, wait_until="load")
    map_told = page.locator("[data-told]")
    if await map_told.count():
        # The heat map says from where to where it goes once it is drawn.
        await expect(map_told).to_contain_text("From ", timeout=60_000)
    last: float = await page.evaluate("performance.now()")
    first: float = await page.evaluate(_PAINTED)
    await context.close()
    return first / 1000, last / 1000


def _tell(bench: Bench, what: str, took: Mapping[str, list[float]]) -> None:
    empty = statistics.median(took[EMPTY])
    for name, each in took.items():
        middle = statistics.median(each)
        bench.tell(f"{what}: {name}", 1000 * middle, "ms")
        if name != EMPTY:
            bench.tell(f"{what}: {name}, ratio to the empty page", middle / empty)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All of it, on one Postgres."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        async with LocalPostgres(folder / "postgres") as postgres:
            bench = Bench(folder, postgres, {})
            empty, full = await bench.database("empty"), await bench.database("filled")
            await filled(full, partitions=options.partitions)
            async with dispatcher_over(bench, empty) as bare, dispatcher_over(bench, full) as laden:
                pages = {
                    EMPTY: f"{bare[0]}/",
                    f"{JOBS} jobs": f"{laden[0]}/",
                    f"{options.partitions:,} partitions": f"{laden[0]}/datasets/{DATASET}",
                }
                cells = f"{laden[0]}/datasets/{DATASET}/partitions?cells=1"
                await over_http(bench, {**pages, "their cells": cells}, rounds=options.rounds)
                await in_a_browser(bench, pages, rounds=max(1, options.rounds // 4))
            return bench.figures


def main() -> None:
    """Measure, print, and perhaps write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = asyncio.run(measure(options))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
