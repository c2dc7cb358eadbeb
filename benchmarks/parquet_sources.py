"""Parquet files that sections of `benchmarks.pipeline` read: of many months, and small ones."""

from __future__ import annotations

from pathlib import Path

TRIP_FILES = 8
LITTLE_FILES = 16


def trips(folder: Path, *, months: int, rows: int) -> None:
    """So many rows a month, in files each of which has rows of all months."""
    import numpy as np  # noqa: PLC0415 - so that --help needs none of these
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    folder.mkdir()
    random = np.random.default_rng(7)
    first = np.datetime64("2019-01-01", "us")
    seconds = int((np.datetime64("2019-01") + months).astype("datetime64[s]").astype(int))
    seconds -= int(first.astype("datetime64[s]").astype(int))
    count = months * rows // TRIP_FILES
    for number in range(TRIP_FILES):
        at = first + (random.random(count) * seconds * 1e6).astype("timedelta64[us]")
        table = pa.table(
            {
                "ts": pa.array(at, pa.timestamp("us", tz="UTC")),
                "zone": pa.array(random.integers(0, 260, count, dtype=np.int32)),
                "fare": pa.array(random.random(count) * 50),
                "miles": pa.array(random.random(count) * 20),
                "note": pa.array(random.integers(0, 10**9, count).astype(str)),
            }
        )
        parquet.write_table(table, folder / f"{number}.parquet")


def little(folder: Path, *, rows: int) -> None:
    """So many rows, in files that are small: how much there is to compute is not in their bytes."""
    import pyarrow as pa  # noqa: PLC0415 - so that --help needs none of these
    from pyarrow import parquet  # noqa: PLC0415

    folder.mkdir()
    for number in range(LITTLE_FILES):
        table = pa.table({"id": pa.array(range(number, rows, LITTLE_FILES), pa.int64())})
        parquet.write_table(table, folder / f"{number}.parquet")
