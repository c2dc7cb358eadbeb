"""Workers and sources, as people look at them to operate an installation.

Each question is one short transaction. Workers are those of the last day, some at most. When a
source was last heard of is found by the indexes of cursors and intervals, and in the latest
thousands of events; what is older and has neither is not found, and said to be so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query

NEWS_MAX: Final = 5_000
"""How many of the latest events are looked at for news of sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker that was heard of in the last day."""

    name: str
    operators: Sequence[str]
    about: Mapping[str, Any]
    """What it has said of itself: its runtimes, how many tasks it takes, and more."""
    first_seen_at: datetime
    last_seen_at: datetime
    is_heard: bool
    """Whether it was heard of in the last minute, and has not left."""
    is_gone: bool
    """Whether it has said that it leaves."""
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """When a source was last heard of."""

    job: str
    heard_at: datetime | None
    lately: int
    """How many of the latest events are its, and of the last hour."""


class OperationViews:
    """The questions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def workers(self, *, limit: int) -> Sequence[Worker]:
        """Those that were heard of lately come first."""

        async def work(connection: Connection) -> Sequence[Worker]:
            found = await connection.execute(query("shown_workers"), {"limit": limit})
            return [Worker(**row) for row in await found.fetchall()]

        return await self._database.transact(work)

    async def news(self) -> Mapping[str, News]:
        """When each source of the DAG in force was last heard of, by job."""

        async def work(connection: Connection) -> Mapping[str, News]:
            found = await connection.execute(query("source_news"), {"window": NEWS_MAX})
            return {row["job"]: News(**row) for row in await found.fetchall()}

        return await self._database.transact(work)
