"""Forgets what a dataset was, because somebody says so: to erase what may not be kept.

History holds files against every other rule; this overrides it. What readers read now stays, and so
does a generation that is being built. Of a dataset all else goes: its snapshots, tags too, and the
generations that were left, with those of the other outputs of its job, unless something that is
live reads them. Of a partition every snapshot goes that shows it in another state than now, for a
snapshot is never changed, and what generations that were left have of it; if that is asked for,
also what readers read now, as retention drops partitions.

It is some transactions, each of which may be done again: first publications go, then a snapshot is
made without them, then those before are forgotten. Who dies in between has the rest to be asked for
again. Manifests for clients that plan themselves have bounds of what was removed: so all of them
are forgotten, the newest are written anew, and such clients are told of earlier snapshots no more.
No file is removed here: nothing names it any more, and the sweeper finds it. Called by the API.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.dispatcher.catalog.snapshots import Snapshots
from penstock.dispatcher.database.pool import Connection, Database, fetch_rows, query

_GENERATIONS_MAX: Final = 1000
_MAKES_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """What was forgotten."""

    snapshots: int
    publications: int
    """Partitions that are not published any more, in all generations."""
    generations: int
    """Generations that are dropped."""
    generations_left: int
    """Those that could not be, because something that is live reads them."""


class Purging:
    """Forgets."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._snapshots = Snapshots(database, pace_seconds=0)

    async def purge(
        self, dataset: str, *, keys: Sequence[str] | None, is_current: bool = False
    ) -> Purged | None:
        """Forget all that a dataset, or some partitions of it, was; `is_current` is for those.

        None if so much is published at the moment that it has to be asked for again.
        """
        publications = generations = left = 0
        if keys is None:
            generations, left = await self._database.transact(lambda one: _leave(one, dataset))
        else:
            publications = await self._database.transact(
                lambda one: _drop(one, dataset, keys, is_current=is_current)
            )
        if not await self._settle(dataset):
            return None

        async def forget(connection: Connection) -> int:
            asked = {"dataset": dataset, "keys": None if keys is None else list(keys)}
            await connection.execute(query("wait_for_table"), asked)
            forgotten = (await connection.execute(query("purge_snapshots"), asked)).rowcount
            for statement in ("purge_parts", "purge_lists", "purge_manifests"):
                await connection.execute(query(statement), asked)
            return forgotten

        return Purged(
            snapshots=await self._database.transact(forget),
            publications=publications,
            generations=generations,
            generations_left=left,
        )

    async def _settle(self, dataset: str) -> bool:
        """Have all that was committed until now be in a snapshot; whether that is so."""

        async def is_due(connection: Connection) -> bool:
            (found,) = await fetch_rows(connection, "is_snapshot_due", dataset=dataset, seconds=0)
            return bool(found["is_due"])

        for _ in range(_MAKES_MAX):
            await self._snapshots.make(dataset)
            if not await self._database.transact(is_due):
                return True
        return False


async def _leave(connection: Connection, dataset: str) -> tuple[int, int]:
    """Drop the generations that were left; how many, and how many stay."""
    await connection.execute(query("take_deployment_lock"))
    outputs = [
        row["dataset"] for row in await fetch_rows(connection, "purge_outputs", dataset=dataset)
    ]
    rows = await fetch_rows(
        connection,
        "generations_to_drop",
        datasets=outputs,
        generations=[1] * len(outputs),
        ages_ms=[None] * len(outputs),
        grace_seconds=0,
        limit=_GENERATIONS_MAX,
    )
    versions = [row["version"] for row in rows]
    await connection.execute(query("drop_generations"), {"versions": versions})
    (left,) = await fetch_rows(connection, "generations_left", dataset=dataset)
    return len(versions), left["generations"]


async def _drop(
    connection: Connection, dataset: str, keys: Sequence[str], *, is_current: bool
) -> int:
    """Drop partitions; of how many publications."""
    dropped = 0
    for row in await fetch_rows(
        connection, "purge_generations", dataset=dataset, is_current=is_current
    ):
        asked = {"dataset": dataset, "generation": row["generation"], "keys": list(keys)}
        await connection.execute(query("drop_partition_events"), asked)
        dropped += (await connection.execute(query("drop_partitions"), asked)).rowcount
    return dropped
