"""Holes that were found in chores, batches and touched leases, each closed for good."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock.kernel.errors import InvalidInput, Unavailable
from penstock.queue import batch_progress
from penstock.queue.batch_progress import BatchMaintenance
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.doorbell import ChangeSignal
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.maintenance import MaintenanceTask, run_repeatedly
from penstock.queue.settings import WorkerSettings
from penstock.queue.worker import Worker
from penstock.store.base import Object, Version, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.virtual import World, simulate


async def _queue(world: World, bucket: MemoryBucket) -> Queue:
    store = MemoryStore(bucket, clock=world.clock())
    return await Queue.on(store, name="q", entropy=world.entropy("queue"))


def test_a_chore_that_raises_anything_is_done_again() -> None:
    class Broken(MaintenanceTask):
        name = "the broken one"
        turns = 0

        async def turn(self) -> float:
            self.turns += 1
            raise (ValueError("a line of a later release"), InvalidInput("no"))[self.turns % 2]

    async def main(world: World) -> None:
        chore, said = Broken(), list[str]()
        batch_progress = run_repeatedly(
            chore, clock=world.clock(), warn=said.append, is_ours=lambda: True
        )
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await batch_progress
        assert chore.turns == 4
        assert "maintenance of the broken one failed, retrying" in said[0]

    simulate(main, seed=1)


def test_with_more_batches_than_are_minded_nothing_of_theirs_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock())
        queue = await _queue(world, bucket)
        batches = []
        for _ in range(3):
            batch = queue.new_batch(then="t")
            await batch.__aenter__()
            batches.append(batch)
        # The last has a mark, and is not among those that are minded.
        layout = queue.access.layout
        mark = f"{layout.all_marks}{batches[-1].id}/{'0' * 24}~1~0~0~0"
        bucket.write(mark, b"", {})
        assert layout.read_mark(mark) is not None, "it looks like one"
        monkeypatch.setattr(batch_progress, "BATCHES_MAX", 2)
        await world.clock().sleep(7200)
        chore = BatchMaintenance(queue.access, ChangeSignal(queue.access.store, layout.bell))
        await chore._forget()
        assert mark in bucket.objects
        monkeypatch.setattr(batch_progress, "BATCHES_MAX", 1000)
        await queue.access.store.delete(layout.open_batch(batches[-1].id))
        await chore._forget()
        assert mark not in bucket.objects, "of a batch that is gone it is"

    simulate(main, seed=1)


def test_what_comes_then_must_fit_with_what_is_wrapped_around_it() -> None:
    def nested(levels: int) -> object:
        value: object = 1
        for _ in range(levels):
            value = [value]
        return value

    async def main(world: World) -> None:
        queue = await _queue(world, MemoryBucket(world.clock()))
        queue.new_batch(then=("t", nested(99)))
        with pytest.raises(InvalidInput, match="more than 99 levels"):
            queue.new_batch(then=("t", nested(100)))

    simulate(main, seed=1)


class SlowPayloads(Wrapper):
    """A store whose payloads cannot be had for a while."""

    until = 0.0

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        if "/payloads/" in key and self.clock.machine.monotonic() < self.until:
            raise Unavailable("It is slow.")
        return await self.inner.get(key, unless=unless)


def test_nothing_starts_on_a_lease_that_only_a_touch_has_prolonged() -> None:
    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock())
        store = SlowPayloads(MemoryStore(bucket, clock=world.clock()))
        config = QueueConfig(shards=4)
        queue = await Queue.on(store, name="q", entropy=world.entropy("queue"), config=config)
        worker = Worker(queue, mode="shared", settings=WorkerSettings(heartbeat="touch"))
        left: list[float] = []

        @worker.handler("work")
        async def work(_task: TaskContext) -> None:
            (key,) = [key for key in bucket.objects if key.endswith(".ledger")]
            leases = json.loads(bucket.objects[key].body)["leases"]
            left.extend(lease[1] / 1000 - world.now() for lease in leases.values())
            worker.stop()

        await queue.submit("work", "x" * 100_000)
        store.until = store.clock.machine.monotonic() + 50
        await worker.run(signals=False)
        assert len(left) == 1
        assert left[0] > 0, "the lease that the start rests on was written by a swap"

    simulate(main, seed=1)
