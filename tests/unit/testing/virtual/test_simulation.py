"""`simulate`: results, bounds, and what is cleaned up afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.testing.virtual import (
    EPOCH,
    Deadlock,
    Exhausted,
    SimulationError,
    Unhandled,
    World,
    simulate,
)


async def _fail(message: str) -> None:
    raise ValueError(message)


async def _forever() -> None:
    await asyncio.Event().wait()


def test_it_returns_what_main_returns() -> None:
    async def main(world: World) -> tuple[int | str, float]:
        return world.seed, world.now()

    async def bare() -> str:
        return "bare"

    assert simulate(main, seed=7) == (7, EPOCH)
    assert simulate(main, seed="seven", epoch=5.0) == ("seven", 5.0)
    assert simulate(bare(), seed=1) == "bare"


def test_time_jumps_to_the_next_timer() -> None:
    async def main(world: World) -> list[tuple[str, float]]:
        seen = []
        clock = world.clock()

        async def sleeper(name: str, seconds: float) -> None:
            await clock.sleep(seconds)
            seen.append((name, round(world.loop.time(), 6)))

        async with asyncio.TaskGroup() as group:
            group.create_task(sleeper("day", 86_400))
            group.create_task(sleeper("second", 1))
            group.create_task(sleeper("hour", 3600))
        assert world.now() == EPOCH + world.loop.time()
        return seen

    for seed in range(20):
        assert simulate(main, seed=seed) == [("second", 1), ("hour", 3600), ("day", 86_400)]


def test_an_error_of_main_is_raised_with_the_seed() -> None:
    async def main(world: World) -> None:
        await world.clock().sleep(2)
        await _fail("boom")

    with pytest.raises(ValueError, match="boom") as caught:
        simulate(main, seed=77)
    assert "seed=77, shuffle=True; it failed at second 2.000000" in caught.value.__notes__[0]


def test_a_deadlock_names_the_waiting_tasks_and_where_they_wait() -> None:
    async def consume(queue: asyncio.Queue[int]) -> None:
        await queue.get()

    async def main(world: World) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(consume(asyncio.Queue()), name="consumer-1")
            await world.clock().sleep(3)
            group.create_task(_forever())

    with pytest.raises(Deadlock) as caught:
        simulate(main, seed=1)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("At virtual second 3.000000 nothing can run any more.")
    assert [line.split(":")[0].strip() for line in lines] == ["Task-1", "consumer-1", "Task-3"]
    assert ".consume (test_simulation.py:" in lines[1]
    assert " > Queue.get (queues.py:" in lines[1]
    assert "Event.wait (locks.py:" in lines[2]


def test_a_long_list_of_waiting_tasks_is_cut() -> None:
    async def main(_world: World) -> None:
        await asyncio.gather(*[_forever() for _ in range(50)])

    with pytest.raises(Deadlock) as caught:
        simulate(main, seed=1)
    assert str(caught.value).endswith("\n  and 31 more")


def test_virtual_seconds_are_bounded() -> None:
    async def main(world: World) -> float:
        clock = world.clock()
        while world.loop.time() < 100:
            await clock.sleep(10)
        return round(world.loop.time(), 6)

    assert simulate(main, seed=1, seconds_max=101) == 100
    with pytest.raises(
        Exhausted, match=r"due at virtual second 100\.0.* the bound of 99"
    ) as caught:
        simulate(main, seed=1, seconds_max=99)
    assert "Task-1: test_virtual_seconds_are_bounded.<locals>.main" in str(caught.value)


def test_a_sleep_without_end_meets_the_bound() -> None:
    async def main(world: World) -> None:
        await world.clock().sleep(float("inf"))

    with pytest.raises(Exhausted, match="virtual second inf"):
        simulate(main, seed=1)


def test_steps_are_bounded_exactly() -> None:
    async def main(world: World) -> int:
        clock = world.clock()
        for _ in range(50):
            await clock.sleep(0)
        return world.loop.steps

    steps = simulate(main, seed=1)
    # One more step tells the loop that main is done.
    assert simulate(main, seed=1, steps_max=steps + 1) == steps
    with pytest.raises(Exhausted, match=f"has run {steps:,} steps, which is its bound"):
        simulate(main, seed=1, steps_max=steps)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0])
def test_a_bound_has_to_be_one(seconds: float) -> None:
    async def main(_world: World) -> None: ...

    with pytest.raises(InvalidInput):
        simulate(main, seed=1, seconds_max=seconds)
    with pytest.raises(InvalidInput):
        simulate(main, seed=1, steps_max=-1)


def test_leftovers_are_cancelled_in_order_and_may_take_their_time() -> None:
    ended: list[tuple[str, float]] = []

    async def leftover(world: World, name: str) -> None:
        try:
            await _forever()
        finally:
            await world.clock().sleep(1)
            ended.append((name, world.loop.time()))

    async def main(world: World) -> None:
        for name in "abcdefgh":
            world.loop.create_task(leftover(world, name))
        await world.clock().sleep(1)

    # The bounds are those of main; what is cancelled has bounds of its own.
    simulate(main, seed=1, shuffle=False, seconds_max=1.5)
    assert [name for name, _ in ended] == list("abcdefgh")
    assert all(instant > 1.9 for _, instant in ended)


def test_a_task_that_will_not_end_is_an_error() -> None:
    async def immortal() -> None:
        while True:
            try:
                await _forever()
            except asyncio.CancelledError:
                continue

    async def main(world: World) -> None:
        task = world.loop.create_task(immortal(), name="immortal")
        # It is left pending for good, and should not complain when the tests have ended.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        await world.clock().sleep(1)

    with pytest.raises(Deadlock, match=r"immortal: .*immortal"):
        simulate(main, seed=1)


def test_tasks_that_go_on_starting_others_are_an_error() -> None:
    async def main(world: World) -> None:
        def start(_done: object = None) -> None:
            world.loop.create_task(_forever()).add_done_callback(start)

        start()
        await world.clock().sleep(1)

    with pytest.raises(SimulationError, match="started others"):
        simulate(main, seed=1)


def test_asynchronous_generators_are_closed() -> None:
    closed: list[str] = []

    async def count(world: World, name: str) -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            await world.clock().sleep(1)
            closed.append(name)

    async def main(world: World) -> object:
        async for number in count(world, "dropped"):
            if number == 3:
                break
        await world.clock().sleep(2)
        assert closed == ["dropped"]
        kept = count(world, "kept")
        async for _ in kept:
            break
        return kept

    simulate(main, seed=1)
    assert closed == ["dropped", "kept"]


def test_generators_that_cancelled_tasks_drop_are_closed_in_every_order() -> None:
    closed: list[str] = []

    async def count(world: World) -> AsyncIterator[int]:
        try:
            while True:
                yield 1
                await world.clock().sleep(1)
        finally:
            await world.clock().sleep(1)
            closed.append("closed")

    async def iterate(world: World) -> None:
        async for _ in count(world):
            await _forever()

    async def main(world: World) -> None:
        world.loop.create_task(iterate(world))
        await world.clock().sleep(1)

    for seed in range(100):
        closed.clear()
        simulate(main, seed=seed)
        assert closed == ["closed"]


def test_a_generator_that_fails_while_it_is_closed_fails_the_run() -> None:
    async def count() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await _fail("in a generator")

    async def main(_world: World) -> object:
        kept = count()
        await anext(kept)
        return kept

    with pytest.raises(Unhandled, match="closed: ValueError: in a generator"):
        simulate(main, seed=1)


def test_streams_of_randomness_do_not_move_each_other() -> None:
    async def main(world: World, *, draws: int = 0) -> list[float]:
        for _ in range(draws):
            world.entropy("other").random()
        return [world.entropy("mine").random() for _ in range(3)]

    async def disturbed(world: World) -> list[float]:
        return await main(world, draws=5)

    first = simulate(main, seed=1)
    assert len(set(first)) == 3
    assert simulate(disturbed, seed=1) == first
    assert simulate(main, seed=2) != first
