"""Who is told of work that was committed, when, and what the worker that has made it may take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from penstock.dispatcher.announcer import CLAIMED_SECONDS, PACE_SECONDS, Announcer
from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import TaskCounts, WakeUpChannel
from penstock.kernel.errors import DatabaseUnavailable
from penstock.testing.virtual import VirtualClock, World, simulate

A, B = ("a", "normal"), ("b", "normal")
A_CHANNEL, B_CHANNEL = (WakeUpChannel(each, Priority.NORMAL) for each in "ab")


class Ears:
    """Who hears, here and elsewhere."""

    def __init__(self) -> None:
        self.here: list[str] = []
        self.elsewhere: list[set[str]] = []
        self.left: list[TaskCounts] = []
        self.waiting = 1
        self.own = 0
        self.failures = 0
        self.error: Exception = DatabaseUnavailable("Postgres does not answer.")

    def hear(self, tasks_of: TaskCounts) -> TaskCounts:
        self.here += sorted(f"{each.operator}/{each.priority}" for each in tasks_of)
        return {each: min(tasks, self.waiting) for each, tasks in tasks_of.items()}

    async def publish(self, tasks_of: TaskCounts) -> None:
        if self.failures:
            self.failures -= 1
            raise self.error
        self.elsewhere.append({each.operator for each in tasks_of})
        self.left.append(dict(tasks_of))

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
        announcer.announce({A: 1, ("a", "bulk"): 1}, is_kept=False)
        assert ears.here == ["a/bulk", "a/normal"]
        await clock.sleep(PACE_SECONDS / 4)
        announcer.announce({A: 1}, is_kept=False)
        announcer.announce({B: 1}, is_kept=False)
        await clock.sleep(PACE_SECONDS / 4)
        assert ears.elsewhere == [{"a"}]
        await clock.sleep(PACE_SECONDS)
        assert ears.elsewhere == [{"a"}, {"a", "b"}]

    play(story)


def test_others_wake_for_the_tasks_that_are_left() -> None:
    async def story(announcer: Announcer, ears: Ears, clock: VirtualClock) -> None:
        ears.waiting = 3
        announcer.announce({A: 5, B: 2}, is_kept=False)
        await clock.sleep(PACE_SECONDS)
        assert ears.left == [{A_CHANNEL: 2, B_CHANNEL: 1}]

    play(story)


def test_what_dispatchers_run_themselves_kicks_their_loop() -> None:
    async def story(announcer: Announcer, ears: Ears, clock: VirtualClock) -> None:
        announcer.announce({("own", "normal"): 1}, is_kept=False)
        await clock.sleep(1)
        assert (ears.own, ears.here, ears.elsewhere) == (1, [], [])

    play(story)


def test_what_is_kept_is_for_who_takes_it_and_the_rest_is_told() -> None:
    async def story(announcer: Announcer, ears: Ears, clock: VirtualClock) -> None:
        announcer.announce({A: 1, B: 2}, is_kept=True)
        assert ears.here == []
        assert announcer.take(["b", "c"]) == {B_CHANNEL: 2}
        assert ears.here == ["a/normal"]
        assert announcer.take(["a", "b"]) == {}
        await clock.sleep(1)
        assert ears.here == ["a/normal"]
        announcer.give_back({B_CHANNEL: 1})
        assert ears.here == ["a/normal", "b/normal"]

    play(story)


def test_what_nobody_takes_is_told_soon() -> None:
    async def story(announcer: Announcer, ears: Ears, clock: VirtualClock) -> None:
        announcer.announce({A: 1}, is_kept=True)
        await clock.sleep(CLAIMED_SECONDS / 2)
        announcer.announce({B: 1}, is_kept=True)
        assert ears.here == []
        await clock.sleep(CLAIMED_SECONDS)
        assert ears.here == ["a/normal", "b/normal"]

    play(story)


@pytest.mark.parametrize("error", [DatabaseUnavailable("It is away."), RuntimeError("A bug.")])
def test_others_are_told_when_postgres_is_back(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(announcer: Announcer, ears: Ears, clock: VirtualClock) -> None:
        ears.failures, ears.error = 3, error
        announcer.announce({A: 1}, is_kept=False)
        await clock.sleep(0.1)
        announcer.announce({B: 1}, is_kept=False)
        await clock.sleep(10)
        assert ears.elsewhere == [{"a", "b"}]
        (failed,) = (each for each in caplog.records if "retrying" in each.getMessage())
        # A mistake of ours has its traceback.
        assert (failed.exc_info is None) == isinstance(error, DatabaseUnavailable)

    play(story)
