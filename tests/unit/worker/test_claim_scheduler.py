"""Who is asked next, and which wake-up an answer settles."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.kernel.errors import DispatcherUnavailable
from penstock.testing.virtual import VirtualClock, World, simulate
from penstock.worker.claim_scheduler import OperatorQueue


def play(story: Callable[[OperatorQueue, VirtualClock], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        entropy = world.entropy("appetite")
        await story(OperatorQueue(look_seconds=30, clock=clock, entropy=entropy), clock)

    simulate(main, seed=1)


def served(appetite: OperatorQueue, *, is_more: bool = False) -> list[str]:
    """Answer all who are hungry, up to ten times."""
    names = []
    for _ in range(10):
        asking = appetite.next()
        if asking is None:
            break
        names.append(asking.operator)
        appetite.answered(asking, is_more=is_more)
    return names


def test_new_operators_are_hungry_once_and_in_turn() -> None:
    async def story(appetite: OperatorQueue, clock: VirtualClock) -> None:
        assert appetite.first is None
        assert appetite.serve(["a", "b"])
        assert not appetite.serve(["a", "b"])
        assert served(appetite) == ["a", "b"]
        assert appetite.first is None
        appetite.enqueue("b")
        appetite.enqueue("a")
        appetite.enqueue("b")
        appetite.enqueue("unknown")
        assert served(appetite) == ["b", "a"]
        appetite.enqueue("a")
        appetite.enqueue("b")
        assert served(appetite, is_more=True) == ["a", "b"] * 5

    play(story)


def test_an_operator_that_nobody_asks_for_is_asked_after_a_while() -> None:
    async def story(appetite: OperatorQueue, clock: VirtualClock) -> None:
        assert appetite.seconds_to_look() > 1e6
        appetite.serve(["a", "b"])
        served(appetite)
        assert 23 < appetite.seconds_to_look() < 37
        await clock.sleep(20)
        appetite.enqueue("a")
        assert served(appetite) == ["a"]
        await clock.sleep(17)
        assert appetite.first is not None
        assert served(appetite) == ["b"]

    play(story)


def test_a_claim_settles_the_wake_ups_that_were_there_when_it_began() -> None:
    async def story(appetite: OperatorQueue, clock: VirtualClock) -> None:
        appetite.serve(["a"])
        first = appetite.wake("a")
        asking = appetite.next()
        assert asking is not None
        second = appetite.wake("a")
        appetite.answered(asking, is_more=False)
        assert first.done()
        assert not second.done()
        assert served(appetite) == ["a"]
        assert second.done()

    play(story)


def test_a_claim_that_fails_settles_nothing() -> None:
    async def story(appetite: OperatorQueue, clock: VirtualClock) -> None:
        appetite.serve(["a"])
        word = appetite.wake("a")
        gone = appetite.wake("a")
        asking = appetite.next()
        assert asking is not None
        gone.cancel()
        appetite.failed(asking)
        assert not word.done()
        assert served(appetite) == ["a"]
        await word

    play(story)


def test_words_about_what_is_not_served_are_settled() -> None:
    async def story(appetite: OperatorQueue, clock: VirtualClock) -> None:
        await appetite.wake("a")
        appetite.serve(["a"])
        word = appetite.wake("a")
        asking = appetite.next()
        under_way, later = word, appetite.wake("a")
        appetite.serve([])
        await later
        assert asking is not None
        appetite.failed(asking)
        await under_way
        assert list(appetite.operators) == []
        assert appetite.first is None

    play(story)


def test_everybody_is_sent_away() -> None:
    async def story(appetite: OperatorQueue, clock: VirtualClock) -> None:
        appetite.serve(["a", "b"])
        words = [appetite.wake("a"), appetite.wake("b")]
        appetite.next()
        appetite.refuse(DispatcherUnavailable("no"))
        for word in words:
            with pytest.raises(DispatcherUnavailable):
                await word
        # Those who have given up are not kept.
        for _ in range(100):
            appetite.wake("b").cancel()
        assert len(appetite._operators["b"].waiting) == 1
        await asyncio.wait_for(appetite.wake("unknown"), 1)

    play(story)
