"""How long a worker waits between looks."""

from __future__ import annotations

import math

import pytest

from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import InvalidInput
from penstock.queue.settings import Polling, PollPace
from penstock.testing.virtual import World, simulate

EVEN = Polling(min_seconds=1.0, max_seconds=8.0, factor=2.0, jitter=0.0)


def _waits(polling: Polling, *, count: int, seed: int = 1) -> list[float]:
    async def main(world: World) -> list[float]:
        pace = PollPace(polling, entropy=world.entropy("x"), clock=world.clock())
        return [pace.next_seconds() for _ in range(count)]

    return simulate(main, seed=seed)


def test_the_longer_there_is_no_work_the_longer_the_wait_up_to_the_most() -> None:
    assert _waits(EVEN, count=6) == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_by_default_a_look_comes_after_1_6_to_8_seconds() -> None:
    polling = Polling()
    assert (polling.min_seconds, polling.max_seconds) == (1.6, 8.0)
    waits = _waits(polling, count=60)
    assert waits[0] == pytest.approx(1.6, rel=0.1)
    assert waits[-1] == pytest.approx(8.0, rel=0.1)


def test_jitter_spreads_to_both_sides_and_no_further() -> None:
    polling = Polling(min_seconds=4.0, max_seconds=4.0, jitter=0.25)
    waits = _waits(polling, count=300)
    assert all(3.0 <= wait <= 5.0 for wait in waits)
    assert min(waits) < 3.2
    assert max(waits) > 4.8
    assert waits != _waits(polling, count=300, seed=2)


def test_work_sets_the_interval_back() -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        pace = PollPace(EVEN, entropy=seeded_entropy(1), clock=clock)
        for _ in range(6):
            pace.next_seconds()
        await clock.sleep(10)
        pace.reset()
        assert [pace.next_seconds() for _ in range(2)] == [1.0, 2.0]

    simulate(main, seed=1)


def test_rare_work_sets_it_back_too_and_it_grows_faster_then() -> None:
    even = Polling(min_seconds=1.0, max_seconds=8.0, factor=1.1, jitter=0.0)

    async def main(world: World) -> None:
        clock = world.clock()
        pace = PollPace(even, entropy=seeded_entropy(1), clock=clock)
        await clock.sleep(3600)
        pace.reset()
        waits = [pace.next_seconds() for _ in range(7)]
        assert waits == pytest.approx([1.0, 1.5, 2.25, 3.375, 5.0625, 7.59375, 8.0])
        await clock.sleep(10)
        pace.reset()
        assert [pace.next_seconds() for _ in range(2)] == pytest.approx([1.0, 1.1])

    simulate(main, seed=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_seconds": 0.0},
        {"min_seconds": -1.0},
        {"min_seconds": 9.0},
        {"max_seconds": 1.0},
        {"max_seconds": 3601.0},
        {"max_seconds": math.inf},
        {"min_seconds": math.nan},
        {"factor": 0.9},
        {"factor": 101.0},
        {"factor": math.nan},
        {"jitter": -0.1},
        {"jitter": 1.0},
        {"jitter": math.nan},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="Polling needs"):
        Polling(**wrong)
