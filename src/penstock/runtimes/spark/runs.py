"""One run in a host: a task, or a batch of tasks, that a thread works for. Imports no Spark.

A run is given its work, is *entered* by a thread, and *left*. Meanwhile the engine says for which
tasks Spark jobs are (`begin`), and the runtime drops tasks that nobody wants any more:

- a group of jobs whose tasks are all dropped is cancelled, and what is started in it later too;
- its thread is interrupted besides: `Stopped` is raised in it, some time later and at most a few
  times, so that engine and user's code can end by themselves first.

Nothing is raised in a thread that has left, that works for others by then, or that tells how a task
has ended. Methods may be called from any thread, but for those
of `Telling`, which are the engine's.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from penstock.runtimes.base import Work
from penstock.runtimes.spark.printing import Log
from penstock.runtimes.spark.sessions import Group, Sessions
from penstock.runtimes.spark.telling import Ended
from penstock.runtimes.task import Stopped

_RAISED_AT: Final = frozenset({6, 16, 32})
"""At which looks at a group that is dropped as a whole its thread is interrupted."""
_NAMED_MAX: Final = 3


class Reporting(Protocol):
    """Who hears of a run, in its own thread."""

    def begun(self, run: Run, task_ids: Collection[int]) -> None: ...

    def ended(self, run: Run, task_id: int, ended: Ended) -> None: ...

    def dropping(self) -> None:
        """There is something to cancel."""


class Run:
    """What one thread works for; the engine's `Telling`."""

    def __init__(self, number: int, works: Sequence[Work], sessions: Sessions) -> None:
        self.number = number
        self.works = tuple(works)
        self.log = Log(self._logs)
        self.groups: list[str] = []
        self.was_interrupted = False
        self.told: set[int] = set()
        """The tasks that have ended."""
        self._sessions = sessions
        self._session: Any = None
        self._lock = threading.Lock()
        self._dropped: set[int] = set()
        self._serving = frozenset(work.task_id for work in self.works)
        self._phase = "waiting"
        self._thread_id: int | None = None
        self._looks = 0
        self.reporting: Reporting | None = None

    def enter(self, session: Any) -> None:
        """This thread works for the run."""
        with self._lock:
            self._session = session
            self._thread_id = threading.get_ident()
        self.begin(self._serving)

    def leave(self) -> None:
        """This thread does not work for the run any more, and is left alone from now on."""
        with self._lock:
            if self._thread_id is not None:
                _raise_in(self._thread_id, None)
            self._thread_id = None

    # What the engine says and asks.

    def is_dropped(self, task_id: int) -> bool:
        return task_id in self._dropped

    def begin(self, task_ids: Collection[int]) -> None:
        self.log.flush()
        with self._undisturbed():
            self._begin(task_ids)

    def end(self, task_id: int, ended: Ended) -> None:
        if task_id not in self.told:
            self.told.add(task_id)
            assert self.reporting is not None, "given to it before it runs"
            with self._undisturbed():
                self.reporting.ended(self, task_id, ended)

    def _begin(self, task_ids: Collection[int]) -> None:
        with self._lock:
            self._looks = 0
            self._serving = frozenset(task_ids)
            # Tags of Connect have the same rules as this: no spaces, no commas.
            first = min(self._serving, default=0)
            group = f"penstock-task-{first}-run-{self.number}-{len(self.groups)}"
            self.groups.append(group)
            is_vain = self._serving <= self._dropped
        tasks = _named(sorted(task_ids))
        title = f"{self.works[0].job} ({tasks})"
        self._sessions.enter(self._session, Group(name=group, title=title, tasks=tasks))
        assert self.reporting is not None, "given to it before it runs"
        self.reporting.begun(self, task_ids)
        if is_vain:
            self.reporting.dropping()

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Within this nothing is raised in the thread, and what was to be raised before never is:
        it may hold a lock here, and what was to stop has ended."""
        was = self._thread_id
        self.leave()
        try:
            yield
        finally:
            with self._lock:
                self._thread_id = was

    def phase(self, name: str) -> None:
        self._phase = name

    # What the host does.

    @property
    def said(self) -> str:
        """The phase that the engine is in."""
        return self._phase

    @property
    def group(self) -> tuple[str, int]:
        """The group that was begun last, and how many tasks it is for."""
        with self._lock:
            return self.groups[-1] if self.groups else "", len(self._serving)

    @property
    def wanted(self) -> list[int]:
        """The tasks that are worked for now, and not dropped."""
        with self._lock:
            return sorted(self._serving - self._dropped)

    @property
    def is_vain(self) -> bool:
        """Whether nobody wants any of its tasks."""
        return self._dropped.issuperset(work.task_id for work in self.works)

    def drop(self, task_id: int) -> None:
        """Nobody wants this task any more."""
        with self._lock:
            self._dropped.add(task_id)
            is_vain = self._serving <= self._dropped
        if is_vain and self.reporting is not None:
            self.reporting.dropping()

    def look(self) -> str:
        """The group that is to be cancelled now, if one is; interrupts the thread where due."""
        with self._lock:
            if self._thread_id is None or not self.groups or not self._serving <= self._dropped:
                return ""
            self._looks += 1
            if self._looks in _RAISED_AT:
                self.was_interrupted = True
                _raise_in(self._thread_id, Stopped)
            return self.groups[-1]

    def _logs(self) -> list[str]:
        return [work.log for work in self.works if work.task_id in self._serving]


def _named(task_ids: Sequence[int]) -> str:
    first = ", ".join(str(task_id) for task_id in task_ids[:_NAMED_MAX])
    more = f" and {len(task_ids) - _NAMED_MAX} more" if len(task_ids) > _NAMED_MAX else ""
    return f"task {first}" if len(task_ids) == 1 else f"tasks {first}{more}"


def _raise_in(thread_id: int, error: type[BaseException] | None) -> None:
    """Have a thread raise this at its next instruction; None takes back what it has not raised."""
    thing = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), thing)
