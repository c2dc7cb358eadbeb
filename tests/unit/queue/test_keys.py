"""Several types in one submit, and what a submit says of its key: its life, and its input."""

from __future__ import annotations

import pytest

from penstock.kernel.errors import InvalidInput, KeyConflict, PenstockError, QueueDrained
from penstock.queue.config import QueueConfig
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.submitter import NotAllSubmitted
from penstock.store.metered import Kind
from penstock.testing import FaultPlan, QueueBench, run_queue


def _handled(bench: QueueBench, *kinds: str) -> None:
    for kind in kinds:

        @bench.worker.handler(kind)
        async def handle(task: TaskContext) -> object:
            return [task.type, task.input]


def test_several_types_are_one_put_a_type_and_keep_their_order() -> None:
    async def test(bench: QueueBench) -> None:
        _handled(bench, "a", "b")
        before = bench.meter.requests(kind=Kind.PUT)
        given = [("ab"[number % 2], number) for number in range(2100)]
        tasks = await bench.queue.submit_mixed(given, tags={"env": "prod"})
        assert bench.meter.requests(kind=Kind.PUT) - before == 4
        assert (await tasks[7].view()).tags == {"env": "prod"}
        await bench.run_until_settled(seconds=3600)
        shown = tasks[:5] + tasks[2000:2005]
        assert [tuple(await task.result()) for task in shown] == given[:5] + given[2000:2005]
        assert await bench.queue.submit_mixed([]) == []

    run_queue(test)


def test_one_wrong_task_of_several_types_submits_nothing() -> None:
    async def test(bench: QueueBench) -> None:
        before = bench.meter.requests(kind=Kind.PUT)
        for wrong in (("a b", 1), ("b", object()), ("b",), "ab"):
            with pytest.raises(InvalidInput):
                await bench.queue.submit_mixed([("a", 1), wrong])  # type: ignore[list-item]
        assert bench.meter.requests(kind=Kind.PUT) == before
        await bench.queue.drain("b")
        with pytest.raises(QueueDrained):
            await bench.queue.submit_mixed([("a", 1), ("b", 2)])

    run_queue(test)


def test_what_is_not_submitted_of_several_types_is_told_in_their_order() -> None:
    async def test(bench: QueueBench) -> None:
        await bench.queue.submit("c")
        bench.faults = FaultPlan(throttled=0.8)
        for _ in range(20):
            try:
                await bench.queue.submit_mixed([("a", 1), ("b", 2), ("a", 3)])
            except NotAllSubmitted as error:
                first, second, third = error.tasks
                assert isinstance(first, str) != isinstance(second, str)
                assert isinstance(first, str) == isinstance(third, str)
                return
            except PenstockError:  # The door could not be asked.
                continue
        raise AssertionError("no part ever failed alone")

    run_queue(test)


def test_a_submit_says_how_long_its_key_is_taken() -> None:
    async def test(bench: QueueBench) -> None:
        _handled(bench, "t")
        short = await bench.queue.submit("t", 1, key="short", key_seconds=600)
        long = await bench.queue.submit("t", 1, key="long", key_seconds=9000)
        plain = await bench.queue.submit("t", 1, key="plain")
        await bench.run_until_settled()
        reads = bench.meter.requests(kind=Kind.GET, label="monitor")
        await bench.advance(1200)
        for task, key, is_free in ((short, "short", True), (plain, "plain", False)):
            await bench.queue.submit("t", 2, key=key)
            await bench.advance(60)
            assert await task.result(timeout=60) == ["t", 2 if is_free else 1]
        await bench.advance(6000)
        # The queue's own time is over: the monitor knows that this one is to stay.
        assert bench.meter.requests(kind=Kind.GET, label="monitor") - reads <= 6
        await bench.queue.submit("t", 2, key="long")
        await bench.advance(60)
        assert await long.result(timeout=60) == ["t", 1]
        await bench.advance(4000)
        await bench.queue.submit("t", 2, key="long")
        await bench.advance(60)
        assert await long.result(timeout=60) == ["t", 2]

    run_queue(test, config=QueueConfig(key_seconds=3600))


@pytest.mark.parametrize("is_large", [False, True])
def test_another_input_under_the_same_key_is_an_error_on_request(is_large: bool) -> None:
    async def test(bench: QueueBench) -> None:
        _handled(bench, "t")
        queue = bench.queue
        pad = "x" * 100_000 if is_large else ""
        first = {"a": 1, "b": True, "pad": pad}
        task = await queue.submit("t", first, key="k", same_input=True)
        for _ in range(2):  # While it waits, and when it has ended.
            assert (await queue.submit("t", first, key="k", same_input=True)).id == task.id
            for other in ({**first, "a": 2}, {**first, "b": 1}, None):
                with pytest.raises(KeyConflict, match="which has another input") as refused:
                    await queue.submit("t", other, key="k", same_input=True)
                assert refused.value.task == task.id
            assert (await queue.submit("t", {"a": 2}, key="k")).id == task.id
            await bench.run_until_settled()
        if not is_large:
            turned = dict(reversed(first.items()))
            assert (await queue.submit("t", turned, key="k", same_input=True)).id == task.id
        assert await task.result() == ["t", first]
        await bench.advance(700)
        again = await queue.submit("t", "new", key="k", same_input=True)
        await bench.advance(60)
        assert await again.result(timeout=60) == ["t", "new"]

    run_queue(test, config=QueueConfig(key_seconds=600))


def test_what_is_said_of_a_key_needs_one() -> None:
    async def test(bench: QueueBench) -> None:
        for wrong in ({"same_input": True}, {"key_seconds": 600}, {"key": "k", "key_seconds": 5}):
            with pytest.raises(InvalidInput, match="key"):
                await bench.queue.submit("t", **wrong)

    run_queue(test)


def test_a_key_costs_no_more_for_who_does_not_ask() -> None:
    async def test(bench: QueueBench) -> None:
        await bench.queue.submit("t")
        before = bench.meter.requests()
        await bench.queue.submit("t", 1, key="k", key_seconds=600)
        assert bench.meter.requests() - before == 2
        await bench.queue.submit("t", 1, key="other", same_input=True)
        assert bench.meter.requests() - before == 2 + 2 + 4

    run_queue(test)
