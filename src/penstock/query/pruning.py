"""Which parts and files of its datasets a query can leave out, by what its WHERE clauses say. Pure.

`conditions` takes the tree of a SELECT, as DuckDB's parser gives it, and says for each table what
must be true of each of its rows that the query uses. From that, `key_ranges` says which partition
keys are needed, and `file_filter` what the bounds of a file are held against (`datasets.bounds`).

A condition is JSON: None is anything; `["and", ...]`, `["or", ...]`; `[sign, column, kind, text]`,
and `["prefix", column, text]`. It is taken over only where it holds for certain, and leaves nothing
out otherwise:

- of WHERE, and of each use of a table: a table that is used twice, once without a condition, is
  read whole; so is one of which WITH gives the name, too;
- from comparisons that no null passes. So a row that is left out would have been dropped after an
  outer join, too. Joins by position or by nearness (ASOF) count rows, and leave nothing out;
- of columns that are named with their table, or of the only table of a FROM;
- against constants of which the value is certain: what DuckDB would cast in its own way
  (a number against a text, a fraction) is no condition.

What the process of a query says is not trusted, so trees are bounded again when they are read; a
wrong one can only leave out what its own query would have read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, TypeAlias

from penstock.datasets.bounds import (
    ColumnKind,
    Compared,
    Conjunction,
    Disjunction,
    Filter,
    Prefixed,
    Sign,
    Unknown,
    Value,
)
from penstock.protocol.queries import KeyRange

Condition: TypeAlias = Any
RANGES_MAX: Final = 1_000
SPANS_MAX: Final = 16
"""How many ranges there may be that are more than one key."""
DEPTH_MAX: Final = 20
_NODES_MAX: Final = 5_000
_LAST: Final = 0x10FFFF
_SURROGATES: Final = range(0xD800, 0xE000)
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - of timestamps without a zone
_SIGNS: Final = {
    "COMPARE_EQUAL": "=",
    "COMPARE_LESSTHAN": "<",
    "COMPARE_LESSTHANOREQUALTO": "<=",
    "COMPARE_GREATERTHAN": ">",
    "COMPARE_GREATERTHANOREQUALTO": ">=",
}
_FLIPPED: Final = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_JOINS: Final = ("INNER", "LEFT", "RIGHT", "OUTER")
_INTEGERS: Final = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT")
_PREFIX_FUNCTIONS: Final = ("starts_with", "prefix", "^@")
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
_MOMENT: Final = re.compile(r"\d{4}-\d{2}-\d{2}( \d{2}:\d{2}:\d{2}(\.\d{1,6})?)?")


def folded(name: str) -> str:
    """A name as DuckDB compares it: without case, of the letters of ASCII."""
    return name.lower() if name.isascii() else name


def conditions(statement: Any) -> dict[str, Condition]:
    """What is true of all rows that a statement uses of each table that it names."""
    found: dict[str, list[Condition]] = {}
    known: dict[int, Condition] = {}
    given: set[str] = set()
    waiting = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        if not isinstance(node, dict):
            continue
        if isinstance(node.get("cte_map"), dict):
            given |= {folded(str(each["key"])) for each in node["cte_map"].get("map", ())}
        if node.get("type") == "SELECT_NODE" and node.get("where_clause"):
            known |= _of_select(node)
        if node.get("type") == "BASE_TABLE":
            found.setdefault(node["table_name"], []).append(known.get(id(node)))
        waiting += node.values()
    return {
        name: _any_of(every)
        for name, every in found.items()
        if None not in every and folded(name) not in given
    }


def _of_select(node: Mapping[str, Any]) -> dict[int, Condition]:
    sources = list(_sources(node["from_table"]))
    aliases = [folded(str(each.get("alias") or each.get("table_name"))) for each in sources]
    if any(each.get("type") is None for each in sources) or len({*aliases}) < len(aliases):
        return {}
    is_alone = len(sources) == 1
    return {
        id(source): _Reader(alias, is_alone=is_alone).read(node["where_clause"], 0)
        for source, alias in zip(sources, aliases, strict=True)
        if source["type"] == "BASE_TABLE"
        and not (source.get("sample") or source.get("at_clause") or source["column_name_alias"])
    }


def _sources(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a FROM joins; something without a type, if it is joined in another way than by ON."""
    if node.get("type") != "JOIN":
        yield node
    elif node.get("ref_type") in ("REGULAR", "CROSS") and node.get("join_type") in _JOINS:
        yield from _sources(node["left"])
        yield from _sources(node["right"])
    else:
        yield {}


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads what a WHERE says of the table with this alias."""

    alias: str
    is_alone: bool

    def read(self, node: Mapping[str, Any], depth: int) -> Condition:
        if depth > DEPTH_MAX:
            return None
        kind, children = node.get("type"), node.get("children", [])
        match kind:
            case "CONJUNCTION_AND":
                said = [self.read(each, depth + 1) for each in children]
                return _all_of([each for each in said if each is not None])
            case "CONJUNCTION_OR":
                said = [self.read(each, depth + 1) for each in children]
                return None if None in said else _any_of(said)
            case "COMPARE_IN":
                column, *values = children
                said = [self._compared("=", column, each) for each in values]
                return None if None in said else _any_of(said)
            case "COMPARE_BETWEEN":
                low = self._compared(">=", node["input"], node["lower"])
                high = self._compared("<=", node["input"], node["upper"])
                return _all_of([each for each in (low, high) if each is not None])
            case "FUNCTION":
                return self._prefixed(str(node.get("function_name")), children)
        if (sign := _SIGNS.get(str(kind))) is None:
            return None
        left, right = node["left"], node["right"]
        if left.get("type") == "COLUMN_REF":
            return self._compared(sign, left, right)
        return self._compared(_FLIPPED[sign], right, left)

    def _compared(self, sign: str, left: Any, right: Any) -> Condition:
        column, constant = self._column(left), _constant(right)
        return None if column is None or constant is None else [sign, column, *constant]

    def _prefixed(self, function: str, children: Sequence[Any]) -> Condition:
        if len(children) != 2:
            return None
        column, constant = self._column(children[0]), _constant(children[1])
        if column is None or constant is None or constant[0] != "text":
            return None
        text = constant[1]
        if function == "~~" and text.endswith("%"):
            text = text[:-1]
            return None if any(x in text for x in "%_\\") else ["prefix", column, text]
        return ["prefix", column, text] if function in _PREFIX_FUNCTIONS else None

    def _column(self, node: Mapping[str, Any]) -> str | None:
        if node.get("type") != "COLUMN_REF":
            return None
        match [folded(str(each)) for each in node["column_names"]]:
            case [name] if self.is_alone:
                return name
            case [alias, name] if alias == self.alias:
                return name
        return None


def _constant(node: Mapping[str, Any]) -> tuple[str, str] | None:
    """The kind of a constant, and its value as a text."""
    if node.get("type") == "OPERATOR_CAST" and not node.get("try_cast"):
        inner, to = _constant(node["child"]), node["cast_type"]["id"]
        if inner is None or inner[0] != "text":
            return None
        if to == "DATE" and _DATE.fullmatch(inner[1]):
            return "date", inner[1]
        if to == "TIMESTAMP" and _MOMENT.fullmatch(inner[1]):
            return "timestamp", inner[1]
        return None
    if node.get("type") != "VALUE_CONSTANT" or node["value"]["is_null"]:
        return None
    value, kind = node["value"]["value"], node["value"]["type"]
    match kind["id"]:
        case "VARCHAR" if isinstance(value, str) and "\x00" not in value:
            return "text", value
        case "DECIMAL" if isinstance(value, int):
            return "number", str(Decimal(value).scaleb(-int(kind["type_info"]["scale"])))
        case name if name in _INTEGERS and isinstance(value, int):
            return "number", str(value)
    return None


def _all_of(every: Sequence[Condition]) -> Condition:
    return (["and", *every] if len(every) > 1 else every[0]) if every else None


def _any_of(every: Sequence[Condition]) -> Condition:
    return ["or", *every] if len(every) > 1 else every[0]


def checked(said: Any) -> Condition:
    """A condition as the process of a query told it; None for one that is too large or none."""
    left = [_NODES_MAX]

    def look(node: Any, depth: int) -> bool:
        left[0] -= 1
        if left[0] < 0 or depth > 2 * DEPTH_MAX:
            return False
        match node:
            case ["and" | "or", *parts] if parts:
                return all(look(each, depth + 1) for each in parts)
            case ["prefix", str(), str()]:
                return True
            case [str(sign), str(), str(), str()]:
                return sign in _FLIPPED
        return False

    return said if look(said, 0) else None


def needed_keys(condition: Condition, column: str) -> list[KeyRange] | None:
    """Which partitions are needed, if a text column has their keys; None for all of them."""
    found = key_ranges(condition, column)
    if found is None or sum(low != high or low is None for low, high in found) > SPANS_MAX:
        return None
    return [KeyRange(low=low, high=high) for low, high in found]


def key_ranges(condition: Condition, column: str) -> list[tuple[str | None, str | None]] | None:
    """Which values of a text column a condition lets through; None for all of them."""
    match condition:
        case ["and", *parts]:
            known = [each for part in parts if (each := key_ranges(part, column)) is not None]
            found = known[0] if known else None
            for each in known[1:]:
                assert found is not None, "it begins with the first"
                found = [both for x in found for y in each if (both := _overlap(x, y))]
                if len(found) > RANGES_MAX:
                    return None
            return found
        case ["or", *parts]:
            every = [key_ranges(part, column) for part in parts]
            ranges = [each for some in every if some is not None for each in some]
            return None if None in every or len(ranges) > RANGES_MAX else ranges
        case ["prefix", name, text] if name == column:
            return [(text, _following(text))]
        case [sign, name, "text", text] if name == column:
            low = text if sign in ("=", ">", ">=") else None
            return [(low, text if sign in ("=", "<", "<=") else None)]
    return None


def _overlap(
    one: tuple[str | None, str | None], other: tuple[str | None, str | None]
) -> tuple[str | None, str | None] | None:
    lows = [each for each in (one[0], other[0]) if each is not None]
    highs = [each for each in (one[1], other[1]) if each is not None]
    low, high = max(lows, default=None), min(highs, default=None)
    return None if low is not None and high is not None and low > high else (low, high)


def _following(prefix: str) -> str | None:
    """A text that none is above that begins so; None if there is none."""
    kept = prefix.rstrip(chr(_LAST))
    if not kept:
        return None
    code = ord(kept[-1]) + 1
    return kept[:-1] + chr(_SURROGATES.stop if code in _SURROGATES else code)


def file_filter(condition: Condition, kinds: Mapping[str, tuple[str, ColumnKind]]) -> Filter:
    """A condition as the bounds of files are asked; `kinds` by names without case."""
    match condition:
        case ["and", *parts]:
            return Conjunction(tuple(file_filter(each, kinds) for each in parts))
        case ["or", *parts]:
            return Disjunction(tuple(file_filter(each, kinds) for each in parts))
        case ["prefix", name, text] if name in kinds:
            return Prefixed(kinds[name][0], text)
        case [sign, name, kind, text] if name in kinds:
            column, compared = kinds[name]
            if (value := _value(kind, text, compared)) is not None:
                return Compared(column, Sign(sign), value)
    return Unknown()


def _value(kind: str, text: str, column: ColumnKind) -> Value | None:
    """A constant as a value of a column; None where DuckDB may compare them in another way."""
    try:
        match column:
            case ColumnKind.TEXT if kind == "text":
                return text
            case ColumnKind.NUMBER if kind == "number":
                return int(text) if "." not in text else None
            case ColumnKind.DECIMAL if kind == "number":
                return Decimal(text)
            case ColumnKind.DAY if kind in ("text", "date") and _DATE.fullmatch(text):
                return (date.fromisoformat(text) - _EPOCH.date()).days
            case ColumnKind.MOMENT | ColumnKind.LOCAL_MOMENT if kind != "number":
                if _MOMENT.fullmatch(text):
                    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)
    except (ValueError, ArithmeticError):
        pass
    return None
