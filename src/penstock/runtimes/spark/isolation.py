"""Keeps jobs apart that share a context of Spark: none finds what another has made.

- What belongs to a session is gone with it, since every run has one of its own (`Sessions.fresh`):
  views, functions, variables, settings, the current database, data sources.
- What belongs to a thread is reset after the run: properties, tags, the active session. Threads
  that a run's own thread starts work for that run.
- What belongs to the context is dropped after the run, by name: what was cached, tables, databases
  and functions of Spark's own catalog.
- What cannot be taken back, or would be taken from others too, is refused with a sentence.

Of the context it is known what it holds, not who made it. What is new in it when a run leaves may
be that run's, or one's that runs beside it, so it is dropped when all of them have left. Only when
nobody runs at all, everything is cleared that has no name.

What is refused is refused in Python, where users' code calls it (`install`, once a process), and
only to sessions of runs. It keeps mistakes from others; code that means harm has the rights of the
host anyway. Imports PySpark.

A Connect server keeps sessions apart by itself, and shares what belongs to its context: what a run
has cached is dropped here (`leave`), global views are refused, and tables are not looked after.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.internals import (
    SharedState,
    builder_options,
    session_of_catalog,
)

_log = logging.getLogger(__name__)

_SQL_REFUSED: Final = {
    re.compile(r"CREATE\s+(OR\s+REPLACE\s+)?GLOBAL\s+TEMP"): "CREATE GLOBAL TEMPORARY VIEW",
    re.compile(r"CLEAR\s+CACHE\b"): "CLEAR CACHE",
    re.compile(r"ADD\s+(JARS?|FILES?|ARCHIVES?)\b"): "ADD",
}
_CACHING: Final = re.compile(r"CACHE\s")
_NOISE: Final = re.compile(r"/\*.*?\*/|--[^\n]*(\n|$)|\s+", re.DOTALL)
_INSTEAD: Final = {
    "createGlobalTempView": "use createOrReplaceTempView, whose views are the task's own",
    "createOrReplaceGlobalTempView": "use createOrReplaceTempView, whose views are the task's own",
    "CREATE GLOBAL TEMPORARY VIEW": "write CREATE TEMPORARY VIEW, whose views are the task's own",
    "clearCache": "drop what you have cached with unpersist or uncacheTable; it is dropped anyway",
    "CLEAR CACHE": "write UNCACHE TABLE for what you have cached; it is dropped anyway",
    "addPyFile": "name it in spark.submit.pyFiles below conf in the settings of the runtime",
    "addFile": "name it in spark.files below conf in the settings of the runtime",
    "addArchive": "name it in spark.archives below conf in the settings of the runtime",
    "ADD": "name it in spark.jars or spark.files below conf in the settings of the runtime",
    "setCheckpointDir": "name it in spark.checkpoint.dir below conf in the settings of the runtime",
    "setLogLevel": "leave it out: the log of the JVM is that of all tasks",
    "stop": "leave it out: what a task has made in its session is gone when the task ends",
}
_CONTEXT: Final = ("addPyFile", "addFile", "addArchive", "setCheckpointDir", "setLogLevel", "stop")

_runs: WeakKeyDictionary[Any, list[DataFrame | _Named]] = WeakKeyDictionary()
"""The sessions of runs, and what each has cached: frames, and names."""
_thread: Final = threading.local()
_installed: Final[set[type]] = set()


def enter(session: Any) -> None:
    """This thread works for a run with this session."""
    _runs.setdefault(session, [])
    _thread.session = session


def leave(session: Any) -> None:
    """The run is over: what it has cached is dropped."""
    _thread.session = None
    for each in _runs.pop(session, ()):
        try:
            each.unpersist()
        except PySparkException as error:
            # As when a Connect server looks again for a view that it was made of.
            _log.warning("what a task has cached is not dropped: %s", error)


def install(session: type, frame: type, catalog: type, context: type | None = None) -> None:
    """Have these classes of PySpark refuse to sessions of runs what is not theirs alone."""
    if session in _installed:
        return
    _installed.add(session)

    _before(session, "sql", _look_at_sql)
    _before(catalog, "cacheTable", _keep_named)
    for name in ("cache", "persist"):
        _before(frame, name, _keep)
    for name in ("createGlobalTempView", "createOrReplaceGlobalTempView"):
        _before(frame, name, _refusing(name, lambda self: self.sparkSession in _runs))
    clearing = _refusing("clearCache", lambda self: session_of_catalog(self) in _runs)
    _before(catalog, "clearCache", clearing)
    for name in _CONTEXT if context is not None else ():
        _before(context, name, _refusing(name, lambda _: _current() is not None))
    if len(_installed) == 1:
        _before(threading.Thread, "start", _remember)
    # What users import is the classic one, also as clients of a Connect server.
    for each in {session, SparkSession}:
        _install_builder(each)


def _look_at_sql(self: Any, *args: Any, **named: Any) -> None:
    text = args[0] if args else named.get("sqlQuery")
    if self not in _runs or not isinstance(text, str):
        return
    words = _words(text)
    if what := _refused(words):
        raise _refusal(what)
    if _CACHING.match(words):
        _runs[self].append(_Named(self))


def _keep(self: Any, *args: Any, **named: Any) -> None:
    del args, named
    if self.sparkSession in _runs:
        _runs[self.sparkSession].append(self)


def _keep_named(self: Any, *args: Any, **named: Any) -> None:
    del args, named
    session = session_of_catalog(self)
    if session in _runs:
        _runs[session].append(_Named(session))


class Commons:
    """What the sessions of one context share, and which runs are there."""

    def __init__(self, base: Any) -> None:
        self._shared = SharedState(base)
        self._lock = threading.Lock()
        self._active: set[int] = set()
        self._known = self._shared.names()
        self._new: dict[tuple[str, str], set[int]] = {}
        """What nobody is known to have made, and who runs that may have."""

    def enter(self, session: Any) -> None:
        """A run is there."""
        with self._lock:
            self._active.add(id(session))
        enter(session)

    def leave(self, session: Any) -> None:
        """A run is over: drop what is certainly nobody's any more."""
        try:
            try:
                if self._shared.has_cached():
                    _uncache_views(session)
            finally:
                leave(session)
        finally:
            with self._lock:
                self._active.discard(id(session))
                for owners in self._new.values():
                    owners.discard(id(session))
                for name in self._shared.names() - self._known - self._new.keys():
                    self._new[name] = set(self._active)
                over = [name for name, owners in self._new.items() if not owners]
                for name in over:
                    self._drop(*self._forget(name))
                if not self._active:
                    # Nobody runs: whatever is cached is nobody's.
                    self._shared.clear()

    def _forget(self, name: tuple[str, str]) -> tuple[str, str]:
        del self._new[name]
        return name

    def _drop(self, kind: str, name: str) -> None:
        try:
            self._shared.drop(kind, name)
        except Py4JError as error:
            _log.warning("the %s %s that a task has left is not dropped: %s", kind, name, error)
        else:
            _log.info("the %s %s that a task has left is dropped", kind, name)


@dataclass(frozen=True, slots=True)
class _Named:
    """What a run has cached by a name."""

    session: Any

    def unpersist(self) -> None:
        _uncache_views(self.session)


def _uncache_views(session: Any) -> None:
    catalog = session.catalog
    # The database that it was in may be gone.
    catalog.setCurrentCatalog("spark_catalog")
    catalog.setCurrentDatabase("default")
    for each in catalog.listTables():
        if each.isTemporary and catalog.isCached(each.name):
            catalog.uncacheTable(each.name)


def _words(text: str) -> str:
    """The beginning of a statement, without comments."""
    start = 0
    while (noise := _NOISE.match(text, start)) is not None:
        start = noise.end()
    return _NOISE.sub(" ", text[start : start + 500]).upper()


def _refused(words: str) -> str:
    """What a statement is that is refused; empty if it is not."""
    return next((what for pattern, what in _SQL_REFUSED.items() if pattern.match(words)), "")


def _refusal(what: str) -> WorkFailed:
    return WorkFailed(
        f"{what} would change what other tasks in the same JVM see; {_INSTEAD[what]}.",
        is_retried=False,
    )


def _refusing(name: str, is_refused: Callable[[Any], bool]) -> Callable[..., None]:
    def refuse(self: Any, *args: Any, **named: Any) -> None:
        del args, named
        if is_refused(self):
            raise _refusal(name)

    return refuse


def _before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Have a method of a class begin with this."""
    plain = getattr(owner, name)

    @wraps(plain)
    def method(self: Any, *args: Any, **named: Any) -> Any:
        look(self, *args, **named)
        return plain(self, *args, **named)

    setattr(owner, name, method)


def _install_builder(session: Any) -> None:
    """`SparkSession.builder.getOrCreate()` gives the session of the run, not the host's own."""
    plain = session.Builder.getOrCreate

    @wraps(plain)
    def get_or_create(self: Any) -> Any:
        current = _current()
        if current is None:
            return plain(self)
        for name, value in builder_options(self).items():
            try:
                current.conf.set(name, value)
            except Exception as error:  # noqa: BLE001 - as PySpark does, of what cannot be changed
                _log.warning("%s is not set: %s", name, error)
        return current

    session.Builder.getOrCreate = get_or_create


def _remember(self: threading.Thread) -> None:
    if (session := _current()) is not None:
        self._penstock_session = ref(session)  # type: ignore[attr-defined]


def _current() -> Any:
    """The session that this thread works for, or that the one worked for which has started it."""
    session = getattr(_thread, "session", None)
    if session is None:
        started_for = getattr(threading.current_thread(), "_penstock_session", None)
        session = None if started_for is None else started_for()
    return session
