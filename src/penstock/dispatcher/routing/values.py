"""What goes into routing and what comes out of it: values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """A dataset has moved on: to a cursor, or in one partition, which may be a range.

    An event with the id of an earlier one, of the same dataset and generation, is that one again.
    """

    dataset: str
    generation: str
    event_id: str
    """The source's own name for it."""
    cursor: int | None = None
    partition_key: str | None = None
    start: int | None = None
    end: int | None = None
    payload: Mapping[str, Any] | None = None
    """What comes with it: see `penstock.dispatcher.payloads`."""
    task_id: int | None = None
    """The task that sends it, if it is one."""


class Acceptance(StrEnum):
    """What became of an event."""

    NEW = "new"
    DUPLICATE = "duplicate"
    AUDITED = "audited"
    """It is kept, and no task is made of it."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """An event that is kept."""

    seq: int
    outcome: Acceptance
    why_not: str | None = None
    """Why it was only audited."""
    paused: str | None = None
    """Why its source should send nothing more for now; None if it may."""


class WhyRefused(StrEnum):
    """Why an event was not kept."""

    UNKNOWN_DATASET = "unknown dataset"
    MALFORMED = "malformed"
    NO_RANGE = "no range"
    """It leads to a job that works on ranges, and has none."""


@dataclass(frozen=True, slots=True)
class NotAccepted:
    """An event that was not kept."""

    why: WhyRefused
    detail: str = ""
    place: int | None = None
    """Which one of several was refused, where that refuses all of them."""


class Status(StrEnum):
    """What an event is that is to be routed."""

    PENDING = "pending"
    HELD = "held"
    """It waits for room in a queue with a limit."""


@dataclass(frozen=True, slots=True)
class Routed:
    """What one turn of routing has done."""

    routed: int
    """Events that have reached all who read their dataset."""
    audited: int
    """Events of generations that have left in the meantime."""
    tasks: int
    """Tasks that were not there before."""

    def __add__(self, other: Routed) -> Routed:
        return Routed(
            self.routed + other.routed, self.audited + other.audited, self.tasks + other.tasks
        )
