"""Limits in a fleet: never above them, nobody starves, what dies is freed, others go on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from penstock.kernel.document_format import decode
from penstock.kernel.errors import InvalidInput
from penstock.queue.client import Queue, Task
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.ids import NONCE_CHARACTERS, task_at
from penstock.queue.layout import QueueLayout
from penstock.queue.limits import LEASE_SECONDS, LimitState
from penstock.queue.settings import DiscoveryMode, Polling, WorkerSettings
from penstock.queue.worker import Worker
from penstock.store.base import NO_METADATA, REPLACE, PutMode, Version, Wrapper
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.retrying import RetryingStore
from penstock.testing.virtual import World, simulate
from tests.sizes import some

LAYOUT = QueueLayout("q")
QUICK = WorkerSettings(
    polling=Polling(min_seconds=0.5, max_seconds=2.0),
    lease_ttl_secs=10,
    lease_renew_interval_secs=3,
)
ROUGH = FaultPlan(
    latency_seconds_max=0.3,
    throttled=0.02,
    failed=0.02,
    lost_request=0.02,
    late_request=0.01,
    lost_answer=0.03,
    duplicate=0.02,
    late_seconds_max=20,
)
AWAY = FaultPlan(lost_request=1.0)


@dataclass
class Site:
    """One worker and what belongs to it."""

    worker: Worker
    store: FaultyStore
    meter: Meter
    run: asyncio.Task[None] | None = None


class SlowOnce(Wrapper):
    """A store whose next write of a limit takes so long."""

    seconds = 0.0

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        if key.startswith(LAYOUT.limits):
            seconds, self.seconds = self.seconds, 0.0
            await self.clock.machine.sleep(seconds)
        return await super().put(key, body, mode, metadata=metadata)


@dataclass
class Scene:
    """A bucket, a user, workers, and a record of everything that runs under a limit."""

    world: World
    group: asyncio.TaskGroup
    sites: dict[str, Site] = field(default_factory=dict)
    running: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    starts: dict[str, list[float]] = field(default_factory=dict)
    by_worker: Counter[str] = field(default_factory=Counter)
    interrupted: int = 0
    is_deaf: bool = False
    """Handlers do not heed their interruption."""

    def __post_init__(self) -> None:
        self.clock = self.world.clock()
        self.bucket = MemoryBucket(self.world.clock())

    @property
    def lived(self) -> float:
        return self.world.now() - self.world.epoch

    async def queue(self, name: str = "user") -> Queue:
        return await Queue.on(self._store(name)[0], name="q", entropy=self.world.entropy(name))

    def _store(self, name: str) -> tuple[RetryingStore, FaultyStore, Meter]:
        meter = Meter()
        inner = MeteredStore(MemoryStore(self.bucket, clock=self.world.clock()), meter)
        faulty = FaultyStore(inner, FaultPlan(), entropy=self.world.entropy(f"faults {name}"))
        entropy = self.world.entropy(f"retries {name}")
        return RetryingStore(faulty, entropy=entropy), faulty, meter

    async def worker(
        self,
        name: str,
        *,
        concurrency: int = 8,
        mode: DiscoveryMode = DiscoveryMode.SHARED,
        plan: FaultPlan | None = None,
    ) -> Site:
        store, faulty, meter = self._store(name)
        queue = await Queue.on(store, name="q", entropy=self.world.entropy(name))
        worker = Worker(queue, concurrency=concurrency, mode=mode, name=name, settings=QUICK)

        async def handle(task: TaskContext) -> None:
            await self._handle(name, task)

        worker.handler("t")(handle)
        faulty.plan = plan or FaultPlan()
        site = self.sites[name] = Site(worker, faulty, meter)
        site.run = self.group.create_task(self._run(worker))
        return site

    async def _run(self, worker: Worker) -> None:
        with suppress(asyncio.CancelledError):
            await worker.run(signals=False)

    async def _handle(self, worker: str, task: TaskContext) -> None:
        key, seconds = task.input
        self.running[key] += 1
        self.most[key] = max(self.most[key], self.running[key])
        self.starts.setdefault(key, []).append(self.lived)
        self.by_worker[worker] += 1
        until = self.lived + seconds
        try:
            while until - self.lived > 0.001:
                try:
                    await self.clock.sleep(until - self.lived)
                except asyncio.CancelledError:
                    self.interrupted += 1
                    if not self.is_deaf:
                        raise
        finally:
            self.running[key] -= 1

    def kill(self, name: str) -> None:
        """End a worker as `kill -9` does: it says nothing more to anybody."""
        site = self.sites.pop(name)
        site.store.plan = AWAY
        assert site.run is not None
        site.run.cancel()

    def state(self, key: str) -> LimitState:
        where = LAYOUT.limit(key)
        return decode(LimitState, self.bucket.objects[where].body, where=where)

    def check_rate(self, key: str, *, rate: float, burst: int) -> None:
        starts = self.starts[key]
        for number, first in enumerate(starts):
            for count, later in enumerate(starts[number:], 1):
                assert count <= burst + rate * (later - first) + 1e-6, (first, later, count)


async def settled(tasks: list[Task], *, seconds: float) -> None:
    for task in tasks:
        await task.result(timeout=seconds)


def _run(check: Callable[[Scene], Awaitable[None]], *, seed: int = 1) -> None:
    async def main(world: World) -> None:
        async with asyncio.TaskGroup() as group:
            scene = Scene(world, group)
            await check(scene)
            for name in list(scene.sites):
                scene.kill(name)

    simulate(main, seed=seed)


@pytest.mark.parametrize("mode", [DiscoveryMode.SHARED, DiscoveryMode.LEASED])
@pytest.mark.proof
@pytest.mark.parametrize("seed", range(some(4)))
def test_no_more_run_than_may_and_all_end(mode: DiscoveryMode, seed: int) -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.limits.set("api", concurrency=3)
        tasks = [await queue.submit("t", ["api", 1], limit="api") for _ in range(20)]
        tasks += await queue.submit_many("t", [["api", 1]] * 60, limit="api")
        tasks += [await queue.submit("t", ["api", 1], limit="api", key=f"k{n}") for n in range(5)]
        for name in "abc":
            await scene.worker(name, mode=mode)
        await settled(tasks, seconds=400)
        assert scene.most["api"] == 3
        assert len(scene.starts["api"]) == 85
        # Permits are used again: it takes little longer than 85 / 3 seconds.
        assert scene.lived < 75

    _run(check, seed=seed)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(some(6)))
def test_never_above_the_limit_whatever_dies(seed: int) -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.limits.set("api", concurrency=4)
        tasks = await queue.submit_many("t", [["api", 5]] * 40, limit="api")
        tasks += [await queue.submit("t", ["api", 5], limit="api") for _ in range(20)]
        draw = scene.world.entropy("deaths")
        for number in range(4):
            await scene.worker(f"w{number}", plan=ROUGH)
        for number in range(4, 8):
            await scene.clock.sleep(draw.uniform(5, 40))
            victim = draw.choice(sorted(scene.sites))
            if draw.random() < 0.5:
                # Cut off: it goes on until it must stop by itself.
                scene.sites[victim].store.plan = AWAY
                await scene.clock.sleep(draw.uniform(10, 90))
            scene.kill(victim)
            await scene.worker(f"w{number}", plan=ROUGH)
        await settled(tasks, seconds=3000)
        assert scene.most["api"] <= 4

    _run(check, seed=seed)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(max(4, some(6))))
def test_never_faster_than_the_rate_whatever_dies(seed: int) -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        rate, burst = [(1.0, 1), (2.0, 5), (10.0, 10), (0.2, 2)][seed % 4]
        await queue.limits.set("mail", rate=rate, burst=burst)
        count = min(150, int(rate * 60) + burst)
        tasks = await queue.submit_many("t", [["mail", 0.5]] * count, limit="mail")
        tasks += [await queue.submit("t", ["mail", 0.1], limit="mail") for _ in range(10)]
        draw = scene.world.entropy("deaths")
        for number in range(3):
            await scene.worker(f"w{number}", plan=ROUGH)
        for number in range(3, 6):
            await scene.clock.sleep(draw.uniform(3, 30))
            victim = draw.choice(sorted(scene.sites))
            scene.sites[victim].store.plan = AWAY
            await scene.clock.sleep(draw.uniform(0, 30))
            scene.kill(victim)
            await scene.worker(f"w{number}", plan=ROUGH)
        await settled(tasks, seconds=5000)
        scene.check_rate("mail", rate=rate, burst=burst)

    _run(check, seed=seed)


@pytest.mark.parametrize(("rate", "burst"), [(1.0, 1), (5.0, 5), (20.0, 20), (0.5, 1)])
def test_a_rate_is_nearly_reached(rate: float, burst: int) -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.limits.set("mail", rate=rate, burst=burst)
        for _ in range(10):
            await queue.submit_many("t", [["mail", 0.05]] * int(rate * 8), limit="mail")
        for name in "ab":
            await scene.worker(name, concurrency=20)
        await scene.clock.sleep(60)
        scene.check_rate("mail", rate=rate, burst=burst)
        assert len(scene.starts["mail"]) > 0.6 * rate * 60

    _run(check)


def test_a_full_limit_holds_up_nobody_else() -> None:
    """More packs of the limit than a look wants stand before the others."""

    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.limits.set("api", concurrency=1)
        for _ in range(60):
            await queue.submit("t", ["api", 300], limit="api", priority=5)
        await scene.worker("a", concurrency=4)
        await scene.clock.sleep(20)
        others = [await queue.submit("t", ["free", 1]) for _ in range(10)]
        await settled(others, seconds=15)
        assert scene.running["api"] == scene.most["api"] == 1

    _run(check)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_every_worker_has_its_turn(limit: int) -> None:
    """Each has a backlog of its own, as owners of shards have, and tasks without end."""

    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.limits.set("api", concurrency=limit)
        for _ in range(10):
            await queue.submit_many("t", [["api", 4]] * 40, limit="api")
        for name in "abc":
            await scene.worker(name, concurrency=8)
        await scene.clock.sleep(300)
        assert scene.most["api"] == limit
        assert len(scene.starts["api"]) > 0.75 * limit * 300 / 4
        least, *_, most = sorted(scene.by_worker.values())
        assert len(scene.by_worker) == 3
        assert most < 3 * least, scene.by_worker

    _run(check)


def test_what_a_killed_worker_held_is_free_again_within_the_bound() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.limits.set("api", concurrency=2)
        await queue.submit_many("t", [["api", 1000]] * 2, limit="api")
        await scene.worker("a")
        await scene.clock.sleep(10)
        assert scene.running["api"] == 2
        scene.kill("a")
        killed = scene.lived
        await scene.worker("b")
        while scene.running["api"] < 2 and scene.lived < 1000:
            await scene.clock.sleep(1)
        # Its lease, and the next question of who waits.
        assert scene.lived - killed < LEASE_SECONDS + 10

    _run(check)


def test_a_worker_that_is_cut_off_stops_before_others_begin() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.limits.set("api", concurrency=1)
        await queue.submit("t", ["api", 10_000], limit="api")
        site = await scene.worker("a")
        await scene.clock.sleep(10)
        await queue.submit("t", ["api", 10_000], limit="api")
        site.store.plan = AWAY
        await scene.worker("b")
        await scene.clock.sleep(100)
        assert scene.interrupted >= 1
        assert scene.running["api"] == 1
        assert scene.most["api"] == 1
        assert scene.by_worker["b"] >= 1

    _run(check)


def test_limits_change_while_they_are_held() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.limits.set("api", concurrency=6)
        for _ in range(4):
            await queue.submit_many("t", [["api", 3]] * 100, limit="api")
        for name in "ab":
            await scene.worker(name)
        await scene.clock.sleep(20)
        assert scene.running["api"] == 6
        await queue.limits.set("api", concurrency=2)
        await scene.clock.sleep(35)
        assert scene.running["api"] == 2
        await queue.limits.set("api", concurrency=5)
        await scene.clock.sleep(45)
        assert scene.running["api"] == 5
        assert await queue.limits.remove("api")
        await scene.clock.sleep(45)
        assert scene.running["api"] > 8
        assert scene.interrupted == 0

    _run(check)


def test_a_limit_that_is_set_later_is_heard_of() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.submit_many("t", [["api", 1]] * 500, limit="api")
        await scene.worker("a")
        await scene.clock.sleep(10)
        assert scene.running["api"] == 8
        await queue.limits.set("api", concurrency=2)
        await scene.clock.sleep(40)
        assert scene.running["api"] == 2

    _run(check)


def test_a_steady_load_writes_rarely_and_an_idle_worker_not_at_all() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.limits.set("api", concurrency=8)
        for _ in range(200):
            await queue.submit("t", ["api", 6], limit="api")
        site = await scene.worker("a")
        while len(scene.starts.get("api", [])) < 200:
            await scene.clock.sleep(1)
        puts = site.meter.requests(kind=Kind.PUT, label="limits")
        # 150 seconds of work: renewals, and no write a task.
        assert puts <= 16
        await scene.clock.sleep(30)
        assert scene.state("api").shares == {}
        before = site.meter.requests(label="limits")
        await scene.clock.sleep(3600)
        assert site.meter.requests(label="limits") == before

    _run(check)


def test_who_stops_gives_everything_back_at_once() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.limits.set("api", concurrency=2, rate=5)
        await queue.submit_many("t", [["api", 5]] * 50, limit="api")
        site = await scene.worker("a")
        await scene.clock.sleep(7)
        held = await queue.limits.get("api")
        assert held is not None
        assert held.permits_held == 2
        assert [each.permits for each in held.holders] == [2]
        site.worker.stop()
        await scene.clock.sleep(8)
        after = await queue.limits.get("api")
        assert after is not None
        assert after.holders == ()

    _run(check)


@pytest.mark.parametrize("seconds", [4.0, 12.0])
def test_a_first_ask_that_takes_long_is_counted(seconds: float) -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.limits.set("api", concurrency=1)
        site = await scene.worker("a", concurrency=4)
        slow = site.store.inner = SlowOnce(site.store.inner)
        slow.seconds = seconds
        await queue.submit("t", ["api", 120], limit="api")
        await scene.clock.sleep(20)
        assert scene.running["api"] == 1
        for _ in range(5):
            await queue.submit("t", ["api", 120], limit="api")
        await scene.clock.sleep(90)
        assert scene.most["api"] == 1
        assert scene.interrupted == 0

    _run(check)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_goes_on_after_its_worker_has_stopped_keeps_its_permit(is_cancelled: bool) -> None:
    async def check(scene: Scene) -> None:
        scene.is_deaf = True
        queue = await scene.queue()
        await queue.limits.set("api", concurrency=1)
        first = await scene.worker("a", concurrency=1)
        await queue.submit("t", ["api", 55], limit="api")
        await scene.clock.sleep(5)
        await queue.submit("t", ["api", 1], limit="api")
        await scene.worker("b", concurrency=1)
        assert first.run is not None
        if is_cancelled:
            first.run.cancel()
        else:
            first.worker.stop()
            await scene.clock.sleep(1)
            first.worker.stop()
        await scene.clock.sleep(25)
        assert first.run.done()
        assert scene.running["api"] == 1
        # It ends by itself: within a lease, and the next question of who waits.
        await scene.clock.sleep(LEASE_SECONDS - 15)
        assert scene.by_worker["b"] >= 1
        assert scene.most["api"] == 1

    _run(check)


def test_what_cannot_be_read_lets_nothing_of_its_key_start() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        scene.bucket.write(LAYOUT.limit("api"), b"garbage", {})
        await queue.submit("t", ["api", 1], limit="api")
        other = await queue.submit("t", ["free", 1])
        await scene.worker("a")
        await other.result(timeout=30)
        await scene.clock.sleep(60)
        assert "api" not in scene.starts
        assert await queue.limits.list() == ()

    _run(check)


def test_limits_are_listed_and_removed() -> None:
    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        assert await queue.limits.list() == ()
        await queue.limits.set("b", rate=10, per_seconds=60)
        await queue.limits.set("a", concurrency=5)
        await queue.limits.set("a", concurrency=6)
        scene.bucket.write(LAYOUT.limits + "stray", b"x", {})
        one, two = await queue.limits.list()
        assert (one.key, one.concurrency, one.rate) == ("a", 6, None)
        assert (two.key, two.burst, two.tokens_left) == ("b", 10, 10)
        assert await queue.limits.remove("a")
        assert not await queue.limits.remove("a")
        assert await queue.limits.get("a") is None
        with pytest.raises(InvalidInput, match="not the key of a limit"):
            await queue.limits.set("a/b", concurrency=1)
        with pytest.raises(InvalidInput, match="zero"):
            await queue.limits.set("a", concurrency=0)

    _run(check)


@pytest.mark.parametrize("is_lost", [False, True], ids=["beside its own pointer", "alone"])
@pytest.mark.parametrize("other", ["", "free"])
@pytest.mark.parametrize("mode", [DiscoveryMode.SHARED, DiscoveryMode.LEASED])
def test_the_limit_of_a_key_is_that_of_the_submit_that_counts(
    mode: DiscoveryMode, other: str, is_lost: bool
) -> None:
    """Another submit of the key, with another limit, has died between its pointer and its pack."""

    async def check(scene: Scene) -> None:
        queue = await scene.queue()
        await queue.limits.set("api", concurrency=1)
        tasks = [
            await queue.submit("t", ["api", 60], limit="api", key=f"k{number}")
            for number in range(2)
        ]
        for task in tasks:
            at, _ = task_at(task.id)
            (own,) = (key for key in scene.bucket.objects if "@" in key and at.pack in key)
            body = scene.bucket.objects[own].body
            if is_lost:
                scene.bucket.remove(own)
            now_ms, nonce = int(scene.world.now() * 1000), "0" * NONCE_CHARACTERS
            pointer = LAYOUT.pointer(at, due_ms=now_ms, nonce=nonce, priority=3, limit=other)
            scene.bucket.write(pointer, body, {})
        await scene.worker("w", mode=mode)
        await settled(tasks, seconds=600)
        assert scene.most["api"] == 1
        attempts = [(await task.view()).attempt for task in tasks]
        assert max(attempts) <= 10, "a wrong pointer is tried every half a minute at the most"

    _run(check)
