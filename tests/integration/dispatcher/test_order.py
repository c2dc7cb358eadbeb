"""Of two tasks for one partition the later one counts: it must be the one that has seen more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.router import accept_events, route_events
from penstock.dispatcher.tasks.completion import end
from penstock.dispatcher.tasks.model import ClaimedTask, Completion, TaskOutput
from penstock.protocol.steering import BackfillAsk
from tests.integration.dispatcher.test_deployment import Pipeline, chain
from tests.integration.dispatcher.test_ranges import RANGES, Ranges
from tests.integration.dispatcher.world import Play, World

TWO = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  other: {activation: source, source: {kind: manual}, outputs: [raw2]}
  clean: {runtime: process, operator: a:clean, config: {v: %s}, inputs: %s, outputs: [tidy]}
"""


async def publish(
    connection: Connection, pipeline: Pipeline, task: ClaimedTask, place: str
) -> None:
    """Complete a task of `clean`, in a transaction that is still open."""
    tidy = (await pipeline.job("clean")).outputs["tidy"]
    output = TaskOutput(dataset=tidy, location=place, partition_key="p")
    await end(connection, [Completion(task.fence, (output,))], route=route_events)


async def numbered(world: World, job: str) -> list[str]:
    """What the tasks of a job are about, by their numbers."""
    rows = await world.rows(
        "SELECT coalesce(payload ->> 'revision', payload ->> 'cursor', 'backfill') AS what"
        " FROM task JOIN job ON job.id = job_id WHERE name = %s ORDER BY task.id",
        job,
    )
    return [row["what"] for row in rows]


def test_an_earlier_cursor_replaces_a_later_one(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        cursors = range(1, 13)
        events = [await pipeline.event(f"c{each}", cursor=each) for each in cursors]
        await pipeline.routing.accept(events)
        await pipeline.route()
        assert await numbered(world, "clean") == [str(each) for each in cursors]

    play(story)


@pytest.mark.parametrize("fields", [{"cursor": 7}, {"partition_key": "p"}])
@pytest.mark.parametrize("is_first", [True, False])
def test_updates_that_two_routers_have_in_hand_change_places(
    play: Play, fields: dict[str, Any], is_first: bool
) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.routing.accept([await pipeline.event("a", **fields)])
        seq = await world.value("SELECT seq FROM event")
        async with asyncio.TaskGroup() as group, world.database.transaction() as slow:
            await slow.execute(b"SELECT FROM event WHERE seq = %s FOR UPDATE", [seq])
            others = [await pipeline.event("b", **fields), await pipeline.event("c", cursor=9)]
            await pipeline.routing.accept(others[: 1 if is_first else 2])
            if is_first:
                await route_events(slow, [seq])
                quick = group.create_task(pipeline.routing.route())
                # Without the lock it is routed at once, and can be claimed before the first.
                await world.until_waiting()
            else:
                # The other one has taken it, and is not as far as we are.
                quick = group.create_task(pipeline.routing.route())
                await asyncio.wait({quick})
                await route_events(slow, [seq])
        assert quick.result().tasks == (1 if is_first or "partition_key" in fields else 0)
        await pipeline.route()
        rows = await world.rows("SELECT event_seq FROM task ORDER BY id")
        mine = [row["event_seq"] for row in rows if row["event_seq"] <= seq + 1]
        assert mine == [seq, seq + 1]

    play(story)


def test_a_backfill_overtakes_the_first_publication_of_a_partition(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.send("p")
        (task,) = await pipeline.tasks.claim_next("a:clean", worker="w")
        await pipeline.backfills.create(BackfillAsk(job="report", keys=["p"]))
        async with asyncio.TaskGroup() as group, world.database.transaction() as slow:
            await publish(slow, pipeline, task, "s3://b/new")
            turning = group.create_task(pipeline.backfills.turn())
            await world.until_waiting()
        assert turning.result() is not None
        assert await numbered(world, "report") == ["1", "backfill"]
        found = await pipeline.tasks.claim_next("a:report", worker="w", limit=2)
        assert {each.inputs["tidy"]["location"] for each in found} == {"s3://b/new"}

    play(story)


def test_what_a_rollback_routes_again_overtakes_a_publication(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.send("p")
        await pipeline.work("a:clean")
        await pipeline.work("a:report")
        await pipeline.apply(chain().split("  report:")[0])
        for name in ("again", "and again"):
            await pipeline.routing.accept([await pipeline.event(name, partition_key="p")])
        await pipeline.route()
        await pipeline.work("a:clean", most=1)
        (task,) = await pipeline.tasks.claim_next("a:clean", worker="w")
        # The report is back; it has missed the second publication.
        await pipeline.deployment.rollback(1)
        async with asyncio.TaskGroup() as group, world.database.transaction() as slow:
            await publish(slow, pipeline, task, "s3://b/newest")
            quick = group.create_task(pipeline.routing.route())
            await world.until_waiting()
        assert quick.result().tasks == 1
        found = await pipeline.tasks.claim_next("a:report", worker="w", limit=9)
        assert {each.inputs["tidy"]["location"] for each in found} == {"s3://b/newest"}

    play(story)


def test_the_earlier_definition_of_a_fan_in_is_routed_out_of_order(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(TWO % (1, "[raw, raw2]"))
        other = await pipeline.job("other")
        place = {"dataset": other.outputs["raw2"], "generation": other.generation}
        await pipeline.send("p")
        await pipeline.work("a:clean")
        # The new definition reads one dataset; the earlier one, which is served, reads two.
        await pipeline.apply(TWO % (2, "[raw2]"))
        await pipeline.routing.accept([await pipeline.event("q", partition_key="p")])
        seq = await world.value("SELECT max(seq) FROM event")
        async with asyncio.TaskGroup() as group, world.database.transaction() as slow:
            await slow.execute(b"SELECT FROM event WHERE seq = %s FOR UPDATE", [seq])
            await route_events(slow, [seq])
            event = await pipeline.event("r", partition_key="p", **place)
            await pipeline.routing.accept([event])
            quick = group.create_task(pipeline.routing.route())
            await world.until_waiting()
        assert quick.result().routed == 1

    play(story)


@pytest.mark.parametrize("first", ["feed", "second"])
def test_news_of_a_window_is_lost_when_its_event_is_committed_late(play: Play, first: str) -> None:
    async def story(world: World) -> None:
        ranges = Ranges(world)
        await ranges.apply(RANGES)
        last = "second" if first == "feed" else "feed"
        await ranges.bring(0, 20, job=first)
        await ranges.bring(0, 20, job=last)
        await ranges.operators().turn()
        assert await ranges.published("windows") == {"0-20": 1}
        job = await ranges.job(first)
        (dataset,) = job.outputs.values()
        place = {"dataset": dataset, "generation": job.generation}
        again = await ranges.event("late", partition_key="again", start=0, end=20, **place)
        async with world.database.transaction() as slow:
            # It has its number, and others that come later are seen first.
            await accept_events(slow, [again])
            await ranges.bring(0, 20, job=last, name="news")
            await ranges.operators().turn()
            assert await ranges.published("windows") == {"0-20": 2}
        await ranges.route()
        await ranges.operators().turn()
        assert await ranges.published("windows") == {"0-20": 3}

    play(story)
