"""What a purge cancels, what it forgets, and what it leaves alone."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from penstock.kernel.document_format import decode
from penstock.kernel.errors import InvalidInput, TaskNotFound
from penstock.queue import archive, retention
from penstock.queue.attempt_outcomes import AttemptOutcome, Failed, Succeeded
from penstock.queue.client import Queue, Task
from penstock.queue.execution.pack_runner import PayloadTransfer
from penstock.queue.ids import task_at
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger, LedgerFailure
from penstock.queue.pack import Pack
from penstock.queue.pack_session import ListedPack, PackSession
from penstock.queue.payloads import Payloads
from penstock.queue.transitions import LedgerClaim
from penstock.store.base import Object, ObjectStore, Version, Wrapper, find
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")
FAILED = Failed(LedgerFailure("E", "m"))
W_SECONDS = 400.0
LARGE = "x" * 100_000


class Bench:
    """A queue, and somebody who claims and settles its tasks."""

    def __init__(self, world: World, queue: Queue, bucket: MemoryBucket) -> None:
        self.clock = world.clock()
        self.queue = queue
        self.bucket = bucket

    async def claim(self, task: Task) -> PackSession:
        at, _ = task_at(task.id)
        access = self.queue.access
        session = PackSession(access.store, LAYOUT, at, entropy=access.entropy)
        seen = None
        if at.place != "key":
            stored = self.bucket.objects[LAYOUT.pack(at)]
            seen = ListedPack(stored.version, stored.modified, has_ledger=True)
        assert await session.claim(LedgerClaim("c", "w", 30_000, at.count, 3), seen) is not None
        return session

    async def end(self, task: Task, *endings: AttemptOutcome) -> None:
        session = await self.claim(task)
        await session.settle({n: ("c", each) for n, each in enumerate(endings or (Succeeded(),))})

    async def archived(self, *tasks: Task) -> None:
        """Let the settled tasks leave for the archive."""
        await self.clock.sleep(W_SECONDS)
        assert (await self.queue.archive.flush()).ledgers_archived == len(tasks)

    async def status(self, task: Task) -> str:
        try:
            return (await task.view()).status
        except TaskNotFound:
            return "forgotten"

    def count(self, prefix: str) -> int:
        return sum(key.startswith(prefix) for key in self.bucket.objects)


def _run(check: Callable[[Bench], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock())
        store = MemoryStore(bucket, clock=world.clock())
        queue = await Queue.on(store, name="q", entropy=world.entropy("q"))
        await check(Bench(world, queue, bucket))

    simulate(main, seed=1)


def test_everything_is_cancelled_or_forgotten() -> None:
    async def check(bench: Bench) -> None:
        done, failed = await bench.queue.submit("t"), await bench.queue.submit("t")
        await bench.end(done)
        await bench.end(failed, FAILED)
        await bench.archived(done, failed)
        ready = await bench.queue.submit("t")
        delayed = await bench.queue.submit("t", delay=3600)
        keyed = await bench.queue.submit("t", key="k")
        low = await bench.queue.submit("t", priority=-3)
        high = await bench.queue.submit("t", priority=3)
        running = await bench.queue.submit("t")
        session = await bench.claim(running)
        just = await bench.queue.submit("t")
        await bench.end(just)
        purged = await bench.queue.purge()
        assert (purged.cancelled, purged.asked_to_stop, purged.tasks_forgotten) == (5, 1, 2)
        for task in (ready, delayed, keyed, low, high):
            assert await bench.status(task) == "cancelled"
        for task in (done, failed):
            assert await bench.status(task) == "forgotten"
        # What runs ends as its worker says; what was settled just now is a tombstone.
        assert (await running.view()).cancel_asked
        assert await session.settle({0: ("c", Succeeded())}) == frozenset()
        assert await bench.status(just) == "succeeded"
        assert bench.count(LAYOUT.archive) == bench.count(LAYOUT.dead) == 0
        await bench.clock.sleep(W_SECONDS)
        # Settled for long enough, they are archived and forgotten. The key stays taken, and the
        # ledger of the one that was delayed is met by no look before its minute has come.
        assert (await bench.queue.purge()).tasks_forgotten == 5
        assert await bench.status(just) == "forgotten"
        assert await bench.status(keyed) == "cancelled"

    _run(check)


def test_only_what_is_meant_by_type() -> None:
    async def check(bench: Bench) -> None:
        mine, other = await bench.queue.submit("mine"), await bench.queue.submit("other")
        old_mine, old_other = await bench.queue.submit("mine"), await bench.queue.submit("other")
        await bench.end(old_mine)
        await bench.end(old_other)
        await bench.archived(old_mine, old_other)
        purged = await bench.queue.purge(types=["mine"])
        assert (purged.cancelled, purged.tasks_forgotten, purged.batches_rewritten) == (1, 1, 1)
        assert [await bench.status(task) for task in (mine, old_mine)] == ["cancelled", "forgotten"]
        assert [await bench.status(task) for task in (other, old_other)] == ["ready", "succeeded"]
        assert [event.what for event in await bench.queue.history(old_other.id)][-1] == "succeeded"

    _run(check)


def test_only_what_is_meant_by_status() -> None:
    async def check(bench: Bench) -> None:
        delayed, ready = await bench.queue.submit("t", delay=3600), await bench.queue.submit("t")
        done, failed = await bench.queue.submit("t"), await bench.queue.submit("t")
        await bench.end(done)
        await bench.end(failed, FAILED)
        await bench.archived(done, failed)
        running = await bench.queue.submit("t")
        await bench.claim(running)
        purged = await bench.queue.purge(statuses=["ready", "failed"])
        assert (purged.cancelled, purged.asked_to_stop, purged.tasks_forgotten) == (1, 0, 1)
        assert not (await running.view()).cancel_asked
        found = [await bench.status(task) for task in (delayed, ready, done, failed)]
        assert found == ["delayed", "cancelled", "succeeded", "forgotten"]

    _run(check)


def test_only_what_is_old_enough() -> None:
    async def check(bench: Bench) -> None:
        old = await bench.queue.submit("t")
        keyed = await bench.queue.submit("t", key="old")
        await bench.clock.sleep(1000)
        young = await bench.queue.submit("t")
        young_keyed = await bench.queue.submit("t", key="young")
        assert (await bench.queue.purge(older_than=500)).cancelled == 2
        assert [await bench.status(task) for task in (old, keyed)] == ["cancelled"] * 2
        assert [await bench.status(task) for task in (young, young_keyed)] == ["ready"] * 2
        await bench.clock.sleep(2000)
        assert (await bench.queue.purge(older_than=2900)).tasks_forgotten == 1
        assert [await bench.status(task) for task in (old, young)] == ["forgotten", "ready"]

    _run(check)


def test_in_a_pack_of_many_only_what_is_meant_is_cancelled_and_its_record_goes_whole() -> None:
    async def check(bench: Bench) -> None:
        tasks = await bench.queue.submit_many("t", [1, 2])
        at, _ = task_at(tasks[0].id)
        session = await bench.claim(tasks[0])
        await session.settle({0: ("c", Succeeded()), 1: ("c", FAILED)})
        assert at.count == 2
        await bench.archived(tasks[0])
        purged = await bench.queue.purge(statuses=["failed"])
        assert (purged.tasks_forgotten, purged.tasks_kept) == (0, 1)
        assert [await bench.status(task) for task in tasks] == ["succeeded", "failed"]
        purged = await bench.queue.purge(statuses=["failed", "succeeded"])
        assert (purged.tasks_forgotten, purged.tasks_kept) == (2, 0)

    _run(check)


def test_payloads_go_with_what_is_forgotten() -> None:
    async def check(bench: Bench) -> None:
        access = bench.queue.access
        stays = await bench.queue.submit("other", LARGE)
        task = await bench.queue.submit("t", LARGE)
        at, _ = task_at(task.id)
        session = await bench.claim(task)
        carrier = PayloadTransfer(Payloads(access.store, LAYOUT, access.entropy), at)
        pack = decode(Pack, bench.bucket.objects[LAYOUT.pack(at)].body, where="pack")
        large = Succeeded(msgspec.Raw(msgspec.json.encode(LARGE)))
        ending = await carrier.store(large, pack, 0)
        assert ending is not None
        await session.settle({0: ("c", ending)})
        await bench.archived(task)
        assert bench.count(LAYOUT.payloads) == 3
        purged = await bench.queue.purge(types=["t"])
        assert (purged.tasks_forgotten, purged.payloads_deleted) == (1, 2)
        assert bench.count(LAYOUT.payloads) == 1
        assert (await stays.view()).input == LARGE

    _run(check)


def test_a_dry_run_does_nothing_and_tells_the_same() -> None:
    async def check(bench: Bench) -> None:
        done = await bench.queue.submit("t", LARGE)
        await bench.end(done)
        await bench.archived(done)
        await bench.queue.submit("t")
        running = await bench.queue.submit("t")
        await bench.claim(running)
        before = dict(bench.bucket.objects)
        said = await bench.queue.purge(dry_run=True)
        assert bench.bucket.objects == before
        assert await bench.queue.purge() == said
        assert (said.cancelled, said.asked_to_stop, said.tasks_forgotten) == (1, 1, 1)
        assert said.payloads_deleted == 1

    _run(check)


def test_what_cannot_be_read_is_left_alone_and_told() -> None:
    async def check(bench: Bench) -> None:
        task, broken = await bench.queue.submit("t"), await bench.queue.submit("t")
        done = await bench.queue.submit("t")
        await bench.end(done)
        await bench.archived(done)
        (batch,) = (key for key in bench.bucket.objects if key.startswith(LAYOUT.archive))
        bench.bucket.write(batch, b"damaged", {})
        bench.bucket.write(LAYOUT.pack(task_at(broken.id)[0]), b"damaged", {})
        purged = await bench.queue.purge()
        assert await bench.status(task) == "cancelled"
        assert len(purged.notes) == 2
        assert bench.bucket.objects[batch].body == b"damaged"

    _run(check)


def test_payloads_stay_while_the_ledger_is_there() -> None:
    """What a crash between the put of a batch and the delete of the ledgers leaves."""

    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", LARGE)
        await bench.end(task)
        access = bench.queue.access
        at, _ = task_at(task.id)
        ledger = decode(Ledger, bench.bucket.objects[LAYOUT.ledger(at)].body, where="ledger")
        await archive.keep(access.store, LAYOUT, [(at, ledger)], entropy=access.entropy)
        purged = await bench.queue.purge()
        assert (purged.tasks_forgotten, purged.payloads_deleted) == (1, 0)
        assert (await task.view()).input == LARGE

    _run(check)


class Interrupted(Wrapper):
    """A store in which something happens before the first batch is read."""

    def __init__(self, inner: ObjectStore, before: Callable[[], Awaitable[object]]) -> None:
        super().__init__(inner)
        self._before: Callable[[], Awaitable[object]] | None = before

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        before, self._before = self._before, None
        if before is not None:
            await before()
        return await self.inner.get(key, unless=unless)


def test_a_record_is_found_while_its_batch_is_written_anew() -> None:
    """It was listed before. Also if it is gone then, and what is left of it is in another."""

    async def check(bench: Bench) -> None:
        tasks = [await bench.queue.submit(each) for each in ("mine", "other")]
        for task in tasks:
            await bench.end(task)
        await bench.archived(*tasks)
        access = bench.queue.access
        (key,) = (key for key in bench.bucket.objects if key.startswith(LAYOUT.archive))

        async def move() -> None:
            records = [each async for each in archive.read(access.store, LAYOUT, key)]
            await archive.put(access.store, LAYOUT, LAYOUT.archive, records, entropy=access.entropy)
            bench.bucket.remove(key)

        store = Interrupted(access.store, lambda: bench.queue.purge(types=["mine"]))
        assert await archive.find(store, LAYOUT, task_at(tasks[1].id)[0]) is not None
        store = Interrupted(access.store, move)
        assert await archive.find(store, LAYOUT, task_at(tasks[1].id)[0]) is not None
        assert await archive.find(store, LAYOUT, task_at(tasks[0].id)[0]) is None

    _run(check)


class Overtaken(Wrapper):
    """A store in which something happens after a batch was read, so often.

    With `lenient` it takes a delete of what is gone for done, as S3 does.
    """

    def __init__(
        self,
        inner: ObjectStore,
        after: Callable[[], Awaitable[object]],
        *,
        times: int = 1,
        lenient: bool = False,
    ) -> None:
        super().__init__(inner)
        self._after = after
        self._times = times
        self._lenient = lenient

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        found = await self.inner.get(key, unless=unless)
        if key.startswith(LAYOUT.archive) and self._times:
            self._times -= 1
            await self._after()
        return found

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        if self._lenient and await find(self.inner, key) is None:
            return
        await self.inner.delete(key, version=version)


TYPES = ("a", "b", "c")


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("one", ["a", "ab", "abc"])
@pytest.mark.parametrize("other", ["a", "b", "bc", "abc"])
def test_of_two_purges_at_once_neither_brings_back_what_the_other_drops(
    one: str, other: str, lenient: bool
) -> None:
    async def check(bench: Bench) -> None:
        tasks = [await bench.queue.submit(each, LARGE) for each in TYPES]
        for task in tasks:
            await bench.end(task)
        await bench.archived(*tasks)
        access = bench.queue.access
        store = Overtaken(access.store, lambda: bench.queue.purge(types=other), lenient=lenient)
        await retention.purge(replace(access, store=store), types=one)
        for type_, task in zip(TYPES, tasks, strict=True):
            is_gone = type_ in one + other
            assert await bench.status(task) == ("forgotten" if is_gone else "succeeded")
            if not is_gone:
                assert (await task.view()).input == LARGE
        left = set(TYPES) - set(one + other)
        assert bench.count(LAYOUT.payloads) == len(left)
        assert bench.count(LAYOUT.archive) == bool(left)

    _run(check)


def test_a_batch_that_others_change_all_the_time_is_left_alone_with_its_payloads() -> None:
    async def check(bench: Bench) -> None:
        tasks = [await bench.queue.submit(each, LARGE) for each in TYPES]
        for task in tasks:
            await bench.end(task)
        await bench.archived(*tasks)
        access = bench.queue.access
        (key,) = (key for key in bench.bucket.objects if key.startswith(LAYOUT.archive))

        changes = itertools.count(1)

        async def change() -> None:
            # The same records in other bytes.
            rows = gzip.decompress(bench.bucket.objects[key].body)
            bench.bucket.write(key, gzip.compress(rows, mtime=next(changes)), {})

        store = Overtaken(access.store, change, times=100)
        for types in ("a", "abc"):
            purged = await retention.purge(replace(access, store=store), types=types)
            assert purged == retention.PurgeResult(notes=purged.notes)
            assert "written too often" in purged.notes[0]
        assert [(await task.view()).input for task in tasks] == [LARGE] * 3

    _run(check)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"statuses": ["done"]}, "'done' is not a status"),
        ({"statuses": []}, "No status is named"),
        ({"types": ["a/b"]}, "'a/b' is not the name of a type"),
        ({"older_than": -1.0}, "An age is at least"),
        ({"older_than": float("nan")}, "An age is at least"),
    ],
)
def test_a_senseless_choice_is_refused(choice: Any, said: str) -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t")
        with pytest.raises(InvalidInput, match=said):
            await bench.queue.purge(**choice)
        assert await bench.status(task) == "ready"

    _run(check)


def test_the_words_for_what_has_ended_are_all_the_others() -> None:
    assert {
        *("ready", "delayed", "running", "retrying"),
        *("succeeded", "failed", "cancelled", "expired"),
    } == retention.LIVE | retention.SETTLED
    assert not retention.LIVE & retention.SETTLED
