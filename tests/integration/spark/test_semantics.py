"""Whatever Spark pushes to the data source, no row is skipped that Spark finds in memory.

The same rows are written through Arrow and by Spark, and read with every filter that is pushed.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import datasource
from pyspark.sql import functions as F  # noqa: N812

from penstock.datasets.snapshot import DataFile
from penstock.datasets.transfer import Transfer
from penstock.runtimes.spark.access.base import DataAccess, WriteTarget
from penstock.runtimes.spark.access.folder import FolderAccess
from penstock.runtimes.spark.access.remote import FileReader, TaggedFile
from penstock.runtimes.spark.job_config import JobConfig
from penstock.runtimes.spark.output_writer import OutputWriter, shape_of

NAN, INF = float("nan"), float("inf")
UTC = dt.UTC
KINDS: Mapping[str, tuple[str, Sequence[Any], Sequence[str]]] = {
    # A column: its type, values, and what it is compared with.
    "i": ("int", (-(2**31), -1, 0, 7, 2**31 - 1), ("-1", "0", "7", "2147483648L")),
    "n": ("bigint", (-(2**63), 0, 5, 2**63 - 1), ("0L", "5", "9223372036854775807L", "4.5D")),
    "f": ("float", (NAN, -0.0, 0.0, 0.5, INF, -INF), ("float('nan')", "0F", "-0F", "0.5D")),
    "d": ("double", (NAN, -0.0, 0.0, 0.1, 1.0, INF), ("double('nan')", "0D", "-0D", "0.5D")),
    "m": (
        "decimal(10,2)",
        (Decimal("-0.01"), Decimal("0.00"), Decimal("1.10"), Decimal("99999999.99")),
        ("1.1", "1.100", "0", "1.105", "0.5D"),
    ),
    "s": ("string", ("", "A", "a", "ab", "b", "é", "\U0001f600", "\ufffd"), ("'a'", "''", "'é'")),
    "c": ("string collate UTF8_LCASE", ("", "A", "a", "ab", "B", "É"), ("'a'", "'É'", "'B'")),
    "x": ("binary", (b"", b"a", b"\x80"), ("X'61'", "X'80'")),
    "b": ("boolean", (True, False), ("true", "false")),
    "y": (
        "date",
        (dt.date(1, 1, 1), dt.date(1582, 10, 4), dt.date(1970, 1, 1), dt.date(9999, 12, 31)),
        ("date'1970-01-01'", "date'1582-10-15'", "timestamp'1970-01-01 00:00:01'"),
    ),
    "t": (
        "timestamp",
        tuple(
            dt.datetime(year, 4, 12, 1, 2, 3, 456789, UTC) for year in (1, 1582, 1969, 2262, 9999)
        ),
        (
            "timestamp'2262-04-12 01:02:03.456789Z'",
            "timestamp'1969-04-12 01:02:03+01:00'",
            "timestamp'1969-04-12 06:32:03.456789'",
            "date'1969-04-12'",
        ),
    ),
    "z": (
        "timestamp_ntz",
        tuple(dt.datetime(year, 4, 12, 1, 2, 3, 456789) for year in (1, 1969, 2262, 9999)),  # noqa: DTZ001
        ("timestamp_ntz'2262-04-12 01:02:03.456789'", "timestamp_ntz'1969-04-12 01:02:03'"),
    ),
}
MORE = {"i": (3,), "d": (0.05,), "m": (Decimal("1.1"), Decimal("1.105")), "s": ("aa",)}
"""Values that no row has."""
NESTED = ("d", "i", "s", "m", "t", "z")
ROWS, ROWS_A_FILE = 10, 5
PUSHED: Mapping[Any, Any] = {
    datasource.EqualTo: lambda column, value: column == value,
    datasource.EqualNullSafe: lambda column, value: column.eqNullSafe(value),
    datasource.GreaterThan: lambda column, value: column > value,
    datasource.GreaterThanOrEqual: lambda column, value: column >= value,
    datasource.LessThan: lambda column, value: column < value,
    datasource.LessThanOrEqual: lambda column, value: column <= value,
}
SCHEMA = (
    "k int, "
    + ", ".join(f"{name} {kind}" for name, (kind, _, _) in KINDS.items())
    + f", o struct<{','.join(f'{name}:{KINDS[name][0]}' for name in NESTED)}>"
)


class Ways:
    """The same rows in memory, written through Arrow, and by Spark."""

    def __init__(
        self,
        session: Any,
        folder: Path,
        rows: Sequence[tuple[Any, ...]],
    ) -> None:
        self.session = session
        self.folder = folder
        self.memory = session.createDataFrame(rows, SCHEMA).coalesce(1)
        self.transfer = Transfer("file:///?fsync=off")
        self.native = FolderAccess(self.transfer)

    def by_arrow(self) -> list[DataFile]:
        # What has a collation does not leave through Arrow.
        frame = self.memory.drop("c")
        shape = shape_of(frame, JobConfig(operator="compact"))
        table = frame.toArrow()
        writer = OutputWriter(self.transfer, target_file_bytes=2**27)
        found = []
        for start in range(0, ROWS, ROWS_A_FILE):
            location = f"{self.folder.as_uri()}/arrow-{start}"
            some = table.slice(start, ROWS_A_FILE)
            files = writer.table(some, shape, location, self.native, file_bytes=2**27)
            found += [_file(location, each) for each in files]
        return found

    def by_spark(self, access: DataAccess, name: str) -> list[DataFile]:
        location = f"{self.folder.as_uri()}/{name}"
        target = WriteTarget(location=location, staging=f"{location}-staging", file_bytes=1)
        # Neighbours by their number are in one file.
        place = (F.col("k") / ROWS_A_FILE).cast("int")
        parted = self.memory.repartitionByRange(ROWS // ROWS_A_FILE, place)
        return [_file(location, each) for each in access.write(parted, target)]


def _file(location: str, file: Any) -> DataFile:
    return DataFile(
        location=f"{location}/{file.name}", bytes=file.bytes, rows=file.rows, sha256=file.sha256
    )


def found_by_spark(
    session: Any, ways: Ways, asked: Sequence[tuple[Any, str, Any]]
) -> tuple[list[str], list[Any]]:
    """For every row whether it is wanted, in a column for each that is asked; and their names."""
    # Literals as columns: not all of them can be said to a JVM in another way.
    values = {
        f"v{place}": each for place, each in enumerate(dict.fromkeys(each[1:] for each in asked))
    }
    literals = session.createDataFrame(
        [tuple(value for _, value in values.values())],
        ", ".join(f"{name} {KINDS[column][0]}" for name, (column, _) in values.items()),
    )
    named = {column_value: name for name, column_value in values.items()}
    names = [f"f{place}" for place in range(len(asked))]
    expected = (
        ways.memory.crossJoin(literals)
        .select(
            "k",
            *(
                PUSHED[kind](F.col(column), F.col(named[column, value])).alias(name)
                for name, (kind, column, value) in zip(names, asked, strict=True)
            ),
        )
        .collect()
    )
    return names, expected


@pytest.mark.timeout(600)
def test_the_data_source_drops_no_row_that_a_filter_wants(spark: Any, tmp_path: Path) -> None:
    """Every operator with every value of every type: Spark says in one query what is wanted."""
    rows = [
        (place, *(([*KINDS[name][1], *[None] * ROWS][place]) for name in KINDS), None)
        for place in range(ROWS)
    ]
    ways = Ways(spark, tmp_path, rows)
    asked = [
        (kind, name, value)
        for kind in PUSHED
        for name in KINDS
        for value in (*KINDS[name][1], *MORE.get(name, ()))
    ]
    names, expected = found_by_spark(spark, ways, asked)
    held = [TaggedFile(each, None) for each in [*ways.by_arrow(), *ways.by_spark(ways.native, "s")]]
    skipped = 0
    for (kind, name, value), place in zip(asked, names, strict=True):
        reader = FileReader(ways.transfer, held, ways.memory.schema)
        pushed: Any = kind((name,), value)
        assert list(reader.pushFilters([pushed])) == [pushed]
        found = [
            row
            for part in reader.partitions()
            for batch in reader.read(part)
            for row in batch.column("k").to_pylist()
        ]
        # Each row is there twice; what has a collation is not in the files of Arrow.
        lost = [row["k"] for row in expected if row[place] and found.count(row["k"]) < 2]
        if name == "c":
            lost = [row["k"] for row in expected if row[place] and row["k"] not in found]
        assert lost == [], (kind.__name__, name, value)
        skipped += len(found) < 2 * ROWS
    assert skipped > len(asked) // 4
