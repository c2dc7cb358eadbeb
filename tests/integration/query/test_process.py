"""The process of a query: what it can do with more than its memory, and what it cannot do."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.kernel.clock import SystemClock
from penstock.protocol.queries import QUERY_LESS_HINT
from penstock.query import child, engine
from penstock.query.engine import QueryFailed, QueryForkServer, QueryProcess, QueryProcesses
from penstock.runtimes.guard import user_processes
from penstock.runtimes.uid_pool import FOLDER, UidPool
from tests.integration.query.site import BOUNDS

pytestmark = pytest.mark.timeout(300)
IS_ROOT = os.geteuid() == 0
TIGHT = replace(
    BOUNDS, memory_bytes=40 * 1024**2, spill_bytes=2 * 1024**3, seconds_max=240, threads=2
)
LARGE = {
    "sort": "SELECT n FROM (SELECT md5(i::VARCHAR) || repeat('x', 60) AS s, i AS n"
    " FROM range(500_000) t(i) ORDER BY s) OFFSET 499_995",
    "join": "SELECT count(*), sum(length(b.p)) FROM (SELECT md5(i::VARCHAR) AS s"
    " FROM range(750_000) t(i)) a JOIN (SELECT md5((i + 7)::VARCHAR) AS s, repeat('y', 50) || i"
    " AS p FROM range(750_000) t(i)) b USING (s)",
    "aggregate": "SELECT count(*), sum(c) FROM (SELECT md5(i::VARCHAR) AS s, count(*) AS c"
    " FROM range(600_000) t(i) GROUP BY s)",
}


@pytest.fixture
def forks() -> Iterator[Callable[..., QueryForkServer]]:
    made: list[QueryForkServer] = []

    def make(bounds: Any = BOUNDS) -> QueryForkServer:
        made.append(QueryForkServer(bounds))
        return made[-1]

    yield make
    for each in made:
        each.close()


def result(process: QueryProcess, sql: str, **fields: Any) -> bytes:
    process.parse(sql)
    process.run([], [], [], how={"format": "csv", "explain": False, "cut": None, **fields})
    pieces = []
    while (piece := process.next()) is not None:
        pieces.append(piece)
    return b"".join(pieces)


def run(server: QueryForkServer, bounds: Any, sql: str) -> str:
    return ran(server, bounds, sql).decode()


def ran(server: QueryForkServer, bounds: Any, sql: str, **fields: Any) -> bytes:
    user = UidPool.of("60864-60895", FOLDER).take() if IS_ROOT else None
    process = QueryProcess(bounds, server, user=user, clock=SystemClock())
    try:
        process.wait()
        assert process.is_closed
        assert process.is_isolated is IS_ROOT
        return result(process, sql, **fields)
    finally:
        if (left := process.close()) is not None:
            left.unlock()


NUMBERS = {
    "9007199254740991": 9007199254740991,
    "9007199254740993": "9007199254740993",
    "-9007199254740993": "-9007199254740993",
    "18446744073709551615::UBIGINT": "18446744073709551615",
    "170141183460469231731687303715884105727::HUGEINT": "170141183460469231731687303715884105727",
    "sum(x)": 3,
    "true": True,
    "12345678901234567890.12": "12345678901234567890.12",
    "0.00000000::DECIMAL(18, 8)": "0.00000000",
    "0.1::DOUBLE": 0.1,
    "'nan'::DOUBLE": "NaN",
    "'-inf'::FLOAT": "-Infinity",
    "[9007199254740993, 1]": ["9007199254740993", 1],
    "{'a': 'inf'::DOUBLE, 'b': 1.5}": {"a": "Infinity", "b": "1.5"},
    "MAP {'k': 9007199254740993}": [["k", "9007199254740993"]],
}


def test_rows_have_every_number_as_it_is(forks: Callable[..., QueryForkServer]) -> None:
    sql = f"SELECT {', '.join(NUMBERS)} FROM range(3) t(x)"
    server = forks()
    said = json.loads(ran(server, BOUNDS, sql, format="rows"))
    assert dict(zip(NUMBERS, said, strict=True)) == NUMBERS
    # As a reader does whose numbers are doubles.
    doubles = json.loads(ran(server, BOUNDS, sql, format="rows"), parse_int=float)
    assert [x if isinstance(x, bool | str | list | dict) else str(x) for x in doubles[:3]] == [
        "9007199254740991.0",
        "9007199254740993",
        "-9007199254740993",
    ]
    # Lines of JSON have all digits of a number, and no number where there is none.
    text = "SELECT 9007199254740993 AS a, 12345678901234567890.12 AS b, 'nan'::DOUBLE AS c"
    line = b'{"a":9007199254740993,"b":12345678901234567890.12,"c":null}\n'
    assert ran(server, BOUNDS, text, format="jsonl") == line


def test_columns_of_one_name_are_kept_apart_in_every_format(
    forks: Callable[..., QueryForkServer],
) -> None:
    server = forks()
    sql = "SELECT 1 AS id, 2 AS id, 3 AS ID, 4 AS id_1, 5 AS other"
    names = ["id", "id_2", "ID_3", "id_1", "other"]
    expected = dict(zip(names, range(1, 6), strict=True))
    assert json.loads(ran(server, BOUNDS, sql, format="jsonl")) == expected
    assert ran(server, BOUNDS, sql).decode().splitlines()[0] == ",".join(names)
    arrow = pa.ipc.open_stream(ran(server, BOUNDS, sql, format="arrow")).read_all()
    parquet = pq.read_table(io.BytesIO(ran(server, BOUNDS, sql, format="parquet")))
    assert arrow.to_pylist() == parquet.to_pylist() == [expected]
    with closing(QueryProcess(BOUNDS, server, user=None, clock=SystemClock())) as process:
        process.wait()
        result(process, sql, format="rows")
        assert [name for name, _ in process.columns] == names


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize(
    ("sql", "place"),
    {
        "SELECT 'ééé', nope": "nope",
        "SELECT '😀', nope FROM range(3)": "nope",
        "SELECT 'ééé', 1 ) 2": ") 2",
        "SELECT '😀é'\n FROM read_text('x')": "read_text",
        "SELECT 'é' FROM sys.x": "sys.x",
        "SELECT 'é', 1::nosuch": "nosuch",
        "SELECT '😀é'": None,
    }.items(),
)
def test_the_place_of_an_error_is_told_in_characters(
    sql: str, place: str | None, explain: bool, forks: Callable[..., QueryForkServer]
) -> None:
    server = forks()
    if place is None:
        assert ran(server, BOUNDS, sql, explain=explain)
        return
    with pytest.raises(QueryFailed) as failed:
        ran(server, BOUNDS, sql, explain=explain)
    assert failed.value.position == sql.index(place), failed.value.message


def test_what_is_larger_than_memory_is_sorted_joined_and_counted(
    forks: Callable[..., QueryForkServer],
) -> None:
    server = forks(TIGHT)
    for name, sql in LARGE.items():
        rows = duckdb.execute(sql).fetchall()
        expected = "".join(f"{','.join(map(str, row))}\n" for row in rows)
        assert run(server, TIGHT, sql).partition("\n")[2] == expected, name
    none = replace(TIGHT, spill_bytes=0)
    refusing = forks(none)
    for sql in LARGE.values():
        with pytest.raises(QueryFailed, match="Memory") as failed:
            run(refusing, none, sql)
        assert failed.value.kind == "memory"


def test_the_kernel_bounds_what_duckdb_does_not_count(
    forks: Callable[..., QueryForkServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    sql = "SELECT length(string_agg(repeat('x', 500_000) || i, '')) AS n FROM range(600) t(i)"
    bounds = replace(BOUNDS, memory_bytes=2 * 1024**3, spill_bytes=0)
    assert int(run(forks(bounds), bounds, sql).split()[1]) > 600 * 500_000
    # For DuckDB there is as much as before.
    monkeypatch.setattr(engine, "_MORE_BYTES", 300 * 1024**2 - bounds.memory_bytes)
    with pytest.raises(QueryFailed) as failed:
        run(forks(bounds), bounds, sql)
    assert failed.value.kind in ("memory", "ended"), failed.value.message
    assert failed.value.hint == QUERY_LESS_HINT
    assert run(forks(bounds), bounds, "SELECT 1 AS n") == "n\n1\n"


def test_a_temporary_file_that_duckdb_cuts_keeps_what_is_in_use() -> None:
    with tempfile.TemporaryFile() as space:
        files = child.file_system(child.Wire(), [space.fileno()])
        with files.open("spill/blocks.tmp", "wb") as opened:
            opened.write(b"kept")
        # As DuckDB asks for it, whatever length it wants.
        files.touch("spill/blocks.tmp", truncate=True)
        assert files.open("spill/blocks.tmp", "rb").read(4) == b"kept"
        files.rm("spill/blocks.tmp")
        assert not files.exists("spill/blocks.tmp")
        assert space.seek(0, io.SEEK_END) == 0


def test_forks_share_nothing_but_what_was_imported(forks: Callable[..., QueryForkServer]) -> None:
    server = forks()
    sql = "SELECT uuid(), random()"
    assert len({run(server, BOUNDS, sql) for _ in range(3)}) == 3
    # One that is killed takes nothing with it, and its end is waited for.
    with closing(QueryProcess(BOUNDS, server, user=None, clock=SystemClock())) as process:
        process.wait()
        pid = process.pid
        os.kill(pid, 9)
        with pytest.raises(QueryFailed, match="exited before"):
            process.parse("SELECT 1")
    assert not Path(f"/proc/{pid}").exists()
    # The fork server ends with all of its forks, and another takes its place.
    with closing(QueryProcess(BOUNDS, server, user=None, clock=SystemClock())) as process:
        process.wait()
        server.close()
        with pytest.raises(QueryFailed, match="exited before"):
            process.parse("SELECT 1")
    assert not server.is_alive
    with pytest.raises(QueryFailed, match="does not answer"):
        run(server, BOUNDS, "SELECT 1")
    assert run(forks(), BOUNDS, "SELECT 1 AS n") == "n\n1\n"


@pytest.mark.skipif(not IS_ROOT, reason="only root has users for queries")
def test_a_user_of_whom_nothing_is_left_is_kept_for_the_next_query(tmp_path: Path) -> None:
    # Numbers that no other test has.
    pool = UidPool.of("60900-60903", str(tmp_path / "users"))

    def user_of(process: QueryProcess) -> int:
        place = Path(f"/proc/{process.pid}")
        return place.stat().st_uid if place.exists() else 0

    async def story() -> None:
        with ThreadPoolExecutor(4) as threads:
            processes = QueryProcesses(BOUNDS, uids=pool, threads=threads, clock=SystemClock())
            try:
                seen = []
                for _ in range(3):
                    process = await processes.take()
                    seen.append(user_of(process))
                    other = await processes.take()
                    assert 0 != user_of(other) != seen[-1]
                    await processes.closed(other)
                    assert user_of(other) == 0
                    await processes.closed(process)
                assert len(set(seen)) == 1
                # One whose end was not seen is ended as a user, and is nobody's meanwhile.
                process = await processes.take()
                os.kill(process.pid, signal.SIGSTOP)
                processes.end()
                await processes.closed(process)
                assert not user_processes(seen[0])
            finally:
                processes.end()
        # Nobody holds one any more.
        taken = [pool.take() for _ in range(4)]
        for user in taken:
            user.end()

    asyncio.run(story())


CLOSED = """
import ctypes, json, os, socket, sys, threading
from penstock.protocol.queries import QUERY_LESS_HINT
from penstock.query import child, engine
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
pair = socket.socketpair()
os.read(os.open("/etc/passwd", os.O_RDONLY), 10)
bounds = {"cpu_seconds": 60, "spill_bytes": 1 << 20, "files_max": 64, "process_bytes": 1 << 32}
is_closed = child.give_up(bounds, int(sys.argv[1]), parent, [])
python = {
    "open": lambda: os.open("/etc/passwd", os.O_RDONLY),
    "create": lambda: os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY),
    "stat": lambda: os.stat("/etc/passwd"),
    "list": lambda: os.listdir("/"),
    "remove": lambda: os.unlink("/tmp/nothing"),
    "socket": lambda: socket.socket(),
    "unix socket": lambda: socket.socket(socket.AF_UNIX),
    "connect": lambda: pair[0].connect("/run/nothing"),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "fork": lambda: os.fork(),
    "kill": lambda: os.kill(parent, 0),
    "pipe": lambda: os.pipe(),
    "duplicate": lambda: os.dup2(0, 60),
}
found = {}
for name, attempt in python.items():
    try:
        found[name] = str(attempt())
    except OSError as error:
        found[name] = error.errno
numbers = {
    "x86_64": {"openat2": 437, "io_uring_setup": 425, "ptrace": 101, "process_vm_readv": 310,
               "memfd_create": 319, "bpf": 321, "mount": 165, "open_by_handle_at": 304,
               "userfaultfd": 323, "keyctl": 250, "setuid": 105, "pidfd_getfd": 438,
               "unshare": 272, "prctl": 157, "ioctl": 16, "clone": 56, "vfork": 58},
    "aarch64": {"openat2": 437, "io_uring_setup": 425, "ptrace": 117, "process_vm_readv": 270,
                "memfd_create": 279, "bpf": 280, "mount": 40, "open_by_handle_at": 265,
                "userfaultfd": 282, "keyctl": 219, "setuid": 146, "pidfd_getfd": 438,
                "unshare": 97, "prctl": 167, "ioctl": 29, "clone": 220},
}[os.uname().machine]
for name, number in numbers.items():
    libc.syscall(number, 0, 0, 0, 0, 0)
    found[name] = ctypes.get_errno()
worked = []
thread = threading.Thread(target=lambda: worked.append(1))
thread.start()
thread.join()
os.write(1, json.dumps({"closed": is_closed, "worked": worked, "found": found}).encode())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the filter of calls")
@pytest.mark.parametrize("user", [0, 60_895])
def test_the_kernel_refuses_everything_else_inside_of_it(user: int, tmp_path: Path) -> None:
    if user and not IS_ROOT:
        pytest.skip("only root has users for queries")
    made = tmp_path / "made"
    command = [sys.executable, "-c", CLOSED, str(user), str(made)]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=True)
    said = json.loads(ended.stdout)
    assert said["closed"]
    assert said["worked"] == [1]
    refused = {name for name, errno in said["found"].items() if errno == 1}
    assert refused == set(said["found"]), said["found"]
    assert not made.exists()
