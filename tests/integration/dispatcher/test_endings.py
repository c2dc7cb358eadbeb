"""Attempts that end: completed, failed, cancelled, given up, played again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.dispatcher.database.pool import Connection, query
from penstock.dispatcher.tasks.completion import LOSSES_MAX, RELEASES_MAX
from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    ClaimedTask,
    Completion,
    ExtendedLease,
    Failure,
    Fence,
    PublishOutcome,
    Refusal,
    Release,
    TaskOutput,
    TaskRefusalReason,
    TaskSnapshot,
)
from penstock.dispatcher.tasks.rows import fence_arrays
from penstock.dispatcher.tasks.schemas import output_arrays
from penstock.kernel.errors import InvalidInput
from penstock.protocol.base import TaskStatus
from tests.integration.dispatcher.world import Play, World, Worlds, done, either_way, failed


async def ended(world: World, fence: Fence, *outputs: TaskOutput) -> AttemptEnd:
    (found,) = await world.tasks.complete(done(fence, *outputs))
    assert isinstance(found, AttemptEnd)
    return found


async def again(world: World, claimed: ClaimedTask) -> ClaimedTask:
    found = await world.tasks.claim(claimed.task_id, worker="worker")
    assert isinstance(found, ClaimedTask)
    return found


def zombies_of(fence: Fence) -> list[Fence]:
    return [
        replace(fence, attempt=fence.attempt + 1),
        replace(fence, attempt=0),
        replace(fence, lease_token="guessed"),
    ]


async def snapshot(world: World) -> list[object]:
    tables = ("task", "attempt", "event", "publication", "appended", "outbox")
    return [await world.rows(f"SELECT * FROM {table} ORDER BY 1, 2") for table in tables]


def test_a_heartbeat_extends_its_own_lease_only(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        first, second = await job.claimed("a"), await job.claimed("b")
        world.later(5)
        stale = replace(second.fence, lease_token="guessed")
        kept, lost, unknown = await world.tasks.heartbeat([first.fence, stale, Fence(404, 1, "x")])
        assert isinstance(kept, ExtendedLease)
        assert not kept.cancel_asked
        assert (kept.lease_expires_at - first.lease_expires_at).total_seconds() > 4
        assert isinstance(lost, Refusal)
        assert lost.why is TaskRefusalReason.STALE
        assert lost.state is not None
        assert (lost.state.status, lost.state.worker) == (TaskStatus.RUNNING, "worker")
        assert lost.state.lease_expires_at == second.lease_expires_at
        assert unknown == Refusal(404, TaskRefusalReason.UNKNOWN, None)
        with pytest.raises(InvalidInput, match="twice"):
            await world.tasks.heartbeat([first.fence, first.fence])
        assert await world.tasks.heartbeat([]) == ()

    play(story)


def test_a_late_heartbeat_revives_a_lease_that_nobody_has_ended(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        claimed = await job.claimed()
        await world.tasks.reap()
        world.later(3600)
        (kept,) = await world.tasks.heartbeat([claimed.fence])
        assert isinstance(kept, ExtendedLease)
        assert (await world.tasks.reap(outage_seconds=9999)).reaped == ()
        assert (await ended(world, claimed.fence)).status is TaskStatus.SUCCEEDED

    play(story)


def test_completing_publishes_and_tells(worlds: Worlds) -> None:
    routed: list[tuple[int, object]] = []

    async def route(connection: Connection, events: Sequence[int]) -> None:
        for seq in events:
            found = await connection.execute(b"SELECT * FROM event WHERE seq = %s", [seq])
            row = await found.fetchone()
            assert row is not None
            routed.append((seq, row["partition_key"]))

    async def main() -> None:
        async with worlds.world(route=route) as world:
            job = await world.job()
            claimed = await job.claimed()
            outputs = (
                job.output("0-10", "s3://b/1", start=0, end=10),
                job.output("10-20", "s3://b/2", start=10, end=20),
            )
            answer = await ended(world, claimed.fence, *outputs)
            assert answer.status is TaskStatus.SUCCEEDED
            assert [each.outcome for each in answer.published] == [PublishOutcome.PUBLISHED] * 2
            events = [each.event_seq for each in answer.published]
            assert routed == [(events[0], "0-10"), (events[1], "10-20")]
            rows = await world.rows(
                "SELECT partition_key, range_start, range_end, location, task_id, revision"
                " FROM publication ORDER BY 2"
            )
            assert rows[1] == {
                "partition_key": "10-20",
                "range_start": 10,
                "range_end": 20,
                "location": "s3://b/2",
                "task_id": claimed.task_id,
                "revision": 1,
            }
            before = await snapshot(world)
            assert await ended(world, claimed.fence, *outputs) == answer
            assert await snapshot(world) == before
            assert len(routed) == 2

    asyncio.run(main())


def test_routing_that_fails_undoes_all_of_it(worlds: Worlds) -> None:
    async def route(connection: Connection, events: Sequence[int]) -> None:
        raise RuntimeError("no way")

    async def main() -> None:
        async with worlds.world(route=route) as world:
            job = await world.job()
            claimed = await job.claimed()
            before = await snapshot(world)
            with pytest.raises(RuntimeError, match="no way"):
                await world.tasks.complete(done(claimed.fence, job.output()))
            assert await snapshot(world) == before
            assert (await ended(world, claimed.fence)).status is TaskStatus.SUCCEEDED

    asyncio.run(main())


def test_a_different_completion_is_refused(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        claimed = await job.claimed()
        await ended(world, claimed.fence, job.output("a"))
        before = await snapshot(world)
        for other in (done(claimed.fence, job.output("b")), failed(claimed.fence)):
            call = world.tasks.complete if isinstance(other[0], Completion) else world.tasks.fail
            (refused,) = await call(other)  # type: ignore[arg-type]  # each gets its own
            assert isinstance(refused, Refusal)
            assert refused.why is TaskRefusalReason.DIFFERENT
            assert refused.state is not None
            assert refused.state.status is TaskStatus.SUCCEEDED
        (late,) = await world.tasks.heartbeat([claimed.fence])
        assert isinstance(late, Refusal)
        assert late.why is TaskRefusalReason.OVER
        assert await snapshot(world) == before

    play(story)


def test_zombies_change_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        first = await job.claimed()
        await world.tasks.reap()
        world.later(11)
        (reaped,) = (await world.tasks.reap()).reaped
        assert (reaped.attempt, reaped.worker, reaped.status) == (1, "worker", TaskStatus.RETRYING)
        world.later(11)
        second = await again(world, first)
        before = await snapshot(world)
        for fence in [first.fence, *zombies_of(second.fence)]:
            for (answer,) in (
                await world.tasks.heartbeat([fence]),
                await world.tasks.complete(done(fence, job.output())),
                await world.tasks.fail(failed(fence)),
            ):
                assert isinstance(answer, Refusal)
                assert answer.why is TaskRefusalReason.STALE
                assert answer.state is not None
                assert (answer.state.attempt, answer.state.worker) == (2, "worker")
        assert await snapshot(world) == before

    play(story)


def test_a_claim_that_a_crash_of_postgres_forgot_proves_nothing(play: Play) -> None:
    # Its commit is not waited for: decision 0076.
    async def story(world: World) -> None:
        job = await world.job()
        await job.make("one")
        async with world.unfinished(is_kept=False) as server:
            (forgotten,) = await server.claim_next(job.operator, worker="worker")
        lost = job.output(location="s3://b/lost")

        async def refused() -> None:
            for (answer,) in (
                await world.tasks.heartbeat([forgotten.fence]),
                await world.tasks.complete(done(forgotten.fence, lost)),
                await world.tasks.fail(failed(forgotten.fence)),
            ):
                assert isinstance(answer, Refusal)
                assert answer.why is TaskRefusalReason.STALE

        await refused()
        # Nobody knows of that attempt, so this one has its number, and another token.
        (claimed,) = await world.tasks.claim_next(job.operator, worker="worker")
        assert claimed.fence.attempt == forgotten.fence.attempt == 1
        await refused()
        (ended,) = await world.tasks.complete(done(claimed.fence, job.output()))
        assert isinstance(ended, AttemptEnd)
        rows = await world.rows("SELECT location FROM publication")
        assert [row["location"] for row in rows] == ["s3://b/x"]
        assert await world.value("SELECT count(*) FROM attempt") == 1

    play(story)


def test_a_completion_looks_at_its_own_tasks_whatever_postgres_knows_of_the_table(
    play: Play,
) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await job.make(*map(str, range(2_000)))
        # As right after the first start: there are no statistics.
        await world.rows("DELETE FROM pg_statistic WHERE starelid = 'task'::regclass")
        claimed = await world.tasks.claim_next(job.operator, worker="worker", limit=20)
        completions = [done(each.fence, job.output(f"p{each.task_id}"))[0] for each in claimed]
        asked = {
            **fence_arrays(each.fence for each in completions),
            **output_arrays(completions),
        }

        async def plan(connection: Connection) -> str:
            cursor = await connection.execute(b"EXPLAIN " + query("hold_outputs"), asked)
            return "\n".join(row["QUERY PLAN"] for row in await cursor.fetchall())

        text = await world.database.transact(plan)
        found = re.findall(r"Scan (?:using (\w+) )?on task\b", text)
        assert found == ["task_pkey"] * 2, text

    play(story)


def test_one_refused_completion_costs_the_others_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        job, other = await world.job(), await world.job("other")
        good, bad, stale = [await job.claimed(key) for key in "abc"]
        sayings = [
            Completion(stale.fence.__class__(stale.task_id, 1, "guessed"), (job.output("c"),)),
            Completion(bad.fence, (other.output("x"),)),
            Completion(good.fence, (job.output("a"),)),
            Completion(Fence(404, 1, "x")),
        ]
        answers = await world.tasks.complete(sayings)
        assert [getattr(each, "why", None) for each in answers] == [
            TaskRefusalReason.STALE,
            TaskRefusalReason.OUTPUTS,
            None,
            TaskRefusalReason.UNKNOWN,
        ]
        assert isinstance(answers[1], Refusal)
        assert other.dataset in answers[1].detail
        assert await world.value("SELECT count(*) FROM event") == 1
        assert (await ended(world, bad.fence, job.output("b"))).status is TaskStatus.SUCCEEDED

    play(story)


NO_OUTPUTS: list[dict[str, Any]] = [
    {"partition_key": ""},
    {"partition_key": "x" * 501},
    {"partition_key": "nul\x00"},
    {"partition_key": "p", "start": 1},
    {"partition_key": "p", "start": 2, "end": 2},
    {"partition_key": None, "start": 1, "end": 2},
    {"partition_key": "p", "cursor": 1},
    {"partition_key": None, "cursor": 2**63},
    {"location": ""},
    {"append_key": ""},
    {"dataset": "x"},
]


def test_outputs_that_make_no_sense_are_refused(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        claimed = await job.claimed()
        wrong = [(replace(job.output(), **fields),) for fields in NO_OUTPUTS]
        for outputs in (*wrong, (job.output("a"), job.output("a"))):
            (answer,) = await world.tasks.complete(done(claimed.fence, *outputs))
            assert isinstance(answer, Refusal)
            assert answer.why is TaskRefusalReason.OUTPUTS
            assert answer.detail
        assert (await ended(world, claimed.fence, job.output("a"))).status is TaskStatus.SUCCEEDED

    play(story)


def test_a_partition_is_replaced_by_later_tasks_only(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        first, second, third = [await job.claimed(key) for key in "abc"]

        async def publish(claimed: ClaimedTask) -> tuple[PublishOutcome, int | None]:
            answer = await ended(world, claimed.fence, job.output("p", f"s3://{claimed.task_id}"))
            (one,) = answer.published
            assert (one.event_seq is None) == (one.outcome is not PublishOutcome.PUBLISHED)
            return one.outcome, one.revision

        assert await publish(second) == (PublishOutcome.PUBLISHED, 1)
        assert await publish(first) == (PublishOutcome.SUPERSEDED, None)
        assert await publish(third) == (PublishOutcome.PUBLISHED, 2)
        assert await world.value("SELECT location FROM publication") == f"s3://{third.task_id}"
        assert await world.value("SELECT count(*) FROM event") == 2

    play(story)


def test_of_two_in_one_call_the_later_counts(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        first, second = [await job.claimed(key) for key in "ab"]
        answers = await world.tasks.complete(
            [Completion(second.fence, (job.output(),)), Completion(first.fence, (job.output(),))]
        )
        outcomes = [each.published[0].outcome for each in answers if isinstance(each, AttemptEnd)]
        assert outcomes == [PublishOutcome.PUBLISHED, PublishOutcome.SUPERSEDED]
        assert await world.value("SELECT task_id FROM publication") == second.task_id

    play(story)


def test_appending_is_unique_by_its_key(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(update_mode="append")

        async def append(key: str, append_key: str | None) -> tuple[PublishOutcome, int | None]:
            claimed = await job.claimed(key)
            output = job.output("p", append_key=append_key)
            (one,) = (await ended(world, claimed.fence, output)).published
            return one.outcome, one.revision

        assert await append("a", "k1") == (PublishOutcome.PUBLISHED, 1)
        assert await append("b", "k1") == (PublishOutcome.DUPLICATE, None)
        assert await append("c", "k2") == (PublishOutcome.PUBLISHED, 2)
        assert await append("d", None) == (PublishOutcome.PUBLISHED, 3)
        late, later = await job.claimed("e"), await job.claimed("f")
        await ended(world, later.fence, job.output("p"))
        (one,) = (await ended(world, late.fence, job.output("p"))).published
        assert (one.outcome, one.revision) == (PublishOutcome.PUBLISHED, 5)
        assert await world.value("SELECT count(*) FROM appended") == 5
        assert await world.value("SELECT count(*) FROM event") == 5
        two = [await job.claimed(key) for key in "gh"]
        answers = await world.tasks.complete(
            [Completion(each.fence, (job.output("q", append_key="same"),)) for each in two]
        )
        assert [each.published[0].outcome for each in answers if isinstance(each, AttemptEnd)] == [
            PublishOutcome.PUBLISHED,
            PublishOutcome.DUPLICATE,
        ]

    play(story)


def test_a_dataset_without_partitions_moves_its_cursor(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        first, second = [await job.claimed(key) for key in "ab"]
        await ended(world, first.fence, job.output(None, cursor=77))
        await ended(world, second.fence, job.output(None))
        rows = await world.rows("SELECT cursor, partition_key FROM event ORDER BY seq")
        assert [row["cursor"] for row in rows] == [77, second.task_id]
        assert await world.value("SELECT partition_key FROM publication") == ""

    play(story)


@either_way
def test_failures_are_retried_later_and_later_and_then_dead(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=4, retry_first_ms=1_000, retry_max_ms=2_500)
        claimed = await job.claimed()
        for pause in (1.0, 2.0, 2.5):
            calls = failed(claimed.fence, "so\x00it\ud800goes")
            (answer,) = await world.tasks.fail(calls)
            assert isinstance(answer, AttemptEnd)
            assert answer.status is TaskStatus.RETRYING
            assert answer.due_at is not None
            waits = await world.value(
                "SELECT extract(epoch FROM due_at - penstock_now())::float FROM task"
            )
            assert 0.75 * pause <= waits <= min(1.25 * pause, 2.5)
            assert await world.tasks.fail(calls) == (answer,)
            assert await world.wakes() == []
            refused = await world.tasks.claim(claimed.task_id, worker="w")
            assert isinstance(refused, Refusal)
            assert refused.why is TaskRefusalReason.NOT_DUE
            world.later(3)
            assert await world.wakes() == ["operator/normal"]
            claimed = await again(world, claimed)
        (last,) = await world.tasks.fail(failed(claimed.fence, "enough"))
        assert isinstance(last, AttemptEnd)
        assert (last.status, last.attempt, last.due_at) == (TaskStatus.FAILED, 4, None)
        assert await world.value("SELECT reason FROM task") == "enough"
        outcomes = await world.rows("SELECT outcome, reason FROM attempt ORDER BY number")
        assert [row["outcome"] for row in outcomes] == ["failed"] * 4
        assert outcomes[0]["reason"] == "so\ufffdit?goes"

    play(story)


def test_a_failure_that_must_not_be_retried(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        claimed = await job.claimed()
        (answer,) = await world.tasks.fail(failed(claimed.fence, is_retried=False))
        assert isinstance(answer, AttemptEnd)
        assert answer.status is TaskStatus.FAILED

    play(story)


@either_way
def test_a_dead_task_is_played_again_with_new_attempts(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=2)
        first = await job.claimed()
        (dead,) = await world.tasks.fail(failed(first.fence, is_retried=False))
        (queued, unknown) = await world.tasks.replay([first.task_id, 404])
        assert isinstance(queued, TaskSnapshot)
        assert (queued.status, queued.attempt, queued.reason) == (TaskStatus.QUEUED, 1, None)
        assert unknown == Refusal(404, TaskRefusalReason.UNKNOWN, None)
        assert await world.wakes() == ["operator/normal"]
        (twice,) = await world.tasks.replay([first.task_id])
        assert isinstance(twice, Refusal)
        assert twice.why is TaskRefusalReason.NOT_DEAD
        # The attempt that died is still answered as it was.
        assert await world.tasks.fail(failed(first.fence, is_retried=False)) == (dead,)
        numbers = []
        for _ in range(2):
            claimed = await again(world, first)
            numbers.append(claimed.attempt)
            await world.tasks.fail(failed(claimed.fence))
            world.later(10)
        assert numbers == [2, 3]
        assert await world.value("SELECT status FROM task") == "dead"

    play(story)


def test_cancelling_what_waits_and_what_runs(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        (queued,) = await job.make("queued")
        retrying, running, failing, silent = [await job.claimed(key) for key in "abcd"]
        await world.tasks.fail(failed(retrying.fence))
        over = await job.claimed("over")
        await ended(world, over.fence)
        ids = [queued, retrying.task_id, running.task_id, over.task_id, 404]
        answers = await world.tasks.cancel(ids, reason="no need")
        assert await world.tasks.cancel(ids, reason="really") == answers
        await world.tasks.cancel([failing.task_id, silent.task_id])
        first, second, third, fourth, fifth = answers
        for each in (first, second):
            assert isinstance(each, TaskSnapshot)
            assert (each.status, each.reason) == (TaskStatus.CANCELLED, "no need")
        assert isinstance(third, TaskSnapshot)
        assert (third.status, third.cancel_asked) == (TaskStatus.RUNNING, True)
        assert isinstance(fourth, Refusal)
        assert fourth.why is TaskRefusalReason.OVER
        assert fifth == Refusal(404, TaskRefusalReason.UNKNOWN, None)
        (beat,) = await world.tasks.heartbeat([running.fence])
        assert isinstance(beat, ExtendedLease)
        assert beat.cancel_asked
        answer = await ended(world, running.fence, job.output())
        assert (answer.status, answer.published) == (TaskStatus.CANCELLED, ())
        assert await ended(world, running.fence, job.output()) == answer
        (stopped,) = await world.tasks.fail(failed(failing.fence))
        assert isinstance(stopped, AttemptEnd)
        assert stopped.status is TaskStatus.CANCELLED
        assert await world.value("SELECT count(*) FROM event") == 0
        await world.tasks.reap(outage_seconds=9999)
        world.later(60)
        await world.tasks.reap(outage_seconds=9999)
        assert await world.value("SELECT status FROM task WHERE id = %s", silent.task_id) == (
            "cancelled"
        )

    play(story)


@either_way
def test_the_reaper_ends_what_is_silent_in_batches(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=2)
        await world.tasks.reap()
        first = [await job.claimed(key) for key in "abc"]
        world.later(5)
        (kept,) = await world.tasks.heartbeat([first[2].fence])
        assert isinstance(kept, ExtendedLease)
        world.later(6)
        assert len((await world.tasks.reap(limit=1)).reaped) == 1
        assert len((await world.tasks.reap(limit=9)).reaped) == 1
        assert (await world.tasks.reap()).reaped == ()
        rows = await world.rows("SELECT status, reason FROM task ORDER BY id")
        assert [row["status"] for row in rows] == ["retrying", "retrying", "running"]
        assert rows[0]["reason"] == "The worker worker was not heard of in time."
        world.later(2)
        assert set(await world.wakes()) == {"operator/normal"}
        await again(world, first[0])
        world.later(11)
        reaped = (await world.tasks.reap()).reaped
        assert {(each.task_id, each.status) for each in reaped} == {
            (first[0].task_id, TaskStatus.FAILED),
            (first[2].task_id, TaskStatus.RETRYING),
        }
        outcomes = await world.rows(
            "SELECT DISTINCT outcome FROM attempt WHERE ended_at IS NOT NULL"
        )
        assert outcomes == [{"outcome": "expired"}]

    play(story)


def test_after_an_outage_the_reaper_waits_for_the_slowest_heartbeat(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(heartbeat_ms=10_000)
        slow = await world.job("slow", heartbeat_ms=60_000)
        await world.tasks.reap()
        alive, silent, long = (
            await job.claimed("a"),
            await job.claimed("b"),
            await slow.claimed("c"),
        )
        world.later(300)
        quiet = await world.tasks.reap(outage_seconds=30)
        assert quiet.reaped == ()
        assert quiet.quiet_until is not None
        for _ in range(5):
            world.later(10)
            assert (await world.tasks.reap(outage_seconds=30)).reaped == ()
            (beat,) = await world.tasks.heartbeat([alive.fence])
            assert isinstance(beat, ExtendedLease)
        world.later(9.5)
        await world.tasks.heartbeat([alive.fence, long.fence])
        assert (await world.tasks.reap(outage_seconds=30)).quiet_until is not None
        world.later(1)
        found = await world.tasks.reap(outage_seconds=30)
        assert found.quiet_until is None
        assert [each.task_id for each in found.reaped] == [silent.task_id]

    play(story)


def test_too_many_at_once_are_refused(play: Play) -> None:
    async def story(world: World) -> None:
        many = [Fence(number, 1, "x") for number in range(1001)]
        with pytest.raises(InvalidInput, match="1000 tasks at most"):
            await world.tasks.heartbeat(many)
        with pytest.raises(InvalidInput, match="1000 tasks at most"):
            await world.tasks.complete([Completion(each) for each in many])
        with pytest.raises(InvalidInput, match="twice"):
            await world.tasks.cancel([1, 1])

    play(story)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({"step": "ж" * 8_000}, None),
        ({"text": "x" * 20_000}, "It has 20,011 bytes as JSON; 16,384 are allowed."),
        ({"n": [1e300] * 1_000}, "It has more than 16384 bytes."),
        ({"nul": "a\0b"}, {"nul": "a\ufffdb"}),
    ],
    ids=["much", "too much", "many digits", "nul"],
)
def test_progress_is_kept_within_its_bound(play: Play, said: Any, kept: Any) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        first, second = await job.claimed("a"), await job.claimed("b")
        progress = {first.task_id: said, second.task_id: {"step": 1}}
        await world.tasks.heartbeat([first.fence, second.fence], progress=progress)
        rows = await world.rows("SELECT progress FROM attempt ORDER BY task_id")
        expected = {"omitted": kept} if isinstance(kept, str) else kept or said
        assert [row["progress"] for row in rows] == [expected, {"step": 1}]

    play(story)


async def released(world: World, fence: Fence, *, is_delayed: bool = False) -> AttemptEnd:
    (found,) = await world.tasks.end([Release(fence, "The worker was stopped.", is_delayed)])
    assert isinstance(found, AttemptEnd)
    return found


async def task_of(world: World, claimed: ClaimedTask) -> dict[str, Any]:
    (row,) = await world.rows(
        "SELECT status, attempt, attempt_limit, releases, losses, reason FROM task WHERE id = %s",
        claimed.task_id,
    )
    return row


@either_way
def test_a_release_is_not_counted_and_its_number_is_not_used_again(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=1)
        first = await job.claimed()
        answer = await released(world, first.fence)
        assert (answer.status, await world.wakes()) == (TaskStatus.QUEUED, ["operator/normal"])
        assert await released(world, first.fence) == answer, "said twice is said once"
        second = await again(world, first)
        assert second.attempt == 2
        (stale,) = await world.tasks.end([Release(first.fence, "Something else.")])
        assert isinstance(stale, Refusal)
        (failure,) = await world.tasks.fail(failed(second.fence))
        assert isinstance(failure, AttemptEnd)
        assert failure.status is TaskStatus.FAILED, "the one attempt that counts has failed"
        rows = await world.rows("SELECT number, outcome, reason FROM attempt ORDER BY number")
        assert [tuple(row.values()) for row in rows] == [
            (1, "released", "The worker was stopped."),
            (2, "failed", "broken"),
        ]

    play(story)


def test_the_pause_after_a_failure_is_that_of_failures_alone(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=5, retry_max_ms=1_000_000)
        claimed = await job.claimed()
        for _ in range(6):
            await released(world, claimed.fence)
            claimed = await again(world, claimed)
        (failure,) = await world.tasks.fail(failed(claimed.fence))
        assert isinstance(failure, AttemptEnd)
        assert failure.due_at is not None
        now = await world.value("SELECT penstock_now()")
        assert (failure.due_at - now).total_seconds() < 1.3, "as after a first failure"

    play(story)


def test_nothing_is_handed_round_for_ever(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=1)
        claimed = await job.claimed()
        pauses = []
        for _ in range(RELEASES_MAX):
            answer = await released(world, claimed.fence, is_delayed=True)
            assert answer.status is TaskStatus.QUEUED
            assert answer.due_at is not None
            refused = await world.tasks.claim(claimed.task_id, worker="worker")
            assert isinstance(refused, Refusal)
            now = await world.value("SELECT penstock_now()")
            pauses.append((answer.due_at - now).total_seconds())
            world.later(61)
            claimed = await again(world, claimed)
        assert pauses[0] < 1.3
        assert 40 < pauses[-1] <= 60
        assert (await released(world, claimed.fence, is_delayed=True)).status is TaskStatus.FAILED
        row = await task_of(world, claimed)
        assert row["reason"].startswith("The worker was stopped. It was released 20 times before")
        outcome = "SELECT outcome FROM attempt ORDER BY number DESC LIMIT 1"
        assert await world.value(outcome) == "failed"
        await world.tasks.replay([claimed.task_id])
        claimed = await again(world, claimed)
        assert (await released(world, claimed.fence)).status is TaskStatus.QUEUED

    play(story)


def test_what_was_lost_before_it_began_is_not_counted_five_times(play: Play) -> None:
    async def lost(world: World, fence: Fence) -> AttemptEnd:
        (found,) = await world.tasks.end([Release(fence, "The worker was killed.", is_lost=True)])
        assert isinstance(found, AttemptEnd)
        return found

    async def story(world: World) -> None:
        job = await world.job(max_attempts=1)
        claimed = await job.claimed()
        # Other releases are counted apart.
        await released(world, claimed.fence)
        claimed = await again(world, claimed)
        for _ in range(LOSSES_MAX):
            assert (await lost(world, claimed.fence)).status is TaskStatus.QUEUED
            claimed = await again(world, claimed)
        row = await task_of(world, claimed)
        assert (row["losses"], row["releases"]) == (LOSSES_MAX, LOSSES_MAX + 1)
        assert row["attempt_limit"] == claimed.attempt
        assert (await lost(world, claimed.fence)).status is TaskStatus.FAILED
        reason = (await task_of(world, claimed))["reason"]
        assert reason.startswith("The worker was killed. That happened 5 times before")
        await world.tasks.replay([claimed.task_id])
        claimed = await again(world, claimed)
        assert (await lost(world, claimed.fence)).status is TaskStatus.QUEUED

    play(story)


def test_what_was_lost_while_it_ran_is_counted_and_tried_again_at_once(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=2)
        claimed = await job.claimed()
        loss = Failure(claimed.fence, "The worker was killed.", is_lost=True)
        (answer,) = await world.tasks.fail([loss])
        assert isinstance(answer, AttemptEnd)
        assert answer.status is TaskStatus.RETRYING
        claimed = await again(world, claimed)
        (answer,) = await world.tasks.fail([replace(loss, fence=claimed.fence)])
        assert isinstance(answer, AttemptEnd)
        assert answer.status is TaskStatus.FAILED

    play(story)


@either_way
def test_what_may_begin_again_is_announced_when_it_may(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=3)
        claimed = await job.claimed()
        await world.wakes()
        # Handed back, lost before and after it began: at once. A failure: after its pause.
        for saying in (
            Release(claimed.fence, "The worker was stopped."),
            Release(claimed.fence, "The worker was killed.", is_lost=True),
            Failure(claimed.fence, "The worker was killed.", is_lost=True),
        ):
            await world.tasks.end([replace(saying, fence=claimed.fence)])
            assert await world.wakes() == ["operator/normal"]
            claimed = await again(world, claimed)
        await world.tasks.fail(failed(claimed.fence))
        assert await world.wakes() == []
        world.later(3600)
        assert await world.wakes() == ["operator/normal"]
        claimed = await again(world, claimed)
        await world.tasks.fail(failed(claimed.fence, is_retried=False))
        assert await world.wakes() == []
        await world.tasks.replay([claimed.task_id])
        assert await world.wakes() == ["operator/normal"]

    play(story)


def test_a_source_that_runs_well_between_stops_is_always_handed_back(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=1, body='{"source": {"kind": "always_on"}}')
        claimed = await job.claimed()
        for _ in range(RELEASES_MAX + 5):
            world.later(3600)
            assert (await released(world, claimed.fence)).status is TaskStatus.QUEUED
            claimed = await again(world, claimed)
        assert (await task_of(world, claimed))["releases"] == 1

    play(story)


def test_a_cancellation_wins_over_a_release(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        claimed = await job.claimed()
        await world.tasks.cancel([claimed.task_id], reason="Not wanted.")
        assert (await released(world, claimed.fence)).status is TaskStatus.CANCELLED
        assert await world.value("SELECT outcome FROM attempt") == "cancelled"

    play(story)


async def died(world: World, fence: Fence) -> AttemptEnd:
    """The process of an attempt has died, and others ran in it."""
    (found,) = await world.tasks.end([Release(fence, "The JVM died.", runs_alone=True)])
    assert isinstance(found, AttemptEnd)
    return found


def test_a_death_beside_others_is_free_once_and_the_task_runs_alone_then(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=1)
        first = await job.claimed()
        assert not first.runs_alone
        answer = await died(world, first.fence)
        assert answer.status is TaskStatus.QUEUED
        assert await died(world, first.fence) == answer, "said twice is said once"
        second = await again(world, first)
        assert second.runs_alone
        # A worker that is stopped changes nothing of that, and is not counted either.
        assert (await released(world, second.fence)).status is TaskStatus.QUEUED
        third = await again(world, second)
        assert third.runs_alone
        # Said by a worker that had others beside it all the same.
        assert (await died(world, third.fence)).status is TaskStatus.FAILED
        row = await task_of(world, third)
        assert row["reason"] == (
            "The JVM died. Its process has died before, which was not counted; this time counts as"
            " a failure."
        )
        rows = await world.rows("SELECT outcome, reason FROM attempt ORDER BY number")
        assert [each["outcome"] for each in rows] == ["released", "released", "failed"]
        assert rows[-1]["reason"] == row["reason"]
        await world.tasks.replay([third.task_id])
        assert (await again(world, third)).runs_alone, "a replay is no reason to trust it"

    play(story)


def test_who_has_died_alone_is_charged_and_runs_alone_too(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=2)
        first = await job.claimed()
        (answer,) = await world.tasks.fail([Failure(first.fence, "It died.", runs_alone=True)])
        assert isinstance(answer, AttemptEnd)
        assert answer.status is TaskStatus.RETRYING
        world.later(3600)
        second = await again(world, first)
        assert second.runs_alone
        await world.tasks.cancel([second.task_id], reason="Not wanted.")
        assert (await died(world, second.fence)).status is TaskStatus.CANCELLED

    play(story)
