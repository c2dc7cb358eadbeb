"""Replaying: the input of a settled task again, as a new task, once.

A small object remembers which task a settled one was replayed as, for good. Two who replay the
same task at the same time submit with the same key, and so make the same task. A crash between the
submit and the note makes it again as long as the key is free, and not otherwise. A large input is
copied: a payload has one owner, and goes with it.
"""

from __future__ import annotations

import json
from typing import ClassVar

from penstock.kernel.errors import AlreadyExists
from penstock.kernel.wire import Document, decode, encode
from penstock.queue.access import Access
from penstock.queue.options import Options
from penstock.queue.places import TaskId
from penstock.queue.reading import Reader
from penstock.queue.submission import Submitter
from penstock.queue.views import TaskView
from penstock.store.base import CREATE, find, pages


class Replayed(Document, frozen=True, kw_only=True):
    """Which task a settled one was submitted again as."""

    kind: ClassVar[str] = "replayed"

    task: str


async def replay(access: Access, view: TaskView) -> TaskId:
    """Submit the input of a settled task again, unless that was done; returns the new task.

    Raises `PayloadLost` if the input is large, and gone or damaged.
    """
    where = access.layout.replayed(name_of(view))
    known = await _known(access, where)
    if known is not None:
        return known
    value = view.input
    if view.input_ref is not None and value is None:
        value = json.loads(bytes(await Reader(access).payloads.fetch(view.input_ref)))
    task = await Submitter(access.store, access.layout, access.entropy).submit_keyed(
        view.type,
        value,
        Options(
            key=f"replay of {name_of(view)}",
            priority=view.priority,
            limit=view.limit,
            tags=view.tags,
        ),
        key_seconds=access.config.key_seconds,
    )
    try:
        await access.store.put(where, encode(Replayed(task=task)), CREATE)
    except AlreadyExists:
        return await _known(access, where) or task
    return task


def name_of(view: TaskView) -> str:
    """A settled task and when it was submitted: a key has the same task in each of its lives."""
    return f"{view.id}.{int(view.submitted_at * 1000)}"


async def replayed(access: Access) -> frozenset[str]:
    """The names of tasks that have been replayed; one LIST for every 1,000."""
    prefix = access.layout.replayed("")
    found: set[str] = set()
    async for page in pages(access.store, prefix):
        found |= {entry.key.removeprefix(prefix) for entry in page.entries}
    return frozenset(found)


async def _known(access: Access, where: str) -> TaskId | None:
    found = await find(access.store, where)
    return TaskId(decode(Replayed, found.body, where=where).task) if found else None
