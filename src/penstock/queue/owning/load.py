"""How busy a worker is: what it tells those who share out the work.

A worker is *full* while it has no room. What it then finds, and cannot take, waits: after some
seconds it is saturated and offers shards, and soon after that it wants help with those types, so
that nothing starves behind tasks that run for hours. It also wants help with types that it has no
handler for, and with packs of which it has had more than it can run for a while.

What waits is known when a look has ended. A worker that looks again because it has used up what it
had found, or because that is old, has room until the look ends, and is no less strained for it:
if it said so, it would take back its offers for many seconds, and those who would take them would
not hear of the next ones for long.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from penstock.kernel.clock import Clock

SATURATED_SECONDS: Final = 3.0
WAITS_SECONDS: Final = 10.0
TOO_MANY_SECONDS: Final = 30.0
MET_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's own view of itself, at one moment."""

    saturated: bool = False
    """It has found more than it has room for, for some seconds."""
    idle_seconds: float = 0.0
    help_wanted: frozenset[str] = frozenset()
    """Types that it has no handler for, or cannot take all tasks of."""


class Strain:
    """How long a worker has been full, and of what. Asked every few seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[tuple[str, str], float] = {}
        self._met: dict[str, float] = {}
        self._is_looking = False

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Until this ends, what waits is not known: what was waiting goes on."""
        self._is_looking = True
        try:
            yield
        finally:
            self._is_looking = False

    def meet(self, type: str) -> None:
        """A task of a type without a handler was seen."""
        self._met[type] = self._clock.monotonic()

    def load(
        self,
        *,
        is_full: bool,
        waiting: AbstractSet[str],
        too_many: AbstractSet[str],
        idle_seconds: float,
    ) -> Load:
        """The load, from the types that wait for room and those that are too many to run."""
        instant = self._clock.monotonic()
        present = {("waits", each) for each in waiting} | {("more", each) for each in too_many}
        if not self._is_looking:
            self._since = {
                each: self._since.get(each, instant) for each in (present if is_full else ())
            }
        met = {each for each, at in self._met.items() if at > instant - MET_SECONDS}
        wanted = self._lasting("waits", WAITS_SECONDS) | self._lasting("more", TOO_MANY_SECONDS)
        saturated = bool(self._lasting("waits", SATURATED_SECONDS))
        return Load(saturated, idle_seconds, frozenset(wanted | met))

    def _lasting(self, what: str, seconds: float) -> set[str]:
        until = self._clock.monotonic() - seconds
        return {
            each for (kind, each), since in self._since.items() if kind == what and since <= until
        }
