"""The queue as its users see it: what they are told of tasks, and what a key does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec import Raw

from penstock.kernel.clock import SystemClock
from penstock.kernel.document_format import decode, encode
from penstock.kernel.errors import (
    InvalidInput,
    NotOurs,
    NotSettled,
    QueueNotFound,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
)
from penstock.queue import archive
from penstock.queue.attempt_outcomes import AttemptOutcome, Failed, Retried, Succeeded
from penstock.queue.client import Queue, Task
from penstock.queue.config import QueueConfig
from penstock.queue.ids import keyed_pack, task_at
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger, LedgerFailure
from penstock.queue.pack import Pack
from penstock.queue.pack_session import ListedPack, PackSession
from penstock.queue.transitions import LedgerClaim
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Meter, MeteredStore
from penstock.store.opening import Opening
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")
KEY_SECONDS = 3600


class Bench:
    """A queue, and somebody who claims and settles its tasks."""

    def __init__(self, world: World, bucket: MemoryBucket, queue: Queue, meter: Meter) -> None:
        self.world = world
        self.clock = world.clock()
        self.bucket = bucket
        self.queue = queue
        self.meter = meter

    @property
    def lived(self) -> float:
        """Seconds since the beginning."""
        return self.world.now() - self.world.epoch

    async def claim(self, task: Task, *, lease_ms: int = 30_000) -> PackSession:
        at, _ = task_at(task.id)
        access = self.queue.access
        session = PackSession(access.store, LAYOUT, at, entropy=access.entropy)
        seen = None
        if at.place != "key":
            stored = self.bucket.objects[LAYOUT.pack(at)]
            seen = ListedPack(stored.version, stored.modified, has_ledger=True)
        assert await session.claim(LedgerClaim("c", "w", lease_ms, at.count, 3), seen) is not None
        return session

    async def end(self, task: Task, ending: AttemptOutcome | None = None) -> None:
        """Claim the pack of a task, and settle all of it."""
        at, _ = task_at(task.id)
        session = await self.claim(task)
        await session.settle({n: ("c", ending or Succeeded()) for n in range(at.count)})

    def pack(self, task: Task) -> Pack:
        body = self.bucket.objects[LAYOUT.pack(task_at(task.id)[0])].body
        return decode(Pack, body, where="pack")

    def has_pack(self, task: Task) -> bool:
        return LAYOUT.pack(task_at(task.id)[0]) in self.bucket.objects

    def pointers(self) -> list[str]:
        return [key for key in self.bucket.objects if LAYOUT.read_pointer(key)]

    async def archive(self, task: Task) -> None:
        """What the monitor does in the end."""
        at, _ = task_at(task.id)
        stored = self.bucket.objects[LAYOUT.ledger(at)]
        ledger = decode(Ledger, stored.body, where="ledger")
        access = self.queue.access
        await archive.keep(access.store, LAYOUT, [(at, ledger)], entropy=access.entropy)
        self.bucket.remove(LAYOUT.ledger(at))


def _run(check: Callable[[Bench], Awaitable[None]], *, seed: int = 1) -> None:
    async def main(world: World) -> None:
        meter = Meter()
        bucket = MemoryBucket(world.clock())
        store = MeteredStore(MemoryStore(bucket, clock=world.clock()), meter)
        config = QueueConfig(key_seconds=KEY_SECONDS)
        queue = await Queue.on(store, name="q", entropy=world.entropy("q"), config=config)
        await check(Bench(world, bucket, queue, meter))

    simulate(main, seed=seed)


def test_a_task_is_shown_from_submit_to_end() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", {"n": 1})
        view = await task.view()
        assert (view.id, view.status, view.input) == (task.id, "ready", {"n": 1})
        assert (view.attempt, view.key, view.submitted_at) == (0, None, bench.world.epoch)
        session = await bench.claim(task)
        view = await task.view()
        assert (view.status, view.attempt, view.input) == ("running", 1, {"n": 1})
        retried = Retried(LedgerFailure("OSError", "m"), int(bench.world.now() * 1000) + 5000)
        await session.settle({0: ("c", retried)})
        view = await task.view()
        assert (view.status, view.error) == ("retrying", "OSError")
        assert view.due_at == pytest.approx(bench.world.epoch + 5, abs=0.01)
        await bench.clock.sleep(6)
        await bench.end(task)
        view = await task.view()
        assert (view.status, view.attempt, view.is_settled) == ("succeeded", 2, True)

    _run(check)


def test_a_delayed_task_is_delayed_until_it_is_due() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", delay=90)
        assert (await task.view()).status == "delayed"
        assert (await task.view()).due_at == pytest.approx(bench.world.epoch + 90, abs=0.01)
        await bench.clock.sleep(91)
        assert (await task.view()).status == "ready"

    _run(check)


def test_tasks_of_one_pack_are_told_apart() -> None:
    async def check(bench: Bench) -> None:
        tasks = await bench.queue.submit_many("t", ["a", "b", "c"])
        session = await bench.claim(tasks[0])
        await session.settle({1: ("c", Failed(LedgerFailure("E", "m")))})
        views = [await task.view() for task in tasks]
        assert [view.input for view in views] == ["a", "b", "c"]
        assert [view.status for view in views] == ["running", "failed", "running"]

    _run(check)


def test_the_archive_is_asked_in_the_end() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", 7)
        await bench.end(task)
        await bench.archive(task)
        view = await task.view()
        assert (view.status, view.input) == ("succeeded", 7)
        assert [event.what for event in await bench.queue.history(task.id)] == [
            "submitted",
            "claimed",
            "succeeded",
        ]
        assert await task.result(timeout=0) is None

    _run(check)


def test_nothing_known_is_not_found() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t")
        bench.bucket.remove(LAYOUT.pack(task_at(task.id)[0]))
        for ask in (task.view, task.cancel, lambda: task.result(timeout=5)):
            with pytest.raises(TaskNotFound) as caught:
                await ask()
            assert caught.value.task == task.id
        with pytest.raises(TaskNotFound):
            await bench.queue.history(keyed_pack(type="t", key="never").task(0))
        assert bench.lived < 5

    _run(check)


@pytest.mark.parametrize("id", ["", "x", "now.000", "../etc", "now.000." + "0" * 24 + ".1.1.t"])
def test_what_is_no_id_is_refused_without_a_request(id: str) -> None:
    async def check(bench: Bench) -> None:
        before = bench.meter.requests()
        queue = bench.queue
        with pytest.raises(InvalidInput):
            queue.task(id)
        for ask in (queue.get, queue.history, queue.cancel, queue.replay, queue.result):
            with pytest.raises(InvalidInput):
                await ask(id)
        assert bench.meter.requests() == before

    _run(check)


def test_a_pack_that_is_damaged_is_told() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t")
        bench.bucket.write(LAYOUT.pack(task_at(task.id)[0]), b"damaged", {})
        with pytest.raises(NotOurs):
            await task.view()

    _run(check)


def test_the_history_tells_what_happened_in_order() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", key="k")
        session = await bench.claim(task)
        await bench.clock.sleep(1)
        retried = Retried(LedgerFailure("OSError", "m"), int(bench.world.now() * 1000))
        await session.settle({0: ("c", retried)})
        await bench.clock.sleep(1)
        await task.cancel()
        events = await bench.queue.history(task.id)
        assert [(event.what, event.attempt, event.who, event.note) for event in events] == [
            ("submitted", 0, "", "key k"),
            ("claimed", 1, "w", ""),
            ("retrying", 1, "w", "OSError"),
            ("cancelled", 1, "cancel", ""),
        ]
        assert [event.at for event in events] == sorted(event.at for event in events)

    _run(check)


def test_a_result_is_waited_for() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t")

        async def work() -> None:
            await bench.clock.sleep(100)
            await bench.end(task, Succeeded(Raw(b'{"ok":1}')))

        async with asyncio.TaskGroup() as group:
            group.create_task(work())
            assert await task.result() == {"ok": 1}
            assert 100 <= bench.lived <= 106

    _run(check)


def test_to_wait_for_a_running_task_is_one_cheap_question_at_a_time() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t")
        await bench.claim(task, lease_ms=400_000)
        before = bench.meter.requests(label="get")
        with pytest.raises(NotSettled):
            await task.result(timeout=300)
        # Every five seconds in the end, and the ledger is fetched only when it is new.
        assert bench.meter.requests(label="get") - before <= 80

    _run(check)


def test_a_wait_ends_in_time() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t")
        with pytest.raises(TimeoutError) as caught:
            await task.result(timeout=7)
        assert isinstance(caught.value, NotSettled)
        assert caught.value.task == task.id
        assert bench.lived == pytest.approx(7, abs=0.01)
        with pytest.raises(NotSettled):
            await task.result(timeout=0)
        assert bench.lived == pytest.approx(7, abs=0.01)

    _run(check)


def test_a_task_that_failed_raises_its_error() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t")
        await bench.end(task, Failed(LedgerFailure("ValueError", "too large")))
        with pytest.raises(TaskFailed, match="failed: ValueError: too large") as caught:
            await task.result(timeout=1)
        assert (caught.value.error, caught.value.task) == ("ValueError", task.id)

    _run(check)


def test_a_task_that_was_cancelled_raises_that() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t")
        await task.cancel()
        with pytest.raises(TaskCancelled):
            await task.result(timeout=1)

    _run(check)


@pytest.mark.parametrize(("key", "delay"), [(None, 0.0), (None, 600.0), ("k", 0.0), ("k", 600.0)])
def test_what_has_not_started_is_cancelled_at_once(key: str | None, delay: float) -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", 5, key=key, delay=delay)
        view = await task.cancel()
        assert (view.status, view.input) == ("cancelled", 5)
        assert not bench.has_pack(task)
        assert (await task.cancel()).settled_at == view.settled_at

    _run(check)


def test_one_task_of_a_pack_is_cancelled_and_no_other() -> None:
    async def check(bench: Bench) -> None:
        tasks = await bench.queue.submit_many("t", [0, 1, 2])
        await tasks[1].cancel()
        assert [(await task.view()).status for task in tasks] == ["ready", "cancelled", "ready"]
        assert bench.has_pack(tasks[0])

    _run(check)


def test_what_runs_is_asked_to_stop() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t")
        session = await bench.claim(task)
        view = await task.cancel()
        assert (view.status, view.cancel_asked) == ("running", True)
        assert (await session.extend(["c"], lease_ms=30_000)).asked_to_stop == {0}

    _run(check)


def test_what_has_ended_stays_as_it_is() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t")
        await bench.end(task)
        assert (await task.cancel()).status == "succeeded"

    _run(check)


def test_a_replay_is_a_new_task_with_the_same_input_once() -> None:
    async def check(bench: Bench) -> None:
        tasks = await bench.queue.submit_many("t", [{"n": 0}, {"n": 1}])
        with pytest.raises(InvalidInput, match="is ready: only what has ended"):
            await bench.queue.replay(tasks[1].id)
        await bench.end(tasks[1], Failed(LedgerFailure("E", "m")))
        again = await bench.queue.replay(tasks[1].id)
        view = await again.view()
        assert (view.type, view.input, view.status) == ("t", {"n": 1}, "ready")
        assert again.id not in {task.id for task in tasks}
        assert (await bench.queue.replay(tasks[1].id)).id == again.id
        assert (await bench.queue.replay(tasks[0].id)).id != again.id

    _run(check)


def test_a_replay_of_what_was_replayed_long_ago_runs_nothing() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", 1)
        await bench.end(task, Failed(LedgerFailure("E", "m")))
        again = await bench.queue.replay(task.id)
        await bench.end(again)
        await bench.clock.sleep(KEY_SECONDS + 400)
        await bench.archive(again)
        assert (await bench.queue.replay(task.id)).id == again.id
        assert not bench.has_pack(again)

    _run(check)


def test_a_key_is_one_task() -> None:
    async def check(bench: Bench) -> None:
        first = await bench.queue.submit("t", 1, key="k")
        pointers = bench.pointers()
        assert len(pointers) == 1
        second = await bench.queue.submit("t", 2, key="k", delay=60)
        assert second.id == first.id
        assert (await second.view()).input == 1
        assert bench.pointers() == pointers
        others = [await bench.queue.submit("t", key="K"), await bench.queue.submit("u", key="k")]
        assert len({first.id, *(task.id for task in others)}) == 3

    _run(check)


def test_of_many_submits_of_a_key_at_once_one_counts() -> None:
    async def check(bench: Bench) -> None:
        submits = (bench.queue.submit("t", number, key="k") for number in range(8))
        tasks = await asyncio.gather(*submits)
        assert len({task.id for task in tasks}) == 1
        nonce = bench.pack(tasks[0]).nonce
        assert [key for key in bench.pointers() if nonce in key] == bench.pointers()

    for seed in range(5):
        _run(check, seed=seed)


def test_a_key_stays_taken_after_its_task_has_ended() -> None:
    async def check(bench: Bench) -> None:
        first = await bench.queue.submit("t", 1, key="k")
        await bench.end(first, Succeeded(Raw(b"11")))
        await bench.clock.sleep(KEY_SECONDS - 10)
        second = await bench.queue.submit("t", 2, key="k")
        assert second.id == first.id
        assert await second.result(timeout=1) == 11
        # Whoever follows the pointer takes the duplicate away and runs nothing.
        session = PackSession(
            bench.queue.access.store,
            LAYOUT,
            task_at(first.id)[0],
            entropy=bench.queue.access.entropy,
        )
        assert await session.claim(LedgerClaim("d", "w", 30_000, 1, 3), None) is None
        assert not bench.has_pack(first)
        assert await first.result(timeout=1) == 11

    _run(check)


def test_a_key_is_free_when_its_lifetime_is_over() -> None:
    async def check(bench: Bench) -> None:
        first = await bench.queue.submit("t", 1, key="k")
        await bench.end(first)
        await bench.clock.sleep(KEY_SECONDS + 10)
        second = await bench.queue.submit("t", 2, key="k")
        view = await second.view()
        assert (second.id, view.status, view.input) == (first.id, "ready", 2)
        await bench.end(second, Succeeded(Raw(b"22")))
        assert await second.result(timeout=1) == 22
        assert (await second.view()).attempt == 1

    _run(check)


@pytest.mark.parametrize("seconds", [10.0, KEY_SECONDS + 10.0])
def test_a_pack_that_was_left_beside_its_record(seconds: float) -> None:
    """A worker has died before it deleted the pack. The key is free when its lifetime is over."""

    async def check(bench: Bench) -> None:
        first = await bench.queue.submit("t", 1, key="k")
        left = encode(bench.pack(first))
        await bench.end(first)
        bench.bucket.write(LAYOUT.pack(task_at(first.id)[0]), left, {})
        await bench.clock.sleep(seconds)
        second = await bench.queue.submit("t", 2, key="k")
        view = await second.view()
        if seconds < KEY_SECONDS:
            assert (view.status, view.input) == ("succeeded", 1)
            return
        assert (view.status, view.input) == ("ready", 2)
        await bench.end(second)
        assert (await second.view()).input == 2

    _run(check)


def test_a_second_submit_after_the_end_is_not_taken_for_a_leftover() -> None:
    async def check(bench: Bench) -> None:
        first = await bench.queue.submit("t", 1, key="k")
        await bench.end(first)
        await bench.clock.sleep(KEY_SECONDS + 10)
        await bench.queue.submit("t", 2, key="k")
        await bench.clock.sleep(1)
        third = await bench.queue.submit("t", 3, key="k")
        assert (await third.view()).input == 2

    _run(check)


def test_a_pack_that_came_too_late_does_not_hold_its_key() -> None:
    async def check(bench: Bench) -> None:
        first = await bench.queue.submit("t", 1, key="k")
        late = encode(bench.pack(first))
        await bench.clock.sleep(400)
        bench.bucket.write(LAYOUT.pack(task_at(first.id)[0]), late, {})
        second = await bench.queue.submit("t", 2, key="k")
        assert (await second.view()).input == 2

    _run(check)


@pytest.mark.parametrize("key", ["", "x" * 1001, "\ud800"])
def test_a_key_that_is_none_is_refused_and_nothing_is_written(key: str) -> None:
    async def check(bench: Bench) -> None:
        before = set(bench.bucket.objects)
        with pytest.raises(InvalidInput, match="idempotency key"):
            await bench.queue.submit("t", 1, key=key)
        assert set(bench.bucket.objects) == before

    _run(check)


def test_a_queue_that_is_not_open_says_so() -> None:
    queue = Queue("memory://", name="q")
    with pytest.raises(InvalidInput, match="'q' is not open") as caught:
        asyncio.run(queue.submit("t"))
    assert "Queue.open" in caught.value.hint


def test_a_queue_is_open_inside_async_with_only() -> None:
    async def main() -> None:
        queue = Queue("memory://", name="q")
        async with queue:
            await queue.submit("t")
            async with queue.opened() as same:
                assert same is queue
            await queue.submit("t")
        with pytest.raises(InvalidInput, match="not open"):
            await queue.submit("t")
        async with queue.opened():
            await queue.submit("t")
        await queue.close()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["", ".q", "a/b", "x" * 101])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        Queue("memory://", name=name)


def test_wrong_settings_are_refused_before_anything_is_opened() -> None:
    with pytest.raises(InvalidInput):
        Queue("nowhere://", name="q", config=QueueConfig(shards=3))


def test_a_queue_is_not_made_where_that_was_not_asked_for() -> None:
    async def main() -> None:
        url = "memory://test-client-create"
        opening = Opening(clock=SystemClock())
        async with Queue(url, name="mail", opening=opening):
            with pytest.raises(QueueNotFound) as caught:
                await Queue.open(url, name="mial", create=False, opening=opening)
            assert "mail" in caught.value.hint
            with pytest.raises(QueueNotFound):
                await Queue.open(url, name="mial", create=False, opening=opening)
            found = await Queue.open(url, name="mail", create=False, opening=opening)
            await found.close()

    asyncio.run(main())


def test_the_settings_of_the_first_hold_for_all() -> None:
    async def check(bench: Bench) -> None:
        access = bench.queue.access
        other = await Queue.on(
            access.store, name="q", entropy=access.entropy, config=QueueConfig(shards=8)
        )
        assert other.access.config == access.config
        # A store that the queue was given stays open.
        await other.close()
        await bench.queue.submit("t")

    _run(check)
