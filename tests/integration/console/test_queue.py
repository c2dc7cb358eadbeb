"""The page of the queues: what is in the bucket, who holds what, what died, and its levers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.document_format import encode
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import Unavailable
from penstock.queue.client import Queue
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.layout import QueueLayout
from penstock.queue.settings import DiscoveryMode, Polling, WorkerSettings
from penstock.queue.shards.registry import OwnerRole, Registration
from penstock.queue.worker import Worker
from penstock.store.base import ObjectStore, Page, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from tests.integration.console.looking import Look, Visitor, words

NASTY = "<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to wait for a first look."""
    monkeypatch.setattr("penstock.dispatcher.bucket_queues.SNAPSHOT_FIRST_SECONDS", 0.0)


def _store() -> ObjectStore:
    clock = SystemClock()
    return MemoryStore(MemoryBucket(clock), clock=clock)


async def _queue(visitor: Visitor, name: str = "images") -> Queue:
    store = visitor.parts.store
    assert store is not None
    return await Queue.on(store, name=name, entropy=seeded_entropy(3))


@asynccontextmanager
async def _failing(queue: Queue) -> AsyncIterator[None]:
    """A worker beside that fails all tasks of the type `bad`."""
    settings = WorkerSettings(polling=Polling(min_seconds=0.02, max_seconds=0.1))
    worker = Worker(queue, concurrency=8, name="ada", mode=DiscoveryMode.SHARED, settings=settings)

    @worker.handler("bad", retry=Retry(attempts=1))
    async def bad(task: TaskContext) -> None:
        raise ValueError(f"it was {task.input}")

    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run(signals=False))
        yield
        worker.stop()


async def _settled(queue: Queue, ids: list[str]) -> None:
    async with asyncio.timeout(30):
        for each in ids:
            with pytest.raises(Exception, match="it was"):
                await queue.result(each, timeout=20)


async def _register(queue: Queue, name: str, **fields: Any) -> None:
    now = (await queue.access.store.now()).latest
    said = {"role": OwnerRole.OWNER, "expires_ms": int(now * 1000) + 60_000, "of": 64, **fields}
    document = Registration(**said).stamped(writer="w", write="1")
    await queue.access.store.put(queue.access.layout.worker(name), encode(document))


def test_a_bucket_without_queues_says_how_to_make_one(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        status, page = await visitor.get("/queue")
        assert status == 200
        assert "There is no queue in this bucket yet" in words(page)
        assert "penstock queue submit" in words(page)
        status, page = await visitor.get("/queue?name=none")
        assert status == 404
        assert "There is no queue 'none' in this store." in words(page)
        status, page = await visitor.get(f"/queue?name={NASTY}")
        assert status == 404
        assert NASTY not in page

    console(story, store=_store())


def test_a_dispatcher_without_a_store_says_so(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        status, page = await visitor.get("/queue")
        assert status == 200
        assert "This dispatcher has no store." in words(page)
        _, page = await visitor.post("/queue/pause", {"name": "images", "to": "/queue"})
        assert "This dispatcher has no store." in words(page)

    console(story)


def test_a_queue_is_shown_with_what_waits_and_what_a_look_costs(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        queue = await _queue(visitor)
        await _queue(visitor, "wake-ups")
        await queue.submit_many("resize", list(range(300)))
        await queue.submit("later", delay=7200)
        status, page = await visitor.get("/queue")
        assert status == 200
        said = words(page)
        assert "Wake-ups Messages with which the dispatcher wakes up workers" in said
        assert "The tasks themselves are on Tasks" in said
        assert "so there are fewer wake-ups than tasks" in said
        assert "registered" not in said
        assert "Estimated cost on S3 The store of this installation is not on S3" in said
        assert '<a href="/queue?name=images">images</a>' in page
        status, page = await visitor.get("/queue?name=images")
        said = words(page)
        assert status == 200
        assert "Waiting 300 ready to start" in said
        assert "Delayed 1 due later" in said
        assert "resize 300 0 0 0" in said
        assert "&lt; 10 s: 300 waiting and 0 in progress" in page
        assert "None of the 64 shards has an owner." in said
        assert "The last refresh took" in said
        assert "At most one refresh per 5 s, shared by all viewers" in said
        assert "No dead letters." in said
        assert "style=" not in page

    console(story, store=_store())


def test_shards_are_shown_with_their_holders_and_workers_with_what_they_own(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        queue = await _queue(visitor)
        await _register(queue, "ada", shards=dict.fromkeys(range(40), 1), host=NASTY, pid=7)
        await _register(queue, "bob", shards=dict.fromkeys(range(40, 60), 1), handles=("resize",))
        await _register(queue, "cid", help_wanted=(NASTY,), handles=(NASTY,))
        _, page = await visitor.get("/queue?name=images")
        said = words(page)
        assert page.count('data-key="shard-') == 64
        assert 'aria-label="Shard 41, owned by bob, 0 tasks unsettled"' in page
        assert 'href="#worker-bob"' in page
        assert 'id="worker-bob"' in page
        assert "64 shards, 2 owners, 4 shards unowned." in page
        assert "A ada 40" in said
        assert "0\N{EN DASH}39 40 of 64" in said
        assert "3 shard owners:" in said
        assert NASTY not in page
        assert said.count(NASTY) == 3

    console(story, store=_store())


def test_dead_letters_tell_why_and_are_replayed_once(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        queue = await _queue(visitor)
        ids = [(await queue.submit("bad", f"{NASTY} {each}")).id for each in range(3)]
        async with _failing(queue):
            await _settled(queue, [str(each) for each in ids])
        _, page = await visitor.get("/queue?name=images")
        assert NASTY not in page
        assert words(page).count(f"ValueError: it was {NASTY}") >= 3
        assert "Dead letters 3 not replayed" in words(page)
        to = "/queue?name=images"
        one = {"name": "images", "id": str(ids[0]), "to": to}
        _, page = await visitor.post("/queue/replay", one)
        assert "1 task is submitted again." in words(page)
        assert "Dead letters 2 not replayed" in words(page)
        _, page = await visitor.post("/queue/replay", {"name": "images", "to": to})
        assert "2 tasks are submitted again." in words(page)
        assert "Dead letters 0 not replayed" in words(page)
        assert "bad 3 0 0 3" in words(page)
        _, page = await visitor.post("/queue/replay", {"name": "images", "to": to})
        assert "All dead letters were replayed already." in words(page)
        _, page = await visitor.post("/queue/replay", {"name": "images", "id": NASTY, "to": to})
        assert "is not the id of a task" in words(page)
        assert NASTY not in page

    console(story, store=_store())


def test_a_queue_and_a_type_are_paused_drained_and_resumed(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        queue = await _queue(visitor)
        await queue.submit("resize")
        to = "/queue?name=images"
        whole = {"name": "images", "to": to}
        typed = {**whole, "type": "resize"}
        _, page = await visitor.post("/queue/pause", {**whole, "reason": f"the lens {NASTY}"})
        assert "The queue images is paused: workers notice within 10 seconds." in words(page)
        assert f"Reason: the lens {NASTY}" in words(page)
        assert NASTY not in page
        _, page = await visitor.post("/queue/drain", typed)
        assert "The type resize of the queue images is draining" in words(page)
        held = {each.type: each for each in await queue.control.state()}
        assert held[None].paused_at
        assert held[None].reason == f"the lens {NASTY}"
        assert held["resize"].drained_at
        assert not held["resize"].paused_at
        await visitor.post("/queue/resume", typed)
        _, page = await visitor.post("/queue/resume", whole)
        assert "The queue images is resumed." in words(page)
        assert await queue.control.state() == ()
        _, page = await visitor.post("/queue/pause", {**whole, "type": "a b"})
        assert "'a b' is not the name of a type." in words(page)
        _, page = await visitor.post("/queue/pause", {"name": "none", "to": to})
        assert "There is no queue 'none' in this store." in words(page)
        assert QueueLayout("none").config not in await _keys(visitor)

    console(story, store=_store())


async def _keys(visitor: Visitor) -> list[str]:
    store = visitor.parts.store
    assert store is not None
    return [each.key for each in (await store.list("queues/")).entries]


def test_who_may_only_look_has_no_levers(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        queue = await _queue(visitor)
        await queue.submit("resize")
        await visitor.sign_in("look")
        _, page = await visitor.get("/queue?name=images")
        assert "<button" in page
        assert '<button class="">' not in page
        status, _ = await visitor.post("/queue/pause", {"name": "images"})
        assert status == 403
        assert await queue.control.state() == ()

    console(story, store=_store(), api_token="steer", viewer_token="look")


class _Away(Wrapper):
    """A store that answers to nobody."""

    async def list(self, *_: Any, **__: Any) -> Page:
        raise Unavailable(f"The store at {NASTY} does not answer.")


def test_a_store_that_is_away_is_told_on_the_page(console: Look) -> None:
    store = _store()

    async def story(visitor: Visitor) -> None:
        await Queue.on(store, name="images", entropy=seeded_entropy(3))
        status, page = await visitor.get("/queue?name=images")
        assert status == 200
        assert "does not answer." in words(page)
        assert NASTY not in page

    console(story, store=_Away(store))


def test_what_is_much_does_not_make_the_page_large(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        queue = await _queue(visitor)
        for number in range(120):
            await queue.submit(f"type-{number:03}", number)
        await queue.reshard(4096)
        for number in range(110):
            shards = dict.fromkeys(range(number * 30, number * 30 + 30), 1)
            await _register(queue, f"worker-{number:03}", shards=shards, of=4096, era=1)
        for number in range(60):
            await _queue(visitor, f"other-{number:02}")
        status, page = await visitor.get("/queue?name=images")
        assert status == 200
        assert len(page) < 400_000
        assert page.count('data-key="shard-') == 256
        assert page.count('data-key="type-') == 50
        assert page.count('<tr id="worker-') == 100
        assert "And 70 more: penstock queue stats --queue images" in words(page)
        assert "And 10 more: penstock queue stats --queue images" in words(page)
        assert "Each cell is 16 shards." in words(page)
        assert page.count('href="/queue?name=') <= 31

    console(story, store=_store())
