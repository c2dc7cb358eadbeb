"""Batches: one end and one task that comes then, whoever dies; how far they are; what is left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.kernel.errors import (
    BatchNotFound,
    InvalidInput,
    NotSettled,
    QueueDrained,
    StoreError,
    TaskNotFound,
    Unavailable,
)
from penstock.queue.batch_marks import KEPT_SECONDS, BatchView
from penstock.queue.batch_progress import (
    ENDED_SECONDS,
    OPEN_SECONDS,
    BatchFinisher,
    BatchMaintenance,
)
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.doorbell import ChangeSignal
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.inspection import run_monitor
from penstock.queue.settings import DiscoveryMode, Polling, WorkerSettings
from penstock.queue.submitter import NotAllSubmitted
from penstock.queue.worker import Worker, maintenance_tasks
from penstock.store.base import (
    NO_METADATA,
    REPLACE,
    Delimiter,
    Object,
    ObjectStore,
    Page,
    PutMode,
    Version,
    Wrapper,
)
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.retrying import RetryingStore
from penstock.testing.virtual import World, simulate

DAY = 86_400
QUICK = WorkerSettings(polling=Polling(min_seconds=0.2, max_seconds=0.5))


class Died(Exception):
    """The process is gone."""


class Mortal(Wrapper):
    """A store whose process dies at one request, before or after it is done; or stalls at one."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.requests = 0
        self.dies_at = -1
        self.after = False
        self.fails: Callable[[str], bool] = lambda _: False
        self.stalls = ""
        self.stalled = asyncio.Event()
        self.go_on = asyncio.Event()

    async def _ask(self, what: str, request: Callable[[], Awaitable[Any]]) -> Any:
        name = what.replace("queues/q/", "")
        if self.stalls and name.startswith(self.stalls):
            self.stalled.set()
            await self.go_on.wait()
        if self.fails(name):
            raise Unavailable("away")
        self.requests += 1
        if self.requests == self.dies_at and not self.after:
            raise Died
        answer = await request()
        if self.requests == self.dies_at:
            raise Died
        return answer

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        found: Object | None = await self._ask(
            f"get {key}", lambda: self.inner.get(key, unless=unless)
        )
        return found

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        version: Version = await self._ask(
            f"put {key}", lambda: self.inner.put(key, body, mode, metadata=metadata)
        )
        return version

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        await self._ask(f"delete {key}", lambda: self.inner.delete(key, version=version))

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = 1000,
        cursor: str | None = None,
    ) -> Page:
        page: Page = await self._ask(
            f"list {prefix}",
            lambda: self.inner.list(
                prefix, start_after=start_after, delimiter=delimiter, limit=limit, cursor=cursor
            ),
        )
        return page


@dataclass
class Bench:
    """A bucket with a queue in it, its workers, and what has run."""

    world: World
    bucket: MemoryBucket
    ran: Counter[str] = field(default_factory=Counter)
    thens: list[Any] = field(default_factory=list)
    workers: int = 0

    def __post_init__(self) -> None:
        self.clock = self.world.clock()

    def store(self) -> ObjectStore:
        return MemoryStore(self.bucket, clock=self.clock)

    async def queue(self, store: ObjectStore | None = None) -> Queue:
        config = QueueConfig(shards=4)
        entropy = self.world.entropy("q")
        return await Queue.on(store or self.store(), name="q", entropy=entropy, config=config)

    async def chore(self, store: ObjectStore | None = None) -> BatchMaintenance:
        access = (await self.queue(store)).access
        return BatchMaintenance(access, ChangeSignal(access.store, access.layout.bell))

    async def mind(self, seconds: float) -> None:
        """Somebody minds the batches for so long."""
        chore = await self.chore()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    await self.clock.sleep(await chore.turn())

    def worker(self, queue: Queue, mode: DiscoveryMode = DiscoveryMode.SHARED) -> Worker:
        self.workers += 1
        worker = Worker(queue, mode=mode, name=f"w{self.workers}", settings=QUICK)

        @worker.handler("work", retry=Retry(attempts=1))
        async def work(task: TaskContext) -> None:
            self.ran[task.id] += 1
            if task.input == "bad":
                raise ValueError(task.input)
            if isinstance(task.input, float):
                await self.clock.sleep(task.input)

        @worker.handler("zip")
        async def zip_(task: TaskContext) -> str:
            self.thens.append(task.input)
            return "zipped"

        return worker

    @asynccontextmanager
    async def working(
        self,
        *,
        store: ObjectStore | None = None,
        mode: DiscoveryMode = DiscoveryMode.SHARED,
        maintenance: bool = False,
    ) -> AsyncIterator[Worker]:
        """A worker, which leaves the chores to others unless told."""
        worker = self.worker(await self.queue(store), mode)
        with pytest.MonkeyPatch.context() as patch:
            if not maintenance:
                patch.setattr("penstock.queue.worker.maintenance_tasks", lambda _: ())
            async with asyncio.TaskGroup() as group:
                group.create_task(worker.run(signals=False))
                yield worker
                worker.stop()

    def keys(self, folder: str) -> list[str]:
        return [key for key in self.bucket.objects if key.startswith(f"queues/q/{folder}")]

    async def monitored(self) -> None:
        access = (await self.queue()).access
        await run_monitor(access, tell=lambda _: None, stopping=asyncio.Event(), passes_max=1)


def play(act: Callable[[Bench], Awaitable[None]], *, seed: int = 1) -> None:
    async def main(world: World) -> None:
        await act(Bench(world, MemoryBucket(world.clock(), date_resolution_seconds=1.0)))

    simulate(main, seed=seed, seconds_max=40 * DAY)


def ends(view: BatchView) -> tuple[int, int, int, int]:
    return view.total, view.succeeded, view.failed, view.cancelled


@pytest.mark.parametrize("mode", DiscoveryMode)
def test_a_small_batch_ends_quickly_and_then_comes_what_was_asked_for(mode: DiscoveryMode) -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        async with bench.working(mode=mode, maintenance=True):
            await bench.clock.sleep(10)
            began = bench.world.now()
            batch = await queue.batch("work", [1, "bad", 3], then=("zip", {"to": "x"}))
            assert batch.then_task is not None
            view = await batch.wait(timeout=60)
            assert bench.world.now() - began < 5
            assert ends(view) == (3, 2, 1, 0)
            assert await queue.result(batch.then_task, timeout=60) == "zipped"
        (told,) = bench.thens
        assert told == {
            "batch": batch.id,
            "total": 3,
            "succeeded": 2,
            "failed": 1,
            "cancelled": 0,
            "expired": 0,
            "lost": 0,
            "input": {"to": "x"},
        }
        assert view.then_task == batch.then_task
        assert not bench.keys("batches/open/")
        assert not bench.keys("batches/marks/")
        assert (await queue.get(next(iter(bench.ran)))).batch == batch.id

    play(act)


def test_an_open_batch_takes_tasks_until_its_block_ends() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        async with bench.working():
            async with queue.new_batch(then="zip") as batch:
                first = await batch.submit_many("work", [1, 2], priority=2, tags={"a": "b"})
                await bench.clock.sleep(30)
                open_view = await batch.progress()
                assert (open_view.status, *ends(open_view)) == ("open", 2, 2, 0, 0)
                await batch.submit("work", 3)
            assert ends(await batch.wait(timeout=60)) == (3, 3, 0, 0)
            await bench.clock.sleep(10)
        assert [each["total"] for each in bench.thens] == [3]
        assert (await queue.get(first[0])).tags == {"a": "b"}
        with pytest.raises(InvalidInput, match="takes no more tasks: it is sealed"):
            await batch.submit("work", 4)
        with pytest.raises(InvalidInput, match="started once"):
            async with batch:
                pass

    play(act)


def test_what_has_ended_before_the_batch_is_sealed_ends_it_when_it_is() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        async with bench.working():
            async with queue.new_batch(then="zip") as batch:
                await batch.submit_many("work", [1, 2])
                await bench.clock.sleep(60)
            began = bench.world.now()
            await batch.wait(timeout=60)
            assert bench.world.now() - began < 1

    play(act)


def test_an_empty_batch_ends_at_once() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        batch = await queue.batch("work", [], then="zip")
        view = await batch.wait(timeout=1)
        assert (view.status, view.total) == ("ended", 0)
        async with bench.working():
            await bench.clock.sleep(10)
        assert [each["total"] for each in bench.thens] == [0]

    play(act)


def test_a_batch_of_many_packs_ends_when_the_last_is_settled() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        async with queue.new_batch(then="zip") as batch:
            for number in range(60):
                await batch.submit("work", number)
        async with bench.working(maintenance=True), bench.working(maintenance=True):
            view = await batch.wait(timeout=300)
            await bench.clock.sleep(30)
        assert ends(view) == (60, 60, 0, 0)
        assert len(bench.thens) == 1

    play(act)


def test_progress_tells_what_waits_runs_and_has_ended() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        batch = await queue.batch("work", [1, 2, 100.0])
        view = await batch.progress()
        assert (view.status, view.total, view.ready, view.running) == ("sealed", 3, 3, 0)
        async with bench.working():
            await bench.clock.sleep(40)
            view = await queue.batches.get(batch.id).progress()
            assert (view.total, view.ready, view.running, view.succeeded) == (3, 0, 1, 2)
            assert view.settled == 2
            assert not view.is_ended
            with pytest.raises(NotSettled, match="has not ended in 5 s"):
                await batch.wait(timeout=5)
            await batch.wait(timeout=100)
        view = await batch.progress()
        assert (view.status, view.settled, view.then_task) == ("ended", 3, None)
        assert [each.id for each in await queue.batches.list()] == [batch.id]

    play(act)


def test_what_is_cancelled_counts_as_ended() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        batch = await queue.batch("work", [1, 2], delay=3600)
        async with queue.new_batch() as other:
            task = await other.submit("work", 1, delay=3600)
        (pack,) = [each for each in bench.keys("ready/") if "~2~" in each]
        assert pack
        await queue.cancel(task)
        await bench.mind(200)
        assert ends(await other.progress()) == (1, 0, 0, 1)
        assert (await other.progress()).is_ended
        assert not (await batch.progress()).is_ended

    play(act)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_whoever_dies_at_any_request_of_the_end_leaves_one_task_that_comes_then(
    after: bool,
) -> None:
    async def act(bench: Bench) -> None:
        queue, mortal = await bench.queue(), Mortal(bench.store())
        reached = 0
        async with bench.working() as worker:
            for dies_at in range(1, 14):
                async with queue.new_batch(then="zip") as batch:
                    await batch.submit_many("work", [dies_at])
                    await bench.clock.sleep(20)
                    # Sealed by somebody who cannot try to end it.
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(BatchFinisher, "try_to_end", _nothing)
                        await batch.seal()
                    dying = BatchFinisher((await bench.queue(mortal)).access)
                    mortal.requests, mortal.dies_at, mortal.after = 0, dies_at, after
                    try:
                        await dying.try_to_end(batch.id, dying.cell(batch.id))
                    except Died:
                        reached = dies_at
                    mortal.dies_at = -1
                await bench.mind(60)
                assert (await batch.progress()).is_ended
                assert not bench.keys("batches/open/")
            await bench.clock.sleep(30)
            assert worker.types
        # Open object, marks, record, pointer, pack, the open object, marks again, a mark.
        assert reached >= 8
        assert sorted(Counter(each["batch"] for each in bench.thens).values()) == [1] * 13

    play(act)


async def _nothing(*_: object) -> None:
    """Somebody who dies before the first request."""


def test_a_worker_that_dies_before_it_can_mark_a_pack_does_not_keep_the_batch_from_its_end() -> (
    None
):
    async def act(bench: Bench) -> None:
        mortal = Mortal(bench.store())
        mortal.fails = lambda request: "batches/marks" in request
        queue = await bench.queue()
        batch = await queue.batch("work", [1, 2], then="zip")
        async with bench.working(store=mortal):
            await bench.clock.sleep(30)
            assert sum(bench.ran.values()) == 2
            assert not bench.keys("batches/marks/")
            assert (await batch.progress()).succeeded == 2
            await bench.mind(200)
            assert (await batch.progress()).is_ended
            await bench.clock.sleep(30)
        assert len(bench.thens) == 1

    play(act)


def test_no_settled_pack_leaves_for_the_archive_without_a_mark() -> None:
    async def act(bench: Bench) -> None:
        mortal = Mortal(bench.store())
        mortal.fails = lambda request: "batches/marks" in request
        queue = await bench.queue()
        async with queue.new_batch() as batch:
            await batch.submit_many("work", [1, "bad"])
            async with bench.working(store=mortal):
                await bench.clock.sleep(30)
            await bench.clock.sleep(700)
            await bench.monitored()
            assert not bench.keys("tasks/")
            assert len(bench.keys("batches/marks/")) == 1
        assert ends(await batch.wait(timeout=1)) == (2, 1, 1, 0)

    play(act)


def test_a_mark_is_found_in_the_archive_if_need_be_and_what_has_no_record_is_lost() -> None:
    async def act(bench: Bench) -> None:
        mortal = Mortal(bench.store())
        mortal.fails = lambda request: "batches/marks" in request
        queue = await bench.queue()
        async with queue.new_batch(then="zip") as batch:
            await batch.submit_many("work", [1, 2])
            await batch.submit("work", 3, delay=9000)
        async with bench.working(store=mortal):
            await bench.clock.sleep(30)
        await bench.clock.sleep(700)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.queue.maintenance.mark_before_archiving", _nothing)
            await bench.monitored()
        assert not bench.keys("tasks/")
        (gone,) = bench.keys("ready/")
        del bench.bucket.objects[gone]
        await bench.mind(200)
        view = await batch.progress()
        assert (*ends(view), view.lost) == (3, 2, 0, 0, 1)

    play(act)


async def _ended_and_forgotten(bench: Bench) -> None:
    """Let what came then run, and its record leave for the archive."""
    async with bench.working():
        await bench.clock.sleep(60)
    await bench.clock.sleep(KEPT_SECONDS + 700)
    await bench.monitored()
    assert not bench.keys("keyed/")


@pytest.mark.parametrize(
    "at",
    ["get batches/open", "list", "put batches/ended", "put ready/", "put keyed/"],
)
def test_who_was_stalled_cannot_submit_what_comes_then_again(at: str) -> None:
    async def act(bench: Bench) -> None:
        queue, stalled = await bench.queue(), Mortal(bench.store())
        batch = await queue.batch("work", [1], then="zip")
        mortal = Mortal(bench.store())
        mortal.fails = lambda request: "batches/marks" in request
        async with bench.working(store=mortal):
            await bench.clock.sleep(30)
        chore = await bench.chore()
        ender = BatchFinisher((await bench.queue(stalled)).access)
        (minded,) = await _missing(ender, batch.id)
        assert minded
        mark = await chore._missing_mark(batch.id, minded)
        assert mark is not None
        await queue.access.store.put(queue.access.layout.mark(mark), b"{}")
        stalled.stalls = at
        async with asyncio.TaskGroup() as group:
            late = group.create_task(_quietly(ender, batch.id))
            await bench.clock.sleep(1)
            await bench.mind(60)
            assert (await batch.progress()).is_ended
            await _ended_and_forgotten(bench)
            assert len(bench.thens) == 1
            stalled.go_on.set()
            await late
        async with bench.working(maintenance=True):
            await bench.clock.sleep(1200)
        assert len(bench.thens) == 1

    play(act)


async def _missing(ender: BatchFinisher, batch: str) -> list[Any]:
    return list((await ender.try_to_end(batch, ender.cell(batch))).missing)


async def _quietly(ender: BatchFinisher, batch: str) -> None:
    with suppress(StoreError):
        await ender.try_to_end(batch, ender.cell(batch))


def test_what_came_then_is_remembered_longer_than_its_key() -> None:
    """Who submitted it died before the open object was deleted, and nobody came for days."""

    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        mortal = Mortal(bench.store())
        mortal.fails = lambda request: request.startswith("delete batches/open")
        batch = await queue.batch("work", [1], then="zip")
        async with bench.working(store=mortal):
            await bench.clock.sleep(60)
        assert len(bench.thens) == 1
        await _ended_and_forgotten(bench)
        assert len(bench.keys("batches/open/")) == 1
        await bench.mind(300)
        async with bench.working():
            await bench.clock.sleep(60)
        assert len(bench.thens) == 1
        assert not bench.keys("batches/open/")
        assert (await batch.progress()).succeeded == 1

    play(act)


@pytest.mark.parametrize("seed", range(3))
def test_on_a_bad_store_with_workers_that_die_each_batch_ends_once(seed: int) -> None:
    plan = FaultPlan(
        latency_seconds_max=0.3,
        throttled=0.02,
        lost_request=0.02,
        lost_answer=0.04,
        late_request=0.02,
        duplicate=0.04,
    )

    async def act(bench: Bench) -> None:
        chance, faulty = bench.world.entropy("deaths"), list[FaultyStore]()

        def bad(name: str) -> ObjectStore:
            faulty.append(FaultyStore(bench.store(), plan, entropy=bench.world.entropy(name)))
            return RetryingStore(faulty[-1], entropy=bench.world.entropy(f"retries {name}"))

        async def one(number: int) -> None:
            while True:
                queue = await bench.queue()
                queue = await Queue.on(
                    bad(f"worker {number}"), name="q", entropy=queue.access.entropy
                )
                worker = bench.worker(queue)
                with suppress(TimeoutError):
                    async with asyncio.timeout(chance.uniform(5, 100)):
                        await worker.run(signals=False)

        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(one(number)) for number in range(3)]
            producer = await bench.queue(bad("producer"))
            batches = []
            for number in range(10):
                with suppress(StoreError, NotAllSubmitted):
                    batches.append(await producer.batch("work", [number] * 3, then="zip"))
                await bench.clock.sleep(chance.uniform(0, 60))
            for batch in batches:
                assert ends(await batch.wait(timeout=3000))[0] == 3
            await bench.clock.sleep(120)
            for each in workers:
                each.cancel()
            for store in faulty:
                await store.close()
        told = Counter(each["batch"] for each in bench.thens)
        assert {batch.id for batch in batches} <= set(told)
        queue = await bench.queue()
        settled = [await queue.get(str(batch.then_task)) for batch in batches]
        assert {view.status for view in settled} == {"succeeded"}

    play(act, seed=seed)


def test_a_batch_whose_producer_died_never_ends_is_shown_and_one_day_forgotten() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        batch = queue.new_batch(then="zip")
        await batch.__aenter__()
        await batch.submit("work", 1)
        await batch.__aexit__(Died, Died(), None)
        async with bench.working():
            await bench.clock.sleep(60)
        await bench.mind(3600)
        (view,) = await queue.batches.list()
        assert (view.id, view.status, view.succeeded) == (batch.id, "open", 1)
        await bench.clock.sleep(OPEN_SECONDS)
        await bench.mind(DAY + 3600)
        with pytest.raises(BatchNotFound):
            await batch.progress()
        with pytest.raises(BatchNotFound):
            await batch.seal()
        await bench.mind(DAY + 3600)
        assert not bench.keys("batches/")
        assert bench.thens == []

    play(act)


def test_a_batch_that_has_ended_is_forgotten_after_a_week() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        batch = await queue.batch("work", [])
        await bench.clock.sleep(ENDED_SECONDS - 3600)
        await bench.mind(1200)
        assert (await batch.progress()).is_ended
        await bench.clock.sleep(3600)
        await bench.mind(1200)
        with pytest.raises(BatchNotFound, match=f"There is no batch '{batch.id}'"):
            await batch.wait(timeout=60)
        assert not bench.keys("batches/")

    play(act)


def test_a_part_that_was_not_submitted_does_not_belong_to_the_batch() -> None:
    async def act(bench: Bench) -> None:
        mortal = Mortal(bench.store())
        queue = await bench.queue(mortal)
        refused = 0

        def fails_once(request: str) -> bool:
            nonlocal refused
            refused += request.startswith("put tasks/")
            return request.startswith("put tasks/") and refused == 2

        async with queue.new_batch(then="zip") as batch:
            mortal.fails = fails_once
            with pytest.raises(NotAllSubmitted):
                await batch.submit_many("work", list(range(1500)))
        async with bench.working():
            view = await batch.wait(timeout=600)
        assert view.total in (500, 1000)
        assert view.succeeded == view.total

    play(act)


def test_a_batch_asks_a_drained_queue_like_any_producer() -> None:
    async def act(bench: Bench) -> None:
        await (await bench.queue()).drain()
        queue = await bench.queue()
        with pytest.raises(QueueDrained):
            await queue.batch("work", [1])
        async with bench.working():
            await bench.clock.sleep(30)
        assert not bench.ran

    play(act)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda queue: queue.new_batch(then="no/type"), "not the name of a type"),
        (lambda queue: queue.new_batch(then=("zip", {1})), "that comes then is not JSON"),
        (lambda queue: queue.new_batch(then=("zip", "x" * 70_000)), "70,002 bytes"),
        (lambda queue: queue.batches.get("what"), "'what' is not the id of a batch"),
        (lambda queue: queue.new_batch().id, "is not open"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[Queue], object], sentence: str) -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        with pytest.raises(InvalidInput, match=sentence):
            make(queue)
        assert not bench.keys("batches/")

    play(act)


def test_what_is_not_there_is_said_to_be() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        nobody = queue.batches.get("0" * 24)
        for ask in (nobody.progress, nobody.wait):
            with pytest.raises(BatchNotFound):
                await ask()
        with pytest.raises(InvalidInput, match="takes no more tasks here"):
            await nobody.submit("work", 1)
        assert await queue.batches.list() == ()

    play(act)


def test_what_a_batch_costs() -> None:
    async def act(bench: Bench) -> None:
        meter = Meter()
        store = MeteredStore(bench.store(), meter)
        queue = await bench.queue(store)
        async with bench.working(store=store):
            batch = await queue.batch("work", [1, 2, 3], then="zip")
            await batch.wait(timeout=60)
            await bench.clock.sleep(10)
        puts = meter.requests(kind=Kind.PUT, label="batches")
        # Begin, seal, mark, end. The bell is rung by another name, and submits have theirs.
        assert puts == 4
        assert meter.requests(kind=Kind.PUT, label="chores") == 1
        assert meter.requests(kind=Kind.PUT, label="submit") == 3
        assert meter.requests(kind=Kind.LIST, label="batches") <= 4

    play(act)


def test_chores_share_the_bell() -> None:
    async def act(bench: Bench) -> None:
        meter = Meter()
        queue = await bench.queue(MeteredStore(bench.store(), meter))
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(
                run_monitor(
                    queue.access,
                    tell=lambda _: None,
                    stopping=stopping,
                    maintenance=maintenance_tasks(queue.access),
                )
            )
            await bench.clock.sleep(3600)
            stopping.set()
        assert 100 <= meter.requests(kind=Kind.GET, label="chores") <= 121

    play(act)


def test_an_object_that_is_not_ours_keeps_nothing_from_being_forgotten() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        await queue.batch("work", [])
        for folder in ("open", "ended"):
            bench.bucket.write(f"queues/q/batches/{folder}/{'0' * 24}.json", b"what?", {})
        await bench.clock.sleep(ENDED_SECONDS + 3600)
        await bench.mind(1200)
        assert [each.rsplit("/")[-1] for each in bench.keys("batches/")] == [f"{'0' * 24}.json"] * 2

    play(act)


def test_what_is_idle_costs_next_to_nothing() -> None:
    async def act(bench: Bench) -> None:
        meter = Meter()
        chore = await bench.chore(MeteredStore(bench.store(), meter))
        meter.billed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(7200):
                while True:
                    await bench.clock.sleep(await chore.turn())
        assert meter.requests(kind=Kind.GET) <= 2 * 121
        # Two more a quarter of an hour, and three on the day's first look for what is old.
        assert meter.requests(kind=Kind.LIST) <= 9 + 3
        assert meter.requests(kind=Kind.PUT) == 0

    play(act)


def test_a_task_that_never_came_is_not_there() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        batch = await queue.batch("work", [1], then="zip")
        assert batch.then_task is not None
        with pytest.raises(TaskNotFound):
            await queue.get(batch.then_task)

    play(act)
