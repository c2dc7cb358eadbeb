"""Parquet of others is read by a process that can reach nothing."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as writer

from penstock.datasets import parquet_child
from penstock.datasets.bounds import Bound
from penstock.datasets.manifest import Unfit
from penstock.datasets.parquet import Footer, copied, first_rows, footers
from penstock.datasets.schema import Column
from penstock.kernel.errors import PenstockError

_HOSTILE = """
import ctypes, json, os, resource, runpy, signal, socket, sys, threading
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
    "more": lambda: resource.setrlimit(7, (9, 9)),
    "look": lambda: os.stat("/etc/hostname"),
    "remove": lambda: os.unlink(sys.argv[2]),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "signal": lambda: os.kill(os.getppid(), 0),
    "trace": lambda: trace(os.getppid()),
    "limit another": lambda: resource.prlimit(os.getppid(), 7),
}
libc = ctypes.CDLL(None)

def trace(process):
    if libc.ptrace(16, process, 0, 0) != 0:
        raise PermissionError
    libc.ptrace(17, process, 0, 0)

print(json.dumps({name: tried(deed) for name, deed in deeds.items()} | {"uid": os.getuid()}))
"""


def file_of(table: pa.Table) -> io.BytesIO:
    body = io.BytesIO()
    writer.write_table(table, body, row_group_size=100)
    return body


def test_who_reads_can_open_start_and_become_nothing(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.touch()
    ran = subprocess.run(
        [sys.executable, "-I", "-c", _HOSTILE, parquet_child.__file__, str(ours)],
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
    assert ours.exists()


@pytest.mark.parametrize(
    "said",
    [
        f'{{"file": 0, "at": 0, "bytes": {parquet_child.PIECE_BYTES_MAX + 1}}}',
        f'{{"file": 0, "at": {2**70}, "bytes": 1}}',
        '{"file": 0, "at": 0, "bytes": -1}',
        '{"found": [{"columns": [], "rows": [], "left_out": Infinity}]}',
        '{"found": ' + "[[]," * 300_000 + "[]" + "]" * 300_000 + "}",
        '{"found": [{"columns": ["%s"], "rows": [], "left_out": 0}]}' % ("x" * 4_000_000),
    ],
    ids=["much", "far", "negative", "infinite", "deep", "long"],
)
def test_what_the_reader_says_is_not_trusted(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    astray = tmp_path / "astray.py"
    astray.write_text(f"import sys\nsys.stdin.readline()\nprint({said!r}, flush=True)\n")
    astray.write_text(astray.read_text() + "sys.stdin.buffer.read(1)\n")
    monkeypatch.setattr(parquet_child, "__file__", str(astray))

    class File(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise AssertionError(f"{size} bytes were read")

    with pytest.raises(PenstockError, match="cannot be read as Parquet"):
        first_rows(File(b"x"), rows=20, seconds_max=60, columns_max=60, characters_max=200)


def test_more_than_was_asked_for_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    astray = tmp_path / "astray.py"
    found = {"columns": ["a"] * 9, "rows": [["x" * 99, [[]], None]] * 9, "left_out": 0}
    line = json.dumps({"found": [found]})
    astray.write_text(f"import sys\nsys.stdin.readline()\nprint({line!r}, flush=True)\n")
    monkeypatch.setattr(parquet_child, "__file__", str(astray))
    cut = first_rows(io.BytesIO(), rows=2, seconds_max=60, columns_max=2, characters_max=5)
    assert (cut.columns, cut.rows) == (["a", "a"], [["xxxxx", "[[]]"]] * 2)


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
            "n": pa.array([0], pa.timestamp("ns")),
            "d": pa.array([Decimal("1.50")], pa.decimal128(10, 2)),
            "f": pa.array([float("nan")]),
            "x": pa.array(["x" * 50]),
            "s": pa.array([[{"a b": "x"}]], pa.list_(pa.struct({"a b": pa.string()}))),
        }
    )
    nameless = pa.table({"t": pa.array([0], pa.time64("ns"))})
    files = [io.BytesIO(b"junk"), file_of(table), io.BytesIO(b""), file_of(nameless)]
    words = [
        ("i", "int"),
        ("t", "timestamp"),
        ("n", "timestamp_ntz"),
        ("d", "decimal(10,2)"),
        ("f", "double"),
    ]
    words += [("x", "string"), ("s", "array<struct<`a b`:string>>")]
    # Not every writer tells whether there is a NaN: of fractions nothing is told.
    bounds = {"i": Bound(1, 1, 0), "t": Bound(0, 0, 0), "d": Bound("1.50", "1.50", 0)}
    bounds["x"] = Bound("x" * 32, "x" * 31 + "y", 0)
    assert footers(files, seconds_max=60) == [
        None,
        Footer(rows=1, columns=tuple(Column(*each) for each in words), bounds=bounds),
        None,
        Footer(rows=1, columns=()),
    ]


@pytest.mark.parametrize("is_trusted", [False, True])
def test_what_engines_would_misread_is_told(is_trusted: bool) -> None:
    copied = pa.field("n", pa.int64(), metadata={"PARQUET:field_id": "7"})
    schemas = {
        None: pa.schema([("n", pa.uint16()), ("m", pa.map_(pa.string(), pa.int64()))]),
        Unfit.FIELD_IDS: pa.schema([("l", pa.list_(pa.struct([copied])))]),
        Unfit.UNSIGNED: pa.schema([("m", pa.map_(pa.string(), pa.uint64()))]),
    }
    files = [file_of(each.empty_table()) for each in schemas.values()]
    found = footers(files, seconds_max=60, is_trusted=is_trusted)
    assert [each and each.unfit for each in found] == list(schemas)


def test_rows_are_copied_as_lines_that_postgres_takes(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    at = datetime(2026, 1, 2, 3, tzinfo=UTC)
    writer.write_table(
        pa.table(
            {
                "text": pa.array(['a "b",\n\0', "", None]),
                "raw": pa.array([b"\0\xff", b"", None]),
                "at": pa.array([at, None, None], pa.timestamp("us", "UTC")),
                "amount": pa.array([Decimal("1.20"), None, None]),
                "named": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())),
                "word": pa.array(["x", "y", None]).dictionary_encode(),
                "_penstock_task": pa.array([1, 2, 3]),
            }
        ),
        path,
    )
    columns = [
        Column("word", "string"),
        Column("missing", "bigint"),
        Column("text", "string"),
        Column("raw", "binary"),
        Column("at", "timestamp"),
        Column("amount", "decimal(12,2)"),
        Column("named", "map<string,bigint>"),
    ]
    with path.open("rb") as file:
        found = b"".join(copied(file, columns, seconds_max=120)).decode()
    assert list(csv.reader(io.StringIO(found))) == [
        ["x", "", 'a "b",\n�', r"\x00ff", "2026-01-02 03:00:00.000000", "1.20", '{"a": 1}'],
        ["y", "", "", r"\x", "", "", "{}"],
        [""] * 7,
    ]
    # What is null has no quotes, and what is empty has some: COPY tells them by that.
    assert found.splitlines()[-2:] == [r'"y",,"","\x",,,"{}"', ",,,,,,"]


def test_values_that_python_or_json_lack_are_copied_as_postgres_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    ancient, far = -62_135_596_801_000_000, 2**63 - 1
    moment = pa.timestamp("us", "Europe/Berlin")
    inner = pa.struct([("on", pa.date32()), ("at", pa.timestamp("us"))])
    nan, endless = float("nan"), float("-inf")
    table = pa.table(
        {
            "day": pa.array([-800_000, 2_932_897, None], pa.date32()),
            "at": pa.array([ancient, far, None], moment),
            "plain": pa.array([0, -(2**62), None], pa.timestamp("us")),
            "numbers": pa.array([[1.5, nan, endless], [], None], pa.list_(pa.float64())),
            "text": pa.array([["\\u0000", "\0"], [], None], pa.list_(pa.string())),
            "when": pa.array([{"on": -800_000, "at": ancient}, {"on": 0, "at": 1}, None], inner),
            "zoned": pa.array([[("k", 0)], [], None], pa.map_(pa.string(), moment)),
        }
    )
    writer.write_table(table, path)
    kinds = ("date", "timestamp", "timestamp_ntz", *["array<double>"] * 4)
    columns = [Column(*each) for each in zip(table.column_names, kinds, strict=True)]
    with path.open("rb") as file:
        found = b"".join(copied(file, columns, seconds_max=120)).decode()
    first, second, third = csv.reader(io.StringIO(found))
    assert first == [
        *("0222-09-04 BC", "0001-12-31 23:59:59.000000 BC", "1970-01-01 00:00:00.000000"),
        '[1.5, "NaN", "-Infinity"]',
        r'["\\u0000", "\ufffd"]',
        '{"on": "0222-09-04 BC", "at": "0001-12-31 23:59:59 BC"}',
        '{"k": "1970-01-01 00:00:00+00:00"}',
    ]
    assert second[:3] == [
        *("10000-01-01", "294247-01-10 04:00:54.775807"),
        "144170-06-28 09:59:32.612096 BC",
    ]
    assert third == [""] * 7


def test_what_is_no_parquet_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and nothing else PAR1")
    with path.open("rb") as file, pytest.raises(PenstockError, match="cannot be read as Parquet"):
        list(copied(file, [Column("a", "int")], seconds_max=120))
