"""Where a world takes place: one bucket, one queue, and the machines with their networks.

Each machine has clocks of its own, off by up to a day and drifting, and a network of its own that
misbehaves as the plan says, until `make_peace`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

from penstock.kernel.errors import StoreError
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.layout import QueueLayout
from penstock.store.base import ObjectStore
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.retrying import RetryingStore
from penstock.store.tombstoned import TombstonedStore
from penstock.testing.simulator.chronicle import Chronicle
from penstock.testing.simulator.machines import HostLocks, Machine, MortalStore
from penstock.testing.simulator.plans import KEY_SECONDS, Plan
from penstock.testing.simulator.referee import Referee
from penstock.testing.simulator.tracking import Tracker
from penstock.testing.simulator.watched import NamedStore, WatchedBucket
from penstock.testing.virtual import World

LAYOUT: Final = QueueLayout("sim")
_DAY_SECONDS: Final = 86_400.0
_DRIFT: Final = 150e-6
_PEACE: Final = FaultPlan(latency_seconds_max=0.1)
_OPENING_TRIES: Final = 20


class Site:
    """One world's bucket, machines and referee."""

    def __init__(self, world: World, plan: Plan, group: asyncio.TaskGroup) -> None:
        self.world = world
        self.plan = plan
        self.group = group
        self.bucket = WatchedBucket(world.clock())
        self.tracker = Tracker()
        self.chronicle = Chronicle(world.loop.time)
        self.referee = Referee(LAYOUT, self.tracker, self.chronicle, world.now)
        self.referee.is_swept = plan.is_swept
        self.referee.is_provably_gone = self._is_provably_gone
        self.bucket.witness = self.referee
        self.machines: dict[str, Machine] = {}
        self.hosts: dict[str, str] = {}
        """Machine → the host that it is on; several, one after the other, may be on one."""
        self._locks: dict[str, HostLocks] = {}
        self.peace = asyncio.Event()
        self.clock = world.clock()
        self._networks: list[FaultyStore] = []
        self._numbers = 0

    @property
    def is_peace(self) -> bool:
        """Whether nothing fails any more."""
        return self.peace.is_set()

    def next_number(self) -> int:
        """A number for one more task."""
        self._numbers += 1
        return self._numbers

    def _is_provably_gone(self, machine: str, to: str) -> bool:
        """Whether a machine can know that another one's process has ended."""
        same = self.hosts.get(machine, machine) == self.hosts.get(to, to)
        return same and machine in self.machines and self.machines[machine].is_dead

    def machine(self, name: str, *, host: str = "") -> Machine:
        """One more machine, on a host of its own or where another one was."""
        self.hosts[name] = host or name
        entropy = self.world.entropy(f"machine {name}")
        clock = self.world.clock(
            skew_seconds=entropy.uniform(-_DAY_SECONDS, _DAY_SECONDS),
            drift=entropy.uniform(-_DRIFT, _DRIFT),
        )
        machine = Machine(name, clock=clock, entropy=entropy, tell=self.chronicle.note)
        self.machines[name] = machine
        return machine

    def run(self, machine: Machine, process: Callable[[Queue], Coroutine[Any, Any, None]]) -> None:
        """Run a process on a machine, with a connection to the queue."""

        async def live() -> None:
            await process(await self._queue(machine))

        machine.start(self.group, live)

    async def _queue(self, machine: Machine) -> Queue:
        plan = self._faults(_PEACE if self.is_peace else self.plan.faults)
        backend = NamedStore(self.bucket, clock=machine.network_clock, name=machine.name)
        network = FaultyStore(backend, plan, entropy=machine.entropy)
        self._networks.append(network)
        reached: ObjectStore = MortalStore(network, machine)
        if self.plan.racy_delete_seconds_max:
            reached = TombstonedStore(reached, entropy=machine.entropy)
        store = RetryingStore(reached, entropy=machine.entropy)
        config = QueueConfig(
            shards=self.plan.shards, key_seconds=KEY_SECONDS, direct=self.plan.direct
        )
        for _ in range(_OPENING_TRIES):
            try:
                queue = await Queue.on(
                    store, name=LAYOUT.queue, entropy=machine.entropy, config=config
                )
            except StoreError:
                await machine.clock.sleep(1)
            else:
                host = self.hosts[machine.name]
                queue.locks = self._locks.setdefault(host, HostLocks()).of(machine)
                return queue
        raise AssertionError("the queue could not be opened in so many tries")

    def _faults(self, faults: FaultPlan) -> FaultPlan:
        """These, and what the store is always like."""
        return replace(faults, racy_delete_seconds_max=self.plan.racy_delete_seconds_max)

    def make_peace(self) -> None:
        """From now on nothing fails, and whatever was frozen goes on."""
        self.peace.set()
        for network in self._networks:
            network.plan = self._faults(_PEACE)
        for machine in self.machines.values():
            machine.thaw()

    def end(self) -> None:
        """Everything stops where it is."""
        self.bucket.witness = None
        for machine in self.machines.values():
            machine.die()
