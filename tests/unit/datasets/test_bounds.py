"""Bounds never hide a row: whatever is in a file, a filter that one of its rows passes may hold."""

from __future__ import annotations

import operator
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from penstock.datasets.bounds import (
    CHARACTERS_MAX,
    COLUMNS_MAX,
    Bound,
    ColumnKind,
    Compared,
    Conjunction,
    Disjunction,
    Filter,
    Nullness,
    Prefixed,
    Sign,
    Unknown,
    bound_of,
    kind_of,
    may_hold,
    with_room,
)
from penstock.datasets.manifest import File, with_bounds

SIGNS: dict[Sign, Callable[[Any, Any], bool]] = {
    Sign.LESS: operator.lt,
    Sign.AT_MOST: operator.le,
    Sign.EQUAL: operator.eq,
    Sign.AT_LEAST: operator.ge,
    Sign.GREATER: operator.gt,
}
TEXTS = some.text(
    some.sampled_from(["a", "b", "\ud7ff", "\ue000", "\U0010ffff", "ü"]),
    max_size=CHARACTERS_MAX + 3,
) | some.builds(
    lambda head, tail: head * CHARACTERS_MAX + tail,
    some.sampled_from("a\U0010ffff\ud7ff"),
    some.text(max_size=2),
)
VALUES = {
    ColumnKind.NUMBER: some.integers(-3, 3),
    ColumnKind.TEXT: TEXTS,
    ColumnKind.DECIMAL: some.decimals(-2, 2, places=1),
    ColumnKind.DOUBLE: some.sampled_from([-1.5, -0.0, 0.0, 1.0, 2.5]),
}


@given(some.data())
def test_a_filter_that_a_row_passes_may_hold(data: some.DataObject) -> None:
    kind = data.draw(some.sampled_from(list(VALUES)))
    values = data.draw(some.lists(VALUES[kind], min_size=1, max_size=4))
    nulls = data.draw(some.integers(0, 2))
    sign = data.draw(some.sampled_from(list(SIGNS)))
    value = data.draw(VALUES[kind])
    told = bound_of(min(values), max(values), nulls)
    stored = msgspec.json.decode(msgspec.json.encode(told), type=Bound)

    def holds(wanted: Filter) -> bool:
        return may_hold(wanted, {"a": stored}, {"a": kind}, rows=len(values) + nulls)

    is_there = any(SIGNS[sign](each, value) for each in values)
    assert holds(Compared("a", sign, value)) or not is_there
    assert holds(Nullness("a", True)) == (nulls > 0)
    assert holds(Nullness("a", False))
    assert holds(Conjunction((Compared("a", sign, value), Unknown()))) == holds(
        Compared("a", sign, value)
    )
    assert holds(Disjunction((Compared("a", sign, value), Unknown())))
    if kind is ColumnKind.TEXT:
        prefix = data.draw(some.text(some.sampled_from("ab\U0010ffff\ud7ff"), max_size=3))
        assert holds(Prefixed("a", prefix)) or not any(
            str(each).startswith(prefix) for each in values
        )


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Compared("n", Sign.EQUAL, 7), False),
        (Compared("n", Sign.LESS, 1), False),
        (Compared("n", Sign.GREATER, 5), False),
        (Compared("n", Sign.EQUAL, "7"), True),
        (Compared("f", Sign.GREATER, 9.0), True),  # NaN may be there
        (Compared("f", Sign.EQUAL, 9.0), False),
        (Compared("f", Sign.EQUAL, float("nan")), True),
        (Compared("f", Sign.LESS, -0.0), False),  # 0.0 is not less
        (Compared("t", Sign.EQUAL, "z"), False),
        (Prefixed("t", "b"), True),
        (Prefixed("t", "d"), False),
        (Compared("all null", Sign.EQUAL, 1), False),
        (Nullness("all null", False), False),
        (Compared("unknown", Sign.EQUAL, 1), True),
        (Compared("odd", Sign.EQUAL, 1), True),
        (Disjunction(()), False),
    ],
)
def test_what_is_certain_is_used_and_nothing_else(wanted: Filter, expected: bool) -> None:
    bounds = {
        "n": Bound(1, 5, 0),
        "f": Bound(0.0, 2.0, 0),
        "t": Bound("a", "c", 0),
        "all null": Bound(None, None, 3),
        "odd": Bound(5, 6, 0),
    }
    kinds = {
        "n": ColumnKind.NUMBER,
        "f": ColumnKind.DOUBLE,
        "t": ColumnKind.TEXT,
        "all null": ColumnKind.NUMBER,
        "odd": ColumnKind.TEXT,
    }
    assert may_hold(wanted, bounds, kinds, rows=3) is expected


def test_infinity_and_nan_are_in_no_bound() -> None:
    assert bound_of(float("-inf"), 1.0, 2) == Bound(nulls=2)
    assert bound_of(1.0, float("nan"), 0) == Bound(nulls=0)
    assert bound_of(Decimal("1.50"), Decimal("2.5"), 0) == Bound("1.50", "2.5", 0)


def test_texts_of_other_orders_have_no_kind() -> None:
    assert kind_of("string") is ColumnKind.TEXT
    for each in ("string collate UTF8_LCASE", "varchar(3)", "char(3)", "float", "binary"):
        assert kind_of(each) is None


def test_a_manifest_has_room_for_so_many_bounds() -> None:
    wide = {f"c{place}": Bound(1, 2, 0) for place in range(COLUMNS_MAX + 1)}
    assert len(with_room(wide.items(), columns_max=COLUMNS_MAX)) == COLUMNS_MAX
    assert with_room([("a", Bound())], columns_max=1) == {}
    file = File(name="a", rows=1, bytes=1, sha256="0" * 64, bounds=wide)
    assert len(with_bounds([file])[0].bounds) == COLUMNS_MAX + 1
    many = with_bounds([file] * 20_000)
    assert {len(each.bounds) for each in many} == {5}
