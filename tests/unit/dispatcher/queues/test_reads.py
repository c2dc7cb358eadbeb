"""What pages read beside a look: once for all who ask, paced by what it took, never worse."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from penstock.dispatcher.bucket_queues import (
    ANSWERS_MAX,
    READ_FIRST_SECONDS,
    READ_REQUESTS_MAX,
    READ_SECONDS_MAX,
    REQUESTS_A_SECOND,
    SharedReads,
)
from penstock.kernel.clock import Clock
from penstock.kernel.errors import TaskNotFound, Throttled, Unavailable
from penstock.store.base import ObjectStore, find
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.virtual import World, simulate


@dataclass
class Scene:
    """Somebody who reads, and how often it was read."""

    clock: Clock
    reads: SharedReads
    requests: int = 1
    error: Exception | None = None
    seconds: float = 0.0
    times: list[float] = field(default_factory=list)

    async def make(self, store: ObjectStore) -> int:
        self.times.append(self.clock.monotonic())
        await self.clock.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        for _ in range(self.requests):
            await find(store, "nothing")
        return len(self.times)

    async def watch(self, what: str, seconds: float) -> None:
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            await self.reads.read(("one", what), self.make, seconds=10)
            await self.clock.sleep(1)


def _play(act: Callable[[Scene], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        store = MemoryStore(MemoryBucket(clock), clock=clock)
        await act(Scene(clock, SharedReads(store)))

    simulate(main, seed=1)


def test_all_who_watch_share_one_read_in_its_time() -> None:
    async def act(scene: Scene) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(scene.watch("tasks", 60))
        assert len(scene.times) == 6

    _play(act)


def test_what_took_many_requests_is_read_less_often() -> None:
    async def act(scene: Scene) -> None:
        scene.requests = READ_REQUESTS_MAX - 10
        await scene.watch("tasks", 100)
        assert len(scene.times) == 4
        assert scene.times[1] - scene.times[0] >= scene.requests / REQUESTS_A_SECOND

    _play(act)


def test_first_reads_come_one_after_another_and_at_a_pace() -> None:
    async def act(scene: Scene) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                ask = scene.reads.read(("one", number), scene.make, seconds=10)
                group.create_task(ask)
        gaps = [later - before for before, later in zip(scene.times, scene.times[1:], strict=False)]
        assert min(gaps) >= READ_FIRST_SECONDS

    _play(act)


def test_a_read_has_a_bound_and_one_that_fails_leaves_the_last() -> None:
    async def act(scene: Scene) -> None:
        scene.requests = READ_REQUESTS_MAX + 1
        with pytest.raises(Throttled):
            await scene.reads.read(("one", "big"), scene.make, seconds=10)
        scene.requests = 1
        first = await scene.reads.read(("one", "x"), scene.make, seconds=10)
        assert (first.requests, first.trouble) == (1, "")
        scene.error = Unavailable("The store is away.")
        await scene.clock.sleep(60)
        later = await scene.reads.read(("one", "x"), scene.make, seconds=10)
        assert (later.found, later.trouble) == (first.found, "The store is away.")
        scene.error, scene.seconds = None, READ_SECONDS_MAX + 1
        await scene.clock.sleep(60)
        late = await scene.reads.read(("one", "x"), scene.make, seconds=10)
        assert "has not answered all of it" in late.trouble

    _play(act)


def test_what_is_gone_is_forgotten_and_what_was_changed_is_read_again() -> None:
    async def act(scene: Scene) -> None:
        await scene.reads.read(("one", "x"), scene.make, seconds=10)
        scene.reads.forget("two")
        assert (await scene.reads.read(("one", "x"), scene.make, seconds=10)).found == 1
        scene.reads.forget("one")
        assert (await scene.reads.read(("one", "x"), scene.make, seconds=10)).found == 2
        scene.error = TaskNotFound("Nothing is known of it.", task="x")
        await scene.clock.sleep(60)
        for _ in range(2):
            with pytest.raises(TaskNotFound):
                await scene.reads.read(("one", "x"), scene.make, seconds=10)

    _play(act)


def test_so_many_answers_are_remembered() -> None:
    async def act(scene: Scene) -> None:
        for number in range(ANSWERS_MAX + 1):
            await scene.reads.read(("one", number), scene.make, seconds=10_000)
        await scene.reads.read(("one", ANSWERS_MAX), scene.make, seconds=10_000)
        assert len(scene.times) == ANSWERS_MAX + 1
        await scene.reads.read(("one", 0), scene.make, seconds=10_000)
        assert len(scene.times) == ANSWERS_MAX + 2

    _play(act)
