"""Two real connections, interleaved: one call is held open while the other arrives.

`unfinished` is the first of the two: its transaction is open until its block ends. Whoever comes
second either waits for it, and then sees what it has done, or passes the row by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    ClaimedTask,
    Completion,
    ExtendedLease,
    Failure,
    Fence,
    PublishOutcome,
    Refusal,
    TaskRefusalReason,
    TaskSnapshot,
)
from penstock.protocol.base import TaskStatus
from tests.integration.dispatcher.world import Play, World, done, failed

Answer = TypeVar("Answer")


async def second_after_first(
    world: World,
    first: Callable[[Tasks], Awaitable[object]],
    second: Coroutine[Any, Any, Answer],
    *,
    is_kept: bool = True,
) -> Answer:
    """The answer to a second call that arrives while the first is done but not committed."""
    async with asyncio.TaskGroup() as group, world.unfinished(is_kept=is_kept) as other:
        await first(other)
        waiting = group.create_task(second)
        await world.until_waiting()
    return waiting.result()


def why(answer: object) -> TaskRefusalReason:
    assert isinstance(answer, Refusal)
    return answer.why


def status(answer: object) -> TaskStatus:
    assert isinstance(answer, AttemptEnd | TaskSnapshot)
    return answer.status


def test_a_heartbeat_that_is_under_way_is_not_reaped(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await world.tasks.reap()
        claimed = await job.claimed()
        world.later(11)
        async with world.unfinished() as other:
            assert isinstance((await other.heartbeat([claimed.fence]))[0], ExtendedLease)
            assert (await world.tasks.reap()).reaped == ()
        assert (await world.tasks.reap()).reaped == ()

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
def test_whoever_comes_after_the_reaper_is_refused(play: Play, is_kept: bool) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        calls: list[Callable[[Fence], Coroutine[Any, Any, tuple[object, ...]]]] = [
            lambda fence: world.tasks.heartbeat([fence]),
            lambda fence: world.tasks.complete(done(fence, job.output())),
            lambda fence: world.tasks.fail(failed(fence)),
        ]
        for number, call in enumerate(calls):
            await world.tasks.reap()
            claimed = await job.claimed(str(number))
            world.later(11)
            (answer,) = await second_after_first(
                world, lambda other: other.reap(), call(claimed.fence), is_kept=is_kept
            )
            if is_kept:
                assert why(answer) is TaskRefusalReason.STALE
                assert await world.value("SELECT count(*) FROM event") == 0
            else:
                assert isinstance(answer, ExtendedLease | AttemptEnd)
            # What is left must not meet the next reaper.
            await world.tasks.cancel([claimed.task_id])
            await world.tasks.complete(done(claimed.fence))

    play(story)


def test_an_attempt_that_is_ending_is_not_reaped(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await world.tasks.reap()
        first, second = await job.claimed("a"), await job.claimed("b")
        world.later(11)
        async with world.unfinished() as other:
            assert status((await other.complete(done(first.fence)))[0]) is TaskStatus.SUCCEEDED
            assert status((await other.fail(failed(second.fence)))[0]) is TaskStatus.RETRYING
            assert (await world.tasks.reap()).reaped == ()
        assert (await world.tasks.reap()).reaped == ()
        assert await world.value("SELECT count(*) FROM attempt WHERE outcome = 'expired'") == 0

    play(story)


def test_two_reapers_reap_each_once(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await world.tasks.reap()
        for key in "abcde":
            await job.claimed(key)
        world.later(11)
        found = await second_after_first(
            world, lambda other: other.reap(limit=2), world.tasks.reap(limit=9)
        )
        assert len(found.reaped) == 3
        some = await asyncio.gather(*(world.tasks.reap() for _ in range(4)))
        assert [each.reaped for each in some] == [()] * 4

    play(story)


def test_cancel_and_complete(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        first, second = await job.claimed("a"), await job.claimed("b")
        (answer,) = await second_after_first(
            world,
            lambda other: other.cancel([first.task_id]),
            world.tasks.complete(done(first.fence, job.output())),
        )
        assert status(answer) is TaskStatus.CANCELLED
        (refused,) = await second_after_first(
            world,
            lambda other: other.complete(done(second.fence)),
            world.tasks.cancel([second.task_id]),
        )
        assert why(refused) is TaskRefusalReason.OVER
        assert await world.value("SELECT count(*) FROM event") == 0

    play(story)


def test_cancel_and_claim(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        first, second, third = await job.make("a", "b", "c")
        answer = await second_after_first(
            world, lambda other: other.cancel([first]), world.tasks.claim(first, worker="w")
        )
        assert why(answer) is TaskRefusalReason.OVER
        (asked,) = await second_after_first(
            world, lambda other: other.claim(second, worker="w"), world.tasks.cancel([second])
        )
        assert isinstance(asked, TaskSnapshot)
        assert (asked.status, asked.cancel_asked) == (TaskStatus.RUNNING, True)
        async with world.unfinished() as other:
            await other.cancel([third])
            assert await world.tasks.claim_next("operator", worker="w") == ()

    play(story)


def test_two_completions_of_one_attempt(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        for key, outputs, expected in (
            ("a", (), None),
            ("b", (job.output(),), TaskRefusalReason.DIFFERENT),
        ):
            claimed = await job.claimed(key)
            told: list[object] = []

            async def first(other: Tasks, claimed: ClaimedTask = claimed) -> None:
                told.extend(await other.complete(done(claimed.fence)))  # noqa: B023 - awaited here

            (answer,) = await second_after_first(
                world, first, world.tasks.complete([Completion(claimed.fence, outputs)])
            )
            if expected is None:
                assert [answer] == told
            else:
                assert why(answer) is expected
            (other_end,) = await world.tasks.fail([Failure(claimed.fence, "late")])
            assert why(other_end) is TaskRefusalReason.DIFFERENT

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
def test_two_claims_of_one_task(play: Play, is_kept: bool) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        (task_id,) = await job.make("a")
        answer = await second_after_first(
            world,
            lambda other: other.claim(task_id, worker="first"),
            world.tasks.claim(task_id, worker="second"),
            is_kept=is_kept,
        )
        if is_kept:
            assert isinstance(answer, Refusal)
            assert answer.state is not None
            assert (answer.why, answer.state.worker) == (TaskRefusalReason.RUNNING, "first")
        else:
            assert isinstance(answer, ClaimedTask)
            assert answer.attempt == 1

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("limited", ["operator", "job"])
def test_claims_under_a_limit_come_one_after_the_other(
    play: Play, limited: str, is_kept: bool
) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_concurrency=1 if limited == "job" else None)
        if limited == "operator":
            await world.rows("INSERT INTO operator VALUES ('operator', 1)")
        first, second = await job.make("a", "b")

        async def claim_first(other: Tasks) -> None:
            assert isinstance(await other.claim(first, worker="first"), ClaimedTask)

        some = await second_after_first(
            world, claim_first, world.tasks.claim_next("operator", worker="w")
        )
        assert some == ()
        (claimed,) = await world.rows("SELECT attempt, lease_token FROM task WHERE id = %s", first)
        await world.tasks.fail(failed(Fence(first, claimed["attempt"], claimed["lease_token"])))
        world.later(60)
        answer = await second_after_first(
            world, claim_first, world.tasks.claim(second, worker="second"), is_kept=is_kept
        )
        if is_kept:
            assert why(answer) is TaskRefusalReason.FULL
        else:
            assert isinstance(answer, ClaimedTask)

    play(story)


def test_the_next_passes_by_what_others_have_in_hand(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await job.make("a", "b", "c")
        async with world.unfinished(is_kept=False) as other:
            first = await other.claim_next("operator", worker="first", limit=2)
            second = await world.tasks.claim_next("operator", worker="second", limit=2)
        assert [each.payload["key"] for each in first] == ["a", "b"]
        assert [each.payload["key"] for each in second] == ["c"]
        # What the first had in hand is there again, and the second has passed the word on.
        assert await world.wakes() == ["operator/normal"]
        third = await world.tasks.claim_next("operator", worker="third", limit=9)
        assert [each.payload["key"] for each in third] == ["a", "b"]

    play(story)


def test_two_replays_are_one(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        claimed = await job.claimed()
        await world.tasks.fail(failed(claimed.fence, is_retried=False))
        (answer,) = await second_after_first(
            world,
            lambda other: other.replay([claimed.task_id]),
            world.tasks.replay([claimed.task_id]),
        )
        assert why(answer) is TaskRefusalReason.NOT_DEAD
        assert await world.wakes() == ["operator/normal"]

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
def test_two_makers_of_one_task(play: Play, is_kept: bool) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        (made,) = await second_after_first(
            world,
            lambda other: other.create([job.new("a")]),
            world.tasks.create([job.new("a")]),
            is_kept=is_kept,
        )
        assert (made is None) == is_kept
        assert await world.value("SELECT count(*) FROM task") == 1
        assert await world.wakes() == ["operator/normal"]

    play(story)


@pytest.mark.parametrize("mode", ["replace", "append"])
def test_two_tasks_publish_one_partition(play: Play, mode: str) -> None:
    async def story(world: World) -> None:
        job = await world.job(update_mode=mode)

        async def race(
            first: ClaimedTask, second: ClaimedTask
        ) -> tuple[PublishOutcome, int | None]:
            output = job.output("p", append_key="same" if mode == "append" else None)
            (answer,) = await second_after_first(
                world,
                lambda other: other.complete(done(first.fence, output)),
                world.tasks.complete(done(second.fence, output)),
            )
            assert isinstance(answer, AttemptEnd)
            return answer.published[0].outcome, answer.published[0].revision

        early, late = await job.claimed("a"), await job.claimed("b")
        refused = PublishOutcome.SUPERSEDED if mode == "replace" else PublishOutcome.DUPLICATE
        assert await race(late, early) == (refused, None)
        if mode == "replace":
            older, younger = await job.claimed("c"), await job.claimed("d")
            assert await race(older, younger) == (PublishOutcome.PUBLISHED, 3)
            assert await world.value("SELECT task_id FROM publication") == younger.task_id

    play(story)


def test_many_end_many_in_any_order(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        claims = [await job.claimed(str(number)) for number in range(12)]
        outputs = [job.output(str(number % 3)) for number in range(12)]
        sayings = [Completion(c.fence, (o,)) for c, o in zip(claims, outputs, strict=True)]
        orders = [sayings, sayings[::-1], sayings[6:] + sayings[:6]]
        answers = await asyncio.gather(*(world.tasks.complete(order) for order in orders))
        by_task = [{each.task_id: each for each in some} for some in answers]
        assert by_task[0] == by_task[1] == by_task[2]
        assert all(isinstance(each, AttemptEnd) for each in by_task[0].values())
        top = await world.rows("SELECT partition_key, task_id FROM publication ORDER BY 1")
        assert [row["task_id"] for row in top] == [each.task_id for each in claims[9:]]

    play(story)
