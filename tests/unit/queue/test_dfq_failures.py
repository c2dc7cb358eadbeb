"""What goes wrong in DFQ, whose queue lives in a bucket too: each failure, in every mode.

Claims by create-if-absent, leases beside the task, and reclaims of stale leases are what both have;
here is what ours must not do with them, with either heartbeat. `test_peers_failures` has the same
failures at the level of a single claim.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest

from penstock.kernel.document_format import encode
from penstock.queue.attempt_outcomes import Succeeded
from penstock.queue.client import Queue, Task
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.ids import LEDGER, new_pack, task_at
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import TOUCH_SLACK_MS
from penstock.queue.pack import Pack
from penstock.queue.pack_session import ListedPack, PackSession
from penstock.queue.settings import DiscoveryMode, HeartbeatMode
from penstock.queue.transitions import LedgerClaim
from penstock.queue.worker import Worker
from penstock.store.base import CREATE
from penstock.testing.queue_contract.bench import QUICK, GateAccess, gate_of
from penstock.testing.virtual import World, simulate
from tests.unit.queue.test_peers_failures import TAKEOVER_SECONDS, Place

LEASE_SECONDS = QUICK.task_lease_seconds
FREE_SECONDS = LEASE_SECONDS + TOUCH_SLACK_MS / 1000 + 5
"""Within this a dead worker's task is taken by one that looks at it."""
RIVALS = 6

every_mode = pytest.mark.parametrize("mode", DiscoveryMode)
both_heartbeats = pytest.mark.parametrize("heartbeat", HeartbeatMode)

Check = Callable[[Place], Awaitable[None]]


def _try(check: Check, mode: DiscoveryMode, *, seeds: int = 2) -> None:
    async def main(world: World) -> None:
        await check(Place(world, mode))

    for seed in range(seeds):
        simulate(main, seed=seed)


async def _worker(
    place: Place, name: str, heartbeat: HeartbeatMode, *, concurrency: int = 8
) -> Worker:
    settings = replace(QUICK, heartbeat=heartbeat)
    queue = await place.bench.queue()
    return place.bench.worker(queue, name=name, settings=settings, concurrency=concurrency)


async def _held(queue: Queue, task: Task, *, seconds: float, touches: bool = False) -> PackSession:
    """The pack of a single task, claimed by somebody who is then not heard of."""
    at, _ = task_at(task.id)
    access = queue.access
    session = PackSession(access.store, access.layout, at, entropy=access.entropy)
    head = await access.store.head(access.layout.pack(at))
    touch_ms = int(seconds * 1000) + TOUCH_SLACK_MS if touches else 0
    claim = LedgerClaim("dead", "dead", int(seconds * 1000), 1, 3, touch_ms=touch_ms)
    assert await session.claim(claim, ListedPack(head.version, head.modified, has_ledger=False))
    return session


def _returns_attempt(worker: Worker, ran: Counter[str] | None = None) -> Worker:
    @worker.handler("work")
    async def work(task: TaskContext) -> int:
        if ran is not None:
            ran[task.id] += 1
        return task.attempt

    return worker


class Witness:
    """Notes every ledger that is deleted."""

    def __init__(self, place: Place) -> None:
        self.deleted: list[str] = []
        remove = place.bucket.remove

        def watched(key: str) -> None:
            if key.endswith(LEDGER):
                self.deleted.append(key)
            remove(key)

        place.bucket.remove = watched  # type: ignore[method-assign]  # only to watch it


@both_heartbeats
@every_mode
def test_two_workers_both_win_what_is_reclaimed(
    mode: DiscoveryMode, heartbeat: HeartbeatMode
) -> None:
    """A reclaim is a swap: nothing is deleted on the way, and of many one wins."""

    async def check(place: Place) -> None:
        witness = Witness(place)
        queue = await place.bench.queue()
        tasks = [await queue.submit("work") for _ in range(5)]
        for task in tasks:
            touches = heartbeat is HeartbeatMode.TOUCH
            await _held(queue, task, seconds=LEASE_SECONDS, touches=touches)
        ran: Counter[str] = Counter()
        rivals = [
            _returns_attempt(await _worker(place, f"r{n}", heartbeat), ran) for n in range(RIVALS)
        ]
        async with place.bench.crew(*rivals):
            assert [await task.result(timeout=60) for task in tasks] == [2] * 5
        assert ran == {task.id: 1 for task in tasks}
        assert witness.deleted == []

    _try(check, mode)


@both_heartbeats
@every_mode
def test_stale_leased_tasks_are_never_found_by_others(
    mode: DiscoveryMode, heartbeat: HeartbeatMode
) -> None:
    """A worker dies at work, whatever its heartbeat; one that has looked on takes over."""

    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        victim = await _worker(place, "victim", heartbeat)
        begun: list[str] = []

        @victim.handler("work")
        async def hang(task: TaskContext) -> None:
            begun.append(task.id)
            await bench.clock.sleep(1000)

        async with bench.crew(victim) as crew:
            tasks = [await queue.submit("work") for _ in range(3)]
            await bench.until(lambda: len(begun) == 3, what="they run")
            crew.start(_returns_attempt(await _worker(place, "heir", heartbeat)))
            await bench.clock.sleep(3 * LEASE_SECONDS)
            assert {(await task.view()).attempt for task in tasks} == {1}, "it is alive"
            await crew.kill(victim)
            for task in tasks:
                # In `leased`, the heir has to own the shard first.
                owning = TAKEOVER_SECONDS if mode is DiscoveryMode.LEASED else 0.0
                assert await task.result(timeout=owning + FREE_SECONDS) == 2

    _try(check, mode)


@both_heartbeats
def test_a_zombies_heartbeat_takes_the_lease_over(heartbeat: HeartbeatMode) -> None:
    async def check(place: Place) -> None:
        queue, other = await place.bench.queue(), await place.bench.queue()
        task = await queue.submit("work")
        touches = heartbeat is HeartbeatMode.TOUCH
        zombie = await _held(queue, task, seconds=3, touches=touches)
        await place.clock.sleep(8)
        access = other.access
        live = PackSession(access.store, access.layout, zombie.at, entropy=access.entropy)
        head = await access.store.head(access.layout.pack(zombie.at))
        seen = ListedPack(head.version, head.modified, has_ledger=True)
        assert await live.claim(LedgerClaim("live", "live", 30_000, 1, 3), seen)
        ledger = place.bucket.objects[access.layout.ledger(zombie.at)]

        assert await zombie.touch(frozenset({"dead"}), lease_ms=3_000) is None
        assert (await zombie.extend(["dead"], lease_ms=3_000)).expires_ms == {}
        after = place.bucket.objects[access.layout.ledger(zombie.at)]
        assert (after.body, after.metadata) == (ledger.body, ledger.metadata)
        assert after.metadata["holder"] == "live"

    _try(check, DiscoveryMode.SHARED, seeds=5)


@both_heartbeats
def test_a_zombies_ack_deletes_the_live_holders_task(heartbeat: HeartbeatMode) -> None:
    async def check(place: Place) -> None:
        queue, other = await place.bench.queue(), await place.bench.queue()
        task = await queue.submit("work")
        zombie = await _held(queue, task, seconds=3, touches=heartbeat is HeartbeatMode.TOUCH)
        await place.clock.sleep(8)
        access = other.access
        live = PackSession(access.store, access.layout, zombie.at, entropy=access.entropy)
        head = await access.store.head(access.layout.pack(zombie.at))
        seen = ListedPack(head.version, head.modified, has_ledger=True)
        assert await live.claim(LedgerClaim("live", "live", 30_000, 1, 3), seen)

        assert await zombie.settle({0: ("dead", Succeeded(msgspec.Raw(b'"dead"')))}) == {0}
        assert access.layout.pack(zombie.at) in place.bucket.objects, "the task is there"
        assert (await task.view()).status == "running"
        assert await live.settle({0: ("live", Succeeded(msgspec.Raw(b'"live"')))}) == frozenset()
        assert await task.result(timeout=1) == "live"

    _try(check, DiscoveryMode.SHARED, seeds=5)


@every_mode
def test_a_poll_of_10_finds_none_of_50_free_tasks_behind_250_leased_ones(
    mode: DiscoveryMode,
) -> None:
    """The leased ones are listed first: 500 objects before the first that is free."""

    async def check(place: Place) -> None:
        queue = await place.bench.queue()
        now_ms = int((await queue.access.store.now()).latest * 1000)
        store, layout = queue.access.store, queue.access.layout

        async def submit(slot: int) -> Task:
            at = new_pack(type="work", count=1, submitted_ms=now_ms, entropy=queue.access.entropy)
            at = replace(at, slot=slot)
            one = (msgspec.Raw(b"1"),)
            pack = Pack(type="work", nonce=at.pack, submitted_ms=now_ms, inputs=one)
            await store.put(layout.pack(at), encode(pack), CREATE)
            return Task(queue, at.task(0))

        async def held() -> None:
            await _held(queue, await submit(slot=16), seconds=3600)

        await asyncio.gather(*(held() for _ in range(250)))
        free = await asyncio.gather(*(submit(slot=17) for _ in range(50)))
        worker = _returns_attempt(await _worker(place, "w", HeartbeatMode.SWAP, concurrency=10))
        began = place.world.now()
        async with place.bench.crew(worker):
            for task in free:
                assert await task.result(timeout=60) == 1
        assert place.world.now() - began < 15

    _try(check, mode, seeds=1)


@every_mode
def test_there_are_no_attempts_no_backoff_and_no_dead_letters(mode: DiscoveryMode) -> None:
    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        worker = await _worker(place, "w", HeartbeatMode.SWAP)
        began: list[float] = []

        @worker.handler("work", retry=Retry(attempts=4, first_seconds=2, backoff=3, jitter=0))
        async def fail(task: TaskContext) -> None:
            began.append(place.world.now())
            assert task.attempt == len(began)
            raise OSError("again")

        async with bench.crew(worker):
            task = await queue.submit("work", {"n": 1})
            view = await bench.ended(task)
            again = await queue.replay(task.id)
        assert (view.status, view.error, view.attempt) == ("failed", "OSError", 4)
        pauses = [after - before for before, after in itertools.pairwise(began)]
        for pause, due in zip(pauses[:3], (2, 6, 18), strict=True):
            assert due <= pause < due + 2
        assert (await again.view()).input == {"n": 1}, "a dead letter has its input"

    _try(check, mode, seeds=1)


@both_heartbeats
@every_mode
def test_staleness_trusts_the_clocks_of_workers(
    mode: DiscoveryMode, heartbeat: HeartbeatMode
) -> None:
    """Every machine's clock is wrong by up to a day: nobody steals, and what is over is taken."""

    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        begun: Counter[str] = Counter()

        async def hold(task: TaskContext) -> int:
            begun[task.id] += 1
            await bench.clock.sleep(25 if task.attempt == 1 else 1)
            return task.attempt

        workers = [await _worker(place, f"w{n}", heartbeat) for n in range(RIVALS)]
        for worker in workers:
            worker.handler("work")(hold)
        async with bench.crew(*workers) as crew:
            live = await queue.submit("work")
            assert await live.result(timeout=60) == 1
            assert begun[live.id] == 1
            dead = await queue.submit("work")
            await bench.until(lambda: begun[dead.id], what="it runs")
            holder = (await queue.history(dead.id))[-1].who
            await crew.kill(next(w for w in workers if holder.startswith(w._name)))
            assert await dead.result(timeout=60) == 2

    _try(check, mode)


@both_heartbeats
@every_mode
def test_both_nodes_win_when_the_store_is_away(
    mode: DiscoveryMode, heartbeat: HeartbeatMode
) -> None:
    """There is no lease but the store's: without it nothing starts, and nothing is renewed."""

    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        ran: Counter[str] = Counter()
        workers = [await _worker(place, f"w{n}", heartbeat) for n in range(2)]

        async def work(task: TaskContext) -> int:
            ran[task.id] += 1
            await bench.clock.sleep(task.input)
            return task.attempt

        for worker in workers:
            worker.handler("work")(work)
        async with bench.crew(*workers):
            long = await queue.submit("work", 20)
            await bench.until(lambda: ran[long.id], what="it runs")
            for worker in workers:
                gate_of(worker.queue).access = GateAccess.CLOSED
            new = await queue.submit("work", 0)
            await bench.clock.sleep(60)
            assert ran == {long.id: 1}, "nobody runs what it could not claim"
            assert not (await long.view()).is_settled, "nor settles what it cannot write"
            for worker in workers:
                gate_of(worker.queue).access = GateAccess.OPEN
            assert await new.result(timeout=60) == 1
            # Its lease is long over: it still counts if nobody has taken it over meanwhile.
            assert await long.result(timeout=60) in (1, 2)
        assert ran[new.id] == 1

    _try(check, mode)


@every_mode
def test_a_crash_between_settling_and_deleting_runs_the_task_again(mode: DiscoveryMode) -> None:
    """It leaves a settled ledger beside its pack: whoever sees both deletes the pack."""

    async def check(place: Place) -> None:
        bench = place.bench
        queue, doomed = await bench.queue(), await bench.queue()
        task = await queue.submit("work")
        session = await _held(doomed, task, seconds=30)
        layout: QueueLayout = queue.access.layout
        keep = place.bucket.objects[layout.pack(session.at)]
        assert await session.settle({0: ("dead", Succeeded(msgspec.Raw(b'"done"')))}) == frozenset()
        assert layout.pack(session.at) not in place.bucket.objects, "as a rule it goes at once"
        place.bucket.write(layout.pack(session.at), keep.body, keep.metadata)
        place.bucket.objects[layout.pack(session.at)] = keep
        assert (await task.view()).status == "succeeded"
        ran: Counter[str] = Counter()
        worker = _returns_attempt(await _worker(place, "w", HeartbeatMode.SWAP), ran)
        async with bench.crew(worker):
            await bench.until(
                lambda: layout.pack(session.at) not in place.bucket.objects, what="it is deleted"
            )
            assert await task.result(timeout=1) == "done"
        assert ran == {}

    _try(check, mode)
