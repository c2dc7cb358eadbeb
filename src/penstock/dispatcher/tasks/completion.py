"""How attempts end: completed, failed, released, or given up by the reaper; and what follows.

One transaction ends the attempts, publishes their outputs, writes the events, has them routed
and writes the wake-ups (FENCE-7). Each attempt of a call has its own answer: one that is refused
changes nothing and costs the others nothing (FENCE-9). A call that has published very many
partitions leaves the events pending, and routers make their tasks in windows. The order of locks
is consumers of changes, tasks by id, then schemas, then partitions by name (FENCE-10); what these
ends mean for batches of buffered datasets comes after that (`batches`).

A release does not count against `max_attempts`, up to `RELEASES_MAX` times (FENCE-11); further ones
are failures. Of these, `LOSSES_MAX` may be of work that was killed before it began. A worker killed
while it ran is a failure whose next attempt begins at once. An attempt whose process died beside
others is released with `runs_alone`, once: its task runs in no batch and with nothing beside it.

Merges are compare-and-swap by revision (PUBLISH-5): each output of a job that merges says which
revision it was merged with (`base_revision`), compared before the attempt ends:

| what is published | and the turn is | the answer |
|---|---|---|
| is what it was merged with | nobody's, or its own | it is published |
| is something else | nobody's, or its own | merge again, with this; the `TRIES_MAX`th |
| | | time, and later, it has its turn |
| whatever it is | another's | wait: say the same again |

With `partition_by` the partitions are known when the result is: the attempt keeps its result
and says which they are, with `NOT_READ` for their revisions, is told what is published, and
merges with all of it. They are compared as one: all are published, or none (PUBLISH-6).

A refusal ends nothing: the attempt merges again. The order of merges is that of their commits; each
row says which version and task it is of, so every order gives the same rows
(`penstock.runtimes.spark.merger`; PUBLISH-8). The turn is a row in `merge_lease` of all partitions
that the attempt writes, taken at once or not at all, and worth something while the attempt runs
(PUBLISH-7); so there is progress. A crash leaves a conflict that was counted, or a turn whose lease
runs out. Those that merge into one dataset are compared one after the other, by the lock of its
schema.

Called by `lifecycle`, which opens the transaction.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Container,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

import msgspec
from psycopg.types.json import Jsonb

from penstock.dispatcher.database.pool import Connection, query
from penstock.dispatcher.tasks.batches import settle_batches
from penstock.dispatcher.tasks.consumption import consume, refuse_overtaken
from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    AttemptMeasure,
    Completion,
    Failure,
    Fence,
    PublishedOutput,
    PublishOutcome,
    ReapedAttempt,
    ReaperPass,
    Refusal,
    Release,
    TaskOutput,
    TaskRefusalReason,
)
from penstock.dispatcher.tasks.rewrites import refuse_unlike, rewrite
from penstock.dispatcher.tasks.rows import (
    SAYING_BYTES_MAX,
    announce,
    fence_arrays,
    refusal,
    storable,
    storable_json,
    task_states,
    wake,
)
from penstock.dispatcher.tasks.schemas import output_arrays, refuse_misfits, written
from penstock.dispatcher.tasks.schemas import undeclared as undeclared_columns
from penstock.protocol.base import TaskStatus
from penstock.runtimes.base import NOT_READ, Facts

TRIES_MAX: Final = 3
"""The conflict with which an attempt asks for its turn."""

Current = Mapping[str, Sequence[Mapping[str, Any]]]
Partition = tuple[str, str, str]
"""A dataset, its generation and the key of a partition."""

UNMERGED: Final = (
    "The job merges, and what was made does not say what it was merged with; bring the worker to"
    " the release of the dispatcher."
)


@dataclass(frozen=True, slots=True)
class MergeConflict:
    """A completion that is not merged with what is published."""

    current: Current | None
    """What to merge with; None to wait, and say the same again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """What is published of a partition that an output was merged into."""

    task_id: int
    partition: Partition
    base: int
    dataset: str
    revision: int
    part: Mapping[str, Any] | None
    is_held: bool


async def refuse_moved(
    connection: Connection,
    completions: Sequence[Completion],
    written: Mapping[int, Mapping[str, str]],
    *,
    held: Sequence[Fence],
) -> Mapping[int, MergeConflict | str]:
    """Those that may not end now, by task: what has moved, or what is wrong as a sentence.

    All of these merge; `written` has the datasets of each, and their generation. Of `held`, all
    that end in this call, the tasks are locked at once: in two steps they would not be in order.
    """
    refused: dict[int, MergeConflict | str] = {
        each.fence.task_id: UNMERGED
        for each in completions
        if any(output.base_revision is None for output in each.outputs)
    }
    sound = [
        each
        for each in completions
        if each.outputs
        and each.fence.task_id not in refused
        # What is misplaced is refused elsewhere.
        and all(output.dataset in written[each.fence.task_id] for output in each.outputs)
    ]
    if not sound:
        return refused
    found = await connection.execute(query("hold_attempts"), fence_arrays(held))
    # Who is asked to stop publishes nothing, and who is not current is told so elsewhere.
    current = {row["task_id"] for row in await found.fetchall() if not row["cancel_asked"]}
    sound = [each for each in sound if each.fence.task_id in current]
    return {**refused, **await _compare(connection, sound, written)}


async def end_turns(connection: Connection, task_ids: Sequence[int]) -> None:
    """These have published, and let the next ones."""
    if task_ids:
        await connection.execute(query("end_merge_leases"), {"tasks": list(task_ids)})


async def _compare(
    connection: Connection,
    completions: Sequence[Completion],
    written: Mapping[int, Mapping[str, str]],
) -> Mapping[int, MergeConflict]:
    heads = await _heads(connection, completions, written)
    moved: list[Completion] = []
    refused: dict[int, MergeConflict] = {}
    taken: set[Partition] = set()
    for each in sorted(completions, key=lambda one: one.fence.task_id):
        own = heads[each.fence.task_id]
        if any(head.is_held or head.partition in taken for head in own):
            # Of two in one call the second finds out, when it asks again, what the first has made.
            refused[each.fence.task_id] = MergeConflict(None)
            continue
        if any(head.base != head.revision for head in own):
            moved.append(each)
        else:
            taken |= {head.partition for head in own}
    return {**refused, **await _give_turns(connection, moved, heads, taken)}


async def _heads(
    connection: Connection,
    completions: Sequence[Completion],
    written: Mapping[int, Mapping[str, str]],
) -> Mapping[int, Sequence[_Head]]:
    said = [
        (each.fence.task_id, (output.dataset, generation, output.partition_key or ""), output)
        for each in completions
        for output in each.outputs
        for generation in [written[each.fence.task_id][output.dataset]]
    ]
    if not said:
        return {}
    named = sorted({(dataset, generation) for _, (dataset, generation, _), _ in said})
    schemas = {"datasets": [each[0] for each in named], "generations": [each[1] for each in named]}
    await connection.execute(query("make_schemas"), schemas)
    await connection.execute(query("lock_schemas"), schemas)
    asked = {
        "places": list(range(len(said))),
        "tasks": [task_id for task_id, _, _ in said],
        "datasets": [partition[0] for _, partition, _ in said],
        "generations": [partition[1] for _, partition, _ in said],
        "keys": [partition[2] for _, partition, _ in said],
    }
    found = await connection.execute(query("merge_heads"), asked)
    heads: dict[int, list[_Head]] = {each.fence.task_id: [] for each in completions}
    for row in await found.fetchall():
        task_id, partition, output = said[row.pop("place")]
        base = output.base_revision
        assert base is not None, "those without one are refused before"
        heads[task_id].append(_Head(task_id=task_id, partition=partition, base=base, **row))
    return heads


async def _give_turns(
    connection: Connection,
    moved: Sequence[Completion],
    heads: Mapping[int, Sequence[_Head]],
    taken: set[Partition],
) -> Mapping[int, MergeConflict]:
    """What those are told that have merged with what is not published any more, or not yet."""
    fences = [each.fence for each in moved]
    conflicts = await _conflicts(
        connection,
        [fence for fence in fences if all(head.base != NOT_READ for head in heads[fence.task_id])],
    )
    told: dict[int, MergeConflict] = {}
    turns: list[tuple[Partition, Fence]] = []
    for fence in fences:
        own = heads[fence.task_id]
        is_busy = any(head.partition in taken for head in own)
        if conflicts.get(fence.task_id, 0) >= TRIES_MAX and not is_busy:
            turns += [(head.partition, fence) for head in own]
            taken |= {head.partition for head in own}
        # Who would merge while another has the turn, or publishes now, would be too late again.
        told[fence.task_id] = MergeConflict(None if is_busy else _current(own))
    if turns:
        await connection.execute(query("take_merge_leases"), _lease_arrays(turns))
    return told


async def _conflicts(connection: Connection, fences: Sequence[Fence]) -> Mapping[int, int]:
    """One more for each of these; how many each has had."""
    if not fences:
        return {}
    asked = {
        "tasks": [each.task_id for each in fences],
        "attempts": [each.attempt for each in fences],
    }
    found = await connection.execute(query("count_conflicts"), asked)
    return {row["task_id"]: row["conflicts"] for row in await found.fetchall()}


def _lease_arrays(turns: Sequence[tuple[Partition, Fence]]) -> Mapping[str, Sequence[Any]]:
    return {
        "datasets": [partition[0] for partition, _ in turns],
        "generations": [partition[1] for partition, _ in turns],
        "keys": [partition[2] for partition, _ in turns],
        "tasks": [fence.task_id for _, fence in turns],
        "attempts": [fence.attempt for _, fence in turns],
    }


def _current(heads: Sequence[_Head]) -> Current:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for head in heads:
        found.setdefault(head.dataset, []).extend([] if head.part is None else [head.part])
    return found


Route = Callable[[Connection, Sequence[int]], Awaitable[None]]
"""Called with the numbers of new events, in the transaction that made them."""
AttemptReport = Completion | Failure | Release
Place = TypeVar("Place", bound=Hashable)

ROUTED_MAX: Final = 1_000
"""How many events are routed in the transaction that has made them, at most."""
RELEASES_MAX: Final = 20
"""How often a task is handed back without that being counted, until it is replayed."""
UNACKNOWLEDGED_SECONDS: Final = 10.0
"""How long a claim with an id may go unacknowledged: workers do so within a third of it."""
LOSSES_MAX: Final = 5
"""How many of these may be because a worker was killed before the attempt had begun."""
_RELEASE_FIRST_MS: Final = 1_000
_RELEASE_MAX_MS: Final = 60_000
"""The pause after a delayed release doubles from one to the other."""
_STEADY_SECONDS: Final = 600.0
"""An always-on source that has run for so long is not being handed round: its count begins anew."""
_RELEASED_OUT: Final = (
    f" It was released {RELEASES_MAX} times before; this release counts as a failure."
)

_LOST_OUT: Final = f" That happened {LOSSES_MAX} times before; this time counts as a failure."
_DIED_BEFORE: Final = (
    " Its process has died before, which was not counted; this time counts as a failure."
)
_WORDS: Final = tuple(each.name for each in fields(TaskOutput) if each.name != "facts")
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


async def no_route(connection: Connection, events: Sequence[int]) -> None:
    """Leave events pending."""


async def end(
    connection: Connection, reports: Sequence[AttemptReport], *, route: Route
) -> tuple[tuple[AttemptEnd | Refusal, ...], tuple[AttemptMeasure, ...]]:
    """End attempts as their workers report: an answer to each in its place, and what ended."""
    judged = await _judged(connection, reports)
    allowed = judged.allowed
    rows = await _end_tasks(connection, allowed)
    published, applying = await _publish(connection, allowed, rows)
    ended = {
        task_id: AttemptEnd(
            task_id,
            row["attempt"],
            TaskStatus(row["status"]),
            row["due_at"],
            tuple(published.get(task_id, ())),
        )
        for task_id, row in rows.items()
    }
    await settle_batches(
        connection, rows.values(), statuses={each: end.status for each, end in ended.items()}
    )
    await consume(connection, _completions(allowed, among=judged.consuming), ended)
    await _close(connection, [each for each in allowed if each.fence.task_id in ended], ended, rows)
    events = [
        one.event_seq
        for each in ended.values()
        for one in each.published
        # Who follows is told of a hot table when it has the rows: see `datasets.applier`.
        if one.event_seq and one.event_seq not in applying
    ]
    if 0 < len(events) <= ROUTED_MAX:
        await route(connection, events)
    await announce(connection, [row["task_id"] for row in rows.values() if row["due_at"]])
    await _wake_freed(connection, [row["task_id"] for row in rows.values() if row["is_limited"]])
    left = [each for each in reports if each.fence.task_id not in ended]
    bounded = {task_id: each.bounded() for task_id, each in ended.items()}
    answers = {**bounded, **await _answer_again(connection, left, judged.refused)}
    answers |= _merge_refusal(answers, judged.moved)
    measured = tuple(
        _measured(each, ended[task_id], rows[task_id])
        for each in allowed
        if (task_id := each.fence.task_id) in ended
    )
    return tuple(answers[each.fence.task_id] for each in reports), measured


@dataclass(frozen=True, slots=True)
class _Judged:
    """Which attempts may end as it is said of them, and why the others may not."""

    allowed: Sequence[AttemptReport]
    refused: Mapping[int, tuple[TaskRefusalReason, str]]
    moved: Mapping[int, MergeConflict | str]
    consuming: Collection[int]


async def _judged(connection: Connection, reports: Sequence[AttemptReport]) -> _Judged:
    refused = {
        each.fence.task_id: (TaskRefusalReason.OUTPUTS, told)
        for each in reports
        if (told := _outputs_problem(each))
    }
    sound = [each for each in reports if each.fence.task_id not in refused]
    refused |= await _refuse_doubles(connection, _completions(sound))
    sound = [each for each in sound if each.fence.task_id not in refused]
    rows = await held_outputs(connection, _completions(sound))
    guarded = {row["task_id"]: row for row in rows[0]["guarded"] or ()} if rows else {}
    consuming = {task_id for task_id, row in guarded.items() if row["is_consuming"]}
    overtaken = await refuse_overtaken(connection, _completions(sound, among=consuming))
    refused |= {task_id: (TaskRefusalReason.STALE, told) for task_id, told in overtaken.items()}
    sound = [each for each in sound if each.fence.task_id not in overtaken]
    columns = written(rows)
    undeclared = undeclared_columns(_completions(sound), columns)
    refused |= {
        task_id: (TaskRefusalReason.UNDECLARED, told) for task_id, told in undeclared.items()
    }
    sound = [each for each in sound if each.fence.task_id not in undeclared]
    fences = [each.fence for each in sound]
    misfits = await refuse_misfits(connection, _completions(sound), columns, held=fences)
    refused |= {task_id: (TaskRefusalReason.SCHEMA, told) for task_id, told in misfits.items()}
    sound = [each for each in sound if each.fence.task_id not in misfits]
    maintaining = {task_id for task_id, row in guarded.items() if row["is_maintaining"]}
    unlike = await refuse_unlike(connection, _completions(sound, among=maintaining))
    refused |= {task_id: (TaskRefusalReason.OUTPUTS, told) for task_id, told in unlike.items()}
    sound = [each for each in sound if each.fence.task_id not in unlike]
    merged = {task_id: row["written"] for task_id, row in guarded.items() if row["is_merging"]}
    merging = [_merged_alone(each, guarded) for each in _completions(sound, among=merged)]
    moved = await refuse_moved(connection, merging, merged, held=fences)
    refused |= {
        task_id: (TaskRefusalReason.OUTPUTS, told)
        for task_id, told in moved.items()
        if isinstance(told, str)
    }
    allowed = [each for each in sound if each.fence.task_id not in moved]
    return _Judged(allowed, refused, moved, consuming)


def _merged_alone(completion: Completion, guarded: Mapping[int, Mapping[str, Any]]) -> Completion:
    """A completion with those of its outputs that are merged: what a sink rejects is appended."""
    aside = guarded[completion.fence.task_id]["aside"]
    outputs = tuple(each for each in completion.outputs if each.dataset != aside)
    return completion if aside is None else replace(completion, outputs=outputs)


def _merge_refusal(
    answers: Mapping[int, AttemptEnd | Refusal], moved: Mapping[int, MergeConflict | str]
) -> dict[int, Refusal]:
    """What those are told whose attempts go on, because they are to merge again."""
    return {
        task_id: replace(answer, why=TaskRefusalReason.MOVED, current=told.current)
        for task_id, told in moved.items()
        if isinstance(told, MergeConflict) and isinstance(answer := answers[task_id], Refusal)
    }


async def reap(
    connection: Connection, *, limit: int, outage_seconds: float, unheard_seconds: float
) -> ReaperPass:
    """Expire attempts whose leases have run out, unless reaping is held after an outage."""
    watching = {
        "outage_seconds": outage_seconds,
        "unheard_seconds": unheard_seconds,
        "unacknowledged_seconds": UNACKNOWLEDGED_SECONDS,
    }
    watched = await connection.execute(query("watch_reaper"), watching)
    watch = await watched.fetchone()
    assert watch is not None, "the schema has the one row"
    if watch["is_quiet"]:
        return ReaperPass((), quiet_until=watch["quiet_until"])
    asked = {
        "limit": limit,
        "releases_max": RELEASES_MAX,
        "losses_max": LOSSES_MAX,
        "unacknowledged_seconds": UNACKNOWLEDGED_SECONDS,
    }
    found = await connection.execute(query("reap"), asked)
    rows = await found.fetchall()
    if rows:
        closing: dict[str, Any] = {
            "tasks": [row["task_id"] for row in rows],
            "attempts": [row["attempt"] for row in rows],
            "outcomes": [_reaped(row) for row in rows],
            "reasons": [row["reason"] for row in rows],
            "said": [None for _ in rows],
            "answers": [None for _ in rows],
            "logs": [None for _ in rows],
            "metrics": [None for _ in rows],
            "bytes_max": SAYING_BYTES_MAX,
        }
        await connection.execute(query("close_attempts"), closing)
        statuses = {row["task_id"]: TaskStatus(row["status"]) for row in rows}
        await settle_batches(connection, rows, statuses=statuses)
        await announce(connection, closing["tasks"])
        await _wake_freed(connection, closing["tasks"])
    return ReaperPass(
        tuple(
            ReapedAttempt(row["task_id"], row["attempt"], row["worker"], TaskStatus(row["status"]))
            for row in rows
        ),
        tuple(
            AttemptMeasure(job=row["job"], outcome=_reaped(row), seconds=row["ran_seconds"])
            for row in rows
        ),
    )


def _reaped(row: Mapping[str, Any]) -> str:
    return "released" if row["status"] == TaskStatus.QUEUED else "expired"


async def _refuse_doubles(
    connection: Connection, completions: Sequence[Completion]
) -> Mapping[int, tuple[TaskRefusalReason, str]]:
    """Those that would replace a partition twice, of which one would be lost."""
    doubles = {
        each.fence.task_id: twice[0]
        for each in completions
        if (twice := _more_than_once((one.dataset, one.partition_key) for one in each.outputs))
    }
    if not doubles:
        return {}
    found = await connection.execute(query("replacing_tasks"), {"tasks": list(doubles)})
    told = "Dataset {} has the same partition twice, and its job replaces partitions."
    return {
        row["task_id"]: (TaskRefusalReason.OUTPUTS, told.format(doubles[row["task_id"]][0]))
        for row in await found.fetchall()
    }


async def held_outputs(
    connection: Connection, completions: Sequence[Completion]
) -> Sequence[Mapping[str, Any]]:
    """What is looked at before completions are judged, in one statement."""
    if not completions:
        return ()
    asked = {
        **fence_arrays(each.fence for each in completions),
        **output_arrays(completions),
    }
    return await (await connection.execute(query("hold_outputs"), asked)).fetchall()


async def _end_tasks(
    connection: Connection, reports: Sequence[AttemptReport]
) -> Mapping[int, Mapping[str, Any]]:
    if not reports:
        return {}
    asked = {
        **fence_arrays(each.fence for each in reports),
        "succeeded": [isinstance(each, Completion) for each in reports],
        "retried": [
            isinstance(each, Release) or (isinstance(each, Failure) and each.is_retried)
            for each in reports
        ],
        "released": [isinstance(each, Release) for each in reports],
        "delayed": [isinstance(each, Release) and each.is_delayed for each in reports],
        "alone": [not isinstance(each, Completion) and each.runs_alone for each in reports],
        "lost": [not isinstance(each, Completion) and each.is_lost for each in reports],
        "reasons": [_reason(each) for each in reports],
        "losses_max": LOSSES_MAX,
        "lost_out": _LOST_OUT,
        "releases_max": RELEASES_MAX,
        "released_out": _RELEASED_OUT,
        "died_before": _DIED_BEFORE,
        "release_first_ms": _RELEASE_FIRST_MS,
        "release_max_ms": _RELEASE_MAX_MS,
        "steady_seconds": _STEADY_SECONDS,
        **output_arrays(_completions(reports)),
    }
    found = await connection.execute(query("end_tasks"), asked)
    return {row["task_id"]: row for row in await found.fetchall()}


async def _publish(
    connection: Connection, reports: Sequence[AttemptReport], rows: Mapping[int, Mapping[str, Any]]
) -> tuple[Mapping[int, Sequence[PublishedOutput]], Collection[int]]:
    """What became of the outputs, by task, and which of the events are not to be routed yet."""
    outputs = [
        _output_row(output, place=place, row=row)
        for each in reports
        if isinstance(each, Completion)
        and (row := rows.get(each.fence.task_id)) is not None
        and row["status"] == TaskStatus.SUCCEEDED
        for place, output in enumerate(each.outputs)
    ]
    rewritten = [each for each in outputs if rows[each["task_id"]]["is_maintaining"]]
    published = {task_id: [one] for task_id, one in (await rewrite(connection, rewritten)).items()}
    outputs = [each for each in outputs if not rows[each["task_id"]]["is_maintaining"]]
    applying: set[int] = set()
    if not outputs:
        return published, applying
    found = await connection.execute(query("publish"), {"outputs": Jsonb(outputs)})
    await end_turns(
        connection, sorted({each["task_id"] for each in outputs if each["mode"] == "merge"})
    )
    for row in await found.fetchall():
        one = PublishedOutput(
            row["dataset"],
            row["partition_key"],
            PublishOutcome(row["outcome"]),
            row["revision"],
            row["event_seq"],
        )
        published.setdefault(row["task_id"], []).append(one)
        if row["is_applying"]:
            applying.add(row["event_seq"])
    return published, applying


async def _close(
    connection: Connection,
    reports: Sequence[AttemptReport],
    ended: Mapping[int, AttemptEnd],
    rows: Mapping[int, Mapping[str, Any]],
) -> None:
    if not reports:
        return
    answers = [ended[each.fence.task_id] for each in reports]
    asked = {
        "tasks": [each.fence.task_id for each in reports],
        "attempts": [each.fence.attempt for each in reports],
        "outcomes": [_outcome(each, answer) for each, answer in zip(reports, answers, strict=True)],
        "reasons": [rows[each.fence.task_id]["told"] for each in reports],
        "said": [_digest(each) for each in reports],
        "answers": [_kept(each) for each in answers],
        "logs": [each.log and storable(each.log) for each in reports],
        "metrics": [storable_json(each.metrics) if each.metrics else None for each in reports],
        "bytes_max": SAYING_BYTES_MAX,
    }
    await connection.execute(query("close_attempts"), asked)


def _kept(ended: AttemptEnd) -> Jsonb:
    said = msgspec.to_builtins(ended.bounded())
    del said["is_again"]
    return Jsonb(said)


async def _answer_again(
    connection: Connection,
    reports: Sequence[AttemptReport],
    refused: Mapping[int, tuple[TaskRefusalReason, str]],
) -> Mapping[int, AttemptEnd | Refusal]:
    """What to tell those whose attempt was not ended now."""
    if not reports:
        return {}
    found = await connection.execute(
        query("earlier_answers"), fence_arrays(each.fence for each in reports)
    )
    earlier = {row["task_id"]: row for row in await found.fetchall()}
    sound = [each for each in _completions(reports) if each.fence.task_id not in refused]
    found = await connection.execute(query("misplaced_outputs"), output_arrays(sound))
    misplaced = {
        row["task_id"]: (
            TaskRefusalReason.OUTPUTS,
            f"Dataset {row['dataset']} is not an output of this task.",
        )
        for row in await found.fetchall()
    }
    refused = {**refused, **misplaced}
    states = await task_states(connection, [each.fence.task_id for each in reports])
    answers: dict[int, AttemptEnd | Refusal] = {}
    for each in reports:
        task_id = each.fence.task_id
        before, row = earlier.get(task_id), states.get(task_id)
        if before is not None and before["said"] == _digest(each):
            same = msgspec.convert(before["answer"], AttemptEnd)
            answers[task_id] = replace(same, is_again=True)
        elif before is not None and row is not None:
            answers[task_id] = Refusal(task_id, TaskRefusalReason.DIFFERENT, row.state)
        elif task_id in refused and row is not None:
            why, told = refused[task_id]
            answers[task_id] = Refusal(task_id, why, row.state, told)
        else:
            answers[task_id] = refusal(task_id, row)
    return answers


async def _wake_freed(connection: Connection, task_ids: Iterable[int]) -> None:
    if tasks := list(task_ids):
        await wake(connection, "wake_freed", tasks=tasks)


def _outputs_problem(report: AttemptReport) -> str:
    if not isinstance(report, Completion):
        return ""
    if report.why_not:
        return report.why_not
    places = ((each.dataset, each.partition_key, each.append_key) for each in report.outputs)
    if twice := _more_than_once(places):
        return f"Dataset {twice[0][0]} has the same output twice."
    for each in report.outputs:
        is_range = each.start is not None and each.end is not None and each.start < each.end
        if (each.start is not None or each.end is not None) and not is_range:
            return "A range needs a start that is lower than its end."
        if each.partition_key is None and each.start is not None:
            return "A range needs the key of its partition."
        if each.partition_key is not None and each.cursor is not None:
            return "An output has a partition or a cursor, not both."
        if problem := _text_problem(each):
            return problem
    return ""


def _more_than_once(places: Iterable[Place]) -> list[Place]:
    return [place for place, count in Counter(places).items() if count > 1]


def _text_problem(output: TaskOutput) -> str:
    if not _UUID.fullmatch(output.dataset):
        return "A dataset is named by its uuid."
    for what, text, bytes_max in (
        ("The key of a partition", output.partition_key, 500),
        ("A key to append by", output.append_key, 1000),
        ("A location", output.location, 10_000),
    ):
        if text is not None and (
            storable(text) != text or not 1 <= len(text.encode()) <= bytes_max
        ):
            return f"{what} has 1 to {bytes_max} bytes that can be stored."
    numbers = (output.start, output.end, output.cursor)
    if any(number is not None and not -(2**63) <= number < 2**63 for number in numbers):
        return "A range or a cursor is a number of 64 bits."
    return ""


def _completions(
    reports: Iterable[AttemptReport], *, among: Container[int] | None = None
) -> list[Completion]:
    return [
        each
        for each in reports
        if isinstance(each, Completion) and (among is None or each.fence.task_id in among)
    ]


def _output_row(output: TaskOutput, *, place: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
    start, end = output.start, output.end
    if start is None and row["own_key"] is not None and row["own_key"] == output.partition_key:
        # The task's own partition is its own range, whether or not its function has said so.
        start, end = row["own_start"], row["own_end"]
    return {
        "task_id": row["task_id"],
        "place": place,
        "attempt": row["attempt"],
        "dataset_id": output.dataset,
        "generation": row["generation"],
        "mode": "append" if output.dataset == row["aside"] else row["update_mode"],
        "partition_key": output.partition_key,
        "range_start": start,
        "range_end": end,
        "cursor": output.cursor,
        "append_key": output.append_key or f"task:{row['task_id']}",
        "location": output.location,
        "news": row["dedupe_key"],
        "base_revision": output.base_revision,
        **_facts(output.facts),
    }


def _facts(facts: Facts | None) -> Mapping[str, Any]:
    if facts is None:
        return {}
    return {
        "files": facts.files,
        "rows": facts.rows,
        "bytes": facts.bytes,
        "manifest": facts.manifest,
    }


def _outcome(report: AttemptReport, ended: AttemptEnd) -> str:
    if ended.status is TaskStatus.CANCELLED:
        return "cancelled"
    if isinstance(report, Completion):
        return "completed"
    return "released" if ended.status is TaskStatus.QUEUED else "failed"


def _measured(report: AttemptReport, ended: AttemptEnd, row: Mapping[str, Any]) -> AttemptMeasure:
    outputs = report.outputs if isinstance(report, Completion) else ()
    # What was not published, because the attempt was cancelled, has no answer for its outputs.
    facts = [
        output.facts
        for output, one in zip(outputs, ended.published, strict=False)
        if one.outcome is PublishOutcome.PUBLISHED and output.facts is not None
    ]
    return AttemptMeasure(
        job=row["job"],
        outcome=_outcome(report, ended),
        seconds=row["ran_seconds"],
        published_rows=sum(each.rows or 0 for each in facts),
        published_bytes=sum(each.bytes for each in facts),
    )


def _reason(report: AttemptReport) -> str | None:
    return None if isinstance(report, Completion) else storable(report.reason)


def _digest(report: AttemptReport) -> str:
    """What tells one report of an attempt from another."""
    if isinstance(report, Completion):
        kind = "Completion"
        body: Mapping[str, Any] = {"outputs": [_words(each) for each in report.outputs]}
    elif isinstance(report, Release):
        kind = "Release"
        body = {"reason": report.reason, "is_delayed": report.is_delayed}
    else:
        kind = "Failure"
        body = {"reason": report.reason, "is_retried": report.is_retried}
    # The kinds are stored, whatever the classes are called. ASCII, so that no text is too strange
    # to be told from another. Where the log is, and what it took, say nothing of what was done.
    return hashlib.sha256(json.dumps([kind, body]).encode()).hexdigest()


def _words(output: TaskOutput) -> Mapping[str, Any]:
    # The sum of its manifest stands for all that it says. What has none is as it always was.
    words = {name: getattr(output, name) for name in _WORDS}
    if output.base_revision is None:
        del words["base_revision"]
    return words if output.facts is None else {**words, "manifest": output.facts.manifest}
