"""What is urgent overtakes any backlog, in every mode; what is unhurried waits for the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest

from penstock.kernel.document_format import decode
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.ids import LEDGER
from penstock.queue.ledger import Ledger, QueueTaskStatus
from penstock.queue.settings import DiscoveryMode, Polling, WorkerSettings
from penstock.queue.shards.registry import ShardLease
from penstock.queue.worker import Worker
from penstock.store.base import (
    NO_METADATA,
    REPLACE,
    ObjectStore,
    PutMode,
    Version,
    Wrapper,
)
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import World, simulate

SETTINGS = WorkerSettings(polling=Polling(min_seconds=0.5, max_seconds=1.0))


class Noting(Wrapper):
    """A store that notes what is put, and when."""

    def __init__(self, inner: ObjectStore, noted: Callable[[str, bytes], None]) -> None:
        super().__init__(inner)
        self._noted = noted

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        version = await super().put(key, body, mode, metadata=metadata)
        self._noted(key, body)
        return version


class Bench:
    """A queue, and a worker that runs one task at a time and notes the order."""

    def __init__(self, world: World, mode: DiscoveryMode) -> None:
        self.world = world
        self.mode = mode
        self.bucket = MemoryBucket(world.clock())
        self.ran: list[object] = []
        self.began: list[tuple[object, float]] = []
        self.ledgers: dict[str, list[tuple[float, Ledger]]] = {}
        """What was put of each, and when."""
        self.owners: set[str] = set()
        """The workers that have owned shards."""

    def _note(self, key: str, body: bytes) -> None:
        if "/shard-leases/" in key:
            self.owners |= {decode(ShardLease, body, where=key).worker} - {""}
        if key.endswith(LEDGER):
            ledger = decode(Ledger, body, where=key)
            self.ledgers.setdefault(key, []).append((self.world.now(), ledger))

    async def open(self) -> Queue:
        store = Noting(MemoryStore(self.bucket, clock=self.world.clock()), self._note)
        config = QueueConfig(direct=("*",) if self.mode is DiscoveryMode.DIRECT else ())
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


@pytest.mark.parametrize("mode", DiscoveryMode)
def test_the_order_is_that_of_the_priorities(mode: DiscoveryMode) -> None:
    async def main(world: World) -> None:
        bench = Bench(world, mode)
        queue = await bench.open()

        async def submit() -> None:
            for priority in (0, -9, 5, -1, 9, 1):
                await queue.submit("t", priority, priority=priority)

        await bench.run(queue, tasks=6, meanwhile=submit)
        assert bench.ran == [9, 5, 1, 0, -1, -9]

    simulate(main, seed=1)


@pytest.mark.parametrize("mode", DiscoveryMode)
def test_what_is_urgent_overtakes_a_backlog_that_no_look_sees_whole(mode: DiscoveryMode) -> None:
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


SLOT_SECONDS = 1.0


async def _urgent_after(
    world: World,
    mode: DiscoveryMode,
    *,
    seconds: float,
    pack: int,
    workers: int = 1,
    urgent: int = 1,
    priority: int = 3,
    backlog: int = 0,
    bench: Bench | None = None,
    **how: Any,
) -> float:
    """How long urgent tasks wait behind a backlog that has been worked on for so long.

    The longest of them. With a delay: from when it is due.
    """
    bench = bench or Bench(world, mode)
    producer = await bench.open()
    fleet = []
    for _ in range(workers):
        worker = Worker(await bench.open(), concurrency=4, mode=mode, settings=WorkerSettings())

        @worker.handler("t")
        async def handle(task: TaskContext) -> None:
            bench.began.append((task.input, world.now()))
            await world.clock().sleep(SLOT_SECONDS)

        fleet.append(worker)
    for _ in range(1200 * workers // pack):
        await producer.submit_many("t", ["usual"] * pack, priority=backlog)
    async with asyncio.TaskGroup() as group:
        for worker in fleet:
            group.create_task(worker.run(signals=False))
        delay = float(how.get("delay", 0))
        await world.clock().sleep(seconds - delay)
        while workers > 1 and len(bench.owners) < 2:
            await world.clock().sleep(1.3)
        due = world.now() + delay
        if "limit" in how:
            await producer.limits.set(how["limit"], concurrency=2)
        for _ in range(urgent):
            await producer.submit("t", "urgent", priority=priority, **how)
        while len(began := [at for what, at in bench.began if what == "urgent"]) < urgent:
            await world.clock().sleep(0.1)
        for worker in fleet:
            worker.stop()
            worker.stop()
    return max(began) - due


@pytest.mark.parametrize("how", [{}, {"key": "k"}, {"limit": "api"}], ids=str)
@pytest.mark.parametrize("pack", [1, 400])
@pytest.mark.parametrize("mode", DiscoveryMode)
def test_what_is_urgent_starts_within_five_seconds_and_a_slot(
    mode: DiscoveryMode, pack: int, how: dict[str, Any]
) -> None:
    """Behind what was found before, and behind what was claimed ahead of a pack of many."""

    async def main(world: World) -> None:
        waited = await _urgent_after(world, mode, seconds=23.3, pack=pack, **how)
        assert waited <= 5 + SLOT_SECONDS

    simulate(main, seed=1)


@pytest.mark.parametrize(("priority", "backlog"), [(0, -5), (-1, -9)])
@pytest.mark.parametrize("mode", DiscoveryMode)
def test_what_is_less_unhurried_starts_within_five_seconds_and_a_slot(
    mode: DiscoveryMode, priority: int, backlog: int
) -> None:
    """Nobody rings for it, and no peek shows it."""

    async def main(world: World) -> None:
        # Of those that no inbox has led to, a worker in `direct` learns by then.
        seconds = 151.3 if mode is DiscoveryMode.DIRECT else 23.3
        waited = await _urgent_after(
            world, mode, seconds=seconds, pack=1, priority=priority, backlog=backlog
        )
        assert waited <= 5 + SLOT_SECONDS

    for seed in range(2):
        simulate(main, seed=seed)


def test_a_full_worker_does_not_list_for_what_is_unhurried() -> None:
    """As long as there is no slot, what a look could show could not start."""

    async def main(world: World) -> None:
        bench = Bench(world, DiscoveryMode.LEASED)
        queue = await bench.open()
        meter = Meter()
        store = MeteredStore(queue.access.store, meter)
        opened = await Queue.on(store, name="q", entropy=world.entropy("worker"))
        worker = Worker(opened, concurrency=4, settings=WorkerSettings())

        @worker.handler("t")
        async def handle(_task: TaskContext) -> None:
            await world.clock().sleep(3600)

        for _ in range(1200):
            await queue.submit("t", priority=-5)
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run(signals=False))
            await world.clock().sleep(100)
            before = meter.billed["discovery", Kind.LIST]
            await world.clock().sleep(300)
            # Three at a time, as old as 30 s.
            assert meter.billed["discovery", Kind.LIST] - before <= 3 * 11
            worker.stop()
            worker.stop()

    simulate(main, seed=1)


@pytest.mark.parametrize("pack", [1, 400])
@pytest.mark.parametrize("mode", DiscoveryMode)
def test_what_is_urgent_and_due_starts_when_a_look_has_shown_it(
    mode: DiscoveryMode, pack: int
) -> None:
    """Behind a backlog of five minutes: nobody rings when something becomes due."""

    async def main(world: World) -> None:
        waited = await _urgent_after(world, mode, seconds=23.3, pack=pack, delay=20.0)
        most = 120 if mode is DiscoveryMode.DIRECT and pack > 1 else 30
        assert 0 <= waited <= most + SLOT_SECONDS

    for seed in range(3):
        simulate(main, seed=seed)


@pytest.mark.parametrize("mode", DiscoveryMode)
def test_what_was_claimed_ahead_yields_without_a_put(mode: DiscoveryMode) -> None:
    """It keeps its claim: what is written of its pack meanwhile are ends, claims and renewals."""

    async def main(world: World) -> None:
        bench = Bench(world, mode)
        await _urgent_after(world, mode, seconds=23.3, pack=400, bench=bench)
        _, began = next(each for each in bench.began if each[0] == "urgent")
        claimed = 0
        for ledgers in bench.ledgers.values():
            # At the very moment the worker is stopped, and gives back what it has.
            before = [ledger for at, ledger in ledgers if at < began]
            for old, new in pairwise(before):
                assert (old.tasks, old.leases) != (new.tasks, new.leases)
                assert not any(task.given_back for task in new.tasks)
                claimed = max(
                    claimed, sum(task.status is QueueTaskStatus.CLAIMED for task in new.tasks)
                )
        assert claimed > 4, "some were claimed ahead"

    simulate(main, seed=1)


def test_what_is_urgent_is_seen_by_each_owner_of_a_part() -> None:
    async def main(world: World) -> None:
        bench = Bench(world, DiscoveryMode.LEASED)
        waited = await _urgent_after(
            world, DiscoveryMode.LEASED, seconds=61.7, pack=1, workers=3, urgent=4, bench=bench
        )
        assert waited <= 5 + SLOT_SECONDS
        assert len(bench.owners) > 1, "each looks at a part"

    for seed in range(3):
        simulate(main, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_worker_that_starts_knows_all_before_it_begins(seed: int) -> None:
    """It takes its shards one by one, and what is less urgent may lie in the first."""

    async def main(world: World) -> None:
        bench = Bench(world, DiscoveryMode.LEASED)

        async def delay() -> None:
            await world.clock().sleep(world.entropy("delay").uniform(0.01, 0.05))

        store = MemoryStore(bench.bucket, clock=world.clock(), delay=delay)
        queue = await Queue.on(store, name="q", entropy=world.entropy("queue"))
        await queue.submit_many("t", ["newsletter", "digest"], priority=-5)
        await queue.submit("t", "welcome")
        await queue.submit("t", "password", priority=9)
        await bench.run(queue, tasks=4)
        assert bench.ran[:2] == ["password", "welcome"]

    simulate(main, seed=seed)


def test_the_id_of_a_task_with_a_priority_leads_to_it_and_so_does_its_record() -> None:
    async def main(world: World) -> None:
        bench = Bench(world, DiscoveryMode.LEASED)
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
        bench = Bench(world, DiscoveryMode.LEASED)
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
        bench = Bench(world, DiscoveryMode.LEASED)
        queue = await bench.open()

        async def submit() -> None:
            for number in range(12):
                await queue.submit("t", number)
                await world.clock().sleep(0.01)

        await bench.run(queue, tasks=12, meanwhile=submit)
        assert bench.ran == list(range(12))

    simulate(main, seed=1)


def test_among_equals_what_is_a_minute_older_comes_first_where_all_look_at_all() -> None:
    async def main(world: World) -> None:
        bench = Bench(world, DiscoveryMode.SHARED)
        queue = await bench.open()

        async def submit() -> None:
            for minute in range(3):
                for _ in range(4):
                    await queue.submit("t", minute)
                await world.clock().sleep(60)

        await bench.run(queue, tasks=12, meanwhile=submit)
        assert bench.ran == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]

    simulate(main, seed=1)


@pytest.mark.parametrize("mode", DiscoveryMode)
def test_among_urgent_equals_what_is_a_minute_older_comes_first(mode: DiscoveryMode) -> None:
    """Also where they are found by a peek, behind a backlog that was found before."""

    async def main(world: World) -> None:
        bench = Bench(world, mode)
        queue = await bench.open()

        async def submit() -> None:
            await asyncio.gather(*(queue.submit("t", "usual") for _ in range(1200)))
            for minute in range(3):
                for _ in range(4):
                    await queue.submit("t", minute, priority=3)
                await world.clock().sleep(60)

        await bench.run(queue, tasks=40, meanwhile=submit)
        urgent = [each for each in bench.ran if each != "usual"]
        assert urgent == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]

    simulate(main, seed=1)
