"""Which type holds the values of two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.datasets.schema import widened


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("int", "bigint", "bigint"),
        ("smallint", "tinyint", "smallint"),
        ("float", "double", "double"),
        ("decimal(10,2)", "decimal(9,4)", "decimal(12,4)"),
        ("array<int>", "array<bigint>", "array<bigint>"),
        ("map<string,float>", "map<string,double>", "map<string,double>"),
        ("struct<a:int>", "struct<b:date,a:int>", "struct<a:int,b:date>"),
        (
            "struct<`a:b,<`:int,n:struct<d:decimal(4,2)>>",
            "struct<`a:b,<`:bigint,n:struct<d:decimal(4,2),e:map<int,string>>>",
            "struct<`a:b,<`:bigint,n:struct<d:decimal(4,2),e:map<int,string>>>",
        ),
        ("array<struct<a:int>>", "array<struct<a:int,b:int>>", "array<struct<a:int,b:int>>"),
        ("int", "double", None),
        ("bigint", "decimal(20,0)", None),
        ("date", "timestamp_ntz", None),
        ("decimal(38,0)", "decimal(10,2)", None),
        ("map<int,int>", "map<bigint,int>", None),
        ("struct<a:int>", "struct<A:int>", None),
        ("struct<a:int>", "struct<a:string>", None),
        ("array<int>", "int", None),
        ("string", "string collate UTF8_LCASE", None),
    ],
)
def test_the_wider_type(one: str, other: str, both: str | None) -> None:
    assert widened(one, other) == both


ATOMS = st.sampled_from(
    ("int", "bigint", "float", "double", "decimal(4,2)", "decimal(6,1)", "date")
)
TYPES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        inner.map("array<{}>".format),
        inner.map("map<string,{}>".format),
        st.dictionaries(st.sampled_from(("a", "`b,>`", "c")), inner, min_size=1).map(
            lambda fields: f"struct<{','.join(f'{name}:{kind}' for name, kind in fields.items())}>"
        ),
    ),
    max_leaves=5,
)


@given(TYPES, TYPES)
def test_what_holds_both_holds_each(one: str, other: str) -> None:
    both = widened(one, other)
    assert (both is None) == (widened(other, one) is None)
    if both is not None:
        assert widened(both, one) == both
        assert widened(both, other) == both
