"""A report of ends claims what these have made, within what the worker has room for."""

from __future__ import annotations

import pytest

from penstock.protocol.work import CompleteAsk
from tests.unit.worker.bench import Bench, play
from tests.unit.worker.test_worker import CLAIM, COMPLETE, all_are, waiting


def told(bench: Bench) -> list[CompleteAsk]:
    return [ask for path, ask in bench.dispatcher.calls if path == COMPLETE]


def test_reports_bring_the_next_tasks_and_no_more_than_there_is_room_for() -> None:
    async def story(bench: Bench) -> None:
        bench.runtime.joins_batches = False
        bench.listener.is_waiting_there = True
        bench.dispatcher.is_claiming_with_ends = True
        await bench.until(lambda: all_are(bench, "completed"))
        assert bench.runtime.most_at_once == 2
        # The first claim, and one that finds nothing; everything else came with an end.
        assert bench.dispatcher.paths()[CLAIM] <= 4
        assert all(
            each.limit <= 2
            for ask in told(bench)
            for each in ask.next
            if each.operator == "a:clean"
        )
        assert all(
            len(task.tokens) and task.claims == 1 for task in bench.dispatcher.tasks.values()
        )

    play(story, setting=waiting(20), concurrency=2, ahead_seconds=0)


def test_who_is_woken_by_a_queue_asks_for_nothing_with_its_ends() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: all_are(bench, "completed"))
        assert not any(ask.next for ask in told(bench))

    play(story, setting=waiting(5), concurrency=2)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_report_that_is_not_answered_keeps_nobody_from_claiming(is_lost: bool) -> None:
    async def story(bench: Bench) -> None:
        bench.runtime.joins_batches = False
        bench.listener.is_waiting_there = True
        bench.dispatcher.is_claiming_with_ends = True
        await bench.until(lambda: len(bench.runtime.works) == 1)
        if is_lost:
            bench.dispatcher.answers_lost[COMPLETE] = 1
        await bench.until(lambda: bool(told(bench)))
        # Of what a lost answer has claimed nobody knows: its lease has to end.

        def are_done() -> bool:
            bench.dispatcher.reap()
            return all_are(bench, "completed")

        await bench.until(are_done, seconds=200)

    play(story, setting=waiting(3), concurrency=1, ahead_seconds=0)


def test_a_worker_that_stops_asks_for_nothing_more() -> None:
    async def story(bench: Bench) -> None:
        bench.runtime.joins_batches = False
        bench.listener.is_waiting_there = True
        bench.dispatcher.is_claiming_with_ends = True
        await bench.until(lambda: len(bench.runtime.running) == 2)
        began = len(told(bench))
        await bench.stopped()
        assert not any(ask.next for ask in told(bench)[began:])
        assert not any(t.status == "running" for t in bench.dispatcher.tasks.values())

    play(story, setting=waiting(9), concurrency=2, seconds=3.0)
