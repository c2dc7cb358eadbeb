"""A machine that calls the API in any order, late, twice and at once, against the small model.

What is tested here beyond `test_lifecycle` is what HTTP adds: statuses, problems, several tasks in
a call with an answer each, calls that are gathered, and answers that are the same again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import httpx
import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import multiple, rule, run_state_machine_as_test

from penstock.dispatcher.tasks.model import Fence, TaskRefusalReason
from penstock.protocol.base import TaskStatus
from penstock.protocol.work import (
    Assignment,
    ClaimAnswer,
    ResultsAnswer,
    TaskResult,
    TaskStateAnswer,
)
from tests.integration.dispatcher.api.stage import Stage, perform, read, refused, staged
from tests.integration.dispatcher.machine import Machine
from tests.integration.dispatcher.model import Saying
from tests.integration.dispatcher.world import Job, Worlds

COMPLETED, PUBLISHED = ("completed", False), ("completed", True)
SAYINGS: list[Saying] = [COMPLETED, PUBLISHED, ("failed", True), ("failed", False)]
UNKNOWN = Fence(10**6, 1, "nobody has it")
LOCATION = "s3://bucket/x"


def fence_of(task: Assignment) -> Fence:
    return Fence(task.task_id, task.attempt, task.lease_token)


def results_of(answer: httpx.Response, count: int) -> list[TaskResult]:
    """The answers to a call about tasks, whose status is theirs if they share one."""
    if answer.status_code in (200, 207):
        assert answer.headers["content-type"] == "application/json"
        results = msgspec.json.decode(answer.content, type=ResultsAnswer).results
    else:
        problem = refused(answer, answer.status_code)
        results = problem.results
        assert problem.type == results[0].why
    assert len(results) == count
    statuses = {each.status for each in results}
    assert answer.status_code == (statuses.pop() if len(statuses) == 1 else 207)
    return results


class HttpLifecycle(Machine):
    """Calls of workers and people, over the API."""

    stage: Stage
    told: dict[Fence, TaskResult]
    """What was said to those who ended an attempt first."""

    async def entered(self) -> None:
        self.stage = await self.stack.enter_async_context(staged(self.world))
        self.told = {}

    @rule(target=Machine.fences, task_id=Machine.tasks, at_once=st.integers(1, 2))
    def claim(self, task_id: int, at_once: int) -> object:
        can = self.model.is_claimable(task_id)
        workers = ["w1", "w2"][:at_once]
        answers = self.at_once(*(self.claiming(each, task_id=task_id) for each in workers))
        fences: list[Fence] = []
        for worker, answer in zip(workers, answers, strict=True):
            if answer.status_code == 200:
                (task,) = read(answer, ClaimAnswer).tasks
                assert (task.task_id, task.job) == (task_id, "job")
                self.model.claimed(task_id, task.lease_token, worker)
                assert task.attempt == self.model.tasks[task_id].attempt
                fences.append(fence_of(task))
        assert len(fences) == int(can)
        for answer in answers:
            if answer.status_code != 200:
                problem = refused(answer, 409)
                assert problem.type == self.model.claim_refusal(task_id)
                self.check_state(task_id, problem.state)
        return multiple(*fences)

    @rule(target=Machine.fences, limit=st.integers(1, 3))
    def claim_next(self, limit: int) -> object:
        expected = self.model.claimable()[:limit]
        (answer,) = self.at_once(self.claiming("w3", operator="operator", limit=limit))
        tasks = read(answer, ClaimAnswer).tasks
        assert [each.task_id for each in tasks] == expected
        for each in tasks:
            self.model.claimed(each.task_id, each.lease_token, "w3")
            assert each.lease_expires_at == self.model.tasks[each.task_id].expires
        return multiple(*map(fence_of, tasks))

    @rule(
        fence=Machine.fences,
        more=st.lists(Machine.fences, max_size=2),
        has_unknown=st.booleans(),
        at_once=st.integers(1, 2),
    )
    def heartbeat(self, fence: Fence, more: list[Fence], has_unknown: bool, at_once: int) -> None:
        some = list({each.task_id: each for each in (fence, *more)}.values())
        expected = [self.model.heartbeat(each) for each in some]
        asked = [*some, UNKNOWN] if has_unknown else some
        entries = self.proved(*(said(each) for each in asked))
        answers = self.at_once(*(self.stage.beat(*entries) for _ in range(at_once)))
        for answer in answers:
            results = results_of(answer, len(asked))
            for each, wanted, result in zip(some, expected, results, strict=False):
                if isinstance(wanted, TaskRefusalReason):
                    self.check_refused(each, wanted, result)
                    continue
                task = self.model.tasks[each.task_id]
                assert (result.status, result.task_id) == (200, each.task_id)
                assert result.lease_expires_at == task.expires
                assert result.cancel_asked == task.cancel_asked
            if has_unknown:
                assert (results[-1].status, results[-1].why) == (404, "unknown")

    @rule(
        fence=Machine.fences,
        saying=st.sampled_from(SAYINGS),
        more=st.lists(st.tuples(Machine.fences, st.sampled_from(SAYINGS)), max_size=2),
        has_unknown=st.booleans(),
        at_once=st.integers(1, 2),
    )
    def end(
        self,
        fence: Fence,
        saying: Saying,
        more: list[tuple[Fence, Saying]],
        has_unknown: bool,
        at_once: int,
    ) -> None:
        """Several ends in a call, some new, some again, some of zombies; the same call twice."""
        ends = {each.task_id: (each, words) for each, words in ((fence, saying), *more)}
        asked = [ending(self.job, each, words) for each, words in ends.values()]
        if has_unknown:
            asked.append(said(UNKNOWN))
        asked = self.proved(*asked)
        answers = self.at_once(*(self.stage.complete(*asked) for _ in range(at_once)))
        assert [each.json() for each in answers] == [answers[0].json()] * at_once
        results = results_of(answers[0], len(asked))
        if has_unknown:
            assert (results[-1].status, results[-1].why) == (404, "unknown")
        by_task = {each.task_id: each for each in results}
        # Of what one call publishes for a partition, the latest task counts.
        for each, words in sorted(ends.values(), key=lambda end: -end[0].task_id):
            self.check_ended(each, words, by_task[each.task_id])

    @rule(fence=Machine.fences)
    def smuggle(self, fence: Fence) -> None:
        """A completion with an output that is another's changes nothing."""
        other = {"dataset": "0" * 8 + "-0000-0000-0000-" + "0" * 12, "location": "file:///x"}
        (answer,) = self.at_once(self.stage.complete(*self.proved(said(fence, outputs=[other]))))
        (result,) = results_of(answer, 1)
        self.check_refused(
            fence,
            TaskRefusalReason.DIFFERENT if fence in self.told else TaskRefusalReason.OUTPUTS,
            result,
        )

    @rule(fence=Machine.fences)
    def misplace(self, fence: Fence) -> None:
        """Nor does one of its own output in a place that its token does not grant."""
        elsewhere = ending(self.job, fence, PUBLISHED, location=f"{LOCATION}x")
        (answer,) = self.at_once(self.stage.complete(*self.proved(elsewhere)))
        (result,) = results_of(answer, 1)
        self.check_refused(
            fence,
            TaskRefusalReason.DIFFERENT if fence in self.told else TaskRefusalReason.OUTPUTS,
            result,
        )

    @rule(fence=Machine.fences, other=Machine.fences, is_end=st.booleans())
    def borrow(self, fence: Fence, other: Fence, is_end: bool) -> None:
        """The token of another attempt is no proof, and its holder is told nothing of the task."""
        if (fence.task_id, fence.attempt) == (other.task_id, other.attempt):
            return
        (entry,) = self.proved(said(other))
        asked = {**said(fence), "token": entry["token"]}
        call = self.stage.complete if is_end else self.stage.beat
        (answer,) = self.at_once(call(asked))
        (result,) = results_of(answer, 1)
        assert (result.status, result.state) == (403, None)
        assert result.why in ("token another attempt", "token former attempt")

    @rule(task_id=Machine.tasks, verb=st.sampled_from(["cancel", "replay"]))
    def steer(self, task_id: int, verb: str) -> None:
        (answer,) = self.at_once(
            self.stage.public.post(f"/v1/tasks/{verb}", json={"tasks": [task_id]})
        )
        (result,) = results_of(answer, 1)
        move = self.model.cancel if verb == "cancel" else self.model.replay
        expected = move(task_id)
        if isinstance(expected, TaskRefusalReason):
            assert (result.status, result.why) == (409, expected)
        else:
            assert (result.status, result.task_status) == (200, expected)
        if result.state is not None:
            self.check_state(task_id, result.state)

    @rule(task_id=Machine.tasks)
    def look(self, task_id: int) -> None:
        (answer,) = self.at_once(self.stage.public.get(f"/v1/tasks/{task_id}"))
        assert answer.status_code == 200
        task = self.model.tasks[task_id]
        shown = answer.json()
        assert shown["task"]["status"] == task.status
        assert [each["number"] for each in shown["attempts"]] == [*range(1, task.attempt + 1)]

    def proved(self, *entries: dict[str, Any]) -> list[dict[str, Any]]:
        """The entries with tokens of their attempts, which may write one place."""

        async def main() -> list[dict[str, Any]]:
            return [await proved(self.stage, self.job, each) for each in entries]

        return self.runner.run(main())

    def at_once(self, *calls: Coroutine[Any, Any, httpx.Response]) -> list[httpx.Response]:
        async def main() -> list[httpx.Response]:
            return await asyncio.gather(*calls)

        return self.runner.run(main())

    async def claiming(self, worker: str, **ask: Any) -> httpx.Response:
        headers = self.stage.identity(worker)
        return await self.stage.internal.post("/internal/task-claim", json=ask, headers=headers)

    def check_ended(self, fence: Fence, saying: Saying, result: TaskResult) -> None:
        expected, is_new = self.model.end(fence, saying)
        if isinstance(expected, TaskRefusalReason):
            self.check_refused(fence, expected, result)
            return
        assert (result.status, result.task_status) == (200, expected)
        if not is_new:
            assert result == self.told[fence]
            return
        self.told[fence] = result
        if saying == PUBLISHED and expected is TaskStatus.SUCCEEDED:
            (published,) = result.published
            assert published.outcome == self.model.publish(fence.task_id)
            is_published = published.outcome == "published"
            assert published.revision == (self.model.revision if is_published else None)
        else:
            assert result.published == []
        if expected is TaskStatus.RETRYING:
            assert result.due_at is not None
            self.retried(fence.task_id, result.due_at)

    def check_refused(self, fence: Fence, why: TaskRefusalReason, result: TaskResult) -> None:
        assert (result.task_id, result.status, result.why) == (fence.task_id, 409, why)
        self.check_state(fence.task_id, result.state)

    def check_state(self, task_id: int, state: TaskStateAnswer | None) -> None:
        """Whoever is refused is told what the task is now."""
        assert state is not None
        task = self.model.tasks[task_id]
        seen = (state.status, state.attempt, state.cancel_asked, state.worker)
        assert seen == (task.status, task.attempt, task.cancel_asked, task.worker)
        assert state.lease_expires_at == task.expires


def said(fence: Fence, **fields: Any) -> dict[str, Any]:
    proof = {
        "task_id": fence.task_id,
        "attempt": fence.attempt,
        "lease_token": fence.lease_token,
    }
    return {**proof, **fields}


def ending(job: Job, fence: Fence, saying: Saying, *, location: str = LOCATION) -> dict[str, Any]:
    kind, flag = saying
    if kind == "failed":
        return said(fence, failure={"reason": "broken", "is_retried": flag})
    output = {"dataset": job.dataset, "location": location, "partition_key": "p"}
    return said(fence, outputs=[output] if flag else [])


async def proved(stage: Stage, job: Job, entry: dict[str, Any]) -> dict[str, Any]:
    """What is said, with a token of its attempt that may write one place."""
    write = {job.dataset: LOCATION}
    # As an attempt of the release before: what its token granted is not known.
    await stage.world.rows("UPDATE task SET grants = NULL WHERE id = %s", entry["task_id"])
    token = await stage.token(entry["task_id"], entry["attempt"], write=write)
    return {**entry, "token": token}


def test_the_lifecycle_over_http_is_the_model(worlds: Worlds) -> None:
    HttpLifecycle.worlds = worlds
    run_state_machine_as_test(
        HttpLifecycle,
        settings=settings(
            max_examples=35,
            stateful_step_count=40,
            deadline=None,
            # A failure that is made smaller takes longer than a test may.
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_an_attempt_that_says_two_things_at_once(worlds: Worlds) -> None:
    """One of them holds, whichever it is, and stays; the other is told so."""

    async def story(stage: Stage) -> None:
        job = await stage.world.job()
        for number, (first, second) in enumerate(itertools.permutations(SAYINGS, 2)):
            fence = (await job.claimed(f"{number}")).fence
            asked = [await proved(stage, job, ending(job, fence, each)) for each in (first, second)]
            answers = await asyncio.gather(*map(stage.complete, asked))
            assert sorted(each.status_code for each in answers) == [200, 409]
            winner = [each.status_code for each in answers].index(200)
            (result,) = results_of(answers[winner], 1)
            problem = refused(answers[1 - winner], 409)
            assert problem.type == "different"
            assert problem.state is not None
            assert problem.state.status == result.task_status
            again = await asyncio.gather(*map(stage.complete, asked))
            assert [each.content for each in again] == [each.content for each in answers]

    perform(worlds, story)


def test_half_of_a_proof_is_none(worlds: Worlds) -> None:
    async def story(stage: Stage) -> None:
        job = await stage.world.job()
        fence, other = (await job.claimed("one")).fence, (await job.claimed("two")).fence
        stage.world.later(1)
        for wrong in (
            Fence(fence.task_id, fence.attempt, "x"),
            Fence(fence.task_id, fence.attempt, other.lease_token),
            Fence(fence.task_id, fence.attempt + 1, fence.lease_token),
        ):
            proof = await proved(stage, job, said(wrong))
            assert refused(await stage.beat(proof), 409).type == "stale"
            for saying in SAYINGS:
                answer = await stage.complete({**proof, **ending(job, wrong, saying)})
                assert refused(answer, 409).type == "stale"
            event = {"event_id": "e", "dataset": "job", "partition_key": "p"}
            assert refused(await stage.task_events(proof, event), 409).type == "stale"
        (row,) = await stage.world.rows(
            "SELECT status, lease_expires_at - penstock_now() < interval '10 seconds' AS is_old"
            " FROM task WHERE id = %s",
            fence.task_id,
        )
        assert row == {"status": "running", "is_old": True}
        end = await proved(stage, job, ending(job, fence, PUBLISHED))
        (result,) = results_of(await stage.complete(end), 1)
        assert result.task_status == "completed"
        # Also of what is over: the answer is told to whoever has said it.
        answer = await stage.complete({**end, "lease_token": "x"})
        assert refused(answer, 409).type == "over"

    perform(worlds, story)
