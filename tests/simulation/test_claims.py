"""Worlds of workers that claim, die, come back late and settle, over a store that loses answers.

A referee watches every write that reaches the bucket, on true time. Whatever the seed:
- an attempt is in the ledger before its handler starts, and is given once;
- nobody claims what another holds before its lease is over;
- a settlement comes from the claim that holds the task, and whoever sent it is told so;
- a task that has settled never changes;
- nothing starts after it was settled, although ledgers are archived as soon as they may be;
- every task ends settled, and its pack is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import pytest

from penstock.kernel.clock import Clock
from penstock.kernel.document_format import decode, encode
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import StoreError
from penstock.queue.attempt_outcomes import AttemptOutcome, GivenBack, Retried, Succeeded
from penstock.queue.ids import LEDGER, PackAt, new_pack
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import (
    Ledger,
    LedgerEvent,
    LedgerFailure,
    QueueTaskState,
    QueueTaskStatus,
)
from penstock.queue.pack import Pack
from penstock.queue.pack_session import ListedPack, PackSession
from penstock.queue.transitions import LedgerClaim, history
from penstock.store.base import CREATE, ObjectStore, Version
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.retrying import RetryingStore
from penstock.testing.virtual import World, simulate
from tests.sizes import seeds, some

LAYOUT = QueueLayout("sim")
LEASE_MS = 20_000
ATTEMPTS_MAX = 1_000
SEEDS = 500
FAULTS = FaultPlan(
    latency_seconds_max=2.0,
    throttled=0.05,
    failed=0.05,
    lost_request=0.05,
    lost_answer=0.1,
    duplicate=0.05,
    late_request=0.02,
    late_seconds_max=40.0,
)


class WatchedBucket(MemoryBucket):
    """A bucket that shows every change of a ledger to the referee."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, date_resolution_seconds=1.0)
        self.referee: Referee | None = None

    def write(self, key: str, body: bytes, metadata: Mapping[str, str]) -> Version:
        before = self.objects.get(key)
        version = super().write(key, body, metadata)
        if self.referee is not None and key.endswith(LEDGER):
            old = decode(Ledger, before.body, where=key) if before else None
            self.referee.watch(old, decode(Ledger, body, where=key))
        return version


@dataclass
class Referee:
    """Sees the bucket as it is, and remembers."""

    bucket: WatchedBucket
    packs: Sequence[PackAt]
    started: set[tuple[PackAt, int, int]] = field(default_factory=set)
    refused: set[tuple[int, str]] = field(default_factory=set)
    ended: set[tuple[int, str]] = field(default_factory=set)
    archived: dict[PackAt, Ledger] = field(default_factory=dict)

    def ledger(self, at: PackAt) -> Ledger | None:
        stored = self.bucket.objects.get(LAYOUT.ledger(at))
        return decode(Ledger, stored.body, where="ledger") if stored else None

    def watch(self, old: Ledger | None, new: Ledger) -> None:
        """One write to a ledger."""
        states = old.tasks if old else (QueueTaskState(),) * len(new.tasks)
        for place, (before, after) in enumerate(zip(states, new.tasks, strict=True)):
            assert not before.status.settled or before == after, "a settled task changed"
            assert after.attempt >= before.attempt, "an attempt went back"
            if after.status is QueueTaskStatus.CLAIMED and after.claim != before.claim:
                self._watch_claim(old, before, after)
            if before.status is QueueTaskStatus.CLAIMED and (
                after.status.settled
                or after.status is QueueTaskStatus.RETRYING
                or any(
                    line.what is LedgerEvent.GIVEN_BACK and line.attempt == before.attempt
                    for line in history(new, place)
                )
            ):
                self.ended.add((place, before.claim))
            if (
                after.status is QueueTaskStatus.SUCCEEDED
                and before.status is not QueueTaskStatus.SUCCEEDED
            ):
                by = msgspec.json.decode(after.result)
                assert by == before.claim, "a settlement of another claim than the holder's passed"

    def _watch_claim(
        self, old: Ledger | None, before: QueueTaskState, after: QueueTaskState
    ) -> None:
        assert after.attempt == before.attempt + 1, "an attempt was given twice or skipped"
        if old is not None and before.claim:
            expires = old.leases[before.claim].expires_ms
            assert expires <= self.bucket.clock.wall() * 1000, "a live lease was taken over"

    def starts(self, at: PackAt, place: int, attempt: int) -> None:
        """A handler is about to run."""
        assert at not in self.archived, "a task ran again after it had settled"
        ledger = self.ledger(at)
        assert ledger is not None, "an attempt runs that no ledger knows"
        claims = [
            line
            for line in history(ledger, place)
            if line.what is LedgerEvent.CLAIMED and line.attempt == attempt
        ]
        assert len(claims) == 1, "an attempt was not durable before its handler started"
        assert (at, place, attempt) not in self.started, "an attempt ran twice"
        self.started.add((at, place, attempt))

    def archive(self) -> None:
        """Remove the ledgers of packs that are done, without the grace that the design gives."""
        for at in self.packs:
            ledger = self.ledger(at)
            if ledger and ledger.settled and LAYOUT.pack(at) not in self.bucket.objects:
                self.archived[at] = ledger
                self.bucket.remove(LAYOUT.ledger(at))

    def finished(self) -> bool:
        return len(self.archived) == len(self.packs)


def _store(world: World, bucket: MemoryBucket, clock: Clock, name: str) -> ObjectStore:
    entropy = world.entropy(name)

    async def delay() -> None:
        await clock.sleep(entropy.uniform(0, 0.1))

    faulty = FaultyStore(MemoryStore(bucket, clock=clock, delay=delay), FAULTS, entropy=entropy)
    return RetryingStore(faulty, entropy=entropy)


class Worker:
    """A worker that lists everything, claims, dawdles, and sometimes sleeps through its lease."""

    def __init__(self, world: World, referee: Referee, number: int) -> None:
        self._entropy: Entropy = world.entropy(f"worker {number}")
        self._clock = world.clock(
            skew_seconds=self._entropy.uniform(-86_400, 86_400),
            drift=self._entropy.uniform(-150e-6, 150e-6),
        )
        self._store = _store(world, referee.bucket, self._clock, f"store {number}")
        self._referee = referee
        self._name = f"worker-{number}"

    async def run(self) -> None:
        while not self._referee.finished():
            # It tries again, as a worker does whose store is away.
            with suppress(StoreError):
                await self._round()
            await self._clock.sleep(self._entropy.uniform(0, 15))

    async def _round(self) -> None:
        page = await self._store.list(LAYOUT.tasks)
        entries = {entry.key: entry for entry in page.entries}
        for key, entry in entries.items():
            read = LAYOUT.read(key)
            if read is None or read[1]:
                continue
            at = read[0]
            seen = ListedPack(entry.version, entry.modified, LAYOUT.ledger(at) in entries)
            await self._work(at, seen)

    async def _work(self, at: PackAt, seen: ListedPack) -> None:
        pack = PackSession(self._store, LAYOUT, at, entropy=self._entropy)
        name = new_id(self._entropy)
        wanted = LedgerClaim(
            name, self._name, LEASE_MS, self._entropy.randrange(1, 4), ATTEMPTS_MAX
        )
        claimed = await pack.claim(wanted, seen)
        if claimed is None:
            return
        known = await self._store.now()
        if known.latest * 1000 >= claimed.expires_ms:
            return  # The lease is over before the handler could start.
        for place, attempt in claimed.attempts.items():
            self._referee.starts(at, place, attempt)
        await self._clock.sleep(self._entropy.uniform(0, 10))
        if self._entropy.random() < 0.3:
            await pack.extend([name], lease_ms=LEASE_MS)
        if self._entropy.random() < 0.2:
            await self._clock.sleep(self._entropy.uniform(0, 400))
        if self._entropy.random() < 0.1:
            return  # It dies here, as far as anybody can tell.
        endings = {place: (name, self._ending(name)) for place in claimed.attempts}
        for place in await pack.settle(endings):
            # Without the grace that the design gives, the archive takes the answer along.
            if at not in self._referee.archived:
                self._referee.refused.add((place, name))

    def _ending(self, result: str) -> AttemptOutcome:
        draw = self._entropy.random()
        if draw < 0.15:
            return Retried(LedgerFailure("Oops", "oops"), due_ms=0)
        if draw < 0.25:
            return GivenBack()
        return Succeeded(msgspec.Raw(msgspec.json.encode(result)))


async def a_world(world: World) -> tuple[int, int]:
    entropy = world.entropy("world")
    bucket = WatchedBucket(world.clock())
    packs: list[PackAt] = []
    producer = MemoryStore(bucket, clock=world.clock())
    for _ in range(entropy.randrange(1, 4)):
        count = entropy.randrange(1, 6)
        now_ms = int(world.now() * 1000)
        at = new_pack(type="t", count=count, submitted_ms=now_ms, entropy=entropy)
        inputs = tuple(msgspec.Raw(b"%d" % number) for number in range(count))
        body = encode(Pack(type="t", nonce=new_id(entropy), submitted_ms=now_ms, inputs=inputs))
        await producer.put(LAYOUT.pack(at), body, CREATE)
        packs.append(at)
    referee = bucket.referee = Referee(bucket, packs)
    workers = [Worker(world, referee, number) for number in range(entropy.randrange(2, 6))]
    async with asyncio.TaskGroup() as group:
        group.create_task(_archive(world, referee))
        for worker in workers:
            group.create_task(worker.run())
    _check_the_end(referee)
    return len(referee.started), sum(at.count for at in packs)


async def _archive(world: World, referee: Referee) -> None:
    clock, entropy = world.clock(), world.entropy("archive")
    while not referee.finished():
        await clock.sleep(entropy.uniform(0, 20))
        referee.archive()


def _check_the_end(referee: Referee) -> None:
    for at, ledger in referee.archived.items():
        assert len(ledger.inputs) == at.count
        assert all(task.status is QueueTaskStatus.SUCCEEDED for task in ledger.tasks)
    lied = referee.refused & referee.ended
    assert not lied, "an ending took effect and was reported as refused"


@pytest.mark.proof
@pytest.mark.parametrize("block", range(10))
def test_claims_hold_in_every_world(block: int) -> None:
    attempts = tasks = 0
    for seed in seeds(some(SEEDS))[block::10]:
        ran, had = simulate(a_world, seed=seed)
        attempts, tasks = attempts + ran, tasks + had
    assert attempts > tasks, "no attempt was ever lost: the worlds are too kind"
