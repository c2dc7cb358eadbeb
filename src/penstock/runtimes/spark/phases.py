"""What the engine is doing, told to the host, and how long each of it took."""

from __future__ import annotations

from penstock.kernel.clock import Clock
from penstock.runtimes.spark.telling import Telling


class Phases:
    """The phases of one run of a plan. A phase that is entered again goes on."""

    def __init__(self, tell: Telling, clock: Clock) -> None:
        self._tell = tell
        self._clock = clock
        self._took: dict[str, float] = {}
        self._name = ""
        self._since = 0.0

    def enter(self, name: str) -> None:
        """From here on it is this."""
        self._close()
        self._name, self._since = name, self._clock.monotonic()
        self._tell.phase(name)

    def seconds(self) -> dict[str, float]:
        """How long each phase took until now, as figures: `reading_seconds`, …"""
        self._close()
        return {f"{name}_seconds": round(took, 3) for name, took in self._took.items()}

    def _close(self) -> None:
        if self._name:
            now = self._clock.monotonic()
            self._took[self._name] = self._took.get(self._name, 0.0) + now - self._since
            self._since = now
