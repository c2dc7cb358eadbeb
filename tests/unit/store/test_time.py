"""What is known of the store's time holds it, whatever the machine's clocks and the network do."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.entropy import seeded_entropy
from penstock.store.time import (
    DRIFT_MAX,
    MEMORY_SECONDS,
    ROUNDING_SECONDS,
    Interval,
    StoreClock,
    TimeSample,
)
from tests.sizes import some

EPOCH = 1_735_689_600.0
PPM_MAX = 200e-6
DAY = 86_400.0


class Machine:
    """The clock of one machine, moved by the test; its wall clock is of no use to anyone."""

    def __init__(self, *, start: float = 0.0, wall: float = float("nan")) -> None:
        self.true = 0.0
        self._monotonic = start
        self._wall = wall

    def advance(self, seconds: float, *, drift: float = 0.0) -> None:
        self.true += seconds
        self._monotonic += seconds * (1 + drift)

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Request:
    """A request of true instants: sent `gap` after the one before; it may be heard of late."""

    gap: float
    out: float
    back: float
    heard_after: float = 0.0


@dataclass
class Observation:
    """A machine that learns the time of a store whose clock is true and shows whole seconds."""

    machine: Machine
    resolution: float = 1.0
    store_ahead: float = 0.0
    clock: StoreClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = StoreClock(self.machine)

    def store_time(self) -> float:
        return EPOCH + self.store_ahead + self.machine.true

    def stamp(self) -> float:
        time = self.store_time()
        return math.floor(time / self.resolution) * self.resolution if self.resolution else time

    def ask(self, *, out: float = 0.0, back: float = 0.0, drift: float = 0.0) -> TimeSample:
        sent = self.machine.monotonic()
        self.machine.advance(out, drift=drift)
        stamp = self.stamp()
        self.machine.advance(back, drift=drift)
        sample = TimeSample(stamp, self.resolution, sent, self.machine.monotonic())
        self.clock.observe(sample)
        return sample

    def known(self) -> Interval:
        known = self.clock.estimate()
        assert known is not None
        return known

    def check(self) -> Interval:
        known = self.known()
        assert known.earliest <= self.store_time() <= known.latest, known.width
        return known


def _instants(requests: list[Request]) -> list[tuple[float, int, str]]:
    """When each request is sent, stamped, received and heard of, in the order of true time."""
    found: list[tuple[float, int, str]] = []
    sent = 0.0
    for number, request in enumerate(requests):
        sent += request.gap
        stamped = sent + request.out
        received = stamped + request.back
        heard = received + request.heard_after
        steps = ("0 send", "1 stamp", "2 receive", "3 hear")
        for instant, step in zip((sent, stamped, received, heard), steps, strict=True):
            heapq.heappush(found, (instant, number, step))
    return [heapq.heappop(found) for _ in range(len(found))]


def _observe_all(
    requests: list[Request],
    drifts: list[float],
    *,
    start: float,
    resolution: float,
    watch: list[float],
) -> None:
    """Play the requests, overlapping as they do, and look at the clock at every instant."""
    seen = Observation(Machine(start=start), resolution)
    instants = [*_instants(requests)]
    last = instants[-1][0]
    instants += [(last + after, len(requests), "4 look") for after in sorted(watch)]
    sent: dict[int, float] = {}
    stamped: dict[int, float] = {}
    received: dict[int, float] = {}
    for (instant, number, step), drift in zip(instants, cycle(drifts), strict=False):
        seen.machine.advance(max(0.0, instant - seen.machine.true), drift=drift)
        match step[2:]:
            case "send":
                sent[number] = seen.machine.monotonic()
            case "stamp":
                stamped[number] = seen.stamp()
            case "receive":
                received[number] = seen.machine.monotonic()
            case "hear":
                seen.clock.observe(
                    TimeSample(stamped[number], resolution, sent[number], received[number])
                )
        if seen.clock.estimate() is not None:
            seen.check()


_delays = st.one_of(st.floats(0, 0.05), st.floats(0, 40))
_gaps = st.one_of(st.floats(0, 0.01), st.floats(0, 2), st.floats(0, 20 * DAY))
_drifts = st.one_of(st.sampled_from([-PPM_MAX, PPM_MAX, 0.0]), st.floats(-PPM_MAX, PPM_MAX))
_requests = st.builds(
    Request, gap=_gaps, out=_delays, back=_delays, heard_after=st.just(0.0) | st.floats(0, 60)
)


@settings(max_examples=some(400), deadline=None)
@given(
    requests=st.lists(_requests, min_size=1, max_size=12),
    drifts=st.lists(_drifts, min_size=1, max_size=8),
    start=st.floats(0, 1e8),
    resolution=st.sampled_from([1.0, 0.0, 0.02]),
    watch=st.lists(_gaps, max_size=3),
)
def test_the_stores_time_is_inside_at_every_moment(
    requests: list[Request],
    drifts: list[float],
    start: float,
    resolution: float,
    watch: list[float],
) -> None:
    _observe_all(requests, drifts, start=start, resolution=resolution, watch=watch)


@pytest.mark.parametrize("drift", [-PPM_MAX, PPM_MAX])
@pytest.mark.parametrize("out", [0.0, 0.3])
def test_one_drift_all_along(drift: float, out: float) -> None:
    seen = Observation(Machine(start=12_345.6))
    for gap in (0.0, 0.4, 3.0, 0.05, 700.0, 0.001, 86_400.0, 2.0):
        seen.machine.advance(gap, drift=drift)
        if seen.clock.estimate() is not None:
            seen.check()
        seen.ask(out=out, back=0.3 - out, drift=drift)
        seen.check()


@pytest.mark.parametrize("drift", [-PPM_MAX, PPM_MAX])
def test_thousands_of_answers_a_second_do_not_round_the_drift_away(drift: float) -> None:
    seen = Observation(Machine(start=1e6), resolution=0.0)
    seen.ask()
    seen.resolution = 1.0
    for _ in range(30_000):
        seen.machine.advance(0.0003, drift=drift)
        seen.ask()
        seen.check()


def test_the_interval_widens_by_the_drift_and_no_more() -> None:
    seen = Observation(Machine(), resolution=0.0)
    seen.ask()
    assert seen.check().width <= 2 * ROUNDING_SECONDS + 1e-6
    seen.machine.advance(1000.0)
    assert seen.check().width == pytest.approx(2 * DRIFT_MAX * 1000, abs=5e-6)


def test_a_sample_is_as_wide_as_its_resolution_and_round_trip() -> None:
    seen = Observation(Machine())
    seen.ask(out=0.25, back=0.5)
    assert seen.check().width == pytest.approx(1.75, abs=1e-3)


def test_nothing_is_known_before_the_first_sample() -> None:
    assert StoreClock(Machine()).estimate() is None


def test_samples_are_intersected_in_any_order() -> None:
    """A sample that is heard of late must not undo what later ones have shown."""
    requests = [(0.0, 1.5), (0.9, 1.0), (1.1, 1.2)]  # sent and received, in true seconds
    widths = set()
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        seen = Observation(Machine())
        seen.machine.advance(2.0)
        for number in order:
            sent, received = requests[number]
            stamp = EPOCH + math.floor(received)
            seen.clock.observe(TimeSample(stamp, 1.0, sent, received))
        seen.machine.advance(100.0)
        widths.add(round(seen.check().width, 6))
    assert len(widths) == 1


def test_what_is_heard_late_does_not_make_a_sample_due() -> None:
    seen = Observation(Machine())
    seen.machine.advance(400.0)
    late = TimeSample(EPOCH + 1, 1.0, 1.0, 1.1)
    seen.ask()
    seen.clock.observe(late)
    assert not seen.clock._is_due(seen.check())


def test_a_suspended_machine_knows_how_long_it_slept() -> None:
    """The local clock counts suspension; one that began while a request was on its way, too."""
    seen = Observation(Machine(start=5e5))
    seen.ask(out=0.01, back=0.01)
    before = seen.check()
    seen.machine.advance(8 * 3600.0, drift=PPM_MAX)
    after = seen.check()
    assert after.earliest - before.latest > 8 * 3600 - 15
    seen.ask(out=8 * 3600.0, back=1.0, drift=-PPM_MAX)
    assert seen.check().width < 30
    seen.ask(out=0.01, back=0.01)
    assert seen.check().width < 1.1


def _apart(seconds: float) -> Observation:
    """One answer of a front end whose clock is true, then one of another that is ahead."""
    seen = Observation(Machine(), resolution=0.01)
    seen.ask(out=0.01, back=0.01)
    seen.store_ahead = seconds
    seen.machine.advance(1.0)
    seen.ask(out=0.01, back=0.01)
    return seen


@settings(max_examples=some(300), deadline=None)
@given(
    apart=st.one_of(st.floats(-3, 3), st.floats(-2 * DAY, 2 * DAY)),
    phase=st.floats(0, 1),
    pause=st.floats(0, 1000),
    resolution=st.sampled_from([0.01, 1.0]),
)
def test_front_ends_that_disagree_widen_by_the_gap(
    apart: float, phase: float, pause: float, resolution: float
) -> None:
    seen = Observation(Machine(start=phase), resolution, store_ahead=phase)
    one, other = StoreClock(seen.machine), StoreClock(seen.machine)
    one.observe(seen.ask(out=0.01, back=0.02))
    seen.machine.advance(pause)
    seen.store_ahead += apart
    other.observe(seen.ask(out=0.02, back=0.01))
    first, second, after = one.estimate(), other.estimate(), seen.known()
    assert first is not None
    assert second is not None
    gap = max(first.earliest, second.earliest) - min(first.latest, second.latest)
    if gap > 0:
        assert after.earliest <= min(first.earliest, second.earliest) - gap + 2e-6
        assert after.latest >= max(first.latest, second.latest) + gap - 2e-6
    else:
        assert after.width <= min(first.width, second.width) + 2e-6


@pytest.mark.parametrize("apart", [0.3, -0.3, 5.0, -DAY])
def test_a_disagreement_goes_on_widening_when_one_front_end_is_heard_again(apart: float) -> None:
    seen = _apart(apart)
    seen.store_ahead = 0.0
    for _ in range(50):
        seen.machine.advance(1.0)
        seen.ask(out=0.01, back=0.01)
        known = seen.check()
        assert known.width >= 2 * (abs(apart) - 0.1)
        assert known.earliest <= seen.store_time() + apart + 0.1
        assert known.latest >= seen.store_time() + apart - 0.1


@settings(max_examples=some(100), deadline=None)
@given(
    stamps=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20),
    gaps=st.lists(st.floats(0, 2000), min_size=1, max_size=5),
)
def test_samples_that_make_no_sense_never_raise(stamps: list[float], gaps: list[float]) -> None:
    seen = Observation(Machine())
    for stamp, gap in zip(stamps, cycle(gaps), strict=False):
        seen.machine.advance(gap)
        at = seen.machine.monotonic()
        seen.clock.observe(TimeSample(EPOCH + stamp, 1.0, at, at))
        known = seen.known()
        assert known.earliest <= known.latest


def _hours_of_answers(seen: Observation, *, seconds: float, every: float, check: bool) -> None:
    entropy = seeded_entropy("answers")
    ends_at = seen.machine.true + seconds
    while seen.machine.true < ends_at:
        seen.machine.advance(entropy.uniform(0, 2 * every))
        seen.ask(out=0.01, back=0.01)
        if check:
            seen.check()


@pytest.mark.parametrize("wrong", [DAY, -DAY, 2.0])
def test_one_wrong_date_is_forgotten(wrong: float) -> None:
    seen = Observation(Machine())
    _hours_of_answers(seen, seconds=600, every=5, check=True)
    assert seen.check().width < 0.2
    seen.store_ahead = wrong
    seen.ask()
    seen.store_ahead = 0.0
    seen.check()
    _hours_of_answers(seen, seconds=MEMORY_SECONDS / 2 - 100, every=5, check=True)
    assert seen.check().width >= abs(wrong) - 1.5
    _hours_of_answers(seen, seconds=MEMORY_SECONDS / 2 + 120, every=5, check=True)
    assert seen.check().width < 0.2


def test_a_wrong_first_date_is_forgotten() -> None:
    seen = Observation(Machine(), store_ahead=DAY)
    seen.ask()
    seen.store_ahead = 0.0
    _hours_of_answers(seen, seconds=MEMORY_SECONDS + 20, every=5, check=True)
    assert seen.check().width < 0.2


def test_a_stores_clock_that_is_set_is_followed() -> None:
    seen = Observation(Machine())
    _hours_of_answers(seen, seconds=100, every=1, check=True)
    seen.store_ahead = -300.0
    seen.ask(out=0.01, back=0.01)
    _hours_of_answers(seen, seconds=MEMORY_SECONDS + 20, every=5, check=True)
    assert seen.check().width < 0.2


@pytest.mark.parametrize("looked_after", [MEMORY_SECONDS * share for share in (0.5, 0.75, 0.999)])
def test_a_disagreement_is_forgotten_however_rarely_one_looks(looked_after: float) -> None:
    seen = _apart(100.0)
    seen.machine.advance(looked_after)
    assert seen.known().width > 100
    seen.machine.advance(MEMORY_SECONDS - looked_after)
    assert seen.known().width < 200
    seen.ask(out=0.01, back=0.01)
    assert seen.check().width < 0.1


def test_a_disagreement_is_forgotten_when_nobody_looks() -> None:
    seen = _apart(100.0)
    seen.machine.advance(MEMORY_SECONDS + 1)
    seen.ask(out=0.01, back=0.01)
    assert seen.check().width < 0.1


def test_a_disagreement_that_goes_on_is_not_forgotten() -> None:
    seen = Observation(Machine(), resolution=0.01)
    for number in range(1000):
        seen.store_ahead = 5.0 * (number % 2)
        seen.machine.advance(30.0)
        seen.ask(out=0.01, back=0.01)
        if number:
            assert seen.check().width > 4.9


def test_an_interval_has_a_width_and_a_middle() -> None:
    interval = Interval(10.0, 13.0)
    assert (interval.width, interval.middle) == (3.0, 11.5)
