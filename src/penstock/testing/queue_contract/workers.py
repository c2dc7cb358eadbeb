"""The queue's contract of workers: stopping, crashes, takeover, and stores that are unavailable
for a while.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from penstock.kernel.document_format import decode
from penstock.kernel.errors import NotFound, Refused
from penstock.queue.client import Queue
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.shards.registry import OwnerRole, Registration
from penstock.testing.queue_contract.bench import (
    QUICK,
    RESULT_SECONDS,
    Bench,
    GateAccess,
    QueueCheck,
    captured_logs,
    gate_of,
)
from penstock.testing.store_contract import refused

_OUTAGE_SECONDS: Final = 20.0


async def stopping_lets_what_runs_end(bench: Bench) -> None:
    """Nothing new is begun, what runs is settled, and what was claimed ahead is given back."""
    queue = await bench.queue()
    worker = bench.worker(await bench.queue(), concurrency=2)
    begun: list[str] = []

    @worker.handler("work")
    async def work(task: TaskContext) -> str:
        begun.append(task.id)
        await bench.clock.sleep(0.3)
        return "ended"

    async with bench.crew() as crew:
        tasks = await queue.submit_many("work", [None] * 5)
        crew.start(worker)
        await bench.until(lambda: len(begun) >= 2, what="two run")
        late = await queue.submit("work")
        await crew.stop(worker)
    views = [await task.view() for task in (*tasks, late)]
    assert len(begun) == 2
    assert [view.result for view in views if view.id in begun] == ["ended"] * 2
    assert [view.status for view in views if view.id not in begun] == ["ready"] * 4


async def stopping_gives_back_what_does_not_end(bench: Bench) -> None:
    """An attempt that is given back does not count, and another worker can have it at once."""
    queue = await bench.queue()
    first = bench.worker(
        await bench.queue(), name="first", settings=replace(QUICK, stop_seconds=0.1)
    )
    second = bench.worker(await bench.queue(), name="second")
    twice = Retry(attempts=2, first_seconds=0.02)
    begun: list[int] = []

    @first.handler("work", retry=twice)
    async def hang(task: TaskContext) -> None:
        begun.append(task.attempt)
        await bench.clock.sleep(RESULT_SECONDS)

    @second.handler("work", retry=twice)
    async def end(task: TaskContext) -> int:
        if task.attempt == 2:
            raise OSError("this is the first attempt that counts")
        return task.attempt

    async with bench.crew() as crew:
        task = await queue.submit("work")
        crew.start(first)
        await bench.until(lambda: begun, what="it runs")
        await crew.stop(first)
        assert (await task.view()).status == "ready"
        crew.start(second)
        assert await task.result(timeout=RESULT_SECONDS) == 3
    assert [event.what for event in await queue.history(task.id)] == [
        "submitted",
        "claimed",
        "given back",
        "claimed",
        "retrying",
        "claimed",
        "succeeded",
    ]


async def a_stopped_worker_leaves_nothing_behind(bench: Bench) -> None:
    """No registration that counts, no pack, and nothing that goes on running."""
    queue = await bench.queue()
    mine = await bench.queue()
    before = asyncio.all_tasks()
    worker = bench.worker(mine)

    @worker.handler("work")
    async def work(task: TaskContext) -> object:
        return task.input

    async with bench.crew() as crew:
        crew.start(worker)
        task = await queue.submit("work", 1)
        await task.result(timeout=RESULT_SECONDS)
        await crew.stop(worker)
    assert asyncio.all_tasks() == before
    roles = [(await _registration(queue, key)).role for key in await bench.keys(queue, "workers/")]
    assert [role for role in roles if role is not OwnerRole.GONE] == []
    left = await bench.keys(queue, "tasks/")
    assert [key for key in left if not key.endswith(".ledger")] == []
    gate = gate_of(mine)
    gate.access = GateAccess.CLOSED
    await bench.clock.sleep(0.3)
    assert gate.refused == 0, "it asks for nothing any more"


async def _registration(queue: Queue, key: str) -> Registration:
    found = await queue.access.store.get(queue.access.layout.root + key)
    assert found is not None
    return decode(Registration, found.body, where=key)


async def what_a_dead_worker_held_is_taken_over(bench: Bench) -> None:
    """When its lease ends, and not before; its attempt counts, and its result never does."""
    queue = await bench.queue()
    first = bench.worker(await bench.queue(), name="first")
    second = bench.worker(await bench.queue(), name="second")
    begun: list[str] = []

    @first.handler("work")
    async def die(task: TaskContext) -> None:
        begun.append(task.id)
        await bench.clock.sleep(RESULT_SECONDS)

    @second.handler("work")
    async def live(task: TaskContext) -> object:
        return {"attempt": task.attempt, "by": "second"}

    async with bench.crew() as crew:
        tasks = [*await queue.submit_many("work", [1, 2]), await queue.submit("work", key="k")]
        crew.start(first)
        await bench.until(lambda: len(begun) == 3, what="all run")
        await crew.kill(first)
        crew.start(second)
        for task in tasks:
            result = await task.result(timeout=RESULT_SECONDS)
            assert result == {"attempt": 2, "by": "second"}
            events = [(event.what, event.who[:5]) for event in await queue.history(task.id)]
            assert events == [
                ("submitted", ""),
                ("claimed", "first"),
                ("lease expired", "first"),
                ("claimed", "secon"),
                ("succeeded", "secon"),
            ]


async def nothing_is_lost_while_the_bucket_is_read_only(bench: Bench) -> None:
    """What runs is settled afterwards, what waits runs afterwards, and the log says why."""
    queue = await bench.queue()
    mine = await bench.queue()
    worker = bench.worker(mine)
    begun: list[object] = []

    @worker.handler("work")
    async def work(task: TaskContext) -> object:
        begun.append(task.input)
        await bench.clock.sleep(1)
        return task.attempt

    with captured_logs() as said:
        async with bench.crew(worker):
            running = await queue.submit("work", "running")
            await bench.until(lambda: begun, what="it runs")
            waiting = await queue.submit("work", "waiting", delay=2)
            for gate in (gate_of(queue), gate_of(mine)):
                gate.access = GateAccess.READ_ONLY
            with refused(Refused, what="a submit to a bucket that is read-only"):
                await queue.submit("work", "refused")
            await bench.clock.sleep(_OUTAGE_SECONDS)
            assert (await running.view()).status == "running", "nothing can be written"
            assert begun == ["running"], "nothing begins that is not written first"
            for gate in (gate_of(queue), gate_of(mine)):
                gate.access = GateAccess.OPEN
            assert await running.result(timeout=RESULT_SECONDS) == 1
            assert await waiting.result(timeout=RESULT_SECONDS) == 1
    assert begun == ["running", "waiting"], "nothing ran twice, what was refused did not run"
    assert any("read-only" in sentence for sentence in said)


async def a_store_that_is_away_stops_nobody_for_good(bench: Bench) -> None:
    """A worker that can ask for nothing runs nothing new, and goes on when the store is back."""
    queue = await bench.queue()
    mine = await bench.queue()
    worker = bench.worker(mine)
    begun: list[object] = []

    @worker.handler("work")
    async def work(task: TaskContext) -> object:
        begun.append(task.input)
        return task.attempt

    async with bench.crew(worker):
        await (await queue.submit("work", 1)).result(timeout=RESULT_SECONDS)
        gate_of(mine).access = GateAccess.CLOSED
        task = await queue.submit("work", 2)
        await bench.clock.sleep(_OUTAGE_SECONDS)
        assert begun == [1]
        gate_of(mine).access = GateAccess.OPEN
        assert await task.result(timeout=RESULT_SECONDS) == 1


async def a_lost_lease_object_costs_no_task(bench: Bench) -> None:
    """Whatever is deleted of who owns what, tasks that wait and tasks that run both end."""
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())
    begun: list[object] = []

    @worker.handler("work")
    async def work(task: TaskContext) -> object:
        begun.append(task.input)
        await bench.clock.sleep(5)
        return task.attempt

    access = queue.access
    async with bench.crew(worker):
        running = await queue.submit("work", "running")
        await bench.until(lambda: begun, what="it runs")
        for prefix in ("workers/", "shard-leases/", "monitor.json"):
            for key in await bench.keys(queue, prefix):
                await access.store.delete(access.layout.root + key)
        waiting = await queue.submit("work", "waiting")
        assert await running.result(timeout=RESULT_SECONDS) == 1
        assert await waiting.result(timeout=RESULT_SECONDS) == 1
    with refused(NotFound, what="get of a queue's object that was never there"):
        await access.store.get(access.layout.root + "never")


async def what_ends_its_worker_fails_and_its_neighbours_do_not(bench: Bench) -> None:
    """Of 200 tasks in a pack one ends its worker every time: it fails, and the others succeed."""
    queue = await bench.queue()
    poison = 77
    fatal = asyncio.Event()

    async def work(task: TaskContext) -> None:
        if task.input == poison:
            fatal.set()
            await bench.clock.sleep(RESULT_SECONDS)

    async def is_fatal() -> bool:
        """Whether it ends one more worker; otherwise it is settled."""
        for _ in range(int(RESULT_SECONDS * 10)):
            if fatal.is_set() or (await tasks[poison].view()).is_settled:
                break
            await bench.clock.sleep(0.1)
        return fatal.is_set()

    tasks = await queue.submit_many("work", list(range(200)))
    ended = 0
    async with bench.crew() as crew:
        worker = bench.worker(await bench.queue(), name="first")
        worker.handler("work")(work)
        crew.start(worker)
        while await is_fatal():
            await crew.kill(worker)
            fatal.clear()
            ended += 1
            worker = bench.worker(await bench.queue(), name=f"next-{ended}")
            worker.handler("work")(work)
            crew.start(worker)
        views = [await bench.ended(task) for task in tasks]
    assert {n: view.error for n, view in enumerate(views) if view.status != "succeeded"} == {
        poison: "LeaseExpired"
    }
    # At most 136 are in a window: log2 of that, and three attempts.
    assert 3 < ended == views[poison].attempt <= 10


CHECKS: Final[tuple[QueueCheck, ...]] = (
    stopping_lets_what_runs_end,
    stopping_gives_back_what_does_not_end,
    a_stopped_worker_leaves_nothing_behind,
    what_a_dead_worker_held_is_taken_over,
    what_ends_its_worker_fails_and_its_neighbours_do_not,
    nothing_is_lost_while_the_bucket_is_read_only,
    a_store_that_is_away_stops_nobody_for_good,
    a_lost_lease_object_costs_no_task,
)
PATIENT: Final[tuple[QueueCheck, ...]] = (
    what_a_dead_worker_held_is_taken_over,
    what_ends_its_worker_fails_and_its_neighbours_do_not,
    nothing_is_lost_while_the_bucket_is_read_only,
    a_store_that_is_away_stops_nobody_for_good,
    a_lost_lease_object_costs_no_task,
)
