"""Worlds of workers that join, crash, pause and come back, over a store that loses answers.

An operator deletes and damages registrations and lease objects meanwhile, clocks are wrong by a
day, and loads change. A referee watches every write that reaches the bucket, on true time.
Whatever the seed:
- the epochs of a shard only grow, also across deletes;
- a lease that names an owner names one whose registration had the shard before, and the former
  owner has been ended or relieved of it;
- nobody is ended whose lease has not ended, and nobody reports a shard after its lease has ended;
- when the faults stop and a worker lives, every shard has exactly one live owner, and only that one
  reports it, within `SETTLED_SECONDS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from penstock.kernel.clock import Clock
from penstock.kernel.document_format import AnyDocument, decode
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import UnreadableObject
from penstock.queue.layout import QueueLayout
from penstock.queue.settings import ShardLeaseSettings
from penstock.queue.shards.allocation import WorkerLoad
from penstock.queue.shards.leases import ShardLeases
from penstock.queue.shards.registry import OwnerRole, Registration, ShardLease
from penstock.store.base import Version
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Meter, MeteredStore
from penstock.store.retrying import RetryingStore
from penstock.testing.virtual import World, simulate
from tests.sizes import seeds, some

LAYOUT = QueueLayout("sim")
SEEDS = some(120)
SETTLED_SECONDS = 800.0
"""10 minutes until the damaged lease of a live owner is missed, and the longest ttl, and slack."""

IDLE, BUSY, SATURATED = WorkerLoad(idle_seconds=600.0), WorkerLoad(), WorkerLoad(saturated=True)
FAULTS = FaultPlan(
    latency_seconds_max=2.0,
    throttled=0.03,
    failed=0.03,
    lost_request=0.03,
    lost_answer=0.1,
    duplicate=0.05,
    late_request=0.03,
    late_seconds_max=40.0,
)


class WatchedBucket(MemoryBucket):
    """A bucket that shows every write of the workers to the referee."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, date_resolution_seconds=1.0)
        self.referee: Referee | None = None

    def write(self, key: str, body: bytes, metadata: Mapping[str, str]) -> Version:
        if self.referee is not None:
            self.referee.watch(key, body)
        return super().write(key, body, metadata)

    def damage(self, key: str, body: bytes) -> None:
        super().write(key, body, {})


@dataclass
class Referee:
    """Sees the bucket as it is, and remembers."""

    bucket: WatchedBucket
    shards: int
    machines: list[Machine] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)
    last: set[tuple[int, int, str]] = field(default_factory=set)
    ends: dict[str, float] = field(default_factory=dict)
    projected: set[tuple[str, int, int]] = field(default_factory=set)
    takes: int = 0
    takeovers: int = 0

    def watch(self, key: str, body: bytes) -> None:
        """One write that is about to be done."""
        worker = LAYOUT.read_worker(key)
        if worker is not None:
            self._watch_worker(worker, decode(Registration, body, where=key))
        elif key.startswith(LAYOUT.shard_leases):
            shard = int(key.removeprefix(LAYOUT.shard_leases).removesuffix(".json"))
            self._watch_lease(shard, decode(ShardLease, body, where=key))

    def _watch_worker(self, worker: str, new: Registration) -> None:
        if new.role is OwnerRole.GONE:
            self.takeovers += 1
            assert not any(m.leases.owned() for m in self.machines if m.leases.worker == worker), (
                "an owner was ended that trusts its lease"
            )
        if new.role is OwnerRole.OWNER:
            self.ends[worker] = max(self.ends.get(worker, 0), new.expires_ms / 1000)
        self.projected.update((worker, shard, epoch) for shard, epoch in new.shards.items())

    def _watch_lease(self, shard: int, new: ShardLease) -> None:
        if not new.worker:
            return
        # A write that arrives twice, with its create, after a delete, is the same take.
        grew = new.epoch > self.epochs.get(shard, 0) or (shard, new.epoch, new.worker) in self.last
        assert grew, f"the epoch of shard {shard} went back"
        self.last = {entry for entry in self.last if entry[0] != shard}
        self.last.add((shard, new.epoch, new.worker))
        assert (new.worker, shard, new.epoch) in self.projected, (
            "a lease came before its projection"
        )
        assert new.epoch <= self.bucket.clock.wall() * 1000 + 1, "an epoch is ahead of the time"
        self._watch_former_owner(shard, new)
        self.epochs[shard] = new.epoch
        self.takes += 1

    def _watch_former_owner(self, shard: int, new: ShardLease) -> None:
        before = _stored(self.bucket, ShardLease, LAYOUT.shard_lease(shard))
        if before is None or before.worker in ("", new.worker):
            return
        holder = _stored(self.bucket, Registration, LAYOUT.worker(before.worker))
        if holder is not None and holder.role is OwnerRole.OWNER:
            assert holder.shards.get(shard) != before.epoch, "its owner was not ended or relieved"

    def check_reports(self) -> None:
        """What workers say that they own now."""
        for machine in self.machines:
            if machine.leases.owned():
                ends = self.ends[machine.leases.worker]
                assert self.bucket.clock.wall() < ends, "a worker trusts a lease that is over"
                for shard, epoch in machine.leases.epochs().items():
                    assert epoch <= self.epochs[shard]

    def owner(self, shard: int) -> str | None:
        """Who owns a shard, by what is stored."""
        lease = _stored(self.bucket, ShardLease, LAYOUT.shard_lease(shard))
        if lease is None or not lease.worker:
            return None
        holder = _stored(self.bucket, Registration, LAYOUT.worker(lease.worker))
        if holder is None or holder.role is not OwnerRole.OWNER or shard not in holder.shards:
            return None
        live = self.bucket.clock.wall() * 1000 < holder.expires_ms
        return lease.worker if live else None

    def unsettled(self) -> list[str]:
        """What is not as it should be, in words."""
        problems = []
        for shard in range(self.shards):
            owner = self.owner(shard)
            saying = [m.leases.worker for m in self.machines if shard in m.leases.owned()]
            if owner is None or saying != [owner]:
                problems.append(f"shard {shard} is owned by {owner} and looked at by {saying}")
        return problems


def _stored(bucket: MemoryBucket, kind: type[AnyDocument], key: str) -> AnyDocument | None:
    stored = bucket.objects.get(key)
    try:
        return decode(kind, stored.body, where=key) if stored else None
    except UnreadableObject:
        return None


class Machine:
    """A worker's lease loop on its own machine, with its own clock and its own bad network."""

    def __init__(
        self,
        world: World,
        referee: Referee,
        number: int,
        *,
        faults: FaultPlan,
        meter: Meter | None = None,
    ) -> None:
        self.entropy: Entropy = world.entropy(f"machine {number}")
        self._clock = world.clock(
            skew_seconds=self.entropy.uniform(-86_400, 86_400),
            drift=self.entropy.uniform(-150e-6, 150e-6),
        )
        network = world.entropy(f"network {number}")
        self.pauses = 0.0 if faults == FaultPlan() else 0.004

        async def delay() -> None:
            pause = network.random() < self.pauses
            await self._clock.sleep(network.uniform(0, 200 if pause else 0.1))

        inner = MemoryStore(referee.bucket, clock=self._clock, delay=delay)
        metered = MeteredStore(inner, meter or Meter())
        self.faulty = FaultyStore(metered, faults, entropy=network)
        self.leases = ShardLeases(
            RetryingStore(self.faulty, entropy=network),
            LAYOUT,
            name=f"w{number}",
            shards=referee.shards,
            handles=frozenset({"t"}),
            settings=ShardLeaseSettings(),
            entropy=self.entropy,
        )
        self.load = BUSY
        self.crashed = False

    async def run(self) -> None:
        while not self.crashed:
            seconds = await self.leases.turn(self.load)
            assert 0 < seconds <= 7200
            if self.entropy.random() < 5 * self.pauses:
                seconds = self.entropy.uniform(0, 300)
            await self._clock.sleep(seconds)

    def calm(self) -> None:
        self.faulty.plan = FaultPlan()
        self.pauses = 0.0


async def _operate(world: World, bucket: WatchedBucket) -> None:
    """An operator with heavy hands."""
    clock, entropy = world.clock(), world.entropy("operator")
    while True:
        await clock.sleep(entropy.uniform(0, 90))
        folder = entropy.choice([LAYOUT.workers, LAYOUT.shard_leases])
        keys = [key for key in sorted(bucket.objects) if key.startswith(folder)]
        many = entropy.random() < 0.1
        for key in keys if many else [entropy.choice(keys)] if keys else []:
            if entropy.random() < 0.5:
                bucket.remove(key)
            else:
                bucket.damage(key, b"damaged %d" % entropy.getrandbits(32))


async def _trouble(world: World, machines: list[Machine], group: asyncio.TaskGroup) -> None:
    """Machines come, go for ever, and have more or less to do."""
    clock, entropy = world.clock(), world.entropy("trouble")
    waiting = list(machines)
    ends = world.now() + entropy.uniform(60, 1500)
    while world.now() < ends or waiting:
        await clock.sleep(entropy.uniform(0, 30))
        if waiting and entropy.random() < 0.7:
            group.create_task(waiting.pop().run())
        machine = entropy.choice(machines)
        machine.load = entropy.choice([IDLE, BUSY, SATURATED])
        living = [each for each in machines if not each.crashed]
        if len(living) > 1 and entropy.random() < 0.1:
            entropy.choice(living).crashed = True


async def a_world(world: World) -> Referee:
    entropy = world.entropy("world")
    bucket = WatchedBucket(world.clock())
    referee = bucket.referee = Referee(bucket, shards=entropy.choice([1, 4, 8, 16]))
    for number in range(entropy.randrange(1, 9)):
        referee.machines.append(Machine(world, referee, number, faults=FAULTS))
    clock = world.clock()
    async with asyncio.TaskGroup() as group:
        group.create_task(_referee(clock, referee))
        operator = group.create_task(_operate(world, bucket))
        await _trouble(world, referee.machines, group)
        operator.cancel()
        for machine in referee.machines:
            machine.calm()
        limit = world.now() + SETTLED_SECONDS
        while referee.unsettled() and world.now() < limit:
            await clock.sleep(5)
        assert not referee.unsettled()
        for machine in referee.machines:
            machine.crashed = True
    return referee


async def _referee(clock: Clock, referee: Referee) -> None:
    while not all(machine.crashed for machine in referee.machines):
        referee.check_reports()
        await clock.sleep(1.7)


@pytest.mark.proof
@pytest.mark.parametrize("block", range(6))
def test_leases_hold_in_every_world(block: int) -> None:
    takes = takeovers = 0
    for seed in seeds(SEEDS)[block::6]:
        referee = simulate(a_world, seed=seed)
        takes, takeovers = takes + referee.takes, takeovers + referee.takeovers
    assert takeovers > SEEDS / 6, "nobody was ever taken over: the worlds are too kind"


def test_a_world_is_a_function_of_its_seed() -> None:
    one, other = (simulate(a_world, seed=8) for _ in range(2))
    assert one.epochs == other.epochs
    assert one.bucket.objects == other.bucket.objects


class Fleet:
    """Machines over a store without faults, all of which have the same load."""

    def __init__(self, world: World, *, machines: int, shards: int) -> None:
        self.meter = Meter()
        self.bucket = WatchedBucket(world.clock())
        self.referee = self.bucket.referee = Referee(self.bucket, shards=shards)
        self.referee.machines += [
            Machine(world, self.referee, number, faults=FaultPlan(), meter=self.meter)
            for number in range(machines)
        ]

    def owners(self) -> list[int]:
        """How many shards each of the owners has."""
        owned = [len(machine.leases.owned()) for machine in self.referee.machines]
        return sorted(filter(None, owned))

    def feel(self, load: WorkerLoad) -> None:
        for machine in self.referee.machines:
            machine.load = load

    def start(self, group: asyncio.TaskGroup) -> None:
        for machine in self.referee.machines:
            group.create_task(machine.run())

    def stop(self) -> None:
        for machine in self.referee.machines:
            machine.crashed = True


SPREAD_SECONDS = 90.0
"""A saturated owner's shards are spread over 7 standbys: 10 s until it says so, 8 looks at most."""


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(some(5)))
def test_saturated_workers_share_and_one_owner_is_left_when_all_are_idle(seed: int) -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        fleet = Fleet(world, machines=10, shards=64)
        async with asyncio.TaskGroup() as group:
            fleet.start(group)
            await clock.sleep(60)
            assert fleet.owners() == [64], "one owner is enough while there is little to do"
            fleet.feel(SATURATED)
            await clock.sleep(SPREAD_SECONDS)
            assert len(fleet.owners()) == 10
            fleet.feel(IDLE)
            await clock.sleep(1800)
            assert fleet.owners() == [64]
            assert not fleet.referee.unsettled()
            fleet.feel(SATURATED)
            await clock.sleep(SPREAD_SECONDS)
            assert len(fleet.owners()) == 10
            fleet.stop()

    simulate(main, seed=seed)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(some(5)))
def test_eight_saturated_workers_own_eight_shards_each(seed: int) -> None:
    async def main(world: World) -> None:
        fleet = Fleet(world, machines=8, shards=64)
        async with asyncio.TaskGroup() as group:
            fleet.feel(SATURATED)
            fleet.start(group)
            await world.clock().sleep(SPREAD_SECONDS)
            assert fleet.owners() == [8] * 8
            fleet.stop()

    simulate(main, seed=seed)


TAKEOVER_SECONDS = 72 + 10.0
"""From the end of a lease: the longest time between two looks, and the requests of a take."""


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(some(20)))
def test_what_the_dead_had_is_taken_within_the_bound(seed: int) -> None:
    async def main(world: World) -> None:
        entropy, clock = world.entropy("deaths"), world.clock()
        fleet = Fleet(world, machines=entropy.randrange(2, 12), shards=16)
        async with asyncio.TaskGroup() as group:
            fleet.start(group)
            fleet.feel(entropy.choice([BUSY, IDLE, SATURATED]))
            await clock.sleep(entropy.uniform(60, 900))
            machines = fleet.referee.machines
            for machine in machines[1:]:
                machine.crashed = entropy.random() < 0.7
            ends = [fleet.referee.ends.get(machine.leases.worker, 0) for machine in machines]
            await clock.sleep(max(0.0, max(ends) - world.now()) + TAKEOVER_SECONDS)
            fleet.referee.machines = [machine for machine in machines if not machine.crashed]
            assert not fleet.referee.unsettled()
            fleet.stop()

    simulate(main, seed=seed)


def test_an_idle_fleet_of_fifty_costs_what_it_says() -> None:
    hours = 6

    async def main(world: World) -> float:
        clock = world.clock()
        fleet = Fleet(world, machines=50, shards=64)
        async with asyncio.TaskGroup() as group:
            fleet.feel(IDLE)
            fleet.start(group)
            await clock.sleep(3600)
            before = fleet.meter.dollars(label="leases")
            await clock.sleep(hours * 3600)
            assert fleet.owners() == [64]
            spent = fleet.meter.dollars(label="leases") - before
            fleet.stop()
        return spent

    dollars = simulate(main, seed=1) * 30 * 24 / hours
    assert 1.3 < dollars < 1.6, "the docstring of the leases says 1.47"
