"""The columns of a dataset, and how they may change from one publication to the next. Pure.

All partitions of one generation share a schema, and it only grows:

| a new publication | is |
|---|---|
| has the same columns, in any order | taken |
| has a column more that is nullable | taken; earlier partitions have nulls there |
| leaves a nullable column out | taken; it has nulls there |
| has a column more that is not nullable | refused, once there are other partitions |
| leaves out a column that is not nullable | refused |
| has a narrower type in a column (`int` for `bigint`), or fewer nested fields | taken |
| has a wider type in a column, or new nested fields | taken; the column is wider from then on |
| has a type in a column that neither holds nor fits | refused |
| has nulls in a column that had none so far | taken; the column is nullable from then on |
| has a column twice, or one that differs from another only in upper and lower case | refused |

Types are Spark's own words (`bigint`, `decimal(10,2)`, `array<string>`, `struct<a:int>`); which one
is wider, `widening` says. Names are compared as they are written, but two that Spark would mix up
are never in one schema. What needs another schema is a new generation, which a change of the job's
config makes. Called by the dispatcher, which keeps the schema of each generation and applies this
in the transaction that publishes, by runtimes that know the columns before they compute anything,
and by readers, which read all partitions with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.datasets.widening import widened
from penstock.kernel.errors import SchemaRefused

_WAY_OUT: Final = (
    "Another schema needs a new generation: change the job's config and apply the DAG."
)


HIDDEN: Final = "_penstock_"
"""How the names of columns begin that are in files, and in no schema: only merges read them."""


def is_hidden(name: str) -> bool:
    """Whether readers do not see this column of a file."""
    return name.startswith(HIDDEN)


@dataclass(frozen=True, slots=True)
class Column:
    """A column."""

    name: str
    type: str
    is_nullable: bool = True


def evolve(held: Sequence[Column], new: Sequence[Column]) -> tuple[Column, ...]:
    """The schema of a generation after a publication with these columns, or `SchemaRefused`.

    `held` is what the generation has so far, empty if nothing is known. What is equal to `held`
    needs no writing. A publication that says nothing of its columns changes nothing.
    """
    _refuse_doubles(new)
    if not held or not new:
        return tuple(held) or tuple(new)
    added = _added(held, new)
    kept = {each.name: each for each in new}
    grown = []
    for each in held:
        found = kept.get(each.name)
        if found is None and not each.is_nullable:
            raise SchemaRefused(
                f"The column {each.name!r} ({each.type}) is missing, and it may not be null.",
                hint=f"Write the column. {_WAY_OUT}",
                column=each.name,
            )
        both = each.type if found is None else widened(each.type, found.type)
        if found is not None and both is None:
            raise SchemaRefused(
                f"The column {each.name!r} is {found.type} here, and {each.type} in what is"
                " published of this generation.",
                hint=f"Cast it to {each.type}. {_WAY_OUT}",
                column=each.name,
            )
        is_nullable = each.is_nullable or (found is not None and found.is_nullable)
        grown.append(Column(each.name, both or each.type, is_nullable))
    return (*grown, *added)


def refuse_for_good(held: Sequence[Column], planned: Sequence[Column]) -> None:
    """Raise `SchemaRefused` if columns of these types will not be taken, whatever happens.

    `held` is what a generation has now. It may grow before something of these columns is published,
    which takes nothing back: a column keeps its name, and its type only becomes wider. But one that
    may not be null today may be by then, so that is not judged here.
    """
    evolve(_loose(held), _loose(planned))


def digest(columns: Iterable[Column]) -> str:
    """A SHA-256 that is the same for the same columns, in any order."""
    rows = sorted((each.name, each.type, each.is_nullable) for each in columns)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _loose(columns: Iterable[Column]) -> list[Column]:
    return [replace(each, is_nullable=True) for each in columns]


def _refuse_doubles(new: Sequence[Column]) -> None:
    seen: dict[str, str] = {}
    for each in new:
        folded = each.name.casefold()
        if folded in seen:
            raise _mixed_up(each.name, seen[folded])
        seen[folded] = each.name


def _added(held: Sequence[Column], new: Sequence[Column]) -> list[Column]:
    names = {each.name for each in held}
    folded = {each.name.casefold(): each.name for each in held}
    added = [each for each in new if each.name not in names]
    for each in added:
        other = folded.get(each.name.casefold())
        if other is not None:
            raise _mixed_up(each.name, other)
        if not each.is_nullable:
            raise SchemaRefused(
                f"The column {each.name!r} ({each.type}) is new and may not be null, and"
                " partitions are published that do not have it.",
                hint=f"Make it nullable, or leave it out. {_WAY_OUT}",
                column=each.name,
            )
    return added


def _mixed_up(name: str, other: str) -> SchemaRefused:
    if name == other:
        return SchemaRefused(
            f"The column {name!r} is there twice.", hint="Give one another name.", column=name
        )
    return SchemaRefused(
        f"The columns {name!r} and {other!r} differ only in upper and lower case.",
        hint="Spark would mix them up: give one another name.",
        column=name,
    )
