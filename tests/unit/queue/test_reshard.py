"""A queue with real workers goes on while its number of shards changes, and `stats` is right."""

from __future__ import annotations

import asyncio

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.inspection import stats
from penstock.testing import FaultPlan, QueueBench, run_queue


def test_tasks_that_run_go_on_and_new_ones_are_found() -> None:
    async def test(bench: QueueBench) -> None:
        attempts: list[int] = []

        @bench.worker.handler("slow")
        async def slow(task: TaskContext) -> int:
            attempts.append(task.attempt)
            await asyncio.sleep(300)  # noqa: TID251 - as users write it
            return int(task.input)

        @bench.worker.handler("quick")
        def quick(task: TaskContext) -> int:
            return int(task.input)

        for _ in range(3):
            await bench.start()
        await bench.advance(20)
        before = await bench.queue.submit_many("slow", [1, 2, 3])
        await bench.advance(20)
        await bench.queue.reshard(128)
        assert bench.queue.access.config.shards == 128
        for number in range(40):
            task = await bench.queue.submit("quick", number)
            # Never later than it is found while nothing changes.
            assert await task.result(timeout=20) == number
            await bench.advance(3)
        assert [await task.result(timeout=300) for task in before] == [1, 2, 3]
        assert attempts == [1, 1, 1]

    for seed in range(2):
        run_queue(test, seed=seed)


def test_stats_count_the_shards_of_the_present_cut() -> None:
    async def test(bench: QueueBench) -> None:
        bench.worker.handler("ok")(lambda task: None)
        other = await bench.connect(type(bench.queue)("", name="bench"))
        await bench.start()
        await bench.advance(30)
        assert (await stats(other.access)).unowned == ()
        await bench.queue.reshard(8)
        just_now = await stats(other.access)  # It was opened before the change.
        assert (just_now.shards, len(just_now.unowned)) == (8, 8)
        assert [(seen.role, seen.of) for seen in just_now.workers] == [("owner", 64)]
        await bench.advance(60)
        then = await stats(other.access)
        assert (then.shards, then.unowned) == (8, ())
        assert [(seen.role, seen.of, len(seen.shards)) for seen in then.workers] == [
            ("owner", 8, 8)
        ]
        with pytest.raises(InvalidInput, match="cannot have 5 shards"):
            await bench.queue.reshard(5)

    run_queue(test)


def test_with_faults_nothing_is_lost_and_nothing_runs_twice_at_the_same_time() -> None:
    async def test(bench: QueueBench) -> None:
        @bench.worker.handler("ok")
        async def ok(task: TaskContext) -> int:
            await asyncio.sleep(5)  # noqa: TID251 - as users write it
            return int(task.input)

        workers = [await bench.start() for _ in range(3)]
        tasks = []
        for number in range(12):
            tasks += await bench.queue.submit_many("ok", list(range(10)))
            await bench.advance(15)
            if number in (3, 6):
                await bench.queue.reshard(4 if number == 3 else 32)
            if number == 7:
                await bench.kill(workers[0])
        await bench.run_until_settled()
        bench.faults = FaultPlan()
        assert [await task.result() for task in tasks] == list(range(10)) * 12

    plan = FaultPlan(lost_answer=0.05, lost_request=0.05, throttled=0.05, latency_seconds_max=0.2)
    for seed in range(2):
        run_queue(test, seed=seed, faults=plan)
