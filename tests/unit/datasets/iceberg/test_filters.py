"""Filters leave out only what cannot match, whoever asks, and leave the rest of themselves over."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.datasets.bounds import bound_of
from penstock.datasets.iceberg import filters
from penstock.datasets.iceberg.files import (
    PartitionField,
    PartitionSpec,
    TableFile,
    scan_task_json,
    table_file,
    unreadable,
)
from penstock.datasets.iceberg.filters import (
    DEPTH_MAX,
    NODES_MAX,
    Pruning,
    as_json,
    parsed,
    partition_span,
    partition_values,
    size_of,
)
from penstock.datasets.iceberg.schemas import partition_field, schema_of
from penstock.datasets.manifest import File, Unfit
from penstock.datasets.schema import Column
from penstock.kernel.errors import InvalidInput

KEY = partition_field("key")
SPEC = PartitionSpec(0, (PartitionField(KEY, 1000),))
COLUMNS = (
    Column("n", "bigint"),
    Column("t", "string"),
    Column("f", "double"),
    Column("d", "decimal(38,2)"),
    Column("s", "struct<x:int>"),
)
SCHEMA = schema_of(COLUMNS, schema_id=0, extra=[KEY])
Row = Mapping[str, Any]


def file_of(rows: Sequence[Row], key: str | None) -> TableFile:
    """A file with these rows, and all that a footer could say of them."""
    bounds = {}
    for name in ("n", "t", "f", "d"):
        there = [row[name] for row in rows if row[name] is not None]
        nulls = len(rows) - len(there)
        there = [each for each in there if not (isinstance(each, float) and math.isnan(each))]
        bounds[name] = bound_of(min(there, default=None), max(there, default=None), nulls)
    file = File(name="a.parquet", rows=len(rows), bytes=9, sha256="0" * 64, bounds=bounds)
    return table_file(file, "file:///a.parquet", SCHEMA, partition=(key,))


_COMPARED = {
    "lt": operator.lt,
    "lt-eq": operator.le,
    "gt": operator.gt,
    "gt-eq": operator.ge,
    "eq": operator.eq,
    "not-eq": operator.ne,
}


def holds(said: Any, row: Row, *, in_sql: bool) -> bool | None:
    """Whether a row matches: as SQL has it, where it may be unknown, or as Iceberg has it."""
    if isinstance(said, bool):
        return said
    match said["type"]:
        case "and" | "or":
            parts = [holds(said[side], row, in_sql=in_sql) for side in ("left", "right")]
            settles = bool(said["type"] == "or")
            if settles in parts:
                return settles
            return None if None in parts else not settles
        case "not":
            inner = holds(said["child"], row, in_sql=in_sql)
            return None if inner is None else not inner
    value = row[said["term"]]
    if said["type"].endswith("-null"):
        return bool((value is None) == (said["type"] == "is-null"))
    if value is None:
        return None if in_sql else str(said["type"]).startswith("not-")
    return passes(said, value, nan=math.inf if in_sql else math.nan)


def passes(said: Any, value: Any, *, nan: float) -> bool:
    """Whether a value passes a test; `nan` is what NaN is like."""
    match said["type"]:
        case "in" | "not-in":
            return bool((value in said["values"]) == (said["type"] == "in"))
        case "starts-with" | "not-starts-with":
            return bool(value.startswith(said["value"]) == (said["type"] == "starts-with"))
        case "is-nan" | "not-nan":
            return bool(math.isnan(value) == (said["type"] == "is-nan"))
    if isinstance(value, Decimal):
        return bool(_COMPARED[said["type"]](value, Decimal(said["value"])))
    if isinstance(value, float) and math.isnan(value):
        value = nan
    return bool(_COMPARED[said["type"]](value, said["value"]))


_N = st.integers(-3, 3)
_T = st.sampled_from(["", "a", "ab", "b", "b" * 40, "b" * 40 + "c", "\U0010ffff" * 33, "ü"])
_F = st.sampled_from([-1.5, -0.0, 0.0, 1.5, math.nan])
_D = st.sampled_from(["-1.50", "0.00", "9" * 36 + ".99", "9" * 35 + ".01"])
_KEYS = st.sampled_from(["a", "b", "ab"])
_VALUES = {"n": _N, "t": _T, "f": st.sampled_from([-1.5, 0.0]), "d": _D, "key": _KEYS}


def _test(name: str) -> st.SearchStrategy[Any]:
    value = _VALUES[name]
    of = {"term": st.just(name)}
    kinds = [
        st.fixed_dictionaries({"type": st.sampled_from(sorted(_COMPARED)), **of, "value": value}),
        st.fixed_dictionaries({"type": st.sampled_from(["is-null", "not-null"]), **of}),
    ]
    if name != "d":
        lists = st.lists(value, max_size=3)
        sets = {"type": st.sampled_from(["in", "not-in"]), **of, "values": lists}
        kinds.append(st.fixed_dictionaries(sets))
    if name in ("t", "key"):
        starts = {"type": st.sampled_from(["starts-with", "not-starts-with"]), **of}
        kinds.append(st.fixed_dictionaries({**starts, "value": value}))
    if name == "f":
        nans = {"type": st.sampled_from(["is-nan", "not-nan"]), **of}
        kinds.append(st.fixed_dictionaries(nans))
    return st.one_of(kinds)


def _joined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    both = {"type": st.sampled_from(["and", "or"]), "left": inner, "right": inner}
    negated = {"type": st.just("not"), "child": inner}
    return st.fixed_dictionaries(both) | st.fixed_dictionaries(negated)


_FILTERS = st.recursive(
    st.one_of(st.booleans(), *(_test(name) for name in _VALUES)), _joined, max_leaves=6
)
_ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "n": st.none() | _N,
            "t": st.none() | _T,
            "f": st.none() | _F,
            "d": st.none() | _D.map(Decimal),
        }
    ),
    min_size=1,
    max_size=3,
)


@given(_FILTERS, _ROWS, st.none() | _KEYS)
def test_no_file_with_a_row_that_matches_is_left_out(
    said: Any, rows: list[Row], key: str | None
) -> None:
    """Whether nulls and NaN are as in SQL or as in Iceberg; and the residual says the same."""
    file = file_of(rows, key)
    pruning = Pruning(parsed(said, SCHEMA), SPEC)
    residual = as_json(pruning.residual(file.partition))
    whole = [{**row, "key": key} for row in rows]
    for in_sql in (True, False):
        matching = [holds(said, row, in_sql=in_sql) is True for row in whole]
        assert [holds(residual, row, in_sql=in_sql) is True for row in whole] == matching
        assert pruning.may_hold(file) or not any(matching)
        values = partition_values(parsed(said, SCHEMA), KEY.id)
        assert values is None or key in values or not any(matching)
        low, high = partition_span(parsed(said, SCHEMA), KEY.id)
        if any(matching) and key is not None:
            assert (low or key) <= key <= (high or key)


@pytest.mark.parametrize(
    ("said", "span"),
    [
        ({"type": "gt-eq", "term": "key", "value": "b"}, ("b", None)),
        ({"type": "lt", "term": "key", "value": "b"}, (None, "b")),
        ({"type": "in", "term": "key", "values": ["b", "a"]}, ("a", "b")),
        ({"type": "starts-with", "term": "key", "value": "2026-01"}, ("2026-01", "2026-02")),
        ({"type": "starts-with", "term": "key", "value": "\ud7ff"}, ("\ud7ff", None)),
        ({"type": "starts-with", "term": "key", "value": ""}, ("", None)),
        ({"type": "not-eq", "term": "key", "value": "b"}, (None, None)),
        ({"type": "lt", "term": "t", "value": "b"}, (None, None)),
    ],
)
def test_a_span_of_partitions(said: Any, span: tuple[str | None, str | None]) -> None:
    assert partition_span(parsed(said, SCHEMA), KEY.id) == span
    least = {"type": "gt", "term": "key", "value": "2026-01-03"}
    both = {"type": "and", "left": least, "right": {**least, "type": "lt", "value": "2026-01-05"}}
    assert partition_span(parsed(both, SCHEMA), KEY.id) == ("2026-01-03", "2026-01-05")
    either = partition_span(parsed({**both, "type": "or"}, SCHEMA), KEY.id)
    assert either == (None, None)


def test_what_is_proven_is_left_out() -> None:
    rows = [{"n": n, "t": "m", "f": 1.0, "d": None} for n in (3, 5)]
    file = file_of(rows, "k")

    def kept(type_: str, term: str, value: Any = None, **more: Any) -> bool:
        said = {"type": type_, "term": term, **({} if value is None else {"value": value}), **more}
        return Pruning(parsed(said, SCHEMA), SPEC).may_hold(file)

    assert not kept("lt", "n", 3)
    assert kept("lt-eq", "n", 3)
    assert not kept("gt", "n", 5)
    assert not kept("eq", "n", 6)
    assert not kept("in", "n", values=[1, 2, 9])
    assert kept("in", "n", values=[1, 4])
    assert not kept("starts-with", "t", "n")
    assert not kept("is-null", "n")
    assert not kept("not-null", "d")
    assert not kept("eq", "key", "j")
    assert kept("starts-with", "key", "k")
    assert not kept("not-in", "key", values=["k"])
    # Of fractions nothing is proven.
    assert kept("gt", "f", 5.0)
    assert kept("is-nan", "f")
    # And nothing by what has no bounds.
    assert kept("eq", "s.x", 1)


def test_a_long_list_is_looked_for_by_its_ends() -> None:
    file = file_of([{"n": 2, "t": "b", "f": 1.5, "d": Decimal("1.50")}], "a")
    far: dict[str, list[Any]] = {"n": [9, 10_000], "t": ["c", "d"], "d": ["9.00", "99.00"]}
    for name, (low, high) in far.items():
        values = [low] + [high] * 300
        said = {"type": "in", "term": name, "values": values}
        assert not Pruning(parsed(said, SCHEMA), SPEC).may_hold(file), name
    # Between its ends nobody looks, and of fractions never.
    said = {"type": "in", "term": "n", "values": [-1] + [9] * 300}
    assert Pruning(parsed(said, SCHEMA), SPEC).may_hold(file)
    said = {"type": "in", "term": "f", "values": [9.0] * 300}
    assert Pruning(parsed(said, SCHEMA), SPEC).may_hold(file)


def test_a_large_filter_of_many_files_fails_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody keeps a dispatcher busy with one request."""
    test = {"type": "eq", "term": "n", "value": 9}
    said: Any = test
    for _ in range(9):
        said = {"type": "or", "left": said, "right": test}
    assert size_of(parsed(said, SCHEMA)) == 10
    assert size_of(parsed({"type": "in", "term": "n", "values": [1] * 80}, SCHEMA)) == 11
    monkeypatch.setattr(filters, "TESTS_MAX", 25)
    pruning = Pruning(parsed(said, SCHEMA), SPEC)
    file = file_of([{"n": 2, "t": None, "f": None, "d": None}], "a")
    assert [pruning.may_hold(file) for _ in range(4)] == [False, False, True, True]
    assert as_json(pruning.residual(file.partition)) == said


def test_the_residual_keeps_the_clients_own_words() -> None:
    """But for what the partition's value decides; of a partition without one, nothing is."""
    mine = {"type": "lt", "term": "n", "value": 3, "x-later": 1}
    by_key = {"type": "eq", "term": "key", "value": "a"}
    said = {"type": "and", "left": by_key, "right": {"type": "not", "child": mine}}
    pruning = Pruning(parsed(said, SCHEMA), SPEC)
    assert as_json(pruning.residual(("a",))) == {"type": "not", "child": mine}
    assert as_json(pruning.residual(("b",))) is False
    assert as_json(pruning.residual((None,))) == said
    only = Pruning(parsed(by_key, SCHEMA), SPEC)
    assert as_json(only.residual(("a",))) is True


@pytest.mark.parametrize(
    "said",
    [
        {"type": "eq", "term": "n", "value": 1},
        {"type": "eq", "term": {"type": "reference", "term": "n"}, "value": 1},
        {"type": "eq", "left": {"type": "reference", "name": "n"}, "right": 1},
        {"type": "eq", "left": {"type": "reference", "id": SCHEMA.fields[0].id}, "right": 1},
        {
            "type": "eq",
            "left": {"type": "reference", "name": "n"},
            "right": {"type": "literal", "value": 1, "data-type": "long"},
        },
        {"type": "in", "child": {"type": "reference", "name": "n"}, "values": [1]},
        {
            "type": "in",
            "term": "n",
            "values": {"type": "literals", "values": [1], "data-type": "long"},
        },
        {"type": "and", "left": {"type": "true"}, "right": {"type": "eq", "term": "n", "value": 1}},
    ],
)
def test_every_form_of_the_protocol(said: Any) -> None:
    pruning = Pruning(parsed(said, SCHEMA), SPEC)
    row = {"t": None, "f": None, "d": None}
    assert [pruning.may_hold(file_of([{"n": n, **row}], None)) for n in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    "said",
    [
        {"type": "eq", "term": {"type": "transform", "transform": "x", "term": "n"}, "value": 1},
        {"type": "eq", "left": {"type": "apply", "function": "f", "arguments": []}, "right": 1},
        {
            "type": "eq",
            "left": {"type": "reference", "name": "n"},
            "right": {"type": "reference", "name": "n"},
        },
        {"type": "is-null", "term": "s"},
    ],
)
def test_what_is_not_known_here_is_left_to_the_client(said: Any) -> None:
    pruning = Pruning(parsed({"type": "not", "child": said}, SCHEMA), SPEC)
    file = file_of([{"n": 0, "t": None, "f": None, "d": None}], None)
    assert pruning.may_hold(file)
    assert as_json(pruning.residual(file.partition)) == {"type": "not", "child": said}


def test_names_in_any_case_if_they_are_asked_so() -> None:
    said = {"type": "eq", "term": "N", "value": 1}
    with pytest.raises(InvalidInput, match="no column 'N'"):
        parsed(said, SCHEMA)
    assert as_json(parsed(said, SCHEMA, is_case_sensitive=False)) == said


def nested(depth: int) -> Any:
    said: Any = {"type": "eq", "term": "n", "value": 1}
    for _ in range(depth):
        said = {"type": "not", "child": said}
    return said


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"type": "eq", "term": "gone", "value": 1}, "no column 'gone'"),
        ({"type": "eq", "left": {"type": "reference", "id": 5}, "right": 1}, "with the id 5"),
        ({"type": "eq", "value": 1}, "names no column"),
        ({"type": "eq", "term": "n"}, "compares a long with 'None'"),
        ({"type": "eq", "term": "n", "value": "x"}, "compares a long with 'x'"),
        ({"type": "in", "term": "n"}, "'in' has no list"),
        ({"type": "in", "term": "n", "values": [0] * (NODES_MAX + 1)}, "too large"),
        ({"type": "like", "term": "n", "value": 1}, "'like', which is not a supported predicate"),
        ({"type": "and", "left": True}, "has no 'type'"),
        ({"type": "not"}, "has no 'type'"),
        ({}, "has no 'type'"),
        ("n = 1", "has no 'type'"),
        ([], "has no 'type'"),
        (nested(DEPTH_MAX + 1), "too large"),
        (
            {
                "type": "eq",
                "left": {"type": "literal", "value": 1},
                "right": {"type": "reference", "name": "n"},
            },
            "write the column first",
        ),
    ],
)
def test_what_is_wrong_is_told(said: Any, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        parsed(said, SCHEMA)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "term", "value", "values", "left", "right", "child", "id"]),
            inner
            | st.sampled_from(["eq", "in", "and", "not", "n", "reference", "literal", "is-nan"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(_JSON)
def test_anything_is_a_filter_or_refused(said: Any) -> None:
    try:
        wanted = parsed(said, SCHEMA)
    except InvalidInput:
        return
    Pruning(wanted, SPEC).may_hold(file_of([{"n": 0, "t": "", "f": 0.0, "d": None}], "a"))


def test_a_scan_task() -> None:
    file = file_of([{"n": 1, "t": None, "f": None, "d": None}], "a")
    assert scan_task_json(file, SPEC, residual=False) == {
        "data-file": {
            "content": "data",
            "file-path": "file:///a.parquet",
            "file-format": "parquet",
            "spec-id": 0,
            "partition": ["a"],
            "file-size-in-bytes": 9,
            "record-count": 1,
        },
        "residual-filter": False,
    }


def test_which_files_are_of_a_table() -> None:
    plain = File(name="a", rows=1, bytes=9, sha256="0" * 64)
    assert unreadable(plain) is None
    assert "no Parquet" in str(unreadable(File(name="a", rows=None, bytes=9, sha256="0" * 64)))
    for unfit, word in ((Unfit.FIELD_IDS, "field ids"), (Unfit.UNSIGNED, "unsigned")):
        told = unreadable(File(name="a", rows=1, bytes=9, sha256="0" * 64, unfit=unfit))
        assert word in str(told)


def test_figures_of_a_file() -> None:
    """By the ids of the schema; of fractions no bounds, and of the struct nothing at all."""
    rows = [{"n": 1, "t": None, "f": 1.0, "d": Decimal("1.28")}]
    file = file_of(rows, "a")
    n, t, f, d = (SCHEMA.fields[place].id for place in range(4))
    assert file.lows == {n: (1).to_bytes(8, "little"), d: b"\x00\x80"} == file.highs
    assert file.nulls == {n: 0, t: 1, f: 0, d: 0}
    assert file.values == {n: 1, t: 1, f: 1, d: 1}
