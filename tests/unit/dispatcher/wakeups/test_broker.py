"""Requests that wait and wake-ups come together: once, in order, and whoever leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import Channel
from penstock.dispatcher.wakeups.broker import WAITING_SECONDS_MAX, Broker, WakeUp
from penstock.kernel.errors import DispatcherUnavailable
from penstock.testing.virtual import World, simulate

CLEAN = Channel("clean", Priority.NORMAL)
CLEAN_BULK = Channel("clean", Priority.BULK)
LOAD = Channel("load", Priority.NORMAL)


def channels(found: Sequence[WakeUp]) -> list[Channel]:
    return [each.channel for each in found]


def test_one_wake_up_answers_the_request_that_has_waited_longest() -> None:
    async def main(world: World) -> None:
        broker = Broker(clock=world.clock(), entropy=world.entropy("broker"))
        async with broker, asyncio.TaskGroup() as group:
            waits = []
            for name in ("first", "second", "third"):
                waits.append(group.create_task(broker.wait(name, ["clean", "load"], seconds=50)))
                await world.clock().sleep(1)
            broker.send([CLEAN, CLEAN])
            await world.clock().sleep(1)
            assert [each.done() for each in waits] == [True, True, False]
            broker.send([LOAD])
            assert channels(await waits[2]) == [LOAD]

    simulate(main, seed=1)


def test_what_is_sent_while_nobody_waits_is_one_wake_up_and_bulk_comes_last() -> None:
    async def main(world: World) -> None:
        broker = Broker(clock=world.clock(), entropy=world.entropy("broker"))
        async with broker:
            for _ in range(100):
                broker.send([CLEAN_BULK, CLEAN])
            found = await broker.wait("one", ["clean"], seconds=50)
            assert channels(found) == [CLEAN, CLEAN_BULK]
            assert not await broker.wait(
                "one", ["clean"], seconds=1, answered=[each.id for each in found]
            )
            broker.send([LOAD])
            await world.clock().sleep(WAITING_SECONDS_MAX + 1)
            assert not await broker.wait("one", ["load"], seconds=1)

    simulate(main, seed=1)


def test_a_caller_that_leaves_as_it_is_answered_gives_the_wake_up_to_the_next() -> None:
    async def main(world: World) -> None:
        broker = Broker(clock=world.clock(), entropy=world.entropy("broker"))
        async with broker, asyncio.TaskGroup() as group:
            leaving = group.create_task(broker.wait("leaving", ["clean"], seconds=50))
            staying = group.create_task(broker.wait("staying", ["clean"], seconds=50))
            await world.clock().sleep(1)
            broker.send([CLEAN])
            leaving.cancel()
            assert channels(await staying) == [CLEAN]
            assert broker.waiters == 0

    simulate(main, seed=1)


def test_what_was_given_to_another_is_not_mine_to_answer() -> None:
    async def main(world: World) -> None:
        broker = Broker(clock=world.clock(), entropy=world.entropy("broker"))
        async with broker, asyncio.TaskGroup() as group:
            broker.send([CLEAN])
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
            assert "2 workers wait here already" in await _refused(broker, "one more")
            await broker.stop()
            assert [await each for each in waits] == ["This dispatcher stops."] * 2
            assert await _refused(broker, "late") == "This dispatcher stops."

    simulate(main, seed=1)


async def _refused(broker: Broker, listener: str) -> str:
    with pytest.raises(DispatcherUnavailable) as caught:
        await broker.wait(listener, ["clean"], seconds=50)
    return caught.value.message
