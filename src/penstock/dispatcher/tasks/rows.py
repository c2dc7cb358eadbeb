"""What the operations of the task lifecycle share: rows read as values, refusals, wake-ups.

Called by `lifecycle`, `completion` and others that touch tasks, always inside their
transactions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec
from psycopg.types.json import Jsonb

from penstock.dispatcher.database.pool import Connection, fetch_rows, query
from penstock.dispatcher.tasks.model import Fence, NewTask, Refusal, TaskRefusalReason, TaskSnapshot
from penstock.kernel.errors import InvalidInput
from penstock.protocol.base import TaskStatus
from penstock.runtimes.base import PROGRESS_BYTES_MAX, progress_fault

KEY_BYTES_MAX: Final = 1000
_ROWS_MAX: Final = 5_000
REASON_CHARACTERS_MAX: Final = 10_000
SAYING_BYTES_MAX: Final = PROGRESS_BYTES_MAX
"""How much JSON an attempt may say of itself, as progress and as metrics."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task's state, and what else keeps it from being claimed."""

    state: TaskSnapshot
    is_early: bool
    is_paused: bool


async def task_states(connection: Connection, task_ids: Sequence[int]) -> Mapping[int, TaskRow]:
    """What these tasks are now; those that are not known are left out."""
    if not task_ids:
        return {}
    found = await connection.execute(query("task_states"), {"tasks": list(task_ids)})
    return {
        row["task_id"]: TaskRow(
            is_early=row.pop("is_early"),
            is_paused=row.pop("is_paused"),
            state=TaskSnapshot(**{**row, "status": TaskStatus(row["status"])}),
        )
        for row in await found.fetchall()
    }


def refusal(task_id: int, row: TaskRow | None, *, claiming: bool = False) -> Refusal:
    """Why a call about this task was refused. A worker's call about its attempt is stale."""
    if row is None:
        return Refusal(task_id, TaskRefusalReason.UNKNOWN, None)
    match row.state.status:
        case TaskStatus.SUCCEEDED | TaskStatus.FAILED | TaskStatus.CANCELLED:
            why = TaskRefusalReason.OVER
        case _ if not claiming:
            why = TaskRefusalReason.STALE
        case TaskStatus.RUNNING:
            why = TaskRefusalReason.RUNNING
        case _ if row.is_early:
            why = TaskRefusalReason.NOT_DUE
        case _ if row.is_paused:
            why = TaskRefusalReason.PAUSED
        case _:
            why = TaskRefusalReason.FULL
    return Refusal(task_id, why, row.state)


async def create_tasks(connection: Connection, new: Sequence[NewTask]) -> tuple[int | None, ...]:
    """Make tasks and their wake-ups inside the caller's transaction, as routing does.

    None stands where an equal task was there already. Equal tasks of one call are one task.
    """
    ids: list[int | None] = []
    for first in range(0, len(new), _ROWS_MAX):
        some = new[first : first + _ROWS_MAX]
        if any(len(each.dedupe_key.encode()) > KEY_BYTES_MAX for each in some):
            raise InvalidInput(f"The key of a task has {KEY_BYTES_MAX} bytes at most.")
        asked = [{**asdict(each), "place": place} for place, each in enumerate(some)]
        found = await connection.execute(query("create_tasks"), {"tasks": Jsonb(asked)})
        for row in await found.fetchall():
            if not row["is_known"]:
                number = some[row["place"]].definition_id
                raise InvalidInput(f"There is no definition {number} of a job.")
            ids.append(row["id"])
    await announce(connection, [each for each in ids if each is not None])
    return tuple(ids)


async def announce(connection: Connection, task_ids: Iterable[int]) -> None:
    """Announce tasks that have become claimable, or will be when they are due."""
    if tasks := list(task_ids):
        await wake(connection, "announce", tasks=tasks)


async def wake(
    connection: Connection, statement: str, **asked: object
) -> Sequence[Mapping[str, Any]]:
    """Announce what a statement finds that may begin: after the commit where somebody does that,
    else by rows of the outbox, which it writes itself. Returns what it said."""
    by_rows = connection.woken is None
    rows = await fetch_rows(connection, statement, by_rows=by_rows, **asked)
    note_woken(connection, rows)
    return rows


def note_woken(connection: Connection, rows: Iterable[Mapping[str, Any]]) -> None:
    """What is to be announced after the commit; rows without an operator stand for nothing."""
    if connection.woken is not None:
        for each in rows:
            connection.woken[each["operator"], each["priority"]] += each["tasks"]


def fence_arrays(fences: Iterable[Fence]) -> dict[str, list[Any]]:
    """The parameters of a statement that is fenced."""
    fences = tuple(fences)
    return {
        "tasks": [each.task_id for each in fences],
        "attempts": [each.attempt for each in fences],
        "tokens": [each.lease_token for each in fences],
        "grants": [each.grants for each in fences],
    }


def without_twins(task_ids: Sequence[int], *, most: int) -> None:
    """Raise `InvalidInput` if a call is about too many tasks, or about one of them twice."""
    if len(task_ids) > most:
        raise InvalidInput(f"One call is about {most} tasks at most, not {len(task_ids)}.")
    if len(set(task_ids)) < len(task_ids):
        raise InvalidInput("One call names a task twice.")


def storable_json(value: Mapping[str, Any]) -> str:
    """What somebody says of itself, as Postgres can hold it; what it cannot hold is not kept.

    One task that says something strange must not cost the others of its call their leases.
    """
    try:
        problem = progress_fault(value)
    except TypeError as error:
        problem = f"It cannot be written as JSON: {error}."
    if problem:
        return json.dumps({"omitted": problem})
    text = msgspec.json.encode(value).decode()
    # Postgres has no NUL. An escaped backslash before the same letters is hit as well: the text is
    # for people, and stays JSON.
    return text.replace("\\u0000", "\\ufffd")


def storable(text: str) -> str:
    """A text as Postgres can hold it: no NUL, no half of a character, and not without end."""
    kept = text[:REASON_CHARACTERS_MAX].replace("\x00", "\N{REPLACEMENT CHARACTER}")
    return kept.encode("utf-8", "replace").decode()
