"""Single values as bytes and as JSON."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.datasets.iceberg.values import TableValue, from_bytes, from_json, to_bytes, to_json
from penstock.kernel.errors import InvalidInput

_LONGS = st.integers(-(2**63), 2**63 - 1)
_MICROS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": _LONGS,
    "float": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "double": st.floats(allow_nan=False, allow_infinity=False),
    "date": st.integers(-719_162, 2_932_896),
    "timestamp": _MICROS,
    "timestamptz": _MICROS,
    "string": st.text(st.characters(codec="utf-8")),
    "binary": st.binary(),
    "decimal(38, 4)": st.decimals(-(10**30), 10**30, places=4),
}
_TYPED = st.sampled_from(sorted(_VALUES)).flatmap(
    lambda type_: st.tuples(st.just(type_), _VALUES[type_])
)


@given(_TYPED)
def test_what_is_written_is_read(typed: tuple[str, TableValue]) -> None:
    type_, value = typed
    body = to_bytes(value, type_)
    assert body is not None
    assert from_bytes(body, type_) == value
    assert from_json(to_json(value, type_), type_) == value


@pytest.mark.parametrize(
    ("value", "type_", "body", "said"),
    [
        (True, "boolean", "01", True),
        (-2, "int", "feffffff", -2),
        (34, "long", "2200000000000000", 34),
        (17486, "date", "4e440000", "2017-11-16"),
        (-1, "timestamp", "f" * 16, "1969-12-31T23:59:59.999999"),
        (0, "timestamptz", "0" * 16, "1970-01-01T00:00:00.000000+00:00"),
        (1.0, "float", "0000803f", 1.0),
        ("é", "string", "c3a9", "é"),
        (b"\xff", "binary", "ff", "FF"),
        (Decimal("14.20"), "decimal(9, 2)", "058c", "14.20"),
        (Decimal("-1.28"), "decimal(9, 2)", "80", "-1.28"),
        (Decimal("1.28"), "decimal(9, 2)", "0080", "1.28"),
        (Decimal(0), "decimal(9, 2)", "00", "0"),
        (Decimal("1E+1"), "decimal(9, 2)", "03e8", "10"),
        (Decimal("1.500"), "decimal(9, 2)", "0096", "1.500"),
    ],
)
def test_the_forms_of_the_format(value: TableValue, type_: str, body: str, said: object) -> None:
    assert to_bytes(value, type_) == bytes.fromhex(body)
    assert to_json(value, type_) == said


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (2**31, "int"),
        (1.5, "long"),
        (True, "int"),
        ("a", "long"),
        (1, "string"),
        ("\ud800", "string"),
        (Decimal("1.005"), "decimal(9, 2)"),
        (Decimal("NaN"), "decimal(9, 2)"),
        (1, "struct"),
    ],
)
def test_what_is_not_of_a_type_has_no_bytes(value: TableValue, type_: str) -> None:
    assert to_bytes(value, type_) is None


def test_bounds_of_a_narrower_type_are_read_as_the_wider() -> None:
    assert from_bytes(bytes.fromhex("feffffff"), "long") == -2
    assert from_bytes(bytes.fromhex("0000803f"), "double") == 1.0
    assert from_bytes(b"\x00", "long") is None


@pytest.mark.parametrize("value", [10**9, -(10**9)])
def test_a_day_that_no_calendar_has_is_not_told(value: int) -> None:
    assert to_json(value, "date") is None
    assert to_json(value * 10**12, "timestamp") is None
    assert to_json(math.inf, "double") is None


@pytest.mark.parametrize(
    ("said", "type_", "value"),
    [
        ("2017-11-16", "date", 17486),
        (17486, "date", 17486),
        ("2017-11-16T22:31:08", "timestamp", 1510871468000000),
        ("2017-11-17T00:31:08+02:00", "timestamptz", 1510871468000000),
        ("2017-11-16T22:31:08.000001Z", "timestamptz", 1510871468000001),
        ("2017-11-16T22:31:08", "timestamptz", 1510871468000000),  # as PyIceberg has it
        (5, "timestamptz", 5),
        ("1.5", "decimal(9, 2)", Decimal("1.5")),
        (2, "decimal(9, 2)", Decimal(2)),
        (5.5, "int", 5.5),
    ],
)
def test_literals_as_clients_write_them(said: object, type_: str, value: TableValue) -> None:
    assert from_json(said, type_) == value


@pytest.mark.parametrize(
    ("said", "type_"),
    [
        ("abc", "int"),
        (True, "int"),
        (1, "boolean"),
        (None, "string"),
        (1, "string"),
        ("2017-13-01", "date"),
        ("2017-11-16T22:31:08Z", "timestamp"),
        ("x", "decimal(9, 2)"),
        ("NaN", "decimal(9, 2)"),
        ("0g", "binary"),
        ({}, "string"),
    ],
)
def test_a_literal_of_another_type_is_told(said: object, type_: str) -> None:
    with pytest.raises(InvalidInput, match="The filter compares a "):
        from_json(said, type_)
