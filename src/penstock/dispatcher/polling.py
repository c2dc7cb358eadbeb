"""Finds out which loops have work: one statement for all of them, and no transaction around it.

A dispatcher has many loops, and mostly none has anything to do. The poller asks for all of them,
once in `LOOK_SECONDS`, and when it is kicked because something was committed here; then it kicks
the loops that have work. It is back in time for what is due later, to the moment. So an idle
dispatcher costs Postgres one statement a second, and under load a loop is run because of what was
committed, not once for every call that might have made work for it.

- What the poller says is a hint: a loop looks for itself, and may find that another dispatcher was
  faster. Each loop also runs by itself, seldom, whatever the poller says.
- Kicks that come together are one look: `PACE_SECONDS` lie between two.
- A loop that measures something at its own pace is kicked no more often than that.

A crash leaves nothing behind: there is no state but when each loop was kicked last. Called by the
wiring, which runs `turn` in a `Loop` of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.dispatcher.dag.model import PlatformOperator
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.looping import Loop
from penstock.kernel.clock import Clock, SystemClock

LOOK_SECONDS: Final = 1.0
"""How long a commit of another process may go unseen."""
PACE_SECONDS: Final = 0.01
BY_ITSELF_SECONDS: Final = 60.0
"""How often a loop runs that the poller never kicks."""

Found = Mapping[str, Any]
"""The row of the statement `poll`."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A loop, and how to tell whether it has work."""

    loop: Loop
    has_work: Callable[[Found], bool]
    every_seconds: float = 0.0
    """How long it is left alone after a kick."""


class Poller:
    """Kicks those of the loops that have work."""

    def __init__(
        self, database: Database, watched: Sequence[Watched], *, clock: Clock | None = None
    ) -> None:
        self._database = database
        self._watched = tuple(watched)
        self._clock = clock or SystemClock()
        self._kicked_at = [-math.inf] * len(self._watched)
        self._not_before = -math.inf

    async def turn(self) -> float:
        """Look once; returns the seconds until the next look."""
        early_seconds = self._not_before - self._clock.monotonic()
        if early_seconds > 0:
            await self._clock.sleep(early_seconds)
        asked = {"operators": [str(each) for each in PlatformOperator]}
        found = await self._database.look("poll", asked)
        now = self._clock.monotonic()
        self._not_before = now + PACE_SECONDS
        for place, each in enumerate(self._watched):
            is_early = now - self._kicked_at[place] < each.every_seconds
            if not is_early and each.has_work(found):
                self._kicked_at[place] = now
                each.loop.kick()
        due_seconds: float | None = found["outbox_seconds"]
        if due_seconds is None or due_seconds <= 0:
            return LOOK_SECONDS
        return min(LOOK_SECONDS, max(PACE_SECONDS, due_seconds))


def is_due(found: Found) -> bool:
    """Whether the outbox has a row to be carried out."""
    return found["outbox_seconds"] is not None and found["outbox_seconds"] <= 0
