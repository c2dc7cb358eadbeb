"""The process of one query: `python -I child.py SETTINGS`, see `penstock.query.engine`.

It parses and runs SQL of people and tasks in DuckDB, a large program that reads files of others.
DuckDB's settings are no boundary, so this process has given up, before it is told of a query and
for good, all that a query takes not (`penstock.datasets.parquet_child` has the same for Parquet):

- the user, if that was root: a number that nobody else has;
- opening anything: on Linux (x86-64 and ARM) the kernel refuses every call but those for memory,
  time, threads and open files. No file, no connection, no program, no look into who asks;
- memory beyond a bound, the size of files, processor time, core dumps;
- its environment, which is empty.

What it reads was opened by its parent, for reading: descriptors that come over the socket, or
ranges that it asks for by number. DuckDB gets at them by a file system of ours, and at the space
for what does not fit into memory by the same: files without a name, opened before.

The life of the process, which runs one query and ends:

| state | says | is told |
|---|---|---|
| ready | `ready` | the SQL: one SELECT by DuckDB's own parser, and nothing that reads files |
| parsed | the names of tables | files, views over them, bounds, the format |
| running | ranges it wants; data; `columns` | ranges |
| over | `end`, or `error` | |

DuckDB itself is told the same as the kernel: external access off, the local file system disabled,
no extensions, no Python variables as tables, the configuration locked. Imports nothing of ours
but the filter of calls, by its path.
"""

from __future__ import annotations

import csv
import ctypes
import importlib.util
import io
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

HEADER = struct.Struct(">IB")
JSON, DATA = 0, 1
FRAME_BYTES_MAX = 64 * 1024 * 1024
DESCRIPTORS_AT_ONCE = 200
CHUNK_BYTES = 128 * 1024
SPILL_FILES = 32
BATCH_ROWS = 10_000
PROTOCOL = "penstock"
SPILL = "spill"
KEY = "__penstock_key"
"""The virtual folder of a partition: DuckDB leaves out files by it."""
SOCKET = 0
_DEATH_SIGNAL = 1
_PROCESSES_MAX = 128
MORE_CALLS = {
    "recvmsg": (47, 212),
    "fsync": (74, 82),
    "ftruncate": (77, 46),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "set_robust_list": (273, 99),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getcpu": (309, 168),
    "sched_setaffinity": (203, 122),
    "set_tid_address": (218, 96),
}
"""Calls of the kernel besides those that `parquet_child` leaves."""
TABLE_FUNCTIONS = frozenset(
    {"range", "generate_series", "unnest", "repeat", "json_each", "json_tree"}
)
"""Those that read nothing."""
_SOURCES = frozenset(
    {"BASE_TABLE", "SUBQUERY", "JOIN", "TABLE_FUNCTION", "EXPRESSION_LIST", "EMPTY", "PIVOT"}
)
_TYPES = {
    "boolean": "BOOLEAN",
    "tinyint": "TINYINT",
    "smallint": "SMALLINT",
    "int": "INTEGER",
    "bigint": "BIGINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "string": "VARCHAR",
    "binary": "BLOB",
    "date": "DATE",
    "timestamp": "TIMESTAMP WITH TIME ZONE",
    "timestamp_ntz": "TIMESTAMP",
}


class QueryRefused(Exception):
    """The query cannot be run, and why; `position` is where in its text."""

    def __init__(self, message: str, *, position: int | None = None, kind: str = "query") -> None:
        super().__init__(message)
        self.message = message
        self.position = position
        self.kind = kind


class Wire:
    """The socket to the parent. Threads of DuckDB ask for ranges while results are sent."""

    def __init__(self, own: socket.socket | None = None) -> None:
        self._own = own
        self._lock = threading.Lock()

    def say(self, what: dict[str, Any]) -> None:
        """Send a message."""
        with self._lock:
            self._send(JSON, json.dumps(what).encode())

    def data(self, body: bytes) -> None:
        """Send a piece of the result."""
        with self._lock:
            self._send(DATA, body)

    def ask(self, what: dict[str, Any], size: int) -> bytes:
        """Send a message and read so many bytes."""
        with self._lock:
            self._send(JSON, json.dumps(what).encode())
            return self._read(size)

    def hear(self) -> dict[str, Any]:
        """The next message of the parent; the process ends with it."""
        size, _ = HEADER.unpack(self._read(HEADER.size))
        found: dict[str, Any] = json.loads(self._read(size))
        return found

    def descriptors(self, count: int) -> list[int]:
        """So many open files."""
        assert self._own is not None
        found: list[int] = []
        while len(found) < count:
            _, some, _, _ = socket.recv_fds(self._own, 1, DESCRIPTORS_AT_ONCE)
            if not some:
                raise EOFError("the parent process exited")
            found += some
        return found

    def _send(self, kind: int, body: bytes) -> None:
        left = memoryview(HEADER.pack(len(body), kind) + body)
        while left:
            left = left[os.write(SOCKET, left) :]

    def _read(self, size: int) -> bytes:
        pieces = []
        while size:
            piece = os.read(SOCKET, min(size, 1 << 20))
            if not piece:
                raise EOFError("the parent process exited")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


class OpenFile(io.RawIOBase):
    """A file that is read by many threads: each has its own position."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        self._size = size
        self._read = read
        self._here = threading.local()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence]
        self._here.at = max(0, base + offset)
        return self._here.at  # type: ignore[no-any-return]

    def tell(self) -> int:
        return getattr(self._here, "at", 0)

    def read(self, size: int = -1) -> bytes:
        at = self.tell()
        wanted = max(0, self._size - at if size < 0 else min(size, self._size - at))
        body = self._read(at, wanted) if wanted else b""
        self._here.at = at + len(body)
        return body


class SpillFile(io.RawIOBase):
    """What did not fit into memory, in a file without a name."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._here = threading.local()

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        end = os.fstat(self._descriptor).st_size
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: end}[whence]
        self._here.at = max(0, base + offset)
        return self._here.at  # type: ignore[no-any-return]

    def tell(self) -> int:
        return getattr(self._here, "at", 0)

    def read(self, size: int = -1) -> bytes:
        body = os.pread(self._descriptor, size, self.tell())
        self._here.at = self.tell() + len(body)
        return body

    def write(self, body: Any) -> int:
        at, left = self.tell(), memoryview(body).cast("B")
        while left:
            count = os.pwrite(self._descriptor, left, at)
            left, at = left[count:], at + count
        written = at - self.tell()
        self._here.at = at
        return written

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self._descriptor, size)
        return size


class Files:
    """What DuckDB reads and spills by. Its names are numbers of ours."""

    protocol = PROTOCOL
    cachable = False

    def __init__(self, wire: Wire, spill: list[int]) -> None:
        super().__init__()
        self.files: list[dict[str, Any]] = []
        self._wire = wire
        self._spill = spill
        self._held: dict[str, int] = {}
        self._taking = threading.Lock()

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        name = _bare(path)
        if name.startswith(SPILL):
            return self._spill_file(name, is_new=mode.startswith("w"))
        number = _number(name)
        file = self.files[number]
        size, descriptor = file["bytes"], file.get("descriptor")
        if descriptor is not None:
            return OpenFile(size, lambda at, count: os.pread(descriptor, count, at))
        return OpenFile(
            size,
            lambda at, count: self._wire.ask({"file": number, "at": at, "bytes": count}, count),
        )

    def _spill_file(self, name: str, *, is_new: bool) -> SpillFile:
        with self._taking:
            if name not in self._held:
                if not self._spill:
                    raise OSError("no space is left for what does not fit into memory")
                self._held[name] = self._spill.pop()
            if is_new:
                os.ftruncate(self._held[name], 0)
            return SpillFile(self._held[name])

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = _bare(path)
        if name == SPILL:
            return {"name": name, "size": 0, "type": "directory"}
        if not name.startswith(SPILL):
            return {"name": name, "size": self.files[_number(name)]["bytes"], "type": "file"}
        if name not in self._held:
            raise FileNotFoundError(path)
        return {"name": name, "size": os.fstat(self._held[name]).st_size, "type": "file"}

    def exists(self, path: str, **_: Any) -> bool:
        name = _bare(path)
        return name in self._held if name.startswith(SPILL) else True

    def isdir(self, path: str) -> bool:
        return _bare(path) == SPILL

    def glob(self, path: str, **_: Any) -> list[str]:
        return [_bare(path)]

    def ls(self, path: str, **_: Any) -> list[Any]:
        del path
        return []

    def modified(self, path: str) -> datetime:
        del path
        return datetime(2000, 1, 1, tzinfo=UTC)

    def rm_file(self, path: str, **_: Any) -> None:
        name = _bare(path)
        with self._taking:
            if name in self._held:
                os.ftruncate(self._held[name], 0)
                self._spill.append(self._held.pop(name))

    rm = rm_file


def _bare(path: str) -> str:
    return path.removeprefix(f"{PROTOCOL}://").rstrip("/")


def _number(name: str) -> int:
    return int(name.partition("/")[0])


def file_system(wire: Wire, spill: list[int]) -> Any:
    """The same as DuckDB wants it: with the class of fsspec."""
    base = import_module("fsspec").AbstractFileSystem
    return type("QueryFiles", (Files, base), {})(wire, spill)


def connected(settings: dict[str, Any], files: Any, memory_bytes: int) -> Any:
    """A database that can reach nothing but `files`; views are made before it is `locked`."""
    duckdb = import_module("duckdb")
    connection = duckdb.connect(
        ":memory:",
        config={
            "threads": settings["threads"],
            "memory_limit": f"{memory_bytes}B",
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "allow_community_extensions": False,
            "allow_unsigned_extensions": False,
            "python_enable_replacements": False,
            "errors_as_json": True,
        },
    )
    connection.register_filesystem(files)
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute(f"SET temp_directory = '{PROTOCOL}://spill'")
    connection.execute(f"SET max_temp_directory_size = '{settings['spill_bytes']}B'")
    return connection


def locked(connection: Any) -> None:
    """Nothing more is set, loaded, attached or opened by name."""
    connection.execute("SET disabled_filesystems = 'LocalFileSystem'")
    connection.execute(f"SET allowed_directories = ['{PROTOCOL}://']")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def parsed(connection: Any, sql: str) -> dict[str, Any]:
    """The tables that one SELECT names, and the names that it gives by WITH."""
    (text,) = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchone()
    tree = json.loads(text)
    if tree.get("error"):
        said = str(tree.get("error_message", ""))
        if "Only SELECT" in said:
            said = "Only one SELECT is taken: nothing else is run."
        raise QueryRefused(said, position=_position(tree))
    statements = tree["statements"]
    if len(statements) != 1:
        raise QueryRefused(f"One SELECT is taken at a time, and these are {len(statements)}.")
    tables: dict[str, None] = {}
    given: dict[str, None] = {}
    waiting: list[Any] = [statements[0]]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        if not isinstance(node, dict):
            continue
        _look(node, tables, given)
        waiting += node.values()
    return {"tables": list(tables), "given": list(given)}


def _look(node: dict[str, Any], tables: dict[str, None], given: dict[str, None]) -> None:
    position = node.get("query_location")
    at = position if isinstance(position, int) and 0 <= position < 2**31 else None
    if isinstance(node.get("cte_map"), dict):
        given |= dict.fromkeys(each["key"] for each in node["cte_map"].get("map", ()))
    kind = node.get("type")
    is_source = "alias" in node and "sample" in node
    if is_source and kind not in _SOURCES:
        raise QueryRefused(f"A SELECT from {kind} is not taken.", position=at)
    if kind == "BASE_TABLE":
        if node.get("schema_name") or node.get("catalog_name"):
            name = f"{node.get('schema_name') or node.get('catalog_name')}.{node['table_name']}"
            raise QueryRefused(f"There is no table {name}: datasets have no schema.", position=at)
        tables[node["table_name"]] = None
    if kind == "TABLE_FUNCTION":
        name = str(node.get("function", {}).get("function_name", "")).lower()
        if name not in TABLE_FUNCTIONS:
            raise QueryRefused(f"The table function {name} is not allowed.", position=at)


def _position(said: dict[str, Any]) -> int | None:
    text = str(said.get("position", ""))
    return int(text) if text.isdecimal() else None


def view_of(table: dict[str, Any]) -> str:
    """The statement that makes the view of a dataset."""
    pieces = []
    for group in table["groups"]:
        names = [f"{PROTOCOL}://{_path(*each)}" for each in group["files"]]
        listed = ", ".join(_text(each) for each in names)
        options = "union_by_name=true, " if group["columns"] is None else ""
        source = (
            f"read_parquet([{listed}], {options}hive_partitioning=true,"
            f" hive_types={{{_name(KEY)}: VARCHAR}})"
        )
        if group["columns"] is None:
            columns = f"* EXCLUDE ({_name(KEY)})"
        else:
            columns = ", ".join(_name(each) for each, _ in group["columns"])
        if table["partition"]:
            columns = f"{columns}, {_name(KEY)} AS {_name(table['partition'])}"
        pieces.append(f"SELECT {columns} FROM {source}")  # noqa: S608 - names are quoted
    known = {name for group in table["groups"] for name, _ in group["columns"] or ()}
    shown = [
        _name(name) if name in known else f"CAST(NULL AS {_type(kind)}) AS {_name(name)}"
        for name, kind in table["columns"]
    ]
    if table["partition"]:
        shown.append(_name(table["partition"]))
    made = " UNION ALL BY NAME ".join(pieces)
    if not pieces:
        none = f"(SELECT NULL::VARCHAR AS {_name(table['partition'] or 'nothing')})"
        made = f"SELECT {', '.join(shown)} FROM {none} WHERE false"  # noqa: S608 - the same
    elif table["columns"] and all(group["columns"] for group in table["groups"]):
        # In the order of the dataset, whatever its files have.
        made = f"SELECT {', '.join(shown)} FROM ({made})"  # noqa: S608 - the same
    return f"CREATE VIEW {_name(table['name'])} AS {made}"


def _path(number: int, key: str) -> str:
    return f"{number}/{KEY}={quote(key, safe='')}/{number}.parquet"


def _name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _type(kind: str) -> str:
    if kind.startswith("decimal(") and kind[8:-1].replace(",", "").isdecimal():
        return kind.upper()
    return _TYPES.get(kind, "VARCHAR")


class Out(io.RawIOBase):
    """Pieces of the result on their way, and their bound."""

    def __init__(self, wire: Wire, bytes_max: int) -> None:
        self._wire = wire
        self._bytes_max = bytes_max
        self._held = bytearray()
        self.bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, body: Any) -> int:
        self._held += body
        self.bytes += len(body)
        if self.bytes > self._bytes_max:
            raise QueryRefused(
                f"The result has more than {self._bytes_max:,} bytes: select fewer rows or"
                " columns, or write it by a job.",
                kind="too large",
            )
        if len(self._held) >= CHUNK_BYTES:
            self.send()
        return len(body)

    def tell(self) -> int:
        return self.bytes

    def send(self) -> None:
        """Send what is held."""
        if self._held:
            self._wire.data(bytes(self._held))
            self._held.clear()


def batches(reader: Any, *, rows_max: int, cut: int | None) -> Iterator[tuple[Any, bool]]:
    """The batches of a result within its bounds; whether it goes on after `cut` rows."""
    left = rows_max if cut is None else min(cut, rows_max)
    is_cut = cut is not None and cut <= rows_max
    for batch in reader:
        if batch.num_rows > left:
            if not is_cut:
                raise QueryRefused(
                    f"The result has more than {rows_max:,} rows: add a LIMIT, or write it by a"
                    " job.",
                    kind="too large",
                )
            yield batch.slice(0, left), True
            return
        left -= batch.num_rows
        yield batch, False


def plain_columns(batch: Any) -> list[list[Any]]:
    """The values of a batch as Python has them, by column."""
    pyarrow = import_module("pyarrow")
    found = []
    for column in batch.columns:
        kind, each = column.type, column
        if pyarrow.types.is_timestamp(kind) and kind.unit == "ns":
            each = column.cast(pyarrow.timestamp("us", tz=kind.tz), safe=False)
        found.append(each.to_pylist())
    return found


def written(reader: Any, out: Out, ask: dict[str, Any]) -> tuple[int, bool]:
    """Write a result in the format that was asked for; how many rows, and whether it was cut."""
    writer = {
        "rows": _rows,
        "jsonl": _lines,
        "csv": _csv,
        "parquet": _parquet,
        "arrow": _arrow,
    }[ask["format"]]
    rows, is_cut = 0, False

    def counted() -> Iterator[Any]:
        nonlocal rows, is_cut
        for batch, ends in batches(reader, rows_max=ask["rows_max"], cut=ask["cut"]):
            rows, is_cut = rows + batch.num_rows, ends
            yield batch

    writer(reader.schema, counted(), out)
    out.send()
    return rows, is_cut


def _encoder() -> Any:
    return import_module("msgspec").json.Encoder(decimal_format="number", enc_hook=str)


def _rows(_: Any, each: Iterator[Any], out: Out) -> None:
    encode = _encoder().encode
    for batch in each:
        for row in zip(*plain_columns(batch), strict=True):
            out.write(encode(row) + b"\n")
        out.send()


def _lines(schema: Any, each: Iterator[Any], out: Out) -> None:
    encode, names = _encoder().encode, schema.names
    for batch in each:
        for row in zip(*plain_columns(batch), strict=True):
            out.write(encode(dict(zip(names, row, strict=True))) + b"\n")


def _csv(schema: Any, each: Iterator[Any], out: Out) -> None:
    encode = _encoder().encode
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")

    def cell(value: Any) -> Any:
        match value:
            case bool():
                return "true" if value else "false"
            case bytes():
                return f"0x{value.hex()}"
            case list() | dict() | tuple():
                return encode(value).decode()
        return value

    writer.writerow(schema.names)
    for batch in each:
        for row in zip(*plain_columns(batch), strict=True):
            writer.writerow([cell(value) for value in row])
        out.write(text.getvalue().encode())
        text.seek(0)
        text.truncate()
    out.write(text.getvalue().encode())


def _parquet(schema: Any, each: Iterator[Any], out: Out) -> None:
    with import_module("pyarrow.parquet").ParquetWriter(out, schema) as writer:
        for batch in each:
            writer.write_batch(batch)


def _arrow(schema: Any, each: Iterator[Any], out: Out) -> None:
    with import_module("pyarrow").ipc.new_stream(out, schema) as writer:
        for batch in each:
            writer.write_batch(batch)


def answer(connection: Any, wire: Wire, ask: dict[str, Any], files: Any) -> None:
    """Make the views, run the query, and send what it returns."""
    counted = ask["files"]
    descriptors = wire.descriptors(sum(each["is_open"] for each in counted))
    given = iter(descriptors)
    files.files = [
        {"bytes": each["bytes"], **({"descriptor": next(given)} if each["is_open"] else {})}
        for each in counted
    ]
    for table in ask["tables"]:
        connection.execute(view_of(table))
    locked(connection)
    if ask["explain"]:
        explained(connection, wire, ask)
        return
    result = connection.execute(ask["sql"])
    columns = [[name, str(kind)] for name, kind, *_ in connection.description]
    reader = result.to_arrow_reader(BATCH_ROWS)
    wire.say({"columns": columns})
    rows, is_cut = written(reader, Out(wire, ask["bytes_max"]), ask)
    wire.say({"end": {"rows": rows, "is_cut": is_cut}})


def explained(connection: Any, wire: Wire, ask: dict[str, Any]) -> None:
    """Send how a query would be run."""
    before = "EXPLAIN "
    try:
        rows = connection.execute(f"{before}{ask['sql']}").fetchall()
    except Exception as error:
        said = _said(error)
        at = said["position"]
        at = None if at is None else max(0, at - len(before))
        raise QueryRefused(said["message"], position=at, kind=said["kind"]) from error
    text = "\n".join(str(row[-1]) for row in rows).rstrip() + "\n"
    wire.say({"columns": [["plan", "VARCHAR"]]})
    wire.data(_encoder().encode([text]) + b"\n" if ask["format"] == "rows" else text.encode())
    wire.say({"end": {"rows": 1, "is_cut": False}})


def _warm(settings: dict[str, Any]) -> None:
    """Import all that a query may need, by running one in each format."""
    connection = connected({**settings, "threads": 1}, file_system(Wire(), []), 256 * 1024**2)

    class Nowhere(Wire):
        def data(self, body: bytes) -> None:
            del body

    for name in ("rows", "jsonl", "csv", "parquet", "arrow"):
        result = connection.execute(
            "SELECT 1 AS a, 1.5::DECIMAL(9,2) AS b, now() AS c, DATE '2020-01-01' AS d, 'x' AS e,"
            " [1] AS f, {'g': 1} AS g, TIME '10:00' AS h, INTERVAL 1 DAY AS i, uuid() AS j,"
            " TIMESTAMP_NS '2020-01-01' AS k, '\\x01'::BLOB AS l, MAP {'a': 1} AS m, 1e0 AS n"
        )
        ask = {"format": name, "rows_max": 10, "cut": None}
        if name == "parquet":
            result = connection.execute("SELECT 1 AS a, 'x' AS b")
        written(result.to_arrow_reader(10), Out(Nowhere(), 1 << 20), ask)
    parsed(connection, "WITH a AS (SELECT 1) SELECT * FROM a")
    connection.close()


def give_up(settings: dict[str, Any], spill: list[int]) -> bool:
    """Give up everything that a query takes not; whether the kernel refuses the rest."""
    where = Path(__file__).parent.parent / "datasets" / "parquet_child.py"
    spec = importlib.util.spec_from_file_location("parquet_child", where)
    assert spec is not None
    assert spec.loader is not None
    lockdown = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lockdown)
    limits = {
        resource.RLIMIT_CPU: settings["cpu_seconds"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: settings["spill_bytes"],
        resource.RLIMIT_NOFILE: settings["files_max"] + len(spill) + 16,
        resource.RLIMIT_DATA: settings["process_bytes"],
    }
    for limit, most in limits.items():
        _, hard = resource.getrlimit(limit)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (least, least))
    if settings["user"]:
        number = settings["user"]
        os.setgroups([])
        os.setresgid(number, number, number)
        os.setresuid(number, number, number)
        resource.setrlimit(resource.RLIMIT_NPROC, (_PROCESSES_MAX, _PROCESSES_MAX))
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    library.prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != settings["parent"]:
        raise EOFError("the parent process exited")
    if library.prctl(lockdown.NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        raise OSError("failed to drop privileges for good")
    if os.uname().machine not in lockdown.MACHINES:
        return False
    allowed = {**lockdown.ALLOWED, **MORE_CALLS}
    lockdown.leave_calls(os.uname().machine, allowed=allowed, has_threads=True)
    return True


def _said(error: BaseException) -> dict[str, Any]:
    """An error as its reader gets it."""
    if isinstance(error, QueryRefused):
        return {"message": error.message, "position": error.position, "kind": error.kind}
    text = str(error)
    position, kind = None, "query"
    for at in (text.find("{"),) if "{" in text else ():
        try:
            told = json.loads(text[at:])
            text = f"{told['exception_type']}: {told['exception_message']}"
            position = _position(told)
            kind = "memory" if "Memory" in told["exception_type"] else "query"
        except (ValueError, KeyError, TypeError):
            pass
    if isinstance(error, MemoryError):
        text, kind = "The query needs more memory than a query may have.", "memory"
    return {"message": text[:4000], "position": position, "kind": kind}


def main() -> None:
    """Serve one query."""
    settings = json.loads(sys.argv[1])
    # Files without a name, for what does not fit into memory.
    spill = [
        os.open(settings["spill_folder"], os.O_TMPFILE | os.O_RDWR, 0o600)
        for _ in range(SPILL_FILES if settings["spill_bytes"] else 0)
    ]
    for name in ("duckdb", "fsspec", "msgspec", "pyarrow", "pyarrow.parquet", "pyarrow.dataset"):
        import_module(name)
    import_module("pyarrow").set_cpu_count(1)
    import_module("pyarrow").set_io_thread_count(1)
    # Now: a socket looks at itself when it is made.
    wire = Wire(socket.socket(fileno=SOCKET))
    _warm(settings)
    is_closed = give_up(settings, spill)
    wire.say({"ready": True, "is_closed": is_closed})
    try:
        ask = wire.hear()
        files = file_system(wire, spill)
        connection = connected(settings, files, settings["memory_bytes"])
        wire.say(parsed(connection, ask["sql"]))
        answer(connection, wire, {**wire.hear(), "sql": ask["sql"]}, files)
    except EOFError:
        pass
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the query's
        wire.say({"error": _said(error)})
    # Threads of DuckDB may be busy; nothing here is worth waiting for.
    os._exit(0)


if __name__ == "__main__":
    main()
