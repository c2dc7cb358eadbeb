"""Schedules: one task a tick, whoever dies; what is caught up with; and what users are told."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from penstock.kernel.errors import InvalidInput, ScheduleNotFound, StoreError
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.doorbell import ChangeSignal
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.inspection import run_monitor
from penstock.queue.schedules import KEPT_SECONDS, LISTED_SECONDS, Scheduler
from penstock.queue.settings import DiscoveryMode
from penstock.queue.worker import Worker, maintenance_tasks
from penstock.store.base import NO_METADATA, REPLACE, Object, ObjectStore, PutMode, Version, Wrapper
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.retrying import RetryingStore
from penstock.testing.virtual import World, simulate

MINUTELY = "* * * * *"
DAY = 86_400


class Stop(Exception):
    """The process dies here."""


class Tripwire(Wrapper):
    """A store that dies at one request, before or after it is done; or holds one up."""

    def __init__(self, inner: ObjectStore, *, dies_at: int = -1, after: bool = False) -> None:
        super().__init__(inner)
        self.requests = 0
        self.dies_at = dies_at
        self.after = after
        self.holds = ""
        """The beginning of the request that is held up: "put keyed/", say."""
        self.held = asyncio.Event()
        self.let_go = asyncio.Event()

    async def _trip(self, request: Callable[[], Awaitable[Version | Object | None]]) -> object:
        self.requests += 1
        dies = self.requests == self.dies_at
        if dies and not self.after:
            raise Stop
        answer = await request()
        if dies:
            raise Stop
        return answer

    async def _stall(self, request: str) -> None:
        if self.holds and request.replace("queues/q/", "").startswith(self.holds):
            self.held.set()
            await self.let_go.wait()

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        await self._stall(f"get {key}")
        answer = await self._trip(lambda: self.inner.get(key, unless=unless))
        assert answer is None or isinstance(answer, Object)
        return answer

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        await self._stall(f"put {key}")
        answer = await self._trip(lambda: self.inner.put(key, body, mode, metadata=metadata))
        return Version(str(answer))


@dataclass
class Bench:
    """A bucket with a queue in it, whoever works on it, and what has run."""

    world: World
    bucket: MemoryBucket
    ran: Counter[str]
    workers: int = 0

    def __post_init__(self) -> None:
        self.clock = self.world.clock()

    def store(self) -> ObjectStore:
        return MemoryStore(self.bucket, clock=self.clock)

    async def queue(self, store: ObjectStore | None = None) -> Queue:
        return await Queue.on(
            store or self.store(),
            name="q",
            entropy=self.world.entropy("q"),
            config=QueueConfig(shards=4),
        )

    async def scheduler(self, store: ObjectStore | None = None) -> Scheduler:
        access = (await self.queue(store)).access
        return Scheduler(access, ChangeSignal(access.store, access.layout.bell))

    async def minded(self, chore: Scheduler) -> None:
        """Mind the schedules until cancelled, or until the process dies."""
        while True:
            with suppress(StoreError):
                await self.clock.sleep(await chore.turn())
            await self.clock.sleep(0.01)

    @asynccontextmanager
    async def working(
        self, mode: DiscoveryMode = DiscoveryMode.SHARED, *, maintenance: bool = False
    ) -> AsyncIterator[None]:
        """A worker that counts what it runs; it leaves the chores to others unless told."""
        self.workers += 1
        worker = Worker(await self.queue(), mode=mode, name=f"w{self.workers}")

        @worker.handler("report")
        async def report(task: TaskContext) -> None:
            self.ran[task.id] += 1

        with pytest.MonkeyPatch.context() as patch:
            if not maintenance:
                patch.setattr("penstock.queue.worker.maintenance_tasks", lambda _: ())
            async with asyncio.TaskGroup() as group:
                group.create_task(worker.run(signals=False))
                yield
                worker.stop()

    async def minded_once(self) -> None:
        """One turn of a scheduler that has just come."""
        await (await self.scheduler()).turn()

    async def until_next_minute(self, seconds: float = 0.0) -> None:
        await self.clock.sleep(60 - self.world.now() % 60 + seconds)

    async def monitored(self) -> None:
        """One pass of a monitor, without chores."""
        access = (await self.queue()).access
        await run_monitor(access, tell=lambda _: None, stopping=asyncio.Event(), passes_max=1)


def play(act: Callable[[Bench], Awaitable[None]], *, seed: int = 1) -> None:
    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock(), date_resolution_seconds=1.0)
        await act(Bench(world, bucket, Counter()))

    simulate(main, seed=seed, seconds_max=10 * DAY)


def test_a_tick_is_submitted_in_time_with_what_was_defined() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        await bench.until_next_minute(20)
        added = await queue.schedules.add(
            "m", cron=MINUTELY, type="report", input={"n": 1}, priority=3, tags={"a": "b"}
        )
        chore = await bench.scheduler()
        assert await chore.turn() == pytest.approx(30)
        view = await queue.schedules.get("m")
        assert view.last_task == ""
        while not view.last_task:
            await bench.clock.sleep(min(5, await chore.turn()))
            view = await queue.schedules.get("m")
        assert bench.world.now() % 60 < 10
        task = await queue.get(view.last_task)
        assert (task.type, task.input, task.priority) == ("report", {"n": 1}, 3)
        assert view.last_at == added.next_at == bench.world.now() // 60 * 60
        assert task.tags == {"a": "b", "schedule": "m", "tick": "2025-01-01T00:02:00Z"}
        assert view.next_at == view.last_at + 60

    play(act)


def test_the_first_tick_is_strictly_after_the_creation() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        await bench.until_next_minute()
        assert bench.world.now() % 60 == 0
        view = await queue.schedules.add("m", cron=MINUTELY, type="report", catch_up="all")
        await bench.clock.sleep(5)
        await (await bench.scheduler()).turn()
        assert (await queue.schedules.get("m")).last_task == ""
        assert view.next_at is not None
        assert view.next_at > view.created_at

    play(act)


@pytest.mark.parametrize("seed", range(5))
def test_of_many_schedulers_that_die_on_a_bad_store_each_tick_has_one_task(seed: int) -> None:
    plan = FaultPlan(
        latency_seconds_max=0.5,
        throttled=0.02,
        lost_request=0.03,
        lost_answer=0.05,
        late_request=0.03,
        duplicate=0.05,
    )

    async def act(bench: Bench) -> None:
        chance = bench.world.entropy("deaths")
        queue = await bench.queue()
        await queue.schedules.add("m", cron=MINUTELY, type="report", catch_up="all")
        stores = []

        async def one(number: int) -> None:
            while True:
                faulty = FaultyStore(bench.store(), plan, entropy=bench.world.entropy(f"{number}"))
                stores.append(faulty)
                store = RetryingStore(faulty, entropy=bench.world.entropy(f"retries {number}"))
                with suppress(TimeoutError, StoreError):
                    async with asyncio.timeout(chance.uniform(1, 200)):
                        await bench.minded(await bench.scheduler(store))

        began = bench.world.now()
        async with bench.working(), asyncio.TaskGroup() as group:
            schedulers = [group.create_task(one(number)) for number in range(3)]
            await bench.clock.sleep(1830)
            for each in schedulers:
                each.cancel()
            for store in stores:
                await store.close()
            await bench.minded_once()
            ended = bench.world.now()
            await bench.clock.sleep(60)
        assert len(bench.ran) == ended // 60 - began // 60
        assert set(bench.ran.values()) == {1}

    play(act, seed=seed)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_scheduler_that_dies_at_any_request_leaves_one_task(after: bool) -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        reached = 0
        for dies_at in range(1, 20):
            name = f"s{dies_at}"
            await bench.until_next_minute(1)
            await queue.schedules.add(name, cron=MINUTELY, type="report")
            store = Tripwire(bench.store())
            chore = await bench.scheduler(store)
            await chore.turn()
            await bench.until_next_minute(1)
            store.requests, store.dies_at, store.after = 0, dies_at, after
            try:
                await chore.turn()
            except Stop:
                reached = dies_at
            await bench.minded_once()
            await queue.schedules.remove(name)
        # The control, the cell, the pointer, the pack, the cursor, and the cell again.
        assert reached >= 5
        async with bench.working():
            await bench.clock.sleep(120)
        assert len(bench.ran) == 19
        assert set(bench.ran.values()) == {1}

    play(act)


async def _settled_and_forgotten(bench: Bench, seconds: float) -> None:
    """Let what is submitted run, and its record leave for the archive."""
    async with bench.working():
        await bench.clock.sleep(120)
    await bench.clock.sleep(seconds)
    await bench.monitored()
    assert not [key for key in bench.bucket.objects if "/keyed/" in key]


@pytest.mark.parametrize("at", ["get control", "put ready/", "put keyed/"])
def test_who_was_stalled_cannot_submit_a_tick_again_after_its_key_is_forgotten(at: str) -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        await queue.schedules.add("m", cron=MINUTELY, type="report")
        stalled = Tripwire(bench.store())
        chore = await bench.scheduler(stalled)
        await chore.turn()
        await bench.until_next_minute(1)
        stalled.holds = at
        async with asyncio.TaskGroup() as group:
            group.create_task(chore.turn())
            await stalled.held.wait()
            await bench.minded_once()
            await queue.schedules.pause("m")
            await _settled_and_forgotten(bench, KEPT_SECONDS + 700)
            assert sum(bench.ran.values()) == 1
            stalled.let_go.set()
        async with bench.working():
            await bench.clock.sleep(1200)
        assert sum(bench.ran.values()) == 1

    play(act)


def test_what_was_submitted_by_one_who_died_is_remembered_longer_than_its_key() -> None:
    """The one who died had not moved the cursor, and nobody came for days."""

    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        await queue.schedules.add("w", cron="1 0 * * 3", type="report", catch_up="one")
        store = Tripwire(bench.store())
        store.holds = "put schedules/"
        chore = await bench.scheduler(store)
        async with asyncio.TaskGroup() as group:
            dying = group.create_task(bench.minded(chore))
            await store.held.wait()
            dying.cancel()
        await _settled_and_forgotten(bench, 3 * DAY)
        assert sum(bench.ran.values()) == 1
        assert (await queue.schedules.get("w")).last_task == ""
        await bench.minded_once()
        (task,) = bench.ran
        assert (await queue.schedules.get("w")).last_task == task
        async with bench.working():
            await bench.clock.sleep(120)
        assert sum(bench.ran.values()) == 1

    play(act)


@pytest.mark.parametrize(("catch_up", "tasks"), [("skip", 0), ("one", 1), ("all", 4)])
def test_after_an_outage_ticks_are_caught_up_with_as_was_asked(catch_up: str, tasks: int) -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        await queue.schedules.add("d", cron="@daily", type="report", catch_up=catch_up)
        await bench.clock.sleep(4.5 * DAY)
        await bench.minded_once()
        async with bench.working():
            await bench.clock.sleep(60)
        assert list(bench.ran.values()) == [1] * tasks

    play(act)


def test_more_ticks_than_fit_a_turn_are_all_submitted() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        await queue.schedules.add("m", cron=MINUTELY, type="report", catch_up="all")
        await bench.clock.sleep(250 * 60 + 30)
        chore = await bench.scheduler()
        for _ in range(3):
            assert await chore.turn() < 60
        async with bench.working():
            await bench.clock.sleep(120)
        assert len(bench.ran) == 250
        assert set(bench.ran.values()) == {1}

    play(act)


def test_a_paused_schedule_lets_its_ticks_pass() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        await queue.schedules.add("m", cron=MINUTELY, type="report", catch_up="all")
        paused = await queue.schedules.pause("m")
        assert (paused.is_paused, paused.next_at) == (True, None)
        chore = await bench.scheduler()
        async with asyncio.TaskGroup() as group:
            minding = group.create_task(bench.minded(chore))
            await bench.clock.sleep(600)
            assert (await queue.schedules.get("m")).last_at is None
            resumed = await queue.schedules.resume("m")
            assert resumed.next_at is not None
            await bench.clock.sleep(130)
            minding.cancel()
        view = await queue.schedules.get("m")
        async with bench.working():
            await bench.clock.sleep(60)
        assert len(bench.ran) == 2
        assert view.last_at == resumed.next_at + 60

    play(act)


def test_a_drained_queue_takes_no_ticks_until_it_is_resumed() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        await queue.schedules.add("m", cron=MINUTELY, type="report")
        await queue.drain()
        chore = await bench.scheduler()
        async with asyncio.TaskGroup() as group:
            minding = group.create_task(bench.minded(chore))
            await bench.clock.sleep(150)
            assert (await queue.schedules.get("m")).last_task == ""
            await queue.resume()
            await bench.clock.sleep(70)
            minding.cancel()
        assert (await queue.schedules.get("m")).last_task

    play(act)


def test_a_schedule_that_is_removed_and_added_again_begins_anew() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        chore = await bench.scheduler()
        await queue.schedules.add("m", cron=MINUTELY, type="report")
        async with bench.working(), asyncio.TaskGroup() as group:
            minding = group.create_task(bench.minded(chore))
            await bench.until_next_minute(30)
            await queue.schedules.remove("m")
            await bench.clock.sleep(300)
            assert len(bench.ran) == 1
            await queue.schedules.add("m", cron=MINUTELY, type="report")
            await bench.clock.sleep(90)
            minding.cancel()
        assert len(bench.ran) in (2, 3)

    play(act)


def test_a_change_whose_ringer_died_is_noticed_after_a_while() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        chore = await bench.scheduler()
        await chore.turn()
        await queue.schedules.add("m", cron=MINUTELY, type="report")
        await bench.store().delete(queue.access.layout.bell)
        async with asyncio.TaskGroup() as group:
            minding = group.create_task(bench.minded(chore))
            await bench.clock.sleep(LISTED_SECONDS + 150)
            minding.cancel()
        assert (await queue.schedules.get("m")).last_task

    play(act)


def test_what_is_idle_costs_a_get_in_half_a_minute_and_a_list_in_a_quarter_of_an_hour() -> None:
    async def act(bench: Bench) -> None:
        meter = Meter()
        chore = await bench.scheduler(MeteredStore(bench.store(), meter))
        meter.billed.clear()
        async with asyncio.TaskGroup() as group:
            minding = group.create_task(bench.minded(chore))
            await bench.clock.sleep(3600)
            minding.cancel()
        assert meter.requests(kind=Kind.GET, label="chores") <= 121
        assert meter.requests(kind=Kind.LIST) <= 5
        assert meter.requests(kind=Kind.PUT) == 0

    play(act)


def test_what_cannot_be_read_does_not_keep_others_from_their_ticks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        await queue.schedules.add("b", cron=MINUTELY, type="report")
        bench.bucket.write(queue.access.layout.schedule("a"), b"what?", {})
        bench.bucket.write(queue.access.layout.schedules + "~odd", b"what?", {})
        await bench.clock.sleep(90)
        await bench.minded_once()
        assert (await queue.schedules.get("b")).last_task

    with caplog.at_level(logging.WARNING):
        play(act)
    assert "failed to process the schedule 'a'" in caplog.text
    assert "~odd" in caplog.text


@pytest.mark.parametrize("mode", DiscoveryMode)
def test_workers_mind_the_schedules(mode: DiscoveryMode) -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        await queue.schedules.add("m", cron=MINUTELY, type="report")
        async with bench.working(mode, maintenance=True), bench.working(mode, maintenance=True):
            await bench.clock.sleep(400)
        assert len(bench.ran) in (5, 6, 7)
        assert set(bench.ran.values()) == {1}

    play(act)


def test_a_monitor_that_runs_alone_minds_the_schedules() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        stopping = asyncio.Event()
        await queue.schedules.add("m", cron=MINUTELY, type="report")
        async with asyncio.TaskGroup() as group:
            group.create_task(
                run_monitor(
                    queue.access,
                    tell=lambda _: None,
                    stopping=stopping,
                    maintenance=maintenance_tasks(queue.access),
                )
            )
            await bench.until_next_minute(2)
            first = await queue.schedules.get("m")
            await bench.clock.sleep(60)
            stopping.set()
        second = await queue.schedules.get("m")
        assert first.last_at is not None
        assert second.last_at == first.last_at + 60
        await bench.clock.sleep(60)
        await run_monitor(
            queue.access,
            tell=lambda _: None,
            stopping=asyncio.Event(),
            passes_max=1,
            maintenance=maintenance_tasks(queue.access),
        )
        assert (await queue.schedules.get("m")).last_at == second.last_at + 60

    play(act)


def test_what_goes_wrong_in_a_monitor_with_chores_is_raised_as_it_is() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()

        def tell(_: object) -> None:
            raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            await run_monitor(
                queue.access,
                tell=tell,
                stopping=asyncio.Event(),
                maintenance=maintenance_tasks(queue.access),
            )

    play(act)


def test_a_second_definition_is_refused_with_the_difference_or_replaces_the_first() -> None:
    async def act(bench: Bench) -> None:
        mine, theirs = (await bench.queue()).schedules, (await bench.queue()).schedules
        first = await mine.add("n", cron="0 3 * * *", type="report", input=[1])
        await bench.clock.sleep(100)
        assert await theirs.add("n", cron="0  3 * * *", type="report", input=[1]) == first
        with pytest.raises(InvalidInput) as refused:
            await theirs.add("n", cron="0 4 * * *", type="report", input=[2])
        assert refused.value.message == (
            "There is a different schedule 'n': its cron is '0 3 * * *' and not '0 4 * * *'"
            " and its input is [1] and not [2]."
        )
        assert "replace" in refused.value.hint
        assert await mine.get("n") == first
        await mine.pause("n")
        second = await theirs.add("n", cron="0 4 * * *", type="report", input=[2], replace=True)
        assert second.is_paused
        assert second.created_at > first.created_at
        assert await mine.list() == (second,)

    play(act)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"cron": "61 * * * *"}, "61 as its minute"),
        ({"cron": "every day"}, "has 2 fields"),
        ({"cron": "0 0 30 2 *"}, "never comes"),
        ({"time_zone": "Europe/Pariss"}, "'Europe/Pariss' is not a time zone"),
        ({"type": "no/type"}, "'no/type' is not the name of a type"),
        ({"catch_up": "some"}, "'some' is not a catch-up policy"),
        ({"input": {1, 2}}, "is not JSON"),
        ({"input": "x" * 70_000}, "70,002 bytes"),
        ({"input": float("nan")}, "is not JSON"),
        ({"priority": 10}, "from -9 to 9"),
        ({"expires": 0}, "cannot expire"),
        ({"limit": "a b"}, "not the key of a limit"),
        ({"tags": {"tick": "x"}}, "The tag 'tick' is set"),
        ({"tags": {f"t{n}": "" for n in range(19)}}, "at most 18 tags"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    wrong: dict[str, object], sentence: str
) -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        given: dict[str, object] = {"cron": MINUTELY, "type": "report", **wrong}
        with pytest.raises(InvalidInput, match=re.escape(sentence)):
            await queue.schedules.add("n", **given)  # type: ignore[arg-type]  # wrong on purpose
        assert await queue.schedules.list() == ()

    play(act)


def test_the_zone_that_was_meant_is_named() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        with pytest.raises(InvalidInput) as refused:
            await queue.schedules.add("n", cron="@daily", type="t", time_zone="europe/paris")
        assert refused.value.hint == "Did you mean 'Europe/Paris'?"

    play(act)


def test_a_schedule_that_is_not_there_is_said_to_be() -> None:
    async def act(bench: Bench) -> None:
        schedules = (await bench.queue()).schedules
        await schedules.add("nightly", cron="@daily", type="report")
        for ask in (schedules.get, schedules.pause, schedules.resume, schedules.remove):
            with pytest.raises(ScheduleNotFound, match="no schedule 'nightlt'") as missing:
                await ask("nightlt")
            assert missing.value.hint == "Did you mean 'nightly'?"
        with pytest.raises(InvalidInput, match="not the name of a schedule"):
            await schedules.get("no/name")

    play(act)


def test_a_schedule_is_run_besides_its_ticks() -> None:
    async def act(bench: Bench) -> None:
        queue = await bench.queue()
        await queue.schedules.add("d", cron="@daily", type="report", input=7)
        tasks = [await queue.schedules.run("d") for _ in range(2)]
        async with bench.working():
            await bench.clock.sleep(30)
        assert set(bench.ran) == set(tasks)
        task = await queue.get(tasks[0])
        assert (task.input, task.tags) == (7, {"schedule": "d"})
        assert (await queue.schedules.get("d")).last_task == ""

    play(act)
