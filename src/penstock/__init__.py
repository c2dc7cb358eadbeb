"""Penstock: event-driven data pipelines on a bucket, a Postgres and Spark."""

from penstock.queue.client import Queue, Task
from penstock.queue.config import QueueConfig
from penstock.queue.polling import Polling
from penstock.queue.retry import Retry
from penstock.queue.settings import WorkerSettings
from penstock.queue.worker import Worker

__all__ = ["Polling", "Queue", "QueueConfig", "Retry", "Task", "Worker", "WorkerSettings"]
