"""What stands in the paths and queries of requests: bounds and defaults of lists, and names."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from penstock.dispatcher.wire.base import HELD, Ask, Name, TaskNumber, Uuid

Page = Annotated[int, Meta(ge=1, le=1000)]


class TaskStatus(StrEnum):
    """Where a task is, as in `tasks.values.Status`."""

    QUEUED = "queued"
    RUNNING = "running"
    RETRYING = "retrying"
    COMPLETED = "completed"
    DEAD = "dead"
    CANCELLED = "cancelled"


class LimitParams(Ask):
    limit: Page = 100


class NumberParams(Ask):
    id: TaskNumber


class NameParams(Ask):
    name: Name


class TasksParams(Ask):
    job: Name | None = None
    status: TaskStatus | None = None
    partition_key: Annotated[str, Meta(min_length=1, max_length=500, pattern=HELD)] | None = None
    limit: Page = 100
    before: TaskNumber | None = None
    """Only tasks with a lower number."""


class PartitionsParams(Ask):
    name: Name
    generation: Uuid | None = None
    """None is the one that readers read."""
    after: Annotated[str, Meta(max_length=500)] | None = None
    """Only partitions with a higher key."""
    limit: Page = 100
