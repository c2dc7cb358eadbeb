"""Expiry and progress: what never starts, what is settled without an attempt, what handlers say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from penstock.kernel.errors import InvalidInput, TaskFailed
from penstock.queue import transitions
from penstock.queue.attempt_outcomes import Expired, GivenBack, Retried, Succeeded
from penstock.queue.client import Queue
from penstock.queue.execution.handlers import PROGRESS_SECONDS, ProgressReporter, TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.ids import task_at
from penstock.queue.ledger import Ledger, LedgerFailure, LedgerProgress, QueueTaskStatus, fresh
from penstock.queue.pack_session import ListedPack, PackSession
from penstock.queue.settings import Polling, WorkerSettings
from penstock.queue.transitions import LedgerClaim
from penstock.queue.worker import Worker
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.retrying import RetryingStore
from penstock.store.time import Interval
from penstock.testing.virtual import World, simulate

QUICK = WorkerSettings(polling=Polling(min_seconds=0.1, max_seconds=0.2), settle_seconds=0.5)
NOW = Interval(1000.0, 1000.5)
INPUTS = tuple(msgspec.Raw(b"%d" % n) for n in range(4))


class Bench:
    """A queue, workers on it, and what their handlers have seen."""

    def __init__(self, world: World, *, faults: FaultPlan) -> None:
        self.world = world
        self.clock = world.clock()
        self.meter = Meter()
        self.bucket = MemoryBucket(world.clock())
        inner = MeteredStore(MemoryStore(self.bucket, clock=self.clock), self.meter)
        faulty = FaultyStore(inner, faults, entropy=world.entropy("faults"))
        self.store = RetryingStore(faulty, entropy=world.entropy("retries"))
        self.started: list[str] = []
        self.queue: Queue

    async def open(self) -> None:
        self.queue = await Queue.on(self.store, name="q", entropy=self.world.entropy("q"))

    @asynccontextmanager
    async def worker(
        self, handle: Callable[[TaskContext], Awaitable[object]], *, concurrency: int = 4
    ) -> AsyncIterator[Worker]:
        worker = Worker(self.queue, concurrency=concurrency, mode="shared", settings=QUICK)

        @worker.handler("t", retry=Retry(first_seconds=4, jitter=0))
        async def handler(task: TaskContext) -> object:
            self.started.append(task.id)
            return await handle(task)

        async with asyncio.TaskGroup() as group:
            running = group.create_task(worker.run(signals=False))
            try:
                yield worker
            finally:
                worker.stop()
                await running


def _run(
    check: Callable[[Bench], Awaitable[None]], *, faults: FaultPlan | None = None, seed: int = 1
) -> None:
    async def main(world: World) -> None:
        bench = Bench(world, faults=faults or FaultPlan())
        await bench.open()
        await check(bench)

    simulate(main, seed=seed)


async def _nothing(_: TaskContext) -> None:
    pass


def _claimed(*, tasks_max: int = 4) -> Ledger:
    ledger = fresh(pack_version="v", born="b", count=4)
    return transitions.claim(ledger, LedgerClaim("c", "w", 30_000, tasks_max, 3), NOW)[0]


def _at(seconds: float) -> Interval:
    return Interval(seconds, seconds + 0.5)


def test_an_expired_attempt_does_not_count_and_takes_its_neighbours_along() -> None:
    ledger = _claimed(tasks_max=2)
    after, refused = transitions.settle(
        ledger, {0: ("c", Expired())}, now=_at(1010), inputs=INPUTS, expires_ms=1_010_000
    )
    assert not refused
    statuses = [task.status for task in after.tasks]
    # The second is held: whoever has begun it in time may end it.
    assert statuses == [
        QueueTaskStatus.EXPIRED,
        QueueTaskStatus.CLAIMED,
        QueueTaskStatus.EXPIRED,
        QueueTaskStatus.EXPIRED,
    ]
    assert after.tasks[0].attempt - after.tasks[0].given_back == 0
    assert after.tasks[2].attempt == 0


def test_nothing_expires_before_its_time_is_surely_over() -> None:
    ledger = _claimed(tasks_max=1)
    after, _ = transitions.settle(
        ledger, {0: ("c", Succeeded())}, now=_at(1009.9), inputs=INPUTS, expires_ms=1_010_000
    )
    assert [task.status for task in after.tasks[1:]] == [QueueTaskStatus.READY] * 3


@pytest.mark.parametrize(
    ("due_ms", "status"),
    [(1_009_999, QueueTaskStatus.RETRYING), (1_010_000, QueueTaskStatus.EXPIRED)],
)
def test_a_retry_that_would_come_too_late_is_settled_at_once(
    due_ms: int, status: QueueTaskStatus
) -> None:
    endings = {0: ("c", Retried(LedgerFailure("OSError", "m"), due_ms))}
    after, _ = transitions.settle(_claimed(), endings, now=NOW, inputs=INPUTS, expires_ms=1_010_000)
    assert after.tasks[0].status is status
    assert after.tasks[0].failure == LedgerFailure("OSError", "m")
    assert after.tasks[0].given_back == 0


def test_what_is_to_be_cancelled_is_cancelled_and_not_expired() -> None:
    asked = transitions.cancel(_claimed(), [0], who="u", now=NOW, inputs=INPUTS)
    after, _ = transitions.settle(
        asked, {0: ("c", Expired())}, now=_at(1010), inputs=INPUTS, expires_ms=1_010_000
    )
    assert after.tasks[0].status is QueueTaskStatus.CANCELLED


def test_a_task_that_nobody_took_in_time_never_runs() -> None:
    async def check(bench: Bench) -> None:
        tasks = await bench.queue.submit_many("t", list(range(50)), expires=60)
        task = await bench.queue.submit("t", key="k", expires=60)
        late = await bench.queue.submit("t", expires=600)
        await bench.clock.sleep(61)
        assert (await tasks[0].view()).status == "ready"
        puts = bench.meter.requests(kind=Kind.PUT, label="settle")
        async with bench.worker(_nothing):
            for each in (*tasks, task):
                with pytest.raises(TaskFailed) as failed:
                    await each.result(timeout=30)
                assert failed.value.error == "Expired"
            await late.result(timeout=30)
        assert bench.started == [late.id]
        views = [await each.view() for each in tasks]
        assert {view.status for view in views} == {"expired"}
        # One write settles the rest of a pack, however many they are.
        assert bench.meter.requests(kind=Kind.PUT, label="settle") - puts <= 4

    _run(check)


def test_a_retry_does_not_start_after_the_time() -> None:
    async def fail(_: TaskContext) -> None:
        raise OSError("no")

    async def check(bench: Bench) -> None:
        # Attempts at 0, 4 and 12 seconds or so.
        task = await bench.queue.submit("t", expires=8)
        async with bench.worker(fail):
            with pytest.raises(TaskFailed):
                await task.result(timeout=60)
            assert bench.world.now() - bench.world.epoch < 8
        assert len(bench.started) == 2
        view = await task.view()
        assert (view.status, view.error, view.attempt) == ("expired", "OSError", 2)

    _run(check)


def test_what_waits_for_a_slot_is_not_started_after_the_time() -> None:
    async def check(bench: Bench) -> None:
        async def slow(_: TaskContext) -> None:
            await bench.clock.sleep(7)

        tasks = await bench.queue.submit_many("t", [1, 2, 3], expires=6)
        async with bench.worker(slow, concurrency=1):
            for each in tasks:
                with suppress(TaskFailed):
                    await each.result(timeout=60)
        assert len(bench.started) == 1
        statuses = sorted([(await each.view()).status for each in tasks])
        assert statuses == ["expired", "expired", "succeeded"]

    _run(check)


def test_what_a_dead_worker_held_is_not_started_again_after_the_time() -> None:
    async def check(bench: Bench) -> None:
        (task, _) = await bench.queue.submit_many("t", [1, 2], expires=40)
        access, (at, _) = bench.queue.access, task_at(task.id)
        session = PackSession(access.store, access.layout, at, entropy=access.entropy)
        stored = bench.bucket.objects[access.layout.pack(at)]
        seen = ListedPack(stored.version, stored.modified, has_ledger=False)
        assert await session.claim(LedgerClaim("dead", "w", 30_000, 1, 3), seen)
        await bench.clock.sleep(41)
        async with bench.worker(_nothing):
            with pytest.raises(TaskFailed):
                await task.result(timeout=60)
        assert bench.started == []
        told = [event.what for event in await bench.queue.history(task.id)]
        assert told == ["submitted", "claimed", "lease expired", "expired"]

    _run(check)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_starts_late_whatever_answers_are_lost(seed: int) -> None:
    async def check(bench: Bench) -> None:
        tasks = []
        for _ in range(10):
            tasks += await bench.queue.submit_many("t", [1, 2, 3], expires=20)
        begun: list[float] = []

        async def slow(_: TaskContext) -> None:
            begun.append(bench.world.now() - bench.world.epoch)
            await bench.clock.sleep(3)

        async with bench.worker(slow, concurrency=2):
            for each in tasks:
                try:
                    await each.result(timeout=900)
                except TaskFailed as error:
                    assert error.error == "Expired"  # noqa: PT017 - both ends are right
        # Until it is sure that the time is over a start is right: the clock is known to a second.
        assert begun
        assert max(begun) < 22

    _run(check, faults=FaultPlan(lost_answer=0.05), seed=seed)


def test_what_a_handler_says_is_shown_while_it_runs_and_kept() -> None:
    async def check(bench: Bench) -> None:
        async def handle(task: TaskContext) -> None:
            for step in range(20):
                task.report(step, total=20, message=f"step {step}")
                await bench.clock.sleep(1)

        task = await bench.queue.submit("t")
        async with bench.worker(handle):
            await bench.clock.sleep(PROGRESS_SECONDS + 1)
            progress = (await task.view()).progress
            assert progress is not None
            assert 0 < progress.done <= 6
            assert progress.total == 20
            await task.result(timeout=60)
            progress = (await task.view()).progress
            assert progress is not None
            assert (progress.done, progress.message) == (19, "step 19")
        # Twenty seconds of talking: a write in five seconds, renewals among them.
        assert bench.meter.requests(kind=Kind.PUT, label="heartbeat") <= 4

    _run(check)


def test_a_report_in_a_short_handler_costs_nothing() -> None:
    async def check(bench: Bench) -> None:
        async def handle(task: TaskContext) -> None:
            task.report(0.5)
            await bench.clock.sleep(2)

        task = await bench.queue.submit("t")
        async with bench.worker(handle):
            await task.result(timeout=60)
        progress = (await task.view()).progress
        assert progress is not None
        assert progress.done == 0.5
        assert bench.meter.requests(kind=Kind.PUT, label="heartbeat") == 0

    _run(check)


def test_a_new_attempt_begins_with_nothing_said() -> None:
    async def check(bench: Bench) -> None:
        async def handle(task: TaskContext) -> None:
            if task.attempt == 1:
                task.report(0.9)
                raise OSError("no")
            await bench.clock.sleep(30)

        task = await bench.queue.submit("t")
        async with bench.worker(handle):
            await bench.clock.sleep(3)
            view = await task.view()
            assert view.status == "retrying"
            assert view.progress is not None
            assert view.progress.done == 0.9
            await bench.clock.sleep(5)
            view = await task.view()
            assert (view.status, view.progress) == ("running", None)

    _run(check)


def test_only_who_holds_a_task_may_speak_for_it() -> None:
    said = LedgerProgress(1, 0.5)
    ledger = _claimed(tasks_max=2)
    told = transitions.tell(ledger, {0: ("c", said), 1: ("other", said), 2: ("c", said)})
    assert [task.progress for task in told.tasks] == [said, None, None, None]
    assert transitions.tell(ledger, {}) is ledger
    given, _ = transitions.settle(told, {0: ("c", GivenBack())}, now=NOW, inputs=INPUTS)
    assert given.tasks[0].progress == said
    again, _ = transitions.claim(given, LedgerClaim("d", "w", 30_000, 1, 3), NOW)
    assert again.tasks[0].progress is None


@pytest.mark.parametrize(
    ("done", "total"),
    [(float("nan"), 1), (1, float("inf")), (-1, 1), (1, 0), ("half", 1), (None, 1)],
)
def test_a_report_that_nobody_could_read_is_refused(done: float, total: float) -> None:
    with pytest.raises(InvalidInput):
        ProgressReporter().say(done, total, "")


def test_a_voice_is_heard_once_until_its_word_is_written() -> None:
    heard: list[int] = []
    reporter = ProgressReporter(lambda: heard.append(1))
    reporter.say(1, 3, "")
    first = reporter.unsent
    reporter.say(2, 3, "\ud800" + "x" * 1000)
    assert len(heard) == 1
    assert first is not None
    reporter.sent(first)
    last = reporter.unsent
    assert last is not None
    assert last.done == 2
    last.message.encode()
    assert len(last.message) <= 200
    reporter.sent(last)
    assert reporter.unsent is None
    reporter.say(3, 3, "")
    assert len(heard) == 2
