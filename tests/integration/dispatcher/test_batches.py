"""Tasks that are claimed together: up to so many a place, within limits, of one kind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.database.pool import query
from penstock.dispatcher.tasks import lifecycle
from penstock.dispatcher.tasks.model import AttemptEnd, ClaimedTask, Release
from penstock.protocol.base import TaskStatus
from tests.integration.dispatcher.world import Job, Play, World, done, either_way, failed


async def joined(world: World, name: str = "job", *, most: int = 5, **columns: Any) -> Job:
    """A job whose tasks are claimed together."""
    return await world.job(name, body=f'{{"coalesce": {most}}}', **columns)


async def partitions(job: Job, *keys: str, **fields: Any) -> None:
    """Tasks for these partitions."""
    new = [job.new(key, payload={"key": key, "partition_key": key}, **fields) for key in keys]
    await job.world.tasks.create(new)
    await job.world.wakes()


async def claims(world: World, limit: int = 1, **more: Any) -> tuple[ClaimedTask, ...]:
    asked = {"limit": limit, "in_batches": True, **more}
    return await world.tasks.claim_next("operator", worker="w", **asked)


def keys(found: Sequence[ClaimedTask]) -> list[str]:
    return sorted(str(each.payload["key"]) for each in found)


def sizes(found: Sequence[ClaimedTask]) -> list[int]:
    """How large the batches are, those that run by themselves as ones."""
    return sorted(Counter(each.batch or f"alone {each.task_id}" for each in found).values())


@either_way
def test_one_place_takes_as_many_as_the_job_says(play: Play) -> None:
    async def story(world: World) -> None:
        job = await joined(world)
        await partitions(job, *"abcdefg")
        found = await claims(world)
        assert keys(found) == list("abcde")
        assert {each.batch for each in found} == {f"{found[0].task_id}-1"}
        # Each has an attempt of its own.
        assert len({each.lease_token for each in found}) == 5
        assert await world.wakes() == ["operator/normal"]
        assert keys(await claims(world)) == ["f", "g"]
        assert await world.wakes() == []
        assert await claims(world) == ()

    play(story)


def test_a_batch_whose_process_has_died_is_never_one_again(play: Play) -> None:
    async def story(world: World) -> None:
        job = await joined(world)
        await partitions(job, *"abc")
        found = await claims(world)
        await world.tasks.end([Release(each.fence, "It died.", runs_alone=True) for each in found])
        await partitions(job, *"de")
        again = await claims(world, limit=9)
        assert sizes(again) == [1, 1, 1, 2]
        assert keys([each for each in again if each.runs_alone]) == list("abc")

    play(story)


def test_what_was_handed_back_is_put_together_again(play: Play) -> None:
    """A worker that is stopped must not make a thousand runs of one."""

    async def story(world: World) -> None:
        job = await joined(world)
        await partitions(job, *"abc")
        found = await claims(world)
        await world.tasks.end([Release(each.fence, "The worker was stopped.") for each in found])
        await partitions(job, *"de")
        found = await claims(world)
        assert sizes(found) == [5]
        for each in found:
            await world.tasks.fail(failed(each.fence))
        world.later(3600)
        assert sizes(await claims(world, limit=9)) == [1, 1, 1, 1, 1]

    play(story)


def test_who_takes_no_batches_is_given_none(play: Play) -> None:
    async def story(world: World) -> None:
        job = await joined(world)
        await partitions(job, *"abcd")
        (one,) = await claims(world, in_batches=False)
        assert one.batch == ""
        assert sizes(await claims(world, limit=2, in_batches=False)) == [1, 1]

    play(story)


def test_several_places_share_what_there_is(play: Play) -> None:
    async def story(world: World) -> None:
        job = await joined(world)
        await partitions(job, *"abcdefgh")
        # Eight need two batches of up to five.
        assert sizes(await claims(world, limit=4)) == [4, 4]
        await partitions(job, *"ijklmnopqrstuvw")
        assert sizes(await claims(world, limit=2)) == [5, 5]
        assert sizes(await claims(world, limit=9)) == [5]
        await partitions(job, "x")
        (alone,) = await claims(world)
        assert alone.batch == ""

    play(story)


def test_only_of_one_definition_and_generation(play: Play) -> None:
    async def story(world: World) -> None:
        job = await joined(world)
        await partitions(job, *"ab")
        other = await world.value(
            "INSERT INTO job_definition (job_id, hash, body, runtime, operator, priority,"
            " update_mode, max_attempts, timeout_ms, heartbeat_ms, retry_first_ms, retry_max_ms,"
            " retry_backoff) SELECT job_id, 'new', body, runtime, operator, priority, update_mode,"
            " max_attempts, timeout_ms, heartbeat_ms, retry_first_ms, retry_max_ms, retry_backoff"
            " FROM job_definition RETURNING id"
        )
        newer = Job(world, job.id, other, job.dataset, job.generation, job.operator)
        await partitions(newer, *"cd")
        building = await world.value("SELECT gen_random_uuid()::text")
        rebuilt = Job(world, job.id, other, job.dataset, building, job.operator)
        await partitions(rebuilt, *"ef")
        await partitions(await joined(world, "neighbour"), *"gh")
        for wanted in ("ab", "cd", "ef", "gh"):
            found = await claims(world)
            assert (keys(found), sizes(found)) == (list(wanted), [2])

    play(story)


def test_several_kinds_in_one_claim(play: Play) -> None:
    async def story(world: World) -> None:
        await partitions(await joined(world), *"abc")
        await partitions(await world.job("plain"), *"de")
        await partitions(await joined(world, "three", most=3), *"fgh")
        # Five places: three tasks of the first job were picked, and need but one.
        found = await claims(world, limit=5)
        assert (keys(found), sizes(found)) == (list("abcde"), [1, 1, 3])
        assert [each.job for each in found] == ["job"] * 3 + ["plain"] * 2
        assert sizes(await claims(world, limit=2)) == [3]

    play(story)


def test_what_is_not_of_a_kind_runs_by_itself(play: Play) -> None:
    async def story(world: World) -> None:
        job = await joined(world)
        await job.make("no partition", "nor this")
        assert sizes(await claims(world, limit=9)) == [1, 1]
        await partitions(job, *"abc")
        first = await claims(world)
        assert sizes(first) == [3]
        # What has failed once costs its neighbours nothing the next time.
        await world.tasks.fail(failed(first[0].fence))
        world.later(60)
        await partitions(job, *"def")
        found = await claims(world, limit=2)
        assert sizes(found) == [1, 3]
        assert next(each for each in found if not each.batch).attempt == 2

    play(story)


def test_what_was_attempted_never_fills_a_batch_up(play: Play) -> None:
    async def story(world: World) -> None:
        job = await joined(world)
        await partitions(job, *"ab")
        first, second = await claims(world)
        await world.tasks.end(
            [*failed(first.fence), *failed(second.fence, "Never.", is_retried=False)]
        )
        await world.tasks.replay([second.task_id])
        await partitions(job, *"cd")
        world.later(60)
        await world.rows("UPDATE task SET due_at = penstock_now() WHERE attempt = 1")
        assert keys(await claims(world)) == ["c", "d"]
        assert sizes(await claims(world, limit=9)) == [1, 1]

    play(story)


@either_way
def test_the_same_partition_is_never_twice_in_a_batch(play: Play) -> None:
    async def story(world: World) -> None:
        job = await joined(world)
        twice = [
            job.new(f"{key} {number}", payload={"key": key, "partition_key": key})
            for number in range(2)
            for key in "abc"
        ]
        await world.tasks.create(twice)
        await world.wakes()
        assert (keys(await claims(world))) == list("abc")
        assert await world.wakes() == ["operator/normal"]
        assert (keys(await claims(world))) == list("abc")
        # Both of them picked: two batches.
        again = [
            job.new(f"x {number}", payload={"key": "x", "partition_key": "x"})
            for number in range(2)
        ]
        await world.tasks.create(again)
        await partitions(job, *"yz")
        assert sizes(await claims(world, limit=2)) == [2, 2]

    play(story)


def test_normal_before_bulk_and_never_mixed(play: Play) -> None:
    async def story(world: World) -> None:
        job = await joined(world)
        await partitions(job, *"abc", priority=Priority.BULK)
        await partitions(job, *"de")
        found = await claims(world, limit=2)
        assert sizes(found) == [2, 3]
        assert keys(found[:2]) == ["d", "e"]

    play(story)


@pytest.mark.parametrize(("of_job", "of_operator"), [(3, None), (None, 3), (3, 4), (4, 3)])
def test_within_the_room_of_job_and_operator(
    play: Play, of_job: int | None, of_operator: int | None
) -> None:
    async def story(world: World) -> None:
        job = await joined(world, max_concurrency=of_job)
        if of_operator is not None:
            await world.rows("INSERT INTO operator VALUES ('operator', %s)", of_operator)
        await partitions(job, *"abcdef")
        found = await claims(world, limit=2)
        # Two were picked, and there is room for one more.
        assert len(found) == 3
        assert await claims(world) == ()
        await world.tasks.complete(done(found[0].fence))
        assert len(await claims(world)) == 1

    play(story)


def test_two_groups_share_the_room_of_their_job(play: Play) -> None:
    async def story(world: World) -> None:
        job = await joined(world, max_concurrency=5)
        building = await world.value("SELECT gen_random_uuid()::text")
        rebuilt = Job(world, job.id, job.definition_id, job.dataset, building, job.operator)
        for each in (job, rebuilt):
            await partitions(each, "a")
        for each in (job, rebuilt):
            await partitions(each, *"bcd", delay_ms=1)
        world.later(1)
        found = await claims(world, limit=2)
        assert len(found) == 5
        assert sizes(found) == [1, 4]

    play(story)


def test_a_claim_has_a_thousand_tasks_at_most(play: Play) -> None:
    async def story(world: World) -> None:
        job = await joined(world, most=400)
        await partitions(job, *(str(number) for number in range(1_300)))
        found = await claims(world, limit=5)
        assert len(found) == 1_000
        assert sizes(found) == [333, 333, 334]
        assert sizes(await claims(world, limit=5)) == [300]

    play(story)


def test_two_workers_never_share_a_task(play: Play) -> None:
    async def story(world: World) -> None:
        job = await joined(world, most=3)
        await partitions(job, *"abcdef")
        async with world.unfinished() as somebody:
            theirs = await somebody.claim_next("operator", worker="other", in_batches=True)
            # What they hold is passed over, without waiting for them.
            async with asyncio.timeout(20):
                ours = await claims(world)
        assert keys(theirs) == list("abc")
        assert keys(ours) == list("def")

    play(story)


def test_each_ends_by_itself(play: Play) -> None:
    async def story(world: World) -> None:
        job = await joined(world, max_attempts=1)
        await partitions(job, *"abc")
        first, second, third = await claims(world)
        await world.tasks.end(
            [*done(first.fence, job.output("a")), *failed(second.fence, "Its data is broken.")]
        )
        rows = await world.rows("SELECT status FROM task ORDER BY id")
        assert [row["status"] for row in rows] == [
            TaskStatus.SUCCEEDED,
            TaskStatus.FAILED,
            TaskStatus.RUNNING,
        ]
        (ended,) = await world.tasks.complete(done(third.fence, job.output("c")))
        assert isinstance(ended, AttemptEnd)
        assert ended.status is TaskStatus.SUCCEEDED

    play(story)


def test_claims_of_other_jobs_take_no_second_look(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def counting(name: str) -> bytes:
        asked.extend([name] if name == "pick_more" else [])
        return query(name)

    monkeypatch.setattr(lifecycle, "query", counting)

    async def story(world: World) -> None:
        await partitions(await world.job(), *"abc")
        assert len(await claims(world, limit=2)) == 2
        one = await joined(world, "one", most=1, operator="o")
        await partitions(one, "x")
        assert len(await world.tasks.claim_next("o", worker="w", in_batches=True)) == 1
        assert asked == []
        await partitions(await joined(world, "two", operator="p"), "x")
        assert len(await world.tasks.claim_next("p", worker="w", in_batches=True)) == 1
        assert asked == ["pick_more"]

    play(story)
