"""What the DAG has to know of runtimes: which there are, what they run, and what they accept.

The registry itself is made elsewhere, from settings and entry points; `checks` sees it through this
protocol. The runtime `dispatcher` is part of the platform and is checked here whatever a registry
says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock.dispatcher.dag.model import Job


@dataclass(frozen=True, slots=True)
class Fault:
    """Something in a job that its runtime does not accept."""

    field: str
    """The path inside the job, as in `config.sql` or `resources.memory`."""
    message: str
    """A sentence that says what is wrong and what to do."""


class Partial:
    """`Runtimes` that are not all that there may be: of others nothing is said.

    But what is nearly the name of one of them, and not a longer name such as `process-big`, is a
    slip of the pen, unless it is known to be there.
    """

    def others(self) -> Collection[str]:
        """Runtimes that are there, and of which no more is known."""
        return ()


class Runtimes(Protocol):
    """The runtimes that a DAG may name, besides `dispatcher`."""

    def names(self) -> Collection[str]:
        """All runtimes."""
        ...

    def operators(self, runtime: str) -> Collection[str] | None:
        """The operators of a runtime; None if any operator may be the name of a user's code."""
        ...

    def faults(self, job: Job) -> Iterable[Fault]:
        """What the job's runtime says against its config, resources and other fields."""
        ...
