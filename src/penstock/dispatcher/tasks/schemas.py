"""Whether what attempts have made fits the schemas of their datasets, which only grow.

All partitions of a generation share a schema; the rules are `penstock.datasets.schema`'s. Mostly
nothing changes, and that is seen without a lock, for what a schema allows once it allows for ever.
Where one has to grow, the attempts are locked, then the schemas, and what is grown is grown in the
order of the tasks: each of them fits all of its outputs, or is refused and changes nothing, and its
neighbours go on. The order of locks is tasks by id, then schemas, then partitions by name.

Where the DAG declares the columns of an output, what has others is refused first, without a lock:
the task's own definition says what they are.

Called by `penstock.dispatcher.tasks.completion`, in its transaction and before it ends anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg.types.json import Jsonb

from penstock.datasets.schema import Column, evolve, refuse_undeclared
from penstock.dispatcher.dag.model import OutputStorage
from penstock.dispatcher.database.pool import Connection, query
from penstock.dispatcher.tasks.model import Completion, Fence, TaskOutput
from penstock.dispatcher.tasks.rows import fence_arrays, storable
from penstock.kernel.errors import SchemaRefused

Columns = tuple[Column, ...]
Place = tuple[str, str]
"""A dataset and its generation."""


@dataclass(frozen=True, slots=True)
class WrittenColumns:
    """What completions say to have written: where it belongs, and the columns of what is there."""

    places: Mapping[tuple[int, str], Place]
    """By task and dataset; what is misplaced is not among them."""
    schemas: Mapping[Place, Columns]
    declared: Mapping[tuple[int, str], DeclaredOutput]
    """By task and dataset; only what the DAG declares."""


@dataclass(frozen=True, slots=True)
class DeclaredOutput:
    """What the DAG says of the columns of an output."""

    columns: Columns
    is_hot: bool
    """Whether it has a table in Postgres, too."""


def written(rows: Sequence[Mapping[str, Any]]) -> WrittenColumns:
    """From the rows of `hold_outputs`."""
    found = [row for row in rows if row["dataset"] is not None]
    guarded = rows[0]["guarded"] or () if rows else ()
    return WrittenColumns(
        {
            (task_id, row["dataset"]): (row["dataset"], row["generation"])
            for row in found
            for task_id in row["tasks"]
        },
        {(row["dataset"], row["generation"]): stored_columns(row["columns"]) for row in found},
        {
            (row["task_id"], dataset): DeclaredOutput(
                declared_columns(said["columns"]), said.get("storage") == OutputStorage.POSTGRES
            )
            for row in guarded
            for dataset, said in (row["declared"] or {}).items()
        },
    )


def declared_columns(said: Sequence[Mapping[str, str]]) -> Columns:
    """Columns as the canonical form of a DAG has them."""
    return tuple(Column(name, kind) for each in said for name, kind in each.items())


async def refuse_misfits(
    connection: Connection,
    completions: Sequence[Completion],
    found: WrittenColumns,
    *,
    held: Sequence[Fence],
) -> Mapping[int, str]:
    """Grow the schemas as these need it; returns why, by task, for those that do not fit.

    Where one grows, the tasks of `held`, all that end in this call, are locked at once, in order.
    Nobody removes partitions of what they have written: `hold_outputs` has seen to that.
    """
    unfit = [each for each in completions if not _fits(each, found.places, found.schemas)]
    return await _grow(connection, unfit, found.places, held) if unfit else {}


def undeclared(completions: Iterable[Completion], found: WrittenColumns) -> Mapping[int, str]:
    """Why outputs are not what the DAG declares, by task."""
    if not found.declared:
        return {}
    said = {each.fence.task_id: _undeclared(each, found.declared) for each in completions}
    return {task_id: told for task_id, told in said.items() if told is not None}


def _undeclared(
    completion: Completion, declared: Mapping[tuple[int, str], DeclaredOutput]
) -> str | None:
    """Why an output is not what the DAG declares."""
    for output in completion.outputs:
        known = declared.get((completion.fence.task_id, output.dataset))
        if known is None:
            continue
        facts = output.facts
        is_known = facts is not None and (
            not facts.files or (facts.rows is not None and bool(facts.columns))
        )
        if known.is_hot and not is_known:
            return (
                "What is published with storage: postgres is Parquet whose columns are known, and"
                " this is not. Write Parquet, as with task.write_rows."
            )
        try:
            refuse_undeclared(known.columns, _said(output))
        except SchemaRefused as error:
            return f"{error.message} {error.hint}".strip()
    return None


def output_arrays(completions: Iterable[Completion]) -> Mapping[str, Sequence[Any]]:
    """Which datasets the tasks say to have written."""
    said = [(each.fence.task_id, output.dataset) for each in completions for output in each.outputs]
    return {
        "output_tasks": [task_id for task_id, _ in said],
        "output_datasets": [dataset for _, dataset in said],
    }


def _fits(
    completion: Completion,
    places: Mapping[tuple[int, str], Place],
    schemas: Mapping[Place, Columns],
) -> bool:
    """Whether nothing has to change for these outputs. What is misplaced is not judged here."""
    for output, place in _placed(completion, places):
        new, held = _said(output), schemas[place]
        # Mostly they are the very same.
        if not new or new == held:
            continue
        try:
            grown = evolve(held, new)
        except SchemaRefused:
            return False
        if grown != held:
            return False
    return True


async def _grow(
    connection: Connection,
    completions: Sequence[Completion],
    places: Mapping[tuple[int, str], Place],
    held: Sequence[Fence],
) -> Mapping[int, str]:
    """The same under locks, by those whose attempts are current and whose outputs are theirs."""
    found = await connection.execute(query("hold_attempts"), fence_arrays(held))
    # What was asked to stop publishes nothing.
    current = {row["task_id"] for row in await found.fetchall() if not row["cancel_asked"]}
    found = await connection.execute(query("misplaced_outputs"), output_arrays(completions))
    current -= {row["task_id"] for row in await found.fetchall()}
    asking = sorted(
        (each for each in completions if each.fence.task_id in current),
        key=lambda each: each.fence.task_id,
    )
    wanted = sorted({place for each in asking for _, place in _placed(each, places)})
    if not wanted:
        return {}
    named = {
        "datasets": [dataset for dataset, _ in wanted],
        "generations": [generation for _, generation in wanted],
    }
    await connection.execute(query("make_schemas"), named)
    rows = await (await connection.execute(query("lock_schemas"), named)).fetchall()
    before = {(row["dataset"], row["generation"]): stored_columns(row["columns"]) for row in rows}
    after, refused = _grown(asking, places, before)
    changed = sorted(place for place in after if after[place] != before[place])
    if changed:
        asked = {
            "datasets": [dataset for dataset, _ in changed],
            "generations": [generation for _, generation in changed],
            "columns": [Jsonb([_plain(each) for each in after[place]]) for place in changed],
        }
        await connection.execute(query("grow_schemas"), asked)
    return refused


async def grow_schema(
    connection: Connection, dataset: str, *, generation: str, columns: Sequence[Mapping[str, Any]]
) -> None:
    """Grow the schema of one generation by columns of another, or raise `SchemaRefused`."""
    named = {"datasets": [dataset], "generations": [generation]}
    await connection.execute(query("make_schemas"), named)
    (row,) = await (await connection.execute(query("lock_schemas"), named)).fetchall()
    before = stored_columns(row["columns"])
    after = evolve(before, stored_columns(columns))
    if after != before:
        grown = {**named, "columns": [Jsonb([_plain(each) for each in after])]}
        await connection.execute(query("grow_schemas"), grown)


def _grown(
    completions: Iterable[Completion],
    places: Mapping[tuple[int, str], Place],
    schemas: Mapping[Place, Columns],
) -> tuple[Mapping[Place, Columns], Mapping[int, str]]:
    """What schemas become, and who is refused. One who is refused grows nothing."""
    grown, refused = dict(schemas), dict[int, str]()
    for completion in completions:
        own = dict(grown)
        try:
            for output, place in _placed(completion, places):
                own[place] = evolve(own[place], _said(output))
        except SchemaRefused as error:
            refused[completion.fence.task_id] = f"{error.message} {error.hint}".strip()
        else:
            grown = own
    return grown, refused


def _placed(
    completion: Completion, places: Mapping[tuple[int, str], Place]
) -> Iterable[tuple[TaskOutput, Place]]:
    for output in completion.outputs:
        place = places.get((completion.fence.task_id, output.dataset))
        if place is not None:
            yield output, place


def _said(output: TaskOutput) -> Columns:
    """The columns of an output, as Postgres can hold them."""
    columns = () if output.facts is None else output.facts.columns
    return tuple(
        Column(storable(each.name), storable(each.type), each.is_nullable) for each in columns
    )


def stored_columns(plain: Sequence[Mapping[str, Any]] | None) -> Columns:
    """Columns as `generation_schema` has them."""
    return tuple(
        Column(each["name"], each["type"], each.get("is_nullable", True)) for each in plain or ()
    )


def _plain(column: Column) -> Mapping[str, Any]:
    return {"name": column.name, "type": column.type, "is_nullable": column.is_nullable}
