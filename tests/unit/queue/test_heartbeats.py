"""Leases beside the ledger: what a HEAD shows, and what a touch renews and what it does not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.document_format import decode, encode
from penstock.kernel.errors import OutcomeUnknown, Unavailable
from penstock.queue.attempt_outcomes import GivenBack, Succeeded
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.pack_runner import PackRunner
from penstock.queue.ids import new_pack
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import (
    TOUCH_SLACK_MS,
    ClaimLease,
    Ledger,
    as_of,
    fresh,
    may_touch,
    metadata_of,
)
from penstock.queue.maintenance import Monitor
from penstock.queue.pack import Pack
from penstock.queue.pack_session import ListedPack, PackSession, SwapResult
from penstock.queue.settings import DiscoveryMode, HeartbeatMode
from penstock.queue.transitions import LedgerClaim
from penstock.store.base import CREATE, Entry, check_metadata
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.retrying import RetryingStore
from penstock.testing.queue_contract.bench import QUICK
from penstock.testing.queue_contract.bench import Bench as Workers
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")
LEASE_MS = 30_000
TOUCH_MS = LEASE_MS + TOUCH_SLACK_MS
TOUCHING = replace(QUICK, heartbeat=HeartbeatMode.TOUCH)
THIRD_SECONDS = 10.0


def _ledger(**leases: ClaimLease) -> Ledger:
    return msgspec.structs.replace(fresh(pack_version="v", born="b", count=1), leases=leases)


# Pure


def test_a_reading_makes_plain_leases_of_touched_ones() -> None:
    ledger = _ledger(a=ClaimLease("A", 40_000, TOUCH_MS), b=ClaimLease("B", 50_000))
    assert as_of(ledger, 1.0).leases == {"a": ClaimLease("A", 40_000), "b": ClaimLease("B", 50_000)}
    assert as_of(ledger, 20.0).leases == {
        "a": ClaimLease("A", 52_000),
        "b": ClaimLease("B", 50_000),
    }
    plain = _ledger(b=ClaimLease("B", 50_000))
    assert as_of(plain, 99.0) is plain


@given(
    sent=st.floats(1e9, 2e9),
    late=st.floats(0, 5),
    cut=st.sampled_from([1e-3, 1.0]),
    error=st.floats(0, 0.99),
)
def test_a_holder_never_trusts_a_touch_longer_than_others_do(
    sent: float, late: float, cut: float, error: float
) -> None:
    """Whatever the store makes of the date of a touch, as long as it is within a second."""
    modified = ((sent + late) // cut) * cut - error
    trusted_ms = int(sent * 1000) + LEASE_MS
    (lease,) = as_of(_ledger(a=ClaimLease("A", 0, TOUCH_MS)), modified).leases.values()
    assert lease.expires_ms >= trusted_ms


def test_only_who_is_alone_may_touch_and_only_what_it_wrote_so() -> None:
    mine, yours = ClaimLease("A", 1, TOUCH_MS), ClaimLease("B", 1)
    assert may_touch(_ledger(a=mine), frozenset({"a"}))
    assert may_touch(_ledger(a=mine, b=mine), frozenset({"a", "b"}))
    assert not may_touch(_ledger(a=mine, b=yours), frozenset({"a"}))
    assert not may_touch(_ledger(a=mine, b=mine), frozenset({"a"}))
    assert not may_touch(_ledger(a=yours), frozenset({"a"}))
    assert not may_touch(_ledger(), frozenset())


def test_metadata_names_the_lease_that_ends_first() -> None:
    ledger = _ledger(a=ClaimLease("late", 9_000), b=ClaimLease("soon", 5_000))
    assert metadata_of(ledger) == {"holder": "soon", "expires": "1970-01-01T00:00:05.000+00:00"}
    assert metadata_of(_ledger()) == {}


@given(st.text(max_size=300))
def test_any_holder_fits_into_metadata(holder: str) -> None:
    usable = holder.encode(errors="replace").decode()
    check_metadata(metadata_of(_ledger(a=ClaimLease(usable, 5_000))))


# One pack in two hands


class Bench:
    """One pack of `count` tasks in a bucket that dates to the second."""

    def __init__(self, world: World, *, count: int) -> None:
        self.world = world
        self.clock = world.clock()
        self.bucket = MemoryBucket(world.clock(), date_resolution_seconds=1.0)
        self.meter = Meter()
        self.faults: list[FaultyStore] = []
        self.seen: ListedPack
        now_ms = int(world.now() * 1000)
        self.at = new_pack(type="t", count=count, submitted_ms=now_ms, entropy=world.entropy("at"))

    def session(self, *, plan: FaultPlan | None = None) -> PackSession:
        inner = MeteredStore(MemoryStore(self.bucket, clock=self.clock), self.meter)
        faulty = FaultyStore(inner, plan or FaultPlan(), entropy=self.world.entropy("faults"))
        self.faults.append(faulty)
        store = RetryingStore(faulty, entropy=self.world.entropy("retries"))
        return PackSession(store, LAYOUT, self.at, entropy=self.world.entropy("hand"))

    async def submit(self) -> ListedPack:
        store = MemoryStore(self.bucket, clock=self.clock)
        inputs = tuple(msgspec.Raw(b"1") for _ in range(self.at.count))
        stamp = self.at.submitted_ms or 0
        pack = Pack(type="t", nonce="n", submitted_ms=stamp, inputs=inputs)
        version = await store.put(LAYOUT.pack(self.at), encode(pack), CREATE)
        return ListedPack(version, stamp / 1000, has_ledger=True)

    async def held(self, name: str, *, tasks: int = 1, touch_ms: int = TOUCH_MS) -> PackSession:
        """Some tasks, claimed by a hand that renews by touching."""
        session = self.session()
        assert await session.claim(self.claim(name, tasks=tasks, touch_ms=touch_ms), self.seen)
        return session

    def claim(self, name: str, *, tasks: int = 1, touch_ms: int = TOUCH_MS) -> LedgerClaim:
        return LedgerClaim(name, name, LEASE_MS, tasks, 3, touch_ms=touch_ms)

    async def renew(self, session: PackSession, *claims: str) -> SwapResult:
        """As a worker does."""
        touched = await session.touch(frozenset(claims), lease_ms=LEASE_MS)
        return touched or await session.extend(claims, lease_ms=LEASE_MS)

    @property
    def kinds(self) -> Counter[Kind]:
        found: Counter[Kind] = Counter()
        for (_, kind), count in self.meter.billed.items():
            found[kind] += count
        return found

    @property
    def stored(self) -> Ledger:
        return decode(Ledger, self.bucket.objects[LAYOUT.ledger(self.at)].body, where="ledger")

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self.bucket.objects[LAYOUT.ledger(self.at)].metadata)

    @property
    def now_ms(self) -> float:
        return self.world.now() * 1000


def _run(check: Callable[[Bench], Awaitable[None]], *, count: int = 1) -> None:
    async def main(world: World) -> None:
        bench = Bench(world, count=count)
        bench.seen = await bench.submit()
        await check(bench)

    simulate(main, seed=1)


def test_a_head_shows_the_holder_and_the_end_at_every_write() -> None:
    async def check(bench: Bench) -> None:
        session = await bench.held("A", touch_ms=0)
        claimed_ms = bench.now_ms
        expires = datetime.fromtimestamp((claimed_ms + LEASE_MS) / 1000, UTC)
        told = datetime.fromisoformat(bench.metadata["expires"])
        assert bench.metadata["holder"] == "A"
        assert abs((told - expires).total_seconds()) <= 1
        await bench.clock.sleep(THIRD_SECONDS)
        await bench.renew(session, "A")
        later = datetime.fromisoformat(bench.metadata["expires"])
        assert (later - told).total_seconds() == pytest.approx(THIRD_SECONDS, abs=0.1)
        await session.settle({0: ("A", Succeeded())})
        assert bench.metadata == {}

    _run(check)


def test_a_touch_renews_without_sending_the_ledger() -> None:
    async def check(bench: Bench) -> None:
        session = await bench.held("A")
        body = bench.bucket.objects[LAYOUT.ledger(bench.at)].body
        before = bench.kinds
        renewed = await bench.renew(session, "A")
        for _ in range(12):
            await bench.clock.sleep(THIRD_SECONDS)
            renewed = await bench.renew(session, "A")
            assert renewed.expires_ms["A"] > bench.now_ms + LEASE_MS - 1_100
            assert bench.metadata["holder"] == "A"
            assert datetime.fromisoformat(bench.metadata["expires"]).timestamp() > bench.world.now()
        spent = bench.kinds - before
        assert spent == {Kind.COPY: 13}
        assert bench.bucket.objects[LAYOUT.ledger(bench.at)].body == body
        rival = bench.session()
        assert await rival.claim(bench.claim("B"), bench.seen) is None
        assert rival.next_due_ms >= renewed.expires_ms["A"]

    _run(check)


def test_a_lease_that_is_not_touched_any_more_ends() -> None:
    async def check(bench: Bench) -> None:
        session = await bench.held("A")
        await bench.clock.sleep(THIRD_SECONDS)
        await bench.renew(session, "A")
        await bench.clock.sleep(TOUCH_MS / 1000 - 2)
        assert await bench.session().claim(bench.claim("B"), bench.seen) is None
        await bench.clock.sleep(3)
        taken = await bench.session().claim(bench.claim("B"), bench.seen)
        assert taken is not None
        assert taken.attempts == {0: 2}

    _run(check)


def test_a_touch_that_conflicts_is_read_and_swapped() -> None:
    """Somebody else has claimed a neighbour: both leases stand, and neither is touched."""

    async def check(bench: Bench) -> None:
        first = await bench.held("A")
        await bench.held("B")
        leases = bench.stored.leases
        assert leases["A"].touch_ms == 0, "the swap of the other made it a plain one"
        assert leases["B"].touch_ms == TOUCH_MS
        await bench.clock.sleep(THIRD_SECONDS)
        before = bench.kinds
        renewed = await bench.renew(first, "A")
        assert renewed.expires_ms["A"] > bench.now_ms + LEASE_MS - 1_100
        assert bench.kinds - before == {Kind.COPY: 1, Kind.GET: 1, Kind.PUT: 1}
        before = bench.kinds
        await bench.renew(first, "A")
        assert bench.kinds - before == {Kind.PUT: 1}, "it knows that it is not alone"

    _run(check, count=2)


def test_the_writes_of_one_never_prolong_the_touch_lease_of_another() -> None:
    """QUEUE-11: A dies; B goes on, by whatever means; A's task is free when A's lease ends."""

    async def check(bench: Bench) -> None:
        await bench.held("A")
        ends_ms = bench.stored.leases["A"].expires_ms + TOUCH_SLACK_MS
        second = await bench.held("B")
        while bench.now_ms < ends_ms + 3_000:
            lease = bench.stored.leases.get("A")
            assert lease is None or lease.expires_ms <= ends_ms
            await bench.clock.sleep(5)
            await bench.renew(second, "B")
        assert "A" not in bench.stored.leases
        assert bench.stored.tasks[0].claim == ""

    _run(check, count=2)


def test_one_who_is_alone_again_touches_again() -> None:
    async def check(bench: Bench) -> None:
        first, second = await bench.held("A"), await bench.held("B")
        await second.settle({1: ("B", Succeeded())})
        await bench.renew(first, "A")
        before = bench.kinds
        await bench.renew(first, "A")
        assert bench.kinds - before == {Kind.COPY: 1}

    _run(check, count=2)


def test_a_challenger_that_read_before_the_touch_wins_and_costs_an_attempt_only() -> None:
    """What is weaker than a swap: the ending of the first is refused, the second settles."""

    async def check(bench: Bench) -> None:
        session = await bench.held("A")
        rival = bench.session()
        assert await rival.claim(bench.claim("B"), bench.seen) is None
        await bench.clock.sleep(LEASE_MS / 1000 - 1)
        await bench.renew(session, "A")
        # Between its reading and its write the rival is frozen.
        await bench.clock.sleep(4)
        ledger = await rival._take(bench.claim("B"), bench.seen.version)
        assert ledger is not None
        assert ledger.tasks[0].attempt == 2
        renewed = await bench.renew(session, "A")
        assert renewed.expires_ms == {}, "it hears of it with its next renewal"
        assert await session.settle({0: ("A", Succeeded())}) == {0}

    _run(check)


def test_a_cancel_is_heard_by_one_who_touches() -> None:
    async def check(bench: Bench) -> None:
        session = await bench.held("A")
        await bench.renew(session, "A")
        other = bench.session()
        await other._ledger.read()
        await other._ledger.update(_asked_to_stop)
        assert (await bench.renew(session, "A")).asked_to_stop == {0}

    _run(check)


def _asked_to_stop(present: Ledger | None) -> Ledger | None:
    assert present is not None
    (task,) = present.tasks
    return msgspec.structs.replace(present, tasks=(msgspec.structs.replace(task, cancel=True),))


def test_a_settlement_after_touches_asks_for_the_pack() -> None:
    """A touch proves nothing of the pack: the ledger may be the ghost of an archived one."""

    async def check(bench: Bench) -> None:
        session = await bench.held("A")
        for _ in range(4):
            await bench.clock.sleep(THIRD_SECONDS)
            await bench.renew(session, "A")
        bench.bucket.remove(LAYOUT.pack(bench.at))
        assert await session.settle({0: ("A", Succeeded())}) == {0}

    _run(check)


@pytest.mark.parametrize(
    ("plan", "arrives"),
    [
        (FaultPlan(lost_answer=1.0), True),
        (FaultPlan(lost_request=1.0), False),
        (FaultPlan(failed=1.0), None),
    ],
)
def test_a_touch_whose_answer_is_lost_is_not_trusted(plan: FaultPlan, arrives: bool | None) -> None:
    async def check(bench: Bench) -> None:
        session = await bench.held("A")
        dated = bench.bucket.objects[LAYOUT.ledger(bench.at)].modified
        bench.faults[0].plan = plan
        await bench.clock.sleep(THIRD_SECONDS)
        with pytest.raises((OutcomeUnknown, Unavailable)):
            await bench.renew(session, "A")
        if arrives is not None:
            moved = bench.bucket.objects[LAYOUT.ledger(bench.at)].modified > dated
            assert moved is arrives
        bench.faults[0].plan = FaultPlan()
        assert (await bench.renew(session, "A")).expires_ms["A"] > bench.now_ms
        assert await session.settle({0: ("A", Succeeded())}) == frozenset()

    _run(check)


def test_a_late_touch_of_one_who_was_overtaken_is_refused() -> None:
    async def check(bench: Bench) -> None:
        zombie = await bench.held("A")
        await bench.clock.sleep(TOUCH_MS / 1000 + 2)
        await bench.held("B")
        stored = bench.bucket.objects[LAYOUT.ledger(bench.at)]
        assert await zombie.touch(frozenset({"A"}), lease_ms=LEASE_MS) is None
        assert bench.bucket.objects[LAYOUT.ledger(bench.at)] is stored
        assert (await zombie.extend(["A"], lease_ms=LEASE_MS)).expires_ms == {}

    _run(check)


def test_what_is_given_back_has_no_lease_and_no_metadata() -> None:
    async def check(bench: Bench) -> None:
        session = await bench.held("A")
        await bench.renew(session, "A")
        await session.settle({0: ("A", GivenBack())})
        assert bench.stored.leases == {}
        assert bench.metadata == {}
        assert await bench.session().claim(bench.claim("B"), bench.seen) is not None

    _run(check)


def test_the_monitor_takes_a_touched_ledger_for_live() -> None:
    """Without its pack it is void, but not while a lease in it may last."""

    async def check(bench: Bench) -> None:
        session = await bench.held("A")
        bench.bucket.remove(LAYOUT.pack(bench.at))
        store = MemoryStore(bench.bucket, clock=bench.clock)
        monitor = Monitor(store, LAYOUT, key_seconds=60, entropy=bench.world.entropy("monitor"))

        async def cleared() -> int:
            key = LAYOUT.ledger(bench.at)
            stored = bench.bucket.objects[key]
            entry = Entry(key, stored.version, 1, stored.modified - 1000)
            monitor.note([(bench.at, entry)], await store.now())
            return await monitor.clear(at_once=True)

        await bench.clock.sleep(350)
        await bench.renew(session, "A")
        assert await cleared() == 0
        await bench.clock.sleep(TOUCH_MS / 1000 + 2)
        assert await cleared() == 1

    _run(check)


# Workers


def _worker_bench(world: World) -> tuple[Workers, MemoryBucket, Meter]:
    bucket, meter, clock = MemoryBucket(world.clock()), Meter(), world.clock()

    async def open_client() -> MeteredStore:
        return MeteredStore(MemoryStore(bucket, clock=clock), meter)

    return Workers(open_client, DiscoveryMode.SHARED, world.entropy("bench"), clock), bucket, meter


def _try(check: Callable[[Workers, MemoryBucket, Meter], Coroutine[Any, Any, None]]) -> None:
    async def main(world: World) -> None:
        await check(*_worker_bench(world))

    for seed in range(3):
        simulate(main, seed=seed)


def test_a_worker_renews_by_touching_while_a_task_runs_long() -> None:
    async def check(bench: Workers, _bucket: MemoryBucket, meter: Meter) -> None:
        queue = await bench.queue()
        worker = bench.worker(await bench.queue(), settings=TOUCHING)

        @worker.handler("work")
        async def work(task: TaskContext) -> int:
            await bench.clock.sleep(10 * TOUCHING.task_lease_seconds)
            return task.attempt

        async with bench.crew(worker):
            assert await (await queue.submit("work")).result(timeout=90) == 1
        assert meter.billed["heartbeat", Kind.COPY] >= 25
        assert meter.billed["heartbeat", Kind.PUT] == 0

    _try(check)


@pytest.mark.parametrize("waits", [False, True])
def test_a_worker_whose_tasks_wait_to_start_swaps(*, waits: bool) -> None:
    """Nothing starts on a touched lease."""
    sent: list[str] = []
    done = SwapResult(frozenset(), {"A": 1}, frozenset(), None)

    class Hand:
        async def touch(self, claims: frozenset[str], *, lease_ms: int) -> SwapResult:
            sent.append("touch")
            return done

        async def swap(self, endings: object, **more: object) -> SwapResult:
            sent.append("swap")
            return done

    work: Any = object.__new__(PackRunner)
    work.session = Hand()
    work._context = SimpleNamespace(lease_ms=LEASE_MS, now_ms=lambda: 0)
    work._held = {0: SimpleNamespace(begun=True), 1: SimpleNamespace(begun=not waits)}
    asyncio.run(work._send({}, {"A"}, None, {}))
    assert sent == ["swap" if waits else "touch"]
    asyncio.run(work._send({0: ("A", Succeeded())}, {"A"}, None, {}))
    assert sent[1:] == ["swap"]


def test_what_a_dead_toucher_held_is_taken_over_by_a_swapper_and_back() -> None:
    async def check(bench: Workers, _bucket: MemoryBucket, _meter: Meter) -> None:
        queue = await bench.queue()
        begun: list[int] = []

        async def hang(task: TaskContext) -> int:
            begun.append(task.attempt)
            if task.attempt < 3:
                await bench.clock.sleep(1000)
            return task.attempt

        async with bench.crew() as crew:
            task = await queue.submit("work")
            for number, settings in enumerate((TOUCHING, QUICK, TOUCHING)):
                victim = bench.worker(await bench.queue(), name=f"w{number}", settings=settings)
                victim.handler("work")(hang)
                crew.start(victim)
                await bench.until(lambda: len(begun) == number + 1, what="it runs")  # noqa: B023
                await bench.clock.sleep(5)
                if number < 2:
                    await crew.kill(victim)
            assert await task.result(timeout=60) == 3
        assert begun == [1, 2, 3]

    _try(check)


def test_many_touchers_share_a_pack() -> None:
    async def check(bench: Workers, _bucket: MemoryBucket, _meter: Meter) -> None:
        queue = await bench.queue()
        workers = [
            bench.worker(await bench.queue(), concurrency=2, name=f"w{n}", settings=TOUCHING)
            for n in range(3)
        ]
        ran: Counter[int] = Counter()

        async def work(task: TaskContext) -> int:
            ran[task.input] += 1
            await bench.clock.sleep(2 + task.input % 5)
            return task.attempt

        for worker in workers:
            worker.handler("work")(work)
        async with bench.crew(*workers):
            tasks = await queue.submit_many("work", list(range(30)))
            await asyncio.gather(*(task.result(timeout=300) for task in tasks))
        assert ran == dict.fromkeys(range(30), 1)

    _try(check)
