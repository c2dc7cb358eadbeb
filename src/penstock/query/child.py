"""The process of one query, forked by `penstock.query.fork_server` and driven by `engine`.

It parses and runs SQL of people and tasks in DuckDB, a large program that reads files of others.
DuckDB's settings are no boundary, so before this process is told of a query it gives up, for good,
everything that a query does not need (`penstock.datasets.parquet_child` does so for Parquet):

- the user, if that was root: a number that nobody else has;
- opening anything: on Linux (x86-64 and ARM) the kernel refuses every call but those for memory,
  time, threads and open files. No file, no connection, no program, no look into who asks;
- memory beyond a bound, the size of files, processor time, core dumps;
- its environment, which is empty.

What it reads was opened by the query service, for reading: descriptors that come over the socket,
or ranges that it asks for by number. DuckDB gets at them by a file system of ours, and at the space
for what does not fit into memory by the same: files without a name, opened before. That file system
may use no call but those that are left: `fstat` is none of them.

The life of the process, which runs one query and ends:

| state | says | is told |
|---|---|---|
| ready | `ready` | the SQL: one SELECT by DuckDB's own parser, and nothing that reads files |
| parsed | the names of tables | files, views over them, bounds, the format |
| running | ranges it wants; data; `columns` | ranges |
| over | `end`, or `error` | |

DuckDB itself is told the same as the kernel: external access off, the local file system disabled,
no extensions, no Python variables as tables, the configuration locked.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, BinaryIO
from urllib.parse import quote

from penstock.datasets import parquet_child as lockdown
from penstock.datasets.schema import field_of, parts_of
from penstock.query.pruning import conditions
from penstock.query.result_writer import (
    QueryRefused,
    ResultStream,
    encoder,
    unique_names,
    written,
)

HEADER = struct.Struct(">IB")
JSON, DATA = 0, 1
FRAME_BYTES_MAX = 64 * 1024 * 1024
DESCRIPTORS_AT_ONCE = 200
SPILL_FILES = 32
BATCH_ROWS = 10_000
PROTOCOL = "penstock"
SPILL = "spill"
KEY = "__penstock_key"
"""The virtual folder of a partition: DuckDB leaves out files by it."""
SOCKET = 0
_FULL = "no temporary file is left"
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
        end = length(self._descriptor)
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
                    raise OSError(_FULL)
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
        return {"name": name, "size": length(self._held[name]), "type": "file"}

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

    def touch(self, path: str, *, truncate: bool = True, **_: Any) -> None:
        """Nothing: DuckDB asks for it to cut a file shorter, and would have it emptied."""


def length(descriptor: int) -> int:
    """Of an open file. What `fstat` of today's C library takes (`newfstatat`) is refused here."""
    return os.lseek(descriptor, 0, os.SEEK_END)


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
    # One query reads hardly anything twice, and the cache is a copy of all that is read.
    connection.execute("SET enable_external_file_cache = false")
    where = f"{PROTOCOL}://{SPILL}" if settings["spill_bytes"] else ""
    connection.execute(f"SET temp_directory = '{where}'")
    connection.execute(f"SET max_temp_directory_size = '{settings['spill_bytes']}B'")
    return connection


def locked(connection: Any) -> None:
    """Nothing more is set, loaded, attached or opened by name."""
    connection.execute("SET disabled_filesystems = 'LocalFileSystem'")
    connection.execute(f"SET allowed_directories = ['{PROTOCOL}://']")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def parsed(connection: Any, sql: str) -> dict[str, Any]:
    """The tables that one SELECT names, the names that it gives by WITH, and its conditions."""
    (text,) = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchone()
    tree = json.loads(text)
    if tree.get("error"):
        said = str(tree.get("error_message", ""))
        if "Only SELECT" in said:
            said = "Only one SELECT is allowed: no other statement is run."
        raise QueryRefused(said, position=_position(tree, sql))
    statements = tree["statements"]
    if len(statements) != 1:
        raise QueryRefused(
            f"Only one SELECT is allowed: this text has {len(statements)} statements."
        )
    tables: dict[str, None] = {}
    given: dict[str, None] = {}
    waiting: list[Any] = [statements[0]]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        if not isinstance(node, dict):
            continue
        _look(node, tables, given, sql)
        waiting += node.values()
    return {
        "tables": list(tables),
        "given": list(given),
        "conditions": conditions(statements[0]),
    }


def _look(node: dict[str, Any], tables: dict[str, None], given: dict[str, None], sql: str) -> None:
    position = node.get("query_location")
    at = _characters(sql, position) if isinstance(position, int) and 0 <= position < 2**31 else None
    if isinstance(node.get("cte_map"), dict):
        given |= dict.fromkeys(each["key"] for each in node["cte_map"].get("map", ()))
    kind = node.get("type")
    is_source = "alias" in node and "sample" in node
    if is_source and kind not in _SOURCES:
        raise QueryRefused(f"FROM {kind} is not supported.", position=at)
    if kind == "BASE_TABLE":
        if node.get("schema_name") or node.get("catalog_name"):
            name = f"{node.get('schema_name') or node.get('catalog_name')}.{node['table_name']}"
            raise QueryRefused(f"There is no table {name}: datasets have no schema.", position=at)
        tables[node["table_name"]] = None
    if kind == "TABLE_FUNCTION":
        name = str(node.get("function", {}).get("function_name", "")).lower()
        if name not in TABLE_FUNCTIONS:
            raise QueryRefused(f"The table function {name} is not allowed.", position=at)


def _position(said: dict[str, Any], sql: str) -> int | None:
    """The place of an error in a text, in characters. Errors of DuckDB's parser have them, and all
    others bytes."""
    text = str(said.get("position", ""))
    if not text.isdecimal():
        return None
    kind = said.get("error_type") or said.get("exception_type")
    is_parsers = str(kind).lower() == "parser"
    return int(text) if is_parsers else _characters(sql, int(text))


def _characters(sql: str, position: int) -> int:
    """How many characters so many bytes of a text are."""
    return len(sql.encode()[:position].decode(errors="ignore"))


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
            # What the dataset has no longer is not shown, and hides no name that it has.
            wanted = {name for name, _ in table["columns"] or group["columns"]}
            columns = ", ".join(_name(name) for name, _ in group["columns"] if name in wanted)
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
    """A type of DuckDB for one in Spark's words; text for what it has no word for."""
    outer, inner = parts_of(kind)
    match outer, inner:
        case "array", [of]:
            return f"{_type(of)}[]"
        case "map", [key, of]:
            return f"MAP({_type(key)}, {_type(of)})"
        case "struct", [_, *_]:
            fields = (field_of(each) for each in inner)
            return f"STRUCT({', '.join(f'{_bare_name(name)} {_type(of)}' for name, of in fields)})"
    if kind.startswith("decimal(") and kind[8:-1].replace(",", "").isdecimal():
        return kind.upper()
    return _TYPES.get(kind, "VARCHAR")


def _bare_name(text: str) -> str:
    quoted = len(text) > 1 and text[0] == text[-1] == "`"
    return _name(text[1:-1].replace("``", "`") if quoted else text)


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
    names = unique_names([name for name, *_ in connection.description])
    kinds = [str(kind) for _, kind, *_ in connection.description]
    columns = [list(each) for each in zip(names, kinds, strict=True)]
    reader = result.to_arrow_reader(BATCH_ROWS)
    wire.say({"columns": columns})
    rows, is_cut = written(reader, ResultStream(wire.data, ask["bytes_max"]), ask)
    wire.say({"end": {"rows": rows, "is_cut": is_cut}})


def explained(connection: Any, wire: Wire, ask: dict[str, Any]) -> None:
    """Send how a query would be run."""
    before = "EXPLAIN "
    try:
        rows = connection.execute(f"{before}{ask['sql']}").fetchall()
    except Exception as error:
        said = _said(error, f"{before}{ask['sql']}")
        at = said["position"]
        at = None if at is None else max(0, at - len(before))
        raise QueryRefused(said["message"], position=at, kind=said["kind"]) from error
    text = "\n".join(str(row[-1]) for row in rows).rstrip() + "\n"
    wire.say({"columns": [["plan", "VARCHAR"]]})
    wire.data(encoder().encode([text]) + b"\n" if ask["format"] == "rows" else text.encode())
    wire.say({"end": {"rows": 1, "is_cut": False}})


def give_up(settings: dict[str, Any], user: int, parent: int, spill: list[int]) -> bool:
    """Give up everything that a query does not need; whether the kernel refuses the rest."""
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
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        resource.setrlimit(resource.RLIMIT_NPROC, (_PROCESSES_MAX, _PROCESSES_MAX))
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    library.prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise EOFError("the parent process exited")
    if library.prctl(lockdown.NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        raise OSError("failed to drop privileges for good")
    if os.uname().machine not in lockdown.MACHINES:
        return False
    allowed = {**lockdown.ALLOWED, **MORE_CALLS}
    lockdown.leave_calls(os.uname().machine, allowed=allowed, has_threads=True)
    return True


def _said(error: BaseException, sql: str) -> dict[str, Any]:
    """An error of this text as its reader gets it."""
    if isinstance(error, QueryRefused):
        return {"message": error.message, "position": error.position, "kind": error.kind}
    # What Python's frames are is nobody's business who asks.
    text = str(error).partition("\n\nAt:\n")[0]
    position, kind = None, "query"
    for at in (text.find("{"),) if "{" in text else ():
        try:
            told = json.loads(text[at:])
            text = f"{told['exception_type']}: {told['exception_message']}"
            position = _position(told, sql)
            kind = "memory" if "Memory" in told["exception_type"] else "query"
        except (ValueError, KeyError, TypeError):
            pass
    if _FULL in text:
        text, kind = "The query needs more temporary space than `query_spill` allows.", "memory"
    if isinstance(error, MemoryError):
        text, kind = "The query needs more memory than `query_memory` allows.", "memory"
    return {"message": text[:4000], "position": position, "kind": kind}


def serve(settings: dict[str, Any], user: int, parent: int) -> None:
    """Serve one query over `SOCKET`."""
    folder = settings["spill_folder"]
    spill: list[BinaryIO] = [
        tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - until this ends
        for _ in range(SPILL_FILES if settings["spill_bytes"] else 0)
    ]
    spilling = [each.fileno() for each in spill]
    # Now: a socket looks at itself when it is made.
    wire = Wire(socket.socket(fileno=SOCKET))
    is_closed = give_up(settings, user, parent, spilling)
    sql = ""
    try:
        files = file_system(wire, spilling)
        connection = connected(settings, files, settings["memory_bytes"])
        wire.say({"ready": True, "is_closed": is_closed})
        sql = wire.hear()["sql"]
        wire.say(parsed(connection, sql))
        answer(connection, wire, {**wire.hear(), "sql": sql}, files)
    except EOFError:
        pass
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the query's
        wire.say({"error": _said(error, sql)})
