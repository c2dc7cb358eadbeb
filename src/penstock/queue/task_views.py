"""What users are shown of a task: its state and its history, in words and in seconds. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.queue.ids import PackAt, TaskId
from penstock.queue.ledger import (
    Ledger,
    LedgerEvent,
    LedgerLogLine,
    LedgerProgress,
    QueueTaskState,
    QueueTaskStatus,
)
from penstock.queue.pack import Pack, PayloadReference
from penstock.queue.transitions import history

CANCELLER = "cancel"
"""Who cancels, in the log."""
DELAYED = "delayed"
"""What is ready, but not before a time: of a view alone."""
_READY, *_OTHERS = (each.word for each in QueueTaskStatus)
STATES = (_READY, DELAYED, *_OTHERS)
"""The words for where a task is."""


@dataclass(frozen=True, slots=True)
class TaskView:
    """A task as it was a moment ago. Times are the store's, in seconds since the epoch."""

    id: TaskId
    type: str
    status: str
    """One of `STATES`."""
    attempt: int
    """The number of the last attempt; 0 before the first."""
    input: Any
    result: Any
    error: str
    """The class of the exception that the last attempt ended with, if it did."""
    message: str
    trace: str
    key: str | None
    submitted_at: float
    due_at: float | None
    settled_at: float | None
    cancel_asked: bool
    priority: int = 0
    limit: str = ""
    """The key of the limit that it falls under."""
    expires_at: float | None = None
    """What has not begun by then never will."""
    tags: Mapping[str, str] = field(default_factory=dict)
    batch: str = ""
    progress: LedgerProgress | None = None
    """How far its last attempt says it is."""
    input_ref: PayloadReference | None = None
    """Where its input is, if that is large; `input` is None then, unless it was fetched."""
    result_ref: PayloadReference | None = None
    problem: str = ""
    """Why its input or its result could not be fetched, if so."""

    @property
    def is_settled(self) -> bool:
        """Whether it has ended for good."""
        return self.settled_at is not None


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """One thing that happened to a task."""

    at: float
    what: str
    attempt: int
    who: str
    note: str


def view_of_pack(at: PackAt, place: int, pack: Pack, *, now: float) -> TaskView:
    """A task that nobody has touched."""
    due_at = pack.due_ms / 1000 if pack.due_ms else None
    is_ref = place in pack.refs
    return TaskView(
        id=at.task(place),
        type=at.type,
        status=DELAYED if due_at is not None and due_at > now else QueueTaskStatus.READY.word,
        attempt=0,
        input=None if is_ref else _plain(pack.inputs[place]),
        result=None,
        error="",
        message="",
        trace="",
        key=pack.key,
        submitted_at=pack.submitted_ms / 1000,
        due_at=due_at,
        settled_at=None,
        cancel_asked=False,
        **_facts(pack),
        input_ref=_reference(pack.inputs[place]) if is_ref else None,
    )


def view_of_ledger(at: PackAt, place: int, ledger: Ledger, pack: Pack | None) -> TaskView:
    """A task by its ledger; the pack tells what an unsettled ledger does not."""
    task = ledger.tasks[place]
    said = ledger if ledger.submitted_ms or pack is None else pack
    is_ref = place in said.refs
    inputs = ledger.inputs or (pack.inputs if pack else ())
    due_ms = task.at_ms if task.status is QueueTaskStatus.RETRYING else (pack or ledger).due_ms
    submitted_ms = ledger.submitted_ms or (pack.submitted_ms if pack else at.submitted_ms or 0)
    return TaskView(
        id=at.task(place),
        type=at.type,
        status=word_of(task),
        attempt=task.attempt,
        input=_plain(inputs[place]) if inputs and not is_ref else None,
        result=_plain(task.result)
        if task.status is QueueTaskStatus.SUCCEEDED and not task.is_ref
        else None,
        error=task.failure.error if task.failure else "",
        message=task.failure.message if task.failure else "",
        trace=task.failure.trace if task.failure else "",
        key=ledger.key or (pack.key if pack else None),
        submitted_at=submitted_ms / 1000,
        due_at=due_ms / 1000 if due_ms else None,
        settled_at=task.at_ms / 1000 if task.status.settled else None,
        cancel_asked=task.cancel,
        **_facts(said),
        progress=task.progress,
        input_ref=_reference(inputs[place]) if inputs and is_ref else None,
        result_ref=_reference(task.result) if task.is_ref else None,
    )


def word_of(task: QueueTaskState) -> str:
    """Where a task is: one that its handler has rescheduled is delayed, and has not failed."""
    if task.status is QueueTaskStatus.RETRYING and task.failure is None:
        return DELAYED
    return task.status.word


def _facts(said: Pack | Ledger) -> dict[str, Any]:
    """What a pack, or the record of one, says of its tasks."""
    return {
        "priority": said.priority,
        "limit": said.limit,
        "expires_at": said.expires_ms / 1000 if said.expires_ms else None,
        "tags": said.tags,
        "batch": said.batch,
    }


def events_of(view: TaskView, ledger: Ledger | None, place: int) -> list[TaskEvent]:
    """The history of a task, oldest first."""
    lines: Sequence[LedgerLogLine] = history(ledger, place) if ledger else ()
    first = TaskEvent(view.submitted_at, "submitted", 0, "", f"key {view.key}" if view.key else "")
    told = [
        TaskEvent(line.at_ms / 1000, str(line.what), line.attempt, line.who, line.note)
        for line in lines
        # To cancel what nobody runs, it is held for a moment: no attempt was made.
        if (line.who, line.what) != (CANCELLER, LedgerEvent.CLAIMED)
    ]
    return [first, *told]


def _reference(raw: msgspec.Raw) -> PayloadReference:
    return msgspec.json.decode(bytes(raw), type=PayloadReference)


def _plain(raw: msgspec.Raw) -> Any:
    return json.loads(bytes(raw))
