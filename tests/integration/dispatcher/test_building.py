"""From an edited DAG to the cut-over, on a real Postgres."""

from __future__ import annotations

import asyncio

import pytest

from penstock.dispatcher.deployment import CutOverController
from penstock.dispatcher.deployment_plan import CutOverOutcome
from penstock.dispatcher.tasks.model import Completion, TaskOutput
from penstock.protocol.steering import BackfillAnswer, BackfillAsk
from tests.integration.dispatcher.test_deployment import SINK, Pipeline, chain
from tests.integration.dispatcher.world import Play, World, either_way


def builder(pipeline: Pipeline) -> CutOverController:
    return CutOverController(pipeline.world.database, pipeline.deployment)


async def work_all(pipeline: Pipeline, *names: str) -> None:
    await pipeline.send(*names)
    await pipeline.work("a:clean")
    await pipeline.work("a:report")


async def partitions(pipeline: Pipeline, dataset: str) -> list[str]:
    """What readers are served."""
    rows = await pipeline.world.rows(
        "SELECT partition_key FROM publication JOIN generation"
        " ON (generation.dataset_id, version) = (publication.dataset_id, generation)"
        " JOIN dataset ON dataset.id = generation.dataset_id"
        " WHERE name = %s AND state = 'current' ORDER BY 1",
        dataset,
    )
    return [row["partition_key"] for row in rows]


def test_an_edit_is_rebuilt_and_cut_over_downstream_first(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain(extra=SINK))
        await work_all(pipeline, "p", "q")
        await pipeline.work("a:mail")
        old = await pipeline.generations()
        assert await builder(pipeline).turn() is None
        await pipeline.apply(chain(clean="2", extra=SINK))
        new = await pipeline.generations()
        build = builder(pipeline)
        # There is a rebuild.
        assert await build.turn() is not None
        await pipeline.backfills.turn()
        await pipeline.work("a:clean", most=1)
        await pipeline.backfills.turn()
        assert await build.turn() is not None
        await pipeline.work("a:clean")
        await pipeline.backfills.turn()
        assert (await pipeline.backfills.list()).backfills[0].state == "done"
        # All of tidy is built, and daily is not: both are served as they were.
        await build.turn()
        assert await pipeline.state("tidy", old["clean"]) == "current"
        assert await pipeline.state("daily", old["report"]) == "current"
        # What comes now is of both.
        await pipeline.send("r")
        assert len(await pipeline.work("a:clean")) == 2
        await pipeline.work("a:report")
        assert await build.turn() is None
        for dataset, job in (("tidy", "clean"), ("daily", "report")):
            assert await pipeline.state(dataset, new[job]) == "current"
            assert await pipeline.state(dataset, old[job]) == "retired"
            assert await partitions(pipeline, dataset) == ["p", "q", "r"]

    play(story)


async def claimable(world: World) -> list[str]:
    asked = {"operators": None, "tasks_max": 100}
    rows = await world.database.fetch("claimable_tasks", asked)
    return sorted(f"{row['operator']}/{row['priority']}" for row in rows)


@either_way
def test_what_a_rebuild_makes_is_announced_before_and_after_the_cut_over(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await work_all(pipeline, "p", "q")
        await world.wakes()
        old = await pipeline.generations()
        await pipeline.apply(chain(clean="2"))
        await pipeline.backfills.turn()
        # Each is announced by what has made it, once.
        assert await world.wakes() == await claimable(world) == ["a:clean/bulk"]
        await pipeline.work("a:clean")
        assert set(await world.wakes()) == set(await claimable(world)) == {"a:report/normal"}
        await pipeline.work("a:report")
        await pipeline.backfills.turn()
        # An event while both generations are there is a task of each; they wait for the cut-over.
        await pipeline.send("r")
        await world.wakes()
        for job, dataset in (("report", "daily"), ("clean", "tidy")):
            named = (await pipeline.job(job)).outputs[dataset]
            outcome = await pipeline.deployment.cut_over(named, force=True)
            assert outcome is CutOverOutcome.DONE
        assert await pipeline.state("tidy", old["clean"]) == "retired"
        # One of them was cancelled, the other announced before: there is nothing to add.
        assert await world.wakes() == []
        assert await claimable(world) == ["a:clean/normal"]
        assert len(await pipeline.work("a:clean")) == 1
        assert await world.wakes() == await claimable(world) == ["a:report/normal"]

    play(story)


def test_nothing_is_cut_over_before_what_is_downstream(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await work_all(pipeline, "p")
        old = await pipeline.generations()
        await pipeline.apply(chain(clean="2"))
        await pipeline.backfills.turn()
        await pipeline.work("a:clean")
        await pipeline.backfills.turn()
        # The report fails for good; the earlier one needs the earlier generation of its input.
        await world.rows(
            "UPDATE task SET status = 'cancelled', reason = 'x', settled_at = penstock_now()"
            " WHERE status = 'queued'"
        )
        await builder(pipeline).turn()
        assert await pipeline.state("tidy", old["clean"]) == "current"
        daily = (await pipeline.job("report")).outputs["daily"]
        assert await pipeline.deployment.cut_over(daily) is CutOverOutcome.UNCOVERED
        # Somebody decides that it may be missing; the rest follows.
        assert await pipeline.deployment.cut_over(daily, force=True) is CutOverOutcome.DONE
        assert await builder(pipeline).turn() is None
        assert await pipeline.state("tidy", old["clean"]) == "retired"
        assert await partitions(pipeline, "daily") == []

    play(story)


def test_nothing_is_cut_over_while_what_was_published_upstream_is_still_to_be_routed(
    play: Play,
) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await work_all(pipeline, "p")
        await pipeline.apply(chain(clean="2"))
        await pipeline.backfills.turn()
        await pipeline.work("a:clean")
        await pipeline.work("a:report")
        await pipeline.backfills.turn()
        daily = (await pipeline.job("report")).outputs["daily"]
        # As of a task that has published thousands of partitions.
        mark = "UPDATE event SET routed = %s WHERE seq = (SELECT max(seq) FROM event JOIN dataset"
        mark += " ON dataset.id = dataset_id WHERE dataset.name = 'tidy')"
        await world.rows(mark, "pending")
        assert await pipeline.deployment.cut_over(daily) is CutOverOutcome.UPSTREAM
        await world.rows(mark, "routed")
        assert await pipeline.deployment.cut_over(daily) is CutOverOutcome.DONE

    play(story)


def test_force_does_not_end_a_backfill(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await work_all(pipeline, "p")
        await pipeline.apply(chain(report="2"))
        daily = (await pipeline.job("report")).outputs["daily"]
        assert await pipeline.deployment.cut_over(daily, force=True) is CutOverOutcome.BACKFILL

    play(story)


def test_only_the_generation_that_was_looked_at_is_cut_over(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.apply(chain(report="2"))
        job = await pipeline.job("report")
        await pipeline.apply(chain(report="3"))
        cut_over = pipeline.deployment.cut_over
        daily = job.outputs["daily"]
        assert await cut_over(daily, version=job.generation) is CutOverOutcome.NOTHING
        job = await pipeline.job("report")
        assert await cut_over(daily, version=job.generation) is CutOverOutcome.DONE

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
def test_cut_over_while_the_last_task_of_a_rebuild_ends(play: Play, is_kept: bool) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await work_all(pipeline, "p")
        old = await pipeline.generations()
        await pipeline.apply(chain(report="2"))
        await pipeline.backfills.turn()
        (last,) = await pipeline.tasks.claim_next("a:report", worker="w")
        daily = (await pipeline.job("report")).outputs["daily"]
        output = TaskOutput(dataset=daily, location="s3://b/x", partition_key="p")
        async with asyncio.TaskGroup() as group, world.unfinished(is_kept=is_kept) as other:
            await other.complete([Completion(last.fence, (output,))])
            # Those who look see a task that runs.
            await builder(pipeline).turn()
            assert await pipeline.state("daily", old["report"]) == "current"
            cutting = group.create_task(pipeline.deployment.cut_over(daily))
            await world.until_waiting()
        # The rebuild is not over before somebody has seen that its tasks are.
        assert cutting.result() is CutOverOutcome.BACKFILL
        await pipeline.backfills.turn()
        await builder(pipeline).turn()
        expected = "retired" if is_kept else "current"
        assert await pipeline.state("daily", old["report"]) == expected

    play(story)


def test_many_builders_and_backfills_at_once(play: Play) -> None:
    """Everything at the same time: events come, tasks end, two edits are rebuilt and cut over."""

    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        names = [str(number) for number in range(30)]
        await work_all(pipeline, *names[:20])
        await pipeline.apply(chain(clean="2"))

        async def bring() -> None:
            for name in names[20:]:
                await pipeline.send(name)

        async def labour() -> None:
            for _ in range(40):
                for operator in ("a:clean", "a:report"):
                    await pipeline.work(operator, most=2)

        async def turn() -> None:
            build = builder(pipeline)
            for _ in range(40):
                await pipeline.backfills.turn()
                await build.turn()

        await asyncio.gather(bring(), labour(), labour(), turn(), turn())
        for _ in range(4):
            await pipeline.route()
            await pipeline.backfills.turn()
            await pipeline.work("a:clean")
            await pipeline.work("a:report")
        assert await builder(pipeline).turn() is None
        new = await pipeline.generations()
        assert await pipeline.state("tidy", new["clean"]) == "current"
        assert await partitions(pipeline, "tidy") == sorted(names)
        assert await partitions(pipeline, "daily") == sorted(names)
        found = await world.rows(
            "SELECT payload ->> 'partition_key' AS part, count(*) AS n FROM task"
            " WHERE generation = %s AND status = 'completed' GROUP BY 1",
            new["clean"],
        )
        assert {row["part"]: row["n"] for row in found} == dict.fromkeys(names, 1)

    play(story)


def test_a_job_that_is_added_is_built_of_what_is_there(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await work_all(pipeline, "p", "q")
        added = """
  count:
    runtime: process
    operator: a:count
    inputs: [tidy]
    outputs: [counts]
"""
        await pipeline.apply(chain(extra=added))
        assert await pipeline.states("counts") == ["current"]
        await pipeline.backfills.turn()
        assert await pipeline.open_tasks() == [("count", "p"), ("count", "q")]
        await pipeline.work("a:count")
        await work_all(pipeline, "r")
        await pipeline.work("a:count")
        assert await partitions(pipeline, "counts") == ["p", "q", "r"]

    play(story)


def test_readers_get_what_was_made_of_the_first_of_many_updates(play: Play) -> None:
    """A dataset that has one partition for all is covered by the first task of a rebuild."""

    def by_update(clean: str) -> str:
        text = chain(clean=clean)
        return text.replace("operator: a:clean", "operator: a:clean\n    execution: per_update")

    async def story(world: World) -> None:
        pipeline = Pipeline(world)

        async def finish(operator: str, *, most: int = 1000) -> None:
            for task in await pipeline.tasks.claim_next(operator, worker="w", limit=most):
                (dataset,) = (
                    task.definition["datasets"][each["name"]] for each in task.definition["outputs"]
                )
                output = TaskOutput(dataset=dataset, location=f"s3://b/{task.payload['cursor']}")
                await pipeline.tasks.complete([Completion(task.fence, (output,))])

        await pipeline.apply(by_update("1"))
        for cursor in range(3):
            await pipeline.routing.accept([await pipeline.event(f"{cursor}", cursor=cursor)])
            await pipeline.route()
            await finish("a:clean")
            await finish("a:report")
        await pipeline.apply(by_update("2"))
        new = await pipeline.generations()
        build = builder(pipeline)
        await pipeline.backfills.turn()
        for left in (2, 1):
            await finish("a:clean", most=1)
            await finish("a:report")
            await build.turn()
            assert len(await pipeline.open_tasks()) == left
            assert await pipeline.state("daily", new["report"]) == "building"
        await finish("a:clean")
        await pipeline.backfills.turn()
        # The rebuild is over, and what it has led to is not.
        await build.turn()
        assert await pipeline.state("daily", new["report"]) == "building"
        await finish("a:report")
        assert await build.turn() is None
        assert await pipeline.state("daily", new["report"]) == "current"

    play(story)


@pytest.mark.parametrize("limit", ["", "max_queue_depth: 2"])
def test_what_a_rebuild_leads_to_two_jobs_on_is_waited_for(play: Play, limit: str) -> None:
    """Also what is held until a queue has room, of which there is no task when the rebuild ends."""

    def text(clean: str) -> str:
        total = f"""
  total:
    runtime: process
    operator: a:total
    {limit}
    inputs: [daily]
    outputs: [all]
"""
        found = chain(clean=clean, extra=total)
        for name, more in (("clean", ""), ("report", f"\n    {limit}")):
            by_update = f"operator: a:{name}\n    execution: per_update{more}"
            found = found.replace(f"operator: a:{name}", by_update)
        return found

    async def story(world: World) -> None:
        pipeline = Pipeline(world)

        async def finish(name: str, *, most: int = 1) -> int:
            await pipeline.route()
            claimed = await pipeline.tasks.claim_next(f"a:{name}", worker="w", limit=most)
            for task in claimed:
                (output,) = task.definition["outputs"]
                dataset = task.definition["datasets"][output["name"]]
                made = TaskOutput(dataset=dataset, location=f"s3://b/{task.payload['cursor']}")
                await pipeline.tasks.complete([Completion(task.fence, (made,))])
            world.later(1)
            return len(claimed)

        await pipeline.apply(text("1"))
        for cursor in range(5):
            await pipeline.routing.accept([await pipeline.event(f"{cursor}", cursor=cursor)])
            for name in ("clean", "report", "total"):
                await finish(name)
        await pipeline.apply(text("2"))
        new = await pipeline.generations()
        await pipeline.backfills.turn()
        await finish("clean", most=5)
        await pipeline.backfills.turn()
        assert (await pipeline.backfills.list()).backfills[0].state == "done"
        for left in (4, 3, 2, 1, 0):
            assert (await finish("report"), await finish("total")) == (1, 1)
            await builder(pipeline).turn()
            expected = "building" if left else "current"
            assert await pipeline.state("all", new["total"]) == expected

    play(story)


def test_partitions_that_only_a_backfill_has_made_are_built_too(play: Play) -> None:
    """Without them what is being built would never have all that readers have."""

    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await work_all(pipeline, "p")
        asked = BackfillAsk(job="clean", start=10, end=30, step=10)
        assert isinstance(await pipeline.backfills.create(asked), BackfillAnswer)
        await pipeline.backfills.turn()
        await pipeline.work("a:clean")
        await pipeline.work("a:report")
        everything = ["10-20", "20-30", "p"]
        assert await partitions(pipeline, "tidy") == everything
        await pipeline.apply(chain(clean="2"))
        # What makes them again is no reason to refuse the next change.
        await pipeline.apply(chain(clean="3"))
        build = builder(pipeline)
        for _ in range(6):
            await pipeline.backfills.turn()
            for claimed in await pipeline.tasks.claim_next("a:clean", worker="w", limit=10):
                key = claimed.payload["partition_key"]
                if key != "p":
                    # Its range is known from what was made of it before.
                    assert f"{claimed.payload['start']}-{claimed.payload['end']}" == key
                await pipeline.finish(claimed)
            await pipeline.work("a:report")
            await build.turn()
        assert await pipeline.states("tidy") == ["abandoned", "current", "retired"]
        assert await partitions(pipeline, "tidy") == everything
        assert await partitions(pipeline, "daily") == everything

    play(story)


@pytest.mark.parametrize(
    ("output", "expected"),
    [("tidy", ["4"]), ("{name: tidy, partition_by: day}", ["0", "1", "2", "3", "4"])],
)
def test_of_cursors_the_latest_is_enough_to_build_of_unless_each_may_have_made_other_partitions(
    play: Play, output: str, expected: list[str]
) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain().replace("outputs: [tidy]", f"outputs: [{output}]"))
        events = [await pipeline.event(f"e{n}", cursor=n) for n in range(5)]
        await pipeline.routing.accept(events)
        await pipeline.route()
        for claimed in await pipeline.tasks.claim_next("a:clean", worker="w", limit=10):
            await pipeline.tasks.complete([Completion(claimed.fence)])
        await pipeline.apply(chain(clean="2").replace("outputs: [tidy]", f"outputs: [{output}]"))
        await pipeline.backfills.turn()
        made = await world.rows(
            "SELECT payload ->> 'cursor' AS cursor FROM task WHERE backfill_id IS NOT NULL"
            " ORDER BY id"
        )
        assert [row["cursor"] for row in made] == expected
        (plan,) = (await pipeline.backfills.list()).backfills
        assert (plan.partitions, plan.planned) == (len(expected), len(expected))

    play(story)
