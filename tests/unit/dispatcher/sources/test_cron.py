"""The cron source, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

import pytest

from penstock.dispatcher.loop import Loop
from penstock.dispatcher.sources.cron import LOOK_SECONDS_MAX, CronEmitter, milliseconds
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable
from penstock.protocol.events import EventsAsk, SourceAnswer
from penstock.testing.virtual import World, simulate
from tests.unit.dispatcher.sources.scripted import BEGIN, ScriptedDispatcher, cron_source

HOUR = 3600.0


def hours(*numbers: int) -> list[str]:
    return [f"cron:{(BEGIN + timedelta(hours=number)).isoformat()}" for number in numbers]


async def emit(
    world: World, dispatcher: ScriptedDispatcher, seconds: float, *, sources: int = 1
) -> None:
    """Run cron sources beside each other for a while, on machines with clocks that are wrong."""
    dispatcher.passed = world.now
    loops = []
    for number in range(sources):
        clock = world.clock(skew_seconds=100_000.0 * number)
        source = CronEmitter(dispatcher, clock)
        loops.append(
            Loop("cron", source.turn, idle_seconds=1, clock=clock, entropy=seeded_entropy(1))
        )
    async with asyncio.TaskGroup() as group:
        for loop in loops:
            group.create_task(loop.start())
    await world.clock().sleep(seconds)
    for loop in loops:
        await loop.stop()


def test_every_time_once_and_in_time() -> None:
    async def main(world: World) -> None:
        begin = world.now()
        dispatcher = ScriptedDispatcher([cron_source()], begin=BEGIN - timedelta(seconds=begin))
        late: list[float] = []
        dispatcher.sent = lambda ask: late.append((world.now() - begin) % HOUR)
        await emit(world, dispatcher, 3 * HOUR + 60)
        assert dispatcher.ids == hours(1, 2, 3)
        assert max(late) < 0.2

    simulate(main, seed=1)


def test_several_emit_one_event() -> None:
    async def main(world: World) -> None:
        dispatcher = ScriptedDispatcher(
            [cron_source()], begin=BEGIN - timedelta(seconds=world.now())
        )
        await emit(world, dispatcher, HOUR + 60, sources=3)
        assert dispatcher.ids == hours(1)

    for seed in range(3):
        simulate(main, seed=seed)


def test_an_outage_delays_and_loses_nothing() -> None:
    async def main(world: World) -> None:
        dispatcher = ScriptedDispatcher(
            [cron_source()], begin=BEGIN - timedelta(seconds=world.now())
        )
        dispatcher.failures = [DispatcherUnavailable("away") for _ in range(300)]
        await emit(world, dispatcher, 4 * HOUR)
        assert dispatcher.failures == []
        # It was away from the beginning: nobody knew of the source, so it begins afterwards.
        first = dispatcher.ids[0]
        assert dispatcher.ids == hours(*range(hours(1, 2, 3).index(first) + 1, 5))

    simulate(main, seed=3)


def turns(source: CronEmitter, dispatcher: ScriptedDispatcher, *, advance: float = 0) -> float:
    if advance:
        dispatcher.begin += timedelta(seconds=advance)
    pause = asyncio.run(_turn(source))
    assert pause is not None
    return pause


async def _turn(source: CronEmitter) -> float | None:
    return await source.turn()


class StillClock:
    """A clock of a machine on which no time passes."""

    def monotonic(self) -> float:
        return 5.0

    def wall(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps")


def made(*sources: SourceAnswer) -> tuple[CronEmitter, ScriptedDispatcher]:
    dispatcher = ScriptedDispatcher(list(sources))
    return CronEmitter(dispatcher, StillClock()), dispatcher


def test_it_goes_on_from_the_last_cursor() -> None:
    last = milliseconds(BEGIN - timedelta(hours=3))
    source, dispatcher = made(cron_source(last_cursor=last))
    assert turns(source, dispatcher) == LOOK_SECONDS_MAX
    assert dispatcher.ids == hours(-2, -1, 0)
    # Its own memory counts from now on, not what somebody else has sent.
    dispatcher.sources_ = [cron_source(last_cursor=milliseconds(BEGIN + timedelta(hours=9)))]
    turns(source, dispatcher, advance=HOUR)
    assert dispatcher.ids == hours(-2, -1, 0, 1)


def test_of_many_that_were_missed_the_latest(caplog: pytest.LogCaptureFixture) -> None:
    last = milliseconds(BEGIN - timedelta(hours=150))
    source, dispatcher = made(cron_source(last_cursor=last))
    with caplog.at_level(logging.WARNING):
        turns(source, dispatcher)
    assert dispatcher.ids == hours(*range(-99, 1))
    assert "hourly missed more than 100 ticks" in caplog.text


def test_intervals_go_on_from_the_end_of_the_last() -> None:
    end = milliseconds(BEGIN) // 1000
    source, dispatcher = made(cron_source(emits="interval", last_end=end - 2 * 3600))
    turns(source, dispatcher)
    assert dispatcher.ids == hours(-1, 0)
    assert [(each.start, each.end) for each in dispatcher.kept] == [
        (end - 7200, end - 3600),
        (end - 3600, end),
    ]
    turns(source, dispatcher, advance=HOUR)
    assert dispatcher.kept[-1].partition_key == "2030-01-01T00:00Z"
    # One that has only ever emitted cursors begins now.
    source, dispatcher = made(cron_source(emits="interval", last_cursor=milliseconds(BEGIN) - 9**9))
    turns(source, dispatcher)
    assert dispatcher.ids == []


def test_without_catching_up_it_is_the_latest_alone(caplog: pytest.LogCaptureFixture) -> None:
    last = milliseconds(BEGIN - timedelta(hours=3))
    source, dispatcher = made(cron_source(last_cursor=last, catch_up=False))
    turns(source, dispatcher)
    assert dispatcher.ids == hours(0)
    turns(source, dispatcher, advance=HOUR)
    assert dispatcher.ids == hours(0, 1)
    turns(source, dispatcher, advance=5 * HOUR)
    assert dispatcher.ids == hours(0, 1, 6)
    assert caplog.text == ""


def test_a_pause_is_kept_and_made_up_for() -> None:
    source, dispatcher = made(cron_source(paused="The queue is full."))
    turns(source, dispatcher)
    turns(source, dispatcher, advance=2 * HOUR)
    assert dispatcher.ids == []
    dispatcher.sources_ = [cron_source()]
    turns(source, dispatcher, advance=HOUR)
    assert dispatcher.ids == hours(1, 2, 3)


def test_what_was_not_taken_is_sent_again() -> None:
    source, dispatcher = made(cron_source())
    turns(source, dispatcher)

    def away(ask: EventsAsk) -> None:
        raise DispatcherUnavailable("away")

    dispatcher.sent = away
    dispatcher.begin += timedelta(hours=1)
    with pytest.raises(DispatcherUnavailable):
        asyncio.run(_turn(source))
    dispatcher.sent = lambda ask: None
    turns(source, dispatcher)
    assert dispatcher.ids == hours(1)


def test_one_that_is_refused_keeps_no_other_from_its_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, dispatcher = made(
        cron_source("a"), cron_source("b", datasets={"other": "u"}), cron_source("c", cron="often")
    )
    turns(source, dispatcher)
    assert "invalid cron expression of c: it has 1 field" in caplog.text

    def refusing(ask: EventsAsk) -> None:
        if ask.events[0].dataset == "ticks":
            raise DispatcherRefused("no")

    dispatcher.sent = refusing
    turns(source, dispatcher, advance=HOUR)
    assert [each.dataset for each in dispatcher.kept] == ["other"]
    assert caplog.text.count("expression of c") == 1
    dispatcher.sent = lambda ask: None
    turns(source, dispatcher)
    assert [each.dataset for each in dispatcher.kept] == ["other", "ticks"]


def test_other_kinds_and_sources_that_leave() -> None:
    webhook = SourceAnswer(job="w", kind="webhook", datasets={"w": "u"}, path="/w")
    source, dispatcher = made(cron_source(), webhook)
    turns(source, dispatcher)
    dispatcher.sources_ = [webhook]
    turns(source, dispatcher, advance=HOUR)
    dispatcher.sources_ = [cron_source(), webhook]
    # It has come back: what it would have emitted while it was gone was not its own.
    turns(source, dispatcher, advance=HOUR)
    assert dispatcher.ids == []
    pause = turns(source, dispatcher, advance=HOUR - 3)
    assert pause == 3
    assert dispatcher.ids == []
