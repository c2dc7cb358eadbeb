"""What Parquet files may say of their columns, so that Spark skips no row that it should read.

Readers skip row groups by the least and the greatest value that a footer names, and by
dictionaries. Of columns of fractions these cannot be trusted by Spark:

- Arrow's writer leaves NaN out of least and greatest. To Spark NaN is greater than all numbers, and
  it would skip `f > 0.5` over 0.1 and NaN. So files that are written here through Arrow say nothing
  of such columns (`told_columns`). Spark's own writer does the same where there is a NaN.
- A dictionary that has -0.0 has no 0.0, which to Spark are equal: it would skip `f = 0.0`, in files
  of its own too. So dictionaries are not looked at where there are such columns (`READ_WITHOUT`).

Called by all that writes Parquet through Arrow, and by what has Spark read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
from pyarrow import parquet

from penstock.datasets.schema import Column

READ_WITHOUT: Final = "parquet.filter.dictionary.enabled"
"""The option of Spark's reader that has it look at dictionaries; "false" for not."""
_FRACTION: Final = re.compile(r"\b(?:float|double)\b")
_FRACTIONS: Final = ("FLOAT", "DOUBLE")


def has_fractions(columns: Iterable[Column] | None) -> bool:
    """Whether there are, or may be, columns of fractions, nested ones too."""
    return columns is None or any(_FRACTION.search(each.type) for each in columns)


@lru_cache(maxsize=256)
def told_columns(schema: pa.Schema) -> list[str]:
    """The columns of which a file written through Arrow says least and greatest, by their paths."""
    sink = pa.BufferOutputStream()
    with parquet.ParquetWriter(sink, schema):
        pass
    leaves: Any = parquet.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    every = (leaves.column(place) for place in range(len(leaves.names)))
    return [each.path for each in every if each.physical_type not in _FRACTIONS]


def opened_writer(path: Any, schema: pa.Schema) -> Any:
    """A writer that says what it should of columns, and has checksums of pages as Spark's has."""
    return parquet.ParquetWriter(
        path, schema, write_statistics=told_columns(schema), write_page_checksum=True
    )
