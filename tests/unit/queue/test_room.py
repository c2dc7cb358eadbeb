"""How many tasks a worker takes at once, and how many ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.clock import Clock
from penstock.queue.execution.capacity import WorkerCapacity
from penstock.testing.virtual import World, simulate


class HandClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.instant = 100.0

    def monotonic(self) -> float:
        return self.instant

    def wall(self) -> float:
        raise AssertionError("nothing depends on the wall clock")

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps")


def _room(concurrency: int, clock: Clock | None = None) -> WorkerCapacity:
    return WorkerCapacity(concurrency, clock=clock or HandClock(), freed=asyncio.Event())


def test_no_more_than_can_run_are_taken() -> None:
    room = _room(4)
    assert room.take(3, type="t") == 3
    assert room.free == 1
    assert room.take(3, type="t") == 1
    assert room.take(3, type="t") == 0
    assert (room.free, room.held) == (0, 4)


def test_ahead_is_as_many_again_while_the_rate_is_unknown() -> None:
    room = _room(4)
    assert room.take(100, type="t", ahead_seconds=2.0) == 8
    assert room.free == 0
    assert room.take(100, type="t", ahead_seconds=2.0) == 0
    room.give(5)
    assert room.free == 1
    assert room.take(100, type="t") == 1


def _work(
    room: WorkerCapacity, clock: HandClock, *, tasks: int, seconds: float, type: str = "t"
) -> None:
    """Run so many tasks, one after the other."""
    for _ in range(tasks):
        room.take(1, type=type)
        clock.instant += seconds
        room.note_end(type)
        room.give(1)


def test_ahead_is_what_will_run_until_the_next_settlement() -> None:
    clock = HandClock()
    room = _room(16, clock)
    _work(room, clock, tasks=64, seconds=1 / 64)
    clock.instant += 1 / 64
    # 64 tasks in a second: 128 in two, beside the 16 that run.
    assert room.take(1000, type="t", ahead_seconds=2.0) == 144


def test_ahead_is_bounded_however_fast_tasks_are() -> None:
    room = _room(4)
    for _ in range(64):
        room.note_end("t")
    # All at one instant, which is no division by zero either.
    assert room.take(10**6, type="t", ahead_seconds=2.0) == 4 + 16 * 4


def test_the_rate_is_that_of_the_type() -> None:
    clock = HandClock()
    room = _room(16, clock)
    _work(room, clock, tasks=64, seconds=1 / 64, type="fast")
    assert room.take(1000, type="slow", ahead_seconds=2.0) == 32


def test_a_slow_worker_takes_no_more_than_as_many_again() -> None:
    clock = HandClock()
    room = _room(4, clock)
    _work(room, clock, tasks=100, seconds=10.0)
    assert room.take(1000, type="t", ahead_seconds=8.0) == 8


def test_the_rate_is_that_of_the_last_tasks() -> None:
    clock = HandClock()
    room = _room(1, clock)
    _work(room, clock, tasks=100, seconds=0.001)
    _work(room, clock, tasks=100, seconds=1.0)
    assert room.take(1000, type="t", ahead_seconds=2.0) <= 1 + 3


def test_tasks_that_begin_together_do_not_look_faster_than_they_are() -> None:
    clock = HandClock()
    room = _room(32, clock)
    for _ in range(4):
        room.take(32, type="t")
        clock.instant += 1.0
        for _ in range(32):
            room.note_end("t")
            room.give(1)
    # 32 a second, so 256 in eight, beside the 32 that run.
    assert room.take(1000, type="t", ahead_seconds=8.0) == 288


def test_the_rate_is_remembered_while_there_is_nothing_to_do() -> None:
    clock = HandClock()
    room = _room(16, clock)
    _work(room, clock, tasks=64, seconds=1 / 64)
    clock.instant += 3600.0
    assert room.take(1000, type="t", ahead_seconds=2.0) == 144
    # What was fast, and is not any more, is found out while it runs.
    clock.instant += 60.0
    room.give(144)
    assert room.take(1000, type="t", ahead_seconds=2.0) == 32


def test_nothing_is_taken_ahead_while_all_slots_are_stuck() -> None:
    room = _room(2)
    room.take(2, type="t")
    room.stuck = 2
    assert room.is_stuck
    assert room.take(5, type="t", ahead_seconds=2.0) == 0
    room.stuck = 1
    assert room.take(5, type="t", ahead_seconds=2.0) == 2


def test_what_was_claimed_is_held_whether_there_is_room_or_not() -> None:
    room = _room(2)
    room.hold(5)
    assert (room.held, room.free) == (5, 0)
    assert room.take(1, type="t", ahead_seconds=2.0) == 0
    room.give(4)
    assert room.free == 1


def test_room_that_is_given_back_is_announced() -> None:
    async def check(room: WorkerCapacity, freed: asyncio.Event) -> None:
        room.take(2, type="t")
        room.give(0)
        assert not freed.is_set()
        room.give(1)
        assert freed.is_set()
        freed.clear()
        room.note_end("t")
        assert not freed.is_set()
        room.give(1)
        assert freed.is_set()
        assert room.held == 0

    _with_event(check)


def test_to_give_more_than_was_taken_is_a_mistake() -> None:
    room = _room(2)
    room.take(1, type="t")
    with pytest.raises(AssertionError, match="more room"):
        room.give(2)


@given(
    concurrency=st.integers(1, 20),
    steps=st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.integers(0, 30))),
)
def test_what_is_taken_is_never_over_the_limit(
    concurrency: int, steps: list[tuple[int, bool, int]]
) -> None:
    room = _room(concurrency)
    for count, ahead, back in steps:
        before = room.held
        taken = room.take(count, type="t", ahead_seconds=2.0 if ahead else 0.0)
        assert 0 <= taken <= count
        assert room.held == before + taken
        limit = concurrency * 2 if ahead else concurrency
        assert room.held <= max(limit, before)
        assert taken == count or room.held >= limit
        room.give(min(back, room.held))


def _with_event(check: Callable[[WorkerCapacity, asyncio.Event], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        freed = asyncio.Event()
        await check(WorkerCapacity(2, clock=world.clock(), freed=freed), freed)

    simulate(main, seed=1)


def test_what_is_claimed_ahead_yields_to_what_is_more_urgent() -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        room = _room(2)
        order: list[str] = []
        ends = asyncio.Event()

        async def run(name: str, priority: int) -> None:
            async with room.slots.of(priority):
                room.wait(-1, priority=priority)
                order.append(name)
                await ends.wait()
            room.give(1, priority=priority)

        async with asyncio.TaskGroup() as group:
            assert room.take(4, type="t", ahead_seconds=2.0) == 4
            # Nothing of it waits for a slot yet: who runs is waited for.
            assert room.free_for(5) == 0
            room.wait(4, priority=0)
            for number in range(4):
                group.create_task(run(f"usual {number}", 0))
            await clock.sleep(0.1)
            assert (room.free, room.free_for(0), room.free_for(5)) == (0, 0, 2)
            assert room.take(3, type="t", priority=5) == 2
            assert room.free_for(5) == 0
            room.wait(2, priority=5)
            group.create_task(run("urgent", 5))
            gone = group.create_task(run("gone", 5))
            await clock.sleep(0.1)
            gone.cancel()
            await clock.sleep(0.1)
            room.wait(-1, priority=5)
            room.give(1, priority=5)
            ends.set()
        assert order[2] == "urgent"
        assert (room.held, room.free, room.free_for(9)) == (0, 2, 2)

    simulate(main, seed=1)
