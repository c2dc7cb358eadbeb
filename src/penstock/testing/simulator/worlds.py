"""One world, from its seed to the verdict."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from penstock.testing.simulator.chronicle import Violation
from penstock.testing.simulator.fleet import Workers
from penstock.testing.simulator.machines import MACHINE
from penstock.testing.simulator.people import Canceller, LoneMonitor, Operator, Producer, Reader
from penstock.testing.simulator.plans import Fleet, Plan, Profile, draw
from penstock.testing.simulator.referee import Referee
from penstock.testing.simulator.site import Site
from penstock.testing.virtual import SimulationError, World, simulate

SETTLED_SECONDS: Final = 2400.0
"""So long after the faults everything must have ended."""

_LOOK_SECONDS: Final = 5.0
_STEPS_MAX: Final = 500_000
_REFUSED: Final = re.compile(r"task (\S+): attempt (\d+) was overtaken")


@dataclass(frozen=True, slots=True)
class WorldReport:
    """What became of one world."""

    seed: int
    fleet: Fleet
    profile: Profile
    tasks: int
    starts: int
    refusals: int
    """How many endings were refused, because others had taken over."""
    seconds: float
    violations: tuple[Violation, ...]


def run_world(seed: int, fleet: Fleet) -> WorldReport:
    """Run the world of a seed, and tell what was wrong with it."""
    plan = draw(seed, fleet)

    async def main(world: World) -> WorldReport:
        return await _live(world, plan, seed)

    with _quiet():
        try:
            return simulate(main, seed=f"{seed} {fleet}", steps_max=_STEPS_MAX)
        except SimulationError as error:
            words = traceback.format_exception(error)
            broken = Violation(f"The world broke: {error}", 0.0, tuple("".join(words).splitlines()))
            return WorldReport(seed, fleet, plan.profile, 0, 0, 0, 0.0, (broken,))


async def _live(world: World, plan: Plan, seed: int) -> WorldReport:
    async with asyncio.TaskGroup() as group:
        site = Site(world, plan, group)
        with _listening(site.referee):
            await _pass(site)
        site.end()
    return WorldReport(
        seed,
        plan.fleet,
        plan.profile,
        len(site.tracker.tasks),
        site.referee.starts,
        site.referee.refusals,
        world.loop.time(),
        tuple(site.chronicle.violations),
    )


async def _pass(site: Site) -> None:
    plan, group = site.plan, site.group
    workers = Workers(site)
    producers = [
        Producer(
            site,
            site.machine(f"p{number}"),
            submits=plan.submits,
            poison=0 if number else plan.poison,
        )
        for number in range(plan.producers)
    ]
    for name, producer in zip(list(site.machines), producers, strict=True):
        site.run(site.machines[name], producer.run)
    background = [group.create_task(workers.run())]
    if plan.cancels:
        canceller = site.machine("canceller")
        site.run(canceller, Canceller(site, canceller, producers).run)
    reader = site.machine("reader")
    site.run(reader, Reader(site, reader, producers).run)
    if plan.with_monitor:
        monitor = site.machine("monitor")
        site.run(monitor, LoneMonitor(site, monitor).run)
    if plan.with_operator:
        background.append(group.create_task(Operator(site).run()))
    try:
        await _until(site, plan.storm_seconds, settled=False)
        site.make_peace()
        workers.make_peace()
        site.chronicle.note("world", "faults end")
        if await _until(site, SETTLED_SECONDS, settled=True):
            await _until(site, plan.linger_seconds, settled=False)
            reader = site.machine("last reader")
            site.run(reader, Reader(site, reader, producers).read_all)
            await _until(site, _LOOK_SECONDS, settled=False)
            await _until(site, SETTLED_SECONDS, settled=True)
        if not site.chronicle.violations:
            site.referee.check_the_end()
    finally:
        for task in background:
            task.cancel()


async def _until(site: Site, seconds: float, *, settled: bool) -> bool:
    """Wait so long, or until all is settled, or something is wrong. Whether all is settled."""
    end = site.world.loop.time() + seconds
    while site.world.loop.time() < end and not site.chronicle.violations:
        await site.clock.sleep(min(_LOOK_SECONDS, end - site.world.loop.time()))
        _judge_machines(site)
        if settled and not site.referee.packs_left() and not site.tracker.unsettled():
            return True
    return False


def _judge_machines(site: Site) -> None:
    for machine in site.machines.values():
        if machine.problem is not None:
            error, machine.problem = machine.problem, None
            for line in "".join(traceback.format_exception(error)).splitlines():
                site.chronicle.note(machine.name, line)
            site.chronicle.accuse(f"The process on {machine.name} fell over: {error!r}.")


class _Ear(logging.Handler):
    """Hears what workers say about endings that did not count."""

    def __init__(self, referee: Referee) -> None:
        super().__init__()
        self._referee = referee

    def emit(self, record: logging.LogRecord) -> None:
        who = MACHINE.get()
        if not who:
            return
        if "overtaken" in record.msg:
            found = _REFUSED.match(record.getMessage())
            if found is not None:
                self._referee.was_refused(who, found[1], int(found[2]))
        elif "cannot be written" in record.msg and isinstance(record.args, tuple):
            self._referee.doubted.add((who, str(record.args[0])))


@contextmanager
def _listening(referee: Referee) -> Iterator[None]:
    """Let the referee hear the workers."""
    log, ear = logging.getLogger("penstock.queue.running.work"), _Ear(referee)
    log.addHandler(ear)
    try:
        yield
    finally:
        log.removeHandler(ear)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what simulated workers log to themselves."""
    log, work = logging.getLogger("penstock"), logging.getLogger("penstock.queue.running.work")
    before = log.level, log.propagate, work.level, work.propagate
    log.setLevel(logging.CRITICAL)
    log.propagate = work.propagate = False
    work.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(before[0])
        log.propagate = before[1]
        work.setLevel(before[2])
        work.propagate = before[3]
