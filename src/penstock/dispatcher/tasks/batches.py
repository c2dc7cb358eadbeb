"""Batches: tasks that are claimed together because their job says so, to be run as one.

A claim picks tasks, each of which takes a place of its worker. Where the job of a picked task has
`coalesce: N`, more of the same definition and generation are picked along with it, up to N for each
place, and divided into as few batches as that takes, of about the same size. Only partitions are
put together, and no batch has the same partition twice: what is made of a batch is told apart by
it. A task that was attempted before runs by itself, so that one that breaks what it runs in costs
its neighbours one attempt and not all of theirs.

A batch is only a word in the answer to a claim. Every task of it has an attempt, a lease and an end
of its own, and nothing is stored of it. Called by `penstock.dispatcher.tasks.lifecycle`, between
the statement that picks and the one that begins the attempts, in their transaction. The second
statement that this takes runs only if the job of a picked task coalesces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.database.queries import query


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """A task that this transaction holds, as `pick_next` gives it."""

    id: int
    job_id: int
    definition_id: int
    generation: str
    partition_key: str | None
    is_fresh: bool
    """Whether it has had no attempt."""
    batch_max: int
    is_limited: bool = False
    """Whether a limit of its job or its operator says how many may run."""

    @property
    def is_joined(self) -> bool:
        """Whether it may be run as one with others."""
        return self.batch_max > 1 and self.is_fresh and self.partition_key is not None


@dataclass(frozen=True, slots=True)
class Member:
    """A task of a batch."""

    id: int
    partition_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claiming:
    """Whose tasks are claimed, and how many at most."""

    operator: str
    priority: Priority
    tasks_max: int


async def filled(
    connection: Connection, picked: Sequence[Picked], claiming: Claiming
) -> Sequence[Sequence[int]]:
    """What was picked, and more of it, in batches; a task by itself is a batch of one."""
    if not any(each.is_joined for each in picked):
        return [[each.id] for each in picked]
    groups: dict[tuple[int, str], list[Picked]] = {}
    for each in picked:
        if each.is_joined:
            groups.setdefault((each.definition_id, each.generation), []).append(each)
    filling = _Filling(connection, claiming, picked)
    found: dict[int, Sequence[Sequence[int]]] = {}
    for group in groups.values():
        batches = divided(await filling.members(group), most=group[0].batch_max)
        found[group[0].id] = [[each.id for each in batch] for batch in batches]
    alone: list[Sequence[Sequence[int]]] = [
        found.get(each.id, ()) if each.is_joined else [[each.id]] for each in picked
    ]
    return [batch for batches in alone for batch in batches]


class _Filling:
    """Picks more, and keeps count of what was picked: none of it is running yet."""

    def __init__(
        self, connection: Connection, claiming: Claiming, picked: Sequence[Picked]
    ) -> None:
        self._connection = connection
        self._claiming = claiming
        self._count = len(picked)
        self._count_of_job = Counter(each.job_id for each in picked)

    async def members(self, group: Sequence[Picked]) -> list[Member]:
        """These, and as many more as fit in their places."""
        first = group[0]
        members = [Member(each.id, each.partition_key or "") for each in group]
        wanted = min(len(group) * (first.batch_max - 1), self._claiming.tasks_max - self._count)
        if wanted <= 0:
            return members
        asked: dict[str, Any] = {
            "operator": self._claiming.operator,
            "priority": self._claiming.priority.value,
            "job": first.job_id,
            "definition": first.definition_id,
            "generation": first.generation,
            "keys": [each.partition_key for each in members],
            "limit": wanted,
            "picked": self._count,
            "picked_of_job": self._count_of_job[first.job_id],
        }
        found = await self._connection.execute(query("pick_more"), asked)
        more: dict[str, Member] = {}
        for row in await found.fetchall():
            # A later update of the same partition is left for another claim.
            more.setdefault(row["partition_key"], Member(row["id"], row["partition_key"]))
        self._count += len(more)
        self._count_of_job[first.job_id] += len(more)
        return [*members, *more.values()]


def divided(members: Sequence[Member], *, most: int) -> Sequence[Sequence[Member]]:
    """The members in as few batches as they need, of about the same size.

    A batch has `most` members at most, and no partition twice.
    """
    by_key: dict[str, list[Member]] = {}
    for each in members:
        by_key.setdefault(each.partition_key, []).append(each)
    count = max(-(-len(members) // most), max((len(each) for each in by_key.values()), default=0))
    # Those of one partition are neighbours here, and so are dealt to different batches.
    dealt = [each for same in by_key.values() for each in same]
    return [dealt[first::count] for first in range(count)]


def batch_names(batches: Iterable[Sequence[int]], attempts: dict[int, int]) -> dict[int, str]:
    """The name of each task's batch; tasks that run by themselves have none.

    A batch is named after the first attempt in it, which no other batch ever has.
    """
    return {
        each: f"{batch[0]}-{attempts[batch[0]]}"
        for batch in batches
        if len(batch) > 1
        for each in batch
    }
