"""What every way to carry wake-ups must do, as checks that run on any of them.

A check is given a `WakeUpBench` of one empty place, and raises `AssertionError` where a promise of
`penstock.dispatcher.wakeups.base` does not hold. No test framework is needed; with pytest:

    @pytest.mark.parametrize("name", WAKE_UP_CHECKS)
    def test_my_wake_ups(name):
        asyncio.run(WAKE_UP_CHECKS[name](bench))

Leases and visibilities of a bench should be as short as can be: two checks wait for them to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import Heard, WakeUpChannel, WakeUpListener, WakeUpSender
from penstock.kernel.clock import Clock

_STEP_SECONDS: Final = 0.02
_WAITING_SECONDS: Final = 0.5
"""Time for listeners to begin to wait, or to hear what they should not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeUpBench:
    """One place that carries wake-ups, empty at first."""

    make_sender: Callable[[], WakeUpSender]
    """A sender of its own, not started."""
    make_listener: Callable[[Heard], WakeUpListener]
    """A listener of its own, not started."""
    kill: Callable[[WakeUpListener], Awaitable[None]]
    """End a listener as `kill -9` does: what it holds is not given back."""
    clock: Clock
    held_seconds: float
    """How long a word is kept for a listener that does not say that it lives."""
    woken_max: int
    """How many listeners one call of `send` wakes at most."""
    seconds_max: float = 30.0
    """How long anything may take."""

    async def until(self, holds: Callable[[], object], *, what: str) -> None:
        """Wait until a condition holds; it is a failure if that takes too long."""
        began = self.clock.monotonic()
        while self.clock.monotonic() - began < self.seconds_max:
            if holds():
                return
            await self.clock.sleep(_STEP_SECONDS)
        raise AssertionError(f"{what}: not within {self.seconds_max:.0f} s")

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[WakeUpSender]:
        async with self.make_sender() as sender:
            yield sender

    @asynccontextmanager
    async def ear(self, *operators: str) -> AsyncIterator[RecordingListener]:
        """A listener to these operators, and what it has heard."""
        ear = RecordingListener()
        listener = self.make_listener(ear.hear)
        listener.listen_to(operators)
        async with listener:
            ear.listener = listener
            yield ear
            ear.go_on.set()


@dataclass(eq=False)
class RecordingListener:
    """What was heard. An answer takes until `go_on` is set, and fails as often as `failures`."""

    heard: list[WakeUpChannel] = field(default_factory=list)
    answered: list[WakeUpChannel] = field(default_factory=list)
    failures: int = 0
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    listener: WakeUpListener | None = None

    def __post_init__(self) -> None:
        self.go_on.set()

    async def hear(self, channel: WakeUpChannel) -> None:
        self.heard.append(channel)
        await self.go_on.wait()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("it is not answered")
        self.answered.append(channel)


NORMAL: Final = WakeUpChannel("etl.clean:run", Priority.NORMAL)
BULK: Final = WakeUpChannel("etl.clean:run", Priority.BULK)
OTHER: Final = WakeUpChannel("etl.load:run", Priority.NORMAL)


async def _sent(sender: WakeUpSender, *channels: WakeUpChannel, tasks: int = 1) -> None:
    failed = await sender.send(dict.fromkeys(channels, tasks))
    assert not failed, f"not sent: {failed}"


async def a_word_is_heard_on_its_channel(bench: WakeUpBench) -> None:
    async with bench.sender() as sender, bench.ear(NORMAL.operator) as ear:
        await _sent(sender, NORMAL)
        await bench.until(lambda: ear.answered == [NORMAL], what="the word is heard")
        await _sent(sender, BULK)
        await bench.until(lambda: ear.answered == [NORMAL, BULK], what="the other priority too")


async def every_word_after_an_answer_is_heard(bench: WakeUpBench) -> None:
    async with bench.sender() as sender, bench.ear(NORMAL.operator) as ear:
        for count in range(1, 8):
            await _sent(sender, NORMAL)
            await bench.until(lambda: len(ear.answered) >= count, what=f"word {count}")  # noqa: B023
        assert len(ear.answered) == 7


async def a_word_during_an_answer_is_heard_after_it(bench: WakeUpBench) -> None:
    """Whoever answers may have claimed before the work of the second word was there."""
    async with bench.sender() as sender, bench.ear(NORMAL.operator) as ear:
        ear.go_on.clear()
        await _sent(sender, NORMAL)
        await bench.until(lambda: ear.heard, what="the first word is heard")
        await _sent(sender, NORMAL)
        ear.go_on.set()
        await bench.until(lambda: len(ear.answered) == 2, what="the second word is heard")


async def a_word_waits_for_its_listener(bench: WakeUpBench) -> None:
    async with bench.sender() as sender:
        await _sent(sender, NORMAL, BULK, OTHER)
    async with bench.ear(NORMAL.operator) as ear:
        await bench.until(lambda: sorted(ear.answered) == [BULK, NORMAL], what="both are heard")
    async with bench.ear(OTHER.operator) as ear:
        await bench.until(lambda: ear.answered == [OTHER], what="the third is heard")


async def many_words_that_nobody_hears_block_no_other(bench: WakeUpBench) -> None:
    async with bench.sender() as sender, bench.ear(OTHER.operator) as ear:
        for _ in range(30):
            await _sent(sender, NORMAL, BULK)
        await _sent(sender, OTHER)
        await bench.until(lambda: ear.answered == [OTHER], what="the other is heard")
        assert set(ear.heard) == {OTHER}
    async with bench.ear(NORMAL.operator) as ear:
        await bench.until(lambda: set(ear.answered) == {NORMAL, BULK}, what="they are heard too")


async def a_listener_follows_what_it_is_told(bench: WakeUpBench) -> None:
    async with bench.sender() as sender, bench.ear() as ear:
        assert ear.listener is not None
        ear.listener.listen_to([NORMAL.operator])
        await _sent(sender, NORMAL)
        await bench.until(lambda: ear.answered == [NORMAL], what="the first operator is heard")
        ear.listener.listen_to([OTHER.operator])
        await _sent(sender, OTHER)
        await bench.until(lambda: ear.answered == [NORMAL, OTHER], what="the second is heard")
        await _sent(sender, BULK)
        async with bench.ear(BULK.operator) as another:
            await bench.until(lambda: another.answered == [BULK], what="another hears the first")
        assert ear.answered == [NORMAL, OTHER]


async def as_many_listeners_are_woken_as_there_are_tasks(bench: WakeUpBench) -> None:
    async with AsyncExitStack() as stack:
        sender = await stack.enter_async_context(bench.sender())
        ears = [await stack.enter_async_context(bench.ear(NORMAL.operator)) for _ in range(4)]
        for ear in ears:
            ear.go_on.clear()
        await bench.clock.sleep(_WAITING_SECONDS)
        woken = min(3, bench.woken_max)
        await _sent(sender, NORMAL, tasks=3)
        await bench.until(lambda: sum(len(each.heard) for each in ears) == woken, what="they hear")
        await bench.clock.sleep(_WAITING_SECONDS)
        assert sorted(len(each.heard) for each in ears) == [0] * (4 - woken) + [1] * woken


async def a_word_without_an_answer_comes_again(bench: WakeUpBench) -> None:
    async with bench.sender() as sender, bench.ear(NORMAL.operator) as ear:
        ear.failures = 2
        await _sent(sender, NORMAL)
        await bench.until(lambda: ear.answered == [NORMAL], what="it comes again and again")
        assert len(ear.heard) == 3


async def a_word_whose_listener_dies_is_heard_elsewhere(bench: WakeUpBench) -> None:
    dead = RecordingListener()
    dead.go_on.clear()
    victim = bench.make_listener(dead.hear)
    victim.listen_to([NORMAL.operator])
    async with bench.sender() as sender:
        await victim.start()
        await _sent(sender, NORMAL)
        await bench.until(lambda: dead.heard, what="the first listener hears it")
        await bench.kill(victim)
        async with bench.ear(NORMAL.operator) as ear:
            await bench.until(lambda: ear.answered == [NORMAL], what="the second hears it")


async def a_long_answer_is_nobody_elses(bench: WakeUpBench) -> None:
    async with (
        bench.sender() as sender,
        bench.ear(NORMAL.operator) as one,
        bench.ear(NORMAL.operator) as two,
    ):
        one.go_on.clear()
        two.go_on.clear()
        await _sent(sender, NORMAL)
        await bench.until(lambda: one.heard or two.heard, what="one hears it")
        await bench.clock.sleep(2.5 * bench.held_seconds)
        assert len(one.heard + two.heard) == 1


async def stopping_lets_an_answer_end(bench: WakeUpBench) -> None:
    ear = RecordingListener()
    ear.go_on.clear()
    listener = bench.make_listener(ear.hear)
    listener.listen_to([NORMAL.operator])
    async with bench.sender() as sender, asyncio.TaskGroup() as group:
        await listener.start()
        await _sent(sender, NORMAL)
        await bench.until(lambda: ear.heard, what="it is heard")
        stopping = group.create_task(listener.stop())
        await bench.clock.sleep(0.1)
        ear.go_on.set()
        await stopping
        assert ear.answered == [NORMAL]
    await listener.stop()


async def any_operator_has_a_channel_of_its_own(bench: WakeUpBench) -> None:
    stem = "a." * 95
    operators = ("a.b:c", "a-b:c", "a_b-c", "A.b:c", f"{stem}:first", f"{stem}:other", "_")
    channels = [WakeUpChannel(each, tier) for each in operators for tier in Priority]
    async with bench.sender() as sender:
        await _sent(sender, *channels)
        for operator in operators:
            await _heard_alone(bench, operator)


async def _heard_alone(bench: WakeUpBench, operator: str) -> None:
    wanted: Collection[WakeUpChannel] = {WakeUpChannel(operator, tier) for tier in Priority}
    async with bench.ear(operator) as ear:
        await bench.until(lambda: len(ear.answered) >= 2, what=f"{operator} is heard")
        assert set(ear.heard) == wanted, ear.heard


Check = Callable[[WakeUpBench], Coroutine[Any, Any, None]]

WAKE_UP_CHECKS: Final[dict[str, Check]] = {
    check.__name__: check
    for check in (
        a_word_is_heard_on_its_channel,
        every_word_after_an_answer_is_heard,
        a_word_during_an_answer_is_heard_after_it,
        a_word_waits_for_its_listener,
        many_words_that_nobody_hears_block_no_other,
        a_listener_follows_what_it_is_told,
        as_many_listeners_are_woken_as_there_are_tasks,
        a_word_without_an_answer_comes_again,
        a_word_whose_listener_dies_is_heard_elsewhere,
        a_long_answer_is_nobody_elses,
        stopping_lets_an_answer_end,
        any_operator_has_a_channel_of_its_own,
    )
}
