"""Workers that join, leave, crash, freeze and come back in another mode.

At the beginning there are as many as the plan says. Then, until the peace, one thing after the
other happens to one of them. At the peace a worker joins that has all handlers, so that whatever
is left can end. A worker whose process was ended by a task is followed by another, then as well.
"""

from __future__ import annotations

from typing import Final

from penstock.kernel.errors import WorkerIdConflict
from penstock.queue.client import Queue
from penstock.queue.settings import Mode
from penstock.queue.worker import Worker
from penstock.testing.simulator.deeds import TYPES, Deeds
from penstock.testing.simulator.machines import Blow, Machine, Trigger
from penstock.testing.simulator.plans import Fleet, Profile
from penstock.testing.simulator.site import Site

_CONCURRENCY: Final = (1, 1, 2, 4)
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
    Profile.KEYS: ("ledger create", "ledger delete", "pack delete", "pack get", "archive create"),
    Profile.LATE: ("pack get", "pack get", "ledger create", "ledger delete", "pack delete"),
    Profile.ECHOES: ("ledger create", "ledger create", "ledger swap", "ledger delete"),
}


class Workers:
    """The workers of a world."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._entropy = site.world.entropy("fleet")
        self._names = site.world.entropy("names")
        self._mode: Mode | None = None
        self._workers: dict[str, Worker] = {}

    async def run(self) -> None:
        """Let things happen until the peace."""
        site, plan = self._site, self._site.plan
        for number in range(plan.workers):
            # Something that comes late is worst where somebody has gone on meanwhile.
            is_sound = plan.profile is Profile.LATE and number > 0
            self.join(types=TYPES if is_sound else None, is_sound=is_sound)
        pause = plan.storm_seconds / (2 + plan.workers)
        while not site.is_peace:
            await site.clock.sleep(self._entropy.uniform(0, 2 * pause))
            if not site.is_peace:
                self._happen()

    def join(
        self, *, types: tuple[str, ...] | None = None, is_sound: bool = False, host: str = ""
    ) -> None:
        """One more worker, on a host of its own or where another one was."""
        site, entropy = self._site, self._entropy
        machine = site.machine(f"w{len(self._workers)}", host=host)
        mode = self._mode or site.plan.mode(entropy)
        settings = site.plan.settings(entropy)
        concurrency = entropy.choice(_CONCURRENCY)
        timeout_seconds = entropy.uniform(3, 10)
        if types is None:
            types = TYPES if entropy.random() < 0.7 else (entropy.choice(TYPES),)
        name = self._name(machine, mode)
        self._workers[machine.name] = None  # type: ignore[assignment]  # until it has opened

        async def work(queue: Queue) -> None:
            worker = Worker(queue, concurrency=concurrency, mode=mode, name=name, settings=settings)
            self._workers[machine.name] = worker
            deeds = Deeds(
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

    def _name(self, machine: Machine, mode: Mode) -> str:
        """The name of a worker: in `direct`, now and then that of one that was there before."""
        if mode is not Mode.DIRECT or self._site.is_peace or self._names.random() < 0.6:
            return machine.name
        return self._names.choice([*self._workers, machine.name])

    def _triggers(self) -> list[Trigger]:
        """What befalls the next worker."""
        plan, entropy = self._site.plan, self._entropy
        if plan.profile is Profile.LATE and len(self._workers) == 1 and entropy.random() < 0.8:
            return self._ghost()
        spots = _SPOTS_OF.get(plan.profile, _SPOTS) + (_DIRECT_SPOTS if plan.direct else ())
        triggers: list[Trigger] = []
        for _ in range(2 if plan.is_long else 1):
            triggers += plan.triggers(entropy, spots, chance=0.8)
        return triggers

    def _ghost(self) -> list[Trigger]:
        """A worker claims and freezes; when all is archived its claim comes again, and it thaws."""
        seconds = self._entropy.uniform(450, 600)
        # It thaws soon after, before a monitor has removed what came again.
        later = seconds + self._entropy.uniform(2, 30)
        if self._entropy.random() < 0.5:
            echo = Trigger(Blow.ECHOES, "ledger create", seconds=seconds)
            return [echo, Trigger(Blow.FREEZES_AFTER, "pack get", seconds=later)]
        return [Trigger(Blow.ECHOES, "ledger create", seconds=seconds, freeze_seconds=later)]

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
        elif draw < 0.9 and self._site.plan.fleet is Fleet.MIXED:
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
        self._mode = self._entropy.choice([mode for mode in Mode if mode is not self._mode])
        self._site.chronicle.note("fleet", f"changes its mode to {self._mode}")
        for machine in living:
            self.leave(machine)
        for _ in living:
            self.join()

    def make_peace(self) -> None:
        """One more joins that can do everything; most of the others leave."""
        for machine in self._living():
            if self._entropy.random() < 0.7:
                self.leave(machine)
        self.join(types=TYPES)
