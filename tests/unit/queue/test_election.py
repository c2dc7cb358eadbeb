"""One worker is the monitor, and another when it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from penstock.kernel.document_format import decode, encode
from penstock.queue.discovery.elected import (
    RENEW_SECONDS,
    TERM_SECONDS,
    MonitorElection,
    MonitorTerm,
)
from penstock.queue.layout import QueueLayout
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import VirtualClock, World, simulate

LAYOUT = QueueLayout("q")


class Bench:
    """A bucket, and workers with clocks of their own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock: VirtualClock = world.clock()
        self.bucket = MemoryBucket(world.clock(), date_resolution_seconds=1.0)
        self.meter = Meter()

    def worker(
        self, name: str, *, skew_seconds: float = 0.0, drift: float = 0.0
    ) -> MonitorElection:
        clock = self.world.clock(skew_seconds=skew_seconds, drift=drift)
        store = MeteredStore(MemoryStore(self.bucket, clock=clock), self.meter)
        return MonitorElection(store, LAYOUT, holder=name, entropy=self.world.entropy(name))

    @property
    def elected(self) -> MonitorTerm:
        return decode(MonitorTerm, self.bucket.objects[LAYOUT.monitor].body, where="monitor")


def _run(check: Callable[[Bench], Awaitable[None]], *, seed: int = 1) -> None:
    async def main(world: World) -> None:
        await check(Bench(world))

    simulate(main, seed=seed)


def test_nobody_is_elected_before_its_first_turn() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        believes = [one.is_elected]
        await one.turn()
        believes.append(one.is_elected)
        assert believes == [False, True]
        assert bench.elected.holder == "one"

    _run(check)


def test_of_many_at_once_one_is_elected() -> None:
    async def check(bench: Bench) -> None:
        workers = [bench.worker(str(number)) for number in range(6)]
        await asyncio.gather(*(worker.turn() for worker in workers))
        assert [worker.is_elected for worker in workers].count(True) == 1

    for seed in range(10):
        _run(check, seed=seed)


def test_who_renews_stays_and_others_only_read() -> None:
    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await one.turn()
        puts = bench.meter.requests(kind=Kind.PUT)
        for turns in range(1, 31):
            await bench.clock.sleep(RENEW_SECONDS)
            await one.turn()
            await two.turn()
            assert one.is_elected
            assert not two.is_elected
            assert bench.meter.requests(kind=Kind.PUT) == puts + turns

    _run(check)


def test_a_term_is_trusted_no_longer_than_it_lasts() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one", skew_seconds=86_400)
        await one.turn()
        await bench.clock.sleep(TERM_SECONDS - 2)
        believes = [one.is_elected]
        await bench.clock.sleep(3)
        believes.append(one.is_elected)
        assert believes == [True, False]

    _run(check)


def test_another_takes_over_after_the_term_and_not_before() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one", drift=-150e-6)
        two = bench.worker("two", skew_seconds=-86_400, drift=150e-6)
        began = bench.world.now()
        await one.turn()
        while not two.is_elected:
            await two.turn()
            assert not (one.is_elected and two.is_elected)
            await bench.clock.sleep(1)
        assert TERM_SECONDS <= bench.world.now() - began <= TERM_SECONDS + 5
        assert bench.elected.holder == "two"

    for seed in range(5):
        _run(check, seed=seed)


def test_who_comes_back_late_hears_of_its_successor() -> None:
    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await one.turn()
        await bench.clock.sleep(TERM_SECONDS + 5)
        await two.turn()
        await one.turn()
        assert two.is_elected
        assert not one.is_elected
        assert bench.elected.holder == "two"

    _run(check)


def test_who_has_missed_its_term_may_take_the_next() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await one.turn()
        await bench.clock.sleep(TERM_SECONDS + 5)
        believes = [one.is_elected]
        await one.turn()
        believes.append(one.is_elected)
        assert believes == [False, True]

    _run(check)


def test_who_resigns_makes_room_at_once() -> None:
    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await one.turn()
        await one.resign()
        assert not one.is_elected
        await two.turn()
        assert two.is_elected

    _run(check)


def test_to_resign_does_not_end_the_term_of_another() -> None:
    async def check(bench: Bench) -> None:
        one, two = bench.worker("one"), bench.worker("two")
        await one.turn()
        ends = bench.elected.expires_ms
        await two.resign()
        assert bench.elected.expires_ms == ends
        assert one.is_elected
        # One that believes in its term, although another has been elected by hand.
        body = encode(MonitorTerm(holder="two", expires_ms=ends))
        bench.bucket.write(LAYOUT.monitor, body, {})
        await one.resign()
        assert (bench.elected.holder, bench.elected.expires_ms) == ("two", ends)

    _run(check)


def test_who_believes_wrongly_learns_it_at_its_next_turn() -> None:
    async def check(bench: Bench) -> None:
        one = bench.worker("one")
        await one.turn()
        later_ms = bench.elected.expires_ms + 60_000
        bench.bucket.write(
            LAYOUT.monitor, encode(MonitorTerm(holder="two", expires_ms=later_ms)), {}
        )
        believes = [one.is_elected]
        await one.turn()
        believes.append(one.is_elected)
        assert believes == [True, False]
        assert bench.elected.holder == "two"

    _run(check)
