"""Penstock: event-driven data pipelines on a bucket, a Postgres and Spark."""

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.kernel.errors import (
    InvalidInput,
    NotSettled,
    OutcomeUnknown,
    PenstockError,
    QueueNotFound,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
)
from penstock.queue.client import Queue, Task
from penstock.queue.config import QueueConfig
from penstock.queue.running.handlers import TaskContext
from penstock.queue.running.polling import Polling
from penstock.queue.running.retry import Retry
from penstock.queue.settings import WorkerSettings
from penstock.queue.submission import NotAllSubmitted
from penstock.queue.views import TaskEvent, TaskView
from penstock.queue.worker import Worker

if TYPE_CHECKING:
    from penstock.dispatcher.client import Client
    from penstock.runtimes.task import DoNotRetry

__all__ = [
    "Client",
    "DoNotRetry",
    "InvalidInput",
    "NotAllSubmitted",
    "NotSettled",
    "OutcomeUnknown",
    "PenstockError",
    "Polling",
    "Queue",
    "QueueConfig",
    "QueueNotFound",
    "Retry",
    "Task",
    "TaskCancelled",
    "TaskContext",
    "TaskEvent",
    "TaskFailed",
    "TaskNotFound",
    "TaskView",
    "Worker",
    "WorkerSettings",
]


_LATER = {"Client": "penstock.dispatcher.client", "DoNotRetry": "penstock.runtimes.task"}


def __getattr__(name: str) -> object:
    # Who has a queue and no dispatcher does not wait for what only a dispatcher needs.
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
