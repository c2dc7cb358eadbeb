"""Something like a database: a source that nobody knows the size of, for `benchmarks.pipeline`.

It is read by both sides: `load` is a transform of Penstock's, and `rows` what bare PySpark reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql import datasource

SPLITS = 16


class Database(datasource.DataSource):
    """`rows` rows, which 16 readers share."""

    @classmethod
    def name(cls) -> str:
        return "database"

    def schema(self) -> str:
        return "id bigint, shop bigint, said string"

    def reader(self, schema: Any) -> datasource.DataSourceReader:
        del schema
        return _Reader(int(self.options["rows"]))


class _Reader(datasource.DataSourceReader):
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def partitions(self) -> Sequence[datasource.InputPartition]:
        return [datasource.InputPartition(each) for each in range(SPLITS)]

    def read(self, partition: datasource.InputPartition) -> Iterator[tuple[int, int, str]]:
        return (
            (each, each % 97, f"row {each}") for each in range(partition.value, self._rows, SPLITS)
        )


def rows(session: Any, count: int) -> Any:
    """All of it, as a frame."""
    session.dataSource.register(Database)
    return session.read.format("database").option("rows", count).load()


def load(_inputs: Mapping[str, Any], context: Any) -> Any:
    """All of it, as a job."""
    return rows(context.session, context.parameters["rows"])
