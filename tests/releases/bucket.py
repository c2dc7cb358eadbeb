"""A bucket as a release leaves it: a queue in all of its states, and what datasets say.

`filled` has producers and workers of this release at work in virtual time, stops them as a crash
does, and returns every object. `opened` makes a bucket of what was kept, at the time when it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from penstock.datasets import manifest as manifests
from penstock.datasets.projection import CurrentDataset, CurrentPart, CurrentPartition
from penstock.datasets.schema import Column
from penstock.kernel.document_format import encode
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.inspection import run_monitor
from penstock.queue.settings import DiscoveryMode, Polling, WorkerSettings
from penstock.queue.worker import Worker
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.s3.backend import RECORD, DeletesRecord
from penstock.store.tombstoned import Tombstone
from penstock.testing.virtual import World, simulate
from tests.releases.recorded import Stored

QUEUE: Final = "work"
QUICK: Final = WorkerSettings(polling=Polling(min_seconds=0.2, max_seconds=0.5))
LARGE: Final = "x" * 66_000
GENERATION: Final = "8d4f8a2e-0d0c-4e0e-9d3f-6a1b2c3d4e5f"
ATTEMPT: Final = "12-1-0123456789abcdef01234567"


def filled() -> Sequence[Stored]:
    """What this release stores."""
    return simulate(_fill, seed="a release")


async def _fill(world: World) -> Sequence[Stored]:
    bucket = MemoryBucket(world.clock())
    store = MemoryStore(bucket, clock=world.clock())
    config = QueueConfig(shards=4, direct=("note",))
    queue = await Queue.on(store, name=QUEUE, entropy=world.entropy("queue"), config=config)
    await _define(queue)
    await _ended(world, queue)
    # The archive takes what has been settled for some minutes.
    await world.clock().sleep(900)
    await run_monitor(queue.access, tell=lambda _: None, stopping=asyncio.Event(), passes_max=1)
    await _waiting(queue)
    await _abandoned(world, queue)
    for each in datasets():
        await store.put(each.key, each.body)
    # As where deletes are by tombstone; nobody looks for either here.
    bucket.write(RECORD, encode(DeletesRecord()), {})
    bucket.write("deleted/object", encode(Tombstone(nonce="0" * 60)), {})
    return [
        Stored(key=key, body=each.body, modified=each.modified, metadata=each.metadata)
        for key, each in sorted(bucket.objects.items())
    ]


async def _define(queue: Queue) -> None:
    await queue.limits.set("api", concurrency=2)
    await queue.schedules.add("hourly", cron="0 * * * *", type="note", input={"hour": True})
    await queue.pause("held", reason="a release")


async def _ended(world: World, queue: Queue) -> None:
    """Tasks that succeed, fail, are cancelled and replayed, and a batch that ends."""
    await queue.submit("note", {"n": 1}, tags={"of": "before"})
    await queue.submit("note", {"text": LARGE})
    bad = await queue.submit("fail", {"n": 2})
    dropped = await queue.submit("note", {"n": 3}, delay=3600)
    await dropped.cancel()
    await queue.batch("note", [{"n": 4}, {"n": 5}], then=("note", {"n": 6}))
    async with asyncio.timeout(600), asyncio.TaskGroup() as group:
        worker = worker_of(world, queue, name="first")
        running = group.create_task(worker.run(signals=False))
        await queue.wait_until_empty("note", seconds=300)
        with suppress(Exception):
            await bad.result(timeout=60)
        await queue.replay(bad.id)
        await world.clock().sleep(400)
        worker.stop()
        await running


async def _waiting(queue: Queue) -> None:
    """Tasks that a later release has to find and do."""
    await queue.submit("note", {"n": 10})
    await queue.submit_many("note", [{"n": 11}, {"n": 12}, {"n": 13}], priority=3)
    await queue.submit("note", {"n": 14}, key="fourteen", limit="api")
    await queue.submit("note", {"n": 15}, delay=120, tags={"when": "later"})
    await queue.submit("note", {"n": 16, "text": LARGE})
    await queue.submit("held", {"n": 17})
    async with queue.new_batch(then=("note", {"n": 20})) as batch:
        await batch.submit("part", {"n": 18})
        await batch.submit("note", {"n": 19})


async def _abandoned(world: World, queue: Queue) -> None:
    """A worker of each kind that dies, the one while it runs a task of which it has written."""
    await queue.submit("stick", {"n": 30})
    for mode in (DiscoveryMode.LEASED, DiscoveryMode.DIRECT):
        worker = worker_of(world, queue, name=f"dead-{mode}", mode=mode, types=("stick", "part"))
        with suppress(TimeoutError):
            async with asyncio.timeout(20):
                await worker.run(signals=False)


def worker_of(
    world: World,
    queue: Queue,
    *,
    name: str,
    mode: DiscoveryMode = DiscoveryMode.LEASED,
    types: Sequence[str] = ("note", "fail"),
    done: list[Any] | None = None,
) -> Worker:
    """A worker that does these types; `done` is told of what it has noted."""
    worker = Worker(queue, mode=mode, name=name, settings=QUICK)

    async def note(task: TaskContext) -> int:
        if done is not None:
            done.append(task.input)
        return 1

    async def stick(_: TaskContext) -> None:
        await world.clock().sleep(10_000)

    for kind, function in (("note", note), ("part", note), ("fail", _failing()), ("stick", stick)):
        if kind in types:
            worker.handler(kind, retry=Retry(attempts=2, first_seconds=1.0))(function)
    return worker


def _failing() -> Callable[[TaskContext], Awaitable[None]]:
    """A handler that fails, in a file of nobody's machine: where it failed is stored."""
    names: dict[str, Any] = {}
    text = "async def fail(task):\n    raise ValueError('It is broken.')\n"
    exec(compile(text, "handlers.py", "exec"), names)
    failing: Callable[[TaskContext], Awaitable[None]] = names["fail"]
    return failing


def opened(world: World, every: Sequence[Stored]) -> MemoryBucket:
    """A bucket with these objects, as old as they were."""
    bucket = MemoryBucket(world.clock())
    for each in every:
        bucket.write(each.key, each.body, each.metadata)
        bucket.objects[each.key] = replace(bucket.objects[each.key], modified=each.modified)
    return bucket


def kept_at(every: Sequence[Stored]) -> float:
    """When they were kept."""
    return max(each.modified for each in every)


def datasets() -> Sequence[Stored]:
    """A partition of a dataset: its manifest, and what readers are told of it."""
    file = manifests.File(name="part-0.parquet", rows=3, bytes=100, sha256="ab" * 32)
    read = manifests.ManifestInput(
        input="raw", dataset="raw", generation=GENERATION, location="s3://bucket/raw", revision=1
    )
    made = manifests.Manifest(
        dataset="sales",
        generation=GENERATION,
        job="clean",
        task_id=12,
        attempt=1,
        partition_key="2026-01-01",
        start=0,
        end=86_400_000,
        rows=3,
        bytes=100,
        columns=(Column("id", "bigint", is_nullable=False), Column("name", "string")),
        files=(file,),
        inputs=(read,),
    )
    body = manifests.encode(made)
    folder = f"datasets/sales/{GENERATION}/2026-01-01"
    part = CurrentPart(
        location=f"s3://bucket/lake/{folder}/{ATTEMPT}",
        manifest=manifests.digest(body),
        rows=3,
        bytes=100,
    )
    partition = CurrentPartition(
        dataset="sales",
        generation=GENERATION,
        partition_key="2026-01-01",
        start=0,
        end=86_400_000,
        revision=2,
        parts=(part,),
    )
    current = CurrentDataset(dataset="sales", generation=GENERATION, revision=1)
    return [
        Stored(key=f"{folder}/{ATTEMPT}/manifest.json", body=body, modified=0.0, metadata={}),
        Stored(key=partition.key, body=encode(partition), modified=0.0, metadata={}),
        Stored(key=current.key, body=encode(current), modified=0.0, metadata={}),
    ]
