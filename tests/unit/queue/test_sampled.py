"""The mode `sampled`: which shards a look samples, in which order, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.queue.discovery.base import DiscoveryRequest
from penstock.queue.discovery.elected import READY_SECONDS, SampledDiscovery
from penstock.queue.discovery.scanner import PackCandidate, ScanResult
from penstock.queue.ids import SLOTS, PackAt, PackId
from penstock.queue.layout import QueueLayout
from penstock.queue.settings import (
    SAMPLED_SHARDS,
    DiscoveryMode,
    HeartbeatMode,
    WorkerSettings,
    settings_from,
)
from penstock.store.base import PAGE_KEYS_MAX, Delimiter, Page, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.cost import Workload, run_backlog
from penstock.testing.virtual import EPOCH, World, simulate

LAYOUT = QueueLayout("q")
MINUTE = int(EPOCH // 60)
SHARD_SLOTS = SLOTS // SAMPLED_SHARDS
ENOUGH = 1_000_000


class Listed(Wrapper):
    """A store that notes what was listed, and may show few keys at a time."""

    def __init__(self, inner: MemoryStore, *, keys: int) -> None:
        super().__init__(inner)
        self.keys = keys
        self.lists: list[str] = []

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        self.lists.append(prefix.removeprefix(LAYOUT.root))
        return await self.inner.list(
            prefix,
            start_after=start_after,
            delimiter=delimiter,
            limit=min(limit, self.keys),
            cursor=cursor,
        )


class Bench:
    """A bucket, and one worker's way to look at it."""

    def __init__(self, world: World, *, page_keys: int, samples: int) -> None:
        self.clock = world.clock()
        self.bucket = MemoryBucket(self.clock, date_resolution_seconds=1.0)
        self.store = Listed(MemoryStore(self.bucket, clock=self.clock), keys=page_keys)
        self.discovery = SampledDiscovery(
            self.store,
            LAYOUT,
            name="w",
            lease_seconds=30,
            sample_shards=samples,
            entropy=world.entropy("discovery"),
        )

    def put(self, at: PackAt, *, is_held: bool = False) -> PackAt:
        self.bucket.write(LAYOUT.pack(at), at.path.encode(), {})
        if is_held:
            self.bucket.write(LAYOUT.ledger(at), at.path.encode(), {})
        return at

    def fill(self, *, each: int = 1, is_held: bool = False) -> None:
        """So many packs in every shard."""
        for shard in range(SAMPLED_SHARDS):
            for number in range(each):
                self.put(_at(shard * SHARD_SLOTS + number % SHARD_SLOTS, number), is_held=is_held)

    async def look(self, *, tasks: int = ENOUGH, has_room: bool = True) -> ScanResult:
        self.store.lists.clear()
        return await self.discovery.look(DiscoveryRequest(_worth, tasks, has_room=has_room))

    def sampled(self) -> list[str]:
        """The shards that the last look sampled, by the first digit of their slots."""
        return [prefix for prefix in self.store.lists if prefix.startswith("tasks/")]


def _worth(sight: PackCandidate) -> int:
    return 0 if sight.ledger else sight.at.count


def _at(slot: int, number: int = 0, *, priority: int = 0) -> PackAt:
    return PackAt("now", slot, PackId(f"{number:024d}"), 1, "t", priority)


def _run(
    check: Callable[[Bench], Awaitable[None]],
    *,
    page_keys: int = PAGE_KEYS_MAX,
    samples: int = 3,
    seeds: int = 3,
) -> None:
    async def main(world: World) -> None:
        await check(Bench(world, page_keys=page_keys, samples=samples))

    for seed in range(seeds):
        simulate(main, seed=seed)


def test_a_look_samples_three_of_sixteen_with_one_list_each() -> None:
    async def check(bench: Bench) -> None:
        bench.fill(each=10)
        view = await bench.look()
        assert len(set(bench.sampled())) == 3
        assert all(len(prefix) == len("tasks/0") for prefix in bench.sampled())
        assert sorted(bench.store.lists)[:1] == ["ready/"]
        assert len(view.sights) == 30, "packs and ledgers of three shards"

    _run(check)


def test_all_shards_come_up_before_one_does_again() -> None:
    async def check(bench: Bench) -> None:
        bench.fill(each=10)
        seen: Counter[str] = Counter()
        looks = []
        for _ in range(160):
            await bench.look()
            assert len(set(bench.sampled())) == 3
            seen.update(bench.sampled())
            looks.append(frozenset(bench.sampled()))
        assert len(seen) == SAMPLED_SHARDS
        assert max(seen.values()) - min(seen.values()) <= 1
        assert len(set(looks)) > 30, "in another order every time"
        for shard in seen:
            at = [number for number, look in enumerate(looks) if shard in look]
            assert max(b - a for a, b in pairwise(at)) <= 11

    _run(check)


def test_two_workers_sample_different_shards() -> None:
    async def main(world: World) -> list[str]:
        bench = Bench(world, page_keys=PAGE_KEYS_MAX, samples=3)
        bench.fill(each=10)
        await bench.look()
        return sorted(bench.sampled())

    assert len({tuple(simulate(main, seed=seed)) for seed in range(10)}) > 5


def test_the_most_urgent_and_then_the_oldest_come_first() -> None:
    async def check(bench: Bench) -> None:
        # The older has the later slot, the later number, and is listed last.
        for age in range(20):
            bench.put(_at(4095 - age, 20 - age))
            await bench.clock.sleep(1)
        urgent = bench.put(_at(7, priority=5))
        view = await bench.look()
        assert view.sights[0].at == urgent
        dates = [sight.seen.modified for sight in view.sights[1:] if sight.seen]
        assert len(dates) == 20
        assert dates == sorted(dates)

    _run(check, samples=SAMPLED_SHARDS)


def test_what_is_as_old_comes_in_an_order_of_chance() -> None:
    async def main(world: World) -> list[int]:
        bench = Bench(world, page_keys=PAGE_KEYS_MAX, samples=SAMPLED_SHARDS)
        bench.fill(each=2)
        return [sight.at.slot for sight in (await bench.look()).sights]

    first, second = simulate(main, seed=1), simulate(main, seed=2)
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("page_keys", [100, 1000])
def test_50_free_tasks_behind_250_leased_ones_are_found(page_keys: int) -> None:
    async def check(bench: Bench) -> None:
        for number in range(250):
            bench.put(_at(0, number), is_held=True)
        free = {bench.put(_at(SHARD_SLOTS - 1, number)) for number in range(50)}
        view = await bench.look(tasks=10)
        assert len(free & {sight.at for sight in view.sights if _worth(sight)}) >= 10

    _run(check, page_keys=page_keys, samples=SAMPLED_SHARDS)


def test_empty_samples_are_followed_by_a_look_at_everything() -> None:
    async def check(bench: Bench) -> None:
        slots = (0, 5 * SHARD_SLOTS, SLOTS - 1)
        for slot in slots:
            bench.put(_at(slot))
            for _ in range(5):
                view = await bench.look()
                assert {sight.at.slot for sight in view.sights if _worth(sight)}
            bench.bucket.remove(LAYOUT.pack(_at(slot)))

    _run(check, seeds=10)


def test_a_nearly_empty_queue_costs_one_list_a_look() -> None:
    async def check(bench: Bench) -> None:
        await bench.look()
        for number in range(10):
            await bench.clock.sleep(8)
            bench.put(_at(400 * number))
            view = await bench.look()
            assert len(bench.store.lists) == 1
            assert len(view.sights) == number + 1

    _run(check)


def test_when_there_is_enough_again_it_samples_again() -> None:
    async def check(bench: Bench) -> None:
        await bench.look()
        bench.fill(each=10)
        await bench.look(tasks=8)
        assert bench.sampled() == []
        await bench.look(tasks=8)
        assert len(bench.sampled()) == 3

    _run(check)


def test_a_rotation_goes_on_where_it_broke_off() -> None:
    """Everything is held but one task, in whichever shard: it is found, page by page."""

    async def check(bench: Bench) -> None:
        bench.fill(each=200, is_held=True)
        free = bench.put(_at(SLOTS - 1, 999))
        view = await bench.look()
        assert free in {sight.at for sight in view.sights if _worth(sight)}

    _run(check, page_keys=300)


def test_a_full_worker_does_not_rotate() -> None:
    async def check(bench: Bench) -> None:
        await bench.look(has_room=False)
        assert len(bench.sampled()) == 3
        assert "" not in bench.store.lists

    _run(check)


def test_a_long_shard_is_read_a_page_a_look_and_to_its_end() -> None:
    async def check(bench: Bench) -> None:
        bench.fill(each=100)
        seen: set[PackAt] = set()
        looks = 0
        while len(seen) < 100 * SAMPLED_SHARDS and looks < 200:
            looks += 1
            view = await bench.look(tasks=5)
            assert len(bench.sampled()) == 3, "a page each, however much there is"
            seen |= {sight.at for sight in view.sights}
        # Five pages a shard, and a shard comes up at least every eleventh look; begun anywhere.
        assert looks <= 2 * 5 * 11

    _run(check, page_keys=20)


def test_what_is_due_is_looked_at_every_five_seconds_and_at_its_time() -> None:
    async def check(bench: Bench) -> None:
        bench.fill(each=10)
        later = replace(_at(9), place=str(MINUTE + 1))
        bench.put(later)
        looked = []
        for second in range(1, 70):
            await bench.clock.sleep(1)
            view = await bench.look(tasks=5)
            if "ready/" in bench.store.lists:
                looked.append(second)
            if second < 55:
                assert view.later_ms == (MINUTE + 1) * 60_000
            if later in {sight.at for sight in view.sights}:
                break
        pauses = [b - a for a, b in pairwise(looked)]
        assert set(pauses[:-1]) == {int(READY_SECONDS)}
        assert second <= 61

    _run(check)


def test_what_is_unhurried_is_for_the_room_that_is_left() -> None:
    async def check(bench: Bench) -> None:
        bench.fill(each=10)
        low = bench.put(_at(3000, priority=-2))
        view = await bench.look(tasks=5)
        assert low not in {sight.at for sight in view.sights}
        await bench.clock.sleep(READY_SECONDS)
        view = await bench.look()
        assert view.sights[-1].at == low

    _run(check)


def test_requests_to_claim_a_task_stay_flat_with_the_backlog() -> None:
    load = Workload(workers=4, concurrency=4, tasks_per_day=1, mode=DiscoveryMode.SAMPLED)
    requests = {}
    for backlog in (1_000, 10_000):
        run = run_backlog(load, backlog=backlog)
        assert run.tasks > 250
        causes = ("discovery", "claim")
        requests[backlog] = sum(run.bill.requests(cause=each) for each in causes) / run.tasks
    assert requests[10_000] < 1.05 * requests[1_000]


def test_settings_are_checked_and_read_from_the_environment() -> None:
    assert WorkerSettings().sample_shards == 3
    assert WorkerSettings().heartbeat is HeartbeatMode.SWAP
    said = {"PENSTOCK_WORKER_SAMPLE_SHARDS": "5", "PENSTOCK_WORKER_HEARTBEAT": "touch"}
    settings = settings_from(said)
    assert (settings.sample_shards, settings.heartbeat) == (5, HeartbeatMode.TOUCH)
    for wrong in (0, 17):
        with pytest.raises(InvalidInput, match="sample_shards must be between 1 and 16"):
            WorkerSettings(sample_shards=wrong)
    with pytest.raises(
        InvalidInput, match="WORKER_HEARTBEAT must be one of swap, touch, not 'beat'"
    ):
        settings_from({"PENSTOCK_WORKER_HEARTBEAT": "beat"})
    with pytest.raises(InvalidInput, match="must be a number"):
        settings_from({"PENSTOCK_WORKER_SAMPLE_SHARDS": "2.5"})
