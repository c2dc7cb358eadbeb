"""Virtual time carries real code: the same seed gives the same day, and a day is quick."""

from __future__ import annotations

import asyncio

from penstock.kernel.clock import Clock
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import World, simulate


async def idle_day(world: World, *, pollers: int, every: float) -> Meter:
    """Pollers that find nothing for a day; returns what that would have cost."""
    meter = Meter()
    bucket = MemoryBucket(world.clock())

    async def poll(clock: Clock) -> None:
        store = MeteredStore(MemoryStore(bucket, clock=clock), meter)
        for _ in range(int(86_400 / every)):
            await store.list("tasks/", limit=10)
            await clock.sleep(every)

    async with asyncio.TaskGroup() as group:
        for _ in range(pollers):
            group.create_task(poll(world.clock()))
    return meter


def _day(seed: int) -> tuple[int, float, str]:
    lines: list[str] = []
    meter = simulate(
        lambda world: idle_day(world, pollers=10, every=600), seed=seed, trace=lines.append
    )
    return meter.requests(kind=Kind.LIST), meter.dollars(), "\n".join(lines)


def test_the_same_seed_gives_the_same_day_byte_for_byte() -> None:
    requests, dollars, trace = _day(seed=7)
    assert (requests, dollars, trace) == _day(seed=7)
    assert requests == 10 * 144
    assert trace.count("\n") > 2 * requests


def test_another_seed_gives_another_order() -> None:
    assert _day(seed=7)[2] != _day(seed=8)[2]


def test_a_full_day_of_ten_pollers_is_a_bounded_number_of_steps() -> None:
    """Tests assert no seconds; the number of steps is what takes them."""
    steps: list[int] = []

    async def main_and_count(world: World) -> Meter:
        meter = await idle_day(world, pollers=10, every=10)
        steps.append(world.loop.steps)
        return meter

    meter = simulate(main_and_count, seed=1)
    assert meter.requests() == 86_400
    assert steps[0] < 4 * 86_400
