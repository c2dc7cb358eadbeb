"""Packs that were found and wait at a gate: they stand in nobody's way, and are not forgotten.

A look does not count them, so that it goes on past them to what may start. When their gate opens,
they are tried without another look, unless what the look showed is old by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from penstock.queue.discovery.scan import Sight
from penstock.queue.running.gates import Gate


class Waitlist:
    """Some packs, in the order in which they were found. What is too many is found again."""

    def __init__(self, gates: Sequence[Gate], *, most: int) -> None:
        self._gates = tuple(gates)
        self._waiting: deque[Sight] = deque()
        self._most = most

    def is_shut(self, sight: Sight) -> bool:
        """Whether one of the gates is shut for a pack."""
        return any(gate.is_shut(sight) for gate in self._gates)

    def replace(self, sights: Iterable[Sight]) -> None:
        """A look has shown that these wait, and no others."""
        self._waiting.clear()
        for sight in sights:
            self.add(sight)

    def add(self, sight: Sight) -> None:
        if len(self._waiting) < self._most:
            self._waiting.append(sight)

    def opened(self) -> list[Sight]:
        """Those whose gates are open again; they wait no longer."""
        opened = [sight for sight in self._waiting if not self.is_shut(sight)]
        if opened:
            gone = {sight.at for sight in opened}
            self._waiting = deque(sight for sight in self._waiting if sight.at not in gone)
        return opened

    def seconds_to_open(self) -> float | None:
        """How long until one of them may be worth a try; None if that cannot be told."""
        if not self._waiting:
            return None
        told = [gate.seconds_to_open() for gate in self._gates]
        return min((seconds for seconds in told if seconds is not None), default=None)
