"""Cancelling with a reason, many at once, by type; times as typed, and as the store says."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import click
import pytest

from penstock.cli.options import Days, Seconds
from penstock.kernel.errors import InvalidInput, TaskCancelled
from penstock.queue.execution.handlers import TaskContext
from penstock.testing import QueueBench, run_queue


def test_the_reason_is_shown_wherever_a_cancelled_task_is() -> None:
    async def test(bench: QueueBench) -> None:
        @bench.worker.handler("t")
        async def handle(task: TaskContext) -> None:
            await bench.advance(1000)

        running = await bench.queue.submit("t")
        (held, beside) = await bench.queue.submit_many("t", [1, 2], delay=3600)
        worker = await bench.start()
        await bench.advance(20)
        view = await running.cancel("wrong file")
        assert (view.status, view.cancel_asked, view.message) == ("running", True, "wrong file")
        assert (await beside.cancel("not needed")).message == "not needed"
        assert (await held.cancel()).message == ""
        await bench.advance(60)
        for task, reason in ((running, "wrong file"), (beside, "not needed")):
            with pytest.raises(TaskCancelled, match=f"was cancelled: {reason}"):
                await task.result(timeout=60)
            view = await task.view()
            assert (view.status, view.error, view.message) == ("cancelled", "Cancelled", reason)
            last = (await bench.queue.history(task.id))[-1]
            assert (last.what, last.note) == ("cancelled", reason)
        with pytest.raises(TaskCancelled, match=r"was cancelled\.$"):
            await held.result(timeout=60)
        await bench.stop(worker)
        with pytest.raises(InvalidInput, match="at most 200 characters"):
            await running.cancel("x" * 201)

    run_queue(test)


def test_many_are_cancelled_by_id_by_type_and_by_tag() -> None:
    async def test(bench: QueueBench) -> None:
        queue = bench.queue
        tasks = await queue.submit_many("a", list(range(30)))
        others = await queue.submit_many("b", [1, 2], tags={"env": "prod"})
        later = await queue.submit("a", delay=3600)
        before = bench.meter.requests()
        found = await queue.cancel_many([each.id for each in tasks[:20]], reason="too many")
        assert {(view.status, view.message) for view in found} == {("cancelled", "too many")}
        assert len(found) == 20
        assert bench.meter.requests() - before <= 6
        assert len(await queue.cancel_many(type="a")) == 11
        assert (await later.view()).status == "cancelled"
        assert (await others[0].view()).status == "ready"
        found = await queue.cancel_many(tags={"env": "prod"}, limit=1)
        assert (len(found), found.is_whole) == (1, False)
        assert not await queue.cancel_many(type="a")
        for wrong in ({}, {"ids": [], "type": "a"}, {"tags": {"evn": "prod"}}, {"type": "a b"}):
            with pytest.raises(InvalidInput):
                await queue.cancel_many(**wrong)

    run_queue(test)


def test_a_task_expires_at_a_time_of_the_store() -> None:
    async def test(bench: QueueBench) -> None:
        now = await bench.queue.now()
        assert now.tzinfo is UTC
        assert abs(now.timestamp() - bench.now()) < 2
        task = await bench.queue.submit("t", expires_at=now + timedelta(hours=1))
        (many,) = await bench.queue.submit_many("t", [1], expires_at=now + timedelta(hours=1))
        for each in (task, many):
            expires_at = (await each.view()).expires_at
            assert expires_at == pytest.approx(now.timestamp() + 3600, abs=2)
        with pytest.raises(InvalidInput, match="is in the past"):
            await bench.queue.submit("t", expires_at=now - timedelta(seconds=5))
        for wrong in (
            {"expires_at": datetime(2090, 1, 1)},  # noqa: DTZ001 - it is refused
            {"expires_at": now, "expires": 5},
        ):
            with pytest.raises(InvalidInput, match="time with a time zone"):
                await bench.queue.submit("t", **wrong)

    run_queue(test)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 5), ("0.5", 0.5), ("1e3", 1000), ("90s", 90), ("1h30m", 5400), ("30d", 2_592_000)],
)
def test_a_length_of_time_is_typed_with_its_unit_or_in_seconds(text: str, seconds: float) -> None:
    assert Seconds().convert(text, None, None) == seconds
    in_days = float(text) if text[-1].isdigit() else seconds / 86_400
    assert Days().convert(text, None, None) == in_days


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "is not a duration"),
        ("5 parsecs", "is not a duration"),
        ("1-5", "is not a duration"),
        ("", "is not a duration"),
        ("-1", "is not from 0 to 10 s"),
        ("11s", "is not from 0 to 10 s"),
        ("nan", "is not a duration"),
    ],
)
def test_what_is_no_length_of_time_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(click.BadParameter, match=words):
        Seconds(0, 10).convert(text, None, None)


def test_nothing_of_a_cancelled_pack_is_asked_twice() -> None:
    """To cancel without a reason, after one was given, keeps it."""

    async def test(bench: QueueBench) -> None:
        @bench.worker.handler("t")
        async def handle(task: TaskContext) -> None:
            await asyncio.Event().wait()

        task = await bench.queue.submit("t")
        await bench.start()
        await bench.advance(20)
        await task.cancel("first")
        await task.cancel()
        with pytest.raises(TaskCancelled, match="first"):
            await task.result(timeout=60)

    run_queue(test)
