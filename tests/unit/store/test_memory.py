"""What the memory backend has beyond the contract: delays, dates, and objects of its own."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from penstock.kernel.errors import AlreadyExists, NotFound, VersionConflict
from penstock.store.base import CREATE, Swap
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.virtual import EPOCH, World, simulate


def _client(world: World, bucket: MemoryBucket, *, delay_seconds: float = 0.0) -> MemoryStore:
    clock = world.clock()

    async def delay() -> None:
        await clock.sleep(delay_seconds)

    return MemoryStore(bucket, clock=clock, delay=delay if delay_seconds else None)


def test_clients_share_a_bucket_and_have_their_own_clocks() -> None:
    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock())
        one, other = _client(world, bucket), _client(world, bucket)
        version = await one.put("a", b"one", CREATE)
        found = await other.get("a")
        assert found is not None
        assert (found.body, found.version) == (b"one", version)
        assert one.clock is not other.clock
        with pytest.raises(AlreadyExists):
            await other.put("a", b"two", CREATE)

    simulate(main, seed=1)


def test_a_request_takes_effect_between_its_two_delays() -> None:
    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock())
        slow, fast = _client(world, bucket, delay_seconds=10.0), _client(world, bucket)
        async with asyncio.TaskGroup() as group:
            put = group.create_task(slow.put("a", b"one"))
            await world.clock().sleep(9.9)
            with pytest.raises(NotFound):
                await fast.get("a")
            await world.clock().sleep(0.2)
            assert await fast.get("a") is not None
            assert not put.done()
        assert world.now() - EPOCH == pytest.approx(20.0)

    simulate(main, seed=1)


def test_a_request_that_is_cancelled_on_its_way_back_has_taken_effect() -> None:
    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock())
        slow, fast = _client(world, bucket, delay_seconds=10.0), _client(world, bucket)
        for cancelled_after, there in ((5.0, False), (15.0, True)):
            async with asyncio.TaskGroup() as group:
                put = group.create_task(slow.put("a", b"one"))
                await world.clock().sleep(cancelled_after)
                put.cancel()
            assert ("a" in bucket.objects) is there
        assert (await fast.list()).entries[0].key == "a"

    simulate(main, seed=1)


@pytest.mark.parametrize("resolution", [0.0, 1.0])
def test_dates_are_the_buckets(resolution: float) -> None:
    async def main(world: World) -> None:
        clock = world.clock(skew_seconds=1000.25)
        bucket = MemoryBucket(clock, date_resolution_seconds=resolution)
        store = _client(world, bucket, delay_seconds=0.5)
        sample = await store.sample()
        expected = EPOCH + 1000.75 if resolution == 0 else EPOCH + 1000
        assert sample.stamp == pytest.approx(expected, abs=1e-6)
        assert sample.resolution == resolution
        assert sample.received - sample.sent == pytest.approx(1.0)
        assert store.clock.last_sample is sample
        await store.put("a", b"one")
        modified = (await store.head("a")).modified - EPOCH
        assert modified == pytest.approx(1001.75 if resolution == 0 else 1001)

    simulate(main, seed=1)


def test_every_answer_is_a_sample() -> None:
    async def main(world: World) -> None:
        store = _client(world, MemoryBucket(world.clock()), delay_seconds=0.5)
        seen = set()
        version = await store.put("a", b"one")
        for request in (
            lambda: store.get("a"),
            lambda: store.head("a"),
            lambda: store.touch("a", version=version),
            store.list,
            lambda: store.delete("a"),
            lambda: store.get("a"),
            lambda: store.put("b", b"", Swap(version)),
        ):
            with suppress(NotFound, VersionConflict):
                await request()
            assert store.clock.last_sample is not None
            seen.add(store.clock.last_sample.received)
        assert len(seen) == 7

    simulate(main, seed=1)


def test_a_version_follows_the_body_as_on_s3() -> None:
    async def main(world: World) -> None:
        store = _client(world, MemoryBucket(world.clock()))
        first = await store.put("a", b"one")
        assert await store.touch("a", version=first, metadata={"a": "b"}) == first
        assert await store.put("b", b"one") == first
        assert await store.put("a", b"two") != first
        assert await store.put("a", b"one") == first

    simulate(main, seed=1)


def test_touch_moves_the_date() -> None:
    async def main(world: World) -> None:
        store = _client(world, MemoryBucket(world.clock()))
        version = await store.put("a", b"one")
        await world.clock().sleep(100)
        await store.touch("a", version=version)
        assert (await store.head("a")).modified - EPOCH == pytest.approx(100)

    simulate(main, seed=1)


def test_what_a_caller_does_to_metadata_stays_with_the_caller() -> None:
    async def main(world: World) -> None:
        store = _client(world, MemoryBucket(world.clock()))
        metadata = {"a": "b"}
        await store.put("a", b"one", metadata=metadata)
        metadata["a"] = "changed"
        found = (await store.head("a")).metadata
        assert found == {"a": "b"}
        with pytest.raises(TypeError):
            found["a"] = "changed"  # type: ignore[index] # to see that it cannot be
        assert (await store.head("a")).metadata == {"a": "b"}

    simulate(main, seed=1)


def test_others_get_a_turn_before_a_request() -> None:
    async def main(world: World) -> None:
        store = _client(world, MemoryBucket(world.clock()))
        turns: list[str] = []

        async def other() -> None:
            turns.append("other")

        async with asyncio.TaskGroup() as group:
            group.create_task(other())
            await store.put("a", b"one")
            turns.append("put")
        assert turns == ["other", "put"]

    simulate(main, seed=1, shuffle=False)
