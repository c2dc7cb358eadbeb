"""A pack that a worker works on: when it is written, what one write carries, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from penstock.kernel.document_format import decode, encode
from penstock.queue import transitions
from penstock.queue.canceller import CancelSession
from penstock.queue.execution.capacity import WorkerCapacity
from penstock.queue.execution.gates import CombinedAdmission
from penstock.queue.execution.handlers import Handler, TaskContext
from penstock.queue.execution.pack_runner import GIVE_UP_SECONDS, PackRunner, WorkerContext
from penstock.queue.execution.retry import Retry
from penstock.queue.ids import new_pack
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger, QueueTaskState, QueueTaskStatus
from penstock.queue.pack import Pack
from penstock.queue.pack_session import ListedPack, PackSession
from penstock.queue.settings import WorkerSettings
from penstock.queue.transitions import LedgerClaim
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.time import Interval
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")
LEASE_SECONDS = 30.0
FINE = FaultPlan()
AWAY = FaultPlan(lost_request=1.0)


@dataclass
class Ran:
    """What the handler has seen."""

    started: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    interrupted: dict[int, float] = field(default_factory=dict)
    most_at_once: int = 0


class Bench:
    """One pack whose tasks take as many seconds as their inputs say, and one worker."""

    def __init__(self, world: World, seconds: list[float], *, concurrency: int) -> None:
        self.world = world
        self.delay_seconds = 0.0
        """How long a request is on its way, and its answer."""
        self.heeds = True
        """Whether the handlers end when they are interrupted."""
        self.clock = world.clock()
        self.entropy = world.entropy("x")
        self.meter = Meter()
        self.bucket = MemoryBucket(world.clock())
        # Metered inside of the faults: what is counted is what has arrived.
        backend = MemoryStore(self.bucket, clock=self.clock, delay=self._delay)
        inner = MeteredStore(backend, self.meter)
        self.store = FaultyStore(inner, FINE, entropy=world.entropy("faults"))
        self.room = WorkerCapacity(concurrency, clock=self.clock, freed=asyncio.Event())
        self.ran = Ran()
        self.seconds = seconds
        now_ms = int(world.now() * 1000)
        self.at = new_pack(type="t", count=len(seconds), submitted_ms=now_ms, entropy=self.entropy)
        self.handler = Handler(type="t", function=self._handle, retry=Retry(attempts=3))

    async def _delay(self) -> None:
        await self.clock.sleep(self.delay_seconds)

    async def _handle(self, task: TaskContext) -> int:
        place = int(task.id.split(".")[4])
        self.ran.started[place] = self.lived
        running = len(self.ran.started) - len(self.ran.ended) - len(self.ran.interrupted)
        self.ran.most_at_once = max(self.ran.most_at_once, running)
        try:
            await self.clock.sleep(task.input)
        except asyncio.CancelledError:
            self.ran.interrupted[place] = self.lived
            if self.heeds:
                raise
            await self.clock.sleep(task.input)
        self.ran.ended[place] = self.lived
        return place

    @property
    def lived(self) -> float:
        return self.world.now() - self.world.epoch

    @property
    def ledger(self) -> Ledger:
        return decode(Ledger, self.bucket.objects[LAYOUT.ledger(self.at)].body, where="ledger")

    @property
    def statuses(self) -> list[QueueTaskStatus]:
        return [task.status for task in self.ledger.tasks]

    def puts(self, label: str | None = None) -> int:
        return self.meter.requests(kind=Kind.PUT, label=label)

    def write(self, ledger: Ledger) -> None:
        """Another has written."""
        self.bucket.write(LAYOUT.ledger(self.at), encode(ledger), {})

    async def begin(
        self, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> tuple[PackRunner, Coroutine[Any, Any, None]]:
        """Submit the pack and claim it: the work, and its run."""
        pack = Pack(
            type="t",
            nonce="n",
            submitted_ms=self.at.submitted_ms or 0,
            inputs=tuple(msgspec.Raw(b"%g" % each) for each in self.seconds),
        )
        await self.store.now()
        version = self.bucket.write(LAYOUT.pack(self.at), encode(pack), {})
        settings = WorkerSettings(task_lease_seconds=LEASE_SECONDS, settle_seconds=2.0)
        context = WorkerContext(self.store, "w", settings, self.entropy, self.room)
        session = PackSession(self.store, LAYOUT, self.at, entropy=self.entropy)
        ahead = settings.settle_seconds_of(self.at.count)
        tasks_max = self.room.take(self.at.count, type="t", ahead_seconds=ahead)
        claim = context.claim(self.handler, tasks_max=tasks_max, slots=self.room.concurrency)
        claimed = await session.claim(
            claim, ListedPack(version, self.world.now(), has_ledger=False)
        )
        assert claimed is not None
        work = PackRunner(
            context, session, self.handler, leave=CombinedAdmission((), 0), spawn=spawn
        )
        return work, work.run(claim.id, claimed)


Check = Callable[[Bench, PackRunner, "asyncio.Task[None]"], Awaitable[None]]


def _run(seconds: list[float], check: Check, *, concurrency: int = 8) -> None:
    """Work on a pack, with the check beside it, until the work ends; all room is given back."""

    async def main(world: World) -> None:
        bench = Bench(world, seconds, concurrency=concurrency)
        async with asyncio.TaskGroup() as group:
            work, run = await bench.begin(lambda each: _spawn(group, each))
            running = group.create_task(run)
            await check(bench, work, running)
            with suppress(asyncio.CancelledError):
                await running
        assert bench.room.held == 0

    simulate(main, seed=1)


def _spawn(group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
    group.create_task(work)


def test_a_pack_of_one_costs_a_claim_and_a_settlement() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await running
        assert bench.lived == pytest.approx(5.0, abs=0.01)
        assert bench.puts() == 2
        (task,) = bench.ledger.tasks
        assert (task.status, bytes(task.result)) == (QueueTaskStatus.SUCCEEDED, b"0")
        assert LAYOUT.pack(bench.at) not in bench.bucket.objects

    _run([5.0], check)


def test_endings_that_are_close_together_share_a_swap() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await running
        assert bench.puts("settle") == 1
        assert bench.statuses == [QueueTaskStatus.SUCCEEDED] * 8

    _run([1.0 + number / 5 for number in range(8)], check)


def test_an_ending_waits_no_longer_than_settle_seconds() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await bench.clock.sleep(2.9)
        assert bench.statuses == [QueueTaskStatus.CLAIMED] * 3
        await bench.clock.sleep(0.2)
        assert bench.statuses == [
            QueueTaskStatus.SUCCEEDED,
            QueueTaskStatus.SUCCEEDED,
            QueueTaskStatus.CLAIMED,
        ]
        assert bench.puts("settle") == 1
        await running
        assert bench.lived == pytest.approx(9.0, abs=0.01)
        assert bench.puts("settle") == 2

    _run([1.0, 2.5, 9.0], check)


def test_an_ending_during_a_write_is_in_the_next() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        bench.delay_seconds = 0.5
        await bench.clock.sleep(4.4)
        # Sent two seconds after the first ending; the second came while it was on its way.
        assert bench.statuses == [
            QueueTaskStatus.SUCCEEDED,
            QueueTaskStatus.CLAIMED,
            QueueTaskStatus.CLAIMED,
        ]
        await bench.clock.sleep(2.6)
        assert bench.statuses == [
            QueueTaskStatus.SUCCEEDED,
            QueueTaskStatus.SUCCEEDED,
            QueueTaskStatus.CLAIMED,
        ]
        await running
        assert bench.statuses == [QueueTaskStatus.SUCCEEDED] * 3

    _run([1.0, 3.2, 60.0], check)


def test_a_lease_is_renewed_after_a_third_of_it() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        for beats in range(1, 10):
            await bench.clock.sleep(LEASE_SECONDS / 3)
            await bench.clock.sleep(0.01)
            assert bench.puts("heartbeat") == beats
            (lease,) = bench.ledger.leases.values()
            assert lease.expires_ms / 1000 - bench.world.now() > LEASE_SECONDS * 0.99
        await running
        assert bench.statuses == [QueueTaskStatus.SUCCEEDED]
        assert bench.ledger.tasks[0].attempt == 1

    _run([95.0], check)


def test_a_settlement_is_a_heartbeat_too() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await running
        # Something ends every six seconds: nothing is written only to renew.
        assert bench.puts("heartbeat") == 0
        assert bench.statuses == [QueueTaskStatus.SUCCEEDED] * 8

    _run([6.0 * number for number in range(1, 9)], check)


def test_more_is_claimed_with_the_settlement() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await running
        assert not work.left
        assert bench.statuses == [QueueTaskStatus.SUCCEEDED] * 40
        assert bench.ran.most_at_once == 2
        # Twenty seconds of work, settled every two: no claim of its own after the first.
        assert bench.puts("claim") == 1
        assert bench.puts() <= 20
        assert bench.lived <= 22

    _run([1.0] * 40, check, concurrency=2)


def test_while_other_packs_wait_no_more_is_claimed() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        bench.room.contended = 0
        await running
        assert bench.statuses == [QueueTaskStatus.SUCCEEDED] * 4 + [QueueTaskStatus.READY] * 6
        assert work.left

    _run([1.0] * 10, check, concurrency=2)


def test_what_others_have_taken_meanwhile_is_not_asked_for_again() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        now = Interval(bench.world.now(), bench.world.now())
        other = LedgerClaim("other", "o", 300_000, 100, 3)
        taken, _ = transitions.claim(bench.ledger, other, now)
        bench.write(taken)
        await running
        assert bench.statuses == [QueueTaskStatus.SUCCEEDED] * 4 + [QueueTaskStatus.CLAIMED] * 6
        assert bench.puts() <= 5

    _run([1.0] * 10, check, concurrency=2)


def test_a_claim_that_is_lost_interrupts_its_handlers_and_settles_nothing() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await bench.clock.sleep(5)
        mine = bench.ledger
        other = QueueTaskState(QueueTaskStatus.CLAIMED, 2, claim="other")
        lease = _lease_of_another(mine)
        bench.write(msgspec.structs.replace(mine, tasks=(other, other), leases=lease))
        await running
        assert bench.ran.interrupted.keys() == {0, 1}
        assert bench.lived <= LEASE_SECONDS / 3 + 1
        assert [task.claim for task in bench.ledger.tasks] == ["other", "other"]

    _run([100.0, 100.0], check)


def _lease_of_another(ledger: Ledger) -> dict[str, Any]:
    """The leases of a ledger that another has taken over."""
    (lease,) = ledger.leases.values()
    return {"other": msgspec.structs.replace(lease, holder="other")}


def test_what_was_lost_is_refused_and_its_neighbour_is_not() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await bench.clock.sleep(1)
        mine = bench.ledger
        other = QueueTaskState(QueueTaskStatus.CLAIMED, 2, claim="other")
        leases = {**mine.leases, **_lease_of_another(mine)}
        bench.write(msgspec.structs.replace(mine, tasks=(other, mine.tasks[1]), leases=leases))
        await running
        assert [task.claim == "other" for task in bench.ledger.tasks] == [True, False]
        assert bench.statuses == [QueueTaskStatus.CLAIMED, QueueTaskStatus.SUCCEEDED]

    _run([3.0, 4.0], check)


def test_a_ledger_that_is_gone_ends_the_work() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await bench.clock.sleep(1)
        bench.bucket.remove(LAYOUT.ledger(bench.at))
        await running
        assert bench.ran.interrupted.keys() == {0}
        assert LAYOUT.ledger(bench.at) not in bench.bucket.objects

    _run([100.0], check)


def test_a_task_that_is_asked_to_stop_is_interrupted_and_cancelled() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await bench.clock.sleep(1)
        user = CancelSession(bench.store, LAYOUT, bench.at, entropy=bench.entropy)
        await user.cancel(frozenset({1}), LedgerClaim("x", "user", 30_000, 2, 3))
        await bench.clock.sleep(LEASE_SECONDS / 3 + 2.5)
        assert bench.ran.interrupted.keys() == {1}
        assert bench.statuses == [QueueTaskStatus.CLAIMED, QueueTaskStatus.CANCELLED]
        await running
        assert bench.statuses == [QueueTaskStatus.SUCCEEDED, QueueTaskStatus.CANCELLED]

    _run([40.0, 40.0], check)


def test_to_drain_gives_back_what_has_not_started_and_lets_the_rest_end() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await bench.clock.sleep(1)
        started = set(bench.ran.started)
        work.drain()
        await bench.clock.sleep(2.5)
        tasks = bench.ledger.tasks
        assert {
            n for n, task in enumerate(tasks) if task.status is QueueTaskStatus.CLAIMED
        } == started
        assert {n for n, task in enumerate(tasks) if task.given_back} == {0, 1, 2, 3} - started
        await running
        assert bench.lived == pytest.approx(6, abs=0.1)
        tasks = bench.ledger.tasks
        assert {
            n for n, task in enumerate(tasks) if task.status is QueueTaskStatus.SUCCEEDED
        } == started
        assert {task.status for task in tasks} == {QueueTaskStatus.SUCCEEDED, QueueTaskStatus.READY}
        assert bench.ran.started.keys() == started
        assert len(started) == 2

    _run([6.0] * 6, check, concurrency=2)


def test_to_give_back_interrupts_and_does_not_count() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await bench.clock.sleep(1)
        work.give_back()
        await running
        assert bench.lived <= 1.1
        assert bench.ran.interrupted.keys() == bench.ran.started.keys()
        assert len(bench.ran.started) == 2
        assert bench.statuses == [QueueTaskStatus.READY] * 3
        assert all(task.attempt == task.given_back for task in bench.ledger.tasks)
        assert bench.ledger.leases == {}

    _run([100.0] * 3, check, concurrency=2)


def test_a_failure_is_retried_later_and_not_by_this_work() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await running
        assert bench.statuses == [QueueTaskStatus.RETRYING, QueueTaskStatus.SUCCEEDED]
        failed = bench.ledger.tasks[0]
        assert failed.failure is not None
        assert (failed.failure.error, failed.attempt) == ("ValueError", 1)

    _run([-1.0, 2.0], _with(check, raises=-1.0))


def _with(check: Check, *, raises: float) -> Check:
    """The check, with a handler that fails for this input."""

    async def changed(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        sleep = bench.clock.sleep

        async def fail(seconds: float) -> None:
            if seconds == raises:
                raise ValueError("no")
            await sleep(seconds)

        bench.clock.sleep = fail  # type: ignore[method-assign]  # only this bench's handler sees it
        await check(bench, work, running)

    return changed


def test_a_store_that_was_away_longer_than_the_lease_costs_no_result() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await bench.clock.sleep(1)
        bench.store.plan = AWAY
        await bench.clock.sleep(300)
        assert bench.ran.ended.keys() == {0}
        assert not bench.ran.interrupted
        assert bench.statuses == [QueueTaskStatus.CLAIMED] * 2
        bench.store.plan = FINE
        await bench.clock.sleep(15)
        assert bench.statuses == [QueueTaskStatus.SUCCEEDED, QueueTaskStatus.CLAIMED]
        await running
        assert bench.statuses == [QueueTaskStatus.SUCCEEDED] * 2
        assert {task.attempt for task in bench.ledger.tasks} == {1}

    _run([20.0, 400.0], check)


def test_a_result_that_another_has_overtaken_meanwhile_does_not_count() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        bench.store.plan = AWAY
        await bench.clock.sleep(60)
        now = Interval(bench.world.now(), bench.world.now())
        taken, places = transitions.claim(bench.ledger, LedgerClaim("o", "o", 90_000, 9, 3), now)
        assert places == (0,)
        bench.write(taken)
        bench.store.plan = FINE
        await running
        (task,) = bench.ledger.tasks
        assert (task.status, task.claim, task.attempt) == (QueueTaskStatus.CLAIMED, "o", 2)

    _run([20.0], check)


def test_nothing_starts_under_a_lease_that_may_be_over() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await bench.clock.sleep(1)
        bench.store.plan = AWAY
        await bench.clock.sleep(60)
        assert len(bench.ran.ended) == 1
        assert bench.ran.started.keys() == bench.ran.ended.keys()
        bench.store.plan = FINE
        bench.room.contended = 0
        await running
        assert sorted(bench.statuses) == [QueueTaskStatus.READY, QueueTaskStatus.SUCCEEDED]
        assert sorted(task.given_back for task in bench.ledger.tasks) == [0, 1]

    _run([40.0, 40.0], check, concurrency=1)


def test_a_store_that_stays_away_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await bench.clock.sleep(1)
        bench.store.plan = AWAY
        await running
        assert bench.lived >= LEASE_SECONDS + GIVE_UP_SECONDS
        assert bench.lived <= LEASE_SECONDS + GIVE_UP_SECONDS + 15
        await bench.clock.sleep(1)
        assert bench.ran.interrupted.keys() == {1}
        assert bench.room.free == 8
        bench.store.plan = FINE
        session = PackSession(bench.store, LAYOUT, bench.at, entropy=bench.entropy)
        stored = bench.bucket.objects[LAYOUT.pack(bench.at)]
        seen = ListedPack(stored.version, stored.modified, has_ledger=True)
        claimed = await session.claim(LedgerClaim("o", "o", 30_000, 9, 3), seen)
        assert claimed is not None
        assert claimed.attempts == {0: 2}  # They were lost together.

    with caplog.at_level(logging.ERROR):
        _run([20.0, 5000.0], check)
    assert "its tasks will be retried" in caplog.text


def test_a_ledger_that_cannot_be_read_is_given_up_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await bench.clock.sleep(1)
        bench.bucket.write(LAYOUT.ledger(bench.at), b"damaged", {})
        await running
        assert bench.lived <= LEASE_SECONDS / 3 + 2
        await bench.clock.sleep(1)
        assert bench.ran.interrupted.keys() == {0}
        assert bench.bucket.objects[LAYOUT.ledger(bench.at)].body == b"damaged"

    with caplog.at_level(logging.ERROR):
        _run([100.0], check)
    assert "giving up pack" in caplog.text


def test_lost_answers_settle_once() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        bench.store.plan = replace(FINE, lost_answer=0.4, throttled=0.1, latency_seconds_max=1.0)
        await running
        done = [task for task in bench.ledger.tasks if task.status is QueueTaskStatus.SUCCEEDED]
        # A claim of more whose answer was lost is held by nobody, and ends by itself.
        assert len(done) == len(bench.ran.ended)
        assert {task.attempt for task in bench.ledger.tasks} <= {0, 1}

    _run([float(number % 7) for number in range(30)], check, concurrency=4)


def test_a_worker_that_is_killed_gives_its_room_back_and_leaves_its_lease() -> None:
    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        await bench.clock.sleep(1)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await bench.clock.sleep(6)
        assert bench.room.held == 0
        assert bench.ran.interrupted.keys() == {0}
        assert bench.statuses == [QueueTaskStatus.CLAIMED]
        assert len(bench.ledger.leases) == 1

    _run([100.0], check)


def test_a_handler_that_does_not_heed_keeps_its_slot_and_what_waits_is_given_back() -> None:
    """Others may run it meanwhile; here nothing starts until the handler has ended."""

    async def check(bench: Bench, work: PackRunner, running: asyncio.Task[None]) -> None:
        bench.heeds = False
        await bench.clock.sleep(1)
        (place,) = bench.ran.started
        user = CancelSession(bench.store, LAYOUT, bench.at, entropy=bench.entropy)
        await user.cancel(frozenset({place}), LedgerClaim("x", "user", 30_000, 3, 3))
        # A third of the lease until it hears of it, the grace, and the wait for others.
        await bench.clock.sleep(LEASE_SECONDS / 3 + 5 + 3)
        assert bench.ran.interrupted.keys() == {place}
        assert bench.room.is_stuck
        assert bench.room.free == 0
        assert running.done()
        statuses = Counter(bench.statuses)
        assert statuses == {QueueTaskStatus.CANCELLED: 1, QueueTaskStatus.READY: 2}
        assert bench.ran.started.keys() == {place}
        await bench.clock.sleep(400)
        assert bench.room.free == 1
        assert not bench.room.stuck

    _run([100.0] * 3, check, concurrency=1)
