"""The queue's contract of tasks: how they run, how they end, and what is refused.

- Running: results, batches, concurrency, keys, delays, history, archive.
- Ending: retries, dead letters, timeouts, cancellation.
- Refused or ignored: invalid input, types without a handler, objects of others, newer formats.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any, Final

from penstock.kernel.document_format import encode
from penstock.kernel.errors import (
    InvalidInput,
    NewerFormat,
    NotOurs,
    NotSettled,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
)
from penstock.queue import archive
from penstock.queue.client import Queue, Task
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.ids import task_at
from penstock.queue.settings import DiscoveryMode
from penstock.queue.submitter import INPUT_BYTES_MAX
from penstock.store.base import CREATE, REPLACE
from penstock.testing.queue_contract.bench import (
    QUICK,
    RESULT_SECONDS,
    Bench,
    QueueCheck,
    captured_logs,
)
from penstock.testing.store_contract import refused

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
        bench.worker(await bench.queue(), name=mode, mode=mode, concurrency=4)
        for mode in DiscoveryMode
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


RUN_CHECKS: Final[tuple[QueueCheck, ...]] = (
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
PATIENT_RUN_CHECKS: Final[tuple[QueueCheck, ...]] = (
    settled_tasks_are_found_after_they_were_archived,
)
THREADED_RUN_CHECKS: Final[tuple[QueueCheck, ...]] = (plain_functions_run_beside_each_other,)


_LONG_SECONDS: Final = 3 * QUICK.task_lease_seconds


async def a_retry_is_decided_by_class(bench: Bench) -> None:
    """A subclass of what is retried is retried; what only sounds like it is not."""
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())
    errors: dict[str, type[Exception]] = {
        "same": OSError,
        "subclass": TimeoutError,
        "another": ValueError,
    }
    runs: Counter[str] = Counter()

    @worker.handler("raise", retry=Retry(attempts=3, first_seconds=0.02, on=(OSError,)))
    async def fail(task: TaskContext) -> None:
        runs[task.input] += 1
        raise errors[task.input]("OSError: connection timed out, please retry")

    async with bench.crew(worker):
        tasks = [await queue.submit("raise", name) for name in errors]
        views = [await bench.ended(task) for task in tasks]
    assert runs == {"same": 3, "subclass": 3, "another": 1}
    assert [(view.status, view.attempt) for view in views] == [
        ("failed", 3),
        ("failed", 3),
        ("failed", 1),
    ]


async def pauses_between_attempts_grow(bench: Bench) -> None:
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())
    starts: list[float] = []
    retry = Retry(attempts=3, first_seconds=0.2, backoff=3.0, jitter=0.0)

    @worker.handler("fail", retry=retry)
    async def fail(task: TaskContext) -> str:
        starts.append(bench.clock.monotonic())
        if task.attempt < 3:
            raise OSError(task.attempt)
        return "at last"

    async with bench.crew(worker):
        task = await queue.submit("fail")
        assert await task.result(timeout=RESULT_SECONDS) == "at last"
    first, second, third = starts
    assert second - first >= 0.2
    assert third - second >= 0.6


async def what_failed_for_good_can_be_replayed(bench: Bench) -> None:
    """A replay is a new task with the same input; to replay twice is to replay once."""
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())
    broken = {"yes"}

    @worker.handler("mend", retry=Retry(attempts=2, first_seconds=0.02))
    async def mend(task: TaskContext) -> object:
        if broken:
            raise KeyError("not yet")
        return task.input

    async with bench.crew(worker):
        task = await queue.submit("mend", {"n": 7})
        view = await bench.ended(task)
        assert (view.status, view.attempt, view.error) == ("failed", 2, "KeyError")
        assert "KeyError" in view.trace
        broken.clear()
        again, twice = await queue.replay(task.id), await queue.replay(task.id)
        assert again.id == twice.id != task.id
        assert await again.result(timeout=RESULT_SECONDS) == {"n": 7}
        assert (await queue.get(task.id)).status == "failed", "the dead letter stays"


async def a_timeout_is_enforced(bench: Bench) -> None:
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())
    started: list[int] = []
    finished: list[int] = []

    @worker.handler("slow", timeout=0.2, retry=Retry(attempts=2, first_seconds=0.02))
    async def slow(task: TaskContext) -> None:
        started.append(task.attempt)
        await bench.clock.sleep(_LONG_SECONDS)
        finished.append(task.attempt)

    async with bench.crew(worker):
        view = await bench.ended(await queue.submit("slow"))
    assert (view.status, view.error, view.attempt) == ("failed", "TimeoutError", 2)
    assert (started, finished) == ([1, 2], [])


async def a_task_longer_than_its_lease_runs_once(bench: Bench) -> None:
    """The lease is renewed as long as the task runs, for other workers to see; none takes it."""
    queue = await bench.queue()
    workers = [bench.worker(await bench.queue(), name=f"worker{n}") for n in range(2)]
    attempts: list[int] = []

    async def last(task: TaskContext) -> str:
        attempts.append(task.attempt)
        await bench.clock.sleep(_LONG_SECONDS)
        return "done"

    for worker in workers:
        worker.handler("last", timeout=_LONG_SECONDS * 10)(last)
    async with bench.crew(*workers):
        task = await queue.submit("last")
        assert await task.result(timeout=RESULT_SECONDS) == "done"
    assert attempts == [1]
    assert [event.what for event in await queue.history(task.id)] == [
        "submitted",
        "claimed",
        "succeeded",
    ]


async def what_is_cancelled_before_its_start_never_runs(bench: Bench) -> None:
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())
    ran: list[object] = []

    @worker.handler("work")
    async def work(task: TaskContext) -> object:
        ran.append(task.input)
        return task.input

    single = await queue.submit("work", "single")
    keyed = await queue.submit("work", "keyed", key="k")
    delayed = await queue.submit("work", "delayed", delay=3600)
    pack = await queue.submit_many("work", ["first", "second", "third"])
    for task in (single, keyed, delayed, pack[1]):
        view = await queue.cancel(task.id)
        assert view.status == "cancelled"
        assert (await queue.cancel(task.id)).status == "cancelled", "twice is once"
    async with bench.crew(worker):
        assert await pack[0].result(timeout=RESULT_SECONDS) == "first"
        assert await pack[2].result(timeout=RESULT_SECONDS) == "third"
        for task in (single, keyed, delayed, pack[1]):
            with refused(TaskCancelled, what="the result of a cancelled task"):
                await task.result(timeout=RESULT_SECONDS)
    assert sorted(map(str, ran)) == ["first", "third"]
    assert (await queue.cancel(pack[0].id)).status == "succeeded", "what has ended stays so"


async def what_is_cancelled_while_it_runs_ends_as_cancelled(bench: Bench) -> None:
    """Whether its handler heeds the request, or returns a result in spite of it."""
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())
    begun: set[object] = set()

    @worker.handler("run", retry=Retry(attempts=3))
    async def run(task: TaskContext) -> str:
        begun.add(task.input)
        try:
            await bench.clock.sleep(_LONG_SECONDS)
        except asyncio.CancelledError:
            if task.input == "heeds":
                raise
            assert task.cancel_asked
        return "completed"

    async with bench.crew(worker):
        tasks = [await queue.submit("run", how) for how in ("heeds", "returns")]
        await bench.until(lambda: len(begun) == 2, what="both run")
        for task in tasks:
            view = await queue.cancel(task.id)
            assert view.cancel_asked or view.status == "cancelled"
        for task in tasks:
            view = await bench.ended(task)
            assert (view.status, view.attempt, view.result) == ("cancelled", 1, None)


async def a_result_says_what_became_of_the_task(bench: Bench) -> None:
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())

    @worker.handler("fail", retry=Retry(attempts=1))
    async def fail(task: TaskContext) -> None:
        raise LookupError(f"there is no {task.input}")

    waiting = await queue.submit("nobody")
    with refused(NotSettled, what="the result of a task that waits"):
        await waiting.result(timeout=0.05)
    with refused(InvalidInput, what="the replay of a task that waits"):
        await queue.replay(waiting.id)
    async with bench.crew(worker):
        failed = await queue.submit("fail", "such thing")
        error = await _error_of(failed)
        assert (error.error, error.task) == ("LookupError", failed.id)
        assert "there is no such thing" in error.message
    await _unknown_tasks_are_not_found(queue, waiting.id)


async def _error_of(task: Task) -> TaskFailed:
    try:
        await task.result(timeout=RESULT_SECONDS)
    except TaskFailed as error:
        return error
    raise AssertionError("the result of a failed task must raise TaskFailed")


async def _unknown_tasks_are_not_found(queue: Queue, known: str) -> None:
    place, slot, pack, rest = known.split(".", 3)
    other = f"{place}.{slot}.{pack[::-1]}.{rest}"
    for ask in (queue.get, queue.history, queue.cancel, queue.replay):
        with refused(TaskNotFound, what=f"{ask.__name__} of an unknown task"):
            await ask(other)
        with refused(InvalidInput, what=f"{ask.__name__} of what is no id"):
            await ask("not an id")


END_CHECKS: Final[tuple[QueueCheck, ...]] = (
    a_retry_is_decided_by_class,
    pauses_between_attempts_grow,
    what_failed_for_good_can_be_replayed,
    a_timeout_is_enforced,
    a_task_longer_than_its_lease_runs_once,
    what_is_cancelled_before_its_start_never_runs,
    what_is_cancelled_while_it_runs_ends_as_cancelled,
    a_result_says_what_became_of_the_task,
)
PATIENT_END_CHECKS: Final[tuple[QueueCheck, ...]] = (a_task_longer_than_its_lease_runs_once,)


_UNHANDLED: Final = 480
_AT_ONCE: Final = 24
_LARGE_BYTES: Final = 300_000


async def wrong_input_is_refused_and_nothing_is_written(bench: Bench) -> None:
    queue = await bench.queue()
    before = await bench.keys(queue)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ({1, 2}, object(), b"bytes", float("nan"), "\ud800", {"a": [object()]}, deep):
        with refused(InvalidInput, what=f"an input of {type(value).__name__}"):
            await queue.submit("work", value)
    with refused(InvalidInput, what="an input that is too large"):
        await queue.submit("work", "x" * INPUT_BYTES_MAX)
    with refused(InvalidInput, what="a batch with one wrong input"):
        await queue.submit_many("work", [1, 2, object()])
    for name in ("", "a/b", ".hidden", "a b", "x" * 101, "ä", "a~b", "t.ledger"):
        with refused(InvalidInput, what=f"the type {name[:20]!r}"):
            await queue.submit(name, 1)
        with refused(InvalidInput, what=f"the type {name[:20]!r} with a key"):
            await queue.submit(name, 1, key="k")
    for key in ("", "k" * 1001, "\ud800"):
        with refused(InvalidInput, what=f"the key {key[:20]!r}"):
            await queue.submit("work", 1, key=key)
    for delay in (-1.0, float("inf"), float("nan"), 1e12):
        with refused(InvalidInput, what=f"a delay of {delay}"):
            await queue.submit("work", 1, delay=delay)
    assert await queue.submit_many("work", []) == []
    assert await bench.keys(queue) == before


async def a_large_input_and_a_large_result_arrive_whole(bench: Bench) -> None:
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())
    largest = "x" * _LARGE_BYTES

    @worker.handler("large")
    async def large(task: TaskContext) -> object:
        return [len(task.input), task.input == largest]

    @worker.handler("echo")
    async def echo(task: TaskContext) -> object:
        return task.input

    async with bench.crew(worker):
        tasks = await queue.submit_many("large", [largest] * 5)
        for task in tasks:
            assert await task.result(timeout=RESULT_SECONDS) == [len(largest), True]
        assert (await queue.get(tasks[4].id)).input == largest
        echoed = await queue.submit("echo", largest, key="large")
        assert await echoed.result(timeout=RESULT_SECONDS) == largest
        view = await queue.get(echoed.id)
        assert view.input == view.result == largest
        assert view.input_ref is not None
        assert view.result_ref is not None


async def a_type_without_a_handler_is_never_claimed_and_blocks_nobody(bench: Bench) -> None:
    queue = await bench.queue()
    worker = bench.worker(await bench.queue(), concurrency=2)

    @worker.handler("known")
    async def known(task: TaskContext) -> object:
        return task.input

    for _ in range(0, _UNHANDLED, _AT_ONCE):
        await asyncio.gather(*(queue.submit("unknown") for _ in range(_AT_ONCE)))
    pack = await queue.submit_many("unknown", [None] * 3)
    task = await queue.submit("known", "through")
    async with bench.crew(worker):
        assert await task.result(timeout=RESULT_SECONDS) == "through"
    assert (await queue.get(pack[0].id)).status == "ready"
    # Of a type that is direct, what nobody could be told of is where things become due.
    places = [*await bench.keys(queue, "tasks/"), *await bench.keys(queue, "ready/")]
    left = [key for key in places if "unknown" in key]
    assert len(left) == _UNHANDLED + 1
    assert not any(key.endswith(".ledger") for key in left)


async def objects_of_others_are_left_alone(bench: Bench) -> None:
    """Keys that mean nothing here, and packs that cannot be read: the rest is served."""
    queue = await bench.queue()
    worker = bench.worker(await bench.queue())

    @worker.handler("work")
    async def work(task: TaskContext) -> object:
        return task.input

    root = queue.access.layout.root
    store = queue.access.store
    example = task_at((await queue.submit("work", "example")).id)[0].path
    name = example.rpartition("/")[2]
    theirs = {
        "notes.txt": b"by hand",
        "tasks/000/notes.txt": b"by hand",
        "tasks/zzz/notes.txt": b"by hand",
        "tasks/000/" + name: b"no pack",
        "tasks/001/" + name: b'{"penstock":"pack/99","type":"work","inputs":{"new":"form"}}',
        "ready/00000001/000/" + name.replace("~1~", "~2~"): b'{"penstock":"image/1"}',
        "keyed/000/notes.txt": b"by hand",
        "workers/notes.txt": b"by hand",
        "shard-leases/notes.txt": b"by hand",
    }
    for key, body in theirs.items():
        await store.put(root + key, body, CREATE)
    with captured_logs() as said:
        async with bench.crew(worker):
            tasks = [await queue.submit("work", 1), await queue.submit("work", 2, key="k")]
            tasks += await queue.submit_many("work", [3, 4])
            results = [await task.result(timeout=RESULT_SECONDS) for task in tasks]
            assert results == [1, 2, 3, 4]
            await bench.until(
                lambda: all(any(what in line for line in said) for what in ("format 99", "notes")),
                what="the log names what is left alone",
            )
    for key, body in theirs.items():
        found = await store.get(root + key)
        assert found is not None
        assert found.body == body, f"{key} is left as it is"


async def a_queue_of_a_newer_format_is_not_opened(bench: Bench) -> None:
    queue = await bench.queue()
    config = queue.access.layout.config
    store = queue.access.store
    body = encode(queue.access.config)
    await store.put(config, body.replace(b"queue/1", b"queue/2"), REPLACE)
    with refused(NewerFormat, what="to open a queue of a newer format"):
        await bench.queue()
    await store.put(config, b"by hand", REPLACE)
    with refused(NotOurs, what="to open a queue whose settings are not ours"):
        await bench.queue()
    await store.put(config, body, REPLACE)
    assert (await bench.queue()).access.config == queue.access.config


REFUSAL_CHECKS: Final[tuple[QueueCheck, ...]] = (
    wrong_input_is_refused_and_nothing_is_written,
    a_large_input_and_a_large_result_arrive_whole,
    a_type_without_a_handler_is_never_claimed_and_blocks_nobody,
    objects_of_others_are_left_alone,
    a_queue_of_a_newer_format_is_not_opened,
)
