"""What wake-ups leave in the bucket, and what a bucket that is away does to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import WakeUpChannel
from penstock.dispatcher.wakeups.bucket import (
    NEAR_POLLING,
    QUEUE_NAME,
    BucketListener,
    BucketSender,
)
from penstock.kernel.errors import Unavailable
from penstock.queue.client import Queue
from penstock.store.base import pages
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.queue_contract.bench import GateAccess, GatedStore
from penstock.testing.virtual import World, simulate

NORMAL = WakeUpChannel("etl:run", Priority.NORMAL)
BULK = WakeUpChannel("etl:run", Priority.BULK)


class Site:
    """A bucket in virtual time, and the gate that its client goes through."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = world.clock()
        self.bucket = MemoryBucket(self.clock)
        self.gate = GatedStore(MemoryStore(self.bucket, clock=self.clock))

    async def queue(self) -> Queue:
        return await Queue.on(self.gate, name=QUEUE_NAME, entropy=self.world.entropy("queue"))

    async def sender(self) -> BucketSender:
        return BucketSender(await self.queue(), clock=self.clock)

    async def keys(self) -> list[str]:
        store = MemoryStore(self.bucket, clock=self.clock)
        found: list[str] = []
        async for page in pages(store, f"queues/{QUEUE_NAME}/tasks/"):
            found += [entry.key for entry in page.entries]
        return found


def play(story: Callable[[Site], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        await story(Site(world))

    simulate(main, seed=1)


def test_words_that_nobody_hears_do_not_pile_up() -> None:
    async def story(site: Site) -> None:
        sender = await site.sender()
        for _ in range(100):
            assert await sender.send(Counter([NORMAL, BULK])) == {}
        assert len(await site.keys()) == 2
        # In case the word is stuck another is sent, more and more rarely.
        for _ in range(24 * 60):
            await site.clock.sleep(60)
            await sender.send(Counter([NORMAL]))
        assert 20 < len(await site.keys()) < 40

    play(story)


def test_answered_words_leave_nothing() -> None:
    async def story(site: Site) -> None:
        sender = await site.sender()
        heard: list[WakeUpChannel] = []

        async def answer(channel: WakeUpChannel) -> None:
            heard.append(channel)

        listener = BucketListener(
            await site.queue(), answer, polling=NEAR_POLLING, clock=site.clock
        )
        listener.listen_to([NORMAL.operator])
        async with listener:
            for _ in range(200):
                await sender.send(Counter([NORMAL]))
                await site.clock.sleep(0.5)
        assert len(heard) == 200
        # Of the last word alone something is there still.
        assert len(await site.keys()) <= 1

    play(story)


def test_a_bucket_that_is_away_fails_each_channel_and_comes_back() -> None:
    async def story(site: Site) -> None:
        sender = await site.sender()
        site.gate.access = GateAccess.CLOSED
        failed = await sender.send(Counter([NORMAL, BULK]))
        assert set(failed) == {NORMAL, BULK}
        assert all(failed.values())
        site.gate.access = GateAccess.OPEN
        assert await sender.send(Counter([NORMAL, BULK])) == {}
        assert len(await site.keys()) == 2

    play(story)


class Shy(Queue):
    """A queue that can be connected to at the third try."""

    def __init__(self, site: Site, tries: list[int]) -> None:
        super().__init__("", name=QUEUE_NAME)
        self._site = site
        self._tries = tries
        self._owns_store = False

    async def _connect(self) -> None:
        self._tries.append(1)
        if len(self._tries) < 3:
            raise Unavailable("away")
        await self._use(self._site.gate, self._site.world.entropy("shy"))


def test_a_queue_that_cannot_be_opened_is_tried_again() -> None:
    async def story(site: Site) -> None:
        tries: list[int] = []
        async with BucketSender(Shy(site, tries), clock=site.clock) as sender:
            assert await sender.send(Counter([NORMAL])) == {NORMAL: "away"}
            heard: list[WakeUpChannel] = []

            async def answer(channel: WakeUpChannel) -> None:
                heard.append(channel)

            listener = BucketListener(
                Shy(site, tries), answer, polling=NEAR_POLLING, clock=site.clock
            )
            listener.listen_to([NORMAL.operator])
            async with listener:
                await site.clock.sleep(10)
                assert await sender.send(Counter([NORMAL])) == {}
                await site.clock.sleep(5)
            assert heard == [NORMAL]

    play(story)
