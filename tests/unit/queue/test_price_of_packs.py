"""What large packs cost: how often their ledgers are written, and how often a worker lists."""

from __future__ import annotations

import asyncio
from collections import Counter

from penstock.store.metered import Kind
from penstock.testing.cost import SimulatedFleet, Workload
from penstock.testing.virtual import World, simulate

_LOAD = Workload(workers=1, tasks_per_day=100_000, batch=1000)
"""One worker runs 32 tasks at a time, each for a second: a pack is half a minute of work."""


def _counted(batches_at: tuple[float, ...], *, seconds: float) -> Counter[tuple[str, Kind]]:
    """Requests of a worker with a queue that was empty, when packs come after so many seconds."""

    async def main(world: World) -> Counter[tuple[str, Kind]]:
        fleet = SimulatedFleet(world, _LOAD)
        async with asyncio.TaskGroup() as group:
            await fleet.open(group)
            await fleet.start()
            # How fast its tasks are is known from the first pack; then there is none for long.
            await fleet.wait_for(await fleet.submit(1000), seconds_max=120.0)
            await fleet.clock.sleep(300.0)
            before, began = fleet.meter.billed.copy(), fleet.clock.monotonic()
            packs = []
            for at in batches_at:
                await fleet.clock.sleep(began + at - fleet.clock.monotonic())
                packs.append(await fleet.submit(1000))
            await fleet.clock.sleep(began + seconds - fleet.clock.monotonic())
            assert all(fleet.has_started(pack) for pack in packs)
            after = fleet.meter.billed
            fleet.end()
        return after - before

    return simulate(main, seed="packs", seconds_max=3600.0, steps_max=10**7)


def test_a_pack_alone_is_claimed_once_and_written_every_eight_seconds() -> None:
    counted = _counted((0.0,), seconds=45.0)
    assert counted["claim", Kind.PUT] == 1
    # After 9, 17 and 25 seconds, and at its end.
    assert counted["settle", Kind.PUT] <= 4


def test_a_worker_that_has_found_all_there_is_does_not_look_again_at_once() -> None:
    counted = _counted((0.0,), seconds=45.0)
    # The one that finds it, and those until producers ring again; none while the pack is run.
    assert counted["discovery", Kind.LIST] <= 4
    assert counted["bell", Kind.PUT] == 2


def test_packs_that_share_a_worker_are_not_written_for_a_few_tasks_each() -> None:
    counted = _counted((0.0, 5.0), seconds=90.0)
    writes = counted["claim", Kind.PUT] + counted["settle", Kind.PUT]
    assert writes <= 16
