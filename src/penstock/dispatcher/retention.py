"""Retention: what is removed because it is old, or because the DAG says how much is kept.

`RowPruner` removes old events, settled tasks, batches, workers and audit notes. Once an hour one
dispatcher makes a pass, in the order of ids, some thousand rows a transaction. Kept, however
old: - the latest event of every partition and range of every generation, and the highest cursor
of those
  without partitions: what is built anew is built of these. Of earlier updates it can then not be,
  and a job that appends is not cut over without somebody's word: see `deployment`;
- the events of what is being built, and the tasks of the jobs that build it: by those it is
  judged;
- an event as long as a task made of it waits, runs, or is dead and may still be replayed, or as
  long as a backfill is open that may read it;
- a task as long as one of its events is there. Otherwise a rollback would find an event without
  a task, and make it again. So the number of tasks that are kept grows with the partitions that
  there are, not with the time;
- a task of an open backfill; a dead one for `dead_days`; the last one of an always-on source.

Publications stay. An event that is sent again after its removal counts as new.

`PartitionExpirer` drops partitions and generations by the `keep` of an output in the current
DAG:

- A partition of the current generation goes if there are more than the count with a higher
  range,
  or, without ranges, that were published later; or if it was published longer ago than the age. Not
  while a task that reads it waits or runs or a backfill of a reader is open, and never what has no
  key, which is all there is.
- A generation that has left goes if there are more than the count with the current one, by when
  they left; or if it left longer ago than the age. Never the current one or one that is being
  built, or what one of those reads, or a task that waits or runs.

Dropping a partition removes its row and its events. Its revision goes on, in the table
`removed`: readers without Postgres are told that it is empty, a late task does not bring it back
(PUBLISH-4), and its files are swept when nobody can be reading them. A lock that publications share
keeps everybody from publishing in the generation meanwhile. A generation is marked first, under
the lock of the deployment, and then cleared in small steps; a rollback that needs it builds it
anew. All outputs of a job have the same generations: one goes when all of them allow it.

Both run in loops of every dispatcher; one dispatcher at a time makes a pass, in short
transactions. A crash ends a pass where it is, and the next one continues.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from penstock.dispatcher.database.pool import Connection, Database, fetch_rows, query
from penstock.dispatcher.metrics import take_turn
from penstock.dispatcher.tasks.batches import ID_DAYS
from penstock.kernel.errors import InvalidInput
from penstock.kernel.units import age_ms

_log = logging.getLogger(__name__)

DEAD_DAYS: Final = 90.0
PASS_SECONDS: Final = 3600.0
ROWS_MAX: Final = 2000
_BETWEEN_SECONDS: Final = 0.05
_TURN: Final = "retention"
_STEPS: Final = (
    *("forget_events", "forget_tasks", "forget_audit", "forget_queries"),
    "forget_batches",
)


@dataclass(frozen=True, slots=True)
class _Window:
    """What one statement has done."""

    reached: int
    """The number of the last row that it looked at."""
    is_more: bool
    gone: int


class RowPruner:
    """Removes what is older than so many days, dead tasks after others."""

    def __init__(
        self,
        database: Database,
        *,
        days: float,
        dead_days: float | None = None,
        rows_max: int = ROWS_MAX,
    ) -> None:
        if not 0 < days <= 36_500:
            raise InvalidInput(f"Retention is 0 to 36500 days, not {days:g}.")
        self._database = database
        self._days = days
        self._dead_days = max(days, DEAD_DAYS if dead_days is None else dead_days)
        self._rows_max = rows_max
        self._steps: list[str] = []
        """What is left to do of a pass; empty between passes."""
        self._after = 0
        self._gone: dict[str, int] = {}

    async def turn(self) -> float | None:
        """Look at some rows; the seconds until the next ones should be looked at."""
        if not self._steps:
            if not await take_turn(self._database, _TURN, seconds=PASS_SECONDS):
                return PASS_SECONDS / 4
            self._steps, self._after, self._gone = list(_STEPS), 0, {}
        step = self._steps[0]
        window = await self._database.transact(lambda connection: self._scan(connection, step))
        self._gone[step] = self._gone.get(step, 0) + window.gone
        self._after = window.reached
        if window.is_more:
            return _BETWEEN_SECONDS
        self._steps, self._after = self._steps[1:], 0
        if self._steps:
            return _BETWEEN_SECONDS
        await self._forget_workers()
        events, tasks = self._gone["forget_events"], self._gone["forget_tasks"]
        if events or tasks:
            _log.info("retention removed %d events and %d ended tasks", events, tasks)
        return PASS_SECONDS

    async def _scan(self, connection: Connection, step: str) -> _Window:
        asked = {
            "after": self._after,
            "limit": self._rows_max,
            "days": self._days,
            "dead_days": self._dead_days,
            "id_days": ID_DAYS + 1,
        }
        row = await (await connection.execute(query(step), asked)).fetchone()
        assert row is not None, "the statement has one row"
        return _Window(row["reached"] or self._after, bool(row["is_more"]), row["gone"])

    async def _forget_workers(self) -> None:
        async def work(connection: Connection) -> None:
            await connection.execute(query("forget_workers"), {"days": self._days})

        await self._database.transact(work)


_keep_log = logging.getLogger(__name__)

KEEP_PASS_SECONDS: Final = 600.0
KEEP_ROWS_MAX: Final = 1000
_KEEP_BETWEEN_SECONDS: Final = 0.05
_KEEP_TURN: Final = "keep"

_CLEARING: Final = ("clear_generation_tasks", "clear_generation_events", "clear_generation")

Step = Callable[[Connection], Awaitable[bool]]
"""One transaction; returns whether it should be done again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRule:
    """How much of a dataset is kept; None is no bound."""

    dataset: str
    name: str
    partitions: int | None
    age_ms: int | None
    generations: int | None


class PartitionExpirer:
    """The passes of one dispatcher."""

    def __init__(
        self,
        database: Database,
        *,
        grace_seconds: float,
        pass_seconds: float = KEEP_PASS_SECONDS,
        rows_max: int = KEEP_ROWS_MAX,
    ) -> None:
        self._database = database
        self._grace_seconds = grace_seconds
        self._pass_seconds = pass_seconds
        self._rows_max = rows_max
        self._steps: list[Step] = []
        """What is left of a pass; empty between passes."""

    async def turn(self) -> float | None:
        """Do one step of a pass; the seconds until the next."""
        if not self._steps:
            if not await take_turn(self._database, _KEEP_TURN, seconds=self._pass_seconds):
                return self._pass_seconds / 4
            rules = await self._database.transact(_rules)
            self._steps = [
                *(
                    partial(self._drop_partitions, rule)
                    for rule in rules
                    if rule.partitions is not None or rule.age_ms is not None
                ),
                partial(self._drop_generations, rules),
                self._clear,
            ]
        if not await self._database.transact(self._steps[0]):
            self._steps = self._steps[1:]
        return _KEEP_BETWEEN_SECONDS if self._steps else self._pass_seconds

    async def _drop_partitions(self, rule: KeepRule, connection: Connection) -> bool:
        found = await fetch_rows(connection, "hold_current", dataset=rule.dataset)
        if not found:
            return False
        asked = {"dataset": rule.dataset, "generation": found[0]["generation"]}
        # After the lock, so that all that is published is seen.
        rows = await fetch_rows(
            connection,
            "partitions_to_drop",
            **asked,
            partitions=rule.partitions,
            age_ms=rule.age_ms,
            limit=self._rows_max,
        )
        if not rows:
            return False
        asked["keys"] = [row["partition_key"] for row in rows]
        await connection.execute(query("drop_partition_events"), asked)
        await connection.execute(query("drop_partitions"), asked)
        _keep_log.info("%s: retention dropped %d partitions", rule.name, len(rows))
        return len(rows) == self._rows_max

    async def _drop_generations(self, rules: Sequence[KeepRule], connection: Connection) -> bool:
        asked: dict[str, Any] = {
            "datasets": [rule.dataset for rule in rules],
            "generations": [rule.generations for rule in rules],
            "ages_ms": [rule.age_ms for rule in rules],
            "grace_seconds": self._grace_seconds,
            "limit": self._rows_max,
        }
        # Mostly there is nothing, and nobody has to wait for that.
        if not rules or not await fetch_rows(connection, "generations_to_drop", **asked):
            return False
        await connection.execute(query("take_deployment_lock"))
        rows = await fetch_rows(connection, "generations_to_drop", **asked)
        versions = [row["version"] for row in rows]
        await connection.execute(query("drop_generations"), {"versions": versions})
        for version in versions:
            _keep_log.info("retention dropped generation %s", version)
        return False

    async def _clear(self, connection: Connection) -> bool:
        """Remove some of what is left of a generation that is dropped."""
        # A rollback that needs it comes before this, or after.
        await connection.execute(query("share_deployment_lock"))
        found = await fetch_rows(connection, "dropped_generation")
        if not found:
            return False
        asked = {
            "dataset": found[0]["dataset"],
            "generation": found[0]["generation"],
            "limit": self._rows_max,
        }
        for step in _CLEARING:
            if (await connection.execute(query(step), asked)).rowcount == self._rows_max:
                return True
        await connection.execute(query("clear_generation_schema"), asked)
        return True


async def _rules(connection: Connection) -> tuple[KeepRule, ...]:
    return tuple(_rule(row) for row in await fetch_rows(connection, "keep_rules"))


def _rule(row: Mapping[str, Any]) -> KeepRule:
    keep = row["keep"]
    return KeepRule(
        dataset=row["dataset"],
        name=row["name"],
        partitions=keep.get("partitions"),
        age_ms=None if keep.get("age") is None else age_ms(keep["age"]),
        generations=keep.get("generations"),
    )
