"""The clocks of one simulated machine.

A `VirtualClock` is a `penstock.kernel.clock.Clock` on a virtual loop. Each simulated machine has
its own, as wrong as the simulation wants it: a wall clock that is off by any amount, a monotonic
clock that runs a little fast or slow and began at an instant that means nothing to others. True
time is `epoch` plus the loop's time; only the referee of a simulation looks at it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator

from penstock.kernel.errors import InvalidInput


class VirtualClock:
    """A machine's clocks in virtual time.

    `drift` is the rate error of the monotonic clock: with 150e-6 it gains 150 microseconds in
    a true second, and a sleep is over so much earlier. `skew_seconds` is added to the wall
    clock and may be changed at any time, as an operator or a time service would.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        epoch: float = 0.0,
        skew_seconds: float = 0.0,
        drift: float = 0.0,
        start_seconds: float = 0.0,
    ) -> None:
        if not -1 < drift < math.inf:
            raise InvalidInput(f"A clock cannot drift by {drift!r}: it would not go forward.")
        self.skew_seconds = skew_seconds
        self._loop = loop
        self._epoch = epoch
        self._rate = 1 + drift
        self._start = start_seconds

    def monotonic(self) -> float:
        return self._start + self._loop.time() * self._rate

    def wall(self) -> float:
        return self._epoch + self._loop.time() + self.skew_seconds

    async def sleep(self, seconds: float) -> None:
        """Sleep for so many seconds of this clock; `monotonic` shows no less afterwards."""
        if seconds <= 0:
            await _Turn()
            return
        future = self._loop.create_future()
        timer = self._loop.call_at(self._instant_in(seconds), _wake, future)
        try:
            await future
        finally:
            timer.cancel()

    def _instant_in(self, seconds: float) -> float:
        """The loop's time when this clock will have counted so many seconds."""
        target = self.monotonic() + seconds
        instant = self._loop.time() + seconds / self._rate
        # Rounding may leave the clock a trifle short of the target. Who then sleeps for the
        # rest would sleep for nothing, for ever.
        while self._start + instant * self._rate < target:
            instant += max(math.ulp(instant), math.ulp(target))
        return instant


class _Turn:
    """Lets others run once, without a timer."""

    def __await__(self) -> Generator[None, None, None]:
        yield


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
