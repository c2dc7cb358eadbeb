"""The pages of a queue's tasks: the list by status, type, tag or search, and one task.

A list is read from the bucket and shared by all viewers: at most `_PACKS_MAX` packs a read, and
one read in `_LIST_SECONDS`. It has what is in the queue or settled recently, and of failed
tasks the dead letters too. A search matches a task's id, the key of a task if the type is
chosen, or a text in the key, the tags, the input or the error of those that were read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.console.pages.base import (
    ActionResult,
    ConsolePage,
    FormAction,
    PageNotFound,
    PageRequest,
)
from penstock.console.pages.queue_base import QueueParts, path, queues_of, read, task_path, value_of
from penstock.console.renderer import number
from penstock.dispatcher import bucket_queues
from penstock.kernel.errors import InvalidInput, TaskNotFound
from penstock.queue.client import Queue
from penstock.queue.ids import keyed_pack, task_at
from penstock.queue.inspection.task_search import TaskListing, find_tasks
from penstock.queue.ledger import QueueTaskStatus
from penstock.queue.task_reader import QueueTaskReader
from penstock.queue.task_views import STATES, TaskEvent, TaskView

_PAGE: Final = 50
_SEARCHED: Final = 500
"""So many tasks are searched for a text."""
_PACKS_MAX: Final = 150
_PAGES_MAX: Final = 5
_LIST_SECONDS: Final = 10.0
_TASK_SECONDS: Final = 3.0
_FILTERS: Final = ("status", "type", "tag", "find")


@dataclass(frozen=True, slots=True)
class _Told:
    """One task, and what has happened to it."""

    view: TaskView
    events: list[TaskEvent]


async def _load(parts: QueueParts, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    kept = {each: asked.query.get(each, "").strip()[:500] for each in _FILTERS}
    name = asked.query.get("name", "") or parts.first_queue

    async def make(queue: Queue) -> TaskListing:
        return await _listed(queue, **kept)

    def show(found: TaskListing) -> Mapping[str, Any]:
        return {"tasks": found.tasks[:_PAGE], "shown_all": len(found) <= _PAGE and found.is_whole}

    rest = {each: value for each, value in kept.items() if each != "status"}
    tabs = [("All", "", path("/queue/tasks", name=name, **rest))]
    tabs += [
        (each.capitalize(), each, path("/queue/tasks", name=name, status=each, **rest))
        for each in STATES
    ]
    said = await read(
        parts, asked, tuple(kept.values()), make, here="tasks", seconds=_LIST_SECONDS, show=show
    )
    if isinstance(said, PageNotFound):
        return said
    more = {"tabs": tabs, "is_filtered": any(kept.values()), "searched": _SEARCHED}
    return {"tasks": (), "shown_all": True, **said, **kept, **more}


async def _listed(queue: Queue, *, status: str, type: str, tag: str, find: str) -> TaskListing:
    if find and (one := await _named(queue, type, find)) is not None:
        return TaskListing((one,), (), is_whole=True)
    found = await find_tasks(
        queue.access,
        status=status or None,
        type=type or None,
        tags=[tag] if tag else None,
        limit=_SEARCHED if find else _PAGE,
        packs_max=_PACKS_MAX,
        pages_max=_PAGES_MAX,
    )
    if not find:
        return found
    like = find.casefold()
    wanted = tuple(each for each in found.tasks if like in _text(each))
    return TaskListing(wanted, found.notes, found.is_whole, found.unknown_tags)


async def _named(queue: Queue, type: str, find: str) -> TaskView | None:
    """The task of this id, or of this key if the type is known; None if there is none."""
    try:
        at, place = task_at(find)
    except InvalidInput:
        if not type:
            return None
        at, place = keyed_pack(type=type, key=find), 0
    try:
        return await QueueTaskReader(queue.access).view(at, place)
    except TaskNotFound:
        return None


def _text(view: TaskView) -> str:
    tags = " ".join(f"{name}={value}" for name, value in view.tags.items())
    said = (view.key or "", tags, view.limit, view.batch, view.error, view.message)
    return f"{' '.join(said)} {value_of(view.input)}".casefold()


async def _cancel_many(parts: QueueParts, asked: PageRequest, to: str) -> ActionResult:
    said = {each: asked.query.get(each, "").strip() for each in ("name", "type", "tag", "reason")}
    if not said["type"] and not said["tag"]:
        raise InvalidInput("Choose a type or a tag first: all its tasks are cancelled.")
    count, is_all = await bucket_queues.cancel_many(
        queues_of(parts),
        said["name"],
        type=said["type"] or None,
        tag=said["tag"],
        reason=said["reason"],
    )
    told = "1 task is" if count == 1 else f"{number(count)} tasks are"
    more = "" if is_all else " There may be more: repeat to cancel them."
    return ActionResult(f"{told} cancelled, or asked to stop.{more}", to)


async def _load_task(parts: QueueParts, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    task = asked.path["id"]

    async def make(queue: Queue) -> _Told:
        at, place = task_at(task)
        return _Told(*await QueueTaskReader(queue.access).told(at, place))

    def show(found: _Told) -> Mapping[str, Any]:
        view = found.view
        is_apart = view.input_ref is not None
        return {
            "task": view,
            "events": found.events,
            "input": "" if is_apart else value_of(view.input),
            "result": "" if view.result_ref is not None else value_of(view.result),
        }

    said = await read(parts, asked, task, make, here="task", seconds=_TASK_SECONDS, show=show)
    return said if isinstance(said, PageNotFound) else {"task": None, "id": task, **said}


async def _cancel(parts: QueueParts, asked: PageRequest, to: str) -> ActionResult:
    name, task = asked.query.get("name", ""), asked.query.get("id", "")
    reason = asked.query.get("reason", "").strip()
    status = await bucket_queues.cancel(queues_of(parts), name, task, reason=reason)
    if status == "asked to stop":
        return ActionResult(
            "Cancellation requested: the worker sees it within about ten seconds.", to
        )
    return ActionResult(f"It is {status}.", to, is_well=status == QueueTaskStatus.CANCELLED.word)


async def _replay(parts: QueueParts, asked: PageRequest, to: str) -> ActionResult:
    name, settled = asked.query.get("name", ""), asked.query.get("id", "")
    task = await (await queues_of(parts).opened(name)).replay(settled)
    queues_of(parts).forget(name)
    to = task_path(name, task.id)
    return ActionResult("Replayed as this task.", to)


PAGES: Final = (
    ConsolePage(
        "/queue/tasks",
        "queue_tasks",
        _load,
        live=("state", "list"),
        section="queue",
        query=("name", *_FILTERS),
    ),
    ConsolePage(
        "/queue/task/{id:path}",
        "queue_task",
        _load_task,
        live=("state", "about"),
        section="queue",
        query=("name",),
    ),
)
ACTIONS: Final = (
    FormAction("/queue/tasks/cancel", _cancel_many, fields=("name", "type", "tag", "reason")),
    FormAction("/queue/task/cancel", _cancel, fields=("name", "id", "reason")),
    FormAction("/queue/task/replay", _replay, fields=("name", "id")),
)
