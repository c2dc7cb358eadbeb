"""Jobs that wait for all of their inputs, and inputs that are only read, on a real Postgres."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.dispatcher.backfills import Backfills
from penstock.dispatcher.events import NewEvent
from penstock.dispatcher.router import Router, route_events
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.tasks.model import ClaimedTask, Completion, TaskOutput
from tests.integration.dispatcher.test_deployment import Pipeline
from tests.integration.dispatcher.world import Play, World


def dag(
    *, inputs: str = "[raw, more, planes]", version: int = 1, when: str = "all", extra: str = ""
) -> str:
    return f"""
jobs:
  feed: {{activation: source, source: {{kind: manual}}, outputs: [raw]}}
  second: {{activation: source, source: {{kind: manual}}, outputs: [more]}}
  third: {{activation: source, source: {{kind: manual}}, outputs: [planes]}}
  join:
    runtime: process
    operator: a:join
    config: {{v: {version}}}
    inputs: {inputs}
    when: {when}
    outputs: [joined]
{extra}"""


@dataclass
class Waiting(Pipeline):
    """A world with a job of three inputs."""

    count: itertools.count[int] = field(default_factory=itertools.count)

    async def new(self, job: str, key: str | None, **fields: Any) -> NewEvent:
        found = await self.job(job)
        (dataset,) = found.outputs.values()
        number = next(self.count)
        place = {"partition_key": key} if key is not None else {"cursor": number}
        return NewEvent(
            event_id=f"{job} {number}",
            dataset=dataset,
            generation=found.generation,
            **{**place, **fields},
        )

    async def bring(self, *events: tuple[str, str | None]) -> list[str | None]:
        """Bring events, route them, and tell the partitions of the tasks that there are since."""
        before = await self.world.value("SELECT count(*) FROM task")
        await self.routing.accept([await self.new(job, key) for job, key in events])
        await self.route()
        rows = await self.world.rows(
            "SELECT payload ->> 'partition_key' AS part FROM task ORDER BY id OFFSET %s", before
        )
        return [row["part"] for row in rows]


def test_the_last_input_makes_the_task(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag())
        assert await waiting.bring(("feed", "a"), ("feed", "b")) == []
        assert await waiting.bring(("second", "b")) == []
        assert await waiting.bring(("third", "b")) == ["b"]
        assert await waiting.bring(("third", "a")) == []
        assert await waiting.bring(("second", "a")) == ["a"]
        # From then on each is news.
        assert await waiting.bring(("feed", "a")) == ["a"]
        assert await waiting.bring(("third", "b"), ("second", "b")) == ["b", "b"]
        routed = await world.rows("SELECT DISTINCT routed FROM event")
        assert [row["routed"] for row in routed] == ["routed"]

    play(story)


@pytest.mark.parametrize("order", list(itertools.permutations(["feed", "second", "third"])))
def test_what_comes_at_once_is_one_task(play: Play, order: tuple[str, ...]) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag())
        assert await waiting.bring(*((job, "a") for job in order)) == ["a"]

    play(story)


def test_what_has_no_partition_is_there_for_all(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag())
        assert await waiting.bring(("third", None)) == []
        assert await waiting.bring(("feed", "a")) == []
        assert await waiting.bring(("second", "a")) == ["a"]
        # Another of it is no news for partitions, and the others have nothing that is whole.
        assert await waiting.bring(("third", None)) == []
        assert await waiting.bring(("feed", None), ("second", None)) == [None]

    play(story)


def test_what_has_no_partition_comes_last(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag())
        assert await waiting.bring(("feed", "a"), ("feed", "b"), ("feed", "c")) == []
        assert await waiting.bring(("second", "a"), ("second", "a"), ("third", "c")) == []
        # It frees what waits for it alone: b misses another input.
        assert await waiting.bring(("second", "c")) == ["c"]
        assert await waiting.bring(("third", None), ("third", None)) == ["a"]
        assert await waiting.bring(("second", "b")) == ["b"]
        assert await waiting.bring(("third", None)) == []
        (freed,) = await world.rows(
            "SELECT event_seq AS seq, payload FROM task WHERE payload ->> 'partition_key' = 'a'"
        )
        assert freed["payload"]["event"] == freed["seq"]

    play(story)


def test_all_in_one_turn_and_the_whole_in_between(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag())
        found = await waiting.bring(
            ("feed", "a"), ("second", "a"), ("feed", "b"), ("third", None), ("second", "b")
        )
        assert sorted(str(each) for each in found) == ["a", "b"]

    play(story)


def test_what_does_not_pass_is_not_there(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        inputs = "[raw, {from: more, where: 'partition_key glob \"a*\"'}]"
        await waiting.apply(dag(inputs=inputs))
        assert await waiting.bring(("second", "b"), ("feed", "b"), ("feed", "a1")) == []
        assert await waiting.bring(("second", "a1")) == ["a1"]
        assert await waiting.bring(("third", "b")) == []

    play(story)


def test_the_whole_that_does_not_pass_frees_nothing_and_bars_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag(inputs="[raw, {from: planes, where: 'cursor >= 10'}]"))
        assert await waiting.bring(("feed", "a")) == []
        for cursor in (5, 12, 13):
            await waiting.routing.accept([await waiting.new("third", None, cursor=cursor)])
            await waiting.route()
            made = [("join", "a")] if cursor > 10 else []
            assert await waiting.open_tasks() == made

    play(story)


def test_a_partition_that_does_not_pass_waits_for_the_whole(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        inputs = "[raw, {from: planes, where: 'partition_key glob \"x*\" or cursor >= 0'}]"
        await waiting.apply(dag(inputs=inputs))
        assert await waiting.bring(("feed", "a"), ("third", "a")) == []
        assert await waiting.bring(("third", None)) == ["a"]

    play(story)


@pytest.mark.parametrize("order", [("second", "third"), ("third", "second")])
def test_two_that_are_whole_come_at_once_and_last(play: Play, order: tuple[str, str]) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag())
        assert await waiting.bring(("feed", "a"), ("feed", "b")) == []
        found = await waiting.bring(*((job, None) for job in order))
        assert sorted(str(each) for each in found) == ["a", "b"]

    play(story)


def test_a_partition_and_then_the_whole_at_once_are_one_task(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag(inputs="[raw, planes]"))
        assert await waiting.bring(("feed", "a"), ("feed", "b")) == []
        found = await waiting.bring(("third", "a"), ("third", None))
        assert sorted(str(each) for each in found) == ["a", "b"]

    play(story)


def test_what_a_paused_source_has_sent_is_not_there_yet(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag(inputs="[raw, more]"))
        await world.rows(
            "INSERT INTO pause (job_id, cause, scope, reason)"
            " SELECT id, 'operator', 'all', 'Not now.' FROM job WHERE name = 'second'"
            " RETURNING job_id"
        )
        assert await waiting.bring(("second", "a"), ("feed", "a")) == []
        await world.rows("DELETE FROM pause RETURNING job_id")
        assert await waiting.bring() == ["a"]

    play(story)


def test_what_is_only_read_makes_nothing_run(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        inputs = "[raw, more, {from: planes, trigger: false, read: all}]"
        await waiting.apply(dag(inputs=inputs))
        assert await waiting.bring(("third", "a"), ("third", None), ("feed", "a")) == []
        assert await waiting.bring(("second", "a")) == ["a"]
        assert await waiting.bring(("third", "a")) == []
        rows = await world.rows("SELECT input, is_trigger, reads FROM edge ORDER BY input")
        assert [tuple(row.values()) for row in rows] == [
            ("more", True, "partition"),
            ("planes", False, "all"),
            ("raw", True, "partition"),
        ]
        await waiting.apply(dag(inputs="[raw, {from: more, trigger: false}]", when="any"))
        await waiting.forget_rebuilds()
        assert await waiting.bring(("feed", "z"), ("second", "y")) == ["z"]

    play(story)


FAN_IN = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  left: {runtime: process, operator: "a:left", inputs: [raw], outputs: [l]}
  right: {runtime: process, operator: "a:right", inputs: [raw], outputs: [r]}
  both: {runtime: process, operator: "a:both", inputs: [l, r], when: all, outputs: [b]}
"""


def published(task: ClaimedTask, name: str, key: str | None) -> list[Completion]:
    dataset = task.definition["datasets"][name]
    output = TaskOutput(dataset=dataset, location=f"s3://b/{name}", partition_key=key)
    return [Completion(task.fence, (output,))]


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("keys", [("p", "p"), ("p", None), (None, "p"), (None, None)])
def test_two_inputs_are_published_at_once(
    play: Play, keys: tuple[str | None, str | None], is_kept: bool
) -> None:
    """Neither sees the other when it begins; still exactly one task is made."""

    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(FAN_IN)
        await pipeline.send("p")
        (left,) = await pipeline.tasks.claim_next("a:left", worker="w")
        (right,) = await pipeline.tasks.claim_next("a:right", worker="w")
        async with asyncio.TaskGroup() as group, world.unfinished(is_kept=is_kept) as other:
            await Tasks(other._database, route=route_events).complete(published(left, "l", keys[0]))
            second = group.create_task(pipeline.tasks.complete(published(right, "r", keys[1])))
            await world.until_waiting()
            assert not second.done()
        part = keys[0] if keys[1] is None else keys[1]
        assert await pipeline.select("job.name = 'both'") == [("both", part)] * is_kept
        await pipeline.tasks.complete(published(left, "l", keys[0]))
        assert await pipeline.select("job.name = 'both'") == [("both", part)]

    play(story)


@pytest.mark.parametrize("keys", [("p", "p"), ("p", None), (None, "p")])
def test_two_routers_have_an_input_each(play: Play, keys: tuple[str | None, str | None]) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag(inputs="[raw, more]"))
        await waiting.routing.accept([await waiting.new("feed", keys[0])])
        async with asyncio.TaskGroup() as group, world.unfinished() as other:
            assert (await Router(other._database).route()).tasks == 0
            await waiting.routing.accept([await waiting.new("second", keys[1])])
            second = group.create_task(waiting.routing.route())
            await world.until_waiting()
        assert second.result().tasks == 1
        assert await waiting.open_tasks() == [("join", "p")]

    play(story)


def test_other_partitions_do_not_wait_for_each_other(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag(inputs="[raw, more]"))
        await waiting.bring(("second", "a"), ("second", "b"))
        await waiting.routing.accept([await waiting.new("feed", "a")])
        async with world.unfinished() as other:
            assert (await Router(other._database).route()).tasks == 1
            await waiting.routing.accept([await waiting.new("feed", "b")])
            assert (await waiting.routing.route()).tasks == 1

    play(story)


async def rebuilt(world: World) -> list[str | None]:
    """Let the rebuilds make their tasks; the partitions of those, sorted."""
    for _ in range(20):
        await Backfills(world.database).turn()
    rows = await world.rows(
        "SELECT payload ->> 'partition_key' AS part FROM task WHERE backfill_id IS NOT NULL"
    )
    return sorted((row["part"] for row in rows), key=str)


def test_a_rebuild_makes_what_all_inputs_have(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag())
        keys = ("a", "b", "c")
        await waiting.bring(*((job, key) for job in ("feed", "second") for key in keys))
        await waiting.bring(("feed", "a"), ("third", "a"), ("third", "b"), ("feed", "d"))
        await waiting.work("a:join")
        await waiting.apply(dag(version=2))
        # Once, however many inputs there are, and not what never was complete.
        assert await rebuilt(world) == ["a", "b"]
        assert await waiting.bring(("third", "c")) == ["c", "c"]

    play(story)


def test_a_rebuild_goes_by_what_triggers(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        inputs = "[raw, {from: planes, trigger: false}]"
        await waiting.apply(dag(inputs=inputs, when="any"))
        await waiting.bring(("third", "x"), ("feed", "a"), ("third", None))
        await waiting.work("a:join")
        await waiting.apply(dag(inputs=inputs, when="any", version=2))
        assert await rebuilt(world) == ["a"]
        (plan,) = (await waiting.backfills.list()).backfills
        assert plan.partitions == 1

    play(story)


def test_what_comes_back_catches_up_once(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        first = await waiting.apply(dag())
        await waiting.bring(("feed", "a"), ("second", "a"), ("third", "a"), ("feed", "b"))
        await waiting.work("a:join")
        await waiting.apply(dag(version=2))
        await waiting.forget_rebuilds()
        await world.rows(
            "UPDATE generation SET state = 'retired' WHERE state = 'current'"
            " AND dataset_id = (SELECT id FROM dataset WHERE name = 'joined')"
            " RETURNING version"
        )
        await world.rows(
            "UPDATE generation SET state = 'current' WHERE state = 'building' RETURNING version"
        )
        assert await waiting.bring(("third", "b"), ("second", "b")) == ["b"]
        await waiting.deployment.rollback(first.version_id)
        # What had its task is left alone; what was missed is made.
        assert await waiting.bring() == ["b"]

    play(story)


def test_updates_are_merged_into_the_task_that_waits(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag(inputs="[raw, more]", extra="    merge_updates: true\n"))
        assert await waiting.bring(("feed", "a"), ("second", "a")) == ["a"]
        assert await waiting.bring(("feed", "a"), ("second", "a")) == []
        (task,) = await waiting.work("a:join")
        assert task.payload["inputs"] == ["more", "raw"]

    play(story)
