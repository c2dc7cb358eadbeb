"""What goes wrong in other queues that live in a bucket, each as a test named after it.

Virtual time, latencies that vary, and for every client a machine of its own whose wall clock is
wrong by up to a day.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest

from penstock.kernel.document_format import decode, encode
from penstock.kernel.errors import InvalidInput
from penstock.queue.attempt_outcomes import Succeeded
from penstock.queue.client import Queue, Task
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.ids import new_pack, task_at
from penstock.queue.pack import Pack
from penstock.queue.pack_session import ListedPack, PackSession
from penstock.queue.settings import DiscoveryMode
from penstock.queue.shards.registry import OwnerRole, Registration
from penstock.queue.submitter import INPUT_BYTES_MAX
from penstock.queue.transitions import LedgerClaim
from penstock.queue.worker import Worker
from penstock.store.base import CREATE, ObjectStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.retrying import RetryingStore
from penstock.testing.queue_contract.bench import QUICK, Bench, GateAccess, gate_of
from penstock.testing.virtual import World, simulate

DAY_SECONDS = 86_400.0
HALF_REQUEST_SECONDS_MAX = 0.03
TAKEOVER_SECONDS = QUICK.lease_ttl_secs + 75
"""Within this the shards of a dead owner are taken: its lease, and the longest pause of looks."""
LEASE_SECONDS = QUICK.task_lease_seconds

both_modes = pytest.mark.parametrize("mode", DiscoveryMode)


class Place:
    """One bucket in one world; a meter for every client, in the order of opening."""

    def __init__(self, world: World, mode: DiscoveryMode, *, shards: int = 4) -> None:
        self.world = world
        self.bucket = MemoryBucket(world.clock(), date_resolution_seconds=1.0)
        self.meters: list[Meter] = []
        self.clock = world.clock()
        self.bench = Bench(self.open, mode, world.entropy("bench"), self.clock, shards=shards)

    async def open(self) -> ObjectStore:
        skew = self.world.entropy("skews").uniform(-DAY_SECONDS, DAY_SECONDS)
        clock = self.world.clock(skew_seconds=skew)
        self.meters.append(Meter())

        async def delay() -> None:
            latency = self.world.entropy("latency").uniform(0, HALF_REQUEST_SECONDS_MAX)
            await clock.sleep(latency)

        store = MeteredStore(MemoryStore(self.bucket, clock=clock, delay=delay), self.meters[-1])
        return RetryingStore(store, entropy=self.world.entropy("retries"))

    def asked(self, client: int, label: str = "") -> int:
        """How many requests a client has made."""
        meter = self.meters[client]
        return sum(count for (what, _), count in meter.billed.items() if not label or what == label)

    async def registrations(self, queue: Queue) -> list[Registration]:
        found = []
        for key in await self.bench.keys(queue, "workers/"):
            stored = self.bucket.objects[queue.access.layout.root + key]
            found.append(decode(Registration, stored.body, where=key))
        return found

    def forget_leases(self, queue: Queue) -> None:
        """What an operator, or a lifecycle rule, may delete."""
        layout = queue.access.layout
        for key in list(self.bucket.objects):
            if key.startswith((layout.workers, layout.shard_leases, layout.monitor)):
                self.bucket.remove(key)


def _try(
    check: Callable[[Place], Awaitable[None]],
    mode: DiscoveryMode,
    *,
    seeds: int = 3,
    shards: int = 4,
) -> None:
    async def main(world: World) -> None:
        await check(Place(world, mode, shards=shards))

    for seed in range(seeds):
        simulate(main, seed=seed)


def _returns_attempt(worker: Worker, ran: list[TaskContext] | None = None) -> Worker:
    @worker.handler("work")
    async def work(task: TaskContext) -> int:
        if ran is not None:
            ran.append(task)
        return task.attempt

    return worker


async def _claimed_by_the_dead(queue: Queue, task: Task, *, lease_seconds: float) -> PackSession:
    """The pack of a single task, claimed by somebody who is not heard of again."""
    at, _ = task_at(task.id)
    access = queue.access
    session = PackSession(access.store, access.layout, at, entropy=access.entropy)
    head = await access.store.head(access.layout.pack(at))
    claim = LedgerClaim("dead", "dead", int(lease_seconds * 1000), 1, 3)
    assert await session.claim(claim, ListedPack(head.version, head.modified, has_ledger=False))
    return session


# buquet


@both_modes
def test_a_lost_ready_entry_strands_the_task(mode: DiscoveryMode) -> None:
    async def check(place: Place) -> None:
        queue = await place.bench.queue()
        task = await queue.submit("work", key="k")
        (entry,) = await place.bench.keys(queue, "ready/")
        place.bucket.remove(queue.access.layout.root + entry)
        async with place.bench.crew(
            _returns_attempt(place.bench.worker(await place.bench.queue()))
        ):
            assert await task.result(timeout=120) == 1

    _try(check, mode)


@both_modes
def test_a_lost_lease_entry_strands_the_task(mode: DiscoveryMode) -> None:
    """The worker dies, and then everything is lost that said what it owned."""

    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        first = bench.worker(await bench.queue())
        begun: list[str] = []

        @first.handler("work")
        async def hang(task: TaskContext) -> None:
            begun.append(task.id)
            await bench.clock.sleep(1000)

        async with bench.crew(first) as crew:
            task = await queue.submit("work")
            await bench.until(lambda: begun, what="it runs")
            await crew.kill(first)
            place.forget_leases(queue)
            crew.start(_returns_attempt(bench.worker(await bench.queue())))
            assert await task.result(timeout=60) == 2

    _try(check, mode)


@both_modes
def test_a_timeout_of_a_second_lets_a_handler_of_five_run_four_times_in_full(
    mode: DiscoveryMode,
) -> None:
    async def check(place: Place) -> None:
        queue = await place.bench.queue()
        worker = place.bench.worker(await place.bench.queue())
        took_seconds: list[float] = []
        finished: list[int] = []

        @worker.handler("slow", timeout=1, retry=Retry(attempts=4, first_seconds=0.1))
        async def slow(task: TaskContext) -> None:
            began = place.world.now()
            try:
                await place.clock.sleep(5)
                finished.append(task.attempt)
            finally:
                took_seconds.append(place.world.now() - began)

        async with place.bench.crew(worker):
            view = await place.bench.ended(await queue.submit("slow"))
        assert (view.status, view.error, view.attempt) == ("failed", "TimeoutError", 4)
        assert finished == []
        assert took_seconds == pytest.approx([1.0] * 4)

    _try(check, mode)


@pytest.mark.parametrize(
    "error", [TimeoutError("x"), OSError("permanent, do not retry"), KeyError()]
)
def test_a_retry_is_decided_by_the_text_of_the_exception(error: Exception) -> None:
    async def check(place: Place) -> None:
        queue = await place.bench.queue()
        worker = place.bench.worker(await place.bench.queue())

        @worker.handler("by-default", retry=Retry(first_seconds=0.1))
        @worker.handler("by-class", retry=Retry(first_seconds=0.1, on=type(error)))
        @worker.handler("not", retry=Retry(first_seconds=0.1, on=ZeroDivisionError))
        async def fail(task: TaskContext) -> int:
            if task.attempt < 3:
                raise error
            return task.attempt

        async with place.bench.crew(worker):
            for kind in ("by-default", "by-class"):
                assert await (await queue.submit(kind)).result(timeout=60) == 3
            view = await place.bench.ended(await queue.submit("not"))
            assert (view.status, view.attempt) == ("failed", 1)

    _try(check, DiscoveryMode.SHARED)


@both_modes
def test_480_tasks_of_a_type_that_nobody_handles_block_the_rest(mode: DiscoveryMode) -> None:
    async def check(place: Place) -> None:
        queue = await place.bench.queue()
        await asyncio.gather(*(queue.submit("unknown") for _ in range(480)))
        tasks = [await queue.submit("work") for _ in range(20)]
        worker = _returns_attempt(place.bench.worker(await place.bench.queue()))
        began = place.world.now()
        async with place.bench.crew(worker):
            for task in tasks:
                assert await task.result(timeout=60) == 1
        assert place.world.now() - began < 15
        # Where nobody is there to be told, a direct pack lies in ready/.
        folders = ("tasks/", "ready/")
        keys = [key for folder in folders for key in await place.bench.keys(queue, folder)]
        assert len([key for key in keys if "unknown" in key]) == 480

    _try(check, mode, seeds=1)


def test_more_than_16_shards_break_recovery() -> None:
    """256 shards among three owners, who die with tasks in their hands; a fourth has all of it."""

    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        workers = [bench.worker(await bench.queue(), concurrency=2) for _ in range(3)]

        async def work(task: TaskContext) -> int:
            await bench.clock.sleep(2)
            return task.attempt

        for worker in workers:
            worker.handler("work")(work)
        async with bench.crew(*workers) as crew:
            tasks = await asyncio.gather(*(queue.submit("work") for _ in range(300)))
            await bench.clock.sleep(75)
            shares = [len(each.shards) for each in await place.registrations(queue)]
            assert sum(shares) == 256
            assert min(shares) > 0, "all three are owners"
            assert max(shares) > 16
            for worker in workers:
                await crew.kill(worker)
            crew.start(_returns_attempt(bench.worker(await bench.queue(), name="last")))
            results = [await task.result(timeout=300) for task in tasks]
            attempts = Counter(results)
            assert attempts.keys() == {1, 2}
            assert attempts[2] <= 6, "only what was running ran again"
            # The tasks may be done before: owners that have too much to do ask for hands.
            await bench.clock.sleep(TAKEOVER_SECONDS)
            live = [
                each for each in await place.registrations(queue) if each.role is OwnerRole.OWNER
            ]
            assert [len(each.shards) for each in live] == [256]

    _try(check, DiscoveryMode.LEASED, shards=256, seeds=2)


def test_shard_leasing_does_nothing() -> None:
    """It does: whoever owns nothing does not look, and the price of looking is paid once."""

    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        workers = [
            _returns_attempt(bench.worker(await bench.queue(), name=f"w{n}")) for n in range(4)
        ]
        async with bench.crew(*workers):
            await bench.clock.sleep(60)
            for _ in range(20):
                await (await queue.submit("work")).result(timeout=60)
        looks = sorted(place.asked(client, "discovery") for client in range(1, 5))
        assert looks[:3] == [0, 0, 0]
        assert looks[3] > 20

    _try(check, DiscoveryMode.LEASED)


@both_modes
def test_stopping_a_worker_leaves_it_registered_and_its_monitor_spinning(
    mode: DiscoveryMode,
) -> None:
    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        before = asyncio.all_tasks()
        async with bench.crew(_returns_attempt(bench.worker(await bench.queue()))):
            await (await queue.submit("work")).result(timeout=60)
        assert asyncio.all_tasks() == before
        assert {each.role for each in await place.registrations(queue)} <= {OwnerRole.GONE}
        asked = place.asked(1)
        await bench.clock.sleep(3600)
        assert place.asked(1) == asked

    _try(check, mode)


@both_modes
def test_a_cooperatively_cancelled_task_ends_as_completed(mode: DiscoveryMode) -> None:
    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        worker = bench.worker(await bench.queue())
        begun: list[str] = []

        @worker.handler("work")
        async def work(task: TaskContext) -> str:
            begun.append(task.id)
            while not task.cancel_asked:
                try:
                    await bench.clock.sleep(0.5)
                except asyncio.CancelledError:
                    assert task.cancel_asked
            return "completed"

        async with bench.crew(worker):
            task = await queue.submit("work")
            await bench.until(lambda: begun, what="it runs")
            await queue.cancel(task.id)
            view = await bench.ended(task)
        assert (view.status, view.result) == ("cancelled", None)
        whats = [event.what for event in await queue.history(task.id)]
        assert whats == ["submitted", "claimed", "cancel asked", "cancelled"]

    _try(check, mode)


@both_modes
def test_extending_a_lease_and_then_rescheduling_leaves_it_running(mode: DiscoveryMode) -> None:
    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        worker = bench.worker(await bench.queue())

        @worker.handler("work", retry=Retry(first_seconds=30, jitter=0))
        async def work(task: TaskContext) -> int:
            if task.attempt == 1:
                await bench.clock.sleep(LEASE_SECONDS * 3)
                raise OSError("later")
            return task.attempt

        async with bench.crew(worker):
            task = await queue.submit("work")
            await bench.clock.sleep(LEASE_SECONDS * 3 + 5)
            assert (await task.view()).status == "retrying"
            assert await task.result(timeout=60) == 2

    _try(check, mode)


def test_large_payloads_arrive_as_nothing() -> None:
    async def check(place: Place) -> None:
        queue = await place.bench.queue()
        worker = place.bench.worker(await place.bench.queue())

        @worker.handler("size")
        async def size(task: TaskContext) -> int:
            return len(task.input)

        large = "x" * 1_000_000
        async with place.bench.crew(worker):
            assert await (await queue.submit("size", large)).result(timeout=60) == len(large)
        with pytest.raises(InvalidInput, match="bytes"):
            await queue.submit("size", "x" * INPUT_BYTES_MAX)

    _try(check, DiscoveryMode.LEASED)


def test_submit_many_saves_no_request() -> None:
    async def check(place: Place) -> None:
        queue = await place.bench.queue()
        before = place.meters[0].billed.copy()
        tasks = await queue.submit_many("work", list(range(1000)))
        assert len({task.id for task in tasks}) == 1000
        # And once in a while it is asked whether the queue is drained, and whether to ring.
        asked = {("control", Kind.GET): 1, ("bell", Kind.GET): 1}
        assert place.meters[0].billed - before == {("submit", Kind.PUT): 1, **asked}
        await queue.submit_many("work", list(range(1000)))
        assert place.meters[0].billed - before == {("submit", Kind.PUT): 2, **asked}

    _try(check, DiscoveryMode.LEASED)


# DFQ


def test_a_reclaim_has_two_winners() -> None:
    """Sixteen take what a dead worker held, at the same instant: one of them gets it."""

    async def check(place: Place) -> None:
        queue = await place.bench.queue()
        task = await queue.submit("work")
        await _claimed_by_the_dead(queue, task, lease_seconds=3)
        rivals = [await place.bench.queue() for _ in range(16)]
        await place.clock.sleep(5)

        async def reclaim(number: int) -> bool:
            access = rivals[number].access
            at, _ = task_at(task.id)
            session = PackSession(access.store, access.layout, at, entropy=access.entropy)
            head = await access.store.head(access.layout.pack(at))
            claim = LedgerClaim(f"claim {number}", f"rival {number}", 30_000, 1, 3)
            seen = ListedPack(head.version, head.modified, has_ledger=True)
            return await session.claim(claim, seen) is not None

        won = await asyncio.gather(*(reclaim(number) for number in range(16)))
        assert sum(won) == 1
        assert (await task.view()).attempt == 2

    _try(check, DiscoveryMode.SHARED, seeds=20)


def test_a_zombie_takes_the_lease_over_or_ends_the_live_holders_task() -> None:
    async def check(place: Place) -> None:
        queue, other = await place.bench.queue(), await place.bench.queue()
        task = await queue.submit("work")
        zombie = await _claimed_by_the_dead(queue, task, lease_seconds=3)
        await place.clock.sleep(5)
        access = other.access
        live = PackSession(access.store, access.layout, zombie.at, entropy=access.entropy)
        head = await access.store.head(access.layout.pack(zombie.at))
        seen = ListedPack(head.version, head.modified, has_ledger=True)
        assert await live.claim(LedgerClaim("live", "live", 30_000, 1, 3), seen)

        extended = await zombie.extend(["dead"], lease_ms=30_000)
        assert extended.expires_ms == {}, "its heartbeat gives it nothing"
        refused = await zombie.settle({0: ("dead", Succeeded(msgspec.Raw(b'"zombie"')))})
        assert refused == {0}
        view = await task.view()
        assert (view.status, view.attempt) == ("running", 2)
        assert await live.settle({0: ("live", Succeeded(msgspec.Raw(b'"live"')))}) == frozenset()
        assert await zombie.settle({0: ("dead", Succeeded(msgspec.Raw(b'"zombie"')))}) == {0}
        assert await task.result(timeout=1) == "live"

    _try(check, DiscoveryMode.SHARED, seeds=10)


@both_modes
def test_a_worker_that_comes_back_from_a_pause_overwrites_the_result(mode: DiscoveryMode) -> None:
    """It is cut off for longer than its lease, and comes back while another runs the task."""

    async def check(place: Place) -> None:
        bench = place.bench
        queue, mine = await bench.queue(), await bench.queue()
        zombie, live = bench.worker(mine), bench.worker(await bench.queue())
        begun: list[str] = []

        @zombie.handler("work")
        async def end_soon(task: TaskContext) -> str:
            begun.append("zombie")
            await bench.clock.sleep(2)
            return "zombie"

        @live.handler("work")
        async def take_long(task: TaskContext) -> str:
            begun.append("live")
            await bench.clock.sleep(40)
            return "live"

        async with bench.crew(zombie) as crew:
            task = await queue.submit("work")
            await bench.until(lambda: begun, what="it runs")
            gate_of(mine).access = GateAccess.CLOSED
            crew.start(live)
            await bench.until(lambda: len(begun) == 2, what="it was taken over")
            gate_of(mine).access = GateAccess.OPEN
            await bench.clock.sleep(20)
            view = await task.view()
            assert (view.status, view.attempt) == ("running", 2)
            assert await task.result(timeout=60) == "live"
        assert begun == ["zombie", "live"]

    _try(check, mode)


@both_modes
@pytest.mark.parametrize("leased", [250, 1100])
def test_free_tasks_behind_many_leased_ones_are_not_found(mode: DiscoveryMode, leased: int) -> None:
    """All leased ones are listed before all free ones, and need more than a page if 1,100."""

    async def check(place: Place) -> None:
        queue = await place.bench.queue()
        now_ms = int((await queue.access.store.now()).latest * 1000)
        store, layout = queue.access.store, queue.access.layout

        async def submit(slot: int) -> Task:
            at = new_pack(type="work", count=1, submitted_ms=now_ms, entropy=queue.access.entropy)
            at = replace(at, slot=slot)
            pack = Pack(
                type="work", nonce=at.pack, submitted_ms=now_ms, inputs=(msgspec.Raw(b"1"),)
            )
            await store.put(layout.pack(at), encode(pack), CREATE)
            return Task(queue, at.task(0))

        async def held() -> None:
            task = await submit(slot=0)
            await _claimed_by_the_dead(queue, task, lease_seconds=3600)

        await asyncio.gather(*(held() for _ in range(leased)))
        free = await asyncio.gather(*(submit(slot=4095) for _ in range(50)))
        began = place.world.now()
        worker = _returns_attempt(place.bench.worker(await place.bench.queue(), concurrency=10))
        async with place.bench.crew(worker):
            for task in free:
                assert await task.result(timeout=60) == 1
        assert place.world.now() - began < 15

    _try(check, mode, seeds=1)


@both_modes
def test_stale_leased_tasks_are_never_discovered_by_others(mode: DiscoveryMode) -> None:
    """Nor by one that has looked all the time, and saw them held."""

    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        tasks = [await queue.submit("work") for _ in range(3)]
        for task in tasks:
            await _claimed_by_the_dead(queue, task, lease_seconds=20)
        async with bench.crew(_returns_attempt(bench.worker(await bench.queue()))):
            await bench.clock.sleep(18)
            assert {(await task.view()).attempt for task in tasks} == {1}
            assert [await task.result(timeout=15) for task in tasks] == [2, 2, 2]

    _try(check, mode)


@both_modes
def test_staleness_trusts_worker_clocks(mode: DiscoveryMode) -> None:
    """Clocks that are a day ahead steal nothing; those that are a day behind take what is over."""

    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        owner = bench.worker(await bench.queue(), name="owner")
        rivals = [bench.worker(await bench.queue(), name=f"rival{n}") for n in range(6)]
        begun: Counter[str] = Counter()

        async def hold(task: TaskContext) -> int:
            begun[task.id] += 1
            await bench.clock.sleep(40 if task.attempt == 1 else 1)
            return task.attempt

        for worker in (owner, *rivals):
            worker.handler("work")(hold)
        async with bench.crew(owner) as crew:
            live = await queue.submit("work")
            await bench.until(lambda: begun[live.id], what="it runs")
            for rival in rivals:
                crew.start(rival)
            assert await live.result(timeout=60) == 1
            dead = await queue.submit("work")
            await bench.until(lambda: begun[dead.id], what="it runs")
            holder = (await queue.history(dead.id))[-1].who
            await crew.kill(next(w for w in (owner, *rivals) if holder.startswith(w._name)))
            assert await dead.result(timeout=60) == 2

    _try(check, mode, seeds=5)


@both_modes
def test_there_are_no_attempts_and_no_dead_letters(mode: DiscoveryMode) -> None:
    """A task that kills every worker that runs it ends; it does not go round for ever."""

    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        begun: list[int] = []

        async def kill(task: TaskContext) -> None:
            begun.append(task.attempt)
            await bench.clock.sleep(1000)

        async with bench.crew() as crew:
            task = await queue.submit("work")
            for number in range(3):
                victim = bench.worker(await bench.queue(), name=f"victim{number}")
                victim.handler("work", retry=Retry(attempts=3))(kill)
                crew.start(victim)
                await bench.until(lambda: len(begun) == number + 1, what="it runs")  # noqa: B023
                await crew.kill(victim)
            last = bench.worker(await bench.queue(), name="last")
            last.handler("work", retry=Retry(attempts=3))(kill)
            crew.start(last)
            view = await bench.ended(task)
            assert (view.status, view.error, view.attempt) == ("failed", "LeaseExpired", 3)
            assert begun == [1, 2, 3]
            assert (await queue.replay(task.id)).id != task.id

    _try(check, mode)


@both_modes
def test_a_poison_of_another_pack_costs_its_neighbours_time_and_no_attempt(
    mode: DiscoveryMode,
) -> None:
    """Eight tasks in eight packs on one worker, which one of them ends whenever it runs."""

    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        poisoned = asyncio.Event()

        async def work(task: TaskContext) -> int:
            await bench.clock.sleep(1)
            if task.input == "poison":
                poisoned.set()
                await bench.clock.sleep(1000)
            await bench.clock.sleep(3)
            return task.attempt

        async with bench.crew() as crew:
            poison = await queue.submit("work", "poison")
            others = [await queue.submit("work") for _ in range(7)]
            for number in range(4):
                worker = bench.worker(await bench.queue(), name=f"w{number}", concurrency=8)
                worker.handler("work", retry=Retry(attempts=3))(work)
                crew.start(worker)
                if number < 3:
                    await bench.until(poisoned.is_set, what="the poison runs")
                    await crew.kill(worker)
                    poisoned.clear()
            assert (await bench.ended(poison)).error == "LeaseExpired"
            assert not poisoned.is_set(), "it has run three times, as it may"
            assert {(await bench.ended(task)).status for task in others} == {"succeeded"}

    _try(check, mode)


@both_modes
def test_both_nodes_win_when_the_store_is_unreachable(mode: DiscoveryMode) -> None:
    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        clients = [await bench.queue() for _ in range(2)]
        ran: list[TaskContext] = []
        workers = [_returns_attempt(bench.worker(client), ran) for client in clients]
        async with bench.crew(*workers):
            await (await queue.submit("work")).result(timeout=60)
            for client in clients:
                gate_of(client).access = GateAccess.CLOSED
            task = await queue.submit("work")
            await bench.clock.sleep(120)
            assert len(ran) == 1, "nobody runs what it could not claim"
            for client in clients:
                gate_of(client).access = GateAccess.OPEN
            assert await task.result(timeout=60) == 1
        assert len(ran) == 2

    _try(check, mode)
