"""The columns of a dataset, and how they may change from one publication to the next. Pure.

All partitions of one generation share a schema, and it only grows (PUBLISH-13):

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

Types are Spark's own words (`bigint`, `decimal(10,2)`, `array<string>`, `struct<a:int>`); which
one is wider, `widening` says. Names are compared as they are written, but two that Spark would
mix up are never in one schema. What needs another schema is a new generation, which a change of
the job's config makes. Called by the dispatcher, which keeps the schema of each generation and
applies this in the transaction that publishes, by runtimes that know the columns before they
compute anything, and by readers, which read all partitions with it.

Types in Spark's words, and which one holds the values of two. Pure.

A type is wider than another if every value of the narrower one is the same value in it, and if
Spark's readers and Arrow read a Parquet file of the narrower one as the wider one:

| values | become |
|---|---|
| `tinyint`, `smallint`, `int` | any larger whole number, up to `bigint` |
| `float` | `double` |
| `decimal(p,s)` | a decimal with as many digits, or more, on both sides of the point |
| `struct<…>` | one with more fields, which are null in what was written before |
| `array<…>`, `map<…>` | the same of wider elements, or values; the keys of a map never change |

Nothing else is: a whole number is no fraction, and a day is no instant. Called by `schema`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.kernel.errors import SchemaRefused

_INTEGERS: Final = ("tinyint", "smallint", "int", "bigint")
_FRACTIONS: Final = ("float", "double")
_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")
_DIGITS_MAX: Final = 38
_OPEN, _CLOSE = "<(", ">)"


def widened(one: str, other: str) -> str | None:
    """The type that holds the values of both; None if there is none."""
    if one == other:
        return one
    for chain in (_INTEGERS, _FRACTIONS):
        if one in chain and other in chain:
            return max(one, other, key=chain.index)
    decimals = _DECIMAL.fullmatch(one), _DECIMAL.fullmatch(other)
    if decimals[0] and decimals[1]:
        return _decimal(*(tuple(map(int, each.groups())) for each in decimals if each))
    (kind, inner), (other_kind, other_inner) = parts_of(one), parts_of(other)
    if kind != other_kind:
        return None
    match kind:
        case "array":
            element = widened(inner[0], other_inner[0])
            return None if element is None else f"array<{element}>"
        case "map" if inner[0] == other_inner[0]:
            value = widened(inner[1], other_inner[1])
            return None if value is None else f"map<{inner[0]},{value}>"
        case "struct":
            return _struct(inner, other_inner)
    return None


def _decimal(one: tuple[int, ...], other: tuple[int, ...]) -> str | None:
    scale = max(one[1], other[1])
    digits = max(one[0] - one[1], other[0] - other[1]) + scale
    return f"decimal({digits},{scale})" if digits <= _DIGITS_MAX else None


def _struct(held: list[str], new: list[str]) -> str | None:
    """The fields of both: those that are held in their order, then what is new."""
    fields = dict(field_of(each) for each in held)
    folded = {name.casefold() for name in fields}
    for name, kind in map(field_of, new):
        if name in fields:
            both = widened(fields[name], kind)
            if both is None:
                return None
            fields[name] = both
        elif name.casefold() in folded:
            return None  # Spark would mix them up.
        else:
            fields[name] = kind
            folded.add(name.casefold())
    return f"struct<{','.join(f'{name}:{kind}' for name, kind in fields.items())}>"


def parts_of(text: str) -> tuple[str, list[str]]:
    """What a type is called, and what stands between its brackets."""
    kind, is_open, rest = text.partition("<")
    if not is_open or not rest.endswith(">"):
        return text, []
    return kind, list(_split(rest[:-1], ","))


def field_of(text: str) -> tuple[str, str]:
    """The name, as it is written, and the type of a field of a struct."""
    name, *kind = _split(text, ":")
    return name, ":".join(kind)


def _split(text: str, mark: str) -> Iterator[str]:
    """The pieces between marks that stand in no brackets and in no quoted name."""
    depth, start, is_quoted = 0, 0, False
    for place, character in enumerate(text):
        if character == "`":
            is_quoted = not is_quoted
        elif is_quoted:
            continue
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif character == mark and not depth:
            yield text[start:place]
            start = place + 1
    yield text[start:]


_PRIMITIVES: Final = (
    *("boolean", *_INTEGERS, *_FRACTIONS),
    *("string", "binary", "date", "timestamp", "timestamp_ntz"),
)
_FIELD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_DEPTH_MAX: Final = 20
_TYPE_CHARACTERS_MAX: Final = 1_000


def declared_type(text: str) -> str:
    """A type as somebody writes it, in the words of schemas; `ValueError` if there is none such.

    >>> declared_type("Decimal(12, 2)")
    'decimal(12,2)'
    """
    found = "".join(text.split())
    if len(found) > _TYPE_CHARACTERS_MAX:
        raise ValueError(f"has more than {_TYPE_CHARACTERS_MAX:,} characters")
    return _declared(found, 0)


def _declared(text: str, depth: int) -> str:
    kind, inner = parts_of(text)
    kind, wide = kind.lower(), depth + 1
    match kind:
        case "array" if len(inner) == 1 and depth < _DEPTH_MAX:
            return f"array<{_declared(inner[0], wide)}>"
        case "map" if len(inner) == 2 and depth < _DEPTH_MAX:
            return f"map<{_declared(inner[0], wide)},{_declared(inner[1], wide)}>"
        case "struct" if inner and depth < _DEPTH_MAX:
            fields = [field_of(each) for each in inner]
            names = {name.casefold() for name, _ in fields if _FIELD.fullmatch(name)}
            if len(names) == len(fields):
                said = (f"{name}:{_declared(each, wide)}" for name, each in fields)
                return f"struct<{','.join(said)}>"
    decimal = _DECIMAL.fullmatch(kind)
    if kind in _PRIMITIVES and not inner:
        return kind
    if decimal and 1 <= int(decimal[1]) <= _DIGITS_MAX and int(decimal[2]) <= int(decimal[1]):
        return f"decimal({int(decimal[1])},{int(decimal[2])})"
    raise ValueError(
        f"is no type; write {', '.join(_PRIMITIVES)}, decimal(12,2), or array<int>,"
        " map<string,int>, struct<a:int> of such"
    )


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


TASK_COLUMN: Final = Column(f"{HIDDEN}task", "bigint")
"""The one that stands in files that are merged: the number of the task that made the row."""


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


def refuse_undeclared(declared: Sequence[Column], new: Sequence[Column]) -> None:
    """Raise `SchemaRefused` if a publication has what the DAG does not declare of its dataset.

    A column may be missing, and narrower. That columns are null is never declared.
    """
    planned = {each.name: each for each in declared}
    for each in new:
        known = planned.get(each.name)
        if known is None:
            raise SchemaRefused(
                f"The column {each.name!r} ({each.type}) is not among the `columns` of the output.",
                hint="Add it to `columns` in the DAG, or leave it out.",
                column=each.name,
            )
        if widened(known.type, each.type) != known.type:
            raise SchemaRefused(
                f"The column {each.name!r} is {each.type} here, and {known.type} in the `columns`"
                " of the output.",
                hint=f"Cast it to {known.type}, or declare another type in the DAG.",
                column=each.name,
            )


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
            f"The column {name!r} is there twice.", hint="Rename one of them.", column=name
        )
    return SchemaRefused(
        f"The columns {name!r} and {other!r} differ only in upper and lower case.",
        hint="Spark ignores case: rename one of them.",
        column=name,
    )
