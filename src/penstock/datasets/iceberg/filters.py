"""Filters as clients send them with a scan, and what they say of a file. Pure.

`parsed` checks a filter in the REST protocol's JSON (in both of its forms) against a schema, with
bounds on its size and depth, and raises `InvalidInput` for what is wrong. Then, for each file,

- `Pruning.may_hold` says whether a row of the file could match. It says no only where that is
  proven: by the partition's own value, by a bound, or by a count of nulls. What has no bound may
  hold, and so may fractions, of which no file of a table has bounds (NaN, and the two zeros), and
  terms that are unknown here, such as transforms;
- `Pruning.residual` is what is left for the client to test on the file's rows: the whole filter,
  but for what the partition's identity decides. It keeps the client's own words.

A comparison with a null has one result in Iceberg, where its negation then matches, and another in
SQL: so a partition's value that is null decides nothing but `is-null` and `not-null`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final, TypeAlias

from penstock.datasets import bounds
from penstock.datasets.bounds import (
    Bound,
    Compared,
    Conjunction,
    Disjunction,
    Filter,
    Nullness,
    Prefixed,
    Sign,
)
from penstock.datasets.iceberg.files import PartitionSpec, TableFile
from penstock.datasets.iceberg.schemas import SchemaField, TableSchema
from penstock.datasets.iceberg.values import TableValue, from_bytes, from_json, kind_in
from penstock.kernel.errors import InvalidInput

NODES_MAX: Final = 20_000
"""Of one filter, with the values of its sets."""
DEPTH_MAX: Final = 200
TESTS_MAX: Final = 100_000
"""How many tests of a filter on files one plan makes."""
_LISTED_MAX: Final = 200
"""Of a longer list of values the ends are looked for alone."""


class Op(StrEnum):
    """A test of one column, in the protocol's words."""

    LESS = "lt"
    AT_MOST = "lt-eq"
    GREATER = "gt"
    AT_LEAST = "gt-eq"
    EQUAL = "eq"
    NOT_EQUAL = "not-eq"
    STARTS_WITH = "starts-with"
    NOT_STARTS_WITH = "not-starts-with"
    IS_NULL = "is-null"
    NOT_NULL = "not-null"
    IS_NAN = "is-nan"
    NOT_NAN = "not-nan"
    IN = "in"
    NOT_IN = "not-in"


_NEGATED: Final = {
    Op.LESS: Op.AT_LEAST,
    Op.AT_MOST: Op.GREATER,
    Op.EQUAL: Op.NOT_EQUAL,
    Op.STARTS_WITH: Op.NOT_STARTS_WITH,
    Op.IS_NULL: Op.NOT_NULL,
    Op.IS_NAN: Op.NOT_NAN,
    Op.IN: Op.NOT_IN,
}
_OPPOSITE: Final = {**_NEGATED, **{other: one for one, other in _NEGATED.items()}}
_SIGNS: Final = {
    Op.LESS: Sign.LESS,
    Op.AT_MOST: Sign.AT_MOST,
    Op.EQUAL: Sign.EQUAL,
    Op.AT_LEAST: Sign.AT_LEAST,
    Op.GREATER: Sign.GREATER,
}
_UNARY: Final = (Op.IS_NULL, Op.NOT_NULL, Op.IS_NAN, Op.NOT_NAN)
_NULLS: Final = (Op.IS_NULL, Op.NOT_NULL)
_SETS: Final = (Op.IN, Op.NOT_IN)
_LAST_BEFORE_SURROGATES: Final = 0xD7FF


@dataclass(frozen=True, slots=True)
class ColumnTest:
    """A test of a column against no value, one, or those of a set."""

    op: Op
    field: SchemaField
    values: tuple[TableValue, ...]
    said: Mapping[str, Any]
    """As the client wrote it, which it can read again."""


@dataclass(frozen=True, slots=True)
class OpaqueTest:
    """A test that is left to the client."""

    said: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BothOf:
    """And."""

    left: TableFilter
    right: TableFilter


@dataclass(frozen=True, slots=True)
class EitherOf:
    """Or."""

    left: TableFilter
    right: TableFilter


@dataclass(frozen=True, slots=True)
class Inverse:
    """Not."""

    child: TableFilter


TableFilter: TypeAlias = bool | ColumnTest | OpaqueTest | BothOf | EitherOf | Inverse


def parsed(said: Any, schema: TableSchema, *, is_case_sensitive: bool = True) -> TableFilter:
    """A filter from its JSON; None is no filter. Raises `InvalidInput`."""
    if said is None:
        return True
    return _Parser(schema, is_case_sensitive=is_case_sensitive).node(said, 0)


def as_json(wanted: TableFilter) -> Any:
    """The filter in the protocol's JSON."""
    match wanted:
        case bool():
            return wanted
        case ColumnTest() | OpaqueTest():
            return dict(wanted.said)
        case BothOf(left, right):
            return {"type": "and", "left": as_json(left), "right": as_json(right)}
        case EitherOf(left, right):
            return {"type": "or", "left": as_json(left), "right": as_json(right)}
        case Inverse(child):
            return {"type": "not", "child": as_json(child)}


class Pruning:
    """Asks a filter of one file after another."""

    def __init__(self, wanted: TableFilter, spec: PartitionSpec) -> None:
        self._wanted = wanted
        self._places = {each.source.id: place for place, each in enumerate(spec.fields)}
        self._decided = not any(each.id in self._places for each in fields_in(wanted))
        self._last: tuple[tuple[TableValue | None, ...], TableFilter] | None = None
        self._left = TESTS_MAX
        self._search: _Search | None = None

    def residual(self, partition: tuple[TableValue | None, ...]) -> TableFilter:
        """What is left of the filter in files of a partition; False if none of their rows match."""
        if self._decided:
            return self._wanted
        if self._last is None or self._last[0] != partition:
            self._last = (partition, _without(self._wanted, self._places, partition))
        return self._last[1]

    def may_hold(self, file: TableFile) -> bool:
        """Whether a row of the file could match.

        After `TESTS_MAX` tests of files, every one may: a large filter of many files would take a
        dispatcher longer than it saves.
        """
        left = self.residual(file.partition)
        if isinstance(left, bool):
            return left
        if self._search is None or self._search.of is not left:
            self._search = _Search(left)
        self._left -= self._search.size
        return self._left < 0 or self._search.may_hold(file)


class _Search:
    """A filter as bounds are asked, made once for many files."""

    def __init__(self, of: TableFilter) -> None:
        self.of = of
        self.size = size_of(of)
        self._types = {
            each.id: str(each.type) for each in fields_in(of) if kind_in(each.type) is not None
        }
        kinds = ((identity, kind_in(type_)) for identity, type_ in self._types.items())
        self._kinds = {str(identity): kind for identity, kind in kinds if kind is not None}
        self._searched = _searched(of, is_negated=False)

    def may_hold(self, file: TableFile) -> bool:
        there = {str(each): _bound(file, each, type_) for each, type_ in self._types.items()}
        return bounds.may_hold(self._searched, there, self._kinds, rows=file.rows)


def size_of(wanted: TableFilter) -> int:
    """How much a filter is to test and to tell of: its tests, and a little for each value."""
    match wanted:
        case BothOf(left, right) | EitherOf(left, right):
            return size_of(left) + size_of(right)
        case Inverse(child):
            return size_of(child)
        case ColumnTest(_, _, values):
            return 1 + len(values) // 8
    return 1


def partition_values(wanted: TableFilter, field_id: int) -> frozenset[TableValue] | None:
    """The values of an identity partition that a filter leaves; None if that is not said by values.

    For asking a database for some partitions instead of all. Null partitions are never in it.
    """
    match wanted:
        case False:
            return frozenset()
        case BothOf(left, right):
            one, other = partition_values(left, field_id), partition_values(right, field_id)
            if one is None or other is None:
                return other if one is None else one
            return one & other
        case EitherOf(left, right):
            one, other = partition_values(left, field_id), partition_values(right, field_id)
            return None if one is None or other is None else one | other
        case ColumnTest(op, field, values) if field.id == field_id and op in (Op.EQUAL, Op.IN):
            return frozenset(values)
    return None


def partition_span(wanted: TableFilter, field_id: int) -> tuple[str | None, str | None]:
    """The least and the greatest value of an identity partition that a filter leaves.

    None is no end. Text is compared by its code points. Null partitions are never within it.
    """
    match wanted:
        case BothOf(left, right) | EitherOf(left, right):
            is_both = isinstance(wanted, BothOf)
            spans = partition_span(left, field_id), partition_span(right, field_id)
            lows, highs = (
                [end for end in ends if end is not None] for ends in zip(*spans, strict=True)
            )
            low = max(lows, default=None) if is_both else min(lows) if len(lows) == 2 else None
            high = min(highs, default=None) if is_both else max(highs) if len(highs) == 2 else None
            return low, high
        case ColumnTest(op, field, values) if field.id == field_id and values:
            said = [str(each) for each in values]
            match op:
                case Op.EQUAL | Op.IN:
                    return min(said), max(said)
                case Op.GREATER | Op.AT_LEAST:
                    return said[0], None
                case Op.LESS | Op.AT_MOST:
                    return None, said[0]
                case Op.STARTS_WITH if said[0] and ord(said[0][-1]) < _LAST_BEFORE_SURROGATES:
                    return said[0], said[0][:-1] + chr(ord(said[0][-1]) + 1)
                case Op.STARTS_WITH:
                    return said[0], None
    return None, None


def fields_in(wanted: TableFilter) -> Iterator[SchemaField]:
    """The columns that a filter tests, as far as it can be read here."""
    match wanted:
        case ColumnTest(_, field):
            yield field
        case BothOf(left, right) | EitherOf(left, right):
            yield from fields_in(left)
            yield from fields_in(right)
        case Inverse(child):
            yield from fields_in(child)


def _bound(file: TableFile, identity: int, type_: str) -> Bound:
    low, high = file.lows.get(identity), file.highs.get(identity)
    return Bound(
        low=None if low is None else _plain(from_bytes(low, type_)),
        high=None if high is None else _plain(from_bytes(high, type_)),
        nulls=file.nulls.get(identity),
    )


def _plain(value: TableValue | None) -> int | float | str | None:
    """As `datasets.bounds` has it."""
    if isinstance(value, Decimal):
        return str(value)
    return None if isinstance(value, bytes) else value


def _searched(wanted: TableFilter, *, is_negated: bool) -> Filter:
    """The filter, or its negation, as bounds are asked."""
    match wanted:
        case bool():
            return Conjunction(()) if wanted != is_negated else Disjunction(())
        case BothOf(left, right) | EitherOf(left, right):
            parts = tuple(_searched(each, is_negated=is_negated) for each in (left, right))
            is_every = isinstance(wanted, BothOf) != is_negated
            return Conjunction(parts) if is_every else Disjunction(parts)
        case Inverse(child):
            return _searched(child, is_negated=not is_negated)
        case ColumnTest(op, field, values) if not is_negated:
            return _tested(op, str(field.id), values)
        case ColumnTest(op, field, values):
            # A null may match what is negated.
            opposite = _tested(_OPPOSITE[op], str(field.id), values)
            is_null = Nullness(str(field.id), is_null=True)
            return opposite if op in _NULLS else Disjunction((opposite, is_null))
    return bounds.Unknown()


def _tested(op: Op, column: str, values: tuple[TableValue, ...]) -> Filter:
    comparable = [each for each in values if isinstance(each, int | float | str | Decimal)]
    if len(comparable) != len(values):
        return bounds.Unknown()
    match op:
        case Op.IS_NULL | Op.NOT_NULL:
            return Nullness(column, is_null=op is Op.IS_NULL)
        case Op.IN if len(comparable) > _LISTED_MAX:
            if any(isinstance(each, float) for each in comparable):
                return bounds.Unknown()
            ends = {Sign.AT_LEAST: min(comparable), Sign.AT_MOST: max(comparable)}
            return Conjunction(tuple(Compared(column, sign, end) for sign, end in ends.items()))
        case Op.IN:
            return Disjunction(tuple(Compared(column, Sign.EQUAL, each) for each in comparable))
        case Op.STARTS_WITH if isinstance(comparable[0], str):
            return Prefixed(column, comparable[0])
    sign = _SIGNS.get(op)
    return bounds.Unknown() if sign is None else Compared(column, sign, comparable[0])


def _without(
    wanted: TableFilter, places: Mapping[int, int], partition: tuple[TableValue | None, ...]
) -> TableFilter:
    """The filter where the values of some columns are known."""
    match wanted:
        case ColumnTest(_, field) if field.id in places:
            decided = _decided(wanted, partition[places[field.id]])
            return wanted if decided is None else decided
        case BothOf(left, right):
            return _joined(BothOf, *(_without(each, places, partition) for each in (left, right)))
        case EitherOf(left, right):
            return _joined(EitherOf, *(_without(each, places, partition) for each in (left, right)))
        case Inverse(child):
            left = _without(child, places, partition)
            return not left if isinstance(left, bool) else Inverse(left)
    return wanted


def _joined(how: type[BothOf | EitherOf], one: TableFilter, other: TableFilter) -> TableFilter:
    settles = how is EitherOf
    for each, rest in ((one, other), (other, one)):
        if isinstance(each, bool):
            return settles if each == settles else rest
    return how(one, other)


def _decided(test: ColumnTest, value: TableValue | None) -> bool | None:
    """Whether a known value passes; None if that depends on who asks."""
    match test.op:
        case Op.IS_NULL:
            return value is None
        case Op.NOT_NULL:
            return value is not None
    if value is None:
        return None
    match test.op:
        case Op.IN:
            return value in test.values
        case Op.NOT_IN:
            return value not in test.values
        case Op.STARTS_WITH | Op.NOT_STARTS_WITH:
            starts = isinstance(value, str) and value.startswith(str(test.values[0]))
            return starts == (test.op is Op.STARTS_WITH)
        case Op.IS_NAN | Op.NOT_NAN:
            return None
    return _COMPARED[test.op](value, test.values[0])


_COMPARED: Final[Mapping[Op, Callable[[Any, Any], bool]]] = {
    Op.LESS: operator.lt,
    Op.AT_MOST: operator.le,
    Op.GREATER: operator.gt,
    Op.AT_LEAST: operator.ge,
    Op.EQUAL: operator.eq,
    Op.NOT_EQUAL: operator.ne,
}


class _Parser:
    def __init__(self, schema: TableSchema, *, is_case_sensitive: bool) -> None:
        self._folds = (lambda name: name) if is_case_sensitive else str.casefold
        self._names = {self._folds(name): each for name, each in schema.every()}
        self._ids = {each.id: each for each in self._names.values()}
        self._left = NODES_MAX

    def node(self, said: Any, depth: int) -> TableFilter:
        self._left -= 1
        if self._left < 0 or depth > DEPTH_MAX:
            raise InvalidInput("The filter is too large.", hint="Ask for fewer values at a time.")
        if isinstance(said, bool):
            return said
        if not isinstance(said, Mapping) or not isinstance(said.get("type"), str):
            raise InvalidInput("A part of the filter has no 'type'.")
        match said["type"]:
            case "true" | "false":
                return bool(said["type"] == "true")
            case "and" | "or":
                how = BothOf if said["type"] == "and" else EitherOf
                parts = (self.node(said.get(side), depth + 1) for side in ("left", "right"))
                return _joined(how, *parts)
            case "not":
                child = self.node(said.get("child"), depth + 1)
                return not child if isinstance(child, bool) else Inverse(child)
        try:
            op = Op(said["type"])
        except ValueError as error:
            raise InvalidInput(
                f"The filter has a {said['type'][:100]!r}, which is not a supported predicate."
            ) from error
        return self._test(op, said)

    def _test(self, op: Op, said: Mapping[str, Any]) -> TableFilter:
        one = said.get("child", said.get("left", said.get("term")))
        other = said.get("right", said.get("value"))
        if op in _SIGNS and not _is_term(one) and _is_term(other):
            raise InvalidInput("The filter compares a value with a column: write the column first.")
        field = self._column(one)
        if field is None or not isinstance(field.type, str):
            return OpaqueTest(said)
        if op in _UNARY:
            return ColumnTest(op, field, (), said)
        if op in _SETS:
            values = said.get("values")
            listed = values.get("values") if isinstance(values, Mapping) else values
            if not isinstance(listed, list):
                raise InvalidInput(f"The filter's {op.value!r} has no list of values.")
            self._left -= len(listed)
            if self._left < 0:
                raise InvalidInput("The filter is too large.", hint="Ask for fewer values.")
        elif isinstance(other, Mapping) and other.get("type") in ("reference", "apply"):
            self._column(other)
            return OpaqueTest(said)
        else:
            listed = [other]
        read = tuple(from_json(_bare(each), field.type) for each in listed)
        return ColumnTest(op, field, read, said)

    def _column(self, term: Any) -> SchemaField | None:
        """The column that a term is; None for another term, whose columns are there."""
        if isinstance(term, str):
            return self._named(term)
        if not isinstance(term, Mapping):
            raise InvalidInput("A predicate of the filter names no column.")
        match term.get("type"):
            case "reference" if "id" in term:
                found = self._ids.get(term["id"]) if isinstance(term["id"], int) else None
                if found is None:
                    raise InvalidInput(f"The table has no column with the id {term['id']!r}.")
                return found
            case "reference":
                return self._named(term.get("name", term.get("term")))
            case "transform":
                self._column(term.get("term"))
        return None

    def _named(self, name: Any) -> SchemaField:
        found = self._names.get(self._folds(name)) if isinstance(name, str) else None
        if found is None:
            raise InvalidInput(f"The table has no column {str(name)[:200]!r}.")
        return found


def _is_term(said: Any) -> bool:
    return isinstance(said, str) or (isinstance(said, Mapping) and said.get("type") != "literal")


def _bare(said: Any) -> Any:
    return said.get("value") if isinstance(said, Mapping) else said
