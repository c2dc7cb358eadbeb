"""Runs one world, from its seed to the report of its violations.

Who acts on a simulated queue: workers, a monitor, an operator, and its users
(`penstock.testing.simulator.clients`).

Workers join, leave, crash, freeze and come back in another mode. They start as many as the plan
says; then, until the peace, one thing after the other happens to one of them. At the peace a
worker joins that has all handlers, so that whatever is left can end. A worker whose process was
ended by a task is followed by another, then as well.

The operator deletes, damages and duplicates what the queue calls its index: pointers, leases of
shards, registrations, the doorbell. Never packs and ledgers, which are outside every promise.

In some worlds the last worker is alone when all has ended, and `PromptnessProbe` shows how soon
it starts what it is given.
"""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import WorkerIdConflict
from penstock.queue.client import Queue
from penstock.queue.ids import NONCE_CHARACTERS
from penstock.queue.maintenance import run_monitor
from penstock.queue.settings import DiscoveryMode, Polling
from penstock.queue.worker import Worker
from penstock.testing.simulator.clients import Canceller, Producer, ReadingClient
from penstock.testing.simulator.environment import LAYOUT, WorldEnvironment
from penstock.testing.simulator.history import Violation
from penstock.testing.simulator.machines import MACHINE, FaultTrigger, Machine, MachineFault
from penstock.testing.simulator.plans import (
    TYPES,
    DamagedHints,
    SimulatedHandlers,
    WorkerModes,
    WorldPlan,
    WorldProfile,
    draw,
)
from penstock.testing.simulator.probe import ALONE_SECONDS, PromptnessProbe
from penstock.testing.simulator.referee import OPERATOR, Referee
from penstock.testing.virtual import SimulationError, World, simulate

_CONCURRENCY: Final = (1, 1, 2, 4)
_CONCURRENCY_OF_LARGE: Final = (2, 8, 16)
"""Where a pack of many has a task that ends its worker: claims are of many then, too."""
_SPOTS: Final = (
    "",
    "ledger create",
    "ledger swap",
    "ledger swap",
    "ledger delete",
    "pack delete",
    "pack get",
    "pointer delete",
    "archive create",
)
"""Where it hurts a worker most: between two requests that belong together."""

_DIRECT_SPOTS: Final = ("inbox swap", "inbox delete", "inbox replace")
"""Leases, entries, and entries that are given to others."""

_SPOTS_OF: Final = {
    WorldProfile.KEYS: (
        "ledger create",
        "ledger delete",
        "pack delete",
        "pack get",
        "archive create",
    ),
    WorldProfile.LATE: ("pack get", "pack get", "ledger create", "ledger delete", "pack delete"),
    WorldProfile.ECHOES: ("ledger create", "ledger create", "ledger swap", "ledger delete"),
}


class SimulatedWorkers:
    """The workers of a world."""

    def __init__(self, site: WorldEnvironment) -> None:
        self._site = site
        self._entropy = site.world.entropy("fleet")
        self._names = site.world.entropy("names")
        self._hosts = site.world.entropy("hosts")
        self._mode: DiscoveryMode | None = None
        self._workers: dict[str, Worker] = {}
        self._modes: dict[str, DiscoveryMode] = {}
        self.last: tuple[Machine, int] | None = None
        """The machine that has joined last, and how many tasks it runs at a time."""

    async def run(self) -> None:
        """Let things happen until the peace."""
        site, plan = self._site, self._site.plan
        for number in range(plan.workers):
            # Something that comes late is worst where somebody has gone on meanwhile.
            is_sound = plan.profile is WorldProfile.LATE and number > 0
            self.join(types=TYPES if is_sound else None, is_sound=is_sound)
        pause = plan.storm_seconds / (2 + plan.workers)
        while not site.is_peace:
            await site.clock.sleep(self._entropy.uniform(0, 2 * pause))
            if not site.is_peace:
                self._happen()

    def join(
        self,
        *,
        types: tuple[str, ...] | None = None,
        is_sound: bool = False,
        host: str = "",
        polling: Polling | None = None,
    ) -> None:
        """One more worker, on a host of its own or where another one was, or still is."""
        site, plan, entropy = self._site, self._site.plan, self._entropy
        if not host and self._workers and self._hosts.random() < 0.3:
            host = site.hosts[self._hosts.choice([*self._workers])]
        machine = site.machine(f"w{len(self._workers)}", host=host)
        mode = self._mode or plan.mode(entropy)
        settings = plan.settings(entropy)
        settings = replace(settings, polling=polling or settings.polling)
        is_large = plan.poison and plan.poison_company
        concurrency = entropy.choice(_CONCURRENCY_OF_LARGE if is_large else _CONCURRENCY)
        self.last = machine, concurrency
        timeout_seconds = entropy.uniform(3, 10)
        if types is None:
            types = TYPES if entropy.random() < 0.7 else (entropy.choice(TYPES),)
        name = self._name(machine, mode)
        self._modes[machine.name] = mode
        self._workers[machine.name] = None  # type: ignore[assignment]  # until it has opened

        async def work(queue: Queue) -> None:
            worker = Worker(queue, concurrency=concurrency, mode=mode, name=name, settings=settings)
            self._workers[machine.name] = worker
            deeds = SimulatedHandlers(
                machine,
                site.referee,
                concurrency=concurrency,
                poisoned=lambda: self._start_another(machine),
            )
            deeds.register(worker, types, timeout_seconds=timeout_seconds)
            try:
                await worker.run(signals=False)
            except WorkerIdConflict as error:
                # Another has its name, or has taken over what it had: it ends as it should.
                site.chronicle.note(machine.name, f"stops: {error}")

        site.chronicle.note(machine.name, f"joins, {mode}, for {' and '.join(types)}")
        if not site.is_peace and not is_sound:
            machine.triggers = self._triggers()
        site.run(machine, work)

    def _start_another(self, machine: Machine) -> None:
        """A worker's process has ended: whoever runs it starts another, there or elsewhere."""
        soon = self._names.uniform(0, 3)
        types = TYPES if self._site.is_peace else None
        host = self._site.hosts[machine.name] if self._names.random() < 0.7 else ""
        self._site.world.loop.call_later(soon, lambda: self.join(types=types, host=host))

    def _name(self, machine: Machine, mode: DiscoveryMode) -> str:
        """The name of a worker: in `direct`, now and then that of one that was there before."""
        if mode is not DiscoveryMode.DIRECT or self._site.is_peace or self._names.random() < 0.6:
            return machine.name
        return self._names.choice([*self._workers, machine.name])

    def _triggers(self) -> list[FaultTrigger]:
        """What befalls the next worker."""
        plan, entropy = self._site.plan, self._entropy
        if plan.profile is WorldProfile.LATE and len(self._workers) == 1 and entropy.random() < 0.8:
            return self._ghost()
        spots = _SPOTS_OF.get(plan.profile, _SPOTS) + (_DIRECT_SPOTS if plan.direct else ())
        triggers: list[FaultTrigger] = []
        for _ in range(2 if plan.is_long else 1):
            triggers += plan.triggers(entropy, spots, chance=0.8)
        return triggers

    def _ghost(self) -> list[FaultTrigger]:
        """A worker claims and freezes; when all is archived its claim comes again, and it thaws."""
        seconds = self._entropy.uniform(450, 600)
        # It thaws soon after, before a monitor has removed what came again.
        later = seconds + self._entropy.uniform(2, 30)
        if self._entropy.random() < 0.5:
            echo = FaultTrigger(MachineFault.ECHOES, "ledger create", seconds=seconds)
            return [echo, FaultTrigger(MachineFault.FREEZES_AFTER, "pack get", seconds=later)]
        return [
            FaultTrigger(
                MachineFault.ECHOES, "ledger create", seconds=seconds, freeze_seconds=later
            )
        ]

    def _living(self) -> list[Machine]:
        machines = [self._site.machines[name] for name in self._workers]
        return [machine for machine in machines if not machine.has_ended]

    def _happen(self) -> None:
        living, entropy = self._living(), self._entropy
        if not living:
            self.join()
            return
        machine = entropy.choice(living)
        draw = entropy.random()
        if draw < 0.3 and self._site.plan.crashes:
            machine.die()
            if self._names.random() < 0.4 and len(living) < 5:
                self._start_another(machine)
        elif draw < 0.65 and self._site.plan.freeze_seconds_max:
            machine.freeze_for(entropy.uniform(0, self._site.plan.freeze_seconds_max))
        elif draw < 0.8:
            self.leave(machine)
        elif draw < 0.9 and self._site.plan.fleet is WorkerModes.MIXED:
            self._change_mode(living)
        elif len(living) < (2 if self._site.plan.is_long else 5):
            self.join()

    def leave(self, machine: Machine) -> None:
        """Ask a worker to stop."""
        worker = self._workers[machine.name]
        if worker is not None:
            self._site.chronicle.note(machine.name, "is asked to stop")
            worker.stop()
            if self._entropy.random() < 0.2:
                self._site.world.loop.call_later(self._entropy.uniform(0, 5), worker.stop)

    def _change_mode(self, living: list[Machine]) -> None:
        """All who live leave, one after the other; others come in another mode."""
        self._mode = self._entropy.choice(
            [mode for mode in DiscoveryMode if mode is not self._mode]
        )
        self._site.chronicle.note("fleet", f"changes its mode to {self._mode}")
        for machine in living:
            self.leave(machine)
        for _ in living:
            self.join()

    def mode_of(self, machine: Machine) -> DiscoveryMode:
        return self._modes[machine.name]

    async def leave_new(self, count: int, *, polling: Polling | None = None) -> None:
        """Some come that can do everything, and all others leave; returns when those have all."""
        for machine in self._living():
            self.leave(machine)
        for _ in range(count):
            self.join(types=TYPES, polling=polling)
        await self._site.clock.sleep(ALONE_SECONDS)

    def make_peace(self) -> None:
        """One more joins that can do everything; most of the others leave."""
        for machine in self._living():
            if self._entropy.random() < 0.7:
                self.leave(machine)
        self.join(types=TYPES)


_MONITOR_SECONDS: Final = (30.0, 80.0)


class StandaloneMonitor:
    """A monitor that is no worker's, as `penstock queue monitor` runs it."""

    def __init__(self, site: WorldEnvironment, machine: Machine) -> None:
        self._site = site
        self._machine = machine

    async def run(self, queue: Queue) -> None:
        await run_monitor(
            queue.access,
            tell=lambda _: None,
            stopping=self._site.peace,
            period_seconds=self._machine.entropy.uniform(*_MONITOR_SECONDS),
        )


class Operator:
    """Damages what is only an index, by hand, with the bucket's own tools."""

    def __init__(self, site: WorldEnvironment) -> None:
        self._site = site
        self._entropy: Entropy = site.world.entropy("operator")

    async def run(self) -> None:
        pause = self._site.plan.storm_seconds / 8
        while not self._site.is_peace:
            await self._site.clock.sleep(self._entropy.uniform(0, pause))
            if not self._site.is_peace:
                self._act()

    def _act(self) -> None:
        bucket, entropy = self._site.bucket, self._entropy
        folders = [LAYOUT.shard_leases, LAYOUT.workers, LAYOUT.ready, LAYOUT.monitor]
        folders += [LAYOUT.doorbell] + ([LAYOUT.inboxes] if self._site.plan.direct else [])
        is_all = self._site.plan.damaged is DamagedHints.ALL
        folder = entropy.choice(folders) if is_all else LAYOUT.doorbell
        keys = [key for key in bucket.objects if key.startswith(folder)]
        if folder == LAYOUT.ready:
            keys = [key for key in keys if LAYOUT.read_pointer(key)]
        if not keys:
            return
        key = entropy.choice(sorted(keys))
        bucket.hand = OPERATOR
        if entropy.random() < 0.6:
            self._site.chronicle.note(OPERATOR, f"deletes {key}")
            bucket.remove(key)
        elif folder == LAYOUT.ready:
            head = key.rpartition("/")[2].partition("@")[0]
            nonce = new_id(entropy, characters=NONCE_CHARACTERS)
            self._site.chronicle.note(OPERATOR, f"doubles {key}")
            bucket.write(key.replace(head, nonce, 1), bucket.objects[key].body, {})
        else:
            self._site.chronicle.note(OPERATOR, f"damages {key}")
            bucket.write(key, b"\x00 not what it was", {})


SETTLED_SECONDS: Final = 2400.0
"""So long after the faults everything must have ended."""

_LOOK_SECONDS: Final = 5.0
_STEPS_MAX: Final = 500_000
_REFUSED: Final = re.compile(r"task (\S+): attempt (\d+) was overtaken")


@dataclass(frozen=True, slots=True)
class WorldReport:
    """What became of one world."""

    seed: int
    fleet: WorkerModes
    profile: WorldProfile
    tasks: int
    starts: int
    refusals: int
    """How many endings were refused, because others had taken over."""
    seconds: float
    violations: tuple[Violation, ...]


def run_world(seed: int, fleet: WorkerModes) -> WorldReport:
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


async def _live(world: World, plan: WorldPlan, seed: int) -> WorldReport:
    async with asyncio.TaskGroup() as group:
        site = WorldEnvironment(world, plan, group)
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


async def _pass(site: WorldEnvironment) -> None:
    plan, group = site.plan, site.group
    site.define_limits()
    workers = SimulatedWorkers(site)
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
    site.run(reader, ReadingClient(site, reader, producers).run)
    if plan.with_monitor:
        monitor = site.machine("monitor")
        site.run(monitor, StandaloneMonitor(site, monitor).run)
    if plan.damaged is not DamagedHints.NONE:
        background.append(group.create_task(Operator(site).run()))
    try:
        await _until(site, plan.storm_seconds, settled=False)
        site.make_peace()
        workers.make_peace()
        site.chronicle.note("world", "faults end")
        if await _until(site, SETTLED_SECONDS, settled=True):
            await _until(site, plan.linger_seconds, settled=False)
            reader = site.machine("last reader")
            site.run(reader, ReadingClient(site, reader, producers).read_all)
            await _until(site, _LOOK_SECONDS, settled=False)
            await _until(site, SETTLED_SECONDS, settled=True)
            if plan.is_probed and not site.chronicle.violations:
                await _probe(site, workers)
        if not site.chronicle.violations:
            site.referee.check_the_end()
    finally:
        for task in background:
            task.cancel()


_PAIR_MAX: Final = 8
"""What is to occupy two workers that run more than this takes long."""


async def _probe(site: WorldEnvironment, workers: SimulatedWorkers) -> None:
    """Have one worker that has all to itself show how prompt it is, and then two owners."""
    await workers.leave_new(1)
    machine, concurrency = workers.last or (None, 0)
    if machine is not None and not machine.has_ended:
        mode = workers.mode_of(machine)
        producer = site.machine("probe")
        probe = PromptnessProbe(site, producer, mode, concurrency=concurrency)
        await _run_probe(site, producer, probe.run)
        is_leased = site.plan.fleet is WorkerModes.LEASED
        if is_leased and concurrency <= _PAIR_MAX and not site.chronicle.violations:
            await _until(site, SETTLED_SECONDS, settled=True)
            # At a pace at which a list ends the tail soon after it was due.
            await workers.leave_new(2, polling=Polling())
            producer = site.machine("probe of two")
            concurrency = max(concurrency, workers.last[1] if workers.last else 0)
            pair = PromptnessProbe(site, producer, mode, concurrency=concurrency)
            await _run_probe(site, producer, pair.run_pair)
    await _until(site, SETTLED_SECONDS, settled=True)


async def _run_probe(
    site: WorldEnvironment, producer: Machine, run: Callable[[Queue], Coroutine[Any, Any, None]]
) -> None:
    site.run(producer, run)
    while not producer.has_ended and not site.chronicle.violations:
        await site.clock.sleep(_LOOK_SECONDS)
        _judge_machines(site)


async def _until(site: WorldEnvironment, seconds: float, *, settled: bool) -> bool:
    """Wait so long, or until all is settled, or something is wrong. Whether all is settled."""
    end = site.world.loop.time() + seconds
    while site.world.loop.time() < end and not site.chronicle.violations:
        await site.clock.sleep(min(_LOOK_SECONDS, end - site.world.loop.time()))
        _judge_machines(site)
        if settled and not site.referee.packs_left() and not site.tracker.unsettled():
            return True
    return False


def _judge_machines(site: WorldEnvironment) -> None:
    for machine in site.machines.values():
        if machine.problem is not None:
            error, machine.problem = machine.problem, None
            for line in "".join(traceback.format_exception(error)).splitlines():
                site.chronicle.note(machine.name, line)
            site.chronicle.accuse(f"The process on {machine.name} fell over: {error!r}.")


class _LogListener(logging.Handler):
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
        elif "failed to write pack" in record.msg and isinstance(record.args, tuple):
            self._referee.doubted.add((who, str(record.args[0])))


@contextmanager
def _listening(referee: Referee) -> Iterator[None]:
    """Let the referee hear the workers."""
    log, ear = logging.getLogger("penstock.queue.execution.pack_runner"), _LogListener(referee)
    log.addHandler(ear)
    try:
        yield
    finally:
        log.removeHandler(ear)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what simulated workers log to themselves."""
    log, work = (
        logging.getLogger("penstock"),
        logging.getLogger("penstock.queue.execution.pack_runner"),
    )
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
