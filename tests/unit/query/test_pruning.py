"""What a query leaves out, by its conditions, against DuckDB over everything."""

from __future__ import annotations

import json
from datetime import UTC, date
from decimal import Decimal
from typing import Any

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.datasets.bounds import Bound, ColumnKind, may_hold
from penstock.query.pruning import checked, conditions, file_filter, key_ranges, needed_keys

KINDS = {
    "partition_key": ("partition_key", ColumnKind.TEXT),
    "n": ("n", ColumnKind.NUMBER),
    "price": ("price", ColumnKind.DECIMAL),
    "day": ("day", ColumnKind.DAY),
    "seen": ("seen", ColumnKind.LOCAL_MOMENT),
    "name": ("name", ColumnKind.TEXT),
}
DATABASE = duckdb.connect()
DATABASE.execute(
    "CREATE TABLE t AS SELECT chr(97 + (i % 5)::INTEGER) || (i // 5) AS partition_key, i AS n,"
    " (i / 4)::DECIMAL(9,2) AS price, DATE '1970-01-01' + i::INTEGER AS day,"
    " TIMESTAMP '1970-01-01' + to_hours(6 * i) AS seen,"
    " CASE WHEN i % 7 = 0 THEN NULL ELSE chr(120 - (i % 9)::INTEGER) || i END AS name"
    " FROM range(40) r(i)"
)
DATABASE.execute("CREATE TABLE u AS SELECT i AS n, 'a' || i AS partition_key FROM range(12) r(i)")
ROWS = DATABASE.execute("SELECT partition_key, n, price, day, seen, name FROM t").fetchall()


def of(sql: str) -> dict[str, Any]:
    found = DATABASE.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchone()
    assert found is not None
    return conditions(json.loads(found[0])["statements"][0])


@pytest.mark.parametrize(
    ("where", "keys"),
    [
        ("partition_key = 'a'", [("a", "a")]),
        ("'a' = partition_key AND n > 1", [("a", "a")]),
        ("partition_key IN ('a', 'b') AND partition_key > 'a'", [("a", "a"), ("b", "b")]),
        ("T.Partition_Key BETWEEN 'a' AND 'c'", [("a", "c")]),
        ("partition_key < 'b' AND partition_key > 'c'", []),
        ("partition_key LIKE '2026-01-%'", [("2026-01-", "2026-01.")]),
        ("partition_key = 'a' OR (partition_key = 'b' AND n = 1)", [("a", "a"), ("b", "b")]),
        ("partition_key = 'a' OR n = 1", None),
        ("NOT partition_key = 'a'", None),
        ("partition_key <> 'a'", None),
        ("partition_key = 1", None),
        ("partition_key = DATE '2026-01-01'", None),
        ("lower(partition_key) = 'a'", None),
        ("partition_key LIKE 'a_b%'", None),
        ("partition_key = NULL", None),
        ("partition_key COLLATE NOCASE = 'a'", None),
    ],
)
def test_partitions_are_left_out_by_what_is_certain(where: str, keys: Any) -> None:
    found = of(f"SELECT * FROM t WHERE {where}").get("t")
    assert key_ranges(found, "partition_key") == keys


@pytest.mark.parametrize(
    ("sql", "is_left_out"),
    [
        ("SELECT * FROM t JOIN u USING (n) WHERE t.partition_key = 'a'", True),
        ("SELECT * FROM u LEFT JOIN t ON t.n = u.n WHERE t.partition_key = 'a'", True),
        ("SELECT * FROM (SELECT * FROM t WHERE partition_key = 'a')", True),
        ("WITH x AS (SELECT * FROM t WHERE partition_key = 'a') SELECT * FROM x", True),
        ("SELECT * FROM u WHERE n IN (SELECT n FROM t WHERE partition_key = 'a')", True),
        ("SELECT * FROM t WHERE partition_key = 'a' UNION ALL SELECT * FROM t", False),
        ("SELECT * FROM t JOIN u USING (n) WHERE partition_key = 'a'", False),
        ("SELECT * FROM u LEFT JOIN t ON t.partition_key = 'a'", False),
        ("SELECT * FROM t POSITIONAL JOIN u WHERE t.partition_key = 'a'", False),
        ("SELECT * FROM t ASOF JOIN u ON t.n >= u.n WHERE u.partition_key = 'a'", False),
        ("SELECT * FROM t TABLESAMPLE 10% WHERE partition_key = 'a'", False),
        ("SELECT * FROM t AS x(partition_key) WHERE partition_key = 'a'", False),
        ("WITH t AS (SELECT * FROM t) SELECT * FROM t WHERE partition_key = 'a'", False),
        ("SELECT * FROM t QUALIFY partition_key = 'a'", False),
    ],
)
def test_a_table_is_read_whole_where_a_row_that_is_left_out_could_count(
    sql: str, is_left_out: bool
) -> None:
    name = "u" if "ASOF" in sql else "t"
    assert (key_ranges(of(sql).get(name), "partition_key") is not None) is is_left_out


def test_what_the_process_says_is_bounded() -> None:
    deep: Any = ["=", "n", "number", "1"]
    for _ in range(100):
        deep = ["and", deep]
    wrong = [deep, ["and"], ["?", "n", "number", "1"], ["=", "n", "number", 1], {"x": 1}, "and", 7]
    assert [checked(each) for each in wrong] == [None] * len(wrong)
    wide = ["or", *(["=", "partition_key", "text", str(x)] for x in range(2_000))]
    assert needed_keys(checked(wide), "partition_key") is None
    wide = ["or", *([">", "partition_key", "text", str(x)] for x in range(20))]
    assert needed_keys(checked(wide), "partition_key") is None


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


_SIGN = st.sampled_from(["=", "<", "<=", ">", ">=", "<>"])
_TEXT = st.sampled_from(["a0", "a", "b3", "e7", "x1", "v"]).map(_quoted)
_NUMBER = st.integers(-2, 42).map(str)
_HALF = st.integers(-8, 48).map(lambda x: str(Decimal(x) / 4))
_DAY = st.integers(1, 31).map(lambda x: f"1970-01-{x:02}")
_VALUES = {
    "partition_key": _TEXT,
    "name": st.one_of(_TEXT, st.just("NULL")),
    "n": st.one_of(_NUMBER, _HALF, _NUMBER.map(_quoted)),
    "price": st.one_of(_NUMBER, _HALF),
    "day": st.one_of(_DAY.map(lambda x: f"DATE '{x}'"), _DAY.map(_quoted)),
    "seen": st.one_of(
        _DAY.map(lambda x: f"TIMESTAMP '{x} 07:30:00'"),
        _DAY.map(lambda x: f"DATE '{x}'"),
        _DAY.map(_quoted),
    ),
}


@st.composite
def _tests(draw: st.DrawFn) -> str:
    column = draw(st.sampled_from(sorted(_VALUES)))
    values = _VALUES[column]
    match draw(st.integers(0, 5)):
        case 0:
            return f"{column} BETWEEN {draw(values)} AND {draw(values)}"
        case 1:
            return f"{column} IN ({draw(values)}, {draw(values)})"
        case 2:
            return f"{draw(values)} {draw(_SIGN)} {column}"
        case 3 if column in ("partition_key", "name"):
            return f"{column} LIKE '{draw(st.sampled_from(['a', 'v', '', 'b_']))}%'"
    return f"{column} {draw(_SIGN)} {draw(values)}"


_WHERE = st.recursive(
    _tests(),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["AND", "OR"]), inner).map(lambda x: f"({' '.join(x)})"),
        inner.map(lambda x: f"(NOT {x})"),
    ),
    max_leaves=5,
)


def _bound(values: list[Any], kind: ColumnKind) -> Bound:
    """As a manifest has it of these values."""

    def plain(value: Any) -> Any:
        match kind:
            case ColumnKind.DAY:
                return (value - date(1970, 1, 1)).days
            case ColumnKind.LOCAL_MOMENT:
                return int(value.replace(tzinfo=UTC).timestamp()) * 1_000_000
            case ColumnKind.DECIMAL:
                return str(value)
        return value

    known = [each for each in values if each is not None]
    if not known:
        return Bound(nulls=len(values))
    return Bound(plain(min(known)), plain(max(known)), len(values) - len(known))


@given(_WHERE, st.integers(1, 9))
def test_no_row_of_a_result_is_in_what_is_left_out(where: str, at_once: int) -> None:
    expected = {row[1] for row in DATABASE.execute(f"SELECT * FROM t WHERE {where}").fetchall()}
    wanted = checked(of(f"SELECT * FROM t WHERE {where}").get("t"))
    ranges = key_ranges(wanted, "partition_key")
    sought = file_filter(wanted, KINDS)
    for start in range(0, len(ROWS), at_once):
        rows = ROWS[start : start + at_once]
        bounds = {
            name: _bound([row[place] for row in rows], kind)
            for place, (name, kind) in enumerate(KINDS.values())
        }
        kinds = dict(KINDS.values())
        if not may_hold(sought, bounds, kinds, rows=len(rows)):
            assert not expected & {row[1] for row in rows}, where
    for key, n, *_ in ROWS:
        is_needed = ranges is None or any(
            (low is None or key >= low) and (high is None or key <= high) for low, high in ranges
        )
        assert is_needed or n not in expected, where
