"""What is wrong with a DAG: every problem of a file, each with its line and its field.

`DagError` is raised once a file, when all of it has been looked at. Its message is what people
read; `problems` is for programs, such as an API that answers with fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import InvalidInput

SHOWN_MAX: Final = 100
"""How many problems the message has; `problems` has all of them."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong, and what to do about it. Lines and columns are counted from 1."""

    line: int
    column: int
    field: str
    """The path of the field, as in `jobs.clean.inputs[0].from`; empty for the file itself."""
    message: str


class DagError(InvalidInput):
    """A DAG that cannot be used. `problems` holds at least one, in the order of their lines."""

    def __init__(self, problems: Sequence[Problem], *, where: str) -> None:
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


def _rebuilt(problems: Sequence[Problem], where: str) -> DagError:
    return DagError(problems, where=where)
