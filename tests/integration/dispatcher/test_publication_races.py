"""The publication row by two real connections, interleaved, and what readers see of it.

One call is held open while the other arrives, as in `test_races`; it is kept or undone. Whatever
the order, a partition goes to the later task, a part is appended once, a generation has one schema,
and `current.json` ends with what the database says.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.datasets.projection import read_dataset
from penstock.dispatcher.database.pool import Connection, query
from penstock.dispatcher.deployment_plan import CutOverOutcome
from penstock.dispatcher.tasks.completion import end, held_outputs, no_route
from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    Completion,
    Fence,
    PublishOutcome,
    Refusal,
    TaskOutput,
    TaskRefusalReason,
)
from penstock.dispatcher.tasks.schemas import refuse_misfits, written
from penstock.protocol.base import TaskStatus
from tests.integration.dispatcher.readers import Library, columns, facts
from tests.integration.dispatcher.test_deployment import Pipeline, chain
from tests.integration.dispatcher.test_races import second_after_first
from tests.integration.dispatcher.world import Play, World, done


def became(answer: object) -> PublishOutcome:
    assert isinstance(answer, AttemptEnd)
    (one,) = answer.published
    return one.outcome


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("is_in_order", [True, False])
def test_two_replace_one_partition(play: Play, is_in_order: bool, is_kept: bool) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        early, late = [await job.claimed(key) for key in "ab"]
        first, second = (early, late) if is_in_order else (late, early)
        places = {each.task_id: await library.written(each) for each in (first, second)}
        (answer,) = await second_after_first(
            world,
            lambda other: other.complete(done(first.fence, job.output("p", places[first.task_id]))),
            world.tasks.complete(done(second.fence, job.output("p", places[second.task_id]))),
            is_kept=is_kept,
        )
        wins = second if is_in_order or not is_kept else first
        expected = PublishOutcome.PUBLISHED if wins is second else PublishOutcome.SUPERSEDED
        assert became(answer) is expected
        row = await world.rows("SELECT task_id, location, revision FROM publication")
        revision = 2 if is_in_order and is_kept else 1
        assert [tuple(each.values()) for each in row] == [
            (wins.task_id, places[wins.task_id], revision)
        ]
        left = await world.rows("SELECT place FROM departed")
        gone = [places[early.task_id]] if is_in_order and is_kept else []
        assert [each["place"] for each in left] == [
            each.partition("/datasets/")[2] for each in gone
        ]
        await library.carry()
        assert await library.locations(job) == [places[wins.task_id]]

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("is_same_key", [True, False])
def test_two_append_to_one_partition(play: Play, is_same_key: bool, is_kept: bool) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job(update_mode="append")
        early, late = [await job.claimed(key) for key in "ab"]

        def output(number: int) -> TaskOutput:
            key = "same" if is_same_key else None
            return job.output("p", f"s3://b/{number}", append_key=key, facts=facts(rows=5))

        (answer,) = await second_after_first(
            world,
            lambda other: other.complete(done(late.fence, output(2))),
            world.tasks.complete(done(early.fence, output(1))),
            is_kept=is_kept,
        )
        is_double = is_same_key and is_kept
        assert became(answer) is (
            PublishOutcome.DUPLICATE if is_double else PublishOutcome.PUBLISHED
        )
        parts = 1 if is_double or not is_kept else 2
        (row,) = await world.rows("SELECT revision, rows FROM publication")
        assert (row["revision"], row["rows"]) == (parts, parts * 5)
        await library.carry()
        assert len(await library.locations(job)) == parts

    play(story)


def test_a_completion_that_is_sent_again_while_it_is_under_way(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        claimed = await job.claimed()
        output = job.output(facts=facts(of=columns("a")))
        told: list[object] = []

        async def first(other: Any) -> None:
            told.extend(await other.complete(done(claimed.fence, output)))

        again = await second_after_first(
            world, first, world.tasks.complete(done(claimed.fence, output))
        )
        assert list(again) == told
        assert await world.value("SELECT revision FROM publication") == 1
        assert await world.value("SELECT count(*) FROM event") == 1
        await library.carry()
        seen = await library.seen(job)
        assert seen is not None
        assert seen.revision == 1
        # Long afterwards, when others have published, it changes nothing either.
        later = await job.claimed("later")
        await world.tasks.complete(done(later.fence, job.output("p", "s3://later")))
        assert await world.tasks.complete(done(claimed.fence, output)) == tuple(told)
        await library.carry()
        assert await library.locations(job) == ["s3://later"]

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
def test_two_grow_one_schema(play: Play, is_kept: bool) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        base = await job.claimed("base")
        of = columns("a")
        await world.tasks.complete(done(base.fence, job.output("z", facts=facts(of=of))))
        one, two, three = [await job.claimed(key) for key in "abc"]
        with_number = job.output("p", facts=facts(of=columns("a", "b")))
        with_text = job.output("q", facts=facts(of=columns("a", "b", b="string")))
        as_ever = job.output("r", facts=facts(of=of))
        async with asyncio.TaskGroup() as group, world.unfinished(is_kept=is_kept) as other:
            await other.complete(done(one.fence, with_number))
            # Who needs nothing new does not wait.
            (free,) = await world.tasks.complete(done(three.fence, as_ever))
            assert became(free) is PublishOutcome.PUBLISHED
            waiting = group.create_task(world.tasks.complete(done(two.fence, with_text)))
            await world.until_waiting()
        (answer,) = waiting.result()
        if is_kept:
            assert isinstance(answer, Refusal)
            assert answer.why is TaskRefusalReason.SCHEMA
            assert answer.state is not None
            assert answer.state.status is TaskStatus.RUNNING
        else:
            assert became(answer) is PublishOutcome.PUBLISHED
        found = await world.value("SELECT columns FROM generation_schema")
        assert [(each["name"], each["type"]) for each in found] == [
            ("a", "bigint"),
            ("b", "bigint" if is_kept else "string"),
        ]

    play(story)


def test_one_that_was_asked_to_stop_is_not_let_go_on_between_schema_and_end(play: Play) -> None:
    """A rollback takes the cancellation back, while what it has made was judged as cancelled."""

    async def story(world: World) -> None:
        job = await world.job()
        base, late = await job.claimed("base"), await job.claimed("late")
        of = columns("a")
        await world.tasks.complete(done(base.fence, job.output("z", facts=facts(of=of))))
        await world.rows(
            "UPDATE task SET cancel_asked = true, reason = 'Left.' WHERE id = %s", late.task_id
        )
        said = done(late.fence, job.output("q", facts=facts(of=columns("a", a="string"))))
        back = {"versions": [job.generation], "reason": "Left."}

        async def go_on(connection: Connection) -> int:
            return (await connection.execute(query("resume_running"), back)).rowcount

        async with asyncio.TaskGroup() as group, world.database.transaction() as connection:
            found = written(await held_outputs(connection, said))
            held = [each.fence for each in said]
            assert await refuse_misfits(connection, said, found, held=held) == {}
            resumed = group.create_task(world.database.transact(go_on))
            await world.until_waiting()
            (answer,), _ = await end(connection, said, route=no_route)
        assert isinstance(answer, AttemptEnd)
        assert (answer.status, answer.published) == (TaskStatus.CANCELLED, ())
        assert resumed.result() == 0

    play(story)


def test_two_publish_the_first_of_a_generation(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        one, two = [await job.claimed(key) for key in "ab"]
        (answer,) = await second_after_first(
            world,
            lambda other: other.complete(
                done(one.fence, job.output("p", facts=facts(of=columns("a"))))
            ),
            world.tasks.complete(done(two.fence, job.output("q", facts=facts(of=columns("b"))))),
        )
        assert became(answer) is PublishOutcome.PUBLISHED
        found = await world.value("SELECT columns FROM generation_schema")
        assert [each["name"] for each in found] == ["a", "b"]

    play(story)


def output_of(pipeline_task: Any, location: str) -> TaskOutput:
    (name,) = [
        each if isinstance(each, str) else each["name"]
        for each in pipeline_task.definition["outputs"]
    ]
    return TaskOutput(
        dataset=pipeline_task.definition["datasets"][name],
        location=location,
        partition_key=pipeline_task.payload["partition_key"],
    )


@pytest.mark.parametrize("is_new", [True, False])
def test_a_cut_over_while_one_publishes(play: Play, is_new: bool) -> None:
    """A completion of either generation is wholly before a cut-over, or after it."""

    async def story(world: World) -> None:
        library, pipeline = Library(world), Pipeline(world)
        await pipeline.apply(chain())
        before = (await pipeline.generations())["report"]
        await pipeline.send("a")
        await pipeline.work("a:clean")
        (old,) = await pipeline.tasks.claim_next("a:report", worker="w")
        await pipeline.apply(chain(report="2"), force=True)
        after = (await pipeline.generations())["report"]
        await pipeline.backfills.turn()
        (new,) = await pipeline.tasks.claim_next("a:report", worker="w")
        assert (old.generation, new.generation) == (before, after)
        await world.rows("UPDATE backfill SET state = 'cancelled'")
        await library.carry()
        daily = await world.value("SELECT id::text FROM dataset WHERE name = 'daily'")
        late = new if is_new else old
        async with asyncio.TaskGroup() as group, world.unfinished() as other:
            (answer,) = await other.complete(
                [Completion(late.fence, (output_of(late, "s3://b/new"),))]
            )
            assert isinstance(answer, AttemptEnd)
            moving = group.create_task(pipeline.deployment.cut_over(daily, force=True))
            await world.until_waiting()
        found = moving.result()
        if is_new:
            assert found is CutOverOutcome.DONE
        else:
            # The task of the rebuild has not ended.
            assert found is CutOverOutcome.BACKFILL
            await world.tasks.complete([Completion(new.fence, (output_of(new, "s3://b/2"),))])
            assert await pipeline.deployment.cut_over(daily, force=True) is CutOverOutcome.DONE
        await library.carry()
        seen = await read_dataset(library.store, "daily")
        assert seen is not None
        assert (seen.generation, seen.revision) == (after, 3)
        rows = await world.rows(
            "SELECT generation::text, revision, projected FROM publication"
            " WHERE dataset_id = %s ORDER BY 1",
            daily,
        )
        assert all(row["revision"] == row["projected"] == 1 for row in rows)
        assert {row["generation"] for row in rows} == ({after} if is_new else {before, after})

    play(story)


def test_one_who_publishes_after_the_cut_over_reaches_its_own_generation(play: Play) -> None:
    async def story(world: World) -> None:
        library, pipeline = Library(world), Pipeline(world)
        await pipeline.apply(chain())
        before = (await pipeline.generations())["report"]
        await pipeline.send("a")
        await pipeline.work("a:clean")
        (old,) = await pipeline.tasks.claim_next("a:report", worker="w")
        await pipeline.apply(chain(report="2"), force=True)
        await pipeline.forget_rebuilds()
        daily = await world.value("SELECT id::text FROM dataset WHERE name = 'daily'")
        assert await pipeline.deployment.cut_over(daily, force=True) is CutOverOutcome.DONE
        await library.carry()
        await world.tasks.complete([Completion(old.fence, (output_of(old, "s3://b/old"),))])
        await library.carry()
        seen = await read_dataset(library.store, "daily")
        assert seen is not None
        assert seen.generation != before
        rows = await world.rows(
            "SELECT generation::text FROM publication WHERE dataset_id = %s", daily
        )
        assert [row["generation"] for row in rows] == [before]
        # Back again, with a revision that is higher than any before.
        first = await pipeline.deployment.versions()
        await pipeline.deployment.rollback(first[-1].id)
        await library.carry()
        back = await read_dataset(library.store, "daily")
        assert back is not None
        assert back.generation == before
        assert back.revision > seen.revision

    play(story)


def test_two_relays_and_one_who_publishes(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        other = library.another()
        locations = []
        for number in range(6):
            claimed = await job.claimed(str(number))
            locations.append(await library.publish(job, claimed))
            # The one takes the word, the other finds what the next has brought. A turn does not
            # wait for long: on a busy machine it takes another to see what became of it.
            seen = None
            for _ in range(100):
                await asyncio.gather(library.relay.turn(), other.turn())
                seen = await library.seen(job)
                if seen is not None and seen.revision == number + 1:
                    break
            assert seen is not None
            assert (seen.revision, seen.parts[0].location) == (number + 1, locations[-1])
        await library.carry()
        unconfirmed = "SELECT count(*) FROM departed WHERE confirmed_at IS NULL"
        assert await world.value(unconfirmed) == 0
        assert await world.value("SELECT count(*) FROM departed") == 5

    play(story)


def test_a_zombie_of_another_attempt_publishes_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        await world.tasks.reap()
        first = await job.claimed()
        ghost = await library.written(first)
        world.later(11)
        await world.tasks.reap()
        world.later(11)
        second = await world.tasks.claim(first.task_id, worker="other")
        assert not isinstance(second, Refusal)
        good = await library.publish(job, second)
        for fence in (first.fence, Fence(first.task_id, 2, first.lease_token)):
            (answer,) = await world.tasks.complete(done(fence, job.output("p", ghost)))
            assert isinstance(answer, Refusal)
        await library.carry()
        assert await library.locations(job) == [good]

    play(story)
