"""The sweeper: removes the folders that attempts have left behind, in rounds and on request.

What may be removed is decided in Postgres, how it is removed by `penstock.datasets.sweeper`. A
folder is gone if all of this holds, in one statement and so at one moment:
- no publication and no appended part names it, and no batch lies there that is not written yet;
- no snapshot that is kept shows it, and none that is still to be made of the history will;
- its attempt is over for longer than the grace. That of a task which is forgotten is, if the number
  of the task was ever given out; else it is of another life of the database, and is kept;
- if it was published once: `current.json` is confirmed, for longer than the grace, to name
  something else, and no attempt runs that began before it left and reads its dataset.

That is final: what is over completes nothing any more, so nothing will name the folder again.
Whoever may publish the folder of somebody else is a reader of it, and running.

One dispatcher of any number begins a round when the last began long enough ago, and goes
through the store in small steps; a crash ends the round, and the next finds the rest. A request
has a round of its own, of one dataset or all, which goes on with each call and is forgotten
with the process. Called by a loop of the dispatcher (`turn`) and its API (`sweep`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from penstock.datasets.layout import attempt_of_place
from penstock.datasets.sweeper import Sweeper, Swept, Verdict
from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.dispatcher.metrics import take_turn
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import InvalidInput
from penstock.store.base import ObjectStore, Version, Wrapper


class PostgresFolderLedger:
    """What is known of the folders of attempts."""

    def __init__(self, database: Database, *, grace_seconds: float) -> None:
        self._database = database
        self._grace_seconds = grace_seconds

    async def verdicts(self, places: Sequence[str]) -> Mapping[str, Verdict]:
        """What is to become of these folders; those that are not ours are kept."""
        named = {place: found for place in places if (found := attempt_of_place(place)) is not None}
        asked = {
            "places": list(named),
            "tasks": [each.task_id for each in named.values()],
            "attempts": [each.attempt for each in named.values()],
            "grace_seconds": self._grace_seconds,
        }

        async def work(connection: Connection) -> set[str]:
            found = await connection.execute(query("gone_places"), asked)
            return {row["place"] for row in await found.fetchall()}

        gone = await self._database.transact(work) if named else set()
        return {place: Verdict.GONE if place in gone else Verdict.KEEP for place in places}


_log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 86_400.0
ROUND_SECONDS: Final = 3600.0
ASKED_SECONDS: Final = 15.0
"""How long one request goes on with its round."""
_BETWEEN_SECONDS: Final = 0.05
_ASKED_MAX: Final = 100
_DEPARTED_DAYS: Final = 30.0
_ROWS_MAX: Final = 5000
_TURN: Final = "sweep"


class _Spared(Wrapper):
    """A store of which nothing is removed."""

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        del key, version


class StoreSweeper:
    """The rounds of one dispatcher."""

    def __init__(
        self,
        database: Database,
        store: ObjectStore,
        *,
        grace_seconds: float,
        round_seconds: float = ROUND_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._store = store
        self.grace_seconds = grace_seconds
        self._round_seconds = round_seconds
        self._clock = clock or SystemClock()
        self._round: Sweeper | None = None
        """The round that is under way."""
        self._swept = Swept()
        self._asked: dict[tuple[str | None, float, bool], Sweeper] = {}
        self._asking = asyncio.Lock()

    async def turn(self) -> float | None:
        """Go on with a round, or begin one; the seconds until the next turn."""
        if self._round is None:
            if not await take_turn(self._database, _TURN, seconds=self._round_seconds):
                return self._round_seconds / 4
            self._round = self._sweeper(None, self.grace_seconds, self._store)
            self._swept = Swept()
        self._swept += await self._round.turn()
        if not self._swept.is_round_over:
            return _BETWEEN_SECONDS
        self._round = None
        if self._swept.files:
            what = "swept %d attempts: %d files, %d bytes"
            _log.info(what, self._swept.attempts, self._swept.files, self._swept.bytes)
        await self._forget_departed()
        return self._round_seconds

    async def sweep(
        self,
        dataset: str | None = None,
        *,
        grace_seconds: float | None = None,
        dry_run: bool = False,
    ) -> Swept:
        """Go on with the round that was asked for, for a while; see `is_round_over`.

        With `dry_run` nothing is removed, and what would be is told.
        """
        grace = self.grace_seconds if grace_seconds is None else grace_seconds
        async with self._asking:
            if len(self._asked) >= _ASKED_MAX:
                raise InvalidInput("Too many sweeps are running; wait for one to end.")
            asked = (dataset, grace, dry_run)
            store = _Spared(self._store) if dry_run else self._store
            sweeper = self._asked.setdefault(asked, self._sweeper(dataset, grace, store))
            ends_at = self._clock.monotonic() + ASKED_SECONDS
            swept = Swept()
            while not swept.is_round_over:
                swept += await sweeper.turn()
                if self._clock.monotonic() >= ends_at:
                    break
            if swept.is_round_over:
                del self._asked[asked]
            return swept

    def _sweeper(self, dataset: str | None, grace_seconds: float, store: ObjectStore) -> Sweeper:
        book = PostgresFolderLedger(self._database, grace_seconds=grace_seconds)
        return Sweeper(store, book, grace_seconds=grace_seconds, dataset=dataset)

    async def _forget_departed(self) -> None:
        async def work(connection: Connection) -> None:
            asked = {"days": _DEPARTED_DAYS, "limit": _ROWS_MAX}
            await connection.execute(query("forget_departed"), asked)

        await self._database.transact(work)
