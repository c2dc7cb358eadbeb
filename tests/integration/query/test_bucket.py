"""Queries over files in a bucket, from a real S3 server: ranges of them, and what goes wrong."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from types import MappingProxyType
from typing import BinaryIO

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.datasets.bounds import bound_of
from penstock.datasets.manifest import File, Manifest, digest, encode
from penstock.datasets.schema import Column
from penstock.datasets.transfer import Transfer
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import Damaged, Refused
from penstock.protocol.datasets import ColumnAnswer
from penstock.protocol.queries import QueryPart, QueryTable
from penstock.query.engine import QueryFailed, QueryForkServer, QueryProcess
from penstock.query.pruning import Condition
from penstock.query.service import QueryFiles, open_files
from penstock.store.s3.local import LocalS3
from penstock.store.s3.signing import Credentials
from tests.integration.query.site import BOUNDS

pytestmark = pytest.mark.timeout(300)
COLUMNS = {
    "n": "bigint",
    "price": "decimal(12,3)",
    "tags": "array<string>",
    "place": "struct<city:string,at:array<double>>",
    "counts": "map<string,bigint>",
}
ROWS = 20_000
SCAN = 1 << 30


def rows(start: int) -> pa.Table:
    every = range(start, start + ROWS)
    return pa.table(
        {
            "n": pa.array(every, pa.int64()),
            "price": pa.array([Decimal(x) / 8 for x in every], pa.decimal128(12, 3)),
            "tags": pa.array([["a", f"t{x % 5}"][: x % 3] for x in every], pa.list_(pa.string())),
            "place": pa.array(
                [{"city": f"c{x % 7}", "at": [x / 2, None]} for x in every],
                pa.struct([("city", pa.string()), ("at", pa.list_(pa.float64()))]),
            ),
            "counts": pa.array(
                [[("k", x), ("l", x % 3)] for x in every], pa.map_(pa.string(), pa.int64())
            ),
        }
    )


@dataclass
class Shelf:
    """A dataset in a bucket, and how it is queried."""

    transfer: Transfer
    base: str
    server: QueryForkServer
    parts: list[QueryPart] = field(default_factory=list)

    def publish(self, key: str, table: pa.Table) -> None:
        opened = io.BytesIO()
        pq.write_table(table, opened, row_group_size=5_000)
        body, location = opened.getvalue(), f"{self.base}/{key}"
        self.transfer.write_bytes(f"{location}/part-0.parquet", body)
        sha = hashlib.sha256(body).hexdigest()
        manifest = encode(
            Manifest(
                dataset="shelf",
                generation="00000000-0000-0000-0000-000000000001",
                job="make",
                task_id=1,
                attempt=1,
                partition_key=key,
                rows=table.num_rows,
                bytes=len(body),
                columns=tuple(Column(name, kind) for name, kind in COLUMNS.items()),
                files=(
                    File(
                        name="part-0.parquet",
                        rows=table.num_rows,
                        bytes=len(body),
                        sha256=sha,
                        bounds={
                            "n": bound_of(table["n"][0].as_py(), table["n"][-1].as_py(), 0),
                            "price": bound_of(
                                table["price"][0].as_py(), table["price"][-1].as_py(), 0
                            ),
                        },
                    ),
                ),
            )
        )
        self.transfer.write_bytes(f"{location}/manifest.json", manifest)
        self.parts.append(
            QueryPart(location=location, partition_key=key, manifest=digest(manifest))
        )

    def opened(
        self,
        transfer: Transfer | None = None,
        conditions: Mapping[str, Condition] = MappingProxyType({}),
    ) -> QueryFiles:
        table = QueryTable(
            name="shelf",
            uuid="",
            generation=None,
            columns=[
                msgspec.convert({"name": name, "type": kind}, ColumnAnswer)
                for name, kind in COLUMNS.items()
            ],
            parts=self.parts,
        )
        used = transfer or self.transfer
        return open_files([table], used, scan_bytes=SCAN, conditions=conditions)

    @contextmanager
    def process(self) -> Iterator[QueryProcess]:
        process = QueryProcess(BOUNDS, self.server, user=None, clock=SystemClock())
        try:
            process.wait()
            yield process
        finally:
            process.close()

    def query(self, sql: str, form: str = "arrow", *, files: QueryFiles | None = None) -> bytes:
        made = files or self.opened()
        with self.process() as process:
            process.parse(sql)
            how = {"format": form, "explain": False, "cut": None}
            process.run(made.tables, made.files, made.sizes, how=how)
            pieces = []
            while (piece := process.next()) is not None:
                pieces.append(piece)
        return b"".join(pieces)


@pytest.fixture(scope="module")
def server() -> Iterator[QueryForkServer]:
    made = QueryForkServer(BOUNDS)
    yield made
    made.close()


@pytest.fixture
def shelf(
    request: pytest.FixtureRequest, local_s3: LocalS3, server: QueryForkServer
) -> Iterator[Shelf]:
    transfer = Transfer(local_s3.url, local_s3.credentials, environment={})
    made = Shelf(transfer, f"s3://penstock/query/{request.node.name}", server)
    made.publish("a", rows(0))
    made.publish("b", rows(ROWS))
    yield made
    transfer.clear(made.base)


def test_nested_values_and_decimals_come_out_as_they_went_in(shelf: Shelf) -> None:
    shelf_rows = pa.concat_tables([rows(0), rows(ROWS)])
    local = duckdb.connect()
    local.register("shelf", shelf_rows)
    for sql in (
        "SELECT * FROM shelf WHERE n % 4999 = 1 ORDER BY n",
        (
            "SELECT place.city, sum(price) AS total, max(counts['k']) AS k FROM shelf"
            " GROUP BY ALL ORDER BY ALL"
        ),
        "SELECT count(*) AS c FROM shelf, unnest(tags) t(tag) WHERE tag = 't3'",
    ):
        asked = sql.replace("SELECT *", "SELECT * EXCLUDE (partition_key)")
        found = pa.ipc.open_stream(shelf.query(asked)).read_all()
        assert found.to_pylist() == local.execute(sql).to_arrow_table().to_pylist(), sql
    text = shelf.query("SELECT * FROM shelf WHERE n = 9 OR n = 20001 ORDER BY n", "csv").decode()
    assert text.splitlines()[1:] == [
        '9,1.125,[],"{""city"":""c2"",""at"":[4.5,null]}","[[""k"",9],[""l"",0]]",a',
        '20001,2500.125,[],"{""city"":""c2"",""at"":[10000.5,null]}","[[""k"",20001],[""l"",0]]",b',
    ]
    # The types are those of the dataset, also where no file is left.
    shelf.parts.clear()
    none = pa.ipc.open_stream(shelf.query("SELECT * FROM shelf")).read_all()
    assert none.num_rows == 0
    assert none.schema == shelf_rows.schema.remove_metadata()


class Paused(io.RawIOBase):
    """A file of the bucket whose second range waits."""

    def __init__(
        self, file: BinaryIO, has_begun: threading.Event, goes_on: threading.Event
    ) -> None:
        self._file, self._has_begun, self._goes_on = file, has_begun, goes_on
        self._reads = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        self._reads += 1
        if self._reads == 2:
            self._has_begun.set()
            assert self._goes_on.wait(60)
        return self._file.read(size)

    def fileno(self) -> int:
        raise OSError("it is not open")


def test_a_query_is_cancelled_between_two_ranges(shelf: Shelf) -> None:
    made = shelf.opened()
    begun, goes_on = threading.Event(), threading.Event()
    made.files[0] = Paused(made.files[0], begun, goes_on)  # type: ignore[call-overload]
    how = {"format": "csv", "explain": False, "cut": None}
    with shelf.process() as process, ThreadPoolExecutor(1) as pool:
        process.parse("SELECT max(n) FROM shelf")

        def run() -> None:
            process.run(made.tables, made.files, made.sizes, how=how)
            while process.next() is not None:
                pass

        running = pool.submit(run)
        assert begun.wait(60)
        process.kill()
        goes_on.set()
        with pytest.raises(QueryFailed, match="exited before its result was complete"):
            running.result(60)
        pid = process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_files_are_left_out_by_what_their_manifests_say(shelf: Shelf) -> None:
    file = f"{shelf.parts[1].location}/part-0.parquet"
    shelf.transfer.delete([file])
    with shelf.process() as process:
        said = process.parse("SELECT max(n) AS n FROM shelf WHERE price < 2 AND n >= 0")
    made = shelf.opened(conditions=said.conditions)
    assert [each["groups"][0]["files"] for each in made.tables] == [[(0, "a")]]
    sql = "SELECT max(n) AS n FROM shelf WHERE price < 2 AND n >= 0"
    assert shelf.query(sql, "csv", files=made) == b"n\n15\n"
    none = shelf.opened(conditions={"shelf": ["=", "n", "number", "-1"]})
    assert not none.files
    sql = "SELECT count(counts['k']) AS n FROM shelf WHERE n = -1"
    assert shelf.query(sql, "csv", files=none) == b"n\n0\n"


def test_what_is_missing_or_was_changed_is_said(shelf: Shelf) -> None:
    sql = "SELECT sum(n) FROM shelf"
    file = f"{shelf.parts[1].location}/part-0.parquet"
    shelf.transfer.write_bytes(file, b"PAR1")
    with pytest.raises(QueryFailed, match=r"is shorter than its manifest says"):
        shelf.query(sql)
    shelf.transfer.delete([file])
    with pytest.raises(QueryFailed, match=rf"There is no object {file}: it was removed") as missing:
        shelf.query(sql)
    assert (missing.value.kind, "backfill" in missing.value.hint) == ("missing", True)
    shelf.transfer.delete([f"{shelf.parts[1].location}/manifest.json"])
    with pytest.raises(Damaged, match="is not there"):
        shelf.opened()


def test_credentials_that_have_expired_are_said(shelf: Shelf, local_s3: LocalS3) -> None:
    wrong = Credentials("expired", "nothing", "ended")
    refused = Transfer(local_s3.url, wrong, environment={})
    with pytest.raises(Refused, match="was denied"):
        shelf.opened(refused)
    # Between the manifests and the files.
    made = shelf.opened()
    for file in made.files:
        file._transfer = refused  # type: ignore[attr-defined]
    with pytest.raises(Refused, match="was denied"):
        shelf.query("SELECT sum(n) FROM shelf", files=made)
