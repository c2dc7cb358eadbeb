"""Replaying: submit the input of a settled task again, as a new task, once.

A small object records as which task a settled one was replayed, for good. Two who replay the
same task at once submit with the same key, and so create the same task. A crash between the
submit and the record makes it again only while the key is free. A large input is copied: a
payload has one owner and is deleted with it.
"""

from __future__ import annotations

import json
from typing import ClassVar

from penstock.kernel.document_format import Document, decode, encode
from penstock.kernel.errors import AlreadyExists
from penstock.queue.context import QueueContext
from penstock.queue.ids import TaskId
from penstock.queue.submit_options import SubmitOptions
from penstock.queue.submitter import Submitter
from penstock.queue.task_reader import QueueTaskReader
from penstock.queue.task_views import TaskView
from penstock.store.base import CREATE, find, pages


class ReplayRecord(Document, frozen=True, kw_only=True):
    """Which task a settled one was submitted again as."""

    kind: ClassVar[str] = "replayed"

    task: str


async def replay(access: QueueContext, view: TaskView) -> TaskId:
    """Submit the input of a settled task again, unless that was done; returns the new task.

    Raises `PayloadLost` if the input is large, and gone or damaged.
    """
    where = access.layout.replayed(name_of(view))
    known = await _known(access, where)
    if known is not None:
        return known
    value = view.input
    if view.input_ref is not None and value is None:
        value = json.loads(bytes(await QueueTaskReader(access).payloads.fetch(view.input_ref)))
    task = await Submitter.of(access).submit_keyed(
        view.type,
        value,
        SubmitOptions(
            key=f"replay of {name_of(view)}",
            priority=view.priority,
            limit=view.limit,
            tags=view.tags,
        ),
        key_seconds=access.config.key_seconds,
    )
    try:
        await access.store.put(where, encode(ReplayRecord(task=task)), CREATE)
    except AlreadyExists:
        return await _known(access, where) or task
    return task


def name_of(view: TaskView) -> str:
    """A settled task and when it was submitted: a key has the same task in each of its lives."""
    return f"{view.id}.{int(view.submitted_at * 1000)}"


async def replayed(access: QueueContext) -> frozenset[str]:
    """The names of tasks that have been replayed; one LIST for every 1,000."""
    prefix = access.layout.replayed("")
    found: set[str] = set()
    async for page in pages(access.store, prefix):
        found |= {entry.key.removeprefix(prefix) for entry in page.entries}
    return frozenset(found)


async def _known(access: QueueContext, where: str) -> TaskId | None:
    found = await find(access.store, where)
    return TaskId(decode(ReplayRecord, found.body, where=where).task) if found else None
