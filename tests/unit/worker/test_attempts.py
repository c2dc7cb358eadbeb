"""How attempts end when several things happen to them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import pytest

from penstock.kernel.errors import DispatcherUnavailable, WorkFailed, WorkReleased
from penstock.protocol.problem import Problem
from penstock.protocol.work import CompleteAsk, ResultsAnswer, TaskResult
from penstock.runtimes.base import AttemptWork, ProducedOutput, WorkReporter
from penstock.testing.virtual import World, simulate
from penstock.worker.assignment_codec import work_of
from penstock.worker.attempt import InterruptReason, TaskAttempt
from penstock.worker.client import InternalClient
from penstock.worker.reporter import CompletionReporter
from tests.unit.worker.bench import Bench, play
from tests.unit.worker.scripted import Dispatcher, now
from tests.unit.worker.test_assignment_codec import assignment
from tests.unit.worker.test_worker import CLAIM, COMPLETE, HEARTBEAT, waiting


class Slow:
    """Work that takes eight seconds to clean up when it is interrupted."""

    def __init__(self) -> None:
        self.cleaned: list[float] = []

    async def __call__(
        self, work: AttemptWork, reporter: WorkReporter
    ) -> tuple[ProducedOutput, ...]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            began = now()
            try:
                async with asyncio.timeout(8):
                    await asyncio.Event().wait()
            except TimeoutError:
                pass
            finally:
                self.cleaned.append(now() - began)
            raise
        return ()


def test_work_that_is_lost_while_it_is_being_interrupted_tells_nothing() -> None:
    slow = Slow()

    async def story(bench: Bench) -> None:
        task = bench.dispatcher.tasks[1]
        await bench.until(lambda: bool(bench.runtime.running))
        task.cancel_asked = True
        await bench.until(lambda: bench.dispatcher.paths()[HEARTBEAT] == 1)
        await bench.clock.sleep(0.1)
        task.status = "completed"
        await bench.until(lambda: not bench.runtime.running, seconds=10)
        await bench.clock.sleep(5)
        assert bench.dispatcher.paths()[COMPLETE] == 0

    play(story, setting=waiting(1, heartbeat_seconds=6.0), doing=slow)


def test_a_second_interruption_does_not_cut_the_first_short() -> None:
    slow = Slow()

    async def story(bench: Bench) -> None:
        task = bench.dispatcher.tasks[1]
        slow.cleaned.clear()
        await bench.until(lambda: bool(bench.runtime.running))
        task.cancel_asked = True
        await bench.until(lambda: bench.dispatcher.paths()[HEARTBEAT] == 1)
        await bench.clock.sleep(1)
        bench.worker.stop()
        await bench.stopped()
        assert slow.cleaned == [pytest.approx(8)]
        # The first reason is the one that is told.
        assert task.reason == "It was cancelled."

    play(story, setting=waiting(1, heartbeat_seconds=6.0), doing=slow)


def test_why_it_was_interrupted_counts_and_not_how_the_work_puts_it() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if work.task_id == 1:
                raise WorkFailed("The process was killed.", is_retried=False) from None
            raise ValueError("broken pipe") from None
        return ()

    async def story(bench: Bench) -> None:
        tasks = bench.dispatcher.tasks.values()
        await bench.until(lambda: all(task.ended for task in tasks))
        assert {task.reason for task in tasks} == {"It took longer than 10 s."}
        assert {task.status for task in tasks} == {"failed"}

    play(story, setting=waiting(2, timeout_seconds=10.0), doing=doing)


def test_the_time_that_work_waits_in_its_runtime_is_not_its_own() -> None:
    ended: list[float] = []

    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        began = now()
        try:
            for is_running, seconds in ((False, 100), (True, 9), (False, 100), (True, 20)):
                reporter.timed(is_running=is_running)
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await asyncio.Event().wait()
        finally:
            ended.append(now() - began)
        return ()

    async def story(bench: Bench) -> None:
        ended.clear()
        task = bench.dispatcher.tasks[1]
        await bench.until(lambda: bool(task.ended), seconds=300)
        assert task.reason == "It took longer than 10 s."
        assert ended == [pytest.approx(219)]

    play(story, setting=waiting(1, timeout_seconds=10.0), doing=doing)


def test_that_a_task_is_to_run_alone_is_passed_on_both_ways() -> None:
    given = msgspec.structs.replace(assignment(), runs_alone=True)
    assert work_of(given, logs=None, grace_seconds=1.0).runs_alone
    assert not work_of(assignment(), logs=None, grace_seconds=1.0).runs_alone
    attempt = TaskAttempt(given)
    died = WorkReleased("It died.", is_delayed=False, runs_alone=True)
    release = attempt.unfinished(died).release
    assert release is not None
    assert (release.runs_alone, release.is_delayed) == (True, False)
    failure = attempt.unfinished(WorkFailed("It died.", runs_alone=True)).failure
    assert failure is not None
    assert failure.runs_alone


def test_attempts_that_began_at_different_times_are_soon_told_of_together() -> None:
    async def story(bench: Bench) -> None:
        for _ in range(4):
            bench.dispatcher.add()
            await bench.listener.say()
            await bench.clock.sleep(1)
        await bench.clock.sleep(300)
        # Every ten seconds, and not four times as often.
        assert 25 <= bench.dispatcher.paths()[HEARTBEAT] <= 34

    def setting(dispatcher: Dispatcher) -> None:
        dispatcher.operators["a:clean"] = "process"

    async def until_started(bench: Bench) -> None:
        await bench.until(lambda: bench.listener.listening != [])
        await story(bench)

    play(until_started, setting=setting, seconds=1000)


def test_an_end_whose_answers_are_lost_is_told_until_it_is_answered() -> None:
    async def story(bench: Bench) -> None:
        # The dispatcher has taken the end, so heartbeats are refused meanwhile.
        bench.dispatcher.answers_lost[COMPLETE] = 8
        await bench.until(lambda: bench.dispatcher.answers_lost[COMPLETE] == 0)
        assert bench.dispatcher.paths()[HEARTBEAT] > 0
        await bench.clock.sleep(20)
        assert bench.dispatcher.paths()[COMPLETE] == 9
        assert len(bench.dispatcher.tasks[1].ended) == 1

    play(story, setting=waiting(1, heartbeat_seconds=1.5))


def test_the_only_end_does_not_wait_for_others() -> None:
    async def story(bench: Bench) -> None:
        took = await bench.until(lambda: bench.dispatcher.tasks[1].status == "completed")
        assert took < 1.5

    play(story, setting=waiting(1), seconds=1, gather_seconds=5.0)


def test_nothing_is_begun_while_ends_are_not_answered() -> None:
    async def story(bench: Bench) -> None:
        problem = Problem(type="unavailable", title="Not now.", status=503)
        bench.dispatcher.problems[COMPLETE] = problem
        await bench.clock.sleep(120)
        assert len(bench.runtime.works) <= 4
        del bench.dispatcher.problems[COMPLETE]
        await bench.until(
            lambda: all(task.status == "completed" for task in bench.dispatcher.tasks.values()),
            seconds=40,
        )

    play(story, setting=waiting(20), seconds=1, concurrency=2)


def test_an_operator_is_asked_again_when_a_task_of_it_has_ended() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: bool(bench.runtime.running))
        await bench.clock.sleep(1)
        second = bench.dispatcher.add()
        await bench.until(lambda: second.status == "running", seconds=5)

    play(story, setting=waiting(1), seconds=5)


def test_a_place_is_free_before_the_end_of_its_task_is_answered() -> None:
    async def story(bench: Bench) -> None:
        first, second = bench.dispatcher.tasks.values()
        await bench.until(lambda: first.status == "completed")
        # Both calls were under way at once.
        await bench.until(lambda: second.status == "running", seconds=0.2)
        assert bench.dispatcher.paths()[CLAIM] == 2

    def setting(dispatcher: Dispatcher) -> None:
        waiting(2)(dispatcher)
        dispatcher.latency_seconds = 1.0

    play(story, setting=setting, concurrency=1)


class Blocked(InternalClient):
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Sequence[int]] = []
        self.go_on = asyncio.Event()
        self.is_down = True

    async def complete(self, ask: CompleteAsk) -> ResultsAnswer:
        self.asked.append([each.task_id for each in ask.tasks])
        await self.go_on.wait()
        if self.is_down:
            raise DispatcherUnavailable("nobody is there")
        return ResultsAnswer(
            results=[TaskResult(task_id=each.task_id, status=200) for each in ask.tasks]
        )


def test_an_end_that_is_lost_while_it_is_being_told_is_not_told_again() -> None:
    async def main(world: World) -> None:
        clock, client, done = world.clock(), Blocked(), list[TaskAttempt]()
        completions = CompletionReporter(
            client,
            clock=clock,
            entropy=world.entropy("endings"),
            gather_seconds=0.01,
            done=done.append,
            moved=lambda *_: None,
            is_idle=lambda: True,
        )
        attempt = TaskAttempt(assignment())
        completions.add(attempt, attempt.failure("x"))
        running = world.loop.create_task(completions.run())
        await clock.sleep(1)
        attempt.interrupt(InterruptReason.LOST)
        completions.forget(attempt)
        assert len(completions) == 1
        client.go_on.set()
        await clock.sleep(60)
        assert client.asked == [[7]]
        assert len(completions) == 0
        await completions.drained()
        running.cancel()

    simulate(main, seed=1)


def test_an_end_that_is_forgotten_is_not_told() -> None:
    async def main(world: World) -> None:
        clock, client = world.clock(), Blocked()
        completions = CompletionReporter(
            client,
            clock=clock,
            entropy=world.entropy("endings"),
            gather_seconds=0.01,
            done=lambda _: None,
            moved=lambda *_: None,
            is_idle=lambda: True,
        )
        attempt = TaskAttempt(assignment())
        completions.add(attempt, attempt.failure("x"))
        completions.forget(attempt)
        await completions.drained()
        running = world.loop.create_task(completions.run())
        await clock.sleep(60)
        assert client.asked == []
        running.cancel()

    simulate(main, seed=1)


def test_an_end_that_waits_is_dropped_when_its_task_comes_back() -> None:
    async def story(bench: Bench) -> None:
        task = bench.dispatcher.tasks[1]
        bench.dispatcher.problems[COMPLETE] = Problem(type="x", title="Not now.", status=503)
        await bench.until(lambda: bench.dispatcher.paths()[COMPLETE] == 5)
        await bench.clock.sleep(0.5)
        bench.worker._executor.begin([bench.dispatcher._begun(task)])
        del bench.dispatcher.problems[COMPLETE]
        told = len(bench.dispatcher.calls)
        await bench.until(lambda: task.status == "completed", seconds=30)
        asks = [ask for path, ask in bench.dispatcher.calls[told:] if path == COMPLETE]
        assert [end.attempt for ask in asks for end in ask.tasks] == [2]

    play(story, setting=waiting(1))
