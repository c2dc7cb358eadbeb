"""How the columns of a dataset may change."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.datasets.schema import (
    Column,
    declared_type,
    digest,
    evolve,
    refuse_for_good,
    refuse_undeclared,
    widened,
)
from penstock.kernel.errors import SchemaRefused

ID = Column("id", "bigint", is_nullable=False)
NAME = Column("name", "string")
HELD = (ID, NAME)


@pytest.mark.parametrize(
    ("new", "after"),
    [
        (HELD, HELD),
        ((NAME, ID), HELD),
        ((ID,), HELD),
        ((), HELD),
        ((ID, NAME, Column("x", "int")), (*HELD, Column("x", "int"))),
        ((Column("x", "int"), ID), (*HELD, Column("x", "int"))),
        ((Column("id", "bigint"), NAME), (Column("id", "bigint"), NAME)),
        ((ID, Column("name", "string", is_nullable=False)), HELD),
        ((Column("id", "int", is_nullable=False), NAME), HELD),
    ],
)
def test_what_is_taken(new: tuple[Column, ...], after: tuple[Column, ...]) -> None:
    assert evolve(HELD, new) == after


def test_a_wider_type_stays_and_the_hint_names_the_one_that_is_held() -> None:
    held = (Column("n", "int"), Column("o", "struct<a:int>"))
    wide = (Column("n", "bigint"), Column("o", "struct<b:string,a:bigint>"))
    grown = (Column("n", "bigint"), Column("o", "struct<a:bigint,b:string>"))
    assert evolve(held, wide) == grown
    assert evolve(grown, held) == grown
    with pytest.raises(SchemaRefused) as caught:
        evolve(grown, (Column("n", "string"),))
    assert "Cast it to bigint." in caught.value.hint


def test_the_first_publication_says_what_there_is() -> None:
    assert evolve((), HELD) == HELD
    assert evolve((), ()) == ()


@pytest.mark.parametrize(
    ("held", "new", "column", "words"),
    [
        (HELD, (NAME,), "id", ("'id' (bigint) is missing",)),
        (HELD, (ID, Column("name", "int")), "name", ("'name'", "int here", "string in what")),
        (HELD, (Column("id", "double", False), NAME), "id", ("double here", "bigint in what")),
        (HELD, (*HELD, Column("x", "int", False)), "x", ("'x' (int) is new",)),
        (HELD, (*HELD, Column("Name", "string")), "Name", ("'Name' and 'name'", "case")),
        (HELD, (ID, Column("NAME", "string")), "NAME", ("'NAME' and 'name'", "case")),
        ((), (ID, ID), "id", ("'id' is there twice",)),
        ((), (ID, Column("ID", "bigint")), "ID", ("'ID' and 'id'",)),
    ],
)
def test_what_is_refused(
    held: tuple[Column, ...], new: tuple[Column, ...], column: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(SchemaRefused) as caught:
        evolve(held, new)
    assert caught.value.column == column
    assert caught.value.hint
    for each in words:
        assert each in caught.value.message


COLUMNS = st.lists(
    st.builds(
        Column,
        st.sampled_from("abcdef"),
        st.sampled_from(("int", "bigint", "string", "struct<x:int>", "struct<x:bigint,y:string>")),
        st.booleans(),
    ),
    unique_by=lambda column: column.name,
    max_size=5,
)


@given(st.lists(COLUMNS, max_size=6))
def test_a_schema_only_grows_and_every_publication_fits_it(rounds: list[list[Column]]) -> None:
    held: tuple[Column, ...] = ()
    taken: list[list[Column]] = []
    for new in rounds:
        try:
            after = evolve(held, new)
        except SchemaRefused:
            continue
        assert [each.name for each in after][: len(held)] == [each.name for each in held]
        taken.append(new)
        held = after
    by_name = {each.name: each for each in held}
    for new in filter(None, taken):
        for each in new:
            assert widened(by_name[each.name].type, each.type) == by_name[each.name].type
            assert by_name[each.name].is_nullable or not each.is_nullable
        missing = by_name.keys() - {each.name for each in new}
        assert all(by_name[name].is_nullable for name in missing)
        assert evolve(held, new) == held


@given(st.lists(COLUMNS, max_size=6), COLUMNS, st.integers(0, 5))
def test_what_is_refused_for_good_is_refused_whatever_is_published_before(
    rounds: list[list[Column]], planned: list[Column], seen: int
) -> None:
    held: tuple[Column, ...] = ()
    is_refused = False
    for place, new in enumerate([*rounds, []]):
        if place == seen:
            try:
                refuse_for_good(held, planned)
            except SchemaRefused:
                is_refused = True
        with suppress(SchemaRefused):
            held = evolve(held, new)
    if is_refused:
        with pytest.raises(SchemaRefused):
            evolve(held, planned)


def test_nulls_are_judged_only_when_something_is_published() -> None:
    """What may not be null today may be when the task ends."""
    refuse_for_good(HELD, (NAME,))
    refuse_for_good(HELD, (*HELD, Column("x", "int", is_nullable=False)))
    refuse_for_good((), HELD)
    for planned in ((Column("id", "string"),), (Column("ID", "bigint"),), (NAME, NAME)):
        with pytest.raises(SchemaRefused):
            refuse_for_good(HELD, planned)


def test_the_digest_is_of_the_columns_in_any_order() -> None:
    assert digest(HELD) == digest(reversed(HELD))
    assert digest(HELD) != digest((ID,))
    assert digest((NAME,)) != digest((Column("name", "string", is_nullable=False),))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("BigInt", "bigint"),
        ("decimal(12, 2)", "decimal(12,2)"),
        ("Map<string, array<int>>", "map<string,array<int>>"),
        ("struct<Id: bigint, at: timestamp>", "struct<Id:bigint,at:timestamp>"),
    ],
)
def test_a_declared_type_is_in_the_words_of_schemas(text: str, expected: str) -> None:
    assert declared_type(text) == declared_type(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("text", "", "int<", "int<int>", "array<>", "map<int>", "struct<>", "struct<a>"),
        *("decimal", "decimal(0,0)", "decimal(39,1)", "decimal(2,3)", "struct<a:int,A:int>"),
        *("array<" * 30 + "int" + ">" * 30, "struct<" + "a" * 2000 + ":int>"),
    ],
)
def test_what_is_no_type_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no type|has more than"):
        declared_type(text)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ((Column("id", "int"),), ""),
        ((Column("id", "bigint", is_nullable=False), NAME), ""),
        ((), ""),
        ((ID, Column("more", "int")), "'more' (int) is not among the `columns`"),
        ((Column("id", "double"),), "'id' is double here, and bigint in the `columns`"),
        ((Column("id", "decimal(5,1)"),), "'id' is decimal(5,1) here"),
    ],
)
def test_what_is_published_has_the_declared_columns(new: tuple[Column, ...], said: str) -> None:
    if not said:
        refuse_undeclared((Column("id", "bigint"), NAME), new)
        return
    with pytest.raises(SchemaRefused) as caught:
        refuse_undeclared((Column("id", "bigint"), NAME), new)
    assert said in caught.value.message


def test_a_narrower_declaration_refuses_what_is_wider() -> None:
    with pytest.raises(SchemaRefused):
        refuse_undeclared((Column("n", "int"),), (Column("n", "bigint"),))
