"""Tasks that were claimed to be run as one: one place, one call of the runtime for each of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import AttemptWork, ProducedOutput, WorkReporter
from penstock.worker.attempt import InterruptReason
from tests.unit.worker.bench import Bench, nothing, play
from tests.unit.worker.scripted import Dispatcher
from tests.unit.worker.test_worker import CLAIM, all_are, waiting


def batches(*sizes: int, **fields: Any) -> Any:
    """Batches of these sizes wait."""

    def setting(dispatcher: Dispatcher) -> None:
        for number, size in enumerate(sizes):
            for _ in range(size):
                dispatcher.add(batch=f"batch {number}", **fields)

    return setting


def test_each_of_a_batch_is_run_and_knows_how_many_they_are() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: all_are(bench, "completed"), seconds=10)
        told = {each.task_id: (each.batch, each.batch_size) for each in bench.runtime.works}
        assert told == {
            1: ("batch 0", 3),
            2: ("batch 0", 3),
            3: ("batch 0", 3),
            4: ("batch 1", 2),
            5: ("batch 1", 2),
            6: ("", 1),
        }

    def setting(dispatcher: Dispatcher) -> None:
        batches(3, 2)(dispatcher)
        dispatcher.add()

    play(story, setting=setting)


@pytest.mark.parametrize("joins", [True, False])
def test_batches_are_asked_for_where_the_runtime_joins_them(joins: bool) -> None:
    async def story(bench: Bench) -> None:
        bench.runtime.joins_batches = joins
        bench.dispatcher.add()
        await bench.until(lambda: bench.dispatcher.paths()[CLAIM] > 0)
        asks = [ask for path, ask in bench.dispatcher.calls if path == CLAIM]
        assert {ask.in_batches for ask in asks} == {joins}

    play(story)


def test_a_batch_takes_one_place() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: all_are(bench, "completed"), seconds=10)
        # Two of three batches fit.
        assert bench.runtime.most_at_once == 100

    play(story, setting=batches(50, 50, 50), concurrency=2)


def test_the_place_is_taken_until_the_last_of_a_batch_has_ended() -> None:
    go_on: list[asyncio.Event] = []

    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        if work.task_id == 2:
            go_on.append(asyncio.Event())
            await go_on[-1].wait()
        return await nothing(work, reporter)

    async def story(bench: Bench) -> None:
        tasks = bench.dispatcher.tasks
        await bench.until(lambda: tasks[1].status == "completed" and tasks[3].status == "completed")
        await bench.clock.sleep(60)
        claims = bench.dispatcher.paths()[CLAIM]
        assert (tasks[2].status, tasks[4].status) == ("running", "queued")
        assert bench.worker._executor.room == 0
        go_on[-1].set()
        await bench.until(lambda: all_are(bench, "completed"), seconds=5)
        assert claims == 1

    def setting(dispatcher: Dispatcher) -> None:
        batches(3)(dispatcher)
        dispatcher.add()

    play(story, setting=setting, doing=doing, concurrency=1)


def test_one_of_a_batch_that_is_cancelled_or_fails_costs_the_others_nothing() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        if work.task_id == 1:
            raise WorkFailed("The partition is broken.", is_retried=False)
        if work.task_id == 2:
            await asyncio.Event().wait()
        return await nothing(work, reporter)

    async def story(bench: Bench) -> None:
        await bench.until(lambda: 2 in {each.task_id for each in bench.runtime.running.values()})
        bench.dispatcher.tasks[2].cancel_asked = True
        await bench.until(lambda: bool(bench.dispatcher.tasks[2].ended), seconds=30)
        statuses = [task.status for task in bench.dispatcher.tasks.values()]
        assert statuses == ["dead", "cancelled", "completed", "completed"]
        assert bench.runtime.cancelled == [2]
        await bench.until(lambda: bench.worker._executor.room == 8)

    play(story, setting=batches(4), doing=doing)


def test_a_batch_that_was_lost_frees_its_place_once() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        await asyncio.Event().wait()
        return ()

    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == 3)
        executor = bench.worker._executor
        assert (executor.room, executor.count) == (1, 3)
        for attempt in tuple(executor._running):
            attempt.interrupt(InterruptReason.LOST)
        await bench.until(lambda: executor.count == 0)
        assert executor.room == 2

    play(story, setting=batches(3), doing=doing, concurrency=2)


def test_a_runtime_is_told_that_there_will_be_work_when_it_is_served() -> None:
    async def story(bench: Bench) -> None:
        await bench.clock.sleep(30)
        assert bench.runtime.expected == 0
        bench.dispatcher.add()
        await bench.until(lambda: bench.runtime.expected > 0)

    play(story)


def test_what_it_took_is_told_with_the_end() -> None:
    async def story(bench: Bench) -> None:
        bench.runtime.metrics = {"rows": 7}
        bench.dispatcher.add()
        await bench.until(lambda: bool(bench.dispatcher.tasks) and all_are(bench, "completed"))
        (end,) = bench.dispatcher.tasks[1].ended
        assert end.metrics == {"rows": 7}

    play(story)


@pytest.mark.parametrize("why", ["schema", "undeclared"])
def test_columns_that_a_dataset_cannot_take_are_a_failure_for_good(why: str) -> None:
    async def story(bench: Bench) -> None:
        good, bad = bench.dispatcher.tasks.values()
        bench.runtime.metrics = {"rows": 7}
        await bench.until(lambda: bool(good.ended and bad.ended))
        assert (good.status, bad.status) == ("completed", "dead")
        assert bad.reason.startswith("Its outputs were refused: The column 'delay' is string here")
        assert bad.ended[0].metrics == {"rows": 7}

    play(story, setting=lambda d: (d.add(), d.add(bad_schema=why)))


@pytest.mark.parametrize("alone", [True, False])
def test_stopping_gives_a_whole_batch_back(alone: bool) -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        await asyncio.Event().wait()
        return ()

    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == 3)
        await bench.stopped()
        told = {(task.status, task.reason) for task in bench.dispatcher.tasks.values()}
        assert told == {("released", "The worker was stopped.")}

    setting = waiting(3) if alone else batches(3)
    play(story, setting=setting, doing=doing, stop_seconds=1.0, seeds=range(2))
