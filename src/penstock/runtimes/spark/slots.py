"""The threads of a host that run work, each with a session of its own.

A thread takes a run, gives it to the engine, and says how each of its tasks ended. It is used again
unless it was interrupted: what an exception that came from nowhere has left in it is not known. A
session is used again if it is as it was (`Sessions.leave`).

After a failure it is asked whether the sessions are of use at all. If not, the task is no worse
than the others: the host is broken, says so once, and ends; nothing is said of the task alone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Protocol

from penstock.runtimes.calling import told
from penstock.runtimes.secrets import print_error
from penstock.runtimes.spark.frames import Ended as EndedFrame
from penstock.runtimes.spark.frames import FromHost, Over
from penstock.runtimes.spark.printing import Printing
from penstock.runtimes.spark.runs import Run
from penstock.runtimes.spark.sessions import Sessions
from penstock.runtimes.spark.telling import Ended, Failed, Running

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.25
_IDLE_SECONDS: Final = 5.0


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
        self._number = 0
        self._dropping = threading.Event()
        threading.Thread(target=self._cancel, name="penstock-cancel", daemon=True).start()

    @property
    def runs(self) -> tuple[Run, ...]:
        """Those that are not over."""
        with self._lock:
            return tuple(self._runs.values())

    def start(self, run: Run) -> None:
        """Have a thread work for this run."""
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
        ended, fallback = self._ran(slot, run)
        if not run.is_vain and any(isinstance(each, Failed) for each in ended.values()):
            reason = self._sessions.why_dead()
            if reason:
                self._host.broken(reason)
                return False
        metrics = {} if run.is_vain else self._metrics(run)
        for work in run.works:
            if not run.is_dropped(work.task_id):
                outcome = ended.get(work.task_id, fallback)
                self._host.send(_frame(run.number, work.task_id, outcome, metrics))
        try:
            if not self._sessions.leave(slot.session):
                slot.session = None
        except Exception:  # noqa: BLE001 - the run has ended all the same
            _log.warning("a session could not be cleared", exc_info=True)
            slot.session = None
        with self._lock:
            del self._runs[run.number]
            if not run.was_interrupted:
                self._idle.append(slot)
        self._host.send(Over(run=run.number))
        return not run.was_interrupted

    def _ran(self, slot: _Slot, run: Run) -> tuple[Mapping[int, Ended], Failed]:
        """How the tasks of a run ended, and how those did of which nothing is said."""
        silence = Failed(reason="The engine said nothing of this task.")
        with self._printing.to(run.log):
            try:
                try:
                    if slot.session is None:
                        slot.session = self._sessions.fresh()
                    run.enter(slot.session, dropping=self._dropping.set)
                    return self._engine.run(slot.session, run.works, run), silence
                finally:
                    run.leave()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the end of the run
                # What came late may have come into the leaving itself.
                run.leave()
                print_error(error, [v for work in run.works for v in work.secrets.values()])
                reason, is_retried = told(error.with_traceback(_below(error)))
                failed = Failed(reason=reason, is_retried=is_retried)
                return {work.task_id: failed for work in run.works}, failed

    def _metrics(self, run: Run) -> Mapping[str, Any]:
        try:
            said = dict(self._sessions.metrics(run.groups))
        except Exception:  # noqa: BLE001 - figures are not worth a failure
            _log.warning("there are no figures of run %s", run.number, exc_info=True)
            return {}
        # Figures of Spark jobs that several tasks share are those of all of them.
        return {**said, "shared_by": len(run.works)} if len(run.works) > 1 else said

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
