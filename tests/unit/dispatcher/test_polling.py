"""The poller asks once for all, and kicks those that have work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.dispatcher.poller import (
    LOOK_SECONDS,
    PACE_SECONDS,
    QUIET_POLLS,
    QUIET_SECONDS,
    Poller,
    WatchedLoop,
    is_due,
)
from penstock.testing.virtual import World, simulate


class Answers:
    """A database with one row, which tests change."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {
            "outbox_seconds": None,
            "is_pending": False,
            "is_slow": True,
            "is_waiting": True,
            "is_running": False,
        }
        self.looks = 0

    async def fetch(self, name: str, asked: Mapping[str, object]) -> list[dict[str, Any]]:
        self.looks += 1
        return [self.row]


class Kicks:
    """A loop that counts its kicks."""

    def __init__(self) -> None:
        self.count = 0

    def kick(self) -> None:
        self.count += 1


def test_loops_with_work_are_kicked_at_their_own_pace() -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        answers: Any = Answers()
        router, slow, relay = (Kicks() for _ in range(3))
        loops: list[Any] = [router, slow, relay]
        poller = Poller(
            answers,
            [
                WatchedLoop(loops[0], lambda found: found["is_pending"]),
                WatchedLoop(loops[1], lambda found: found["is_slow"], every_seconds=10),
                WatchedLoop(loops[2], is_due),
            ],
            clock=clock,
        )
        for _ in range(15):
            assert await poller.turn() == LOOK_SECONDS
            await clock.sleep(LOOK_SECONDS)
        assert (router.count, slow.count, relay.count) == (0, 2, 0)
        answers.row |= {"is_pending": True, "outbox_seconds": 0.4}
        assert await poller.turn() == 0.4
        answers.row |= {"outbox_seconds": -3.0}
        await clock.sleep(0.4)
        assert await poller.turn() == LOOK_SECONDS
        assert (router.count, relay.count) == (2, 1)

    simulate(main, seed=1)


def test_many_kicks_are_few_looks() -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        answers: Any = Answers()
        poller = Poller(answers, [], clock=clock)
        began = clock.monotonic()
        while clock.monotonic() - began < 1:
            await poller.turn()
        assert answers.looks <= 1 / PACE_SECONDS + 2

    simulate(main, seed=1)


def test_where_nothing_is_to_be_done_it_looks_seldom_until_there_is() -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        answers: Any = Answers()
        loop: Any = Kicks()
        poller = Poller(
            answers, [WatchedLoop(loop, lambda found: found["is_pending"])], clock=clock
        )
        for quiet in ("is_waiting", "is_running"):
            answers.row |= {"is_waiting": False, "is_running": False}
            pauses = []
            for _ in range(QUIET_POLLS + 2):
                pauses.append(await poller.turn())
                await clock.sleep(pauses[-1])
            assert pauses == [LOOK_SECONDS] * QUIET_POLLS + [QUIET_SECONDS] * 2
            answers.row |= {quiet: True}
            assert await poller.turn() == LOOK_SECONDS

    simulate(main, seed=1)
