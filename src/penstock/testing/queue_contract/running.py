"""The contract of running tasks: results, batches, concurrency, keys, delays, history, archive."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Final

from penstock.kernel.errors import TaskFailed
from penstock.queue import archive
from penstock.queue.running.handlers import TaskContext
from penstock.queue.running.retry import Retry
from penstock.queue.settings import Mode
from penstock.testing.queue_contract.bench import RESULT_SECONDS, Bench, Check
from penstock.testing.store_contract.check import refused

_APART_SECONDS: Final = 1.5
"""How far two clients may be apart who both know the store's time to the second."""


async def a_task_runs_and_gives_its_result(bench: Bench) -> None:
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())

    @worker.handler("double")
    async def double(task: TaskContext) -> object:
        return {"twice": task.input["n"] * 2, "attempt": task.attempt, "id": task.id}

    async with bench.crew(worker):
        value = {"n": 21, "text": "ünïcödé \N{WATER WAVE}"}
        task = await queue.submit("double", value)
        result = await task.result(timeout=RESULT_SECONDS)
        assert result == {"twice": 42, "attempt": 1, "id": task.id}
        view = await queue.get(task.id)
        assert (view.status, view.attempt, view.type) == ("succeeded", 1, "double")
        assert (view.input, view.result, view.error) == (value, result, "")


async def many_tasks_run_once_each(bench: Bench) -> None:
    """A batch, singles and two workers: every task runs once and keeps its own result."""
    queue = await bench.queue()
    ran: Counter[str] = Counter()
    workers = [bench.worker(await bench.queue(), name=f"worker{n}") for n in range(2)]

    async def square(task: TaskContext) -> object:
        ran[task.id] += 1
        return task.input**2

    for worker in workers:
        worker.handler("square")(square)
    tasks = await queue.submit_many("square", list(range(50)))
    tasks += [await queue.submit("square", number) for number in range(50, 55)]
    async with bench.crew(*workers):
        for number, task in enumerate(tasks):
            assert await task.result(timeout=RESULT_SECONDS) == number**2
    assert ran == {task.id: 1 for task in tasks}
    assert len(ran) == 55


async def plain_functions_run_beside_each_other(bench: Bench) -> None:
    """Each runs in a thread of its own: two that wait for each other both end."""
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())
    arrived: set[str] = set()

    @worker.handler("plain", timeout=20)
    def plain(task: TaskContext) -> object:
        arrived.add(task.id)
        while len(arrived) < 2:
            assert not task.cancel_asked, "it waits alone"
        return task.input + 1

    @worker.handler("fails", retry=Retry(attempts=1))
    def fails(task: TaskContext) -> object:
        raise LookupError(task.id)

    async with bench.crew(worker):
        tasks = await queue.submit_many("plain", [1, 2])
        bad = await queue.submit("fails")
        assert [await task.result(timeout=RESULT_SECONDS) for task in tasks] == [2, 3]
        view = await bench.ended(bad)
        assert (view.status, view.error) == ("failed", "LookupError")


async def no_more_run_at_once_than_allowed(bench: Bench) -> None:
    """Neither a batch, which is claimed ahead, nor singles exceed the number of slots."""
    queue = await bench.queue()
    worker = bench.worker(await bench.queue(), concurrency=3)
    running: set[str] = set()
    most: list[int] = []

    @worker.handler("slow")
    async def slow(task: TaskContext) -> None:
        running.add(task.id)
        most.append(len(running))
        await bench.clock.sleep(0.05)
        running.remove(task.id)

    tasks = await queue.submit_many("slow", [None] * 9)
    tasks += [await queue.submit("slow") for _ in range(3)]
    async with bench.crew(worker):
        for task in tasks:
            await task.result(timeout=RESULT_SECONDS)
    assert len(most) == 12
    assert max(most) == 3


async def a_key_is_one_task(bench: Bench) -> None:
    """Equal keys are one task that runs once: at the same time, meanwhile and afterwards."""
    queue, other = await bench.queue(), await bench.queue()
    worker = bench.worker(await bench.queue())
    ran: list[object] = []

    @worker.handler("keyed")
    async def keyed(task: TaskContext) -> object:
        ran.append(task.input)
        return task.input

    @worker.handler("also-keyed")
    async def also_keyed(task: TaskContext) -> object:
        return task.input

    at_once = await asyncio.gather(
        queue.submit("keyed", 1, key="k"), other.submit("keyed", 2, key="k")
    )
    async with bench.crew(worker):
        result = await at_once[0].result(timeout=RESULT_SECONDS)
        assert result in (1, 2)
        later = await other.submit("keyed", 3, key="k")
        assert {task.id for task in (*at_once, later)} == {later.id}
        assert await later.result(timeout=RESULT_SECONDS) == result
        assert (await queue.get(later.id)).key == "k"
        another = await queue.submit("keyed", 4, key="l")
        of_another_type = await queue.submit("also-keyed", 5, key="k")
        assert await another.result(timeout=RESULT_SECONDS) == 4
        assert await of_another_type.result(timeout=RESULT_SECONDS) == 5
    assert sorted(map(str, ran)) == sorted([str(result), "4"])


async def a_delayed_task_starts_when_it_is_due(bench: Bench) -> None:
    queue, mine = await bench.queue(), await bench.queue()
    worker = bench.worker(mine)
    latest: dict[str, float] = {}

    @worker.handler("later")
    async def later(task: TaskContext) -> None:
        latest[task.id] = (await mine.access.store.now()).latest

    async with bench.crew(worker):
        await (await queue.submit("later")).result(timeout=RESULT_SECONDS)
        latest.clear()
        tasks = [
            await queue.submit("later", delay=0.6),
            await queue.submit("later", delay=0.6, key="k"),
            *await queue.submit_many("later", [1, 2], delay=0.6),
        ]
        due = [(await task.view()).due_at for task in tasks]
        assert not latest, "nothing starts before it is due"
        for task in tasks:
            await task.result(timeout=RESULT_SECONDS)
    for task, due_at in zip(tasks, due, strict=True):
        assert due_at is not None
        assert due_at <= latest[task.id]


async def history_tells_what_happened(bench: Bench) -> None:
    queue = await bench.queue()
    worker = bench.worker(await bench.queue(), name="historian")

    @worker.handler("twice", retry=Retry(attempts=2, first_seconds=0.05))
    async def twice(task: TaskContext) -> None:
        if task.attempt == 1:
            raise ConnectionError("once")

    task = await queue.submit("twice")
    assert [event.what for event in await queue.history(task.id)] == ["submitted"]
    async with bench.crew(worker):
        await task.result(timeout=RESULT_SECONDS)
    events = await queue.history(task.id)
    assert [(event.what, event.attempt) for event in events] == [
        ("submitted", 0),
        ("claimed", 1),
        ("retrying", 1),
        ("claimed", 2),
        ("succeeded", 2),
    ]
    assert all(event.who.startswith("historian") for event in events[1:])
    for earlier, later in pairwise(events):
        # Each tells the store's time as it knows it.
        assert earlier.at <= later.at + _APART_SECONDS


async def workers_of_both_modes_share_a_queue(bench: Bench) -> None:
    queue = await bench.queue()
    ran: Counter[str] = Counter()
    workers = [
        bench.worker(await bench.queue(), name=mode, mode=mode, concurrency=4) for mode in Mode
    ]

    async def work(task: TaskContext) -> None:
        ran[task.id] += 1
        await bench.clock.sleep(0.02)

    for worker in workers:
        worker.handler("work")(work)
    async with bench.crew(*workers):
        tasks = await queue.submit_many("work", [None] * 20)
        tasks += [await queue.submit("work", key=f"k{number}") for number in range(5)]
        tasks += [await queue.submit("work") for _ in range(5)]
        for task in tasks:
            await task.result(timeout=RESULT_SECONDS)
    assert ran == {task.id: 1 for task in tasks}


async def settled_tasks_are_found_after_they_were_archived(bench: Bench) -> None:
    """The bucket's lists become empty again; what happened is still known."""
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())

    @worker.handler("work", retry=Retry(attempts=1))
    async def work(task: TaskContext) -> object:
        assert task.input != "bad", "it is bad"
        return task.input

    async with bench.crew(worker):
        good = await queue.submit_many("work", ["a", "b"])
        bad = await queue.submit("work", "bad")
        for task in (*good, bad):
            await bench.ended(task)
        before = await queue.history(good[1].id)
        await bench.clock.sleep(900)
        assert await bench.keys(queue, "tasks/") == []
        assert (await queue.get(good[1].id)).result == "b"
        assert await good[1].result(timeout=1) == "b"
        assert await queue.history(good[1].id) == before
        view = await queue.get(bad.id)
        assert (view.status, view.input, view.error) == ("failed", "bad", "AssertionError")
        with refused(TaskFailed, what="the result of an archived failure"):
            await bad.result(timeout=1)
        access = queue.access
        dead = [at async for at, _ in archive.dead(access.store, access.layout)]
        assert [at.task(0) for at in dead] == [bad.id], "it is among the dead letters"
        again = await queue.replay(bad.id)
        assert again.id != bad.id
        assert (await bench.ended(again)).status == "failed"


CHECKS: Final[tuple[Check, ...]] = (
    a_task_runs_and_gives_its_result,
    many_tasks_run_once_each,
    plain_functions_run_beside_each_other,
    no_more_run_at_once_than_allowed,
    a_key_is_one_task,
    a_delayed_task_starts_when_it_is_due,
    history_tells_what_happened,
    workers_of_both_modes_share_a_queue,
    settled_tasks_are_found_after_they_were_archived,
)
PATIENT: Final[tuple[Check, ...]] = (settled_tasks_are_found_after_they_were_archived,)
THREADED: Final[tuple[Check, ...]] = (plain_functions_run_beside_each_other,)
