"""A teller: sends notices that are due to their destinations. Every dispatcher has one.

Notices are lent in one short transaction (`SKIP LOCKED`, so that tellers share the work), sent
outside of any, and recorded one by one, each with its own outcome. Destinations are told side by
side; one whose notice failed is left alone until the next turn, and what else was lent for it is
given back untried. Pauses between tries grow up to a quarter of an hour; after a day of failures a
notice is given up, which is logged and shown. See the package for what a crash leaves.

Bounds: `NOTICES_MAX` notices a turn, each within the destination's own `seconds_max`. Called by a
loop of the dispatcher, which the judge kicks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from penstock.dispatcher.alerts.judging import GIVE_UP_SECONDS
from penstock.dispatcher.alerts.notices import Notice
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.tasks.rows import storable
from penstock.kernel.clock import Clock, SystemClock

_log = logging.getLogger(__name__)

PACE_SECONDS: Final = 5.0
NOTICES_MAX: Final = 10
_FIRST_MS: Final = 5_000
_MAX_MS: Final = 900_000
_LENT_SECONDS_MORE: Final = 30.0
_ERROR_CHARACTERS_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of sending a notice."""

    is_sent: bool
    note: str = ""
    """Why it was not sent, or what is to be known although it was. No secrets."""


def taken(note: str = "") -> Outcome:
    """The destination has it."""
    return Outcome(is_sent=True, note=note)


def not_taken(why: str) -> Outcome:
    """It has to be sent again."""
    return Outcome(is_sent=False, note=why)


class Destination(Protocol):
    """Where notices go."""

    name: str
    seconds_max: float
    """How long sending one takes at most."""

    async def send(self, notice: Notice, *, at: float) -> Outcome:
        """Send one, at this time in seconds since the epoch. What goes wrong is an outcome."""
        ...


@dataclass(frozen=True, slots=True)
class _Lent:
    notice: Notice
    tries: int


class Teller:
    """Sends notices to these destinations."""

    def __init__(
        self,
        database: Database,
        destinations: Sequence[Destination],
        *,
        url: str = "",
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._destinations = {each.name: each for each in destinations}
        self._url = url
        self._clock = clock or SystemClock()
        longest = max((each.seconds_max for each in destinations), default=0.0)
        self._lent_seconds = NOTICES_MAX * longest + _LENT_SECONDS_MORE

    async def turn(self) -> float | None:
        """Send what is due; at once again if there may be more."""
        if not self._destinations:
            return None
        rows = await self._take()
        if not rows:
            return None
        taken_at = self._clock.monotonic()
        lent: dict[str, list[_Lent]] = {}
        for row in rows:
            notice = Notice(id=row["id"], what=row["what"], alert=row["body"], url=self._url)
            lent.setdefault(row["destination"], []).append(_Lent(notice, row["tries"]))
        # The database's time of sending, carried forward by our own clock.
        ahead = rows[0]["now"] - taken_at
        # One destination whose outcome cannot be written down does not interrupt the others.
        outcomes = await asyncio.gather(
            *(self._tell(self._destinations[name], some, ahead) for name, some in lent.items()),
            return_exceptions=True,
        )
        for each in outcomes:
            if isinstance(each, BaseException):
                raise each
        is_well = all(outcomes)
        return 0.0 if is_well and len(rows) == NOTICES_MAX else None

    async def _tell(self, to: Destination, some: Sequence[_Lent], ahead: float) -> bool:
        """Send some to one destination, until one fails; whether none has."""
        for place, each in enumerate(some):
            outcome = await self._sent(to, each.notice, at=ahead + self._clock.monotonic())
            if outcome.is_sent:
                await self._record_told(each, outcome)
                continue
            await self._record_untold(to, each, outcome)
            await self._return(some[place + 1 :])
            return False
        return True

    async def _sent(self, to: Destination, notice: Notice, *, at: float) -> Outcome:
        try:
            async with asyncio.timeout(to.seconds_max):
                return await to.send(notice, at=at)
        except TimeoutError:
            return not_taken(f"It was not taken within {to.seconds_max:g} s.")
        except Exception as error:  # noqa: BLE001 - whatever it is, only this notice has failed
            # What it says may hold an address or a password.
            _log.warning("%s: a mistake of ours, %s", to.name, type(error).__name__)
            return not_taken(f"Sending failed: {type(error).__name__}.")

    async def _take(self) -> list[dict[str, Any]]:
        asked = {
            "destinations": list(self._destinations),
            "limit": NOTICES_MAX,
            "lent_seconds": self._lent_seconds,
        }

        async def work(connection: Connection) -> list[dict[str, Any]]:
            return await (await connection.execute(query("take_notices"), asked)).fetchall()

        rows = await self._database.transact(work)
        # What an update returns has no order.
        return sorted(rows, key=lambda row: (row["body"]["id"], row["what"]))

    async def _record_told(self, each: _Lent, outcome: Outcome) -> None:
        asked = {"id": each.notice.id, "note": _cut(outcome.note) or None}

        async def work(connection: Connection) -> None:
            await connection.execute(query("record_told"), asked)

        await self._database.transact(work)

    async def _record_untold(self, to: Destination, each: _Lent, outcome: Outcome) -> None:
        asked = {
            "id": each.notice.id,
            "tries": each.tries,
            "why": _cut(outcome.note),
            "first_ms": _FIRST_MS,
            "max_ms": _MAX_MS,
            "give_up_seconds": GIVE_UP_SECONDS,
        }

        async def work(connection: Connection) -> dict[str, Any] | None:
            return await (await connection.execute(query("record_untold"), asked)).fetchone()

        row = await self._database.transact(work)
        number = each.notice.alert["id"]
        if row is not None and row["is_given_up"]:
            _log.error("%s is not told of alert %d: %s", to.name, number, asked["why"])
        elif each.tries == 0:
            _log.warning("%s is told of alert %d later: %s", to.name, number, asked["why"])

    async def _return(self, some: Sequence[_Lent]) -> None:
        if not some:
            return
        asked = {
            "ids": [each.notice.id for each in some],
            "tries": [each.tries for each in some],
            "pause_seconds": _FIRST_MS / 1000,
        }

        async def work(connection: Connection) -> None:
            await connection.execute(query("return_notices"), asked)

        await self._database.transact(work)


def _cut(text: str) -> str:
    return storable(text[:_ERROR_CHARACTERS_MAX])
