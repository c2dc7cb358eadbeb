"""A claim whose answer was lost is repeated, and one that is answered late begins nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.runtimes.base import AttemptWork, ProducedOutput, WorkReporter
from tests.unit.worker.bench import Bench, play
from tests.unit.worker.scripted import Dispatcher
from tests.unit.worker.test_worker import CLAIM, COMPLETE, HEARTBEAT, all_are, waiting

ACKNOWLEDGE_SECONDS = 10.0


def claimed_by_id(count: int, **fields: Any) -> Callable[[Dispatcher], None]:
    """So many tasks, at a dispatcher that wants claims to be acknowledged."""

    def setting(dispatcher: Dispatcher) -> None:
        waiting(count, **fields)(dispatcher)
        dispatcher.acknowledge_seconds = ACKNOWLEDGE_SECONDS

    return setting


def once_each(dispatcher: Dispatcher) -> bool:
    return all(task.claims == 1 for task in dispatcher.tasks.values())


@pytest.mark.parametrize("answers_lost", [1, 2, 5])
def test_a_claim_that_is_not_answered_is_repeated(answers_lost: int) -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: all_are(bench, "completed"))
        assert once_each(bench.dispatcher)
        assert len(bench.runtime.works) == 5

    def setting(dispatcher: Dispatcher) -> None:
        claimed_by_id(5)(dispatcher)
        dispatcher.answers_lost[CLAIM] = answers_lost

    play(story, setting=setting, concurrency=2)


@pytest.mark.parametrize("answers_lost", [1, 2])
def test_a_report_that_is_not_answered_brings_what_it_has_claimed(answers_lost: int) -> None:
    async def story(bench: Bench) -> None:
        bench.runtime.joins_batches = False
        bench.listener.is_waiting_there = True
        bench.dispatcher.is_claiming_with_ends = True
        await bench.until(lambda: len(bench.runtime.works) == 1)
        bench.dispatcher.answers_lost[COMPLETE] = answers_lost
        await bench.until(lambda: all_are(bench, "completed"))
        assert once_each(bench.dispatcher)

    play(story, setting=claimed_by_id(4), concurrency=1, ahead_seconds=0)


def test_what_runs_for_longer_is_acknowledged_in_time() -> None:
    async def story(bench: Bench) -> None:

        def is_done() -> bool:
            bench.dispatcher.reap()
            return all_are(bench, "completed")

        await bench.until(is_done, seconds=300)
        assert once_each(bench.dispatcher)
        assert bench.dispatcher.paths()[HEARTBEAT] >= 1

    play(story, setting=claimed_by_id(3), concurrency=1, seconds=15.0)


def test_of_an_answer_that_comes_late_only_what_is_still_held_begins() -> None:
    async def story(bench: Bench) -> None:
        dispatcher = bench.dispatcher
        gone, kept = dispatcher.tasks.values()
        await bench.until(lambda: gone.status == "running" and kept.status == "running")
        # The answer is under way for eight seconds, and meanwhile somebody else has the one.
        gone.status, gone.attempt, gone.claims = "elsewhere", gone.attempt + 1, gone.claims + 1
        await bench.until(lambda: kept.status == "completed", seconds=300)
        assert [each.task_id for each in bench.runtime.works] == [kept.id]
        assert kept.claims == 1

    def setting(dispatcher: Dispatcher) -> None:
        claimed_by_id(2)(dispatcher)
        dispatcher.answer_latency_seconds[CLAIM] = 8.0

    play(story, setting=setting, concurrency=2)


def test_a_call_that_hangs_keeps_back_no_acknowledgement() -> None:
    async def story(bench: Bench) -> None:
        dispatcher = bench.dispatcher
        await bench.until(lambda: dispatcher.paths()[HEARTBEAT] > 0)
        (old,) = dispatcher.tasks.values()
        await bench.until(lambda: old.claim_id is None)
        # A heartbeat of the old one hangs for 20 seconds when the young one is claimed.
        dispatcher.hanging.add(HEARTBEAT)
        await bench.clock.sleep(20.5)
        young = dispatcher.add(heartbeat_seconds=60.0)
        await bench.until(lambda: young.status == "running")
        await bench.clock.sleep(1.0)
        dispatcher.hanging.clear()
        await bench.until(lambda: young.claim_id is None, seconds=ACKNOWLEDGE_SECONDS - 1.0)

    play(story, setting=claimed_by_id(1, heartbeat_seconds=60.0), concurrency=2, seconds=200.0)


def test_an_acknowledgement_that_is_not_answered_is_sent_again_in_time() -> None:
    async def story(bench: Bench) -> None:
        dispatcher = bench.dispatcher
        (task,) = dispatcher.tasks.values()
        dispatcher.hanging.add(HEARTBEAT)
        await bench.until(lambda: task.status == "running")
        await bench.clock.sleep(4.0)
        dispatcher.hanging.clear()
        await bench.until(lambda: task.claim_id is None, seconds=ACKNOWLEDGE_SECONDS - 4.0)

    play(story, setting=claimed_by_id(1, heartbeat_seconds=60.0), concurrency=2, seconds=200.0)


def test_an_acknowledgement_that_is_refused_for_now_is_sent_again_in_time() -> None:
    async def story(bench: Bench) -> None:
        dispatcher = bench.dispatcher
        (task,) = dispatcher.tasks.values()
        await bench.until(lambda: task.status == "running")
        dispatcher.unknown_tokens = 1
        await bench.until(lambda: task.claim_id is None, seconds=ACKNOWLEDGE_SECONDS)

    play(story, setting=claimed_by_id(1, heartbeat_seconds=60.0), concurrency=2, seconds=200.0)


@pytest.mark.parametrize("answers_lost", [0, 1, 3])
def test_of_an_answer_that_comes_late_nothing_is_forgotten(answers_lost: int) -> None:
    async def story(bench: Bench) -> None:
        dispatcher = bench.dispatcher
        dispatcher.answers_lost[HEARTBEAT] = answers_lost
        await bench.until(lambda: all_are(bench, "completed"), seconds=60.0)
        assert once_each(dispatcher)

    def setting(dispatcher: Dispatcher) -> None:
        claimed_by_id(2, heartbeat_seconds=60.0)(dispatcher)
        dispatcher.answer_latency_seconds[CLAIM] = 8.0

    play(story, setting=setting, concurrency=2)


def test_what_cannot_be_acknowledged_is_given_back() -> None:
    async def story(bench: Bench) -> None:
        dispatcher = bench.dispatcher
        dispatcher.hanging.add(HEARTBEAT)
        await bench.until(lambda: all_are(bench, "released"), seconds=90.0)
        assert bench.runtime.works == []

    play(story, setting=claimed_by_id(1, heartbeat_seconds=30.0), concurrency=1)


@pytest.mark.parametrize(("has_journal", "was_lost"), [(False, False), (True, True), (True, False)])
def test_what_would_not_be_known_to_have_begun_is_acknowledged_first(
    has_journal: bool, was_lost: bool, tmp_path: Path
) -> None:
    is_first = not has_journal or was_lost
    seen: list[bool] = []

    async def story(bench: Bench) -> None:
        tasks = bench.dispatcher.tasks

        async def doing(work: AttemptWork, _: WorkReporter) -> tuple[ProducedOutput, ...]:
            seen.append(tasks[work.task_id].claim_id is None)
            return ()

        bench.runtime.doing = doing
        await bench.until(lambda: all_are(bench, "completed"))
        # One call for all that a claim has brought, or none.
        assert bench.dispatcher.paths()[HEARTBEAT] <= (2 if is_first else 0)

    play(
        story,
        setting=claimed_by_id(4, was_lost=was_lost),
        concurrency=4,
        locks=tmp_path if has_journal else None,
    )
    assert seen
    assert set(seen) == {is_first}


def test_a_claim_whose_answer_is_always_faulty_is_given_up() -> None:
    async def story(bench: Bench) -> None:
        (_, task) = bench.dispatcher.tasks.values()
        await bench.until(lambda: task.status == "completed", seconds=60.0)
        assert once_each(bench.dispatcher)

    def setting(dispatcher: Dispatcher) -> None:
        claimed_by_id(2)(dispatcher)
        dispatcher.unspeakable.add(1)

    play(story, setting=setting, concurrency=1)


def test_an_end_is_acknowledged_whatever_is_claimed_with_it() -> None:
    async def story(bench: Bench) -> None:
        bench.runtime.joins_batches = False
        bench.listener.is_waiting_there = True
        bench.dispatcher.is_claiming_with_ends = True
        _, _, task = bench.dispatcher.tasks.values()
        await bench.until(lambda: task.status == "completed", seconds=60.0)
        assert [each.task_id for each in bench.runtime.works] == [1, 3]

    def setting(dispatcher: Dispatcher) -> None:
        claimed_by_id(3)(dispatcher)
        dispatcher.unspeakable.add(2)

    play(story, setting=setting, concurrency=1, ahead_seconds=0)
