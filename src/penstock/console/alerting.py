"""How many alerts are open and hold, for the header of every page.

One short question for all who look, at most every five seconds, by an index that has nothing but
what is open. What cannot be asked now stays as it was.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

from penstock.console.rendering import number
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.views.alerts import AlertViews
from penstock.kernel.clock import Clock
from penstock.kernel.errors import DatabaseUnavailable

BLOCK: Final = "open-alerts"
"""What the element in the header is called in the stream of a page."""
_LOOK_SECONDS: Final = 5.0
_MANY: Final = 1000


class AlertCount(Protocol):
    """What the header of a page says of alerts."""

    @property
    def shown(self) -> str:
        """The count as a text; none are nothing."""
        ...

    async def look(self) -> None:
        """Bring it up to date, if it is not."""
        ...


class NoCount:
    """Of a console that shows none."""

    shown = ""

    async def look(self) -> None:
        """There is nothing to ask."""


class OpenAlerts:
    """The count, as it was last seen."""

    def __init__(self, database: Database, *, clock: Clock) -> None:
        self._views = AlertViews(database)
        self._clock = clock
        self._asked_at = -math.inf
        self._count = 0

    @property
    def shown(self) -> str:
        """The count as a text; none are nothing."""
        return number(self._count, most=_MANY) if self._count else ""

    async def look(self) -> None:
        """Ask, unless somebody has a moment ago."""
        now = self._clock.monotonic()
        if now - self._asked_at < _LOOK_SECONDS:
            return
        # First, so that those who come meanwhile do not ask as well.
        self._asked_at = now
        try:
            self._count = await self._views.open_count()
        except DatabaseUnavailable:
            return
