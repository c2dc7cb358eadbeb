"""How long to wait between two looks: short while there is work, longer the longer there is none.

Work sets the interval back to the least; every look that finds nothing lengthens it by a factor, up
to the most. Jitter keeps the looks of many workers apart. The most is the bound for how late the
first task after a long idle time is found.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import InvalidInput


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

    def __init__(self, polling: Polling, *, entropy: Entropy) -> None:
        self._polling = polling
        self._entropy = entropy
        self._seconds = polling.min_seconds

    def reset(self) -> None:
        """There was work."""
        self._seconds = self._polling.min_seconds

    def next_seconds(self) -> float:
        """How long to wait now; the time after that is longer."""
        seconds = self._seconds
        self._seconds = min(self._polling.max_seconds, seconds * self._polling.factor)
        spread = self._polling.jitter * seconds
        return self._entropy.uniform(seconds - spread, seconds + spread)
