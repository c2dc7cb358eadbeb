"""The simulations behind a price: a fleet at work, the same fleet idle, a fleet that is saturated.

Each is a function of its workload: the same seed gives the same figures. What happens while a
fleet warms up, or calms down, is simulated and not counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from penstock.kernel.errors import InvalidInput
from penstock.testing.cost.bill import Bill
from penstock.testing.cost.fleet import Fleet
from penstock.testing.cost.load import Window, Workload
from penstock.testing.virtual import World, simulate

CALM_SECONDS: Final = 3600.0
IDLE_SECONDS: Final = 3600.0
FIRST_TRIES: Final = 3
_LATE_SECONDS_MAX: Final = 900.0
_STEPS_MAX: Final = 10**10

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Steady:
    """A fleet at work: the bill of the window, and when the window's tasks started."""

    bill: Bill
    tasks: int
    start_seconds: tuple[float, ...]
    """In order. Tasks that have not started long after the window are missing."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A fleet with nothing to do, and how long the first task waits each time."""

    bill: Bill
    first_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Saturated:
    """A fleet with more to do than it can: the bill of the window, and the tasks it has ended."""

    bill: Bill
    tasks: int
    busy: int
    """How many workers have run tasks."""

    @property
    def requests_per_task(self) -> float:
        """Requests to process a task; submits are not among them."""
        return (self.bill.requests() - self.bill.requests(cause="submit")) / self.tasks


def run_steady(load: Workload, window: Window) -> Steady:
    """Run the workload for a window."""

    async def main(fleet: Fleet) -> Steady:
        await fleet.start()
        await fleet.submit_through(window.warm_up_seconds)
        before = fleet.meter.billed.copy()
        tasks = await fleet.submit_through(window.seconds)
        bill = Bill.between(before, fleet.meter.billed, seconds=window.seconds)
        await fleet.wait_for(tasks, seconds_max=_LATE_SECONDS_MAX)
        return Steady(bill, len(tasks), fleet.start_seconds(tasks))

    return _run(load, main)


def run_idle(load: Workload, *, seconds: float = IDLE_SECONDS, tries: int = FIRST_TRIES) -> Idle:
    """Run the fleet of a workload without its tasks: an hour, and some seconds that are counted.

    Then submit one, so many times, with an hour without any before each.
    """

    async def main(fleet: Fleet) -> Idle:
        await fleet.start()
        await fleet.clock.sleep(CALM_SECONDS)
        before = fleet.meter.billed.copy()
        await fleet.clock.sleep(seconds)
        bill = Bill.between(before, fleet.meter.billed, seconds=seconds)
        first: list[float] = []
        for number in range(tries):
            await fleet.clock.sleep(CALM_SECONDS if number else 0)
            task = await fleet.submit(1)
            await fleet.wait_for(task, seconds_max=_LATE_SECONDS_MAX)
            first += fleet.start_seconds(task)
        return Idle(bill, tuple(sorted(first)))

    return _run(load, main)


def run_saturated(load: Workload, window: Window) -> Saturated:
    """Run the fleet on a backlog of single tasks, submitted before, that outlasts the window."""
    if load.handler_seconds <= 0:
        raise InvalidInput("--handler-seconds must be more than 0 to saturate a fleet.")

    async def main(fleet: Fleet) -> Saturated:
        per_second = load.workers * load.concurrency / load.handler_seconds
        await fleet.submit_backlog(int(per_second * (window.warm_up_seconds + window.seconds)))
        await fleet.start()
        await fleet.clock.sleep(window.warm_up_seconds)
        before, ended = fleet.meter.billed.copy(), fleet.ended.copy()
        await fleet.clock.sleep(window.seconds)
        bill = Bill.between(before, fleet.meter.billed, seconds=window.seconds)
        done = fleet.ended - ended
        return Saturated(bill, done.total(), len(done))

    return _run(load, main)


def run_backlog(load: Workload, *, backlog: int, seconds: float = 20.0) -> Saturated:
    """Run the fleet for some seconds on so many single tasks, which must outlast them."""

    async def main(fleet: Fleet) -> Saturated:
        await fleet.submit_backlog(backlog)
        before = fleet.meter.billed.copy()
        await fleet.start()
        await fleet.clock.sleep(seconds)
        bill = Bill.between(before, fleet.meter.billed, seconds=seconds)
        return Saturated(bill, fleet.ended.total(), len(fleet.ended))

    return _run(load, main)


def _run(load: Workload, main: Callable[[Fleet], Coroutine[Any, Any, Result]]) -> Result:
    async def world_main(world: World) -> Result:
        fleet = Fleet(world, load)
        async with asyncio.TaskGroup() as group:
            await fleet.open(group)
            try:
                return await main(fleet)
            finally:
                fleet.end()

    return simulate(
        world_main,
        seed=f"cost {load.seed}",
        seconds_max=(load.days + 1) * 86_400.0,
        steps_max=_STEPS_MAX,
    )
