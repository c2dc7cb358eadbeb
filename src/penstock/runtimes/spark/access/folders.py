"""What Spark's writer has left in a folder of this machine that only one attempt writes to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pyarrow import parquet

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.access.footers import settle_footer

SUCCESS: Final = "_SUCCESS"


def left_by_spark(folder: Path) -> Iterator[tuple[Path, int]]:
    """The files that Spark has committed, in order, and how many rows each has; no empty ones."""
    if not (folder / SUCCESS).exists():
        raise WorkFailed("Spark's writer ended and has not committed what it wrote.")
    for path in sorted(folder.glob("part-*.parquet")):
        rows = parquet.read_metadata(path).num_rows
        if rows:
            settle_footer(path)
            yield path, rows
