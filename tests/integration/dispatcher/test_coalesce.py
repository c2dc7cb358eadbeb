"""Updates that become part of a task that waits, on a real Postgres."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.dispatcher.tasks.model import ClaimedTask
from penstock.protocol.steering import BackfillAsk
from tests.integration.dispatcher.test_deployment import Pipeline, chain
from tests.integration.dispatcher.world import Play, World, failed

OTHER = """
  second:
    activation: source
    source: {kind: manual}
    outputs: [raw2]
"""


def coalescing(*, clean: str = "1", inputs: str = "[raw]") -> str:
    text = chain(clean=clean, extra=OTHER)
    return text.replace("    timeout: 1h\n", "    timeout: 1h\n    merge_updates: true\n").replace(
        "inputs: [raw]", f"inputs: {inputs}"
    )


async def bring(pipeline: Pipeline, *ids: str, partition: str = "p", **fields: Any) -> None:
    """Events of one partition, each in a turn of its own."""
    for each in ids:
        given = {} if "cursor" in fields else {"partition_key": partition}
        event = await pipeline.event(each, **given, **fields)
        await pipeline.routing.accept([event])
        await pipeline.route()


async def tasks(world: World) -> list[tuple[str, Any]]:
    rows = await world.rows("SELECT status, payload FROM task ORDER BY id")
    return [(row["status"], row["payload"]["event"]) for row in rows]


async def parts(world: World) -> list[tuple[int, int]]:
    rows = await world.rows("SELECT event_seq, task_id FROM coalesced ORDER BY 1, 2")
    return [(row["event_seq"], row["task_id"]) for row in rows]


def test_what_comes_while_a_task_waits_becomes_part_of_it(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(coalescing())
        await bring(pipeline, "1", "2", "3")
        assert await tasks(world) == [("queued", 3)]
        assert await parts(world) == [(2, 1), (3, 1)]
        await bring(pipeline, "4", partition="q")
        assert await tasks(world) == [("queued", 3), ("queued", 4)]
        assert await world.value("SELECT count(*) FROM event WHERE routed <> 'routed'") == 0
        # What runs takes nothing more.
        (claimed,) = await pipeline.tasks.claim_next("a:clean", worker="w")
        await bring(pipeline, "5")
        assert await tasks(world) == [("running", 3), ("queued", 4), ("queued", 5)]
        # The later task has the higher number: its output counts.
        await pipeline.finish(claimed)
        assert [each.payload["event"] for each in await pipeline.work("a:clean")] == [4, 5]

    play(story)


def test_the_payload_is_that_of_the_latest(play: Play) -> None:
    async def story(world: World) -> None:
        async def payload() -> Any:
            return await world.value("SELECT payload -> 'payload' FROM task ORDER BY id LIMIT 1")

        pipeline = Pipeline(world)
        await pipeline.apply(coalescing())
        await bring(pipeline, "1", payload={"n": 1, "null": None})
        assert await payload() == {"n": 1, "null": None}
        await bring(pipeline, "2", payload={"n": 2})
        assert await payload() == {"n": 2}
        # The latest has none.
        await bring(pipeline, "3")
        assert await payload() is None
        events = [
            await pipeline.event(each, partition_key="p", payload={"n": each}) for each in "45"
        ]
        await pipeline.routing.accept(events)
        await pipeline.route()
        assert await payload() == {"n": "5"}
        assert await tasks(world) == [("queued", 5)]

    play(story)


def test_several_in_one_turn(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(coalescing())
        events = [await pipeline.event(each, partition_key="p") for each in "abc"]
        await pipeline.routing.accept([*events, await pipeline.event("q")])
        routed = await pipeline.routing.route()
        assert (routed.routed, routed.tasks) == (4, 2)
        assert await tasks(world) == [("queued", 3), ("queued", 4)]
        assert await parts(world) == [(1, 1), (2, 1)]
        # The same again is nothing: not a task, and not part of one.
        await pipeline.work("a:clean")
        await world.rows("UPDATE event SET routed = 'pending'")
        await pipeline.route()
        assert len([each for each in await tasks(world) if each[0] == "completed"]) == 2
        assert await pipeline.select("status = 'queued' AND operator = 'a:clean'") == []

    play(story)


def test_a_job_that_does_not_coalesce(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await bring(pipeline, "1", "2")
        assert len(await tasks(world)) == 2
        assert await parts(world) == []

    play(story)


def test_cursors_of_one_dataset(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(coalescing())
        await bring(pipeline, "a", cursor=7)
        await bring(pipeline, "b", cursor=9)
        # Late, and behind: the highest cursor stays.
        await bring(pipeline, "c", cursor=8)
        rows = await world.rows("SELECT payload FROM task")
        assert [(row["payload"]["cursor"], row["payload"]["event"]) for row in rows] == [(9, 2)]

    play(story)


def test_the_inputs_that_have_moved_are_all_named(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(coalescing(inputs="[raw, raw2]"))
        second = await pipeline.job("second")
        other = {"dataset": second.outputs["raw2"], "generation": second.generation}
        await bring(pipeline, "1")
        await bring(pipeline, "2", **other)
        rows = await world.rows("SELECT payload FROM task")
        assert [row["payload"]["inputs"] for row in rows] == [["raw", "raw2"]]
        assert rows[0]["payload"]["dataset"] == other["dataset"]

    play(story)


def test_whoever_is_claiming_it_wins(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(coalescing())
        await bring(pipeline, "1")
        async with world.unfinished() as other:
            (claimed,) = await other.claim_next("a:clean", worker="w")
            # Not waited for: the event gets a task of its own.
            await bring(pipeline, "2")
        assert await tasks(world) == [("running", 1), ("queued", 2)]
        assert await parts(world) == []
        # The one after it becomes part of the newest.
        await bring(pipeline, "3")
        assert await tasks(world) == [("running", 1), ("queued", 3)]
        await pipeline.finish(claimed)

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_claim_while_a_task_takes_more(play: Play, is_kept: bool) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(coalescing())
        await bring(pipeline, "1")
        await pipeline.routing.accept([await pipeline.event("2", partition_key="p")])
        async with asyncio.TaskGroup() as group, world.unfinished(is_kept=is_kept) as other:
            routing = Pipeline(World(world.dsn, other._database, other)).routing
            assert (await routing.route()).routed == 1
            # The next one is not waited for; this very one is, and is then what it has become.
            assert await pipeline.tasks.claim_next("a:clean", worker="w") == ()
            claiming = group.create_task(pipeline.tasks.claim(1, worker="w"))
            await world.until_waiting()
        claimed = claiming.result()
        assert isinstance(claimed, ClaimedTask)
        assert claimed.payload["event"] == (2 if is_kept else 1)
        await pipeline.route()
        assert len(await tasks(world)) == (1 if is_kept else 2)

    play(story)


def test_only_the_newest_task_takes_more(play: Play) -> None:
    """What an older task makes does not count once a newer one has published the partition."""

    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(coalescing())
        await bring(pipeline, "1")
        async with world.unfinished(is_kept=False) as other:
            # Somebody is about to claim it, and never does.
            await other.claim_next("a:clean", worker="w")
            await bring(pipeline, "2")
        newer = await pipeline.tasks.claim(2, worker="w")
        assert isinstance(newer, ClaimedTask)
        await bring(pipeline, "3")
        assert await tasks(world) == [("queued", 1), ("running", 2), ("queued", 3)]

    play(story)


def test_a_task_that_was_attempted_takes_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(coalescing())
        await bring(pipeline, "1")
        (claimed,) = await pipeline.tasks.claim_next("a:clean", worker="w")

        await pipeline.tasks.fail(failed(claimed.fence))
        await bring(pipeline, "2")
        assert await tasks(world) == [("retrying", 1), ("queued", 2)]

    play(story)


def test_a_backfill_takes_no_updates(play: Play) -> None:
    """Its tasks are bulk, and an update is not to wait for them."""

    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(coalescing())
        await pipeline.backfills.create(BackfillAsk(job="clean", keys=["p"]))
        await pipeline.backfills.turn()
        await bring(pipeline, "1")
        rows = await world.rows("SELECT backfill_id, coalesce_key FROM task ORDER BY id")
        assert [tuple(row.values()) for row in rows] == [(1, "partition:p"), (None, "partition:p")]

    play(story)


def test_what_was_part_of_a_task_is_not_replayed(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        first = await pipeline.apply(coalescing())
        await bring(pipeline, "1", "2")
        await pipeline.work("a:clean")
        await pipeline.work("a:report")
        await pipeline.apply(coalescing(clean="2"))
        await pipeline.backfills.turn()
        await pipeline.work("a:clean")
        await pipeline.work("a:report")
        await pipeline.backfills.turn()
        for dataset in ("daily", "tidy"):
            (uuid,) = (
                await pipeline.job("report" if dataset == "daily" else "clean")
            ).outputs.values()
            await pipeline.deployment.cut_over(uuid)
        await bring(pipeline, "3", "4")
        await pipeline.deployment.rollback(first.version_id)
        await pipeline.route()
        # Of what came since, one task; of what was there, none.
        rows = await world.rows(
            "SELECT payload ->> 'event' AS event FROM task WHERE status = 'queued'"
        )
        assert len(rows) == 1
        assert await pipeline.open_tasks() == [("clean", "p")]

    play(story)


def test_many_routers_and_claims(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(coalescing())
        seen: list[int] = []

        async def events(place: int) -> None:
            for number in range(15):
                await bring(pipeline, f"{place}-{number}", partition=str(number % 3))

        async def labour() -> None:
            for _ in range(40):
                done = await pipeline.work("a:clean", most=2)
                seen.extend(task.task_id for task in done)

        await asyncio.gather(events(1), events(2), labour(), labour())
        await pipeline.route()
        await pipeline.work("a:clean")
        assert len(seen) == len(set(seen))
        # Every event has made a task or is part of one, and only of one.
        counts = await world.rows(
            "SELECT event.seq, count(task.id) + (SELECT count(*) FROM coalesced"
            " WHERE event_seq = event.seq) AS n FROM event LEFT JOIN task"
            " ON task.dedupe_key = 'event:' || event.seq"
            " WHERE event.revision IS NULL GROUP BY event.seq"
        )
        assert len(counts) == 30
        assert {row["n"] for row in counts} == {1}

    play(story)
