"""Which process a worker is, and which processes on its machine have surely ended.

Every lease that a worker writes names its *incarnation*: claims in ledgers, its registration,
its name in `direct`, its term as monitor, its shares of limits. A worker that starts where an
earlier one died takes all of these at once, if a file lock proves that the process and its
children have ended (`penstock.kernel.process_locks`). Without that proof the leases decide
(QUEUE-13).

Requests of the dead process may still arrive, within W. That is safe, as for any worker that
lost its lease:

- All were creates and swaps. One that arrives after our write finds another version, and a body
  is
  never written twice; one that arrives before our read is what we read.
- A settlement that arrives first counts: its attempt did end so. Attempt numbers and claims
  fence
  whatever comes later.
- A claim or a renewal that arrives first names the same incarnation, and is as over as the rest:
  ended incarnations are remembered for as long as this process lives.

One lease is left to run out all the same: that of a task which had lost a worker before, and was
claimed alone of its pack. Its loss counts, and a task that ends each worker would otherwise use up
its attempts as fast as somebody restarts them: the lease is the pause between two attempts. A
first loss, one in company, and the final one of an exclusive attempt are not waited for.

Two workers that start at once may both know of the same death; they compete for its leases by
compare-and-swap. A worker on another machine waits for the leases. Releases that know no
incarnations drop them when they write: then the lease decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from penstock.queue.ledger import ClaimLease, Ledger

_replace = msgspec.structs.replace


class IncarnationLock(Protocol):
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


class IncarnationLocks(Protocol):
    """The locks of one machine. `penstock.kernel.process_locks.ProcessLocks` is one."""

    def acquire(self) -> IncarnationLock | None:
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
        """A ledger in which the leases of those that have ended are over, but for a pause."""
        ended = {n for n, lease in ledger.leases.items() if lease.incarnation in self._ended}
        if not ended:
            return ledger
        suspects = {task.claim for task in ledger.tasks if task.window_max}
        leases = {
            name: _replace(lease, expires_ms=0)
            if name in ended and not (name in suspects and _is_paused_for(lease))
            else lease
            for name, lease in ledger.leases.items()
        }
        return _replace(ledger, leases=leases)


def _is_paused_for(lease: ClaimLease) -> bool:
    """Whether the loss of a suspect under this lease counts, and is not its last."""
    return lease.window == 1 and not lease.exclusive


NOBODY = Incarnation()
"""For whoever is not a worker with a lock, and knows of no end."""
