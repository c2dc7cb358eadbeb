"""Makes tasks that rewrite the files of datasets, where a DAG says `maintain` and it is worth it.

The rule is the `maintain` of an output, in the DAG that is in force, for the generation that it
names if that is the one that readers read: nothing is rewritten that is being built, or that is
being replaced. A partition is due if nothing was published of it for a while (`after`), and if it
has many small files (`compact`), or several that are not clustered yet (`cluster`). A partition is
rewritten once at each of its revisions: its files are then as they can be.

Of a partition that is appended to, a run of consecutive parts is due if its new files are many and
small; neither the parts that came lately count (`after`) nor do runs reach over the position of a
job that reads changes. All parts of a run are given to such a job together from then on, so it must
never be between them. Positions are where claims have found the latest revision, so a run is chosen
while no claim gives changes (`hold_runs`): every later claim is up to the run's end or further.
That is a transaction of its own, which holds nothing else and makes no task: who waits for it, as
claims do, may hold anything.

Of a dataset there is one such task at a time, which keeps the rest of the job's work going and
bounds how much is written twice; that is asked under a lock of the dataset. Its key names the
edition that it is for, so two dispatchers, or one that crashed and comes back, make one task. One
that is dead is not made again for that edition: `penstock task replay` tries it again, and so does
the next revision. A task that waits while its partition is published anew finds that when it is
claimed, and does nothing. What a task does, and how its files are put in place:
`penstock.dispatcher.tasks.rewrites`.

Once in a while one dispatcher, of any number, makes a pass, in a short transaction for each
dataset. People may ask for it too: then neither the time counts nor how many and how small the
files are, and there may be `ASKED_MAX` tasks at a time. Called by a loop of the dispatcher, and by
the API.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.database.pool import Connection, Database, fetch_rows, query
from penstock.dispatcher.metrics import take_turn
from penstock.dispatcher.tasks.model import NewTask
from penstock.dispatcher.tasks.rows import create_tasks
from penstock.kernel.units import byte_count, duration_ms
from penstock.runtimes.base import MAINTAIN

_log = logging.getLogger(__name__)

PASS_SECONDS: Final = 30.0
ASKED_MAX: Final = 100
"""How many tasks are made when somebody asks."""
RUN_PARTS_MAX: Final = 1_000
RUN_BYTES_MAX: Final = 10 * 2**30
"""How much of what is appended is put together by one task."""
_TURN: Final = "maintain"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintainRule:
    """When the partitions of a dataset are rewritten, and how."""

    dataset: str
    name: str
    job: int
    definition_id: int
    generation: str
    files: int | None
    """How many files are many; None if they are not put together."""
    below: int | None
    """How many bytes a file has on average that is small."""
    cluster: tuple[str, ...]
    after_ms: int
    is_appended: bool = False


@dataclass(frozen=True, slots=True)
class _Asking:
    """What is looked for: what a pass is to do next, or all that somebody asks for."""

    partition_key: str | None = None
    is_asked: bool = False
    limit: int = 1


_PASS: Final = _Asking()


@dataclass(frozen=True, slots=True)
class RequestedRewrites:
    """The tasks that were made because somebody asked, and whether that is all there is to do."""

    tasks: tuple[int, ...]
    is_all: bool


class Maintainer:
    """The passes of one dispatcher, and what people ask for."""

    def __init__(self, database: Database, *, pass_seconds: float = PASS_SECONDS) -> None:
        self._database = database
        self._pass_seconds = pass_seconds

    async def turn(self) -> float | None:
        """Make a pass, if it is ours to make; the seconds until the next."""
        if await take_turn(self._database, _TURN, seconds=self._pass_seconds):
            for rule in await self._database.transact(_rules):
                await self.maintain(rule)
        return self._pass_seconds

    async def maintain(self, rule: MaintainRule) -> int | None:
        """Make the next task of a dataset; None if there is one, or nothing to do."""
        runs = await self._runs(rule) if rule.is_appended else ()

        async def work(connection: Connection) -> int | None:
            await connection.execute(query("lock_maintenance"), {"name": rule.name})
            (found,) = await fetch_rows(connection, "is_maintained", name=rule.name)
            if found["is_maintained"]:
                return None
            due = runs if rule.is_appended else await _due(connection, rule)
            made = await create_tasks(connection, due)
            return made[0] if made else None

        task_id = await self._database.transact(work)
        if task_id is not None:
            _log.info("%s: created maintenance task %d", rule.name, task_id)
        return task_id

    async def ask(self, name: str, *, partition_key: str | None) -> RequestedRewrites | None:
        """Make tasks of a dataset, or of one partition; None if it is not maintained now."""

        rules = [each for each in await self._database.transact(_rules) if each.name == name]
        if not rules:
            return None
        rule, asked = rules[0], _Asking(partition_key, is_asked=True, limit=ASKED_MAX + 1)
        runs = await self._runs(rule, asked) if rule.is_appended else ()

        async def work(connection: Connection) -> RequestedRewrites:
            await connection.execute(query("lock_maintenance"), {"name": name})
            due = runs if rule.is_appended else await _due(connection, rule, asked)
            made = await create_tasks(connection, due[:ASKED_MAX])
            return RequestedRewrites(
                tuple(each for each in made if each is not None), len(due) <= ASKED_MAX
            )

        return await self._database.transact(work)

    async def _runs(self, rule: MaintainRule, asking: _Asking = _PASS) -> Sequence[NewTask]:
        """Tasks for runs of parts; they are chosen while nobody is given changes."""

        async def look(connection: Connection) -> Sequence[NewTask]:
            return await _due(connection, rule, asking)

        async def choose(connection: Connection) -> Sequence[NewTask]:
            # A statement of its own: the next sees all that was given before.
            await connection.execute(query("hold_runs"), {"generation": rule.generation})
            return await _due(connection, rule, asking)

        if not await self._database.transact(look):
            return ()
        return await self._database.transact(choose)


async def _rules(connection: Connection) -> tuple[MaintainRule, ...]:
    return tuple(_rule(row) for row in await fetch_rows(connection, "maintain_rules"))


async def _due(
    connection: Connection, rule: MaintainRule, asking: _Asking = _PASS
) -> Sequence[NewTask]:
    bounds = {"parts_max": RUN_PARTS_MAX, "bytes_max": RUN_BYTES_MAX}
    found = await fetch_rows(
        connection,
        "runs_to_compact" if rule.is_appended else "due_for_maintenance",
        **(bounds if rule.is_appended else {"is_clustered": bool(rule.cluster)}),
        dataset=rule.dataset,
        generation=rule.generation,
        job=rule.job,
        files=rule.files,
        below=rule.below,
        after_ms=rule.after_ms,
        partition_key=asking.partition_key,
        is_asked=asking.is_asked,
        limit=asking.limit,
    )
    return [_task(rule, row) for row in found]


def _rule(row: Mapping[str, Any]) -> MaintainRule:
    said = row["maintain"]
    compact = said.get("compact")
    return MaintainRule(
        dataset=row["dataset"],
        name=row["name"],
        job=row["job_id"],
        definition_id=row["definition_id"],
        generation=row["generation"],
        files=None if compact is None else compact["files"],
        below=None if compact is None else byte_count(compact["below"]),
        cluster=tuple(said.get("cluster") or ()),
        after_ms=duration_ms(said["after"]),
        is_appended=row["is_appended"],
    )


def _task(rule: MaintainRule, row: Mapping[str, Any]) -> NewTask:
    # Not where the partition of a task stands: it is no task of that partition to anybody.
    about = {
        "dataset": rule.name,
        "partition_key": row["partition_key"] or None,
        "start": row["start"],
        "end": row["end"],
        "first": row.get("first_revision"),
        "revision": row["revision"],
        "cluster": list(rule.cluster) or None,
    }
    return NewTask(
        definition_id=rule.definition_id,
        generation=rule.generation,
        dedupe_key=row["dedupe_key"],
        payload={MAINTAIN: {name: value for name, value in about.items() if value is not None}},
        priority=Priority.BULK,
    )
