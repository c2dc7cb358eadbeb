"""The queue contract, in every mode, over every backend.

In memory it runs in virtual time: what waits for leases to end takes no time there. On the real
stores everything runs but those checks that wait for long; one of them, a takeover, does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import new_id, seeded_entropy, system_entropy
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.settings import DiscoveryMode
from penstock.store.base import ObjectStore
from penstock.store.file.backend import FileStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.retrying import RetryingStore
from penstock.store.s3.backend import S3Store
from penstock.store.s3.config import s3_config
from penstock.store.s3.local import LocalS3
from penstock.testing.queue_contract import (
    PATIENT_CHECKS,
    QUEUE_CHECKS,
    THREADED_CHECKS,
    Bench,
)
from penstock.testing.virtual import World, simulate
from tests.sizes import some

_HALF_REQUEST_SECONDS_MAX = 0.03
_SECONDS_MAX = 60.0

_LOOKS_AT_THE_LOOP = "a_stopped_worker_leaves_nothing_behind"
"""So it is alone on it."""
_TAKEN_OVER = "what_a_dead_worker_held_is_taken_over"
_ON_REAL_STORES = [
    name for name in QUEUE_CHECKS if name not in PATIENT_CHECKS or name == _TAKEN_OVER
]

OpenBackend = Callable[[], ObjectStore]

both_modes = pytest.mark.parametrize("mode", DiscoveryMode)


@pytest.mark.proof
@both_modes
@pytest.mark.parametrize("name", [name for name in QUEUE_CHECKS if name not in THREADED_CHECKS])
def test_in_memory_and_virtual_time(name: str, mode: DiscoveryMode) -> None:
    async def main(world: World) -> None:
        await QUEUE_CHECKS[name](_bench(world, mode))

    for seed in range(some(3)):
        simulate(main, seed=seed)


@pytest.mark.proof
@both_modes
def test_a_task_starts_soon_after_it_is_due(mode: DiscoveryMode) -> None:
    """Also where a worker has met it before, or has met its pointer before its pack."""

    async def main(world: World) -> None:
        bench = _bench(world, mode)
        queue, mine = await bench.queue(), await bench.queue()
        worker = bench.worker(mine)
        late_seconds: list[float] = []

        @worker.handler("due")
        async def due(task: TaskContext) -> None:
            at = (await queue.get(task.id)).due_at or task.input
            late_seconds.append(world.now() - at)

        async with bench.crew(worker):
            await bench.clock.sleep(5)
            for number in range(30):
                await bench.clock.sleep(1)
                await queue.submit("due", world.now())
                await queue.submit("due", world.now(), key=f"{number}")
                await queue.submit("due", world.now(), delay=1.5)
                await queue.submit("due", world.now(), key=f"{number} later", delay=1.5)
            await bench.until(lambda: len(late_seconds) == 120, what="all run")
        # Half a second to the next look, and a second by which a client may not know the time.
        assert max(late_seconds) < 2.5

    for seed in range(some(3)):
        simulate(main, seed=seed)


@both_modes
@pytest.mark.parametrize("name", sorted(THREADED_CHECKS))
def test_in_memory_with_threads(name: str, mode: DiscoveryMode) -> None:
    bucket = MemoryBucket(SystemClock())
    _exercise(name, {mode: lambda: MemoryStore(bucket, clock=SystemClock())})


@pytest.mark.parametrize("name", _ON_REAL_STORES)
def test_on_files(name: str, tmp_path: Path) -> None:
    def opening(mode: DiscoveryMode) -> OpenBackend:
        folder = tmp_path / mode
        folder.mkdir()
        return lambda: FileStore(folder, clock=SystemClock(), entropy=system_entropy(), fsync=False)

    _exercise(name, {mode: opening(mode) for mode in DiscoveryMode})


@pytest.mark.parametrize("name", _ON_REAL_STORES)
def test_on_s3(name: str, local_s3: LocalS3) -> None:
    bucket, _, options = local_s3.url.partition("?")

    def opening() -> OpenBackend:
        url = f"{bucket}/{new_id(system_entropy())}?{options}"
        config = s3_config(url, environment={}, credentials=local_s3.credentials)
        return lambda: S3Store(config, clock=SystemClock())

    _exercise(name, {mode: opening() for mode in DiscoveryMode})


def _bench(world: World, mode: DiscoveryMode) -> Bench:
    """A bucket that is dated like S3's, and requests that take as long as they please."""
    bucket = MemoryBucket(world.clock(), date_resolution_seconds=1.0)
    clock = world.clock()

    async def delay() -> None:
        await clock.sleep(world.entropy("latency").uniform(0, _HALF_REQUEST_SECONDS_MAX))

    async def open_client() -> ObjectStore:
        store = MemoryStore(bucket, clock=clock, delay=delay)
        return RetryingStore(store, entropy=world.entropy("retries"))

    return Bench(open_client, mode, world.entropy("bench"), clock)


def _exercise(name: str, backends: Mapping[DiscoveryMode, OpenBackend]) -> None:
    """Run a check in real time, in all modes at once: most of it is waiting."""
    at_once = asyncio.Semaphore(1 if name == _LOOKS_AT_THE_LOOP else len(DiscoveryMode))

    async def check(mode: DiscoveryMode) -> None:
        async with at_once, asyncio.timeout(_SECONDS_MAX):
            await _check(name, mode, backends[mode])

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for mode in backends:
                group.create_task(check(mode))

    asyncio.run(main())


async def _check(name: str, mode: DiscoveryMode, open_backend: OpenBackend) -> None:
    """One check in one mode; closes whatever it has opened."""
    entropy = seeded_entropy(f"{name} {mode}")
    opened: list[ObjectStore] = []

    async def open_client() -> ObjectStore:
        opened.append(RetryingStore(open_backend(), entropy=entropy))
        return opened[-1]

    try:
        await QUEUE_CHECKS[name](Bench(open_client, mode, entropy, SystemClock(), is_used=True))
    except Exception as error:
        error.add_note(f"in mode {mode}")
        raise
    finally:
        for store in opened:
            await store.close()
