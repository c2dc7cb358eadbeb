"""A loop goes on, at its pace, whatever its turns do."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest

from penstock.dispatcher.loop import Loop
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import DatabaseUnavailable
from penstock.testing.virtual import World, simulate


def test_turns_come_at_the_pace_that_they_ask_for() -> None:
    async def main(world: World) -> list[float]:
        clock, turns = world.clock(), list[float]()
        said = iter([0.0, 0.0, 5.0, None, None])

        async def turn() -> float | None:
            turns.append(clock.monotonic())
            return next(said, 1000.0)

        async with Loop("x", turn, idle_seconds=10, clock=clock, entropy=seeded_entropy(1)):
            await clock.sleep(100)
        return [round(late - early) for early, late in itertools.pairwise(turns)]

    pauses = simulate(main, seed=1)
    assert pauses[:3] == [0, 0, 5]
    assert all(8 <= pause <= 12 for pause in pauses[3:])
    assert len(pauses) == 5


def test_a_kick_ends_the_pause_and_one_that_comes_during_a_turn_is_not_lost() -> None:
    async def main(world: World) -> int:
        clock, turns = world.clock(), 0

        async def turn() -> float | None:
            nonlocal turns
            turns += 1
            if turns == 2:
                loop.kick()
            return 1000.0

        loop = Loop("x", turn, idle_seconds=10, clock=clock, entropy=seeded_entropy(1))
        async with loop:
            await clock.sleep(1)
            loop.kick()
            await clock.sleep(1)
        return turns

    assert simulate(main, seed=1) == 3


def test_failures_are_logged_once_and_pauses_grow(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: World) -> tuple[int, bool]:
        clock, turns = world.clock(), 0

        async def turn() -> float | None:
            nonlocal turns
            turns += 1
            if clock.monotonic() - begun < 300:
                raise DatabaseUnavailable("Postgres does not answer.")
            return None

        begun = clock.monotonic()
        loop = Loop("router", turn, idle_seconds=1, clock=clock, entropy=seeded_entropy(1))
        async with loop:
            for _ in range(3000):
                # Kicks never make a failing loop spin.
                loop.kick()
                await clock.sleep(0.1)
            failing = loop.is_failing
            seen = turns
            await clock.sleep(60)
            assert not loop.is_failing
        return seen, failing

    with caplog.at_level(logging.INFO, "penstock"):
        turns, failing = simulate(main, seed=1)
    assert failing
    assert turns < 60
    told = [record.message for record in caplog.records]
    assert told == ["router failed: Postgres does not answer.", "router recovered"]


def test_stop_lets_a_turn_end_and_interrupts_one_that_hangs() -> None:
    async def main(world: World) -> list[str]:
        clock, log = world.clock(), list[str]()

        async def turn() -> float | None:
            try:
                await clock.sleep(5 if not log else 1000)
                log.append("ended")
            except asyncio.CancelledError:
                log.append("interrupted")
                raise
            return None

        loop = Loop("x", turn, idle_seconds=1, clock=clock, entropy=seeded_entropy(1))
        async with loop:
            await clock.sleep(1)
        again = Loop("x", turn, idle_seconds=1, clock=clock, entropy=seeded_entropy(1))
        async with again:
            await clock.sleep(1)
        return log

    assert simulate(main, seed=1) == ["ended", "interrupted"]
