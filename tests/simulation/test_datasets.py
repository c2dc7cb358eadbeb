"""Worlds of attempts, zombies, relays, sweepers and readers, over a store that loses answers.

The database is a few dictionaries that change at one instant, as transactions do. A referee sees
every object that is written or removed, on true time. Whatever the seed:
- the revision of a `current.json` never goes back;
- what is published, what `current.json` names, and what a running attempt was given never loses
  a file, and a reader that follows `current.json` finds every file that it names within the grace;
- when all is quiet, nothing is left but what is published.

The last test breaks the rules one at a time, and the referee has to see each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from penstock.datasets.layout import (
    CURRENT,
    DATASETS,
    attempt_name,
    attempt_of,
    attempt_prefix,
    place_of,
    scratch_prefix,
)
from penstock.datasets.projection import CurrentPart, CurrentPartition, project, read_partition
from penstock.datasets.sweeper import Sweeper, Verdict
from penstock.kernel.clock import Clock
from penstock.kernel.document_format import decode, encode
from penstock.kernel.errors import NotFound, StoreError
from penstock.store.base import REPLACE, ObjectStore, Version
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.retrying import RetryingStore
from penstock.testing.virtual import Unhandled, World, simulate
from tests.sizes import some

SEEDS_MAX = 25
"""In which each broken rule is found."""
SEEDS = some(SEEDS_MAX)
GRACE = 400.0
BUSY_SECONDS = 4000.0
QUIET_SECONDS = 10 * GRACE
PARTITIONS = ("a", "b")
ROOT = "memory://bucket"
FILES = ("part-0.parquet", "part-1.parquet", "manifest.json")
FAULTS = FaultPlan(
    latency_seconds_max=2.0,
    throttled=0.03,
    failed=0.03,
    lost_request=0.03,
    lost_answer=0.05,
    duplicate=0.05,
    late_request=0.03,
    late_seconds_max=60.0,
)


@dataclass
class Attempt:
    """A running or ended attempt, and what it was given to read."""

    name: str
    began_at: float
    given: tuple[str, ...] = ()
    ended_at: float | None = None


@dataclass
class Departed:
    """What was published once: when it left, and when `current.json` was known to know it."""

    partition: str
    revision: int
    left_at: float
    confirmed_at: float | None = None


@dataclass
class Database:
    """The rows; every method is one transaction. `broken` names the rule that does not hold."""

    world: World
    broken: str = ""
    revisions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTITIONS, 0))
    published: dict[str, str | None] = field(default_factory=lambda: dict.fromkeys(PARTITIONS))
    projected: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTITIONS, 0))
    attempts: dict[int, Attempt] = field(default_factory=dict)
    departed: dict[str, Departed] = field(default_factory=dict)

    def begin(self) -> Attempt:
        number = len(self.attempts) + 1
        name = attempt_name(task_id=number, attempt=1, lease_token=f"fence of {number}")
        given = tuple(place for place in self.published.values() if place)
        self.attempts[number] = Attempt(name, self.world.now(), given)
        return self.attempts[number]

    def end(self, attempt: Attempt) -> None:
        attempt.ended_at = attempt.ended_at or self.world.now()

    def publish(self, partition: str, attempt: Attempt | None) -> None:
        """The end of an attempt that is still ours; without one, the partition is dropped."""
        if attempt is not None and attempt.ended_at is not None:
            return
        before = self.published[partition]
        self.revisions[partition] += 1
        if before is not None:
            left = Departed(partition, self.revisions[partition], self.world.now())
            self.departed[before] = left
        self.published[partition] = None if attempt is None else place(partition, attempt.name)
        if attempt is not None:
            self.end(attempt)

    def confirm(self, partition: str, revision: int) -> None:
        self.projected[partition] = max(self.projected[partition], revision)
        for each in self.departed.values():
            is_known = each.partition == partition and each.revision <= revision
            if is_known and each.confirmed_at is None:
                each.confirmed_at = self.world.now()

    async def verdicts(self, places: Sequence[str]) -> Mapping[str, Verdict]:
        return {each: Verdict.GONE for each in places if self._is_gone(each)}

    def _is_gone(self, place: str) -> bool:
        now, rule = self.world.now(), self.broken
        found = attempt_of(place.rpartition("/")[2])
        assert found is not None
        attempt = self.attempts[found.task_id]
        if place in self.published.values():
            return rule == "published"
        if attempt.ended_at is None:
            return rule == "running"
        left = self.departed.get(place)
        if left is None:
            return now >= attempt.ended_at + GRACE
        if left.confirmed_at is None and rule != "confirmed":
            return False
        since = left.left_at if rule == "since" else max(left.left_at, left.confirmed_at or 0.0)
        if rule != "readers" and any(
            each.ended_at is None and each.began_at < left.left_at
            for each in self.attempts.values()
        ):
            return False
        return now >= since + (0.0 if rule == "grace" else GRACE)


def place(partition: str, attempt: str) -> str:
    prefix = attempt_prefix("d", generation="g", partition_key=partition, attempt=attempt)
    return prefix.removeprefix(DATASETS)


class Watched(MemoryBucket):
    """A bucket whose every change the referee sees."""

    def __init__(self, clock: Clock, database: Database) -> None:
        super().__init__(clock, date_resolution_seconds=1.0)
        self.database = database

    def write(self, key: str, body: bytes, metadata: Mapping[str, str]) -> Version:
        if key.endswith(CURRENT):
            new, old = self._current(key, body), self.objects.get(key)
            before = self._current(key, old.body).revision if old else 0
            assert new.revision > before, "a revision went back"
            for each in new.parts:
                self._assert_whole(
                    str(place_of(each.location)), "current.json names a missing file"
                )
        return super().write(key, body, metadata)

    def remove(self, key: str) -> None:
        assert not key.endswith(CURRENT), "a current.json was removed"
        where = place_of(f"/{key}") or key
        assert where not in self.database.published.values(), "a published file was removed"
        for attempt in self.database.attempts.values():
            held = attempt.ended_at is None and where in attempt.given
            assert not held, "a file that a running attempt reads was removed"
        for name in PARTITIONS:
            stored = self.objects.get(f"{DATASETS}d/g/{name}/{CURRENT}")
            for each in self._current(name, stored.body).parts if stored else ():
                assert place_of(each.location) != where, (
                    "a file that current.json names was removed"
                )
        super().remove(key)

    def _assert_whole(self, where: str, problem: str) -> None:
        assert all(f"{DATASETS}{where}/{name}" in self.objects for name in FILES), problem

    @staticmethod
    def _current(key: str, body: bytes) -> CurrentPartition:
        return decode(CurrentPartition, body, where=key)


class Trusting(Sweeper):
    """One that does not look into `current.json` itself, and so hides no mistake of the book's."""

    async def _is_named(self, folder: object) -> bool:
        return False


class Cast:
    """Everybody in a world."""

    def __init__(self, world: World, broken: str) -> None:
        self.world = world
        self.broken = broken
        self.database = Database(world, broken)
        self.bucket = Watched(world.clock(), self.database)
        self.found = 0
        self.zombies = 0
        self.swept = 0
        self.working = 0
        self._stores: list[ObjectStore] = []

    def store(self, name: str) -> tuple[ObjectStore, Clock]:
        entropy = self.world.entropy(name)
        clock = self.world.clock()

        async def delay() -> None:
            await clock.sleep(entropy.uniform(0, 0.2))

        faulty = FaultyStore(
            MemoryStore(self.bucket, clock=clock, delay=delay), FAULTS, entropy=entropy
        )
        self._stores.append(faulty)
        return RetryingStore(faulty, entropy=entropy), clock

    @property
    def is_busy(self) -> bool:
        return self.world.loop.time() < BUSY_SECONDS

    async def worker(self, number: int) -> None:
        name = f"worker {number}"
        store, clock = self.store(name)
        entropy = self.world.entropy(name)
        self.working += 1
        while self.is_busy:
            partition = entropy.choice(PARTITIONS)
            attempt = self.database.begin()
            fate = entropy.random()
            await self._write(store, scratch_prefix(attempt.name), FILES[:1])
            # Long work: what it was given has to stay, whatever is published meanwhile.
            await clock.sleep(entropy.uniform(0, 2 * GRACE if fate < 0.1 else 60))
            where = place(partition, attempt.name)
            written = FILES[: 2 if fate > 0.7 else 3]
            is_written = await self._write(store, DATASETS + where, written)
            if is_written and len(written) == len(FILES):
                self.database.publish(partition, attempt)
            else:
                self.database.end(attempt)
                if fate > 0.85:
                    # Reaped, and comes back when its folder has been swept, perhaps.
                    self.zombies += 1
                    await clock.sleep(entropy.uniform(0, 3 * GRACE))
                    await self._write(store, DATASETS + where, FILES)
                    self.database.publish(partition, attempt)
            if entropy.random() < 0.1:
                self.database.publish(entropy.choice(PARTITIONS), None)
        self.working -= 1

    @staticmethod
    async def _write(store: ObjectStore, prefix: str, names: Sequence[str]) -> bool:
        try:
            for name in names:
                await store.put(f"{prefix}/{name}", b"rows")
        except StoreError:
            return False
        return True

    async def relay(self, number: int) -> None:
        name = f"relay {number}"
        store, clock = self.store(name)
        entropy, database = self.world.entropy(name), self.database
        await clock.sleep(1)
        while self.working or database.projected != database.revisions:
            # Sometimes it is away for long, and then it carries out what it read before.
            await clock.sleep(entropy.uniform(0, GRACE if entropy.random() < 0.1 else 10))
            partition = entropy.choice(PARTITIONS)
            revision, published = database.revisions[partition], database.published[partition]
            if revision == database.projected[partition]:
                continue
            parts = (CurrentPart(location=f"{ROOT}/{DATASETS}{published}"),) if published else ()
            current = CurrentPartition(
                dataset="d", generation="g", partition_key=partition, revision=revision, parts=parts
            )
            await clock.sleep(entropy.uniform(0, 20))
            with suppress(StoreError):
                if self.broken == "swap":
                    await store.put(current.key, encode(current), REPLACE)
                    database.confirm(partition, revision)
                else:
                    database.confirm(partition, (await project(store, current)).revision)

    async def sweeper(self, number: int) -> None:
        name = f"sweeper {number}"
        store, clock = self.store(name)
        grace = 0.0 if self.broken in ("running", "published") else GRACE
        kind = Trusting if self.broken else Sweeper
        sweeper = kind(store, self.database, grace_seconds=grace)
        while self.world.loop.time() < BUSY_SECONDS + QUIET_SECONDS:
            with suppress(StoreError):
                swept = await sweeper.turn()
                self.swept += swept.attempts
            await clock.sleep(self.world.entropy(name).uniform(0, 30))

    async def reader(self, number: int) -> None:
        name = f"reader {number}"
        store, clock = self.store(name)
        entropy = self.world.entropy(name)
        while self.is_busy:
            began = self.world.now()
            with suppress(StoreError):
                current = await read_partition(
                    store, "d", generation="g", partition_key=entropy.choice(PARTITIONS)
                )
                for part in current.parts if current else ():
                    await self._follow(store, clock, part, began, entropy.uniform(0, GRACE))
            await clock.sleep(entropy.uniform(0, 20))

    async def _follow(
        self, store: ObjectStore, clock: Clock, part: CurrentPart, began: float, seconds: float
    ) -> None:
        await clock.sleep(seconds)
        for name in FILES:
            key = f"{DATASETS}{place_of(part.location)}/{name}"
            try:
                await store.get(key)
            except NotFound:
                late = self.world.now() - began >= GRACE
                assert late, f"a reader did not find {key}"
            else:
                self.found += 1

    async def play(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(self.worker(number))
            for number in range(2):
                tasks.create_task(self.relay(number))
                tasks.create_task(self.sweeper(number))
                tasks.create_task(self.reader(number))
        for store in self._stores:
            await store.close()

    def assert_tidy(self) -> None:
        """Nothing is left but what is published, and all of that."""
        current = {f"{DATASETS}d/g/{name}/{CURRENT}" for name in PARTITIONS}
        there = {place for place in self.database.published.values() if place}
        wanted = {f"{DATASETS}{each}/{name}" for each in there for name in FILES}
        assert set(self.bucket.objects) - current == wanted
        for name in PARTITIONS:
            stored = self.bucket.objects.get(f"{DATASETS}d/g/{name}/{CURRENT}")
            revision = decode(CurrentPartition, stored.body, where=name).revision if stored else 0
            assert revision == self.database.revisions[name]


def play(seed: int, broken: str = "") -> tuple[int, int, int]:
    async def main(world: World) -> tuple[int, int, int]:
        cast = Cast(world, broken)
        await cast.play()
        cast.assert_tidy()
        return cast.found, cast.zombies, cast.swept

    return simulate(main, seed=seed)


@pytest.mark.proof
def test_nothing_is_lost_and_nothing_is_left() -> None:
    found, zombies, swept = map(sum, zip(*(play(seed) for seed in range(SEEDS)), strict=True))
    # The worlds were busy enough to prove something.
    assert found > 100 * SEEDS
    assert zombies > SEEDS
    assert swept > 10 * SEEDS


def test_a_world_is_a_function_of_its_seed() -> None:
    assert play(7) == play(7)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("published", "a published file was removed"),
        ("running", "missing file"),
        ("grace", "a reader did not find"),
        ("since", "a reader did not find"),
        ("confirmed", "current.json names"),
        ("readers", "a running attempt reads was removed"),
        ("swap", "a revision went back"),
    ],
)
def test_the_referee_is_awake(broken: str, said: str) -> None:
    def worlds() -> None:
        for seed in range(SEEDS_MAX):
            play(seed, broken)

    # A late request fails beside the tasks, and is told by the simulation.
    with pytest.raises((ExceptionGroup, Unhandled)) as caught:
        worlds()
    assert said in str(getattr(caught.value, "exceptions", caught.value))
