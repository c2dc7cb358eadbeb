"""How the store's time is asked for: how narrow it gets, how often that costs a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import Refused, StoreError, Unavailable
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.time import (
    CALIBRATED_SECONDS,
    CALIBRATION_SAMPLES_MAX,
    SAMPLE_AT_LATEST_SECONDS,
    SAMPLE_EVERY_SECONDS,
    Interval,
    TimeSample,
)
from penstock.testing.virtual import VirtualClock, World, simulate

Latency = Callable[[Entropy], float]
"""One of the two ways of a request, in seconds."""

LATENCIES: dict[str, Latency] = {
    "none": lambda _: 0.0,
    "near": lambda entropy: entropy.uniform(0.0005, 0.005),
    "far": lambda entropy: entropy.uniform(0.05, 0.15),
    "slow": lambda entropy: entropy.uniform(0.0, 0.3),
    "now and then": lambda entropy: 0.002 if entropy.random() < 0.5 else 0.4,
    "mostly slow": lambda entropy: 0.002 if entropy.random() < 0.2 else 0.35,
    "rarely very slow": lambda entropy: 0.01 if entropy.random() < 0.9 else 1.5,
}


@dataclass
class Client:
    """A machine and its store. `asked` are the machine's instants at which it asked the time."""

    world: World
    machine: VirtualClock
    store: MemoryStore
    asked: list[float] = field(default_factory=list)
    failing: StoreError | None = None
    hanging: asyncio.Event | None = None

    async def sample(self) -> TimeSample:
        self.asked.append(self.machine.monotonic())
        if self.hanging is not None:
            await self.hanging.wait()
        if self.failing is not None:
            await self.machine.sleep(1.0)
            raise self.failing
        return await self.store.sample()

    async def now(self) -> Interval:
        return self._checked(await self.store.clock.read(self.sample))

    async def calibrate(self) -> Interval:
        return self._checked(await self.store.clock.calibrate(self.sample))

    def _checked(self, interval: Interval) -> Interval:
        assert interval.earliest <= self.world.now() <= interval.latest
        return interval


def _client(
    world: World,
    latency: Latency = LATENCIES["near"],
    *,
    drift: float | None = None,
    resolution: float = 1.0,
) -> Client:
    entropy = world.entropy("machine")
    machine = world.clock(
        skew_seconds=entropy.uniform(-1e6, 1e6),
        drift=entropy.uniform(-199e-6, 199e-6) if drift is None else drift,
    )

    async def delay() -> None:
        await machine.sleep(latency(entropy))

    bucket = MemoryBucket(world.clock(), date_resolution_seconds=resolution)
    return Client(world, machine, MemoryStore(bucket, clock=machine, delay=delay))


@pytest.mark.parametrize("latency", LATENCIES)
def test_ten_samples_at_start_are_enough(latency: str) -> None:
    async def main(world: World) -> None:
        client = _client(world, LATENCIES[latency])
        round_trips: list[float] = []
        await client.machine.sleep(world.entropy("start").uniform(0, 2))

        async def sample() -> TimeSample:
            seen = await client.sample()
            round_trips.append(seen.received - seen.sent)
            return seen

        found = await client.store.clock.calibrate(sample)
        assert found.earliest <= world.now() <= found.latest
        assert len(client.asked) <= 10
        assert found.width <= 0.1 + max(round_trips) * 1.001 + 1e-5
        asked = len(client.asked)
        if found.width <= CALIBRATED_SECONDS + min(round_trips):
            await client.calibrate()
            assert len(client.asked) == asked, "what is narrow enough is not asked again"

    for seed in range(100):
        simulate(main, seed=seed)


def test_near_stores_need_only_a_few_samples() -> None:
    async def main(world: World) -> int:
        client = _client(world)
        await client.calibrate()
        return len(client.asked)

    assert max(simulate(main, seed=seed) for seed in range(100)) <= 6


def test_exact_stores_need_one_sample() -> None:
    async def main(world: World) -> None:
        client = _client(world, resolution=0.0)
        assert (await client.calibrate()).width < 0.011
        assert len(client.asked) == 1

    simulate(main, seed=1)


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(
        st.one_of(
            st.floats(0, 10),
            st.floats(SAMPLE_EVERY_SECONDS - 2, SAMPLE_AT_LATEST_SECONDS + 2),
            st.floats(0, 5000),
        ),
        max_size=40,
    ),
    readers=st.integers(1, 3),
    failing=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_at_most_one_request_in_five_minutes(
    gaps: list[float], readers: int, failing: bool, seed: int
) -> None:
    async def main(world: World) -> None:
        client = _client(world)
        await client.calibrate()
        client.asked.clear()
        started = client.machine.monotonic()
        client.failing = Unavailable("down") if failing else None
        for gap in gaps:
            await client.machine.sleep(gap)
            await asyncio.gather(*(client.now() for _ in range(readers)))
        instants = [started - 0.01, *client.asked]
        for before, after in pairwise(instants):
            assert after - before >= 300 - 0.02

    simulate(main, seed=seed)


def test_a_request_goes_out_when_nothing_was_heard_for_long() -> None:
    async def main(world: World) -> None:
        client = _client(world, drift=199e-6)
        await client.calibrate()
        await client.machine.sleep(86_400)
        client.asked.clear()
        assert (await client.now()).width < 1.1
        assert len(client.asked) == 1

    simulate(main, seed=1)


def test_regular_reading_stays_narrower_than_a_sample_and_its_drift() -> None:
    """However unlucky the instants of reading: the interval does not widen hour by hour."""

    async def main(world: World) -> None:
        client = _client(world)
        await client.calibrate()
        for _ in range(24 * 360):
            await client.machine.sleep(10)
            assert (await client.now()).width < 1.2

    for seed in range(3):
        simulate(main, seed=seed)


def test_ordinary_answers_make_requests_unnecessary() -> None:
    async def main(world: World) -> None:
        client = _client(world)
        await client.calibrate()
        client.asked.clear()
        for number in range(300):
            await client.machine.sleep(SAMPLE_EVERY_SECONDS - 1)
            await client.store.put("a", b"%d" % number)
            await client.now()
        assert client.asked == []

    simulate(main, seed=1)


def test_the_first_readers_share_one_request() -> None:
    async def main(world: World) -> None:
        client = _client(world)
        intervals = await asyncio.gather(*(client.now() for _ in range(20)))
        assert len(client.asked) == 1
        assert len(set(intervals)) == 1

    simulate(main, seed=1)


def test_the_first_readers_share_one_failure() -> None:
    """With a store that is down, the twentieth reader does not wait for nineteen others."""

    async def main(world: World) -> None:
        client = _client(world)
        client.failing = Refused("no", hint="ask")
        began = world.now()
        failures = await asyncio.gather(*(client.now() for _ in range(20)), return_exceptions=True)
        assert [(type(failure), getattr(failure, "hint", "")) for failure in failures] == [
            (Refused, "ask")
        ] * 20
        assert len(set(map(id, failures))) == 20, "errors that are raised apart are told apart"
        assert len(client.asked) == 1
        assert world.now() - began < 1.1
        client.failing = None
        await client.now()

    simulate(main, seed=1)


def test_a_first_reader_that_is_cancelled_leaves_the_question_to_the_next() -> None:
    async def main(world: World) -> None:
        client = _client(world)
        client.hanging = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(client.now())
            await client.machine.sleep(1)
            second = group.create_task(client.now())
            await client.machine.sleep(1)
            client.hanging = None
            first.cancel()
        assert first.cancelled()
        assert second.result().width < 1.1
        assert len(client.asked) == 2

    simulate(main, seed=1)


def test_a_failed_refresh_is_not_raised() -> None:
    async def main(world: World) -> None:
        client = _client(world)
        await client.calibrate()
        client.failing = Unavailable("down")
        await client.machine.sleep(3600)
        client.asked.clear()
        assert (await client.now()).width > 1
        assert len(client.asked) == 1

    simulate(main, seed=1)


def test_other_errors_than_the_stores_are_raised() -> None:
    async def main(world: World) -> None:
        client = _client(world)
        await client.calibrate()
        await client.machine.sleep(3600)

        async def broken() -> TimeSample:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            await client.store.clock.read(broken)

    simulate(main, seed=1)


def test_a_sample_that_hangs_holds_nobody_else_up() -> None:
    async def main(world: World) -> None:
        client = _client(world)
        await client.calibrate()
        await client.machine.sleep(3600)
        client.hanging = asyncio.Event()
        client.asked.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(client.now())
            await client.machine.sleep(1)
            began = world.now()
            for _ in range(10):
                await client.now()
            assert world.now() == began
            await client.machine.sleep(3600)
            began = world.now()
            await client.now()
            assert world.now() == began, "not even when another sample would be due"
            client.hanging.set()
        assert len(client.asked) == 1

    simulate(main, seed=1)


def test_a_calibration_that_meets_failures_goes_on() -> None:
    async def main(world: World) -> None:
        client = _client(world)
        await client.now()
        calls = 0

        async def every_other() -> TimeSample:
            nonlocal calls
            calls += 1
            if calls % 2:
                raise Unavailable("lost")
            return await client.sample()

        assert (await client.store.clock.calibrate(every_other)).width < 0.2
        assert calls <= CALIBRATION_SAMPLES_MAX

    simulate(main, seed=1)


def test_a_calibration_of_a_store_that_is_down_ends() -> None:
    async def main(world: World) -> None:
        client = _client(world)
        client.failing = Unavailable("down")
        with pytest.raises(Unavailable, match="down"):
            await client.calibrate()
        assert len(client.asked) == 1
        client.failing = None
        await client.now()
        client.failing = Unavailable("down")
        client.asked.clear()
        assert (await client.calibrate()).width > 1
        assert len(client.asked) < CALIBRATION_SAMPLES_MAX

    simulate(main, seed=1)


def test_a_calibration_holds_no_reader_up() -> None:
    async def main(world: World) -> None:
        client = _client(world, LATENCIES["far"])
        async with asyncio.TaskGroup() as group:
            calibration = group.create_task(client.calibrate())
            await client.machine.sleep(0.01)
            began = world.now()
            assert (await client.now()).width > 1
            assert world.now() - began <= 0.301, "the first sample is enough for a reader"
            assert not calibration.done()
        assert calibration.result().width < CALIBRATED_SECONDS + 0.301

    for seed in range(20):
        simulate(main, seed=seed)


def test_calibrations_at_once_share_their_samples() -> None:
    async def main(world: World) -> None:
        client = _client(world)
        await asyncio.gather(*(client.calibrate() for _ in range(5)))
        assert len(client.asked) <= CALIBRATION_SAMPLES_MAX

    for seed in range(20):
        simulate(main, seed=seed)


def test_a_disagreement_does_not_make_a_calibration_endless() -> None:
    async def main(world: World) -> None:
        client = _client(world)
        at = client.machine.monotonic()
        client.store.clock.observe(TimeSample(1e9, 1.0, at, at))
        client.store.clock.observe(TimeSample(2e9, 1.0, at, at))
        await client.calibrate()
        assert len(client.asked) < CALIBRATION_SAMPLES_MAX

    simulate(main, seed=1)


@pytest.mark.parametrize("skew", [-86_400.0, 0.0, 1e9])
def test_the_wall_clock_of_the_machine_does_not_matter(skew: float) -> None:
    async def main(world: World) -> list[Interval]:
        client = _client(world, drift=1e-4)
        client.machine.skew_seconds = skew
        seen = [await client.calibrate()]
        client.machine.skew_seconds = -skew
        for _ in range(20):
            await client.machine.sleep(200)
            seen.append(await client.now())
        return seen

    assert simulate(main, seed=7) == simulate(main, seed=7, epoch=1_735_689_600.0)
