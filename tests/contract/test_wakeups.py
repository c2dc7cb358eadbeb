"""The contract of wake-ups: by long poll, through the bucket queue and through SQS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from penstock.dispatcher.wakeups.base import Heard, TaskCounts, WakeUpListener
from penstock.dispatcher.wakeups.bucket import (
    FAR_POLLING,
    NEAR_POLLING,
    QUEUE_NAME,
    BucketListener,
    BucketSender,
)
from penstock.dispatcher.wakeups.long_poll import (
    HELD_SECONDS,
    Broker,
    LongPollListener,
    LongPollSender,
)
from penstock.dispatcher.wakeups.sqs import SqsListener, SqsSender, SqsSettings
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.protocol.work import WaitAnswer, WaitAsk, WakeUpAnswer
from penstock.queue.client import Queue
from penstock.queue.settings import Polling
from penstock.store.base import ObjectStore
from penstock.store.file.backend import FileStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.retrying import RetryingStore
from penstock.testing.queue_contract.bench import GateAccess, GatedStore
from penstock.testing.virtual import World, simulate
from tests.contract.wakeup_contract import WAKE_UP_CHECKS, WakeUpBench
from tests.integration.aws_server import AwsServer

_LEASE_SECONDS = 10.0
_PATIENT = {"a_word_whose_listener_dies_is_heard_elsewhere", "a_long_answer_is_nobody_elses"}


class _Buckets:
    """Senders and listeners of one store, each with a client of its own."""

    def __init__(
        self, make_store: Callable[[], ObjectStore], *, clock: Clock, entropy: Entropy
    ) -> None:
        self._make_store = make_store
        self._clock = clock
        self._entropy = entropy
        self._gates: dict[WakeUpListener, list[GatedStore]] = {}
        self.stores: list[ObjectStore] = []

    def _queue(self) -> tuple[Queue, list[GatedStore]]:
        gates: list[GatedStore] = []
        outer = self

        class Here(Queue):
            async def _connect(self) -> None:
                store = RetryingStore(outer._make_store(), entropy=outer._entropy)
                outer.stores.append(store)
                gates.append(GatedStore(store))
                self._owns_store = False
                await self._use(gates[-1], outer._entropy)

        return Here("", name=QUEUE_NAME), gates

    def bench(self, *, polling: Polling) -> WakeUpBench:
        def make_listener(answer: Heard) -> WakeUpListener:
            queue, gates = self._queue()
            listener = BucketListener(
                queue, answer, name="worker", polling=polling, clock=self._clock
            )
            self._gates[listener] = gates
            return listener

        return WakeUpBench(
            make_sender=lambda: BucketSender(self._queue()[0], clock=self._clock),
            make_listener=make_listener,
            kill=self.kill,
            clock=self._clock,
            held_seconds=_LEASE_SECONDS,
            woken_max=1,
            seconds_max=60.0,
        )

    async def kill(self, listener: WakeUpListener) -> None:
        assert isinstance(listener, BucketListener)
        for gate in self._gates[listener]:
            gate.access = GateAccess.CLOSED
        runner, listener._runner = listener._runner, None
        assert runner is not None
        runner.cancel()
        await asyncio.wait({runner})


class _Dispatchers:
    """Two brokers that tell each other what is sent, and listeners that wait at one of them."""

    def __init__(self, world: World) -> None:
        self._clock = world.clock()
        self._entropy = world.entropy("long poll")
        self.brokers = [Broker(clock=self._clock, entropy=self._entropy) for _ in range(2)]

    def bench(self) -> WakeUpBench:
        async def wait(ask: WaitAsk) -> WaitAnswer:
            await self._clock.sleep(self._entropy.uniform(0, 0.02))
            found = await self.brokers[0].wait(
                ask.listener,
                ask.operators,
                seconds=ask.seconds,
                answered=ask.answered,
                returned=ask.returned,
                held=ask.held,
            )
            await self._clock.sleep(self._entropy.uniform(0, 0.02))
            return WaitAnswer(
                wake_ups=[WakeUpAnswer(id=each.id, **asdict(each.channel)) for each in found]
            )

        async def publish(tasks_of: TaskCounts) -> None:
            await self._clock.sleep(0.01)
            self.brokers[0].send(tasks_of)

        return WakeUpBench(
            make_sender=lambda: LongPollSender(self.brokers[1], publish),
            make_listener=lambda answer: LongPollListener(
                wait, answer, clock=self._clock, entropy=self._entropy
            ),
            kill=_kill_long_poll,
            clock=self._clock,
            held_seconds=HELD_SECONDS,
            woken_max=1_000,
            seconds_max=60.0,
        )


async def _kill_long_poll(listener: WakeUpListener) -> None:
    assert isinstance(listener, LongPollListener)
    runner, listener._runner = listener._runner, None
    assert runner is not None
    runner.cancel()
    await asyncio.wait({runner})


@pytest.mark.parametrize("name", WAKE_UP_CHECKS)
def test_long_polls_in_virtual_time(name: str) -> None:
    async def main(world: World) -> None:
        dispatchers = _Dispatchers(world)
        async with dispatchers.brokers[0], dispatchers.brokers[1]:
            await WAKE_UP_CHECKS[name](dispatchers.bench())

    for seed in range(3):
        simulate(main, seed=seed)


@pytest.mark.parametrize("polling", [NEAR_POLLING, FAR_POLLING], ids=["near", "far"])
@pytest.mark.parametrize("name", WAKE_UP_CHECKS)
def test_a_bucket_in_memory_and_virtual_time(name: str, polling: Polling) -> None:
    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock(), date_resolution_seconds=1.0)
        clock = world.clock()

        async def delay() -> None:
            await clock.sleep(world.entropy("latency").uniform(0, 0.02))

        buckets = _Buckets(
            lambda: MemoryStore(bucket, clock=clock, delay=delay),
            clock=clock,
            entropy=world.entropy("wake-ups"),
        )
        await WAKE_UP_CHECKS[name](buckets.bench(polling=polling))

    for seed in range(3):
        simulate(main, seed=seed)


@pytest.mark.parametrize("name", [name for name in WAKE_UP_CHECKS if name not in _PATIENT])
def test_a_bucket_of_files(name: str, tmp_path: Path) -> None:
    clock, entropy = SystemClock(), system_entropy()
    buckets = _Buckets(
        lambda: FileStore(tmp_path, clock=clock, entropy=entropy, fsync=False),
        clock=clock,
        entropy=entropy,
    )

    async def main() -> None:
        try:
            await WAKE_UP_CHECKS[name](buckets.bench(polling=NEAR_POLLING))
        finally:
            for store in buckets.stores:
                await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("name", WAKE_UP_CHECKS)
def test_sqs(name: str, aws_server: AwsServer) -> None:
    settings = SqsSettings(
        prefix=f"{new_id(system_entropy(), characters=12)}-",
        wait_seconds=1,
        visibility_seconds=2,
        again_seconds=0,
    )

    async def kill(listener: WakeUpListener) -> None:
        assert isinstance(listener, SqsListener)
        tasks = [*listener._polls.values(), *listener._answers]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    bench = WakeUpBench(
        make_sender=lambda: SqsSender(aws_server.aws, settings=settings),
        make_listener=lambda answer: SqsListener(answer, aws=aws_server.aws, settings=settings),
        kill=kill,
        clock=SystemClock(),
        held_seconds=settings.visibility_seconds,
        woken_max=10,
    )
    asyncio.run(WAKE_UP_CHECKS[name](bench))
