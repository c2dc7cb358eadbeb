"""What it costs that workers wait: statements of an idle installation, and many who wait at once.

- *idle*: a dispatcher and workers with nothing to do: statements of Postgres by who asks for them.
- *waiters*: so many requests that wait at two dispatchers: descriptors, memory, CPU and statements
  of each while nothing happens, and how long it takes until wake-ups have reached their share.
- *ramp*: so many idle workers with one slot each, and as many events at once: how long it takes
  until each of them has a task, and how many claims found none; beside it one worker and one event.

Statements are counted in the log of a Postgres of its own, `BEGIN` and `COMMIT` apart from the
rest. CPU seconds and counts hold on a busy machine too; latencies do not. Run
`python -m benchmarks.waiting`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.dispatcher import FIVE_JOBS, SECRET, _client, _end, _event, _post
from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.kernel.ports import free_port
from penstock.protocol.base import WORKER_HEADER
from penstock.protocol.identity import Identities
from penstock.settings import Settings, variables_of

_SAID = re.compile(r"(?:statement|execute [^:]*): +(.*)")
_FRAME = re.compile(r"BEGIN|COMMIT|ROLLBACK")
_AT_ONCE = 200
ONE_JOB = FIVE_JOBS.partition("  totals:")[0]


@dataclass
class Stage:
    """A Postgres that writes down what it is asked, and the processes around it."""

    folder: Path
    postgres: LocalPostgres

    @contextlib.asynccontextmanager
    async def process(self, kind: str, settings: Settings) -> AsyncIterator[int]:
        with (self.folder / f"{kind}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock", kind),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **variables_of(settings)},
            )
        try:
            yield process.pid
        finally:
            process.terminate()
            await process.wait()

    def settings(self, *urls: str, **more: object) -> Settings:
        said = {"port": free_port(), "internal_port": free_port(), **more}
        return Settings(
            data=self.folder / "data",
            postgres=self.postgres.dsn,
            worker_secret=SECRET,
            dispatchers=tuple(urls),
            **said,  # type: ignore[arg-type]  # as settings are called
        )

    def asked(self, since: int) -> tuple[int, int, Counter[str]]:
        """Statements since a place in the log, what frames them, and which they were."""
        text = (self.folder / "postgres" / "postgres.log").read_text("utf-8", "replace")[since:]
        found = [each for each in _SAID.findall(text) if each]
        frames = sum(1 for each in found if _FRAME.match(each))
        rest = Counter(" ".join(each.split()[:7])[:60] for each in found if not _FRAME.match(each))
        return sum(rest.values()), frames, rest

    def log_size(self) -> int:
        return len((self.folder / "postgres" / "postgres.log").read_text("utf-8", "replace"))


async def _ready(url: str) -> None:
    async with _client(url) as client:
        for _ in range(600):
            with contextlib.suppress(Exception):
                if (await client.get("/readyz")).status_code == 200:
                    return
            await asyncio.sleep(0.1)
    raise RuntimeError("the dispatcher does not answer")


async def idle(stage: Stage, *, workers: int, seconds: float) -> float:
    settings = stage.settings()
    public = f"http://127.0.0.1:{settings.port}"
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(stage.process("dispatcher", settings))
        await _ready(public)
        async with _client(public) as client:
            await _post(client, "/v1/dag", {"source": FIVE_JOBS})
        for _ in range(workers):
            await stack.enter_async_context(
                stage.process("worker", stage.settings(settings.dispatcher_urls[0]))
            )
        await asyncio.sleep(20.0)
        since = stage.log_size()
        await asyncio.sleep(seconds)
        count, frames, which = stage.asked(since)
    print(f"idle, {workers} workers, {seconds:.0f} s: {count / seconds:.2f} statements/s", end="")
    print(f" and {frames / seconds:.2f}/s of BEGIN and COMMIT")
    for text, times in which.most_common(25):
        print(f"    {times / seconds:6.3f}/s  {text}")
    return count / seconds


async def waiters(stage: Stage, *, count: int, seconds: float) -> None:
    both = [stage.settings() for _ in range(2)]
    urls = [f"http://127.0.0.1:{each.port}" for each in both]
    async with contextlib.AsyncExitStack() as stack:
        pids = []
        for each, url in zip(both, urls, strict=True):
            pids.append(await stack.enter_async_context(stage.process("dispatcher", each)))
            await _ready(url)
        async with _client(urls[0]) as client:
            await _post(client, "/v1/dag", {"source": FIVE_JOBS})
        before = [_figures(each) for each in pids]
        began, since = time.monotonic(), stage.log_size()
        waiting = await _many(both, count=count)
        print(f"{count:,} requests wait after {time.monotonic() - began:.1f} s;", end=" ")
        print(f"{sum(stage.asked(since)[:2])} statements")
        await asyncio.sleep(5.0)
        steady = [_figures(each) for each in pids]
        since = stage.log_size()
        await asyncio.sleep(seconds)
        after = [_figures(each) for each in pids]
        asked, frames, which = stage.asked(since)
        for place in range(2):
            grown = steady[place].bytes - before[place].bytes
            print(
                f"dispatcher {place}: {after[place].files:,} descriptors,"
                f" {after[place].bytes / 1e6:.0f} MB ({grown / (count / 2) / 1e3:.1f} KB for each"
                f" who waits), {after[place].cpu - steady[place].cpu:.1f} CPU s"
                f" in {seconds:.0f} s"
            )
        print(f"both: {asked / seconds:.2f} statements/s, {frames / seconds:.2f}/s around them")
        for text, times in which.most_common(8):
            print(f"    {times / seconds:6.3f}/s  {text}")
        began = time.monotonic()
        async with _client(f"http://127.0.0.1:{both[0].internal_port}") as client:
            await _post(client, "/internal/events", {"events": [_event(1)]})
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=40)
        took = (time.monotonic() - began) * 1000
        print(f"one event: the first of them knew after {took:.0f} ms", end="; ")
        await asyncio.sleep(1.0)
        woken = sum(1 for task in waiting if task.done() and task.exception() is None)
        lost = Counter(repr(task.exception())[:80] for task in waiting if task.done())
        print("; ".join(f"{times} {why}" for why, times in lost.items() if why != "None"), end="")
        print(f"{woken} were woken, one for each dispatcher")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def ramp(stage: Stage, *, workers: int) -> float:
    settings = stage.settings()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(stage.process("dispatcher", settings))
        public = f"http://127.0.0.1:{settings.port}"
        await _ready(public)
        async with _client(public) as client:
            await _post(client, "/v1/dag", {"source": ONE_JOB})
        clients = [
            await stack.enter_async_context(
                _client(settings.dispatcher_urls[0], name=f"worker-{number}")
            )
            for number in range(workers)
        ]
        # What is made at first use is not what is measured.
        alone = [await _ramped(clients[:1], first=number) for number in range(5)]
        await _ramped(clients, first=100)
        rounds = [await _ramped(clients, first=1000 * number) for number in (1, 2, 3)]
    one = statistics.median(each.seconds[-1] for each in alone)
    least = min(rounds, key=lambda each: each.seconds[-1])
    half, last = least.seconds[workers // 2], least.seconds[-1]
    print(f"ramp: one worker has its task after {1000 * one:.0f} ms; of {workers} half after")
    print(f"    {1000 * half:.0f} ms and the last after {1000 * last:.0f}", end="")
    print(f" ({last / one:.1f} times as long), {least.empty} claims found nothing")
    return last / one


@dataclass
class Ramp:
    seconds: list[float]
    """How long after the events each worker had its task, in order."""
    empty: int


async def _ramped(clients: Sequence[httpx.AsyncClient], *, first: int) -> Ramp:
    """Have workers wait, give each of them something to do, and wait until they have it."""
    ramp = Ramp([], 0)

    async def one(client: httpx.AsyncClient) -> None:
        ask: dict[str, object] = {
            "listener": f"{client.headers[WORKER_HEADER]}-{first}",
            "operators": ["bench:clean"],
            "seconds": 50,
        }
        while True:
            given = (await _post(client, "/internal/wait", ask))["wake_ups"]
            if not given:
                continue
            claim = {"operator": "bench:clean", "limit": 1}
            tasks = (await _post(client, "/internal/task-claim", claim))["tasks"]
            if tasks:
                ramp.seconds.append(time.monotonic() - began)
            ask["answered"] = [each["id"] for each in given]
            if tasks:
                await _post(client, "/internal/wait", {**ask, "operators": [], "seconds": 0})
                await _post(client, "/v1/task/complete", {"tasks": [_end(each) for each in tasks]})
                return
            ramp.empty += 1

    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(one(client))
        await asyncio.sleep(1.0)
        events = [_event(first + number) for number in range(len(clients))]
        began = time.monotonic()
        await _post(clients[0], "/internal/events", {"events": events})
    return ramp


async def _many(both: Sequence[Settings], *, count: int) -> list[asyncio.Task[bytes]]:
    """Requests that wait, each on a connection of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count + 500)), hard))
    identities = Identities(SECRET)
    ask = {
        "listener": "bench",
        "operators": ["bench:clean", "bench:totals", "bench:outliers", "bench:report"],
        "seconds": 50,
        "hello": {"runtimes": ["process"], "concurrency": 4},
    }
    body = json.dumps(ask)
    gate = asyncio.Semaphore(_AT_ONCE)
    refused: Counter[str] = Counter()
    opened = 0

    async def one(number: int) -> bytes:
        nonlocal opened
        identity = identities.identity(f"worker-{number}")
        head = (
            f"POST /internal/wait HTTP/1.1\r\nHost: x\r\n{WORKER_HEADER}: {identity.name}\r\n"
            f"Authorization: Bearer {identity.token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        )
        async with gate:
            port = both[number % 2].internal_port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            is_first = True
            while True:
                writer.write(head.encode())
                opened += is_first
                is_first = False
                answer = await reader.readuntil(b"\r\n\r\n")
                status = answer.split(maxsplit=2)[1].decode()
                length = int(re.search(rb"content-length: (\d+)", answer)[1])  # type: ignore[index]
                answer = await reader.readexactly(length)
                if status != "200":
                    # As a worker does: it says why, and is asked again.
                    refused[f"{status} {json.loads(answer).get('title')}"] += 1
                    await asyncio.sleep(0.5)
                elif b'"wake_ups":[]' not in answer:
                    return answer
        finally:
            writer.close()

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    while opened < count:
        await asyncio.sleep(0.1)
        for each in tasks:
            if each.done():
                each.result()
    await asyncio.sleep(2.0)
    for why, times in refused.items():
        print(f"refused at first: {times:,} by {why}")
    return tasks


@dataclass(frozen=True)
class Figures:
    files: int
    bytes: int
    cpu: float


def _figures(pid: int) -> Figures:
    place = Path("/proc") / str(pid)
    rollup = (place / "smaps_rollup").read_text()
    pss = int(re.search(r"^Pss: +(\d+)", rollup, re.MULTILINE)[1]) * 1024  # type: ignore[index]
    fields = (place / "stat").read_text().rpartition(")")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Figures(len(list((place / "fd").iterdir())), pss, cpu)


async def measure(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        settings = {"log_statement": "all", "fsync": "off"}
        async with LocalPostgres(folder / "postgres", settings=settings) as postgres:
            stage = Stage(folder, postgres)
            if "idle" in options.sections:
                rate = await idle(stage, workers=options.workers, seconds=options.seconds)
                figures["statements a second, idle"] = rate
            if "waiters" in options.sections:
                await waiters(stage, count=options.waiters, seconds=options.seconds)
            if "ramp" in options.sections:
                figures["a task for each of many, for one 1"] = await ramp(
                    stage, workers=options.ramped
                )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("sections", nargs="*", default=["idle", "waiters", "ramp"])
    parser.add_argument("--workers", type=int, default=1, help="for idle")
    parser.add_argument("--waiters", type=int, default=10_000)
    parser.add_argument("--ramped", type=int, default=100, help="workers of ramp")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to count")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
