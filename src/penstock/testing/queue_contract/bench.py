"""What the checks of the queue's contract are made of: queues, workers that die, unavailable
stores.

A `Bench` is one empty store and one mode. Every queue that it opens has a client of its own, so
that one of them can be cut off while others go on: a worker whose client is closed and whose
run is cancelled leaves in the bucket exactly what a killed process leaves. All times are short,
so that a check takes less than a second, or a few, on a real store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from penstock.kernel.clock import Clock
from penstock.kernel.document_format import encode
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import AlreadyExists, Refused
from penstock.queue.client import Queue, Task
from penstock.queue.config import QueueConfig
from penstock.queue.settings import DiscoveryMode, Polling, WorkerSettings
from penstock.queue.shards.registry import ShardLease
from penstock.queue.task_views import TaskView
from penstock.queue.worker import Worker
from penstock.store.base import CREATE, Answer, ObjectStore, StoreOperation, Wrapper, pages
from penstock.testing.store_contract import OpenClient

NAME: Final = "contract"
QUICK: Final = WorkerSettings(
    lease_ttl_secs=2.0,
    lease_renew_interval_secs=1.0,
    task_lease_seconds=3.0,
    settle_seconds=0.05,
    stop_seconds=5.0,
    sweep_seconds=3.0,
    lease_duration_secs=3.0,
    lease_renewal_interval_secs=1.0,
    overflow_scavenge_interval_secs=2.0,
    polling=Polling(min_seconds=0.05, max_seconds=0.3, factor=1.5, jitter=0.1),
)
"""The shortest times that a worker may have, nearly."""

RESULT_SECONDS: Final = 60.0
"""How long a check waits for a task: much longer than any of them takes."""
_STEP_SECONDS: Final = 0.05


class QueueCheck(Protocol):
    """One behaviour of a queue and its workers, tried in one mode on one store."""

    __name__: str

    async def __call__(self, bench: Bench, /) -> None: ...


class GateAccess(Enum):
    """What a gate lets through."""

    OPEN = "open"
    READ_ONLY = "read-only"
    CLOSED = "closed"


class GatedStore(Wrapper):
    """A client of a store that can be shut, for writes or for everything."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.access = GateAccess.OPEN
        self.refused = 0

    async def request(
        self, operation: StoreOperation, key: str, ask: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        is_barred = operation.writes and self.access is GateAccess.READ_ONLY
        if self.access is GateAccess.CLOSED or is_barred:
            self.refused += 1
            raise Refused(f"The store is {self.access.value} for this client.", key=key)
        return await ask()


class RunningWorkers:
    """Workers that run side by side until the check ends."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._runs: dict[Worker, asyncio.Task[None]] = {}

    def start(self, worker: Worker) -> Worker:
        """Let it work."""
        self._runs[worker] = self._group.create_task(worker.run(signals=False))
        return worker

    async def stop(self, worker: Worker) -> None:
        """Let it stop as it does on SIGTERM, and wait until it has."""
        worker.stop()
        await self._runs[worker]

    async def kill(self, worker: Worker) -> None:
        """Let it end as with `kill -9`: nothing that it does from now on reaches the store."""
        gate_of(worker.queue).access = GateAccess.CLOSED
        run = self._runs[worker]
        run.cancel()
        await asyncio.wait((run,))

    def stop_all(self) -> None:
        for worker in self._runs:
            worker.stop()


@dataclass(frozen=True, slots=True)
class Bench:
    """One empty store, and the mode that its workers have."""

    open_client: OpenClient
    mode: DiscoveryMode
    entropy: Entropy
    clock: Clock
    shards: int = 4
    is_used: bool = False
    """Whether there were workers before: the first owner of a shard waits a second or two."""

    async def queue(self) -> Queue:
        """The queue, through a client of its own."""
        store = GatedStore(await self.open_client())
        direct = ("*",) if self.mode is DiscoveryMode.DIRECT else ()
        config = QueueConfig(shards=self.shards, direct=direct)
        queue = await Queue.on(store, name=NAME, entropy=self.entropy, config=config)
        for shard in range(self.shards) if self.is_used else ():
            lease = ShardLease(worker="former", epoch=1)
            with suppress(AlreadyExists):
                await store.put(queue.access.layout.shard_lease(shard), encode(lease), CREATE)
        return queue

    def worker(
        self,
        queue: Queue,
        *,
        concurrency: int = 8,
        name: str = "worker",
        mode: DiscoveryMode | None = None,
        settings: WorkerSettings = QUICK,
    ) -> Worker:
        """A worker with short times, unless others are given."""
        mode = mode or self.mode
        if mode is DiscoveryMode.DIRECT:
            # There the name of a worker is its own, and that of its inbox.
            name = f"{name}-{new_id(self.entropy, characters=12)}"
        return Worker(
            queue,
            concurrency=concurrency,
            mode=mode,
            name=name,
            settings=settings,
        )

    @asynccontextmanager
    async def crew(self, *workers: Worker) -> AsyncIterator[RunningWorkers]:
        """These workers at work, and more if need be; all are stopped in the end."""
        async with asyncio.TaskGroup() as group:
            crew = RunningWorkers(group)
            for worker in workers:
                crew.start(worker)
            yield crew
            crew.stop_all()

    async def until(self, holds: Callable[[], object], *, what: str) -> None:
        """Wait until a condition holds; it is a failure if that takes too long."""
        began = self.clock.monotonic()
        while self.clock.monotonic() - began < RESULT_SECONDS:
            if holds():
                return
            await self.clock.sleep(_STEP_SECONDS)
        raise AssertionError(f"{what}: not within {RESULT_SECONDS:.0f} s")

    async def ended(self, task: Task) -> TaskView:
        """The task, once it is settled, however that is."""
        began = self.clock.monotonic()
        while self.clock.monotonic() - began < RESULT_SECONDS:
            view = await task.view()
            if view.is_settled:
                return view
            await self.clock.sleep(_STEP_SECONDS)
        raise AssertionError(f"{task!r} has not ended within {RESULT_SECONDS:.0f} s")

    async def keys(self, queue: Queue, prefix: str = "") -> list[str]:
        """The keys in the queue, without the part that all of them share."""
        root = queue.access.layout.root
        found: list[str] = []
        async for page in pages(queue.access.store, root + prefix):
            found += [entry.key.removeprefix(root) for entry in page.entries]
        return found


def gate_of(queue: Queue) -> GatedStore:
    """The client that a queue of a bench goes through."""
    gate = queue.access.store
    assert isinstance(gate, GatedStore)
    return gate


@contextmanager
def captured_logs() -> Iterator[list[str]]:
    """What the queue says in the log meanwhile, warnings and worse."""
    said: list[str] = []

    class LogCapture(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = LogCapture(logging.WARNING)
    log = logging.getLogger("penstock.queue")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)
