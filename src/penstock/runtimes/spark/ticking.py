"""Tells, twice a second, how far runs are, and now and then how much memory the host has.

Called by nobody: a thread of its own, so that nothing that runs has to say it. A Spark that does
not answer holds up this thread and no other.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from penstock.runtimes.guard import session_members
from penstock.runtimes.spark.frames import FromHost, Resident, Told
from penstock.runtimes.spark.runs import Run
from penstock.runtimes.spark.sessions import Sessions
from penstock.runtimes.spark.slots import Slots

_log = logging.getLogger(__name__)

_TICK_SECONDS: Final = 0.5
_RESIDENT_TICKS: Final = 20
_GROUPS_MAX: Final = 20
"""How many of the last groups of a run are looked at: a batch that runs singly has very many."""


class Ticking:
    """A thread that looks at runs until the process ends."""

    def __init__(self, slots: Slots, sessions: Sessions, send: Callable[[FromHost], None]) -> None:
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
                self._send(Resident(resident_bytes(os.getsid(0))))

    def _tell(self, run: Run) -> None:
        try:
            said = {"phase": run.said, **self._sessions.progress(run.groups[-_GROUPS_MAX:])}
        except Exception as error:  # noqa: BLE001 - there is another tick
            _log.debug("no progress of run %s: %s", run.number, error)
            return
        wanted = run.wanted
        if wanted and said != self._told[run.number]:
            self._told[run.number] = said
            self._send(Told(run=run.number, task_ids=wanted, said=said))


def resident_bytes(leader: int) -> int:
    """The memory of all processes of a session; 0 where nobody tells."""
    pages = 0
    for process in session_members(leader):
        try:
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has just ended
    return pages * os.sysconf("SC_PAGE_SIZE")
