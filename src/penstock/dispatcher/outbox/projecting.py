"""The carrier of projections: has `current.json` say what is published.

Triggers of the schema write the rows of the outbox, in the transactions that move publications: one
for a generation, however many partitions have moved, and one for a dataset whose current generation
has. What there is to write follows from the tables: every partition whose revision is higher than
what is known to be written. So a row is only the word that there is something, rows may be lost,
merged or doubled, and any number of relays may carry them out at once: `datasets.projection` never
lets a revision go back. Where an object is found to be ahead of what was to be written, another
relay was faster, or the database was brought back to an earlier time: the database is asked again,
and the object amended if it says something else.

What was written is confirmed afterwards, and only by that do folders that have left publication
become free to be swept. A crash in between writes the same once more. One partition that cannot be
written is told as the failure of the row, after all others were tried. The new generation of a
dataset is named only after all that is published of it was written, so that readers find it whole.

What one delivery cannot do in its time is left to a row of its own. Called by the relay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from penstock.datasets.projection import (
    Current,
    CurrentDataset,
    CurrentPart,
    CurrentPartition,
    amend,
    project,
)
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.outbox.values import Row
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

    async def carry(self, rows: Sequence[Row]) -> Mapping[int, str]:
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
                await self._do("project_again", dataset=dataset, generation=None)
                return ""
            now = partial(dataset_now, self._database, dataset)
            if isinstance(outcome := await self._write(_dataset_of(row), now), str):
                return outcome
        await self._do("confirm_dataset", dataset=dataset, revision=row["revision"])
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
            await self._do(
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
        await self._do("project_again", dataset=dataset, generation=generation)
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
        return await _rows(self._database, statement, **asked)

    async def _do(self, statement: str, /, **asked: object) -> None:
        async def work(connection: Connection) -> None:
            # What is forgotten with the server is found and written down again.
            await connection.execute(query("relax_commit"))
            await connection.execute(query(statement), asked)

        await self._database.transact(work)


async def partition_now(
    database: Database, dataset: str, *, generation: str, partition_key: str
) -> CurrentPartition | None:
    """What readers are to be told of a partition; None if it was never published."""
    asked = {"dataset": dataset, "generation": generation, "partition_key": partition_key}
    rows = await _rows(database, "partition_now", **asked)
    return _partition_of(rows[0], generation=generation) if rows else None


async def dataset_now(database: Database, dataset: str) -> CurrentDataset | None:
    """What readers are to be told of a dataset; None if it has no current generation."""
    rows = await _rows(database, "dataset_now", dataset=dataset)
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


async def _rows(database: Database, statement: str, /, **asked: object) -> list[dict[str, Any]]:
    async def work(connection: Connection) -> list[dict[str, Any]]:
        return await (await connection.execute(query(statement), asked)).fetchall()

    return await database.transact(work)
