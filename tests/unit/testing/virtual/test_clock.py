"""A simulated machine's clocks: wrong as wanted, and never short of a sleep."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import InvalidInput
from penstock.testing.virtual import EPOCH, Deadlock, VirtualClock, VirtualLoop, World, simulate


def test_it_is_a_clock() -> None:
    async def main(world: World) -> None:
        clock: Clock = world.clock()
        before = clock.monotonic()
        await clock.sleep(1.5)
        assert clock.monotonic() - before == pytest.approx(1.5)
        assert clock.wall() == pytest.approx(EPOCH + 1.5)

    simulate(main, seed=1)


def test_the_system_clock_sleeps_virtually_too() -> None:
    async def main(world: World) -> float:
        await SystemClock().sleep(12_345)
        return world.loop.time()

    assert simulate(main, seed=1) == 12_345


def test_the_wall_clock_may_be_wrong_and_may_jump() -> None:
    async def main(world: World) -> None:
        clock = world.clock(skew_seconds=86_400)
        assert clock.wall() == world.now() + 86_400
        monotonic = clock.monotonic()
        clock.skew_seconds = -5
        assert clock.wall() == world.now() - 5
        assert clock.monotonic() == monotonic

    simulate(main, seed=1)


def test_machines_start_their_monotonic_clocks_anywhere() -> None:
    async def main(world: World) -> tuple[float, float]:
        return world.clock().monotonic(), world.clock().monotonic()

    starts = {start for seed in range(10) for start in simulate(main, seed=seed)}
    assert len(starts) == 20
    assert simulate(main, seed=4) == simulate(main, seed=4)


@pytest.mark.parametrize(
    ("drift", "slept"), [(150e-6, 86_387.042), (-150e-6, 86_412.962), (0, 86_400)]
)
def test_a_drifting_clock_counts_its_own_seconds(drift: float, slept: float) -> None:
    async def main(world: World) -> None:
        clock = world.clock(drift=drift)
        before = clock.monotonic()
        await clock.sleep(86_400)
        assert clock.monotonic() - before == pytest.approx(86_400, abs=1e-6)
        assert world.loop.time() == pytest.approx(slept, abs=1e-3)
        assert clock.wall() == pytest.approx(world.now())

    simulate(main, seed=1)


def test_a_clock_that_does_not_go_forward_is_refused() -> None:
    with pytest.raises(InvalidInput):
        VirtualClock(VirtualLoop(), drift=-1.0)


def test_a_cancelled_sleep_leaves_no_timer() -> None:
    async def main(world: World) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await world.clock().sleep(1000)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"At virtual second 1\.0"):
        simulate(main, seed=1)


def _seconds(high: float) -> st.SearchStrategy[float]:
    return st.floats(min_value=0, max_value=high, allow_subnormal=False)


@given(
    drift=st.floats(min_value=-0.9, max_value=10),
    start=_seconds(1e9),
    lead=_seconds(1e5),
    wanted=st.lists(_seconds(1e5), min_size=1, max_size=4),
)
def test_a_sleep_is_never_short(
    drift: float, start: float, lead: float, wanted: list[float]
) -> None:
    """Who sleeps until a deadline is past it then, or would sleep for nothing, for ever."""

    async def main(world: World) -> None:
        clock = VirtualClock(world.loop, drift=drift, start_seconds=start)
        await clock.sleep(lead)
        for seconds in wanted:
            deadline = clock.monotonic() + seconds
            await clock.sleep(seconds)
            assert clock.monotonic() >= deadline
            assert clock.monotonic() - deadline < 1e-5

    simulate(main, seed=1, seconds_max=1e8)


def test_sleeping_nothing_still_lets_others_run() -> None:
    async def main(world: World) -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            turns += 1

        world.loop.create_task(other())
        for _ in range(100):
            await world.clock().sleep(-1.0)
        return turns

    assert simulate(main, seed=1) == 1
