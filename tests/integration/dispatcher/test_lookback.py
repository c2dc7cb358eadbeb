"""Jobs that read what lies before their partition, and are run again when it changes.

A change of a day is late for the days after it whose window has it: each of those that the job has
made before is made again, once however many days are late, and whatever is routed at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatcher.events import AcceptedEvent, EventRefusalReason, RefusedEvent
from penstock.dispatcher.router import Router, route_events
from penstock.dispatcher.tasks.completion import end
from penstock.dispatcher.tasks.model import ClaimedTask, Completion, TaskOutput
from penstock.protocol.steering import BackfillAsk
from tests.integration.dispatcher.crews import Crew, drawn
from tests.integration.dispatcher.test_deployment import Pipeline
from tests.integration.dispatcher.test_keeping import keep_all, published
from tests.integration.dispatcher.world import Play, World, failed

FIRST = datetime(2026, 1, 1, tzinfo=UTC)


def dag(*, back: str = "3d", v: int = 1, more: str = "", inputs: str = "", keep: str = "") -> str:
    return f"""
jobs:
  feed:
    activation: source
    source: {{kind: manual}}
    outputs: [raw]
  clean:
    runtime: process
    operator: a:clean
    inputs: [raw]
    outputs: [{{name: tidy{keep}}}]
  moving:
    runtime: process
    operator: a:moving
    config: {{v: {v}}}
    inputs: [{{from: tidy, lookback: {back}}}{inputs}]
    outputs: [averages]
{more}"""


def day(number: int) -> str:
    """The key of a day, from 1."""
    return f"{FIRST + timedelta(days=number - 1):%Y-%m-%d}"


class Days(Pipeline):
    """A pipeline whose partitions are days."""

    async def tell(self, *numbers: int, turn: str = "a") -> None:
        """Days of the source are new; all in one call, then routed."""
        events = [await self.event(f"{turn}{n}", partition_key=day(n)) for n in numbers]
        assert all(isinstance(each, AcceptedEvent) for each in await self.routing.accept(events))
        await self.route()

    async def publish(self, *numbers: int, turn: str = "a") -> None:
        """Days of the input are published, each in a turn of its own."""
        for each in numbers:
            await self.tell(each, turn=turn)
            await self.work("a:clean")

    async def waiting(self) -> list[str]:
        rows = await self.world.rows(
            "SELECT payload ->> 'partition_key' AS key FROM task WHERE operator = 'a:moving'"
            " AND status = 'queued' ORDER BY id"
        )
        return [row["key"] for row in rows]

    async def claim(self) -> ClaimedTask:
        (found,) = await self.tasks.claim_next("a:moving", worker="w")
        return found

    async def finish_all(self, claimed: Sequence[ClaimedTask]) -> None:
        """In one call, as workers do."""
        await self.tasks.complete([completion(each) for each in claimed])


def completion(claimed: ClaimedTask) -> Completion:
    """What the job `clean` says of its day."""
    output = TaskOutput(
        dataset=claimed.definition["datasets"]["tidy"],
        location="s3://b/x",
        partition_key=claimed.payload["partition_key"],
    )
    return Completion(claimed.fence, (output,))


def read(claimed: ClaimedTask) -> list[str]:
    """The partitions that a task is given."""
    return [each["partition_key"] for each in claimed.inputs["tidy"]["parts"]]


def days(numbers: Sequence[int]) -> list[str]:
    return [day(each) for each in numbers]


def test_a_task_reads_its_own_day_and_those_before_it_that_there_are(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag())
        await it.publish(1, 2, 3, 5, 6)
        found = {each.payload["partition_key"]: read(each) for each in await it.work("a:moving")}
        assert found == {
            day(1): days([1]),
            day(2): days([1, 2]),
            day(3): days([1, 2, 3]),
            day(5): days([2, 3, 5]),
            day(6): days([3, 5, 6]),
        }

    play(story)


def test_days_that_came_before_anybody_looked_back_are_looked_back_at(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag().replace(", lookback: 3d", ""))
        await it.tell(1)
        (first,) = await it.tasks.claim_next("a:clean", worker="w")
        # As workers write it: what is in the place of an attempt is swept by that.
        said = completion(first)
        place = f"s3://b/datasets/tidy/g/{day(1)}/1-1-{'a' * 24}"
        await it.tasks.complete(
            [replace(said, outputs=(replace(said.outputs[0], location=place),))]
        )
        await it.publish(2)
        await it.work("a:moving")
        # One runs and one waits, here and upstream, while the DAG changes.
        await it.tell(3, 4)
        (running,) = await it.tasks.claim_next("a:clean", worker="w")
        await it.tell(5)
        await it.apply(dag())
        assert await it.backfills.turn() is not None
        await it.finish(running)
        await it.work("a:clean")
        ours = (await it.generations())["moving"]
        made = [each for each in await it.work("a:moving") if each.generation == ours]
        found = {each.payload["partition_key"]: read(each) for each in made}
        assert found[day(1)] == days([1])
        assert found[day(2)] == days([1, 2])
        assert found[day(5)] == days([2, 3, 4, 5])

    play(story)


def test_days_that_are_only_looked_back_at_have_ranges_too(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        night = """  night:
    activation: source
    source: {kind: manual}
    outputs: [nights]
"""
        text = dag(more=night, inputs=", {from: nights}")
        await it.apply(text.replace("lookback: 3d", "lookback: 3d, trigger: false"))
        await it.publish(1, 2)
        told = await it.event("n", **await dataset(it, "nights"), partition_key=day(2))
        assert isinstance((await it.routing.accept([told]))[0], AcceptedEvent)
        await it.route()
        assert read(await it.claim()) == days([1, 2])
        # One that is no part of the calendar is taken, since nothing runs for it.
        other = await it.event("other")
        assert isinstance((await it.routing.accept([other]))[0], AcceptedEvent)

    play(story)


async def dataset(it: Days, name: str) -> dict[str, str]:
    (row,) = await it.world.rows(
        "SELECT dataset.id::text AS dataset, version::text AS generation FROM dataset"
        " JOIN generation ON dataset_id = dataset.id WHERE name = %s",
        name,
    )
    return row


def test_late_days_make_the_days_after_them_again_and_each_of_them_once(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag())
        await it.publish(1, 2, 3, 4, 5, 6)
        assert len(await it.work("a:moving")) == 6
        # In the order of time there is nothing late.
        assert await it.waiting() == []
        await it.publish(2, turn="b")
        assert sorted(await it.waiting()) == days([2, 3, 4, 5])
        # A burst: each of these is late for several, and each day is one task.
        await it.publish(1, 2, 3, turn="c")
        assert sorted(await it.waiting()) == days([1, 2, 3, 4, 5, 6])
        again = await it.work("a:moving")
        assert [read(each) for each in again if each.payload["partition_key"] == day(6)] == [
            days([3, 4, 5, 6])
        ]
        assert await it.waiting() == []
        # A day that nobody has made is made when it comes, and not before.
        await it.publish(6, turn="d")
        assert await it.waiting() == days([6])

    play(story)


def test_what_comes_in_one_turn_with_the_day_itself_is_one_task(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag())
        await it.publish(1, 2, 3)
        await it.work("a:moving")
        await it.tell(1, 2, 3, turn="b")
        claimed = await it.tasks.claim_next("a:clean", worker="w", limit=3)
        await it.finish_all(claimed)
        assert sorted(await it.waiting()) == days([1, 2, 3])

    play(story)


def test_what_runs_is_made_again_after_it(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag())
        await it.publish(2)
        running = await it.claim()
        assert read(running) == days([2])
        await it.publish(1)
        assert sorted(await it.waiting()) == days([1, 2])
        await it.finish(running)
        found = {each.payload["partition_key"]: read(each) for each in await it.work("a:moving")}
        assert found[day(2)] == days([1, 2])

    play(story)


def test_what_fails_and_is_tried_again_takes_nothing_from_the_later_task(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag())
        await it.publish(2)
        earlier = await it.claim()
        await it.tasks.fail(failed(earlier.fence))
        # It has been attempted: what is late is a task of its own, whose output counts.
        await it.publish(1)
        assert sorted(await it.waiting()) == days([1, 2])

    play(story)


def test_two_at_once_never_both_miss_the_other(play: Play) -> None:
    """Day 1 and day 2 are published at the same time: day 2 must not be made without day 1."""

    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag())
        await it.tell(1, 2)
        first, second = await it.tasks.claim_next("a:clean", worker="w", limit=2)
        async with asyncio.TaskGroup() as group, world.database.transaction() as connection:
            await end(connection, [completion(first)], route=route_events)
            group.create_task(it.tasks.complete([completion(second)]))
            # It waits: were it routed now, neither would know of the other.
            await world.until_waiting()
        made = {each.payload["partition_key"]: read(each) for each in await it.work("a:moving")}
        assert made == {day(1): days([1]), day(2): days([1, 2])}
        await it.tell(1, 2, turn="b")
        second, first = sorted(
            await it.tasks.claim_next("a:clean", worker="w", limit=2),
            key=lambda each: each.payload["partition_key"],
            reverse=True,
        )
        await it.finish(second)
        ahead = await it.claim()
        assert read(ahead) == days([1, 2])
        await it.finish(first)
        assert sorted(await it.waiting()) == days([1, 2])

    play(story)


def test_what_only_looks_back_is_read_and_makes_nothing_run(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        text = dag().replace("lookback: 3d}", "lookback: 3d, trigger: false}, raw")
        await it.apply(text)
        await it.publish(1, 2)
        assert [read(each) for each in await it.work("a:moving")] == [days([1]), days([1, 2])]
        await it.publish(1, turn="b")
        assert await it.waiting() == days([1])

    play(story)


def test_who_waits_for_all_is_made_again_only_where_all_was_there(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        other = """
  second:
    activation: source
    source: {kind: manual}
    outputs: [more]
"""
        await it.apply(dag(more=other, inputs=", more").replace("v: 1}", "v: 1}\n    when: all"))
        second = await it.job("second")
        more = {"dataset": second.outputs["more"], "generation": second.generation}
        await it.publish(1, 2, 3)
        await it.routing.accept([await it.event("m2", partition_key=day(2), **more)])
        await it.route()
        assert await it.waiting() == days([2])
        await it.work("a:moving")
        await it.publish(1, turn="b")
        assert await it.waiting() == days([2])

    play(story)


def test_a_rebuild_makes_each_day_once_of_all_that_is_there(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag())
        await it.publish(3, 2, 1)
        await it.work("a:moving")
        await it.apply(dag(v=2))
        assert await it.backfills.turn() is not None
        made = await it.work("a:moving")
        assert sorted((each.payload["partition_key"], read(each)) for each in made) == [
            (day(1), days([1])),
            (day(2), days([1, 2])),
            (day(3), days([1, 2, 3])),
        ]
        # What is late while it is built reaches both generations.
        await it.publish(1, turn="b")
        assert sorted(await it.waiting()) == sorted(days([1, 2, 3]) * 2)

    play(story)


def test_what_was_late_when_a_generation_left_is_made_when_it_is_back(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag())
        await it.publish(1, 2)
        await it.work("a:moving")
        await it.publish(1, turn="b")
        ours = await it.claim()
        assert ours.payload["partition_key"] == day(1)
        await it.finish(ours)
        assert await it.waiting() == days([2])
        # The generation leaves with what waits, and comes back.
        await it.apply(dag().split("  moving:")[0], force=True)
        assert await it.waiting() == []
        await it.apply(dag())
        await it.route()
        assert day(2) in await it.waiting()

    play(story)


def test_a_backfill_looks_back_too_and_waits_for_nothing_late(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag())
        await it.publish(1, 2, 3)
        await it.work("a:moving")
        await it.backfills.create(BackfillAsk(job="moving", keys=[day(3)]))
        await it.backfills.turn()
        # The backfill's task is the newest of the day, and runs; what is late comes after it.
        running = await it.claim()
        assert read(running) == days([1, 2, 3])
        await it.publish(1, turn="b")
        assert day(3) in await it.waiting()

    play(story)


def test_what_a_waiting_task_looks_back_at_is_kept(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag(keep=", keep: {partitions: 1}"))
        await it.publish(1, 2, 3, 4, 5)
        await it.work("a:moving")
        await it.publish(5, turn="b")
        await keep_all(world)
        assert await published(world) == days([2, 3, 4, 5])

    play(story)


@pytest.mark.parametrize("fields", [{"partition_key": "some"}, {"cursor": 4}], ids=str)
def test_what_has_no_range_is_refused(play: Play, fields: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag().replace("runtime: process", "runtime: spark"))
        event = await it.event("e", **fields)
        (answer,) = await Router(world.database).accept([event])
        assert isinstance(answer, RefusedEvent)
        assert answer.why is EventRefusalReason.NO_RANGE
        assert "'moving' downstream (lookback) works on ranges" in answer.detail

    play(story)


def test_the_ends_of_numbers_are_no_fault(play: Play) -> None:
    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag())
        for name, start in (("low", -(2**63)), ("high", 2**63 - 2)):
            event = await it.event(name, partition_key=name, start=start, end=start + 1)
            await it.routing.accept([event])
        await it.route()
        await it.work("a:clean")
        assert sorted(read(each)[0] for each in await it.work("a:moving")) == ["high", "low"]

    play(story)


DEEDS = st.lists(
    st.tuples(st.sampled_from(["publish", "claim", "finish", "fail"]), st.integers(1, 4)),
    min_size=6,
    max_size=14,
)


@given(DEEDS)
@drawn
def test_results_do_not_depend_on_what_comes_when(play: Play, deeds: Sequence[Any]) -> None:
    """When all is done, what is published of each day was made of what its window has now."""

    async def story(world: World) -> None:
        it = Days(world)
        await it.apply(dag(back="2d"))
        read_by: dict[int, list[tuple[str, int]]] = {}

        async def finish(claimed: ClaimedTask) -> None:
            parts = claimed.inputs["tidy"]["parts"]
            read_by[claimed.task_id] = [(each["partition_key"], each["revision"]) for each in parts]
            await it.finish(claimed)

        crew = Crew(it, "a:moving", finish)
        for number, (deed, which) in enumerate(deeds):
            if deed == "publish":
                await it.publish(which, turn=f"{number}-")
            else:
                await crew.do(deed, which)
        await crew.drain()
        there = await heads(world, "tidy", "revision")
        made = await heads(world, "averages", "task_id")
        assert {key: read_by[task_id] for key, task_id in made.items()} == {
            key: [(each, there[each]) for each in window(key) if each in there] for key in there
        }

    play(story)


async def heads(world: World, dataset: str, column: str) -> dict[str, int]:
    """What is published of a dataset: a number of each partition."""
    rows = await world.rows(
        f"SELECT partition_key, publication.{column} AS number FROM publication"
        " JOIN dataset ON dataset.id = dataset_id WHERE name = %s",
        dataset,
    )
    return {row["partition_key"]: row["number"] for row in rows}


def window(key: str) -> list[str]:
    """A day and the two before it."""
    place = datetime.fromisoformat(key)
    return [f"{place - timedelta(days=back):%Y-%m-%d}" for back in (2, 1, 0)]
