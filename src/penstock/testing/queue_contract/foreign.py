"""The contract of what does not fit: wrong input, types nobody handles, objects of others."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from penstock.kernel.errors import InvalidInput, NewerFormat, NotOurs
from penstock.kernel.wire import encode
from penstock.queue.places import task_at
from penstock.queue.running.handlers import TaskContext
from penstock.queue.submission import INPUT_BYTES_MAX
from penstock.store.base import CREATE, REPLACE
from penstock.testing.queue_contract.bench import RESULT_SECONDS, Bench, Check, heard
from penstock.testing.store_contract.check import refused

_UNHANDLED: Final = 480
_AT_ONCE: Final = 24
_LARGE_BYTES: Final = 300_000


async def wrong_input_is_refused_and_nothing_is_written(bench: Bench) -> None:
    queue = await bench.queue()
    before = await bench.keys(queue)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ({1, 2}, object(), b"bytes", float("nan"), "\ud800", {"a": [object()]}, deep):
        with refused(InvalidInput, what=f"an input of {type(value).__name__}"):
            await queue.submit("work", value)
    with refused(InvalidInput, what="an input that is too large"):
        await queue.submit("work", "x" * INPUT_BYTES_MAX)
    with refused(InvalidInput, what="a batch with one wrong input"):
        await queue.submit_many("work", [1, 2, object()])
    for name in ("", "a/b", ".hidden", "a b", "x" * 101, "ä", "a~b", "t.ledger"):
        with refused(InvalidInput, what=f"the type {name[:20]!r}"):
            await queue.submit(name, 1)
        with refused(InvalidInput, what=f"the type {name[:20]!r} with a key"):
            await queue.submit(name, 1, key="k")
    for key in ("", "k" * 1001, "\ud800"):
        with refused(InvalidInput, what=f"the key {key[:20]!r}"):
            await queue.submit("work", 1, key=key)
    for delay in (-1.0, float("inf"), float("nan"), 1e12):
        with refused(InvalidInput, what=f"a delay of {delay}"):
            await queue.submit("work", 1, delay=delay)
    assert await queue.submit_many("work", []) == []
    assert await bench.keys(queue) == before


async def a_large_input_and_a_large_result_arrive_whole(bench: Bench) -> None:
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())
    largest = "x" * _LARGE_BYTES

    @worker.handler("large")
    async def large(task: TaskContext) -> object:
        return [len(task.input), task.input == largest]

    @worker.handler("echo")
    async def echo(task: TaskContext) -> object:
        return task.input

    async with bench.crew(worker):
        tasks = await queue.submit_many("large", [largest] * 5)
        for task in tasks:
            assert await task.result(timeout=RESULT_SECONDS) == [len(largest), True]
        assert (await queue.get(tasks[4].id)).input == largest
        echoed = await queue.submit("echo", largest, key="large")
        assert await echoed.result(timeout=RESULT_SECONDS) == largest
        view = await queue.get(echoed.id)
        assert view.input == view.result == largest
        assert view.input_ref is not None
        assert view.result_ref is not None


async def a_type_without_a_handler_is_never_claimed_and_blocks_nobody(bench: Bench) -> None:
    queue = await bench.queue()
    worker = bench.worker(await bench.queue(), concurrency=2)

    @worker.handler("known")
    async def known(task: TaskContext) -> object:
        return task.input

    for _ in range(0, _UNHANDLED, _AT_ONCE):
        await asyncio.gather(*(queue.submit("unknown") for _ in range(_AT_ONCE)))
    pack = await queue.submit_many("unknown", [None] * 3)
    task = await queue.submit("known", "through")
    async with bench.crew(worker):
        assert await task.result(timeout=RESULT_SECONDS) == "through"
    assert (await queue.get(pack[0].id)).status == "ready"
    # Of a type that is direct, what nobody could be told of is where things become due.
    places = [*await bench.keys(queue, "tasks/"), *await bench.keys(queue, "ready/")]
    left = [key for key in places if "unknown" in key]
    assert len(left) == _UNHANDLED + 1
    assert not any(key.endswith(".ledger") for key in left)


async def objects_of_others_are_left_alone(bench: Bench) -> None:
    """Keys that mean nothing here, and packs that cannot be read: the rest is served."""
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())

    @worker.handler("work")
    async def work(task: TaskContext) -> object:
        return task.input

    root = queue.access.layout.root
    store = queue.access.store
    example = task_at((await queue.submit("work", "example")).id)[0].path
    name = example.rpartition("/")[2]
    theirs = {
        "notes.txt": b"by hand",
        "tasks/000/notes.txt": b"by hand",
        "tasks/zzz/notes.txt": b"by hand",
        "tasks/000/" + name: b"no pack",
        "tasks/001/" + name: b'{"penstock":"pack/99","type":"work","inputs":{"new":"form"}}',
        "ready/00000001/000/" + name.replace("~1~", "~2~"): b'{"penstock":"image/1"}',
        "keyed/000/notes.txt": b"by hand",
        "workers/notes.txt": b"by hand",
        "shard-leases/notes.txt": b"by hand",
    }
    for key, body in theirs.items():
        await store.put(root + key, body, CREATE)
    with heard() as said:
        async with bench.crew(worker):
            tasks = [await queue.submit("work", 1), await queue.submit("work", 2, key="k")]
            tasks += await queue.submit_many("work", [3, 4])
            results = [await task.result(timeout=RESULT_SECONDS) for task in tasks]
            assert results == [1, 2, 3, 4]
            await bench.until(
                lambda: all(any(what in line for line in said) for what in ("format 99", "notes")),
                what="the log names what is left alone",
            )
    for key, body in theirs.items():
        found = await store.get(root + key)
        assert found is not None
        assert found.body == body, f"{key} is left as it is"


async def a_queue_of_a_newer_format_is_not_opened(bench: Bench) -> None:
    queue = await bench.queue()
    config = queue.access.layout.config
    store = queue.access.store
    body = encode(queue.access.config)
    await store.put(config, body.replace(b"queue/1", b"queue/2"), REPLACE)
    with refused(NewerFormat, what="to open a queue of a newer format"):
        await bench.queue()
    await store.put(config, b"by hand", REPLACE)
    with refused(NotOurs, what="to open a queue whose settings are not ours"):
        await bench.queue()
    await store.put(config, body, REPLACE)
    assert (await bench.queue()).access.config == queue.access.config


CHECKS: Final[tuple[Check, ...]] = (
    wrong_input_is_refused_and_nothing_is_written,
    a_large_input_and_a_large_result_arrive_whole,
    a_type_without_a_handler_is_never_claimed_and_blocks_nobody,
    objects_of_others_are_left_alone,
    a_queue_of_a_newer_format_is_not_opened,
)
