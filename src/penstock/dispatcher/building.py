"""Cuts over what was built: the last step of a change of the DAG.

A generation that is being built becomes the current one when its rebuild is over, and those of all
that it is built of, with all that they have led to, also what was held until a queue had room
(`penstock_has_caught_up` in the schema); and it has all that the current one has: every partition,
and of those that are appended to every part. `Deployment.cut_over` decides the last, under its
locks; what was published long before them is looked at before they are taken. This looks for those
that may be ready, downstream first: the earlier generation of a job is fed by the earlier
generations of its inputs, so those are served until it is not needed any more. A job is therefore
not cut over while a job downstream of it is being built. One that is never covered (a task is dead,
the change makes fewer partitions, or what was appended cannot be made again) stays as it is,
visibly, and so does what is built of it, until somebody replays the task, cancels what is in the
way, keeps what there was or forces the cut-over.

Any number of dispatchers may look at once; a crash leaves a cut-over done or not done. Called by a
loop in every dispatcher. What is not ready costs a look, and no lock.
"""

from __future__ import annotations

from typing import Any, Final

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.deployment.moves import Deployment
from penstock.dispatcher.deployment.values import CutOver

_ROUNDS_MAX: Final = 1000
_BUILDING_SECONDS: Final = 1.0
"""How soon to look again while something is being built."""
_LACKING_SECONDS: Final = 5.0
"""How soon to look again at what is built, and lacks something: every look compares all of it."""


class Builder:
    """Looks for generations that are built, and cuts them over."""

    def __init__(self, database: Database, deployment: Deployment) -> None:
        self._database = database
        self._deployment = deployment

    async def turn(self) -> float | None:
        """Cut over all that is ready, each after what is downstream of it."""
        for _ in range(_ROUNDS_MAX):
            rows = await self._database.transact(_building)
            if not rows:
                return None
            ready = [row for row in rows if row["is_last"] and row["is_ready"]]
            done = [await self._try(row) for row in ready]
            if not any(done):
                return _LACKING_SECONDS if ready else _BUILDING_SECONDS
        return 0.0

    async def _try(self, row: dict[str, Any]) -> bool:
        judged_at = await self._deployment.judge(row["version"])
        if judged_at is None:
            return False
        found = await self._deployment.cut_over(
            row["dataset"], version=row["version"], judged_at=judged_at
        )
        return found is CutOver.DONE


async def _building(connection: Connection) -> list[dict[str, Any]]:
    return await (await connection.execute(query("building_jobs"))).fetchall()
