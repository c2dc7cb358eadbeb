"""What all who use a queue agree on, also when two make it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.kernel.errors import InvalidInput, NewerFormat, NotOurs
from penstock.kernel.wire import encode
from penstock.queue.config import (
    QueueConfig,
    checked,
    make_queue,
    no_such_queue,
    read_config,
)
from penstock.queue.layout import QueueLayout
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")


def _run(check: Callable[[MemoryStore], Awaitable[None]], *, seed: int = 1) -> None:
    async def main(world: World) -> None:
        await check(MemoryStore(MemoryBucket(world.clock()), clock=world.clock()))

    simulate(main, seed=seed)


def test_a_queue_that_is_not_there_has_no_settings() -> None:
    async def check(store: MemoryStore) -> None:
        assert await read_config(store, LAYOUT) is None

    _run(check)


def test_what_was_made_is_read() -> None:
    async def check(store: MemoryStore) -> None:
        wanted = QueueConfig(shards=16, key_seconds=3600)
        assert await make_queue(store, LAYOUT, wanted) == wanted
        assert await read_config(store, LAYOUT) == wanted
        assert await read_config(store, QueueLayout("q2")) is None

    _run(check)


def test_what_the_first_wrote_holds() -> None:
    async def check(store: MemoryStore) -> None:
        first = QueueConfig(shards=16)
        await make_queue(store, LAYOUT, first)
        assert await make_queue(store, LAYOUT, QueueConfig(shards=32)) == first

    _run(check)


def test_two_at_the_same_time_agree() -> None:
    async def check(store: MemoryStore) -> None:
        wanted = [QueueConfig(shards=2**number) for number in range(1, 6)]
        made = await asyncio.gather(*(make_queue(store, LAYOUT, each) for each in wanted))
        assert len({each.shards for each in made}) == 1
        assert made[0] == await read_config(store, LAYOUT)

    for seed in range(5):
        _run(check, seed=seed)


@pytest.mark.parametrize("shards", [0, -1, 3, 24, 8192, 10**6])
def test_shards_are_a_power_of_two(shards: int) -> None:
    with pytest.raises(InvalidInput):
        checked(QueueConfig(shards=shards))


@pytest.mark.parametrize("shards", [1, 2, 64, 4096])
def test_any_power_of_two_up_to_the_slots_will_do(shards: int) -> None:
    assert checked(QueueConfig(shards=shards)).shards == shards


def test_a_key_outlives_the_time_in_which_a_submit_may_be_sent_again() -> None:
    assert checked(QueueConfig(key_seconds=300)).key_seconds == 300
    with pytest.raises(InvalidInput, match="at least 300 s, not 299"):
        checked(QueueConfig(key_seconds=299))


def test_what_makes_no_sense_is_not_written() -> None:
    async def check(store: MemoryStore) -> None:
        with pytest.raises(InvalidInput):
            await make_queue(store, LAYOUT, QueueConfig(shards=3))
        assert await read_config(store, LAYOUT) is None

    _run(check)


def test_settings_that_somebody_else_wrote_are_not_trusted() -> None:
    async def check(store: MemoryStore) -> None:
        await store.put(LAYOUT.config, encode(QueueConfig(shards=3)))
        with pytest.raises(InvalidInput):
            await read_config(store, LAYOUT)
        await store.put(LAYOUT.config, b"shards: 4")
        with pytest.raises(NotOurs):
            await read_config(store, LAYOUT)
        await store.put(LAYOUT.config, b'{"penstock":"queue/99","shards":4}')
        with pytest.raises(NewerFormat):
            await read_config(store, LAYOUT)

    _run(check)


def test_the_error_names_the_queues_that_are_there() -> None:
    async def check(store: MemoryStore) -> None:
        error = await no_such_queue(store, LAYOUT)
        assert str(error) == "There is no queue 'q' in this store."
        assert error.hint.startswith("There is none here yet.")
        for name in ("images", "mail"):
            await make_queue(store, QueueLayout(name), QueueConfig())
        assert (await no_such_queue(store, LAYOUT)).hint.startswith("There are: images, mail.")

    _run(check)


def test_which_types_are_direct_is_agreed_on() -> None:
    async def check(store: MemoryStore) -> None:
        await make_queue(store, LAYOUT, QueueConfig(direct=("a", "b")))
        config = await read_config(store, LAYOUT)
        assert config is not None
        assert [config.is_direct(type_) for type_ in "abc"] == [True, True, False]

    _run(check)
    assert QueueConfig(direct=("*",)).is_direct("whatever")
    assert not QueueConfig().is_direct("whatever")
    with pytest.raises(InvalidInput, match="is not the name of a type"):
        checked(QueueConfig(direct=("a", "*")))
