"""How many files of Penstock one task runs through: what somebody reads who follows it.

A file counts when a function of it is called in this process between two moments; what is run when
a module is imported does not count. Figures are printed, and never asserted. Run
`python -m benchmarks.files_touched`; `--list` names the files.

- *queue*: a task on `memory://`, from its submit until its result is there; the worker waits
  already. *whole* has the start and the end of the queue and the worker in it.
- *pipeline*: an event of a manual source, from its trigger until the partition is published: a
  dispatcher with a Postgres of its own and a worker, in one process, and a function of the runtime
  `process`, whose child counts from the moment at which the user's module is imported. One task
  has run before. Loops of the dispatcher that run meanwhile, for whatever reason, are in it: *idle*
  has how many files these touch in the same time when nothing happens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from penstock import Client, Queue, Worker
from penstock.app import make_worker
from penstock.dispatcher_app import Dispatcher
from penstock.kernel.clock import SystemClock
from penstock.settings import Settings

SOURCE = str(Path(__file__).resolve().parents[1] / "src" / "penstock") + os.sep
DAG = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  clean: {runtime: process, operator: "touched_code:clean", inputs: [raw], outputs: [tidy]}
"""
CODE = """
import sys, threading
from pathlib import Path

LOG = Path(__file__).with_name("child.txt")
seen = set()

def profile(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_flags & 1 and code.co_filename not in seen:
        seen.add(code.co_filename)
        with LOG.open("a") as log:
            log.write(code.co_filename + chr(10))

threading.setprofile(profile)
sys.setprofile(profile)

def clean(task):
    (task.output.path / "part.txt").write_text(task.partition_key)
"""
SECONDS_MAX = 120.0
CLOCK = SystemClock()
_CO_OPTIMIZED = 1  # set for functions, and neither for modules nor for bodies of classes

touched: set[str] = set()


def _profile(frame: FrameType, event: str, _: Any) -> None:
    code = frame.f_code
    name = code.co_filename
    if event == "call" and name.startswith(SOURCE) and code.co_flags & _CO_OPTIMIZED:
        touched.add(name)


def watch() -> None:
    """Note every file from now on, in this thread and in all that it starts."""
    threading.setprofile(_profile)
    sys.setprofile(_profile)


async def queue_task() -> tuple[set[str], set[str]]:
    """The files of one task, and those of the whole life of its queue and its worker."""
    watch()
    queue = Queue("memory://", name="touched")
    worker = Worker(queue, concurrency=1)

    @worker.handler("double")
    async def double(task: Any) -> int:
        return int(task.input) * 2

    async with queue:
        running = asyncio.create_task(worker.run())
        await queue.submit("double", 1)
        await CLOCK.sleep(2)
        before = set(touched)
        touched.clear()
        task = await queue.submit("double", 21)
        assert await task.result(timeout=SECONDS_MAX) == 42
        one = set(touched)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    sys.setprofile(None)
    return one, before | one | touched


async def published(client: Client) -> set[str | None]:
    return {each.partition_key for each in (await client.partitions("tidy")).partitions}


async def pipeline_event(folder: Path) -> tuple[set[str], set[str]]:
    """The files of one event until its partition is there, and of as long a time without one."""
    watch()
    settings = Settings(data=folder / "data", port=0, internal_port=0)
    dispatcher = Dispatcher(settings)
    await dispatcher.start()
    worker = make_worker(replace(settings, dispatchers=(dispatcher.internal_url,)))
    working = asyncio.create_task(worker.run())
    try:
        async with Client(dispatcher.public_url) as client:
            await client.apply(DAG)

            async def event(key: str) -> None:
                await client.trigger("feed", partition_key=key)
                async with asyncio.timeout(SECONDS_MAX):
                    while key not in await published(client):
                        await CLOCK.sleep(0.05)

            await event("first")
            await CLOCK.sleep(2)
            touched.clear()
            began = time.monotonic()
            await event("second")
            took = time.monotonic() - began
            child = (folder / "child.txt").read_text().splitlines()
            one = set(touched) | {name for name in child if name.startswith(SOURCE)}
            await CLOCK.sleep(2)
            touched.clear()
            await CLOCK.sleep(took)
            idle = set(touched)
    finally:
        worker.stop()
        await working
        await dispatcher.stop()
        sys.setprofile(None)
    return one, idle


def _of_process(part: str) -> None:
    """Measure in a process of its own, so that nothing is imported or started already."""
    here = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "touched_code.py").write_text(CODE)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.files_touched",
                "--inside",
                name,
                *sys.argv[1:],
                part,
            ],
            cwd=here,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([name, str(here)])},
            check=True,
        )


def _say(what: str, found: set[str], *, is_listed: bool) -> None:
    print(f"{what:44} {len(found):4} files", flush=True)
    if is_listed:
        for each in sorted(name.removeprefix(SOURCE) for name in found):
            print(f"    {each}")


def main() -> None:
    parser = argparse.ArgumentParser(description="How many files a task runs through.")
    parser.add_argument("parts", nargs="*", metavar="queue|pipeline")
    parser.add_argument("--list", action="store_true", help="name the files")
    parser.add_argument("--inside", metavar="FOLDER", help=argparse.SUPPRESS)
    said = parser.parse_args()
    parts = said.parts or ["queue", "pipeline"]
    if not said.inside:
        sys.argv[1:] = ["--list"] if said.list else []
        for part in parts:
            _of_process(part)
    elif parts == ["queue"]:
        one, whole = asyncio.run(queue_task())
        _say("queue: from submit to settled", one, is_listed=said.list)
        _say("queue: whole, with start and end", whole, is_listed=False)
    else:
        one, idle = asyncio.run(pipeline_event(Path(said.inside)))
        _say("pipeline: from event to partition", one, is_listed=said.list)
        _say("pipeline: idle for the same time", idle, is_listed=False)


if __name__ == "__main__":
    main()
