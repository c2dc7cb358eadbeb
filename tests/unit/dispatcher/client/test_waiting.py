"""Waiting: when it is over, what it survives, how often it asks, and when it gives up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from penstock import Client, NotSettled, PenstockError
from penstock.dispatcher.client.waiter import OUTAGE_SECONDS
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable
from penstock.protocol.steering import BackfillAnswer, StatusAnswer
from penstock.testing import World, simulate
from tests.unit.dispatcher.client.scripted import (
    Scripted,
    Step,
    backfill,
    job,
    problem,
    status,
    task,
)

GONE = httpx.ConnectError("refused")


def waited(scripted: Scripted, wait: Callable[[Client], Awaitable[object]]) -> tuple[Any, float]:
    """What came of waiting, and how long it took in virtual time."""

    async def main(world: World) -> tuple[Any, float]:
        began = world.now()
        clock, entropy = world.clock(), world.entropy("client")
        transport = scripted.transport
        async with Client("http://x", clock=clock, entropy=entropy, transport=transport) as client:
            try:
                found: object = await wait(client)
            except PenstockError as error:
                found = error
        return found, world.now() - began

    return simulate(main, seed=1)


def test_a_backfill_is_over_when_its_tasks_are() -> None:
    scripted = Scripted().on(
        "GET /v1/backfills/7",
        backfill(),
        backfill(planned=1000, open=100, state="done"),
        done := backfill(planned=1000, state="done", dead=3),
    )
    told: list[BackfillAnswer] = []
    found, _ = waited(scripted, lambda c: c.wait(backfill=7, told=told.append))
    assert found == done
    assert [each.open for each in told] == [0, 100, 0]


@pytest.mark.parametrize("word", ["completed", "dead", "cancelled"])
def test_a_task_is_over_however_it_has_ended(word: str) -> None:
    steps = [task(status=each) for each in ("queued", "running", "retrying", word)]
    scripted = Scripted().on("GET /v1/tasks/42", *steps)
    found, _ = waited(scripted, lambda c: c.wait(task=42))
    assert found.task.status == word
    assert len(scripted.heard) == 4


BUSY = [
    status(events_pending=1),
    status(job(queued=1)),
    status(job(running=1)),
    status(backfills=[backfill()]),
    status(backfills=[backfill(state="cancelled", open=1)]),
]
IDLE = [
    status(),
    status(job("tick", activation="source", running=1)),
    status(job(dead=1)),
    status(backfills=[backfill(state="paused", open=0)]),
    status(outbox_pending=1, outbox_parked=1),
    status(dag_version=None, workers=0),
]


@pytest.mark.parametrize("busy", BUSY)
def test_work_that_is_left_is_waited_for(busy: StatusAnswer) -> None:
    scripted = Scripted().on("GET /v1/status", busy, busy, status())
    found, _ = waited(scripted, lambda c: c.wait())
    assert found == status()
    assert len(scripted.heard) == 4


@pytest.mark.parametrize("idle", IDLE)
def test_what_nothing_becomes_of_is_not_waited_for(idle: StatusAnswer) -> None:
    scripted = Scripted().on("GET /v1/status", idle)
    found, seconds = waited(scripted, lambda c: c.wait())
    assert found == idle
    assert seconds < 1


def test_idle_is_seen_twice_in_a_row() -> None:
    scripted = Scripted().on("GET /v1/status", status(), BUSY[0], status())
    waited(scripted, lambda c: c.wait())
    assert len(scripted.heard) == 4


def test_a_long_wait_asks_seldom() -> None:
    scripted = Scripted().on("GET /v1/backfills/7", backfill(planned=120, open=20))
    found, seconds = waited(scripted, lambda c: c.wait(backfill=7, timeout_seconds=3600))
    assert isinstance(found, NotSettled)
    assert isinstance(found, TimeoutError)
    assert found.message == (
        "The backfill 7 of totals is not over: it is running,"
        " and 100 of 1,000 partitions have ended."
    )
    assert seconds == pytest.approx(3600)
    assert 1000 < len(scripted.heard) < 1500


def test_what_is_left_is_said_with_the_reason_why() -> None:
    stuck = status(job(queued=2, paused=["The disk is full."]), events_pending=1)
    scripted = Scripted().on("GET /v1/status", stuck)
    found, _ = waited(scripted, lambda c: c.wait(timeout_seconds=0))
    assert found.message == (
        "There is still work: 1 events to route;"
        " clean (2 waiting, 0 running, paused: The disk is full.)."
    )


def test_no_time_is_one_look() -> None:
    scripted = Scripted().on("GET /v1/tasks/42", task(status="running"))
    found, seconds = waited(scripted, lambda c: c.wait(task=42, timeout_seconds=0))
    assert found.message == "The task 42 of clean is not over: it is running."
    assert (len(scripted.heard), seconds) == (1, 0)


def test_a_dispatcher_that_is_restarted_interrupts_nothing() -> None:
    silence: list[Step] = [GONE] * 20
    scripted = Scripted().on("GET /v1/tasks/42", task(), *silence, task(status="completed"))
    found, seconds = waited(scripted, lambda c: c.wait(task=42))
    assert found.task.status == "completed"
    assert 20 < seconds < OUTAGE_SECONDS


def test_a_dispatcher_that_stays_away_is_told() -> None:
    scripted = Scripted().on("GET /v1/tasks/42", task(), GONE)
    found, seconds = waited(scripted, lambda c: c.wait(task=42))
    assert isinstance(found, DispatcherUnavailable)
    assert OUTAGE_SECONDS < seconds < OUTAGE_SECONDS + 10


def test_one_that_was_never_there_is_told_at_once() -> None:
    found, seconds = waited(Scripted().on("GET /v1/tasks/42", GONE), lambda c: c.wait(task=42))
    assert isinstance(found, DispatcherUnavailable)
    assert seconds == 0


def test_a_refusal_ends_the_wait() -> None:
    scripted = Scripted().on("GET /v1/tasks/42", task(), problem(404, title="It is gone."))
    found, _ = waited(scripted, lambda c: c.wait(task=42))
    assert isinstance(found, DispatcherRefused)
    assert len(scripted.heard) == 2
