"""Every request that is sent is counted once, under the right label, at the right price."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.kernel.errors import (
    AlreadyExists,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    Refused,
    StoreError,
    Throttled,
    Unavailable,
    VersionConflict,
)
from penstock.store.base import CREATE, ObjectStore, Swap, Version
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore, Prices, labelled
from penstock.testing.virtual import World, simulate
from tests.unit.store.scripted import Fault, ScriptedStore, Step


def _store(world: World, meter: Meter, **scripts: list[Step]) -> MeteredStore:
    inner = MemoryStore(MemoryBucket(world.clock()), clock=world.clock())
    return MeteredStore(ScriptedStore(inner, **scripts), meter)


async def _one_of_each(store: ObjectStore) -> None:
    version = await store.put("a", b"one")
    version = await store.touch("a", version=version, metadata={"b": "c"})
    await store.list()
    await store.get("a")
    await store.get("a", unless=version)
    await store.head("a")
    await store.delete("a", version=version)


def test_every_kind_is_counted() -> None:
    async def main(world: World) -> None:
        meter = Meter()
        await _one_of_each(_store(world, meter))
        assert dict(meter.billed) == {
            ("other", Kind.PUT): 1,
            ("other", Kind.COPY): 1,
            ("other", Kind.LIST): 1,
            ("other", Kind.GET): 2,
            ("other", Kind.HEAD): 1,
            ("other", Kind.DELETE): 1,
        }
        assert not meter.unbilled
        assert meter.requests() == 7
        assert meter.requests(kind=Kind.GET) == 2
        assert meter.requests(label="other") == 7
        assert meter.requests(label="claim") == 0
        assert meter.labels() == ["other"]

    simulate(main, seed=1)


def test_the_prices_are_those_of_s3_standard() -> None:
    """A million of each, in dollars."""
    prices = Prices()
    assert {kind: round(1_000_000 * prices.of(kind), 6) for kind in Kind} == {
        Kind.PUT: 5.0,
        Kind.COPY: 5.0,
        Kind.LIST: 5.0,
        Kind.GET: 0.4,
        Kind.HEAD: 0.4,
        Kind.DELETE: 0.0,
    }


def test_dollars() -> None:
    async def main(world: World) -> None:
        meter = Meter()
        store = _store(world, meter)
        with labelled("work"):
            await _one_of_each(store)
        await store.list()
        assert meter.dollars(label="work") == pytest.approx((3 * 0.005 + 3 * 0.0004) / 1000)
        assert meter.dollars(label="other") == pytest.approx(0.005 / 1000)
        assert meter.dollars() == pytest.approx((4 * 0.005 + 3 * 0.0004) / 1000)
        dear = Meter(Prices(delete=1000.0))
        await _one_of_each(_store(world, dear))
        assert dear.dollars() == pytest.approx(1.0, abs=0.001)

    simulate(main, seed=1)


REFUSALS: dict[str, tuple[Callable[[ObjectStore], Awaitable[object]], type[StoreError]]] = {
    "create": (lambda store: store.put("a", b"two", CREATE), AlreadyExists),
    "swap": (lambda store: store.put("a", b"two", Swap(Version("x"))), VersionConflict),
    "touch": (lambda store: store.touch("a", version=Version("x")), VersionConflict),
    "delete": (lambda store: store.delete("a", version=Version("x")), VersionConflict),
    "get": (lambda store: store.get("nothing"), NotFound),
    "head": (lambda store: store.head("nothing"), NotFound),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_store_refuses_is_billed(name: str) -> None:
    request, error = REFUSALS[name]

    async def main(world: World) -> None:
        meter = Meter()
        store = _store(world, meter)
        await store.inner.put("a", b"one")
        with pytest.raises(error):
            await request(store)
        assert sum(meter.billed.values()) == 1
        assert not meter.unbilled

    simulate(main, seed=1)


@pytest.mark.parametrize(
    ("error", "billed"),
    [
        (Throttled("503"), False),
        (Unavailable("500"), False),
        (OutcomeUnknown("500"), False),
        (Refused("403"), True),
        (StoreError("400"), True),
    ],
)
def test_what_the_store_fails_is_not_billed(error: StoreError, billed: bool) -> None:
    async def main(world: World) -> None:
        meter = Meter()
        store = _store(world, meter, put=[error])
        with pytest.raises(type(error)):
            await store.put("a", b"one")
        counted, other = (
            (meter.billed, meter.unbilled) if billed else (meter.unbilled, meter.billed)
        )
        assert counted == {("other", Kind.PUT): 1}
        assert not other
        assert meter.requests() == 1
        assert meter.dollars() == pytest.approx(0.005 / 1000 if billed else 0.0)
        assert meter.labels() == ["other"]

    simulate(main, seed=1)


def test_what_is_not_sent_is_not_counted() -> None:
    async def main(world: World) -> None:
        meter = Meter()
        store = _store(world, meter)
        for request in (
            lambda: store.put("", b"x"),
            lambda: store.put("a", b"x", metadata={"A": "b"}),
            lambda: store.list(limit=0),
            lambda: store.get("a//b"),
            lambda: store.touch("/a", version=Version("x")),
            lambda: store.delete(".."),
            lambda: store.head("a\n"),
        ):
            with pytest.raises(InvalidInput):
                await request()
        assert meter.requests() == 0

    simulate(main, seed=1)


def test_a_cancelled_request_is_counted_once_and_not_billed() -> None:
    async def main(world: World) -> None:
        async def hang() -> None:
            await asyncio.Event().wait()

        meter = Meter()
        store = _store(world, meter, put=[hang])
        async with asyncio.TaskGroup() as group:
            put = group.create_task(store.put("a", b"one"))
            await world.clock().sleep(1)
            put.cancel()
        assert put.cancelled()
        assert dict(meter.unbilled) == {("other", Kind.PUT): 1}
        assert not meter.billed

    simulate(main, seed=1)


def test_labels_nest() -> None:
    async def main(world: World) -> None:
        meter = Meter()
        store = _store(world, meter)
        with labelled("outer"):
            await store.list()
            with labelled("inner"):
                await store.list()
            await store.list()
        await store.list()
        assert {label: meter.requests(label=label) for label in meter.labels()} == {
            "inner": 1,
            "other": 1,
            "outer": 2,
        }

    simulate(main, seed=1)


def test_a_label_ends_with_a_failure() -> None:
    async def main(world: World) -> None:
        meter = Meter()
        store = _store(world, meter)
        with pytest.raises(NotFound), labelled("failing"):
            await store.get("nothing")
        await store.list()
        assert meter.requests(label="failing") == 1
        assert meter.requests(label="other") == 1

    simulate(main, seed=1)


def test_tasks_have_the_label_of_whoever_made_them() -> None:
    async def main(world: World) -> None:
        meter = Meter()
        store = _store(world, meter)

        async def work(label: str, *, times: int) -> None:
            with labelled(label):
                async with asyncio.TaskGroup() as group:
                    for _ in range(times):
                        group.create_task(store.list())
                await asyncio.gather(store.list(), store.list())

        with labelled("parent"):
            async with asyncio.TaskGroup() as group:
                group.create_task(work("one", times=3))
                group.create_task(work("two", times=5))
                group.create_task(store.list())
            await store.list()
        assert {label: meter.requests(label=label) for label in meter.labels()} == {
            "one": 5,
            "two": 7,
            "parent": 2,
        }

    for seed in range(10):
        simulate(main, seed=seed)


def test_the_label_is_that_of_the_context_in_which_a_request_runs() -> None:
    async def main(world: World) -> None:
        meter = Meter()
        store = _store(world, meter)
        with labelled("made"):
            request = store.list()
        with labelled("awaited"):
            await request
        assert meter.labels() == ["awaited"]

    simulate(main, seed=1)


@pytest.mark.parametrize("label", ["claim", ""])
def test_time_is_counted_under_its_own_label(label: str) -> None:
    async def main(world: World) -> None:
        meter = Meter()
        store = _store(world, meter)
        with labelled(label):
            await store.now()
            await store.now()
        assert dict(meter.billed) == {("time", Kind.HEAD): 1}
        await store.sample()
        await store.calibrate()
        assert meter.requests(label="time") == 2
        assert meter.dollars(label="time") == pytest.approx(2 * 0.0004 / 1000)

    simulate(main, seed=1)


def test_a_failed_sample_is_counted_too() -> None:
    async def main(world: World) -> None:
        meter = Meter()
        store = _store(world, meter, sample=[Fault.UNAVAILABLE])
        with pytest.raises(Unavailable):
            await store.now()
        await store.now()
        assert meter.unbilled[("time", Kind.HEAD)] == 1
        assert meter.requests(label="time") == 2

    simulate(main, seed=1)


def test_stores_may_share_a_meter() -> None:
    async def main(world: World) -> None:
        meter = Meter()
        for _ in range(3):
            await _store(world, meter).list()
        assert meter.requests() == 3

    simulate(main, seed=1)
