"""What is asked of datasets as files: everything about one, and snapshots of what is published.

Each question is one short transaction and its answer what goes over HTTP. A snapshot is one
statement, so it is of one moment, whatever is published or cut over meanwhile. Called by the
dispatcher's API.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.wire.datasets import (
    SNAPSHOT_PARTS_MAX,
    ColumnAnswer,
    DatasetDetail,
    GenerationDetail,
    KeepAnswer,
    MaintainedAnswer,
    SnapshotAnswer,
    SnapshotPart,
)


class DatasetViews:
    """The questions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def show(self, name: str) -> DatasetDetail | None:
        """Everything about a dataset; None if there is none of this name."""

        async def work(connection: Connection) -> DatasetDetail | None:
            found = await _rows(connection, "show_dataset", name=name)
            if not found:
                return None
            row = found[0]
            generations = await _rows(connection, "show_generations", dataset=row["uuid"])
            keep, maintain = row.pop("keep"), row.pop("maintain")
            return DatasetDetail(
                **row,
                keep=None if keep is None else msgspec.convert(keep, KeepAnswer),
                generations=msgspec.convert(generations, list[GenerationDetail]),
                maintain=None if maintain is None else msgspec.convert(maintain, MaintainedAnswer),
            )

        return await self._database.transact(work)

    async def exists(self, name: str) -> bool:
        """Whether there is a dataset of this name."""

        async def work(connection: Connection) -> bool:
            return bool(await _rows(connection, "find_generation", name=name, generation=None))

        return await self._database.transact(work)

    async def snapshot(
        self, name: str, *, generation: str | None, partition_key: str | None
    ) -> SnapshotAnswer | None:
        """All that is published; None if there is no such dataset or generation.

        Has one part more than it may have if there are more.
        """

        async def work(connection: Connection) -> SnapshotAnswer | None:
            found = await _rows(connection, "find_generation", name=name, generation=generation)
            if not found or found[0]["generation"] is None:
                return None
            place = found[0]
            rows = await _rows(
                connection,
                "snapshot",
                **place,
                partition_key=partition_key,
                limit=SNAPSHOT_PARTS_MAX + 1,
            )
            found = await _rows(connection, "columns_of_generation", **place)
            columns = found[0]["columns"] if found else []
            return SnapshotAnswer(
                dataset=name,
                generation=place["generation"],
                columns=msgspec.convert(columns, list[ColumnAnswer]),
                parts=msgspec.convert(rows, list[SnapshotPart]),
            )

        return await self._database.transact(work)


async def _rows(connection: Connection, statement: str, /, **asked: object) -> list[dict[str, Any]]:
    return await (await connection.execute(query(statement), asked)).fetchall()
