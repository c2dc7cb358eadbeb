"""What is removed and what is kept, on a real Postgres."""

from __future__ import annotations

import asyncio

import pytest

from penstock.dispatcher.retention import PASS_SECONDS, RowPruner
from penstock.dispatcher.tasks.model import Completion, Failure
from penstock.kernel.errors import InvalidInput
from penstock.protocol.steering import BackfillAnswer, BackfillAsk
from tests.integration.dispatcher.test_deployment import SINK, Pipeline, chain
from tests.integration.dispatcher.test_pressure import backfill, fill
from tests.integration.dispatcher.test_ranges import RANGES, Ranges
from tests.integration.dispatcher.world import Play, World

DAY = 86_400.0
TWO_OUTPUTS = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  cut: {runtime: process, operator: "a:cut", inputs: [raw], outputs: [left, right]}
  join: {runtime: process, operator: "a:join", inputs: [left, right], outputs: [whole]}
"""


async def whole_pass(world: World, *, days: float = 30, rows_max: int = 2000) -> None:
    world.later(PASS_SECONDS)
    retention = RowPruner(world.database, days=days, rows_max=rows_max)
    for _ in range(1000):
        if await retention.turn() == PASS_SECONDS:
            return
    pytest.fail("a pass does not end")


async def run_all(pipeline: Pipeline) -> None:
    for _ in range(3):
        for operator in ("a:clean", "a:cut", "a:report", "a:join", "a:mail"):
            await pipeline.work(operator)


async def events(world: World) -> list[int]:
    return [row["seq"] for row in await world.rows("SELECT seq FROM event ORDER BY seq")]


async def tasks(world: World) -> list[str]:
    rows = await world.rows("SELECT dedupe_key FROM task ORDER BY id")
    return [row["dedupe_key"] for row in rows]


async def unmatched(world: World) -> int:
    """Events whose tasks are gone, which a rollback would route again."""
    count = await world.value(
        "SELECT count(*) FROM event JOIN edge ON edge.dataset_id = event.dataset_id"
        " WHERE NOT EXISTS (SELECT FROM task WHERE task.job_id = edge.job_id AND dedupe_key IN ("
        "'event:' || event.seq, 'task:' || event.task_id || ':' || event.partition_key))"
    )
    assert isinstance(count, int)
    return count


def test_the_latest_of_each_partition_stays_with_its_tasks(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        for round_ in range(3):
            given = [
                await pipeline.event(f"{round_}:{key}", partition_key=key) for key in ("a", "b")
            ]
            await pipeline.routing.accept(given)
            await pipeline.route()
            await run_all(pipeline)
        await world.rows("INSERT INTO worker (name) VALUES ('old')")
        # Three events a partition and round: of the source, of clean, and of report.
        assert len(await events(world)) == 18
        assert len(await tasks(world)) == 12
        world.later(29 * DAY)
        await whole_pass(world)
        assert len(await events(world)) == 18
        world.later(2 * DAY)
        await whole_pass(world, rows_max=4)
        kept = await world.rows(
            "SELECT max(seq) AS seq FROM event GROUP BY dataset_id, partition_key ORDER BY 1"
        )
        assert await events(world) == [row["seq"] for row in kept]
        assert len(kept) == 6
        assert len(await tasks(world)) == 4
        assert await unmatched(world) == 0
        assert await world.value("SELECT count(*) FROM attempt") == 4
        assert await world.value("SELECT count(*) FROM publication") == 4
        assert await world.value("SELECT count(*) FROM worker") == 0

    play(story)


def test_a_rollback_after_it_makes_nothing_again(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        first = await pipeline.apply(chain())
        for round_ in range(2):
            await pipeline.routing.accept([await pipeline.event(str(round_), partition_key="a")])
            await pipeline.route()
            await run_all(pipeline)
        world.later(31 * DAY)
        await whole_pass(world)
        await pipeline.apply(chain(clean="2"), force=True)
        await pipeline.deployment.rollback(first.version_id)
        assert await pipeline.route() == 0
        assert await pipeline.open_tasks() == []

    play(story)


def test_the_highest_cursor_stays(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        for number in (5, 9, 7):
            await pipeline.routing.accept([await pipeline.event(str(number), cursor=number)])
        world.later(31 * DAY)
        await whole_pass(world)
        assert len(await events(world)) == 3, "what is not routed stays"
        await pipeline.route()
        claimed = await pipeline.tasks.claim_next("a:clean", worker="w", limit=9)
        await pipeline.tasks.complete([Completion(each.fence) for each in claimed])
        await whole_pass(world)
        rows = await world.rows("SELECT cursor FROM event WHERE cursor IS NOT NULL")
        assert [row["cursor"] for row in rows] == [9]
        # Its tasks have only just ended.
        assert len(await tasks(world)) == 3
        world.later(31 * DAY)
        await whole_pass(world)
        assert len(await tasks(world)) == 1

    play(story)


def test_open_and_dead_tasks_keep_their_events(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        for number in range(4):
            await pipeline.routing.accept([await pipeline.event(str(number), partition_key="a")])
            await pipeline.route()
        dead, running, done = await pipeline.tasks.claim_next("a:clean", worker="w", limit=3)
        await pipeline.tasks.fail([Failure(dead.fence, "no", is_retried=False)])
        await pipeline.tasks.complete([Completion(done.fence)])
        world.later(31 * DAY)
        await whole_pass(world)
        assert await events(world) == [1, 2, 4]
        assert await tasks(world) == ["event:1", "event:2", "event:4"]
        await pipeline.tasks.complete([Completion(running.fence)])
        world.later(60 * DAY)
        await whole_pass(world)
        assert await events(world) == [4]
        assert await tasks(world) == ["event:4"]

    play(story)


def test_a_backfill_that_is_open_keeps_what_it_reads_and_has_made(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        for number in range(2):
            await pipeline.routing.accept([await pipeline.event(str(number), partition_key="a")])
        await pipeline.route()
        number = await backfill(pipeline, "clean")
        await fill(pipeline, "clean", 1, backfill_id=number)
        claimed = await pipeline.tasks.claim_next("a:clean", worker="w", limit=9)
        await pipeline.tasks.complete([Completion(each.fence) for each in claimed])
        world.later(31 * DAY)
        await whole_pass(world)
        assert (len(await events(world)), len(await tasks(world))) == (2, 3)
        await world.rows("UPDATE backfill SET state = 'cancelled'")
        await whole_pass(world)
        assert (await events(world), await tasks(world)) == ([2], ["event:2"])

    play(story)


def test_a_backfill_counts_what_is_not_kept_any_more(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        made = await pipeline.backfills.create(BackfillAsk(job="clean", keys=["a", "b", "c", "d"]))
        assert isinstance(made, BackfillAnswer)
        await pipeline.backfills.turn()
        done, dead = await pipeline.tasks.claim_next("a:clean", worker="w", limit=2)
        await pipeline.tasks.complete([Completion(done.fence)])
        await pipeline.tasks.fail([Failure(dead.fence, "x", is_retried=False)])
        await pipeline.backfills.cancel(made.id)

        async def counts() -> tuple[int, int, int, int]:
            found = await pipeline.backfills.get(made.id)
            assert found is not None
            return found.planned, found.open, found.dead, found.cancelled

        assert await counts() == (4, 0, 1, 2)
        for days in (31, 400):
            world.later(days * DAY)
            await whole_pass(world)
            assert await counts() == (4, 0, 1, 2)
        assert await tasks(world) == []

    play(story)


@pytest.mark.parametrize("latest", ["left", "right"])
def test_one_task_of_two_events_goes_with_the_last_of_them(play: Play, latest: str) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(TWO_OUTPUTS)
        for number in range(2):
            await pipeline.routing.accept([await pipeline.event(str(number), partition_key="a")])
            await pipeline.route()
            await run_all(pipeline)
        joined = [key for key in await tasks(world) if key.startswith("task:")]
        assert len(joined) == 2
        # Of the first round only the event of one dataset is superseded.
        await world.rows(
            "DELETE FROM event WHERE seq = (SELECT max(seq) FROM event"
            " JOIN dataset ON dataset.id = dataset_id WHERE name = %s)",
            latest,
        )
        world.later(31 * DAY)
        await whole_pass(world)
        assert [key for key in await tasks(world) if key.startswith("task:")] == joined
        assert await unmatched(world) == 0

    play(story)


def test_events_that_became_part_of_a_task_keep_it(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.send("a")
        await pipeline.work("a:clean")
        (other,) = await fill(pipeline, "clean", 1)
        await world.rows(
            "INSERT INTO coalesced SELECT 1, job_id, generation, id FROM task WHERE id = %s", other
        )
        (claimed,) = await pipeline.tasks.claim_next("a:clean", worker="w")
        await pipeline.tasks.complete([Completion(claimed.fence)])
        await pipeline.work("a:report")
        world.later(31 * DAY)
        await whole_pass(world)
        assert await world.value("SELECT count(*) FROM task WHERE id = %s", other) == 1
        await world.rows("DELETE FROM coalesced")
        await whole_pass(world)
        assert await world.value("SELECT count(*) FROM task WHERE id = %s", other) == 0

    play(story)


def test_the_last_task_of_a_source_stays(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        for number in (1, 2):
            await job.make(f"source:{number}")
            (claimed,) = await world.tasks.claim_next(job.operator, worker="w")
            await world.tasks.complete([Completion(claimed.fence)])
        world.later(31 * DAY)
        await whole_pass(world)
        assert await tasks(world) == ["source:2"]

    play(story)


def test_one_dispatcher_makes_a_pass(play: Play) -> None:
    async def story(world: World) -> None:
        one, two = RowPruner(world.database, days=30), RowPruner(world.database, days=30)
        assert await one.turn() == 0.05
        assert await two.turn() == PASS_SECONDS / 4
        # A turn for each kind of rows: events, tasks, the audit, queries, batches.
        assert [await one.turn() for _ in range(4)] == [0.05, 0.05, 0.05, PASS_SECONDS]
        assert await one.turn() == PASS_SECONDS / 4

    play(story)


def test_a_dead_task_that_is_replayed_meanwhile_stays(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        claimed = await job.claimed()
        await world.tasks.fail([Failure(claimed.fence, "no", is_retried=False)])
        world.later(91 * DAY)
        async with asyncio.TaskGroup() as group, world.unfinished() as other:
            await other.replay([claimed.task_id])
            group.create_task(whole_pass(world))
            await world.until_waiting()
        rows = await world.rows("SELECT status FROM task")
        assert [row["status"] for row in rows] == ["queued"]

    play(story)


@pytest.mark.parametrize("days", [0, -1, 40_000])
def test_days_that_make_no_sense(play: Play, days: float) -> None:
    async def story(world: World) -> None:
        with pytest.raises(InvalidInput, match="0 to 36500 days"):
            RowPruner(world.database, days=days)

    play(story)


def test_a_new_job_reads_what_was_kept(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.send("a", "b")
        await run_all(pipeline)
        world.later(31 * DAY)
        await whole_pass(world)
        await pipeline.apply(chain(extra=SINK))
        rows = await world.rows(
            "SELECT partition_key FROM event JOIN dataset d ON d.id ="
            " dataset_id WHERE d.name = 'tidy' ORDER BY 1"
        )
        assert [row["partition_key"] for row in rows] == ["a", "b"]

    play(story)


def test_ranges_are_forgotten_because_another_has_their_key(play: Play) -> None:
    async def story(world: World) -> None:
        ranges = Ranges(world)
        await ranges.apply(RANGES)
        for start in (0, 20):
            await ranges.bring(start, start + 20, name="eu")
        await ranges.operators().turn()
        world.later(31 * DAY)
        await whole_pass(world)
        # The other input is late.
        await ranges.bring(0, 40, job="second")
        await ranges.operators().turn()
        assert list(await ranges.published("windows")) == ["0-20", "10-30", "20-40"]

    play(story)
