"""A worker whose predecessor has provably ended takes what it held at once; others wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from penstock.queue.execution.handlers import TaskContext
from penstock.queue.inbox import WorkerLease
from penstock.queue.incarnation import Incarnation
from penstock.queue.ledger import ClaimLease, Ledger, QueueTaskState, QueueTaskStatus, fresh
from penstock.queue.limits import LimitDefinition, LimitRequest, LimitState, apply_request
from penstock.queue.settings import DiscoveryMode, WorkerSettings
from penstock.queue.shards.registry import Registration
from penstock.queue.worker import Worker, lock_files
from penstock.store.time import Interval
from penstock.testing.virtual import World, simulate
from tests.unit.queue.test_peers_failures import Place

HOUR = 3600.0
LONG = WorkerSettings(
    lease_ttl_secs=HOUR,
    lease_renew_interval_secs=HOUR / 3,
    task_lease_seconds=HOUR,
    lease_duration_secs=HOUR,
    lease_renewal_interval_secs=HOUR / 3,
)
"""Leases so long that nothing is taken over because one has ended."""


@dataclass
class Lock:
    """The lock of one process."""

    incarnation: str
    is_free: bool = False
    is_released: bool = False
    descriptor: None = None

    def refresh(self) -> None:
        pass

    def release(self) -> None:
        self.is_released = True


@dataclass
class Host:
    """The locks of one machine."""

    locks: list[Lock] = field(default_factory=list)

    def acquire(self) -> Lock:
        self.locks.append(Lock(f"i{len(self.locks)}"))
        return self.locks[-1]

    def ended(self) -> frozenset[str]:
        return frozenset(lock.incarnation for lock in self.locks if lock.is_free)


class Restart:
    """A worker that dies with a task, and others that follow it."""

    def __init__(self, place: Place) -> None:
        self.bench = place.bench
        self.host = Host()
        self.begun: list[int] = []

    async def worker(self, host: Host | None = None) -> Worker:
        queue = await self.bench.queue()
        queue.locks = host or self.host
        worker = self.bench.worker(queue, settings=LONG)
        worker.call("same")

        async def work(task: TaskContext) -> int:
            self.begun.append(task.attempt)
            if task.attempt == 1 and task.input == "hang":
                await self.bench.clock.sleep(10 * HOUR)
            return task.attempt

        worker.handler("work")(work)
        return worker


def _try(check: Callable[[Restart], Awaitable[None]], mode: DiscoveryMode) -> None:
    async def main(world: World) -> None:
        await check(Restart(Place(world, mode)))

    for seed in range(2):
        simulate(main, seed=seed)


@pytest.mark.parametrize("mode", DiscoveryMode)
def test_the_successor_of_one_that_was_killed_takes_all_it_held(mode: DiscoveryMode) -> None:
    """Shards, inbox, claims, and the only permit of a limit; with leases of an hour."""

    async def check(restart: Restart) -> None:
        bench = restart.bench
        queue = await bench.queue()
        await queue.limits.set("gpu", concurrency=1)
        first = await restart.worker()
        async with bench.crew(first) as crew:
            held = await queue.submit("work", "hang", limit="gpu")
            await bench.until(lambda: restart.begun, what="it runs")
            waiting = await queue.submit("work", limit="gpu")
            await crew.kill(first)
            restart.host.locks[0].is_free = True
            crew.start(await restart.worker())
            assert await waiting.result(timeout=60) == 1
            assert await held.result(timeout=60) == 2
        assert restart.host.locks[1].is_released, "who ends in order leaves no proof"

    _try(check, mode)


@pytest.mark.parametrize("mode", [DiscoveryMode.LEASED, DiscoveryMode.SHARED])
@pytest.mark.parametrize("elsewhere", [True, False], ids=["another machine", "a child lives"])
def test_without_the_proof_the_lease_decides(mode: DiscoveryMode, elsewhere: bool) -> None:
    async def check(restart: Restart) -> None:
        bench = restart.bench
        queue = await bench.queue()
        first = await restart.worker()
        async with bench.crew(first) as crew:
            held = await queue.submit("work", "hang")
            await bench.until(lambda: restart.begun, what="it runs")
            await crew.kill(first)
            # Its name is the same, and all that can be seen of it but the lock.
            restart.host.locks[0].is_free = elsewhere
            crew.start(await restart.worker(Host() if elsewhere else None))
            await bench.clock.sleep(HOUR / 2)
            assert restart.begun == [1]
            if not elsewhere:
                # The child has ended too: it is seen soon.
                restart.host.locks[0].is_free = True
                assert await held.result(timeout=60) == 2

    _try(check, mode)


def test_a_ledger_shows_the_leases_of_those_that_have_ended_as_over() -> None:
    gone = Incarnation("me", lambda: frozenset({"gone", "me", ""}))
    assert gone.refresh()
    assert not gone.refresh(), "nothing more"
    leases = {
        "a": ClaimLease("w", 9000, incarnation="gone"),
        "b": ClaimLease("w", 9000, incarnation="me"),
        "c": ClaimLease("w", 9000),
    }
    ledger = Ledger(pack_version="v", born="b", tasks=(), leases=leases)
    ends = {name: lease.expires_ms for name, lease in gone.seen(ledger).leases.items()}
    assert ends == {"a": 0, "b": 9000, "c": 9000}
    plain = fresh(pack_version="v", born="b", count=1)
    assert gone.seen(plain) is plain


def test_a_suspect_that_was_lost_alone_keeps_its_lease_as_the_pause() -> None:
    """Its loss counts; what ends every worker would use up its attempts as fast as they start."""
    gone = Incarnation("me", lambda: frozenset({"gone"}))
    gone.refresh()

    def end(*, window_max: int = 0, window: int = 1, exclusive: bool = False) -> int:
        lease = ClaimLease("w", 9000, window=window, exclusive=exclusive, incarnation="gone")
        task = QueueTaskState(
            status=QueueTaskStatus.CLAIMED, attempt=2, claim="a", window_max=window_max
        )
        ledger = Ledger(pack_version="v", born="b", tasks=(task,), leases={"a": lease})
        return gone.seen(ledger).leases["a"].expires_ms

    assert end(window_max=1) == 9000
    assert end() == 0, "a first loss"
    assert end(window_max=4, window=4) == 0, "in company, and not counted"
    assert end(window_max=1, exclusive=True) == 0, "the last one"


@pytest.mark.parametrize("mode", DiscoveryMode)
def test_what_ends_every_worker_does_so_a_lease_apart(mode: DiscoveryMode) -> None:
    """Each is followed at once; neighbours start with the first successor, and none fails."""

    async def main(world: World) -> None:
        bench, host = Place(world, mode).bench, Host()
        begun: list[tuple[object, float]] = []
        crashed = asyncio.Event()

        async def worker() -> Worker:
            queue = await bench.queue()
            queue.locks = host
            made = bench.worker(queue, settings=WorkerSettings())

            @made.handler("work")
            async def work(task: TaskContext) -> None:
                begun.append((task.input, world.now()))
                if task.input == "poison":
                    crashed.set()
                    await bench.clock.sleep(10 * HOUR)

            return made

        queue, began = await bench.queue(), world.now()
        tasks = await queue.submit_many("work", ["poison", *range(20)])
        running = await worker()
        async with bench.crew(running) as crew:
            while not (view := await queue.get(tasks[0].id)).is_settled:
                with suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await crashed.wait()
                if crashed.is_set():
                    crashed.clear()
                    await crew.kill(running)
                    host.locks[-1].is_free = True
                    running = await worker()
                    crew.start(running)
            views = [await queue.get(task.id) for task in tasks]
        assert [each.status for each in views] == ["failed"] + ["succeeded"] * 20
        assert view.error == "LeaseExpired"
        deaths = [at for what, at in begun if what == "poison"]
        pauses = [later - earlier for earlier, later in pairwise(deaths)]
        assert sum(pause > 20 for pause in pauses) == 2, "between those of its attempts that count"
        assert world.now() - began < 150

    simulate(main, seed=1)


def test_tokens_of_one_that_has_ended_count_as_used_by_now_and_no_later() -> None:
    """A rate of one a second and a burst of two, of which the dead one had taken both."""
    state = LimitState(definition=LimitDefinition(rate=1, burst=2))
    state = apply_request(
        state, LimitRequest(worker="dead", wants=2, incarnation=Incarnation("x")), _at(1000)
    )
    assert state.shares["dead"].tokens == 2
    mine = Incarnation("y", lambda: frozenset({"x"}))
    ask = LimitRequest(worker="new", wants=2, incarnation=mine)
    assert apply_request(state, ask, _at(1005)).shares.keys() == {"dead"}
    mine.refresh()
    after = apply_request(state, ask, _at(1005))
    assert not after.shares, "they may have been used just now"
    assert after.full_ms == 1_007_000
    assert apply_request(after, ask, _at(1007)).shares["new"].tokens == 2


def _at(second: float) -> Interval:
    return Interval(second, second)


def test_documents_of_an_earlier_release_name_no_incarnation() -> None:
    known = Incarnation("me", lambda: frozenset({""}))
    known.refresh()
    lease = WorkerLease(holder="h", expires_ms=1, seconds=1.0, since_ms=0)
    for document in (lease, ClaimLease("w", 1), Registration.__struct_defaults__[-1]):
        named = document if isinstance(document, str) else document.incarnation
        assert not known.is_ended(named)


@pytest.mark.parametrize(
    ("url", "folder", "is_there"),
    [
        ("s3://bucket", None, True),
        ("file:///x", "/run/locks", True),
        ("file:///x", "", False),
        ("memory://x", None, False),
        ("", None, False),
    ],
)
def test_lock_files_are_for_queues_that_others_can_open(
    url: str,
    folder: str | None,
    is_there: bool,
) -> None:
    assert (lock_files(url, folder) is not None) is is_there


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("mode", DiscoveryMode)
def test_without_a_lock_the_next_start_is_within_three_minutes(
    mode: DiscoveryMode, is_busy: bool
) -> None:
    """A lone worker of an hour is killed and started again, with the settings that workers have."""

    async def main(world: World) -> None:
        bench = Place(world, mode).bench
        begun: list[int] = []

        async def worker() -> Worker:
            queue = await bench.queue()
            queue.locks = None
            made = bench.worker(queue, settings=WorkerSettings())

            @made.handler("work")
            async def work(task: TaskContext) -> None:
                begun.append(task.input)
                await bench.clock.sleep(10 * HOUR if task.attempt == 1 and task.input == 1 else 0)

            return made

        first, queue = await worker(), await bench.queue()
        async with bench.crew(first) as crew:
            await bench.clock.sleep(HOUR)
            expected = [2]
            if is_busy:
                await queue.submit("work", 1)
                await bench.until(lambda: begun, what="it runs")
                expected = [1, 2]
            await crew.kill(first)
            killed, begun[:] = world.now(), []
            await queue.submit("work", 2)
            crew.start(await worker())
            while sorted(begun) != expected and world.now() < killed + 600:
                await bench.clock.sleep(0.5)
            assert world.now() - killed <= 180

    for seed in range(3):
        simulate(main, seed=seed)
