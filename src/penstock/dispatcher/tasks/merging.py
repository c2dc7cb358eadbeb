"""Whether what was merged was merged with what is published: a compare-and-swap by revisions.

A task of a job that merges is given what is published of its partition, merges what it has made
with it, and says with each output which revision that was (`base_revision`). Of two that have
merged with the same one, the second would drop the rows of the first; so before an attempt ends,
each of its outputs is compared with what is published now:

| what is published | and the turn is | the answer |
|---|---|---|
| is what it was merged with | nobody's, or its own | it is published |
| is something else | nobody's, or its own | merge again, with this; the `TRIES_MAX`th |
| | | time, and later, it has its turn |
| whatever it is | another's | wait: say the same again |

Where the output has `partition_by`, the partitions are known when the result is, so the attempt is
given nothing beforehand. It computes its result, keeps it, and says which partitions that is of,
with `NOT_READ` for their revisions. No partition has that one, so nothing is published: it is told
what there is, or to wait, and no conflict is counted. Then it merges what it has kept with all of
them. They are compared as one: all are published, or none is. What an attempt has kept has the same
partitions each time, and turns are taken for all of them at once: no two attempts wait for each
other.

A refusal ends nothing: the attempt goes on, and merges again. The order of merges is that of their
commits, never that of the tasks: each row says which version and task it is of, so every order
gives the same rows (`penstock.runtimes.spark.merging`), and a late task loses nothing.

The turn is a row in `merge_lease` of all partitions that the attempt writes, taken at once or not
at all. It is worth something while the attempt runs: however it ends, also by the reaper, the
next may take it. So whoever was too late several times is the only one to publish until it has, and
there is progress. A crash leaves a conflict that was counted, or a turn of an attempt whose lease
runs out.

Those that merge into one dataset are compared one after the other, by the lock of its schema, which
covers partitions that are not there yet. The order of locks is tasks by id, then schemas. Called by
`penstock.dispatcher.tasks.ending`, in its transaction and before it ends anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.tasks.rows import fence_arrays
from penstock.dispatcher.tasks.values import Completion, Fence
from penstock.runtimes.base import NOT_READ

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
class Moved:
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
) -> Mapping[int, Moved | str]:
    """Those that may not end now, by task: what has moved, or what is wrong as a sentence.

    All of these merge; `written` has the datasets of each, and their generation. Of `held`, all
    that end in this call, the tasks are locked at once: in two steps they would not be in order.
    """
    refused: dict[int, Moved | str] = {
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
) -> Mapping[int, Moved]:
    heads = await _heads(connection, completions, written)
    moved: list[Completion] = []
    refused: dict[int, Moved] = {}
    taken: set[Partition] = set()
    for each in sorted(completions, key=lambda one: one.fence.task_id):
        own = heads[each.fence.task_id]
        if any(head.is_held or head.partition in taken for head in own):
            # Of two in one call the second finds out, when it asks again, what the first has made.
            refused[each.fence.task_id] = Moved(None)
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
) -> Mapping[int, Moved]:
    """What those are told that have merged with what is not published any more, or not yet."""
    fences = [each.fence for each in moved]
    conflicts = await _conflicts(
        connection,
        [fence for fence in fences if all(head.base != NOT_READ for head in heads[fence.task_id])],
    )
    told: dict[int, Moved] = {}
    turns: list[tuple[Partition, Fence]] = []
    for fence in fences:
        own = heads[fence.task_id]
        is_busy = any(head.partition in taken for head in own)
        if conflicts.get(fence.task_id, 0) >= TRIES_MAX and not is_busy:
            turns += [(head.partition, fence) for head in own]
            taken |= {head.partition for head in own}
        # Who would merge while another has the turn, or publishes now, would be too late again.
        told[fence.task_id] = Moved(None if is_busy else _current(own))
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
