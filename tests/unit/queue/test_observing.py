"""What a worker tells of itself: hooks, figures and spans."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.kernel.errors import InvalidInput, TaskCancelled, TaskFailed
from penstock.kernel.prometheus import Family, Histogram, exposed
from penstock.queue import metrics
from penstock.queue.client import Queue
from penstock.queue.execution import observer as hooks_module
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.observer import EVENTS, HOOK_SECONDS, Hooks, WorkerEvent
from penstock.queue.execution.retry import Retry
from penstock.queue.metrics import MetricsServer
from penstock.queue.settings import Polling, WorkerSettings
from penstock.queue.worker import Worker
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Meter, MeteredStore
from penstock.testing.virtual import World, simulate

QUICK = WorkerSettings(polling=Polling(min_seconds=0.1, max_seconds=0.2))


class Bench:
    """A queue and a worker on it."""

    def __init__(self, world: World, queue: Queue, meter: Meter) -> None:
        self.world = world
        self.clock = world.clock()
        self.queue = queue
        self.meter = meter
        self.worker = Worker(queue, mode="shared", name="w", settings=QUICK)
        self.told: list[WorkerEvent] = []

    def listen(self, *events: str) -> None:
        async def note(event: WorkerEvent) -> None:
            self.told.append(event)

        for each in events:
            self.worker.on(each)(note)

    async def work(self, until: Callable[[], Awaitable[None]]) -> None:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self.worker.run(signals=False))
            try:
                await until()
            finally:
                self.worker.stop()
                await running

    @property
    def heard(self) -> list[tuple[str, str, int]]:
        return [(event.what, event.status, event.attempt) for event in self.told]


def _run(check: Callable[[Bench], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        meter = Meter()
        memory = MemoryStore(MemoryBucket(world.clock()), clock=world.clock())
        store = MeteredStore(memory, meter)
        queue = await Queue.on(store, name="q", entropy=world.entropy("q"))
        await check(Bench(world, queue, meter))

    simulate(main, seed=1)


def test_hooks_are_told_what_becomes_of_a_task() -> None:
    async def check(bench: Bench) -> None:
        bench.listen(*EVENTS)

        @bench.worker.handler("t", retry=Retry(attempts=2, first_seconds=1))
        async def handle(task: TaskContext) -> None:
            await bench.clock.sleep(3)
            if task.input == "bad" or task.attempt == 1:
                raise OSError("no")

        async def until() -> None:
            await (await bench.queue.submit("t", "good")).result(timeout=60)
            with pytest.raises(TaskFailed):
                await (await bench.queue.submit("t", "bad")).result(timeout=60)

        await bench.work(until)
        first = [("attempt", "running", 1), ("retry", "retrying", 1), ("attempt", "running", 2)]
        ended = [("success", "succeeded", 2), ("settled", "succeeded", 2)]
        ended += [("failure", "failed", 2), ("settled", "failed", 2)]
        around = [("start", "", 0), ("stop", "", 0)]
        # Each event has a line of its own: among several there is no order.
        assert sorted(bench.heard) == sorted([*around, *first, *first, *ended])
        (failure,) = (event for event in bench.told if event.what == "failure")
        assert (failure.worker, failure.type, failure.error, failure.message) == (
            "w",
            "t",
            "OSError",
            "no",
        )
        assert failure.seconds == pytest.approx(3, abs=0.1)
        assert failure.task

    _run(check)


def test_what_is_settled_without_an_attempt_is_told_and_counted() -> None:
    async def check(bench: Bench) -> None:
        bench.listen("attempt", "settled", "failure")
        bench.worker.handler("t")(lambda _: None)
        tasks = await bench.queue.submit_many("t", [1] * 40, expires=10)
        await bench.clock.sleep(11)

        async def until() -> None:
            for task in tasks:
                with pytest.raises(TaskFailed):
                    await task.result(timeout=60)

        await bench.work(until)
        assert bench.heard.count(("settled", "expired", 0)) >= 24
        assert {what for what, _, _ in bench.heard} == {"settled"}
        assert len({event.task for event in bench.told}) == 40
        text = bench.worker.metrics()
        assert 'penstock_queue_tasks_total{type="t",outcome="expired"} 40' in text
        assert "penstock_queue_handler_seconds_count" not in text

    _run(check)


def test_a_hook_that_fails_or_hangs_changes_nothing_and_delays_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check(bench: Bench) -> None:
        bench.listen("settled")

        @bench.worker.on("success")
        async def fails(_: WorkerEvent) -> None:
            raise RuntimeError("a bug in a hook")

        @bench.worker.on("attempt")
        async def hangs(_: WorkerEvent) -> None:
            while True:
                try:
                    await bench.clock.sleep(1000)
                except asyncio.CancelledError:
                    if bench.world.now() - bench.world.epoch > 500:
                        raise

        @bench.worker.handler("t")
        async def handle(task: TaskContext) -> None:
            pass

        async def until() -> None:
            began = bench.world.now()
            tasks = await bench.queue.submit_many("t", list(range(10)))
            for task in tasks:
                await task.result(timeout=60)
            assert bench.world.now() - began < HOOK_SECONDS
            await bench.clock.sleep(600)

        await bench.work(until)
        assert len(bench.told) == 10

    _run(check)
    assert "a bug in a hook" in caplog.text
    assert caplog.text.count("did not end within 5 s") == 3
    assert caplog.text.count("is stuck, and will not be called again") == 1


def test_a_plain_hook_runs_in_a_thread_and_events_beyond_a_bound_are_dropped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks_module, "EVENTS_MAX", 10)
    threads: list[str] = []
    go_on = threading.Event()

    def plain(_: WorkerEvent) -> None:
        go_on.wait(4)
        threads.append(threading.current_thread().name)
        raise ValueError("caught")

    async def main() -> None:
        hooks = Hooks()
        hooks.add("settled", plain)
        async with hooks.running():
            for _ in range(20):
                hooks.tell(WorkerEvent(what="settled"))
            hooks.tell(WorkerEvent(what="start"))
            go_on.set()
        hooks.tell(WorkerEvent(what="settled"))

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    # One gave way to the end of the line.
    assert threads == ["penstock-handler"] * 9
    assert caplog.text.count("events are dropped") == 1
    assert "caught" in caplog.text


def test_an_event_that_never_comes_is_refused() -> None:
    worker = Worker(Queue("memory://", name="q"))
    with pytest.raises(InvalidInput, match="'sucess' is not an event"):
        worker.on("sucess")
    wrong: Any = "print"
    with pytest.raises(InvalidInput, match="cannot be called"):
        worker.on("success")(wrong)


def test_figures_tell_what_was_done_and_what_it_cost() -> None:
    async def check(bench: Bench) -> None:
        @bench.worker.handler("t", retry=Retry(attempts=2, first_seconds=1))
        async def handle(task: TaskContext) -> None:
            await bench.clock.sleep(2)
            assert 'attempts_running{type="t"} 1' in bench.worker.metrics()
            if task.attempt == 1:
                raise OSError("no")

        @bench.worker.handler("slow")
        async def slow(_: TaskContext) -> None:
            await bench.clock.sleep(1000)

        async def until() -> None:
            await (await bench.queue.submit("t")).result(timeout=60)
            task = await bench.queue.submit("slow")
            await bench.clock.sleep(5)
            await task.cancel()
            with pytest.raises(TaskCancelled):
                await task.result(timeout=60)

        await bench.work(until)
        lines = bench.worker.metrics().splitlines()
        for line in (
            'penstock_queue_tasks_total{type="t",outcome="succeeded"} 1',
            'penstock_queue_tasks_total{type="slow",outcome="cancelled"} 1',
            'penstock_queue_attempts_total{type="t",ending="retried"} 1',
            'penstock_queue_attempts_total{type="t",ending="succeeded"} 1',
            'penstock_queue_attempts_total{type="slow",ending="stopped"} 1',
            'penstock_queue_attempts_running{type="t"} 0',
            'penstock_queue_handler_seconds_count{type="t"} 2',
            'penstock_queue_handler_seconds_bucket{type="t",le="1"} 0',
            'penstock_queue_handler_seconds_bucket{type="t",le="5"} 2',
            'penstock_queue_start_seconds_count{type="t"} 1',
            "# TYPE penstock_queue_start_seconds histogram",
        ):
            assert line in lines
        requests = bench.meter.requests(label="claim", kind=None)
        said = [line for line in lines if 'cause="claim"' in line and "requests_total" in line]
        assert sum(int(line.split()[-1]) for line in said) == requests > 0
        (each,) = (line for line in lines if line.startswith("penstock_queue_dollars_per_task "))
        assert float(each.split()[1]) == pytest.approx(bench.meter.dollars() / 2)

    _run(check)


def test_a_worker_that_has_not_run_has_figures_too() -> None:
    text = Worker(Queue("memory://", name="q")).metrics()
    assert "# TYPE penstock_queue_tasks_total counter" in text


def test_a_histogram_counts_to_its_bounds_and_labels_are_escaped() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 7):
        histogram.note(value)
    family = Family("x", "What.", "histogram", histograms=[({"a": 'q"\\\n'}, histogram)])
    label = 'a="q\\"\\\\\\n"'
    assert exposed([family]).splitlines() == [
        "# HELP x What.",
        "# TYPE x histogram",
        f'x_bucket{{{label},le="1"}} 2',
        f'x_bucket{{{label},le="2"}} 3',
        f'x_bucket{{{label},le="+Inf"}} 4',
        f"x_sum{{{label}}} 10",
        f"x_count{{{label}}} 4",
    ]


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /metrics", 200),
        ("GET /metrics?x=1", 200),
        ("HEAD /metrics", 200),
        ("GET /", 404),
        ("POST /metrics", 405),
        ("x" * 40_000, 0),
    ],
)
def test_the_door_answers_scrapes_and_nothing_else(request_line: str, status: int) -> None:
    async def main() -> bytes:
        async with MetricsServer(lambda: "figures 1\n", host="127.0.0.1", port=0) as guard:
            reader, writer = await asyncio.open_connection("127.0.0.1", guard.port)
            writer.write(f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            try:
                return await reader.read()
            except ConnectionError:
                return b""
            finally:
                writer.close()

    answer = asyncio.run(main())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode() if status else b"")
    assert bool(answer) == bool(status)
    assert answer.endswith(b"figures 1\n") == (status == 200 and request_line.startswith("GET"))


def test_the_door_holds_few_who_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(metrics, "REQUEST_SECONDS", 1000)

    async def main() -> None:
        async with MetricsServer(str, host="127.0.0.1", port=0) as guard, asyncio.timeout(60):
            silent = [await asyncio.open_connection("127.0.0.1", guard.port) for _ in range(3)]
            with contextlib.suppress(ConnectionError):
                assert await silent[2][0].read() == b""
            for _, writer in silent:
                writer.transport.abort()

    asyncio.run(main())


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    async def main() -> None:
        async with MetricsServer(str, host="127.0.0.1", port=0) as guard:
            with pytest.raises(InvalidInput, match="Failed to serve metrics on"):
                await MetricsServer(str, host="127.0.0.1", port=guard.port).start()

    asyncio.run(main())


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[ReadableSpan]]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield lambda: list(exporter.get_finished_spans())
    provider.shutdown()


def test_an_attempt_is_linked_to_the_submit_that_it_comes_from(
    spans: Callable[[], list[ReadableSpan]],
) -> None:
    async def check(bench: Bench) -> None:
        @bench.worker.handler("t", retry=Retry(attempts=2, first_seconds=1))
        async def handle(task: TaskContext) -> None:
            with trace.get_tracer("users").start_as_current_span("inside"):
                await bench.clock.sleep(2)
            if task.attempt == 1:
                raise OSError("no")

        async def until() -> None:
            with trace.get_tracer("users").start_as_current_span("request"):
                tasks = await bench.queue.submit_many("t", [1])
                tasks.append(await bench.queue.submit("t", key="k"))
            for task in tasks:
                await task.result(timeout=60)

        await bench.work(until)

    _run(check)
    by_name: dict[str, list[ReadableSpan]] = {}
    for span in spans():
        by_name.setdefault(span.name, []).append(span)
    assert {name: len(each) for name, each in by_name.items()} == {
        "request": 1,
        "submit t": 2,
        "attempt t": 4,
        "inside": 4,
    }
    request = by_name["request"][0].context
    assert request is not None
    submits = {span.context.span_id for span in by_name["submit t"] if span.context}
    for span in by_name["submit t"]:
        assert span.parent is not None
        assert span.parent.span_id == request.span_id
    for span in by_name["attempt t"]:
        assert span.parent is None
        (link,) = span.links
        assert link.context.span_id in submits
        assert link.context.trace_id == request.trace_id
        assert span.attributes is not None
        is_first = span.attributes["penstock.attempt"] == 1
        assert span.attributes["penstock.outcome"] == ("retried" if is_first else "succeeded")
        assert span.status.is_ok != is_first
    attempts = {span.context.span_id for span in by_name["attempt t"] if span.context}
    assert {span.parent.span_id for span in by_name["inside"] if span.parent} == attempts


def test_without_a_collector_nothing_is_imported() -> None:
    code = (
        "import asyncio, sys\n"
        "from penstock import Queue\n"
        "async def main():\n"
        "    async with Queue('memory://', name='q') as queue:\n"
        "        await queue.submit('t', 1)\n"
        "asyncio.run(main())\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
