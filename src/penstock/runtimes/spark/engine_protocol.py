"""The interfaces inside a host: its engine, what the engine reports, and its sessions of Spark.

Imports no Spark. The host gives the engine a thread, a session and some work, which is one task
or a batch of them. The engine reports by a `RunReporter`: it asks which tasks are still wanted,
and says which ones it works for now, which phase it is in (`PhaseTimer` counts how long each
took), and how each has ended, as soon as it has: what comes after cannot undo it.

A *job group* is a name under which Spark jobs are started, cancelled and counted. A thread that
works for tasks enters one; what others do under other names never touches it. `classic` has
sessions of a JVM that the host starts, `connect` has sessions of a Connect server. Called by
`run_executor`, in the host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.runtimes.base import AttemptWork, WorkResult

if TYPE_CHECKING:
    from penstock.kernel.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFailure:
    """How work ended that failed: a sentence for people, and whether another attempt may help."""

    reason: str
    is_retried: bool = True
    is_released: bool = False
    """Whether it is released: this worker cannot run it, another may."""


WorkOutcome = WorkResult | WorkFailure


class RunReporter(Protocol):
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

    def end(self, task_id: int, ended: WorkOutcome) -> None:
        """How a task has ended, which is passed on at once; it is told once of each."""
        ...

    def phase(self, name: str) -> None:
        """What is being done now, in a word: `reading`, `running`, `checking`, `writing`."""
        ...


class WorkEngine(Protocol):
    """The engine, as the host sees it: `penstock.runtimes.spark.engine.Engine`.

    Made once a host, with `Engine(settings, session)`. `run` is called by several threads at once.
    """

    def run(self, session: Any, works: Sequence[AttemptWork], tell: RunReporter) -> None:
        """Run these, which are of one job and generation, and tell how each has ended.

        What it raises, or its silence, is the failure of the tasks that have not.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGroup:
    """A name for Spark jobs. `title` says to people what they are for."""

    name: str
    title: str
    tasks: str
    """The tasks that they are for, in a few words, for lines of the log."""


class SparkSessions(Protocol):
    """Sessions of Spark. `enter` and `leave` are called by the thread that uses the session."""

    spark: str
    java: str
    jvm: int
    base: Any
    """The session that the engine is made with."""

    def fresh(self) -> Any:
        """A session for one run, in which nothing is."""
        ...

    def enter(self, session: Any, group: JobGroup) -> None:
        """From now on jobs of this thread are of this group."""
        ...

    def leave(self, session: Any) -> None:
        """The thread works for nobody, and the session is not used again."""
        ...

    def cancel(self, group: str) -> None:
        """Cancel all jobs of a group. May be called from any thread, and again."""
        ...

    def progress(self, groups: Sequence[str]) -> Mapping[str, int]:
        """How far jobs of these groups are: stages, stages_done, tasks, tasks_done."""
        ...

    def metrics(self, groups: Sequence[str]) -> Mapping[str, Any]:
        """What jobs of these groups, which have ended, took."""
        ...

    def why_dead(self) -> str:
        """Why no session is of use any more; empty if they are."""
        ...

    def stop(self) -> None:
        """End all sessions."""
        ...


class PhaseTimer:
    """The phases of one run of a plan. A phase that is entered again goes on."""

    def __init__(self, tell: RunReporter, clock: Clock) -> None:
        self._tell = tell
        self._clock = clock
        self._took: dict[str, float] = {}
        self._name = ""
        self._since = 0.0

    def enter(self, name: str) -> None:
        """From here on it is this."""
        self._close()
        self._name, self._since = name, self._clock.monotonic()
        self._tell.phase(name)

    def seconds(self) -> dict[str, float]:
        """How long each phase took until now, as figures: `reading_seconds`, …"""
        self._close()
        return {f"{name}_seconds": round(took, 3) for name, took in self._took.items()}

    def _close(self) -> None:
        if self._name:
            now = self._clock.monotonic()
            self._took[self._name] = self._took.get(self._name, 0.0) + now - self._since
            self._since = now
