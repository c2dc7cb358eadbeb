"""One look for all who watch: paced, bounded, and never worse than the one before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from penstock.dispatcher import bucket_queues
from penstock.dispatcher.bucket_queues import (
    QUEUES_MAX,
    SNAPSHOT_REQUESTS_MAX,
    SNAPSHOT_SECONDS,
    SNAPSHOT_SECONDS_MAX,
    BoundedStore,
    QueueInspector,
)
from penstock.kernel.errors import InvalidInput, QueueNotFound, Throttled, Unavailable
from penstock.queue.client import Queue
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.worker import Worker
from penstock.store.base import PAGE_KEYS_MAX, Delimiter, ObjectStore, Page, Wrapper, pages
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import World, simulate


class _Slow(Wrapper):
    """A store whose lists take a while, or fail."""

    seconds = 0.0
    error: Exception | None = None

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        await self.clock.machine.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return await self.inner.list(
            prefix, start_after=start_after, delimiter=delimiter, limit=limit, cursor=cursor
        )


@dataclass
class Scene:
    """A bucket with two queues, and those who look at it."""

    world: World
    store: _Slow
    meter: Meter
    queues: QueueInspector
    one: Queue
    two: Queue

    async def wait(self, seconds: float) -> None:
        await self.world.clock().sleep(seconds)

    async def watch(self, name: str, seconds: float) -> None:
        """Ask about once a second, as a page does that somebody looks at."""
        clock = self.world.clock()
        until = clock.monotonic() + seconds
        while clock.monotonic() < until:
            await self.queues.look(name)
            await clock.sleep(1)


def _play(act: Callable[[Scene], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        clock, meter = world.clock(), Meter()
        backend = MemoryStore(MemoryBucket(clock), clock=clock)
        store = _Slow(MeteredStore(backend, meter))
        one = await Queue.on(store, name="one", entropy=world.entropy("one"))
        two = await Queue.on(store, name="two", entropy=world.entropy("two"))
        queues = QueueInspector(store, entropy=world.entropy("looks"))
        await act(Scene(world, store, meter, queues, one, two))

    simulate(main, seed=1)


def test_a_look_shows_what_is_there_and_what_it_took() -> None:
    async def act(scene: Scene) -> None:
        await scene.one.submit_many("resize", [1, 2, 3])
        await scene.one.pause("resize", "because")
        scene.meter.billed.clear()
        look = await scene.queues.look("one")
        assert look.names == ("one", "two")
        assert [(each.type, each.ready) for each in look.stats.types] == [("resize", 3)]
        assert sum(look.depths) == 3
        assert len(look.depths) == 64
        assert [(each.type, each.reason) for each in look.stats.held] == [("resize", "because")]
        assert [each.ready for each in look.stats.ages] == [3, 0, 0, 0, 0, 0, 0, 0]
        assert look.cost.requests == scene.meter.requests() <= 12
        assert look.cost.lists == scene.meter.requests(kind=Kind.LIST)
        assert look.cost.dollars == pytest.approx(scene.meter.dollars())

    _play(act)


def test_all_who_watch_together_cost_one_look_in_five_seconds() -> None:
    async def act(scene: Scene) -> None:
        alone = (await scene.queues.look("one")).cost.requests
        scene.meter.billed.clear()
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(scene.watch("one", 60))
        assert scene.meter.requests(label="inspect") <= (60 / SNAPSHOT_SECONDS + 1) * alone

    _play(act)


def test_two_queues_that_are_watched_take_turns_at_the_same_pace() -> None:
    async def act(scene: Scene) -> None:
        seen: dict[str, set[float]] = {"one": set(), "two": set()}
        for _ in range(60):
            for name, times in seen.items():
                # The first is always there before the second.
                times.add((await scene.queues.look(name)).stats.at)
            await scene.wait(1)
        turns = 60 / SNAPSHOT_SECONDS
        assert sum(map(len, seen.values())) <= turns + 2
        assert all(len(times) >= turns / 2 - 1 for times in seen.values()), seen

    _play(act)


def test_a_look_that_takes_too_long_leaves_the_last_one_and_the_next_takes_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def act(scene: Scene) -> None:
        for number in range(60):
            await scene.one.submit("ok", number)
        first = await scene.queues.look("one")
        assert (first.trouble, first.is_whole) == ("", True)
        monkeypatch.setattr("penstock.queue.survey.pages", _small_pages)
        scene.store.seconds = 0.4
        await scene.wait(SNAPSHOT_SECONDS)
        began = scene.world.clock().monotonic()
        late = await scene.queues.look("one")
        assert scene.world.clock().monotonic() - began <= SNAPSHOT_SECONDS_MAX + 0.01
        assert "within 3 seconds" in late.trouble
        assert late.stats == first.stats
        await scene.wait(SNAPSHOT_SECONDS)
        short = await scene.queues.look("one")
        assert (short.trouble, short.is_whole) == ("", False)

    _play(act)


async def _small_pages(
    store: ObjectStore, prefix: str = "", *, delimiter: Delimiter = ""
) -> AsyncIterator[Page]:
    async for page in pages(store, prefix, delimiter=delimiter, page_keys=10):
        yield page


def test_what_the_store_says_is_told_and_what_was_seen_stays() -> None:
    async def act(scene: Scene) -> None:
        scene.store.error = Unavailable("The store is away.")
        with pytest.raises(Unavailable):
            await scene.queues.look("one")
        scene.store.error = None
        await scene.wait(SNAPSHOT_SECONDS)
        seen = await scene.queues.look("one")
        scene.store.error = Unavailable("The store is away.")
        await scene.wait(SNAPSHOT_SECONDS)
        assert (await scene.queues.look("one")).trouble == "The store is away."
        scene.store.error = None
        await scene.wait(SNAPSHOT_SECONDS)
        again = await scene.queues.look("one")
        assert (again.trouble, again.stats.queue) == ("", seen.stats.queue)

    _play(act)


def test_a_queue_that_is_not_there_is_not_made_and_is_in_nobodys_way() -> None:
    async def act(scene: Scene) -> None:
        before = await scene.queues.look("one")
        for number in range(2 * QUEUES_MAX):
            with pytest.raises(QueueNotFound):
                await scene.queues.look(f"none-{number}")
        with pytest.raises(InvalidInput):
            await scene.queues.look("../config")
        assert await scene.queues.names() == ("one", "two")
        after = await scene.queues.look("one")
        assert after.stats.at > before.stats.at + SNAPSHOT_SECONDS

    _play(act)


def test_a_look_that_nobody_waits_for_any_more_does_not_break_the_pace() -> None:
    async def act(scene: Scene) -> None:
        await scene.queues.look("one")
        scene.store.seconds = 0.5
        await scene.wait(SNAPSHOT_SECONDS)
        scene.meter.billed.clear()
        for _ in range(10):
            looking = asyncio.get_running_loop().create_task(scene.queues.look("one"))
            await scene.wait(0.1)
            looking.cancel()
            await asyncio.wait([looking])
        assert scene.meter.requests(kind=Kind.GET) <= 2

    _play(act)


def test_no_more_requests_than_the_bound_are_sent() -> None:
    async def main(world: World) -> None:
        clock, meter = world.clock(), Meter()
        inner = MeteredStore(MemoryStore(MemoryBucket(clock), clock=clock), meter)
        store = BoundedStore(inner, requests_max=3)
        for _ in range(3):
            await store.list("a/")
        with pytest.raises(Throttled, match="at most 3 requests"):
            await store.list("a/")
        assert meter.requests() == store.meter.requests() == 3

    simulate(main, seed=1)
    assert SNAPSHOT_REQUESTS_MAX <= 500


def test_what_is_steered_is_seen_at_once() -> None:
    async def act(scene: Scene) -> None:
        worker = Worker(scene.one, concurrency=2)

        @worker.handler("bad", retry=Retry(attempts=1))
        async def bad(task: TaskContext) -> None:
            raise ValueError("no good")

        ids = [(await scene.one.submit("bad", number)).id for number in range(3)]
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run(signals=False))
            await scene.wait(30)
            worker.stop()
        queues = scene.queues
        assert len((await queues.look("one")).lately.letters) == 3
        await bucket_queues.pause(queues, "one", type=None, reason="stop")
        await bucket_queues.drain(queues, "one", type="bad")
        look = await queues.look("one")
        assert [(each.type, each.reason) for each in look.stats.held] == [
            (None, "stop"),
            ("bad", ""),
        ]
        refused = await bucket_queues.replay(queues, "one", ids)
        assert refused.replayed == 0
        assert len(refused.problems) == 3
        assert "drained" in refused.problems[0]
        await bucket_queues.resume(queues, "one", type="bad")
        done = await bucket_queues.replay(queues, "one", [*ids, *ids])
        assert (done.replayed, done.problems) == (3, ())
        await bucket_queues.replay(queues, "one", ids[:1])
        look = await queues.look("one")
        assert len(look.lately.replayed) == 3
        assert [each.ready for each in look.stats.types] == [3]
        with pytest.raises(InvalidInput):
            await bucket_queues.replay(queues, "one", [])
        with pytest.raises(QueueNotFound):
            await bucket_queues.pause(queues, "none", type=None, reason="")

    _play(act)
