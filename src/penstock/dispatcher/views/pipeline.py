"""The DAG in force as people look at it: who reads what of whom, and what has ended lately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query

RECENT_MINUTES: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """An edge: a job reads a dataset that another writes."""

    reader: str
    input: str
    dataset: str
    writer: str
    is_trigger: bool
    reads: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Endings:
    """What has ended of a job in the last minutes; of very many, the latest."""

    job: str
    completed: int
    failed: int
    last_at: datetime


class PipelineViews:
    """The questions. Each is one short transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def readings(self) -> Sequence[Reading]:
        """All edges of the DAG in force."""

        async def work(connection: Connection) -> Sequence[Reading]:
            found = await connection.execute(query("edges_in_force"))
            return [Reading(**row) for row in await found.fetchall()]

        return await self._database.transact(work)

    async def endings(self) -> Mapping[str, Endings]:
        """What has ended lately, by job."""

        async def work(connection: Connection) -> Mapping[str, Endings]:
            found = await connection.execute(query("recent_endings"), {"minutes": RECENT_MINUTES})
            return {row["job"]: Endings(**row) for row in await found.fetchall()}

        return await self._database.transact(work)
