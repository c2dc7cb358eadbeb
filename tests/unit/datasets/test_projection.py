"""What is published, for readers without Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import permutations

import msgspec
import pytest

from penstock.datasets.projection import (
    Amended,
    Current,
    CurrentDataset,
    CurrentPart,
    CurrentPartition,
    Projected,
    amend,
    project,
    read_dataset,
    read_partition,
)
from penstock.kernel.errors import NewerFormat, NotOurs, OutcomeUnknown, VersionConflict
from penstock.store.base import NO_METADATA, REPLACE, PutMode, Version, Wrapper
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.virtual import World, simulate

KEY = "datasets/sales/g/2013-01-01/current.json"


def partition(revision: int) -> CurrentPartition:
    return CurrentPartition(
        dataset="sales",
        generation="g",
        partition_key="2013-01-01",
        start=0,
        end=1,
        revision=revision,
        parts=(CurrentPart(location=f"s3://b/{revision}", manifest="0" * 64, rows=1, bytes=2),),
    )


def memory(world: World) -> MemoryStore:
    return MemoryStore(MemoryBucket(world.clock()), clock=world.clock())


@pytest.mark.parametrize("order", list(permutations((1, 2, 3))))
def test_the_highest_revision_stays(order: tuple[int, ...]) -> None:
    async def main(world: World) -> None:
        store = memory(world)
        for each in (*order, *order):
            there = await project(store, partition(each))
            assert there.revision >= each
        found = await read_partition(store, "sales", generation="g", partition_key="2013-01-01")
        assert found == partition(3)

    simulate(main, seed=1)


def test_what_was_done_is_told() -> None:
    async def main(world: World) -> None:
        store = memory(world)
        assert await project(store, partition(2)) == Projected(2, is_written=True)
        assert await project(store, partition(2)) == Projected(2, is_written=True)
        assert await project(store, partition(1)) == Projected(2, is_written=False)
        written_at = (await store.head(KEY)).modified
        await store.clock.machine.sleep(5)
        assert await project(store, partition(2)) == Projected(2, is_written=True)
        assert (await store.head(KEY)).modified == written_at

    simulate(main, seed=1)


def test_a_dropped_partition_has_no_parts_and_a_higher_revision() -> None:
    async def main(world: World) -> None:
        store = memory(world)
        await project(store, partition(2))
        await project(store, msgspec.structs.replace(partition(3), parts=()))
        await project(store, partition(2))
        found = await read_partition(store, "sales", generation="g", partition_key="2013-01-01")
        assert found is not None
        assert (found.revision, found.parts) == (3, ())

    simulate(main, seed=1)


def test_a_dataset_has_its_own() -> None:
    async def main(world: World) -> None:
        store = memory(world)
        assert await read_dataset(store, "sales") is None
        newer = CurrentDataset(dataset="sales", generation="old", revision=7)
        await project(store, CurrentDataset(dataset="sales", generation="new", revision=6))
        await project(store, newer)
        assert await read_dataset(store, "sales") == newer
        assert await read_partition(store, "sales", generation="x", partition_key=None) is None

    simulate(main, seed=1)


def test_writers_that_race_and_lose_answers_leave_the_highest() -> None:
    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock())
        plan = FaultPlan(lost_answer=0.2, lost_request=0.2, late_request=0.2, duplicate=0.3)

        async def write(number: int) -> None:
            clock = world.clock()
            inner = MemoryStore(bucket, clock=clock)
            store = FaultyStore(inner, plan, entropy=world.entropy(f"writer {number}"))
            for _ in range(100):
                try:
                    await project(store, partition(number))
                    break
                except Exception:  # noqa: BLE001 - reads fail too, and are asked again
                    await clock.sleep(1)
            await clock.sleep(60)
            await store.close()

        async with asyncio.TaskGroup() as tasks:
            for number in range(1, 6):
                tasks.create_task(write(number))
        found = await read_partition(
            MemoryStore(bucket, clock=world.clock()),
            "sales",
            generation="g",
            partition_key="2013-01-01",
        )
        assert found == partition(5)

    for seed in range(50):
        simulate(main, seed=seed)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{}", NotOurs),
        (b'{"penstock":"current-dataset/1"}', NotOurs),
        (b'{"penstock":"current-partition/2"}', NewerFormat),
    ],
)
def test_what_is_not_ours_is_left(body: bytes, problem: type[Exception]) -> None:
    async def main(world: World) -> None:
        store = memory(world)
        await store.put(KEY, body)
        for revision in (1, 2):
            with pytest.raises(problem):
                await project(store, partition(revision))
        found = await store.get(KEY)
        assert found is not None
        assert found.body == body

    simulate(main, seed=1)


def test_an_object_that_is_ahead_of_the_database_is_amended_under_a_higher_revision() -> None:
    """After a restore: what the object names is forgotten, and its revision is not."""

    async def main(world: World) -> None:
        store = memory(world)
        await project(store, partition(5))
        told = msgspec.structs.replace(partition(1), revision=5)

        async def now() -> Current:
            return told

        # The same revision, and something else: neither is written by its revision alone.
        assert await project(store, told) == Projected(5, is_written=False)
        assert await amend(store, KEY, now) == Amended(5, is_written=True)
        found = await read_partition(store, "sales", generation="g", partition_key="2013-01-01")
        assert found == msgspec.structs.replace(told, revision=6)
        assert await amend(store, KEY, now) == Amended(5, is_written=False)
        told = partition(9)
        assert await amend(store, KEY, now) == Amended(9, is_written=True)
        found = await read_partition(store, "sales", generation="g", partition_key="2013-01-01")
        assert found == partition(9)

    simulate(main, seed=1)


def test_nothing_is_written_of_what_nobody_was_told() -> None:
    async def main(world: World) -> None:
        store = memory(world)

        async def nothing() -> Current | None:
            return None

        async def dropped() -> Current | None:
            return msgspec.structs.replace(partition(3), parts=())

        assert await amend(store, KEY, nothing) is None
        assert await amend(store, KEY, dropped) == Amended(3, is_written=False)
        assert await read_dataset(store, "sales") is None
        await project(store, partition(2))
        assert await amend(store, KEY, nothing) is None
        assert await amend(store, KEY, dropped) == Amended(3, is_written=True)

    simulate(main, seed=1)


def test_who_amends_while_others_publish_leaves_what_was_published_last() -> None:
    """The database moves on, relays carry it out late and in any order, and all is amended."""

    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock())
        await project(MemoryStore(bucket, clock=world.clock()), partition(7))
        revision = 1
        plan = FaultPlan(lost_answer=0.2, lost_request=0.2, duplicate=0.3)

        async def relay(number: int) -> None:
            nonlocal revision
            clock, entropy = world.clock(), world.entropy(f"relay {number}")
            store = FaultyStore(MemoryStore(bucket, clock=clock), plan, entropy=entropy)

            async def now() -> Current:
                await clock.sleep(entropy.random())
                found = partition(revision)
                await clock.sleep(entropy.random())
                return found

            for _ in range(100):
                revision += entropy.random() < 0.1
                said = partition(revision)
                await clock.sleep(entropy.random())
                try:
                    if not (await project(store, said)).is_written:
                        await amend(store, KEY, now)
                except Exception:  # noqa: BLE001 - it is carried out again
                    continue
                if said.revision == revision:
                    break
            await store.close()

        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(relay(number))
        store = MemoryStore(bucket, clock=world.clock())
        found = await read_partition(store, "sales", generation="g", partition_key="2013-01-01")
        assert found is not None
        assert (found.parts, found.revision > 7) == (partition(revision).parts, True)

    for seed in range(50):
        simulate(main, seed=seed)


class Deaf(Wrapper):
    """A store whose puts never come through."""

    def __init__(self, inner: MemoryStore, problem: Exception) -> None:
        super().__init__(inner)
        self.problem = problem
        self.puts = 0

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        self.puts += 1
        raise self.problem


@pytest.mark.parametrize("problem", [OutcomeUnknown("lost"), VersionConflict("others")])
@pytest.mark.parametrize("current", [partition(1), partition(9)])
def test_it_gives_up(problem: Exception, current: Current) -> None:
    async def main(world: World) -> None:
        store = Deaf(memory(world), problem)
        with pytest.raises(type(problem)):
            await project(store, current)
        assert 2 <= store.puts <= 100

    simulate(main, seed=1)
