"""Makes tasks that rewrite the files of datasets, where a DAG says `maintain` and it is worth it.

The rule is the `maintain` of an output, in the DAG that is in force, for the generation that it
names if that is the one that readers read: nothing is rewritten that is being built, or that is
being replaced. A partition is due if nothing was published of it for a while (`after`), and if it
has many small files (`compact`), or several that are not clustered yet (`cluster`). A partition is
rewritten once at each of its revisions: its files are then as they can be.

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
from penstock.dispatcher.dag.units import byte_count, duration_ms
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.metrics.reading import take_turn
from penstock.dispatcher.tasks.lifecycle import create_tasks
from penstock.dispatcher.tasks.values import NewTask
from penstock.runtimes.base import MAINTAIN

_log = logging.getLogger(__name__)

PASS_SECONDS: Final = 10.0
ASKED_MAX: Final = 100
"""How many tasks are made when somebody asks."""
_TURN: Final = "maintain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
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


@dataclass(frozen=True, slots=True)
class Asked:
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

    async def maintain(self, rule: Rule) -> int | None:
        """Make the next task of a dataset; None if there is one, or nothing to do."""

        async def work(connection: Connection) -> int | None:
            await connection.execute(query("lock_maintenance"), {"name": rule.name})
            (found,) = await _rows(connection, "is_maintained", name=rule.name)
            if found["is_maintained"]:
                return None
            made = await create_tasks(connection, await _due(connection, rule))
            return made[0] if made else None

        task_id = await self._database.transact(work)
        if task_id is not None:
            _log.info("%s: task %d rewrites the files of a partition", rule.name, task_id)
        return task_id

    async def ask(self, name: str, *, partition_key: str | None) -> Asked | None:
        """Make tasks of a dataset, or of one partition; None if it is not maintained now."""

        async def work(connection: Connection) -> Asked | None:
            rules = [each for each in await _rules(connection) if each.name == name]
            if not rules:
                return None
            await connection.execute(query("lock_maintenance"), {"name": name})
            due = await _due(
                connection,
                rules[0],
                partition_key=partition_key,
                is_asked=True,
                limit=ASKED_MAX + 1,
            )
            made = await create_tasks(connection, due[:ASKED_MAX])
            return Asked(tuple(each for each in made if each is not None), len(due) <= ASKED_MAX)

        return await self._database.transact(work)


async def _rules(connection: Connection) -> tuple[Rule, ...]:
    return tuple(_rule(row) for row in await _rows(connection, "maintain_rules"))


async def _due(
    connection: Connection,
    rule: Rule,
    *,
    partition_key: str | None = None,
    is_asked: bool = False,
    limit: int = 1,
) -> Sequence[NewTask]:
    found = await _rows(
        connection,
        "due_for_maintenance",
        dataset=rule.dataset,
        generation=rule.generation,
        job=rule.job,
        files=rule.files,
        below=rule.below,
        is_clustered=bool(rule.cluster),
        after_ms=rule.after_ms,
        partition_key=partition_key,
        is_asked=is_asked,
        limit=limit,
    )
    return [_task(rule, row) for row in found]


def _rule(row: Mapping[str, Any]) -> Rule:
    said = row["maintain"]
    compact = said.get("compact")
    return Rule(
        dataset=row["dataset"],
        name=row["name"],
        job=row["job_id"],
        definition_id=row["definition_id"],
        generation=row["generation"],
        files=None if compact is None else compact["files"],
        below=None if compact is None else byte_count(compact["below"]),
        cluster=tuple(said.get("cluster") or ()),
        after_ms=duration_ms(said["after"]),
    )


def _task(rule: Rule, row: Mapping[str, Any]) -> NewTask:
    # Not where the partition of a task stands: it is no task of that partition to anybody.
    about = {
        "dataset": rule.name,
        "partition_key": row["partition_key"] or None,
        "start": row["start"],
        "end": row["end"],
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


async def _rows(connection: Connection, statement: str, /, **asked: object) -> list[dict[str, Any]]:
    return await (await connection.execute(query(statement), asked)).fetchall()
