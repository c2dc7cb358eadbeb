"""What the monitor takes away, what it leaves, and which pointers it writes again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from penstock.kernel.document_format import encode
from penstock.kernel.errors import Unavailable
from penstock.queue import archive
from penstock.queue import maintenance as module
from penstock.queue.attempt_outcomes import Succeeded
from penstock.queue.discovery.scanner import ALL, Run, Scanner
from penstock.queue.ids import PackAt, delayed, keyed_pack, new_pack
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import ClaimLease, Ledger, QueueTaskState, QueueTaskStatus
from penstock.queue.maintenance import WAIT_SECONDS, Monitor
from penstock.queue.pack import Pack, forgotten_ms
from penstock.queue.pack_session import ListedPack, PackSession
from penstock.queue.submit_options import SubmitOptions
from penstock.queue.submitter import Submitter
from penstock.queue.transitions import LedgerClaim
from penstock.store.base import Object, Version
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.time import Interval
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")
KEY_SECONDS = 3600
DONE = QueueTaskState(QueueTaskStatus.SUCCEEDED, 1, at_ms=1)


class Bench:
    """A queue with one monitor."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = world.clock()
        self.entropy = world.entropy("x")
        self.meter = Meter()
        self.bucket = MemoryBucket(world.clock())
        self.store = MeteredStore(MemoryStore(self.bucket, clock=self.clock), self.meter)
        self.monitor = Monitor(self.store, LAYOUT, key_seconds=KEY_SECONDS, entropy=self.entropy)

    def now_ms(self) -> int:
        return int(self.world.now() * 1000)

    def new(self) -> PackAt:
        return new_pack(type="t", count=1, submitted_ms=self.now_ms(), entropy=self.entropy)

    def ledger(
        self,
        at: PackAt,
        state: QueueTaskState = DONE,
        *,
        key: str | None = None,
        key_ends_ms: int = 0,
    ) -> Ledger:
        """Write a ledger, without its pack."""
        ledger = Ledger(
            pack_version="v",
            born="b",
            tasks=(state,),
            leases={"c": ClaimLease("w", self.now_ms() + 30_000)} if state.claim else {},
            inputs=(msgspec.Raw(b"1"),) if state.status.settled else (),
            submitted_ms=self.now_ms() if state.status.settled else 0,
            key=key,
            key_ends_ms=key_ends_ms,
        )
        self.bucket.write(LAYOUT.ledger(at), encode(ledger), {})
        return ledger

    def has_ledger(self, at: PackAt) -> bool:
        return LAYOUT.ledger(at) in self.bucket.objects

    async def look(self) -> None:
        """One look at the lists, with what it shows noted."""
        looked = await self.store.now()
        view = await Scanner(self.store, LAYOUT).look(
            ALL, minute=int(self.world.now() // 60), worth=lambda _: 1, wanted=10**6
        )
        self.monitor.note(view.settled, looked)

    async def pass_by(self, *, seconds: float = 0.0) -> int:
        """Time passes, then a look, and whatever it has shown is cleared."""
        await self.clock.sleep(seconds)
        await self.look()
        return await self.monitor.clear(at_once=True)

    async def archived(self, at: PackAt) -> bool:
        return await archive.find(self.store, LAYOUT, at) is not None

    async def submit(self, key: str, *, delay: float = 0.0) -> PackAt:
        await Submitter(self.store, LAYOUT, self.entropy).submit_keyed(
            "t", 1, SubmitOptions(key=key, delay=delay), key_seconds=KEY_SECONDS
        )
        return keyed_pack(type="t", key=key)

    def pointers(self, at: PackAt) -> list[str]:
        read = {key: LAYOUT.read_pointer(key) for key in self.bucket.objects}
        return [key for key, found in read.items() if found and found[0] == at]

    def lose_pointers(self, at: PackAt) -> None:
        for key in self.pointers(at):
            self.bucket.remove(key)


def _run(check: Callable[[Bench], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        await check(Bench(world))

    simulate(main, seed=1)


def test_a_settled_ledger_stays_until_its_pack_can_no_longer_come() -> None:
    async def check(bench: Bench) -> None:
        at = bench.new()
        ledger = bench.ledger(at)
        assert await bench.pass_by(seconds=300) == 0
        assert bench.has_ledger(at)
        assert await bench.pass_by(seconds=2) == 1
        assert not bench.has_ledger(at)
        found = await archive.find(bench.store, LAYOUT, at)
        assert found is not None
        assert encode(found) == encode(ledger)

    _run(check)


def test_only_a_list_that_began_late_enough_proves_that_the_pack_is_gone() -> None:
    """The ledger was seen without its pack too early: the pack may have come since."""

    async def check(bench: Bench) -> None:
        at = bench.new()
        bench.ledger(at)
        await bench.clock.sleep(300)
        await bench.look()
        await bench.clock.sleep(1000)
        assert await bench.monitor.clear(at_once=True) == 0
        assert bench.has_ledger(at)

    _run(check)


def test_the_moment_is_that_of_the_store_at_the_earliest() -> None:
    async def check(bench: Bench) -> None:
        at = bench.new()
        bench.ledger(at)
        entry = (await bench.store.list(LAYOUT.tasks)).entries[0]
        ends = forgotten_ms(at.submitted_ms or 0) / 1000
        bench.monitor.note([(at, entry)], Interval(ends - 0.001, ends + 5))
        assert await bench.monitor.clear(at_once=True) == 0
        bench.monitor.note([(at, entry)], Interval(ends, ends + 5))
        assert await bench.monitor.clear(at_once=True) == 1

    _run(check)


def test_a_delayed_is_forgotten_after_its_submit_too() -> None:
    async def check(bench: Bench) -> None:
        now = bench.now_ms()
        at = delayed(
            new_pack(type="t", count=1, submitted_ms=now, entropy=bench.entropy),
            due_ms=now + 60_000,
        )
        bench.ledger(at)
        assert await bench.pass_by(seconds=302) == 1
        assert await bench.archived(at)

    _run(check)


def test_ledgers_leave_together_after_a_while() -> None:
    async def check(bench: Bench) -> None:
        ats = [bench.new() for _ in range(20)]
        for at in ats:
            bench.ledger(at)
        await bench.clock.sleep(400)
        await bench.look()
        assert await bench.monitor.clear() == 0
        await bench.clock.sleep(WAIT_SECONDS - 1)
        await bench.look()
        assert await bench.monitor.clear() == 0
        await bench.clock.sleep(1)
        puts = bench.meter.requests(kind=Kind.PUT)
        assert await bench.monitor.clear() == 20
        assert bench.meter.requests(kind=Kind.PUT) == puts + 1
        assert await bench.monitor.clear() == 0

    _run(check)


def test_enough_ledgers_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 5)

    async def check(bench: Bench) -> None:
        for _ in range(13):
            bench.ledger(bench.new())
        await bench.clock.sleep(400)
        await bench.look()
        assert [await bench.monitor.clear() for _ in range(3)] == [10, 0, 0]
        assert await bench.monitor.clear(at_once=True) == 3

    _run(check)


def test_what_this_worker_has_settled_is_not_read_again() -> None:
    async def check(bench: Bench) -> None:
        at, other = bench.new(), bench.new()
        ledger = bench.ledger(at)
        bench.ledger(other)
        version = bench.bucket.objects[LAYOUT.ledger(at)].version
        bench.monitor.remember(at, ledger, version)
        gets = bench.meter.requests(kind=Kind.GET)
        assert await bench.pass_by(seconds=400) == 2
        assert bench.meter.requests(kind=Kind.GET) == gets + 1
        assert await bench.archived(at)

    _run(check)


def test_what_is_remembered_in_another_version_is_read() -> None:
    async def check(bench: Bench) -> None:
        at = bench.new()
        ledger = bench.ledger(at, QueueTaskState(QueueTaskStatus.FAILED, 1, at_ms=1))
        bench.monitor.remember(at, ledger, Version("another"))
        gets = bench.meter.requests(kind=Kind.GET)
        assert await bench.pass_by(seconds=400) == 1
        assert bench.meter.requests(kind=Kind.GET) == gets + 1

    _run(check)


def test_what_is_remembered_is_bounded_and_the_oldest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REMEMBERED_MAX", 3)

    async def check(bench: Bench) -> None:
        first = bench.new()
        for _ in range(10):
            ledger = bench.ledger(first)
            version = bench.bucket.objects[LAYOUT.ledger(first)].version
            bench.monitor.remember(first, ledger, version)
        for _ in range(3):
            at = bench.new()
            ledger = bench.ledger(at)
            version = bench.bucket.objects[LAYOUT.ledger(at)].version
            bench.monitor.remember(at, ledger, version)
        gets = bench.meter.requests(kind=Kind.GET)
        assert await bench.pass_by(seconds=400) == 4
        assert bench.meter.requests(kind=Kind.GET) == gets + 1

    _run(check)


def test_to_remember_one_place_often_takes_the_room_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A key that is used again and again."""
    monkeypatch.setattr(module, "REMEMBERED_BYTES_MAX", 3_000)

    async def check(bench: Bench) -> None:
        at, other = bench.new(), bench.new()
        for each in [other, *[at] * 20]:
            ledger = bench.ledger(each)
            version = bench.bucket.objects[LAYOUT.ledger(each)].version
            bench.monitor.remember(each, ledger, version)
        gets = bench.meter.requests(kind=Kind.GET)
        assert await bench.pass_by(seconds=400) == 2
        assert bench.meter.requests(kind=Kind.GET) == gets

    _run(check)


def test_a_void_ledger_is_removed_and_not_archived() -> None:
    async def check(bench: Bench) -> None:
        at = bench.new()
        bench.ledger(at, QueueTaskState(QueueTaskStatus.CLAIMED, 1, claim="c"))
        assert await bench.pass_by(seconds=400) == 1
        assert not bench.has_ledger(at)
        assert not await bench.archived(at)

    _run(check)


def test_a_ledger_with_a_live_lease_is_left() -> None:
    async def check(bench: Bench) -> None:
        at = bench.new()
        await bench.clock.sleep(400)
        bench.ledger(at, QueueTaskState(QueueTaskStatus.CLAIMED, 1, claim="c"))
        assert await bench.pass_by(seconds=20) == 0
        assert bench.has_ledger(at)
        assert await bench.pass_by(seconds=320) == 1

    _run(check)


def test_a_ledger_that_has_changed_since_the_list_is_left() -> None:
    async def check(bench: Bench) -> None:
        at, other = bench.new(), bench.new()
        bench.ledger(at)
        bench.ledger(other)
        await bench.clock.sleep(400)
        await bench.look()
        bench.ledger(at, QueueTaskState(QueueTaskStatus.FAILED, 2, at_ms=2))
        bench.bucket.remove(LAYOUT.ledger(other))
        assert await bench.monitor.clear(at_once=True) == 0
        assert bench.has_ledger(at)
        assert await bench.pass_by(seconds=320) == 1

    _run(check)


def test_a_ledger_that_was_written_lately_is_left() -> None:
    """An old claim of it may still come, and would bring it back."""

    async def check(bench: Bench) -> None:
        at = bench.new()
        await bench.clock.sleep(400)
        bench.ledger(at)
        assert await bench.pass_by(seconds=200) == 0
        assert await bench.pass_by(seconds=120) == 1

    _run(check)


def test_a_ledger_that_changes_while_it_is_archived_is_not_deleted() -> None:
    """What this worker remembers is archived unread: the delete alone decides."""

    async def check(bench: Bench) -> None:
        at = bench.new()
        ledger = bench.ledger(at)
        bench.monitor.remember(at, ledger, bench.bucket.objects[LAYOUT.ledger(at)].version)
        await bench.clock.sleep(400)
        await bench.look()
        bench.ledger(at, QueueTaskState(QueueTaskStatus.FAILED, 2, at_ms=2))
        await bench.monitor.clear(at_once=True)
        assert bench.has_ledger(at)

    _run(check)


def test_a_ledger_that_cannot_be_read_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def check(bench: Bench) -> None:
        at, other = bench.new(), bench.new()
        bench.bucket.write(LAYOUT.ledger(at), b"damaged", {})
        bench.ledger(other)
        with caplog.at_level(logging.WARNING):
            assert await bench.pass_by(seconds=400) == 1
        assert "skipped a ledger" in caplog.text
        assert bench.has_ledger(at)
        assert not bench.has_ledger(other)
        gets = bench.meter.requests(kind=Kind.GET)
        assert await bench.pass_by(seconds=600) == 0
        assert bench.meter.requests(kind=Kind.GET) == gets
        assert await bench.pass_by(seconds=3600) == 0
        assert bench.meter.requests(kind=Kind.GET) == gets + 1

    _run(check)


def test_what_cannot_be_read_now_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(bench: Bench) -> None:
        at = bench.new()
        bench.ledger(at)
        await bench.clock.sleep(400)
        await bench.look()

        async def away(key: str, *, unless: Version | None = None) -> Object | None:
            raise Unavailable("away")

        with monkeypatch.context() as patch:
            patch.setattr(bench.store, "get", away)
            with pytest.raises(Unavailable):
                await bench.monitor.clear(at_once=True)
        assert bench.has_ledger(at)
        assert await bench.monitor.clear(at_once=True) == 1
        assert await bench.archived(at)

    _run(check)


def test_a_batch_that_cannot_be_written_costs_no_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(bench: Bench) -> None:
        at = bench.new()
        bench.ledger(at)
        await bench.clock.sleep(400)
        await bench.look()

        async def fail(*args: object, **options: object) -> None:
            raise Unavailable("away")

        with monkeypatch.context() as patch:
            patch.setattr(module, "keep", fail)
            with pytest.raises(Unavailable):
                await bench.monitor.clear(at_once=True)
        assert bench.has_ledger(at)

    _run(check)


def test_the_ledger_of_a_key_stays_for_its_lifetime() -> None:
    """And for as long after it as a submit may be under way that was first sent before its end."""

    async def check(bench: Bench) -> None:
        at = keyed_pack(type="t", key="k")
        ends_ms = bench.now_ms() + KEY_SECONDS * 1000
        bench.ledger(at, key="k", key_ends_ms=ends_ms)
        for seconds in (400, 3190):
            await bench.clock.sleep(seconds)
            await bench.monitor.sweep(ALL)
            assert await bench.monitor.clear(at_once=True) == 0
        await bench.clock.sleep(320)
        await bench.monitor.sweep(ALL)
        assert await bench.monitor.clear(at_once=True) == 1
        assert not bench.has_ledger(at)

    _run(check)


def test_a_lifetime_that_the_ledger_says_is_longer_counts() -> None:
    async def check(bench: Bench) -> None:
        at = keyed_pack(type="t", key="k")
        bench.ledger(at, key="k", key_ends_ms=bench.now_ms() + 86_400_000)
        await bench.clock.sleep(KEY_SECONDS + 1000)
        await bench.monitor.sweep(ALL)
        assert await bench.monitor.clear(at_once=True) == 0
        assert bench.has_ledger(at)

    _run(check)


def test_a_pointer_that_was_lost_is_written_again() -> None:
    async def check(bench: Bench) -> None:
        at = await bench.submit("k")
        bench.lose_pointers(at)
        await bench.clock.sleep(61)
        assert await bench.monitor.sweep(ALL) == 1
        (pointer,) = bench.pointers(at)
        assert LAYOUT.ready_minute(pointer) == int(bench.world.now() // 60)
        assert await bench.monitor.sweep(ALL) == 0
        assert bench.pointers(at) == [pointer]

    _run(check)


def test_pointers_that_are_there_are_left() -> None:
    async def check(bench: Bench) -> None:
        soon, later = await bench.submit("soon"), await bench.submit("later", delay=7200)
        before = bench.pointers(soon) + bench.pointers(later)
        assert len(before) == 2
        await bench.clock.sleep(1000)
        assert await bench.monitor.sweep(ALL) == 0
        assert bench.pointers(soon) + bench.pointers(later) == before

    _run(check)


def test_a_pack_that_has_just_come_is_given_time() -> None:
    async def check(bench: Bench) -> None:
        at = await bench.submit("k")
        bench.lose_pointers(at)
        await bench.clock.sleep(30)
        assert await bench.monitor.sweep(ALL) == 0
        assert bench.pointers(at) == []

    _run(check)


def test_only_the_slots_that_are_guarded_are_swept() -> None:
    async def check(bench: Bench) -> None:
        ats = [await bench.submit(f"k{number}") for number in range(12)]
        for at in ats:
            bench.lose_pointers(at)
        await bench.clock.sleep(100)
        slots = sorted(at.slot for at in ats)
        mine: list[Run] = [(slots[2], slots[4]), (slots[7], slots[7])]
        assert await bench.monitor.sweep(mine) == 4
        pointed = sorted(at.slot for at in ats if bench.pointers(at))
        assert pointed == [*slots[2:5], slots[7]]

    _run(check)


def test_a_sweep_of_a_queue_without_keys_is_one_list() -> None:
    async def check(bench: Bench) -> None:
        bench.ledger(bench.new())
        lists = bench.meter.requests(kind=Kind.LIST)
        assert await bench.monitor.sweep(ALL) == 0
        assert bench.meter.requests(kind=Kind.LIST, label="monitor") == lists + 1

    _run(check)


def test_a_settled_ledger_whose_pack_is_there_is_never_noted() -> None:
    """Somebody died between the last settlement and the delete of the pack (QUEUE-3)."""

    async def check(bench: Bench) -> None:
        at = bench.new()
        pack = Pack(type="t", nonce="n", submitted_ms=bench.now_ms(), inputs=(msgspec.Raw(b"1"),))
        version = bench.bucket.write(LAYOUT.pack(at), encode(pack), {})
        session = PackSession(bench.store, LAYOUT, at, entropy=bench.entropy)
        seen = ListedPack(version, bench.world.now(), has_ledger=False)
        assert await session.claim(LedgerClaim("c", "w", 30_000, 1, 3), seen) is not None
        await session.settle({0: ("c", Succeeded())})
        bench.bucket.write(LAYOUT.pack(at), encode(pack), {})
        assert await bench.pass_by(seconds=1000) == 0
        assert bench.has_ledger(at)

    _run(check)
