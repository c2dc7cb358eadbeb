"""The partitions of a dataset as cells of a heat map: compact arrays for the script that draws it.

A cell is a partition that is published, or that should be: a task waits, runs or is dead, or inputs
have it and there is no task. Where a newer task is at a partition that is published, the task's
state is shown. Cells are in the order of their ranges, then of their keys; of more than there may
be, the last ones are kept, which are the newest. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from penstock.dispatcher.views.partitions import CELLS_MAX, Blocking, Cell, Lacking

STATES: Final = ("published", "queued", "running", "retrying", "dead", "missing")
"""What a cell may be; the script is given places in this list."""
_PLACES: Final = {name: place for place, name in enumerate(STATES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """What is drawn, and how many of which state, those that were left out too."""

    keys: Sequence[str]
    states: Sequence[int]
    rows: Sequence[int | None]
    ages: Sequence[int | None]
    """Seconds since it was published; None for what is not."""
    tasks: Mapping[int, int]
    """The task that is at a cell, by the place of the cell."""
    counts: Mapping[str, int]
    left_out: int

    def data(self) -> dict[str, Any]:
        """As the script has it."""
        return {
            "names": STATES,
            "keys": self.keys,
            "states": self.states,
            "rows": self.rows,
            "ages": self.ages,
            "tasks": self.tasks,
            "leftOut": self.left_out,
        }


@dataclass(slots=True)
class _Cell:
    key: str
    start: int | None
    state: str = "published"
    rows: int | None = None
    age: int | None = None
    task: int | None = None


def arranged(
    cells: Sequence[Cell],
    blocking: Sequence[Blocking],
    lacking: Sequence[Lacking],
    *,
    now: datetime,
    cells_max: int = CELLS_MAX,
) -> Cells:
    """All of them in order."""
    found = {
        each.partition_key: _Cell(
            each.partition_key,
            each.start,
            rows=each.rows,
            age=max(0, int((now - each.published_at).total_seconds())),
        )
        for each in cells
    }
    for task in blocking:
        key = task.partition_key or ""
        cell = found.setdefault(key, _Cell(key, task.start))
        # The latest task of a partition says how it is.
        if cell.task is None or task.id > cell.task:
            cell.state, cell.task = task.status, task.id
    for each in lacking:
        key = each.partition_key
        found.setdefault(key, _Cell(key, each.start, state="missing"))
    ordered = sorted(
        found.values(), key=lambda cell: (cell.start is None, cell.start or 0, cell.key)
    )
    shown = ordered[-cells_max:]
    return Cells(
        keys=[each.key for each in shown],
        states=[_PLACES[each.state] for each in shown],
        rows=[each.rows for each in shown],
        ages=[each.age for each in shown],
        tasks={place: each.task for place, each in enumerate(shown) if each.task is not None},
        counts=Counter(each.state for each in ordered),
        left_out=len(ordered) - len(shown),
    )
