"""Versions of the DAG and generations of datasets, on a real Postgres."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.dispatcher.backfills import Backfills
from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.dag.parser import parse
from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.deployment import Deployer
from penstock.dispatcher.deployment_plan import (
    CutOverOutcome,
    DagApplied,
    DagNotApplied,
    DagPreview,
    DeployedJob,
    ObsoletedWork,
    WhyNotApplied,
)
from penstock.dispatcher.events import AcceptedEvent, NewEvent
from penstock.dispatcher.router import Router, route_events
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.tasks.model import ClaimedTask, Completion, Failure, TaskOutput
from penstock.kernel.errors import InvalidInput
from tests.integration.dispatcher.world import Play, World, either_way


def chain(*, clean: str = "1", report: str = "1", extra: str = "", timing: str = "1h") -> str:
    """A source, a job that reads it, a job that reads that."""
    return f"""
jobs:
  feed:
    activation: source
    source: {{kind: manual}}
    outputs: [raw]
  clean:
    runtime: process
    operator: a:clean
    config: {{v: {clean}}}
    timeout: {timing}
    inputs: [raw]
    outputs: [tidy]
  report:
    runtime: process
    operator: a:report
    config: {{v: {report}}}
    inputs: [tidy]
    outputs: [daily]
{extra}"""


SINK = """
  mail:
    runtime: process
    operator: a:mail
    inputs: [tidy]
"""


@dataclass
class Pipeline:
    """A world with a DAG in it."""

    world: World

    @property
    def deployment(self) -> Deployer:
        return Deployer(self.world.database)

    @property
    def routing(self) -> Router:
        return Router(self.world.database)

    @property
    def tasks(self) -> Tasks:
        return Tasks(self.world.database, route=route_events)

    async def try_apply(self, text: str, *, force: bool = False) -> DagApplied | DagNotApplied:
        return await self.deployment.apply(parse(text, "dag"), text, force=force)

    async def apply(self, text: str, *, force: bool = False) -> DagApplied:
        found = await self.try_apply(text, force=force)
        assert isinstance(found, DagApplied)
        return found

    @property
    def backfills(self) -> Backfills:
        return Backfills(self.world.database)

    async def forget_rebuilds(self) -> None:
        """Cancel the rebuilds that a change has planned, for stories about something else."""
        for each in (await self.backfills.list()).backfills:
            if each.kind == "rebuild" and each.state == "running":
                await self.backfills.cancel(each.id)

    async def job(self, name: str) -> DeployedJob:
        deployed = await self.deployment.current()
        assert deployed is not None
        (found,) = [job for job in deployed.jobs if job.name == name]
        return found

    async def generations(self) -> dict[str, str]:
        deployed = await self.deployment.current()
        assert deployed is not None
        return {job.name: job.generation for job in deployed.jobs}

    async def states(self, dataset: str) -> list[str]:
        """The states of the generations of a dataset, sorted."""
        rows = await self.world.rows(
            "SELECT state FROM generation JOIN dataset ON dataset.id = dataset_id"
            " WHERE name = %s ORDER BY state",
            dataset,
        )
        return [row["state"] for row in rows]

    async def state(self, dataset: str, version: str) -> str:
        found = await self.world.value(
            "SELECT state FROM generation JOIN dataset ON dataset.id = dataset_id"
            " WHERE name = %s AND version = %s",
            dataset,
            version,
        )
        return str(found)

    async def event(self, name: str, **fields: Any) -> NewEvent:
        """An event of the source."""
        feed = await self.job("feed")
        given = {"partition_key": name} if "cursor" not in fields else {}
        values = {"event_id": name, **given, **fields}
        values.setdefault("dataset", feed.outputs["raw"])
        values.setdefault("generation", feed.generation)
        return NewEvent(**values)

    async def send(self, *names: str) -> None:
        """Bring events of the source and route all there are."""
        answers = await self.routing.accept([await self.event(name) for name in names])
        assert all(isinstance(each, AcceptedEvent) for each in answers)
        await self.route()

    async def route(self) -> int:
        """Route until nothing is pending; how many tasks that made."""
        made = 0
        for _ in range(1000):
            found = await self.routing.route()
            if found.routed + found.audited == 0:
                return made
            made += found.tasks
        pytest.fail("there is no end to events")

    async def work(self, operator: str, *, most: int = 1000) -> list[ClaimedTask]:
        """Do what waits for an operator, in the partition of its event."""
        claimed = await self.tasks.claim_next(operator, worker="w", limit=most)
        for each in claimed:
            await self.finish(each)
        return list(claimed)

    async def finish(self, task: ClaimedTask) -> None:
        datasets = task.definition["datasets"]
        outputs = tuple(
            TaskOutput(
                dataset=datasets[name if isinstance(name, str) else name["name"]],
                location="s3://b/x",
                partition_key=task.payload["partition_key"],
                start=task.payload.get("start"),
                end=task.payload.get("end"),
            )
            for name in task.definition.get("outputs", [])
        )
        await self.tasks.complete([Completion(task.fence, outputs)])

    async def open_tasks(self) -> list[tuple[str, str]]:
        """Job and partition of what waits or runs."""
        return await self.select("status IN ('queued', 'retrying', 'running')")

    async def select(self, condition: str) -> list[tuple[str, str]]:
        rows = await self.world.rows(
            "SELECT job.name, payload ->> 'partition_key' AS part FROM task"
            f" JOIN job ON job.id = job_id WHERE {condition} ORDER BY 1, 2"
        )
        return [(row["name"], row["part"]) for row in rows]


def changed(before: dict[str, str], after: dict[str, str]) -> Sequence[str]:
    return sorted(name for name in after if before.get(name) != after[name])


def test_a_first_version_is_current_at_once(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        assert await pipeline.deployment.current() is None
        assert await pipeline.deployment.versions() == ()
        text = chain()
        applied = await pipeline.apply(text)
        assert (applied.is_changed, applied.building, applied.cancelled) == (True, (), 0)
        deployed = await pipeline.deployment.current()
        assert deployed is not None
        assert (deployed.text.source, deployed.version.hash) == (text, applied.hash)
        assert [job.name for job in deployed.jobs] == ["clean", "feed", "report"]
        assert [list(job.outputs) for job in deployed.jobs] == [["tidy"], ["raw"], ["daily"]]
        assert await pipeline.states("tidy") == ["current"]
        assert await world.value("SELECT count(*) FROM edge") == 2
        row = await world.rows(
            "SELECT runtime, operator, timeout_ms, body FROM job_definition"
            " WHERE operator = 'a:clean'"
        )
        assert (row[0]["runtime"], row[0]["timeout_ms"]) == ("process", 3_600_000)
        assert set(row[0]["body"]["datasets"]) == {"raw", "tidy"}

    play(story)


def test_the_same_again_is_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        first = await pipeline.apply(chain())
        again = await pipeline.apply("# A comment.\n" + chain())
        assert (again.version_id, again.hash, again.is_changed) == (
            first.version_id,
            first.hash,
            False,
        )
        assert len(await pipeline.deployment.versions()) == 1

    play(story)


def test_timing_rebuilds_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        before = await pipeline.generations()
        applied = await pipeline.apply(chain(timing="2h"))
        assert applied.is_changed
        assert applied.building == ()
        assert await pipeline.generations() == before
        await pipeline.send("p")
        (task,) = await pipeline.work("a:clean")
        assert task.timeout_ms == 7_200_000
        limited = chain(timing="2h").replace("timeout: 2h", "timeout: 2h\n    max_concurrency: 3")
        await pipeline.apply(limited)
        limit = "SELECT max_concurrency FROM job WHERE name = 'clean'"
        assert await world.value(limit) == 3
        await pipeline.deployment.rollback(applied.version_id)
        assert await world.value(limit) is None

    play(story)


def queried(clean: str, report: str = "SELECT * FROM tidy") -> str:
    """The chain, with queries for functions."""
    text = chain(clean=clean, report=report).replace("runtime: process", "runtime: spark")
    for name in ("clean", "report"):
        text = text.replace(
            f"operator: a:{name}\n    config: {{v: ", "operator: spark.sql\n    config: {sql: "
        )
    return text


def test_comments_and_layout_of_a_query_rebuild_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(queried("SELECT a FROM raw"))
        first = await pipeline.generations()
        # Each is an edit of the one before; what runs is the text as it was applied last.
        for text in (
            '"SELECT a -- why\\nFROM raw"',
            '"/* x */ SELECT a  FROM raw"',
            "SELECT  a FROM raw",
        ):
            applied = await pipeline.apply(queried(text))
            assert (applied.is_changed, applied.building) == (True, ())
            assert await pipeline.generations() == first
        await pipeline.send("p")
        (task,) = await pipeline.work("spark.sql")
        assert task.definition["config"]["sql"] == "SELECT  a FROM raw"
        # An edit downstream is built of the same input, and what it takes back is there again.
        await pipeline.apply(queried("SELECT a FROM  raw", "SELECT b FROM tidy"))
        assert changed(first, await pipeline.generations()) == ["report"]
        back = await pipeline.apply(queried("SELECT a   FROM raw", "SELECT *  FROM tidy"))
        assert back.building == ()
        assert await pipeline.generations() == first
        await pipeline.apply(queried("SELECT a, b FROM raw"))
        assert changed(first, await pipeline.generations()) == ["clean", "report"]

    play(story)


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        (chain(clean="2"), ["clean", "report"]),
        (chain(report="2"), ["report"]),
        (chain(extra=SINK), ["mail"]),
    ],
)
def test_the_edited_part_gets_a_new_generation(play: Play, text: str, edited: list[str]) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        before = await pipeline.generations()
        applied = await pipeline.apply(text)
        after = await pipeline.generations()
        assert changed(before, after) == edited
        rebuilt = [name for name in edited if name != "mail"]
        assert applied.building == tuple(rebuilt)
        if "report" in edited:
            assert await pipeline.states("daily") == ["building", "current"]
            assert await pipeline.state("daily", after["report"]) == "building"

    play(story)


def test_a_building_generation_that_is_edited_again_is_abandoned(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.apply(chain(report="2"))
        second = await pipeline.generations()
        await pipeline.apply(chain(report="3"))
        assert await pipeline.states("daily") == ["abandoned", "building", "current"]
        assert await pipeline.state("daily", second["report"]) == "abandoned"

    play(story)


def test_what_an_edit_takes_back_is_the_current_generation(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        first = await pipeline.generations()
        await pipeline.apply(chain(report="2"))
        applied = await pipeline.apply(chain(report="1", extra=SINK))
        assert changed(first, await pipeline.generations()) == ["mail"]
        assert applied.building == ()
        assert await pipeline.states("daily") == ["abandoned", "current"]

    play(story)


def test_a_removed_job_keeps_its_data(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        text = chain()
        await pipeline.apply(text)
        before = await pipeline.generations()
        await pipeline.send("p")
        await pipeline.work("a:clean")
        await pipeline.work("a:report")
        shorter = text[: text.index("  report:")]
        await pipeline.apply(shorter)
        assert await pipeline.states("daily") == ["current"]
        assert await world.value("SELECT count(*) FROM publication") == 2
        await pipeline.send("q")
        await pipeline.work("a:clean")
        assert await pipeline.open_tasks() == []
        # Back again, it has its data, and what it has missed.
        await pipeline.apply(shorter + text[text.index("  report:") :] + SINK)
        after = await pipeline.generations()
        assert after["report"] == before["report"]
        await pipeline.route()
        assert await pipeline.select("status = 'queued' AND job.name = 'report'") == [
            ("report", "q")
        ]

    play(story)


def test_work_that_would_be_broken_refuses_the_change(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        text = chain()
        await pipeline.apply(text)
        before = await pipeline.generations()
        await pipeline.send("p", "q", "r")
        await pipeline.work("a:clean")
        (running,) = await pipeline.tasks.claim_next("a:report", worker="w")
        shorter = text[: text.index("  report:")]
        refused = await pipeline.try_apply(shorter)
        assert refused == DagNotApplied(
            WhyNotApplied.BREAKS, (ObsoletedWork("report", before["report"], 2, 1, 0),)
        )
        assert await pipeline.generations() == before
        assert len(await pipeline.deployment.versions()) == 1
        forced = await pipeline.apply(shorter, force=True)
        assert forced.cancelled == 2
        assert await pipeline.open_tasks() == [("report", running.payload["partition_key"])]
        (extended,) = await pipeline.tasks.heartbeat([running.fence])
        assert getattr(extended, "cancel_asked", False)

    play(story)


def test_work_of_a_job_that_was_gone_before_is_not_broken_by_the_change(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        text = chain()
        await pipeline.apply(text)
        await pipeline.send("p")
        await pipeline.work("a:clean")
        (claimed,) = await pipeline.tasks.claim_next("a:report", worker="w")
        await pipeline.tasks.fail([Failure(claimed.fence, "broken", False)])
        await pipeline.apply(text[: text.index("  report:")])
        await pipeline.tasks.replay([claimed.task_id])
        later = chain(timing="2h")
        assert (await pipeline.apply(later[: later.index("  report:")])).cancelled == 0
        assert await pipeline.open_tasks() == [("report", "p")]

    play(story)


def test_an_edit_of_a_job_with_work_breaks_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.send("p")
        assert (await pipeline.apply(chain(clean="2"))).cancelled == 0
        assert await pipeline.open_tasks() == [("clean", "p")]
        # The one that is being built has work, and is edited again.
        await pipeline.send("q")
        building = (await pipeline.generations())["clean"]
        refused = await pipeline.try_apply(chain(clean="3"))
        assert isinstance(refused, DagNotApplied)
        assert refused.breaks == (ObsoletedWork("clean", building, 1, 0, 0),)
        assert (await pipeline.apply(chain(clean="3"), force=True)).cancelled == 1
        assert await pipeline.open_tasks() == [("clean", "p"), ("clean", "q")]

    play(story)


def test_a_backfill_is_work(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.apply(chain(report="2"))
        job = await pipeline.job("report")
        await plan_backfill(world, job)
        refused = await pipeline.try_apply(chain(report="3"))
        assert isinstance(refused, DagNotApplied)
        assert refused.breaks == (ObsoletedWork("report", job.generation, 0, 0, 1),)
        await pipeline.apply(chain(report="3"), force=True)
        assert await world.value("SELECT state FROM backfill") == "cancelled"

    play(story)


async def plan_backfill(world: World, job: DeployedJob) -> None:
    await world.rows(
        "INSERT INTO backfill (definition_id, generation, plan, partitions, concurrency_max)"
        " VALUES (%s, %s, '{}', 1, 1)",
        job.definition_id,
        job.generation,
    )


def test_a_dataset_that_gets_another_writer(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        text = chain()
        await pipeline.apply(text)
        await pipeline.send("p")
        await pipeline.work("a:clean")
        renamed = text.replace("  report:", "  other:")
        refused = await pipeline.try_apply(renamed)
        assert isinstance(refused, DagNotApplied)
        assert [each.job for each in refused.breaks] == ["report"]
        assert (await pipeline.apply(renamed, force=True)).building == ("other",)
        assert await pipeline.states("daily") == ["building", "current"]
        await pipeline.send("q")
        await pipeline.work("a:clean")
        assert await pipeline.open_tasks() == [("other", "q")]
        (done,) = await pipeline.work("a:report")
        assert done.job == "other"
        assert await world.value("SELECT count(*) FROM publication WHERE location <> ''") == 3

    play(story)


def test_a_job_that_loses_one_of_its_datasets(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        both = chain().replace("[daily]", "[daily, weekly]")
        first = await pipeline.apply(both)
        old = await pipeline.generations()
        await pipeline.send("p")
        await pipeline.work("a:clean")
        other = SINK.replace("mail", "other") + "    outputs: [weekly]\n"
        parted = chain(extra=other)
        refused = await pipeline.try_apply(parted)
        assert isinstance(refused, DagNotApplied)
        assert refused.breaks == (ObsoletedWork("report", old["report"], 1, 0, 0),)
        forced = await pipeline.apply(parted, force=True)
        assert (forced.cancelled, forced.building) == (1, ("other", "report"))
        # What could not publish all of its outputs any more is not made.
        await pipeline.send("q")
        await pipeline.work("a:clean")
        new = await pipeline.generations()
        rows = await world.rows(
            "SELECT generation::text FROM task WHERE status = 'queued' ORDER BY job_id"
        )
        assert [row["generation"] for row in rows] == [new["report"], new["other"]]
        await pipeline.deployment.rollback(first.version_id)
        await pipeline.route()
        assert await pipeline.open_tasks() == [("report", "p"), ("report", "q")]
        assert len(await pipeline.work("a:report")) == 2
        assert await world.value("SELECT count(*) FROM publication") == 6

    play(story)


def test_a_heartbeat_that_the_schema_cannot_hold(play: Play) -> None:
    async def story(world: World) -> None:
        # Not one that was parsed: the check of the file says it first, with the line.
        dag = parse(chain(), "dag")
        slow = dataclasses.replace(dag.jobs[0], heartbeat_timeout_ms=86_400_001)
        with pytest.raises(InvalidInput, match="longer than a day"):
            await Pipeline(world).deployment.apply(Dag((slow, *dag.jobs[1:])), chain())

    play(story)


def test_rollback_brings_the_retired_generation_back(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        first = await pipeline.apply(chain())
        old = await pipeline.generations()
        await pipeline.send("before")
        await pipeline.work("a:clean")
        await pipeline.work("a:report")
        await pipeline.apply(chain(report="2"))
        new = await pipeline.generations()
        # Built anew: the partition that was there.
        await pipeline.backfills.turn()
        assert await pipeline.open_tasks() == [("report", "before")]
        await pipeline.work("a:report")
        assert await pipeline.backfills.turn() is not None
        daily = (await pipeline.job("report")).outputs["daily"]
        assert await pipeline.deployment.cut_over(daily) is CutOverOutcome.DONE
        assert await pipeline.state("daily", old["report"]) == "retired"
        await pipeline.send("after")
        await pipeline.work("a:clean")
        assert await pipeline.open_tasks() == [("report", "after")]
        back = await pipeline.deployment.rollback(first.version_id)
        assert isinstance(back, DagApplied)
        assert (back.is_changed, back.building, back.cancelled) == (True, (), 1)
        assert await pipeline.generations() == old
        assert await pipeline.state("daily", old["report"]) == "current"
        assert await pipeline.state("daily", new["report"]) == "retired"
        assert await pipeline.open_tasks() == []
        # What came since is routed to what is back; what it has had already is not.
        assert await pipeline.route() == 1
        assert await pipeline.open_tasks() == [("report", "after")]
        again = await pipeline.deployment.rollback(first.version_id)
        assert isinstance(again, DagApplied)
        assert not again.is_changed
        # Forward again: what was cancelled on the way is made again.
        forward = await pipeline.apply(chain(report="2"), force=True)
        assert forward.version_id == first.version_id + 1
        assert await pipeline.generations() == new
        assert await pipeline.state("daily", new["report"]) == "current"
        await pipeline.route()
        # What it was built of has its task.
        assert await pipeline.open_tasks() == [("report", "after")]

    play(story)


async def build(pipeline: Pipeline, name: str, *partitions: str) -> None:
    """Publish partitions in the generation of a job that the DAG names."""
    job = await pipeline.job(name)
    (dataset,) = job.outputs.values()
    await pipeline.world.rows(
        "INSERT INTO publication (dataset_id, generation, partition_key, mode, task_id, attempt,"
        " location) SELECT %s, %s, unnest(%s::text[]), 'replace', 1, 1, 's3://b/y'",
        dataset,
        job.generation,
        list(partitions),
    )


def test_rollback_from_a_generation_that_is_being_built(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        first = await pipeline.apply(chain())
        old = await pipeline.generations()
        await pipeline.apply(chain(clean="2"))
        new = await pipeline.generations()
        await pipeline.send("p")
        assert await pipeline.open_tasks() == [("clean", "p"), ("clean", "p")]
        back = await pipeline.deployment.rollback(first.version_id)
        assert isinstance(back, DagApplied)
        assert back.cancelled == 1
        assert await pipeline.generations() == old
        assert await pipeline.state("tidy", new["clean"]) == "abandoned"
        assert await pipeline.open_tasks() == [("clean", "p")]
        # To build it after all makes the cancelled task again, as part of its rebuild.
        await pipeline.apply(chain(clean="2"))
        assert await pipeline.state("tidy", new["clean"]) == "building"
        assert await pipeline.route() == 0
        await pipeline.backfills.turn()
        assert await pipeline.open_tasks() == [("clean", "p"), ("clean", "p")]

    play(story)


def test_a_running_task_may_go_on_when_its_generation_is_back(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        first = await pipeline.apply(chain())
        second = await pipeline.apply(chain(clean="2"))
        await pipeline.send("p")
        generation = (await pipeline.generations())["clean"]
        claimed = await pipeline.tasks.claim_next("a:clean", worker="w", limit=2)
        (running,) = [each for each in claimed if each.generation == generation]
        await pipeline.deployment.rollback(first.version_id)
        (asked,) = await pipeline.tasks.heartbeat([running.fence])
        assert getattr(asked, "cancel_asked", None) is True
        await pipeline.deployment.rollback(second.version_id)
        (allowed,) = await pipeline.tasks.heartbeat([running.fence])
        assert getattr(allowed, "cancel_asked", None) is False

    play(story)


def test_rollback_replays_what_was_audited(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        first = await pipeline.apply(chain())
        await pipeline.send("p")
        (late,) = await pipeline.tasks.claim_next("a:clean", worker="w")
        await pipeline.apply(chain(clean="2"))
        await pipeline.forget_rebuilds()
        tidy = (await pipeline.job("clean")).outputs["tidy"]
        assert await pipeline.deployment.cut_over(tidy) is CutOverOutcome.DONE
        await pipeline.finish(late)
        events = await world.rows("SELECT routed, why_not FROM event ORDER BY seq")
        assert [row["routed"] for row in events] == ["routed", "audited"]
        assert events[1]["why_not"] == "This generation is retired."
        await pipeline.deployment.rollback(first.version_id)
        await pipeline.route()
        assert await pipeline.open_tasks() == [("report", "p")]

    play(story)


def test_a_version_that_is_not_there(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        assert await pipeline.deployment.rollback(7) == DagNotApplied(WhyNotApplied.UNKNOWN)

    play(story)


def test_going_back_is_to_what_was_in_force_before(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        deployment = pipeline.deployment
        assert await deployment.previous() is None
        assert await deployment.rollback() == DagNotApplied(WhyNotApplied.NONE)
        for number in ("1", "2", "3"):
            await pipeline.apply(chain(report=number))
            # The same again is not another time in force.
            await pipeline.apply(chain(report=number))
            if number == "1":
                assert await deployment.rollback() == DagNotApplied(WhyNotApplied.FIRST)
        assert await deployment.previous() == 2
        world.later(60)
        await deployment.rollback(1)
        for expected in (3, 1, 3):
            moved = await deployment.rollback()
            assert isinstance(moved, DagApplied)
            assert moved.version_id == expected
        assert await deployment.previous() == 1
        latest, second, first = await deployment.versions()
        assert latest.since == first.since
        assert latest.since is not None
        assert second.since is not None
        assert second.since < latest.since
        current = await deployment.current()
        assert current is not None
        assert current.version.since == latest.since

    play(story)


def test_what_is_foreseen_happens_and_changes_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        deployment = pipeline.deployment

        async def dump() -> Sequence[Any]:
            asked = "SELECT version, state FROM generation ORDER BY version"
            versions = "SELECT id, hash FROM dag_version ORDER BY id"
            tasks = "SELECT id, status, cancel_asked FROM task ORDER BY id"
            return [await world.rows(each) for each in (asked, versions, tasks)]

        first = await deployment.foresee(parse(chain(), "dag.yaml"))
        assert (first.version_id, first.is_changed, first.before) == (None, True, None)
        await pipeline.apply(chain())
        await pipeline.send("p")
        gone = chain()[: chain().index("  clean:")]
        before = await dump()
        edited = await deployment.foresee(parse(chain(clean="2"), "dag.yaml"))
        assert (edited.building, edited.breaks) == (("clean", "report"), ())
        broken = await deployment.foresee(parse(gone, "dag.yaml"))
        assert [(each.job, each.waiting) for each in broken.breaks] == [("clean", 1)]
        same = await deployment.foresee(parse(chain(), "dag.yaml"))
        assert (same.version_id, same.is_changed) == (1, False)
        assert await dump() == before
        applied = await pipeline.apply(chain(clean="2"))
        assert isinstance(applied, DagApplied)
        # The number was not used up.
        assert (applied.version_id, applied.building, applied.before) == (2, edited.building, 1)
        before = await dump()
        back = await deployment.foresee_rollback()
        assert isinstance(back, DagPreview)
        assert (back.version_id, back.building, back.before) == (1, (), 2)
        assert await deployment.foresee_rollback(9) == DagNotApplied(WhyNotApplied.UNKNOWN)
        assert await dump() == before

    play(story)


def test_versions_are_listed_latest_first(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        for number in ("1", "2", "3"):
            await pipeline.apply(chain(report=number))
        versions = await pipeline.deployment.versions(limit=2)
        assert [each.is_current for each in versions] == [True, False]
        assert versions[0].id > versions[1].id
        await pipeline.deployment.rollback(versions[1].id)
        versions = await pipeline.deployment.versions()
        assert [each.is_current for each in versions] == [False, True, False]
        with pytest.raises(InvalidInput):
            await pipeline.deployment.versions(limit=0)

    play(story)


def test_cut_over_waits_for_what_it_needs(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        daily = (await pipeline.job("report")).outputs["daily"]
        cut_over = pipeline.deployment.cut_over
        assert await cut_over(daily) is CutOverOutcome.NOTHING
        assert await cut_over("00000000-0000-0000-0000-000000000000") is CutOverOutcome.UNKNOWN
        await pipeline.send("p", "q")
        await pipeline.work("a:clean")
        await pipeline.work("a:report")
        await pipeline.apply(chain(report="2"))
        assert await cut_over(daily) is CutOverOutcome.BACKFILL
        await pipeline.forget_rebuilds()
        assert await cut_over(daily) is CutOverOutcome.UNCOVERED
        await build(pipeline, "report", "p")
        assert await cut_over(daily) is CutOverOutcome.UNCOVERED
        await build(pipeline, "report", "q")
        await plan_backfill(world, await pipeline.job("report"))
        assert await cut_over(daily) is CutOverOutcome.BACKFILL
        await world.rows("UPDATE backfill SET state = 'done', position = 1 WHERE plan = '{}'")
        await world.rows(
            "INSERT INTO task (job_id, definition_id, generation, dedupe_key, operator, priority,"
            " payload, attempt_limit, due_at, backfill_id) SELECT job_id, definition_id,"
            " generation, 'b', 'o', 'normal', '{}', 1, penstock_now(), 1 FROM dag_job"
            " WHERE generation = %s",
            (await pipeline.job("report")).generation,
        )
        assert await cut_over(daily) is CutOverOutcome.BACKFILL
        await world.rows(
            "UPDATE task SET status = 'cancelled', settled_at = penstock_now(), reason = 'x'"
            " WHERE backfill_id IS NOT NULL"
        )
        assert await cut_over(daily) is CutOverOutcome.DONE
        assert await pipeline.states("daily") == ["current", "retired"]
        assert not (await pipeline.job("report")).is_building
        assert await cut_over(daily) is CutOverOutcome.NOTHING

    play(story)


def test_all_outputs_of_a_job_are_cut_over_together(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        texts = [chain(report=n).replace("[daily]", "[daily, weekly]") for n in ("1", "2")]
        await pipeline.apply(texts[0])
        await pipeline.apply(texts[1])
        outputs = (await pipeline.job("report")).outputs
        assert await pipeline.deployment.cut_over(outputs["weekly"]) is CutOverOutcome.DONE
        assert await pipeline.states("daily") == ["current", "retired"]
        assert await pipeline.states("weekly") == ["current", "retired"]

    play(story)


def test_cut_over_cancels_what_waits_for_the_old_generation(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.send("p")
        await pipeline.apply(chain(clean="2"))
        await pipeline.forget_rebuilds()
        await pipeline.send("q")
        assert len(await pipeline.open_tasks()) == 3
        tidy = (await pipeline.job("clean")).outputs["tidy"]
        assert await pipeline.deployment.cut_over(tidy) is CutOverOutcome.DONE
        assert await pipeline.open_tasks() == [("clean", "q")]

    play(story)


def test_two_apply_the_same(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        found = await asyncio.gather(*(pipeline.apply(chain()) for _ in range(5)))
        assert sorted(each.is_changed for each in found) == [False] * 4 + [True]
        assert len({each.version_id for each in found}) == 1
        texts = [chain(clean=str(number)) for number in range(2, 7)]
        await asyncio.gather(*(pipeline.apply(text) for text in texts))
        assert await pipeline.states("tidy") == ["abandoned"] * 4 + ["building", "current"]

    play(story)


async def hold_routing(connection: Connection) -> None:
    """What a router does before it routes: events in hand, and their generations."""
    await connection.execute(b"SELECT FROM event WHERE routed = 'pending' FOR NO KEY UPDATE")
    await connection.execute(
        b"SELECT FROM generation WHERE (dataset_id, version) IN"
        b" (SELECT dataset_id, generation FROM event) FOR SHARE"
    )


def test_apply_waits_for_what_is_being_routed(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.routing.accept([await pipeline.event("p")])
        async with asyncio.TaskGroup() as group, world.database.transaction() as other:
            await hold_routing(other)
            applying = group.create_task(pipeline.apply(chain(clean="2")))
            await world.until_waiting()
            (seq,) = await (await other.execute(b"SELECT seq FROM event")).fetchall()
            await route_events(other, [seq["seq"]])
        assert applying.result().building == ("clean", "report")
        # It was routed under the DAG before, and wholly so.
        assert await pipeline.open_tasks() == [("clean", "p")]
        await pipeline.send("q")
        assert await pipeline.open_tasks() == [("clean", "p"), ("clean", "q"), ("clean", "q")]

    play(story)


@pytest.mark.parametrize("is_cut_over", [True, False])
def test_what_arrives_during_a_move_sees_the_move(play: Play, is_cut_over: bool) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        old = await pipeline.generations()
        await pipeline.apply(chain(clean="2"))
        tidy = (await pipeline.job("clean")).outputs["tidy"]
        event = await pipeline.event("p", dataset=tidy, generation=old["clean"])
        async with asyncio.TaskGroup() as group, world.unfinished(is_kept=is_cut_over) as other:
            moving = Deployer(other._database)
            assert await moving.cut_over(tidy) is CutOverOutcome.DONE
            accepting = group.create_task(pipeline.routing.accept([event]))
            await world.until_waiting()
        (answer,) = accepting.result()
        assert isinstance(answer, AcceptedEvent)
        assert answer.outcome == ("audited" if is_cut_over else "new")
        assert await pipeline.route() == (0 if is_cut_over else 1)

    play(story)


def test_cut_over_sees_what_was_published_while_it_waited(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.send("p")
        (claimed,) = await pipeline.tasks.claim_next("a:clean", worker="w")
        await pipeline.apply(chain(clean="2"))
        await pipeline.forget_rebuilds()
        tidy = (await pipeline.job("clean")).outputs["tidy"]
        async with asyncio.TaskGroup() as group, world.unfinished() as other:
            output = TaskOutput(dataset=tidy, location="s3://b/x", partition_key="p")
            await other.complete([Completion(claimed.fence, (output,))])
            cutting = group.create_task(pipeline.deployment.cut_over(tidy))
            await world.until_waiting()
        assert cutting.result() is CutOverOutcome.UNCOVERED

    play(story)


def test_rollback_while_events_come_and_tasks_end(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        first = await pipeline.apply(chain())
        second = await pipeline.apply(chain(clean="2"))
        names = [str(number) for number in range(60)]

        async def bring() -> None:
            for name in names:
                await pipeline.send(name)

        async def labour() -> None:
            for _ in range(60):
                await pipeline.work("a:clean", most=3)

        async def move() -> None:
            for number in range(12):
                to = first if number % 2 == 0 else second
                await pipeline.deployment.rollback(to.version_id)

        await asyncio.gather(bring(), labour(), labour(), move())
        await pipeline.deployment.rollback(first.version_id)
        for _ in range(3):
            await pipeline.route()
            await pipeline.work("a:clean")
        await pipeline.route()
        generation = (await pipeline.generations())["clean"]
        found = await world.rows(
            "SELECT payload ->> 'partition_key' AS part, count(*) AS n FROM task"
            " WHERE generation = %s AND status = 'completed' GROUP BY 1",
            generation,
        )
        assert {row["part"]: row["n"] for row in found} == dict.fromkeys(names, 1)

    play(story)


def test_a_rollback_computes_again_what_a_rebuild_had_passed_by(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        for name in ("one", "two", "three"):
            await pipeline.routing.accept([await pipeline.event(name, partition_key="p")])
            await pipeline.route()
            await pipeline.work("a:clean")
            await pipeline.work("a:report")
        tidy = (await pipeline.job("clean")).outputs["tidy"]
        for config in ("2", "3"):
            await pipeline.apply(chain(clean=config))
            for _ in range(2):
                await pipeline.backfills.turn()
                await pipeline.work("a:clean")
                await pipeline.work("a:report")
            assert await pipeline.deployment.cut_over(tidy) is CutOverOutcome.DONE
        # It was built of the latest, and has missed nothing since.
        await pipeline.deployment.rollback(2)
        assert await pipeline.route() == 0
        await pipeline.deployment.rollback(3)
        await pipeline.routing.accept([await pipeline.event("four", partition_key="p")])
        await pipeline.routing.accept([await pipeline.event("five", partition_key="p")])
        await pipeline.route()
        await pipeline.work("a:clean")
        await pipeline.deployment.rollback(2)
        assert await pipeline.route() == 1

    play(story)


def test_a_job_without_outputs_that_comes_back_gets_all_that_ever_was(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.send("a", "b", "c")
        await pipeline.work("a:clean")
        world.later(60)
        await pipeline.apply(chain(extra=SINK))
        world.later(60)
        await pipeline.deployment.rollback(1)
        await pipeline.send("d")
        await pipeline.work("a:clean")
        await pipeline.deployment.rollback(2)
        await pipeline.route()
        mails = [task for task in await pipeline.open_tasks() if task[0] == "mail"]
        assert mails == [("mail", "d")]

    play(story)


@either_way
def test_nobody_is_told_of_tasks_that_a_higher_limit_lets_run(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)

        def text(limit: str) -> str:
            return chain().replace("    timeout: 1h", f"    timeout: 1h{limit}")

        one, two = "\n    max_concurrency: 1", "\n    max_concurrency: 2"
        await pipeline.apply(text(one))
        await pipeline.send("a", "b", "c")
        assert len(await pipeline.tasks.claim_next("a:clean", worker="w", limit=9)) == 1
        await world.wakes()
        await pipeline.apply(text(two))
        assert await world.wakes() == ["a:clean/normal"]
        await pipeline.deployment.rollback(1)
        assert await world.wakes() == []
        await pipeline.deployment.rollback(2)
        assert await world.wakes() == ["a:clean/normal"]
        await pipeline.apply(text(""))
        assert await world.wakes() == ["a:clean/normal"]
        await pipeline.apply(chain(timing="2h"))
        assert await world.wakes() == []

    play(story)


def sinking(update: str = "update: append") -> str:
    return f"""
jobs:
  write:
    runtime: sink
    operator: sink.write
    {update}
    outputs: [{{name: alerts, buffered: true, columns: {{id: string}}}}, rejected]
"""


@pytest.mark.parametrize("what", ["nothing", "rows", "batches"])
def test_rows_that_a_sink_has_accepted_keep_their_generation(play: Play, what: str) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(sinking())
        sink = await pipeline.job("write")
        if what == "rows":
            await world.rows(
                "INSERT INTO publication (dataset_id, generation, partition_key, mode, task_id,"
                " attempt, location) VALUES (%s, %s::uuid, '', 'append', 1, 1, 'l')",
                sink.outputs["alerts"],
                sink.generation,
            )
        elif what == "batches":
            await world.rows(
                "INSERT INTO buffer_batch (dataset_id, partition_key, task_id, attempt, batch_id,"
                " digest, format, location, place, bytes, state)"
                " VALUES (%s, '', 1, 1, 'b', repeat('0', 64), 'jsonl', 'l', 'p', 1, 'held')",
                sink.outputs["alerts"],
            )
        # How it judges rows is no matter of generations.
        await pipeline.apply(sinking("update: append\n    config: {max_rows: 5}"))
        merging = sinking("update: merge\n    unique_key: [id]")
        if what == "nothing":
            await pipeline.apply(merging)
            return
        for change in (
            pipeline.try_apply(merging, force=True),
            pipeline.deployment.foresee(parse(merging, "dag")),
        ):
            with pytest.raises(InvalidInput, match="has accepted rows for alerts"):
                await change
        # One that leaves the DAG, and comes back as it was, has them.
        await pipeline.apply(chain())
        await pipeline.apply(sinking())
        assert (await pipeline.job("write")).generation == sink.generation

    play(story)
