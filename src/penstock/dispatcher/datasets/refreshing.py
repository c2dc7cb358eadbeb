"""Has every `current.json` of a dataset say what the database says, whatever it said before.

The relay writes what is not known to be written (`outbox.projecting`). That is all there is to do,
unless somebody else has changed the objects or the database: after a restore of Postgres to an
earlier time they name publications that it has forgotten, and after one of the bucket they name
what was replaced since. Then somebody asks for this. Every partition that the database knows is
looked at, one reading each, and written where it says something else; then the dataset itself, so
that readers find its generation whole. Partitions that only the bucket knows are left as they are.

A request goes on for a while and says where it has come to; the next goes on from there. Any number
may run at once, beside relays. A crash leaves some of it done. Called by the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from penstock.datasets.layout import dataset_current_key, partition_current_key
from penstock.datasets.projection import amend
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.outbox.projecting import dataset_now, partition_now
from penstock.kernel.clock import Clock, SystemClock
from penstock.store.base import ObjectStore

PAGE: Final = 200
AT_ONCE: Final = 16
ASKED_SECONDS: Final = 15.0
"""How long one request goes on."""


@dataclass(frozen=True, slots=True)
class At:
    """The partition that was looked at last."""

    generation: str
    partition_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """What one request has done."""

    looked: int
    written: int
    at: At | None
    """Where the next goes on; None if all is done."""


class Refreshing:
    """Compares the objects of a store with a database."""

    def __init__(
        self, database: Database, store: ObjectStore, *, clock: Clock | None = None
    ) -> None:
        self._database = database
        self._store = store
        self._clock = clock or SystemClock()

    async def refresh(self, name: str, *, uuid: str, after: At | None = None) -> Refreshed:
        """Go on with a dataset. Raises what the store or the database raises."""
        ends_at = self._clock.monotonic() + ASKED_SECONDS
        looked = written = 0
        while True:
            page = await self._page(uuid, after)
            looked, written = looked + len(page), written + await self._amend(name, uuid, page)
            if page:
                after = At(page[-1]["generation"], page[-1]["partition_key"])
            if len(page) < PAGE:
                break
            if self._clock.monotonic() >= ends_at:
                return Refreshed(looked=looked, written=written, at=after)
        now = partial(dataset_now, self._database, uuid)
        last = await amend(self._store, dataset_current_key(name), now)
        written += last is not None and last.is_written
        return Refreshed(looked=looked, written=written, at=None)

    async def _page(self, uuid: str, after: At | None) -> Sequence[Mapping[str, Any]]:
        asked = {
            "dataset": uuid,
            "generation": None if after is None else after.generation,
            "partition_key": None if after is None else after.partition_key,
            "limit": PAGE,
        }

        async def work(connection: Connection) -> list[dict[str, Any]]:
            return await (await connection.execute(query("told_partitions"), asked)).fetchall()

        return await self._database.transact(work)

    async def _amend(self, name: str, uuid: str, page: Sequence[Mapping[str, Any]]) -> int:
        """How many of these had to be written."""
        room = asyncio.Semaphore(AT_ONCE)

        async def one(generation: str, partition_key: str) -> bool:
            key = partition_current_key(name, generation=generation, partition_key=partition_key)
            place = {"generation": generation, "partition_key": partition_key}
            async with room:
                found = await amend(
                    self._store, key, partial(partition_now, self._database, uuid, **place)
                )
            return found is not None and found.is_written

        return sum(await asyncio.gather(*(one(**row) for row in page)))
