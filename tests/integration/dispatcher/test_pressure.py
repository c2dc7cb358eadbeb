"""Pressure measured and pauses written, on a real Postgres."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.dispatcher.pressure.pressures import Pressures
from penstock.dispatcher.tasks.values import Claimed, NewTask, Refusal, Why
from tests.integration.dispatcher.test_deployment import Pipeline
from tests.integration.dispatcher.world import Play, World

LINE = """
jobs:
  feed:
    activation: source
    source: {{kind: manual}}
    outputs: [raw]
  clean:
    runtime: process
    operator: a:clean
    inputs: [raw]
    outputs: [tidy]
  side:
    runtime: {runtime}
    operator: a:side
    inputs: [raw]
    outputs: [aside]
    priority: {side}
  report:
    runtime: process
    operator: a:report
    inputs: [tidy, aside]
    max_queue_depth: {depth}
    resume_queue_depth: 1
    max_queue_age: 10m
"""


def line(*, side: str = "normal", depth: int = 4, runtime: str = "process") -> str:
    return LINE.format(side=side, depth=depth, runtime=runtime)


async def fill(pipeline: Pipeline, job: str, count: int, **fields: Any) -> list[int]:
    """Tasks of a job, and no wake-ups."""
    found = await pipeline.job(job)
    first = await pipeline.world.value("SELECT coalesce(max(id), 0) FROM task")
    made = await pipeline.tasks.create(
        [
            NewTask(
                definition_id=found.definition_id,
                generation=found.generation,
                dedupe_key=f"{first}:{number}",
                payload={},
                **fields,
            )
            for number in range(count)
        ]
    )
    await pipeline.world.wakes()
    return [each for each in made if each is not None]


async def backfill(pipeline: Pipeline, job: str) -> int:
    found = await pipeline.job(job)
    number = await pipeline.world.value(
        "INSERT INTO backfill (definition_id, generation, plan, partitions, concurrency_max)"
        " VALUES (%s, %s, '{}', 10, 10) RETURNING id",
        found.definition_id,
        found.generation,
    )
    assert isinstance(number, int)
    return number


async def drain(pipeline: Pipeline, operator: str, count: int) -> None:
    claimed = await pipeline.tasks.claim_next(operator, worker="w", limit=count)
    assert len(claimed) == count
    await pipeline.world.wakes()


async def pauses(world: World) -> dict[str, str]:
    rows = await world.rows("SELECT name, scope FROM pause JOIN job ON job.id = job_id")
    return {row["name"]: row["scope"] for row in rows}


def test_a_full_queue_pauses_its_upstream_until_it_has_drained(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Pressures(world.database)
        assert await pressures.turn() is None
        await pipeline.apply(line())
        await fill(pipeline, "clean", 1)
        (paused_task,) = await fill(pipeline, "clean", 1)
        await fill(pipeline, "report", 5)
        assert await pressures.turn() is None
        assert await pauses(world) == {"feed": "all", "clean": "all", "side": "all"}
        refused = await pipeline.tasks.claim(paused_task, worker="w")
        assert isinstance(refused, Refusal)
        assert refused.why is Why.PAUSED
        (answer,) = await pipeline.routing.accept([await pipeline.event("a")])
        assert getattr(answer, "paused", None) == "5 tasks of report wait, and 4 may."
        await drain(pipeline, "a:report", 3)
        await pressures.turn()
        assert len(await pauses(world)) == 3
        assert await world.wakes() == []
        await drain(pipeline, "a:report", 1)
        await pressures.turn()
        assert await pauses(world) == {}
        # Only what can be claimed now is told of.
        assert await world.wakes() == ["a:clean/normal"]
        assert isinstance(await pipeline.tasks.claim(paused_task, worker="w"), Claimed)

    play(story)


def test_bulk_is_shed_first_and_backfills_do_not_count(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Pressures(world.database)
        await pipeline.apply(line(side="bulk"))
        planned = await backfill(pipeline, "report")
        await fill(pipeline, "report", 9, backfill_id=planned)
        await pressures.turn()
        assert await pauses(world) == {}
        await fill(pipeline, "report", 5)
        await pressures.turn()
        assert await pauses(world) == {"side": "bulk"}
        # Bulk tasks of a normal job are shed too; what is normal of it goes on.
        await fill(pipeline, "clean", 1, backfill_id=planned, priority="bulk")
        await fill(pipeline, "clean", 1)
        await pressures.turn()
        assert await pauses(world) == {"side": "bulk", "clean": "bulk"}
        assert len(await pipeline.tasks.claim_next("a:clean", worker="w", limit=9)) == 1
        await fill(pipeline, "report", 1)
        await pressures.turn()
        assert await pauses(world) == {"feed": "all", "side": "all", "clean": "all"}

    play(story)


def test_an_old_queue_is_pressure_and_one_that_is_not_due_is_not(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Pressures(world.database)
        await pipeline.apply(line())
        await fill(pipeline, "report", 1)
        await fill(pipeline, "report", 1, delay_ms=3_600_000)
        world.later(600)
        await pressures.turn()
        assert await pauses(world) == {}
        world.later(1)
        await pressures.turn()
        assert set(await pauses(world)) == {"feed", "side", "clean"}
        answer = await pressures.answer()
        (report,) = answer.jobs
        assert (report.job, report.pressed, report.depth) == ("report", True, 2)
        assert report.oldest_seconds == 601
        assert (report.max_queue_depth, report.max_queue_age_seconds) == (4, 600)
        assert report.reason == "A task of report has waited for 10m1s, and 10m is the limit."
        assert report.pauses == ["clean", "feed", "side"]
        assert [(each.job, each.cause) for each in answer.pauses] == [
            ("clean", "pressure:report"),
            ("feed", "pressure:report"),
            ("side", "pressure:report"),
        ]
        since = report.since
        world.later(5)
        await pressures.turn()
        (again,) = (await pressures.answer()).jobs
        assert (again.since, again.oldest_seconds) == (since, 606)
        assert {each.since for each in (await pressures.answer()).pauses} == {since}

    play(story)


def test_a_new_dag_takes_its_pressure_with_it(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Pressures(world.database)
        await pipeline.apply(line())
        await fill(pipeline, "clean", 1)
        await fill(pipeline, "report", 5)
        await pressures.turn()
        assert len(await pauses(world)) == 3
        await pipeline.apply(line(depth=50))
        await pressures.turn()
        # Still above where it resumes, so still pressed; then the limits are gone.
        assert len(await pauses(world)) == 3
        text = line().split("    max_queue_depth")[0]
        await pipeline.apply(text)
        await pressures.turn()
        assert await pauses(world) == {}
        assert await world.value("SELECT count(*) FROM pressure") == 0
        assert await world.wakes() == ["a:clean/normal"]
        assert (await pressures.answer()).jobs == []

    play(story)


def test_people_pause_and_resume_beside_pressure(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Pressures(world.database)
        await pipeline.apply(line())
        await fill(pipeline, "clean", 1)
        assert not await pressures.pause("nothing", "x")
        assert not await pressures.resume("nothing")
        assert await pressures.resume("clean")
        assert await world.wakes() == []
        assert await pressures.pause("clean", "We look into it.")
        assert await pressures.pause("clean", "We still do.\x00")
        assert await pipeline.tasks.claim_next("a:clean", worker="w") == ()
        await fill(pipeline, "report", 5)
        await pressures.turn()
        (reason,) = [e.reason for e in (await pressures.answer()).pauses if e.cause == "operator"]
        assert reason == "We still do.\N{REPLACEMENT CHARACTER}"
        # Pressure still pauses it: there is nothing to tell of yet.
        assert await pressures.resume("clean")
        assert await world.wakes() == []
        assert await pauses(world) == {"feed": "all", "side": "all", "clean": "all"}
        assert await pressures.pause("side", "x")
        await drain(pipeline, "a:report", 4)
        await pressures.turn()
        assert await pauses(world) == {"side": "all"}
        assert await world.wakes() == ["a:clean/normal"]

    play(story)


def test_functions_are_invoked_again_when_their_job_goes_on(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Pressures(world.database)
        await pipeline.apply(line(runtime="lambda"))
        (task,) = await fill(pipeline, "side", 1)
        await world.rows("DELETE FROM outbox")
        assert await pressures.pause("side", "x")
        assert await pressures.resume("side")
        rows = await world.rows("SELECT kind, target, body FROM outbox")
        assert [tuple(row.values()) for row in rows] == [("invoke", "a:side", {"task_id": task})]

    play(story)


def test_while_one_measures_the_others_pass_by(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(line())
        await fill(pipeline, "report", 5)
        async with world.database.transaction() as other:
            await other.execute(b"SELECT pg_advisory_xact_lock(8102650226125664869)")
            assert await Pressures(world.database).turn() is None
            assert await pauses(world) == {}
        several = [Pressures(world.database) for _ in range(6)]
        await asyncio.gather(*[each.turn() for each in several])
        assert len(await pauses(world)) == 3

    play(story)


def test_a_dag_that_changes_during_a_turn_is_read_again(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(line())
        known = await Pressures(world.database)._in_force()

        class Late(Pressures):
            """Has read the DAG before it was changed."""

            async def _in_force(self) -> Any:
                return known

        late = Late(world.database)
        assert await late.turn() is None
        await pipeline.apply(line(depth=5))
        assert await late.turn() == 0.0

    play(story)
