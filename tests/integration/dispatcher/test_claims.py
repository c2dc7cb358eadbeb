"""Making tasks and claiming them: in order, within limits, and with wake-ups for what is left."""

from __future__ import annotations

import asyncio

import pytest

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.tasks.model import ClaimedTask, Refusal, TaskRefusalReason
from penstock.kernel.errors import InvalidInput
from penstock.protocol.base import TaskStatus
from tests.integration.dispatcher.world import Play, World, done, either_way, failed


def keys(claims: tuple[ClaimedTask, ...]) -> list[str]:
    return [str(each.payload["key"]) for each in claims]


def test_equal_tasks_are_made_once(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        other = await world.job("other")
        first = await world.tasks.create([job.new("a"), job.new("b"), job.new("a")])
        assert first[0] == first[2] != first[1]
        again = await world.tasks.create([job.new("b"), job.new("c"), other.new("b")])
        assert again[0] is None
        assert None not in again[1:]
        assert await world.value("SELECT count(*) FROM task") == 4
        assert await world.tasks.create([]) == ()

    play(story)


@either_way
def test_many_tasks_need_one_wake_up(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await world.tasks.create([job.new(str(number)) for number in range(5_001)])
        assert await world.wakes() == ["operator/normal"]
        await world.tasks.create([job.new("x", priority=Priority.BULK), job.new("y")])
        assert await world.wakes() == ["operator/bulk", "operator/normal"]
        await world.tasks.create([job.new("x")])
        assert await world.wakes() == []
        await world.tasks.create([job.new("later", delay_ms=60_000)])
        assert await world.wakes() == []
        world.later(61)
        assert await world.wakes() == ["operator/normal"]

    play(story)


def test_a_claim_for_several_workers_gives_each_its_own(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await world.tasks.create(
            [job.new("bulk", priority=Priority.BULK), job.new("a"), job.new("b")]
        )
        found = await world.tasks.claim_for("operator", ["one", "two", "two", "three"])
        claimed = tuple(each for each in found if each is not None)
        # Both tiers at once, the normal one first; there is none for the last.
        assert keys(claimed) == ["a", "b", "bulk"]
        assert found[3] is None
        rows = await world.rows(
            "SELECT task.worker, attempt.worker AS tried, task.lease_token, task.attempt"
            " FROM task JOIN attempt ON task_id = task.id AND number = task.attempt"
            " ORDER BY task.priority DESC, task.id"
        )
        assert [(row["worker"], row["tried"]) for row in rows] == [
            ("one", "one"),
            ("two", "two"),
            ("two", "two"),
        ]
        assert [row["lease_token"] for row in rows] == [each.lease_token for each in claimed]
        with pytest.raises(InvalidInput):
            await world.tasks.claim_for("operator", [])

    play(story)


def test_a_limit_holds_for_several_workers_and_both_tiers(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_concurrency=3)
        bulk = [job.new(f"z{each}", priority=Priority.BULK) for each in range(4)]
        await world.tasks.create([job.new("a"), job.new("b"), *bulk])
        for _ in range(2):
            found = await world.tasks.claim_for("operator", ["w"] * 6)
            await world.tasks.complete(
                [one for each in found if each is not None for one in done(each.fence)]
            )
        assert await world.value("SELECT count(*) FROM attempt") == 6
        found = await world.tasks.claim_for("operator", ["w"] * 6)
        assert found == (None,) * 6

    play(story)


def test_a_function_is_invoked_for_each_task(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(runtime="lambda")
        made = await world.tasks.create([job.new("a"), job.new("b")])
        rows = await world.rows(
            "SELECT kind, target, body FROM outbox WHERE kind = 'invoke' ORDER BY id"
        )
        assert rows == [
            {"kind": "invoke", "target": "operator", "body": {"task_id": each}} for each in made
        ]

    play(story)


def test_what_cannot_be_made_makes_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        wrong = [
            job.new("x" * 1001),
            job.new("x", payload={"nul": "\x00"}),
        ]
        for each in wrong:
            with pytest.raises(InvalidInput):
                await world.tasks.create([job.new("right"), each])
        await world.rows("DELETE FROM generation")
        await world.rows("DELETE FROM job_definition")
        with pytest.raises(InvalidInput, match="no definition"):
            await world.tasks.create([job.new("a")])
        assert await world.value("SELECT count(*) FROM task") == 0
        assert await world.value("SELECT count(*) FROM outbox WHERE kind = 'wake'") == 0

    play(story)


def test_a_claim_gives_all_that_a_worker_needs(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(body='{"config": 1}', heartbeat_ms=5_000, timeout_ms=7_000)
        (task_id,) = await job.make("a")
        claimed = await world.tasks.claim(task_id, worker="w1")
        assert isinstance(claimed, ClaimedTask)
        assert (claimed.task_id, claimed.attempt, claimed.job) == (task_id, 1, "job")
        assert (claimed.heartbeat_ms, claimed.timeout_ms) == (5_000, 7_000)
        assert (claimed.payload, claimed.definition) == ({"key": "a"}, {"config": 1})
        assert claimed.generation == job.generation
        assert await world.value(
            "SELECT lease_expires_at = claimed_at + interval '5 seconds' FROM task"
        )
        rows = await world.rows("SELECT number, worker, lease_token, outcome FROM attempt")
        assert rows == [
            {"number": 1, "worker": "w1", "lease_token": claimed.lease_token, "outcome": None}
        ]

    play(story)


def test_a_claim_that_is_refused_says_why(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=1)
        assert await world.tasks.claim(404, worker="w") == Refusal(
            404, TaskRefusalReason.UNKNOWN, None
        )

        async def why(task_id: int) -> tuple[TaskRefusalReason, TaskStatus | None, str | None]:
            found = await world.tasks.claim(task_id, worker="w2")
            assert isinstance(found, Refusal)
            assert found.state is not None
            return found.why, found.state.status, found.state.worker

        running = await job.claimed("running", worker="w1")
        assert await why(running.task_id) == (TaskRefusalReason.RUNNING, TaskStatus.RUNNING, "w1")
        completed = await job.claimed("completed")
        await world.tasks.complete(done(completed.fence))
        assert await why(completed.task_id) == (TaskRefusalReason.OVER, TaskStatus.SUCCEEDED, None)
        dead = await job.claimed("dead")
        await world.tasks.fail(failed(dead.fence))
        assert await why(dead.task_id) == (TaskRefusalReason.OVER, TaskStatus.FAILED, None)
        (cancelled,) = await job.make("cancelled")
        await world.tasks.cancel([cancelled])
        assert await why(cancelled) == (TaskRefusalReason.OVER, TaskStatus.CANCELLED, None)
        (early,) = await world.tasks.create([job.new("early", delay_ms=1_000)])
        assert early is not None
        assert await why(early) == (TaskRefusalReason.NOT_DUE, TaskStatus.QUEUED, None)
        world.later(2)
        await world.rows("INSERT INTO pause VALUES (%s, 'hand', 'all', 'tired')", job.id)
        assert await why(early) == (TaskRefusalReason.PAUSED, TaskStatus.QUEUED, None)
        await world.rows("DELETE FROM pause")
        await world.rows("INSERT INTO operator VALUES ('operator', 1)")
        assert await why(early) == (TaskRefusalReason.FULL, TaskStatus.QUEUED, None)
        await world.tasks.complete(done(running.fence))
        assert isinstance(await world.tasks.claim(early, worker="w"), ClaimedTask)

    play(story)


def test_the_next_are_normal_before_bulk_and_old_before_young(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        other = await world.job("other")
        await world.job("elsewhere", operator="another")
        await world.tasks.create([job.new("bulk", priority=Priority.BULK)])
        await world.tasks.create([job.new("late", delay_ms=500)])
        await world.tasks.create([other.new("middle", delay_ms=200)])
        await world.tasks.create([job.new("early", delay_ms=100), job.new("far", delay_ms=99_000)])
        world.later(1)
        claims = await world.tasks.claim_next("operator", worker="w", limit=10)
        # The job with the oldest comes first, with all that it has.
        assert keys(claims) == ["early", "late", "middle", "bulk"]
        assert await world.tasks.claim_next("operator", worker="w") == ()
        assert await world.tasks.claim_next("another", worker="w") == ()
        world.later(100)
        assert keys(await world.tasks.claim_next("operator", worker="w")) == ["far"]

    play(story)


@either_way
def test_of_one_job_if_asked(play: Play) -> None:
    async def story(world: World) -> None:
        job, other = await world.job(), await world.job("other")
        await job.make("a", "b")
        await other.make("c")
        found = await world.tasks.claim_next("operator", worker="w", limit=9, job_id=other.id)
        assert keys(found) == ["c"]
        assert await world.wakes() == ["operator/normal"]

    play(story)


@either_way
def test_a_claim_with_a_remainder_passes_the_word_on(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await job.make("a", "b", "c")
        await world.tasks.create([job.new("bulk", priority=Priority.BULK)])
        await world.wakes()
        await world.tasks.claim_next("operator", worker="w", limit=2)
        assert await world.wakes() == ["operator/bulk", "operator/normal"]
        await world.tasks.claim_next("operator", worker="w")
        assert await world.wakes() == ["operator/bulk"]
        await world.tasks.claim_next("operator", worker="w")
        assert await world.wakes() == []
        assert await world.tasks.claim_next("operator", worker="w") == ()
        assert await world.wakes() == []

    play(story)


@either_way
def test_paused_jobs_start_nothing_and_stop_no_others(play: Play) -> None:
    async def story(world: World) -> None:
        job, other = await world.job(), await world.job("other")
        await job.make("a")
        await world.tasks.create([job.new("bulk", priority=Priority.BULK)])
        await other.make("b")
        await world.rows("INSERT INTO pause VALUES (%s, 'hand', 'bulk', 'tired')", job.id)
        found = await world.tasks.claim_next("operator", worker="w", limit=1)
        assert keys(found) == ["a"]
        await world.rows("INSERT INTO pause VALUES (%s, 'more', 'all', 'tired')", job.id)
        assert keys(await world.tasks.claim_next("operator", worker="w", limit=9)) == ["b"]
        await world.wakes()
        assert await world.tasks.claim_next("operator", worker="w", limit=9) == ()
        assert await world.wakes() == []
        await world.rows("DELETE FROM pause")
        assert keys(await world.tasks.claim_next("operator", worker="w", limit=9)) == ["bulk"]

    play(story)


@pytest.mark.parametrize("limited", ["operator", "job"])
@either_way
def test_limits_are_kept_and_room_is_announced(play: Play, limited: str) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_concurrency=2 if limited == "job" else None)
        if limited == "operator":
            await world.rows("INSERT INTO operator VALUES ('operator', 2)")
        await job.make("a", "b", "c")
        await world.tasks.create([job.new("bulk", priority=Priority.BULK)])
        first = await world.tasks.claim_next("operator", worker="w")
        await world.wakes()
        second = await world.tasks.claim_next("operator", worker="w", limit=9)
        assert keys(first + second) == ["a", "b"]
        assert await world.wakes() == []
        assert await world.tasks.claim_next("operator", worker="w", limit=9) == ()
        await world.tasks.complete(done(first[0].fence))
        assert await world.wakes() == ["operator/bulk", "operator/normal"]
        assert keys(await world.tasks.claim_next("operator", worker="w", limit=9)) == ["c"]
        await world.wakes()
        await world.tasks.reap()
        world.later(11)
        assert len((await world.tasks.reap()).reaped) == 2
        assert "operator/bulk" in await world.wakes()

    play(story)


def test_sixteen_claimers_share_without_doubles(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await job.make(*map(str, range(40)))
        claims = await asyncio.gather(
            *(world.tasks.claim_next("operator", worker=f"w{n}", limit=2) for n in range(16))
        )
        taken = [each.task_id for some in claims for each in some]
        assert len(set(taken)) == len(taken) == 32
        assert all(len(some) == 2 for some in claims)

    play(story)


def test_sixteen_claimers_of_one_task_have_one_winner(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        for number in range(5):
            (task_id,) = await job.make(str(number))
            answers = await asyncio.gather(
                *(world.tasks.claim(task_id, worker=f"w{n}") for n in range(16))
            )
            (won,) = [each for each in answers if isinstance(each, ClaimedTask)]
            lost = [each for each in answers if isinstance(each, Refusal)]
            assert {each.why for each in lost} == {TaskRefusalReason.RUNNING}
            row = await world.value("SELECT worker FROM task WHERE id = %s", task_id)
            assert {each.state.worker for each in lost if each.state} == {row}
            assert won.attempt == 1

    play(story)


@pytest.mark.parametrize("limited", ["operator", "job"])
def test_sixteen_claimers_never_pass_a_limit(play: Play, limited: str) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_concurrency=5 if limited == "job" else None)
        if limited == "operator":
            await world.rows("INSERT INTO operator VALUES ('operator', 5)")
        ids = await job.make(*map(str, range(40)))
        answers = await asyncio.gather(
            *(world.tasks.claim_next("operator", worker="w", limit=2) for _ in range(8)),
            *(world.tasks.claim(each, worker="w") for each in ids[-8:]),
        )
        won = [each for each in answers if isinstance(each, ClaimedTask)]
        assert sum(len(each) for each in answers if isinstance(each, tuple)) + len(won) == 5
        assert await world.value("SELECT count(*) FROM task WHERE status = 'running'") == 5

    play(story)


def test_a_limit_that_makes_no_sense(play: Play) -> None:
    async def story(world: World) -> None:
        for limit in (0, -1, 1001):
            with pytest.raises(InvalidInput, match="1 to 1000"):
                await world.tasks.claim_next("operator", worker="w", limit=limit)

    play(story)


def test_a_worker_has_a_name(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        (task_id,) = await job.make("a")
        for worker in ["", "x" * 201, "nul\x00"]:
            with pytest.raises(InvalidInput, match="worker's name"):
                await world.tasks.claim(task_id, worker=worker)
            with pytest.raises(InvalidInput, match="worker's name"):
                await world.tasks.claim_next("operator", worker=worker)
        assert await world.value("SELECT status FROM task") == "queued"

    play(story)
