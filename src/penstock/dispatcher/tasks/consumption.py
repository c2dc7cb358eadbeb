"""Consumption of changes (`read: changes`): a task is given what its job has not consumed yet.

What a generation of a job has consumed of an input is a revision of each partition, in
`consumed`. A claim gives what is later: of a partition that is replaced the whole of it, of one
that is appended to the parts of later revisions. It writes down what it has given, in
`consumption`, and moves nothing. The transaction that completes the attempt moves the positions
to there.

| what happens | what is consumed |
|---|---|
| an attempt fails, is handed back, or its lease is over | nothing: the next is given it again |
| it completes, and its outputs are published | what it was given, in that transaction |
| it completes, and a later task had published its partition | nothing: its outputs do not count |
| somebody dies before the commit, or the answer is lost | nothing; or all, as it was committed |
| two attempts were given the same | by the first that completes; the other is refused |
| a partition is removed before it was read | it is counted as missed, by the next task, once |
| somebody's backfill | it is given everything, and consumes it |
| a new generation, of the job or of the input | nothing yet |

Invariants:
- Positions are revisions, which are given under the lock of the partition, and never times or
  numbers of a sequence: what is committed later has a later one (PUBLISH-9).
- Parts that are put together (`penstock.dispatcher.tasks.rewrites`) are given together, so no
  position is ever between them: which ones they are is not decided while changes are given.
- A job that reads changes runs one task at a time (`max_concurrency: 1`, which the DAG sees
  to), so
  two attempts have the same only if that limit was another meanwhile. Then the positions decide:
  they have to be where the claim has found them, under a lock of the job's consumers. Who is
  refused stops reporting, and its task is tried again when the lease is over.

Called by `lifecycle` when attempts begin, and by `completion` when they end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from penstock.dispatcher.dag.model import ReadMode
from penstock.dispatcher.database.pool import Connection, fetch_rows, query
from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    ClaimedTask,
    Completion,
    Fence,
    PublishOutcome,
)
from penstock.protocol.base import TaskStatus

OVERTAKEN: Final = "Another task has already consumed changes that were assigned to this attempt."


async def with_changes(
    connection: Connection, claimed: Sequence[ClaimedTask]
) -> tuple[ClaimedTask, ...]:
    """Attempts that are about to begin, with what there is to read of their changing inputs.

    Of those that run, whose claim is repeated, only the ones that have been given just that: what
    they complete consumes what is noted, whoever has read it.
    """
    reading = [each.task_id for each in claimed if _reads_changes(each.definition)]
    if not reading:
        return tuple(claimed)
    given: dict[int, dict[str, dict[str, Any]]] = {}
    # A statement of its own: the next sees every part that was put together with others so far.
    await fetch_rows(connection, "hold_positions", tasks=reading)
    moved: set[int] = set()
    for row in await fetch_rows(connection, "give_changes", tasks=reading):
        given.setdefault(row["task_id"], {})[row["input"]] = _given(row)
        if not row["is_same"]:
            moved.add(row["task_id"])
    return tuple(
        replace(each, inputs=_merged(each.inputs, given[each.task_id]))
        if each.task_id in given
        else each
        for each in claimed
        if each.task_id not in moved
    )


async def refuse_overtaken(
    connection: Connection, completions: Sequence[Completion]
) -> Mapping[int, str]:
    """Those whose changes were consumed by others since; the positions of all others are held."""
    if not completions:
        return {}
    asked = _fences(each.fence for each in completions)
    if not await fetch_rows(connection, "hold_consumers", **asked):
        return {}
    # A statement of its own, which sees what was consumed until the locks were given.
    rows = await fetch_rows(connection, "overtaken", **asked)
    return {row["task_id"]: OVERTAKEN for row in rows}


async def consume(
    connection: Connection, completions: Sequence[Completion], ended: Mapping[int, AttemptEnd]
) -> None:
    """Move positions to what these have read, of those that are completed and count."""
    done = [
        each.fence
        for each in completions
        if (end := ended.get(each.fence.task_id)) is not None
        and end.status is TaskStatus.SUCCEEDED
        and all(one.outcome is not PublishOutcome.SUPERSEDED for one in end.published)
    ]
    if done:
        await connection.execute(query("consume"), _fences(done))


def _reads_changes(definition: Mapping[str, Any]) -> bool:
    return any(
        isinstance(each, Mapping) and each.get("read") == ReadMode.CHANGES
        for each in definition.get("inputs") or ()
    )


def _given(row: Mapping[str, Any]) -> dict[str, Any]:
    parts = row["parts"]
    found = {"parts": parts, "missed": row["missed"]}
    if not parts:
        return {**found, "columns": row["columns"]}
    if len(parts) == 1:
        return {**found, "location": parts[0]["location"], "revision": parts[0]["revision"]}
    return found


def _merged(
    inputs: Mapping[str, Mapping[str, Any]], given: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    return {name: {**each, **given.get(name, {})} for name, each in inputs.items()}


def _fences(fences: Iterable[Fence]) -> dict[str, list[int]]:
    held = list(fences)
    return {
        "tasks": [each.task_id for each in held],
        "attempts": [each.attempt for each in held],
    }
