"""An owner with nothing to do reads a doorbell instead of lists, and is as prompt as before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.queue.bell import BELIEVED_SECONDS, Ear, Ringer
from penstock.queue.client import Queue
from penstock.queue.layout import QueueLayout
from penstock.queue.running.handlers import TaskContext
from penstock.queue.submission import Submitter
from penstock.queue.worker import Worker
from penstock.store.base import REPLACE
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")
HOUR = 3600.0


class Bench:
    """Workers, a producer, and when each task has started, by its input."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = world.clock()
        self.bucket = MemoryBucket(world.clock(), date_resolution_seconds=1.0)
        self.meter = Meter()
        self.started: dict[object, float] = {}
        self.by: dict[object, str] = {}

    async def open(self, name: str) -> Queue:
        entropy = self.world.entropy(f"delay of {name}")

        async def delay() -> None:
            await self.clock.sleep(entropy.uniform(0.01, 0.02))

        store = MeteredStore(
            MemoryStore(self.bucket, clock=self.world.clock(), delay=delay), self.meter
        )
        return await Queue.on(store, name="q", entropy=self.world.entropy(name))

    @asynccontextmanager
    async def running(
        self, workers: int = 1, *, concurrency: int = 4, seconds: float = 0.1
    ) -> AsyncIterator[Queue]:
        """So many workers, and the queue of a producer."""
        fleet = []
        for number in range(workers):
            worker = Worker(await self.open(f"worker {number}"), concurrency=concurrency)

            @worker.handler("t")
            async def handle(task: TaskContext, name: str = f"worker {number}") -> None:
                self.started.setdefault(task.input, self.world.now())
                self.by.setdefault(task.input, name)
                await self.clock.sleep(seconds)

            fleet.append(worker)
        async with asyncio.TaskGroup() as group:
            for worker in fleet:
                group.create_task(worker.run(signals=False))
            yield await self.open("producer")
            for worker in fleet:
                worker.stop()

    async def waited(self, name: object, *, since: float) -> float:
        """How long a task has waited for its start."""
        async with asyncio.timeout(600):
            while name not in self.started:
                await self.clock.sleep(0.05)
        return self.started[name] - since

    def lists(self) -> int:
        return self.meter.requests(kind=Kind.LIST)


def test_a_task_is_found_within_seconds_whenever_it_comes() -> None:
    """After an idle hour; and in every phase of falling asleep, by who had just asked."""

    async def main(world: World) -> None:
        bench = Bench(world)
        async with bench.running() as queue:
            await bench.clock.sleep(HOUR)
            for step in range(60):
                since = world.now()
                await queue.submit("t", step)
                assert await bench.waited(step, since=since) <= 3.5, step
                await bench.clock.sleep(0.35 * step)

    simulate(main, seed=1)


def test_an_owner_with_nothing_to_do_lists_rarely_and_wakes_for_each_of_two() -> None:
    async def main(world: World) -> None:
        bench = Bench(world)
        async with bench.running() as queue:
            await bench.clock.sleep(HOUR)
            before = bench.lists()
            await bench.clock.sleep(HOUR)
            # A few more are of the leases and of the chores.
            assert bench.lists() - before <= 40 + 30
            for name in ("first", "second"):
                since = world.now()
                await queue.submit("t", name)
                assert await bench.waited(name, since=since) <= 3.5
                await bench.clock.sleep(BELIEVED_SECONDS / 2)

    simulate(main, seed=1)


def test_a_busy_producer_rings_for_nobody() -> None:
    async def main(world: World) -> None:
        bench = Bench(world)
        async with bench.running() as queue:
            await bench.clock.sleep(60)
            await queue.submit("t", "first")
            await bench.clock.sleep(5)
            before = bench.meter.billed.copy()
            for number in range(300):
                await queue.submit("t", number)
                await bench.clock.sleep(0.5)
            after = bench.meter.billed - before
            assert after["bell", Kind.PUT] <= 4
            assert 20 < after["bell", Kind.GET] <= 300 * 0.5 / BELIEVED_SECONDS + 10

    simulate(main, seed=1)


def test_who_does_not_ring_waits_for_a_slow_list_once() -> None:
    async def main(world: World) -> None:
        bench = Bench(world)
        async with bench.running() as queue:
            access = queue.access
            silent = Submitter(access.store, access.layout, access.entropy)
            await bench.clock.sleep(HOUR)
            since = world.now()
            await silent.submit_many("t", ["first"])
            assert await bench.waited("first", since=since) <= 95
            await bench.clock.sleep(600)
            since = world.now()
            await silent.submit_many("t", ["second"])
            assert await bench.waited("second", since=since) <= 10

    simulate(main, seed=1)


def test_a_burst_at_an_idle_fleet_reaches_a_second_worker_within_five_seconds() -> None:
    async def main(world: World) -> None:
        bench = Bench(world)
        async with bench.running(3, concurrency=4, seconds=2.0) as queue:
            await bench.clock.sleep(600)
            since = world.now()
            await asyncio.gather(*(queue.submit("t", number) for number in range(200)))
            while len(set(bench.by.values())) < 2:
                await bench.clock.sleep(0.05)
            assert world.now() - since <= 5.0

    simulate(main, seed=1)


def _pair(world: World) -> tuple[Ringer, Ear, Ear, MemoryStore]:
    store = MemoryStore(MemoryBucket(world.clock()), clock=world.clock())
    entropy = world.entropy("bell")
    ears = [Ear(store, LAYOUT.doorbell, entropy) for _ in range(2)]
    return Ringer(store, LAYOUT.doorbell, entropy), ears[0], ears[1], store


def test_only_who_is_asleep_is_rung_for_and_a_ring_is_heard_by_all() -> None:
    async def main(world: World) -> None:
        ringer, first, second, _ = _pair(world)
        await ringer.submitted(is_urgent=False)
        assert not await first.has_rung()
        assert await first.sleep()
        assert await second.has_rung(), "who knows nothing has to look"
        assert await second.sleep()
        await world.clock().sleep(BELIEVED_SECONDS)
        await ringer.submitted(is_urgent=False)
        assert await first.has_rung()
        assert not await first.has_rung()
        # What the first writes does not hide the ring from the second.
        assert await first.sleep()
        assert await second.has_rung()

    simulate(main, seed=1)


def test_who_goes_to_sleep_while_it_rings_is_told_so() -> None:
    async def main(world: World) -> None:
        ringer, first, _, _ = _pair(world)
        assert await first.sleep()
        await ringer.submitted(is_urgent=True)
        assert await first.has_rung()
        await world.clock().sleep(60)
        await ringer.submitted(is_urgent=True)
        assert not await first.sleep()

    simulate(main, seed=1)


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff"])
def test_a_damaged_bell_is_made_good_by_the_next_ring(body: bytes) -> None:
    async def main(world: World) -> None:
        ringer, first, _, store = _pair(world)
        assert await first.sleep()
        await store.put(LAYOUT.doorbell, body, REPLACE)
        assert await first.has_rung()
        assert await first.sleep()
        await ringer.submitted(is_urgent=False)
        assert await first.has_rung()
        assert await first.sleep()

    simulate(main, seed=1)
