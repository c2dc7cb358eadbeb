"""The test kit for users: real workers in virtual time, faults, kills, and clear failures."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.kernel.errors import InvalidInput, TaskFailed
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.settings import DiscoveryMode
from penstock.queue.worker import Worker
from penstock.testing import FaultPlan, QueueBench, run_queue

# As a user's module has them.
MODULE_QUEUE = Queue("s3://never/opened", name="images")
MODULE_WORKER = Worker(MODULE_QUEUE, concurrency=2)


@MODULE_WORKER.handler("first")
async def first(task: TaskContext) -> str:
    return (await MODULE_QUEUE.submit("second", task.input + 1)).id


@MODULE_WORKER.handler("second")
def second(task: TaskContext) -> int:
    return int(task.input)


@pytest.mark.parametrize("mode", [DiscoveryMode.LEASED, DiscoveryMode.SHARED])
def test_plain_and_async_handlers_run_to_the_end_without_a_thread(mode: DiscoveryMode) -> None:
    async def test(bench: QueueBench) -> tuple[int, int, float]:
        threads = threading.active_count()

        @bench.worker.handler("plain")
        def plain(task: TaskContext) -> int:
            assert threading.active_count() == threads
            return int(task.input) * 2

        @bench.worker.handler("slow")
        async def slow(task: TaskContext) -> int:
            await asyncio.sleep(1200)  # noqa: TID251 - as users write it
            return int(task.input) * 3

        began = bench.now()
        one = await bench.queue.submit("plain", 1)
        two = await bench.queue.submit("slow", 2, delay=600)
        await bench.run_until_settled()
        return await one.result(), await two.result(), bench.now() - began

    plain, slow, seconds = run_queue(test, mode=mode)
    assert (plain, slow) == (2, 6)
    assert 1800 <= seconds < 1900


def test_retries_and_failures_are_the_real_ones() -> None:
    async def test(bench: QueueBench) -> None:
        @bench.worker.handler("flaky", retry=Retry(attempts=3, first_seconds=60))
        def flaky(task: TaskContext) -> int:
            if task.attempt <= task.input:
                raise OSError("not yet")
            return task.attempt

        good = await bench.queue.submit("flaky", 2)
        bad = await bench.queue.submit("flaky", 5)
        await bench.run_until_settled()
        assert await good.result() == 3
        with pytest.raises(TaskFailed, match="not yet"):
            await bad.result()

    run_queue(test)


def test_the_worker_and_the_queue_of_a_module_can_be_used_by_many_tests() -> None:
    async def test(bench: QueueBench) -> None:
        queue = await bench.connect(MODULE_QUEUE)
        await bench.start(MODULE_WORKER)
        await queue.submit("first", 1)
        await bench.run_until_settled()
        done = await queue.tasks(status="succeeded")
        assert sorted((view.type, view.input) for view in done) == [("first", 1), ("second", 2)]

    for seed in range(2):
        run_queue(test, seed=seed)
        with pytest.raises(InvalidInput, match="not open"):
            _ = MODULE_QUEUE.access


def test_a_worker_that_is_killed_loses_nothing_and_another_goes_on() -> None:
    async def test(bench: QueueBench) -> None:
        runs: list[int] = []

        @bench.worker.handler("slow")
        async def slow(task: TaskContext) -> int:
            runs.append(task.attempt)
            await asyncio.sleep(60)  # noqa: TID251 - as users write it
            return task.attempt

        one = await bench.start()
        task = await bench.queue.submit("slow")
        await bench.advance(30)
        assert runs == [1]
        await bench.kill(one)
        two = await bench.start()
        await bench.run_until_settled()
        assert await task.result() == 2
        await bench.stop(two)

    run_queue(test)


def test_faults_are_met_and_tasks_still_end_once() -> None:
    async def test(bench: QueueBench) -> int:
        @bench.worker.handler("ok")
        def ok(task: TaskContext) -> int:
            return int(task.input)

        tasks = await bench.queue.submit_many("ok", list(range(50)))
        await bench.run_until_settled()
        bench.faults = FaultPlan()
        assert [await task.result() for task in tasks] == list(range(50))
        return bench.meter.requests()

    plan = FaultPlan(lost_answer=0.1, lost_request=0.1, throttled=0.1, latency_seconds_max=0.5)
    for seed in range(3):
        assert run_queue(test, faults=plan, seed=seed) > run_queue(test, seed=seed)


def test_a_seed_gives_the_same_run_again() -> None:
    async def test(bench: QueueBench) -> str:
        return (await bench.queue.submit("x")).id

    assert run_queue(test, seed=5) == run_queue(test, seed=5) != run_queue(test, seed=6)


def test_what_can_never_end_is_told_at_once() -> None:
    async def unhandled(bench: QueueBench) -> None:
        bench.worker.handler("ok")(lambda task: None)
        await bench.queue.submit_many("other", [1, 2])
        await bench.run_until_settled(10**9)

    with pytest.raises(AssertionError, match="no worker runs such tasks: 2 of 'other'"):
        run_queue(unhandled)

    async def late(bench: QueueBench) -> None:
        bench.worker.handler("ok")(lambda task: None)
        await bench.queue.submit("ok", delay=7200)
        await bench.run_until_settled(3600)

    with pytest.raises(AssertionError, match="not settled within 3600 s: 1 of 'ok'"):
        run_queue(late)

    async def no_handler(bench: QueueBench) -> None:
        await bench.start()

    with pytest.raises(InvalidInput, match="has no handler"):
        run_queue(no_handler)


def test_what_the_test_raises_comes_out_as_it_is() -> None:
    async def test(bench: QueueBench) -> None:
        bench.worker.handler("ok")(lambda task: None)
        await bench.start()
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run_queue(test)


def test_isolated_handlers_and_hooks_run_inline_and_workers_share_nothing() -> None:
    async def test(bench: QueueBench) -> list[str]:
        told: list[str] = []
        bench.worker.handler("double", isolate=True)(_double)
        bench.worker.on("success")(lambda event: told.append(event.what))

        @bench.worker.on("start")
        async def start(event: object) -> None:
            told.append("start")

        await bench.start()
        await bench.start()
        tasks = await bench.queue.submit_many("double", [1, 2, 3])
        await bench.run_until_settled()
        await bench.advance(1)
        assert [await task.result() for task in tasks] == [2, 4, 6]
        return sorted(told)

    assert run_queue(test) == ["start"] * 2 + ["success"] * 3


@pytest.mark.parametrize("mode", DiscoveryMode)
def test_every_mode_can_be_tried_with_two_workers(mode: DiscoveryMode) -> None:
    async def test(bench: QueueBench) -> None:
        bench.worker.handler("double")(_double)
        await bench.start()
        await bench.start()
        tasks = await bench.queue.submit_many("double", list(range(20)))
        await bench.run_until_settled()
        assert [await task.result() for task in tasks] == [2 * each for each in range(20)]

    run_queue(test, mode=mode, config=QueueConfig(direct=("double",)))


def _double(task: TaskContext) -> int:
    return int(task.input) * 2
