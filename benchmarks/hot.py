"""Rows loaded into hot tables, against bare COPY of the same rows in the same run.

    python -m benchmarks.hot [--rows 200000] [--rounds 3]

A Postgres of its own, which syncs what it commits; Parquet files of four columns, read by the
closed process, as the applier reads them. Each line is one partition in one transaction, the best
of some rounds: rows a second, and as a share of bare COPY, whose lines are in memory already.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Generator
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pyarrow as pa
from pyarrow import parquet

from penstock.datasets.parquet import copied
from penstock.datasets.schema import Column
from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.dispatcher.datasets.hot_tables import (
    AppliedPartition,
    HotDataset,
    HotGeneration,
    HotRelation,
    PostgresData,
)
from penstock.kernel.clock import SystemClock

CLOCK = SystemClock()
COLUMNS = (
    Column("id", "bigint"),
    Column("at", "timestamp"),
    Column("level", "string"),
    Column("amount", "double"),
)
DATASET = "00000000-0000-4000-8000-000000000001"
GENERATION = "00000000-0000-4000-8000-000000000002"
BARE = (
    b"CREATE TABLE IF NOT EXISTS bare"
    b" (id bigint PRIMARY KEY, at timestamptz, level text, amount double precision)"
)


def written(path: Path, rows: int, *, changed: int = 0) -> Path:
    """A file of so many rows, of which some are others than before."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    arrays = {
        "id": pa.array(range(rows), pa.int64()),
        "at": pa.array([at] * rows, pa.timestamp("us", "UTC")),
        "level": pa.array([f"level {number % 7}" for number in range(rows)]),
        "amount": pa.array([number * 1.25 + (number < changed) for number in range(rows)]),
    }
    parquet.write_table(pa.table(arrays), path)
    return path


def pieces(path: Path) -> Generator[Generator[bytes]]:
    """The rows of a file, as the applier has them."""

    def rows() -> Generator[bytes]:
        with path.open("rb") as file:
            yield from copied(file, COLUMNS, seconds_max=600)

    yield rows()


async def loaded(
    tables: HotDataset, relation: HotRelation, path: Path, revision: int, *, is_added: bool = False
) -> None:
    """One partition, in one transaction."""
    async with tables.loading(f"position {revision}") as load:
        wanted = AppliedPartition(
            generation=GENERATION, partition_key="p", revision=revision, stamp=str(revision)
        )
        await load.load(relation, wanted, pieces(path), is_added=is_added)


async def timed(work: Callable[[], Awaitable[None]]) -> float:
    began = CLOCK.monotonic()
    await work()
    return CLOCK.monotonic() - began


async def bare_copy(dsn: str, body: bytes) -> None:
    """The same lines, by COPY alone, into a table with the same key."""
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await connection.execute(BARE)
        await connection.execute(b"TRUNCATE bare")
        async with (
            connection.cursor() as cursor,
            cursor.copy(b"COPY bare FROM STDIN (FORMAT csv)") as copy,
        ):
            await copy.write(body)


async def measured(folder: Path, *, rows: int, rounds: int) -> None:
    first = written(folder / "first.parquet", rows)
    other = written(folder / "other.parquet", rows, changed=rows // 100)
    body = b"".join(piece for each in pieces(first) for piece in each)
    async with LocalPostgres(folder / "postgres") as postgres:
        data = PostgresData(postgres.data_dsn, reader="penstock_reader")
        best: dict[str, float] = {}

        def note(name: str, seconds: float) -> None:
            best[name] = min(seconds, best.get(name, seconds))

        for number in range(rounds):
            note("bare COPY", await timed(lambda: bare_copy(postgres.data_dsn, body)))
            async with data.connection() as connection:
                for keys in ((), ("id",)):
                    async with data.locked(connection, DATASET, "alerts") as tables:
                        assert tables is not None, "nobody else is here"
                        await tables.look()
                        hot = HotGeneration(
                            generation=GENERATION, is_current=True, columns=COLUMNS, keys=keys
                        )
                        ((relation,), _) = await tables.prepare([hot])
                        at = 10 * number
                        what = "merge" if keys else "replace"
                        seconds = await timed(lambda: loaded(tables, relation, first, at + 1))  # noqa: B023
                        note(f"{what}, the first time", seconds)
                        seconds = await timed(lambda: loaded(tables, relation, other, at + 2))  # noqa: B023
                        note(f"{what}, 1 % changed", seconds)
                        await tables.clear(is_all=True)
    for name, seconds in best.items():
        share = best["bare COPY"] / seconds
        print(f"{name:24} {rows / seconds:12,.0f} rows/s {share:6.2f} of bare COPY")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    said = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hot-") as place:
        asyncio.run(measured(Path(place), rows=said.rows, rounds=said.rounds))


if __name__ == "__main__":
    main()
