"""What is old is forgotten, with its payloads, and nothing that anybody still needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace

import msgspec
import pytest

from penstock.kernel.document_format import decode, encode
from penstock.kernel.errors import InvalidInput, TaskNotFound, Unavailable
from penstock.queue import archive, retention
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig, read_config
from penstock.queue.ids import PackAt, keyed_pack, new_pack
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger, LedgerFailure, QueueTaskState, QueueTaskStatus
from penstock.queue.pack import Pack
from penstock.queue.payloads import Payloads, raw
from penstock.queue.retention import ArchiveRetention, RetentionResult, RetentionTask
from penstock.store.base import Object, Version, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")
DAY = 86_400
LONG = 4.5 * DAY


class Breaking(Wrapper):
    """A store that stops to answer after so many deletes."""

    deletes = 10**9

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        self.deletes -= 1
        if self.deletes < 0:
            raise Unavailable("away")
        await self.inner.delete(key, version=version)


class Bench:
    """A queue whose tasks are made, settled and archived by hand."""

    def __init__(self, world: World, queue: Queue, bucket: MemoryBucket, store: Breaking) -> None:
        self.world = world
        self.clock = world.clock()
        self.queue = queue
        self.bucket = bucket
        self.store = store
        access = queue.access
        self.payloads = Payloads(access.store, LAYOUT, access.entropy)
        self.entropy = access.entropy

    def now_ms(self) -> int:
        return int(self.world.now() * 1000)

    def new(self) -> PackAt:
        return new_pack(type="t", count=1, submitted_ms=self.now_ms(), entropy=self.entropy)

    async def pack(self, at: PackAt, *, due_ms: int = 0) -> Pack:
        """A pack with a payload, as it was submitted now."""
        submitted_ms = at.submitted_ms or self.now_ms()
        ref = await self.payloads.put(at.task(0), b'"large"', submitted_ms=submitted_ms)
        key = None if at.submitted_ms else "k"
        pack = Pack(
            type="t",
            nonce="n",
            submitted_ms=submitted_ms,
            due_ms=due_ms,
            inputs=(raw(ref),),
            refs=(0,),
            key=key,
        )
        self.bucket.write(LAYOUT.pack(at), encode(pack), {})
        return pack

    async def settled(self, at: PackAt, *, fails: bool = False) -> Ledger:
        """The same, settled: the ledger alone, with a payload as its result as well."""
        pack = await self.pack(at)
        self.bucket.remove(LAYOUT.pack(at))
        ref = await self.payloads.put(at.task(0), b'"result"', submitted_ms=pack.submitted_ms)
        done = QueueTaskState(QueueTaskStatus.SUCCEEDED, 1, result=raw(ref), is_ref=True)
        failed = QueueTaskState(QueueTaskStatus.FAILED, 1, failure=LedgerFailure("E", "m"))
        ledger = Ledger(
            pack_version="v",
            born="b",
            tasks=(failed if fails else done,),
            inputs=pack.inputs,
            refs=pack.refs,
            submitted_ms=pack.submitted_ms,
            key=pack.key,
        )
        self.bucket.write(LAYOUT.ledger(at), encode(ledger), {})
        return ledger

    async def archived(self, at: PackAt, *, fails: bool = False) -> None:
        ledger = await self.settled(at, fails=fails)
        await archive.keep(self.store, LAYOUT, [(at, ledger)], entropy=self.entropy)
        self.bucket.remove(LAYOUT.ledger(at))

    def count(self, prefix: str) -> int:
        return sum(key.startswith(prefix) for key in self.bucket.objects)

    @property
    def payload_count(self) -> int:
        return self.count(LAYOUT.payloads)

    async def retain(self, days: int | None = 3, dead: int | None = None) -> RetentionResult:
        return await ArchiveRetention(self.queue.access).retain(
            archive_days=days, dead_letter_days=dead
        )


def _run(check: Callable[[Bench], Awaitable[None]]) -> Meter:
    meter = Meter()

    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock())
        store = Breaking(MeteredStore(MemoryStore(bucket, clock=world.clock()), meter))
        queue = await Queue.on(store, name="q", entropy=world.entropy("q"))
        await check(Bench(world, queue, bucket, store))

    simulate(main, seed=1, seconds_max=1000.0 * DAY)
    return meter


def test_what_is_old_goes_with_its_payloads_and_what_is_not_stays() -> None:
    async def check(bench: Bench) -> None:
        old, young = bench.new(), None
        await bench.archived(old)
        await bench.clock.sleep(LONG)
        young = bench.new()
        await bench.archived(young)
        assert await bench.retain() == RetentionResult(batches=1, payloads=2)
        with pytest.raises(TaskNotFound):
            await bench.queue.get(old.task(0))
        assert (await bench.queue.get(young.task(0))).result == "result"
        assert await bench.retain() == RetentionResult()

    _run(check)


def test_without_a_setting_everything_is_kept() -> None:
    async def check(bench: Bench) -> None:
        await bench.archived(bench.new())
        await bench.archived(bench.new(), fails=True)
        await bench.clock.sleep(400 * DAY)
        assert await bench.retain(None, None) == RetentionResult()

    _run(check)


def test_dead_letters_have_a_setting_and_payloads_of_their_own() -> None:
    async def check(bench: Bench) -> None:
        fine, dead = bench.new(), bench.new()
        await bench.archived(fine)
        await bench.archived(dead, fails=True)
        await bench.clock.sleep(LONG)
        # Of the dead letter the input stays; that it has a "result" too is an orphan of the test.
        assert await bench.retain(3, None) == RetentionResult(batches=1, payloads=3)
        assert (await bench.queue.get(dead.task(0))).input == "large"
        assert await bench.retain(3, 3) == RetentionResult(dead_letter_batches=1, payloads=1)
        assert bench.payload_count == 0

    _run(check)


def test_payloads_of_packs_and_ledgers_stay_however_old_they_are() -> None:
    async def check(bench: Bench) -> None:
        waiting, done = bench.new(), bench.new()
        await bench.pack(waiting)
        await bench.settled(done)
        await bench.clock.sleep(50 * DAY)
        assert await bench.retain() == RetentionResult()
        assert bench.payload_count == 3

    _run(check)


def test_payloads_of_nobody_go_when_their_pack_can_no_longer_come() -> None:
    async def check(bench: Bench) -> None:
        at = bench.new()
        await bench.payloads.put(at.task(0), b"1", submitted_ms=bench.now_ms())
        assert await bench.retain(1) == RetentionResult()
        await bench.clock.sleep(3 * DAY + 1)
        # The result of somebody who was overtaken long ago, and has only now come to its end.
        await bench.payloads.put(at.task(0), b"2", submitted_ms=at.submitted_ms or 0)
        assert await bench.retain(1) == RetentionResult(payloads=1)
        await bench.clock.sleep(3 * DAY)
        assert await bench.retain(1) == RetentionResult(payloads=1)

    _run(check)


def test_a_batch_is_as_old_as_its_last_write() -> None:
    """A task that was delayed for long was submitted long before it was archived."""

    async def check(bench: Bench) -> None:
        at = bench.new()
        ledger = await bench.settled(at)
        await bench.clock.sleep(10 * DAY)
        await archive.keep(bench.store, LAYOUT, [(at, ledger)], entropy=bench.entropy)
        bench.bucket.remove(LAYOUT.ledger(at))
        assert await bench.retain() == RetentionResult()
        assert (await bench.queue.get(at.task(0))).input == "large"
        await bench.clock.sleep(LONG)
        assert await bench.retain() == RetentionResult(batches=1, payloads=2)

    _run(check)


def test_each_life_of_a_key_has_its_own_payloads() -> None:
    async def check(bench: Bench) -> None:
        at = keyed_pack(type="t", key="k")
        await bench.archived(at)
        await bench.clock.sleep(LONG)
        await bench.pack(at)
        assert await bench.retain() == RetentionResult(batches=1, payloads=2)
        assert (await bench.queue.get(at.task(0))).input == "large"
        await bench.clock.sleep(LONG)
        assert await bench.retain() == RetentionResult()
        bench.bucket.remove(LAYOUT.pack(at))
        await bench.settled(at)
        await bench.clock.sleep(LONG)
        # What was left of the life before; the one that is settled keeps its own.
        assert await bench.retain() == RetentionResult(payloads=1)
        assert (await bench.queue.get(at.task(0))).result == "result"

    _run(check)


def test_what_cannot_be_read_may_need_its_payloads() -> None:
    async def check(bench: Bench) -> None:
        dead, keyed = bench.new(), keyed_pack(type="t", key="k")
        await bench.archived(dead, fails=True)
        await bench.pack(keyed)
        (key,) = (key for key in bench.bucket.objects if key.startswith(LAYOUT.dead))
        bench.bucket.write(key, b"damaged", {})
        bench.bucket.write(LAYOUT.pack(keyed), b"damaged", {})
        before = bench.payload_count
        await bench.clock.sleep(LONG)
        assert await bench.retain() == RetentionResult()
        assert bench.payload_count == before

    _run(check)


def test_an_owner_that_moves_on_meanwhile_keeps_its_payloads() -> None:
    """Pack, ledger, archive are asked in this order: what is archived in between is met there."""

    async def check(bench: Bench) -> None:
        at = bench.new()
        ledger = await bench.settled(at, fails=True)
        await bench.clock.sleep(LONG)
        inner = ArchiveRetention(bench.queue.access)
        ask = inner._owners.is_live

        async def moved(at: PackAt, day: str) -> bool:
            await archive.keep(bench.store, LAYOUT, [(at, ledger)], entropy=bench.entropy)
            bench.bucket.remove(LAYOUT.ledger(at))
            return await ask(at, day)

        class Moving(type(inner._owners)):  # type: ignore[misc]
            is_live = staticmethod(moved)

        inner._owners = Moving(bench.queue.access)
        await inner.retain(archive_days=3, dead_letter_days=None)
        assert (await bench.queue.get(at.task(0))).input == "large"

    _run(check)


class Moving(Wrapper):
    """A store in which a batch gets another key, without its first record, when it is read."""

    def __init__(self, bench: Bench, *, moves: int) -> None:
        super().__init__(bench.store)
        self._bench = bench
        self._moves = moves

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        if key.startswith(LAYOUT.dead) and self._moves:
            self._moves -= 1
            records = [each async for each in archive.read(self.inner, LAYOUT, key)]
            left = records[1:] or records
            await archive.put(self.inner, LAYOUT, LAYOUT.dead, left, entropy=self._bench.entropy)
            await self.inner.delete(key)
        return await self.inner.get(key, unless=unless)


@pytest.mark.parametrize(("moves", "payloads"), [(0, 2), (1, 3), (2, 3), (3, 0), (10**9, 0)])
def test_a_batch_that_is_written_anew_meanwhile_keeps_its_payloads(
    moves: int, payloads: int
) -> None:
    async def check(bench: Bench) -> None:
        dropped, stays = bench.new(), bench.new()
        both = [(at, await bench.settled(at, fails=True)) for at in (dropped, stays)]
        await archive.keep(bench.store, LAYOUT, both, entropy=bench.entropy)
        for at, _ in both:
            bench.bucket.remove(LAYOUT.ledger(at))
        await bench.clock.sleep(LONG)
        access = replace(bench.queue.access, store=Moving(bench, moves=moves))
        # Two are orphans: the "results" of what has failed.
        retained = await ArchiveRetention(access).retain(archive_days=3, dead_letter_days=None)
        assert retained == RetentionResult(payloads=payloads)
        assert (await bench.queue.get(stays.task(0))).input == "large"

    _run(check)


@pytest.mark.parametrize("deletes", range(10))
def test_a_crash_on_the_way_leaves_the_rest_for_the_next_turn(deletes: int) -> None:
    async def check(bench: Bench) -> None:
        for _ in range(3):
            await bench.archived(bench.new())
        await bench.clock.sleep(LONG)
        bench.store.deletes = deletes
        with pytest.raises(Unavailable) if deletes < 9 else nullcontext():
            await bench.retain()
        # Batches go first, so that no record is without its payloads.
        assert bench.count(LAYOUT.archive) == 0 or bench.payload_count == 6
        bench.store.deletes = 10**9
        await bench.retain()
        assert bench.count(LAYOUT.archive) == bench.payload_count == 0

    _run(check)


def test_two_at_once_do_no_harm() -> None:
    async def check(bench: Bench) -> None:
        keeps = bench.new()
        await bench.archived(keeps, fails=True)
        for _ in range(5):
            await bench.archived(bench.new())
        await bench.clock.sleep(LONG)
        await asyncio.gather(*(bench.retain() for _ in range(3)))
        assert bench.count(LAYOUT.archive) == 0
        assert (await bench.queue.get(keeps.task(0))).input == "large"

    _run(check)


def test_a_turn_is_bounded_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "DAYS_MAX", 2)

    async def check(bench: Bench) -> None:
        for _ in range(5):
            await bench.payloads.put(bench.new().task(0), b"1", submitted_ms=bench.now_ms())
            kept = bench.new()
            await bench.pack(kept)
            await bench.clock.sleep(DAY)
        await bench.clock.sleep(LONG)
        turns = ArchiveRetention(bench.queue.access)
        found = [await turns.retain(archive_days=3, dead_letter_days=None) for _ in range(4)]
        assert [each.payloads for each in found] == [2, 2, 1, 0]
        assert [each.is_whole for each in found] == [False, False, True, False]

    _run(check)


def test_the_chore_does_what_the_settings_say_once_a_day() -> None:
    async def check(bench: Bench) -> None:
        chore = RetentionTask(bench.queue.access)
        assert await chore.turn() == retention.FIRST_SECONDS
        await bench.archived(bench.new())
        await bench.clock.sleep(LONG)
        assert await chore.turn() == retention.TURN_SECONDS
        assert bench.count(LAYOUT.archive) == 1
        # Somebody else sets it: the chore reads it anew.
        await bench.queue.archive.retain(archive_days=100, dead_letter_days=200)
        assert await bench.queue.archive.retention() == (100, 200)
        await chore.turn()
        assert bench.count(LAYOUT.archive) == 1
        await bench.clock.sleep(100 * DAY)
        assert await chore.turn() == retention.TURN_SECONDS
        assert bench.count(LAYOUT.archive) == bench.payload_count == 0

    _run(check)


def test_a_day_costs_a_get_and_with_a_setting_three_lists() -> None:
    async def idle(bench: Bench) -> None:
        chore = RetentionTask(bench.queue.access)
        for _ in range(31):
            await chore.turn()

    assert dict(_of(_run(idle))) == {Kind.GET: 30}

    async def kept(bench: Bench) -> None:
        await bench.queue.archive.retain(archive_days=3, dead_letter_days=3)
        await idle(bench)

    meter = _of(_run(kept))
    assert meter[Kind.LIST] == 31 * 3
    assert meter[Kind.PUT] == 1


def _of(meter: Meter) -> dict[Kind, int]:
    return {kind: n for (label, kind), n in meter.billed.items() if label == "retention"}


def test_setting_it_keeps_the_other_settings() -> None:
    async def check(bench: Bench) -> None:
        before = await read_config(bench.store, LAYOUT)
        await bench.queue.archive.retain(archive_days=7, dead_letter_days=None)
        after = await read_config(bench.store, LAYOUT)
        assert before is not None
        assert after is not None
        assert (after.archive_days, after.dead_letter_days) == (7, None)
        assert (after.shards, after.key_seconds) == (before.shards, before.key_seconds)
        body = bench.bucket.objects[LAYOUT.config].body
        assert decode(QueueConfig, body, where="config") == after

    _run(check)


@pytest.mark.parametrize("days", [0, -1, 10**6, True])
def test_a_senseless_number_of_days_is_refused(days: int) -> None:
    async def check(bench: Bench) -> None:
        with pytest.raises(InvalidInput, match="1 to 36,500 days"):
            await bench.queue.archive.retain(archive_days=days, dead_letter_days=None)
        assert await bench.queue.archive.retention() == (None, None)

    _run(check)
    with pytest.raises(InvalidInput):
        Queue("memory://", name="q", config=msgspec.structs.replace(QueueConfig(), archive_days=0))
