"""A ledger being changed: what every transition is made of. Pure.

A change collects new states and the lines that the log gets of them, and gives the ledger that
results: the very same one if nothing has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.queue.ledger import NULL, Failure, Happening, Ledger, LogLine, Status, TaskState
from penstock.store.time import Interval

LOG_LINES_MAX: Final = 1000
"""The log keeps the last lines; a ledger is rewritten whole and must not grow for ever."""

_replace = msgspec.structs.replace

_HAPPENINGS = {
    Status.SUCCEEDED: Happening.SUCCEEDED,
    Status.FAILED: Happening.FAILED,
    Status.CANCELLED: Happening.CANCELLED,
    Status.EXPIRED: Happening.EXPIRED,
}


class Change:
    """A ledger being changed: states, leases, and the lines that the log will get."""

    def __init__(self, before: Ledger, now: Interval) -> None:
        self._before = before
        self._at_ms = ms_of(now.latest)
        self._lines: list[LogLine] = []
        self.tasks = list(before.tasks)
        self.leases = dict(before.leases)

    def set(
        self, place: int, state: TaskState, what: Happening, *, who: str, note: str = ""
    ) -> None:
        self.tasks[place] = state
        line = LogLine(self._at_ms, what, (place, place), state.attempt, who, note)
        self._lines.append(line)

    def settle(
        self,
        place: int,
        status: Status,
        *,
        who: str,
        result: msgspec.Raw = NULL,
        failure: Failure | None = None,
        is_ref: bool = False,
    ) -> None:
        task = self.tasks[place]
        state = TaskState(
            status=status,
            attempt=task.attempt,
            given_back=task.given_back,
            claim=task.claim,
            at_ms=self._at_ms,
            result=result,
            failure=failure,
            is_ref=is_ref,
            progress=task.progress,
        )
        note = ""
        if failure is not None:
            note = failure.message if status is Status.CANCELLED else failure.error
        self.set(place, state, _HAPPENINGS[status], who=who, note=note)

    def ledger(self) -> Ledger:
        if not self._lines:
            return self._before
        held = {task.claim for task in self.tasks if task.status is Status.CLAIMED}
        return _replace(
            self._before,
            tasks=tuple(self.tasks),
            leases={name: lease for name, lease in self.leases.items() if name in held},
            log=(self._before.log + _merged(self._lines))[-LOG_LINES_MAX:],
        )


def _merged(lines: Sequence[LogLine]) -> tuple[LogLine, ...]:
    """One line for all to whom the same thing happened."""
    merged: dict[tuple[str, int, str, str], LogLine] = {}
    for line in sorted(lines, key=lambda line: line.runs):
        kind = (line.what, line.attempt, line.who, line.note)
        known = merged.get(kind)
        runs = _joined(known.runs, line.runs) if known else line.runs
        merged[kind] = _replace(line, runs=runs)
    return tuple(merged.values())


def _joined(runs: tuple[int, ...], later: tuple[int, ...]) -> tuple[int, ...]:
    if later[0] == runs[-1] + 1:
        return (*runs[:-1], *later[1:])
    return runs + later


def ms_of(seconds: float) -> int:
    """Milliseconds, as ledgers have them."""
    return int(seconds * 1000)
