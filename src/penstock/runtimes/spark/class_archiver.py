"""Makes the archive of classes: `python -m penstock.runtimes.spark.class_archiver LOG PARENT`.

A process of its own, at the lowest priority, started by `runtime` when a host has been idle.
It starts a JVM that writes down the classes it has loaded when it ends, has it do what tasks do
(read, group, join, write, Arrow), ends it, and moves the file to its place. One at a time makes
it, by a lock beside the file; what a killed one leaves is overwritten by the next. Imports
PySpark.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock.kernel.errors import PenstockError
from penstock.kernel.frames import READ_BYTES, bodies
from penstock.kernel.parent_watch import die_with
from penstock.runtimes.guard import kill_session
from penstock.runtimes.spark.classic import ClassicSessions
from penstock.runtimes.spark.frames import OpenSession, to_host
from penstock.runtimes.spark.java import archive_of, find_java, packaged_java
from penstock.runtimes.spark.settings import SparkSettings

_log = logging.getLogger(__name__)

_NICE: Final = 19
_DUMP_SECONDS: Final = 200.0


def make(settings: SparkSettings, folder: Path) -> None:
    """Make the archive for hosts of these settings, if it is not there and nobody else does."""
    java = find_java(settings.java, os.environ, packaged=packaged_java())
    path = archive_of(settings, java).path
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        if path.is_file():
            return
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        # What cannot be archived is skipped, and said by a thousand lines.
        os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:ArchiveClassesAtExit={new} -Xlog:cds*=off"
        # Wherever work will run, the classes are those of a session on this machine.
        local = replace(settings, master="local[1]", archive=False, conf={})
        sessions = ClassicSessions(local, folder, lambda _reason: None)
        try:
            _exercise(sessions.base, folder)
        finally:
            sessions.stop(_DUMP_SECONDS)
        if new.is_file():
            new.replace(path)
            _log.info("the class archive is made: %s", path)


def _exercise(session: Any, folder: Path) -> None:
    """Load what tasks load."""
    files = str(folder / "exercise")
    rows = session.range(1000).selectExpr("id", "id % 7 AS k", "cast(id AS string) AS text")
    rows.write.parquet(files)
    read = session.read.schema(rows.schema).parquet(files)
    read.createOrReplaceTempView("rows")
    grouped = session.sql(
        "SELECT a.k, count(*) AS n, sum(b.id) AS total, max(b.text) AS text,"
        " row_number() OVER (ORDER BY a.k) AS place"
        " FROM rows a JOIN rows b ON a.id = b.id WHERE a.id > 10 GROUP BY a.k ORDER BY a.k"
    )
    grouped.toArrow()
    grouped.write.mode("overwrite").partitionBy("k").parquet(f"{files}-grouped")


def _hello() -> OpenSession:
    """What the runtime asks for; from then on this process ends when the runtime does."""
    connection = socket.socket(fileno=os.dup(0))
    body = next(bodies(connection), None)
    if body is None:
        sys.exit(0)
    hello = to_host.decode(body)
    assert isinstance(hello, OpenSession)

    def end_with_runtime() -> None:
        with suppress(OSError):
            while connection.recv(READ_BYTES):
                pass
        kill_session(os.getpid(), but=os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_runtime, daemon=True).start()
    return hello


def main(arguments: Sequence[str]) -> int:
    """Make an archive for the process of this number."""
    log, parent = arguments
    die_with(int(parent))
    os.nice(_NICE)
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    logging.basicConfig(level=logging.INFO)
    hello = _hello()
    try:
        make(hello.settings, Path(hello.folder))
    except PenstockError as error:
        _log.warning("no class archive: %s", error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
