"""Who was refused, and what was minted: notes that never cost the call that they are about.

`note` puts a note into a bounded memory and returns; `turn`, called by a loop of every dispatcher,
writes what has come together in one statement. The same again within a minute, by the database's
clock, is counted in its row and not written anew, whichever dispatcher it came to.

Bounds: `NOTES_MAX` different notes wait at a time, and `MINUTE_MAX` come into being in a minute, so
that a caller that says something else each time fills no disk. What is beyond is dropped, and a row
says how many were. Texts are cut. Nothing that is noted is a token, a credential or a lease's.

A database that is away keeps the notes waiting; a crash loses those of the last second; a write
whose answer is lost counts twice. Stopping writes what waits, within a bound. Old rows are removed
by `dispatcher.retention`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from psycopg.types.json import Jsonb

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.tasks.rows import storable, storable_json
from penstock.dispatcher.wire.keys import AuditAnswer, AuditNote
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import PenstockError
from penstock.kernel.service import Service

_log = logging.getLogger(__name__)

NOTES_MAX: Final = 5_000
MINUTE_MAX: Final = 2_000
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


@dataclass(slots=True)
class _Noted:
    times: int = 0
    detail: Mapping[str, Any] = field(default_factory=dict)


class Audit(Service):
    """Notes of one dispatcher on their way to the table, and the table as people see it."""

    def __init__(self, database: Database, *, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._notes: dict[_Same, _Noted] = {}
        self._dropped = 0
        self._minute_began = self._clock.monotonic()
        self._this_minute = 0

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
    ) -> None:
        """Remember that something was refused, or allowed. Returns at once, and never fails.

        `what` is the operation, as in `POST /v1/task/credentials`; `outcome` is `allowed` or
        `refused`; `reason` is a word or a few; what differs each time belongs into `detail`.
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
        noted = self._notes.get(same)
        if noted is None:
            if not self._has_room():
                self._dropped += 1
                return
            noted = self._notes[same] = _Noted()
        noted.times = min(noted.times + 1, _TIMES_MAX)
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
            _log.warning("%d notes of the audit are lost: %s", len(self._notes), error)

    async def turn(self) -> float | None:
        """Write some of the notes that wait; 0 if there are more."""
        if self._dropped:
            _log.warning("%d notes of the audit were dropped", self._dropped)
            same = _Same("audit", "refused", None, None, "", "", "notes were dropped")
            noted = self._notes.setdefault(same, _Noted())
            noted.times, self._dropped = min(noted.times + self._dropped, _TIMES_MAX), 0
        some = dict(list(self._notes.items())[:WRITTEN_MAX])
        if not some:
            return None
        for same in some:
            del self._notes[same]
        try:
            await self._write(some)
        except BaseException:
            self._put_back(some)
            raise
        return 0.0 if self._notes else None

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
            newer = self._notes.setdefault(same, noted)
            if newer is not noted:
                newer.times = min(newer.times + noted.times, _TIMES_MAX)
                newer.detail = newer.detail or noted.detail

    def _has_room(self) -> bool:
        now = self._clock.monotonic()
        if now - self._minute_began >= _MINUTE_SECONDS:
            self._minute_began, self._this_minute = now, 0
        if self._this_minute >= MINUTE_MAX or len(self._notes) >= NOTES_MAX:
            return False
        self._this_minute += 1
        return True


def _text(said: str) -> str:
    return storable(said[:TEXT_CHARACTERS_MAX])
