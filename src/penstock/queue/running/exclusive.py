"""When a worker runs a task with nothing beside it.

A suspect on its last attempt is claimed exclusively (`penstock.queue.windows`): while it is held,
its worker must run nothing else and hold nothing else, so that a loss says which task it was.

| phase | means | leaves by |
|---|---|---|
| ordinary | the worker claims as always | a task waits here and the pause is over: draining; |
| | | one waits and the worker has nothing else to do: running |
| draining | nothing is claimed; what runs may end | nothing is held: running; patience ends: |
| | | ordinary, after a pause of four times the patience, which doubles |
| running | one task is claimed exclusively, to its last write | the next one; after |
| | | `PHASE_SECONDS`, or when none waits: ordinary, for as long as the phase took |

So a task that waits here comes when what runs has ended, also behind a backlog that never ends; a
handler that never ends costs its worker a fifth of its time at the most; and many that wait leave
the rest of the queue half of the time. A worker with nothing else to do never waits.

Where several workers look at the same packs, all of them may learn of such a task. Each waits a
while of its own before it drains, and forgets the task if a list shows that its ledger has changed.

A crash leaves nothing: what needs it is told by the ledger. Used by `penstock.queue.running.shift`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from penstock.kernel.clock import Clock
from penstock.queue.discovery.scan import Sight
from penstock.queue.places import PackAt

PATIENCE_SECONDS: Final = 60.0
PATIENCE_SECONDS_MAX: Final = 3600.0
PHASE_SECONDS: Final = 60.0
OTHERS_SECONDS: Final = 30.0
"""How long a worker waits at the most for others who see the same packs."""
_PAUSE: Final = 4.0
_PACKS_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class _Waiting:
    sight: Sight
    since: float
    """From when on it is worth draining for it."""


class Exclusive:
    """What waits to run with nothing beside it, on one worker."""

    def __init__(self, clock: Clock, *, delay: Callable[[], float]) -> None:
        """`delay` draws how many seconds to leave to other workers."""
        self._clock = clock
        self._delay = delay
        self._waiting: dict[PackAt, _Waiting] = {}
        self._running: PackAt | None = None
        self._is_draining = False
        self._patience = PATIENCE_SECONDS
        self._drain_until = self._began_at = self._pause_until = float("-inf")

    def __contains__(self, at: PackAt) -> bool:
        return at in self._waiting

    @property
    def is_reserved(self) -> bool:
        """Whether nothing else may be claimed now."""
        return self._is_draining or self._running is not None

    def note(self, sight: Sight) -> None:
        """A pack has a task that must run with nothing beside it."""
        if len(self._waiting) < _PACKS_MAX:  # The others are found again.
            since = self._clock.monotonic() + self._delay()
            self._waiting.setdefault(sight.at, _Waiting(sight, since))

    def see(self, sights: Iterable[Sight]) -> None:
        """Forget what a list shows with another ledger: somebody else has it."""
        for sight in sights:
            known = self._waiting.get(sight.at)
            if known is not None and sight.seen and sight.ledger != known.sight.ledger:
                del self._waiting[sight.at]

    def next(self, *, is_empty: bool, is_idle: bool) -> Sight | None:
        """What to claim exclusively now, if the worker holds nothing (`is_empty`).

        `is_idle`: it has also found nothing that it could claim instead.
        """
        if self._running is not None:
            return None
        instant = self._clock.monotonic()
        if not self._waiting:
            self._end_phase(instant)
            return None
        if self._is_draining and instant >= self._drain_until and not is_empty:
            self._is_draining = False
            self._pause_until = instant + _PAUSE * self._patience
            self._patience = min(2 * self._patience, PATIENCE_SECONDS_MAX)
        first = min(self._waiting.values(), key=lambda each: each.since)
        is_due = instant >= max(self._pause_until, first.since)
        if not self._is_draining and (is_due or (is_empty and is_idle)):
            self._is_draining = True
            self._began_at, self._drain_until = instant, instant + self._patience
        if not self._is_draining or not is_empty:
            return None
        del self._waiting[first.sight.at]
        self._running = first.sight.at
        return first.sight

    def ended(self, at: PackAt) -> None:
        """Nothing of a pack is held any more."""
        if at != self._running:
            return
        self._running = None
        self._patience = PATIENCE_SECONDS
        instant = self._clock.monotonic()
        self._drain_until = instant + self._patience
        if instant - self._began_at >= PHASE_SECONDS:
            self._end_phase(instant)

    def _end_phase(self, instant: float) -> None:
        if self._is_draining:
            self._is_draining = False
            self._pause_until = instant + (instant - self._began_at)
