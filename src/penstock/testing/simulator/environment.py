"""The environment of a world: one bucket with an observer, one queue, machines with their networks.

Each machine has clocks of its own, off by up to a day and drifting, and a network of its own
that misbehaves as the plan says, until `make_peace`.

Each machine has its own client of the bucket, `NamedStore`. A request takes effect at one
instant, right after the client's `_send`: there the client puts its name on the bucket. The
observer is called after the change, with the object before and after it, and after every read;
it must not change the bucket. A tombstone (`penstock.store.tombstoned`) is shown as no object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from penstock.kernel.clock import Clock
from penstock.kernel.document_format import encode
from penstock.kernel.errors import StoreError
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.layout import QueueLayout
from penstock.queue.limits import LimitState
from penstock.queue.settings import DispatchSettings, WorkerSelection
from penstock.store.base import Object, ObjectStore, Version
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.retrying import RetryingStore
from penstock.store.tombstoned import TombstonedStore, is_tombstone
from penstock.testing.simulator.history import EventLog, TaskTracker
from penstock.testing.simulator.machines import HostLocks, Machine, MachineStore
from penstock.testing.simulator.plans import KEY_SECONDS, LIMITS, WorldPlan
from penstock.testing.simulator.referee import Referee
from penstock.testing.virtual import World


class ChangeObserver(Protocol):
    """Sees every change. `before` and `after` are bodies; None where there is no object."""

    def saw(
        self,
        who: str,
        key: str,
        *,
        before: bytes | None,
        after: bytes | None,
        version: Version | None,
    ) -> None: ...

    def read(self, who: str, key: str, modified: float) -> None:
        """Somebody has read an object of this date."""


class ObservedBucket(MemoryBucket):
    """A bucket with a witness. Dates its objects to the second, as S3 does."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, date_resolution_seconds=1.0)
        self.witness: ChangeObserver | None = None
        self.hand = ""
        """Who makes the present change."""

    def write(self, key: str, body: bytes, metadata: Mapping[str, str]) -> Version:
        known = self.objects.get(key)
        version = super().write(key, body, metadata)
        before = None if known is None or is_tombstone(known.body) else known.body
        if not is_tombstone(body):
            self._show(key, before, body, version)
        elif known is not None:
            self._show(key, before, None, known.version)
        return version

    def remove(self, key: str) -> None:
        known = self.objects[key]
        super().remove(key)
        self._show(key, None if is_tombstone(known.body) else known.body, None, known.version)

    def _show(self, key: str, before: bytes | None, after: bytes | None, version: Version) -> None:
        if self.witness is not None and not (before is None and after is None):
            self.witness.saw(self.hand, key, before=before, after=after, version=version)


class NamedStore(MemoryStore):
    """A client of a watched bucket."""

    def __init__(self, bucket: ObservedBucket, *, clock: Clock, name: str) -> None:
        super().__init__(bucket, clock=clock)
        self._watched = bucket
        self._name = name

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        found = await super().get(key, unless=unless)
        is_there = found is not None and not is_tombstone(found.body)
        if found is not None and is_there and self._watched.witness is not None:
            self._watched.witness.read(self._name, key, found.modified)
        return found

    async def _send(self) -> float:
        sent = await super()._send()
        # Nothing else runs between here and the change.
        self._watched.hand = self._name
        return sent


LAYOUT: Final = QueueLayout("sim")
_DAY_SECONDS: Final = 86_400.0
_DRIFT: Final = 150e-6
_PEACE: Final = FaultPlan(latency_seconds_max=0.1)
_OPENING_TRIES: Final = 20


class WorldEnvironment:
    """One world's bucket, machines and referee."""

    def __init__(self, world: World, plan: WorldPlan, group: asyncio.TaskGroup) -> None:
        self.world = world
        self.plan = plan
        self.group = group
        self.bucket = ObservedBucket(world.clock())
        self.tracker = TaskTracker()
        self.chronicle = EventLog(world.loop.time)
        self.referee = Referee(LAYOUT, self.tracker, self.chronicle, world.now)
        self.referee.is_swept = plan.is_swept
        self.referee.is_provably_gone = self._is_provably_gone
        self.referee.freezes = self._freezes
        self.bucket.witness = self.referee
        self.machines: dict[str, Machine] = {}
        self.hosts: dict[str, str] = {}
        """Machine → the host that it is on, alone or beside others."""
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

    def _freezes(self, machine: str) -> int | None:
        known = self.machines[machine]
        return None if known.is_halted else known.freezes

    def define_limits(self) -> None:
        """Write the limits, before anybody comes."""
        for limit, definition in LIMITS.items() if self.plan.features.limited else ():
            state = LimitState(definition=definition)
            self.bucket.write(LAYOUT.limit(limit), encode(state), {})

    def machine(self, name: str, *, host: str = "") -> Machine:
        """One more machine, on a host of its own or where another one is or was."""
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
        reached: ObjectStore = MachineStore(network, machine)
        if self.plan.racy_delete_seconds_max:
            reached = TombstonedStore(reached, entropy=machine.entropy)
        store = RetryingStore(reached, entropy=machine.entropy)
        config = QueueConfig(
            shards=self.plan.shards, key_seconds=KEY_SECONDS, direct=self.plan.direct
        )
        # With affinities, inboxes are chosen by them.
        by = WorkerSelection.HASH if self.plan.features.affine else WorkerSelection.ROUND_ROBIN
        dispatch = DispatchSettings(worker_selection=by)
        for _ in range(_OPENING_TRIES):
            try:
                queue = Queue(
                    "",
                    name=LAYOUT.queue,
                    config=config,
                    dispatch=dispatch,
                    gather_seconds=self.plan.features.gather_seconds,
                )
                await queue.attach(store, machine.entropy)
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
