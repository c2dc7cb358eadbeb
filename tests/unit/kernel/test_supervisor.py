"""What ends is started again; what is stopped stays so."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from penstock.kernel.clock import Clock
from penstock.kernel.supervisor import Supervisor
from penstock.testing.virtual import World, simulate


class Scripted:
    """A service that the test ends."""

    def __init__(self, name: str, log: list[str], *, fails: bool = False) -> None:
        self.name = name
        self.running = False
        self._log = log
        self._fails = fails

    async def start(self) -> None:
        self._log.append(f"start {self.name}")
        if self._fails:
            raise OSError("no room")
        self.running = True

    async def stop(self) -> None:
        self._log.append(f"stop {self.name}")
        self.running = False


def test_services_start_in_order_and_stop_in_the_reverse() -> None:
    log: list[str] = []

    async def main(world: World) -> None:
        made = [("a", lambda: Scripted("a", log)), ("b", lambda: Scripted("b", log))]
        async with Supervisor(made, clock=world.clock()):
            await world.clock().sleep(60)

    simulate(main, seed=1)
    assert log == ["start a", "start b", "stop b", "stop a"]


def test_one_that_ends_is_started_again_and_the_others_go_on() -> None:
    log: list[str] = []
    alive: list[Scripted] = []

    def make(name: str) -> Scripted:
        alive.append(Scripted(name, log))
        return alive[-1]

    async def main(world: World) -> None:
        made = [("a", lambda: make("a")), ("b", lambda: make("b"))]
        async with Supervisor(made, clock=world.clock()):
            alive[0].running = False
            await world.clock().sleep(5)
            assert [each.running for each in alive] == [False, True, True]

    simulate(main, seed=1)
    assert log.count("start a") == 2
    assert log.count("start b") == 1


def test_pauses_grow_while_it_keeps_ending_and_are_forgotten_when_it_runs() -> None:
    starts: list[float] = []

    async def main(world: World) -> None:
        clock = world.clock()
        kept: list[Scripted] = []

        def make() -> Scripted:
            starts.append(clock.monotonic())
            kept.append(Scripted("a", []))
            return kept[-1]

        async with Supervisor([("a", make)], clock=clock):
            for _ in range(600):
                await clock.sleep(0.1)
                kept[-1].running = False
            restless = len(starts)
            assert restless < 20, "it was started again and again without a pause"
            await clock.sleep(60)
            kept[-1].running = False
            await clock.sleep(1)
            assert len(starts) > restless + 1, "its past was held against it"

    simulate(main, seed=1)


def test_a_start_that_fails_later_is_tried_again() -> None:
    log: list[str] = []
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Scripted("a", log, fails=len(made) in (1, 2)))
        return made[-1]

    async def main(world: World) -> None:
        async with Supervisor([("a", make)], clock=world.clock()):
            made[0].running = False
            await world.clock().sleep(30)
            assert made[-1].running

    simulate(main, seed=1)
    assert len(made) == 4


def test_a_first_start_that_fails_is_told_and_nothing_is_left() -> None:
    log: list[str] = []

    async def main() -> None:
        made = [("a", lambda: Scripted("a", log)), ("b", lambda: Scripted("b", log, fails=True))]
        with pytest.raises(OSError, match="no room"):
            async with Supervisor(made):
                raise AssertionError("it started")

    asyncio.run(main())
    assert log == ["start a", "start b", "stop b", "stop a"]


def test_one_that_is_slow_to_start_again_keeps_the_others_from_nothing() -> None:
    log: list[str] = []
    alive: list[Scripted] = []

    async def main(world: World) -> None:
        clock = world.clock()

        class Slow(Scripted):
            async def start(self) -> None:
                if any(each.name == "b" for each in alive):
                    await clock.sleep(1000)
                await super().start()

        def make(kind: type[Scripted], name: str) -> Scripted:
            alive.append(kind(name, log))
            return alive[-1]

        made = [("a", lambda: make(Slow, "a")), ("b", lambda: make(Scripted, "b"))]
        async with Supervisor(made, clock=clock):
            for each in alive:
                each.running = False
            await clock.sleep(5)
            assert [each.running for each in alive if each.name == "b"] == [False, True]

    simulate(main, seed=1)


def test_one_that_does_not_stop_leaves_the_others_kept_and_stopped() -> None:
    log: list[str] = []
    alive: list[Scripted] = []

    class Stubborn(Scripted):
        async def stop(self) -> None:
            await super().stop()
            raise OSError("busy")

    def make(kind: type[Scripted], name: str) -> Scripted:
        alive.append(kind(name, log))
        return alive[-1]

    async def main(world: World) -> None:
        made = [("a", lambda: make(Scripted, "a")), ("b", lambda: make(Stubborn, "b"))]
        async with Supervisor(made, clock=world.clock()):
            alive[1].running = False
            await world.clock().sleep(5)
            alive[0].running = False
            await world.clock().sleep(5)
            assert [each.running for each in alive[2:]] == [True, True]

    simulate(main, seed=1)
    assert log[-2:] == ["stop b", "stop a"]


class Slow(Scripted):
    """A service that takes its time to stop."""

    def __init__(self, name: str, log: list[str], clock: Clock, seconds: float) -> None:
        super().__init__(name, log)
        self._clock = clock
        self._seconds = seconds

    async def stop(self) -> None:
        await super().stop()
        await self._clock.sleep(self._seconds)


def test_those_that_need_nothing_of_each_other_stop_at_the_same_time() -> None:
    log: list[str] = []
    told: list[list[str]] = []

    async def main(world: World) -> None:
        clock = world.clock()
        began = clock.monotonic()
        ends = {"base": 2.0, "middle": 1.0, "a": 9.0, "b": 5.0, "top": 1.0}
        made = [(name, partial(Slow, name, log, clock, each)) for name, each in ends.items()]
        keeper = Supervisor(
            made,
            clock=clock,
            together=("a", "b", "top", "base"),
            waiting=lambda names: told.append(list(names)),
        )
        await keeper.start()
        await keeper.stop()
        # The longest of three, and then one after the other.
        assert clock.monotonic() - began == pytest.approx(9 + 1 + 2)

    simulate(main, seed=1)
    ends = [each for each in log if each.startswith("stop")]
    assert sorted(ends[:3]) == ["stop a", "stop b", "stop top"]
    assert ends[3:] == ["stop middle", "stop base"]
    # Who has ended within three seconds is not spoken of, nor is anybody twice.
    assert told == [["b", "a"], ["a"], ["middle"], ["base"]]


def test_a_quick_stop_is_not_spoken_of() -> None:
    told: list[object] = []

    async def main(world: World) -> None:
        clock = world.clock()
        made = [(name, partial(Slow, name, [], clock, 1.4)) for name in ("a", "b")]
        async with Supervisor(made, clock=clock, waiting=told.append):
            await clock.sleep(60)

    simulate(main, seed=1)
    assert told == []


def test_it_is_told_at_once_why_one_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    alive: list[Scripted] = []

    def make() -> Scripted:
        alive.append(Scripted("a", log))
        return alive[-1]

    async def main(world: World) -> None:
        keeper = Supervisor(
            [("a", make)], clock=world.clock(), why_ended=lambda name: f"No {name}."
        )
        async with keeper:
            alive[0].running = False
            await world.clock().sleep(1)

    simulate(main, seed=1)
    assert "a exited and is restarted. It says: No a." in caplog.messages
