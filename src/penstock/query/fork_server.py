"""The process that forks those of queries: `python -I -c … SETTINGS`, see `penstock.query.engine`.

Importing DuckDB and Arrow takes half a second of CPU, a fork some milliseconds. So this process
imports everything, runs a query in each format, and then forks a `child` whenever it is told to. It
never sees a query: the child is given a socket of its own, and gives up everything before it is
told the SQL. It has an empty environment, no credentials, and nothing open but its own socket,
which no child keeps.

It forks only while it has one thread: what another one holds would be held in every fork for good.

| state | is told | does |
|---|---|---|
| loading | | imports, warms up, says `READY` |
| ready | `FORK`, a number of a user, and a socket | forks; answers with the process id |
| ready | `END` and a process id | kills that child, waits for it, and answers with its id |
| over | the socket is closed | ends, and the kernel ends its children |

A child is waited for when that is told, and not before: until then its id is nobody else's. It is
killed by the kernel when this process ends, and this process when the query service does.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from penstock.kernel.parent_watch import die_with
from penstock.query import child
from penstock.query.result_writer import ResultStream, written

REQUEST: Final = struct.Struct(">cI")
ANSWER: Final = struct.Struct(">I")
FORK: Final = b"f"
END: Final = b"e"
READY: Final = 0
_MODULES: Final = ("duckdb", "msgspec", "fsspec", "pyarrow", "pyarrow.parquet", "pyarrow.dataset")


def warm(settings: dict[str, Any]) -> None:
    """Import all that a query may need, by running one in each format."""
    for name in _MODULES:
        import_module(name)
    import_module("pyarrow").set_cpu_count(1)
    import_module("pyarrow").set_io_thread_count(1)
    files = child.file_system(child.Wire(), [])
    connection = child.connected({**settings, "threads": 1}, files, 256 * 1024**2)
    for name in ("rows", "jsonl", "csv", "parquet", "arrow"):
        result = connection.execute(
            "SELECT 1 AS a, 1.5::DECIMAL(9,2) AS b, now() AS c, DATE '2020-01-01' AS d, 'x' AS e,"
            " [1] AS f, {'g': 1} AS g, TIME '10:00' AS h, INTERVAL 1 DAY AS i, uuid() AS j,"
            " TIMESTAMP_NS '2020-01-01' AS k, '\\x01'::BLOB AS l, MAP {'a': 1} AS m, 1e0 AS n"
        )
        if name == "parquet":
            result = connection.execute("SELECT 1 AS a, 'x' AS b")
        ask = {"format": name, "rows_max": 10, "cut": None}
        written(result.to_arrow_reader(10), ResultStream(lambda _: None, 1 << 20), ask)
    child.parsed(connection, "WITH a AS (SELECT 1) SELECT * FROM a")
    connection.close()
    # The module has made a database of its own, with threads.
    import_module("duckdb").default_connection().close()


def serve(settings: dict[str, Any], control: socket.socket) -> None:
    """Fork and end children until the query service closes the socket."""
    while True:
        asked, handed, _, _ = socket.recv_fds(control, REQUEST.size, 1, socket.MSG_WAITALL)
        if len(asked) < REQUEST.size:
            return
        kind, number = REQUEST.unpack(asked)
        if kind == FORK:
            number = _forked(settings, number, control, *handed)
        else:
            _ended(number)
        control.sendall(ANSWER.pack(number))


def _forked(settings: dict[str, Any], user: int, control: socket.socket, theirs: int) -> int:
    me, pid = os.getpid(), os.fork()
    if pid:
        os.close(theirs)
        return pid
    try:
        # In its place: a child of this process can tell it nothing.
        os.dup2(theirs, child.SOCKET)
        os.close(theirs)
        control.detach()
        child.serve(settings, user, me)
    finally:
        # Threads of DuckDB may be busy; nothing here is worth waiting for.
        os._exit(0)


def _ended(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _threads() -> int:
    """How many there are; one where nobody can tell."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def main() -> None:
    """Serve one query service, over standard input."""
    settings = json.loads(sys.argv[-1])
    die_with(settings["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm(settings)
    if (count := _threads()) > 1:
        raise SystemExit(f"Cannot fork processes for queries: imports have left {count} threads.")
    # What is there now is neither looked at nor moved again, and so it stays shared.
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=child.SOCKET)
    control.sendall(ANSWER.pack(READY))
    with suppress(ConnectionError):
        serve(settings, control)
