"""Penstock: event-driven data pipelines on a bucket, a Postgres and Spark."""

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.kernel.errors import (
    BatchNotFound,
    DoNotRetry,
    InvalidInput,
    KeyConflict,
    NotSettled,
    OutcomeUnknown,
    PayloadLost,
    PenstockError,
    QueueDrained,
    QueueNotFound,
    Reschedule,
    ScheduleNotFound,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    WorkerIdConflict,
    WorkerLeaseLost,
)

if TYPE_CHECKING:
    from penstock.dispatcher.client import Client
    from penstock.queue.batch_marks import BatchView
    from penstock.queue.batches import Batch
    from penstock.queue.client import Queue, Task
    from penstock.queue.config import QueueConfig
    from penstock.queue.execution.handlers import TaskContext
    from penstock.queue.execution.retry import Retry
    from penstock.queue.schedules import ScheduleView
    from penstock.queue.settings import DispatchSettings, Polling, WorkerSettings
    from penstock.queue.submitter import NotAllSubmitted
    from penstock.queue.task_views import TaskEvent, TaskView
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
    "Batch": "penstock.queue.batches",
    "BatchView": "penstock.queue.batch_marks",
    "Client": "penstock.dispatcher.client",
    "DispatchSettings": "penstock.queue.settings",
    "NotAllSubmitted": "penstock.queue.submitter",
    "Polling": "penstock.queue.settings",
    "Queue": "penstock.queue.client",
    "QueueConfig": "penstock.queue.config",
    "Retry": "penstock.queue.execution.retry",
    "ScheduleView": "penstock.queue.schedules",
    "Task": "penstock.queue.client",
    "TaskContext": "penstock.queue.execution.handlers",
    "TaskEvent": "penstock.queue.task_views",
    "TaskView": "penstock.queue.task_views",
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
