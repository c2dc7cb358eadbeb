"""Why something was refused: the answer that is not a success, and the problems of a DAG.

`Problem` is RFC 9457. `DagError` is raised once a file, when all of it has been read: its
message is for people; `problems` is for programs, each with its line and field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import InvalidInput
from penstock.protocol.base import Answer
from penstock.protocol.dags import BreakAnswer, DagProblem
from penstock.protocol.work import TaskResult, TaskStateAnswer

SHOWN_MAX: Final = 100
"""How many problems the message has; `problems` has all of them."""


@dataclass(frozen=True, slots=True, order=True)
class DagDiagnostic:
    """One thing that is wrong, and what to do about it. Lines and columns are counted from 1."""

    line: int
    column: int
    field: str
    """The path of the field, as in `jobs.clean.inputs[0].from`; empty for the file itself."""
    message: str


class DagError(InvalidInput):
    """A DAG that cannot be used. `problems` holds at least one, in the order of their lines."""

    def __init__(self, problems: Sequence[DagDiagnostic], *, where: str) -> None:
        self.problems = tuple(sorted(set(problems)))
        self.where = where
        lines = [
            f"{where}:{each.line}: {each.field + ': ' if each.field else ''}{each.message}"
            for each in self.problems
        ]
        count = f"{len(lines)} problems" if len(lines) > 1 else "a problem"
        more = [f"and {len(lines) - SHOWN_MAX} more"] if len(lines) > SHOWN_MAX else []
        super().__init__("\n  ".join([f"{where} has {count}:", *lines[:SHOWN_MAX], *more]))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (self.problems, self.where)


def _rebuilt(problems: Sequence[DagDiagnostic], where: str) -> DagError:
    return DagError(problems, where=where)


class Problem(Answer):
    """Every answer that is not a success, as RFC 9457 has it."""

    type: str
    """Which kind of problem, for programs: a word such as `stale` or `malformed`."""
    title: str
    """What is wrong, in one sentence."""
    status: int
    detail: str = ""
    """What to do, if there is something."""
    field: str = ""
    """The field of the request that is wrong."""
    position: int | None = None
    """Where in the text of a query, in characters from its beginning."""
    state: TaskStateAnswer | None = None
    """What the task is now, where the problem is about one."""
    breaks: list[BreakAnswer] = []
    """What a DAG would break."""
    problems: list[DagProblem] = []
    """What is wrong with a DAG, by line."""
    results: list[TaskResult] = []
    """The answers one by one, where the call was about several tasks."""
