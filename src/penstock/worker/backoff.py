"""How long to wait before a request is made again that nobody has answered."""

from __future__ import annotations

from penstock.kernel.entropy import Entropy


class Backoff:
    """Pauses that double up to a bound, each made shorter at random so that many spread out."""

    def __init__(
        self, entropy: Entropy, *, first_seconds: float = 0.25, most_seconds: float = 10.0
    ) -> None:
        self._entropy = entropy
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self.failures = 0

    def next_seconds(self, *, most_seconds: float | None = None) -> float:
        """The pause after one more failure."""
        most = self._most_seconds if most_seconds is None else min(self._most_seconds, most_seconds)
        pause = min(most, self._first_seconds * 2.0 ** min(self.failures, 20))
        self.failures += 1
        return self._entropy.uniform(pause / 2, pause)

    def succeeded(self) -> bool:
        """Begin anew; returns whether this ends a row of failures."""
        had_failed = self.failures > 0
        self.failures = 0
        return had_failed
