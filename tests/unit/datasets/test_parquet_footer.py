"""Footers of Parquet files: equal rows, equal bytes and ids, whoever wrote them."""

from __future__ import annotations

import base64
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from penstock.datasets.iceberg.schemas import ids_of
from penstock.datasets.manifest import Unfit
from penstock.datasets.parquet import footers
from penstock.datasets.parquet_child import field_ids
from penstock.datasets.parquet_footer import (
    columns_in,
    encodings,
    identified_file,
    identify,
    identify_file,
    settle_file,
    with_ids,
)
from tests.sizes import some

TABLE = pa.table(
    {
        "number": pa.array(range(50), pa.int64()),
        "name": [f"n{number % 3}" for number in range(50)],
        "share": [number / 7 for number in range(50)],
        "is_even": [number % 2 == 0 for number in range(50)],
        "parts": [[number, None] for number in range(50)],
    }
)
COLUMNS = 5
GROUPS = 20


def _written(path: Path) -> bytes:
    # More groups than a short list has, and everything that a footer may say besides.
    parquet.write_table(TABLE, path, row_group_size=50 // GROUPS + 1, write_page_index=True)
    return path.read_bytes()


def _footer(body: bytes) -> slice:
    return slice(len(body) - 8 - int.from_bytes(body[-8:-4], "little"), len(body) - 8)


def _turned(body: bytes) -> bytes:
    """The same file as another JVM would write it."""
    footer = bytearray(body[_footer(body)])
    for place in encodings(bytes(footer)):
        footer[place] = footer[place][::-1]
    return body[: _footer(body).start] + bytes(footer) + body[-8:]


def test_every_column_of_every_group_is_found(tmp_path: Path) -> None:
    body = _written(tmp_path / "a.parquet")
    groups = parquet.ParquetFile(tmp_path / "a.parquet").metadata.num_row_groups
    assert groups > 15
    assert len(list(encodings(body[_footer(body)]))) == groups * COLUMNS


def test_files_that_differ_in_the_order_of_encodings_become_equal(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    body = _written(path)
    assert _turned(body) != body
    settle_file(path, ())
    settled = path.read_bytes()
    path.write_bytes(_turned(body))
    settle_file(path, ())
    assert path.read_bytes() == settled
    assert len(settled) == len(body)
    assert parquet.read_table(path).equals(TABLE)
    named = parquet.ParquetFile(path).metadata.row_group(0).column(1).encodings
    assert named == ("PLAIN", "RLE", "RLE_DICTIONARY")


@pytest.mark.parametrize("body", [b"PAR1" + 20 * b"x" + b"PARE", b"\xff\xff\xff\xffPAR1"])
def test_what_has_no_such_footer_is_left_alone(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(body)
    settle_file(path, ())
    assert path.read_bytes() == body


INNER = pa.struct([("x", pa.int32()), ("a.b", pa.list_(pa.struct([("z", pa.string())])))])
NESTED = pa.table(
    {
        "n": pa.array([1, None], pa.int16()),
        "d": pa.array([None, None], pa.decimal128(9, 2)),
        "deep": pa.array([{"x": 1, "a.b": [{"z": "q"}, None]}, None], INNER),
        "by": pa.array([[("k", {"x": 2, "a.b": None})], None], pa.map_(pa.string(), INNER)),
        "ll": pa.array([[[1.5], None], None], pa.list_(pa.list_(pa.float64()))),
        "at": pa.array([0, None], pa.timestamp("us", "UTC")),
    }
)


def _ids(path: Path) -> list[int | None]:
    """The ids of a file as a library reads them, each field before those in it."""
    return field_ids(parquet.read_schema(path))


@pytest.mark.parametrize("columns", [1, 14, 15, 300])
def test_every_field_has_its_id_and_nothing_else_is_changed(tmp_path: Path, columns: int) -> None:
    path = tmp_path / "a.parquet"
    table = NESTED
    for number in range(columns):
        table = table.append_column(f"c{number}", pa.array([number, None], pa.int64()))
    parquet.write_table(table, path, write_page_index=True, row_group_size=1)
    before = path.read_bytes()
    wanted = list(ids_of(columns_in(table.schema)))
    assert len(wanted) == 18 + columns
    identify_file(path, columns_in(table.schema))
    assert _ids(path) == wanted
    assert parquet.read_table(path).equals(table)
    made = path.read_bytes()
    assert made[: _footer(before).start] == before[: _footer(before).start]
    assert identified_file(before, columns_in(table.schema)) == made
    with path.open("r+b") as file:
        assert identify(file, columns_in(table.schema))
    assert path.read_bytes() == made


def test_arrows_own_schema_has_them_too_and_is_as_it_was(tmp_path: Path) -> None:
    """Of functions: what they read again has the types that they wrote."""
    path = tmp_path / "a.parquet"
    kinds = {
        "l": pa.large_list(pa.struct([("x", pa.large_string())])),
        "m": pa.map_(pa.string(), pa.list_(pa.int8())),
        "e": pa.dictionary(pa.int32(), pa.string()),
        "t": pa.timestamp("ms", "Europe/Berlin"),
    }
    table = pa.table({name: pa.nulls(2, kind) for name, kind in kinds.items()})
    table = table.replace_schema_metadata({"mine": "yes"})
    parquet.write_table(table, path)
    columns = columns_in(table.schema)
    for is_trusted in (False, True):
        with path.open("r+b") as file:
            assert identify(file, columns, is_trusted=is_trusted)
        body = parquet.read_metadata(path).metadata[b"ARROW:schema"]
        said = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(body)))
        assert said.equals(table.schema)
        assert said.metadata == table.schema.metadata
        assert field_ids(said) == (list(ids_of(columns)) if is_trusted else [None] * 9)
        assert parquet.read_table(path).equals(table)
        assert _ids(path) == list(ids_of(columns))


def test_ids_that_were_copied_are_overwritten(tmp_path: Path) -> None:
    """A function reads a file with ids, and exchanges the names of two columns."""
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"a": [1], "b": [2]}), path)
    identify_file(path, columns_in(parquet.read_schema(path)))
    parquet.write_table(parquet.read_table(path).rename_columns(["b", "a"]), path)
    with path.open("rb") as file:
        (found,) = footers([file], seconds_max=60, is_trusted=True)
    assert found is not None
    assert found.unfit is Unfit.FIELD_IDS
    identify_file(path, found.columns)
    assert _ids(path) == list(ids_of(found.columns)) != [None, None]
    with path.open("rb") as file:
        (found,) = footers([file], seconds_max=60, is_trusted=True)
    assert found is not None
    assert found.unfit is None


def test_what_is_somebody_elses_too_and_what_has_other_columns_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    body = _written(path)
    for columns in (
        (),
        columns_in(TABLE.schema)[1:],
        columns_in(TABLE.rename_columns(list("abcde")).schema),
    ):
        assert with_ids(body[_footer(body)], columns) is None
        identify_file(path, columns)
        assert path.read_bytes() == body
    (tmp_path / "b.parquet").hardlink_to(path)
    with path.open("r+b") as file:
        assert not identify(file, columns_in(TABLE.schema))
    assert path.read_bytes() == body


@given(st.data())
@settings(max_examples=some(300))
def test_a_footer_that_lies_is_left_alone(data: st.DataObject) -> None:
    """Whatever it says, it is read in the time of its length, and no error leaves."""
    columns = columns_in(NESTED.schema)
    footer = bytearray(_NESTED_FOOTER)
    for _ in range(data.draw(st.integers(1, 4))):
        footer[data.draw(st.integers(0, len(footer) - 1))] = data.draw(st.integers(0, 255))
    made = with_ids(bytes(footer[: data.draw(st.integers(0, len(footer)))]), columns)
    assert made is None or len(made) < 2 * len(footer)


def _nested_footer() -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(NESTED, sink)
    body: bytes = sink.getvalue().to_pybytes()
    return body[_footer(body)]


_NESTED_FOOTER = _nested_footer()
