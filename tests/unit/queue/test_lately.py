"""What a queue has done lately is read from it once, counted once, and remembered for an hour."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from penstock.queue.client import Queue
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.ids import task_at
from penstock.queue.inspection import run_monitor
from penstock.queue.inspection.activity import (
    ActivityReader,
    RecentActivity,
    SettledPack,
    by_minute,
    standing_cost,
    task_cost,
    unread,
    within,
)
from penstock.queue.replay import name_of
from penstock.queue.survey import surveyed
from penstock.queue.worker import Worker
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import World, simulate


@dataclass
class Scene:
    """A queue in memory, on virtual time, and somebody who looks at it."""

    world: World
    queue: Queue
    bucket: MemoryBucket
    meter: Meter
    lately: ActivityReader

    async def wait(self, seconds: float) -> None:
        await self.world.clock().sleep(seconds)

    async def look(self) -> tuple[RecentActivity, int]:
        """What a look shows, and how many objects it has read."""
        survey = await surveyed(self.queue.access)
        self.meter.billed.clear()
        seen = await self.lately.look(self.queue.access, survey)
        return seen, self.meter.requests(kind=Kind.GET, label="inspect")

    @asynccontextmanager
    async def working(self) -> AsyncIterator[Worker]:
        worker = Worker(self.queue, concurrency=8, name="w")

        @worker.handler("ok")
        async def ok(task: TaskContext) -> None:
            await self.wait(1)

        @worker.handler("bad", retry=Retry(attempts=1))
        async def bad(task: TaskContext) -> None:
            await self.wait(1)
            raise ValueError(f"no good: {task.input}")

        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run(signals=False))
            yield worker
            worker.stop()

    async def archive_all(self) -> None:
        """Have everything that is settled leave for the archive."""
        await self.wait(400)
        await run_monitor(
            self.queue.access, tell=lambda _: None, stopping=asyncio.Event(), passes_max=1
        )


def _play(act: Callable[[Scene], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        bucket, meter = MemoryBucket(clock), Meter()
        store = MeteredStore(MemoryStore(bucket, clock=clock), meter)
        queue = await Queue.on(store, name="q", entropy=world.entropy("q"))
        await act(Scene(world, queue, bucket, meter, ActivityReader()))

    simulate(main, seed=1)


def _outcomes(seen: RecentActivity) -> dict[str, int]:
    counts: dict[str, int] = {}
    for minute in seen.minutes:
        for what, count in minute.outcomes:
            counts[what] = counts.get(what, 0) + count
    return counts


def test_what_ended_is_counted_by_minute_with_how_long_it_had_waited() -> None:
    async def act(scene: Scene) -> None:
        await scene.queue.submit_many("ok", [1, 2, 3])
        await scene.queue.submit("bad", "<b>", key="k")
        dropped = await scene.queue.submit("unhandled")
        await scene.queue.cancel(dropped.id)
        await scene.wait(100)
        async with scene.working():
            await scene.wait(30)
        seen, _ = await scene.look()
        assert _outcomes(seen) == {"succeeded": 3, "failed": 1, "cancelled": 1}
        assert (seen.settled, seen.starts, seen.unread) == (5, 4, 0)
        assert 100 <= seen.median_seconds <= seen.most_seconds < 115
        assert len(seen.minutes) == 60
        (busy,) = [each for each in seen.minutes if each.starts]
        assert (busy.starts, busy.median_seconds) == (4, seen.median_seconds)
        (letter,) = seen.letters
        assert (letter.type, letter.error, letter.message) == ("bad", "ValueError", "no good: <b>")
        assert "no good" in letter.trace
        assert seen.are_letters_whole
        # Three puts for a pack of many, one more for the pointer of a key; nobody ran the last.
        assert (seen.puts, seen.gets, seen.tasks_read) == (3 + 4 + 2, 2, 5)

    _play(act)


def test_each_ledger_and_each_batch_is_read_once_and_counted_once() -> None:
    async def act(scene: Scene) -> None:
        for number in range(5):
            await scene.queue.submit("bad" if number == 0 else "ok", number)
        async with scene.working():
            await scene.wait(30)
        first, reads = await scene.look()
        assert reads == 5
        again, reads = await scene.look()
        assert reads == 0
        assert again == first
        await scene.archive_all()
        archived, reads = await scene.look()
        assert reads == 2
        assert _outcomes(archived) == _outcomes(first) == {"succeeded": 4, "failed": 1}
        assert [each.id for each in archived.letters] == [each.id for each in first.letters]
        _, reads = await scene.look()
        assert reads == 0
        # Somebody who comes only now sees the same.
        scene.lately = ActivityReader()
        fresh, _ = await scene.look()
        assert _outcomes(fresh) == _outcomes(first)
        assert fresh.letters == archived.letters

    _play(act)


def test_what_was_taken_away_is_still_known_and_after_an_hour_forgotten() -> None:
    async def act(scene: Scene) -> None:
        task = await scene.queue.submit("ok")
        async with scene.working():
            await scene.wait(30)
        seen, _ = await scene.look()
        access = scene.queue.access
        await access.store.delete(access.layout.ledger(task_at(task.id)[0]))
        seen, _ = await scene.look()
        assert _outcomes(seen) == {"succeeded": 1}
        await scene.wait(3600)
        seen, _ = await scene.look()
        assert _outcomes(seen) == {}
        assert (seen.settled, seen.starts) == (0, 0)

    _play(act)


def test_what_is_too_much_for_a_look_counts_as_settled_until_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.queue.inspection.activity.LEDGERS_MAX", 4)

    async def act(scene: Scene) -> None:
        for number in range(10):
            await scene.queue.submit("ok", number)
        async with scene.working():
            await scene.wait(30)
        seen, reads = await scene.look()
        assert reads == 4
        assert _outcomes(seen) == {"succeeded": 4, "settled": 6}
        assert (seen.unread, seen.tasks_read, seen.are_letters_whole) == (6, 4, False)
        await scene.look()
        seen, reads = await scene.look()
        assert reads == 2
        assert _outcomes(seen) == {"succeeded": 10}
        assert (seen.unread, seen.are_letters_whole) == (0, True)

    _play(act)


def test_what_cannot_be_read_is_told_and_not_tried_again() -> None:
    async def act(scene: Scene) -> None:
        task = await scene.queue.submit("ok")
        async with scene.working():
            await scene.wait(30)
        access = scene.queue.access
        key = access.layout.ledger(task_at(task.id)[0])
        await access.store.put(key, b"no JSON")
        seen, reads = await scene.look()
        assert reads == 1
        assert any(key in note for note in seen.notes)
        assert _outcomes(seen) == {"settled": 1}
        seen, reads = await scene.look()
        assert reads == 0
        assert any(key in note for note in seen.notes)

    _play(act)


def test_dead_letters_that_were_replayed_are_known_as_such() -> None:
    async def act(scene: Scene) -> None:
        task = await scene.queue.submit("bad", 1)
        other = await scene.queue.submit("bad", 2)
        async with scene.working():
            await scene.wait(30)
        await scene.queue.replay(task.id)
        seen, _ = await scene.look()
        assert seen.replayed == {name_of(await scene.queue.get(task.id))}
        left = [each.id for each in seen.letters if each.name not in seen.replayed]
        assert left == [other.id]

    _play(act)


def test_the_share_that_started_within_a_time_weighs_each_as_often_as_it_counts() -> None:
    waited = [(9.0, 1), (1.0, 18), (2.0, 1)]
    assert within(waited, share=0.5) == 1.0
    assert within(waited, share=0.95) == 2.0
    assert within(waited, share=1.0) == 9.0
    assert within([], share=0.5) == 0.0


def test_minutes_before_the_hour_are_left_out() -> None:
    old, new = SettledPack(((100, "succeeded", 1),)), SettledPack(((160, "succeeded", 2),))
    minutes = by_minute([old, new], now=160 * 60 + 30)
    assert [each.outcomes for each in minutes if each.outcomes] == [(("succeeded", 2),)]
    assert minutes[-1].at == 160 * 60
    assert unread(task_at("now.000." + "0" * 24 + ".3.0.ok")[0], settled_at=61.0).tasks == 3


def test_what_a_task_and_what_workers_cost_follows_from_the_prices() -> None:
    assert task_cost(puts=0, gets=0, tasks=0) is None
    cost = task_cost(puts=3, gets=1, tasks=1)
    assert cost is not None
    assert cost.requests == 4
    assert round(cost.dollars_per_million, 2) == 15.40
    many = task_cost(puts=3, gets=1, tasks=300)
    assert many is not None
    assert round(many.dollars_per_million, 4) == round(15.4 / 300, 4)
    two, one = standing_cost(owners=2), standing_cost(owners=1)
    assert two.idle_requests == 2 * one.idle_requests == 2 * (120 + 450)
    assert one.busy_dollars > one.idle_dollars > 0
    assert standing_cost(owners=0).busy_dollars_per_month == 0
