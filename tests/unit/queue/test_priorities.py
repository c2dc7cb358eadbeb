"""What is urgent overtakes any backlog, in every mode; what is unhurried waits for the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.running.handlers import TaskContext
from penstock.queue.running.polling import Polling
from penstock.queue.settings import Mode, WorkerSettings
from penstock.queue.worker import Worker
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.virtual import World, simulate

SETTINGS = WorkerSettings(polling=Polling(min_seconds=0.5, max_seconds=1.0))


class Bench:
    """A queue, and a worker that runs one task at a time and notes the order."""

    def __init__(self, world: World, mode: Mode) -> None:
        self.world = world
        self.mode = mode
        self.bucket = MemoryBucket(world.clock())
        self.ran: list[object] = []

    async def open(self) -> Queue:
        store = MemoryStore(self.bucket, clock=self.world.clock())
        config = QueueConfig(direct=("*",) if self.mode is Mode.DIRECT else ())
        entropy = self.world.entropy(f"queue {len(self.bucket.objects)}")
        return await Queue.on(store, name="q", entropy=entropy, config=config)

    async def run(
        self,
        queue: Queue,
        *,
        tasks: int,
        concurrency: int = 1,
        meanwhile: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Run so many tasks; `meanwhile` happens when a first one occupies the worker."""
        worker = Worker(queue, concurrency=concurrency, mode=self.mode, settings=SETTINGS)

        @worker.handler("t")
        async def handle(task: TaskContext) -> None:
            self.ran.append(task.input)
            await self.world.clock().sleep(1)
            if len(self.ran) == tasks:
                worker.stop()

        @worker.handler("first")
        async def first(_task: TaskContext) -> None:
            await self.world.clock().sleep(60)
            if meanwhile is not None:
                await meanwhile()
            await self.world.clock().sleep(20)

        if meanwhile is not None:
            await queue.submit("first")
        async with asyncio.timeout(3600):
            await worker.run(signals=False)


@pytest.mark.parametrize("mode", Mode)
def test_the_order_is_that_of_the_priorities(mode: Mode) -> None:
    async def main(world: World) -> None:
        bench = Bench(world, mode)
        queue = await bench.open()

        async def submit() -> None:
            for priority in (0, -9, 5, -1, 9, 1):
                await queue.submit("t", priority, priority=priority)

        await bench.run(queue, tasks=6, meanwhile=submit)
        assert bench.ran == [9, 5, 1, 0, -1, -9]

    simulate(main, seed=3)


@pytest.mark.parametrize("mode", Mode)
def test_what_is_urgent_overtakes_a_backlog_that_no_look_sees_whole(mode: Mode) -> None:
    async def main(world: World) -> None:
        bench = Bench(world, mode)
        queue = await bench.open()

        async def submit() -> None:
            await asyncio.gather(*(queue.submit("t", "usual") for _ in range(2500)))
            await queue.submit("t", "urgent", priority=3)
            await queue.submit("t", "urgent", priority=3, key="k")

        await bench.run(queue, tasks=20, meanwhile=submit)
        # What an earlier look has found may come before, for five seconds or so.
        assert bench.ran[:8].count("urgent") == 2

    simulate(main, seed=1)


def test_the_id_of_a_task_with_a_priority_leads_to_it_and_so_does_its_record() -> None:
    async def main(world: World) -> None:
        bench = Bench(world, Mode.LEASED)
        queue = await bench.open()
        tasks = [await queue.submit("t", n, priority=n, limit="api") for n in (-3, 0, 4)]
        keyed = await queue.submit("t", 5, priority=5, key="k")
        for task, priority in zip(tasks, (-3, 0, 4), strict=True):
            view = await queue.get(task.id)
            assert (view.priority, view.limit, view.status) == (priority, "api", "ready")
        assert (await queue.get(keyed.id)).priority == 5
        assert (await queue.submit("t", 5, priority=-5, key="k")).id == keyed.id
        await bench.run(queue, tasks=4)
        for task in (*tasks, keyed):
            assert (await queue.get(task.id)).status == "succeeded"

    simulate(main, seed=1)


def test_a_delayed_task_with_a_priority_is_not_early() -> None:
    async def main(world: World) -> None:
        bench = Bench(world, Mode.LEASED)
        queue = await bench.open()
        await queue.submit("t", "later", priority=9, delay=90)
        await queue.submit("t", "now", priority=-9)
        began = world.now()
        await bench.run(queue, tasks=2)
        assert bench.ran == ["now", "later"]
        assert world.now() - began >= 90

    simulate(main, seed=1)


def test_among_equals_the_oldest_comes_first() -> None:
    """In the part of the queue that a worker looks at: an owner of all of it sees all of them."""

    async def main(world: World) -> None:
        bench = Bench(world, Mode.LEASED)
        queue = await bench.open()

        async def submit() -> None:
            for number in range(12):
                await queue.submit("t", number)
                await world.clock().sleep(0.01)

        await bench.run(queue, tasks=12, meanwhile=submit)
        assert bench.ran == list(range(12))

    simulate(main, seed=1)
