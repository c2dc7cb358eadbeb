"""Runs that end by themselves, and what comes before the first task."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.kernel.errors import InvalidInput, PenstockError, Reschedule
from penstock.queue.client import Queue
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.worker import StartupRunner, Worker
from penstock.testing import QueueBench, run_queue

MODES = ["leased", "shared", "sampled", "direct"]


async def _statuses(bench: QueueBench) -> list[str]:
    return sorted(view.status for view in await bench.queue.tasks())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_many", [False, True])
def test_a_worker_runs_so_many_tasks_and_no_more(mode: str, is_many: bool) -> None:
    async def test(bench: QueueBench) -> None:
        begun: list[int] = []

        @bench.worker.handler("t")
        async def handle(task: TaskContext) -> None:
            begun.append(task.input)
            await bench.advance(1)

        if is_many:
            await bench.queue.submit_many("t", list(range(20)))
        else:
            for number in range(20):
                await bench.queue.submit("t", number)
        await bench.worker.run(signals=False, max_tasks=11)
        assert len(begun) == 11
        statuses = await _statuses(bench)
        assert statuses == ["ready"] * 9 + ["succeeded"] * 11
        # Nothing else was claimed, and given back: that would cost puts, and others a wait.
        assert sum(view.attempt for view in await bench.queue.tasks()) == 11

    run_queue(test, mode=mode)


def test_what_runs_last_may_take_longer_than_a_stopping_worker_would_wait() -> None:
    async def test(bench: QueueBench) -> None:
        @bench.worker.handler("t")
        async def handle(task: TaskContext) -> str:
            await bench.advance(300)
            return "whole"

        task = await bench.queue.submit("t")
        other = await bench.queue.submit("t")
        began = bench.now()
        async with asyncio.TaskGroup() as group:
            group.create_task(bench.worker.run(signals=False, max_tasks=1))
            await bench.advance(30)
            # It lets go of its shards, so that others go on with the rest meanwhile.
            await bench.start()
            await bench.advance(30)
            running = [(await each.view()).status for each in (task, other)]
            assert running == ["running", "running"]
        assert bench.now() - began > 299
        assert sorted([await task.result(), await other.result(timeout=60)]) == ["whole", "whole"]

    run_queue(test)


def test_a_worker_that_is_spent_can_still_be_stopped() -> None:
    async def test(bench: QueueBench) -> None:
        @bench.worker.handler("t")
        async def handle(task: TaskContext) -> None:
            await bench.advance(3000)

        task = await bench.queue.submit("t")
        began = bench.now()
        async with asyncio.TaskGroup() as group:
            group.create_task(bench.worker.run(signals=False, max_tasks=1))
            await bench.advance(60)
            bench.worker.stop()
        assert bench.now() - began < 100
        view = await task.view()
        assert (view.status, view.attempt) == ("ready", 1)

    run_queue(test)


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_runs_until_nothing_of_its_types_is_left(mode: str) -> None:
    async def test(bench: QueueBench) -> None:
        @bench.worker.handler("t", retry=Retry(first_seconds=100, jitter=0))
        async def handle(task: TaskContext) -> None:
            if task.input == "flaky" and task.attempt == 1:
                raise OSError("once")
            if task.input == "later" and task.attempt == 1:
                raise Reschedule(200)

        await bench.queue.submit_many("t", [*range(10), "flaky", "later"])
        await bench.queue.submit("t", key="k")
        await bench.queue.submit("t", delay=3600)
        await bench.queue.submit("other")
        await bench.worker.run(signals=False, until_empty=True)
        assert await _statuses(bench) == ["delayed", "ready"] + ["succeeded"] * 13

    run_queue(test, mode=mode)


def test_what_another_worker_runs_is_waited_for_and_an_empty_queue_is_not() -> None:
    async def test(bench: QueueBench) -> None:
        @bench.worker.handler("t")
        async def handle(task: TaskContext) -> None:
            await bench.advance(100)

        await bench.queue.submit("t")
        await bench.start()
        await bench.advance(20)
        began = bench.now()
        await bench.worker.run(signals=False, until_empty=True)
        assert 80 < bench.now() - began < 150
        again = bench.worker.again(bench.queue, inline=True)
        began = bench.now()
        await again.run(signals=False, until_empty=True)
        assert bench.now() - began < 5

    run_queue(test)


@pytest.mark.parametrize("tasks", [0, -1, True])
def test_a_budget_of_nothing_is_refused(tasks: int) -> None:
    worker = Worker(Queue("memory://", name="q"))
    with pytest.raises(InvalidInput, match="at least 1 task"):
        asyncio.run(worker.run(max_tasks=tasks))


def test_what_is_done_at_start_up_is_over_before_the_first_claim() -> None:
    async def test(bench: QueueBench) -> None:
        done: list[str] = []

        @bench.worker.startup()
        async def load() -> None:
            await bench.advance(50)
            view = await task.view()
            done.append(f"loaded while {view.status}, {view.attempt}")

        @bench.worker.startup(timeout=5)
        def warm() -> None:
            done.append("warm")

        @bench.worker.handler("t")
        async def handle(task: TaskContext) -> None:
            done.append("task")

        task = await bench.queue.submit("t")
        await bench.start()
        await task.result(timeout=120)
        assert done == ["loaded while ready, 0", "warm", "task"]

    run_queue(test)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_worker_whose_start_up_fails_does_not_start(is_late: bool) -> None:
    async def test(bench: QueueBench) -> None:
        @bench.worker.startup(timeout=10)
        async def load() -> None:
            if is_late:
                await bench.advance(11)
            raise KeyError("model")

        @bench.worker.handler("t")
        async def handle(task: TaskContext) -> None: ...

        task = await bench.queue.submit("t")
        words = "did not end within 10 s" if is_late else "failed: KeyError: 'model'"
        with pytest.raises(PenstockError, match=words):
            await bench.worker.run(signals=False)
        assert (await task.view()).attempt == 0

    run_queue(test)


def test_plain_start_up_functions_run_in_a_thread() -> None:
    threads: list[threading.Thread] = []
    startup = StartupRunner()
    startup.add(lambda: threads.append(threading.current_thread()), seconds=10)

    def fail() -> None:
        raise SystemExit("no")

    startup.add(fail, seconds=10)
    with pytest.raises(PenstockError, match="SystemExit"):
        asyncio.run(startup.run())
    assert threads != [threading.main_thread()]


def test_a_start_up_function_that_could_not_be_called_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no arguments"):
        StartupRunner().add(lambda worker: worker, seconds=1)  # type: ignore[misc,arg-type]
    with pytest.raises(InvalidInput, match="not a timeout"):
        StartupRunner().add(print, seconds=0)
