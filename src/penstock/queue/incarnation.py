"""Which process a worker is, and which of its machine have surely ended.

Every lease that a worker writes names its *incarnation*: its claims in ledgers, its registration,
its name in `direct`, its term as monitor, and its shares of limits. A worker that starts where an
earlier one has died takes all of these at once, if a file lock proves that the process has ended,
with its children (`penstock.kernel.process_locks`). Without that proof the leases decide.

What the dead process has sent may still arrive, within W. It is no harm, for the same reasons as of
any worker that lost its lease:

- All it sent were creates and swaps. One that arrives after we wrote finds another version, and a
  body is never written twice; one that arrives before we read is what we read.
- A settlement that arrives first counts: its attempt did end so. Attempt numbers and claims are
  fences for whatever comes later.
- A claim or a renewal that arrives first names the same incarnation, and is as over as the rest:
  what has ended is remembered for as long as we live.

Of two who start at once both may know of the same death, and race for what it left as they race for
anything: by compare-and-swap. A worker elsewhere knows nothing and waits for the leases. Releases
that know no incarnations drop them when they write: then the lease decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from penstock.queue.ledger import Ledger

_replace = msgspec.structs.replace


class Lock(Protocol):
    """What a process holds until it ends."""

    @property
    def incarnation(self) -> str:
        """The random id that its leases name."""

    @property
    def descriptor(self) -> int | None:
        """What its children inherit; None if it has none."""

    def refresh(self) -> None:
        """Say that it is in use."""

    def release(self) -> None:
        """Let go, if nothing is left to be taken over."""


class Locks(Protocol):
    """The locks of one machine. `penstock.kernel.process_locks.ProcessLocks` is one."""

    def acquire(self) -> Lock | None:
        """A lock for this process; None if it would prove nothing."""

    def ended(self) -> frozenset[str]:
        """The incarnations of this machine that have surely ended."""


class Incarnation:
    """One worker's own incarnation, and those that it knows to have ended."""

    def __init__(self, id: str = "", look: Callable[[], frozenset[str]] = frozenset) -> None:
        self.id = id
        """Empty: nobody can prove that this process has ended."""
        self._look = look
        self._ended: set[str] = set()

    @property
    def knows_any(self) -> bool:
        """Whether any is known to have ended."""
        return bool(self._ended)

    def is_ended(self, incarnation: str) -> bool:
        """Whether this incarnation has surely ended; False for the empty one."""
        return incarnation in self._ended

    def refresh(self) -> bool:
        """Look again; whether there are more than before."""
        more = self._look() - self._ended - {self.id, ""}
        self._ended |= more
        return bool(more)

    def seen(self, ledger: Ledger) -> Ledger:
        """A ledger in which the leases of those that have ended are over."""
        if not any(lease.incarnation in self._ended for lease in ledger.leases.values()):
            return ledger
        leases = {
            name: _replace(lease, expires_ms=0) if lease.incarnation in self._ended else lease
            for name, lease in ledger.leases.items()
        }
        return _replace(ledger, leases=leases)


NOBODY = Incarnation()
"""For whoever is not a worker with a lock, and knows of no end."""
