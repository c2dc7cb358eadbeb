"""TPC-H's 22 queries in processes for queries equal those of DuckDB itself over the same files."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.query import QUERIES, TABLES, same

from penstock.datasets.bounds import bound_values
from penstock.datasets.manifest import File, Manifest, digest, encode
from penstock.datasets.parquet_child import ends, word
from penstock.datasets.schema import Column
from penstock.datasets.transfer import Transfer
from penstock.kernel.clock import SystemClock
from penstock.protocol.datasets import ColumnAnswer
from penstock.protocol.queries import QueryPart, QueryTable
from penstock.query.engine import QueryForkServer, QueryProcess
from penstock.query.service import open_files
from tests.integration.query.site import BOUNDS

pytestmark = pytest.mark.timeout(300)
PARTS = 3


def published(folder: Path, name: str, table: pa.Table) -> QueryTable:
    """A table as a dataset of several parts, each with a file and its manifest."""
    columns = tuple(Column(each.name, word(each.type)) for each in table.schema)
    parts = []
    step = -(-table.num_rows // PARTS)
    for number in range(0, table.num_rows, step):
        place = folder / name / str(number)
        place.mkdir(parents=True)
        piece = table.slice(number, step)
        pq.write_table(piece, place / "0.parquet", row_group_size=10_000)
        size = (place / "0.parquet").stat().st_size
        file = File(
            name="0.parquet",
            rows=piece.num_rows,
            bytes=size,
            sha256="0" * 64,
            bounds=bound_values(ends(pq.read_metadata(place / "0.parquet"), columns_max=32)),
        )
        manifest = encode(
            Manifest(
                dataset=name,
                generation="00000000-0000-0000-0000-000000000001",
                job="make",
                task_id=1,
                attempt=1,
                rows=piece.num_rows,
                bytes=size,
                columns=columns,
                files=(file,),
            )
        )
        (place / "manifest.json").write_bytes(manifest)
        parts.append(QueryPart(location=place.as_uri(), manifest=digest(manifest)))
    known = [msgspec.convert({"name": x.name, "type": x.type}, ColumnAnswer) for x in columns]
    return QueryTable(name=name, uuid="", generation=None, columns=known, parts=parts)


def test_all_queries_of_tpch_equal_those_of_duckdb(tmp_path: Path) -> None:
    source = tmp_path / "source"
    make = str(Path(sys.executable).with_name("tpchgen-cli"))
    subprocess.run(
        [make, "parquet", "-s", "0.01", "--output-dir", str(source)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    bare = duckdb.connect()
    tables = {}
    for name in TABLES:
        bare.execute(f"CREATE VIEW {name} AS SELECT * FROM '{source}/{name}.parquet'")
        order = "ORDER BY l_shipdate" if name == "lineitem" else ""
        read = bare.execute(f"SELECT * FROM {name} {order}").to_arrow_table()
        tables[name] = published(tmp_path, name, read)
    server, left_out = QueryForkServer(BOUNDS), 0
    with closing(server):
        for number, sql in enumerate(QUERIES.read_text().partition("\n")[2].split("\n-----\n"), 1):
            found, opened = run(server, sql, tables, str(tmp_path.as_uri()))
            expected = bare.execute(sql).to_arrow_table()
            assert found.num_rows == expected.num_rows, number
            assert same(found, expected), number
            left_out += PARTS - opened
    assert left_out > 0, "by the bounds of lineitem"


def run(
    server: QueryForkServer, sql: str, tables: dict[str, QueryTable], store: str
) -> tuple[pa.Table, int]:
    """The result, and of how many parts of `lineitem` files were opened."""
    process: Any = QueryProcess(BOUNDS, server, user=None, clock=SystemClock())
    with closing(process):
        process.wait()
        said = process.parse(sql)
        named = [tables[name] for name in said.tables if name not in said.given]
        made = open_files(named, Transfer(store), scan_bytes=1 << 30, conditions=said.conditions)
        how = {"format": "arrow", "explain": False, "cut": None}
        process.run(made.tables, made.files, made.sizes, how=how)
        pieces = []
        while (piece := process.next()) is not None:
            pieces.append(piece)
    of_lines = [each for each in made.tables if each["name"] == "lineitem"]
    opened = sum(len(group["files"]) for each in of_lines for group in each["groups"])
    return pa.ipc.open_stream(b"".join(pieces)).read_all(), opened if of_lines else PARTS
