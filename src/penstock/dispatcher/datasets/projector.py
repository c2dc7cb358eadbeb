"""The projector: has every `current.json` say what the database says is published.

`ProjectCarrier` carries out rows of the outbox that triggers write in the transactions that
publish: one for a generation, and one for a dataset whose current generation has moved. What to
write follows from the tables: every partition whose revision is higher than what is known to be
written. So a row is only a hint, rows may be lost, merged or doubled, and any number of relays
may carry them out: `datasets.projection` never lets a revision go back. If an object is found
ahead, another relay was faster or the database was restored: it is asked again, and the object
amended if it differs.

A write is confirmed afterwards, and only then do folders that left publication become free to
be swept; a crash in between writes again. One partition that cannot be written fails the row,
after all others were tried. A new generation is named only after all of it was written, so
readers find it whole. What does not fit into one delivery gets a row of its own.

`ProjectionRefresher` is for after a restore of Postgres or of the bucket: every partition that
the database knows is read once, and written where it differs, then the dataset. Partitions that
only the bucket knows stay. A request says where it has come to; the next continues. Called by
the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from penstock.datasets.layout import dataset_current_key, partition_current_key
from penstock.datasets.projection import (
    Current,
    CurrentDataset,
    CurrentPart,
    CurrentPartition,
    amend,
    project,
)
from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.dispatcher.outbox import OutboxEntry
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import PenstockError
from penstock.store.base import ObjectStore

PAGE: Final = 200
PAGES_MAX: Final = 100
AT_ONCE: Final = 16
CARRY_SECONDS: Final = 10.0
"""When so much time has passed, the rest is left to another delivery: half of what one may take."""

Now = Callable[[], Awaitable[Current | None]]
"""Asks what readers are to be told."""


class ProjectCarrier:
    """Carries out rows of the kind `project`."""

    def __init__(
        self, database: Database, store: ObjectStore, *, clock: Clock | None = None
    ) -> None:
        self._database = database
        self._store = store
        self._clock = clock or SystemClock()

    async def carry(self, rows: Sequence[OutboxEntry]) -> Mapping[int, str]:
        failed: dict[int, str] = {}
        # Those of one target say the same, if they are from the same release.
        for place in {(row.body["dataset"], row.body.get("generation")) for row in rows}:
            dataset, generation = place
            if generation is None:
                why = await self._carry_dataset(dataset)
            else:
                why, _ = await self._carry_partitions(dataset, generation)
            if why:
                failed |= {
                    row.id: why
                    for row in rows
                    if (row.body["dataset"], row.body.get("generation")) == place
                }
        return failed

    async def _carry_dataset(self, dataset: str) -> str:
        """Name the current generation; returns why that could not be done."""
        found = await self._ask("unprojected_dataset", dataset=dataset)
        if not found:
            return ""
        (row,) = found
        if row["generation"] is not None:
            why, is_whole = await self._carry_partitions(dataset, row["generation"])
            if why:
                return why
            if not is_whole:
                await self._ask("project_again", dataset=dataset, generation=None)
                return ""
            now = partial(dataset_now, self._database, dataset)
            if isinstance(outcome := await self._write(_dataset_of(row), now), str):
                return outcome
        await self._ask("confirm_dataset", dataset=dataset, revision=row["revision"])
        return ""

    async def _carry_partitions(self, dataset: str, generation: str) -> tuple[str, bool]:
        """Write what is not known to be written.

        Returns why some of it could not be, and whether all of it was looked at.
        """
        ends_at = self._clock.monotonic() + CARRY_SECONDS
        why, after = "", None
        for _ in range(PAGES_MAX):
            asked = {"dataset": dataset, "generation": generation}
            page = await self._ask("unprojected_partitions", **asked, after=after, limit=PAGE)
            outcomes = await self._write_page(page, **asked)
            written = {key: each for key, each in outcomes.items() if isinstance(each, int)}
            await self._ask(
                "confirm_partitions",
                **asked,
                keys=list(written),
                revisions=list(written.values()),
            )
            why = why or next((each for each in outcomes.values() if isinstance(each, str)), "")
            if len(page) < PAGE:
                return why, True
            after = page[-1]["partition_key"]
            if self._clock.monotonic() >= ends_at:
                break
        await self._ask("project_again", dataset=dataset, generation=generation)
        return why, False

    async def _write_page(
        self, page: Sequence[Mapping[str, Any]], *, dataset: str, generation: str
    ) -> Mapping[str, int | str | None]:
        """For each partition, by key, the revision that is there now, or what went wrong."""
        room = asyncio.Semaphore(AT_ONCE)

        async def write(row: Mapping[str, Any]) -> int | str | None:
            place = {"generation": generation, "partition_key": row["partition_key"]}
            now = partial(partition_now, self._database, dataset, **place)
            async with room:
                return await self._write(_partition_of(row, generation=generation), now)

        outcomes = await asyncio.gather(*(write(row) for row in page))
        return {row["partition_key"]: each for row, each in zip(page, outcomes, strict=True)}

    async def _write(self, current: Current, now: Now) -> int | str | None:
        """The revision that is written, of the database's; None if it has forgotten the place."""
        try:
            written = await project(self._store, current)
            if written.is_written:
                return written.revision
            amended = await amend(self._store, current.key, now)
        except PenstockError as error:
            return error.message
        return None if amended is None else amended.revision

    async def _ask(self, statement: str, /, **asked: object) -> list[dict[str, Any]]:
        return await self._database.fetch(statement, asked)


async def partition_now(
    database: Database, dataset: str, *, generation: str, partition_key: str
) -> CurrentPartition | None:
    """What readers are to be told of a partition; None if it was never published."""
    asked = {"dataset": dataset, "generation": generation, "partition_key": partition_key}
    rows = await database.fetch("partition_now", asked)
    return _partition_of(rows[0], generation=generation) if rows else None


async def dataset_now(database: Database, dataset: str) -> CurrentDataset | None:
    """What readers are to be told of a dataset; None if it has no current generation."""
    rows = await database.fetch("dataset_now", {"dataset": dataset})
    return _dataset_of(rows[0]) if rows else None


def _partition_of(row: Mapping[str, Any], *, generation: str) -> CurrentPartition:
    return CurrentPartition(
        dataset=row["dataset"],
        generation=generation,
        partition_key=row["partition_key"] or None,
        start=row["start"],
        end=row["end"],
        revision=row["revision"],
        parts=msgspec.convert(row["parts"], tuple[CurrentPart, ...]),
    )


def _dataset_of(row: Mapping[str, Any]) -> CurrentDataset:
    return CurrentDataset(
        dataset=row["dataset"], generation=row["generation"], revision=row["revision"]
    )


ASKED_SECONDS: Final = 15.0
"""How long one request goes on."""


@dataclass(frozen=True, slots=True)
class RefreshPosition:
    """The partition that was looked at last."""

    generation: str
    partition_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshResult:
    """What one request has done."""

    looked: int
    written: int
    at: RefreshPosition | None
    """Where the next goes on; None if all is done."""


class ProjectionRefresher:
    """Compares the objects of a store with a database."""

    def __init__(
        self, database: Database, store: ObjectStore, *, clock: Clock | None = None
    ) -> None:
        self._database = database
        self._store = store
        self._clock = clock or SystemClock()

    async def refresh(
        self, name: str, *, uuid: str, after: RefreshPosition | None = None
    ) -> RefreshResult:
        """Go on with a dataset. Raises what the store or the database raises."""
        ends_at = self._clock.monotonic() + ASKED_SECONDS
        looked = written = 0
        while True:
            page = await self._page(uuid, after)
            looked, written = looked + len(page), written + await self._amend(name, uuid, page)
            if page:
                after = RefreshPosition(page[-1]["generation"], page[-1]["partition_key"])
            if len(page) < PAGE:
                break
            if self._clock.monotonic() >= ends_at:
                return RefreshResult(looked=looked, written=written, at=after)
        now = partial(dataset_now, self._database, uuid)
        last = await amend(self._store, dataset_current_key(name), now)
        written += last is not None and last.is_written
        return RefreshResult(looked=looked, written=written, at=None)

    async def _page(self, uuid: str, after: RefreshPosition | None) -> Sequence[Mapping[str, Any]]:
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
