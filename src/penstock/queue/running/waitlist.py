"""Packs that were found and wait at a gate: they stand in nobody's way, and are not forgotten.

A look does not count them, so that it goes on past them to what may start. When their gate opens,
they are tried without another look; if what the look showed is old by then, there is one as well.

What a look does not show waits on, and comes first when the gate opens: a look into an inbox shows
only what is there, and whatever else waits would starve behind it. Most of all what is *ours*: the
entry of a pack is deleted when some of it is claimed, so nothing leads to the rest of it, or to a
retry, but this process, until somebody scavenges. That has a bound of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from penstock.queue.discovery.scan import Sight
from penstock.queue.places import PackAt
from penstock.queue.running.gates import Gate

OURS_MAX: Final = 1000


def is_ours(sight: Sight) -> bool:
    """Whether an entry of an inbox led to this pack, and none does since it was begun."""
    is_entry = sight.pointer is not None and sight.pointer.is_entry
    return is_entry and sight.ledger is not None


class Waitlist:
    """Some packs, in the order in which they were found. What is too many is found again."""

    def __init__(self, gates: Sequence[Gate], *, most: int) -> None:
        """`most` may wait that are not ours."""
        self._gates = tuple(gates)
        self._ours: deque[Sight] = deque()
        self._others: deque[Sight] = deque()
        self._most = most

    def __iter__(self) -> Iterator[Sight]:
        return chain(self._ours, self._others)

    def is_shut(self, sight: Sight) -> bool:
        """Whether one of the gates is shut for a pack."""
        return any(gate.is_shut(sight) for gate in self._gates)

    def take_in(
        self, sights: Iterable[Sight], *, shown: Collection[PackAt], busy: Collection[PackAt]
    ) -> None:
        """Of all that a look has `shown`, these wait; what is `busy` waits no longer."""
        self._ours = deque(sight for sight in self._ours if sight.at not in busy)
        self._others = deque(
            sight for sight in self._others if sight.at not in busy and sight.at not in shown
        )
        ours = {sight.at for sight in self._ours}
        self.add_all(sight for sight in sights if sight.at not in ours)

    def add_all(self, sights: Iterable[Sight]) -> None:
        for sight in sights:
            self.add(sight)

    def add(self, sight: Sight) -> None:
        waiting, most = (self._ours, OURS_MAX) if is_ours(sight) else (self._others, self._most)
        if len(waiting) < most:
            waiting.append(sight)

    def opened(self) -> list[Sight]:
        """Those whose gates are open again; they wait no longer."""
        opened = [sight for sight in self if not self.is_shut(sight)]
        if opened:
            gone = {sight.at for sight in opened}
            self._ours = deque(sight for sight in self._ours if sight.at not in gone)
            self._others = deque(sight for sight in self._others if sight.at not in gone)
        return opened

    def seconds_to_open(self) -> float | None:
        """How long until one of them may be worth a try; None if that cannot be told."""
        if not (self._ours or self._others):
            return None
        told = [gate.seconds_to_open() for gate in self._gates]
        return min((seconds for seconds in told if seconds is not None), default=None)
