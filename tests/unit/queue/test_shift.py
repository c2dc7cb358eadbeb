"""One run of a worker: what it looks at, tries, remembers, and lets go of."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from penstock.kernel.document_format import decode, encode
from penstock.kernel.errors import OutcomeUnknown, Unavailable
from penstock.queue.client import Queue, Task
from penstock.queue.discovery.base import Discovery, DiscoveryRequest
from penstock.queue.discovery.scanner import ALL, Run, Scanner, ScanResult
from penstock.queue.execution.handlers import Handler, HandlerRegistry, TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.execution.worker_loop import WorkerLoop
from penstock.queue.ids import PackAt, keyed_pack, task_at
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger, QueueTaskStatus
from penstock.queue.pack_session import ListedPack, PackSession
from penstock.queue.settings import Polling, WorkerSettings
from penstock.queue.shards.allocation import WorkerLoad
from penstock.queue.submitter import Pointer
from penstock.queue.transitions import LedgerClaim
from penstock.store.base import NO_METADATA, REPLACE, Object, PutMode, Version, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")
RARELY = Polling(min_seconds=3600, max_seconds=3600, jitter=0)
"""Looks so rare that whatever happens meanwhile happens without one."""


class Lossy(Wrapper):
    """A store that carries everything out; while it `loses`, puts and gets have no answer."""

    loses = False

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        version = await super().put(key, body, mode, metadata=metadata)
        if self.loses:
            raise OutcomeUnknown("The answer was lost.", key=key)
        return version

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        if self.loses:
            raise Unavailable("away", key=key)
        return await super().get(key, unless=unless)


class Everything(Discovery):
    """Looks at all slots, in order, and is told what it guards."""

    sight_seconds = 30.0
    is_alone = True
    name = "w"

    def __init__(self, queue: Queue, *, guards: bool) -> None:
        super().__init__()
        self._store = queue.access.store
        self._scanner = Scanner(self._store, LAYOUT)
        self._guards = guards
        self.load: Callable[[], WorkerLoad] = WorkerLoad
        self.looks = 0
        self.look_seconds = 0.0
        self.failures = 0
        self.is_released = False

    async def look(self, wanted: DiscoveryRequest) -> ScanResult:
        self.looks += 1
        await self._store.clock.machine.sleep(self.look_seconds)
        if self.failures:
            self.failures -= 1
            raise Unavailable("away")
        minute = int((await self._store.now()).earliest // 60)
        return await self._scanner.look(ALL, minute=minute, worth=wanted.worth, wanted=wanted.tasks)

    def guarded(self) -> Sequence[Run]:
        return ALL if self._guards else ()

    async def keep(self, load: Callable[[], WorkerLoad]) -> None:
        self.load = load
        while True:
            load()
            await self._store.clock.machine.sleep(1)

    async def release(self) -> None:
        self.is_released = True


@dataclass
class Ran:
    """What the handlers have seen: the id of each task and when."""

    started: list[tuple[str, float]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)

    def starts(self, task: Task) -> list[float]:
        return [at for name, at in self.started if name == task.id]


class Bench:
    """A queue and one worker, whose tasks take as many seconds as their inputs say.

    A task of the type `fails` fails.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = world.clock()
        self.bucket = MemoryBucket(world.clock())
        self.meter = Meter()
        metered = MeteredStore(MemoryStore(self.bucket, clock=world.clock()), self.meter)
        self.store = Lossy(metered)
        self.ran = Ran()

    async def open(self) -> None:
        self.queue = await Queue.on(self.store, name="q", entropy=self.world.entropy("q"))

    @property
    def lived(self) -> float:
        return self.world.now() - self.world.epoch

    def shift(
        self,
        *,
        concurrency: int = 4,
        polling: Polling | None = None,
        guards: bool = False,
        stop_seconds: float = 30.0,
    ) -> tuple[WorkerLoop, Everything]:
        handlers = HandlerRegistry()
        retry = Retry(attempts=3, first_seconds=20, jitter=0)
        for kind in ("t", "fails"):
            handlers.add(Handler(type=kind, function=self._handle, retry=retry))
        settings = WorkerSettings(polling=polling or Polling(), stop_seconds=stop_seconds)
        discovery = Everything(self.queue, guards=guards)
        access = self.queue.access
        shift = WorkerLoop(access, handlers, discovery, concurrency=concurrency, settings=settings)
        return shift, discovery

    async def _handle(self, task: TaskContext) -> None:
        self.ran.started.append((task.id, self.lived))
        if task.type == "fails":
            raise ValueError("no")
        try:
            await self.clock.sleep(task.input)
        except asyncio.CancelledError:
            self.ran.interrupted.append(task.id)
            raise
        self.ran.ended.append(task.id)

    def ledger(self, task: Task) -> Ledger:
        key = LAYOUT.ledger(task_at(task.id)[0])
        return decode(Ledger, self.bucket.objects[key].body, where=key)

    async def claim(self, task: Task, *, lease_seconds: float) -> PackSession:
        """Another worker claims a pack."""
        at, _ = task_at(task.id)
        access = self.queue.access
        session = PackSession(access.store, LAYOUT, at, entropy=access.entropy)
        stored = self.bucket.objects[LAYOUT.pack(at)]
        seen = ListedPack(stored.version, stored.modified, has_ledger=False)
        claim = LedgerClaim("other", "other", int(lease_seconds * 1000), at.count, 3)
        assert await session.claim(claim, seen) is not None
        return session

    def pointers(self, at: PackAt) -> list[str]:
        read = {key: LAYOUT.read_pointer(key) for key in self.bucket.objects}
        return [key for key, found in read.items() if found and found[0] == at]


Check = Callable[[Bench], Awaitable[None]]


def _run(check: Check, *, seed: int = 1) -> None:
    async def main(world: World) -> None:
        bench = Bench(world)
        await bench.open()
        await check(bench)

    simulate(main, seed=seed)


class Running:
    """A shift that runs as long as the block does."""

    def __init__(self, shift: WorkerLoop) -> None:
        self._shift = shift
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> asyncio.Task[None]:
        await self._group.__aenter__()
        self._task = self._group.create_task(self._shift.run())
        return self._task

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._group.__aexit__(None, None, None)


def test_what_is_there_runs_and_what_comes_is_found() -> None:
    async def check(bench: Bench) -> None:
        shift, _ = bench.shift()
        tasks = [await bench.queue.submit("t", 1) for _ in range(3)]
        async with Running(shift):
            await bench.clock.sleep(2)
            assert {task.id for task in tasks} == set(bench.ran.ended)
            await bench.clock.sleep(100)
            late = await bench.queue.submit("t", 1)
            await bench.clock.sleep(10)
            assert late.id in bench.ran.ended

    _run(check)


def test_packs_take_turns() -> None:
    """While others wait, the pack that was found first gets no more than it has."""

    async def check(bench: Bench) -> None:
        shift, _ = bench.shift(concurrency=1)
        packs = [await bench.queue.submit_many("t", [1] * 20) for _ in range(3)]
        async with Running(shift):
            await bench.clock.sleep(70)
        assert Counter(bench.ran.ended) == Counter(task.id for pack in packs for task in pack)
        for pack in packs:
            mine = {task.id for task in pack}
            # One that runs and one ahead, of each pack before it.
            assert min(at for name, at in bench.ran.started if name in mine) <= 4.5

    _run(check)


def test_no_more_run_at_a_time_than_they_may() -> None:
    async def check(bench: Bench) -> None:
        shift, _ = bench.shift(concurrency=3)
        await bench.queue.submit_many("t", [1] * 10)
        for _ in range(5):
            await bench.queue.submit("t", 1)
        async with Running(shift):
            for _ in range(60):
                await bench.clock.sleep(0.1)
                assert len(bench.ran.started) - len(bench.ran.ended) <= 3
        assert len(bench.ran.ended) >= 10

    _run(check)


def test_a_pointer_whose_pack_comes_later_is_found_soon() -> None:
    """The submitter wrote its pointer, and was slow to write the pack."""

    async def check(bench: Bench) -> None:
        at = keyed_pack(type="t", key="k")
        task = await bench.queue.submit("t", 1, key="k")
        body = bench.bucket.objects[LAYOUT.pack(at)].body
        bench.bucket.remove(LAYOUT.pack(at))
        shift, _ = bench.shift()
        async with Running(shift):
            await bench.clock.sleep(20)
            assert bench.pointers(at)
            bench.bucket.write(LAYOUT.pack(at), body, {})
            await bench.clock.sleep(25)
            assert len(bench.ran.starts(task)) == 1
            assert bench.pointers(at) == []

    _run(check)


def test_a_pointer_to_nothing_is_removed_when_its_pack_can_no_longer_come() -> None:
    async def check(bench: Bench) -> None:
        at = keyed_pack(type="t", key="k")
        key = LAYOUT.pointer(at, due_ms=int(bench.world.now() * 1000), nonce="0" * 15)
        bench.bucket.write(key, encode(Pointer(submitted_ms=0)), {})
        shift, _ = bench.shift()
        async with Running(shift):
            await bench.clock.sleep(300)
            assert bench.pointers(at) == [key]
            gets = bench.meter.requests(kind=Kind.GET)
            # It was followed more and more rarely.
            assert gets <= 20
            await bench.clock.sleep(400)
            assert bench.pointers(at) == []

    _run(check)


def test_a_pointer_to_nothing_does_not_hide_the_next_submit_of_its_key() -> None:
    """A submitter has died between its pointer and its pack, and the user submits again."""

    async def check(bench: Bench) -> None:
        at = keyed_pack(type="t", key="k")
        left = LAYOUT.pointer(at, due_ms=int(bench.world.now() * 1000), nonce="0" * 15)
        bench.bucket.write(left, encode(Pointer(submitted_ms=0)), {})
        shift, _ = bench.shift()
        async with Running(shift):
            await bench.clock.sleep(100)
            task = await bench.queue.submit("t", 1, key="k")
            await bench.clock.sleep(15)
            assert len(bench.ran.starts(task)) == 1

    _run(check)


def test_a_pointer_of_a_duplicate_outlives_the_task_of_its_key() -> None:
    """It may be the pointer of a submit that is under way: it is removed when that cannot come."""

    async def check(bench: Bench) -> None:
        at = keyed_pack(type="t", key="k")
        task = await bench.queue.submit("t", 1, key="k")
        other = LAYOUT.pointer(at, due_ms=int(bench.world.now() * 1000), nonce="0" * 15)
        bench.bucket.write(other, encode(Pointer(submitted_ms=0)), {})
        shift, _ = bench.shift()
        async with Running(shift):
            await bench.clock.sleep(60)
            assert len(bench.ran.starts(task)) == 1
            assert other in bench.pointers(at)
            await bench.clock.sleep(800)
            assert bench.pointers(at) == []
            assert len(bench.ran.starts(task)) == 1

    _run(check)


def test_types_without_a_handler_are_left_and_in_nobodys_way() -> None:
    async def check(bench: Bench) -> None:
        for _ in range(1500):
            await bench.queue.submit("strange", 1)
        before = set(bench.bucket.objects)
        task = await bench.queue.submit("t", 1)
        shift, discovery = bench.shift()
        async with Running(shift):
            await bench.clock.sleep(5)
            assert len(bench.ran.starts(task)) == 1
            assert discovery.load().help_wanted == {"strange"}
        assert before <= set(bench.bucket.objects)
        assert not any(".ledger" in key and "strange" in key for key in bench.bucket.objects)

    _run(check)


def test_a_type_that_is_met_no_more_is_not_asked_help_for() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("strange", 1)
        shift, discovery = bench.shift()
        async with Running(shift):
            await bench.clock.sleep(5)
            assert discovery.load().help_wanted == {"strange"}
            await task.cancel()
            await bench.clock.sleep(80)
            assert discovery.load().help_wanted == frozenset()

    _run(check)


def test_a_retry_comes_when_it_is_due_without_a_list() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("fails")
        shift, discovery = bench.shift(polling=RARELY)
        async with Running(shift):
            await bench.clock.sleep(100)
        assert bench.ran.starts(task) == [
            pytest.approx(0, abs=0.5),
            pytest.approx(20, abs=0.5),
            pytest.approx(60, abs=0.5),
        ]
        assert bench.ledger(task).tasks[0].status is QueueTaskStatus.FAILED
        assert discovery.looks == 1

    _run(check)


def test_a_pack_of_a_dead_worker_is_taken_when_its_lease_ends_without_a_list() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", 1)
        await bench.claim(task, lease_seconds=40)
        await bench.clock.sleep(2)
        shift, discovery = bench.shift(polling=RARELY, guards=True)
        async with Running(shift):
            await bench.clock.sleep(60)
        assert bench.ran.starts(task) == [pytest.approx(40, abs=0.5)]
        assert bench.ledger(task).tasks[0].attempt == 2
        assert discovery.looks == 1

    _run(check)


def test_a_ledger_that_does_not_change_is_not_read_again() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", 1)
        await bench.claim(task, lease_seconds=500)
        shift, discovery = bench.shift()
        async with Running(shift):
            await bench.clock.sleep(10)
            gets = bench.meter.requests(kind=Kind.GET)
            await bench.clock.sleep(200)
            assert bench.meter.requests(kind=Kind.GET) == gets
            assert discovery.looks > 20

    _run(check)


def test_what_is_delayed_starts_when_it_is_due() -> None:
    async def check(bench: Bench) -> None:
        delays = (30.0, 75.0, 200.0)
        tasks = [await bench.queue.submit("t", 1, delay=delay) for delay in delays]
        keyed = await bench.queue.submit("t", 1, delay=100, key="k")
        shift, _ = bench.shift(polling=RARELY)
        async with Running(shift):
            await bench.clock.sleep(220)
        for task, delay in zip([*tasks, keyed], [*delays, 100.0], strict=True):
            (start,) = bench.ran.starts(task)
            assert delay <= start <= delay + 1

    _run(check)


def test_a_change_is_looked_at_at_once() -> None:
    async def check(bench: Bench) -> None:
        shift, discovery = bench.shift(polling=RARELY)
        async with Running(shift):
            await bench.clock.sleep(100)
            assert discovery.looks == 1
            task = await bench.queue.submit("t", 1)
            discovery.changed.set()
            await bench.clock.sleep(0.5)
            assert len(bench.ran.starts(task)) == 1

    _run(check)


@pytest.mark.parametrize(("seconds", "wants_help"), [(1, False), (10, True)])
def test_help_is_wanted_for_what_will_last_and_not_for_what_is_soon_done(
    seconds: int, wants_help: bool
) -> None:
    async def check(bench: Bench) -> None:
        for _ in range(2):
            await bench.queue.submit_many("t", [seconds] * 600)
        shift, discovery = bench.shift(concurrency=32)
        async with Running(shift):
            wanted: frozenset[str] = frozenset()
            for _ in range(8):
                await bench.clock.sleep(4)
                wanted = discovery.load().help_wanted
            assert len(bench.ran.started) < 1200
            assert wanted == (frozenset({"t"}) if wants_help else frozenset())

    _run(check)


def test_saturated_is_who_has_found_more_than_it_can_run_for_a_while() -> None:
    async def check(bench: Bench) -> None:
        for _ in range(4):
            await bench.queue.submit("t", 40)
        shift, discovery = bench.shift(concurrency=2)
        async with Running(shift):
            await bench.clock.sleep(5)
            assert discovery.load() == WorkerLoad()
            await bench.clock.sleep(10)
            assert discovery.load() == WorkerLoad(help_wanted=frozenset({"t"}))
            await bench.clock.sleep(20)
            assert discovery.load() == WorkerLoad(saturated=True, help_wanted=frozenset({"t"}))
            await bench.clock.sleep(10)
            # The last two run now, and nothing waits.
            assert discovery.load() == WorkerLoad()

    _run(check)


def test_who_looks_again_is_as_saturated_as_before() -> None:
    async def check(bench: Bench) -> None:
        for _ in range(80):
            await bench.queue.submit("t", 1.937)
        shift, discovery = bench.shift(concurrency=2)
        discovery.look_seconds = 1.0
        async with Running(shift):
            await bench.clock.sleep(35)
            looks = discovery.looks
            for _ in range(350):
                load = discovery.load()
                assert (load.saturated, load.help_wanted) == (True, frozenset({"t"}))
                await bench.clock.sleep(0.1)
            assert discovery.looks > looks, "what was found has become old, and it has looked"
            await bench.clock.sleep(15)
            # All have run, and nothing waits.
            load = discovery.load()
            assert (load.saturated, load.help_wanted) == (False, frozenset())

    _run(check)


def test_who_has_room_is_not_saturated() -> None:
    async def check(bench: Bench) -> None:
        for _ in range(4):
            await bench.queue.submit("t", 20)
        shift, discovery = bench.shift(concurrency=5)
        async with Running(shift):
            await bench.clock.sleep(15)
            assert not discovery.load().saturated

    _run(check)


def test_help_is_wanted_for_a_pack_that_is_too_much_for_one() -> None:
    async def check(bench: Bench) -> None:
        await bench.queue.submit_many("t", [5] * 100)
        shift, discovery = bench.shift(concurrency=2)
        async with Running(shift):
            await bench.clock.sleep(15)
            assert discovery.load().help_wanted == frozenset()
            await bench.clock.sleep(30)
            assert discovery.load().help_wanted == {"t"}

    _run(check)


def test_idle_time_is_counted_from_the_last_task() -> None:
    async def check(bench: Bench) -> None:
        await bench.queue.submit("t", 10)
        shift, discovery = bench.shift()
        async with Running(shift):
            await bench.clock.sleep(9)
            assert discovery.load().idle_seconds == 0
            await bench.clock.sleep(51)
            assert discovery.load().idle_seconds == pytest.approx(50, abs=1)

    _run(check)


def test_a_store_that_is_away_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", 1)
        shift, discovery = bench.shift()
        discovery.failures = 5
        async with Running(shift):
            await bench.clock.sleep(15)
            assert len(bench.ran.starts(task)) == 1

    with caplog.at_level(logging.WARNING):
        _run(check)
    assert caplog.text.count("failed to list the queue") == 1


def test_a_claim_whose_answer_is_lost_costs_no_attempt() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", 1)
        shift, _ = bench.shift()
        bench.store.loses = True
        async with Running(shift):
            await bench.clock.sleep(100)
            assert bench.ledger(task).tasks[0].status is QueueTaskStatus.CLAIMED
            assert bench.ran.starts(task) == []
            bench.store.loses = False
            await bench.clock.sleep(10)
            assert len(bench.ran.starts(task)) == 1
            (state,) = bench.ledger(task).tasks
            assert (state.status, state.attempt) == (QueueTaskStatus.SUCCEEDED, 1)

    _run(check)


def test_a_damaged_pack_is_left_alone_and_others_run(caplog: pytest.LogCaptureFixture) -> None:
    async def check(bench: Bench) -> None:
        bad = await bench.queue.submit("t", 1)
        good = await bench.queue.submit("t", 1)
        bench.bucket.write(LAYOUT.pack(task_at(bad.id)[0]), b"damaged", {})
        shift, _ = bench.shift(concurrency=1)
        async with Running(shift):
            await bench.clock.sleep(60)
            assert bench.ran.starts(bad) == []
            assert len(bench.ran.starts(good)) == 1
            requests = bench.meter.requests(label="claim")
            await bench.clock.sleep(300)
            # It is not tried again and again.
            assert bench.meter.requests(label="claim") == requests

    with caplog.at_level(logging.WARNING):
        _run(check)
    assert "skipped a pack" in caplog.text


def test_foreign_objects_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def check(bench: Bench) -> None:
        bench.bucket.write(f"{LAYOUT.tasks}000/readme", b"", {})
        shift, _ = bench.shift()
        async with Running(shift):
            await bench.clock.sleep(60)

    with caplog.at_level(logging.WARNING):
        _run(check)
    assert caplog.text.count("skipped an object that is not of this queue") == 1


def test_to_stop_lets_what_runs_end_and_starts_nothing_more() -> None:
    async def check(bench: Bench) -> None:
        tasks = await bench.queue.submit_many("t", [10] * 6)
        shift, discovery = bench.shift(concurrency=2)
        async with Running(shift) as running:
            await bench.clock.sleep(5)
            shift.stop(at_once=False)
            await running
            assert 10 <= bench.lived <= 13
        assert len(bench.ran.ended) == len(bench.ran.started) == 2
        statuses = Counter(task.status for task in bench.ledger(tasks[0]).tasks)
        assert statuses == {QueueTaskStatus.SUCCEEDED: 2, QueueTaskStatus.READY: 4}
        assert discovery.is_released

    _run(check)


def test_what_runs_too_long_after_a_stop_is_given_back() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", 500)
        shift, discovery = bench.shift(stop_seconds=20)
        async with Running(shift) as running:
            await bench.clock.sleep(5)
            shift.stop(at_once=False)
            await running
            assert 25 <= bench.lived <= 27
        assert bench.ran.interrupted == [task.id]
        (state,) = bench.ledger(task).tasks
        assert (state.status, state.attempt, state.given_back) == (QueueTaskStatus.READY, 1, 1)
        assert discovery.is_released

    _run(check)


def test_a_second_stop_gives_back_at_once() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", 500)
        shift, _ = bench.shift()
        async with Running(shift) as running:
            await bench.clock.sleep(5)
            shift.stop(at_once=False)
            await bench.clock.sleep(1)
            shift.stop(at_once=True)
            await running
            assert bench.lived <= 7
        assert bench.ledger(task).tasks[0].given_back == 1

    _run(check)


def test_a_stop_of_an_idle_worker_is_immediate() -> None:
    async def check(bench: Bench) -> None:
        shift, discovery = bench.shift(polling=RARELY)
        async with Running(shift) as running:
            await bench.clock.sleep(50)
            shift.stop(at_once=False)
            await running
            assert bench.lived == pytest.approx(50, abs=0.1)
        assert discovery.is_released

    _run(check)


def test_what_is_settled_is_archived_by_who_guards_it() -> None:
    async def check(bench: Bench) -> None:
        tasks = [await bench.queue.submit("t", 1) for _ in range(5)]
        shift, _ = bench.shift(guards=True)
        async with Running(shift):
            await bench.clock.sleep(290)
            assert all(bench.ledger(task).settled for task in tasks)
            gets = bench.meter.requests(label="monitor", kind=Kind.GET)
            await bench.clock.sleep(200)
            assert not [key for key in bench.bucket.objects if key.startswith(LAYOUT.tasks)]
            assert [(await task.view()).status for task in tasks] == ["succeeded"] * 5
            # This worker has settled them itself: none was read again.
            assert bench.meter.requests(label="monitor", kind=Kind.GET) == gets

    _run(check)


def test_who_guards_nothing_archives_nothing() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", 1)
        shift, _ = bench.shift(guards=False)
        async with Running(shift):
            await bench.clock.sleep(1500)
            assert bench.ledger(task).settled
            assert bench.meter.requests(label="monitor") == 0

    _run(check)


def test_a_pointer_that_was_lost_before_a_worker_came_is_written_when_it_begins() -> None:
    async def check(bench: Bench) -> None:
        task = await bench.queue.submit("t", 1, key="k")
        for key in bench.pointers(task_at(task.id)[0]):
            bench.bucket.remove(key)
        await bench.clock.sleep(60)
        shift, _ = bench.shift(guards=True)
        async with Running(shift):
            await bench.clock.sleep(15 + 10)
            assert len(bench.ran.starts(task)) == 1

    _run(check)


def test_a_pointer_that_is_lost_behind_a_backlog_is_written_at_the_next_look() -> None:
    async def check(bench: Bench) -> None:
        shift, _ = bench.shift(guards=True, concurrency=1)
        async with Running(shift):
            await bench.clock.sleep(20)
            busy = await bench.queue.submit("t", 100)
            await bench.clock.sleep(10)
            assert bench.ran.starts(busy)
            task = await bench.queue.submit("t", 1, key="k")
            await bench.clock.sleep(20)
            at, _ = task_at(task.id)
            for key in bench.pointers(at):
                bench.bucket.remove(key)
            await bench.clock.sleep(20)
            assert bench.pointers(at)
            await bench.clock.sleep(90)
            assert len(bench.ran.starts(task)) == 1
            # What this worker settles itself is not asked for again.
            before = bench.meter.requests(label="monitor")
            await bench.queue.submit("t", 1, key="another")
            await bench.clock.sleep(60)
            assert bench.meter.requests(label="monitor") == before

    _run(check)
