"""Penstock: event-driven data pipelines on a bucket, a Postgres and Spark."""

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.kernel.errors import (
    BatchNotFound,
    InvalidInput,
    KeyConflict,
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
from penstock.kernel.handler_errors import DoNotRetry, Reschedule

if TYPE_CHECKING:
    from penstock.dispatcher.client import Client
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

__all__ = [
    "Batch",
    "BatchNotFound",
    "BatchView",
    "Client",
    "DispatchSettings",
    "DoNotRetry",
    "InvalidInput",
    "KeyConflict",
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
    "Reschedule",
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


_LATER = {
    "Batch": "penstock.queue.batches.api",
    "BatchView": "penstock.queue.batches.documents",
    "Client": "penstock.dispatcher.client",
    "DispatchSettings": "penstock.queue.settings",
    "NotAllSubmitted": "penstock.queue.submission",
    "Polling": "penstock.queue.running.polling",
    "Queue": "penstock.queue.client",
    "QueueConfig": "penstock.queue.config",
    "Retry": "penstock.queue.running.retry",
    "ScheduleView": "penstock.queue.schedules.document",
    "Task": "penstock.queue.client",
    "TaskContext": "penstock.queue.running.handlers",
    "TaskEvent": "penstock.queue.views",
    "TaskView": "penstock.queue.views",
    "Worker": "penstock.queue.worker",
    "WorkerSettings": "penstock.queue.settings",
}


def __getattr__(name: str) -> object:
    # Each name is imported when it is first asked for: the command line answers at once, and who
    # has a queue and no dispatcher does not wait for what only a dispatcher needs.
    if name in _LATER:
        found = getattr(import_module(_LATER[name]), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
