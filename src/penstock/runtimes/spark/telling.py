"""What the host and the engine say to each other while work runs. Imports no Spark.

The host gives the engine a thread, a session and some work, which is one task or a batch of them.
The engine asks and tells by a `Telling`: which tasks are still wanted, which ones it works for now,
what it is doing, and how each has ended, as soon as it has: what comes after cannot undo it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.runtimes.base import Finished, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """How work ended that failed: a sentence for people, and whether another attempt may help."""

    reason: str
    is_retried: bool = True
    is_released: bool = False
    """Whether it is handed back: this worker cannot run it, another may."""


Ended = Finished | Failed


class Telling(Protocol):
    """The host, as the engine sees it. Its methods may be called from the engine's thread only."""

    def is_dropped(self, task_id: int) -> bool:
        """Whether nobody wants this task any more. It is not written then."""
        ...

    def begin(self, task_ids: Collection[int]) -> None:
        """From here on Spark jobs are for these tasks, until the next call.

        If all of them are dropped, then or later, their Spark jobs are interrupted, and after a
        while `Stopped` is raised in the thread; what others do never touches them. At first they
        are for all the tasks of the call. The time limits of these begin, those of others wait.
        """
        ...

    def end(self, task_id: int, ended: Ended) -> None:
        """How a task has ended, which is passed on at once; it is told once of each."""
        ...

    def phase(self, name: str) -> None:
        """What is being done now, in a word: `reading`, `running`, `checking`, `writing`."""
        ...


class Running(Protocol):
    """The engine, as the host sees it: `penstock.runtimes.spark.engine.Engine`.

    Made once a host, with `Engine(settings, session)`. `run` is called by several threads at once.
    """

    def run(self, session: Any, works: Sequence[Work], tell: Telling) -> None:
        """Run these, which are of one job and generation, and tell how each has ended.

        What it raises, or its silence, is the failure of the tasks that have not.
        """
        ...
