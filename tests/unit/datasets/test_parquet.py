"""Parquet of others is read by a process that can reach nothing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet as writer

from penstock.datasets import parquet_child
from penstock.datasets.parquet import Footer, first_rows, footers
from penstock.datasets.schema import Column
from penstock.kernel.errors import PenstockError

_HOSTILE = """
import json, os, runpy, socket, sys, threading
child = runpy.run_path(sys.argv[1])
import pyarrow.parquet
child["give_up"](5)

def tried(deed):
    try:
        deed()
    except (OSError, RuntimeError, ValueError) as error:
        return type(error).__name__
    return "done"

deeds = {
    "read": lambda: open("/etc/hostname"),
    "write": lambda: open("/tmp/made", "w"),
    "connect": lambda: socket.socket(),
    "fork": os.fork,
    "thread": lambda: threading.Thread(target=print).start(),
    "root": lambda: os.setuid(0) if os.getuid() else None,
    "more": lambda: __import__("resource").setrlimit(7, (9, 9)),
}
print(json.dumps({name: tried(deed) for name, deed in deeds.items()} | {"uid": os.getuid()}))
"""


def file_of(table: pa.Table) -> io.BytesIO:
    body = io.BytesIO()
    writer.write_table(table, body, row_group_size=100)
    return body


def test_who_reads_can_open_start_and_become_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-I", "-c", _HOSTILE, parquet_child.__file__],
        capture_output=True,
        check=True,
        timeout=60,
        env={"ARROW_DEFAULT_MEMORY_POOL": "system"},
    )
    said = json.loads(ran.stdout)
    user = said.pop("uid")
    if os.geteuid() == 0:
        assert user in parquet_child.USERS
    else:
        del said["root"]
    assert "done" not in said.values(), said


def test_rows_are_values_or_texts_and_only_as_many_as_asked_for() -> None:
    table = pa.table({"n": range(1000), "deep": [{"a": [1, None]}] * 1000, "raw": [b"x"] * 1000})
    found = first_rows(file_of(table), rows=2, seconds_max=60)
    assert list(found.columns) == ["n", "deep", "raw"]
    assert found.rows == [[0, {"a": [1, None]}, "b'x'"], [1, {"a": [1, None]}, "b'x'"]]
    cut = first_rows(file_of(table), rows=1, seconds_max=60, columns_max=2, characters_max=5)
    assert (cut.rows, cut.left_out) == ([["0", "{'a'…"]], 1)


def test_a_file_that_claims_to_be_huge_is_refused() -> None:
    """A run of one value is a few bytes however long it is; who makes values of it has bounds."""
    body = bytearray(file_of(pa.table({"n": [1]})).getvalue())
    body[-8:-4] = (2**31 - 1).to_bytes(4, "little")
    with pytest.raises(PenstockError, match="cannot be read as Parquet"):
        first_rows(io.BytesIO(body), rows=1, seconds_max=60)


def test_footers_tell_rows_and_columns_and_one_that_is_none_spoils_no_other() -> None:
    table = pa.table(
        {
            "i": pa.array([1], pa.int32()),
            "t": pa.array([0], pa.timestamp("us", tz="UTC")),
            "d": pa.array([None], pa.decimal128(10, 2)),
            "s": pa.array([[{"a b": "x"}]], pa.list_(pa.struct({"a b": pa.string()}))),
        }
    )
    nameless = pa.table({"t": pa.array([0], pa.time64("ns"))})
    files = [io.BytesIO(b"junk"), file_of(table), io.BytesIO(b""), file_of(nameless)]
    words = [("i", "int"), ("t", "timestamp"), ("d", "decimal(10,2)")]
    words.append(("s", "array<struct<`a b`:string>>"))
    assert footers(files, seconds_max=60) == [
        None,
        Footer(rows=1, columns=tuple(Column(*each) for each in words)),
        None,
        Footer(rows=1, columns=()),
    ]
