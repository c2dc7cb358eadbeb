"""What the DAG has to know of runtimes: which there are, what they run, and what they accept.

The registry itself is made elsewhere, from settings and entry points; `checks` sees it through this
protocol. The runtime `dispatcher` is part of the platform and is checked here whatever a registry
says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock.dispatcher.dag.model import Dag, Job


@dataclass(frozen=True, slots=True)
class Fault:
    """Something in a job that its runtime does not accept."""

    field: str
    """The path inside the job, as in `config.sql` or `resources.memory`."""
    message: str
    """A sentence that says what is wrong and what to do."""


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

    def queued(self, dag: Dag) -> Dag:
        """The DAG, whose jobs say in which queue their tasks wait, unless it is the default."""
        ...
