"""Counted requests, and what they cost: arithmetic on values, nothing else.

A `Bill` is the requests of some seconds, by cause and kind; dollars a month follow from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.store.metered import Kind, Prices

MONTH_SECONDS: Final = 30 * 86_400.0
CAUSES: Final = ("submit", "discovery", "claim", "settle", "leases", "time", "monitor")
"""What requests are for. A cause that is not among them is shown behind them."""

Slot = tuple[str, Kind]


@dataclass(frozen=True, slots=True)
class Bill:
    """The billed requests of so many seconds, by cause and kind."""

    counts: Mapping[Slot, int]
    seconds: float
    prices: Prices = field(default_factory=Prices)

    @classmethod
    def between(cls, before: Counter[Slot], after: Counter[Slot], *, seconds: float) -> Bill:
        """What has come between two readings of a meter, so many seconds apart."""
        new = {slot: count - before[slot] for slot, count in after.items()}
        return cls({slot: count for slot, count in new.items() if count}, seconds)

    @property
    def causes(self) -> tuple[str, ...]:
        """The causes, in the order in which they are shown."""
        others = {cause for cause, _ in self.counts} - set(CAUSES)
        return (*CAUSES, *sorted(others))

    def requests(self, *, cause: str | None = None, kind: Kind | None = None) -> int:
        """How many there are of this cause and this kind, if they are given."""
        return sum(
            count
            for (its_cause, its_kind), count in self.counts.items()
            if cause in (None, its_cause) and kind in (None, its_kind)
        )

    def dollars(self, *, cause: str | None = None) -> float:
        """What they cost."""
        return sum(
            count * self.prices.of(kind)
            for (its_cause, kind), count in self.counts.items()
            if cause in (None, its_cause)
        )

    def dollars_per_month(self, *, cause: str | None = None) -> float:
        """What a month of 30 days costs that is like these seconds."""
        return self.dollars(cause=cause) * MONTH_SECONDS / self.seconds


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The least value that so many percent of the values do not exceed; they are in order."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
