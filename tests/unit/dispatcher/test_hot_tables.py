"""Hot tables, as far as they are pure: types, names, which columns a view can have, batches."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from psycopg import sql

from penstock.datasets.schema import Column
from penstock.dispatcher.datasets.applier import BYTES_MAX, PlannedPartition, batches
from penstock.dispatcher.datasets.hot_tables import postgres_type, projected, relation_name


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("tinyint", "smallint"),
        ("int", "integer"),
        ("decimal(12,2)", "numeric(12,2)"),
        ("timestamp", "timestamp with time zone"),
        ("timestamp_ntz", "timestamp without time zone"),
        ("binary", "bytea"),
        ("array<int>", "jsonb"),
        ("struct<a:int>", "jsonb"),
    ],
)
def test_each_type_has_one_in_postgres(word: str, expected: str) -> None:
    assert postgres_type(word) == expected


def test_names_of_tables_fit_and_are_never_the_same() -> None:
    long = "a" * 63
    names = {relation_name(f"d{x}", long, f"g{y}") for x in range(3) for y in range(3)}
    assert len(names) == 9
    assert max(map(len, names)) <= 63


def test_a_view_has_what_a_table_holds_or_nothing() -> None:
    held = (Column("a", "int"), Column('b "x', "string"))
    shape = (Column("a", "bigint"), Column("new", "date"), Column('b "x', "string"))
    found = projected(held, shape)
    assert found is not None
    assert [each.as_string() for each in found] == [
        'held."a"::bigint',
        "NULL::date",
        'held."b ""x"::text',
    ]
    assert projected(held, (Column("a", "string"),)) is None
    assert projected(shape, held) is None
    assert isinstance(found[0], sql.Composable)


def planned(key: str, size: int) -> PlannedPartition:
    return PlannedPartition(
        generation="g",
        partition_key=key,
        applied=0,
        revision=1,
        stamp="s",
        bytes=size,
        is_anew=False,
        is_added=False,
        parts=(),
        planned_at=datetime(2030, 1, 1, tzinfo=UTC),
    )


def test_a_transaction_loads_one_partition_at_least_and_is_bounded() -> None:
    every = [planned("a", BYTES_MAX * 3), planned("b", 1)]
    assert [each.partition_key for each in batches(every)] == ["a"]
    small = [planned(str(number), BYTES_MAX // 4) for number in range(6)]
    assert len(batches(small)) == 4
    assert batches([]) == []
