"""Submits of a short while share a pack: what is put, who waits, and what fails with whom."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.kernel.errors import InvalidInput, Unavailable
from penstock.queue.client import Queue, Task
from penstock.queue.ids import task_at
from penstock.store.base import NO_METADATA, REPLACE, ObjectStore, PutMode, Version, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.virtual import World, simulate


class _Puts(Wrapper):
    """Notes what is put, takes a while for it, or fails."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.keys: list[str] = []
        self.seconds = 0.0
        self.fails = ""

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        await self.clock.machine.sleep(self.seconds)
        if self.fails and self.fails in key:
            raise Unavailable("The store is away.")
        self.keys.append(key)
        return await self.inner.put(key, body, mode, metadata=metadata)


@dataclass
class Scene:
    world: World
    store: _Puts
    queue: Queue

    @property
    def packs(self) -> int:
        return len(self.store.keys)

    async def wait(self, seconds: float) -> None:
        await self.world.clock().sleep(seconds)


def _begun(submit: Coroutine[Any, Any, Task]) -> asyncio.Task[Task]:
    return asyncio.get_running_loop().create_task(submit)


def _play(act: Callable[[Scene], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        store = _Puts(MemoryStore(MemoryBucket(clock), clock=clock))
        queue = Queue("", name="q", gather_seconds=0.1)
        await queue.attach(store, world.entropy("queue"))
        store.keys.clear()
        await act(Scene(world, store, queue))

    simulate(main, seed=1)


def test_submits_of_a_tenth_of_a_second_are_one_pack_and_each_has_its_own_task() -> None:
    async def act(scene: Scene) -> None:
        queue = scene.queue
        tasks = await asyncio.gather(*(queue.submit("resize", number) for number in range(50)))
        assert scene.packs == 1
        assert [(await queue.get(each.id)).input for each in tasks] == list(range(50))
        await queue.submit("resize", 1)
        assert scene.packs == 2

    _play(act)


def test_a_submit_returns_after_its_put_and_never_before() -> None:
    async def act(scene: Scene) -> None:
        scene.store.seconds = 3.0
        submit = _begun(scene.queue.submit("resize", 1))
        await scene.wait(3.05)
        assert not submit.done()
        assert scene.packs == 0
        await scene.wait(0.1)
        assert submit.done()
        assert scene.packs == 1

    _play(act)


def test_only_what_is_submitted_alike_shares_a_pack_and_keys_do_not() -> None:
    async def act(scene: Scene) -> None:
        queue = scene.queue
        tasks = await asyncio.gather(
            *(queue.submit("resize", number) for number in range(3)),
            queue.submit("mail"),
            queue.submit("resize", priority=1),
            queue.submit("resize", limit="api"),
            queue.submit("resize", tags={"env": "prod"}),
            queue.submit("resize", affinity="a"),
            queue.submit("resize", expires=60),
            queue.submit("resize", delay=60),
            queue.submit("resize", key="k"),
            queue.submit("resize", key="l"),
        )
        counts = [task_at(each.id)[0].count for each in tasks]
        assert counts == [3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1]

    _play(act)


def test_errors_are_of_the_task_or_of_its_pack_alone() -> None:
    async def act(scene: Scene) -> None:
        queue = scene.queue
        scene.store.fails = "mail"
        found = await asyncio.gather(
            queue.submit("resize", {1}),
            queue.submit("resize", 1),
            queue.submit("mail", 1),
            queue.submit("mail", 2),
            return_exceptions=True,
        )
        assert isinstance(found[0], InvalidInput)
        assert not isinstance(found[1], BaseException)
        assert all(isinstance(each, Exception) for each in found[2:])

    _play(act)


def test_a_submit_that_is_cancelled_in_time_is_not_sent() -> None:
    async def act(scene: Scene) -> None:
        queue = scene.queue
        first = _begun(queue.submit("resize", 1))
        second = _begun(queue.submit("resize", 2))
        await scene.wait(0.05)
        first.cancel()
        task = await second
        assert (await queue.get(task.id)).input == 2
        assert task_at(task.id)[0].count == 1
        alone = _begun(queue.submit("resize", 3))
        await scene.wait(0.05)
        alone.cancel()
        await scene.wait(1)
        assert scene.packs == 1

    _play(act)


def test_a_full_pack_is_sent_at_once_and_close_sends_the_rest() -> None:
    async def act(scene: Scene) -> None:
        queue = scene.queue
        submits = [_begun(queue.submit("resize", n)) for n in range(1001)]
        await scene.wait(0.05)
        assert scene.packs == 1
        large = [_begun(queue.submit("big", "x" * 60_000)) for _ in range(9)]
        await scene.wait(0.01)
        assert scene.packs == 2
        await queue.close()
        assert scene.packs == 3
        assert len({task.id for task in await asyncio.gather(*submits, *large)}) == 1010

    _play(act)


@pytest.mark.parametrize("seconds", [0, -1, 11])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidInput, match="Submits are gathered for"):
        Queue("memory://", name="q", gather_seconds=seconds)
