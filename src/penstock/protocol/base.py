"""What requests and answers have in common: bounds, headers, parameters of paths and queries."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

WORKER_HEADER = "X-Penstock-Worker"
"""Who claims or sends events; `Authorization: Bearer` has the proof. See `protocol.identity`."""

TASK_HEADER: Final = "X-Trace-Task-Capability"
"""The capability token of an attempt, for calls about one task."""

PROTOCOL_HEADER: Final = "X-Penstock-Protocol"
"""Which protocol who calls speaks; who does not say so is not judged by it. See decision 0025."""
PROTOCOL: Final = 4
"""What this release speaks: one more whenever a request may say what an earlier release refuses."""
PROTOCOL_MIN: Final = 1
"""The earliest that a dispatcher of this release still serves."""

Capability = str
"""A capability token: see `penstock.tokens`. Any text: each is judged by itself, and a wrong one is
the answer of its own entry, never of the whole call."""
TaskNumber = Annotated[int, Meta(ge=1, le=2**63 - 1)]
AttemptNumber = Annotated[int, Meta(ge=1, le=2**31 - 1)]
# Postgres has no NUL. Keys and ids are judged one by one, where each has its own answer.
HELD: Final = r"^[^\u0000]*$"

LeaseToken = Annotated[str, Meta(min_length=1, max_length=100, pattern=HELD)]
Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=HELD)]
PartitionKey = Annotated[str, Meta(min_length=1, max_length=500)]
EventId = Annotated[str, Meta(min_length=1, max_length=900)]
Payload = dict[str, Any]
"""What comes with an event; its bounds are those of `protocol.events`."""
Uuid = Annotated[str, Meta(pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", max_length=36)]


_HIDDEN: Final = frozenset({"token", "lease_token", "secret_key", "session_token"})
"""Fields that prove something: they are in no text that may end up in a log."""


class _Said(msgspec.Struct):
    """What is sent, in either direction. Its text hides secrets."""

    def __repr__(self) -> str:
        shown = (
            f"{name}={'…' if name in _HIDDEN else repr(getattr(self, name))}"
            for name in self.__struct_fields__
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class Ask(_Said, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A request, or a part of one."""


class Answer(_Said, kw_only=True):
    """An answer, or a part of one."""


Page = Annotated[int, Meta(ge=1, le=1000)]


class TaskStatus(StrEnum):
    """The status of a task of a pipeline, as Postgres, HTTP, metrics and people have it.

    Members are called as those of `queue.ledger.QueueTaskStatus`; values are what is stored and
    sent (decision 0122).
    """

    QUEUED = "queued"
    RUNNING = "running"
    RETRYING = "retrying"
    SUCCEEDED = "completed"
    FAILED = "dead"
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


class HealthAnswer(Answer):
    status: str
    """`ok` or `ready`; whoever is not is answered with a problem."""
