"""Plans of partitions and the tasks that they become, on a real Postgres."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.dispatcher.backfills import BackfillRefusalReason, BackfillRefused, Backfills, advance
from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.deployment_plan import DagApplied, DagNotApplied
from penstock.dispatcher.router import route_events
from penstock.dispatcher.tasks.completion import end
from penstock.dispatcher.tasks.model import Completion, TaskOutput
from penstock.kernel.errors import InvalidInput
from penstock.protocol.steering import BackfillAnswer, BackfillAsk
from tests.integration.dispatcher.test_deployment import Pipeline, chain
from tests.integration.dispatcher.world import Play, World, either_way


async def planned(pipeline: Pipeline, job: str = "clean", **fields: Any) -> BackfillAnswer:
    found = await pipeline.backfills.create(BackfillAsk(job=job, **fields))
    assert isinstance(found, BackfillAnswer)
    return found


async def look(pipeline: Pipeline, backfill_id: int) -> tuple[str, int, int, int]:
    found = await pipeline.backfills.get(backfill_id)
    assert found is not None
    return found.state, found.partitions, found.planned, found.open


async def drain(pipeline: Pipeline, *operators: str) -> None:
    """Turn and work until nothing is left to do."""
    for _ in range(100):
        pause = await pipeline.backfills.turn()
        done = [task for operator in operators for task in await pipeline.work(operator)]
        await pipeline.route()
        if pause is None and not done:
            return
    pytest.fail("there is no end to it")


@either_way
def test_ranges_become_tasks_in_a_window(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        made = await planned(pipeline, start=-5, end=30, step=10, concurrency=3)
        assert (made.kind, made.state, made.partitions, made.planned) == ("ranges", "running", 4, 0)
        assert await pipeline.backfills.turn() is not None
        assert await look(pipeline, made.id) == ("running", 4, 3, 3)
        assert await world.wakes() == ["a:clean/bulk"]
        # No room: nothing happens.
        await pipeline.backfills.turn()
        assert await look(pipeline, made.id) == ("running", 4, 3, 3)
        (first,) = await pipeline.work("a:clean", most=1)
        assert first.payload == {
            "backfill": made.id,
            "inputs": ["raw"],
            "partition_key": "-5-5",
            "start": -5,
            "end": 5,
        }
        await pipeline.backfills.turn()
        assert await look(pipeline, made.id) == ("running", 4, 4, 3)
        await pipeline.work("a:clean")
        keys = await world.rows("SELECT dedupe_key, payload FROM task WHERE backfill_id = 1")
        assert sorted(row["dedupe_key"] for row in keys) == [
            f"backfill:{made.id}:{place}" for place in range(4)
        ]
        assert sorted(row["payload"]["partition_key"] for row in keys) == [
            "-5-5", "15-25", "25-30", "5-15",
        ]  # fmt: skip
        await pipeline.backfills.turn()
        assert await look(pipeline, made.id) == ("done", 4, 4, 0)
        assert await pipeline.backfills.turn() is None

    play(story)


def test_the_largest_numbers(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await planned(pipeline, start=-(2**63), end=2**63 - 1, step=2**63 - 1)
        await pipeline.backfills.turn()
        rows = await world.rows("SELECT payload FROM task ORDER BY id")
        assert [(row["payload"]["start"], row["payload"]["end"]) for row in rows] == [
            (-(2**63), -1),
            (-1, 2**63 - 2),
            (2**63 - 2, 2**63 - 1),
        ]

    play(story)


def test_keys_and_the_ranges_that_are_known_of_them(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        event = await pipeline.event("r", partition_key="b", start=7, end=9)
        await pipeline.routing.accept([event])
        made = await planned(pipeline, keys=["c", "b", "a", "b"])
        assert (made.kind, made.partitions) == ("keys", 3)
        await pipeline.backfills.turn()
        rows = await world.rows("SELECT payload FROM task ORDER BY id")
        found = [row["payload"] for row in rows]
        assert [each["partition_key"] for each in found] == ["c", "b", "a"]
        assert [each.get("start") for each in found] == [None, 7, None]

    play(story)


DAYS = """
jobs:
  feed: {{activation: source, source: {{kind: manual}}, outputs: [raw]}}
  tick:
    activation: source
    source: {{kind: cron, cron: "0 * * * *", emits: interval}}
    outputs: [hours]
  clean:
    runtime: {runtime}
    operator: {operator}
    config: {config}
    inputs: [raw, hours]
    outputs: [tidy]
  days:
    runtime: dispatcher
    operator: range_aggregate
    config: {{size: day}}
    inputs: [tidy]
    outputs: [windows]
"""
SPARK_DAYS = DAYS.format(runtime="spark", operator="spark.sql", config="{sql: select 1}")
OWN_DAYS = DAYS.format(runtime="process", operator="a:clean", config="{}")


def test_keys_that_were_never_seen_have_the_range_that_they_imply(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(SPARK_DAYS)
        await pipeline.routing.accept([await pipeline.event("old", start=1, end=2)])
        ask = BackfillAsk(job="clean", keys=["1970-01-02", "other"])
        for refused in (
            await pipeline.backfills.create(ask),
            await pipeline.backfills.foresee(ask),
        ):
            assert refused == BackfillRefused(
                BackfillRefusalReason.INVALID,
                "No range of the partition 'other' is known, and the job 'days' downstream"
                " (range_aggregate) works on ranges; give a start, an end and a step.",
            )
        assert (await pipeline.backfills.list()).backfills == []
        await planned(pipeline, keys=["1970-01-02", "old", "1970-01-01T05:00Z"])
        await pipeline.backfills.turn()
        # A function may publish ranges of its own, so it may be asked for any key.
        await pipeline.apply(OWN_DAYS, force=True)
        await pipeline.forget_rebuilds()
        await planned(pipeline, keys=["other", "1970-01-02"])
        await pipeline.backfills.turn()
        rows = await world.rows("SELECT payload FROM task ORDER BY id")
        assert [(row["payload"].get("start"), row["payload"].get("end")) for row in rows] == [
            (86_400, 172_800),
            (1, 2),
            (5 * 3600, 6 * 3600),
            (None, None),
            (86_400, 172_800),
        ]

    play(story)


def test_numbers_that_people_see_have_no_gaps(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())

        taken = (
            "INSERT INTO dag_version (hash, source) VALUES ('x', 'x')",
            "INSERT INTO backfill (definition_id, generation, plan, partitions, concurrency_max)",
            "SELECT id, gen_random_uuid(), '{}', 0, 1 FROM job_definition LIMIT 1",
        )

        async def crash(connection: Connection) -> None:
            await connection.execute(taken[0].encode())
            await connection.execute(" ".join(taken[1:]).encode())
            raise RuntimeError

        # As after a crash of the database, numbers that were taken were not used.
        with pytest.raises(RuntimeError):
            await world.database.transact(crash)
        assert (await pipeline.apply(chain(timing="2h"))).version_id == 2
        asks = [planned(pipeline, keys=[key]) for key in ("a", "b", "c", "d")]
        assert {each.id for each in await asyncio.gather(*asks)} == {1, 2, 3, 4}
        for _ in range(3):
            assert (await planned(pipeline, keys=["e"], request_id="r")).id == 5
        assert (await planned(pipeline, keys=["f"])).id == 6

    play(story)


def test_a_million_partitions_are_one_row(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        made = await planned(pipeline, start=0, end=10**6, step=1, concurrency=20_000)
        assert made.partitions == 10**6
        # In bounded steps: at once again, as long as there is room.
        assert await pipeline.backfills.turn() == 0.0
        assert await look(pipeline, made.id) == ("running", 10**6, 5000, 5000)

    play(story)


def test_the_same_request_is_the_same_backfill(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        asks = [planned(pipeline, keys=["a", "b"], request_id="r") for _ in range(5)]
        found = await asyncio.gather(*asks)
        assert {each.id for each in found} == {found[0].id}
        assert await world.value("SELECT count(*) FROM backfill_key") == 2
        other = await planned(pipeline, keys=["a"])
        assert other.id != found[0].id
        assert [each.id for each in (await pipeline.backfills.list()).backfills] == [
            other.id,
            found[0].id,
        ]
        with pytest.raises(InvalidInput, match="1 to 1000"):
            await pipeline.backfills.list(limit=0)

    play(story)


ALWAYS = """
  tail:
    activation: source
    source: {kind: always_on}
    runtime: process
    operator: a:tail
    outputs: [tailed]
  cut:
    runtime: dispatcher
    operator: range_split
    config: {size: 10}
    inputs: [raw]
    outputs: [cuts]
"""


@pytest.mark.parametrize(
    ("job", "fields", "why", "said"),
    [
        ("nobody", {"keys": ["a"]}, BackfillRefusalReason.UNKNOWN_JOB, "has no job nobody"),
        ("feed", {"keys": ["a"]}, BackfillRefusalReason.NOT_RUN, "only emits events"),
        ("tail", {"keys": ["a"]}, BackfillRefusalReason.NOT_RUN, "always on"),
        ("cut", {"keys": ["a"]}, BackfillRefusalReason.INVALID, "works on ranges"),
        ("clean", {}, BackfillRefusalReason.INVALID, "needs keys"),
    ],
)
def test_what_cannot_be_filled(
    play: Play, job: str, fields: dict[str, Any], why: BackfillRefusalReason, said: str
) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain(extra=ALWAYS))
        found = await pipeline.backfills.create(BackfillAsk(job=job, **fields))
        assert isinstance(found, BackfillRefused)
        assert (found.why, said in found.detail) == (why, True)
        assert await world.value("SELECT count(*) FROM backfill") == 0

    play(story)


def test_pause_resume_cancel(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        made = await planned(pipeline, keys=list("abcdef"), concurrency=2)
        backfills = pipeline.backfills
        assert await backfills.pause(99) is None
        assert await backfills.get(99) is None
        for _ in range(2):
            paused = await backfills.pause(made.id)
            assert isinstance(paused, BackfillAnswer)
            assert paused.state == "paused"
        assert await backfills.turn() is None
        assert await look(pipeline, made.id) == ("paused", 6, 0, 0)
        await backfills.resume(made.id)
        await backfills.turn()
        (running,) = await pipeline.tasks.claim_next("a:clean", worker="w")
        cancelled = await backfills.cancel(made.id)
        assert isinstance(cancelled, BackfillAnswer)
        assert (cancelled.state, cancelled.planned, cancelled.open) == ("cancelled", 2, 1)
        rows = await world.rows("SELECT status, cancel_asked FROM task ORDER BY id")
        assert [tuple(row.values()) for row in rows] == [("running", True), ("cancelled", False)]
        await pipeline.finish(running)
        assert await backfills.turn() is None
        assert await look(pipeline, made.id) == ("cancelled", 6, 2, 0)
        refused = await backfills.resume(made.id)
        assert isinstance(refused, BackfillRefused)
        assert (refused.why, refused.detail) == (
            BackfillRefusalReason.OVER,
            "Backfill 1 is cancelled.",
        )
        # To cancel it again is nothing.
        assert isinstance(await backfills.cancel(made.id), BackfillAnswer)

    play(story)


def test_dead_tasks_end_a_backfill_and_are_counted(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        made = await planned(pipeline, keys=["a"])
        await pipeline.backfills.turn()
        await world.rows(
            "UPDATE task SET status = 'running', attempt = 1, lease_token = 'x', worker = 'w',"
            " lease_expires_at = penstock_now(), claimed_at = penstock_now()"
        )
        await world.rows(
            "UPDATE task SET status = 'dead', lease_token = NULL, worker = NULL, reason = 'x',"
            " lease_expires_at = NULL, claimed_at = NULL, settled_at = penstock_now()"
        )
        await pipeline.backfills.turn()
        found = await pipeline.backfills.get(made.id)
        assert found is not None
        assert (found.state, found.dead, found.open) == ("done", 1, 0)

    play(story)


def test_two_dispatchers_advance_one_backfill(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        made = await planned(pipeline, start=0, end=100, step=1, concurrency=10)
        async with world.database.transaction() as other:
            await advance(other, made.id)
            # The other has it in hand: passed by, and not waited for.
            await pipeline.backfills.turn()
            assert await look(pipeline, made.id) == ("running", 100, 0, 0)
        assert await look(pipeline, made.id) == ("running", 100, 10, 10)
        many = [Backfills(world.database).turn() for _ in range(8)]
        await asyncio.gather(*many)
        assert await look(pipeline, made.id) == ("running", 100, 10, 10)
        await drain(pipeline, "a:clean", "a:report")
        assert await look(pipeline, made.id) == ("done", 100, 100, 0)
        assert await world.value("SELECT count(*) FROM task WHERE backfill_id = 1") == 100

    play(story)


def test_a_crash_in_the_middle_plans_nothing_twice(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        made = await planned(pipeline, start=0, end=10, step=1)
        async with world.unfinished(is_kept=False) as other:
            await Backfills(other._database).turn()
        assert await look(pipeline, made.id) == ("running", 10, 0, 0)
        await pipeline.backfills.turn()
        assert await look(pipeline, made.id) == ("running", 10, 10, 10)

    play(story)


def test_cancel_during_an_advance(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        made = await planned(pipeline, start=0, end=10, step=1)
        async with asyncio.TaskGroup() as group, world.database.transaction() as other:
            await advance(other, made.id)
            cancelling = group.create_task(pipeline.backfills.cancel(made.id))
            await world.until_waiting()
        found = cancelling.result()
        assert isinstance(found, BackfillAnswer)
        # Also the tasks that were being made.
        assert (found.state, found.planned, found.open) == ("cancelled", 10, 0)
        assert await pipeline.open_tasks() == []

    play(story)


@pytest.mark.parametrize(
    "extra", ["", "  mail: {runtime: process, operator: a:mail, inputs: raw}\n"]
)
def test_apply_during_an_advance(play: Play, extra: str) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain(extra=extra))
        # A job without an output has no generation that could be locked.
        made = await planned(pipeline, "mail" if extra else "clean", start=0, end=10, step=1)
        without = chain().replace("operator: a:clean", "operator: a:tidy")
        text = chain() if extra else without.replace("clean:", "tidy:", 1)
        async with asyncio.TaskGroup() as group, world.database.transaction() as other:
            await advance(other, made.id)
            applying = group.create_task(pipeline.try_apply(text, force=True))
            await world.until_waiting()
        applied = applying.result()
        assert isinstance(applied, DagApplied)
        assert applied.cancelled == 10
        assert await look(pipeline, made.id) == ("cancelled", 10, 10, 0)
        assert await pipeline.backfills.turn() is None

    play(story)


def test_an_advance_waits_for_apply(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        made = await planned(pipeline, start=0, end=10, step=1)
        ask = BackfillAsk(job="clean", keys=["a"])
        async with asyncio.TaskGroup() as group, world.unfinished() as other:
            moving = Pipeline(World(world.dsn, other._database, other))
            text = chain().replace("clean:", "tidy:", 1)
            assert isinstance(await moving.try_apply(text), DagNotApplied)
            await moving.apply(text, force=True)
            turning = group.create_task(pipeline.backfills.turn())
            creating = group.create_task(pipeline.backfills.create(ask))
            await world.until_waiting(2)
        assert turning.result() is not None
        assert await look(pipeline, made.id) == ("cancelled", 10, 0, 0)
        found = creating.result()
        assert isinstance(found, BackfillRefused)
        assert found.why is BackfillRefusalReason.UNKNOWN_JOB

    play(story)


async def finished(pipeline: Pipeline, *names: str) -> None:
    await pipeline.send(*names)
    await pipeline.work("a:clean")
    await pipeline.work("a:report")


def test_a_rebuild_takes_the_latest_event_of_each_partition(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        again = await pipeline.event("p again", partition_key="p")
        await finished(pipeline, "p", "q")
        await pipeline.routing.accept([again, await pipeline.event("c", cursor=5)])
        await pipeline.route()
        await pipeline.apply(chain(clean="2"))
        rebuild = (await pipeline.backfills.list()).backfills
        # What reads it comes by itself.
        assert [(each.job, each.kind) for each in rebuild] == [("clean", "rebuild")]
        generation = (await pipeline.generations())["clean"]
        await pipeline.backfills.turn()
        rows = await world.rows(
            "SELECT payload ->> 'partition_key' AS part, dedupe_key, priority, backfill_id"
            " FROM task WHERE generation = %s ORDER BY id",
            generation,
        )
        seqs = await world.rows("SELECT seq FROM event WHERE dedupe LIKE 'source:%%' ORDER BY seq")
        q, again_seq, cursor = [row["seq"] for row in seqs][1:]
        assert [tuple(row.values()) for row in rows] == [
            ("q", f"event:{q}", "bulk", 1),
            ("p", f"event:{again_seq}", "bulk", 1),
            (None, f"event:{cursor}", "bulk", 1),
        ]
        assert await look(pipeline, 1) == ("running", 3, 3, 3)

    play(story)


def test_a_rebuild_of_every_update(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        texts = [
            chain(clean=number).replace("    timeout", "    execution: per_update\n    timeout")
            for number in ("1", "2")
        ]
        await pipeline.apply(texts[0])
        await pipeline.send("p")
        again = await pipeline.event("p again", partition_key="p")
        await pipeline.routing.accept([again])
        await pipeline.route()
        await pipeline.work("a:clean")
        await pipeline.apply(texts[1])
        await pipeline.backfills.turn()
        assert await look(pipeline, 1) == ("running", 2, 2, 2)

    play(story)


def test_a_rebuild_follows_the_filter_of_the_edge(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        where = "inputs: [{from: raw, where: 'start >= 5'}]"
        await pipeline.apply(chain().replace("inputs: [raw]", where))
        # The latest of the same partition does not pass, but the one before did.
        events = [
            await pipeline.event("1", partition_key="p", start=7, end=9),
            await pipeline.event("2", partition_key="p", start=1, end=9),
            await pipeline.event("3", partition_key="q", start=1, end=9),
        ]
        await pipeline.routing.accept(events)
        await pipeline.route()
        assert await pipeline.open_tasks() == [("clean", "p")]
        await pipeline.work("a:clean")
        await pipeline.apply(chain(clean="2").replace("inputs: [raw]", where))
        await pipeline.backfills.turn()
        assert await pipeline.open_tasks() == [("clean", "p"), ("report", "p")]

    play(story)


def test_a_rebuild_is_windowed_and_nothing_is_made_twice(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few events a turn, so that there are many turns.
    monkeypatch.setattr("penstock.dispatcher.backfills.WALK_MAX", 3)
    monkeypatch.setattr("penstock.dispatcher.backfills.COUNT_MAX", 4)

    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        names = [str(number) for number in range(40)]
        await finished(pipeline, *names[:30])
        # Not routed when the change comes: routed to both generations afterwards.
        await pipeline.routing.accept([await pipeline.event(name) for name in names[30:]])
        await pipeline.apply(chain(clean="2"))
        await world.rows("UPDATE backfill SET concurrency_max = 4")
        most = 0
        for number in range(200):
            pause = await pipeline.backfills.turn()
            most = max(most, (await look(pipeline, 1))[3])
            if number == 5:
                # Also what comes during the rebuild is neither missed nor doubled.
                await pipeline.send("new", "0")
                again = await pipeline.event("1 again", partition_key="1")
                await pipeline.routing.accept([again])
                await pipeline.route()
            if number > 5:
                await pipeline.work("a:clean")
            if pause is None and not await pipeline.open_tasks():
                break
            await pipeline.work("a:report")
        assert most <= 4
        generation = (await pipeline.generations())["clean"]
        found = await world.rows(
            "SELECT payload ->> 'partition_key' AS part, count(*) AS n FROM task"
            " WHERE generation = %s AND status = 'completed' GROUP BY 1",
            generation,
        )
        made = {row["part"]: row["n"] for row in found}
        assert made.keys() == {*names, "new"}
        # "1" came again after its rebuild had begun, perhaps after its first task was made.
        assert {part for part, count in made.items() if count > 1} <= {"1"}

    play(story)


def test_a_rebuild_does_not_overtake_a_publication(play: Play) -> None:
    """The partition is being published again while its rebuild looks at it."""

    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await finished(pipeline, "p", "q")
        await pipeline.routing.accept([await pipeline.event("p again", partition_key="p")])
        await pipeline.route()
        (task,) = await pipeline.tasks.claim_next("a:clean", worker="w")
        await pipeline.apply(chain(report="2"))
        generation = (await pipeline.generations())["report"]
        tidy = (await pipeline.job("clean")).outputs["tidy"]
        output = TaskOutput(dataset=tidy, location="s3://b/new", partition_key="p")
        async with asyncio.TaskGroup() as group, world.database.transaction() as other:
            await end(other, [Completion(task.fence, (output,))], route=route_events)
            turning = group.create_task(pipeline.backfills.turn())
            await world.until_waiting()
        assert turning.result() is not None
        rows = await world.rows(
            "SELECT payload ->> 'partition_key' AS part, backfill_id FROM task"
            " WHERE generation = %s ORDER BY id",
            generation,
        )
        # Not a task of the earlier event, with a higher number than that of the later.
        assert [tuple(row.values()) for row in rows] == [("p", None), ("q", 1)]

    play(story)


def test_a_rebuild_waits_for_that_of_its_input(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        both = {"report": "1", "clean": "1"}
        joined = chain(**both).replace("inputs: [tidy]", "inputs: [tidy, raw]")
        await pipeline.apply(joined)
        await finished(pipeline, "p", "q")
        await pipeline.apply(chain(clean="2").replace("inputs: [tidy]", "inputs: [tidy, raw]"))
        backfills = (await pipeline.backfills.list()).backfills
        assert sorted(each.job for each in backfills) == ["clean", "report"]
        await pipeline.backfills.turn()
        assert await pipeline.open_tasks() == [("clean", "p"), ("clean", "q")]
        await pipeline.work("a:clean")
        await pipeline.work("a:report")
        await pipeline.backfills.turn()
        await pipeline.backfills.turn()
        assert await pipeline.open_tasks() == [("report", "p"), ("report", "q")]
        await drain(pipeline, "a:report")
        assert {each.state for each in (await pipeline.backfills.list()).backfills} == {"done"}

    play(story)
