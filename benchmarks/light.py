"""How light an installation is: processes and memory while idle, CPU time and tasks a second.

The chain is three trivial functions (`runtime: process`) for each partition, four at a time, on
`penstock up` with a Postgres of its own. CPU time is the kernel's, of every process of the
installation, those that have ended too; it is the safer figure on a busy machine. Times are the
database's. Run `make bench`, or `python -m benchmarks.light --help`.

- *idle*: processes, and PSS, which counts what is shared once.
- *chain*: partitions through the chain, by backfills of both sizes, after one that warms up.
- *lone*: one partition at a time, each after the one before; the median.
- *s3*: chain and lone with the data on an S3 server (SeaweedFS) that mints credentials.
- *thread*: the chain with `runtime: thread`.
- *untrusted*: the chain with `untrusted: true`, each attempt in a child with a user of its own; as
  root only.
- *triggers*: a thousand events one by one, and in one call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

import penstock
from benchmarks.pipeline import Bench, installed
from penstock.dispatcher.client import Client
from penstock.runtimes.privileges import hindrance
from penstock.store.s3.local import LocalS3

SECTIONS = ("idle", "chain", "lone", "s3", "thread", "untrusted", "triggers")
CHAIN = """
jobs:
  told: {{activation: source, source: {{kind: manual}}, outputs: [keys]}}
  one: {{runtime: {runtime}, operator: "chain:work", inputs: [told.keys], outputs: [one]}}
  two: {{runtime: {runtime}, operator: "chain:{two}", inputs: [one.one], outputs: [two]}}
  three: {{runtime: {runtime}, operator: "chain:{three}", inputs: [two.two], outputs: [three]}}
"""
FIRST_USER = 60_800
FUNCTION = """
import pathlib
import time

TIMES = pathlib.Path(__file__).parent / "times"


def work(task):
    began = time.time()
    (task.output.path / "part.txt").write_text(task.partition_key)
    if task.partition_key.startswith("lone"):
        (TIMES / f"{task.job}-{task.partition_key}").write_text(f"{began} {time.time()}")


def work_two(task):
    work(task)


def work_three(task):
    work(task)
"""
STEPS = 3
TRIGGERS = 1000
TICKS = os.sysconf("SC_CLK_TCK")
WAIT_SECONDS_MAX = 300.0


# Processes --------------------------------------------------------------------------------------


def _descendants(of: int) -> Iterator[int]:
    for folder in Path(f"/proc/{of}/task").iterdir():
        with suppress(OSError):
            for child in map(int, (folder / "children").read_text().split()):
                yield child
                yield from _descendants(child)


def _role(pid: int) -> str:
    """What a process is, in the words of its command line."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    if "postgres" in words.partition("postgresql://")[0].split(" -m ")[0]:
        return "postgres"
    if " weed " in words or words.startswith("weed") or "/weed" in words:
        return "s3 server"
    for mark, role in (
        ("penstock.runtimes.child", "children"),
        ("penstock.runtimes.fork_server", "children"),
        ("guard.py", "guards"),
        ("kernel.parent_watch", "parent watches"),
        ("kernel/parent_watch.py", "parent watches"),
    ):
        if mark in words:
            return role
    after = words.partition("-m penstock ")[2].split()
    return " ".join(after[:2]) if after[:1] == ["source"] else (after or ["others"])[0]


def cpu_seconds() -> Counter[str]:
    """CPU time so far by role; that of ended processes is their parents'.

    A worker waits for its children, so what it has of ended ones is theirs.
    """
    found: Counter[str] = Counter()
    for pid in _descendants(os.getpid()):
        with suppress(OSError):
            role = _role(pid)
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            own, reaped = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
            found[role] += own
            found["children" if role == "worker" else role] += reaped
    return Counter({role: ticks / TICKS for role, ticks in found.items()})


def memory() -> dict[str, tuple[int, float]]:
    """How many processes there are by role, and their megabytes of PSS."""
    found: dict[str, tuple[int, float]] = {}
    for pid in _descendants(os.getpid()):
        with suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            kilobytes = next(int(x.split()[1]) for x in rollup.splitlines() if x[:4] == "Pss:")
            count, size = found.get(_role(pid), (0, 0.0))
            found[_role(pid)] = (count + 1, size + kilobytes / 1024)
    return found


# The chain --------------------------------------------------------------------------------------


def write_dag(
    folder: Path, *, runtime: str, is_mixed: bool = False, is_untrusted: bool = False
) -> Path:
    """The folder of a DAG that is the chain: of one function, or of three."""
    folder.mkdir()
    (folder / "times").mkdir()
    (folder / "chain.py").write_text(FUNCTION)
    dag = folder / "chain.yaml"
    two, three = ("work_two", "work_three") if is_mixed else ("work", "work")
    text = CHAIN.format(runtime=runtime, two=two, three=three)
    dag.write_text(
        text.replace("operator:", "untrusted: true, operator:") if is_untrusted else text
    )
    return dag


async def run(client: Client, name: str, count: int, *, last: Path | None = None) -> float:
    """So many partitions through the chain; seconds from the first event to the last end.

    `last` is a file that its last function writes: until then nobody is asked.
    """
    keys = [f"{name}-{each:04}" for each in range(count)]
    began = (await client.status()).now
    await client.trigger_many("told", events=keys)
    until = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < until:
        await asyncio.sleep(0.2 if count > 1 else 0.02)
        if last is not None and not last.exists():  # noqa: ASYNC240 - a look, of a benchmark
            continue
        tasks = (await client.tasks(job="three", limit=1000 if count > 1 else 1)).tasks
        mine = [each for each in tasks if each.partition_key in set(keys)]
        if sum(each.settled_at is not None for each in mine) == count:
            if wrong := [each.reason for each in mine if each.status != "completed"]:
                raise RuntimeError(wrong[0])
            ends = [each.settled_at for each in mine if each.settled_at is not None]
            return (max(ends) - began).total_seconds()
    raise TimeoutError(f"{name} was not done")


async def measured(bench: Bench, client: Client, what: str, count: int) -> None:
    """Tasks a second of one backfill, and the CPU time of its tasks by role."""
    before = cpu_seconds()
    seconds = await run(client, f"{what}-{count}".replace(", ", "-").replace(" ", "-"), count)
    spent = cpu_seconds()
    spent.subtract(before)
    tasks = STEPS * count
    bench.tell(f"{what}: {count} partitions", tasks / seconds, "/s")
    ours = {role: 1000 * each / tasks for role, each in spent.items() if role != "s3 server"}
    bench.tell(f"{what}: {count} partitions, CPU a task", sum(ours.values()), "ms")
    parts = ", ".join(f"{role} {each:.2f}" for role, each in sorted(ours.items()) if each >= 0.005)
    print(f"  ({parts})", flush=True)


async def lone(bench: Bench, client: Client, what: str, dag: Path) -> None:
    """One partition at a time: how long, where the time has gone, and the CPU time of it.

    The first is not counted: it starts what later ones find.
    """
    times: list[float] = []
    stages: dict[str, list[float]] = {}
    before: Counter[str] = Counter()
    for number in range(bench.options.lone + 1):
        await asyncio.sleep(0.3)
        if number == 1:
            before = cpu_seconds()
        began = (await client.status()).now
        key = f"lone-{number}-0000"
        last = dag.parent / "times" / f"three-{key}"
        seconds = await run(client, f"lone-{number}", 1, last=last)
        if number == 0:
            continue
        times.append(seconds)
        for name, found in (await _stages(client, key, began, dag.parent / "times")).items():
            stages.setdefault(name, []).append(found)
    spent = cpu_seconds()
    spent.subtract(before)
    bench.tell(f"{what}: lone chain, median", 1000 * statistics.median(times), "ms")
    bench.tell(f"{what}: lone chain, best", 1000 * min(times), "ms")
    bench.tell(f"{what}: lone chain, worst", 1000 * max(times), "ms")
    each = {role: 1000 * spent[role] / len(times) for role in sorted(spent) if spent[role]}
    bench.tell(f"{what}: lone chain, CPU with the asking", sum(each.values()), "ms")
    print("  (" + ", ".join(f"{role} {found:.1f}" for role, found in each.items()) + ")")
    medians = {name: 1000 * statistics.median(found) for name, found in stages.items()}
    print("  (" + ", ".join(f"{name} {found:.1f}" for name, found in medians.items()) + ")")


async def _stages(client: Client, key: str, began: datetime, folder: Path) -> dict[str, float]:
    """How many seconds were between the moments of a chain, by Postgres and by the function."""
    found: dict[str, float] = {}
    before = began
    for job in ("one", "two", "three"):
        tasks = (await client.tasks(job=job, limit=5)).tasks
        task = next(each for each in tasks if each.partition_key == key)
        attempt = (await client.task(task.id)).attempts[-1]
        begun, ended = map(float, (folder / f"{job}-{key}").read_text().split())
        assert task.settled_at is not None, "the chain is over"
        for name, moment in (
            ("created", task.created_at),
            ("claimed", attempt.started_at),
            ("function begun", datetime.fromtimestamp(begun, tz=UTC)),
            ("function ended", datetime.fromtimestamp(ended, tz=UTC)),
            ("completed", task.settled_at),
        ):
            found[f"{job} {name}"] = (moment - before).total_seconds()
            before = moment
    return found


async def chain(bench: Bench, client: Client, what: str) -> None:
    """Warm up, then both sizes, twice each, so that one can see how steady they are."""
    await run(client, "warm", 20)
    for turn in range(bench.options.turns):
        for count in bench.options.partitions:
            await measured(bench, client, f"{what}, turn {turn + 1}", count)
    found = memory()
    bench.tell(f"{what}: children right after", found.get("children", (0, 0.0))[0])


async def idle(bench: Bench) -> None:
    """What is there after a while in which nothing was asked."""
    await asyncio.sleep(bench.options.seconds)
    before = cpu_seconds()
    await asyncio.sleep(5)
    spent = cpu_seconds()
    spent.subtract(before)
    found = memory()
    ours = {role: each for role, each in found.items() if role not in {"postgres", "s3 server"}}
    bench.tell("idle: processes of Penstock's own", sum(count for count, _ in ours.values()))
    bench.tell("idle: PSS of Penstock's own", sum(size for _, size in ours.values()), "MB")
    count, size = found.get("postgres", (0, 0.0))
    bench.tell("idle: processes of Postgres", count)
    bench.tell("idle: PSS of Postgres", size, "MB")
    bench.tell("idle: CPU", 1000 * sum(spent.values()) / 5, "ms/s")
    for role, (count, size) in sorted(found.items()):
        print(f"  ({role}: {count} processes, {size:.1f} MB)", flush=True)


async def on_folder(bench: Bench, sections: Mapping[str, bool], *, runtime: str) -> None:
    """What is asked for, on one installation on a folder."""
    what = "chain" if runtime == "process" else runtime
    dag = write_dag(bench.folder / f"{what}-dag", runtime=runtime, is_mixed=bench.options.mixed)
    async with installed(bench.folder / what, dag) as client:
        if sections.get("idle"):
            await idle(bench)
        if sections.get("chain"):
            await chain(bench, client, what)
        if sections.get("lone"):
            await lone(bench, client, what, dag)


async def on_s3(bench: Bench) -> None:
    """The chain where each attempt has credentials of its own, and so a child of its own."""
    dag = write_dag(bench.folder / "s3-dag", runtime="process")
    async with LocalS3(bench.folder / "server", mints=True) as server:
        os.environ["AWS_ACCESS_KEY_ID"] = server.credentials.access_key
        os.environ["AWS_SECRET_ACCESS_KEY"] = server.credentials.secret_key
        more: dict[str, Any] = {"task_role": server.task_role, "sts_endpoint": server.endpoint}
        async with installed(bench.folder / "s3", dag, store=server.url, **more) as client:
            await chain(bench, client, "s3")
            await lone(bench, client, "s3", dag)


def _shared_python() -> str:
    """A Python of this version that every user can run; empty if there is none."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for each in (sys.executable, f"/usr/bin/{name}", f"/usr/local/bin/{name}"):
        if os.access(each, os.X_OK) and hindrance(Path(each), FIRST_USER) is None:
            return each
    return ""


async def untrusted(bench: Bench) -> None:
    """The chain where nobody trusts the functions."""
    if os.geteuid() != 0 or not (python := _shared_python()):
        print("untrusted: not measured, as it needs root, and a Python for everybody", flush=True)
        return
    # Other users are to reach what is theirs below it.
    bench.folder.chmod(0o711)
    dag = write_dag(bench.folder / "untrusted-dag", runtime="process", is_untrusted=True)
    path = (dag.parent, Path(penstock.__file__).parents[1], Path(msgspec.__file__).parents[1])
    said = {
        "uids": f"{FIRST_USER}-{FIRST_USER + 63}",
        "uids_folder": str(bench.folder / "users"),
        "untrusted_on_files": True,
        "python": [python],
        "path": [str(each) for each in path],
    }
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in said.items())
    more = f"[runtimes.process]\n{lines}"
    async with installed(bench.folder / "untrusted", dag, runtimes=more) as client:
        await chain(bench, client, "untrusted")


async def triggers(bench: Bench) -> None:
    """Until the last answer; what follows from the events goes on beside it."""
    dag = write_dag(bench.folder / "triggers-dag", runtime="process")
    async with installed(bench.folder / "triggers", dag) as client:
        await run(client, "warm", 5)
        began = time.monotonic()
        for number in range(TRIGGERS):
            await client.trigger("told", partition_key=f"one-{number}")
        bench.tell(f"triggers: {TRIGGERS} one by one", time.monotonic() - began, "s")
        began = time.monotonic()
        await client.trigger_many("told", events=[f"many-{each}" for each in range(TRIGGERS)])
        bench.tell(f"triggers: {TRIGGERS} in one call", time.monotonic() - began, "s")


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the sections in turn."""
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        bench = Bench(Path(name), options, {})
        wanted = dict.fromkeys(options.sections, True)
        if wanted.keys() & {"idle", "chain", "lone"}:
            await on_folder(bench, wanted, runtime="process")
        if "s3" in wanted:
            await on_s3(bench)
        if "thread" in wanted:
            await on_folder(bench, {"chain": True, "lone": True}, runtime="thread")
        if "untrusted" in wanted:
            await untrusted(bench)
        if "triggers" in wanted:
            await triggers(bench)
        print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
        return bench.figures


def main() -> None:
    """Measure, print, and perhaps write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("sections", nargs="*", default=SECTIONS, help=", ".join(SECTIONS))
    parser.add_argument("--partitions", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--turns", type=int, default=2, help="how often each size is run")
    parser.add_argument("--lone", type=int, default=15, help="chains of one partition")
    parser.add_argument("--mixed", action="store_true", help="a function of its own for each job")
    parser.add_argument("--seconds", type=float, default=10, help="how long idle is before a look")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = asyncio.run(measure(options))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
