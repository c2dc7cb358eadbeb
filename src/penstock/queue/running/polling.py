"""How long to wait between two looks: short while there is work, longer the longer there is none.

Work sets the interval back; every look that finds nothing lengthens it by a factor, up to the most.
It is set back to the least, but no further than to a fraction of the time since the work before:
where packs come a quarter of an hour apart, one of them says nothing about the next minute. Jitter
keeps the looks of many workers apart. The most is the bound for how late the first task after a
long idle time is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import InvalidInput

_LOOKS_A_GAP: Final = 40
"""So many looks, at the most, between two finds that are equally far apart."""


@dataclass(frozen=True, slots=True)
class Polling:
    """The least and the most seconds between looks, the factor of growth, and the jitter."""

    min_seconds: float = 1.6
    max_seconds: float = 8.0
    factor: float = 1.1
    jitter: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.min_seconds <= self.max_seconds <= 3600:
            raise InvalidInput(
                "Polling needs 0 < min_seconds <= max_seconds <= 3600,"
                f" not {self.min_seconds} and {self.max_seconds}."
            )
        if not 1 <= self.factor <= 100 or not 0 <= self.jitter < 1:
            raise InvalidInput(
                "Polling needs a factor of 1 to 100 and a jitter of 0 to below 1,"
                f" not {self.factor} and {self.jitter}."
            )


class Pace:
    """One worker's present interval."""

    def __init__(self, polling: Polling, *, entropy: Entropy, clock: Clock) -> None:
        self._polling = polling
        self._entropy = entropy
        self._clock = clock
        self._seconds = polling.min_seconds
        self._worked_at = clock.monotonic()

    def reset(self) -> None:
        """There was work."""
        instant = self._clock.monotonic()
        gap, self._worked_at = instant - self._worked_at, instant
        slow = min(gap / _LOOKS_A_GAP, self._polling.max_seconds)
        self._seconds = min(self._seconds, max(slow, self._polling.min_seconds))

    def next_seconds(self) -> float:
        """How long to wait now; the time after that is longer."""
        seconds = self._seconds
        self._seconds = min(self._polling.max_seconds, seconds * self._polling.factor)
        spread = self._polling.jitter * seconds
        return self._entropy.uniform(seconds - spread, seconds + spread)
