"""The lifecycle of tasks as a few dictionaries: what the database is compared with.

Pure and small enough to be read at once. Every method answers what the real call must answer, as
a status or a `Why`, and moves the model. Pauses before retries are drawn by the database, so the
model is told them and checks only their bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from penstock.dispatcher.tasks.completion import RELEASES_MAX
from penstock.dispatcher.tasks.model import Fence, PublishOutcome, TaskRefusalReason
from penstock.protocol.base import TaskStatus

ATTEMPTS = 2
HEARTBEAT = timedelta(seconds=10)
PAUSE_MIN, PAUSE_MAX = timedelta(seconds=3), timedelta(seconds=4)
"""A first pause of four seconds that is also the longest, and a quarter shorter by luck."""
WAITING = (TaskStatus.QUEUED, TaskStatus.RETRYING)

Saying = tuple[str, bool]
Answer = TaskStatus | TaskRefusalReason


@dataclass
class ModelTask:
    """A task."""

    due: datetime
    status: TaskStatus = TaskStatus.QUEUED
    attempt: int = 0
    limit: int = ATTEMPTS
    releases: int = 0
    token: str | None = None
    worker: str | None = None
    expires: datetime | None = None
    cancel_asked: bool = False
    said: dict[tuple[int, str], tuple[Saying, TaskStatus]] = field(default_factory=dict)

    @property
    def seen(self) -> tuple[object, ...]:
        """What a row of the database must be."""
        return self.status, self.attempt, self.cancel_asked, self.worker, self.token, self.expires


@dataclass
class Model:
    """All tasks, and the one partition that they publish."""

    now: datetime
    tasks: dict[int, ModelTask] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    head: int = 0
    revision: int = 0

    def is_claimable(self, task_id: int) -> bool:
        task = self.tasks[task_id]
        return task.status in WAITING and task.due <= self.now

    def claimable(self) -> list[int]:
        """In the order in which they are claimed."""
        found = [each for each in self.tasks if self.is_claimable(each)]
        return sorted(found, key=lambda each: (self.tasks[each].due, each))

    def claim_refusal(self, task_id: int) -> TaskRefusalReason:
        match self.tasks[task_id].status:
            case TaskStatus.RUNNING:
                return TaskRefusalReason.RUNNING
            case TaskStatus.QUEUED | TaskStatus.RETRYING:
                return TaskRefusalReason.NOT_DUE
            case _:
                return TaskRefusalReason.OVER

    def claimed(self, task_id: int, token: str, worker: str) -> None:
        task = self.tasks[task_id]
        task.status, task.token, task.worker = TaskStatus.RUNNING, token, worker
        task.attempt += 1
        task.expires = self.now + HEARTBEAT

    def is_current(self, fence: Fence) -> bool:
        task = self.tasks[fence.task_id]
        return task.status is TaskStatus.RUNNING and (task.attempt, task.token) == (
            fence.attempt,
            fence.lease_token,
        )

    def refusal(self, task_id: int) -> TaskRefusalReason:
        return (
            TaskRefusalReason.STALE
            if self.tasks[task_id].status in (*WAITING, TaskStatus.RUNNING)
            else TaskRefusalReason.OVER
        )

    def heartbeat(self, fence: Fence) -> Answer:
        if not self.is_current(fence):
            return self.refusal(fence.task_id)
        self.tasks[fence.task_id].expires = self.now + HEARTBEAT
        return TaskStatus.RUNNING

    def end(self, fence: Fence, saying: Saying) -> tuple[Answer, bool]:
        """What an end answers, and whether it is the first to say so."""
        task = self.tasks[fence.task_id]
        if self.is_current(fence):
            status = self._status_after(task, saying)
            task.said[fence.attempt, fence.lease_token] = saying, status
            self.leave(task, status)
            if status is TaskStatus.QUEUED:
                task.limit, task.releases, task.due = task.limit + 1, task.releases + 1, self.now
            return status, True
        before = task.said.get((fence.attempt, fence.lease_token))
        if before is None:
            return self.refusal(fence.task_id), False
        return (before[1] if before[0] == saying else TaskRefusalReason.DIFFERENT), False

    def _status_after(self, task: ModelTask, saying: Saying) -> TaskStatus:
        kind, is_retried = saying
        if task.cancel_asked:
            return TaskStatus.CANCELLED
        if kind == "released" and task.releases < RELEASES_MAX:
            return TaskStatus.QUEUED
        if kind not in ("failed", "released"):
            return TaskStatus.SUCCEEDED
        return (
            TaskStatus.RETRYING if is_retried and task.attempt < task.limit else TaskStatus.FAILED
        )

    def leave(self, task: ModelTask, status: TaskStatus) -> None:
        task.status = status
        task.token = task.worker = task.expires = None

    def publish(self, task_id: int) -> PublishOutcome:
        if task_id <= self.head:
            return PublishOutcome.SUPERSEDED
        self.head, self.revision = task_id, self.revision + 1
        return PublishOutcome.PUBLISHED

    def retry(self, task_id: int, due: datetime) -> None:
        assert self.now + PAUSE_MIN <= due <= self.now + PAUSE_MAX
        self.tasks[task_id].due = due

    def cancel(self, task_id: int) -> Answer:
        task = self.tasks[task_id]
        if task.status in WAITING:
            task.status = TaskStatus.CANCELLED
        elif task.status is TaskStatus.RUNNING:
            task.cancel_asked = True
        return (
            task.status
            if task.status in (TaskStatus.RUNNING, TaskStatus.CANCELLED)
            else TaskRefusalReason.OVER
        )

    def replay(self, task_id: int) -> Answer:
        task = self.tasks[task_id]
        if task.status is not TaskStatus.FAILED:
            return TaskRefusalReason.NOT_DEAD
        task.status, task.due, task.limit = TaskStatus.QUEUED, self.now, task.attempt + ATTEMPTS
        task.releases = 0
        return TaskStatus.QUEUED

    def reap(self) -> dict[int, TaskStatus]:
        reaped = {}
        for task_id, task in self.tasks.items():
            if task.expires is not None and task.expires <= self.now:
                reaped[task_id] = self._status_after(task, ("failed", True))
                self.leave(task, reaped[task_id])
        return reaped
