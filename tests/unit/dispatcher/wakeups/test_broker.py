"""Requests that wait and wake-ups come together: once, in order, and whoever leaves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import TaskCounts, WakeUpChannel
from penstock.dispatcher.wakeups.long_poll import (
    RESENT_MAX,
    WAITING_SECONDS_MAX,
    Broker,
    LongPollSender,
    WakeUp,
)
from penstock.kernel.errors import DispatcherUnavailable
from penstock.testing.virtual import World, simulate

CLEAN = WakeUpChannel("clean", Priority.NORMAL)
CLEAN_BULK = WakeUpChannel("clean", Priority.BULK)
LOAD = WakeUpChannel("load", Priority.NORMAL)


def channels(found: Sequence[WakeUp]) -> list[WakeUpChannel]:
    return [each.channel for each in found]


def test_one_wake_up_answers_the_request_that_has_waited_longest() -> None:
    async def main(world: World) -> None:
        broker = Broker(clock=world.clock(), entropy=world.entropy("broker"))
        async with broker, asyncio.TaskGroup() as group:
            waits = []
            for name in ("first", "second", "third"):
                waits.append(group.create_task(broker.wait(name, ["clean", "load"], seconds=50)))
                await world.clock().sleep(1)
            broker.send(Counter([CLEAN, CLEAN]))
            await world.clock().sleep(1)
            assert [each.done() for each in waits] == [True, True, False]
            broker.send(Counter([LOAD]))
            assert channels(await waits[2]) == [LOAD]

    simulate(main, seed=1)


def test_as_many_are_woken_as_there_are_tasks_that_nobody_is_woken_for() -> None:
    async def main(world: World) -> None:
        broker = Broker(clock=world.clock(), entropy=world.entropy("broker"))
        async with broker, asyncio.TaskGroup() as group:
            waits = []
            for number in range(10):
                wait = broker.wait(f"{number}", ["clean", "load"], seconds=50)
                waits.append(group.create_task(wait))
                await world.clock().sleep(0.1)

            async def woken() -> int:
                await world.clock().sleep(0.1)
                done = [each.done() for each in waits]
                assert done == sorted(done, reverse=True), "the one that has waited longest first"
                return sum(done)

            assert broker.send({CLEAN: 3}) == {CLEAN: 3}
            assert await woken() == 3
            # Three are on their way to claim; two more tasks have come.
            assert broker.send({CLEAN: 5}) == {CLEAN: 2}
            # Whoever is on the way may have claimed before this one was there.
            assert broker.send({CLEAN: 1}) == {CLEAN: 1}
            assert await woken() == 6
            (first,) = await waits[0]
            await broker.wait("0", [], seconds=0, answered=[first.id])
            assert broker.send({CLEAN: 7, LOAD: 1000}) == {CLEAN: 2, LOAD: 2}
            assert await woken() == 10
            assert channels(await waits[9]) == [LOAD]

    simulate(main, seed=1)


def test_the_others_are_told_of_the_tasks_that_nobody_was_woken_for_here() -> None:
    async def main(world: World) -> None:
        told: list[TaskCounts] = []

        async def publish(tasks_of: TaskCounts) -> None:
            told.append(tasks_of)

        broker = Broker(clock=world.clock(), entropy=world.entropy("broker"))
        async with broker, asyncio.TaskGroup() as group:
            waits = [
                group.create_task(broker.wait(f"{number}", ["clean"], seconds=50))
                for number in range(3)
            ]
            await world.clock().sleep(1)
            sender = LongPollSender(broker, publish)
            await sender.send({CLEAN: 2, LOAD: 7})
            await sender.send({CLEAN: 10, LOAD: 1})
            await asyncio.wait(waits)
            # One at least: whoever was woken here may have lost its power.
            assert told == [{CLEAN: 1, LOAD: 7}, {CLEAN: 9, LOAD: 1}]

    simulate(main, seed=1)


def test_what_is_sent_while_nobody_waits_is_one_wake_up_and_bulk_comes_last() -> None:
    async def main(world: World) -> None:
        broker = Broker(clock=world.clock(), entropy=world.entropy("broker"))
        async with broker:
            for _ in range(100):
                broker.send(Counter([CLEAN_BULK, CLEAN]))
            found = await broker.wait("one", ["clean"], seconds=50)
            assert channels(found) == [CLEAN, CLEAN_BULK]
            assert not await broker.wait(
                "one", ["clean"], seconds=1, answered=[each.id for each in found]
            )
            broker.send(Counter([LOAD]))
            await world.clock().sleep(WAITING_SECONDS_MAX + 1)
            assert not await broker.wait("one", ["load"], seconds=1)

    simulate(main, seed=1)


def test_a_wake_up_that_the_dead_were_given_reaches_who_is_alive_within_the_half_minute() -> None:
    async def main(world: World) -> None:
        broker = Broker(clock=world.clock(), entropy=world.entropy("broker"))
        async with broker, asyncio.TaskGroup() as group:
            for number in range(50):
                # Their machines have lost their power: nobody says so, and nobody reads an answer.
                group.create_task(broker.wait(f"dead {number}", ["clean"], seconds=50))
            await world.clock().sleep(1)
            alive = group.create_task(broker.wait("alive", ["clean"], seconds=50))
            await world.clock().sleep(1)
            broker.send(Counter([CLEAN]))
            async with asyncio.timeout(20):
                (found,) = await alive
            assert not await broker.wait("alive", ["clean"], seconds=10, answered=[found.id])

    simulate(main, seed=1)


def test_of_thousands_who_wait_a_part_is_asked_again() -> None:
    async def main(world: World) -> None:
        broker = Broker(clock=world.clock(), entropy=world.entropy("broker"))
        async with broker, asyncio.TaskGroup() as group:
            waits = [
                group.create_task(broker.wait(f"{number}", ["clean"], seconds=50))
                for number in range(2_500)
            ]
            await world.clock().sleep(1)
            broker.send(Counter([CLEAN]))
            await world.clock().sleep(16)
            assert RESENT_MAX // 2 <= sum(each.done() for each in waits) <= RESENT_MAX + 1
            broker.interrupt()

    simulate(main, seed=1)


def test_a_caller_that_leaves_as_it_is_answered_gives_the_wake_up_to_the_next() -> None:
    async def main(world: World) -> None:
        broker = Broker(clock=world.clock(), entropy=world.entropy("broker"))
        async with broker, asyncio.TaskGroup() as group:
            leaving = group.create_task(broker.wait("leaving", ["clean"], seconds=50))
            staying = group.create_task(broker.wait("staying", ["clean"], seconds=50))
            await world.clock().sleep(1)
            broker.send(Counter([CLEAN]))
            leaving.cancel()
            assert channels(await staying) == [CLEAN]
            assert broker.waiters == 0

    simulate(main, seed=1)


def test_what_was_given_to_another_is_not_mine_to_answer() -> None:
    async def main(world: World) -> None:
        broker = Broker(clock=world.clock(), entropy=world.entropy("broker"))
        async with broker, asyncio.TaskGroup() as group:
            broker.send(Counter([CLEAN]))
            (given,) = await broker.wait("one", ["clean"], seconds=0)
            await broker.wait("two", [], seconds=0, answered=[given.id], returned=[given.id])
            waiting = group.create_task(broker.wait("two", ["clean"], seconds=50))
            await world.clock().sleep(1)
            assert not waiting.done()
            # Who cannot answer hands it to whoever waits, at once.
            await broker.wait("one", [], seconds=0, returned=[given.id])
            await world.clock().sleep(0)
            assert channels(await waiting) == [CLEAN]

    simulate(main, seed=1)


def test_a_broker_that_stops_answers_all_and_one_that_is_full_refuses() -> None:
    async def main(world: World) -> None:
        broker = Broker(clock=world.clock(), entropy=world.entropy("broker"), waiters_max=2)
        async with asyncio.TaskGroup() as group:
            await broker.start()
            waits = [
                group.create_task(_refused(broker, f"listener {number}")) for number in range(2)
            ]
            await world.clock().sleep(1)
            assert "2 workers already wait at this dispatcher" in await _refused(broker, "one more")
            await broker.stop()
            assert [await each for each in waits] == ["This dispatcher is shutting down."] * 2
            assert await _refused(broker, "late") == "This dispatcher is shutting down."

    simulate(main, seed=1)


async def _refused(broker: Broker, listener: str) -> str:
    with pytest.raises(DispatcherUnavailable) as caught:
        await broker.wait(listener, ["clean"], seconds=50)
    return caught.value.message
