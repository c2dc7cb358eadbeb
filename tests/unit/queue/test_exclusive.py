"""When a worker makes way for a task that must run with nothing beside it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest

from penstock.kernel.document_format import encode
from penstock.kernel.entropy import seeded_entropy
from penstock.queue.client import Queue
from penstock.queue.discovery.scanner import PackCandidate
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.execution.worker_loop import (
    PATIENCE_SECONDS,
    PATIENCE_SECONDS_MAX,
    PHASE_SECONDS,
    ExclusiveMode,
)
from penstock.queue.ids import new_pack, task_at
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import QueueTaskState, fresh
from penstock.queue.pack_session import ListedPack
from penstock.queue.settings import DiscoveryMode
from penstock.store.base import CREATE, Version
from penstock.testing.queue_contract.bench import QUICK
from penstock.testing.virtual import World, simulate
from tests.unit.queue.test_peers_failures import Place

LAYOUT = QueueLayout("q")
ENTROPY = seeded_entropy("sights")


def _sight(version: str = "v1") -> PackCandidate:
    at = new_pack(type="t", count=1, submitted_ms=1, entropy=ENTROPY)
    return PackCandidate(at, ListedPack(Version("p"), 1.0, has_ledger=True), Version(version))


class Watched:
    """What waits on one worker, and a clock that is moved."""

    def __init__(self, *, delay: float = 0.0) -> None:
        self.instant = 1000.0
        self.exclusive = ExclusiveMode(self, delay=lambda: delay)  # type: ignore[arg-type]  # enough

    def monotonic(self) -> float:
        return self.instant

    def is_reserved(self) -> bool:
        return self.exclusive.is_reserved

    def next(self, *, is_empty: bool = False, is_idle: bool = False) -> PackCandidate | None:
        return self.exclusive.next(is_empty=is_empty, is_idle=is_idle)


def test_a_busy_worker_claims_nothing_until_it_is_empty() -> None:
    watched, sight = Watched(), _sight()
    assert watched.next() is None
    assert not watched.is_reserved()
    watched.exclusive.note(sight)
    assert watched.next() is None
    assert watched.is_reserved()
    assert watched.next(is_empty=True) == sight
    assert watched.is_reserved()
    assert watched.next(is_empty=True) is None, "one at a time"
    watched.exclusive.ended(sight.at)
    assert watched.next(is_empty=True) is None
    assert not watched.is_reserved()


def test_what_never_ends_costs_a_fifth_of_the_time_at_the_most() -> None:
    watched = Watched()
    watched.exclusive.note(_sight())
    reserved = 0
    seconds = int(5 * PATIENCE_SECONDS * (1 + 2 + 4 + 8 + 16))
    for _ in range(seconds):
        watched.next()
        reserved += watched.is_reserved()
        watched.instant += 1.0
    assert 0 < reserved <= seconds / 5
    # And whatever takes less than the longest patience is waited for.
    for _ in range(int(6 * PATIENCE_SECONDS_MAX)):
        watched.next()
        if watched.is_reserved():
            break
        watched.instant += 1.0
    watched.instant += PATIENCE_SECONDS_MAX - 1
    assert watched.next(is_empty=True) is not None


def test_many_that_wait_leave_half_of_the_time_to_the_others() -> None:
    watched = Watched()
    for _ in range(20):
        watched.exclusive.note(_sight())
    ran = 0
    while (sight := watched.next(is_empty=True)) is not None:
        ran += 1
        watched.instant += 10.0
        watched.exclusive.ended(sight.at)
    assert ran == PHASE_SECONDS / 10
    assert not watched.is_reserved()
    watched.instant += PHASE_SECONDS - 1
    assert watched.next(is_empty=True) is None
    # One who has nothing else to do does not wait.
    assert watched.next(is_empty=True, is_idle=True) is not None


def test_others_who_see_the_same_are_left_a_while_and_heeded() -> None:
    watched, sight = Watched(delay=20.0), _sight()
    watched.exclusive.note(sight)
    watched.instant += 19.0
    assert watched.next(is_empty=True) is None
    watched.exclusive.see([sight])
    assert sight.at in watched.exclusive
    watched.exclusive.see([replace(sight, ledger=Version("v2"))])
    assert sight.at not in watched.exclusive
    watched.instant += 2.0
    assert watched.next(is_empty=True) is None


def _try(check: Callable[[Place], Awaitable[None]], mode: DiscoveryMode) -> None:
    async def main(world: World) -> None:
        await check(Place(world, mode))

    for seed in range(2):
        simulate(main, seed=seed)


async def _lose(queue: Queue, suspect: str) -> None:
    """The first task of this pack was lost alone, and has one attempt of three left."""
    access = queue.access
    at, _ = task_at(suspect)
    head = await access.store.head(access.layout.pack(at))
    lost = fresh(pack_version=head.version, born=at.pack[:12], count=at.count)
    tasks = (QueueTaskState(attempt=2, window_max=1), *lost.tasks[1:])
    stored = msgspec.structs.replace(lost, tasks=tasks).stamped(writer="x", write="y")
    await access.store.put(access.layout.ledger(at), encode(stored), CREATE)


def test_its_end_is_written_at_once_whatever_else_its_pack_has() -> None:
    """A worker that is killed before would have lost it exclusively, for good."""

    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        returned: dict[str, float] = {}

        async def work(task: TaskContext) -> None:
            await bench.clock.sleep(1)
            returned[task.id] = place.world.now()

        settings = replace(QUICK, settle_seconds=8.0, task_lease_seconds=30.0)
        worker = bench.worker(await bench.queue(), concurrency=3, settings=settings)
        worker.handler("work", retry=Retry(attempts=3))(work)
        suspect, *others = await queue.submit_many("work", list(range(400)))
        await _lose(queue, suspect.id)
        for number in range(60):
            await queue.submit("work", number)
        async with bench.crew(worker):
            while (await queue.get(suspect.id)).status != "succeeded":
                await bench.clock.sleep(0.1)
            assert place.world.now() - returned[suspect.id] < 1
            assert len(returned) < len(others), "there is more of its pack"

    _try(check, DiscoveryMode.LEASED)


@pytest.mark.parametrize("mode", DiscoveryMode)
def test_it_runs_alone_behind_a_backlog_that_never_ends(mode: DiscoveryMode) -> None:
    async def check(place: Place) -> None:
        bench = place.bench
        queue = await bench.queue()
        running: set[str] = set()
        beside: dict[str, set[str]] = {}

        async def work(task: TaskContext) -> None:
            running.add(task.id)
            for each in running:
                beside.setdefault(each, set()).update(running - {each})
            await bench.clock.sleep(2)
            running.discard(task.id)

        worker = bench.worker(await bench.queue(), concurrency=3)
        worker.handler("work", retry=Retry(attempts=3))(work)
        suspects = [await queue.submit("work") for _ in range(2)]
        for suspect in suspects:
            await _lose(queue, suspect.id)
        backlog = [await queue.submit("work") for _ in range(30)]
        async with bench.crew(worker):
            for suspect in suspects:
                assert (await bench.ended(suspect)).status == "succeeded"
                assert beside[suspect.id] == set()
            for task in backlog:
                assert (await bench.ended(task)).status == "succeeded"
        assert any(len(each) == 2 for each in beside.values()), "the others run side by side"

    _try(check, mode)
