"""Real worker processes, killed at random with `kill -9`, on real stores.

Four workers, 2,000 tasks, and every second or so one of the workers is killed and another started.
In the end the ledgers are held against what the workers wrote down of their attempts.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.document_format import decode
from penstock.kernel.entropy import Entropy, new_id, seeded_entropy, system_entropy
from penstock.queue.client import Queue, Task
from penstock.queue.ids import PackAt, task_at
from penstock.queue.ledger import Ledger, LedgerEvent, LedgerLogLine, QueueTaskStatus
from penstock.queue.settings import DiscoveryMode
from penstock.queue.transitions import history
from penstock.store.opening import Opening
from penstock.store.s3.local import LocalS3

SCRIPT = Path(__file__).with_name("killed_worker.py")
WORKERS = 4
WAVES = 5
SINGLES_A_WAVE = 80
PACKS_A_WAVE = ("async", "plain", "async", "plain")
PACK_TASKS = 80
TASKS = WAVES * (SINGLES_A_WAVE + len(PACKS_A_WAVE) * PACK_TASKS)
SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 20.0
AT_WORK_SECONDS_MAX = 5.0
QUEUE = "killed"
CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, order=True)
class Ran:
    """One attempt, as its worker wrote it down."""

    task: str
    attempt: int
    worker: int


@dataclass(slots=True)
class Fleet:
    """Worker processes: those that live, and those that were killed."""

    url: str
    mode: DiscoveryMode
    folder: Path
    environment: Mapping[str, str]
    live: dict[int, asyncio.subprocess.Process] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)

    async def start(self) -> None:
        number = next(self.numbers)
        arguments = [self.url, QUEUE, self.mode, str(number), str(self.folder / f"{number}.log")]
        with (self.folder / f"{number}.err").open("wb") as said:
            self.live[number] = await asyncio.create_subprocess_exec(
                sys.executable,
                str(SCRIPT),
                *arguments,
                stdin=subprocess.PIPE,
                stderr=said,
                env=self.environment,
            )

    async def kill(self, number: int) -> None:
        process = self.live.pop(number)
        assert process.returncode is None, self.said(number)
        process.kill()
        await _end_of(process)
        self.killed.append(number)

    async def stop(self) -> None:
        """End all of them as an operator would, once all have begun."""
        logs = [self.folder / f"{number}.log" for number in self.live]
        await _until(lambda: all(log.exists() for log in logs), seconds=STOP_SECONDS_MAX)
        for process in self.live.values():
            process.terminate()
        for number, process in self.live.items():
            assert await _end_of(process) == 0, self.said(number)
        self.live.clear()

    async def kill_all(self) -> None:
        for process in self.live.values():
            if process.returncode is None:
                process.kill()
            await _end_of(process)

    def at_work(self) -> list[int]:
        """The live workers that are in the middle of a handler."""
        started, ended = self.lines()
        return sorted({ran.worker for ran in set(started) - set(ended)} & self.live.keys())

    def said(self, number: int) -> str:
        return (self.folder / f"{number}.err").read_text()

    def lines(self) -> tuple[list[Ran], list[Ran]]:
        """The attempts that have started, and those whose handler came to its end."""
        noted: dict[str, list[Ran]] = {"start": [], "end": []}
        for log in self.folder.glob("*.log"):
            for line in log.read_text().splitlines():
                what, task, attempt, worker = json.loads(line)
                noted[what].append(Ran(task, attempt, worker))
        return noted["start"], noted["end"]


async def _until(holds: Callable[[], object], *, seconds: float) -> bool:
    """Wait until a condition holds, for so many seconds at the most; returns whether it does."""
    began = CLOCK.monotonic()
    while not holds():
        if CLOCK.monotonic() - began >= seconds:
            return False
        await CLOCK.sleep(0.02)
    return True


async def _end_of(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(STOP_SECONDS_MAX):
        code = await process.wait()
    assert process.stdin is not None
    process.stdin.close()
    return code


@asynccontextmanager
async def _fleet(
    url: str, mode: DiscoveryMode, folder: Path, environment: Mapping[str, str]
) -> AsyncIterator[Fleet]:
    fleet = Fleet(url, mode, folder, environment)
    try:
        for _ in range(WORKERS):
            await fleet.start()
        yield fleet
    finally:
        await fleet.kill_all()


async def _submit_wave(queue: Queue, wave: int, entropy: Entropy) -> list[Task]:
    """Singles, of which some have a key or a delay, and packs."""

    def job() -> object:
        return {"seconds": round(entropy.uniform(0.01, 0.15), 3)}

    tasks: list[Task] = []
    for number in range(SINGLES_A_WAVE):
        kind = entropy.choice(("async", "async", "plain"))
        key = f"{wave}/{number}" if number % 4 == 0 else None
        tasks.append(await queue.submit(kind, job(), key=key, delay=0.5 if number % 10 == 1 else 0))
    for kind in PACKS_A_WAVE:
        tasks += await queue.submit_many(kind, [job() for _ in range(PACK_TASKS)])
    return tasks


async def _rage(queue: Queue, fleet: Fleet, entropy: Entropy) -> list[Task]:
    """Submit in waves, and after each kill a worker: any, and every other time one at work."""
    tasks: list[Task] = []
    for wave in range(WAVES):
        tasks += await _submit_wave(queue, wave, entropy)
        await CLOCK.sleep(entropy.uniform(0.2, 1.0))
        victims = sorted(fleet.live)
        if wave % 2 and await _until(fleet.at_work, seconds=AT_WORK_SECONDS_MAX):
            victims = fleet.at_work() or victims
        await fleet.kill(entropy.choice(victims))
        await fleet.start()
    return tasks


async def _ledgers(queue: Queue, tasks: Sequence[Task]) -> dict[PackAt, Ledger]:
    """The ledger of every pack, once all of them are settled."""
    waiting = {task_at(task.id)[0] for task in tasks}
    settled: dict[PackAt, Ledger] = {}
    began = CLOCK.monotonic()
    while CLOCK.monotonic() - began < SECONDS_MAX:
        for at in sorted(waiting, key=lambda each: each.path):
            ledger = await _ledger(queue, at)
            if ledger is None or not ledger.settled:
                break
            settled[at] = ledger
            waiting.remove(at)
        if not waiting:
            return settled
        await CLOCK.sleep(0.25)
    raise AssertionError(f"{len(waiting)} packs are not settled after {SECONDS_MAX:.0f} s")


async def _ledger(queue: Queue, at: PackAt) -> Ledger | None:
    key = queue.access.layout.ledger(at)
    page = await queue.access.store.list(key)
    if not page.entries:
        return None
    found = await queue.access.store.get(key)
    assert found is not None
    return decode(Ledger, found.body, where=key)


SETTLING = (LedgerEvent.SUCCEEDED, LedgerEvent.FAILED, LedgerEvent.CANCELLED, LedgerEvent.EXPIRED)


def _worker_of(line: LedgerLogLine) -> int:
    return int(line.who.partition("-")[0].removeprefix("w"))


def _hold_to_account(
    tasks: Sequence[Task], ledgers: Mapping[PackAt, Ledger], fleet: Fleet
) -> Counter[LedgerEvent]:
    """Hold the ledgers against the workers' own logs; returns what has happened, how often."""
    started, ended = fleet.lines()
    repeated = Counter((ran.task, ran.attempt) for ran in started) - Counter(
        {(ran.task, ran.attempt) for ran in started}
    )
    assert not repeated, "an attempt ran twice"
    assert set(ended) <= set(started)
    claimed: set[Ran] = set()
    seen: Counter[LedgerEvent] = Counter()
    for task in tasks:
        at, place = task_at(task.id)
        lines = history(ledgers[at], place)
        seen.update(line.what for line in lines)
        attempts = [line.attempt for line in lines if line.what is LedgerEvent.CLAIMED]
        assert attempts == list(range(1, len(attempts) + 1)), "attempts are counted one by one"
        claimed |= {
            Ran(task.id, line.attempt, _worker_of(line))
            for line in lines
            if line.what is LedgerEvent.CLAIMED
        }
        (settling,) = [line for line in lines if line.what in SETTLING]
        assert settling is lines[-1], "nothing happens after the end"
        state = ledgers[at].tasks[place]
        assert (settling.what, state.status) == (LedgerEvent.SUCCEEDED, QueueTaskStatus.SUCCEEDED)
        result = json.loads(bytes(state.result))
        settled = Ran(task.id, settling.attempt, _worker_of(settling))
        assert settled == Ran(task.id, result["attempt"], result["worker"])
        assert settled.attempt == state.attempt == attempts[-1]
        assert settled in ended, "what settled it had been killed before it came to its end"
    assert set(started) <= claimed, "an attempt ran that no ledger knows"
    assert {ran.task for ran in started} == {task.id for task in tasks}
    return seen


async def _exercise(
    url: str, mode: DiscoveryMode, folder: Path, environment: Mapping[str, str]
) -> None:
    entropy = seeded_entropy(f"{mode} killed")
    opening = Opening(environment=environment)
    async with await Queue.open(url, name=QUEUE, opening=opening) as queue:
        async with _fleet(url, mode, folder, environment) as fleet:
            tasks = await _rage(queue, fleet, entropy)
            ledgers = await _ledgers(queue, tasks)
            await fleet.stop()
        assert len({task.id for task in tasks}) == TASKS == 2000
        assert len(fleet.killed) == WAVES
        seen = _hold_to_account(tasks, ledgers, fleet)
        assert seen[LedgerEvent.SUCCEEDED] == TASKS
        assert seen[LedgerEvent.LEASE_EXPIRED] > 0, "no worker was killed at work: a lame test"


both_modes = pytest.mark.parametrize("mode", DiscoveryMode)


@both_modes
def test_workers_are_killed_on_files(mode: DiscoveryMode, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    url = f"file://{tmp_path / 'store'}?fsync=off"
    asyncio.run(_exercise(url, mode, logs, dict(os.environ)))


@both_modes
def test_workers_are_killed_on_s3(mode: DiscoveryMode, tmp_path: Path, local_s3: LocalS3) -> None:
    bucket, _, options = local_s3.url.partition("?")
    url = f"{bucket}/{new_id(system_entropy())}?{options}"
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": local_s3.credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": local_s3.credentials.secret_key,
    }
    asyncio.run(_exercise(url, mode, tmp_path, environment))
