"""Penstock: event-driven data pipelines on a bucket, a Postgres and Spark."""

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

__all__ = [
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
