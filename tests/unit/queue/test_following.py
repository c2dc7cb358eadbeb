"""Following a queue: everything that happens is told once, and what was before is not."""

from __future__ import annotations

import asyncio
from collections import Counter

from penstock.queue.client import Queue
from penstock.queue.execution.retry import Retry
from penstock.queue.inspection import QueueFollower, TaskHappening
from penstock.queue.inspection.task_search import tag_filters
from penstock.queue.worker import Worker
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.virtual import World, simulate


async def _queue(world: World) -> Queue:
    bucket = MemoryBucket(world.clock())
    store = MemoryStore(bucket, clock=world.clock())
    return await Queue.on(store, name="q", entropy=world.entropy("q"))


async def _follow(follower: QueueFollower, world: World, seconds: float) -> list[TaskHappening]:
    told: list[TaskHappening] = []
    clock = world.clock()
    until = clock.monotonic() + seconds
    while clock.monotonic() < until:
        await clock.sleep(2)
        told += (await follower.look()).events
    return told


def test_all_that_happens_is_told_once() -> None:
    async def main(world: World) -> None:
        queue = await _queue(world)
        before = await queue.submit("ok", 0)
        follower = QueueFollower(queue.access)
        assert (await follower.look()).events == ()
        worker = Worker(queue, concurrency=8)

        @worker.handler("ok", retry=Retry(attempts=2, first_seconds=1))
        async def ok(task: object) -> None:
            if getattr(task, "attempt", 0) == 1 and getattr(task, "input", 0) == 5:
                raise ValueError("once")

        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run(signals=False))
            many = await queue.submit_many("ok", list(range(10)))
            keyed = await queue.submit("ok", 1, key="k")
            told = await _follow(follower, world, 60)
            worker.stop()
        counts: Counter[str] = Counter()
        for event in told:
            counts[event.what] += event.tasks
        assert counts == {"submitted": 11, "claimed": 13, "retrying": 1, "succeeded": 12}
        assert before.id not in [e.id for e in told if e.what == "submitted"]
        submitted = {e.id: e.tasks for e in told if e.what == "submitted"}
        assert submitted == {many[0].id: 10, keyed.id: 1}
        assert (await follower.look()).events == ()

    simulate(main, seed=3)


def test_only_what_has_the_type_and_the_tags_is_told() -> None:
    async def main(world: World) -> None:
        queue = await _queue(world)
        follower = QueueFollower(queue.access, type="ok", tags=tag_filters(["env=prod"]))
        await follower.look()
        wanted = await queue.submit("ok", tags={"env": "prod"})
        other = await queue.submit("ok", tags={"env": "test"})
        await queue.submit("else", tags={"env": "prod"})
        told = list((await follower.look()).events)
        await queue.cancel(wanted.id)
        await queue.cancel(other.id)
        told += (await follower.look()).events
        assert [(e.what, e.id) for e in told] == [
            ("submitted", wanted.id),
            ("cancelled", wanted.id),
        ]

    simulate(main, seed=3)


def test_what_cannot_be_read_is_named_once_and_stops_nobody() -> None:
    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock())
        store = MemoryStore(bucket, clock=world.clock())
        queue = await Queue.on(store, name="q", entropy=world.entropy("q"))
        follower = QueueFollower(queue.access)
        await follower.look()
        await store.put(queue.access.layout.tasks + "notes.txt", b"by hand")
        task = await queue.submit("ok")
        heard = await follower.look()
        assert [e.id for e in heard.events] == [task.id]
        assert len(heard.notes) == 1
        assert (await follower.look()).notes == ()

    simulate(main, seed=3)
