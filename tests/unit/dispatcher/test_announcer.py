"""Who is told of work that was committed, when, and what the worker that has made it may take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from penstock.dispatcher.announcer import CLAIMED_SECONDS, PACE_SECONDS, Announcer
from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import WakeUpChannel
from penstock.kernel.errors import DatabaseUnavailable
from penstock.testing.virtual import VirtualClock, World, simulate

A, B = ("a", "normal"), ("b", "normal")
A_CHANNEL, B_CHANNEL = (WakeUpChannel(each, Priority.NORMAL) for each in "ab")


class Ears:
    """Who hears, here and elsewhere."""

    def __init__(self) -> None:
        self.here: list[str] = []
        self.elsewhere: list[set[str]] = []
        self.own = 0
        self.failures = 0

    def hear(self, channels: Collection[WakeUpChannel]) -> None:
        self.here += sorted(f"{each.operator}/{each.priority}" for each in channels)

    async def publish(self, channels: Collection[WakeUpChannel]) -> None:
        if self.failures:
            self.failures -= 1
            raise DatabaseUnavailable("Postgres does not answer.")
        self.elsewhere.append({each.operator for each in channels})

    def kick(self) -> None:
        self.own += 1


def play(story: Callable[[Announcer, Ears, VirtualClock], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        ears, clock = Ears(), world.clock()
        announcer = Announcer(
            here=ears.hear, elsewhere=ears.publish, own={"own": ears.kick}, clock=clock
        )
        async with announcer:
            await story(announcer, ears, clock)

    simulate(main, seed=1)


def test_who_waits_here_hears_at_once_and_the_others_together() -> None:
    async def story(announcer: Announcer, ears: Ears, clock: VirtualClock) -> None:
        announcer.announce([A, ("a", "bulk")], is_kept=False)
        assert ears.here == ["a/bulk", "a/normal"]
        await clock.sleep(PACE_SECONDS / 4)
        announcer.announce([A], is_kept=False)
        announcer.announce([B], is_kept=False)
        await clock.sleep(PACE_SECONDS / 4)
        assert ears.elsewhere == [{"a"}]
        await clock.sleep(PACE_SECONDS)
        assert ears.elsewhere == [{"a"}, {"a", "b"}]

    play(story)


def test_what_dispatchers_run_themselves_kicks_their_loop() -> None:
    async def story(announcer: Announcer, ears: Ears, clock: VirtualClock) -> None:
        announcer.announce([("own", "normal")], is_kept=False)
        await clock.sleep(1)
        assert (ears.own, ears.here, ears.elsewhere) == (1, [], [])

    play(story)


def test_what_is_kept_is_for_who_takes_it_and_the_rest_is_told() -> None:
    async def story(announcer: Announcer, ears: Ears, clock: VirtualClock) -> None:
        announcer.announce([A, B], is_kept=True)
        assert ears.here == []
        assert announcer.take(["b", "c"]) == {B_CHANNEL}
        assert ears.here == ["a/normal"]
        assert announcer.take(["a", "b"]) == set()
        await clock.sleep(1)
        assert ears.here == ["a/normal"]
        announcer.give_back({B_CHANNEL})
        assert ears.here == ["a/normal", "b/normal"]

    play(story)


def test_what_nobody_takes_is_told_soon() -> None:
    async def story(announcer: Announcer, ears: Ears, clock: VirtualClock) -> None:
        announcer.announce([A], is_kept=True)
        await clock.sleep(CLAIMED_SECONDS / 2)
        announcer.announce([B], is_kept=True)
        assert ears.here == []
        await clock.sleep(CLAIMED_SECONDS)
        assert ears.here == ["a/normal", "b/normal"]

    play(story)


def test_others_are_told_when_postgres_is_back() -> None:
    async def story(announcer: Announcer, ears: Ears, clock: VirtualClock) -> None:
        ears.failures = 3
        announcer.announce([A], is_kept=False)
        await clock.sleep(0.1)
        announcer.announce([B], is_kept=False)
        await clock.sleep(10)
        assert ears.elsewhere == [{"a", "b"}]

    play(story)
