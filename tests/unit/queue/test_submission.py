"""What is submitted is there once, what is wrong is not sent, and what is unknown is called so."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.document_format import decode
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import InvalidInput, OutcomeUnknown, Refused, Throttled
from penstock.queue.client import Queue
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.ids import TaskId, task_at
from penstock.queue.layout import QueueLayout
from penstock.queue.pack import RESEND_SECONDS, Pack
from penstock.queue.submit_options import SubmitOptions
from penstock.queue.submitter import INPUT_BYTES_MAX, NotAllSubmitted, Submitter
from penstock.queue.worker import Worker
from penstock.store.base import NO_METADATA, REPLACE, PutMode, Version, Wrapper
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.retrying import RetryingStore
from penstock.testing import QueueBench, run_queue
from penstock.testing.virtual import World, simulate

LAYOUT = QueueLayout("q")


def _packs(bucket: MemoryBucket) -> list[Pack]:
    return [decode(Pack, stored.body, where=key) for key, stored in bucket.objects.items()]


def _submitted(
    inputs: list[object], *, delay: float = 0.0
) -> tuple[list[TaskId], MemoryBucket, Meter]:
    bucket, meter = MemoryBucket(SystemClock()), Meter()

    async def run() -> list[TaskId]:
        store = MeteredStore(MemoryStore(bucket, clock=SystemClock()), meter)
        submitter = Submitter(store, LAYOUT, seeded_entropy(1))
        return await submitter.submit_many("resize", inputs, SubmitOptions(delay=delay))

    return asyncio.run(run()), bucket, meter


def test_one_task_is_one_put() -> None:
    tasks, bucket, meter = _submitted([{"n": 1}])
    assert meter.requests(kind=Kind.PUT) == 1
    at, index = task_at(tasks[0])
    assert (at.place, at.count, at.type, index) == ("now", 1, "resize", 0)
    (pack,) = _packs(bucket)
    assert [bytes(each) for each in pack.inputs] == [b'{"n":1}']
    assert pack.submitted_ms == at.submitted_ms


def test_a_thousand_tasks_are_one_put_and_keep_their_order() -> None:
    tasks, bucket, meter = _submitted(list(range(2500)))
    assert meter.requests(kind=Kind.PUT) == 3
    assert len(set(tasks)) == 2500
    by_pack = {pack.nonce: pack for pack in _packs(bucket)}
    assert sorted(len(pack.inputs) for pack in by_pack.values()) == [500, 1000, 1000]
    for number in (0, 999, 1000, 2499):
        at, index = task_at(tasks[number])
        stored = bucket.objects[LAYOUT.pack(at)]
        assert bytes(decode(Pack, stored.body, where="").inputs[index]) == str(number).encode()


def test_large_inputs_make_smaller_packs() -> None:
    _, _, meter = _submitted(["x" * 60_000] * 40)
    assert meter.requests(kind=Kind.PUT) == 3


def test_no_inputs_are_no_tasks() -> None:
    assert _submitted([])[0] == []


def test_a_delay_puts_the_pack_into_its_minute() -> None:
    tasks, bucket, _ = _submitted([1], delay=3600)
    at, _ = task_at(tasks[0])
    (pack,) = _packs(bucket)
    assert pack.due_ms - pack.submitted_ms == 3_600_000
    assert at.place == str(pack.due_ms // 60_000)
    assert LAYOUT.pack(at).startswith(f"queues/q/ready/{at.place}/")


@pytest.mark.parametrize(
    "wrong", [float("nan"), float("inf"), object(), {"a": {1, 2}}, b"bytes", "\ud800", {(1, 2): 3}]
)
def test_what_is_not_json_is_refused_and_nothing_is_sent(wrong: object) -> None:
    with pytest.raises(InvalidInput, match="Input 1 is not JSON"):
        _submitted([1, wrong])


def test_a_loop_and_a_tower_are_not_json() -> None:
    loop: list[object] = []
    loop.append(loop)
    tower: object = None
    for _ in range(100_000):
        tower = [tower]
    for wrong in (loop, tower):
        with pytest.raises(InvalidInput, match="Input 0 is not JSON"):
            _submitted([wrong])


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(InvalidInput, match="Input 0 has"):
        _submitted(["x" * INPUT_BYTES_MAX])


@pytest.mark.parametrize("delay", [-1.0, 10**9, float("nan")])
def test_a_senseless_delay_is_refused(delay: float) -> None:
    with pytest.raises(InvalidInput, match="A delay of"):
        _submitted([1], delay=delay)


class Slow(Wrapper):
    """A store that takes longer than a submit may."""

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        await self.clock.machine.sleep(RESEND_SECONDS)
        return await super().put(key, body, mode, metadata=metadata)


def test_an_answer_that_comes_too_late_is_unknown() -> None:
    async def main(world: World) -> None:
        store = Slow(MemoryStore(MemoryBucket(world.clock()), clock=world.clock()))
        with pytest.raises(OutcomeUnknown):
            await Submitter(store, LAYOUT, world.entropy("x")).submit_many("t", [1])

    simulate(main, seed=1)


class RefusesSome(Wrapper):
    """A bucket that turns read-only after one put."""

    puts = 0

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        self.puts += 1
        if self.puts > 1:
            raise Refused("The bucket is read-only.")
        return await super().put(key, body, mode, metadata=metadata)


def test_one_pack_that_fails_takes_no_other_along() -> None:
    bucket = MemoryBucket(SystemClock())

    async def run() -> None:
        store = RefusesSome(MemoryStore(bucket, clock=SystemClock()))
        await Submitter(store, LAYOUT, seeded_entropy(1)).submit_many("t", list(range(1500)))

    with pytest.raises(
        NotAllSubmitted, match="of 1500 tasks may not have been submitted"
    ) as caught:
        asyncio.run(run())
    tasks = caught.value.tasks
    assert len(tasks) == 1500
    sent = [task for task in tasks if isinstance(task, str)]
    assert len(sent) in (500, 1000)
    assert all(LAYOUT.pack(task_at(task)[0]) in bucket.objects for task in sent)


def test_lost_answers_submit_once() -> None:
    """Every task that is reported is there, in one pack, however often it had to be sent."""
    plan = FaultPlan(lost_answer=0.3, lost_request=0.2, throttled=0.1, latency_seconds_max=1)

    async def main(world: World) -> None:
        bucket = MemoryBucket(world.clock())
        entropy = world.entropy("x")
        faulty = FaultyStore(MemoryStore(bucket, clock=world.clock()), plan, entropy=entropy)
        submitter = Submitter(RetryingStore(faulty, entropy=entropy), LAYOUT, entropy)
        tasks = await submitter.submit_many("t", list(range(3000)))
        assert len(set(tasks)) == 3000
        assert len(bucket.objects) == 3

    for seed in range(50):
        simulate(main, seed=seed)


def test_an_input_that_not_every_reader_could_read_is_refused() -> None:
    deep: object = 1
    for _ in range(101):
        deep = [deep]
    with pytest.raises(InvalidInput, match="nested more than 100 levels"):
        _submitted([1, deep])
    assert _submitted([{"brackets in text": "[" * 500}])


@pytest.mark.parametrize("fault", ["lost_answer", "lost_request", "failed"])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_submit_whose_answers_are_lost_for_minutes_submits_once(
    fault: str, key: str | None
) -> None:
    async def test(bench: QueueBench) -> None:
        runs: list[int] = []

        @bench.worker.handler("t")
        async def handle(task: TaskContext) -> None:
            runs.append(task.attempt)

        await bench.start()
        await bench.advance(60)
        await bench.queue.submit("other")  # It knows that the queue is not drained.
        bench.faults = FaultPlan(**{fault: 1.0})
        async with asyncio.TaskGroup() as group:
            submitted = group.create_task(bench.queue.submit("t", key=key))
            await bench.advance(200)
            assert not submitted.done()
            bench.faults = None
        # A worker has met the pointer without its pack, and looks after it more and more rarely.
        assert await submitted.result().result(timeout=200) is None
        assert runs == [1]
        await bench.advance(600)
        assert runs == [1]

    run_queue(test)


def test_a_submit_gives_up_when_what_it_sends_would_be_void() -> None:
    async def test(bench: QueueBench) -> None:
        await bench.queue.submit("other")
        began = bench.now()
        bench.faults = FaultPlan(lost_request=1.0)
        with pytest.raises(OutcomeUnknown):
            await bench.queue.submit("t")
        assert 280 < bench.now() - began < 340

    run_queue(test)


def test_a_store_that_has_surely_done_nothing_is_not_waited_for_long() -> None:
    async def test(bench: QueueBench) -> None:
        began = bench.now()
        bench.faults = FaultPlan(throttled=1.0)
        with pytest.raises(Throttled):
            await bench.queue.submit("t")
        assert bench.now() - began < 30

    run_queue(test)


SUBMITS: dict[str, dict[str, Any]] = {
    "A priority is a whole number": {"priority": 1.5},
    "A priority is a whole number from": {"priority": "high"},
    "delay is a number of seconds, not '1h'": {"delay": "1h"},
    "delay is a number of seconds, not 'True'": {"delay": True},
    "expires is a number of seconds": {"expires": "1h"},
    "key_seconds is a number of seconds": {"key": "k", "key_seconds": "7d"},
    "An idempotency key is a text": {"key": 17},
    "'5' is not the key of a limit": {"limit": 5},
    "Tags are names with values": {"tags": ["env"]},
    "A task starts at a time with a time zone": {"at": "2030-01-01"},
    "A task expires at a time with a time zone": {"expires_at": 17},
}


@pytest.mark.parametrize("said", SUBMITS)
def test_an_option_of_the_wrong_type_is_one_sentence_and_nothing_is_sent(said: str) -> None:
    async def act(bench: QueueBench) -> None:
        with pytest.raises(InvalidInput, match=said):
            await bench.queue.submit("t", 1, **SUBMITS[said])
        assert not await bench.queue.tasks()

    run_queue(act)


@pytest.mark.parametrize("inputs", ["abc", b"abc", {"n": 1}, None, 7])
def test_what_is_no_list_of_inputs_is_refused(inputs: Any) -> None:
    async def act(bench: QueueBench) -> None:
        with pytest.raises(InvalidInput, match="The inputs of many tasks are a list"):
            await bench.queue.submit_many("t", inputs)
        assert len(await bench.queue.submit_many("t", (n for n in range(3)))) == 3  # type: ignore[arg-type]  # as users may

    run_queue(act)


@pytest.mark.parametrize("id", [None, 7, ["a"], "x" * 500])
def test_what_is_no_id_is_refused(id: Any) -> None:
    async def act(bench: QueueBench) -> None:
        for ask in (bench.queue.get, bench.queue.result, bench.queue.cancel):
            with pytest.raises(InvalidInput, match="is not the id of a task"):
                await ask(id)

    run_queue(act)


WORKERS: dict[str, dict[str, Any]] = {
    "A worker runs 1 to 1000 tasks, not '8'": {"concurrency": "8"},
    "A worker runs 1 to 1000 tasks, not 2.5": {"concurrency": 2.5},
    "settings= takes WorkerSettings": {"settings": {"stop_seconds": 3}},
}


@pytest.mark.parametrize("said", WORKERS)
def test_a_worker_that_cannot_be_is_one_sentence(said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Worker(Queue("memory://q", name="q"), **WORKERS[said])


def test_a_handler_without_a_type_is_refused_where_it_is_written() -> None:
    """`@worker.handler` without its type would register nothing, and say nothing."""
    worker = Worker(Queue("memory://q", name="q"))
    with pytest.raises(InvalidInput, match="A handler needs the type of its tasks"):

        @worker.handler  # type: ignore[arg-type]  # as users may
        def handle(_task: object) -> None: ...


@pytest.mark.parametrize(
    "wrong", [{"config": {"shards": 4}}, {"gather_seconds": "0.1"}, {"gather_seconds": 0}]
)
def test_a_queue_that_cannot_be_is_one_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Queue("memory://q", name="q", **wrong)
