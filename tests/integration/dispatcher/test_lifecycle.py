"""A machine that calls the task lifecycle in any order, late and twice, against a small model."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from penstock.dispatcher.tasks.values import (
    Claimed,
    Completion,
    Ended,
    Extended,
    Failure,
    Fence,
    Refusal,
    Status,
    TaskState,
    Why,
)
from tests.integration.dispatcher.model import Answer, Model, ModelTask
from tests.integration.dispatcher.world import Job, World, Worlds

BASE = datetime(2030, 1, 1, tzinfo=UTC)
FOREVER_SECONDS = 1e9
"""No outage is as long: reapers that hold still have a test of their own."""


def short(answer: object) -> Answer:
    match answer:
        case Refusal(why=why):
            return why
        case Extended():
            return Status.RUNNING
        case Ended(status=status) | TaskState(status=status):
            return status
    raise AssertionError(answer)


class Lifecycle(RuleBasedStateMachine):
    """Tasks of one job. Old proofs stay in use for ever."""

    worlds: ClassVar[Worlds]
    world: World
    job: Job

    tasks = Bundle("tasks")
    fences = Bundle("fences")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = contextlib.AsyncExitStack()
        self.model = Model(BASE)
        self.events = 0

    @initialize()
    def begin(self) -> None:
        async def enter() -> None:
            self.world = await self.stack.enter_async_context(self.worlds.world())
            self.job = await self.world.job(
                max_attempts=2, heartbeat_ms=10_000, retry_first_ms=4_000, retry_max_ms=4_000
            )
            await self.world.tasks.reap()

        self.runner.run(enter())

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()

    @rule(target=tasks, key=st.sampled_from("abcd"))
    def create(self, key: str) -> object:
        (made,) = self.runner.run(self.world.tasks.create([self.job.new(key)]))
        assert (made is None) == (key in self.model.keys)
        if made is None:
            return multiple()
        self.model.keys.add(key)
        self.model.tasks[made] = ModelTask(self.model.now)
        return made

    @rule(target=fences, task_id=tasks, worker=st.sampled_from(["w1", "w2"]))
    def claim(self, task_id: int, worker: str) -> object:
        can = self.model.is_claimable(task_id)
        found = self.runner.run(self.world.tasks.claim(task_id, worker=worker))
        if not can:
            assert short(found) is self.model.claim_refusal(task_id)
            return multiple()
        assert isinstance(found, Claimed)
        self.model.claimed(task_id, found.lease_token, worker)
        return found.fence

    @rule(target=fences, limit=st.integers(1, 3))
    def claim_next(self, limit: int) -> object:
        expected = self.model.claimable()[:limit]
        found = self.runner.run(self.world.tasks.claim_next("operator", worker="w3", limit=limit))
        assert [each.task_id for each in found] == expected
        for each in found:
            self.model.claimed(each.task_id, each.lease_token, "w3")
        return multiple(*(each.fence for each in found))

    @rule(target=fences, fence=consumes(fences))
    def guess(self, fence: Fence) -> object:
        return multiple(fence, Fence(fence.task_id, fence.attempt + 1, fence.lease_token))

    @rule(some=st.lists(fences, max_size=3, unique_by=lambda each: each.task_id))
    def heartbeat(self, some: list[Fence]) -> None:
        expected = [self.model.heartbeat(each) for each in some]
        answers = self.runner.run(self.world.tasks.heartbeat(some))
        assert [short(each) for each in answers] == expected
        for each in answers:
            if isinstance(each, Extended):
                task = self.model.tasks[each.task_id]
                assert (each.lease_expires_at, each.cancel_asked) == (
                    task.expires,
                    task.cancel_asked,
                )

    @rule(fence=fences, publishes=st.booleans(), times=st.integers(1, 2))
    def complete(self, fence: Fence, publishes: bool, times: int) -> None:
        expected, is_new = self.model.end(fence, ("completed", publishes))
        outputs = (self.job.output("p"),) if publishes else ()

        async def call() -> list[tuple[Ended | Refusal, ...]]:
            completion = Completion(fence, outputs)
            return await asyncio.gather(
                *(self.world.tasks.complete([completion]) for _ in range(times))
            )

        answers = self.runner.run(call())
        assert answers == [answers[0]] * times
        ((answer,), *_) = answers
        assert short(answer) is expected
        if isinstance(answer, Ended) and is_new and publishes and expected is Status.COMPLETED:
            outcome = self.model.publish(fence.task_id)
            assert [each.outcome for each in answer.published] == [outcome]
        elif isinstance(answer, Ended) and is_new:
            assert answer.published == ()

    @rule(fence=fences, is_retried=st.booleans())
    def fail(self, fence: Fence, is_retried: bool) -> None:
        expected, is_new = self.model.end(fence, ("failed", is_retried))
        (answer,) = self.runner.run(
            self.world.tasks.fail([Failure(fence, "broken", is_retried=is_retried)])
        )
        assert short(answer) is expected
        if is_new and expected is Status.RETRYING:
            assert isinstance(answer, Ended)
            assert answer.due_at is not None
            self.model.retry(fence.task_id, answer.due_at)

    @rule(task_id=tasks)
    def cancel(self, task_id: int) -> None:
        (answer,) = self.runner.run(self.world.tasks.cancel([task_id]))
        assert short(answer) is self.model.cancel(task_id)

    @rule(task_id=tasks)
    def replay(self, task_id: int) -> None:
        (answer,) = self.runner.run(self.world.tasks.replay([task_id]))
        assert short(answer) is self.model.replay(task_id)

    @rule()
    def reap(self) -> None:
        found = self.runner.run(self.world.tasks.reap(outage_seconds=FOREVER_SECONDS))
        assert {each.task_id: each.status for each in found.reaped} == self.model.reap()
        rows = self.runner.run(self.world.rows("SELECT id, due_at FROM task"))
        dues = {row["id"]: row["due_at"] for row in rows}
        for each in found.reaped:
            if each.status is Status.RETRYING:
                self.model.retry(each.task_id, dues[each.task_id])

    @rule(seconds=st.sampled_from([1, 4, 5, 10]))
    def wait(self, seconds: int) -> None:
        self.world.later(seconds)
        self.model.now += timedelta(seconds=seconds)

    @rule()
    def ask_for_what_is_not_there(self) -> None:
        unknown = Fence(10**6, 1, "x")
        answers = self.runner.run(self.world.tasks.complete([Completion(unknown)]))
        assert [short(each) for each in answers] == [Why.UNKNOWN]

    @invariant()
    def the_database_is_the_model(self) -> None:
        if not hasattr(self, "job"):
            return
        rows = self.runner.run(
            self.world.rows(
                "SELECT id, status, attempt, cancel_asked, worker, lease_token, lease_expires_at,"
                " (SELECT count(*) FROM attempt WHERE task_id = id) AS attempts,"
                " (SELECT count(*) FROM attempt WHERE task_id = id AND ended_at IS NULL) AS open"
                " FROM task"
            )
        )
        seen = {row.pop("id"): row for row in rows}
        assert seen.keys() == self.model.tasks.keys()
        for task_id, task in self.model.tasks.items():
            *columns, attempts, still_open = seen[task_id].values()
            assert tuple(columns) == task.seen
            assert (attempts, still_open) == (task.attempt, int(task.status is Status.RUNNING))
        published = self.runner.run(self.world.rows("SELECT task_id, revision FROM publication"))
        expected = [{"task_id": self.model.head, "revision": self.model.revision}]
        assert published == (expected if self.model.revision else [])
        events = self.runner.run(self.world.value("SELECT count(*) FROM event"))
        assert events == self.model.revision


def test_the_lifecycle_is_the_model(worlds: Worlds) -> None:
    Lifecycle.worlds = worlds
    run_state_machine_as_test(
        Lifecycle,
        settings=settings(
            max_examples=25,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
