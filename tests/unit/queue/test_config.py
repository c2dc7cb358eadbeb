"""What all who use a queue agree on, also when two make it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.kernel.document_format import encode
from penstock.kernel.errors import InvalidInput, NewerFormat, NotOurs
from penstock.queue.client import Queue
from penstock.queue.config import (
    QueueConfig,
    checked,
    make_queue,
    no_such_queue,
    read_config,
)
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.inspection import stats
from penstock.queue.layout import QueueLayout
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing import QueueBench, run_queue
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
        assert error.hint.startswith("There are no queues here yet.")
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


def test_settings_are_changed_while_the_queue_is_in_use() -> None:
    async def test(bench: QueueBench) -> None:
        queue = bench.queue
        assert (await queue.config()).shards == 16
        changed = await queue.configure(direct=["a"], key_seconds=600)
        assert (changed.direct, changed.key_seconds, changed.shards) == (("a",), 600, 16)
        assert await queue.config() == changed
        # What is not named stays, and nothing is written where nothing changes.
        assert await queue.configure(key_seconds=600) == changed
        assert (await queue.configure(direct=[])).key_seconds == 600
        for types in ("a", ["a b"]):
            with pytest.raises(InvalidInput):
                await queue.configure(direct=types)
        with pytest.raises(InvalidInput, match="at least 300 s"):
            await queue.configure(key_seconds=5)

    run_queue(test, config=QueueConfig(shards=16))


def test_a_key_and_a_direct_type_follow_a_change_at_once_where_it_was_made() -> None:
    async def test(bench: QueueBench) -> None:
        @bench.worker.handler("a")
        async def handle(task: TaskContext) -> None: ...

        await bench.queue.configure(direct=["a"], key_seconds=600)
        await bench.start()
        await bench.advance(60)
        task = await bench.queue.submit("a", key="k")
        keys = bench._bucket.keys_from("queues/")
        assert any("/inbox/bench" in key for key in keys)
        await bench.advance(60)
        assert (await task.view()).status == "succeeded"
        await bench.advance(700)
        assert (await bench.queue.submit("a", key="k")).id == task.id
        assert (await task.view()).status == "ready"

    run_queue(test, mode="direct")


def test_what_is_asked_for_and_is_not_so_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: QueueBench) -> None:
        name = bench.queue.name
        await bench.connect(Queue("", name=name, config=QueueConfig(shards=16)))
        await bench.connect(Queue("", name=name))
        await bench.connect(Queue("", name=name, config=QueueConfig()))
        assert not caplog.records
        other = QueueConfig(direct=("a",), shards=16, key_seconds=600)
        await bench.connect(Queue("", name=name, config=other))

    run_queue(test, config=QueueConfig(shards=16))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "key_seconds is 86400 and not 600, direct is () and not ('a',)." in said
    assert "shards" not in said


@pytest.mark.parametrize("direct", [("a",), ("a", "b"), ()])
def test_a_direct_worker_says_which_of_its_types_are_not_direct(
    direct: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bench: QueueBench) -> None:
        for kind in ("a", "b"):

            @bench.worker.handler(kind)
            async def handle(task: TaskContext) -> None: ...

        await bench.start()
        await bench.advance(5)

    run_queue(test, mode="direct", config=QueueConfig(direct=direct))
    others = [each for each in ("a", "b") if each not in direct]
    said = [text for text in caplog.messages if "as in 'shared'" in text]
    assert [f"not direct: {', '.join(others)};" in text for text in said] == [True] * bool(others)


def test_direct_workers_are_shown_while_they_live() -> None:
    async def test(bench: QueueBench) -> None:
        @bench.worker.handler("a")
        async def handle(task: TaskContext) -> None: ...

        assert (await stats(bench.queue.access)).workers == ()
        worker = await bench.start()
        await bench.advance(5)
        (seen,) = (await stats(bench.queue.access)).workers
        assert (seen.role, seen.handles, seen.shards) == ("direct", ("a",), ())
        assert seen.name.startswith("bench")
        assert bench.now() < seen.ends_at < bench.now() + 61
        await bench.stop(worker)
        assert (await stats(bench.queue.access)).workers == ()

    run_queue(test, mode="direct", config=QueueConfig(direct=("*",)))
