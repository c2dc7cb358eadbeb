"""The `where` of an input: what it says, what it lets through, and what is none."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatcher.dag.filters import (
    And,
    Comparison,
    FilterOperator,
    Or,
    Where,
    WhereError,
    accepts,
    glob_matches,
    parse_where,
    where_text,
)
from tests.unit.dispatcher.dag.drawing import COMPARISONS, INTEGERS, WHERES

A = Comparison("start", FilterOperator.GREATER_OR_EQUAL, 10)
B = Comparison("end", FilterOperator.LESS, 20)
C = Comparison("partition_key", FilterOperator.GLOB, "eu-*")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("start >= 10", A),
        ("start>=10", A),
        ("  ( (start\n>= +10) ) ", A),
        ("start >= 10 and end < 20", And((A, B))),
        ("start >= 10 or end < 20", Or((A, B))),
        ('start >= 10 or end < 20 and partition_key glob "eu-*"', Or((A, And((B, C))))),
        ("(start >= 10 or end < 20) and partition_key glob 'eu-*'", And((Or((A, B)), C))),
        ("start >= 10 and (end < 20 and partition_key glob 'eu-*')", And((A, B, C))),
        ("cursor = -1_000_000", Comparison("cursor", FilterOperator.EQUAL, -1_000_000)),
        ("partition_key != 'it''s'", Comparison("partition_key", FilterOperator.UNEQUAL, "it's")),
        ('partition_key = "a""b"', Comparison("partition_key", FilterOperator.EQUAL, 'a"b')),
        ("partition_key not glob '?'", Comparison("partition_key", FilterOperator.NOT_GLOB, "?")),
        ("partition_key = ''", Comparison("partition_key", FilterOperator.EQUAL, "")),
    ],
)
def test_what_a_filter_says(text: str, where: Where) -> None:
    assert parse_where(text) == where
    assert parse_where(where_text(where)) == where


@given(WHERES)
def test_a_filter_is_written_in_one_way(where: Where) -> None:
    assert parse_where(where_text(where)) == where


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "ends where a field is expected"),
        ("start", "ends where a comparison is expected"),
        ("start >", "ends where a value is expected"),
        ("strat > 1", "has 'strat' where one of partition_key, start, end and cursor is expected;"),
        ("10 < start", "has '10' where one of"),
        ("start == 1", "compares start by '=='; start is compared by =, !=, <, <=, > and >="),
        ("start glob 'x'", "compares start by 'glob'"),
        ("partition_key > 'x'", "is compared by =, !=, glob and not glob"),
        ("partition_key not 'x'", "compares partition_key by 'not'"),
        ("partition_key = eu", "put the text in quotes, as in partition_key = 'a'"),
        ("partition_key = 5", "put the text in quotes"),
        ("start > '5'", "write a whole number"),
        ("start > 1.5", "cannot be read from '1.5' on"),
        ("start > 9223372036854775808", "of more than 64 bits"),
        ("start > 1 end < 2", "goes on with 'end' where `and` or `or` is expected"),
        ("start > 1 and", "ends where a field is expected"),
        ("(start > 1", "has a parenthesis that is not closed"),
        ("start > 1)", "goes on with ')'"),
        ("start > 1; drop table task", "cannot be read from '; drop table task' on"),
        ("partition_key = 'x", "cannot be read from"),
        ("(" * 17 + "start > 1" + ")" * 17, "has more than 16 parentheses in each other"),
        ("x" * 2001, "is longer than 2000 characters"),
        (" or ".join(["end<1"] * 210), "is longer than 2000 characters"),
    ],
)
def test_what_is_no_filter(text: str, words: str) -> None:
    with pytest.raises(WhereError) as caught:
        parse_where(text)
    assert words in str(caught.value)


@given(st.text("()= <>!'\"andorstglbpik_eyu0159-", max_size=60))
def test_any_text_is_a_filter_or_an_error(text: str) -> None:
    try:
        where = parse_where(text)
    except WhereError:
        return
    assert parse_where(where_text(where)) == where


_PARTITION: dict[str, str | int | None] = {
    "partition_key": "eu-1",
    "start": 10,
    "end": 20,
    "cursor": None,
}


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ("start = 10", True),
        ("start != 10", False),
        ("start < 10", False),
        ("start <= 10", True),
        ("start > 9", True),
        ("end >= 21", False),
        ("partition_key = 'eu-1'", True),
        ("partition_key != 'eu-1'", False),
        ("partition_key glob 'eu-?'", True),
        ("partition_key not glob 'eu-*'", False),
        ("partition_key not glob 'us-*'", True),
        ("cursor = 1", False),
        ("cursor != 1", False),
        ("cursor = 1 or start = 10", True),
        ("start = 10 and end = 21", False),
        ("start = 1 and end = 1 or end = 20", True),
        ("start = 1 and (end = 1 or end = 20)", False),
    ],
)
def test_what_passes(text: str, is_accepted: bool) -> None:
    assert accepts(parse_where(text), _PARTITION) is is_accepted


@given(COMPARISONS)
def test_what_an_event_does_not_have_passes_nothing(where: Comparison) -> None:
    assert not accepts(where, {})
    assert not accepts(where, dict.fromkeys(_PARTITION))


@given(st.text("ab*?", max_size=8), st.text("ab*?", max_size=8))
def test_a_glob_is_what_it_says(pattern: str, text: str) -> None:
    parts = {"*": ".*", "?": "."}
    meant = "".join(parts.get(each, re.escape(each)) for each in pattern)
    assert glob_matches(pattern, text) == bool(re.fullmatch(meant, text, re.DOTALL))


def test_a_hard_glob_takes_no_longer_than_its_size_allows() -> None:
    assert not glob_matches("a*" * 500 + "b", "a" * 2000)


@given(WHERES, INTEGERS, INTEGERS, st.text(max_size=3))
def test_groups_are_all_and_any(where: Where, start: int, end: int, key: str) -> None:
    event: dict[str, str | int | None] = {
        "start": start,
        "end": end,
        "cursor": start,
        "partition_key": key,
    }
    match where:
        case And(terms):
            assert accepts(where, event) == all(accepts(term, event) for term in terms)
        case Or(terms):
            assert accepts(where, event) == any(accepts(term, event) for term in terms)
        case Comparison():
            assert accepts(And((where, where)), event) == accepts(where, event)
