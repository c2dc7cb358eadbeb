"""Streams: what has changed is sent, once, to all who look, and nothing is done for nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import aclosing

import pytest

from penstock.console import live
from penstock.console.live import BEAT, EventStream, LivePages, TooManyWatchers, event
from penstock.console.sessions import ConsoleRole, ConsoleSession
from penstock.kernel.clock import Clock
from penstock.kernel.errors import DatabaseUnavailable
from penstock.testing.virtual import World, simulate

_SESSION = ConsoleSession(ConsoleRole.VIEWER, 0, "one")


async def _none(_: Collection[ConsoleSession]) -> Collection[ConsoleSession]:
    return ()


def _hub(clock: Clock, over: live.SessionsOver = _none) -> LivePages:
    return LivePages(clock=clock, over=over)


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

    def stream(
        self,
        hub: LivePages,
        key: str = "page",
        *,
        session: ConsoleSession = _SESSION,
        counted_as: str = "",
    ) -> EventStream:
        return hub.stream(key, self.blocks, session=session, counted_as=counted_as)


async def _next(events: AsyncIterator[bytes]) -> tuple[str, str]:
    """The next event; comments are passed over."""
    async for each in events:
        if each.startswith(b"event: "):
            name, body = each.decode().strip().split("\n")
            return name.removeprefix("event: "), json.loads(body.removeprefix("data: "))
    raise AssertionError("the stream has ended")


def test_what_has_changed_is_sent_and_what_has_not_is_not() -> None:
    async def main(world: World) -> None:
        page = _Page()
        hub = _hub(world.clock())
        async with hub, aclosing(page.stream(hub)) as events:
            first = {await _next(events), await _next(events), await _next(events)}
            assert first == {("block", "one"), ("same", "always"), ("trouble", "")}
            page.said = "two\n<b>"
            assert await _next(events) == ("block", "two\n<b>")
        assert hub.count == 0

    simulate(main, seed=1)


def test_who_comes_later_is_sent_all_and_nothing_that_is_older_than_their_page() -> None:
    async def main(world: World) -> None:
        page = _Page()
        hub = _hub(world.clock())
        async with hub, aclosing(page.stream(hub)) as first:
            for _ in range(3):
                await _next(first)
            # Somebody changes it, and is sent to the page, which shows that.
            page.said = "two"
            async with aclosing(page.stream(hub)) as second:
                found = {await _next(second) for _ in range(3)}
                assert found == {("block", "two"), ("same", "always"), ("trouble", "")}

    simulate(main, seed=1)


def test_many_cost_as_much_as_one_and_nobody_costs_nothing() -> None:
    async def main(world: World) -> None:
        page = _Page()
        clock = world.clock()
        hub = _hub(clock)
        streams = [page.stream(hub) for _ in range(20)]
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


async def _drain(events: AsyncIterator[bytes]) -> None:
    async for _ in events:
        pass


def test_a_page_that_breaks_is_told_and_comes_back() -> None:
    async def main(world: World) -> None:
        page = _Page()
        page.is_broken = True
        hub = _hub(world.clock())
        async with aclosing(page.stream(hub)) as events:
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
        hub = _hub(clock)
        heard: list[bytes] = []

        async def listen() -> None:
            async with aclosing(page.stream(hub)) as events:
                heard.extend([each async for each in events])

        async with asyncio.TaskGroup() as group:
            group.create_task(listen())
            await clock.sleep(35)
            await hub.stop()
        # Every ten seconds, by an event: a browser hands no comments to scripts.
        assert heard.count(event(BEAT, "")) == 3
        assert all(each.startswith(b"event: ") for each in heard)
        with pytest.raises(TooManyWatchers):
            page.stream(hub)

    simulate(main, seed=1)


def test_no_more_look_than_may_whether_or_not_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WATCHERS_MAX", 2)

    async def main(world: World) -> None:
        page = _Page()
        hub = _hub(world.clock())
        streams = [page.stream(hub) for _ in range(2)]
        await _next(streams[0])
        with pytest.raises(TooManyWatchers):
            page.stream(hub, "other")
        # One was read and one was not: both give their place back.
        for each in streams:
            await each.aclose()
            async with aclosing(page.stream(hub, "other")):
                pass
        assert hub.count == 0

    simulate(main, seed=1)


def test_nobody_takes_the_places_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WATCHERS_EACH_MAX", 2)

    async def main(world: World) -> None:
        page = _Page()
        hub = _hub(world.clock())
        streams = [page.stream(hub, f"page {number}", counted_as="one") for number in range(2)]
        with pytest.raises(TooManyWatchers):
            page.stream(hub, counted_as="one")
        streams.append(page.stream(hub, counted_as="other"))
        for each in streams:
            await each.aclose()
        await page.stream(hub, counted_as="one").aclose()

    simulate(main, seed=1)


def test_whose_session_is_over_is_let_go_and_others_go_on() -> None:
    async def main(world: World) -> None:
        page = _Page()
        gone = ConsoleSession(ConsoleRole.VIEWER, 0, "gone")
        over: set[ConsoleSession] = set()

        async def judge(sessions: Collection[ConsoleSession]) -> Collection[ConsoleSession]:
            return over.intersection(sessions)

        hub = _hub(world.clock(), judge)
        async with (
            aclosing(page.stream(hub)) as one,
            aclosing(page.stream(hub, session=gone)) as other,
        ):
            for _ in range(3):
                await _next(one)
                await _next(other)
            over.add(gone)
            page.said = "two"
            assert [each async for each in other] == []
            assert await _next(one) == ("block", "two")
            assert hub.count == 1

    simulate(main, seed=1)


def test_while_nobody_knows_whose_session_is_over_nothing_is_sent() -> None:
    async def main(world: World) -> None:
        page = _Page()
        is_away = True

        async def judge(_: Collection[ConsoleSession]) -> Collection[ConsoleSession]:
            if is_away:
                raise DatabaseUnavailable("away")
            return ()

        hub = _hub(world.clock(), judge)
        async with aclosing(page.stream(hub)) as events:
            name, said = await _next(events)
            assert (name, bool(said), page.loads) == ("trouble", True, 0)
            is_away = False
            found = {await _next(events) for _ in range(3)}
            assert ("block", "one") in found

    simulate(main, seed=1)


def test_an_event_has_no_end_of_line_in_it() -> None:
    assert event("block", "a\r\nb\nc") == b'event: block\ndata: "a\\r\\nb\\nc"\n\n'
