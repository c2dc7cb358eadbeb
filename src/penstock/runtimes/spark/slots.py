"""The threads of a host that run work, each with a session of its own.

A thread takes a run, gives it to the engine, and passes on how each of its tasks ends, when it
does; of those that the engine says nothing of, at the end. It is used again unless it was
interrupted: what an exception that came from nowhere has left in it is not known. Every run has a
session of its own.

After a failure it is asked whether the sessions are of use at all. If not, the task is no worse
than the others: the host is broken, says so once, and ends; nothing is said of the task alone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Protocol

from penstock.runtimes.calling import told
from penstock.runtimes.secrets import print_error
from penstock.runtimes.spark.frames import Begun, FromHost, Over
from penstock.runtimes.spark.frames import Ended as EndedFrame
from penstock.runtimes.spark.printing import Printing
from penstock.runtimes.spark.runs import Run
from penstock.runtimes.spark.sessions import Sessions
from penstock.runtimes.spark.telling import Ended, Failed, Running
from penstock.runtimes.task import Stopped

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.25
_IDLE_SECONDS: Final = 5.0
_INTERRUPTED: Final = "A task of its batch was stopped, and this one with it; it is handed back."


class Reporting(Protocol):
    """What slots say of runs, and who hears it."""

    def send(self, frame: FromHost) -> None: ...

    def broken(self, reason: str) -> None: ...


class Slots:
    """Starts runs in threads, and cancels them."""

    def __init__(
        self, sessions: Sessions, engine: Running, printing: Printing, host: Reporting
    ) -> None:
        self._sessions = sessions
        self._engine = engine
        self._printing = printing
        self._host = host
        self._lock = threading.Lock()
        self._idle: list[_Slot] = []
        self._runs: dict[int, Run] = {}
        self._figures: dict[int, tuple[str, Mapping[str, Any]]] = {}
        self._number = 0
        self._is_broken = False
        self._dropping = threading.Event()
        threading.Thread(target=self._cancel, name="penstock-cancel", daemon=True).start()

    @property
    def runs(self) -> tuple[Run, ...]:
        """Those that are not over."""
        with self._lock:
            return tuple(self._runs.values())

    def start(self, run: Run) -> None:
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

    def _serve(self, slot: _Slot, run: Run) -> bool:
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
            _log.warning("a session could not be cleared", exc_info=True)
        slot.session = None
        with self._lock:
            del self._runs[run.number]
            self._figures.pop(run.number, None)
            if not run.was_interrupted:
                self._idle.append(slot)
        self._host.send(Over(run=run.number))
        return not run.was_interrupted

    def begun(self, run: Run, task_ids: Collection[int]) -> None:
        """A run works for these of its tasks now."""
        self._host.send(Begun(run=run.number, task_ids=list(task_ids)))

    def ended(self, run: Run, task_id: int, ended: Ended) -> None:
        """A task of a run has ended; said at once, if somebody waits for it."""
        if run.is_dropped(task_id):
            return
        if isinstance(ended, Failed) and (why := self._sessions.why_dead()):
            self._is_broken = True
            self._host.broken(why)
        else:
            self._host.send(_frame(run.number, task_id, ended, self._metrics(run)))

    def dropping(self) -> None:
        """Something was dropped."""
        self._dropping.set()

    def _ran(self, slot: _Slot, run: Run) -> Failed:
        """Run it; how those of its tasks have ended of which nothing was said."""
        silence = Failed(reason="The engine said nothing of this task.")
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
                return Failed(reason=_INTERRUPTED, is_released=True)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the end of the run
                # What came late may have come into the leaving itself.
                run.leave()
                print_error(error, [v for work in run.works for v in work.secrets.values()])
                reason, is_retried = told(error.with_traceback(_below(error)))
                return Failed(reason=reason, is_retried=is_retried)

    def _metrics(self, run: Run) -> Mapping[str, Any]:
        """What the Spark jobs took that the run has begun last; asked once for all of them."""
        group, shared_by = run.group
        if self._figures.get(run.number, ("",))[0] != group:
            self._figures[run.number] = group, self._figures_of(group, shared_by)
        return self._figures[run.number][1]

    def _figures_of(self, group: str, shared_by: int) -> Mapping[str, Any]:
        try:
            said = dict(self._sessions.metrics([group]))
        except Exception:  # noqa: BLE001 - figures are not worth a failure
            _log.warning("there are no figures of %s", group, exc_info=True)
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
                        _log.warning("%s could not be cancelled", group, exc_info=True)
            if is_any:
                # Long enough for what was cancelled to end by itself.
                threading.Event().wait(_LOOK_SECONDS)
                self._dropping.set()


class _Slot:
    """A thread that works for one run after the other."""

    def __init__(self, name: str, serve: Callable[[_Slot, Run], bool]) -> None:
        self.queue: queue.SimpleQueue[Run] = queue.SimpleQueue()
        self.session: Any = None
        self._serve = serve
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while self._serve(self, self.queue.get()):
            pass


def _below(error: BaseException) -> TracebackType | None:
    """Where it was raised, as far as that is not here."""
    return error.__traceback__.tb_next if error.__traceback__ is not None else None


def _frame(run: int, task_id: int, ended: Ended, metrics: Mapping[str, Any]) -> EndedFrame:
    if isinstance(ended, Failed):
        return EndedFrame(
            run=run,
            task_id=task_id,
            reason=ended.reason,
            is_retried=ended.is_retried,
            is_released=ended.is_released,
        )
    finished = replace(ended, metrics={**metrics, **ended.metrics})
    return EndedFrame(run=run, task_id=task_id, finished=finished)
