"""The poller: finds out which loops have work, with one statement for all of them.

A dispatcher has many loops, and most of the time none of them has work. The poller asks for all
of them once in `LOOK_SECONDS`, and when something was committed in this process, and kicks
those that have work. What is due later is found at its time. An idle dispatcher therefore costs
Postgres one statement every few seconds, and under load a loop runs once for many commits.

- The result is a hint: a loop looks for itself, and may find that another dispatcher was faster.
  Each loop also runs by itself, seldom, whatever the poller says.
- Kicks that come together are one look: `PACE_SECONDS` lie between two.
- A loop that measures at its own pace is kicked no more often than that.

`routing_turn` and `reaping_turn` are the turns that take more than one call: routing kicks the
loops that follow it, reaping goes on while a full batch of leases has expired. A crash leaves
nothing behind: the only state is when each loop was kicked last. The wiring runs all of it in
`loop.Loop`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.dispatcher.dag.model import PlatformOperator
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.loop import Loop, Turn
from penstock.dispatcher.router import Router
from penstock.dispatcher.tasks.lifecycle import BATCH_MAX, Tasks
from penstock.kernel.clock import Clock, SystemClock

LOOK_SECONDS: Final = 1.0
"""How long a commit of another process may go unseen."""
QUIET_POLLS: Final = 10
QUIET_SECONDS: Final = 4.0
"""The same, after so many looks that have found nothing at all: mostly others do what follows from
their own commits, and this is for those who have died before they could."""
PACE_SECONDS: Final = 0.05
BY_ITSELF_SECONDS: Final = 60.0
"""How often a loop runs that the poller never kicks."""

Found = Mapping[str, Any]
"""The row of the statement `poll`."""


@dataclass(frozen=True, slots=True)
class WatchedLoop:
    """A loop, and how to tell whether it has work."""

    loop: Loop
    has_work: Callable[[Found], bool]
    every_seconds: float = 0.0
    """How long it is left alone after a kick."""


class Poller:
    """Kicks those of the loops that have work."""

    def __init__(
        self, database: Database, watched: Sequence[WatchedLoop], *, clock: Clock | None = None
    ) -> None:
        self._database = database
        self._watched = tuple(watched)
        self._clock = clock or SystemClock()
        self._kicked_at = [-math.inf] * len(self._watched)
        self._not_before = -math.inf
        self._quiet_polls = 0

    async def turn(self) -> float:
        """Look once; returns the seconds until the next look."""
        early_seconds = self._not_before - self._clock.monotonic()
        if early_seconds > 0:
            await self._clock.sleep(early_seconds)
        asked = {"operators": [str(each) for each in PlatformOperator]}
        (found,) = await self._database.fetch("poll", asked)
        now = self._clock.monotonic()
        self._not_before = now + PACE_SECONDS
        due_seconds: float | None = found["outbox_seconds"]
        is_quiet = due_seconds is None and not found["is_waiting"] and not found["is_running"]
        for place, each in enumerate(self._watched):
            is_early = now - self._kicked_at[place] < each.every_seconds
            if not is_early and each.has_work(found):
                is_quiet = False
                self._kicked_at[place] = now
                each.loop.kick()
        self._quiet_polls = self._quiet_polls + 1 if is_quiet else 0
        if self._quiet_polls > QUIET_POLLS:
            return QUIET_SECONDS
        if due_seconds is None or due_seconds <= 0:
            return LOOK_SECONDS
        return min(LOOK_SECONDS, max(PACE_SECONDS, due_seconds))


def is_due(found: Found) -> bool:
    """Whether the outbox has a row to be carried out."""
    return found["outbox_seconds"] is not None and found["outbox_seconds"] <= 0


_OUTAGE_SECONDS: Final = 15.0
"""Without a reaper for so long, workers could not be heard either; far above the reapers' pace."""
_UNHEARD_SECONDS: Final = 6.5
"""The same for claims that were not acknowledged: after so long an answer to a heartbeat may have
been missed twice; a little above the reapers' pace."""
_ROUTED_MAX: Final = 2000


def routing_turn(routing: Router, followers: Sequence[Loop]) -> Turn:
    """Route events; what may have become of them is looked at by `followers`."""

    async def turn() -> float | None:
        routed = await routing.route(limit=_ROUTED_MAX)
        if not routed.routed and not routed.audited:
            return None
        for each in followers:
            each.kick()
        return 0.0

    return turn


def reaping_turn(tasks: Tasks) -> Turn:
    """Expire attempts whose leases have run out."""

    async def turn() -> float | None:
        reaping = await tasks.reap(outage_seconds=_OUTAGE_SECONDS, unheard_seconds=_UNHEARD_SECONDS)
        return 0.0 if len(reaping.reaped) == BATCH_MAX else None

    return turn
