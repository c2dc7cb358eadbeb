"""The queue without `async`: the same answers and errors, from any thread, and no thread is left.

A file store and a real loop: what is tried here is threads, which have no virtual time.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import pytest

import penstock
from penstock import Polling, WorkerSettings
from penstock.kernel.errors import InvalidInput, TaskFailed, TaskNotFound
from penstock.queue import client
from penstock.queue.execution.retry import Retry
from penstock.sync import Mirror, Queue, Worker, _Portal

SETTINGS = WorkerSettings(polling=Polling(min_seconds=0.02, max_seconds=0.05), settle_seconds=0.02)
SECONDS = 60


def _threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "penstock.sync"]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    yield f"file://{tmp_path}"
    gc.collect()
    assert _threads() == []


def _worker(queue: Queue) -> Worker:
    worker = Worker(queue, mode="shared", settings=SETTINGS)

    @worker.handler("plain")
    def plain(task: Any) -> int:
        return int(task.input) * 2

    @worker.handler("async")
    async def asynchronous(task: Any) -> int:
        return int(task.input) * 3

    @worker.handler("bad", retry=Retry(attempts=1))
    def bad(task: Any) -> None:
        raise ValueError("no good")

    @worker.handler("more")
    def more(task: Any) -> str:
        return str(queue.submit("plain", task.input).id)

    return worker


def test_tasks_are_submitted_run_and_asked_for(url: str) -> None:
    with Queue(url, name="q") as queue, _worker(queue):
        plain = queue.submit("plain", 1)
        many = queue.submit_many("async", [1, 2])
        assert plain.result(timeout=SECONDS) == 2
        assert [task.result(timeout=SECONDS) for task in many] == [3, 6]
        assert plain.view().status == queue.get(plain.id).status == "succeeded"
        with pytest.raises(TaskFailed, match="no good"):
            queue.submit("bad").result(timeout=SECONDS)
        inner = queue.submit("more", 4).result(timeout=SECONDS)
        assert queue.result(inner, timeout=SECONDS) == 8
        assert queue.task(plain.id) == plain
        assert {queue.task(plain.id), plain} == {plain}
        assert len(queue.tasks(status="succeeded")) == 5


def test_every_public_method_of_the_async_queue_is_there(url: str) -> None:
    with Queue(url, name="q") as queue:
        for name in dir(client.Queue):
            if not name.startswith("_"):
                assert hasattr(queue, name), name
                assert name in dir(queue)
        given = inspect.signature(queue.submit).parameters
        assert list(given) == list(inspect.signature(client.Queue.submit).parameters)[1:]
        assert queue.submit.__doc__ == client.Queue.submit.__doc__
        with pytest.raises(AttributeError):
            _ = queue.no_such_thing
        with pytest.raises(TaskNotFound):
            queue.get("now.000.1jgfjjz0000000000000000a.1.0.resize")
        assert "Queue" in repr(queue)


def test_it_works_inside_of_a_loop_that_runs_as_in_a_notebook(url: str) -> None:
    async def cell() -> int:
        with Queue.open(url, name="q") as queue, _worker(queue):
            return int(queue.submit("plain", 5).result(timeout=SECONDS))

    assert asyncio.run(cell()) == 10


def test_a_queue_that_is_closed_or_cannot_be_opened_leaves_no_thread(url: str) -> None:
    with pytest.raises(penstock.QueueNotFound):
        Queue(url, name="q", create=False)
    assert _threads() == []
    queue = Queue(url, name="q")
    queue.close()
    queue.close()
    assert _threads() == []
    with pytest.raises(InvalidInput, match="closed"):
        queue.submit("plain")


def test_a_queue_that_nobody_refers_to_is_closed_and_a_task_refers_to_its_queue(url: str) -> None:
    task = Queue(url, name="q").submit("plain", 1)
    gc.collect()
    assert task.view().status == "ready"
    del task
    gc.collect()
    assert _threads() == []


def test_closing_the_queue_stops_its_workers(url: str) -> None:
    queue = Queue(url, name="q")
    worker = _worker(queue)
    worker.start()
    with pytest.raises(InvalidInput, match="runs once"):
        worker.start()
    queue.submit("plain", 1).result(timeout=SECONDS)
    queue.close()
    worker.join(timeout=SECONDS)


def test_a_worker_that_cannot_run_says_so_to_who_runs_it(url: str) -> None:
    with Queue(url, name="q") as queue:
        worker = Worker(queue)
        with pytest.raises(InvalidInput, match="no handler"):
            worker.run()


def test_a_worker_in_the_foreground_stops_by_a_signal_or_by_its_handler(url: str) -> None:
    with Queue(url, name="q") as queue:
        before = signal.getsignal(signal.SIGTERM)
        worker = _worker(queue)

        @worker.handler("signal")
        def kill(task: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        task = queue.submit("signal")
        worker.run()
        assert task.result(timeout=SECONDS) is None
        assert signal.getsignal(signal.SIGTERM) is before

        second = _worker(queue)
        second.handler("stop")(lambda task: second.stop())
        task = queue.submit("stop")
        second.run(signals=False)
        assert task.result(timeout=SECONDS) is None


def test_a_worker_in_the_foreground_ends_when_it_is_done(url: str) -> None:
    with Queue(url, name="q") as queue:
        worker = _worker(queue)
        begun: list[str] = []
        worker.startup()(lambda: begun.append(threading.current_thread().name))
        tasks = queue.submit_many("plain", [1, 2, 3])
        worker.run(signals=False, max_tasks=2)
        assert begun
        assert sum(task.view().status == "succeeded" for task in tasks) == 2
        _worker(queue).run(signals=False, until_empty=True)
        assert [task.result(timeout=SECONDS) for task in tasks] == [2, 4, 6]


def test_an_async_handler_that_would_wait_for_itself_is_told(url: str) -> None:
    with Queue(url, name="q") as queue:
        worker = _worker(queue)

        @worker.handler("wrong", retry=Retry(attempts=1))
        async def wrong(task: Any) -> str:
            return str(queue.submit("plain", 1).id)

        with worker, pytest.raises(TaskFailed, match="would wait for itself"):
            queue.submit("wrong").result(timeout=SECONDS)


class _Thing:
    """Something that is used with `async with` and `async for`, as batches may be."""

    entered = 0

    async def __aenter__(self) -> Self:
        self.entered += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.entered -= 1

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async def add(self, others: list[_Thing]) -> int:
        return sum(other.entered for other in others)

    def other(self) -> _Thing:
        return _Thing()


def test_what_is_async_around_is_used_without() -> None:
    portal = _Portal()
    try:
        thing = Mirror(_Thing(), portal)
        with thing as entered:
            assert entered is thing
            assert thing.entered == 1
            assert list(thing) == [0, 1, 2]
        assert thing.entered == 0
    finally:
        portal.stop()


def test_a_call_that_is_interrupted_is_cancelled_in_the_loop(monkeypatch: Any) -> None:
    portal = _Portal()
    cancelled: Future[bool] = Future()
    began = threading.Event()

    async def forever() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set_result(True)
            raise

    def interrupted(_: object) -> None:
        began.wait(SECONDS)
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.wait", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            portal.run(forever())
        assert cancelled.result(SECONDS)
    finally:
        portal.stop()
