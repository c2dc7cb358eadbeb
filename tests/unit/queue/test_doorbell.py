"""An owner with nothing to do reads a doorbell instead of lists, and is as prompt as before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from penstock.kernel.errors import Unavailable
from penstock.queue.client import Queue
from penstock.queue.discovery.leased import BELL_SECONDS, READY_SECONDS, LeasedDiscovery
from penstock.queue.discovery.scanner import ALL, Run, Scanner, ScanResult
from penstock.queue.doorbell import BELIEVED_SECONDS, DoorbellListener, DoorbellRinger
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.ids import keyed_pack
from penstock.queue.layout import QueueLayout
from penstock.queue.submit_options import SubmitOptions
from penstock.queue.submitter import Submitter
from penstock.queue.worker import Worker
from penstock.store.base import REPLACE, Object, Version
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")
HOUR = 3600.0


class Bench:
    """Workers, a producer, and when each task has started, by its input."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = world.clock()
        self.bucket = MemoryBucket(world.clock(), date_resolution_seconds=1.0)
        self.meter = Meter()
        self.started: dict[object, float] = {}
        self.by: dict[object, str] = {}

    async def open(self, name: str) -> Queue:
        entropy = self.world.entropy(f"delay of {name}")

        async def delay() -> None:
            await self.clock.sleep(entropy.uniform(0.01, 0.02))

        store = MeteredStore(
            MemoryStore(self.bucket, clock=self.world.clock(), delay=delay), self.meter
        )
        return await Queue.on(store, name="q", entropy=self.world.entropy(name))

    @asynccontextmanager
    async def running(
        self, workers: int = 1, *, concurrency: int = 4, seconds: float = 0.1
    ) -> AsyncIterator[Queue]:
        """So many workers, and the queue of a producer."""
        fleet = []
        for number in range(workers):
            worker = Worker(await self.open(f"worker {number}"), concurrency=concurrency)

            @worker.handler("t")
            async def handle(task: TaskContext, name: str = f"worker {number}") -> None:
                self.started.setdefault(task.input, self.world.now())
                self.by.setdefault(task.input, name)
                await self.clock.sleep(seconds)

            fleet.append(worker)
        async with asyncio.TaskGroup() as group:
            for worker in fleet:
                group.create_task(worker.run(signals=False))
            yield await self.open("producer")
            for worker in fleet:
                worker.stop()

    async def waited(self, name: object, *, since: float) -> float:
        """How long a task has waited for its start."""
        async with asyncio.timeout(600):
            while name not in self.started:
                await self.clock.sleep(0.05)
        return self.started[name] - since

    def lists(self) -> int:
        return self.meter.requests(kind=Kind.LIST)


def test_a_task_is_found_within_seconds_whenever_it_comes() -> None:
    """After an idle hour; and in every phase of falling asleep, by who had just asked."""

    async def main(world: World) -> None:
        bench = Bench(world)
        async with bench.running() as queue:
            await bench.clock.sleep(HOUR)
            for step in range(60):
                since = world.now()
                await queue.submit("t", step)
                assert await bench.waited(step, since=since) <= 5, step
                await bench.clock.sleep(0.35 * step)

    simulate(main, seed=1)


def test_an_owner_with_nothing_to_do_lists_rarely_and_wakes_for_each_of_two() -> None:
    async def main(world: World) -> None:
        bench = Bench(world)
        async with bench.running() as queue:
            await bench.clock.sleep(HOUR)
            before = bench.lists()
            await bench.clock.sleep(HOUR)
            # A few more are of the leases and of the chores.
            assert bench.lists() - before <= 40 + 30
            for name in ("first", "second"):
                since = world.now()
                await queue.submit("t", name)
                assert await bench.waited(name, since=since) <= 5
                await bench.clock.sleep(BELIEVED_SECONDS / 2)

    simulate(main, seed=1)


def test_a_busy_producer_rings_for_nobody() -> None:
    async def main(world: World) -> None:
        bench = Bench(world)
        async with bench.running() as queue:
            await bench.clock.sleep(60)
            await queue.submit("t", "first")
            await bench.clock.sleep(5)
            before = bench.meter.billed.copy()
            for number in range(300):
                await queue.submit("t", number)
                await bench.clock.sleep(0.5)
            after = bench.meter.billed - before
            assert after["bell", Kind.PUT] <= 4
            assert 20 < after["bell", Kind.GET] <= 300 * 0.5 / BELIEVED_SECONDS + 10

    simulate(main, seed=1)


def test_who_does_not_ring_waits_for_a_slow_list_once() -> None:
    async def main(world: World) -> None:
        bench = Bench(world)
        async with bench.running() as queue:
            access = queue.access
            silent = Submitter(access.store, access.layout, access.entropy)
            await bench.clock.sleep(HOUR)
            since = world.now()
            await silent.submit_many("t", ["first"])
            assert await bench.waited("first", since=since) <= 125
            await bench.clock.sleep(600)
            since = world.now()
            await silent.submit_many("t", ["second"])
            assert await bench.waited("second", since=since) <= 10

    simulate(main, seed=1)


async def _burst_seconds(world: World, workers: int) -> float:
    """How long after a burst at an idle fleet a second worker has some of it."""
    bench = Bench(world)
    async with bench.running(workers, concurrency=4, seconds=2.0) as queue:
        await bench.clock.sleep(600)
        since = world.now()
        await asyncio.gather(*(queue.submit("t", number) for number in range(200)))
        while len(set(bench.by.values())) < 2:
            await bench.clock.sleep(0.05)
        return world.now() - since


def test_a_burst_at_an_idle_fleet_reaches_a_second_worker_within_five_seconds() -> None:
    for seed in range(8):
        assert simulate(lambda world: _burst_seconds(world, 3), seed=seed) <= 5.0


def test_of_fifty_half_of_the_bursts_reach_a_second_worker_in_five_seconds_and_all_in_ten() -> None:
    """The owner hears the ring within 4 s; then one of the others looks every 2 s, by chance."""
    waits = sorted(
        simulate(lambda world: _burst_seconds(world, 50), seed=seed) for seed in range(6)
    )
    assert waits[3] <= 5.0
    assert waits[-1] <= 10.0


def _pair(world: World) -> tuple[DoorbellRinger, DoorbellListener, DoorbellListener, MemoryStore]:
    store = MemoryStore(MemoryBucket(world.clock()), clock=world.clock())
    entropy = world.entropy("bell")
    ears = [DoorbellListener(store, LAYOUT.doorbell, entropy) for _ in range(2)]
    return DoorbellRinger(store, LAYOUT.doorbell, entropy), ears[0], ears[1], store


def test_only_who_is_asleep_is_rung_for_and_a_ring_is_heard_by_all() -> None:
    async def main(world: World) -> None:
        ringer, first, second, _ = _pair(world)
        await ringer.submitted(is_urgent=False)
        assert not await first.has_rung()
        assert await first.sleep()
        assert await second.has_rung(), "who knows nothing has to look"
        assert await second.sleep()
        await world.clock().sleep(BELIEVED_SECONDS)
        await ringer.submitted(is_urgent=False)
        assert await first.has_rung()
        assert not await first.has_rung()
        # What the first writes does not hide the ring from the second.
        assert await first.sleep()
        assert await second.has_rung()

    simulate(main, seed=1)


def test_who_goes_to_sleep_while_it_rings_is_told_so() -> None:
    async def main(world: World) -> None:
        ringer, first, _, _ = _pair(world)
        assert await first.sleep()
        await ringer.submitted(is_urgent=True)
        assert await first.has_rung()
        await world.clock().sleep(60)
        await ringer.submitted(is_urgent=True)
        assert not await first.sleep()

    simulate(main, seed=1)


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff"])
def test_a_damaged_bell_is_made_good_by_the_next_ring(body: bytes) -> None:
    async def main(world: World) -> None:
        ringer, first, _, store = _pair(world)
        assert await first.sleep()
        await store.put(LAYOUT.doorbell, body, REPLACE)
        assert await first.has_rung()
        assert await first.sleep()
        await ringer.submitted(is_urgent=False)
        assert await first.has_rung()
        assert await first.sleep()

    simulate(main, seed=1)


async def _submit_seconds(world: World, queue: Queue, task: str) -> float:
    since = world.now()
    await queue.submit("t", task)
    return world.now() - since


def test_a_doorbell_that_is_away_fails_no_submit_and_delays_one_by_two_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a producer that submits on: the others wait for nothing, for ten seconds."""

    async def main(world: World) -> None:
        bench = Bench(world)
        queue = await bench.open("producer")
        store = queue.access.store
        read = store.get

        async def get(key: str, *, unless: Version | None = None) -> Object | None:
            if key == LAYOUT.doorbell:
                await asyncio.Event().wait()
            return await read(key, unless=unless)

        monkeypatch.setattr(store, "get", get)
        assert await _submit_seconds(world, queue, "first") <= 2.2
        for number in range(5):
            assert await _submit_seconds(world, queue, str(number)) <= 0.2
        await bench.clock.sleep(10)
        assert 2.0 <= await _submit_seconds(world, queue, "again") <= 2.2

    simulate(main, seed=1)


def test_an_urgent_submit_rings_while_another_one_only_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(world: World) -> None:
        ringer, ear, _, store = _pair(world)
        assert await ear.sleep()
        asked = asyncio.Event()

        async def get(_key: str, *, unless: Version | None = None) -> Object | None:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        with monkeypatch.context() as patch:
            patch.setattr(store, "get", get)
            async with asyncio.TaskGroup() as group:
                group.create_task(ringer.submitted(is_urgent=False))
                await asked.wait()
                await ringer.submitted(is_urgent=True)
        assert await ear.has_rung()

    simulate(main, seed=1)


@pytest.mark.parametrize("is_urgent", [False, True])
def test_a_submit_that_is_withdrawn_leaves_no_other_without_its_ring(
    is_urgent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others that come while it asks, or rings, wait for it and then ring themselves."""

    async def main(world: World) -> None:
        ringer, ear, _, store = _pair(world)
        assert await ear.sleep()
        under_way = asyncio.Event()

        async def never(*_what: object, **_how: object) -> Object | None:
            under_way.set()
            await asyncio.Event().wait()
            raise AssertionError

        async with asyncio.TaskGroup() as group:
            with monkeypatch.context() as patch:
                patch.setattr(store, "put" if is_urgent else "get", never)
                first = group.create_task(ringer.submitted(is_urgent=is_urgent))
                await under_way.wait()
            others = [
                group.create_task(ringer.submitted(is_urgent=each)) for each in (False, is_urgent)
            ]
            await world.clock().sleep(1)
            first.cancel()
        assert all(each.done() for each in others)
        assert await ear.has_rung()

    simulate(main, seed=1)


def test_a_worker_that_is_full_hears_a_ring_and_lists_when_it_has_room() -> None:
    """Asleep with one long task, it is rung for: nobody rings twice."""

    async def main(world: World) -> None:
        bench = Bench(world)
        async with bench.running(concurrency=1, seconds=40.0) as queue:
            await bench.clock.sleep(HOUR)
            await queue.submit("t", "long")
            await bench.clock.sleep(25)
            await queue.submit("t", "next")
            began = world.now()
            assert await bench.waited("next", since=began) <= 40 - 25 + 5 + 2

    simulate(main, seed=1)


def test_who_lost_its_shards_lists_when_it_has_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the doorbell, loses everything for a while, and knows nothing of that time."""

    async def main(world: World) -> None:
        bench = Bench(world)
        async with bench.running() as queue:
            await bench.clock.sleep(HOUR)
            access = queue.access
            silent = Submitter(access.store, access.layout, access.entropy)
            with monkeypatch.context() as patch:
                patch.setattr(LeasedDiscovery, "guarded", lambda _: ())
                await bench.clock.sleep(10)
                await silent.submit_many("t", ["meanwhile"])
            since = world.now()
            # Not told that it has them again, it asks at the pace of its polling.
            assert await bench.waited("meanwhile", since=since) <= 9

    simulate(main, seed=1)


@pytest.mark.parametrize("are_lists_failing", [False, True])
def test_no_one_sleeps_before_a_list_has_ended_the_time_in_which_producers_believe(
    are_lists_failing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QUEUE-24: lists that fail, or come late, do not count."""

    async def main(world: World) -> None:
        bench = Bench(world)
        slept: list[float] = []
        sleep = DoorbellListener.sleep

        async def noted(self: DoorbellListener) -> bool:
            slept.append(world.now())
            return await sleep(self)

        monkeypatch.setattr(DoorbellListener, "sleep", noted)
        async with bench.running() as queue:
            access = queue.access
            silent = Submitter(access.store, access.layout, access.entropy)
            await bench.clock.sleep(HOUR)
            await queue.submit("t", "first")
            slept.clear()
            while not slept:
                await bench.clock.sleep(0.02)
            look = Scanner.look

            async def fails(*_args: object, **_keywords: object) -> ScanResult:
                raise Unavailable("away")

            with monkeypatch.context() as patch:
                if are_lists_failing:
                    patch.setattr(Scanner, "look", fails)
                # One of those who believe that all are awake.
                await bench.clock.sleep(BELIEVED_SECONDS - 0.1)
                await silent.submit_many("t", ["believed"])
                await bench.clock.sleep(5)
            assert Scanner.look is look
            since = world.now()
            assert await bench.waited("believed", since=since) <= 10

    simulate(main, seed=1)


@pytest.mark.parametrize("seconds", [1.0, 2.0, 3.0, 3.9])
def test_an_owner_of_a_part_looks_for_keys_before_it_sleeps(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QUEUE-24: what has a key is shown by its pointer alone, which not every list includes."""

    async def main(world: World) -> None:
        bench = Bench(world)
        asleep: list[LeasedDiscovery] = []
        tire = LeasedDiscovery._tire

        async def noted(self: LeasedDiscovery, instant: float) -> None:
            await tire(self, instant)
            asleep.extend([self] if self._asleep_at is not None else [])

        async with bench.running(2, concurrency=1, seconds=5.0) as queue:
            access = queue.access
            silent = Submitter(access.store, access.layout, access.entropy)
            await asyncio.gather(*(queue.submit("t", number) for number in range(24)))
            while len(bench.started) < 24:
                await bench.clock.sleep(0.1)
            with monkeypatch.context() as patch:
                patch.setattr(LeasedDiscovery, "_tire", noted)
                while not asleep:
                    await bench.clock.sleep(0.02)
            await bench.clock.sleep(seconds)
            runs = asleep[0].guarded()
            assert runs != ALL, "each owns a part"
            key = next(key for key in map(str, range(4096)) if _is_in(runs, key))
            since = world.now()
            # Of a producer that believes that all are awake: only its pointer shows it.
            await silent.submit_keyed("t", "keyed", SubmitOptions(key=key), key_seconds=86_400)
            assert await bench.waited("keyed", since=since) <= READY_SECONDS + BELL_SECONDS

    for seed in range(4):
        simulate(main, seed=seed)


def _is_in(runs: Sequence[Run], key: str) -> bool:
    slot = keyed_pack(type="t", key=key).slot
    return any(first <= slot <= last for first, last in runs)


def test_one_large_pack_calls_nobody_and_many_packs_do() -> None:
    """A pack costs least in one place: who comes to help pays claims and settlements of his own."""

    async def main(world: World) -> None:
        bench = Bench(world)
        async with bench.running(4, concurrency=8, seconds=1.0) as queue:
            await bench.clock.sleep(600)
            await queue.submit_many("t", list(range(100)))
            while len(bench.started) < 100:
                await bench.clock.sleep(0.1)
            assert len(set(bench.by.values())) == 1

    simulate(main, seed=1)
