"""What goes into a decision about pressure and what comes out of it: values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CAUSE = "pressure:"
"""What the cause of a pause begins with if a job downstream is pressed; its name follows."""


class Scope(StrEnum):
    """What of a job is paused."""

    BULK = "bulk"
    """Its bulk tasks."""
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Measure:
    """What a job's queue is at one moment. Tasks of backfills are neither counted nor timed."""

    depth: int = 0
    """Waiting tasks, counted to a bound that is above every threshold of the job."""
    oldest_seconds: float = 0.0
    """How long the oldest task that is due has waited."""
    has_bulk: bool = False
    """Whether bulk tasks of the job wait or run, whatever the priority of the job."""


@dataclass(frozen=True, slots=True)
class State:
    """Whether a job with limits is pressed, and what its upstream gives way by."""

    scope: Scope | None = None
    """What is paused upstream; None if the job is not pressed."""
    reason: str | None = None
    """Why; it stands as long as the scope does."""

    @property
    def is_pressed(self) -> bool:
        return self.scope is not None


@dataclass(frozen=True, slots=True, order=True)
class Pause:
    """A job that is to start nothing, or nothing that is bulk, because of one downstream."""

    job: str
    cause: str
    scope: Scope
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Who is pressed, of all jobs with limits, and who pauses for it."""

    states: dict[str, State]
    pauses: frozenset[Pause]
