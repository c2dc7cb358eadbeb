"""What is kept of settled packs is found again, in few objects."""

from __future__ import annotations

import gzip
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from penstock.kernel.document_format import encode
from penstock.kernel.errors import NotOurs
from penstock.queue import archive
from penstock.queue.ids import PackAt, keyed_pack, new_pack
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger, LedgerFailure, QueueTaskState, QueueTaskStatus
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import EPOCH, World, simulate

LAYOUT = QueueLayout("q")
MS = int(EPOCH * 1000)
FAILED = QueueTaskState(QueueTaskStatus.FAILED, 1, failure=LedgerFailure("E", "m"))
SUCCEEDED = QueueTaskState(QueueTaskStatus.SUCCEEDED, 1, result=msgspec.Raw(b"7"))


class Bench:
    """An archive."""

    def __init__(self, world: World) -> None:
        self.entropy = world.entropy("x")
        self.meter = Meter()
        self.bucket = MemoryBucket(world.clock())
        self.store = MeteredStore(MemoryStore(self.bucket, clock=world.clock()), self.meter)

    def record(
        self, after_ms: int, *states: QueueTaskState, input_bytes: int = 1
    ) -> tuple[PackAt, Ledger]:
        states = states or (SUCCEEDED,)
        at = new_pack(type="t", count=len(states), submitted_ms=MS + after_ms, entropy=self.entropy)
        ledger = Ledger(
            pack_version="v",
            born=at.pack,
            tasks=states,
            inputs=(msgspec.Raw(b"1" * input_bytes),) * len(states),
            submitted_ms=MS + after_ms,
        )
        return at, ledger

    async def keep(self, *records: tuple[PackAt, Ledger]) -> None:
        await archive.keep(self.store, LAYOUT, records, entropy=self.entropy)

    async def find(self, at: PackAt) -> Ledger | None:
        return await archive.find(self.store, LAYOUT, at)

    async def dead(self) -> list[PackAt]:
        return [at async for at, _ in archive.dead(self.store, LAYOUT)]

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.bucket.objects if key.startswith(prefix)]


def _run(check: Callable[[Bench], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        await check(Bench(world))

    simulate(main, seed=1)


def _same(one: Ledger | None, other: Ledger) -> bool:
    return one is not None and encode(one) == encode(other)


def test_what_is_kept_is_found_whole() -> None:
    async def check(bench: Bench) -> None:
        records = [bench.record(number * 1000, SUCCEEDED, FAILED) for number in range(3)]
        await bench.keep(*records)
        for at, ledger in records:
            assert _same(await bench.find(at), ledger)

    _run(check)


def test_many_records_are_one_put() -> None:
    async def check(bench: Bench) -> None:
        await bench.keep(*(bench.record(number) for number in range(500)))
        assert bench.meter.requests(kind=Kind.PUT) == 1
        assert len(bench.keys(LAYOUT.archive)) == 1

    _run(check)


def test_nothing_is_no_object() -> None:
    async def check(bench: Bench) -> None:
        await bench.keep()
        assert bench.bucket.objects == {}

    _run(check)


def test_packs_with_a_failed_task_are_dead_letters() -> None:
    async def check(bench: Bench) -> None:
        cancelled = QueueTaskState(QueueTaskStatus.CANCELLED)
        fine, dead = bench.record(0, SUCCEEDED, cancelled), bench.record(1, SUCCEEDED, FAILED)
        await bench.keep(fine, dead)
        assert len(bench.keys(LAYOUT.archive)) == len(bench.keys(LAYOUT.dead)) == 1
        assert await bench.dead() == [dead[0]]
        assert _same(await bench.find(dead[0]), dead[1])

    _run(check)


def test_what_was_never_kept_is_not_found() -> None:
    async def check(bench: Bench) -> None:
        await bench.keep(*(bench.record(number * 1000) for number in (0, 2)))
        for after_ms in (-1000, 0, 1000, 2000, 3000):
            assert await bench.find(bench.record(after_ms)[0]) is None

    _run(check)


def test_a_task_with_a_key_is_looked_for_in_every_batch() -> None:
    async def check(bench: Bench) -> None:
        at, other = (keyed_pack(type="t", key=key) for key in ("k", "other"))
        mine = bench.record(3)[1]
        await bench.keep((other, bench.record(2)[1]), bench.record(0))
        await bench.keep((at, mine), bench.record(7, FAILED))
        await bench.keep(bench.record(9))
        assert _same(await bench.find(at), mine)
        assert await bench.find(keyed_pack(type="t", key="never")) is None

    _run(check)


@pytest.mark.parametrize("states", [(FAILED, SUCCEEDED), (SUCCEEDED, FAILED), (FAILED, FAILED)])
def test_of_a_key_that_was_used_twice_the_last_record_is_found(
    states: tuple[QueueTaskState, QueueTaskState],
) -> None:
    async def check(bench: Bench) -> None:
        at = keyed_pack(type="t", key="k")
        first, second = (bench.record(n * 86_400_000, state)[1] for n, state in enumerate(states))
        await bench.keep((at, first))
        await bench.keep((at, second))
        assert _same(await bench.find(at), second)

    _run(check)


def test_of_two_records_of_a_key_in_one_batch_the_last_is_found() -> None:
    async def check(bench: Bench) -> None:
        at = keyed_pack(type="t", key="k")
        first, second = (bench.record(after_ms)[1] for after_ms in (0, 400_000))
        await bench.keep((at, second), (at, first))
        assert _same(await bench.find(at), second)

    _run(check)


def test_batches_are_cut_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "RECORDS_MAX", 3)

    async def check(bench: Bench) -> None:
        records = [bench.record(number) for number in range(7)]
        await bench.keep(*records)
        assert len(bench.keys(LAYOUT.archive)) == 3
        for at, ledger in records:
            assert _same(await bench.find(at), ledger)

    _run(check)


def test_batches_are_cut_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "BATCH_BYTES_MAX", 10_000)

    async def check(bench: Bench) -> None:
        records = [bench.record(number, input_bytes=4_000) for number in range(5)]
        records.append(bench.record(5, input_bytes=50_000))
        await bench.keep(*records)
        sizes = [len(gzip.decompress(each.body)) for each in bench.bucket.objects.values()]
        assert len(sizes) == 4
        assert sum(size > 12_000 for size in sizes) == 1
        for at, ledger in records:
            assert _same(await bench.find(at), ledger)

    _run(check)


def test_a_task_is_found_by_the_time_in_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the batch that its submit falls into is read, whatever the order they were kept in."""
    monkeypatch.setattr(archive, "RECORDS_MAX", 10)

    async def check(bench: Bench) -> None:
        records = [bench.record(number * 1000) for number in range(100)]
        await bench.keep(*reversed(records))
        assert len(bench.keys(LAYOUT.archive)) == 10
        for at, _ in (records[0], records[9], records[10], records[55], records[99]):
            before = bench.meter.requests(kind=Kind.GET)
            assert await bench.find(at) is not None
            assert bench.meter.requests(kind=Kind.GET) == before + 1

    _run(check)


def test_records_of_one_millisecond_are_found_in_any_batch() -> None:
    async def check(bench: Bench) -> None:
        records = [bench.record(0) for _ in range(4)]
        for record in records:
            await bench.keep(record)
        for at, ledger in records:
            assert _same(await bench.find(at), ledger)

    _run(check)


def test_a_record_that_is_kept_twice_is_found_once() -> None:
    """What a crash between the put and the delete leaves."""

    async def check(bench: Bench) -> None:
        record = bench.record(0)
        await bench.keep(record)
        await bench.keep(record, bench.record(5))
        assert _same(await bench.find(record[0]), record[1])

    _run(check)


def test_what_is_not_ours_is_passed_over_and_what_is_damaged_is_told() -> None:
    async def check(bench: Bench) -> None:
        record = bench.record(0, FAILED)
        await bench.keep(record)
        bench.bucket.write(f"{LAYOUT.dead}readme.txt", b"x", {})
        assert await bench.dead() == [record[0]]
        assert _same(await bench.find(record[0]), record[1])
        (key,) = (key for key in bench.keys(LAYOUT.dead) if not key.endswith("txt"))
        bench.bucket.write(key, b"damaged", {})
        with pytest.raises(NotOurs, match="dead/"):
            await bench.find(record[0])

    _run(check)


def test_a_batch_that_goes_meanwhile_has_no_records() -> None:
    async def check(bench: Bench) -> None:
        gone = LAYOUT.batch(LAYOUT.archive, first_ms=MS, last_ms=MS, entropy=bench.entropy)
        assert [each async for each in archive.read(bench.store, LAYOUT, gone)] == []

    _run(check)
