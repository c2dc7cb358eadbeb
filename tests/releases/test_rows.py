"""The rows of an installation that an earlier state of Penstock left: it goes on with today's code.

`rows/migration-19.sql` is what `pg_dump` said of the tables of one at migration 19, in the midst of
a backfill: tasks that ran, waited, were to be retried, were dead, and one of a paused job.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import psycopg

from penstock.dispatcher.database.migrations import migrate, migrations
from tests.integration.dispatcher.test_backfills import drain, look
from tests.integration.dispatcher.test_deployment import Pipeline
from tests.integration.dispatcher.world import World, Worlds

VERSION: Final = 19
ROWS: Final = Path(__file__).parent / "rows" / f"migration-{VERSION}.sql"
LONG: Final = 1e9
"""More seconds than lie between the rows and the time of the test."""
PUBLISHED: Final = "SELECT * FROM publication ORDER BY location"
STATUSES: Final = """
    SELECT j.name, t.status, count(*)::int FROM task t JOIN job j ON j.id = t.job_id
    GROUP BY 1, 2 ORDER BY 1, 2
"""


async def _opened(worlds: Worlds) -> str:
    """A database with these rows, as the earlier state had it."""
    dsn = await worlds.empty()
    await migrate(dsn, migrations()[:VERSION])
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        # Rows come in the order of their tables' names, and not in that of their making.
        await connection.execute(b"SET session_replication_role = replica")
        for table in ("reaper", "numbering"):
            await connection.execute(f"DELETE FROM {table}".encode())
        await connection.execute(ROWS.read_bytes())
    return dsn


def test_a_backfill_goes_on_after_the_upgrade(worlds: Worlds) -> None:
    async def story() -> None:
        dsn = await _opened(worlds)
        assert await migrate(dsn) == migrations()[VERSION:]
        async with worlds.world(dsn=dsn) as world:
            pipeline = Pipeline(world)
            before = await world.rows(PUBLISHED)
            assert await look(pipeline, 2) == ("running", 20, 11, 8)
            assert ("clean", "running", 3) in await _statuses(world)

            # Whoever ran them is gone, and their leases are over.
            reaped = await pipeline.tasks.reap(outage_seconds=LONG)
            assert len(reaped.reaped) == 4
            world.later(600)
            await drain(pipeline, "jobs:clean", "jobs:totals", "jobs:flaky", "jobs:slow")

            assert await look(pipeline, 2) == ("done", 20, 20, 0)
            assert await _statuses(world) == [
                ("clean", "completed", 32),
                ("dies", "dead", 1),
                ("dies", "queued", 1),
                ("flaky", "completed", 2),
                ("paused", "queued", 1),
                ("slow", "completed", 1),
                ("totals", "completed", 32),
            ]
            after = await world.rows(PUBLISHED)
            assert len(after) == 67
            assert [row for row in after if row in before] == before

    asyncio.run(story())


async def _statuses(world: World) -> list[tuple[str, str, int]]:
    return [tuple(row.values()) for row in await world.rows(STATUSES)]
