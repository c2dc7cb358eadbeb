"""Inputs and results that are large: stored apart, fetched by themselves, told when gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.document_format import decode
from penstock.kernel.errors import (
    PayloadLost,
    Refused,
    StoreError,
    TaskFailed,
    Unavailable,
    Unsupported,
)
from penstock.queue import archive, payloads, submitter
from penstock.queue.attempt_outcomes import DEPTH_MAX, is_too_deep
from penstock.queue.client import Queue, Task
from penstock.queue.execution import pack_runner
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.ids import TaskId, day_of, payload_at, payload_path, task_at
from penstock.queue.inspection import list_tasks
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger
from penstock.queue.pack import Pack, PayloadReference
from penstock.queue.settings import Polling, WorkerSettings
from penstock.queue.worker import Worker
from penstock.store.base import NO_METADATA, REPLACE, Object, PutMode, Version, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")
LARGE = "x" * 100_000
QUICK = WorkerSettings(polling=Polling(min_seconds=0.2, max_seconds=0.5))


class Trouble(Wrapper):
    """A store that fails for payloads, and in which requests can be stopped at."""

    error: Exception | None = None
    fails = 0
    stop_at = ""

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        self._meet(key)
        return await self.inner.get(key, unless=unless)

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        self._meet(key)
        if self.stop_at and self.stop_at in key:
            raise asyncio.CancelledError
        return await self.inner.put(key, body, mode, metadata=metadata)

    def _meet(self, key: str) -> None:
        if self.error is not None and "/payloads/" in key and self.fails:
            self.fails -= 1
            raise self.error


class Bench:
    """A queue and a worker that echoes, over a store that can be made to fail."""

    def __init__(self, world: World, queue: Queue, store: Trouble, bucket: MemoryBucket) -> None:
        self.world = world
        self.clock = world.clock()
        self.queue = queue
        self.store = store
        self.bucket = bucket
        self.ran = 0
        self.worker = Worker(queue, concurrency=4, mode="shared", settings=QUICK)

        @self.worker.handler("echo")
        async def echo(task: TaskContext) -> Any:
            self.ran += 1
            return task.input

        @self.worker.handler("size")
        async def size(task: TaskContext) -> int:
            self.ran += 1
            return len(task.input)

    def payloads(self) -> list[str]:
        return [key for key in self.bucket.objects if key.startswith(LAYOUT.payloads)]

    def pack(self, task: Task) -> Pack:
        body = self.bucket.objects[LAYOUT.pack(task_at(task.id)[0])].body
        return decode(Pack, body, where="pack")

    async def archive(self, task: Task) -> None:
        at, _ = task_at(task.id)
        stored = self.bucket.objects[LAYOUT.ledger(at)]
        access = self.queue.access
        ledger = decode(Ledger, stored.body, where="ledger")
        await archive.keep(access.store, LAYOUT, [(at, ledger)], entropy=access.entropy)
        self.bucket.remove(LAYOUT.ledger(at))

    @asynccontextmanager
    async def working(self) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.worker.run(signals=False))
            yield
            self.worker.stop()


def _run(check: Callable[[Bench], Awaitable[None]]) -> Meter:
    meter = Meter()

    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock())
        store = Trouble(MeteredStore(MemoryStore(bucket, clock=world.clock()), meter))
        queue = await Queue.on(store, name="q", entropy=world.entropy("q"))
        await check(Bench(world, queue, store, bucket))

    simulate(main, seed=1)
    return meter


def test_a_large_input_is_stored_apart_before_its_pack() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("size", LARGE)
        (key,) = bench.payloads()
        assert bench.bucket.objects[key].body == b'"' + LARGE.encode() + b'"'
        pack = bench.pack(task)
        assert pack.refs == (0,)
        assert len(bytes(pack.inputs[0])) < payloads.REFERENCE_BYTES
        day = day_of(pack.submitted_ms)
        assert payload_at(key.removeprefix(LAYOUT.root)) == (day, *task_at(task.id))
        assert list(bench.bucket.objects).index(key) < list(bench.bucket.objects).index(
            LAYOUT.pack(task_at(task.id)[0])
        )

    _run(check)


def test_what_is_small_stays_in_the_pack() -> None:
    async def check(bench: Bench) -> None:
        at_most = "x" * (payloads.INLINE_BYTES_MAX - 2)
        task = await bench.queue.submit("size", at_most)
        assert bench.payloads() == []
        assert bench.pack(task).refs == ()

    _run(check)


def test_large_ones_and_small_ones_share_a_pack() -> None:
    async def check(bench: Bench) -> None:
        tasks = await bench.queue.submit_many("echo", [1, LARGE, 3, [LARGE]])
        assert bench.pack(tasks[0]).refs == (1, 3)
        async with bench.working():
            assert [await task.result(60) for task in tasks] == [1, LARGE, 3, [LARGE]]
        assert [(await task.view()).input for task in tasks] == [1, LARGE, 3, [LARGE]]
        assert len(bench.payloads()) == 4

    _run(check)


def test_results_above_their_share_are_stored_apart() -> None:
    """In a pack of a thousand a result has four kilobytes."""

    async def check(bench: Bench) -> None:
        tasks = await bench.queue.submit_many("echo", ["x" * 5_000] * 3 + [1] * 997)
        async with bench.working():
            assert await tasks[0].result(60) == "x" * 5_000
            assert await tasks[999].result(60) == 1
        assert len(bench.payloads()) == 3

    _run(check)


def test_a_task_is_shown_whole_also_from_the_archive_and_in_lists_by_reference() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("echo", LARGE)
        assert (await task.view()).input == LARGE
        async with bench.working():
            await task.result(60)
        (listed,) = (await list_tasks(bench.queue.access)).tasks
        assert (listed.input, listed.result) == (None, None)
        assert listed.input_ref is not None
        assert listed.result_ref is not None
        await bench.archive(task)
        view = await task.view()
        assert (view.input, view.result, view.problem) == (LARGE, LARGE, "")
        assert await task.result(1) == LARGE
        assert [event.what for event in await bench.queue.history(task.id)][-1] == "succeeded"

    _run(check)


def test_a_replay_has_a_payload_of_its_own() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("size", LARGE)
        async with bench.working():
            await task.result(60)
            await bench.archive(task)
            again = await bench.queue.replay(task.id)
            owners = {payload_at(key.removeprefix(LAYOUT.root)) for key in bench.payloads()}
            assert {owner and owner.at for owner in owners} == {
                task_at(task.id)[0],
                task_at(again.id)[0],
            }
            assert await again.result(60) == len(LARGE)

    _run(check)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, "is gone"),
        (b'"short"', "has 7 bytes and not 100,002: it is damaged"),
        (b'"' + b"y" * 100_000 + b'"', "another checksum"),
    ],
)
def test_a_payload_that_is_gone_or_damaged_fails_the_task_once(
    body: bytes | None, said: str
) -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("size", LARGE)
        other = await bench.queue.submit("size", "fine")
        (key,) = bench.payloads()
        if body is None:
            bench.bucket.remove(key)
        else:
            bench.bucket.write(key, body, {})
        assert said in (await task.view()).problem
        async with bench.working():
            with pytest.raises(TaskFailed, match="payloads/") as failed:
                await task.result(60)
            assert await other.result(60) == 4
        assert failed.value.error == "PayloadLost"
        assert said in failed.value.message
        view = await task.view()
        assert (view.status, view.attempt, view.input) == ("failed", 1, None)
        assert bench.ran == 1
        with pytest.raises(PayloadLost, match="payloads/"):
            await bench.queue.replay(task.id)

    _run(check)


def test_a_result_that_is_gone_is_told() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("echo", LARGE)
        async with bench.working():
            await task.result(60)
        view = await task.view()
        assert view.result_ref is not None
        bench.bucket.remove(LAYOUT.payload(view.result_ref.key))
        with pytest.raises(PayloadLost, match="is gone"):
            await task.result(1)
        view = await task.view()
        assert (view.status, view.input, view.result) == ("succeeded", LARGE, None)
        assert "is gone" in view.problem
        # Its input is there: it can be replayed all the same.
        assert await bench.queue.replay(task.id) != task

    _run(check)


def test_a_store_that_is_away_for_a_while_costs_no_attempt() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("echo", LARGE)
        bench.store.error, bench.store.fails = Unavailable("away"), 3
        async with bench.working():
            assert await task.result(60) == LARGE
            assert (await task.view()).attempt == 1
            again = await bench.queue.submit("echo", LARGE)
            while not bench.ran:
                await bench.clock.sleep(0.1)
            bench.store.fails = 3
            assert await again.result(60) == LARGE
        assert bench.ran == 2

    _run(check)


def test_an_input_that_cannot_be_had_for_long_is_given_back() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("echo", LARGE)
        bench.store.error, bench.store.fails = Unavailable("away"), 10**9
        async with bench.working():
            await bench.clock.sleep(pack_runner.FETCH_SECONDS + 5)
            said = [event.what for event in await bench.queue.history(task.id)]
            assert said[:3] == ["submitted", "claimed", "given back"]
            bench.store.fails = 0
            assert await task.result(200) == LARGE
        assert bench.ran == 1

    _run(check)


@pytest.mark.parametrize("error", [Refused("not allowed"), Unsupported("not here")])
def test_an_input_that_the_store_refuses_is_asked_for_as_patiently(error: StoreError) -> None:
    """Given back at once, it would be claimed again at once, for as long as it is refused."""

    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("echo", LARGE)
        bench.store.error, bench.store.fails = error, 10**9
        async with bench.working():
            await bench.clock.sleep(pack_runner.FETCH_SECONDS / 2)
            said = [event.what for event in await bench.queue.history(task.id)]
            assert said == ["submitted", "claimed"]
            assert 10**9 - bench.store.fails < 20
            await bench.clock.sleep(pack_runner.FETCH_SECONDS / 2 + 5)
            said = [event.what for event in await bench.queue.history(task.id)]
            assert said[:3] == ["submitted", "claimed", "given back"]
            bench.store.fails = 0
            assert await task.result(200) == LARGE
        assert bench.ran == 1

    _run(check)


def test_a_result_that_the_store_refuses_fails_the_task() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("echo", ["x" * 30_000] * 2)
        bench.store.error, bench.store.fails = Refused("not allowed"), 10**9
        small = await bench.queue.submit("echo", "small")
        worker = bench.worker

        @worker.handler("make")
        async def make(task: TaskContext) -> str:
            return LARGE

        made = await bench.queue.submit("make")
        async with bench.working():
            assert await task.result(60) == ["x" * 30_000] * 2
            assert await small.result(60) == "small"
            with pytest.raises(TaskFailed, match="100,002 bytes, and the store says: not allowed"):
                await made.result(60)

    _run(check)


def test_a_result_that_is_nested_too_deep_is_refused_large_or_not() -> None:
    async def check(bench: Bench) -> None:
        @bench.worker.handler("deep")
        async def deep(task: TaskContext) -> Any:
            value: Any = LARGE
            for _ in range(DEPTH_MAX + 1):
                value = [value]
            return value

        task = await bench.queue.submit("deep")
        async with bench.working():
            with pytest.raises(TaskFailed, match="nested more than 100"):
                await task.result(60)
        assert bench.payloads() == []

    _run(check)


def test_a_crash_between_payload_and_pack_leaves_a_payload_of_nobody() -> None:
    async def check(bench: Bench) -> None:
        bench.store.stop_at = "/tasks/"
        with pytest.raises(asyncio.CancelledError):
            await bench.queue.submit("size", LARGE)
        assert len(bench.payloads()) == 1
        assert (await list_tasks(bench.queue.access)).tasks == ()

    _run(check)


def test_a_payload_that_cannot_be_stored_submits_nothing() -> None:
    async def check(bench: Bench) -> None:
        bench.store.error, bench.store.fails = Refused("not allowed"), 1
        with pytest.raises(Refused):
            await bench.queue.submit_many("size", [LARGE, LARGE])
        assert (await list_tasks(bench.queue.access)).tasks == ()

    _run(check)


def test_what_takes_too_long_to_send_is_not_submitted() -> None:
    async def check(bench: Bench) -> None:
        put = bench.store.inner.put

        async def slow(key: str, *args: Any, **named: Any) -> Version:
            if "/payloads/" in key:
                await bench.clock.sleep(250)
            return await put(key, *args, **named)

        vars(bench.store.inner)["put"] = slow
        with pytest.raises(Unavailable, match="nothing of their pack was submitted"):
            await bench.queue.submit("size", LARGE)
        assert (await list_tasks(bench.queue.access)).tasks == ()

    _run(check)


def test_the_duplicate_of_a_key_sends_no_payload() -> None:
    async def check(bench: Bench) -> None:
        first = await bench.queue.submit("size", LARGE, key="k")
        assert await bench.queue.submit("size", LARGE, key="k") == first
        assert len(bench.payloads()) == 1
        async with bench.working():
            assert await first.result(60) == len(LARGE)
            assert await bench.queue.submit("size", LARGE, key="k") == first
        assert len(bench.payloads()) == 1
        # Its key is free after a day: the next life has another payload.
        await bench.clock.sleep(86_400 + 600)
        assert await bench.queue.submit("size", LARGE, key="k") == first
        assert len(bench.payloads()) == 2
        assert (await first.view()).status == "ready"

    _run(check)


def test_payloads_of_many_packs_are_sent_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitter, "PAYLOADS_OF_A_PACK_BYTES_MAX", 250_000)

    async def check(bench: Bench) -> None:
        tasks = await bench.queue.submit_many("size", [LARGE] * 10)
        packs = {task_at(task.id)[0] for task in tasks}
        assert sorted(at.count for at in packs) == [2] * 5
        assert [task_at(task.id)[1] for task in tasks] == [0, 1] * 5

    _run(check)


def test_small_tasks_cost_nothing_and_large_ones_a_put_and_a_get() -> None:
    async def check(bench: Bench) -> None:
        small = await bench.queue.submit("size", "small")
        large = await bench.queue.submit("size", LARGE)
        async with bench.working():
            await small.result(60)
            await large.result(60)

    meter = _run(check)
    assert meter.billed["payload", Kind.PUT] == meter.billed["payload", Kind.GET] == 1


@pytest.mark.parametrize(
    "path",
    [
        "payloads/../config.json",
        "tasks/000/x",
        "payloads/2030-01-01/nobody/0123456789abcdefghjkmnpq",
        "payloads/2030-01-01/now.000.0000000000123456789abcde.1.0.t/../x",
        "",
    ],
)
def test_a_reference_to_anything_else_is_not_followed(path: str) -> None:
    async def check(bench: Bench) -> None:
        access = bench.queue.access
        found = payloads.Payloads(access.store, LAYOUT, access.entropy)
        with pytest.raises(PayloadLost, match="not the key of a payload"):
            await found.fetch(PayloadReference(path, 1, ""))

    _run(check)


def test_keys_of_payloads_are_read_as_they_are_made() -> None:
    async def check(bench: Bench) -> None:
        task = TaskId("key.0ab.0123456789abcdefghjkmnpq.1.0.resize")
        path = payload_path(
            task, submitted_ms=1_900_000_000_000, entropy=bench.queue.access.entropy
        )
        assert payload_at(path) == ("2030-03-17", *task_at(task))
        assert payload_at(path + "x") is None
        assert payload_at(path.replace("key.", "keys.")) is None

    _run(check)


@given(
    st.recursive(
        st.none() | st.text('[]{}"\\a'),
        lambda inner: st.lists(inner) | st.dictionaries(st.text('[{"\\'), inner),
        max_leaves=30,
    ),
    st.integers(90, 110),
)
def test_depth_is_told_whatever_is_in_the_strings(value: Any, more: int) -> None:
    def depth(inner: Any) -> int:
        inside = inner.values() if isinstance(inner, dict) else inner
        if isinstance(inner, str) or inner is None:
            return 0
        return 1 + max(map(depth, inside), default=0)

    deep = value
    for _ in range(more):
        deep = [deep]
    for each in (value, deep, {"a": [deep, deep]}):
        assert is_too_deep(msgspec.json.encode(each)) == (depth(each) > DEPTH_MAX)
