"""A queue for the tests of those who use one: in memory, in virtual time, with faults on demand.

    from penstock.testing import QueueBench, run_queue

    def test_resize_is_tried_again() -> None:
        async def test(bench: QueueBench) -> None:
            @bench.worker.handler("resize", retry=Retry(attempts=3, first_seconds=60))
            def resize(task):
                if task.attempt == 1:
                    raise OSError("not yet")
                return task.input["n"]

            task = await bench.queue.submit("resize", {"n": 1})
            await bench.run_until_settled()
            assert await task.result() == 1

        run_queue(test)

Everything but the time, the store and the network is the real thing. Nothing waits for real: an
hour passes when nobody has anything to do before it is over. A run is a function of its seed; a
failure names it. Every worker has a client of its own, so that it can be killed, and fails on its
own where a `FaultPlan` says so.

Handlers. `async def` ones run as they are: `asyncio.sleep` takes virtual time. Plain ones run where
they are called and not in a thread, which would not be virtual: they take no time, are not
interrupted by a timeout, and `time.sleep` in them sleeps for real. Those of `isolate=True`, and
plain hooks, run inline too. What needs sockets, threads or processes raises `NotSimulated`: put a
fake in its place.

A worker of the test is never run itself, but another like it (`Worker.again`): so the worker of
a module can be used by many tests. All that was started is stopped at the end of the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from penstock.kernel.errors import InvalidInput, StoreError
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.ids import PackAt
from penstock.queue.layout import QueueLayout
from penstock.queue.settings import DiscoveryMode, WorkerSettings
from penstock.queue.worker import Worker
from penstock.store.base import ObjectStore
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Meter, MeteredStore
from penstock.store.retrying import RetryingStore
from penstock.testing.queue_contract.bench import GateAccess, GatedStore
from penstock.testing.virtual import World, simulate

Result = TypeVar("Result")

NO_FAULTS: Final = FaultPlan()
SETTLE_SECONDS: Final = 3600.0
_STEP_SECONDS: Final = 0.5
_OPENING_TRIES: Final = 100
_SHOWN_MAX: Final = 5


class QueueBench:
    """A queue, a worker for it, and the time, for one test. Made by `run_queue`."""

    def __init__(
        self, world: World, group: asyncio.TaskGroup, *, faults: FaultPlan, mode: DiscoveryMode
    ) -> None:
        self._world = world
        self._group = group
        self._faults = faults
        self._mode = mode
        self._bucket = MemoryBucket(world.clock())
        self._clock = world.clock()
        self._networks: list[FaultyStore] = []
        self._runs: dict[Worker, asyncio.Task[None]] = {}
        self._gates: dict[Worker, GatedStore] = {}
        self._connected: list[Queue] = []
        self.meter = Meter()
        """The requests of everybody on the bench: `meter.dollars()` prices them."""
        self.queue: Queue
        """The queue, open."""
        self.worker: Worker
        """A worker for it: give it handlers. `run_until_settled` starts it if nobody has."""

    async def open(self, *, name: str, config: QueueConfig | None) -> None:
        """Make the queue and the worker. Called by `run_queue`."""
        self.queue = Queue("", name=name, config=config)
        await self._attach(self.queue, self._client()[0])
        self.worker = Worker(self.queue, mode=self._mode, name="bench", settings=WorkerSettings())

    @property
    def faults(self) -> FaultPlan:
        """What fails, and how often. Set it to change it on the way, for all clients."""
        return self._faults

    @faults.setter
    def faults(self, plan: FaultPlan | None) -> None:
        self._faults = plan or NO_FAULTS
        for network in self._networks:
            network.plan = self._faults

    def now(self) -> float:
        """The store's time, in seconds since the epoch."""
        return self._world.now()

    async def advance(self, seconds: float) -> None:
        """Let so much time pass, and whatever happens in it."""
        await self._clock.sleep(seconds)

    async def connect(self, queue: Queue) -> Queue:
        """Open somebody's queue object, that of a module say, in the memory of this bench."""
        await self._attach(queue, self._client()[0])
        self._connected.append(queue)
        return queue

    async def start(self, worker: Worker | None = None) -> Worker:
        """Start a worker like this one, on its queue; returns the one that was started.

        Without an argument it is like `bench.worker`. One of another queue, as modules have it,
        works on the queue of that name in this bench.
        """
        model = worker or self.worker
        if not model.types:
            raise InvalidInput(
                "The worker has no handler.",
                hint='Register one: @bench.worker.handler("TYPE") above def handle(task).',
            )
        store, gate = self._client()
        queue = Queue("", name=model.queue.name)
        await self._attach(queue, store)
        started = model.again(queue, inline=True)
        self._gates[started] = gate
        self._runs[started] = self._group.create_task(started.run(signals=False))
        return started

    async def stop(self, worker: Worker) -> None:
        """Stop a worker as SIGTERM does, and wait until it has ended."""
        worker.stop()
        await asyncio.wait((self._runs[worker],))

    async def kill(self, worker: Worker) -> None:
        """End a worker as `kill -9` does: nothing that it does from now on reaches the store."""
        self._gates[worker].access = GateAccess.CLOSED
        run = self._runs[worker]
        run.cancel()
        await asyncio.wait((run,))

    async def run_until_settled(self, seconds: float = SETTLE_SECONDS) -> None:
        """Let time pass until every task has ended, those that are due later as well.

        Starts a worker like `bench.worker` if none was started. It is a failure if that takes
        longer than so many seconds, or if what is left is of types that nobody handles.
        """
        if not self._runs:
            await self.start()
        until = self._clock.monotonic() + seconds
        while left := self._unsettled():
            if self._clock.monotonic() >= until:
                raise AssertionError(f"not settled within {seconds:g} s: {_shown(left)}")
            handled = {kind for worker in self._working() for kind in worker.types}
            if not any(at.type in handled for at in left):
                raise AssertionError(f"no worker runs such tasks: {_shown(left)}")
            await self._clock.sleep(_STEP_SECONDS)

    def _working(self) -> list[Worker]:
        return [worker for worker, run in self._runs.items() if not run.done()]

    def _unsettled(self) -> list[PackAt]:
        """The packs that are there, in any queue: what is settled has none."""
        found = []
        for key in self._bucket.keys_from("queues/"):
            layout = QueueLayout(key.split("/")[1])
            read = layout.read(key)
            if read is not None and not read[1]:
                found.append(read[0])
        return found

    def _client(self) -> tuple[ObjectStore, GatedStore]:
        """One more client of the store, with a network of its own."""
        number = len(self._networks)
        entropy = self._world.entropy(f"client {number}")
        backend = MemoryStore(self._bucket, clock=self._world.clock())
        network = FaultyStore(backend, self._faults, entropy=entropy)
        self._networks.append(network)
        gate = GatedStore(MeteredStore(network, self.meter))
        return RetryingStore(gate, entropy=entropy), gate

    async def _attach(self, queue: Queue, store: ObjectStore) -> None:
        entropy = self._world.entropy(f"queue {len(self._networks)}")
        for _ in range(_OPENING_TRIES):
            with suppress(StoreError):
                await queue.attach(store, entropy)
                return
            await self._clock.sleep(1)
        raise AssertionError(f"with these faults the queue cannot be opened: {self._faults}")

    async def close(self) -> None:
        """Stop all that was started, and let go of what was connected. Called by `run_queue`."""
        self.faults = NO_FAULTS
        for worker in self._working():
            worker.stop()
            worker.stop()
        if self._runs:
            await asyncio.wait(self._runs.values())
        for queue in self._connected:
            await queue.close()


def run_queue(
    test: Callable[[QueueBench], Coroutine[Any, Any, Result]],
    *,
    faults: FaultPlan | None = None,
    seed: int | str = 0,
    mode: str = DiscoveryMode.LEASED,
    name: str = "bench",
    config: QueueConfig | None = None,
) -> Result:
    """Run `test(bench)` in virtual time and return its result; raise what it raises.

    The same seed gives the same run: try others with `for seed in range(100)`.
    """

    async def main(world: World) -> Result:
        outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            bench = QueueBench(world, group, faults=faults or NO_FAULTS, mode=DiscoveryMode(mode))
            await bench.open(name=name, config=config)
            try:
                outcome.set_result(await test(bench))
            except Exception as error:  # noqa: BLE001 - raised below: the group would wrap it
                outcome.set_exception(error)
            await bench.close()
        return outcome.result()

    return simulate(main, seed=seed)


def _shown(packs: list[PackAt]) -> str:
    shown = [f"{at.count} of {at.type!r}" for at in packs[:_SHOWN_MAX]]
    more = f" and {len(packs) - _SHOWN_MAX} packs more" if len(packs) > _SHOWN_MAX else ""
    return ", ".join(shown) + more
