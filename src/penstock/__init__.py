"""Penstock: event-driven data pipelines on a bucket, a Postgres and Spark."""

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.kernel.errors import (
    BatchNotFound,
    InvalidInput,
    NotSettled,
    OutcomeUnknown,
    PayloadLost,
    PenstockError,
    QueueDrained,
    QueueNotFound,
    ScheduleNotFound,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    WorkerIdConflict,
    WorkerLeaseLost,
)
from penstock.queue.batches.api import Batch
from penstock.queue.batches.documents import BatchView
from penstock.queue.client import Queue, Task
from penstock.queue.config import QueueConfig
from penstock.queue.running.handlers import TaskContext
from penstock.queue.running.polling import Polling
from penstock.queue.running.retry import Retry
from penstock.queue.schedules.document import ScheduleView
from penstock.queue.settings import DispatchSettings, WorkerSettings
from penstock.queue.submission import NotAllSubmitted
from penstock.queue.views import TaskEvent, TaskView
from penstock.queue.worker import Worker

if TYPE_CHECKING:
    from penstock.dispatcher.client import Client
    from penstock.runtimes.task import DoNotRetry

__all__ = [
    "Batch",
    "BatchNotFound",
    "BatchView",
    "Client",
    "DispatchSettings",
    "DoNotRetry",
    "InvalidInput",
    "NotAllSubmitted",
    "NotSettled",
    "OutcomeUnknown",
    "PayloadLost",
    "PenstockError",
    "Polling",
    "Queue",
    "QueueConfig",
    "QueueDrained",
    "QueueNotFound",
    "Retry",
    "ScheduleNotFound",
    "ScheduleView",
    "Task",
    "TaskCancelled",
    "TaskContext",
    "TaskEvent",
    "TaskFailed",
    "TaskNotFound",
    "TaskView",
    "Worker",
    "WorkerIdConflict",
    "WorkerLeaseLost",
    "WorkerSettings",
]


_LATER = {"Client": "penstock.dispatcher.client", "DoNotRetry": "penstock.runtimes.task"}


def __getattr__(name: str) -> object:
    # Who has a queue and no dispatcher does not wait for what only a dispatcher needs.
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
