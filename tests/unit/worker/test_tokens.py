"""Capability tokens on their way: each call brings the newest that the attempt has."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from penstock.protocol.problem import Problem
from penstock.runtimes.base import AttemptWork, ProducedOutput, WorkEvent, WorkReporter
from penstock.worker.attempt import TaskAttempt
from tests.unit.worker.bench import Bench, nothing, play
from tests.unit.worker.test_assignment_codec import assignment
from tests.unit.worker.test_worker import COMPLETE, HEARTBEAT, waiting

EVENTS = "/v1/task/events"


def tokens(bench: Bench, path: str) -> list[str | None]:
    """The tokens of a task's entries in the calls of a path."""
    asks: list[Any] = [ask for called, ask in bench.dispatcher.calls if called == path]
    return [each.token for ask in asks for each in ask.tasks]


def test_a_heartbeat_brings_the_next_token() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "completed")
        assert tokens(bench, HEARTBEAT) == ["cap.1.1-0", "cap.1.1-1", "cap.1.1-2"]
        assert tokens(bench, COMPLETE) == ["cap.1.1-3"]

    play(story, setting=waiting(1, heartbeat_seconds=3.0), seconds=3.5)


def test_an_empty_token_keeps_the_old_one() -> None:
    async def story(bench: Bench) -> None:
        bench.dispatcher.is_signing = False
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "completed")
        assert set(tokens(bench, HEARTBEAT)) == {"cap.1.1-0"}
        assert tokens(bench, COMPLETE) == ["cap.1.1-0"]

    play(story, setting=waiting(1, heartbeat_seconds=3.0), seconds=3.5)


def test_a_failure_has_its_token_too() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        raise ValueError("no")

    async def story(bench: Bench) -> None:
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "failed")
        assert tokens(bench, COMPLETE) == ["cap.1.1-0"]

    play(story, setting=waiting(1), doing=doing)


def test_a_heartbeat_whose_token_is_not_known_interrupts_nothing() -> None:
    async def story(bench: Bench) -> None:
        bench.dispatcher.unknown_tokens = 2
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "completed")
        assert bench.dispatcher.tasks[1].attempt == 1
        assert bench.runtime.cancelled == []

    play(story, setting=waiting(1, heartbeat_seconds=3.0), seconds=3.5)


def test_an_end_whose_token_is_not_known_is_told_again_as_it_is() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: bool(bench.runtime.running))
        bench.dispatcher.unknown_tokens = 2
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "completed")
        assert len(tokens(bench, COMPLETE)) == 3
        assert bench.dispatcher.tasks[1].ended[0].failure is None

    play(story, setting=waiting(1, heartbeat_seconds=3000.0))


def test_an_end_is_told_again_with_the_newest_token() -> None:
    async def story(bench: Bench) -> None:
        bench.dispatcher.strange_ends.add("cap.1.1-0")
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "completed")
        assert tokens(bench, COMPLETE) == ["cap.1.1-0", "cap.1.1-1"]

    play(story, setting=waiting(1, heartbeat_seconds=6.0))


def test_an_end_that_never_proves_anything_is_left_to_the_reaper() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: bool(bench.runtime.running))
        bench.dispatcher.unknown_tokens = 1000
        await bench.until(lambda: len(tokens(bench, COMPLETE)) == 5)
        await bench.clock.sleep(100)
        assert len(tokens(bench, COMPLETE)) == 5
        assert bench.dispatcher.tasks[1].status == "running"
        # Nothing is said of it any more, so that its lease can run out.
        assert tokens(bench, HEARTBEAT) == []

    play(story, setting=waiting(1, heartbeat_seconds=300.0))


def test_events_bring_the_newest_token_and_wait_for_one_that_is_valid() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        await reporter.emit([WorkEvent(output="out", event_id="1", cursor=1)])
        return await nothing(work, reporter)

    async def story(bench: Bench) -> None:
        # It has expired while nobody answered: the heartbeat brings the next.
        bench.dispatcher.expired.add("cap.1.1-0")
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "completed")
        assert bench.dispatcher.paths()[EVENTS] > 1
        assert tokens(bench, COMPLETE) == ["cap.1.1-1"]

    play(story, setting=waiting(1, heartbeat_seconds=6.0), doing=doing)


def test_events_that_never_prove_anything_fail_the_attempt() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        await reporter.emit([WorkEvent(output="out", event_id="1", cursor=1)])
        return await nothing(work, reporter)

    async def story(bench: Bench) -> None:
        refusal = Problem(type="token bad signature", title="It is not signed.", status=403)
        bench.dispatcher.problems[EVENTS] = refusal
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "failed")
        assert bench.dispatcher.tasks[1].reason == "Its events were refused: It is not signed."

    play(story, setting=waiting(1, heartbeat_seconds=6.0), doing=doing, seeds=range(2))


def test_a_token_that_nobody_knows_gives_way_to_the_one_before_it() -> None:
    """As after a failover that has lost the row of the newest key."""

    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(tokens(bench, HEARTBEAT)) == 2)
        bench.dispatcher.strangers.update(f"cap.1.1-{number}" for number in range(2, 5))
        await bench.until(lambda: len(tokens(bench, HEARTBEAT)) == 7)
        # Each new one is of that key, until it is known again.
        assert tokens(bench, HEARTBEAT)[2:] == [
            *("cap.1.1-2", "cap.1.1-1", "cap.1.1-3", "cap.1.1-1", "cap.1.1-4"),
        ]
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "completed")
        assert tokens(bench, COMPLETE)[0] == "cap.1.1-5"

    play(story, setting=waiting(1, heartbeat_seconds=3.0), seconds=8.5)


def test_an_end_is_told_with_the_token_before_if_that_one_is_known() -> None:
    async def story(bench: Bench) -> None:
        bench.dispatcher.strange_ends.add("cap.1.1-1")
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "completed")
        assert tokens(bench, COMPLETE) == ["cap.1.1-1", "cap.1.1-0"]

    play(story, setting=waiting(1, heartbeat_seconds=30.0), seconds=11)


def test_a_token_that_is_older_and_no_good_either_takes_turns() -> None:
    attempt = TaskAttempt(msgspec.structs.replace(assignment(), token="first"))
    attempt.doubt("first")
    assert attempt.token == "first"
    attempt.renew("second")
    attempt.doubt("first")
    assert attempt.token == "second", "not the one that was sent"
    attempt.doubt("second")
    attempt.doubt("second")
    assert attempt.token == "first", "two calls with one token are one doubt"
    attempt.doubt("first")
    assert attempt.token == "second"


def test_a_heartbeat_is_never_longer_than_a_call_may_be() -> None:
    """Tokens and progress may be long: many attempts are told of in several calls."""
    count = 60

    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        reporter.progress({"words": "x" * 15_000})
        await asyncio.Event().wait()
        return ()

    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == count)
        await bench.until(lambda: all(each.progress for each in bench.dispatcher.tasks.values()))
        asks = [ask for path, ask in bench.dispatcher.calls if path == HEARTBEAT]
        assert len(asks) == 2
        assert all(len(msgspec.json.encode(each)) <= 501_000 for each in asks)
        assert sum(len(each.tasks) for each in asks) == count

    setting = waiting(count, heartbeat_seconds=30.0)
    play(story, setting=setting, doing=doing, seeds=[1], concurrency=count)
