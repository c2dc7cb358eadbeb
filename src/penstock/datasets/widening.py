"""Types in Spark's words, and which one holds the values of two. Pure.

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

import re
from collections.abc import Iterator
from typing import Final

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
    (kind, inner), (other_kind, other_inner) = _parts(one), _parts(other)
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
    fields = dict(_field(each) for each in held)
    folded = {name.casefold() for name in fields}
    for name, kind in map(_field, new):
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


def _parts(text: str) -> tuple[str, list[str]]:
    """What a type is called, and what stands between its brackets."""
    kind, is_open, rest = text.partition("<")
    if not is_open or not rest.endswith(">"):
        return text, []
    return kind, list(_split(rest[:-1], ","))


def _field(text: str) -> tuple[str, str]:
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
