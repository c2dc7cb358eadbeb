"""Workers of the mode `direct`: what they are told of runs, and what they are not told of too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from penstock.kernel.errors import WorkerIdConflict, WorkerLeaseLost
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.ids import new_pack
from penstock.queue.inbox import IDLE_STRETCH
from penstock.queue.layout import QueueLayout
from penstock.queue.settings import DiscoveryMode, Polling, WorkerSettings
from penstock.queue.worker import Worker
from penstock.store.base import ObjectStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.retrying import RetryingStore
from penstock.testing.queue_contract.bench import GateAccess, GatedStore
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")
SETTINGS = WorkerSettings(polling=Polling(min_seconds=0.5, max_seconds=4))
SCAVENGED_SECONDS = 1.2 * SETTINGS.overflow_scavenge_interval_secs + 10
RECOVERED_SECONDS = 1.2 * SETTINGS.lease_duration_secs


@dataclass
class Yard:
    """A bucket, producers and workers; what ran is in `ran`, as (worker, input)."""

    world: World
    direct: tuple[str, ...] = ("*",)
    ran: list[tuple[str, object]] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)
    hold: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.clock = self.world.clock()
        self.bucket = MemoryBucket(self.world.clock(), date_resolution_seconds=1.0)
        self.gates: dict[str, GatedStore] = {}

    def _store(self, name: str) -> ObjectStore:
        clock = self.world.clock()
        entropy = self.world.entropy(f"latency {name}")

        async def delay() -> None:
            await clock.sleep(entropy.uniform(0.005, 0.02))

        inner = MemoryStore(self.bucket, clock=clock, delay=delay)
        gate = GatedStore(MeteredStore(inner, self.meter))
        self.gates[name] = gate
        return RetryingStore(gate, entropy=self.world.entropy("retries"))

    async def queue(self, name: str = "producer") -> Queue:
        config = QueueConfig(direct=self.direct)
        entropy = self.world.entropy(name)
        return await Queue.on(self._store(name), name="q", entropy=entropy, config=config)

    async def worker(
        self,
        name: str,
        *,
        types: tuple[str, ...] = ("t",),
        mode: DiscoveryMode = DiscoveryMode.DIRECT,
        concurrency: int = 2,
        settings: WorkerSettings = SETTINGS,
        seconds: float = 0.0,
    ) -> Worker:
        """A worker whose tasks take so many seconds."""
        queue = await self.queue(f"{name} {len(self.gates)}")
        worker = Worker(queue, concurrency=concurrency, mode=mode, name=name, settings=settings)
        self.gates[name] = self.gates[f"{name} {len(self.gates) - 1}"]

        async def handle(task: TaskContext) -> object:
            self.ran.append((name, task.input))
            if task.input == "hold":
                await self.hold.wait()
            if task.input == "retry" and task.attempt == 1:
                raise OSError("once more")
            await self.clock.sleep(seconds)
            return task.input

        retry = Retry(attempts=3, first_seconds=20, jitter=0, on=(OSError,))
        for type_ in types:
            worker.handler(type_, retry=retry)(handle)
        return worker

    @asynccontextmanager
    async def at_work(self, *workers: Worker) -> AsyncIterator[dict[Worker, asyncio.Task[None]]]:
        async with asyncio.TaskGroup() as group:
            runs = {each: group.create_task(each.run(signals=False)) for each in workers}
            await self.clock.sleep(5)
            yield runs
            for each in runs:
                each.stop()

    async def kill(self, name: str, run: asyncio.Task[None]) -> None:
        """End a worker as `kill -9` does: nothing of it reaches the store any more."""
        self.gates[name].access = GateAccess.CLOSED
        run.cancel()
        await asyncio.wait((run,))

    def keys(self, folder: str) -> list[str]:
        return [key for key in self.bucket.objects if key.startswith(LAYOUT.root + folder)]

    async def until(self, holds: Callable[[], object], *, seconds: float) -> float:
        """Wait until it holds; returns how long that took."""
        began = self.world.now()
        while not holds():
            assert self.world.now() - began < seconds, f"not within {seconds} s: {self.ran}"
            await self.clock.sleep(0.1)
        return self.world.now() - began


def _run(check: Callable[[Yard], Awaitable[None]], *, seeds: int = 3) -> None:
    async def main(world: World) -> None:
        await check(Yard(world))

    for seed in range(seeds):
        simulate(main, seed=seed)


def test_what_is_submitted_runs_where_it_was_announced_and_its_entry_goes() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        async with yard.at_work(await yard.worker("a"), await yard.worker("b")):
            tasks = [await queue.submit("t", number) for number in range(10)]
            for task in tasks:
                await task.result(timeout=10)
            await yard.until(lambda: not yard.keys("inbox/a/"), seconds=10)
            await yard.until(lambda: not yard.keys("inbox/b/"), seconds=10)
        # In turns: neither has taken what was the other's.
        assert sorted(name for name, _ in yard.ran) == ["a"] * 5 + ["b"] * 5

    _run(check)


def test_the_entry_of_what_runs_goes_while_it_runs() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        async with yard.at_work(await yard.worker("a")):
            await queue.submit("t", "hold")
            await yard.until(lambda: yard.ran, seconds=10)
            await yard.until(lambda: not yard.keys("inbox/a/"), seconds=10)
            yard.hold.set()

    _run(check)


def test_a_pack_that_nobody_was_told_of_is_found_by_scavenging() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        async with yard.at_work(await yard.worker("a")):
            await queue.submit("t", "first")
            await yard.until(lambda: len(yard.ran) == 1, seconds=10)
            # The queue is large, so that no look at what is due shows what is in `tasks/`.
            for number in range(1100):
                key = f"{LAYOUT.tasks}{number % 4096:03x}/x{number}"
                yard.bucket.write(key, b"not ours", {})
            await yard.clock.sleep(SCAVENGED_SECONDS)
            await queue.submit("t", "lost")
            (entry,) = yard.keys("inbox/a/")
            yard.bucket.remove(entry)
            took = await yard.until(lambda: len(yard.ran) == 2, seconds=SCAVENGED_SECONDS + 5)
            assert took > 9

    _run(check)


def test_what_was_submitted_before_any_worker_came_starts_soon_and_all_of_it() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        for number in range(40):
            await queue.submit("t", number)
        assert len(yard.keys("ready/")) == 40
        async with yard.at_work(await yard.worker("a")):
            await yard.until(lambda: len(yard.ran) == 40, seconds=60)

    _run(check)


def test_a_name_in_use_is_a_clear_error_and_harms_nobody() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        async with yard.at_work(await yard.worker("a")):
            with pytest.raises(WorkerIdConflict, match="'a' is in use"):
                await (await yard.worker("a")).run(signals=False)
            assert await (await queue.submit("t", 1)).result(timeout=10) == 1

    _run(check)


def test_workers_without_a_name_have_names_of_their_own() -> None:
    async def check(yard: Yard) -> None:
        yard_queue = await yard.queue()
        workers = [Worker(await yard.queue(f"w{n}"), mode="direct") for n in range(2)]
        for each in workers:
            each.handler("t")(lambda _: None)
        async with yard.at_work(*workers):
            assert len(yard.keys("inbox/@leases/")) == 2
        assert yard_queue.name == "q"

    _run(check, seeds=1)


def test_who_has_lost_its_lease_stops_at_once_and_gives_back() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        worker = await yard.worker("a")
        run = asyncio.get_running_loop().create_task(worker.run(signals=False))
        await yard.clock.sleep(5)
        task = await queue.submit("t", "hold")
        await yard.until(lambda: yard.ran, seconds=10)
        yard.bucket.remove(LAYOUT.inbox_lease("a"))
        with pytest.raises(WorkerLeaseLost, match="has lost its lease"):
            await run
        view = await task.view()
        assert view.status == "ready"
        events = [event.what for event in await queue.history(task.id)]
        assert "given back" in " ".join(events)
        yard.hold.set()
        async with yard.at_work(await yard.worker("b")):
            assert await task.result(timeout=SCAVENGED_SECONDS) == "hold"

    _run(check)


def test_a_worker_that_was_cut_off_and_that_nobody_missed_goes_on() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        async with yard.at_work(await yard.worker("a")):
            await (await queue.submit("t", 1)).result(timeout=10)
            yard.gates["a"].access = GateAccess.CLOSED
            await yard.clock.sleep(10 * SETTINGS.lease_duration_secs)
            yard.gates["a"].access = GateAccess.OPEN
            await yard.clock.sleep(30)
            assert await (await queue.submit("t", 2)).result(timeout=30) == 2

    _run(check)


def test_what_a_dead_worker_was_told_of_is_run_by_others() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        dead, lives = await yard.worker("a", concurrency=1), await yard.worker("b", types=("u",))
        async with yard.at_work(dead, lives) as runs:
            await queue.submit("t", "hold")
            await yard.until(lambda: yard.ran, seconds=10)
            for number in range(3):
                await queue.submit("t", number)
            await yard.kill("a", runs.pop(dead))
            assert len(yard.keys("inbox/a/")) >= 3
            other = await yard.worker("c")
            async with yard.at_work(other):
                await yard.until(
                    lambda: {each for name, each in yard.ran if name == "c"} >= {0, 1, 2},
                    seconds=SETTINGS.lease_duration_secs + RECOVERED_SECONDS + 10,
                )
                yard.hold.set()
                await yard.until(lambda: ("c", "hold") in yard.ran, seconds=SCAVENGED_SECONDS + 30)
                await yard.until(lambda: not yard.keys("inbox/a/"), seconds=600)
                await yard.until(lambda: not yard.keys("inbox/@leases/a"), seconds=600)

    _run(check)


@pytest.mark.parametrize("hours", [3, 50])
def test_a_worker_that_comes_back_under_its_name_goes_on(
    hours: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        first = await yard.worker("a", concurrency=1)
        with suppress(asyncio.CancelledError):
            async with yard.at_work(first) as runs:
                await queue.submit("t", "hold")
                await yard.until(lambda: yard.ran, seconds=10)
                for number in range(5):
                    await queue.submit("t", number)
                await yard.kill("a", runs.pop(first))
        yard.hold.set()
        await yard.clock.sleep(hours * 3600)
        async with yard.at_work(await yard.worker("a")):
            await yard.until(lambda: len(yard.ran) == 7, seconds=SCAVENGED_SECONDS)
            await yard.until(lambda: not yard.keys("inbox/a/"), seconds=10)

    _run(check, seeds=2)
    assert ("was away for" in caplog.text) == (hours > 24)


def test_whoever_stops_gives_away_its_inbox_and_saves_its_cursor() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        stops = await yard.worker("a", concurrency=1)
        async with yard.at_work(stops) as runs:
            held = await queue.submit("t", "hold")
            await yard.until(lambda: yard.ran, seconds=10)
            for number in range(4):
                await queue.submit("t", number)
            async with yard.at_work(await yard.worker("b")):
                stops.stop()
                yard.hold.set()
                await runs.pop(stops)
                assert await held.result(timeout=1) == "hold"
                assert not yard.keys("inbox/a/")
                await yard.until(lambda: len(yard.ran) == 5, seconds=15)

    _run(check)


def test_whoever_stops_alone_leaves_its_inbox_to_itself() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        stops = await yard.worker("a", concurrency=1)
        async with yard.at_work(stops) as runs:
            await queue.submit("t", "hold")
            await yard.until(lambda: yard.ran, seconds=10)
            for number in range(4):
                await queue.submit("t", number)
            stops.stop()
            yard.hold.set()
            await runs.pop(stops)
        assert len(yard.keys("inbox/a/")) == 4
        async with yard.at_work(await yard.worker("a")):
            await yard.until(lambda: len(yard.ran) == 5, seconds=15)

    _run(check)


def test_a_retry_is_remembered_and_after_a_death_found() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        worker = await yard.worker("a")
        async with yard.at_work(worker) as runs:
            await queue.submit("t", "retry")
            await yard.until(lambda: len(yard.ran) == 2, seconds=30)
            again = await queue.submit("t", "retry")
            await yard.until(lambda: len(yard.ran) == 3, seconds=30)
            await yard.clock.sleep(5)
            await yard.kill("a", runs.pop(worker))
            async with yard.at_work(await yard.worker("b")):
                assert await again.result(timeout=SCAVENGED_SECONDS + 20) == "retry"

    _run(check)


def test_keys_and_delays_run_in_time_and_leave_no_pointer() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        async with yard.at_work(await yard.worker("a")):
            tasks = [
                await queue.submit("t", "key", key="k"),
                await queue.submit("t", "low", key="l", priority=-1),
                await queue.submit("t", "later", delay=90),
                await queue.submit("t", "both", key="m", delay=90, priority=3),
            ]
            for task in tasks[:2]:
                await task.result(timeout=10)
            await yard.until(lambda: not yard.keys("unhurried/"), seconds=10)
            assert len(yard.ran) == 2
            await yard.clock.sleep(80)
            assert len(yard.ran) == 2
            for task in tasks[2:]:
                await task.result(timeout=20)
            await yard.until(lambda: not any("@" in key for key in yard.keys("ready/")), seconds=10)
            assert not yard.keys("inbox/a/")

    _run(check)


def test_the_most_urgent_comes_first() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        async with yard.at_work(await yard.worker("a", concurrency=1)):
            await queue.submit("t", "hold")
            await yard.until(lambda: yard.ran, seconds=10)
            for priority in (0, -3, 5, -1, 2):
                await queue.submit("t", priority, priority=priority)
            await yard.clock.sleep(3)
            yard.hold.set()
            await yard.until(lambda: len(yard.ran) == 6, seconds=40)
        assert [each for _, each in yard.ran] == ["hold", 5, 2, 0, -1, -3]

    _run(check)


def test_types_that_are_not_direct_are_found_at_once_beside_those_that_are() -> None:
    async def check(yard: Yard) -> None:
        yard.direct = ("t",)
        queue = await yard.queue()
        workers = (
            await yard.worker("a", types=("t", "u")),
            await yard.worker("b", types=("t", "u"), mode=DiscoveryMode.LEASED),
        )
        async with yard.at_work(*workers):
            for number in range(20):
                assert await (await queue.submit("t", number)).result(timeout=15) == number
                assert await (await queue.submit("u", number)).result(timeout=15) == number
        assert not [key for key in yard.keys("inbox/") if ".u" in key]

    _run(check)


def test_workers_of_other_modes_run_direct_types_too() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        for mode in (DiscoveryMode.LEASED, DiscoveryMode.SHARED, DiscoveryMode.SAMPLED):
            async with yard.at_work(await yard.worker(f"w-{mode}", mode=mode)):
                await yard.clock.sleep(5)
                assert await (await queue.submit("t", mode)).result(timeout=30) == mode

    _run(check, seeds=1)


def test_an_idle_worker_asks_for_its_inbox_and_little_else() -> None:
    async def check(yard: Yard) -> None:
        async with yard.at_work(await yard.worker("a", settings=WorkerSettings())):
            await yard.clock.sleep(1800)
            before = yard.meter.billed.copy()
            await yard.clock.sleep(3600)
            lists = yard.meter.requests(kind=Kind.LIST) - sum(
                count for (_, kind), count in before.items() if kind is Kind.LIST
            )
            puts = yard.meter.requests(kind=Kind.PUT) - sum(
                count for (_, kind), count in before.items() if kind is Kind.PUT
            )
        # Every 8 s the inbox, every 8 s what is due (alone, it is the whole fleet), and leases.
        assert lists < 3600 / 8 * 2 * 1.15 + 3600 / 60 * 1.3 + 20
        renewals = 3600 / (SETTINGS.lease_renewal_interval_secs * IDLE_STRETCH)
        assert puts < renewals * 1.3 + 3600 / 60 * 1.3 + 5

    _run(check, seeds=1)


def test_a_full_worker_waits_for_room_whatever_becomes_due() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        async with yard.at_work(await yard.worker("a", concurrency=1)):
            await queue.submit("t", "later", delay=70)
            await yard.clock.sleep(8)
            await queue.submit("t", "hold")
            await yard.until(lambda: yard.ran, seconds=10)
            await yard.clock.sleep(120)
            assert len(yard.ran) == 1
            yard.hold.set()
            await yard.until(lambda: len(yard.ran) == 2, seconds=20)

    _run(check)


def _make_large(yard: Yard) -> None:
    """Fill more than a page, so that a worker looks around only rarely."""
    entropy = yard.world.entropy("others")
    for _ in range(1100):
        at = new_pack(type="x", count=1, submitted_ms=1, entropy=entropy)
        yard.bucket.write(LAYOUT.pack(at), b"of no type that has a handler", {})


@asynccontextmanager
async def _fed(yard: Yard, queue: Queue) -> AsyncIterator[None]:
    """More and more tasks of the limit `k` than may run."""

    async def feed() -> None:
        while True:
            await queue.submit("t", "other", limit="k")
            await yard.clock.sleep(1.9)

    async with asyncio.TaskGroup() as group:
        feeding = group.create_task(feed())
        yield
        feeding.cancel()


@pytest.mark.parametrize("backlog", [0, 30])
def test_a_retry_does_not_starve_behind_a_busy_limit(backlog: int) -> None:
    """Its entry is gone: only the worker that has begun it knows of it."""

    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        await queue.limits.set("k", concurrency=1)
        _make_large(yard)
        async with yard.at_work(await yard.worker("a", seconds=2.0)):
            retried = await queue.submit("t", "retry", limit="k")
            await yard.until(lambda: yard.ran, seconds=10)
            for _ in range(backlog):
                await queue.submit("t", "other", limit="k")
            async with _fed(yard, queue):
                await retried.result(timeout=45)
            await queue.control.pause()

    _run(check)


def test_the_rest_of_a_pack_does_not_starve_behind_a_busy_limit() -> None:
    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        await queue.limits.set("k", concurrency=1)
        _make_large(yard)
        async with yard.at_work(await yard.worker("a", seconds=2.0)):
            pack = await queue.submit_many("t", range(10), limit="k")
            await yard.clock.sleep(5)
            async with _fed(yard, queue):
                for task in pack:
                    await task.result(timeout=90)
            await queue.control.pause()

    _run(check)


@pytest.mark.parametrize("backlog", [0, 30])
def test_what_is_found_around_waits_for_a_gate_that_is_shut_just_then(backlog: int) -> None:
    """Nobody was told of it, and it is seen only by scavenging, while its limit is busy."""

    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        await queue.limits.set("k", concurrency=1)
        _make_large(yard)
        async with yard.at_work(await yard.worker("a", seconds=2.0)):
            for _ in range(3 + backlog):
                await queue.submit("t", "other", limit="k")
            async with _fed(yard, queue):
                untold = await queue.submit("t", "untold", limit="k")
                name = untold.id.split(".")[2]
                (key,) = (key for key in yard.keys("tasks/") if name in key)
                (entry,) = (key for key in yard.keys("inbox/") if name in key)
                pack = yard.bucket.objects[key]
                yard.bucket.remove(key)
                yard.bucket.remove(entry)
                await yard.clock.sleep(30)
                assert ("a", "untold") not in yard.ran
                yard.bucket.write(key, pack.body, pack.metadata)
                await untold.result(timeout=2 * SCAVENGED_SECONDS)
            await queue.control.pause()

    _run(check)


def test_a_retry_that_becomes_due_while_there_is_no_room_runs_when_there_is() -> None:
    """Others will not have taken it meanwhile: it is not dropped with what is old."""

    async def check(yard: Yard) -> None:
        queue = await yard.queue()
        _make_large(yard)
        async with yard.at_work(await yard.worker("a", concurrency=1)):
            retried = await queue.submit("t", "retry")
            await yard.until(lambda: yard.ran, seconds=10)
            await queue.submit("t", "hold")
            # Its time comes 20 s after it has failed.
            await yard.clock.sleep(60)
            yard.hold.set()
            await retried.result(timeout=8)

    _run(check)
