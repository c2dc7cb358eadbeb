"""What there is to know of a dispatcher in numbers: values only.

All of them are read in one transaction. Whatever can be long is counted to 10,000.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from penstock.dispatcher.wire.steering import OperatorLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """A job of the DAG in force that runs something."""

    name: str
    normal: int
    """Waiting tasks of normal priority."""
    bulk: int
    running: int
    dead: int
    oldest_seconds: float
    """How long the oldest task that is due has waited."""
    is_paused: bool
    is_pressed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One look at everything."""

    now: datetime
    operators: tuple[OperatorLoad, ...]
    jobs: tuple[JobFigures, ...]
    events_pending: int
    events_oldest_seconds: float
    events_last_minute: int
    outbox_pending: int
    """Rows that are due and not sent."""
    outbox_parked: int
    workers: int
    """Those that were heard of in the last minute."""
    settled_last_minute: Mapping[str, int]
    """Tasks that have ended in the last minute, by their status."""
    queues: Mapping[str, int] = field(default_factory=dict)
    """How many tasks of each queue should run at once: what its workers are scaled by."""
