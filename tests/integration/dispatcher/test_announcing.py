"""Work that may begin at once is announced after its commit, without rows of the outbox."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.events import AcceptedEvent
from penstock.dispatcher.router import AT_ONCE_MAX, route_events
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.tasks.model import ClaimedTask, Completion, Failure, TaskOutput
from penstock.dispatcher.tasks.rows import create_tasks
from penstock.kernel.errors import InvalidInput
from tests.integration.dispatcher.test_deployment import Pipeline, chain
from tests.integration.dispatcher.world import Play, World

WORK = ("operator", "normal")


@dataclass
class Announcements:
    """What was announced of a world, and whether it was kept for who has made it."""

    world: World
    heard: list[tuple[set[tuple[str, str]], bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world.database.announce = self

    def __call__(self, woken: Collection[tuple[str, str]], *, is_kept: bool) -> None:
        self.heard.append((set(woken), is_kept))

    async def taken(self) -> list[tuple[set[tuple[str, str]], bool]]:
        """What was announced since; nothing is ever written of what may begin at once."""
        rows = await self.world.rows(
            "SELECT target FROM outbox WHERE kind IN ('wake', 'invoke')"
            " AND due_at <= penstock_now()"
        )
        assert rows == []
        heard, self.heard = self.heard, []
        return heard


def test_new_tasks_are_announced_once_they_are_there(play: Play) -> None:
    async def story(world: World) -> None:
        job, function = await world.job(), await world.job("function", runtime="lambda")
        announced = Announcements(world)
        await world.tasks.create([job.new("one"), job.new("two"), function.new("three")])
        assert await announced.taken() == [({WORK}, False)]
        # Equal ones are there already, and what is undone was never there.
        await world.tasks.create([job.new("one")])
        with pytest.raises(InvalidInput):
            await world.tasks.create([job.new("four"), job.new("x" * 5000)])
        assert await announced.taken() == []

    play(story)


def test_what_may_be_committed_is_announced_though_its_caller_has_left(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        announced = Announcements(world)

        async def leave(connection: Connection) -> None:
            await create_tasks(connection, [job.new("one")])
            raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await world.database.transact(leave)
        assert await announced.taken() == [({WORK}, False)]

    play(story)


def test_a_claim_announces_what_it_leaves_behind_and_no_more(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        other = await world.job("other", priority="bulk", max_concurrency=1)
        await job.make("one", "two", "three")
        announced = Announcements(world)
        assert len(await world.tasks.claim_next("operator", worker="w", limit=2)) == 2
        assert await announced.taken() == [({WORK}, False)]
        assert len(await world.tasks.claim_next("operator", worker="w", limit=2)) == 1
        assert await announced.taken() == []
        await other.make("four", "five")
        announced.heard.clear()
        assert len(await world.tasks.claim_next("operator", worker="w", limit=1)) == 1
        # There is no room for the second one until the first has ended.
        assert await announced.taken() == []

    play(story)


def test_a_retry_has_a_row_and_a_freed_limit_has_none(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_concurrency=1)
        first = await job.claimed()
        await job.make("two")
        announced = Announcements(world)
        await world.tasks.fail([Failure(first.fence, "It broke.")])
        assert await announced.taken() == [({WORK}, False)]
        rows = await world.rows("SELECT target FROM outbox WHERE kind = 'wake'")
        assert [row["target"] for row in rows] == ["operator/normal"]

    play(story)


def test_what_the_end_of_an_attempt_makes_may_be_kept(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.send("a", "b")
        await world.wakes()
        announced = Announcements(world)
        tasks = Tasks(world.database, route=route_events)
        (one, two) = await tasks.claim_next("a:clean", worker="w", limit=2)
        for task, claims_next in ((one, True), (two, False)):
            await tasks.end([_completion(task)], claims_next=claims_next)
        heard = await announced.taken()
        assert [is_kept for _, is_kept in heard] == [True, False]
        assert heard[0][0]
        assert heard[0][0] == heard[1][0]

    play(story)


def test_a_few_events_that_come_alone_are_routed_at_once(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        announced = Announcements(world)
        routing = pipeline.routing
        (found,) = await routing.accept([await pipeline.event("a")], at_once=True)
        assert isinstance(found, AcceptedEvent)
        assert found.is_routed
        assert await pipeline.open_tasks() == [("clean", "a")]
        assert await announced.taken() == [({("a:clean", "normal")}, False)]
        assert await pipeline.route() == 0
        # Again, it is known; and many are left to a router.
        (again,) = await routing.accept([await pipeline.event("a")], at_once=True)
        assert isinstance(again, AcceptedEvent)
        assert not again.is_routed
        many = [await pipeline.event(f"m{number}") for number in range(AT_ONCE_MAX + 1)]
        answers = await routing.accept(many, at_once=True)
        assert not any(each.is_routed for each in answers if isinstance(each, AcceptedEvent))
        assert await pipeline.route() == len(many)

    play(story)


def test_what_waits_for_a_source_or_for_room_is_not_routed_at_once(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        routing = pipeline.routing
        await world.rows(
            "INSERT INTO pause (job_id, cause, scope, reason)"
            " SELECT id, 'operator', 'all', 'Not now.' FROM job WHERE name = 'feed' RETURNING 1"
        )
        (paused,) = await routing.accept([await pipeline.event("a")], at_once=True)
        assert isinstance(paused, AcceptedEvent)
        assert not paused.is_routed
        assert await pipeline.open_tasks() == []
        await world.rows("DELETE FROM pause RETURNING 1")
        await world.rows("UPDATE job SET max_queue_depth = 4 WHERE name = 'clean' RETURNING id")
        (held,) = await routing.accept([await pipeline.event("b")], at_once=True)
        assert isinstance(held, AcceptedEvent)
        assert not held.is_routed
        assert await pipeline.route() == 2

    play(story)


def _completion(task: ClaimedTask) -> Completion:
    key = task.payload["partition_key"]
    names = [each if isinstance(each, str) else each["name"] for each in task.definition["outputs"]]
    datasets = [task.definition["datasets"][name] for name in names]
    places = [TaskOutput(dataset=each, location="s3://b/x", partition_key=key) for each in datasets]
    return Completion(task.fence, tuple(places))
