"""A machine that calls the task lifecycle in any order, late and twice, against a small model."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import multiple, rule, run_state_machine_as_test

from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    ClaimedTask,
    Completion,
    ExtendedLease,
    Failure,
    Fence,
    Refusal,
    Release,
    TaskRefusalReason,
    TaskSnapshot,
)
from penstock.protocol.base import TaskStatus
from tests.integration.dispatcher.machine import Machine
from tests.integration.dispatcher.model import Answer
from tests.integration.dispatcher.world import Worlds


def short(answer: object) -> Answer:
    match answer:
        case Refusal(why=why):
            return why
        case ExtendedLease():
            return TaskStatus.RUNNING
        case AttemptEnd(status=status) | TaskSnapshot(status=status):
            return status
    raise AssertionError(answer)


class Lifecycle(Machine):
    """Calls of the operations themselves."""

    @rule(target=Machine.fences, task_id=Machine.tasks, worker=st.sampled_from(["w1", "w2"]))
    def claim(self, task_id: int, worker: str) -> object:
        can = self.model.is_claimable(task_id)
        found = self.runner.run(self.world.tasks.claim(task_id, worker=worker))
        if not can:
            assert short(found) is self.model.claim_refusal(task_id)
            return multiple()
        assert isinstance(found, ClaimedTask)
        self.model.claimed(task_id, found.lease_token, worker)
        return found.fence

    @rule(target=Machine.fences, limit=st.integers(1, 3))
    def claim_next(self, limit: int) -> object:
        expected = self.model.claimable()[:limit]
        found = self.runner.run(self.world.tasks.claim_next("operator", worker="w3", limit=limit))
        assert [each.task_id for each in found] == expected
        for each in found:
            self.model.claimed(each.task_id, each.lease_token, "w3")
        return multiple(*(each.fence for each in found))

    @rule(some=st.lists(Machine.fences, max_size=3, unique_by=lambda each: each.task_id))
    def heartbeat(self, some: list[Fence]) -> None:
        expected = [self.model.heartbeat(each) for each in some]
        answers = self.runner.run(self.world.tasks.heartbeat(some))
        assert [short(each) for each in answers] == expected
        for each in answers:
            if isinstance(each, ExtendedLease):
                task = self.model.tasks[each.task_id]
                assert (each.lease_expires_at, each.cancel_asked) == (
                    task.expires,
                    task.cancel_asked,
                )

    @rule(fence=Machine.fences, publishes=st.booleans(), times=st.integers(1, 2))
    def complete(self, fence: Fence, publishes: bool, times: int) -> None:
        expected, is_new = self.model.end(fence, ("completed", publishes))
        outputs = (self.job.output("p"),) if publishes else ()

        async def call() -> list[tuple[AttemptEnd | Refusal, ...]]:
            completion = Completion(fence, outputs)
            return await asyncio.gather(
                *(self.world.tasks.complete([completion]) for _ in range(times))
            )

        answers = self.runner.run(call())
        assert answers == [answers[0]] * times
        ((answer,), *_) = answers
        assert short(answer) is expected
        if (
            isinstance(answer, AttemptEnd)
            and is_new
            and publishes
            and expected is TaskStatus.SUCCEEDED
        ):
            outcome = self.model.publish(fence.task_id)
            assert [each.outcome for each in answer.published] == [outcome]
        elif isinstance(answer, AttemptEnd) and is_new:
            assert answer.published == ()

    @rule(fence=Machine.fences, is_retried=st.booleans())
    def fail(self, fence: Fence, is_retried: bool) -> None:
        expected, is_new = self.model.end(fence, ("failed", is_retried))
        (answer,) = self.runner.run(
            self.world.tasks.fail([Failure(fence, "broken", is_retried=is_retried)])
        )
        assert short(answer) is expected
        if is_new and expected is TaskStatus.RETRYING:
            assert isinstance(answer, AttemptEnd)
            assert answer.due_at is not None
            self.retried(fence.task_id, answer.due_at)

    @rule(fence=Machine.fences)
    def release(self, fence: Fence) -> None:
        expected, _ = self.model.end(fence, ("released", True))
        (answer,) = self.runner.run(self.world.tasks.end([Release(fence, "stopped")]))
        assert short(answer) is expected

    @rule(task_id=Machine.tasks)
    def cancel(self, task_id: int) -> None:
        (answer,) = self.runner.run(self.world.tasks.cancel([task_id]))
        assert short(answer) is self.model.cancel(task_id)

    @rule(task_id=Machine.tasks)
    def replay(self, task_id: int) -> None:
        (answer,) = self.runner.run(self.world.tasks.replay([task_id]))
        assert short(answer) is self.model.replay(task_id)

    @rule()
    def ask_for_what_is_not_there(self) -> None:
        unknown = Fence(10**6, 1, "x")
        answers = self.runner.run(self.world.tasks.complete([Completion(unknown)]))
        assert [short(each) for each in answers] == [TaskRefusalReason.UNKNOWN]


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
