"""The store's time as an interval, from dated answers and a monotonic clock.

An answer with a `Date` header is a sample: at some instant between sending the request and
receiving the answer, the store's clock showed that second. So each sample bounds the *offset*,
store time minus local monotonic time, from both sides:

    stamp - received  <=  offset  <  stamp + resolution - sent

Bounds from several samples are intersected, in whatever order they come; between samples they
widen by the drift that the local clock may have. The width of one sample is the header's
resolution plus the round trip. A sample that is sent so that the store's second turns in the
middle of what is known halves it, whatever the answer: `calibrate` sends such samples, ten at the
most, until the width is a tenth of a second plus a round trip. After that every answer of ordinary
work is a free sample, and `read` asks for one of its own only when none has come for five minutes.

Samples that contradict each other come from front ends whose clocks differ, or from a clock that
was set. The gap between them is remembered as the store's disagreement and widens both ends; it
never raises. The gap is the least by which the clocks must differ: they may differ by more until
samples near the turn of a second have shown it. A disagreement that is not seen again is forgotten
within `MEMORY_SECONDS`, so that one wrong answer does not widen the interval for ever.

A sample that fails raises only while nothing is known. Of those who wait for the first sample one
asks, and all of them get its answer or its error.

Whoever holds a lease trusts it while `latest < expires_at`; whoever wants it waits until
`earliest >= expires_at`. The wall clock of the machine is not read here at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.kernel.clock import Clock
from penstock.kernel.errors import StoreError

_log = logging.getLogger(__name__)

DRIFT_MAX: Final = 200e-6 / (1 - 200e-6)
"""How far a second of the local clock may be from one of the store's."""

CALIBRATION_SAMPLES_MAX: Final = 10
CALIBRATED_SECONDS: Final = 0.1
SAMPLE_EVERY_SECONDS: Final = 300.0
SAMPLE_AT_LATEST_SECONDS: Final = 360.0
MEMORY_SECONDS: Final = 1800.0

ROUNDING_SECONDS: Final = 1e-6
"""Seconds since the epoch are floats, exact to a quarter of a microsecond; sums of them to less."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The store's time lies in [earliest, latest], in seconds since the epoch."""

    earliest: float
    latest: float

    @property
    def width(self) -> float:
        return self.latest - self.earliest

    @property
    def middle(self) -> float:
        return (self.earliest + self.latest) / 2


@dataclass(frozen=True, slots=True)
class TimeSample:
    """Between `sent` and `received` the store's clock was in [stamp, stamp + resolution)."""

    stamp: float
    resolution: float
    sent: float
    received: float


Sampler = Callable[[], Awaitable[TimeSample]]


class StoreClock:
    """What one process knows of one store's time. Owned by the backend, fed by its answers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._bounds: _Bounds | None = None
        self._disagreement = _Disagreement()
        self._round_trip = float("inf")
        self._heard_at = float("-inf")
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()
        self._calibrating = asyncio.Lock()
        self._failure: StoreError | None = None
        self._failures = 0
        self.last_sample: TimeSample | None = None

    @property
    def machine(self) -> Clock:
        """The local clock that carries the store's time forward."""
        return self._clock

    def observe(self, sample: TimeSample) -> None:
        """Take in one dated answer. Costs nothing; called for every answer that has a date."""
        seen = _Bounds.of(sample)
        self.last_sample = sample
        self._round_trip = min(self._round_trip, sample.received - sample.sent)
        self._heard_at = max(self._heard_at, sample.received)
        known = self._bounds
        if known is None:
            self._bounds = seen
            return
        both = known.both(seen)
        gap = both.gap(self._heard_at)
        if gap > 0:
            self._disagreement.note(gap, at=self._heard_at)
            both = known.either(seen)
        self._bounds = both

    def estimate(self) -> Interval | None:
        """The store's time as far as it is known now; None before the first sample. No request."""
        bounds = self._bounds
        if bounds is None:
            return None
        # Asked several times a task: hence no interval in between.
        instant = self._clock.monotonic()
        reach = DRIFT_MAX * instant + self._disagreement.margin(at=instant)
        return Interval(bounds.floor - reach + instant, bounds.ceiling + reach + instant)

    async def read(self, sample: Sampler) -> Interval:
        """The store's time, with a sample of its own if one is due."""
        known = self.estimate()
        if known is None:
            return await self._ask_first(sample)
        if self._is_due(known) and not self._asking.locked():
            async with self._asking:
                known = self.estimate() or known
                if self._is_due(known):
                    await self._ask_quietly(sample)
        return self.estimate() or known

    async def calibrate(self, sample: Sampler) -> Interval:
        """Narrow the interval by samples that are sent near the turn of the store's second."""
        async with self._calibrating:
            known = self.estimate() or await self._ask_first(sample)
            for _ in range(CALIBRATION_SAMPLES_MAX - 1):
                if known.width <= CALIBRATED_SECONDS + self._round_trip:
                    break
                await self._clock.sleep(self._seconds_to_turn(known))
                async with self._asking:
                    await self._ask_quietly(sample)
                known = self.estimate() or known
        return known

    async def _ask_first(self, sample: Sampler) -> Interval:
        """Ask while nothing is known. Who waits for another's question takes its outcome."""
        failures = self._failures
        async with self._asking:
            known = self.estimate()
            if known is not None:
                return known
            if self._failure is not None and self._failures > failures:
                raise copy(self._failure)
            try:
                await self._ask(sample)
            except StoreError as error:
                self._failure = copy(error)
                self._failures += 1
                raise
        first = self.estimate()
        assert first is not None
        return first

    async def _ask(self, sample: Sampler) -> None:
        self._asked_at = self._clock.monotonic()
        await sample()

    async def _ask_quietly(self, sample: Sampler) -> None:
        """A sample that refreshes what is known may fail: the interval just goes on widening."""
        try:
            await self._ask(sample)
        except StoreError as error:
            _log.warning(
                "failed to sample the store's time, which is known less precisely: %s", error
            )

    def _is_due(self, known: Interval) -> bool:
        age = self._clock.monotonic() - max(self._asked_at, self._heard_at)
        if age < SAMPLE_EVERY_SECONDS:
            return False
        # Between the two limits only a sample that would cut the interval well is worth sending.
        return age >= SAMPLE_AT_LATEST_SECONDS or self._seconds_off_turn(known) <= known.width / 4

    def _seconds_to_turn(self, known: Interval) -> float:
        """How long to wait so that the store's stamp turns when the request is answered."""
        last = self.last_sample
        if last is None or last.resolution <= 0:
            return 0.0
        arrival = known.middle + (last.received - last.sent) / 2
        return -arrival % last.resolution

    def _seconds_off_turn(self, known: Interval) -> float:
        ahead = self._seconds_to_turn(known)
        resolution = self.last_sample.resolution if self.last_sample else 0.0
        return min(ahead, max(0.0, resolution - ahead))


class _Bounds(NamedTuple):
    """Two lines that the offset, store time minus local time, stays between.

    At the local instant t it lies in [floor - DRIFT_MAX * t, ceiling + DRIFT_MAX * t]. As lines,
    bounds are compared and kept without being moved: moving them at every sample would round
    the drift away where samples come thousands of times a second.
    """

    floor: float
    ceiling: float

    @classmethod
    def of(cls, sample: TimeSample) -> _Bounds:
        """What one sample tells about every instant after it."""
        elapsed = (sample.received - sample.sent) * (1 + DRIFT_MAX)
        drift = DRIFT_MAX * sample.received
        low = sample.stamp - sample.received
        high = low + (sample.resolution + elapsed + ROUNDING_SECONDS)
        return cls(floor=low - ROUNDING_SECONDS + drift, ceiling=high - drift)

    def both(self, other: _Bounds) -> _Bounds:
        """Where both hold; from above its own ceiling if they contradict each other."""
        if other.floor <= self.floor and other.ceiling >= self.ceiling:
            return self  # As most samples are: they come thousands of times a second.
        return _Bounds(max(self.floor, other.floor), min(self.ceiling, other.ceiling))

    def either(self, other: _Bounds) -> _Bounds:
        """Where one of them holds, and what is between them."""
        return _Bounds(min(self.floor, other.floor), max(self.ceiling, other.ceiling))

    def gap(self, instant: float) -> float:
        """By how much the floor is above the ceiling at a local instant; negative if it is not."""
        drift = DRIFT_MAX * instant
        return (self.floor - drift + instant) - (self.ceiling + drift + instant)


class _Disagreement:
    """The largest gap between contradicting samples, forgotten after one to two half memories."""

    def __init__(self) -> None:
        self._current = 0.0
        self._last = 0.0
        self._began = float("-inf")

    def note(self, gap: float, *, at: float) -> None:
        self._turn(at)
        self._current = max(self._current, gap)

    def margin(self, *, at: float) -> float:
        self._turn(at)
        return max(self._current, self._last)

    def _turn(self, at: float) -> None:
        age = at - self._began
        if age >= MEMORY_SECONDS:
            self._current = self._last = 0.0
            self._began = at
        elif age >= MEMORY_SECONDS / 2:
            self._last, self._current = self._current, 0.0
            self._began += MEMORY_SECONDS / 2
