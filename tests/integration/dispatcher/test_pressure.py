"""Pressure measured and pauses written, on a real Postgres."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.dispatcher.backpressure import Backpressure
from penstock.dispatcher.database.pool import Connection, query
from penstock.dispatcher.deployment_plan import CutOverOutcome
from penstock.dispatcher.events import AcceptedEvent, RoutingResult
from penstock.dispatcher.tasks.model import (
    ClaimedTask,
    Completion,
    NewTask,
    Refusal,
    TaskOutput,
    TaskRefusalReason,
)
from tests.integration.dispatcher.test_deployment import Pipeline
from tests.integration.dispatcher.world import Play, World, either_way

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


@either_way
def test_a_full_queue_pauses_its_upstream_until_it_has_drained(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Backpressure(world.database)
        assert await pressures.turn() is None
        await pipeline.apply(line())
        await fill(pipeline, "clean", 1)
        (paused_task,) = await fill(pipeline, "clean", 1)
        await fill(pipeline, "report", 5)
        assert await pressures.turn() is None
        assert await pauses(world) == {"feed": "all", "clean": "all", "side": "all"}
        refused = await pipeline.tasks.claim(paused_task, worker="w")
        assert isinstance(refused, Refusal)
        assert refused.why is TaskRefusalReason.PAUSED
        (answer,) = await pipeline.routing.accept([await pipeline.event("a")])
        assert getattr(answer, "paused", None) == "5 tasks of report are queued; the limit is 4."
        await drain(pipeline, "a:report", 3)
        await pressures.turn()
        assert len(await pauses(world)) == 3
        assert await world.wakes() == []
        await drain(pipeline, "a:report", 1)
        await pressures.turn()
        assert await pauses(world) == {}
        # Only what can be claimed now is told of.
        assert await world.wakes() == ["a:clean/normal"]
        assert isinstance(await pipeline.tasks.claim(paused_task, worker="w"), ClaimedTask)

    play(story)


def test_bulk_is_shed_first_and_backfills_do_not_count(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Backpressure(world.database)
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
        pipeline, pressures = Pipeline(world), Backpressure(world.database)
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
        assert report.reason == "The oldest task of report has waited for 10m1s; the limit is 10m."
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


@either_way
def test_a_new_dag_takes_its_pressure_with_it(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Backpressure(world.database)
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


@either_way
def test_a_cut_over_that_empties_a_queue_wakes_what_was_paused_for_it(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Backpressure(world.database)
        report = "inputs: [tidy, aside]\n    outputs: [said]"
        await pipeline.apply(line().replace("inputs: [tidy, aside]", report))
        await fill(pipeline, "clean", 1)
        await fill(pipeline, "report", 5)
        await pressures.turn()
        assert len(await pauses(world)) == 3
        edited = f"{report}\n    config: {{v: 2}}"
        await pipeline.apply(line().replace("inputs: [tidy, aside]", edited))
        await pipeline.forget_rebuilds()
        said = (await pipeline.job("report")).outputs["said"]
        assert await pipeline.deployment.cut_over(said) is CutOverOutcome.DONE
        await pressures.turn()
        assert await pauses(world) == {}
        assert await world.wakes() == ["a:clean/normal"]

    play(story)


@either_way
def test_people_pause_and_resume_beside_pressure(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Backpressure(world.database)
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
        pipeline, pressures = Pipeline(world), Backpressure(world.database)
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
            assert await Backpressure(world.database).turn() is None
            assert await pauses(world) == {}
        several = [Backpressure(world.database) for _ in range(6)]
        await asyncio.gather(*[each.turn() for each in several])
        assert len(await pauses(world)) == 3

    play(story)


def test_a_dag_that_changes_during_a_turn_is_read_again(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(line())
        known = await Backpressure(world.database)._in_force()

        class Late(Backpressure):
            """Has read the DAG before it was changed."""

            async def _in_force(self) -> Any:
                return known

        late = Late(world.database)
        assert await late.turn() is None
        await pipeline.apply(line(depth=5))
        assert await late.turn() == 0.0

    play(story)


WINDOWS = """
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
  mail:
    runtime: process
    operator: a:mail
    inputs: [{{from: tidy, as: tidy{where}}}]
    {limit}
    {merge}
  copy:
    runtime: process
    operator: a:copy
    inputs: [tidy, raw]
"""


def windows(
    *, limit: str = "max_queue_depth: 10", merge: str = "", where: str = "", feeds: str = "tidy"
) -> str:
    """A limit of ten: fifteen may wait. `feeds` is what the job with the limit reads."""
    text = WINDOWS.format(limit=limit, merge=merge, where=where)
    return text.replace("from: tidy", f"from: {feeds}")


async def depth(pipeline: Pipeline, job: str = "mail") -> int:
    count = await pipeline.world.value(
        "SELECT count(*) FROM task JOIN job ON job.id = job_id"
        " WHERE name = %s AND status IN ('queued', 'retrying')",
        job,
    )
    assert isinstance(count, int)
    return count


async def post(pipeline: Pipeline, *names: str) -> None:
    answers = await pipeline.routing.accept([await pipeline.event(name) for name in names])
    assert all(isinstance(each, AcceptedEvent) for each in answers)


async def run_some(pipeline: Pipeline, job: str, count: int) -> int:
    claimed = await pipeline.tasks.claim_next(f"a:{job}", worker="w", limit=count)
    await pipeline.tasks.complete([Completion(each.fence) for each in claimed])
    return len(claimed)


def test_a_queue_with_a_limit_is_filled_in_windows(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Backpressure(world.database)
        await pipeline.apply(windows(feeds="raw"))
        deepest = 0

        async def poster(who: int) -> None:
            nonlocal deepest
            for number in range(10):
                await post(pipeline, *[f"{who}-{number}-{each}" for each in range(5)])
                await pipeline.routing.route(limit=30)
                deepest = max(deepest, await depth(pipeline))

        await asyncio.gather(*[poster(who) for who in range(4)], pressures.turn())
        (answer,) = (await pressures.answer()).jobs
        assert (answer.job, answer.held) == ("mail", 185)
        # All that may wait does, and what reads the same is where the limited job is.
        assert (deepest, await depth(pipeline, "clean")) == (15, 15)
        done = 0
        while some := await run_some(pipeline, "mail", 7):
            done += some
            await pressures.turn()
            await asyncio.gather(*[pipeline.routing.route() for _ in range(3)])
            assert await depth(pipeline) == min(15, 200 - done)
        assert done == await depth(pipeline, "clean") == 200
        await pressures.turn()
        assert await pauses(world) == {}
        rows = await world.rows(
            "SELECT event_seq FROM task JOIN job ON job.id = job_id WHERE name = 'mail'"
            " ORDER BY task.id"
        )
        # The first fifteen came while others were still being committed; the rest was held.
        held = [row["event_seq"] for row in rows][15:]
        assert held == sorted(held)

    play(story)


def test_what_one_task_publishes_is_routed_in_windows(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(windows())
        await post(pipeline, "a")
        await pipeline.routing.route()
        (claimed,) = await pipeline.tasks.claim_next("a:clean", worker="w", limit=9)
        tidy = (await pipeline.job("clean")).outputs["tidy"]
        outputs = tuple(
            TaskOutput(dataset=tidy, location=f"x{number}", partition_key=f"{number:02}")
            for number in range(40)
        )
        await pipeline.tasks.complete([Completion(claimed.fence, outputs)])
        assert await depth(pipeline) == 0
        for waiting in (15, 15, 15):
            await pipeline.routing.route()
            assert await depth(pipeline) == waiting
            await run_some(pipeline, "mail", 10)
        await pipeline.routing.route()
        assert await depth(pipeline) == 10
        # One of them was made of the source's event, and none twice.
        assert await depth(pipeline, "copy") == 41
        assert (await pipeline.routing.route()) == RoutingResult(0, 0, 0)

    play(story)


def test_what_makes_no_task_takes_no_room(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        where = ", where: partition_key = 'x'"
        await pipeline.apply(windows(feeds="raw", where=where, merge="merge_updates: true"))
        await fill(pipeline, "mail", 14)
        await post(pipeline, *[f"no-{number}" for number in range(30)])
        raw = [await pipeline.event("x", event_id=f"x{number}") for number in range(30)]
        await pipeline.routing.accept(raw)
        for _ in range(40):
            await pipeline.routing.route()
        # The others pass at once; then thirty updates of one partition are one task.
        assert await depth(pipeline) == 15
        assert await depth(pipeline, "clean") == 31
        await run_some(pipeline, "mail", 2)
        for _ in range(40):
            await pipeline.routing.route()
        assert (await depth(pipeline), await depth(pipeline, "clean")) == (13, 60)

    play(story)


def test_a_new_dag_decides_anew_of_what_is_held(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Backpressure(world.database)
        await pipeline.apply(windows(feeds="raw", limit=""))
        await pressures.pause("feed", "x")
        await post(pipeline, *[f"{number:02}" for number in range(40)])
        await pipeline.routing.route()
        assert await depth(pipeline) == 0
        # What waited before there was a limit is held to it, and a person's pause holds all.
        await pipeline.apply(windows(feeds="raw"))
        await pressures.resume("feed")
        await pipeline.routing.route()
        assert await depth(pipeline) == 15
        await pressures.pause("feed", "x")
        await run_some(pipeline, "mail", 10)
        await pipeline.routing.route()
        assert await depth(pipeline) == 5
        await pressures.resume("feed")
        await pipeline.apply(windows(feeds="raw", limit="max_queue_depth: 20"))
        await pipeline.routing.route()
        await pipeline.routing.route()
        assert await depth(pipeline) == 30
        await pipeline.apply(windows(feeds="raw", limit=""))
        again = await pipeline.event("39", event_id="again")
        await pipeline.routing.accept([again])
        await pipeline.routing.route()
        assert await depth(pipeline) == 31
        latest = await world.value(
            "SELECT dedupe FROM event JOIN task ON task.event_seq = event.seq"
            " ORDER BY task.id DESC LIMIT 1"
        )
        assert latest == "source:again"

    play(story)


def test_what_is_held_waits_for_its_predecessors_and_to_be_counted(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(windows())
        await post(pipeline, "a", "b")
        await pipeline.routing.route()
        tidy = (await pipeline.job("clean")).outputs["tidy"]
        for each in await pipeline.tasks.claim_next("a:clean", worker="w", limit=9):
            output = TaskOutput(dataset=tidy, location=f"x{each.task_id}", partition_key="p")
            await pipeline.tasks.complete([Completion(each.fence, (output,))])
        held = "SELECT seq FROM event WHERE routed = 'held' ORDER BY seq"
        first, second = [row["seq"] for row in await world.rows(held)]

        async def uncounted(connection: Connection) -> list[Any]:
            # Nothing was held when the queues were counted.
            asked: dict[str, Any] = {"jobs": [], "limits": [], "rooms": [], "limit": 9}
            return await (await connection.execute(query("pick_held"), asked)).fetchall()

        assert await world.database.transact(uncounted) == []
        # Another router has the first in hand, as after a change of the DAG.
        await world.rows("UPDATE event SET routed = 'pending' WHERE seq = %s", first)
        async with world.database.transaction() as other:
            await other.execute(b"SELECT FROM event WHERE seq = %s FOR UPDATE", [first])
            assert await pipeline.routing.route() == RoutingResult(0, 0, 0)
        await pipeline.routing.route()
        rows = await world.rows(
            "SELECT event_seq FROM task WHERE operator = 'a:mail' ORDER BY task.id"
        )
        assert [row["event_seq"] for row in rows] == [first, second]

    play(story)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_smallest_limits_have_room_for_both_generations(play: Play, limit: int) -> None:
    def text(version: int) -> str:
        more = f"operator: a:clean\n    max_queue_depth: {limit}\n    config: {{v: {version}}}"
        return windows(limit="").replace("operator: a:clean", more)

    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(text(1))
        await post(pipeline, "a")
        await pipeline.routing.route()
        await pipeline.apply(text(2))
        await post(pipeline, *"bcdef")
        for _ in range(20):
            await pipeline.routing.route()
            assert await depth(pipeline, "clean") <= limit + (limit + 1) // 2
            await run_some(pipeline, "clean", 9)
        assert await world.value("SELECT count(*) FROM event WHERE routed = 'held'") == 0

    play(story)
