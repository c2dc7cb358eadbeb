"""Pause, drain and resume: who hears of them when, and what they leave alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from penstock.kernel.errors import InvalidInput, QueueDrained, StoreError, UnreadableObject
from penstock.queue.client import Queue
from penstock.queue.control import PRODUCER_SECONDS, TRUST_SECONDS, WORKER_SECONDS
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.inspection import stats
from penstock.queue.layout import QueueLayout
from penstock.queue.settings import DiscoveryMode, Polling, WorkerSettings
from penstock.queue.survey import RemainingTasks, left, wait_until_empty
from penstock.queue.worker import Worker
from penstock.store.base import Object, Version, Wrapper
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Meter, MeteredStore
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")
QUICK = WorkerSettings(polling=Polling(min_seconds=0.5, max_seconds=2.0))
HEARD_SECONDS = WORKER_SECONDS + 2.5
"""After that long every worker has heard, and has looked again."""


class Scene:
    """A bucket, an operator's connection, and workers with connections of their own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = world.clock()
        self.bucket = MemoryBucket(world.clock())
        self.started: list[tuple[str, float]] = []
        self.ended: list[str] = []
        self.interrupted: list[str] = []
        self.stores: list[FaultyStore] = []
        self.meters: list[Meter] = []

    @property
    def lived(self) -> float:
        return self.world.now() - self.world.epoch

    async def queue(self, name: str = "operator") -> Queue:
        meter = Meter()
        inner = MeteredStore(MemoryStore(self.bucket, clock=self.world.clock()), meter)
        store = FaultyStore(inner, FaultPlan(), entropy=self.world.entropy(f"faults {name}"))
        self.stores.append(store)
        self.meters.append(meter)
        return await Queue.on(store, name="q", entropy=self.world.entropy(name))

    async def worker(self, name: str = "w", *, concurrency: int = 4) -> Worker:
        queue = await self.queue(name)
        worker = Worker(
            queue, concurrency=concurrency, mode=DiscoveryMode.SHARED, name=name, settings=QUICK
        )
        for kind in ("a", "b"):
            worker.handler(kind)(self._handle)
        return worker

    async def _handle(self, task: TaskContext) -> None:
        self.started.append((task.type, self.lived))
        try:
            await self.clock.sleep(task.input)
        except asyncio.CancelledError:
            self.interrupted.append(task.type)
            raise
        self.ended.append(task.type)

    def starts(self, kind: str, *, after: float = -1.0) -> int:
        return sum(name == kind and at > after for name, at in self.started)


def _run(check: Callable[[Scene], Awaitable[None]], *, seed: int = 1) -> None:
    async def main(world: World) -> None:
        await check(Scene(world))

    simulate(main, seed=seed)


class Running:
    """Workers that run as long as the block does."""

    def __init__(self, *workers: Worker) -> None:
        self._workers = workers
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> None:
        await self._group.__aenter__()
        self._tasks = [
            self._group.create_task(worker.run(signals=False)) for worker in self._workers
        ]

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await self._group.__aexit__(None, None, None)


def test_a_paused_queue_starts_nothing_and_takes_submits() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.pause(reason="disk full")
        async with Running(await scene.worker()):
            tasks = [await queue.submit("a", 1) for _ in range(20)]
            await scene.clock.sleep(60)
            assert scene.started == []
            await queue.resume()
            await scene.clock.sleep(HEARD_SECONDS)
            assert scene.starts("a") >= 4
            for task in tasks:
                await task.result(timeout=60)

    _run(check)


def test_a_type_is_paused_and_others_are_not_held_up() -> None:
    """More packs of the paused type than a look wants stand before the others."""

    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.pause("a")
        for _ in range(50):
            await queue.submit("a", 1, priority=5)
        other = await queue.submit("b", 1)
        async with Running(await scene.worker()):
            await other.result(timeout=10)
            assert scene.starts("a") == 0
            assert [mark.type for mark in await queue.resume("b")] == ["a"]
            await scene.clock.sleep(20)
            assert scene.starts("a") == 0
            assert await queue.resume("a") == ()
            await scene.clock.sleep(HEARD_SECONDS + 2)
            assert scene.starts("a") > 0

    _run(check)


@pytest.mark.parametrize("seed", range(3))
def test_a_pause_reaches_a_worker_that_is_busy_with_a_large_pack(seed: int) -> None:
    """What runs goes on, what was only claimed is given back, and no attempt is lost by it."""

    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        tasks = await queue.submit_many("a", [3] * 200)
        async with Running(await scene.worker()):
            await scene.clock.sleep(12)
            await queue.pause()
            paused = scene.lived
            await scene.clock.sleep(60)
            assert scene.starts("a", after=paused + WORKER_SECONDS + 0.5) == 0
            assert scene.interrupted == []
            assert len(scene.ended) == len(scene.started)
            views = [await queue.get(task.id) for task in tasks]
            assert not [view for view in views if view.status == "running"]
            await queue.resume()
            await tasks[-1].result(timeout=400)
        assert len(scene.started) == len(scene.ended) == 200

    _run(check, seed=seed)


def test_what_cannot_be_read_holds_everything_back(caplog: pytest.LogCaptureFixture) -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        scene.bucket.write(LAYOUT.control, b"garbage", {})
        with pytest.raises(UnreadableObject, match="was not written by Penstock"):
            await queue.submit("a", 1)
        scene.bucket.remove(LAYOUT.control)
        async with Running(await scene.worker()):
            await (await queue.submit("a", 1)).result(timeout=10)
            scene.bucket.write(LAYOUT.control, b"garbage", {})
            await scene.clock.sleep(WORKER_SECONDS)
            task = await queue.submit("a", 1)
            await scene.clock.sleep(60)
            assert len(scene.started) == 1
            scene.bucket.remove(LAYOUT.control)
            await task.result(timeout=HEARD_SECONDS)

    with caplog.at_level(logging.WARNING):
        _run(check)
    said = [each.message for each in caplog.records]
    assert sum("failed to read what is paused" in each for each in said) == 1


def test_nothing_starts_on_an_old_reading() -> None:
    """The worker is cut off from the object, and from nothing else, while the queue is paused."""

    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.submit_many("a", [1] * 1000)
        worker = await scene.worker()
        store = scene.stores[-1]
        whole = store.get

        async def get(key: str, **asked: object) -> object:
            if key == LAYOUT.control:
                raise StoreError("away", key=key)
            return await whole(key, **asked)  # type: ignore[arg-type]  # handed on as it came

        async with Running(worker):
            await scene.clock.sleep(20)
            store.get = get  # type: ignore[method-assign,assignment]  # a part of it is away
            cut = scene.lived
            await scene.clock.sleep(0.5)
            await queue.pause()
            await scene.clock.sleep(100)
            assert scene.starts("a", after=cut + 5) > 0
            assert scene.starts("a", after=cut + TRUST_SECONDS + 0.5) == 0

    _run(check)


def test_a_drained_queue_refuses_submits_and_is_emptied() -> None:
    async def check(scene: Scene) -> None:
        queue, producer = await scene.queue(), await scene.queue("producer")
        tasks = await producer.submit_many("a", [1] * 20)
        await queue.drain()
        await scene.clock.sleep(PRODUCER_SECONDS)
        for each in (producer.submit("a", 1), producer.submit("a", 1, key="k")):
            with pytest.raises(QueueDrained) as caught:
                await each
            assert "resume" in caught.value.hint
        with pytest.raises(QueueDrained):
            await producer.submit_many("b", [1])
        assert not any(LAYOUT.keyed in key for key in scene.bucket.objects)
        assert not await queue.wait_until_empty(seconds=30)
        async with Running(await scene.worker()):
            assert await queue.wait_until_empty(seconds=60)
        for task in tasks:
            assert (await task.view()).status == "succeeded"
        await queue.resume()
        await scene.clock.sleep(PRODUCER_SECONDS)
        await producer.submit("a", 1)

    _run(check)


def test_a_type_is_drained_by_itself() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.drain("a")
        await queue.submit("b", 1)
        with pytest.raises(QueueDrained, match="type 'a'"):
            await queue.submit("a", 1)
        assert await queue.wait_until_empty("a", seconds=60)
        assert not await queue.wait_until_empty(seconds=10)

    _run(check)


def test_nothing_is_called_empty_before_every_producer_has_heard() -> None:
    async def check(scene: Scene) -> None:
        queue, producer = await scene.queue(), await scene.queue("producer")
        await producer.submit("a", 1, delay=5)  # It has read the object now.
        async with Running(await scene.worker()):
            await queue.drain()
            seen: list[RemainingTasks] = []
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(
                    wait_until_empty(queue.access, seconds=300, tell=seen.append)
                )
                await scene.clock.sleep(PRODUCER_SECONDS - 2)
                assert not waiting.done()
                await producer.submit("a", 60)
            assert waiting.result()
            assert scene.lived > 80
            assert seen[0].tasks == 1
            assert (await left(queue.access)).tasks == 0

    _run(check)


def test_a_reading_that_began_before_the_own_change_is_not_trusted() -> None:
    class Slow(Wrapper):
        """Answers late to whoever reads the state, once."""

        is_slow = False

        async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
            found = await self.inner.get(key, unless=unless)
            if self.is_slow and key == LAYOUT.control:
                self.is_slow = False
                await self.clock.machine.sleep(0.5)
            return found

    async def check(scene: Scene) -> None:
        store = Slow(MemoryStore(scene.bucket, clock=scene.world.clock()))
        queue = await Queue.on(store, name="q", entropy=scene.world.entropy("q"))
        for change, is_refused in ((queue.control.drain, True), (queue.control.resume, False)):
            await scene.clock.sleep(PRODUCER_SECONDS + 1)
            store.is_slow = True
            async with asyncio.TaskGroup() as group:
                early = group.create_task(_is_refused(queue))
                await scene.clock.sleep(0.1)
                await change()
            assert early.result() is not is_refused
            assert await _is_refused(queue) is is_refused

    async def _is_refused(queue: Queue) -> bool:
        try:
            await queue.submit("a", 1)
        except QueueDrained:
            return True
        return False

    _run(check)


def test_who_drains_is_refused_at_once() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.submit("a", 1)
        await queue.drain()
        with pytest.raises(QueueDrained):
            await queue.submit("a", 1)
        await queue.resume()
        await queue.submit("a", 1)

    _run(check)


def test_two_operators_do_not_undo_each_other() -> None:
    async def check(scene: Scene) -> None:
        one, two = await scene.queue("one"), await scene.queue("two")
        await asyncio.gather(one.pause("a", "slow"), two.drain("a"), one.pause(), two.pause("b"))
        held = {each.type: each for each in await one.control.state()}
        assert held.keys() == {None, "a", "b"}
        assert held["a"].paused_at
        assert held["a"].drained_at
        assert held["a"].reason == "slow"
        again = {each.type: each for each in await two.pause("a")}
        assert again["a"] == held["a"]  # Paused twice is paused once, since the first time.
        assert {each.type for each in await two.resume()} == {"a", "b"}
        shown = await stats(one.access)
        assert {each.type for each in shown.held} == {"a", "b"}
        assert shown.notes == ()

    for seed in range(5):
        _run(check, seed=seed)


def test_bad_words_are_refused() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        with pytest.raises(InvalidInput, match="not the name of a type"):
            await queue.pause("a/b")
        with pytest.raises(InvalidInput, match="at most 500"):
            await queue.pause(reason="x" * 501)
        assert await queue.control.state() == ()
        assert LAYOUT.control not in scene.bucket.objects

    _run(check)


def test_an_idle_worker_never_asks_and_a_busy_one_asks_rarely() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        worker = await scene.worker()
        meter = scene.meters[-1]
        async with Running(worker):
            await scene.clock.sleep(3600)
            assert meter.requests(label="control") == 0
            await queue.submit_many("a", [1] * 1000)
            before = scene.lived
            while len(scene.ended) < 1000:
                await scene.clock.sleep(1)
            asked = meter.requests(label="control")
            assert 1 < asked <= (scene.lived - before) / WORKER_SECONDS + 2
            await scene.clock.sleep(3600)
            assert meter.requests(label="control") <= asked + 1

    _run(check)


def test_a_producer_asks_every_half_minute_at_the_most() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        for _ in range(120):
            await queue.submit("a", 1)
            await scene.clock.sleep(1)
        assert scene.meters[-1].requests(label="control") == 4

    _run(check)
