"""Sessions of a Connect server. Imports PySpark.

Each thread has a session of its own. Groups are tags of operations. A client that was killed leaves
its operations running on the server, so the name of every session is kept in a file below the data
folder, locked as long as this process lives: a later host finds files that nobody holds, attaches
to those sessions, and ends what runs in them. What no host finds any more is ended by the server,
which gives up operations without a client after some minutes.

Calls have bounds: PySpark would try to reach a server that is gone for ten minutes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from penstock.kernel.entropy import Entropy, system_entropy
from penstock.runtimes.spark import isolation
from penstock.runtimes.spark.engine_protocol import JobGroup
from penstock.runtimes.spark.internals import ask_server, check_client, limit_retries
from penstock.runtimes.spark.settings import SparkSettings, connect_conf

_log = logging.getLogger(__name__)

_RETRIES_MAX: Final = 5
_PAUSE_MS_MAX: Final = 5_000
_LEFT_MAX: Final = 100
"""How many sessions of dead hosts are looked after at a start."""


class ConnectSessions:
    """Sessions of one server."""

    java = ""
    jvm = 0

    def __init__(self, settings: SparkSettings, *, entropy: Entropy | None = None) -> None:
        self._settings = settings
        self._entropy = entropy or system_entropy()
        self._names = Path(settings.data) / "spark" / "connect"
        self._names.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._all: dict[str, Any] = {}
        self._sessions: dict[str, Any] = {}
        self._counts: dict[str, dict[str, tuple[int, int, int, int]]] = {}
        self._thread = threading.local()
        self.base = self.fresh()
        check_client(self.base)
        isolation.install(type(self.base), type(self.base.range(0)), type(self.base.catalog))
        self.spark = str(self.base.version)
        self._end_left()

    def fresh(self) -> Any:
        name = _uuid(self._entropy)
        held = _hold(self._names / name)
        session = self._opened(name)
        session.registerProgressHandler(self._heard)
        with self._lock:
            self._all[name] = (session, held)
        return session

    def enter(self, session: Any, group: JobGroup) -> None:
        session.clearTags()
        session.addTag(group.name)
        isolation.enter(session)
        self._thread.group = group.name
        with self._lock:
            self._sessions[group.name] = session
            self._counts[group.name] = {}

    def leave(self, session: Any) -> None:
        with suppress(Exception):
            isolation.leave(session)
        with self._lock:
            for group in [name for name, each in self._sessions.items() if each is session]:
                del self._sessions[group], self._counts[group]
            name = next((name for name, each in self._all.items() if each[0] is session), None)
        if name is not None:
            self._end(name)

    def cancel(self, group: str) -> None:
        with self._lock:
            session = self._sessions.get(group)
        if session is not None:
            session.interruptTag(group)

    def progress(self, groups: Sequence[str]) -> Mapping[str, int]:
        with self._lock:
            found = [each for group in groups for each in self._counts.get(group, {}).values()]
        names = ("stages", "stages_done", "tasks", "tasks_done")
        return {name: sum(each[place] for each in found) for place, name in enumerate(names)}

    def metrics(self, groups: Sequence[str]) -> Mapping[str, Any]:
        """The server tells a client no more than its progress."""
        said = self.progress(groups)
        with self._lock:
            jobs = sum(len(self._counts.get(group, {})) for group in groups)
        return {"jobs": jobs, "stages": said["stages_done"], "tasks": said["tasks_done"]}

    def why_dead(self) -> str:
        try:
            ask_server(self.base)
        except Exception as error:  # noqa: BLE001 - gRPC's own, of many kinds
            return (
                f"The Connect server {self._settings.master} does not answer: {_first_line(error)}"
            )
        return ""

    def stop(self) -> None:
        for name in tuple(self._all):
            self._end(name)

    def _opened(self, name: str) -> Any:
        url = self._settings.master
        separator = ";" if "/;" in url else "/;"
        builder = SparkSession.builder.remote(f"{url.rstrip('/')}{separator}session_id={name}")
        for key, value in connect_conf(self._settings).items():
            builder = builder.config(key, value)
        session: Any = builder.create()
        limit_retries(session, retries_max=_RETRIES_MAX, pause_ms_max=_PAUSE_MS_MAX)
        return session

    def _end(self, name: str) -> None:
        with self._lock:
            session, held = self._all.pop(name)
        with suppress(Exception):
            session.interruptAll()
        with suppress(Exception):
            session.stop()
        (self._names / name).unlink(missing_ok=True)
        os.close(held)

    def _end_left(self) -> None:
        """End what hosts that were killed have left on the server."""
        for file in sorted(self._names.iterdir())[:_LEFT_MAX]:
            if file.name in self._all:
                continue
            try:
                held = _hold(file)
            except OSError:
                continue  # its host lives
            _log.warning("ending the session of a killed host: %s", file.name)
            with suppress(Exception):
                session = self._opened(file.name)
                session.interruptAll()
                session.stop()
            file.unlink(missing_ok=True)
            os.close(held)

    def _heard(
        self,
        stages: Iterable[Any] | None,
        inflight_tasks: int,
        operation_id: str | None,
        done: bool,  # noqa: FBT001 - PySpark calls it so
    ) -> None:
        """Called by PySpark, in the thread that waits for an operation."""
        del inflight_tasks, done
        group = getattr(self._thread, "group", "")
        each = tuple(stages or ())
        count = (
            len(each),
            sum(1 for stage in each if stage.done),
            sum(stage.num_tasks for stage in each),
            sum(stage.num_completed_tasks for stage in each),
        )
        with self._lock:
            if group in self._counts and each:
                self._counts[group][operation_id or ""] = count


def _hold(file: Path) -> int:
    """Make and lock a file that tells of a session; `OSError` if another process has it."""
    opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened


def _uuid(entropy: Entropy) -> str:
    """A random id in the only form that Connect takes."""
    bits = entropy.getrandbits(128)
    bits = bits & ~(0xF << 76) | (4 << 76)
    bits = bits & ~(0x3 << 62) | (2 << 62)
    digits = f"{bits:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
