"""Always-on sources: one task each, whatever happens to it, on a real Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.dispatcher.deployment_plan import CutOverOutcome
from penstock.dispatcher.sources.monitor import DOUBLED, SourceMonitor, SourceState
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.tasks.model import (
    ClaimedTask,
    Completion,
    ExtendedLease,
    Failure,
    NewTask,
    Release,
)
from tests.integration.dispatcher.test_deployment import Pipeline, chain
from tests.integration.dispatcher.world import Play, World, failed

STREAM = """
jobs:
  feed:
    activation: source
    source: {{kind: {kind}}}
    {runs}
    outputs: [raw]
"""


def stream(*, topic: int = 1, heartbeat: str = "1m", kind: str = "always_on") -> str:
    runs = (
        f"runtime: process\n    operator: a:feed\n    config: {{topic: {topic}}}\n"
        f"    heartbeat_timeout: {heartbeat}\n"
        "    retry: {first: 10s, max: 5m, backoff: 2}"
    )
    return STREAM.format(kind=kind, runs=runs if kind == "always_on" else "")


def monitor(world: World) -> SourceMonitor:
    return SourceMonitor(world.database, world.tasks)


async def settle(world: World) -> None:
    """Have the monitor do all that there is to do."""
    for _ in range(5):
        if await monitor(world).turn() is None:
            return
    raise AssertionError("the monitor does not come to an end")


async def states(world: World) -> list[tuple[str, int]]:
    return [(each.state.value, each.restarts) for each in await monitor(world).status()]


async def open_count(world: World) -> int:
    found = await world.value(
        "SELECT count(*) FROM task WHERE status IN ('queued', 'retrying', 'running')"
    )
    assert isinstance(found, int)
    return found


async def claim(world: World) -> ClaimedTask:
    (claimed,) = await world.tasks.claim_next("a:feed", worker="w", limit=5)
    return claimed


def test_a_source_gets_one_task_and_keeps_it(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        assert await monitor(world).turn() is None
        assert await states(world) == []
        await pipeline.apply(stream())
        assert await states(world) == [("pending", 0)]
        assert await monitor(world).turn() == 0.0
        assert await world.wakes() == ["a:feed/normal"]
        await settle(world)
        (pending,) = await monitor(world).status()
        assert (pending.job, pending.state, pending.attempt) == ("feed", SourceState.PENDING, 0)
        claimed = await claim(world)
        assert pending.task_id == claimed.task_id
        assert claimed.definition["source"]["kind"] == "always_on"
        await settle(world)
        assert await states(world) == [("running", 0)]
        await world.tasks.end([Release(claimed.fence, "The worker was stopped.")])
        await settle(world)
        assert await states(world) == [("pending", 0)], "no restart: the next worker takes it"
        claimed = await claim(world)
        assert (claimed.task_id, claimed.attempt) == (pending.task_id, 2)
        await world.tasks.fail([Failure(claimed.fence, "lost the stream")])
        assert await states(world) == [("restarting", 0)]
        await settle(world)
        assert await open_count(world) == 1

    play(story)


def test_one_that_dies_is_made_anew_after_a_pause_that_grows(play: Play) -> None:
    async def story(world: World) -> None:
        await Pipeline(world).apply(stream())
        await settle(world)
        pauses = []
        for restarts in range(4):
            world.later(600)
            claimed = await claim(world)
            await world.tasks.fail([Failure(claimed.fence, "broken", is_retried=False)])
            assert await states(world) == [("dead", restarts)]
            (dead,) = await monitor(world).status()
            assert dead.reason == "broken"
            await settle(world)
            assert await states(world) == [("restarting", restarts + 1)]
            pauses.append(
                await world.value(
                    "SELECT extract(epoch FROM due_at - penstock_now())::float"
                    " FROM task WHERE status = 'queued'"
                )
            )
            assert await world.tasks.claim_next("a:feed", worker="w") == ()
        for pause, expected in zip(pauses, (10, 20, 40, 80), strict=True):
            assert 0.75 * expected <= pause <= 1.25 * expected + 0.001
        # After a quiet hour it begins anew with a short pause.
        world.later(600)
        claimed = await claim(world)
        world.later(7200)
        await world.tasks.complete([Completion(claimed.fence)])
        await settle(world)
        assert await open_count(world) == 1
        world.later(12.6)
        assert await states(world) == [("pending", 4 + 1)]

    play(story)


def test_the_pause_counts_from_the_end_not_from_when_it_was_seen(play: Play) -> None:
    async def story(world: World) -> None:
        await Pipeline(world).apply(stream())
        await settle(world)
        claimed = await claim(world)
        await world.tasks.fail([Failure(claimed.fence, "x", is_retried=False)])
        world.later(60)
        await settle(world)
        assert await states(world) == [("pending", 1)]

    play(story)


def test_any_number_of_monitors_make_one_task(play: Play) -> None:
    async def story(world: World) -> None:
        await Pipeline(world).apply(stream())
        for restarts in range(3):
            await asyncio.gather(*[monitor(world).turn() for _ in range(8)])
            assert await open_count(world) == 1
            world.later(1000)
            claimed = await claim(world)
            await world.tasks.fail([Failure(claimed.fence, "x", is_retried=False)])
            assert await states(world) == [("dead", restarts)]

    play(story)


def test_a_monitor_that_was_slow_makes_nothing_twice(play: Play) -> None:
    """It has seen the end of a task, and by the time it acts the next one is over too."""

    async def story(world: World) -> None:
        await Pipeline(world).apply(stream())
        seen = asyncio.Event()
        go_on = asyncio.Event()

        class SlowTasks(Tasks):
            async def create(self, new: Sequence[NewTask]) -> tuple[int | None, ...]:
                seen.set()
                await go_on.wait()
                return await super().create(new)

        slow = SourceMonitor(world.database, SlowTasks(world.database))
        async with asyncio.TaskGroup() as group:
            group.create_task(slow.turn())
            await seen.wait()
            await settle(world)
            claimed = await claim(world)
            await world.tasks.fail([Failure(claimed.fence, "x", is_retried=False)])
            await settle(world)
            go_on.set()
        assert await open_count(world) == 1
        assert await world.value("SELECT count(*) FROM task") == 2

    play(story)


def test_a_source_that_leaves_the_dag_is_drained(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(stream())
        await settle(world)
        claimed = await claim(world)
        other = chain().replace("feed", "other").replace("raw", "new")
        # Applying asks it to stop, unless somebody has it in hand at that moment.
        async with world.unfinished() as busy:
            await busy.heartbeat([claimed.fence])
            await pipeline.apply(other, force=True)
        assert await world.value("SELECT cancel_asked FROM task") is False
        await settle(world)
        assert await states(world) == [("draining", 0)]
        (extended,) = await world.tasks.heartbeat([claimed.fence])
        assert getattr(extended, "cancel_asked", None) is True
        await world.tasks.fail([Failure(claimed.fence, "stopped")])
        await settle(world)
        assert (await states(world), await open_count(world)) == ([], 0)

    play(story)


def test_while_it_is_rebuilt_the_earlier_one_goes_on(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(stream())
        await settle(world)
        old = await claim(world)
        await pipeline.apply(stream(topic=2))
        await settle(world)
        assert await states(world) == [("running", 0), ("pending", 0)]
        new = await claim(world)
        assert (old.definition["config"], new.definition["config"]) == ({"topic": 1}, {"topic": 2})
        feed = await pipeline.job("feed")
        assert await pipeline.deployment.cut_over(feed.outputs["raw"]) is CutOverOutcome.DONE
        await settle(world)
        assert await states(world) == [("draining", 0), ("running", 0)]
        await world.tasks.fail([Failure(old.fence, "stopped")])
        await settle(world)
        assert await states(world) == [("running", 0)]

    play(story)


def test_a_source_of_another_kind_goes_on_until_it_is_replaced(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(stream())
        await settle(world)
        await pipeline.apply(stream(kind="manual"), force=True)
        await settle(world)
        assert await states(world) == [("pending", 0)]
        feed = await pipeline.job("feed")
        assert await pipeline.deployment.cut_over(feed.outputs["raw"]) is CutOverOutcome.DONE
        await settle(world)
        assert (await states(world), await open_count(world)) == ([], 0)

    play(story)


def test_a_new_definition_of_the_same_data_restarts_it_at_once(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(stream())
        await settle(world)
        # One that waits is replaced.
        await pipeline.apply(stream(heartbeat="2m"))
        await settle(world)
        claimed = await claim(world)
        assert claimed.heartbeat_ms == 120_000
        # One that runs is asked to stop first: never two at a time.
        await pipeline.apply(stream(heartbeat="3m"))
        await settle(world)
        assert await states(world) == [("draining", 0)]
        assert await open_count(world) == 1
        await world.tasks.fail([Failure(claimed.fence, "stopped")])
        await settle(world)
        assert (await claim(world)).heartbeat_ms == 180_000

    play(story)


def test_a_dead_source_that_is_replayed_runs_twice(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(stream())
        await settle(world)
        first = await claim(world)
        await world.tasks.fail(failed(first.fence, is_retried=False))
        await settle(world)
        world.later(3600)
        await world.tasks.replay([first.task_id])
        again = await world.tasks.claim(first.task_id, worker="w")
        assert isinstance(again, ClaimedTask)
        assert await open_count(world) == 2
        await settle(world)
        (told,) = await world.tasks.heartbeat([again.fence])
        assert isinstance(told, ExtendedLease)
        assert told.cancel_asked
        await world.tasks.fail(failed(again.fence))
        await settle(world)
        assert await open_count(world) == 1
        reason = await world.value("SELECT reason FROM task WHERE id = %s", first.task_id)
        assert reason == DOUBLED

    play(story)
