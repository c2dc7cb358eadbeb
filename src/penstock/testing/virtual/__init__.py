"""Run real asyncio code in virtual time, as a function of a seed.

Sleeping takes no time here: when nothing can run, the clock jumps to the next timer. What can run
at the same instant runs in an order drawn from the seed. So a day of polling takes a second, a
race that shows up once in a thousand runs is found by trying a thousand seeds, and a seed that
has found one finds it again, on any machine:

    async def main(world: World) -> float:
        clock = world.clock(skew_seconds=86_400)   # a machine that is wrong by a day
        async with asyncio.timeout(3600):
            await clock.sleep(60)
        return world.now()                         # true time, for the referee

    for seed in range(500):
        simulate(main, seed=seed)

A simulation that waits for something that never comes raises `Deadlock`, with the tasks and where
they wait; one that goes on for ever raises `Exhausted`; an exception that nobody looked at raises
`Unhandled`; sockets, processes, signals and threads raise `NotSimulated`. Every error carries
the seed. What holds of the order, and what does not, is told in `penstock.testing.virtual.loop`.

Used by the simulator and `penstock cost`, and by users for tests of their own. Nothing outlives
`simulate`: tasks are cancelled, generators closed, and there is nothing outside memory.
"""

from penstock.testing.virtual.clock import VirtualClock
from penstock.testing.virtual.errors import (
    Deadlock,
    Exhausted,
    NotSimulated,
    SimulationError,
    Unhandled,
)
from penstock.testing.virtual.loop import SECONDS_MAX, STEPS_MAX, VirtualLoop
from penstock.testing.virtual.simulation import EPOCH, World, simulate

__all__ = [
    "EPOCH",
    "SECONDS_MAX",
    "STEPS_MAX",
    "Deadlock",
    "Exhausted",
    "NotSimulated",
    "SimulationError",
    "Unhandled",
    "VirtualClock",
    "VirtualLoop",
    "World",
    "simulate",
]
