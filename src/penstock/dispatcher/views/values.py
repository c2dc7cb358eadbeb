"""What views answer that is not for people: values only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from penstock.dispatcher.wire.steering import JobAnswer


@dataclass(frozen=True, slots=True)
class Live:
    """A generation of a dataset that events are routed for."""

    dataset: str
    generation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A job that a trigger names, with one of its datasets and a live generation of that."""

    job: str
    is_source: bool | None
    dataset: str | None
    generation: str | None
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overall:
    """What the views know of everything."""

    dag_version: int | None
    now: datetime
    jobs: list[JobAnswer]
    events_pending: int
    workers: int
