"""Streams: what has changed is sent, once, to all who look, and nothing is done for nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import pytest

from penstock.console import live
from penstock.console.live import Full, Live, event
from penstock.testing.virtual import World, simulate


class _Page:
    """A page whose block says what it is set to."""

    def __init__(self) -> None:
        self.said = "one"
        self.loads = 0
        self.is_broken = False

    async def blocks(self) -> Mapping[str, str]:
        self.loads += 1
        if self.is_broken:
            raise ValueError("broken")
        return {"block": self.said, "same": "always"}


async def _next(events: AsyncGenerator[bytes, None]) -> tuple[str, str]:
    """The next event; comments are passed over."""
    async for each in events:
        if each.startswith(b"event: "):
            name, body = each.decode().strip().split("\n")
            return name.removeprefix("event: "), json.loads(body.removeprefix("data: "))
    raise AssertionError("the stream has ended")


def test_what_has_changed_is_sent_and_what_has_not_is_not() -> None:
    async def main(world: World) -> None:
        page = _Page()
        hub = Live(clock=world.clock())
        async with hub, aclosing(hub.stream("page", page.blocks)) as events:
            first = {await _next(events), await _next(events), await _next(events)}
            assert first == {("block", "one"), ("same", "always"), ("trouble", "")}
            page.said = "two\n<b>"
            assert await _next(events) == ("block", "two\n<b>")
        assert hub.count == 0

    simulate(main, seed=1)


def test_who_comes_later_is_sent_all_and_nothing_that_is_older_than_their_page() -> None:
    async def main(world: World) -> None:
        page = _Page()
        hub = Live(clock=world.clock())
        async with hub, aclosing(hub.stream("page", page.blocks)) as first:
            for _ in range(3):
                await _next(first)
            # Somebody changes it, and is sent to the page, which shows that.
            page.said = "two"
            async with aclosing(hub.stream("page", page.blocks)) as second:
                found = {await _next(second) for _ in range(3)}
                assert found == {("block", "two"), ("same", "always"), ("trouble", "")}

    simulate(main, seed=1)


def test_many_cost_as_much_as_one_and_nobody_costs_nothing() -> None:
    async def main(world: World) -> None:
        page = _Page()
        clock = world.clock()
        hub = Live(clock=clock)
        streams = [hub.stream("page", page.blocks) for _ in range(20)]
        for each in streams:
            await _next(each)
        loads = page.loads
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_drain(each)) for each in streams]
            await clock.sleep(10)
            assert 8 <= page.loads - loads <= 12
            for task in tasks:
                task.cancel()
        for each in streams:
            await each.aclose()
        await clock.sleep(3)
        loads = page.loads
        await clock.sleep(60)
        assert page.loads == loads

    simulate(main, seed=1)


async def _drain(events: AsyncGenerator[bytes, None]) -> None:
    async for _ in events:
        pass


def test_a_page_that_breaks_is_told_and_comes_back() -> None:
    async def main(world: World) -> None:
        page = _Page()
        page.is_broken = True
        hub = Live(clock=world.clock())
        async with aclosing(hub.stream("page", page.blocks)) as events:
            name, said = await _next(events)
            assert name == "trouble"
            assert said
            page.is_broken = False
            found = {await _next(events) for _ in range(3)}
            assert ("trouble", "") in found
            assert ("block", "one") in found

    simulate(main, seed=1)


def test_a_quiet_stream_is_heard_of_and_stopping_ends_it() -> None:
    async def main(world: World) -> None:
        page = _Page()
        clock = world.clock()
        hub = Live(clock=clock)
        heard: list[bytes] = []

        async def listen() -> None:
            async with aclosing(hub.stream("page", page.blocks)) as events:
                heard.extend([each async for each in events])

        async with asyncio.TaskGroup() as group:
            group.create_task(listen())
            await clock.sleep(35)
            await hub.stop()
        # Heard of every ten seconds, and at its end.
        assert sum(each.startswith(b":") for each in heard) >= 3
        with pytest.raises(Full):
            hub.stream("page", page.blocks)

    simulate(main, seed=1)


def test_no_more_look_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WATCHERS_MAX", 2)

    async def main(world: World) -> None:
        page = _Page()
        hub = Live(clock=world.clock())
        streams = [hub.stream("page", page.blocks) for _ in range(2)]
        for each in streams:
            await _next(each)
        with pytest.raises(Full):
            hub.stream("other", page.blocks)
        for each in streams:
            await each.aclose()

    simulate(main, seed=1)


def test_an_event_has_no_end_of_line_in_it() -> None:
    assert event("block", "a\r\nb\nc") == b'event: block\ndata: "a\\r\\nb\\nc"\n\n'
