"""The contract of how tasks end: retries, dead letters, timeouts, cancellation, results."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from penstock.kernel.errors import (
    InvalidInput,
    NotSettled,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
)
from penstock.queue.client import Queue, Task
from penstock.queue.running.handlers import TaskContext
from penstock.queue.running.retry import Retry
from penstock.testing.queue_contract.bench import QUICK, RESULT_SECONDS, Bench, Check
from penstock.testing.store_contract.check import refused

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


CHECKS: Final[tuple[Check, ...]] = (
    a_retry_is_decided_by_class,
    pauses_between_attempts_grow,
    what_failed_for_good_can_be_replayed,
    a_timeout_is_enforced,
    a_task_longer_than_its_lease_runs_once,
    what_is_cancelled_before_its_start_never_runs,
    what_is_cancelled_while_it_runs_ends_as_cancelled,
    a_result_says_what_became_of_the_task,
)
PATIENT: Final[tuple[Check, ...]] = (a_task_longer_than_its_lease_runs_once,)
