"""A worker's figures for StatsD: what was added, gauges, tags, and datagrams of a fair size."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import InvalidInput
from penstock.queue.client import Queue
from penstock.queue.metrics import (
    DATAGRAM_BYTES_MAX,
    StatsdPusher,
    WorkerMetrics,
    datagrams,
    lines_of,
)
from penstock.queue.worker import Worker


def test_counters_are_what_was_added_and_gauges_what_is() -> None:
    metrics = WorkerMetrics()
    last: dict[str, float] = {}
    metrics.tasks["resize", "succeeded"] += 3
    metrics.running["resize"] = 2
    metrics.note_end("resize", "succeeded", 0.5)
    first = list(lines_of(metrics.text(None), last))
    assert first == [
        "penstock_queue_tasks_total:3|c|#type:resize,outcome:succeeded",
        "penstock_queue_attempts_total:1|c|#type:resize,ending:succeeded",
        "penstock_queue_attempts_running:2|g|#type:resize",
        "penstock_queue_handler_seconds_sum:0.5|c|#type:resize",
        "penstock_queue_handler_seconds_count:1|c|#type:resize",
    ]
    metrics.tasks["resize", "succeeded"] += 2
    again = list(lines_of(metrics.text(None), last))
    assert again == ["penstock_queue_tasks_total:2|c|#type:resize,outcome:succeeded", first[2]]


def test_what_would_end_a_line_or_a_tag_is_not_sent() -> None:
    metrics = WorkerMetrics()
    metrics.tasks['a|b:"c,\n', "failed"] += 1
    (line,) = lines_of(metrics.text(None), {})
    assert line.startswith("penstock_queue_tasks_total:1|c|#type:a_b_")
    assert line.count("|") == 2
    assert line.count(",") == 1


def test_datagrams_go_through_in_one_piece_and_lose_nothing() -> None:
    lines = [f"name{number}:1|c" for number in range(500)]
    sent = list(datagrams(iter(lines)))
    assert len(sent) > 1
    assert all(len(each) <= DATAGRAM_BYTES_MAX for each in sent)
    assert b"\n".join(sent).decode().split("\n") == lines
    assert list(datagrams(iter(()))) == []


def test_what_was_counted_last_is_sent_at_the_end() -> None:
    async def main(port: int) -> None:
        metrics = WorkerMetrics()
        pusher = StatsdPusher(
            lambda: metrics.text(None), host="127.0.0.1", port=port, clock=SystemClock()
        )
        async with pusher:
            metrics.tasks["t", "succeeded"] += 1

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as heard:
        heard.bind(("127.0.0.1", 0))
        heard.settimeout(30)
        asyncio.run(main(heard.getsockname()[1]))
        assert heard.recv(2000) == b"penstock_queue_tasks_total:1|c|#type:t,outcome:succeeded"


def test_a_worker_sends_what_it_has_done_where_it_is_told_to(tmp_path: Path) -> None:
    async def main(address: str) -> None:
        async with Queue(f"file://{tmp_path}/store", name="q") as queue:
            worker = Worker(queue, mode="shared", statsd=address)
            worker.handler("t")(lambda _task: None)
            await queue.submit("t")
            await worker.run(signals=False, max_tasks=1)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as heard:
        heard.bind(("127.0.0.1", 0))
        heard.settimeout(30)
        asyncio.run(main(f"127.0.0.1:{heard.getsockname()[1]}"))
        assert b"penstock_queue_tasks_total:1|c|#type:t,outcome:succeeded" in heard.recv(2000)


@pytest.mark.parametrize("wrong", ["8125", "host:", "host:0", ":8125", "host:70000", 8125])
def test_what_is_no_address_is_refused_at_once(wrong: object) -> None:
    with pytest.raises(InvalidInput, match="statsd takes HOST:PORT, not"):
        Worker(Queue("memory://q", name="q"), statsd=wrong)  # type: ignore[arg-type]  # as users may
