"""Footers of Parquet files: equal rows, equal bytes, whoever wrote them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.runtimes.spark.access.footers import encodings, settle_footer

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
    settle_footer(path)
    settled = path.read_bytes()
    path.write_bytes(_turned(body))
    settle_footer(path)
    assert path.read_bytes() == settled
    assert len(settled) == len(body)
    assert parquet.read_table(path).equals(TABLE)
    named = parquet.ParquetFile(path).metadata.row_group(0).column(1).encodings
    assert named == ("PLAIN", "RLE", "RLE_DICTIONARY")


@pytest.mark.parametrize("body", [b"PAR1" + 20 * b"x" + b"PARE", b"\xff\xff\xff\xffPAR1"])
def test_what_has_no_such_footer_is_left_alone(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(body)
    settle_footer(path)
    assert path.read_bytes() == body
