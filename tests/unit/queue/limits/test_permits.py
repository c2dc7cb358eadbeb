"""One worker's part of a limit: what it counts on when answers are lost, and what it asks when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from penstock.kernel.document_format import decode
from penstock.kernel.errors import OutcomeUnknown, StoreError, Unavailable
from penstock.queue.client import Queue
from penstock.queue.execution.limit_gate import IDLE_SECONDS, RENEW_SECONDS, LimitHold
from penstock.queue.layout import QueueLayout
from penstock.queue.limits import LEASE_SECONDS, MARGIN_SECONDS, LimitShare, LimitState
from penstock.store.base import NO_METADATA, REPLACE, Object, ObjectStore, PutMode, Version, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import World, simulate

KEY = QueueLayout("q").limit("api")


class Lossy(Wrapper):
    """A store that can be cut off: before a put is carried out, or after, with all reads."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.is_cut = False
        self.loses_answers = False
        self.slow_seconds = 0.0

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        await self.clock.machine.sleep(self.slow_seconds)
        if self.is_cut:
            raise OutcomeUnknown("lost", key=key)
        version = await super().put(key, body, mode, metadata=metadata)
        if self.loses_answers:
            raise OutcomeUnknown("lost", key=key)
        return version

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        await self.clock.machine.sleep(self.slow_seconds)
        if self.is_cut or self.loses_answers:
            raise Unavailable("away", key=key)
        return await super().get(key, unless=unless)


class Bench:
    def __init__(self, world: World) -> None:
        self.clock = world.clock()
        self.world = world
        self.bucket = MemoryBucket(world.clock())
        self.meter = Meter()
        metered = MeteredStore(MemoryStore(self.bucket, clock=world.clock()), self.meter)
        self.store = Lossy(metered)
        self.holds = 0

    async def open(self, **words: int) -> None:
        self.queue = await Queue.on(self.store, name="q", entropy=self.world.entropy("q"))
        if words:
            await self.queue.limits.set("api", **words)

    def hold(self, worker: str = "w") -> LimitHold:
        return LimitHold(self.queue.access, "api", worker=worker)

    def share(self, worker: str = "w") -> LimitShare | None:
        body = self.bucket.objects[KEY].body
        return decode(LimitState, body, where=KEY).shares.get(worker)

    def puts(self) -> int:
        return self.meter.requests(kind=Kind.PUT, label="limits")


def _run(check: Callable[[Bench], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        await check(Bench(world))

    simulate(main, seed=1)


def test_those_who_ask_together_are_served_by_one_write() -> None:
    async def check(bench: Bench) -> None:
        await bench.open(concurrency=10)
        hold = bench.hold()
        before = bench.puts()
        got = await asyncio.gather(*(hold.ask_for(n, 1) for n in range(8)))
        assert got == [1] * 8
        assert bench.puts() == before + 1
        share = bench.share()
        assert share is not None
        assert (share.permits, share.wants) == (8, 0)

    _run(check)


def test_permits_are_used_again_without_a_write() -> None:
    async def check(bench: Bench) -> None:
        await bench.open(concurrency=3)
        hold = bench.hold()
        assert await hold.ask_for("a", 3) == 3
        before = bench.puts()
        for _ in range(10):
            hold.give(1)
            assert hold.grab("a", 1) == 1
            await bench.clock.sleep(0.2)
            await hold.refresh()
        assert bench.puts() == before

    _run(check)


def test_a_take_whose_answer_is_lost_gives_nothing_until_it_is_read() -> None:
    async def check(bench: Bench) -> None:
        await bench.open(concurrency=5)
        hold = bench.hold()
        assert await hold.ask_for("a", 2) == 2
        assert await hold.ask_for("b", 1) == 1
        bench.store.loses_answers = True
        with pytest.raises(StoreError):
            await hold.ask_for("c", 2)
        share = bench.share()
        assert share is not None
        assert share.permits == 5
        assert hold.free() == 0
        bench.store.loses_answers = False
        assert await hold.ask_for("c", 2) == 2

    _run(check)


def test_a_return_whose_answer_is_lost_is_not_used_any_more() -> None:
    async def check(bench: Bench) -> None:
        await bench.open(concurrency=5)
        hold = bench.hold()
        assert await hold.ask_for("a", 5) == 5
        hold.give(4)
        await bench.clock.sleep(IDLE_SECONDS + 1)
        bench.store.is_cut = True
        with pytest.raises(StoreError):
            await hold.refresh()
        # The object still gives us five, and we may have returned four.
        assert hold.free() == 0
        bench.store.is_cut = False
        await hold.refresh()
        share = bench.share()
        assert share is not None
        assert share.permits == 1

    _run(check)


def test_a_renewal_that_fails_ends_what_runs_before_the_lease_ends() -> None:
    async def check(bench: Bench) -> None:
        await bench.open(concurrency=1)
        hold = bench.hold()
        assert await hold.ask_for("a", 1) == 1
        ended: list[float] = []
        hold.watch("a", (lambda: ended.append(1.0), lambda: None))
        await bench.clock.sleep(RENEW_SECONDS + 1)
        bench.store.is_cut = True
        with pytest.raises(StoreError):
            await hold.refresh()
        assert hold.may_start()
        await bench.clock.sleep(LEASE_SECONDS - RENEW_SECONDS - MARGIN_SECONDS - 2)
        over = [hold.is_over]
        await bench.clock.sleep(2)
        over.append(hold.is_over)
        assert over == [False, True]
        assert not hold.may_start()
        hold.end_all()
        assert ended == [1.0]

    _run(check)


def test_who_was_given_up_must_ask_again_and_stop_what_it_cannot_keep() -> None:
    async def check(bench: Bench) -> None:
        await bench.open(concurrency=1)
        hold, other = bench.hold(), bench.hold("other")
        assert await hold.ask_for("a", 1) == 1
        ended: list[float] = []
        hold.watch("a", (lambda: ended.append(1.0), lambda: None))
        await bench.clock.sleep(LEASE_SECONDS + 1)
        assert await other.ask_for("b", 1) == 1
        await hold.refresh()
        assert ended
        assert hold.free() == 0
        assert await bench.hold("third").ask_for("c", 1) == 0

    _run(check)


def test_a_limit_without_tokens_starts_nothing_that_had_leave_before() -> None:
    """A rate was set after tasks had got leave without one."""

    async def check(bench: Bench) -> None:
        await bench.open()
        hold = bench.hold()
        assert await hold.ask_for("a", 50) == 50
        assert hold.may_start()
        await bench.queue.limits.set("api", rate=1, burst=3)
        await bench.clock.sleep(31)
        await hold.refresh()
        assert not hold.may_start()

    _run(check)


def test_tokens_for_those_who_have_leave_are_not_given_twice() -> None:
    async def check(bench: Bench) -> None:
        await bench.open(rate=1, burst=5)
        hold = bench.hold()
        assert await hold.ask_for("a", 3) == 3
        hold.pending += 3
        assert hold.free() == 0
        assert await hold.ask_for("b", 5) == 2
        hold.pending += 2
        share = bench.share()
        assert share is not None
        assert share.tokens == 5
        assert hold.grab("c", 1) == 0
        for _ in range(5):
            assert hold.may_start()
            hold.begin()
            hold.pending -= 1
        assert not hold.may_start()

    _run(check)


def test_starts_are_reported_and_tokens_returned_within_two_seconds() -> None:
    async def check(bench: Bench) -> None:
        await bench.open(rate=1, burst=5)
        hold = bench.hold()
        assert await hold.ask_for("a", 5) == 5
        hold.begin()
        hold.give(5)
        hold.forget("a")
        await bench.clock.sleep(2)
        await hold.refresh()
        assert bench.share() is None
        seen = await bench.queue.limits.get("api")
        assert seen is not None
        # One was used two seconds ago, at a second each.
        assert seen.tokens_left == 5
        assert hold.free() == 0

    _run(check)


def test_who_waits_asks_rarely_and_writes_hardly_ever() -> None:
    async def check(bench: Bench) -> None:
        await bench.open(concurrency=1)
        holder, hold = bench.hold("other"), bench.hold()
        assert await holder.ask_for("a", 1) == 1
        before = bench.puts()
        requests = bench.meter.requests(label="limits")
        for _ in range(180):
            if not hold.is_shut():
                assert await hold.ask_for("b", 1) == 0
            await bench.clock.sleep(0.1)
        assert bench.puts() - before == 1
        assert bench.meter.requests(label="limits") - requests <= 8

    _run(check)


def test_what_is_asked_for_is_not_forgotten_however_long_the_answer_takes() -> None:
    async def check(bench: Bench) -> None:
        await bench.open(concurrency=1)
        bench.store.slow_seconds = 20.0
        hold = bench.hold()
        async with asyncio.TaskGroup() as group:
            apply_request = group.create_task(hold.ask_for("a", 1))
            for _ in range(35):
                await bench.clock.sleep(1)
                assert not hold.is_idle
        assert apply_request.result() == 1
        assert not hold.is_idle

    _run(check)


def test_who_waits_to_ask_is_not_forgotten_when_the_ask_before_fails() -> None:
    async def check(bench: Bench) -> None:
        await bench.open(concurrency=1)
        bench.store.slow_seconds = 20.0
        bench.store.is_cut = True
        hold = bench.hold()
        seen: list[bool] = []

        async def request(who: str) -> None:
            with pytest.raises(StoreError):
                await hold.ask_for(who, 1)
            seen.append(hold.is_idle)

        await asyncio.gather(request("a"), request("b"))
        # The second asks for itself then; until it has, it may get permits.
        assert seen[0] is False

    _run(check)


def test_what_had_leave_does_not_start_under_a_share_that_came_back_smaller() -> None:
    async def check(bench: Bench) -> None:
        await bench.open(concurrency=4)
        hold, other = bench.hold(), bench.hold("other")
        assert await hold.ask_for("a", 4) == 4
        assert hold.may_start()
        # Nothing has started and nobody watches: the claim is still on its way.
        await bench.clock.sleep(LEASE_SECONDS + 1)
        assert await other.ask_for("b", 3) == 3
        await hold.refresh()
        share = bench.share()
        assert share is not None
        assert share.permits == 1
        assert not hold.may_start()
        hold.give(3)
        assert hold.may_start()

    _run(check)
