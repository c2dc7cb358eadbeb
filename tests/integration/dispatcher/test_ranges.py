"""The operators of the dispatcher itself, on a real Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.dispatcher.database.pool import Connection, query
from penstock.dispatcher.events import NewEvent
from penstock.dispatcher.range_operators import RangeOperators, run
from penstock.dispatcher.router import route_events
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.tasks.model import ExtendedLease, Fence, Refusal
from penstock.protocol.steering import BackfillAsk
from tests.integration.dispatcher.test_deployment import Pipeline
from tests.integration.dispatcher.world import Play, World

RANGES = """
jobs:
  feed:
    activation: source
    source: {kind: manual}
    outputs: [raw]
  second:
    activation: source
    source: {kind: manual}
    outputs: [raw2]
  cut:
    runtime: dispatcher
    operator: range_split
    config: {size: 10}
    inputs: [raw]
    outputs: [cuts]
  days:
    runtime: dispatcher
    operator: range_aggregate
    config: {size: 20, step: 10}
    inputs:
      - from: raw
        where: partition_key not glob "*test"
      - raw2
    outputs: [windows]
  report:
    runtime: process
    operator: a:report
    inputs: [windows]
    outputs: [daily]
"""


@dataclass
class Ranges(Pipeline):
    """A world with range operators."""

    def operators(self, name: str = "d") -> RangeOperators:
        return RangeOperators(self.world.database, self.tasks, name=name)

    async def bring(self, start: int, end: int, *, job: str = "feed", name: str = "") -> None:
        found = await self.job(job)
        (dataset,) = found.outputs.values()
        count = await self.world.value("SELECT count(*) FROM event")
        event = await self.event(
            f"{job} {count}",
            partition_key=name or f"{start}-{end}",
            start=start,
            end=end,
            dataset=dataset,
            generation=found.generation,
        )
        await self.routing.accept([event])
        await self.route()

    async def published(self, dataset: str) -> dict[str, int]:
        """Partition and revision."""
        rows = await self.world.rows(
            "SELECT partition_key, publication.revision, location FROM publication JOIN dataset"
            " ON dataset.id = dataset_id WHERE name = %s ORDER BY range_start",
            dataset,
        )
        assert all(row["location"] == f"range:{row['partition_key']}" for row in rows)
        return {row["partition_key"]: row["revision"] for row in rows}


async def started(world: World) -> Ranges:
    ranges = Ranges(world)
    await ranges.apply(RANGES)
    return ranges


def test_a_range_is_cut(play: Play) -> None:
    async def story(world: World) -> None:
        ranges = await started(world)
        await ranges.bring(5, 25)
        assert await ranges.operators().turn() is None
        assert await ranges.published("cuts") == {"5-10": 1, "10-20": 1, "20-25": 1}
        # The same range again is news.
        await ranges.bring(5, 25)
        await ranges.operators().turn()
        assert await ranges.published("cuts") == {"5-10": 2, "10-20": 2, "20-25": 2}
        workers = await world.rows("SELECT DISTINCT worker FROM attempt")
        assert [row["worker"] for row in workers] == ["dispatcher:d"]

    play(story)


@pytest.mark.parametrize(
    ("size", "key"), [("day", "2013-01-31"), ("week", "2013-W05"), ("month", "2013-01")]
)
def test_a_window_is_a_part_of_the_calendar(play: Play, size: str, key: str) -> None:
    async def story(world: World) -> None:
        ranges = Ranges(world)
        day = 86_400
        first = 1_356_998_400
        await ranges.apply(RANGES.replace("size: 20, step: 10", f"size: {size}"))
        for job in ("feed", "second"):
            # Half a day is missing until the end, on the last of January.
            await ranges.bring(first - 40 * day, first + 30 * day, job=job)
            await ranges.bring(first + 31 * day, first + 60 * day, job=job)
        await ranges.operators().turn()
        before = await ranges.published("windows")
        assert key not in before
        for job in ("feed", "second"):
            await ranges.bring(first + 30 * day, first + 31 * day, job=job)
        await ranges.operators().turn()
        after = await ranges.published("windows")
        assert {each for each in after if before.get(each) != after[each]} == {key}
        (row,) = await world.rows(
            "SELECT payload FROM task WHERE payload ->> 'partition_key' = %s"
            " AND operator = 'a:report'",
            key,
        )
        assert row["payload"]["start"] < row["payload"]["end"]

    play(story)


def test_a_range_outside_of_the_calendar_is_refused(play: Play) -> None:
    async def story(world: World) -> None:
        ranges = Ranges(world)
        await ranges.apply(RANGES.replace("size: 20, step: 10", "size: year"))
        # Milliseconds, by mistake.
        await ranges.bring(1_356_998_400_000, 1_356_998_401_000, job="second")
        await ranges.operators().turn()
        reason = await world.value("SELECT reason FROM task WHERE status = 'dead'")
        assert "is not in seconds since 1970, or outside of the calendar" in reason

    play(story)


def test_a_window_is_emitted_when_every_input_covers_it(play: Play) -> None:
    async def story(world: World) -> None:
        ranges = await started(world)
        turn = ranges.operators().turn
        await ranges.bring(0, 15)
        await ranges.bring(15, 20)
        await turn()
        assert await ranges.published("windows") == {}
        await ranges.bring(-10, 5, job="second")
        await turn()
        assert await ranges.published("windows") == {}
        await ranges.bring(3, 40, job="second")
        await turn()
        assert await ranges.published("windows") == {"0-20": 1}
        assert await ranges.open_tasks() == [("report", "0-20")]
        (task,) = await ranges.tasks.claim_next("a:report", worker="w")
        assert (task.payload["start"], task.payload["end"]) == (0, 20)
        # A test's range does not count, but the next does.
        await ranges.bring(20, 30, name="a test")
        await turn()
        assert await ranges.published("windows") == {"0-20": 1}
        await ranges.bring(20, 30)
        await turn()
        assert await ranges.published("windows") == {"0-20": 1, "10-30": 1}
        # Only those windows that a recomputed range is part of are news.
        await ranges.bring(0, 5)
        await turn()
        assert await ranges.published("windows") == {"0-20": 2, "10-30": 1}

    play(story)


def test_the_same_news_is_one_publication(play: Play) -> None:
    async def story(world: World) -> None:
        ranges = await started(world)
        await ranges.bring(0, 20)
        await ranges.bring(0, 10, job="second")
        await ranges.bring(10, 20, job="second")
        # Three tasks that all see the whole, done by several dispatchers at once.
        turns = [ranges.operators(str(number)).turn() for number in range(4)]
        await asyncio.gather(*turns)
        assert await ranges.published("windows") == {"0-20": 1}
        assert await ranges.open_tasks() == [("report", "0-20")]
        assert await world.value("SELECT count(*) FROM task WHERE status = 'completed'") == 4

    play(story)


def test_two_events_that_complete_a_window_at_once(play: Play) -> None:
    async def story(world: World) -> None:
        ranges = await started(world)
        await ranges.bring(0, 20)
        await ranges.operators().turn()
        await ranges.bring(0, 10, job="second")
        (first,) = await ranges.tasks.claim_next("range_aggregate", worker="x")
        async with asyncio.TaskGroup() as group, world.database.transaction() as other:
            # One has looked and seen half of it; the other waits, and then sees all.
            (saying,) = await run(other, [first])
            await ranges.bring(10, 20, job="second")
            turning = group.create_task(ranges.operators().turn())
            await world.until_waiting()
        assert turning.result() is None
        assert getattr(saying, "outputs", None) == ()
        assert await ranges.published("windows") == {"0-20": 1}

    play(story)


def test_a_dispatcher_that_dies_between_claim_and_end(play: Play) -> None:
    async def story(world: World) -> None:
        ranges = await started(world)
        await ranges.bring(0, 10)
        claimed = await ranges.tasks.claim_next("range_split", worker="dispatcher:dead")
        assert len(claimed) == 1
        await ranges.operators().turn()
        assert await ranges.published("cuts") == {}
        # The first look of a reaper is after an outage, and ends nothing.
        await ranges.tasks.reap()
        world.later(61)
        reaping = await ranges.tasks.reap(outage_seconds=1000)
        assert [each.worker for each in reaping.reaped] == ["dispatcher:dead"]
        world.later(3600)
        await ranges.operators().turn()
        assert await ranges.published("cuts") == {"0-10": 1}

    play(story)


def test_a_task_that_was_cancelled_publishes_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        ranges = await started(world)
        await ranges.bring(0, 10)
        operators = ranges.operators()
        claimed = await ranges.tasks.claim_next("range_split", worker="dispatcher:d")
        await ranges.tasks.cancel([claimed[0].task_id])

        async def work(connection: Any) -> None:
            await operators._run(connection, claimed)

        await world.database.transact(work)
        assert await ranges.published("cuts") == {}
        assert await world.value("SELECT status FROM task WHERE operator = 'range_split'") == (
            "cancelled"
        )

    play(story)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"start": 0, "end": 5}, "works on ranges, and what came has none"),
        ({"start": 0, "end": 10**9}, "more than 10,000 ranges"),
    ],
)
def test_what_cannot_be_cut_is_dead_at_once(play: Play, fields: dict[str, Any], said: str) -> None:
    async def story(world: World) -> None:
        ranges = await started(world)
        await ranges.routing.accept([await ranges.event("e", partition_key="p", **fields)])
        if "has none" in said:
            # As a function publishes it; what a source sends so is refused.
            await world.rows("UPDATE event SET range_start = NULL, range_end = NULL")
        await ranges.bring(0, 10)
        await ranges.operators().turn()
        rows = await world.rows("SELECT reason FROM task WHERE status = 'dead'")
        assert rows
        assert all(said in row["reason"] for row in rows)
        # The others are not held up.
        assert await ranges.published("cuts") == {"0-10": 1}

    play(story)


def test_ranges_of_any_length_far_from_the_window(play: Play) -> None:
    async def story(world: World) -> None:
        ranges = await started(world)
        await ranges.bring(-(2**63), 2**63 - 1, job="second")
        await ranges.bring(1000, 1020)
        await ranges.operators().turn()
        assert await ranges.published("windows") == {"1000-1020": 1}

    play(story)


def test_a_backfill_of_windows(play: Play) -> None:
    async def story(world: World) -> None:
        ranges = await started(world)
        await ranges.bring(0, 40)
        await ranges.bring(0, 40, job="second")
        await world.rows(
            "UPDATE task SET status = 'cancelled', reason = 'x', settled_at = penstock_now()"
        )
        await ranges.backfills.create(BackfillAsk(job="days", start=0, end=40, step=20))
        await ranges.backfills.turn()
        await ranges.operators().turn()
        assert list(await ranges.published("windows")) == ["0-20", "10-30", "20-40"]

    play(story)


def test_an_edit_of_ranges_is_rebuilt(play: Play) -> None:
    async def story(world: World) -> None:
        ranges = await started(world)
        for start in (0, 10, 20):
            await ranges.bring(start, start + 10)
            await ranges.bring(start, start + 10, job="second")
        await ranges.operators().turn()
        assert list(await ranges.published("windows")) == ["0-20", "10-30"]
        await ranges.apply(RANGES.replace("{size: 20, step: 10}", "{size: 30, step: 30}"))
        await ranges.backfills.turn()
        await ranges.operators().turn()
        job = await ranges.job("days")
        rows = await world.rows(
            "SELECT partition_key, revision FROM publication WHERE generation = %s", job.generation
        )
        assert [tuple(row.values()) for row in rows] == [("0-30", 1)]

    play(story)


def test_a_task_of_many_ranges_takes_the_leases_of_others_with_it(play: Play) -> None:
    """Each batch is a transaction of its own, and who waits for the next is not given up."""

    async def story(world: World) -> None:
        ranges = await started(world)
        for name in ("a", "b", "c"):
            await ranges.bring(0, 60_000, name=name)
        spans: list[int] = []

        class Slow(Tasks):
            async def heartbeat(
                self,
                fences: Sequence[Fence],
                *,
                progress: Mapping[int, Mapping[str, Any]] | None = None,
            ) -> tuple[ExtendedLease | Refusal, ...]:
                spans.append(len(fences))
                world.later(40)
                told = await super().heartbeat(fences, progress=progress)
                assert all(isinstance(each, ExtendedLease) for each in told)
                return told

        # Reapers have been there before, so that nobody holds still.
        await world.tasks.reap()
        slow = Slow(world.database, route=route_events)
        await RangeOperators(world.database, slow, name="d").turn()
        assert spans[:2] == [2, 1]
        assert not (await world.tasks.reap()).reaped
        cut = "SELECT count(*) FROM task WHERE operator = 'range_split' AND status = 'completed'"
        assert await world.value(cut) == 3

    play(story)


@pytest.mark.parametrize("is_analyzed", [False, True])
def test_a_long_range_does_not_make_every_window_look_at_all_events(
    play: Play, is_analyzed: bool
) -> None:
    async def story(world: World) -> None:
        ranges = await started(world)
        for job in ("feed", "second"):
            found = await ranges.job(job)
            (dataset,) = found.outputs.values()
            spans = [(f"{start}", start, start + 10) for start in range(0, 30_000, 10)]
            events = [
                NewEvent(
                    dataset=dataset,
                    generation=found.generation,
                    event_id=name,
                    partition_key=name,
                    start=start,
                    end=end,
                )
                for name, start, end in [*spans, ("long", 0, 30_000)]
            ]
            await ranges.routing.accept(events)
        days = await ranges.job("days")
        starts = list(range(0, 1000, 10))

        async def look(connection: Connection) -> int:
            asked = {
                "definition": days.definition_id,
                "generation": days.generation,
                "starts": starts,
                "ends": [start + 20 for start in starts],
            }
            # As autovacuum does, sooner or later: with what is there, or when there was nothing.
            for step in (
                ("ANALYZE event",)
                if is_analyzed
                else (
                    "CREATE TEMPORARY TABLE kept ON COMMIT DROP AS SELECT * FROM event",
                    "DELETE FROM event",
                    "ANALYZE event",
                    "INSERT INTO event OVERRIDING SYSTEM VALUE SELECT * FROM kept",
                )
            ):
                await connection.execute(step.encode())
            found = await connection.execute(
                b"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) " + query("covered_windows"), asked
            )
            row = await found.fetchone()
            assert row is not None
            return sum(seen_events(row["QUERY PLAN"][0]["Plan"]))

        # Some for each window and input: of the long one, and of those around it.
        assert await world.database.transact(look) < len(starts) * 2 * 20

    play(story)


def seen_events(plan: dict[str, Any]) -> Iterator[int]:
    """How many events each part of a plan has looked at."""
    if plan.get("Relation Name") == "event":
        rows = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
        yield int(rows * plan["Actual Loops"])
    for part in plan.get("Plans", []):
        yield from seen_events(part)
