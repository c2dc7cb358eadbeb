"""The worker against a dispatcher that fails, refuses, cancels and comes back, on virtual time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from penstock.kernel.errors import (
    DispatcherRefused,
    DispatcherUnavailable,
    WorkFailed,
    WorkReleased,
)
from penstock.protocol.problem import Problem
from penstock.runtimes.base import AttemptWork, ProducedOutput, WorkEvent, WorkReporter
from penstock.testing.virtual import VirtualClock
from penstock.worker.client import InternalClient
from tests.unit.worker.bench import Bench, Doing, nothing, play
from tests.unit.worker.scripted import DATASET, GENERATION, Dispatcher, Task

CLAIM, COMPLETE = "/internal/task-claim", "/v1/task/complete"
HEARTBEAT, HELLO = "/v1/task/heartbeat", "/internal/hello"


def waiting(count: int, **fields: Any) -> Callable[[Dispatcher], None]:
    """So many tasks."""

    def setting(dispatcher: Dispatcher) -> None:
        for _ in range(count):
            dispatcher.add(**fields)

    return setting


def all_are(bench: Bench, status: str) -> bool:
    return all(task.status == status for task in bench.dispatcher.tasks.values())


def counted(bench: Bench) -> Counter[str]:
    """How many tasks there are of each status."""
    return Counter(task.status for task in bench.dispatcher.tasks.values())


def at_first_short(clock: VirtualClock, *, then_seconds: float) -> Doing:
    """Twenty tasks that are short, and then others."""

    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        await clock.sleep(0.01 if work.task_id <= 20 else then_seconds)
        return await nothing(work, reporter)

    return doing


def test_what_waits_is_claimed_run_and_published_at_the_place_of_the_attempt() -> None:
    async def story(bench: Bench) -> None:
        task = bench.dispatcher.tasks[1]
        await bench.until(lambda: task.status == "completed", seconds=2)
        (end,) = task.ended
        (output,) = end.outputs
        assert (output.dataset, output.partition_key) == (DATASET, "a/b")
        folder = f"file:///data/datasets/cleaned/{GENERATION}/a~2Fb/"
        assert output.location.startswith(f"{folder}1-1-")
        assert len(output.location) == len(folder) + len("1-1-") + 24
        (work,) = bench.runtime.works
        assert (work.task_id, work.attempt, work.config) == (1, 1, {"x": 1})
        assert work.scratch == f"file:///data/scratch/{output.location.removeprefix(folder)}"
        assert bench.dispatcher.worker() == "worker-1"
        assert bench.dispatcher.headers["authorization"] == "Bearer secret"

    definition = {
        "outputs": [{"name": "out", "dataset": "cleaned"}],
        "datasets": {"cleaned": DATASET},
        "config": {"x": 1},
    }
    play(
        story,
        setting=lambda d: d.add(payload={"partition_key": "a/b"}, definition=definition),
    )


def test_short_tasks_take_few_calls() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: all_are(bench, "completed"), seconds=60)
        paths = bench.dispatcher.paths()
        assert bench.runtime.most_at_once <= 32
        # 640 tasks, 32 at a time: 20 rounds, and some calls to find out that there is no more.
        assert paths[CLAIM] <= 64
        assert paths[COMPLETE] <= 64
        assert paths[HEARTBEAT] == 0
        assert bench.dispatcher.most_in_calls[CLAIM] == 1
        assert bench.dispatcher.most_in_calls[COMPLETE] == 1

    play(story, setting=waiting(640), seconds=0.02, concurrency=32)


def test_short_tasks_are_claimed_ahead_of_slots_and_run_in_these() -> None:
    async def story(bench: Bench) -> None:
        bench.runtime.joins_batches = False
        await bench.until(lambda: all_are(bench, "completed"), seconds=60)
        assert bench.runtime.most_at_once == 4
        # 80 rounds of slots, 16 tasks a claim.
        assert bench.dispatcher.paths()[CLAIM] <= 70

    play(story, setting=waiting(320), seconds=0.02, concurrency=4)


def test_long_tasks_are_not_claimed_ahead() -> None:
    async def story(bench: Bench) -> None:
        bench.runtime.joins_batches = False
        await bench.until(lambda: all_are(bench, "completed"))
        asks = [ask for path, ask in bench.dispatcher.calls if path == CLAIM]
        assert max(ask.limit for ask in asks) == 4

    play(story, setting=waiting(20), seconds=5.0, concurrency=4)


def test_what_waits_too_long_for_a_slot_is_handed_back_and_no_more_is_claimed_ahead() -> None:
    async def story(bench: Bench) -> None:
        bench.runtime.joins_batches = False
        bench.runtime.doing = at_first_short(bench.clock, then_seconds=500.0)
        await bench.until(lambda: counted(bench)["released"] > 0, seconds=30)
        back = [each for each in bench.dispatcher.tasks.values() if each.status == "released"]
        assert {each.reason.partition(" became")[0] for each in back} == {"No slot of its worker"}
        assert not {each.id for each in back} & {each.task_id for each in bench.runtime.works}
        assert all(each.ended[0].release is not None for each in back)
        await bench.clock.sleep(100)
        assert counted(bench)["running"] == len(bench.runtime.running) == 4

    play(story, setting=waiting(100), concurrency=4)


def test_stopping_gives_back_at_once_what_was_claimed_ahead() -> None:
    async def story(bench: Bench) -> None:
        bench.runtime.joins_batches = False
        bench.runtime.doing = at_first_short(bench.clock, then_seconds=5.0)
        await bench.until(
            lambda: (
                counted(bench)["running"] > 8
                and 21 in {each.task_id for each in bench.runtime.works}
            )
        )
        bench.worker.stop()
        await bench.clock.sleep(0.5)
        assert counted(bench)["released"] > 0
        assert counted(bench)["running"] <= 4
        await bench.running[0]
        assert counted(bench)["running"] == 0

    play(story, setting=waiting(100), concurrency=4)


def test_never_more_at_a_time_than_asked_for_and_the_places_are_used() -> None:
    async def story(bench: Bench) -> None:
        took = await bench.until(lambda: all_are(bench, "completed"))
        assert bench.runtime.most_at_once == 4
        assert took < 5 * 10 + 2

    play(story, setting=waiting(20), seconds=10, concurrency=4)


def test_operators_take_turns() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.works) >= 12)
        assert {work.operator for work in bench.runtime.works[:12]} == {"a:many", "b:few"}

    def setting(dispatcher: Dispatcher) -> None:
        for _ in range(100):
            dispatcher.add(operator="a:many")
        for _ in range(2):
            dispatcher.add(operator="b:few")

    play(story, setting=setting, seconds=1, concurrency=4)


def test_a_wake_up_is_settled_by_a_claim_that_began_after_it() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: bench.listener.is_started)
        await bench.clock.sleep(1)
        before = bench.dispatcher.paths()[CLAIM]
        task = bench.dispatcher.add()
        await bench.listener.say()
        assert task.status == "running"
        assert bench.dispatcher.paths()[CLAIM] == before + 1
        await bench.until(lambda: task.status == "completed", seconds=2)
        # Nobody asks all the time: what is left is the slow look.
        quiet = bench.dispatcher.paths()[CLAIM]
        await bench.clock.sleep(20)
        assert bench.dispatcher.paths()[CLAIM] <= quiet + 1

    play(story, setting=lambda d: d.operators.update({"a:clean": "process"}))


def test_a_wake_up_during_a_claim_needs_another() -> None:
    async def story(bench: Bench) -> None:
        # Long enough that the claim is under way, and not carried out, when the wake-up comes.
        bench.dispatcher.latency_seconds = 0.1
        await bench.until(lambda: bench.dispatcher.in_calls[CLAIM] > 0)
        before = bench.dispatcher.paths()[CLAIM]
        await bench.listener.say()
        assert bench.dispatcher.paths()[CLAIM] == before + 2

    play(story, setting=lambda d: d.operators.update({"a:clean": "process"}))


def test_a_lost_wake_up_only_delays() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: bench.listener.is_started)
        await bench.clock.sleep(1)
        task = bench.dispatcher.add()
        took = await bench.until(lambda: task.status == "completed")
        assert 1 < took < 40

    play(story, setting=lambda d: d.operators.update({"a:clean": "process"}))


def test_a_full_worker_hears_nothing_and_sends_wake_ups_elsewhere() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == 2)
        with pytest.raises(DispatcherUnavailable, match="no room"):
            await bench.listener.say()
        assert bench.listener.listening == [["a:clean"], []]
        with pytest.raises(DispatcherUnavailable, match="no room"):
            await bench.listener.say()
        await bench.until(lambda: len(bench.runtime.running) < 2)
        await bench.clock.sleep(0.1)
        assert bench.listener.listening[-1] == ["a:clean"]

    play(story, setting=waiting(2), seconds=60, concurrency=2)


def test_new_operators_are_served_and_those_that_are_gone_are_not() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: bench.listener.listening == [["a:clean"]])
        task = bench.dispatcher.add(operator="b:new")
        await bench.until(lambda: task.status == "completed", seconds=10)
        assert bench.listener.listening[-1] == ["a:clean", "b:new"]
        del bench.dispatcher.operators["a:clean"]
        await bench.until(lambda: bench.listener.listening[-1] == ["b:new"], seconds=10)
        claims = bench.dispatcher.paths()[CLAIM]
        await bench.listener.say("a:clean")
        assert bench.dispatcher.paths()[CLAIM] == claims

    served = {"a:clean": "process", "x": "spark"}
    play(story, setting=lambda d: d.operators.update(served), hello_seconds=5)


def test_work_outlives_an_outage_that_is_longer_than_its_lease() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == 3)
        bench.dispatcher.is_down = True
        await bench.clock.sleep(300)
        assert not bench.runtime.running
        assert all(now.lease_ends_at < bench.world.loop.time() for now in tasks(bench))
        # It claims nothing that it could not tell the end of.
        assert not bench.runtime.cancelled
        bench.dispatcher.is_down = False
        assert await bench.until(lambda: all_are(bench, "completed")) < 25
        assert [len(task.ended) for task in tasks(bench)] == [1, 1, 1]

    def tasks(bench: Bench) -> list[Task]:
        return list(bench.dispatcher.tasks.values())

    play(story, setting=waiting(3, heartbeat_seconds=30.0), seconds=200)


def test_leases_are_renewed_soon_after_an_outage_and_meanwhile_asked_for_without_a_storm() -> None:
    async def story(bench: Bench) -> None:
        task = bench.dispatcher.tasks[1]
        await bench.until(lambda: bool(bench.runtime.running))
        bench.dispatcher.is_hanging = True
        await bench.clock.sleep(600)
        bench.dispatcher.is_hanging = False
        calls = len(bench.dispatcher.calls)
        took = await bench.until(lambda: task.lease_ends_at > bench.world.loop.time())
        assert took < 21
        assert len(bench.dispatcher.calls) - calls < 10
        assert not bench.runtime.cancelled

    play(story, setting=waiting(1, heartbeat_seconds=30.0), seconds=2000)


@pytest.mark.parametrize("path", [CLAIM, HEARTBEAT, COMPLETE, HELLO])
def test_a_lost_answer_is_asked_for_again(path: str) -> None:
    async def story(bench: Bench) -> None:
        # Twice: the first repeat goes out at once, on another connection.
        bench.dispatcher.answers_lost[path] = 2
        if path == CLAIM:
            await bench.until(lambda: bench.dispatcher.answers_lost[CLAIM] == 0)
            await bench.clock.sleep(31)
            bench.dispatcher.reap()
        await bench.until(lambda: all_are(bench, "completed"))
        assert [len(task.ended) for task in bench.dispatcher.tasks.values()] == [1] * 4

    play(story, setting=waiting(4, heartbeat_seconds=30.0), seconds=40, concurrency=2)


def test_heartbeats_go_together_and_keep_every_lease() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == 8)
        for _ in range(200):
            await bench.clock.sleep(0.5)
            now = bench.world.loop.time()
            assert all(task.lease_ends_at > now for task in bench.dispatcher.tasks.values())
        asks = [ask for path, ask in bench.dispatcher.calls if path == HEARTBEAT]
        # Every second for those that may be silent for three, every ten for the others.
        assert len(asks) < 120
        assert sum(len(ask.tasks) for ask in asks) < 4 * 120 + 4 * 21

    def setting(dispatcher: Dispatcher) -> None:
        for number in range(8):
            dispatcher.add(heartbeat_seconds=3.0 if number % 2 else 30.0)

    play(story, setting=setting, seconds=150)


def test_a_refused_attempt_is_interrupted_and_publishes_nothing() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == 2)
        first, second = bench.dispatcher.tasks.values()
        first.status = "completed"
        await bench.until(lambda: bench.runtime.cancelled == [1], seconds=15)
        assert len(bench.runtime.running) == 1
        await bench.until(lambda: second.status == "completed")
        assert first.ended == []
        told = [e.task_id for p, a in bench.dispatcher.calls if p == COMPLETE for e in a.tasks]
        assert told == [2]

    play(story, setting=waiting(2), seconds=60)


def test_an_end_that_comes_too_late_is_not_told_again() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == 1)
        bench.dispatcher.tasks[1].status = "completed"
        await bench.until(lambda: bench.dispatcher.paths()[COMPLETE] == 1)
        await bench.clock.sleep(60)
        assert bench.dispatcher.paths()[COMPLETE] == 1
        assert bench.dispatcher.paths()[HEARTBEAT] == 0

    play(story, setting=waiting(1), seconds=5)


def test_a_task_that_comes_back_here_ends_its_earlier_attempt() -> None:
    async def story(bench: Bench) -> None:
        task = bench.dispatcher.tasks[1]
        await bench.until(lambda: len(bench.runtime.running) == 1)
        bench.dispatcher.is_down = True
        await bench.clock.sleep(40)
        bench.dispatcher.is_down = False
        bench.dispatcher.reap()
        await bench.listener.say()
        await bench.until(lambda: task.status == "completed")
        assert [end.attempt for end in task.ended] == [2]
        assert bench.runtime.cancelled == [1]

    play(story, setting=waiting(1, heartbeat_seconds=30.0), seconds=60)


def test_a_cancelled_task_is_told_of_by_a_heartbeat() -> None:
    async def story(bench: Bench) -> None:
        task = bench.dispatcher.tasks[1]
        await bench.until(lambda: bool(bench.runtime.running))
        task.cancel_asked = True
        await bench.until(lambda: task.status == "cancelled", seconds=12)
        assert task.reason == "It was cancelled."
        assert bench.runtime.cancelled == [1]

    play(story, setting=waiting(1), seconds=1000)


def test_what_takes_too_long_is_ended_but_not_a_source_that_is_always_on() -> None:
    async def story(bench: Bench) -> None:
        slow, source = bench.dispatcher.tasks.values()
        await bench.until(lambda: slow.status == "failed", seconds=62)
        assert slow.reason == "It took longer than 60 s."
        await bench.clock.sleep(1000)
        assert source.status == "running"
        (work,) = bench.runtime.running.values()
        assert (work.grace_seconds, work.timeout_seconds) == (90.0, None)
        # A source would never end by itself: a worker that stops does not wait for it.
        assert await bench.stopped() < 1
        assert (source.status, source.reason) == ("released", "The worker was stopped.")

    always_on = {"source": {"kind": "always_on", "drain_timeout": "1m30s"}}

    def setting(dispatcher: Dispatcher) -> None:
        dispatcher.add(timeout_seconds=60.0)
        dispatcher.add(timeout_seconds=60.0, definition=always_on)

    play(story, setting=setting, seconds=100_000)


def test_a_source_that_drains_for_longer_than_the_worker_waits_is_handed_back() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(work.grace_seconds)  # noqa: TID251 - virtual time
        return ()

    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == 1)
        assert 39 < await bench.stopped() < 42
        assert all_are(bench, "released")

    always_on = {"source": {"kind": "always_on", "drain_timeout": "10m"}}
    checked: Doing = doing
    play(story, setting=waiting(1, definition=always_on), doing=checked)


def test_stopping_lets_work_end() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == 2)
        took = await bench.stopped()
        assert 15 < took < 21
        assert sorted(task.status for task in bench.dispatcher.tasks.values()) == [
            *("completed", "completed", "queued")
        ]
        assert not bench.listener.is_started

    play(story, setting=waiting(3), seconds=20, concurrency=2)


def test_stopping_gives_back_what_does_not_end_in_time() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == 2)
        assert 30 <= await bench.stopped() < 31
        assert all_are(bench, "released")
        assert {task.reason for task in bench.dispatcher.tasks.values()} == {
            "The worker was stopped."
        }

    play(story, setting=waiting(2), seconds=1000)


def test_stopping_twice_gives_back_at_once() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == 2)
        bench.worker.stop()
        await bench.clock.sleep(1)
        assert await bench.stopped() < 1
        assert all_are(bench, "released")

    play(story, setting=waiting(2), seconds=1000)


def test_what_a_worker_cannot_run_is_handed_back_and_left_to_others() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        raise WorkReleased("There is no module a.")

    async def story(bench: Bench) -> None:
        task = bench.dispatcher.tasks[1]
        began: list[float] = []
        for _ in range(8):
            await bench.until(lambda: task.status == "released")
            began.append(bench.clock.monotonic())
            (end,) = [each.release for each in task.ended[-1:]]
            assert end is not None
            assert (end.reason, end.is_delayed) == ("There is no module a.", True)
            with pytest.raises(DispatcherUnavailable, match="another one may"):
                await bench.listener.say()
            task.status = "queued"
        pauses = [second - first for first, second in itertools.pairwise(began)]
        assert 1 <= pauses[0] < 3
        assert 30 <= pauses[-1] < 61
        assert task.attempt == 8

    checked: Doing = doing
    play(story, setting=waiting(1), doing=checked, look_seconds=1.0)


def test_work_that_ends_well_in_the_grace_period_is_completed() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await nothing(work, reporter)
        return ()

    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == 1)
        await bench.stopped()
        assert all_are(bench, "completed")

    checked: Doing = doing
    play(story, setting=waiting(1), doing=checked, stop_seconds=1.0, seeds=range(2))


@pytest.mark.parametrize("depth", [40, 973, 990, 996, 1000, 5000])
def test_progress_of_one_task_never_ends_the_worker(
    depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        for _ in range(10):
            reporter.progress(nested(depth) if work.task_id == 1 else {"step": 1})
            reporter.progress({"text": "x" * 16_385} if work.task_id == 1 else {"step": 2})
            await clocks[-1].sleep(10)
        return await nothing(work, reporter)

    async def story(bench: Bench) -> None:
        clocks.append(bench.clock)
        await bench.until(lambda: all_are(bench, "completed"), seconds=200)
        strange, plain = bench.dispatcher.tasks.values()
        assert strange.progress == []
        assert set(map(str, plain.progress)) == {"{'step': 2}"}
        told = [each for each in caplog.messages if "progress is not reported" in each]
        assert len(told) == 1, "said once, however often it happens"

    clocks: list[VirtualClock] = []
    checked: Doing = doing
    play(story, setting=waiting(2), doing=checked, seeds=[1])


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


@pytest.mark.parametrize("path", [CLAIM, COMPLETE, HEARTBEAT, HELLO])
def test_an_error_of_one_call_never_ends_the_loop_of_all(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    send = InternalClient._send
    calls: Counter[str] = Counter()

    async def breaking(self: InternalClient, method: str, to: str, *args: Any, **kw: Any) -> Any:
        calls[to] += 1
        # Who does not even come to say hello does not begin.
        if to == path and (to != HELLO or calls[to] > 1) and calls[to] < 4:
            raise RecursionError("deep")
        return await send(self, method, to, *args, **kw)

    async def story(bench: Bench) -> None:
        await bench.until(lambda: all_are(bench, "completed"), seconds=300)
        assert calls[path] >= 4

    monkeypatch.setattr(InternalClient, "_send", breaking)
    few = waiting(2, heartbeat_seconds=9.0)
    play(story, setting=few, seconds=20, seeds=[1], hello_seconds=5)


def test_who_is_stopped_says_goodbye_last() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: all_are(bench, "completed"))
        await bench.stopped()
        said = [ask.is_leaving for path, ask in bench.dispatcher.calls if path == HELLO]
        assert said == [False] * (len(said) - 1) + [True]
        assert bench.dispatcher.calls[-1][0] == HELLO

    play(story, setting=waiting(2))


def test_nobody_has_to_hear_a_goodbye() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: all_are(bench, "completed"))
        bench.dispatcher.is_hanging = True
        assert await bench.stopped() < 10

    play(story, setting=waiting(2))


def test_what_a_claim_brings_while_stopping_is_given_back_unrun() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: bench.dispatcher.in_calls[CLAIM] > 0)
        assert await bench.stopped() < 5
        assert bench.runtime.works == []
        assert all_are(bench, "released")
        assert {task.reason for task in bench.dispatcher.tasks.values()} == {
            "The worker was stopped."
        }

    def setting(dispatcher: Dispatcher) -> None:
        waiting(3)(dispatcher)
        dispatcher.latency_seconds = 1.0

    play(story, setting=setting)


def test_a_worker_that_stops_while_nobody_answers_ends_within_a_bound() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: len(bench.runtime.running) == 2)
        bench.dispatcher.is_hanging = True
        assert await bench.stopped() < 30 + 5 + 15 + 1
        assert all_are(bench, "running")

    play(story, setting=waiting(2), seconds=1000)


def test_a_worker_can_be_stopped_before_anybody_has_answered() -> None:
    async def story(bench: Bench) -> None:
        await bench.clock.sleep(60)
        assert not bench.listener.is_started
        assert await bench.stopped() < 1

    play(story, setting=lambda d: setattr(d, "is_down", True))


def test_a_worker_that_is_not_let_in_says_so() -> None:
    async def story(bench: Bench) -> None:
        with pytest.raises(DispatcherRefused, match="The token is wrong") as caught:
            await bench.running[0]
        assert (caught.value.status, caught.value.kind) == (403, "identity")

    problem = Problem(type="identity", title="The token is wrong.", status=403)
    with pytest.raises(DispatcherRefused):
        play(story, setting=lambda d: d.problems.update({HELLO: problem}), seeds=[1])


def test_failures_are_told_in_the_words_of_the_work() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        match work.task_id:
            case 1:
                raise WorkFailed("ValueError: no such column", is_retried=False)
            case 2:
                raise RuntimeError("broken \ud800 pipe")
            case 3:
                return (ProducedOutput(output="other", location="x"),)
            case 4:
                return (ProducedOutput(output="out", location=""),)
            case 5:
                return (ProducedOutput(output="out", location="x", cursor=2**70),)
            case _:
                raise asyncio.CancelledError

    async def story(bench: Bench) -> None:
        tasks = bench.dispatcher.tasks
        await bench.until(lambda: all(task.ended for task in tasks.values()))
        assert (tasks[1].status, tasks[1].reason) == ("dead", "ValueError: no such column")
        assert (tasks[2].status, tasks[2].reason) == ("failed", "RuntimeError: broken ? pipe")
        assert tasks[3].reason == (
            "The work has made 'other', which is no output of job clean; its outputs: out."
        )
        assert tasks[4].reason.startswith("The outputs of the task cannot be published:")
        assert tasks[5].reason.startswith("The outputs of the task cannot be published:")
        assert tasks[6].reason == "Its runtime stopped it."

    play(story, setting=waiting(6), doing=doing)


def test_a_task_of_a_runtime_that_is_not_here_is_given_back() -> None:
    async def story(bench: Bench) -> None:
        one, two, three = bench.dispatcher.tasks.values()
        await bench.until(lambda: bool(one.ended and two.ended and three.ended))
        assert all_are(bench, "released")
        assert one.reason == (
            "This worker has no runtime 'spark'. Configure it, or upgrade the worker to the release"
            " of the dispatcher."
        )
        assert two.reason.startswith("An output of job clean cannot be read")
        assert three.reason.startswith("This worker cannot read the task: TypeError: ")

    def setting(dispatcher: Dispatcher) -> None:
        dispatcher.operators["a:clean"] = "process"
        dispatcher.add(runtime="spark")
        dispatcher.add(definition={"outputs": ["x"]})
        dispatcher.add(definition={"outputs": 5})

    play(story, setting=setting)


def test_outputs_that_are_refused_are_a_failure_of_that_task_alone() -> None:
    async def story(bench: Bench) -> None:
        good, bad = bench.dispatcher.tasks.values()
        await bench.until(lambda: bool(good.ended and bad.ended))
        assert good.status == "completed"
        assert bad.reason == "Its outputs were refused: Dataset x has the same output twice."

    play(story, setting=lambda d: (d.add(), d.add(bad_outputs=True)))


def test_a_call_that_is_not_understood_is_taken_apart() -> None:
    async def story(bench: Bench) -> None:
        problem = Problem(type="malformed", title="Too much.", status=413)
        bench.dispatcher.problems_once[COMPLETE] = problem
        await bench.until(lambda: all_are(bench, "completed"), seconds=5)
        asks = [len(ask.tasks) for path, ask in bench.dispatcher.calls if path == COMPLETE]
        assert asks == [4, 1, 1, 1, 1]

    play(story, setting=waiting(4))


def test_an_end_that_breaks_the_dispatcher_does_not_hold_up_the_others() -> None:
    async def story(bench: Bench) -> None:
        tasks = list(bench.dispatcher.tasks.values())

        broken = Problem(type="bug", title="It broke.", status=500)
        original = bench.dispatcher._answer
        bench.dispatcher._answer = (  # type: ignore[method-assign]
            lambda path, body: (
                original(path, body)
                if path != COMPLETE or b'"task_id":3,' not in body
                else (500, broken)
            )
        )
        await bench.until(lambda: [task.status for task in tasks].count("completed") == 7)
        assert tasks[2].status == "running"

    play(story, setting=waiting(8), seeds=[1, 2])


def test_progress_goes_with_a_heartbeat_and_only_once() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        reporter.progress({"rows": 1})
        reporter.progress({"rows": 2})
        reporter.progress({"bad": object()})
        reporter.progress({"large": "x" * 100_000})
        await asyncio.Event().wait()
        return ()

    async def story(bench: Bench) -> None:
        task = bench.dispatcher.tasks[1]
        await bench.until(lambda: bench.dispatcher.paths()[HEARTBEAT] == 3)
        assert task.progress == [{"rows": 2}]
        bench.worker.stop()

    play(story, setting=waiting(1), doing=doing)


def test_events_of_running_work_are_sent_until_they_are_heard() -> None:
    said: list[str] = []

    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        news = [
            WorkEvent(output="out", event_id=str(n), cursor=n, payload={"n": n})
            for n in range(1500)
        ]
        said.append(await reporter.emit(news))
        with pytest.raises(WorkFailed, match="no output of job clean"):
            await reporter.emit([WorkEvent(output="x", event_id="1")])
        with pytest.raises(WorkFailed, match="cannot be sent"):
            await reporter.emit([WorkEvent(output="out", event_id="")])
        return await nothing(work, reporter)

    async def story(bench: Bench) -> None:
        bench.dispatcher.answers_lost["/v1/task/events"] = 2
        bench.dispatcher.paused = "Too deep."
        await bench.until(lambda: all_are(bench, "completed"))
        asks = [ask for path, ask in bench.dispatcher.calls if path == "/v1/task/events"]
        assert [len(ask.events) for ask in asks] == [1000, 1000, 1000, 500]
        assert asks[-1].events[0].dataset == "cleaned"
        assert asks[-1].events[0].payload == {"n": 1000}
        assert said.pop() == "Too deep."

    play(story, setting=waiting(1), doing=doing)


def test_events_of_an_attempt_that_is_over_end_it() -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        while True:
            await reporter.emit([WorkEvent(output="out", event_id="1", cursor=1)])

    async def story(bench: Bench) -> None:
        await bench.until(lambda: bool(bench.runtime.running))
        bench.dispatcher.tasks[1].status = "completed"
        await bench.until(lambda: not bench.runtime.running, seconds=5)
        await bench.clock.sleep(5)
        assert bench.dispatcher.paths()[COMPLETE] == 0

    play(story, setting=waiting(1), doing=doing)


def test_a_runtime_that_does_not_let_go_keeps_its_place_and_not_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        until = asyncio.get_running_loop().time() + 500
        while asyncio.get_running_loop().time() < until:
            try:
                async with asyncio.timeout(until - asyncio.get_running_loop().time()):
                    await asyncio.Event().wait()
            except (TimeoutError, asyncio.CancelledError):
                continue
        return ()

    async def story(bench: Bench) -> None:
        first, second = bench.dispatcher.tasks.values()
        took = await bench.until(lambda: first.status == "failed")
        assert 40 <= took < 42
        assert first.reason == "It took longer than 10 s."
        await bench.clock.sleep(100)
        assert second.status == "queued"
        await bench.until(lambda: second.status == "running", seconds=500)
        bench.runtime.is_stubborn = True

    with caplog.at_level(logging.CRITICAL):
        play(story, setting=waiting(2, timeout_seconds=10.0), doing=doing, concurrency=1, seeds=[1])


def test_wake_ups_of_a_worker_that_stops_go_elsewhere() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: bench.listener.is_started)
        await bench.clock.sleep(1)
        bench.dispatcher.is_hanging = True
        async with asyncio.TaskGroup() as group:
            said = group.create_task(refused(bench))
            await bench.clock.sleep(1)
            bench.worker.stop()
            await said
        await refused(bench)

    async def refused(bench: Bench) -> None:
        with pytest.raises(DispatcherUnavailable):
            await bench.listener.say()

    play(story, setting=lambda d: d.operators.update({"a:clean": "process"}))
