"""Drops what a DAG says is not to be kept: partitions and generations, by count or by age.

The rule is the `keep` of an output, in the DAG that is in force; without one all is kept.

- A partition of the current generation goes if there are more than the count with a higher range,
  or, without ranges, that were published later; or if it was published longer ago than the age. Not
  while a task that reads it waits or runs or a backfill of a reader is open, and never what has
  no key, which is all there is.
- A generation that has left goes if there are more than the count with the current one, by when
  they left; or if it left longer ago than the age. Never the current one or one that is being
  built, or what one of those reads, or a task that waits or runs.

A partition is dropped by removing its row and the events that tell of it. Its revision goes on, in
the table `removed`: readers without Postgres are told that it is empty, a late task of before does
not bring it back, and its files are swept when nobody can be reading them. Nobody publishes in the
generation meanwhile, by a lock that publications share.

A generation is marked first, under the lock of the deployment, and then cleared bit by bit: its
tasks, its events, its partitions. If a rollback needs it again it is built anew, at whatever point
that was. All outputs of a job have the same generations: one goes when all of them allow it.

Once in a while one dispatcher, of any number, makes a pass in short transactions. A crash ends it
where it is, and the next goes on. Called by a loop of the dispatcher.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from penstock.dispatcher.dag.units import age_ms
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.metrics.reading import take_turn

_log = logging.getLogger(__name__)

PASS_SECONDS: Final = 600.0
ROWS_MAX: Final = 1000
GRACE_SECONDS: Final = 86_400.0
_BETWEEN_SECONDS: Final = 0.05
_TURN: Final = "keep"

_CLEARING: Final = ("clear_generation_tasks", "clear_generation_events", "clear_generation")

Step = Callable[[Connection], Awaitable[bool]]
"""One transaction; returns whether it should be done again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How much of a dataset is kept; None is no bound."""

    dataset: str
    name: str
    partitions: int | None
    age_ms: int | None
    generations: int | None


class Keeping:
    """The passes of one dispatcher."""

    def __init__(
        self,
        database: Database,
        *,
        grace_seconds: float = GRACE_SECONDS,
        pass_seconds: float = PASS_SECONDS,
        rows_max: int = ROWS_MAX,
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
            if not await take_turn(self._database, _TURN, seconds=self._pass_seconds):
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
        return _BETWEEN_SECONDS if self._steps else self._pass_seconds

    async def _drop_partitions(self, rule: Rule, connection: Connection) -> bool:
        found = await _rows(connection, "hold_current", dataset=rule.dataset)
        if not found:
            return False
        asked = {"dataset": rule.dataset, "generation": found[0]["generation"]}
        # After the lock, so that all that is published is seen.
        rows = await _rows(
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
        _log.info("%s: %d partitions were dropped", rule.name, len(rows))
        return len(rows) == self._rows_max

    async def _drop_generations(self, rules: Sequence[Rule], connection: Connection) -> bool:
        asked: dict[str, Any] = {
            "datasets": [rule.dataset for rule in rules],
            "generations": [rule.generations for rule in rules],
            "ages_ms": [rule.age_ms for rule in rules],
            "grace_seconds": self._grace_seconds,
            "limit": self._rows_max,
        }
        # Mostly there is nothing, and nobody has to wait for that.
        if not rules or not await _rows(connection, "generations_to_drop", **asked):
            return False
        await connection.execute(query("take_deployment_lock"))
        rows = await _rows(connection, "generations_to_drop", **asked)
        versions = [row["version"] for row in rows]
        await connection.execute(query("drop_generations"), {"versions": versions})
        for version in versions:
            _log.info("the generation %s is dropped", version)
        return False

    async def _clear(self, connection: Connection) -> bool:
        """Remove some of what is left of a generation that is dropped."""
        # A rollback that needs it comes before this, or after.
        await connection.execute(query("share_deployment_lock"))
        found = await _rows(connection, "dropped_generation")
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


async def _rules(connection: Connection) -> tuple[Rule, ...]:
    return tuple(_rule(row) for row in await _rows(connection, "keep_rules"))


def _rule(row: Mapping[str, Any]) -> Rule:
    keep = row["keep"]
    return Rule(
        dataset=row["dataset"],
        name=row["name"],
        partitions=keep.get("partitions"),
        age_ms=None if keep.get("age") is None else age_ms(keep["age"]),
        generations=keep.get("generations"),
    )


async def _rows(connection: Connection, statement: str, /, **asked: object) -> list[dict[str, Any]]:
    return await (await connection.execute(query(statement), asked)).fetchall()
