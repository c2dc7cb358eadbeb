"""What a DAG's `keep` drops, and what it never does, on a real Postgres."""

from __future__ import annotations

import asyncio

import pytest

from penstock.dispatcher.retention import KEEP_PASS_SECONDS, PartitionExpirer
from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    Completion,
    NewTask,
    PublishOutcome,
    TaskOutput,
)
from tests.integration.dispatcher.readers import Library
from tests.integration.dispatcher.test_deployment import Pipeline, chain
from tests.integration.dispatcher.world import Play, World

DAY = 86_400.0


def kept(keep: str = "", *, clean: str = "1", report: str = "1") -> str:
    """A pipeline in which the output of `clean` is kept so."""
    text = chain(clean=clean, report=report)
    output = "[tidy]" if not keep else f"[{{name: tidy, keep: {{{keep}}}}}]"
    return text.replace("outputs: [tidy]", f"outputs: {output}")


async def keep_all(world: World, *, rows_max: int = 1000, grace_seconds: float = 0) -> None:
    """A whole pass."""
    world.later(KEEP_PASS_SECONDS)
    keeping = PartitionExpirer(world.database, rows_max=rows_max, grace_seconds=grace_seconds)
    for _ in range(1000):
        if await keeping.turn() == KEEP_PASS_SECONDS:
            return
    pytest.fail("a pass does not end")


async def run_all(pipeline: Pipeline) -> None:
    for operator in ("a:clean", "a:report"):
        await pipeline.work(operator)


async def published(world: World, dataset: str = "tidy", *, state: str = "current") -> list[str]:
    rows = await world.rows(
        "SELECT partition_key FROM publication JOIN dataset ON dataset.id = dataset_id"
        " JOIN generation ON generation.dataset_id = dataset.id AND version = generation"
        " WHERE name = %s AND state = %s ORDER BY 1",
        *(dataset, state),
    )
    return [row["partition_key"] for row in rows]


async def send(pipeline: Pipeline, *names: str) -> None:
    """Partitions that are computed one after the other."""
    for name in names:
        await pipeline.send(name)
        await run_all(pipeline)
        pipeline.world.later(DAY)


async def states(world: World) -> list[str]:
    """The generations of `tidy`: those that are dropped are marked."""
    rows = await world.rows(
        "SELECT state, state = 'abandoned' AND dropped_at = changed_at AS is_dropped"
        " FROM generation JOIN dataset ON dataset.id = dataset_id WHERE name = 'tidy'"
        " ORDER BY generation.created_at"
    )
    return ["dropped" if row["is_dropped"] else row["state"] for row in rows]


def test_partitions_are_counted_by_when_they_were_published(play: Play) -> None:
    async def story(world: World) -> None:
        library, pipeline = Library(world), Pipeline(world)
        await pipeline.apply(kept("partitions: 2"))
        await send(pipeline, "c", "b", "a")
        await keep_all(world)
        assert await published(world) == ["a", "b"]
        assert await published(world, "daily") == ["a", "b", "c"]
        # What is built anew is built of what there is.
        left = await world.rows(
            "SELECT partition_key FROM event JOIN dataset ON dataset.id = dataset_id"
            " WHERE name = 'tidy' ORDER BY 1"
        )
        assert [row["partition_key"] for row in left] == ["a", "b"]
        await library.carry()
        generation = (await pipeline.generations())["clean"]
        key = f"datasets/tidy/{generation}/c/current.json"
        assert b'"parts":[]' in library.bucket.objects[key].body
        # It may come back, and is the newest then.
        await pipeline.routing.accept([await pipeline.event("c2", partition_key="c")])
        await pipeline.route()
        await run_all(pipeline)
        await keep_all(world)
        assert await published(world) == ["a", "c"]
        revision = await world.value(
            "SELECT revision FROM publication WHERE partition_key = 'c' AND generation = %s",
            generation,
        )
        assert revision == 3

    play(story)


def test_partitions_of_ranges_are_counted_by_their_ranges(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(kept("partitions: 2"))
        for start in (30, 10, 20, 0):
            event = await pipeline.event(str(start), start=start, end=start + 10)
            await pipeline.routing.accept([event])
            await pipeline.route()
            await run_all(pipeline)
            world.later(1)
        await keep_all(world, rows_max=1)
        assert await published(world) == ["20", "30"]

    play(story)


def test_partitions_of_an_age(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(kept("age: 3d"))
        await send(pipeline, "a", "b")
        await keep_all(world)
        assert await published(world) == ["a", "b"]
        world.later(DAY)
        await keep_all(world)
        assert await published(world) == ["b"]
        # Without partitions there is nothing to choose from.
        pipeline_job = await pipeline.job("clean")
        await world.rows(
            "INSERT INTO publication (dataset_id, generation, partition_key, mode, task_id,"
            " attempt, location) VALUES (%s, %s, '', 'replace', 1, 1, 'x')",
            *(pipeline_job.outputs["tidy"], pipeline_job.generation),
        )
        world.later(30 * DAY)
        await keep_all(world)
        assert await published(world) == [""]

    play(story)


def test_what_a_task_or_a_backfill_reads_stays(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(kept("partitions: 1"))
        await pipeline.send("a", "b", "c")
        await pipeline.work("a:clean")
        (reading,) = await pipeline.tasks.claim_next("a:report", worker="w")
        await keep_all(world)
        assert await published(world) == ["a", "b", "c"]
        await pipeline.finish(reading)
        await keep_all(world)
        assert reading.payload["partition_key"] not in await published(world)
        assert len(await published(world)) == 2
        await pipeline.work("a:report")
        await world.rows(
            "INSERT INTO backfill (definition_id, generation, plan, partitions, concurrency_max)"
            " SELECT definition_id, generation, '{}', 0, 1 FROM dag_job JOIN job ON job.id = job_id"
            " WHERE job.name = 'report'"
        )
        await keep_all(world)
        assert len(await published(world)) == 2
        await world.rows("UPDATE backfill SET state = 'cancelled'")
        await keep_all(world)
        assert len(await published(world)) == 1

    play(story)


@pytest.mark.parametrize("reads", ["partition", "all"])
def test_what_is_read_as_part_of_a_range_or_of_all_stays(play: Play, reads: str) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(kept("partitions: 1"))
        for start in (0, 10, 20, 30):
            event = await pipeline.event(str(start), start=start, end=start + 10)
            await pipeline.routing.accept([event])
        await pipeline.route()
        await run_all(pipeline)
        report = await pipeline.job("report")
        await world.rows("UPDATE edge SET reads = %s", reads)
        wide = NewTask(
            definition_id=report.definition_id,
            generation=report.generation,
            dedupe_key="wide",
            payload={"partition_key": "10-30", "start": 10, "end": 30},
        )
        await pipeline.tasks.create([wide])
        await keep_all(world)
        kept_so_far = ["0", "10", "20", "30"] if reads == "all" else ["10", "20", "30"]
        assert await published(world) == kept_so_far
        await pipeline.work("a:report")
        await keep_all(world)
        assert await published(world) == ["30"]

    play(story)


def test_a_late_task_does_not_bring_back_what_was_dropped(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(kept("partitions: 1"))
        await pipeline.send("a")
        (late,) = await pipeline.tasks.claim_next("a:clean", worker="w")
        await pipeline.routing.accept([await pipeline.event("a2", partition_key="a")])
        await pipeline.route()
        await run_all(pipeline)
        world.later(1)
        await send(pipeline, "b")
        await keep_all(world)
        assert await published(world) == ["b"]
        output = TaskOutput(
            dataset=late.definition["datasets"]["tidy"], location="s3://x", partition_key="a"
        )
        (answer,) = await pipeline.tasks.complete([Completion(late.fence, (output,))])
        assert isinstance(answer, AttemptEnd)
        assert answer.published[0].outcome is PublishOutcome.SUPERSEDED
        assert await published(world) == ["b"]

    play(story)


def test_a_late_part_does_not_bring_back_what_was_dropped(play: Play) -> None:
    """Of a partition that is appended to, readers would find that part alone."""

    async def story(world: World) -> None:
        library, job = Library(world), await world.job(update_mode="append")
        late, early, last = [await job.claimed(key) for key in ("late", "early", "last")]
        for claimed in (early, last):
            await library.publish(job, claimed)
        await world.rows("DELETE FROM publication")
        location = await library.written(late)
        said = [Completion(late.fence, (job.output("p", location),))]
        (answer,) = await world.tasks.complete(said)
        assert isinstance(answer, AttemptEnd)
        assert answer.published[0].outcome is PublishOutcome.SUPERSEDED
        assert answer.published[0].event_seq is None
        assert await world.tasks.complete(said) == (answer,)
        for table in ("publication", "appended"):
            assert await world.value(f"SELECT count(*) FROM {table}") == 0
        await library.carry()
        assert await library.locations(job) == []
        # What is made of it from now on is a partition again, with all that is appended to it.
        again = [await library.publish(job, await job.claimed(key)) for key in "ab"]
        await library.carry()
        assert await library.locations(job) == again
        assert await world.value("SELECT revision FROM publication") == 5

    play(story)


def test_who_publishes_while_partitions_are_dropped_waits(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(kept("partitions: 1"))
        await send(pipeline, "a", "b")
        await pipeline.routing.accept([await pipeline.event("a2", partition_key="a")])
        await pipeline.route()
        (claimed,) = await pipeline.tasks.claim_next("a:clean", worker="w")
        version = (await pipeline.generations())["clean"]
        async with asyncio.TaskGroup() as group:
            async with world.database.transaction() as connection:
                await connection.execute(
                    b"SELECT pg_advisory_xact_lock(1885695604, hashtext(%s))", [version]
                )
                await connection.execute(
                    b"DELETE FROM publication WHERE partition_key = 'a' AND generation = %s",
                    [version],
                )
                publishing = group.create_task(pipeline.finish(claimed))
                await world.until_waiting()
            await publishing
        rows = await world.rows(
            "SELECT revision FROM publication WHERE partition_key = 'a' AND generation = %s",
            version,
        )
        assert [row["revision"] for row in rows] == [3]

    play(story)


def test_generations_go_by_count_and_by_age_and_come_back_anew(play: Play) -> None:
    async def story(world: World) -> None:
        library, pipeline = Library(world), Pipeline(world)
        rule = "generations: 2"
        first = await pipeline.apply(kept(rule))
        await send(pipeline, "a", "b")
        for number in ("2", "3"):
            await pipeline.apply(kept(rule, clean=number, report=number), force=True)
            await pipeline.backfills.turn()
            await run_all(pipeline)
            await pipeline.backfills.turn()
            for dataset in ("daily", "tidy"):
                row = await world.value("SELECT id::text FROM dataset WHERE name = %s", dataset)
                await pipeline.deployment.cut_over(row, force=True)
            await library.carry()
            world.later(DAY)
        assert await states(world) == ["retired", "retired", "current"]
        await keep_all(world, grace_seconds=2 * DAY)
        assert await states(world) == ["retired", "retired", "current"], "left only lately"
        await keep_all(world, rows_max=1)
        assert await states(world) == ["dropped", "retired", "current"]
        assert await published(world, state="retired") == ["a", "b"]
        assert await published(world, state="abandoned") == []
        gone = await world.value(
            "SELECT count(*) FROM task JOIN generation ON version = generation"
            " WHERE dropped_at = changed_at"
        )
        assert gone == 0
        # Readers of the bucket find it empty, and those of the current one what they had.
        await library.carry()
        assert await published(world) == ["a", "b"]
        # Who needs it again has it built anew.
        await pipeline.deployment.rollback(first.version_id)
        assert sorted(await states(world)) == ["building", "current", "retired"]
        await pipeline.backfills.turn()
        await run_all(pipeline)
        assert await published(world, state="building") == ["a", "b"]
        revisions = await world.rows("SELECT max(revision) AS revision FROM publication")
        assert revisions[0]["revision"] >= 3

    play(story)


def test_what_something_live_reads_is_not_dropped(play: Play) -> None:
    async def story(world: World) -> None:
        library, pipeline = Library(world), Pipeline(world)
        await pipeline.apply(kept("generations: 1"))
        await send(pipeline, "a")
        # The new generation of `report` is not cut over: the old one is read by what is served.
        await pipeline.apply(kept("generations: 1", clean="2"), force=True)
        await pipeline.backfills.turn()
        await pipeline.work("a:clean")
        tidy = await world.value("SELECT id::text FROM dataset WHERE name = 'tidy'")
        await pipeline.backfills.turn()
        await pipeline.deployment.cut_over(tidy, force=True)
        await library.carry()
        world.later(DAY)
        await keep_all(world)
        assert await states(world) == ["retired", "current"]
        await pipeline.work("a:report")
        daily = await world.value("SELECT id::text FROM dataset WHERE name = 'daily'")
        await pipeline.backfills.turn()
        await pipeline.deployment.cut_over(daily, force=True)
        await library.carry()
        world.later(DAY)
        await keep_all(world)
        assert await states(world) == ["dropped", "current"]

    play(story)


def test_nothing_is_dropped_while_readers_are_not_told(play: Play) -> None:
    async def story(world: World) -> None:
        library, pipeline = Library(world), Pipeline(world)
        await pipeline.apply(kept("generations: 1, age: 1d"))
        await send(pipeline, "a")
        await library.carry()
        await pipeline.apply(kept("generations: 1, age: 1d", clean="2", report="2"), force=True)
        await pipeline.forget_rebuilds()
        for dataset in ("daily", "tidy"):
            row = await world.value("SELECT id::text FROM dataset WHERE name = %s", dataset)
            await pipeline.deployment.cut_over(row, force=True)
        world.later(10 * DAY)
        await keep_all(world)
        assert await states(world) == ["retired", "current"]
        await library.carry()
        await keep_all(world)
        assert await states(world) == ["dropped", "current"]

    play(story)


def test_one_dispatcher_makes_a_pass_and_without_a_rule_all_stays(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(kept())
        await send(pipeline, "a", "b", "c")
        world.later(1000 * DAY)
        one, two = (PartitionExpirer(world.database, grace_seconds=DAY) for _ in range(2))
        assert await one.turn() == 0.05
        assert await two.turn() == KEEP_PASS_SECONDS / 4
        assert await one.turn() == KEEP_PASS_SECONDS
        assert await published(world) == ["a", "b", "c"]

    play(story)
