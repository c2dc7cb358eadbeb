"""Faults come as planned, and from the seed alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import (
    AlreadyExists,
    NotFound,
    OutcomeUnknown,
    StoreError,
    Throttled,
    Unavailable,
    VersionConflict,
)
from penstock.store.base import CREATE, ObjectStore, Swap, Version
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import Delay, MemoryBucket, MemoryStore
from penstock.testing.virtual import World, simulate

KEY = "a"
ALL = FaultPlan(
    latency_seconds_max=0.1,
    throttled=0.1,
    failed=0.1,
    lost_request=0.1,
    late_request=0.1,
    lost_answer=0.1,
    duplicate=0.1,
)

READS: dict[str, Callable[[ObjectStore], Awaitable[object]]] = {
    "get": lambda store: store.get(KEY),
    "head": lambda store: store.head(KEY),
    "list": lambda store: store.list(),
    "sample": lambda store: store.sample(),
}
WRITES: dict[str, Callable[[ObjectStore], Awaitable[object]]] = {
    "put": lambda store: store.put(KEY, b"new"),
    "touch": lambda store: store.touch(KEY, version=Version("x")),
    "delete": lambda store: store.delete(KEY),
}


def _stores(
    world: World, plan: FaultPlan, *, seed: str = "faults", delay: Delay | None = None
) -> tuple[FaultyStore, ObjectStore]:
    """A faulty client of a bucket, and one that is not."""
    bucket = MemoryBucket(world.clock())
    inner = MemoryStore(bucket, clock=world.clock(), delay=delay)
    faulty = FaultyStore(inner, plan, entropy=seeded_entropy(seed))
    return faulty, MemoryStore(bucket, clock=world.clock())


async def _outcome(request: Awaitable[object]) -> str:
    try:
        await request
    except StoreError as error:
        return type(error).__name__
    return "done"


@pytest.mark.parametrize("plan", [FaultPlan(lost_request=1.0), FaultPlan(failed=1.0)])
@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_reads_are_unavailable_and_writes_unknown(name: str, plan: FaultPlan) -> None:
    async def main(world: World) -> None:
        store, _ = _stores(world, plan)
        expected = Unavailable if name in READS else OutcomeUnknown
        for _ in range(5):
            with pytest.raises(expected) as caught:
                await (READS | WRITES)[name](store)
            assert caught.value.key == ("" if name in ("list", "sample") else KEY)

    simulate(main, seed=1)


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_throttled_requests_are_not_carried_out(name: str) -> None:
    async def main(world: World) -> None:
        store, other = _stores(world, FaultPlan(throttled=1.0))
        await other.put(KEY, b"old")
        with pytest.raises(Throttled):
            await (READS | WRITES)[name](store)
        found = await other.get(KEY)
        assert found is not None
        assert found.body == b"old"
        assert store.injected == {"throttled": 1}

    simulate(main, seed=1)


def test_nothing_happens_without_a_plan() -> None:
    async def main(world: World) -> None:
        store, _ = _stores(world, FaultPlan())
        began = world.now()
        version = await store.put(KEY, b"one", metadata={"a": "b"})
        version = await store.touch(KEY, version=version, metadata={"c": "d"})
        found = await store.get(KEY)
        assert found is not None
        assert (found.body, dict(found.metadata)) == (b"one", {"c": "d"})
        assert (await store.head(KEY)).version == version
        assert [entry.key for entry in (await store.list("a", limit=3)).entries] == [KEY]
        assert (await store.sample()).received >= 0
        await store.delete(KEY, version=version)
        with pytest.raises(NotFound):
            await store.get(KEY)
        assert world.now() == began
        assert not store.injected

    simulate(main, seed=1)


def test_a_lost_request_is_not_carried_out_and_a_lost_answer_is() -> None:
    async def main(world: World) -> None:
        store, other = _stores(world, FaultPlan(lost_request=1.0))
        assert await _outcome(store.put(KEY, b"one")) == "OutcomeUnknown"
        assert await _outcome(other.get(KEY)) == "NotFound"
        store.plan = FaultPlan(lost_answer=1.0)
        assert await _outcome(store.put(KEY, b"one")) == "OutcomeUnknown"
        assert await _outcome(other.get(KEY)) == "done"
        assert await _outcome(store.get(KEY)) == "Unavailable"
        assert store.injected == {"lost request": 1, "lost answer": 2}

    simulate(main, seed=1)


def test_refusals_are_lost_like_other_answers() -> None:
    async def main(world: World) -> None:
        store, other = _stores(world, FaultPlan(lost_answer=1.0))
        await other.put(KEY, b"one")
        assert await _outcome(store.put(KEY, b"two", CREATE)) == "OutcomeUnknown"
        assert await _outcome(store.delete(KEY, version=Version("x"))) == "OutcomeUnknown"
        assert await _outcome(store.get("nothing")) == "Unavailable"
        store.plan = FaultPlan()
        with pytest.raises(AlreadyExists):
            await store.put(KEY, b"two", CREATE)
        with pytest.raises(VersionConflict):
            await store.put(KEY, b"two", Swap(Version("x")))

    simulate(main, seed=1)


def test_a_failed_write_is_carried_out_or_not() -> None:
    async def main(world: World) -> None:
        store, other = _stores(world, FaultPlan(failed=1.0))
        for number in range(400):
            assert await _outcome(store.put(str(number), b"x")) == "OutcomeUnknown"
        assert 150 < len((await other.list()).entries) < 250

    simulate(main, seed=1)


def test_a_late_request_is_carried_out_after_a_while() -> None:
    async def main(world: World) -> None:
        store, other = _stores(world, FaultPlan(late_request=1.0, late_seconds_max=10.0))
        began = world.now()
        for number in range(100):
            assert await _outcome(store.put(str(number), b"x", CREATE)) == "OutcomeUnknown"
        assert world.now() == began
        seen = []
        for _ in range(11):
            seen.append(len((await other.list()).entries))
            await world.clock().sleep(1)
        assert seen == sorted(seen)
        assert seen[0] == 0
        assert 20 < seen[5] < 80
        assert seen[-1] == 100
        assert await _outcome(store.get("1")) == "done", "reads are not late"

    simulate(main, seed=1)


def test_a_duplicate_is_carried_out_once_more() -> None:
    async def main(world: World) -> None:
        store, other = _stores(world, FaultPlan(duplicate=1.0, late_seconds_max=5.0))
        await store.put(KEY, b"one", CREATE)
        await other.delete(KEY)
        await world.clock().sleep(6)
        assert await _outcome(other.get(KEY)) == "done"
        assert store.injected == {"duplicate": 1}

    simulate(main, seed=1)


def test_a_duplicate_is_never_the_first() -> None:
    """The caller gets the answer to the first: a CREATE of something new is not refused."""

    async def main(world: World) -> None:
        store, _ = _stores(world, FaultPlan(duplicate=1.0, late_seconds_max=0.0))
        await store.put(KEY, b"one", CREATE)

    for seed in range(50):
        simulate(main, seed=seed)


def test_a_duplicate_of_a_refused_write_comes_too() -> None:
    async def main(world: World) -> None:
        store, other = _stores(world, FaultPlan(duplicate=1.0, late_seconds_max=5.0))
        await other.put(KEY, b"one")
        with pytest.raises(AlreadyExists):
            await store.put(KEY, b"two", CREATE)
        await other.delete(KEY)
        await world.clock().sleep(6)
        found = await other.get(KEY)
        assert found is not None
        assert found.body == b"two"

    simulate(main, seed=1)


def test_reads_have_no_duplicates() -> None:
    async def main(world: World) -> None:
        store, other = _stores(world, FaultPlan(duplicate=1.0, late_request=1.0))
        await other.put(KEY, b"one")
        for read in READS.values():
            await read(store)
        assert not store.injected

    simulate(main, seed=1)


def test_close_drops_what_is_on_its_way() -> None:
    async def main(world: World) -> None:
        store, other = _stores(world, FaultPlan(duplicate=1.0, late_request=0.5))
        for number in range(50):
            await _outcome(store.put(str(number), b"x"))
        began = world.now()
        await store.close()
        assert world.now() == began
        there = (await other.list()).entries
        assert 10 < len(there) < 40
        for entry in there:
            await other.delete(entry.key)
        await world.clock().sleep(100)
        assert (await other.list()).entries == ()
        await store.close()

    simulate(main, seed=1)


def test_close_closes_what_is_inside() -> None:
    closed = []

    class Closing(MemoryStore):
        async def close(self) -> None:
            closed.append(True)

    async def main(world: World) -> None:
        inner = Closing(MemoryBucket(world.clock()), clock=world.clock())
        await FaultyStore(inner, FaultPlan(), entropy=world.entropy("faults")).close()

    simulate(main, seed=1)
    assert closed == [True]


def test_a_request_that_is_cancelled_in_its_latency_is_not_sent() -> None:
    async def main(world: World) -> None:
        store, other = _stores(world, FaultPlan(latency_seconds_max=100.0))
        async with asyncio.TaskGroup() as group:
            put = group.create_task(store.put(KEY, b"one"))
            await world.clock().sleep(0.001)
            put.cancel()
        assert await _outcome(other.get(KEY)) == "NotFound"

    simulate(main, seed=1)


def test_latency_is_up_to_its_bound() -> None:
    async def main(world: World) -> None:
        store, _ = _stores(world, FaultPlan(latency_seconds_max=0.5))
        seen = []
        for _ in range(300):
            began = world.now()
            await store.list()
            seen.append(world.now() - began)
        assert max(seen) <= 0.5 + 1e-6
        assert max(seen) > 0.45
        assert min(seen) < 0.05

    simulate(main, seed=1)


async def _history(world: World, seed: str) -> list[str]:
    store, _ = _stores(world, ALL, seed=seed)
    outcomes = [await _outcome(store.put(str(number), b"x")) for number in range(200)]
    return [*outcomes, *(f"{fault} {count}" for fault, count in sorted(store.injected.items()))]


def test_the_same_seed_brings_the_same_faults() -> None:
    def run(seed: str, order: int) -> list[str]:
        return simulate(lambda world: _history(world, seed), seed=order)

    assert run("one", 1) == run("one", 1)
    assert run("one", 1) != run("two", 1)
    assert run("one", 1) == run("one", 2), "the order of other things does not matter"


def test_faults_follow_the_order_of_requests_not_that_of_answers() -> None:
    """Requests that overlap meet the same faults however long each of them takes."""

    async def main(world: World) -> list[str]:
        async def delay() -> None:
            await world.clock().sleep(world.entropy("delays").uniform(0, 10))

        store, _ = _stores(world, ALL, delay=delay)

        async def at_its_time(number: int) -> str:
            await world.clock().sleep(number / 10)
            return await _outcome(store.put(str(number), b"x"))

        outcomes = await asyncio.gather(*(at_its_time(number) for number in range(50)))
        await store.close()
        return outcomes

    first, *others = [simulate(main, seed=seed, shuffle=False) for seed in range(5)]
    assert len(set(first)) > 2
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (FaultPlan(throttled=0.2), "throttled"),
        (FaultPlan(failed=0.2), "failed"),
        (FaultPlan(lost_request=0.2), "lost request"),
        (FaultPlan(late_request=0.2), "late request"),
        (FaultPlan(lost_answer=0.2), "lost answer"),
        (FaultPlan(duplicate=0.2), "duplicate"),
    ],
)
def test_each_fault_is_as_likely_as_planned(plan: FaultPlan, fault: str) -> None:
    async def main(world: World) -> Counter[str]:
        store, _ = _stores(world, plan)
        for number in range(2000):
            await _outcome(store.put(str(number), b"x"))
        await store.close()
        return store.injected

    injected = simulate(main, seed=1)
    assert set(injected) == {fault}
    assert 320 < injected[fault] < 480


def test_all_kinds_occur_together() -> None:
    async def main(world: World) -> Counter[str]:
        store, _ = _stores(world, ALL)
        for number in range(500):
            await _outcome(store.put(str(number), b"x"))
        await store.close()
        return store.injected

    assert set(simulate(main, seed=1)) == {
        "throttled",
        "failed",
        "lost request",
        "late request",
        "lost answer",
        "duplicate",
    }
