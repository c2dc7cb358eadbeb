"""The number of shards changes under a live fleet: no slot is left alone, no epoch goes back.

A referee looks every half second which slots a live worker looks at, and at every write of a lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import pytest

from penstock.kernel.document_format import decode, encode
from penstock.kernel.errors import InvalidInput, StoreError
from penstock.queue.config import ConfigWatch, QueueConfig, change_config, make_queue, reshard
from penstock.queue.ids import SLOTS
from penstock.queue.layout import QueueLayout
from penstock.queue.settings import ShardLeaseSettings
from penstock.queue.shards.allocation import Cut, WorkerLoad
from penstock.queue.shards.leases import ShardLeases
from penstock.queue.shards.registry import OwnerRole, Registration, ShardLease
from penstock.queue.shards.reshard import OWNER_SECONDS, ShardTenures
from penstock.store.base import ObjectStore, Version
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.retrying import RetryingStore
from penstock.testing.simulator import worlds
from penstock.testing.simulator.plans import DamagedHints, draw
from penstock.testing.simulator.plans import WorkerModes as Simulated
from penstock.testing.simulator.worlds import Operator
from penstock.testing.virtual import World, simulate
from tests.sizes import some

LAYOUT = QueueLayout("q")
_OPERATOR = "operator"
BUSY, SATURATED, IDLE = WorkerLoad(), WorkerLoad(saturated=True), WorkerLoad(idle_seconds=1000)
FAULTS = FaultPlan(latency_seconds_max=0.3, throttled=0.03, lost_answer=0.03, lost_request=0.03)
MOVED_SECONDS = 30 + 60 + 10 + 5
"""What `penstock.queue.shards.reshard` promises of the owners of a live fleet, and a turn."""
DEAD_SECONDS = 90 + 72 + 10 + 30
"""Its bound for the slots of a dead worker that may have been idle, with retries."""


class Witness(MemoryBucket):
    """A bucket that remembers every epoch of every lease."""

    def __init__(self, world: World) -> None:
        super().__init__(world.clock(), date_resolution_seconds=1.0)
        self.epochs: dict[str, int] = {}

    def write(self, key: str, body: bytes, metadata: Mapping[str, str]) -> Version:
        if key.startswith(LAYOUT.shard_leases):
            epoch = decode(ShardLease, body, where=key).epoch
            assert epoch >= self.epochs.get(key, 0), f"{key} goes back to {epoch}"
            self.epochs[key] = epoch
        return super().write(key, body, metadata)


class Deaf(ConfigWatch):
    """The settings as a worker of an older release sees them: as they were."""

    async def read(self) -> QueueConfig:
        return self.config


@dataclass
class Machine:
    """A worker, as far as it owns shards."""

    tenures: ShardTenures
    load: WorkerLoad
    run: asyncio.Task[None]
    is_deaf: bool = False

    @property
    def is_alive(self) -> bool:
        return not self.run.done()


@dataclass
class Fleet:
    """Machines on one bucket, and the referee."""

    world: World
    group: asyncio.TaskGroup
    bucket: Witness
    faults: FaultPlan = field(default_factory=FaultPlan)
    meter: Meter = field(default_factory=Meter)
    machines: list[Machine] = field(default_factory=list)
    gap_seconds: float = 0.0

    def store(self) -> ObjectStore:
        entropy = self.world.entropy(f"store {len(self.machines)}")
        metered = MeteredStore(MemoryStore(self.bucket, clock=self.world.clock()), self.meter)
        return RetryingStore(FaultyStore(metered, self.faults, entropy=entropy), entropy=entropy)

    async def start(self, load: WorkerLoad = BUSY, *, is_deaf: bool = False) -> Machine:
        name = f"m{len(self.machines)}"
        store, entropy = self.store(), self.world.entropy(name)
        await store.now()
        clock = store.clock.machine
        found = await store.get(LAYOUT.config)
        assert found is not None
        config = decode(QueueConfig, found.body, where="config")

        def begin(cut: Cut, **given: object) -> ShardLeases:
            return ShardLeases(
                store,
                LAYOUT,
                name=name,
                shards=cut.shards,
                era=cut.era,
                settings=ShardLeaseSettings(shards_per_worker=2),
                entropy=entropy,
                **given,  # type: ignore[arg-type]  # As `Begin` has them.
            )

        watch = (Deaf if is_deaf else ConfigWatch)(store, LAYOUT, config)
        tenures = ShardTenures(watch, begin=begin, clock=clock)

        async def live() -> None:
            while True:
                try:
                    seconds = await tenures.turn(machine.load)
                except StoreError:
                    seconds = 5.0
                await clock.sleep(min(seconds, 5.0))

        machine = Machine(tenures, load, self.group.create_task(live()), is_deaf)
        self.machines.append(machine)
        return machine

    @property
    def alive(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.is_alive]

    async def reshard(self, shards: int) -> QueueConfig:
        for _ in range(20):
            try:
                store = self.store()
                return await reshard(store, LAYOUT, shards, entropy=self.world.entropy("people"))
            except StoreError:
                await self.wait(1)
        raise AssertionError("the settings could not be changed")

    async def wait(self, seconds: float) -> None:
        await self.world.clock().sleep(seconds)

    async def watch(self) -> None:
        """Note the longest time for which a slot was looked at by nobody, once all were."""
        since: dict[int, float] = {}
        has_begun = False
        while True:
            parts = [run for machine in self.alive for run in machine.tenures.slots()]
            covered = frozenset(slot for part in parts for slot in part[:: SLOTS // 64])
            has_begun = has_begun or len(covered) == 64
            now = self.world.now()
            alone = [slot for slot in range(0, SLOTS, SLOTS // 64) if slot not in covered]
            since = {slot: since.get(slot, now) for slot in alone} if has_begun else {}
            self.gap_seconds = max([self.gap_seconds, *(now - at for at in since.values())])
            await self.wait(0.5)

    def owners(self, cut: Cut) -> dict[int, list[Machine]]:
        """Who owns what under a cut."""
        owners: dict[int, list[Machine]] = {shard: [] for shard in range(cut.shards)}
        for machine in self.alive:
            if machine.tenures.present.cut == cut:
                for shard in machine.tenures.present.owned():
                    owners[shard].append(machine)
        return owners

    def registrations(self) -> list[Registration]:
        return [
            decode(Registration, stored.body, where=key)
            for key, stored in self.bucket.objects.items()
            if key.startswith(LAYOUT.workers)
        ]


def _play(
    act: Callable[[Fleet], object],
    *,
    seed: int = 1,
    shards: int = 8,
    faults: FaultPlan | None = None,
) -> Fleet:
    async def main(world: World) -> Fleet:
        async with asyncio.TaskGroup() as group:
            fleet = Fleet(world, group, Witness(world), faults or FaultPlan())
            peaceful = MemoryStore(fleet.bucket, clock=world.clock())
            await make_queue(peaceful, LAYOUT, QueueConfig(shards=shards))
            watching = group.create_task(fleet.watch())
            await act(fleet)  # type: ignore[misc]  # It is a coroutine.
            watching.cancel()
            for machine in fleet.machines:
                machine.run.cancel()
        return fleet

    return simulate(main, seed=seed)


@pytest.mark.parametrize("to", [1, 4, 16, 64])
def test_a_busy_fleet_moves_within_its_bound_and_never_looks_away(to: int) -> None:
    async def act(fleet: Fleet) -> None:
        for _ in range(4):
            await fleet.start(SATURATED)
        await fleet.wait(300)
        before = {id(machine): bool(machine.tenures.slots()) for machine in fleet.machines}
        assert all(before.values()), "each has a part"
        config = await fleet.reshard(to)
        await fleet.wait(MOVED_SECONDS)
        owners = fleet.owners(config.cut)
        assert all(len(who) == 1 for who in owners.values())
        # The work stays where it was: nobody takes all of it.
        assert len({id(who[0]) for who in owners.values()}) == min(4, to)
        for machine in fleet.alive:
            assert machine.tenures.slots() == machine.tenures.present.slots()

    for seed in range(5):
        assert _play(act, seed=seed).gap_seconds == 0


def test_the_one_owner_of_an_idle_fleet_moves_and_standbys_follow() -> None:
    async def act(fleet: Fleet) -> None:
        for _ in range(6):
            await fleet.start(IDLE)
        await fleet.wait(600)
        leases = dict(fleet.bucket.epochs)
        config = await fleet.reshard(32)
        await fleet.wait(MOVED_SECONDS)
        owners = fleet.owners(config.cut)
        assert len({id(each) for who in owners.values() for each in who}) == 1
        await fleet.wait(60)
        assert {machine.tenures.present.cut for machine in fleet.alive} == {config.cut}
        roles = [each.role for each in fleet.registrations() if each.era == config.era]
        assert sorted(roles) == [OwnerRole.OWNER, *[OwnerRole.STANDBY] * 5]
        # Nobody has taken what was left: they knew of the change before.
        assert leases.items() <= fleet.bucket.epochs.items()

    for seed in range(3):
        assert _play(act, seed=seed).gap_seconds == 0


def test_workers_of_an_older_release_go_on_beside_and_hold_up_nobody() -> None:
    async def act(fleet: Fleet) -> None:
        deaf = await fleet.start(SATURATED, is_deaf=True)
        await fleet.start(SATURATED)
        await fleet.wait(200)
        config = await fleet.reshard(16)
        await fleet.wait(MOVED_SECONDS)
        assert all(len(who) == 1 for who in fleet.owners(config.cut).values())
        assert deaf.tenures.slots() != ()
        # A registration without its era, as an older release writes it, is of the first.
        assert Registration(role=OwnerRole.OWNER, shards={0: 1}).slots == (range(SLOTS),)

    for seed in range(3):
        assert _play(act, seed=seed).gap_seconds == 0


def test_one_that_starts_while_the_others_move_does_not_take_their_part() -> None:
    async def act(fleet: Fleet) -> None:
        for _ in range(2):
            await fleet.start(SATURATED)
        await fleet.wait(200)
        config = await fleet.reshard(16)
        new = await fleet.start(BUSY)
        await fleet.wait(20)
        assert new.tenures.present.cut == config.cut
        await fleet.wait(MOVED_SECONDS)
        owners = fleet.owners(config.cut)
        assert all(len(who) == 1 for who in owners.values())
        assert len({id(who[0]) for who in owners.values()} - {id(new)}) == 2

    for seed in range(3):
        assert _play(act, seed=seed).gap_seconds == 0


def test_one_that_dies_anywhere_on_the_way_is_replaced_within_the_bound() -> None:
    async def act(fleet: Fleet) -> None:
        entropy = fleet.world.entropy("deaths")
        for _ in range(3):
            await fleet.start(SATURATED)
        await fleet.wait(200)
        config = await fleet.reshard(entropy.choice((1, 4, 32)))
        await fleet.wait(entropy.uniform(0, 60))
        fleet.machines[entropy.randrange(3)].run.cancel()
        await fleet.wait(MOVED_SECONDS + DEAD_SECONDS)
        assert all(len(who) == 1 for who in fleet.owners(config.cut).values())

    for seed in range(10):
        assert _play(act, seed=seed).gap_seconds <= 30 + 72 + 10


@pytest.mark.proof
@pytest.mark.parametrize("first", range(0, some(24), 8))
def test_changes_faults_deaths_and_newcomers_at_any_time(first: int) -> None:
    async def act(fleet: Fleet) -> None:
        entropy = fleet.world.entropy("events")
        for _ in range(3):
            await fleet.start(entropy.choice((SATURATED, BUSY, IDLE)))
        await fleet.wait(120)
        for _ in range(6):
            await fleet.wait(entropy.uniform(0, 90))
            event = entropy.randrange(4)
            if event == 0 and len(fleet.alive) > 1:
                entropy.choice(fleet.alive).run.cancel()
            elif event == 1:
                await fleet.start(entropy.choice((SATURATED, BUSY, IDLE)))
            else:
                await fleet.reshard(2 ** entropy.randrange(7))
        found = fleet.bucket.objects[LAYOUT.config]
        config = decode(QueueConfig, found.body, where="config")
        await fleet.wait(MOVED_SECONDS + DEAD_SECONDS + 600)
        assert all(who for who in fleet.owners(config.cut).values())
        assert {machine.tenures.present.cut for machine in fleet.alive} == {config.cut}
        for machine in fleet.alive:
            assert machine.tenures.slots() == machine.tenures.present.slots()

    for seed in range(first, first + 8):
        # Deaths one after the other may strike those who have just taken over.
        assert _play(act, seed=seed, faults=FAULTS).gap_seconds <= 3 * DEAD_SECONDS


def test_settings_that_are_made_anew_or_damaged_harm_nothing() -> None:
    async def act(fleet: Fleet) -> None:
        machine = await fleet.start()
        await fleet.wait(60)
        await fleet.reshard(16)
        await fleet.wait(MOVED_SECONDS)
        assert machine.tenures.present.cut == Cut(16, 1)
        for damage in (b"", b"damaged", encode(QueueConfig(shards=3))):
            fleet.bucket.write(LAYOUT.config, damage, {})
            await fleet.wait(2 * OWNER_SECONDS)
            assert machine.tenures.present.cut == Cut(16, 1)
            assert len(machine.tenures.present.owned()) == 16
        fleet.bucket.remove(LAYOUT.config)
        await fleet.wait(2 * OWNER_SECONDS)
        assert len(machine.tenures.present.owned()) == 16
        await make_queue(fleet.store(), LAYOUT, QueueConfig(shards=4))
        await fleet.wait(MOVED_SECONDS)
        # Their leases are those of the first era: epochs go on, and the witness has watched.
        assert machine.tenures.present.cut == Cut(4, 0)
        assert len(machine.tenures.present.owned()) == 4

    assert _play(act).gap_seconds == 0


def test_an_idle_owner_pays_a_read_every_half_minute_and_a_standby_one_every_ten() -> None:
    async def act(fleet: Fleet) -> None:
        await fleet.start(IDLE)
        await fleet.wait(600)
        fleet.meter.billed.clear()
        await fleet.wait(3600)
        alone = fleet.meter.requests(kind=Kind.GET)
        assert alone <= 3600 / OWNER_SECONDS + 10
        await fleet.start(IDLE)
        await fleet.wait(60)
        fleet.meter.billed.clear()
        await fleet.wait(3600)
        looks = 3600 / (2.5 * 0.8)
        assert fleet.meter.requests(kind=Kind.GET) - alone <= looks + 3600 / 600 + 20

    _play(act)


def test_the_settings_count_their_changes_and_lose_none() -> None:
    async def main(world: World) -> None:
        store = MemoryStore(MemoryBucket(world.clock()), clock=world.clock())
        entropy = world.entropy("x")
        await make_queue(store, LAYOUT, QueueConfig(shards=1))

        async def one(number: int) -> None:
            if number % 2:
                await reshard(store, LAYOUT, 2**number, entropy=world.entropy(str(number)))
                return
            await change_config(
                store,
                LAYOUT,
                lambda now: msgspec.structs.replace(now, key_seconds=now.key_seconds + 1),
                entropy=world.entropy(str(number)),
            )

        await asyncio.gather(*map(one, range(6)))
        same = await reshard(store, LAYOUT, 64, entropy=entropy)
        now = await reshard(store, LAYOUT, 64, entropy=entropy)
        assert now == same
        assert now.key_seconds == QueueConfig().key_seconds + 3
        assert (now.shards, now.era, now.revision) == (64, 4, 7)
        with pytest.raises(InvalidInput, match="cannot have 3 shards"):
            await reshard(store, LAYOUT, 3, entropy=entropy)
        assert (await ConfigWatch(store, LAYOUT, QueueConfig()).read()) == now

    for seed in range(5):
        simulate(main, seed=seed)


class Resharder(Operator):
    """An operator who also changes the number of shards, again and again."""

    changes = 0

    def _act(self) -> None:
        super()._act()
        bucket, entropy = self._site.bucket, self._site.world.entropy("resharder")
        key = QueueLayout("sim").config
        if key in bucket.objects and entropy.random() < 0.5:
            now = decode(QueueConfig, bucket.objects[key].body, where=key)
            shards = 2 ** entropy.randrange(6)
            bucket.hand = _OPERATOR
            self._site.chronicle.note(_OPERATOR, f"changes the number of shards to {shards}")
            changed = msgspec.structs.replace(now, shards=shards, era=now.era + 1)
            bucket.write(key, encode(changed), {})
            Resharder.changes += 1


@pytest.mark.proof
@pytest.mark.parametrize("fleet", [Simulated.LEASED, Simulated.MIXED])
def test_the_whole_queue_holds_while_the_number_of_shards_changes(
    fleet: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "Operator", Resharder)
    before = Resharder.changes
    with_operator = [seed for seed in range(150) if draw(seed, fleet).damaged is DamagedHints.ALL]
    for seed in with_operator[: some(25)]:
        report = worlds.run_world(seed, fleet)
        assert [found.sentence for found in report.violations] == [], (seed, report.violations)
    assert Resharder.changes - before > 50
