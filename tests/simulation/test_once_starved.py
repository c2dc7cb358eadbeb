"""What once went wrong with whole workers: starvation, hoarding, storms and waits without an end.

Each test is a small world in virtual time, named after the harm.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from penstock.kernel.errors import NotSettled, Unavailable
from penstock.queue.client import Queue
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.worker import Worker
from penstock.store.base import Object, ObjectStore, Version, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.retrying import RetryingStore
from penstock.testing.virtual import World, simulate


class Away(Wrapper):
    """A store whose reads fail where `fails` says so."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.fails: Callable[[str], bool] = lambda _key: False

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        if self.fails(key):
            await self.clock.machine.sleep(0.2)
            raise Unavailable("away", key=key)
        return await self.inner.get(key, unless=unless)


class Town:
    """A bucket, and queues and workers on it that share a meter."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = world.clock()
        self.meter = Meter()
        self.started: Counter[str] = Counter()
        self.stores: list[Away] = []
        self._bucket = MemoryBucket(world.clock(), date_resolution_seconds=1.0)

    async def queue(self, name: str) -> Queue:
        clock, entropy = self.world.clock(), self.world.entropy(name)

        async def delay() -> None:
            await clock.sleep(entropy.uniform(0.01, 0.03))

        backend = MemoryStore(self._bucket, clock=clock, delay=delay)
        self.stores.append(Away(MeteredStore(backend, self.meter)))
        store = RetryingStore(self.stores[-1], entropy=entropy)
        return await Queue.on(store, name="q", entropy=entropy)

    async def worker(self, name: str, *, concurrency: int, mode: str = "leased") -> Worker:
        """A worker whose tasks take as many seconds as their inputs say."""
        worker = Worker(await self.queue(name), concurrency=concurrency, mode=mode, name=name)

        @worker.handler("work")
        async def work(task: TaskContext) -> float:
            self.started[name] += 1
            began = self.world.now()
            await self.clock.sleep(task.input)
            return began

        @worker.handler("hang", timeout=5, retry=Retry(attempts=1))
        async def hang(_task: TaskContext) -> None:
            while True:
                try:
                    await self.clock.sleep(10_000)
                except asyncio.CancelledError:
                    if self.is_over:
                        raise

        return worker

    is_over = False


def _run(story: Callable[[Town], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        town = Town(world)
        try:
            await story(town)
        finally:
            town.is_over = True

    simulate(main, seed=1)


async def _work(town: Town, workers: list[Worker], story: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(worker.run(signals=False))
            await town.clock.sleep(5)
        await town.clock.sleep(60)
        await story()
        town.is_over = True
        for worker in workers:
            worker.stop()
            worker.stop()


@pytest.mark.parametrize("kind", ["work", "hang"])
def test_an_owner_that_is_full_starves_its_shards_while_others_idle(kind: str) -> None:
    async def story(town: Town) -> None:
        queue = await town.queue("user")
        workers = [await town.worker(f"w{n}", concurrency=2) for n in range(3)]

        async def submit() -> None:
            for _ in range(2):
                await queue.submit(kind, 7200)
            await town.clock.sleep(60)
            submitted_at = town.world.now()
            tasks = [await queue.submit("work", 1) for _ in range(20)]
            began = [await task.result(timeout=600) for task in tasks]
            assert max(began) - submitted_at < 180

        await _work(town, workers, submit)

    _run(story)


def test_one_worker_hoards_slow_tasks_because_it_has_just_run_fast_ones() -> None:
    async def story(town: Town) -> None:
        queue = await town.queue("user")
        workers = [await town.worker(f"w{n}", concurrency=8, mode="shared") for n in range(4)]

        async def submit() -> None:
            quick = await queue.submit_many("work", [0.01] * 1000)
            for task in quick:
                await task.result(timeout=600)
            town.started.clear()
            slow = await queue.submit_many("work", [60] * 128)
            await town.clock.sleep(600)
            views = [await task.view() for task in slow]
            assert {view.status for view in views} == {"succeeded"}
            assert max(town.started.values()) < 80

        await _work(town, workers, submit)

    _run(story)


def test_a_worker_that_was_full_sleeps_on_although_it_is_free() -> None:
    async def story(town: Town) -> None:
        queue = await town.queue("user")
        workers = [await town.worker("w", concurrency=1)]

        async def submit() -> None:
            waits = []
            for _ in range(20):
                submitted_at = town.world.now()
                task = await queue.submit("work", 2.5)
                waits.append(await task.result(timeout=60) - submitted_at)
            assert sorted(waits)[10] < 2.5

        await _work(town, workers, submit)

    _run(story)


@pytest.mark.parametrize("mode", ["leased", "shared"])
def test_packs_that_cannot_be_read_hold_all_slots(mode: str) -> None:
    async def story(town: Town) -> None:
        queue = await town.queue("user")
        workers = [await town.worker("w", concurrency=2, mode=mode)]
        town.stores[-1].fails = lambda key: "/keyed/" in key

        async def submit() -> None:
            for n in range(3):
                await queue.submit("work", 1, key=f"k{n}")
            await town.clock.sleep(60)
            submitted_at = town.world.now()
            tasks = [await queue.submit("work", 1) for _ in range(10)]
            began = [await task.result(timeout=600) for task in tasks]
            assert max(began) - submitted_at < 60

        await _work(town, workers, submit)

    _run(story)


def test_those_who_wait_for_one_pack_wait_for_each_other_while_the_store_is_away() -> None:
    async def story(town: Town) -> None:
        queue = await town.queue("user")
        tasks = await queue.submit_many("work", [1] * 50)
        town.stores[0].fails = lambda _key: True
        began = town.clock.monotonic()

        async def wait(each: int) -> None:
            with pytest.raises(NotSettled):
                await tasks[each].result(timeout=60)
            assert town.clock.monotonic() - began == pytest.approx(60, abs=2)

        await asyncio.gather(*(wait(each) for each in range(50)))

    _run(story)


@pytest.mark.parametrize("waiters", [1, 200])
def test_to_wait_for_many_tasks_of_a_pack_costs_what_waiting_for_one_does(waiters: int) -> None:
    async def story(town: Town) -> None:
        queue = await town.queue("user")
        tasks = await queue.submit_many("work", [1] * 200)

        async def wait(each: int) -> None:
            with pytest.raises(NotSettled):
                await tasks[each].result(timeout=60)

        await asyncio.gather(*(wait(each) for each in range(waiters)))
        reads = town.meter.requests(kind=Kind.GET) + town.meter.requests(kind=Kind.HEAD)
        assert reads < 60

    _run(story)


def test_help_that_was_asked_for_once_is_asked_for_for_ever() -> None:
    async def story(town: Town) -> None:
        queue = await town.queue("user")
        workers = [await town.worker(f"w{n}", concurrency=4) for n in range(3)]

        async def submit() -> None:
            for _ in range(6):
                await queue.submit("work", 36_000)
            await town.clock.sleep(600)
            before = town.meter.billed.copy()
            await town.clock.sleep(1200)
            spent = town.meter.billed - before
            # The owner of the shards reads a ledger that was renewed; nobody else does.
            assert spent["claim", Kind.GET] <= 6 * 1200 / 10
            # Three owners of a part each: what is due later, and two runs of slots at the most.
            assert spent["discovery", Kind.LIST] < 3 * 3 * 1200 / 8

        await _work(town, workers, submit)

    _run(story)
