"""The only place that reads a clock of this machine or sleeps.

Nothing decides by the wall clock: it is for signing a first request and for showing times to
people. What has to be decided by time is decided by the store's time (`penstock.store.time`),
which is carried forward by `monotonic`. Sleeping goes through the running event loop, so that
a virtual loop makes it virtual.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

# A suspended machine must not go on trusting a lease that ended while it slept, so the clock
# has to count suspension. Linux has such a clock; macOS's monotonic clock is the nearest there.
_BOOTTIME: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """A machine's clocks. Every part that needs time is given one."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back and counts suspension."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch as this machine believes; may be wrong by any amount."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Let others run for at least this long."""
        ...


class SystemClock:
    """The clocks of this machine."""

    def monotonic(self) -> float:
        return time.clock_gettime(_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
