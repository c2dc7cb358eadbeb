"""A queue where deletes are by tombstone: which names keep one, and how long."""

from __future__ import annotations

import asyncio

import pytest

from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.ids import PackAt, PackId
from penstock.queue.layout import QueueLayout, is_used_once
from penstock.queue.tombstones import KEPT_SECONDS, remove_old
from penstock.queue.worker import Worker
from penstock.store.base import CREATE, ObjectStore, pages
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.tombstoned import TombstonedStore, is_tombstone
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("mail")
PACK = PackId("0" * 24)
PLACES = [
    PackAt("now", 7, PACK, 1, "send"),
    PackAt("now", 7, PACK, 1, "send", priority=-3, limit="l"),
    PackAt("20000001", 7, PACK, 1, "send"),
]


def test_only_names_that_come_once_and_for_which_nothing_counts_are_so() -> None:
    for at in PLACES:
        assert is_used_once(LAYOUT.pack(at))
        assert is_used_once(LAYOUT.ledger(at))
    assert is_used_once(f"{LAYOUT.archive}0000000-x.jsonl.gz")
    keyed = PackAt("key", 7, PACK, 1, "send")
    for key in (
        LAYOUT.pack(keyed),
        LAYOUT.ledger(keyed),
        LAYOUT.worker("w-1"),
        LAYOUT.open_batch("0" * 24),
        LAYOUT.limit("l"),
        LAYOUT.inbox_lease("w"),
        LAYOUT.config,
        LAYOUT.monitor,
        LAYOUT.pack(PLACES[0]).removeprefix("queues/"),
    ):
        assert not is_used_once(key), key


class Site:
    """One bucket, and a store of it with tombstones."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bucket = MemoryBucket(world.clock())
        bare = MemoryStore(self.bucket, clock=world.clock())
        self.store: ObjectStore = TombstonedStore(bare, entropy=world.entropy("store"))

    def tombstones(self) -> list[str]:
        return [key for key, stored in self.bucket.objects.items() if is_tombstone(stored.body)]


def test_a_key_is_used_again_over_its_tombstones_and_other_tasks_leave_none() -> None:
    async def main(world: World) -> None:
        at = Site(world)
        config = QueueConfig(shards=1, key_seconds=300)
        queue = await Queue.on(at.store, name="mail", entropy=world.entropy("q"), config=config)
        ran: list[object] = []
        worker = Worker(queue, mode="shared", concurrency=4)

        @worker.handler("send")
        async def send(task: object) -> None:
            ran.append(task)

        async with asyncio.TaskGroup() as group:
            running = group.create_task(worker.run(signals=False))
            for _ in range(2):
                await queue.submit("send", 1, key="k")
                await queue.submit("send", 2)
                # Until the key is free again, and all is archived.
                await world.clock().sleep(3000)
            running.cancel()
        assert len(ran) == 4
        kept = [key.removeprefix(LAYOUT.root) for key in at.tombstones()]
        assert {key.partition("/")[0] for key in kept} <= {"keyed", "workers"}
        assert len([key for key in kept if key.startswith("keyed/")]) == 2
        assert not [key for key in at.bucket.objects if key.startswith(LAYOUT.tasks)]

    simulate(main, seed=1)


@pytest.mark.parametrize(("seconds", "left"), [(KEPT_SECONDS - 5, 1), (KEPT_SECONDS + 5, 0)])
def test_a_tombstone_of_a_name_used_once_goes_after_the_longest_lease(
    seconds: float, left: int
) -> None:
    async def main(world: World) -> None:
        at = Site(world)
        key = LAYOUT.worker("w-1")
        await at.store.delete(key, version=await at.store.put(key, b"w", CREATE))
        await world.clock().sleep(seconds)
        async for page in pages(at.store):
            await remove_old(at.store, page.tombstones)
        assert len(at.bucket.objects) == left

    simulate(main, seed=1)


def test_workers_remove_old_tombstones_of_workers_and_batches_only() -> None:
    async def main(world: World) -> None:
        at = Site(world)
        keys = (LAYOUT.worker("w-1"), LAYOUT.open_batch("0" * 24), LAYOUT.limit("l"))
        for key in keys:
            await at.store.delete(key, version=await at.store.put(key, b"was", CREATE))
        await world.clock().sleep(KEPT_SECONDS + 5)
        queue = await Queue.on(at.store, name="mail", entropy=world.entropy("q"))
        worker = Worker(queue)
        worker.handler("send")(_do_nothing)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(worker.run(signals=False))
            await world.clock().sleep(3000)
            running.cancel()
        assert at.tombstones() == [keys[2]]

    simulate(main, seed=1)


async def _do_nothing(_task: object) -> None:
    return
