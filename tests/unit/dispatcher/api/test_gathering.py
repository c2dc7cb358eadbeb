"""Calls that come at the same time, made as one, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.dispatcher.api.group_commit import GroupCommit
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import DatabaseUnavailable, InvalidInput
from penstock.testing.virtual import World, simulate


class Slow:
    """Answers every item with its square, a second later; some items are trouble."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.running = self.most = 0
        self.is_away = False

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.calls.append(list(items))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await SystemClock().sleep(1)
        finally:
            self.running -= 1
        if self.is_away:
            raise DatabaseUnavailable("It is away.")
        if -1 in items:
            raise InvalidInput("There is no such thing.")
        return [item * item for item in items]


def gathering(slow: Slow, *, items_max: int = 100, lanes: int = 1) -> GroupCommit[int, int]:
    return GroupCommit(slow, key=abs, items_max=items_max, lanes=lanes)


def test_a_call_that_finds_a_lane_waits_for_nobody() -> None:
    async def main(world: World) -> None:
        slow = Slow()
        gather = gathering(slow)
        began = world.now()
        assert await gather([2, 3]) == [4, 9]
        assert await gather([4]) == [16]
        assert slow.calls == [[2, 3], [4]]
        assert world.now() - began == pytest.approx(2)

    simulate(main, seed=1)


async def after(gather: GroupCommit[int, int], seconds: float, *items: int) -> Sequence[int]:
    """Call after a while."""
    await SystemClock().sleep(seconds)
    return await gather(items)


def test_calls_that_wait_are_made_as_one() -> None:
    async def main(_: World) -> None:
        slow = Slow()
        gather = gathering(slow)
        found = await asyncio.gather(
            after(gather, 0.1, 2),
            after(gather, 0.2, 3, 4),
            after(gather, 0.3, 5),
            after(gather, 0.4),
        )
        assert [list(each) for each in found] == [[4], [9, 16], [25], []]
        assert slow.calls == [[2], [3, 4, 5]]
        assert await gather([6]) == [36]

    simulate(main, seed=1)


def test_lanes() -> None:
    async def main(_: World) -> None:
        slow = Slow()
        gather = gathering(slow, lanes=2)
        await asyncio.gather(*(after(gather, 0.1 * n, n) for n in range(1, 7)))
        assert slow.calls == [[1], [2], [3, 4, 5, 6]]
        assert slow.most == 2

    simulate(main, seed=1)


def test_a_call_has_no_more_items_than_it_may() -> None:
    async def main(_: World) -> None:
        slow = Slow()
        gather = gathering(slow, items_max=3)
        calls = [[1], [2, 3], [4, 5], [6], [7, 8, 9]]
        found = await asyncio.gather(
            *(after(gather, 0.1 * (n + 1), *items) for n, items in enumerate(calls))
        )
        assert [list(each) for each in found] == [[n * n for n in items] for items in calls]
        assert slow.calls == [[1], [2, 3, 6], [4, 5], [7, 8, 9]]

    simulate(main, seed=1)


def test_two_calls_about_one_thing_are_made_apart() -> None:
    async def main(_: World) -> None:
        slow = Slow()
        gather = gathering(slow)
        found = await asyncio.gather(
            after(gather, 0.1, 1),
            after(gather, 0.2, 2),
            after(gather, 0.3, -2),
            after(gather, 0.4, 2, 3),
        )
        assert [list(each) for each in found] == [[1], [4], [4], [4, 9]]
        assert slow.calls == [[1], [2], [-2], [2, 3]]

    simulate(main, seed=1)


def test_what_is_wrong_with_one_is_no_others_fault() -> None:
    async def main(_: World) -> None:
        for bad in (0, 1, 2):
            slow = Slow()
            gather = gathering(slow)
            items = [2, 3, 4]
            items[bad] = -1
            first, *found = await asyncio.gather(
                after(gather, 0.1, 7),
                *(after(gather, 0.2 + 0.1 * n, item) for n, item in enumerate(items)),
                return_exceptions=True,
            )
            assert first == [49]
            for item, answer in zip(items, found, strict=True):
                if item == -1:
                    assert isinstance(answer, InvalidInput)
                else:
                    assert answer == [item * item]
            # The lane is free again.
            assert await gather([5]) == [25]

    simulate(main, seed=1)


def test_a_call_that_fails_alone_fails_once() -> None:
    async def main(_: World) -> None:
        slow = Slow()
        gather = gathering(slow)
        with pytest.raises(InvalidInput):
            await gather([-1])
        one, two = await asyncio.gather(
            after(gather, 0.1, 2), after(gather, 0.2, -1), return_exceptions=True
        )
        assert one == [4]
        assert isinstance(two, InvalidInput)
        assert slow.calls == [[-1], [2], [-1]]

    simulate(main, seed=1)


def test_a_database_that_is_away_is_away_for_all() -> None:
    async def main(_: World) -> None:
        slow = Slow()
        slow.is_away = True
        gather = gathering(slow)
        found = await asyncio.gather(
            *(after(gather, 0.1 * n, n) for n in range(1, 5)), return_exceptions=True
        )
        assert [type(each) for each in found] == [DatabaseUnavailable] * 4
        # Not once more for each: it would only be slower to say so.
        assert slow.calls == [[1], [2, 3, 4]]
        slow.is_away = False
        assert await gather([5]) == [25]

    simulate(main, seed=1)


@pytest.mark.parametrize(
    ("who", "leaves_at"),
    [(1, 0.5), (1, 0.95), *((who, at) for who in (2, 3) for at in (0.5, 0.95, 1.05, 1.5))],
)
def test_a_caller_that_leaves_takes_nobody_with_it(who: int, leaves_at: float) -> None:
    """The second leads what waits from 1.0 on; the first has a lane until then."""

    async def leaving(gather: GroupCommit[int, int], place: int) -> Sequence[int]:
        call = after(gather, 0.001 * place, place)
        if place != who:
            return await call
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(leaves_at):
                await call
        return []

    async def main(_: World) -> None:
        slow = Slow()
        gather = gathering(slow)
        found = await asyncio.gather(*(leaving(gather, n) for n in range(1, 5)))
        for place, answer in enumerate(found, 1):
            assert place == who or answer == [place * place]
        assert await gather([9]) == [81]
        assert slow.calls[-1] == [9]

    for seed in range(20):
        simulate(main, seed=seed)


def test_a_leader_that_leaves_before_it_leads() -> None:
    """It is told to lead and cancelled in the same instant, whichever comes first."""

    async def main(_: World) -> None:
        slow = Slow()
        gather = gathering(slow)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(after(gather, 0.1, 1))
            leader = group.create_task(after(gather, 0.2, 2))
            third = group.create_task(after(gather, 0.3, 3))
            # The first ends at 1.1.
            asyncio.get_running_loop().call_later(1.1, leader.cancel)
        assert (first.result(), third.result()) == ([1], [9])
        assert await gather([4]) == [16]

    for seed in range(50):
        simulate(main, seed=seed)
