"""The rules of the shard leases, one by one, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec
import pytest

from penstock.kernel.document_format import decode, encode
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import InvalidInput, OutcomeUnknown, Refused, Unavailable
from penstock.queue.layout import QueueLayout
from penstock.queue.settings import ShardLeaseSettings
from penstock.queue.shards.allocation import WorkerLoad
from penstock.queue.shards.leases import ShardLeases
from penstock.queue.shards.registry import OfferReason, OwnerRole, Registration, ShardLease
from penstock.store.base import NO_METADATA, REPLACE, PutMode, Version, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")
ALL = frozenset(range(8))
BUSY, SATURATED, IDLE = WorkerLoad(), WorkerLoad(saturated=True), WorkerLoad(idle_seconds=300.0)
LONGEST_TTL = 90.0


class Breakable(Wrapper):
    """A store whose puts can be made to fail, or to be followed by something."""

    def __init__(self, inner: MeteredStore) -> None:
        super().__init__(inner)
        self.failure: Exception | None = None
        self.puts: list[str] = []
        self.before_put: Callable[[str], Awaitable[None]] | None = None

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        if self.failure is not None:
            raise self.failure
        if self.before_put is not None:
            await self.before_put(key)
        self.puts.append(key)
        return await self.inner.put(key, body, mode, metadata=metadata)


class Bench:
    """A bucket, and workers that are given their turns when they are due."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.clock = world.clock()
        self.bucket = MemoryBucket(self.clock, date_resolution_seconds=1.0)
        self.meter = Meter()
        self.loads: dict[ShardLeases, WorkerLoad] = {}
        self._due: dict[ShardLeases, float] = {}
        self.stores: dict[ShardLeases, Breakable] = {}

    def worker(self, name: str, *, shards: int = 8, handles: str = "") -> ShardLeases:
        metered = MeteredStore(MemoryStore(self.bucket, clock=self.clock), self.meter)
        store = Breakable(metered)
        leases = ShardLeases(
            store,
            LAYOUT,
            name=name,
            shards=shards,
            handles=frozenset(handles.split()),
            settings=ShardLeaseSettings(shards_per_worker=2),
            entropy=seeded_entropy(name),
        )
        self.stores[leases] = store
        self.loads[leases] = BUSY
        self._due[leases] = 0.0
        return leases

    def remove(self, leases: ShardLeases) -> None:
        """It crashes: it has no more turns."""
        del self._due[leases]

    async def run(self, seconds: float) -> None:
        ends = self._world.now() + seconds
        while True:
            due = min([*self._due.values(), ends])
            await self.clock.sleep(max(0.0, due - self._world.now()))
            if due >= ends:
                return
            leases = min(self._due, key=lambda leases: self._due[leases])
            self._due[leases] = self._world.now() + await leases.turn(self.loads[leases])

    def registration(self, worker: str) -> Registration | None:
        stored = self.bucket.objects.get(LAYOUT.worker(worker))
        return decode(Registration, stored.body, where=worker) if stored else None

    def lease(self, shard: int) -> ShardLease:
        stored = self.bucket.objects[LAYOUT.shard_lease(shard)]
        return decode(ShardLease, stored.body, where=str(shard))

    def write(self, key: str, body: bytes) -> None:
        self.bucket.write(key, body, {})

    def said(self, leases: ShardLeases) -> tuple[tuple[int, ...], OfferReason | None]:
        registration = self.registration(leases.worker)
        assert registration is not None
        return registration.offers, registration.reason


def _run(check: Callable[[Bench], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        await check(Bench(world))

    simulate(main, seed=1)


def test_the_first_worker_takes_everything_and_says_so() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one", handles="b a")
        assert one.owned() == frozenset()
        await bench.run(5)
        assert one.owned() == ALL
        assert one.gained.is_set()
        mine = bench.registration(one.worker)
        assert mine is not None
        assert (mine.role, mine.handles) == (OwnerRole.OWNER, ("a", "b"))
        assert mine.shards == one.epochs()
        for shard in ALL:
            assert bench.lease(shard).worker == one.worker
            assert bench.lease(shard).epoch == one.epochs()[shard]

    _run(check)


def test_the_projection_is_written_before_the_leases() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(0.5)
        puts = bench.stores[one].puts
        puts.clear()
        await bench.run(5)
        first, *others = puts
        assert first == LAYOUT.worker(one.worker)
        assert set(others) == {LAYOUT.shard_lease(shard) for shard in ALL}

    _run(check)


def test_a_lease_that_names_an_owner_is_never_created() -> None:
    """So that a create which arrives late, after a delete, brings back no owner."""

    async def check(bench: Bench) -> None:
        bench.worker("one")
        await bench.run(0.5)
        assert {bench.lease(shard).worker for shard in ALL} == {""}

    _run(check)


def test_an_owner_that_cannot_renew_owns_nothing_when_its_lease_ends() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(12)
        bench.stores[one].failure = Unavailable("away")
        await bench.run(15)
        assert one.owned() == ALL
        await bench.run(20)
        assert one.owned() == frozenset()
        bench.stores[one].failure = None
        await bench.run(15)
        assert one.owned() == ALL

    _run(check)


def test_a_refusal_that_lasts_is_raised() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        bench.stores[one].failure = Refused("read only")
        with pytest.raises(Refused):
            await one.turn(BUSY)

    _run(check)


def test_a_dead_owner_is_ended_before_its_shards_are_taken() -> None:
    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await bench.run(20)
        dead, living = (one, two) if one.owned() else (two, one)
        epochs = dead.epochs()
        assert living.owned() == frozenset()
        bench.remove(dead)
        bench.stores[living].puts.clear()
        await bench.run(60)
        assert living.owned() == ALL
        gone = bench.registration(dead.worker)
        assert gone is not None
        assert gone.role is OwnerRole.GONE
        mine, ended, *leases = bench.stores[living].puts[:10]
        assert (mine, ended) == (LAYOUT.worker(living.worker), LAYOUT.worker(dead.worker))
        assert set(leases) == {LAYOUT.shard_lease(shard) for shard in ALL}
        assert all(living.epochs()[shard] > epochs[shard] for shard in ALL)

    _run(check)


def test_an_owner_that_comes_back_late_begins_anew_as_a_standby() -> None:
    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await bench.run(20)
        late, living = (one, two) if one.owned() else (two, one)
        before = late.worker
        bench.remove(late)
        await bench.run(100)
        assert late.owned() == frozenset()
        await late.turn(BUSY)
        await late.turn(BUSY)
        assert late.owned() == frozenset()
        assert late.worker != before
        assert living.owned() == ALL
        again = bench.registration(late.worker)
        assert again is not None
        assert again.role is OwnerRole.STANDBY

    _run(check)


def test_a_renewal_that_overtakes_a_challenger_keeps_everything() -> None:
    """The challenger has read an expired lease; before it can end it, the owner renews."""

    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await bench.run(20)
        owner, rival = (one, two) if one.owned() else (two, one)
        bench.remove(owner)

        async def renew(key: str) -> None:
            if key == LAYOUT.worker(owner.worker):
                bench.stores[rival].before_put = None
                assert owner.owned() == frozenset()
                await owner.turn(BUSY)

        bench.stores[rival].before_put = renew
        for _ in range(60):
            await bench.run(1)
            if bench.stores[rival].before_put is None:
                break
        else:
            pytest.fail("the rival never tried")
        assert owner.owned() == ALL
        assert rival.owned() == frozenset()
        mine = bench.registration(rival.worker)
        assert mine is not None
        assert mine.shards == {}

    _run(check)


def test_what_is_released_is_taken_at_once() -> None:
    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await bench.run(20)
        leaving, living = (one, two) if one.owned() else (two, one)
        await leaving.release()
        assert leaving.owned() == frozenset()
        await bench.run(7)
        assert living.owned() == ALL
        assert leaving.owned() == frozenset()

    _run(check)


def test_a_release_that_cannot_be_written_ends_all_the_same() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(5)

        async def hang(_key: str) -> None:
            await bench.clock.sleep(3600)

        bench.stores[one].before_put = hang
        began = bench.clock.monotonic()
        await one.release()
        assert bench.clock.monotonic() - began <= ShardLeaseSettings().release_seconds + 0.1
        assert one.owned() == frozenset()

    _run(check)


def test_a_standby_that_leaves_is_deleted() -> None:
    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await bench.run(20)
        standby = two if one.owned() else one
        await standby.release()
        assert bench.registration(standby.worker) is None

    _run(check)


def test_a_saturated_owner_offers_what_is_beyond_its_target_and_takes_it_back() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        bench.loads[one] = SATURATED
        await bench.run(1)
        assert bench.said(one) == ((), None)
        await bench.run(20)
        assert bench.said(one) == ((2, 3, 4, 5, 6, 7), OfferReason.SATURATED)
        assert one.owned() == ALL, "what is offered is owned until it is taken"
        bench.loads[one] = BUSY
        await bench.run(11)
        assert bench.said(one) == ((), None)

    _run(check)


def test_a_standby_takes_a_fair_share_of_a_saturated_owners_offer() -> None:
    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await bench.run(20)
        owner, standby = (one, two) if one.owned() else (two, one)
        before = owner.epochs()
        bench.loads[owner] = SATURATED
        await bench.run(40)
        assert len(standby.owned()) == 4
        assert standby.owned() | owner.owned() == ALL
        assert not standby.owned() & owner.owned()
        for shard, epoch in standby.epochs().items():
            assert bench.lease(shard).worker == standby.worker
            assert epoch > before[shard]

    _run(check)


def test_an_owner_takes_nothing_from_a_saturated_one() -> None:
    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await bench.run(20)
        owner, other = (one, two) if one.owned() else (two, one)
        bench.loads[owner] = SATURATED
        await bench.run(40)
        owned = len(other.owned())
        assert owned == 4
        await bench.run(600)
        assert bench.said(owner)[1] is OfferReason.SATURATED
        assert len(other.owned()) == owned

    _run(check)


@pytest.mark.parametrize("busy_sorts_first", [True, False])
def test_an_idle_owner_hands_over_to_one_that_works(busy_sorts_first: bool) -> None:
    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await bench.run(20)
        owner = one if one.owned() else two
        bench.loads[owner] = SATURATED
        await bench.run(40)
        assert one.owned()
        assert two.owned()
        bench.loads[one], bench.loads[two] = (BUSY, IDLE) if busy_sorts_first else (IDLE, BUSY)
        await bench.run(200)
        assert (one if busy_sorts_first else two).owned() == ALL

    _run(check)


def test_of_two_idle_owners_the_one_that_sorts_first_stays() -> None:
    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await bench.run(20)
        owner = one if one.owned() else two
        bench.loads[owner] = SATURATED
        await bench.run(40)
        bench.loads[one] = bench.loads[two] = IDLE
        await bench.run(300)
        assert one.owned() == ALL
        last = bench.registration(two.worker)
        assert last is not None
        assert last.role is OwnerRole.STANDBY
        await bench.run(60)
        assert bench.said(one) == ((), None), "nobody is left to offer to"

    _run(check)


@pytest.mark.parametrize("damage", [b"", b"damaged", b'{"penstock":"worker/9"}'])
def test_an_owner_whose_registration_is_damaged_loses_everything_at_once(damage: bytes) -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(5)
        before, epochs = one.worker, one.epochs()
        bench.write(LAYOUT.worker(before), damage)
        await bench.run(15)
        assert one.owned() == frozenset()
        assert one.worker != before
        await bench.run(LONGEST_TTL - 25)
        assert one.owned() == frozenset(), "it counts until modified + the longest ttl"
        await bench.run(30)
        assert one.owned() == ALL
        assert all(one.epochs()[shard] > epochs[shard] for shard in ALL)

    _run(check)


def test_a_deleted_registration_is_taken_over_without_waiting() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(5)
        before = one.epochs()
        bench.bucket.remove(LAYOUT.worker(one.worker))
        await bench.run(15)
        assert one.owned() == ALL
        assert all(one.epochs()[shard] > before[shard] for shard in ALL)

    _run(check)


@pytest.mark.parametrize("deleted", [True, False])
def test_a_lost_lease_object_is_replaced_under_a_larger_epoch(deleted: bool) -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(5)
        before = one.epochs()
        if deleted:
            bench.bucket.remove(LAYOUT.shard_lease(3))
        else:
            bench.write(LAYOUT.shard_lease(3), b"damaged")
        await bench.run(500)
        assert one.owned() == ALL, "it is not missed before it is looked for"
        await bench.run(200)
        assert one.owned() == ALL
        assert bench.lease(3).worker == one.worker
        assert one.epochs()[3] == bench.lease(3).epoch > before[3]
        assert {s: e for s, e in one.epochs().items() if s != 3} == {
            shard: epoch for shard, epoch in before.items() if shard != 3
        }

    _run(check)


def test_an_unreadable_lease_is_not_taken_before_it_counts_as_expired() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(5)
        bench.remove(one)
        await bench.run(40)
        bench.write(LAYOUT.shard_lease(3), b"damaged")
        two = bench.worker("two")
        await bench.run(LONGEST_TTL - 5)
        assert two.owned() == ALL - {3}
        await bench.run(15)
        assert two.owned() == ALL

    _run(check)


def test_an_epoch_is_beyond_one_that_only_a_registration_tells() -> None:
    async def check(bench: Bench) -> None:
        far = int((bench.clock.wall() + 86_400) * 1000)
        gone = Registration(role=OwnerRole.GONE, shards={3: far})
        bench.write(LAYOUT.worker("somebody"), encode(gone))
        one = bench.worker("one")
        await bench.run(5)
        assert one.epochs()[3] == far + 1

    _run(check)


def test_a_shard_whose_lease_names_a_live_owner_that_does_not_have_it_is_taken() -> None:
    """The taker of an offer died between its last two steps."""

    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(5)
        mine = bench.registration(one.worker)
        assert mine is not None
        rest = {shard: epoch for shard, epoch in mine.shards.items() if shard != 3}
        bench.write(LAYOUT.worker(one.worker), encode(msgspec.structs.replace(mine, shards=rest)))
        await bench.run(11)
        assert one.owned() == ALL - {3}, "what was taken is gone at the next renewal"
        await bench.run(60)
        assert one.owned() == ALL

    _run(check)


async def _take(leases: ShardLeases, others: Mapping[str, Registration]) -> None:
    """Act on a picture of the others, which may be an old one."""
    now = await leases._store.now()
    await leases._taking.take(others, now, idle=False, saturated=False, draw=0.0)


def test_a_picture_that_is_too_old_takes_nothing_from_a_live_owner() -> None:
    """One has become the owner since two has looked."""

    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(10)
        two = bench.worker("two")
        await two.turn(BUSY)
        two._registry.workers.clear()
        await _take(two, {})
        assert two.owned() == frozenset()
        assert {bench.lease(shard).worker for shard in ALL} == {one.worker}

    _run(check)


def test_an_offer_that_was_withdrawn_is_not_taken() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(10)
        two = bench.worker("two")
        await two.turn(BUSY)
        mine = bench.registration(one.worker)
        assert mine is not None
        offer = msgspec.structs.replace(mine, offers=(2, 3), reason=OfferReason.SATURATED)
        await _take(two, {one.worker: offer})
        assert two.owned() == frozenset()
        after = bench.registration(two.worker)
        assert after is not None
        assert (after.role, after.shards) == (OwnerRole.STANDBY, {})
        await bench.run(15)
        assert one.owned() == ALL

    _run(check)


def test_what_has_no_predecessor_is_taken_when_the_time_is_past_its_write() -> None:
    """Then its epoch is beyond every one that was there before, and is not known any more."""

    async def check(bench: Bench) -> None:
        await bench.run(0.9)
        for shard in ALL:
            bench.write(LAYOUT.shard_lease(shard), encode(ShardLease()))
        written_ms = bench.clock.wall() * 1000
        one = bench.worker("one")
        await bench.run(5)
        assert one.owned() == ALL
        assert min(one.epochs().values()) >= written_ms

    _run(check)


def test_an_answer_that_was_lost_is_read_back() -> None:
    """The lease was swapped, the answer never came: the next turn finds it."""

    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(0.5)
        store = bench.stores[one]
        put = store.inner.put
        owned_then: list[frozenset[int]] = []

        async def lossy(
            key: str,
            body: bytes,
            mode: PutMode = REPLACE,
            *,
            metadata: Mapping[str, str] = NO_METADATA,
        ) -> Version:
            version = await put(key, body, mode, metadata=metadata)
            if key == LAYOUT.shard_lease(3):
                owned_then.append(one.owned())
                raise OutcomeUnknown("lost")
            return version

        store.inner.put = lossy  # type: ignore[method-assign]  # a fault of one key only
        await bench.run(5)
        assert len(owned_then) == 1
        assert 3 not in owned_then[0]
        assert one.owned() == ALL

    _run(check)


def test_a_standby_costs_a_put_a_list_and_then_reads() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(20)
        bench.loads[one] = IDLE
        await bench.run(40)
        before = bench.meter.billed.copy()
        bench.worker("two")
        await bench.run(25)
        spent = bench.meter.billed - before
        assert spent[("leases", Kind.LIST)] == 1
        assert spent[("leases", Kind.PUT)] == 1 + 1, "its registration, and a renewal of the owner"
        assert 3 <= spent[("leases", Kind.GET)] <= 15

    _run(check)


def test_an_idle_owner_renews_three_times_less_often() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(20)
        before = bench.meter.requests(kind=Kind.PUT)
        await bench.run(300)
        busy = bench.meter.requests(kind=Kind.PUT) - before
        bench.loads[one] = IDLE
        await bench.run(60)
        before = bench.meter.requests(kind=Kind.PUT)
        await bench.run(300)
        assert (busy, bench.meter.requests(kind=Kind.PUT) - before) == (30, 10)
        bench.loads[one] = BUSY
        await bench.run(60)
        assert one.owned() == ALL

    _run(check)


def test_a_lease_that_lasts_long_is_not_shortened_by_the_next() -> None:
    """SHARD-10: were the answer to the shorter one lost, its owner would trust the longer one."""

    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        bench.loads[one] = IDLE
        await bench.run(300)
        bench.loads[one] = BUSY
        ends_ms = 0
        for _ in range(100):
            await bench.run(1)
            registration = bench.registration(one.worker)
            assert registration is not None
            assert registration.expires_ms >= ends_ms
            ends_ms = registration.expires_ms

    _run(check)


def test_a_worker_that_has_a_handler_learns_of_types_without_one() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(10)
        two = bench.worker("two", handles="rare")
        await bench.run(10)
        bench.loads[one] = WorkerLoad(help_wanted=frozenset({"rare"}))
        await bench.run(30)
        assert two.others[one.worker].help_wanted == ("rare",)
        assert set(two.others[one.worker].shards) == ALL
        assert two.owned() == frozenset()

    _run(check)


def test_of_standbys_that_start_together_one_takes_everything() -> None:
    async def check(bench: Bench) -> None:
        workers = [bench.worker(f"w{number}") for number in range(5)]
        await bench.run(10)
        assert [len(worker.owned()) for worker in workers] == [8, 0, 0, 0, 0]
        takes = [key for key in bench.stores[workers[4]].puts if "shard-leases" in key]
        assert takes == []

    _run(check)


def test_a_damaged_lease_that_is_offered_costs_no_looks() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await bench.run(10)
        for shard in range(2, 8):
            bench.write(LAYOUT.shard_lease(shard), b"damaged")
        two = bench.worker("two")
        bench.loads[one] = SATURATED
        await bench.run(120)
        assert two.owned() == frozenset()
        before = bench.meter.requests(kind=Kind.LIST)
        await bench.run(120)
        assert bench.meter.requests(kind=Kind.LIST) - before < 40

    _run(check)


def test_the_registrations_of_the_dead_are_deleted_after_an_hour() -> None:
    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await bench.run(20)
        dead = one if one.owned() else two
        bench.remove(dead)
        await bench.run(600)
        assert bench.registration(dead.worker) is not None
        await bench.run(3700)
        assert bench.registration(dead.worker) is None

    _run(check)


def test_a_standby_that_lives_is_still_counted_after_hours_and_a_dead_one_is_not() -> None:
    async def check(bench: Bench) -> None:
        one, two, three = bench.worker("one"), bench.worker("two"), bench.worker("three")
        await bench.run(30)
        assert one.owned() == ALL
        bench.remove(three)
        await bench.run(18_000)
        assert set(one.others) == {two.worker}
        assert bench.registration(three.worker) is None

    _run(check)


def test_wrong_words_are_refused() -> None:
    async def check(bench: Bench) -> None:
        with pytest.raises(InvalidInput, match="renewed before"):
            ShardLeaseSettings(ttl_seconds=10, renew_seconds=10)
        with pytest.raises(InvalidInput, match="1 or more"):
            ShardLeaseSettings(shards_per_worker=0)
        with pytest.raises(InvalidInput, match="cannot have 5 shards"):
            bench.worker("one", shards=5)
        with pytest.raises(InvalidInput, match="name of a worker"):
            bench.worker("a/b")

    _run(check)
