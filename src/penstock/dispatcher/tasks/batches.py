"""Batches of rows that many tasks publish into a buffered dataset, and one sink job writes.

| a batch is | who moves it | to |
|---|---|---|
| held | the attempt that has published it completes | released |
| | that attempt ends in any other way | it is gone |
| released | the claim of a task of the sink, which names itself in it | released, and taken |
| | that task completes | done |
| | that task is cancelled, or forgotten; or, dead, it is replayed | released, and taken by nobody |
| done | nobody; it is forgotten when nobody may use its id again | |

A source that is always on never completes, so what it publishes is released at once, and so is what
people give back of rejected rows. Ids are told apart by the task that has published them, and, as
long as it decides whether they count, by the attempt. Rules, by the ids of
`docs/dispatcher-protocol.md`:

- BATCH-1 A batch is accepted from the current attempt alone, under a lock of its task: what a
  zombie publishes is refused, and an attempt that ends has all or none of its batches before that.
- BATCH-2 The same id with the same body is the same batch; with another body it is refused.
- BATCH-3 The body is in the store before the row is written, and the sweeper leaves it there until
  the batch is done. So accepted is durable, and a body without a row is nobody's.
- BATCH-4 The transaction that completes an attempt releases its batches, and the one that ends it
  otherwise drops them. So a retry that publishes other rows neither doubles nor is refused.
- BATCH-5 A claim takes batches in its own transaction, in sequence and up to the limits of the
  sink, and no other task is ever given them: the next attempt of the task is given the same ones.
- BATCH-6 The transaction that publishes what a sink has made of its batches marks them done: by
  the fence of that attempt they are written once.
- BATCH-7 What is released has a task that waits for it, or gets one: from whoever released it or
  left it behind, or else from a pass of a dispatcher. Such a task is due when enough has gathered,
  or when the first batch has waited for `max_age`.
- BATCH-8 An id that was released at once is kept for longer than rows with it are accepted
  (`ID_DAYS`); any other is of a task whose attempts are over.

| a crash between | leaves |
|---|---|
| the body and the row | a file that is swept |
| the row and the completion | a held batch, which ends with the lease of its attempt |
| the release and the task of the sink | nothing: they are one transaction; or, if another was at |
| | it, a batch that the next pass makes a task for |
| the claim and the completion of the sink | a taken batch: its task is tried again with it |
| the files and the completion of the sink | files that are swept; the same batches again |

Where rows are merged, one task of a partition runs at a time: a second could only find that the
first has moved it (PUBLISH-5). What gathers meanwhile is the next one's, made by its end.

Two who release at once make one task: who does not get the lock of a line (a dataset and a
partition) leaves it to the other, and what that task does not see is found by its own end, or by
the pass. Nobody waits there. Locks are taken after those of tasks, schemas and partitions.

Called by `lifecycle` and `completion` in their transactions, by the API, and by a loop of every
dispatcher (`turn`). The bodies of a sink are read by `penstock.runtimes.sink`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.dispatcher.dag.model import SINK_OPERATOR, OutputStorage
from penstock.dispatcher.database.pool import Connection, Database, fetch_rows, query
from penstock.dispatcher.tasks.model import ClaimedTask, Fence, NewTask, Refusal
from penstock.dispatcher.tasks.rows import announce, create_tasks, refusal, storable, task_states
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import InvalidInput
from penstock.protocol.base import TaskStatus
from penstock.runtimes.sink import BatchLimits, batch_limits

_log = logging.getLogger(__name__)

BUFFER: Final = "buffer"
"""What a task of a sink has in its payload, and no other."""
TAKEN_MAX: Final = 1_000
"""How many batches one task of a sink is given."""
HELD_MAX: Final = 10_000
HELD_BYTES_MAX: Final = 4 * 2**30
"""How much an attempt may publish until it completes."""
ID_DAYS: Final = 7.0
"""How old rows may be that are released at once: for so long their ids are known."""
PASS_SECONDS: Final = 1.0
"""How often a pass is made while there are batches that were released."""
_LINES_MAX: Final = 500
"""How many lines one transaction looks at; each may cost a lock, of which Postgres has few."""
_RENEWED: Final = "It was replayed: its batches are written by a new task."

Line = tuple[str, str]
"""A buffered dataset and the key of a partition, empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """A batch whose body is in the store."""

    dataset: str
    """Its uuid."""
    partition_key: str
    batch: str
    sha256: str
    """Of its body."""
    format: str
    location: str
    place: str
    bytes: int
    rows: int | None = None
    made_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class AcceptedBatch:
    """A batch that is kept."""

    sequence: int
    is_new: bool
    is_released: bool
    """Whether it counts already."""


_TRIAL: Final = AcceptedBatch(0, is_new=True, is_released=False)


@dataclass(frozen=True, slots=True)
class RefusedBatch:
    """A batch that is not taken: `kind` is for programs, `why` a sentence."""

    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class BufferOfDataset:
    """A buffered dataset of the DAG in force."""

    dataset: str
    job_id: int
    pressed: str | None
    """Why nothing more is taken for now."""


class BufferedBatches:
    """The operations on batches, and the passes of one dispatcher."""

    def __init__(self, database: Database, *, entropy: Entropy | None = None) -> None:
        self._database = database
        self._entropy = entropy or system_entropy()

    async def buffer(self, dataset: str) -> BufferOfDataset | None:
        """A buffered dataset by its name; None if the DAG in force has none such."""
        asked = {"dataset": storable(dataset)}
        rows = await self._database.fetch("buffer_of_dataset", asked)
        return BufferOfDataset(**rows[0]) if rows else None

    async def accept(
        self, fence: Fence, new: NewBatch, *, is_trial: bool = False
    ) -> AcceptedBatch | RefusedBatch | Refusal | None:
        """Keep a batch of the current attempt; None if its grants are not those that it shows.

        The grants name the folders of the lease, which no other attempt has. A trial keeps nothing:
        its answer is whether the body is worth storing, and its number of a new batch is 0.
        """

        async def work(
            connection: Connection,
        ) -> AcceptedBatch | RefusedBatch | Refusal | None:
            held = {
                "task": fence.task_id,
                "attempt": fence.attempt,
                "grants": fence.grants,
            }
            rows = await fetch_rows(connection, "hold_publisher", held)
            if not rows:
                states = await task_states(connection, [fence.task_id])
                return refusal(fence.task_id, states.get(fence.task_id))
            (row,) = rows
            if not row["has_grants"]:
                return None
            if row["cancel_asked"]:
                return RefusedBatch("cancelled", f"Task {fence.task_id} was asked to stop.")
            if row["counts"]:
                if why := _time_problem(new, now_ms=int(row["now"].timestamp() * 1000)):
                    return RefusedBatch("too old", why)
                if is_trial:
                    return _TRIAL
                return await keep_batch(connection, new, task_id=fence.task_id)
            if why := await _too_much(connection, new, fence):
                return RefusedBatch("too much", why)
            if is_trial:
                return _TRIAL
            held_until = replace(new, made_at_ms=None)
            return await _kept(connection, held_until, task_id=fence.task_id, attempt=fence.attempt)

        return await self._database.transact(work)

    async def turn(self) -> float | None:
        """Give back what cancelled tasks had, and see that all that waits has a task."""

        async def work(connection: Connection) -> int:
            await fetch_rows(connection, "free_batches", tasks=None)
            rows = await fetch_rows(connection, "waiting_lines", limit=_LINES_MAX)
            lines = [(row["dataset"], row["partition_key"]) for row in rows]
            return await make_sink_tasks(connection, lines, entropy=self._entropy)

        made = await self._database.transact(work)
        if made:
            _log.info("created %d tasks for batches that waited without one", made)
        # Whoever looks for released batches asks for the next pass.
        return None


async def keep_batch(
    connection: Connection, new: NewBatch, *, task_id: int
) -> AcceptedBatch | RefusedBatch:
    """Keep a batch that counts whatever becomes of an attempt, and see to its task."""
    found = await _kept(connection, new, task_id=task_id, attempt=0)
    if isinstance(found, AcceptedBatch) and found.is_new:
        await make_sink_tasks(connection, [(new.dataset, new.partition_key)])
    return found


async def _too_much(connection: Connection, new: NewBatch, fence: Fence) -> str:
    """Why an attempt may publish no more; empty if it may, and for what it has published."""
    asked = {"task": fence.task_id, "attempt": fence.attempt}
    (held,) = await fetch_rows(connection, "held_by_attempt", asked)
    if held["batches"] < HELD_MAX and held["bytes"] + new.bytes <= HELD_BYTES_MAX:
        return ""
    said = {"dataset": new.dataset, "batch": new.batch}
    if await fetch_rows(connection, "accepted_batch", asked, **said):
        return ""
    return f"An attempt publishes {HELD_MAX:,} batches and {HELD_BYTES_MAX:,} bytes at most."


async def _kept(
    connection: Connection, new: NewBatch, *, task_id: int, attempt: int
) -> AcceptedBatch | RefusedBatch:
    asked = {
        "dataset": new.dataset,
        "partition_key": new.partition_key,
        "task": task_id,
        "attempt": attempt,
        "batch": new.batch,
        "digest": new.sha256,
        "format": new.format,
        "location": new.location,
        "place": new.place,
        "bytes": new.bytes,
        "rows": new.rows,
        "made_at_ms": new.made_at_ms,
        "state": "held" if attempt else "released",
    }
    if rows := await fetch_rows(connection, "accept_batch", asked):
        return AcceptedBatch(rows[0]["seq"], is_new=True, is_released=not attempt)
    (row,) = await fetch_rows(connection, "accepted_batch", asked)
    if (row["digest"], row["format"], row["partition_key"]) != (
        new.sha256,
        new.format,
        new.partition_key,
    ):
        return RefusedBatch(
            "different",
            f"The batch {new.batch!r} was accepted with another body; give this one another id.",
        )
    return AcceptedBatch(row["seq"], is_new=False, is_released=not attempt)


def _time_problem(new: NewBatch, *, now_ms: int) -> str:
    """Why rows that are released at once are not taken; empty if they are."""
    if new.made_at_ms is None:
        return (
            "A source that is always on says of each batch when its rows were made (`made_at`, in"
            " milliseconds since 1970), and the same again when it repeats it."
        )
    if new.made_at_ms < now_ms - ID_DAYS * 86_400_000:
        return (
            f"The rows of the batch {new.batch!r} are older than {ID_DAYS:g} days: whether they"
            " were published before is not known any more."
        )
    return ""


async def with_batches(
    connection: Connection, claimed: Sequence[ClaimedTask], *, is_again: bool = False
) -> tuple[ClaimedTask, ...]:
    """Attempts that are about to begin, those of sinks with the batches that they write.

    Those that run, whose claim is repeated (`is_again`), take no more: their end would write off
    what it was first given, and what it has taken since.
    """
    if not any(_is_sinking(each) for each in claimed):
        return tuple(claimed)
    return tuple(
        [
            await _with_batches(connection, each, is_again=is_again) if _is_sinking(each) else each
            for each in claimed
        ]
    )


def _is_sinking(claimed: ClaimedTask) -> bool:
    return BUFFER in claimed.payload and claimed.definition.get("operator") == SINK_OPERATOR


async def _with_batches(
    connection: Connection, claimed: ClaimedTask, *, is_again: bool
) -> ClaimedTask:
    dataset = claimed.payload[BUFFER]["dataset"]
    asked: dict[str, Any] = {"task": claimed.task_id}
    rows = await fetch_rows(connection, "taken_batches", asked)
    if not rows and not is_again:
        limits = _limits(claimed.definition)
        asked |= {
            "dataset": dataset,
            "partition_key": claimed.payload.get("partition_key") or "",
            "batches_max": TAKEN_MAX,
            "bytes_max": limits.bytes,
            "rows_max": limits.rows,
        }
        await connection.execute(query("take_batches"), asked)
        rows = await fetch_rows(connection, "taken_batches", asked)
    outputs = claimed.definition.get("outputs") or ()
    (own,) = (each for each in outputs if each.get("buffered"))
    (aside,) = (each for each in outputs if not each.get("buffered"))
    buffer = {
        "dataset": dataset,
        "output": own["name"],
        "rejected": aside["name"],
        "is_hot": own.get("storage") == OutputStorage.POSTGRES,
        "columns": [[name, kind] for each in own["columns"] for name, kind in each.items()],
        "batches": [
            {
                "sequence": row["sequence"],
                "batch": row["batch"],
                "task": row["task"],
                "format": row["format"],
                "location": row["location"],
                "sha256": row["digest"],
            }
            for row in rows
        ],
    }
    return replace(claimed, payload={**claimed.payload, BUFFER: buffer})


async def settle_batches(
    connection: Connection, rows: Iterable[Mapping[str, Any]], *, statuses: Mapping[int, TaskStatus]
) -> None:
    """What the ends of these attempts mean for batches: of rows of `end_tasks`, or of `reap`."""
    done, other, wrote, freed = list[Any](), list[Any](), list[int](), list[int]()
    for row in rows:
        status, task_id = statuses[row["task_id"]], row["task_id"]
        if row["is_buffering"]:
            ended = (task_id, row["attempt"])
            (done if status is TaskStatus.SUCCEEDED else other).append(ended)
        if row["is_sinking"] and status is TaskStatus.SUCCEEDED:
            wrote.append(task_id)
        elif row["is_sinking"] and status is TaskStatus.CANCELLED:
            freed.append(task_id)
    lines: set[Line] = set()
    if other:
        await connection.execute(query("drop_batches"), _fences(other))
    for name, asked in (
        ("release_batches", _fences(done) if done else None),
        ("finish_batches", {"tasks": wrote} if wrote else None),
        ("free_batches", {"tasks": freed} if freed else None),
    ):
        if asked is not None:
            found = await fetch_rows(connection, name, asked)
            lines |= {(row["dataset"], row["partition_key"]) for row in found}
    if lines:
        await make_sink_tasks(connection, sorted(lines))


async def renew_sink_tasks(connection: Connection, task_ids: Sequence[int]) -> list[int]:
    """Give what dead tasks of sinks had to new ones, of the definition that is in force.

    Returns which of these were such tasks; they are cancelled.
    """
    asked = {"tasks": list(task_ids), "reason": _RENEWED}
    rows = await fetch_rows(connection, "give_up_sink_tasks", asked)
    given_up = [row["id"] for row in rows]
    if given_up:
        freed = await fetch_rows(connection, "free_batches", tasks=given_up)
        lines = {(row["dataset"], row["partition_key"]) for row in freed}
        await make_sink_tasks(connection, sorted(lines))
    return given_up


def _fences(ended: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    return {"tasks": [task for task, _ in ended], "attempts": [number for _, number in ended]}


async def make_sink_tasks(
    connection: Connection, lines: Sequence[Line], *, entropy: Entropy | None = None
) -> int:
    """See that what waits in these has a task, which begins soon if enough has gathered.

    Returns how many were made. What is too much for one transaction is left to the passes.
    """
    if not lines:
        return 0
    lines = lines[:_LINES_MAX]
    asked = {
        "datasets": [dataset for dataset, _ in lines],
        "partitions": [partition for _, partition in lines],
        "batches_max": TAKEN_MAX,
    }
    rows = await fetch_rows(connection, "look_at_lines", asked)
    late = [row["waiting"] for row in rows if row["is_early"] and not _delay_ms(row)]
    if late:
        hastened = await fetch_rows(connection, "hasten_tasks", tasks=sorted(late))
        await announce(connection, [row["id"] for row in hastened])
    new = [_task(row, entropy or system_entropy()) for row in rows if row["is_ours"]]
    await create_tasks(connection, new)
    return len(new)


def _task(row: Mapping[str, Any], entropy: Entropy) -> NewTask:
    partition = row["partition_key"]
    payload: dict[str, Any] = {BUFFER: {"dataset": row["name"]}}
    if partition:
        payload["partition_key"] = partition
    return NewTask(
        definition_id=row["definition_id"],
        generation=row["generation"],
        dedupe_key=f"buffer:{new_id(entropy)}",
        payload=payload,
        delay_ms=_delay_ms(row),
    )


def _delay_ms(row: Mapping[str, Any]) -> int:
    """How long a task may still wait for more."""
    limits = _limits(row["body"])
    is_enough = (
        row["rows"] >= limits.rows or row["bytes"] >= limits.bytes or row["batches"] >= TAKEN_MAX
    )
    return 0 if is_enough else max(0, limits.age_ms - row["waited_ms"])


def _limits(definition: Mapping[str, Any]) -> BatchLimits:
    config = definition.get("config")
    try:
        return batch_limits(config if isinstance(config, Mapping) else {})
    except InvalidInput:
        # Of another release; the worker says what is wrong with it.
        return BatchLimits()
