"""What a host needs of Spark, whichever kind it is: sessions, and groups of jobs in them.

A *group* is a name under which Spark jobs are started, cancelled and counted. A thread that works
for tasks enters one; what others do under other names never touches it. `classic` has sessions of
a JVM that the host starts, `connect` has sessions of a Connect server. Called by `slots` and
`ticking`, in the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A name for Spark jobs. `title` says to people what they are for."""

    name: str
    title: str
    tasks: str
    """The tasks that they are for, in a few words, for lines of the log."""


class Sessions(Protocol):
    """Sessions of Spark. `enter` and `leave` are called by the thread that uses the session."""

    spark: str
    java: str
    jvm: int
    base: Any
    """The session that the engine is made with."""

    def fresh(self) -> Any:
        """A session for one run, in which nothing is."""
        ...

    def enter(self, session: Any, group: Group) -> None:
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
