"""The process in which Spark's driver and users' transforms run.

Started as `python -m penstock.runtimes.spark.host PARENT` by
`penstock.runtimes.spark.runtime`, which talks to it over a socket at standard input. It makes
one session, then the engine, and runs work in threads until it is told to end, or is killed, or
its JVM is. The main thread reads the socket and never waits for Spark.

- Nothing of it outlives the runtime: when the socket closes, it kills its whole session of
  processes, the JVM and Spark's Python workers included; so does the guard of the runtime.
- It ends when the JVM does. The last frame that it sends is why (`HostBroken`), and nothing is
  reported of any task after that: that one's failure is all that they have to tell.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.kernel.errors import PenstockError
from penstock.kernel.frames import bodies
from penstock.kernel.parent_watch import die_with
from penstock.runtimes.base import AttemptWork
from penstock.runtimes.frames import encode_frame
from penstock.runtimes.guard import kill_session
from penstock.runtimes.log_router import LogRouter
from penstock.runtimes.spark.engine_protocol import SparkSessions
from penstock.runtimes.spark.frames import (
    DropTask,
    EndHost,
    FromHost,
    GiveWork,
    HostBroken,
    HostReady,
    OpenSession,
    StartRun,
    TaskEnded,
    to_host,
)
from penstock.runtimes.spark.run_executor import HostRun, RunExecutor, RunMonitor
from penstock.runtimes.spark.settings import SparkSettings

_log = logging.getLogger(__name__)

_OURS: Final = "penstock.runtimes.spark.engine"
_BYE_SECONDS: Final = 8.0
_REASON_CHARACTERS_MAX: Final = 2_000


class SparkHost:
    """The other end of the runtime's socket."""

    def __init__(self, connection: socket.socket, printing: LogRouter) -> None:
        self._connection = connection
        self._printing = printing
        self._sending = threading.Lock()
        self._is_over = False
        self._given: defaultdict[int, list[AttemptWork]] = defaultdict(list)
        self._sessions: SparkSessions | None = None
        self._slots: RunExecutor | None = None

    def listen(self) -> None:
        """Hear the runtime until it is gone."""
        with suppress(OSError):
            for body in bodies(self._connection):
                self._hear(body)
        end_all()

    def send(self, frame: FromHost) -> None:
        """Say something; what cannot be said is the failure of the task that it is about."""
        try:
            body = encode_frame(frame)
        except Exception as error:  # noqa: BLE001 - what users make may be anything
            if not isinstance(frame, TaskEnded):
                _log.warning("failed to send %s: %s", type(frame).__name__, error)
                return
            said = f"The result of the task cannot be sent: {error}"
            body = encode_frame(TaskEnded(run=frame.run, task_id=frame.task_id, reason=said))
        with self._sending:
            if not self._is_over:
                self._connection.sendall(body)

    def broken(self, reason: str) -> None:
        """Say why this process is of no use any more, and end it."""
        _log.error("%s", reason)
        with self._sending:
            if not self._is_over:
                self._is_over = True
                with suppress(OSError):
                    self._connection.sendall(
                        encode_frame(HostBroken(reason=reason[:_REASON_CHARACTERS_MAX]))
                    )
        end_all()

    def _hear(self, body: bytes) -> None:
        match to_host.decode(body):
            case OpenSession() as hello:
                threading.Thread(target=self._open, args=(hello,), name="penstock-open").start()
            case GiveWork(run=number, work=work):
                self._given[number].append(work)
            case StartRun(run=number):
                assert self._slots is not None
                assert self._sessions is not None
                self._slots.start(HostRun(number, self._given.pop(number), self._sessions))
            case DropTask(run=number, task_id=task_id):
                if self._slots is not None:
                    self._slots.drop(number, task_id)
            case EndHost():
                threading.Thread(target=self._end, name="penstock-end").start()

    def _open(self, hello: OpenSession) -> None:
        """Make the session and the engine. This thread lives on: Spark may hold on to it."""
        try:
            use_path(hello.settings)
            sessions = _sessions(hello, self.broken)
            module, _, name = hello.engine.partition(":")
            engine = getattr(importlib.import_module(module), name)(hello.settings, sessions.base)
            slots = RunExecutor(sessions, engine, self._printing, self)
        except PenstockError as error:
            self.broken(f"{error.message} {error.hint}".strip())
            return
        except Exception as error:  # noqa: BLE001 - told to the runtime, and this process ends
            _log.exception("the Spark session did not start")
            self.broken(f"The session of Spark did not start: {type(error).__name__}: {error}")
            return
        self._sessions, self._slots = sessions, slots
        RunMonitor(slots, sessions, self.send)
        archive = getattr(sessions, "archive", None)
        is_archived = archive is None or not archive.is_missing
        self.send(
            HostReady(
                spark=sessions.spark,
                java=sessions.java,
                jvm=sessions.jvm,
                is_archived=is_archived,
            )
        )

    def _end(self) -> None:
        """End politely, so that a cluster hears of it; and without it, if that takes its time."""
        with self._sending:
            self._is_over = True
        threading.Timer(_BYE_SECONDS, end_all).start()
        if self._sessions is not None:
            self._sessions.stop()
        end_all()


def _sessions(hello: OpenSession, ended: Any) -> SparkSessions:
    """The sessions that the settings ask for. The engine's module may bring its own, for tests."""
    module = hello.engine.partition(":")[0]
    if module != _OURS:
        theirs = getattr(importlib.import_module(module), "open_sessions", None)
        if theirs is not None:
            sessions: SparkSessions = theirs(hello.settings)
            return sessions
    if hello.settings.is_connect:
        from penstock.runtimes.spark.connect import ConnectSessions  # noqa: PLC0415 - needs gRPC

        return ConnectSessions(hello.settings)
    from penstock.runtimes.spark.classic import ClassicSessions  # noqa: PLC0415 - needs Java

    # What the engine imports takes as long as a part of the JVM's start.
    return ClassicSessions(
        hello.settings, Path(hello.folder), ended, meanwhile=partial(_try_import, module)
    )


def _try_import(module: str) -> None:
    """Whoever imports it next is told what is wrong with it."""
    with suppress(Exception):
        importlib.import_module(module)


def end_all() -> None:
    """Kill this process, and all that it has started."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if os.getsid(0) == os.getpid():
        kill_session(os.getpid(), but=os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


def use_path(settings: SparkSettings) -> None:
    """Find users' modules where the settings say."""
    for folder in reversed(settings.path):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def main(arguments: Sequence[str]) -> None:
    """Serve the process of this number, over standard input; output goes to the log."""
    log, parent = arguments
    die_with(int(parent))
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.close(opened)
    printing = LogRouter()
    printing.install()
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    SparkHost(connection, printing).listen()


if __name__ == "__main__":
    main(sys.argv[1:])
