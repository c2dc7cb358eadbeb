"""Who was refused, and what was minted: notes that never cost the call that they are about.

`note` puts a note into a bounded memory and returns; `turn`, called by a loop of every dispatcher,
writes what has come together in one statement. The same again within a minute, by the database's
clock, is counted in its row and not written anew, whichever dispatcher it came to.

Bounds: of each kind `NOTES_MAX` different notes wait at a time, and so many come into being in a
minute, so that a caller that says something else each time fills no disk:

| kind | a minute |
|---|---|
| what was allowed | `MINUTE_MAX` |
| refused, of a `caller` who is proved | `MINUTE_MAX` |
| refused, of anybody | `UNPROVED_MINUTE_MAX`, and of one address `ADDRESS_MINUTE_MAX` |

Nobody who has no proof, however much they ask, takes the room of a note about somebody who has one.
What is beyond is dropped, and a row says how many were. Texts are cut. Nothing that is noted is a
token, a credential or a lease's.

A database that is away keeps the notes waiting; a crash loses those of the last second; a write
whose answer is lost counts twice. Stopping writes what waits, within a bound. Old rows are removed
by `dispatcher.retention`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from psycopg.types.json import Jsonb

from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.dispatcher.tasks.rows import storable, storable_json
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import PenstockError
from penstock.kernel.service import Service
from penstock.protocol.keys import AuditAnswer, AuditNote

_log = logging.getLogger(__name__)

NOTES_MAX: Final = 5_000
MINUTE_MAX: Final = 2_000
UNPROVED_MINUTE_MAX: Final = 1_000
ADDRESS_MINUTE_MAX: Final = 100
TEXT_CHARACTERS_MAX: Final = 200
WRITTEN_MAX: Final = 1_000
_STOP_SECONDS_MAX: Final = 5.0
_MINUTE_SECONDS: Final = 60.0
_TASK_MAX: Final = 2**63 - 1
_ATTEMPT_MAX: Final = 2**31 - 1
_TIMES_MAX: Final = 10**6


class _Same(NamedTuple):
    """What makes two notes the same."""

    what: str
    outcome: str
    task_id: int | None
    attempt: int | None
    caller: str
    address: str
    reason: str


_DROPPED: Final = _Same("audit", "refused", None, None, "", "", "notes were dropped")


@dataclass(slots=True)
class _Noted:
    times: int = 0
    detail: Mapping[str, Any] = field(default_factory=dict)


class _Kind(Enum):
    """Whose room a note takes, in the order in which they are written."""

    PROVED = "proved"
    ALLOWED = "allowed"
    UNPROVED = "unproved"


class _Room:
    """The notes of one kind that wait, and how many more may come."""

    def __init__(self, minute_max: int, *, address_max: int | None = None) -> None:
        self.notes: dict[_Same, _Noted] = {}
        self._minute_max = minute_max
        self._address_max = minute_max if address_max is None else address_max
        self._this_minute: Counter[str] = Counter()
        self._minute_began = -math.inf

    def take(self, same: _Same, *, now: float) -> _Noted | None:
        """The note of this, which may be new; None if there is no room for it."""
        if (noted := self.notes.get(same)) is not None:
            return noted
        if now - self._minute_began >= _MINUTE_SECONDS:
            self._minute_began = now
            self._this_minute.clear()
        is_full = self._this_minute.total() >= self._minute_max or len(self.notes) >= NOTES_MAX
        if is_full or self._this_minute[same.address] >= self._address_max:
            return None
        self._this_minute[same.address] += 1
        return self.notes.setdefault(same, _Noted())


class AuditLog(Service):
    """Notes of one dispatcher on their way to the table, and the table as people see it."""

    def __init__(self, database: Database, *, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._rooms = {
            _Kind.PROVED: _Room(MINUTE_MAX),
            _Kind.ALLOWED: _Room(MINUTE_MAX),
            _Kind.UNPROVED: _Room(UNPROVED_MINUTE_MAX, address_max=ADDRESS_MINUTE_MAX),
        }
        self._dropped = 0

    def note(
        self,
        *,
        what: str,
        outcome: str,
        task_id: int | None = None,
        attempt: int | None = None,
        caller: str = "",
        address: str = "",
        reason: str = "",
        detail: Mapping[str, Any] | None = None,
        times: int = 1,
    ) -> None:
        """Remember that something was refused, or allowed. Returns at once, and never fails.

        `what` is the operation, as in `POST /v1/task/credentials`; `outcome` is `allowed` or
        `refused`; `caller` is who it is, by a proof, or empty; `reason` is a word or a few; what
        differs each time, and what somebody without a proof has made up, belongs into `detail`.
        """
        same = _Same(
            _text(what),
            "allowed" if outcome == "allowed" else "refused",
            task_id if task_id is not None and 0 <= task_id <= _TASK_MAX else None,
            attempt if attempt is not None and 0 <= attempt <= _ATTEMPT_MAX else None,
            _text(caller),
            _text(address),
            _text(reason),
        )
        noted = self._rooms[_kind(same)].take(same, now=self._clock.monotonic())
        if noted is None:
            self._dropped += times
            return
        noted.times = min(noted.times + times, _TIMES_MAX)
        noted.detail = detail or noted.detail

    async def start(self) -> None:
        """Nothing to do: a loop calls `turn`."""

    async def stop(self) -> None:
        """Write what waits, if the database lets us."""
        try:
            async with asyncio.timeout(_STOP_SECONDS_MAX):
                while await self.turn() == 0.0:
                    pass
        except (PenstockError, TimeoutError) as error:
            _log.warning("lost %d audit records: %s", self._waiting(), error)

    async def turn(self) -> float | None:
        """Write some of the notes that wait; 0 if there are more."""
        if self._dropped:
            _log.warning("dropped %d audit records: the buffer was full", self._dropped)
            noted = self._rooms[_Kind.PROVED].notes.setdefault(_DROPPED, _Noted())
            noted.times, self._dropped = min(noted.times + self._dropped, _TIMES_MAX), 0
        waiting = (each for room in self._rooms.values() for each in room.notes.items())
        some = dict(itertools.islice(waiting, WRITTEN_MAX))
        if not some:
            return None
        for same in some:
            del self._rooms[_kind(same)].notes[same]
        try:
            await self._write(some)
        except BaseException:
            self._put_back(some)
            raise
        return 0.0 if self._waiting() else None

    async def listed(
        self,
        *,
        task_id: int | None = None,
        outcome: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> AuditAnswer:
        """The notes, the newest first."""
        asked = {"task": task_id, "outcome": outcome, "before": before, "limit": limit}

        async def work(connection: Connection) -> AuditAnswer:
            rows = await (await connection.execute(query("audit"), asked)).fetchall()
            last = rows[-1]["id"] if len(rows) == limit else None
            return AuditAnswer(notes=[AuditNote(**row) for row in rows], before=last)

        return await self._database.transact(work)

    async def _write(self, some: Mapping[_Same, _Noted]) -> None:
        notes = [
            {
                **same._asdict(),
                "detail": json.loads(storable_json(noted.detail)),
                "times": noted.times,
            }
            for same, noted in some.items()
        ]

        async def work(connection: Connection) -> None:
            await connection.execute(query("write_audit"), {"notes": Jsonb(notes)})

        await self._database.transact(work)

    def _put_back(self, some: Mapping[_Same, _Noted]) -> None:
        for same, noted in some.items():
            newer = self._rooms[_kind(same)].notes.setdefault(same, noted)
            if newer is not noted:
                newer.times = min(newer.times + noted.times, _TIMES_MAX)
                newer.detail = newer.detail or noted.detail

    def _waiting(self) -> int:
        return sum(len(room.notes) for room in self._rooms.values())


def _kind(same: _Same) -> _Kind:
    if same.outcome == "allowed":
        return _Kind.ALLOWED
    return _Kind.PROVED if same.caller or same == _DROPPED else _Kind.UNPROVED


def _text(said: str) -> str:
    return storable(said[:TEXT_CHARACTERS_MAX])
