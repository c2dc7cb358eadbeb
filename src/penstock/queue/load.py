"""How busy a worker is: what it tells those who share out the work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's own view of itself, at one moment."""

    saturated: bool = False
    """It has found more than it has room for, for some seconds."""
    idle_seconds: float = 0.0
    help_wanted: frozenset[str] = frozenset()
    """Types that it has met and has no handler for, or has too many tasks of."""
