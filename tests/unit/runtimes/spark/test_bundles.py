"""Tickets of one batch travel together; others alone. In virtual time."""

from __future__ import annotations

import asyncio

from penstock.runtimes.base import AttemptWork
from penstock.runtimes.spark.host_process import GATHER_SECONDS, BatchCollector, Bundle, Ticket
from penstock.testing.runtime_contract import RecordingReporter
from penstock.testing.virtual import simulate


def _ticket(task_id: int, batch: str = "", size: int = 1) -> Ticket:
    work = AttemptWork(
        task_id=task_id,
        attempt=1,
        job="job",
        operator="spark.sql",
        generation="first",
        batch=batch,
        batch_size=size,
    )
    return Ticket(work, RecordingReporter(), asyncio.get_running_loop().create_future())


def _seen(whole: list[Bundle]) -> list[list[int]]:
    return [list(bundle.tickets) for bundle in whole]


async def _wait(seconds: float) -> None:
    waiting = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(seconds, waiting.set_result, None)
    await waiting


def test_a_whole_batch_goes_at_once_and_what_is_alone_does_too() -> None:
    async def test() -> None:
        whole: list[Bundle] = []
        gathering = BatchCollector(whole.append)
        gathering.add(_ticket(1, "b", 2))
        gathering.add(_ticket(2))
        assert _seen(whole) == [[2]]
        gathering.add(_ticket(3, "b", 2))
        assert _seen(whole) == [[2], [1, 3]]
        assert len({bundle.number for bundle in whole}) == 2

    simulate(test(), seed=1)


def test_a_batch_that_does_not_become_whole_goes_after_a_moment() -> None:
    async def test() -> None:
        whole: list[Bundle] = []
        gathering = BatchCollector(whole.append)
        for task_id in (1, 2):
            gathering.add(_ticket(task_id, "b", 3))
        await _wait(GATHER_SECONDS / 2)
        assert whole == []
        await _wait(GATHER_SECONDS)
        assert _seen(whole) == [[1, 2]]
        gathering.add(_ticket(3, "b", 3))
        await _wait(2 * GATHER_SECONDS)
        assert _seen(whole) == [[1, 2], [3]]

    simulate(test(), seed=1)


def test_what_is_dropped_is_not_waited_for() -> None:
    async def test() -> None:
        whole: list[Bundle] = []
        gathering = BatchCollector(whole.append)
        tickets = [_ticket(task_id, "b", 3) for task_id in (1, 2, 3)]
        for ticket in tickets[:2]:
            gathering.add(ticket)
        assert gathering.drop(tickets[0])
        gathering.add(tickets[2])
        assert _seen(whole) == [[2, 3]]
        assert not gathering.drop(tickets[1])
        only = _ticket(4, "c", 1)
        gathering.add(only)
        assert not gathering.drop(only)

    simulate(test(), seed=1)


def test_a_batch_of_which_all_are_dropped_never_goes() -> None:
    async def test() -> None:
        whole: list[Bundle] = []
        gathering = BatchCollector(whole.append)
        ticket = _ticket(1, "b", 2)
        gathering.add(ticket)
        assert gathering.drop(ticket)
        await _wait(2 * GATHER_SECONDS)
        gathering.close()
        assert whole == []

    simulate(test(), seed=1)


def test_two_attempts_of_one_task_are_never_in_one_bundle() -> None:
    async def test() -> None:
        whole: list[Bundle] = []
        gathering = BatchCollector(whole.append)
        for _ in range(2):
            gathering.add(_ticket(1, "b", 2))
        gathering.close()
        assert _seen(whole) == [[1], [1]]

    simulate(test(), seed=1)
