"""Columns as schemas: ids that keep their meaning, types that only grow, names for every file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.datasets.iceberg.schemas import (
    ID_MAX,
    ID_MIN,
    SchemaField,
    TableSchema,
    clash,
    field_id,
    fields_of,
    misread,
    name_mapping,
    partition_field,
    schema_from_json,
    schema_json,
    schema_of,
)
from penstock.datasets.schema import Column
from penstock.kernel.errors import InvalidInput

_PRIMITIVES = {
    "boolean": "boolean",
    "tinyint": "int",
    "smallint": "int",
    "int": "int",
    "bigint": "long",
    "float": "float",
    "double": "double",
    "decimal(38,10)": "decimal(38, 10)",
    "string": "string",
    "string collate UNICODE_CI": "string",
    "varchar(3)": "string",
    "binary": "binary",
    "date": "date",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
}


def schema(*types: str, earlier: tuple[TableSchema, ...] = (), number: int = 0) -> TableSchema:
    """A schema of the columns a, b, … of these types."""
    columns = [Column(name, type_) for name, type_ in zip("abcdefghijklmnopq", types, strict=False)]
    return schema_of(columns, schema_id=number, earlier=earlier)


def ids(made: TableSchema) -> dict[str, int]:
    return {name: each.id for name, each in made.every()}


def test_every_type_that_iceberg_has() -> None:
    made = schema(*_PRIMITIVES)
    assert [each.type for each in made.fields] == list(_PRIMITIVES.values())


@pytest.mark.parametrize(
    "word",
    ["void", "variant", "interval day to second", "time(6)", "array<void>", "map<int,variant>"],
)
def test_a_type_that_iceberg_does_not_have_is_told(word: str) -> None:
    with pytest.raises(InvalidInput, match=r"The column 'a' is or has a .*Iceberg has no type"):
        schema(word)


def test_ids_are_the_same_for_ever() -> None:
    """They are in manifests and in what readers remember: another rule would be another table."""
    assert field_id([".a"], "int") == 2_128_659_438
    assert field_id([".a", "[]", ".b"], "string") == 2_059_943_821
    assert ids(schema("bigint"))["a"] == field_id([".a"], "int")


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("int", "bigint", True),
        ("tinyint", "int", True),
        ("float", "double", True),
        ("decimal(5,2)", "decimal(10,2)", True),
        ("decimal(5,2)", "decimal(10,3)", False),
        ("int", "string", False),
        ("int", "double", False),
        ("date", "timestamp", False),
        ("timestamp", "timestamp_ntz", False),
        ("string", "binary", False),
        ("array<int>", "array<string>", True),
        ("array<int>", "int", False),
        ("struct<a:int>", "struct<a:int,b:int>", True),
        ("struct<a:int>", "map<string,int>", False),
    ],
)
def test_an_id_is_that_of_what_can_become_another_type(
    one: str, other: str, *, is_same: bool
) -> None:
    assert (ids(schema(one))["a"] == ids(schema(other))["a"]) == is_same


def test_nested_fields_have_ids_of_their_own() -> None:
    nested = "struct<x:int,l:array<struct<x:int,`a b``c`:string>>,m:map<string,array<int>>>"
    made = schema(nested, "int")
    assert list(ids(made)) == [
        "a",
        "a.x",
        "a.l",
        "a.l.element",
        "a.l.element.x",
        "a.l.element.a b`c",
        "a.m",
        "a.m.key",
        "a.m.value",
        "a.m.value.element",
        "b",
    ]
    assert len(set(ids(made).values())) == 11
    # Only what is incompatible gets new ones.
    other = ids(schema(nested.replace("array<int>", "array<string>"), "int"))
    assert {name for name, each in ids(made).items() if other[name] != each} == {
        "a.m.value.element"
    }


_NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)


@given(st.lists(_NAMES, unique_by=str.casefold, min_size=1, max_size=6))
def test_any_names(names: list[str]) -> None:
    columns = tuple(Column(name, "struct<x:int>") for name in names)
    try:
        made = schema_of(columns, schema_id=3)
    except InvalidInput as error:
        assert "dot" in error.hint  # noqa: PT017 - it is rare
        return
    assert [each.name for each in made.fields] == names
    assert all(ID_MIN <= each <= ID_MAX for each in ids(made).values())
    assert schema_from_json(schema_json(made)) == made


def test_a_schema_is_what_its_json_says() -> None:
    made = schema("array<map<string,struct<a:decimal(5,2)>>>", *_PRIMITIVES)
    assert schema_from_json(schema_json(made)) == made


def test_the_type_of_an_id_only_grows() -> None:
    wide = schema("bigint", "double", "decimal(10,2)", "array<struct<x:bigint>>")
    narrow = ("int", "float", "decimal(5,2)", "array<struct<x:int,y:int>>")
    again = schema(*narrow, earlier=(wide,), number=1)
    assert [each.type for each in again.fields[:3]] == ["long", "double", "decimal(10, 2)"]
    assert again.fields[3].type != wide.fields[3].type
    types = {name: each.type for name, each in again.every()}
    assert (types["d.element.x"], types["d.element.y"]) == ("long", "int")
    # What is no promotion of Iceberg's is another field, and says what it is.
    other = schema("int", "string", earlier=(schema("decimal(5,2)", "int"),))
    assert [each.type for each in other.fields] == ["int", "string"]


def test_a_table_without_columns_is_none() -> None:
    with pytest.raises(InvalidInput, match="The dataset has no schema yet"):
        schema_of((), schema_id=0)


def test_names_that_would_be_one_are_told() -> None:
    with pytest.raises(InvalidInput, match=r"Two of its columns are called 'a\.x'"):
        schema_of((Column("a", "struct<x:int>"), Column("a.x", "int")), schema_id=0)


def test_two_columns_with_one_id_are_told() -> None:
    held = TableSchema(0, (SchemaField(field_id([".a"], "int"), "other", "int"),))
    with pytest.raises(InvalidInput, match="'other' and 'a' have the same field id"):
        schema("int", earlier=(held,))


def test_a_partition_is_no_column() -> None:
    """Also if a column of the data has its name one day."""
    assert partition_field("day").id != fields_of((Column("day", "string"),))[0].id


def test_what_a_name_does_not_mean_any_more_is_told() -> None:
    now = schema("string", "bigint", "array<decimal(7,3)>")
    assert misread([Column("b", "int"), Column("new", "int")], now) is None
    assert misread([Column("a", "string")], now) is None
    assert misread([Column("a", "int")], now) == (
        "The column 'a' is string now, and int in files that Iceberg cannot read as that."
    )
    told = misread([Column("c", "array<decimal(5,2)>")], now)
    assert told is not None
    assert told.startswith("The column 'c.element' is decimal(7, 3) now")
    assert clash(schema("string", "int"), now) is None
    assert clash(schema("struct<x:int>"), now) is not None


def test_names_of_all_that_files_may_have() -> None:
    before = schema("struct<x:int,gone:array<int>>", "string", "int")
    now = schema("struct<x:bigint,y:int>", "int", number=1)
    said = {each["names"][0]: each for each in name_mapping(now, earlier=[before])}
    assert list(said) == ["a", "b", "c", "_penstock_task"]
    inner = {each["names"][0]: each for each in said["a"]["fields"]}
    assert list(inner) == ["x", "y", "gone"]
    assert [each["names"] for each in inner["gone"]["fields"]] == [["element"]]
    # Where both have a name, it is the current one that it means.
    assert said["b"]["field-id"] == ids(now)["b"] != ids(before)["b"]
    assert said["c"]["field-id"] == ids(before)["c"]
