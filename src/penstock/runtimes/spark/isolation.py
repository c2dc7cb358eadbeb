"""Keeps jobs apart that share a context of Spark: none finds what another has made.

- What belongs to a session is gone with it, since every run has one of its own:
  views, functions, variables, settings, the current database, data sources.
- What belongs to a thread is reset after the run: properties, tags, the active session. Threads
  that a run's own thread starts work for that run.
- What sessions share is shared by a *family* of them: the catalog with its tables, databases and
  functions, global views, and what is cached. Runs that are there at the same time are of different
  families, each with a warehouse folder of its own, so that none sees what another makes, and two
  may make tables of one name. When a run leaves, all that is in its family is its own, and is
  dropped, by name; then the family serves another run. There are as many as runs at once.
- What cannot be taken back, or would be taken from others too, is refused with a sentence.

Only cached RDDs are of the context: nobody finds them by a name, and they are dropped when nobody
runs. A metastore is others' too: there all runs are of one family, whose catalog is left alone,
what a run caches is dropped frame by frame, and all of it when nobody runs.

States of a family: idle, or of a run. A family whose clean-up fails is not used again. Nothing here
outlives the JVM, so a crash leaves nothing but folders below the host's own, which go with it.

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
    clear_rdds,
    session_of_catalog,
    stranger,
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
            _log.warning("failed to unpersist cached data of a task: %s", error)


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


class SessionFamilies:
    """The families of one context, and which runs they serve."""

    def __init__(self, base: Any) -> None:
        """`base` is the session of nobody's run; its family is the first."""
        self._base = base
        self._lock = threading.Lock()
        self._idle = [_Family(base)]
        self._count = 1
        self._serving: WeakKeyDictionary[Any, _Family] = WeakKeyDictionary()
        self._active: set[int] = set()

    def fresh(self) -> Any:
        """A session for a run, of a family that no other run is of."""
        with self._lock:
            family = self._idle.pop() if self._idle else self._made()
            if not family.is_exclusive:
                self._idle.append(family)
            session = family.base.newSession()
            self._serving[session] = family
        return session

    def enter(self, session: Any) -> None:
        """A run is there."""
        with self._lock:
            self._active.add(id(session))
        enter(session)

    def leave(self, session: Any) -> None:
        """A run is over: what it has left is dropped."""
        with self._lock:
            family = self._serving.pop(session)
        try:
            try:
                if family.shared.has_cached():
                    _uncache_views(session)
            finally:
                leave(session)
        finally:
            with self._lock:
                self._active.discard(id(session))
                is_last = not self._active
                if family.is_exclusive or is_last:
                    is_clean = family.clean()
                    if family.is_exclusive and is_clean:
                        self._idle.append(family)
                if is_last:
                    clear_rdds(self._base)

    def _made(self) -> _Family:
        warehouse = f"{self._base.conf.get('spark.sql.warehouse.dir')}/penstock-{self._count}"
        self._count += 1
        return _Family(stranger(self._base, warehouse=warehouse))


class _Family:
    """Sessions that share a catalog and a cache."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.shared = SharedState(base)
        self.is_exclusive = self.shared.is_ours
        self._known = self.shared.names()

    def clean(self) -> bool:
        """Drop what was not there at first; whether all of it is gone."""
        is_clean = True
        for kind, name in self.shared.names() - self._known:
            try:
                self.shared.drop(kind, name)
            except Py4JError as error:
                is_clean = False
                _log.warning("failed to drop the %s %s that a task left: %s", kind, name, error)
            else:
                _log.info("dropped the %s %s that a task left", kind, name)
        self.shared.clear()
        return is_clean


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
