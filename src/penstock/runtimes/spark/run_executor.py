"""The threads of a host that execute runs, each with a session of its own. Imports no Spark.

A run is a task, or a batch of tasks. It is given its work, is *entered* by a thread, and *left*.
The thread gives it to the engine, and reports how each of its tasks ends, when it does; of those
that the engine reports nothing of, at the end. A thread is used again unless it was interrupted:
what an exception that came from nowhere has left in it is not known.

Meanwhile the engine says for which tasks Spark jobs are (`begin`), and the runtime drops tasks
that nobody wants any more:

- a job group whose tasks are all dropped is cancelled, and what is started in it later too;
- its thread is interrupted besides: `Stopped` is raised in it, some time later and at most a few
  times, so that engine and user's code can end by themselves first.

Nothing is raised in a thread that has left, that works for others by then, or that reports how
a task has ended. Methods may be called from any thread, but for those of `RunReporter`, which
are the engine's. After a failure the sessions are asked whether they are of use at all. If not,
the task is no worse than the others: the host is broken, says so once, and ends; nothing is
said of the task alone.

`RunMonitor` reports, twice a second, how far runs are, and now and then how much memory the host
has, in a thread of its own: a Spark that does not answer holds up this thread and no other.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from penstock.runtimes.base import AttemptWork
from penstock.runtimes.guard import session_members
from penstock.runtimes.log_router import LogRouter, TaskLogs
from penstock.runtimes.secrets import print_error
from penstock.runtimes.spark.engine_protocol import (
    JobGroup,
    SparkSessions,
    WorkEngine,
    WorkFailure,
    WorkOutcome,
)
from penstock.runtimes.spark.frames import FromHost, HostMemory, RunFocus, RunOver, RunProgress
from penstock.runtimes.spark.frames import TaskEnded as EndedFrame
from penstock.runtimes.task import Stopped
from penstock.runtimes.user_code import told

_RAISED_AT: Final = frozenset({6, 16, 32})
"""At which looks at a group that is dropped as a whole its thread is interrupted."""
_NAMED_MAX: Final = 3


class RunListener(Protocol):
    """Who hears of a run, in its own thread."""

    def begun(self, run: HostRun, task_ids: Collection[int]) -> None: ...

    def ended(self, run: HostRun, task_id: int, ended: WorkOutcome) -> None: ...

    def dropping(self) -> None:
        """There is something to cancel."""


class HostRun:
    """What one thread works for; the engine's `RunReporter`."""

    def __init__(self, number: int, works: Sequence[AttemptWork], sessions: SparkSessions) -> None:
        self.number = number
        self.works = tuple(works)
        self.log = TaskLogs(self._logs)
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
        self.reporting: RunListener | None = None

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

    def end(self, task_id: int, ended: WorkOutcome) -> None:
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
        self._sessions.enter(self._session, JobGroup(name=group, title=title, tasks=tasks))
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


_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.25
_IDLE_SECONDS: Final = 5.0
_INTERRUPTED: Final = "Another task of its batch was interrupted; this one is released with it."


class FrameSender(Protocol):
    """What slots say of runs, and who hears it."""

    def send(self, frame: FromHost) -> None: ...

    def broken(self, reason: str) -> None: ...


class RunExecutor:
    """Starts runs in threads, and cancels them."""

    def __init__(
        self, sessions: SparkSessions, engine: WorkEngine, printing: LogRouter, host: FrameSender
    ) -> None:
        self._sessions = sessions
        self._engine = engine
        self._printing = printing
        self._host = host
        self._lock = threading.Lock()
        self._idle: list[_Slot] = []
        self._runs: dict[int, HostRun] = {}
        self._figures: dict[int, tuple[str, Mapping[str, Any]]] = {}
        self._number = 0
        self._is_broken = False
        self._dropping = threading.Event()
        threading.Thread(target=self._cancel, name="penstock-cancel", daemon=True).start()

    @property
    def runs(self) -> tuple[HostRun, ...]:
        """Those that are not over."""
        with self._lock:
            return tuple(self._runs.values())

    def start(self, run: HostRun) -> None:
        """Have a thread work for this run."""
        run.reporting = self
        with self._lock:
            self._runs[run.number] = run
            if not self._idle:
                self._number += 1
                self._idle.append(_Slot(f"penstock-slot-{self._number}", self._serve))
            slot = self._idle.pop()
        slot.queue.put(run)

    def drop(self, number: int, task_id: int) -> None:
        """Nobody wants this task any more; of a run that is over it is nothing."""
        with self._lock:
            run = self._runs.get(number)
        if run is not None:
            run.drop(task_id)

    def _serve(self, slot: _Slot, run: HostRun) -> bool:
        """Work for a run; whether the thread may be used again."""
        silence = self._ran(slot, run)
        for work in run.works:
            run.end(work.task_id, silence)
        if self._is_broken:
            return False
        try:
            if slot.session is not None:
                self._sessions.leave(slot.session)
        except Exception:  # noqa: BLE001 - the run has ended all the same
            _log.warning("failed to clear a session", exc_info=True)
        slot.session = None
        with self._lock:
            del self._runs[run.number]
            self._figures.pop(run.number, None)
            if not run.was_interrupted:
                self._idle.append(slot)
        self._host.send(RunOver(run=run.number))
        return not run.was_interrupted

    def begun(self, run: HostRun, task_ids: Collection[int]) -> None:
        """A run works for these of its tasks now."""
        self._host.send(RunFocus(run=run.number, task_ids=list(task_ids)))

    def ended(self, run: HostRun, task_id: int, ended: WorkOutcome) -> None:
        """A task of a run has ended; said at once, if somebody waits for it."""
        if run.is_dropped(task_id):
            return
        if isinstance(ended, WorkFailure) and (why := self._sessions.why_dead()):
            self._is_broken = True
            self._host.broken(why)
        else:
            self._host.send(_frame(run.number, task_id, ended, self._metrics(run)))

    def dropping(self) -> None:
        """Something was dropped."""
        self._dropping.set()

    def _ran(self, slot: _Slot, run: HostRun) -> WorkFailure:
        """Run it; how those of its tasks have ended of which nothing was said."""
        silence = WorkFailure(reason="The engine returned no result for this task.")
        with self._printing.to(run.log):
            try:
                try:
                    slot.session = self._sessions.fresh()
                    run.enter(slot.session)
                    self._engine.run(slot.session, run.works, run)
                    return silence
                finally:
                    run.leave()
            except Stopped:
                run.leave()
                # Meant for a task that nobody waits for; it came too late to be for that one alone.
                return WorkFailure(reason=_INTERRUPTED, is_released=True)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the end of the run
                # What came late may have come into the leaving itself.
                run.leave()
                print_error(error, [v for work in run.works for v in work.secrets.values()])
                reason, is_retried = told(error.with_traceback(_below(error)))
                return WorkFailure(reason=reason, is_retried=is_retried)

    def _metrics(self, run: HostRun) -> Mapping[str, Any]:
        """What the Spark jobs took that the run has begun last; asked once for all of them."""
        group, shared_by = run.group
        if self._figures.get(run.number, ("",))[0] != group:
            self._figures[run.number] = group, self._figures_of(group, shared_by)
        return self._figures[run.number][1]

    def _figures_of(self, group: str, shared_by: int) -> Mapping[str, Any]:
        try:
            said = dict(self._sessions.metrics([group]))
        except Exception:  # noqa: BLE001 - figures are not worth a failure
            _log.warning("no metrics of %s", group, exc_info=True)
            return {}
        # Figures of Spark jobs that several tasks share are those of all of them.
        return {**said, "shared_by": shared_by} if shared_by > 1 else said

    def _cancel(self) -> None:
        """Cancel what is dropped, again and again while it is there: new jobs may be started."""
        while True:
            self._dropping.wait(_IDLE_SECONDS)
            self._dropping.clear()
            is_any = False
            for run in self.runs:
                if group := run.look():
                    is_any = True
                    try:
                        self._sessions.cancel(group)
                    except Exception:  # noqa: BLE001 - it is tried again
                        _log.warning("failed to cancel %s", group, exc_info=True)
            if is_any:
                # Long enough for what was cancelled to end by itself.
                threading.Event().wait(_LOOK_SECONDS)
                self._dropping.set()


class _Slot:
    """A thread that works for one run after the other."""

    def __init__(self, name: str, serve: Callable[[_Slot, HostRun], bool]) -> None:
        self.queue: queue.SimpleQueue[HostRun] = queue.SimpleQueue()
        self.session: Any = None
        self._serve = serve
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while self._serve(self, self.queue.get()):
            pass


def _below(error: BaseException) -> TracebackType | None:
    """Where it was raised, as far as that is not here."""
    return error.__traceback__.tb_next if error.__traceback__ is not None else None


def _frame(run: int, task_id: int, ended: WorkOutcome, metrics: Mapping[str, Any]) -> EndedFrame:
    if isinstance(ended, WorkFailure):
        return EndedFrame(
            run=run,
            task_id=task_id,
            reason=ended.reason,
            is_retried=ended.is_retried,
            is_released=ended.is_released,
        )
    finished = replace(ended, metrics={**metrics, **ended.metrics})
    return EndedFrame(run=run, task_id=task_id, finished=finished)


_TICK_SECONDS: Final = 0.5
_RESIDENT_TICKS: Final = 20
_GROUPS_MAX: Final = 20
"""How many of the last groups of a run are looked at: a batch that runs singly has very many."""


class RunMonitor:
    """A thread that looks at runs until the process ends."""

    def __init__(
        self, slots: RunExecutor, sessions: SparkSessions, send: Callable[[FromHost], None]
    ) -> None:
        self._slots = slots
        self._sessions = sessions
        self._send = send
        self._told: dict[int, dict[str, Any]] = {}
        self._never = threading.Event()
        threading.Thread(target=self._tick, name="penstock-tick", daemon=True).start()

    def _tick(self) -> None:
        ticks = 0
        while not self._never.wait(_TICK_SECONDS):
            ticks += 1
            runs = self._slots.runs
            self._told = {run.number: self._told.get(run.number, {}) for run in runs}
            for run in runs:
                run.log.flush()
                self._tell(run)
            if ticks % _RESIDENT_TICKS == 0:
                self._send(HostMemory(resident_bytes(os.getsid(0))))

    def _tell(self, run: HostRun) -> None:
        try:
            said = {"phase": run.said, **self._sessions.progress(run.groups[-_GROUPS_MAX:])}
        except Exception as error:  # noqa: BLE001 - there is another tick
            _log.debug("no progress of run %s: %s", run.number, error)
            return
        wanted = run.wanted
        if wanted and said != self._told[run.number]:
            self._told[run.number] = said
            self._send(RunProgress(run=run.number, task_ids=wanted, said=said))


def resident_bytes(leader: int) -> int:
    """The memory of all processes of a session; 0 where nobody tells."""
    pages = 0
    for process in session_members(leader):
        try:
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has just ended
    return pages * os.sysconf("SC_PAGE_SIZE")
