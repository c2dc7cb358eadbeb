"""The world that is priced: a bucket like S3, workers and a producer that are the real ones.

`Fleet` owns them. Each has a machine of its own: its own clock and its own store over the one
bucket, and all requests are counted on one meter. Answers take 20 to 40 ms and are dated to the
second. When handlers start, and when submits are answered, is noted in true time.

Used by `penstock.testing.cost.runs`, inside `simulate`. It is all memory: nothing is left of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.kernel.clock import Clock
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.running.handlers import TaskContext
from penstock.queue.settings import Mode, WorkerSettings
from penstock.queue.worker import Worker
from penstock.store.base import ObjectStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Meter, MeteredStore
from penstock.store.retrying import RetryingStore
from penstock.store.tombstoned import TombstonedStore
from penstock.testing.cost.load import Workload
from penstock.testing.virtual import World

HALF_TRIP_SECONDS: Final = (0.010, 0.020)
"""A request takes so long to arrive, and its answer as long again."""
_TYPE: Final = "work"
_SUBMITTERS: Final = 64


class Fleet:
    """The workers of a workload, a producer, and what is noted of both."""

    def __init__(self, world: World, load: Workload) -> None:
        self.clock = world.clock()
        self.meter = Meter()
        self.ended: Counter[str] = Counter()
        """How many handlers have ended, by worker."""
        self._world = world
        self._load = load
        self._bucket = MemoryBucket(world.clock(), date_resolution_seconds=1.0)
        self._submitted = 0
        self._answered: dict[int, float] = {}
        self._started: dict[int, float] = {}
        self._running: list[asyncio.Task[None]] = []

    async def open(self, group: asyncio.TaskGroup) -> None:
        """Make the queue, for the producer; what runs beside it runs in this group."""
        self._group = group
        self._queue = await self._open("producer", self.clock)

    async def start(self) -> None:
        """Let the workers run."""
        for number in range(self._load.workers):
            name = f"worker-{number}"
            clock = self._world.clock()
            worker = Worker(
                await self._open(name, clock),
                concurrency=self._load.concurrency,
                mode=self._load.mode,
                name=name,
                settings=WorkerSettings(),
            )
            worker.handler(_TYPE)(self._handler(name, clock))
            self._running.append(self._group.create_task(worker.run(signals=False)))

    def end(self) -> None:
        """End the workers at once, wherever they are: what counts has been counted."""
        for task in self._running:
            task.cancel()

    async def _open(self, name: str, clock: Clock) -> Queue:
        entropy = self._world.entropy(name)
        config = QueueConfig(direct=("*",) if self._load.mode is Mode.DIRECT else ())
        store = self._store(name, clock)
        return await Queue.on(store, name="cost", entropy=entropy, config=config)

    def _store(self, name: str, clock: Clock) -> ObjectStore:
        entropy = self._world.entropy(f"latency of {name}")

        async def delay() -> None:
            await clock.sleep(entropy.uniform(*HALF_TRIP_SECONDS))

        store: ObjectStore = MemoryStore(self._bucket, clock=clock, delay=delay)
        store = MeteredStore(store, self.meter)
        if self._load.by_tombstone:
            store = TombstonedStore(store, entropy=self._world.entropy(f"tombstones of {name}"))
        return RetryingStore(store, entropy=self._world.entropy(f"retries of {name}"))

    def _handler(self, name: str, clock: Clock) -> Callable[[TaskContext], Awaitable[None]]:
        async def work(task: TaskContext) -> None:
            self._started.setdefault(task.input, self._world.now())
            await clock.sleep(self._load.handler_seconds)
            self.ended[name] += 1

        return work

    async def submit(self, count: int) -> range:
        """Submit a batch; returns the numbers of its tasks."""
        numbers = range(self._submitted, self._submitted + count)
        self._submitted += count
        if count == 1:
            await self._queue.submit(_TYPE, numbers.start)
        else:
            await self._queue.submit_many(_TYPE, list(numbers))
        self._answered.update(dict.fromkeys(numbers, self._world.now()))
        return numbers

    async def submit_through(self, seconds: float) -> range:
        """Submit batches at random instants for so long; returns the numbers of their tasks.

        As many come as the load says, at instants of their own: a Poisson process of which the
        total is known, so that a short window has no luck with it.
        """
        batches = round(seconds * self._load.batches_per_second)
        draw = self._world.entropy("arrivals")
        first, began = self._submitted, self.clock.monotonic()
        for instant in sorted(draw.uniform(0, seconds) for _ in range(batches)):
            await self.clock.sleep(began + instant - self.clock.monotonic())
            self._group.create_task(self._submit_one())
        await self.clock.sleep(began + seconds - self.clock.monotonic())
        return range(first, first + batches * self._load.batch)

    async def submit_backlog(self, tasks: int) -> None:
        """Submit so many tasks one by one, as fast as a few submitters can."""
        each, more = divmod(tasks, _SUBMITTERS)
        shares = [each + (number < more) for number in range(_SUBMITTERS)]

        async def submit(count: int) -> None:
            for _ in range(count):
                await self.submit(1)

        async with asyncio.TaskGroup() as group:
            for share in shares:
                group.create_task(submit(share))

    async def _submit_one(self) -> None:
        await self.submit(self._load.batch)

    def has_started(self, numbers: range) -> bool:
        """Whether all these tasks have started."""
        return all(number in self._started for number in reversed(numbers))

    async def wait_for(self, numbers: range, *, seconds_max: float) -> None:
        """Wait until these tasks have started, but no longer than so."""
        until = self.clock.monotonic() + seconds_max
        while not self.has_started(numbers) and self.clock.monotonic() < until:
            await self.clock.sleep(0.5)

    def start_seconds(self, numbers: range) -> tuple[float, ...]:
        """From the answer of the submit to the start of the handler, for those that have started.

        A task may start before its submitter hears that it was submitted: that is 0.
        """
        return tuple(
            sorted(
                max(0.0, self._started[number] - self._answered[number])
                for number in numbers
                if number in self._started and number in self._answered
            )
        )
