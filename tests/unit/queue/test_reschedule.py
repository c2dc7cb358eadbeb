"""A handler that says "later": no failure, no attempt that counts, no request more than a retry."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from penstock.kernel.errors import DoNotRetry, Reschedule, TaskFailed
from penstock.queue import transitions
from penstock.queue.attempt_outcomes import REASON_CHARACTERS_MAX, Rescheduled
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.ledger import Ledger, QueueTaskStatus, fresh
from penstock.queue.transitions import LedgerClaim
from penstock.store.metered import Kind
from penstock.store.time import Interval
from penstock.testing import QueueBench, run_queue

NOW = Interval(1000.0, 1000.5)
INPUTS = (msgspec.Raw(b"1"),)


def _settled(due_ms: int, *, reason: str = "", expires_ms: int = 0, cancel: bool = False) -> Ledger:
    ledger = fresh(pack_version="v", born="b", count=1)
    ledger, _ = transitions.claim(ledger, LedgerClaim("c", "w", 30_000, 1, 3), NOW)
    if cancel:
        ledger = transitions.cancel(ledger, [0], who="u", now=NOW, inputs=INPUTS)
    ending = Rescheduled(due_ms, reason)
    after, refused = transitions.settle(
        ledger, {0: ("c", ending)}, now=NOW, inputs=INPUTS, expires_ms=expires_ms
    )
    assert not refused
    assert not after.leases
    return after


def test_a_rescheduled_task_waits_and_its_attempt_does_not_count() -> None:
    ledger = _settled(1_060_000, reason="x" * 1000)
    (task,) = ledger.tasks
    assert (task.status, task.at_ms, task.claim) == (QueueTaskStatus.RETRYING, 1_060_000, "")
    assert task.attempt - task.given_back == 0
    assert ledger.log[-1].note == "x" * REASON_CHARACTERS_MAX
    early, _ = transitions.claim(ledger, LedgerClaim("d", "w", 30_000, 1, 1), Interval(1059, 1060))
    assert early.tasks[0].status is QueueTaskStatus.RETRYING
    again, _ = transitions.claim(ledger, LedgerClaim("d", "w", 30_000, 1, 1), Interval(1060, 1061))
    assert (again.tasks[0].status, again.tasks[0].attempt) == (QueueTaskStatus.CLAIMED, 2)


def test_what_would_come_too_late_or_is_to_be_cancelled_is_settled() -> None:
    (late,) = _settled(1_060_000, expires_ms=1_060_000).tasks
    assert (late.status, late.attempt - late.given_back, late.claim) == (
        QueueTaskStatus.EXPIRED,
        0,
        "c",
    )
    (asked,) = _settled(1_060_000, cancel=True).tasks
    assert asked.status is QueueTaskStatus.CANCELLED


def test_a_handler_reschedules_more_often_than_it_may_fail() -> None:
    async def test(bench: QueueBench) -> None:
        begun: list[float] = []

        @bench.worker.handler("poll", retry=Retry(attempts=2, first_seconds=1, jitter=0))
        async def poll(task: TaskContext) -> int:
            begun.append(bench.now())
            if len(begun) == 2:
                raise OSError("once")
            if len(begun) < 6:
                raise Reschedule(60, reason=f"look {len(begun)}")
            return task.attempt

        task = await bench.queue.submit("poll")
        worker = await bench.start(bench.worker)
        await bench.advance(30)
        view = await task.view()
        assert (view.status, view.error) == ("delayed", "")
        assert view.due_at is not None
        assert 25 < view.due_at - bench.now() < 60
        assert [each.id for each in await bench.queue.tasks(status="delayed")] == [task.id]
        await bench.run_until_settled(seconds=600)
        assert await task.result() == 6
        waited = [later - sooner >= 60 for sooner, later in pairwise(begun)]
        assert waited == [True, False, True, True, True]
        told = [(each.what, each.note) for each in await bench.queue.history(task.id)]
        assert ("rescheduled", "look 1") in told
        assert [what for what, _ in told].count("rescheduled") == 4
        assert 'ending="rescheduled"} 4' in worker.metrics()

    run_queue(test)


def test_do_not_retry_ends_a_task_at_its_first_attempt() -> None:
    async def test(bench: QueueBench) -> None:
        @bench.worker.handler("t", retry=Retry(attempts=5))
        async def handle(task: TaskContext) -> None:
            raise DoNotRetry("never mind")

        task = await bench.queue.submit("t")
        await bench.run_until_settled(seconds=60)
        with pytest.raises(TaskFailed) as failed:
            await task.result()
        assert failed.value.error == "DoNotRetry"
        assert (await task.view()).attempt == 1

    run_queue(test)


def test_to_reschedule_costs_what_a_retry_costs() -> None:
    def puts(error: Exception) -> int:
        counted: list[int] = []

        async def test(bench: QueueBench) -> None:
            @bench.worker.handler("t", retry=Retry(first_seconds=60, jitter=0))
            async def handle(task: TaskContext) -> None:
                if task.attempt == 1:
                    raise error

            await bench.queue.submit("t")
            await bench.run_until_settled(seconds=600)
            counted.append(bench.meter.requests(kind=Kind.PUT, label="settle"))

        run_queue(test)
        return counted[0]

    assert puts(Reschedule(60)) == puts(OSError("no")) > 0
