"""Where the queue of a verb is: the options `--store`, `--queue`, `--json`, and the connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from penstock.cli.format import length
from penstock.cli.options import json_option
from penstock.kernel.errors import InvalidInput
from penstock.queue.client import Queue
from penstock.queue.ledger import QueueTaskStatus
from penstock.queue.task_views import DELAYED

if TYPE_CHECKING:
    from penstock.queue.task_views import TaskView


def note_of(view: TaskView, *, now: float) -> str:
    """The one thing besides its status that is worth knowing of a task."""
    if view.cancel_asked:
        return "asked to stop"
    if view.status in (DELAYED, QueueTaskStatus.RETRYING.word) and view.due_at is not None:
        due = f"due in {length(view.due_at - now)}" if view.due_at > now else "due"
        return f"{due}, after {view.error}" if view.error else due
    first = view.message.splitlines()[0] if view.message else ""
    return ": ".join(part for part in (view.error, first[:80]) if part)


Verb = TypeVar("Verb", bound=Callable[..., Any])

DEFAULT_QUEUE: Final = "default"

_store_option = click.option(
    "--store",
    metavar="URL",
    envvar="PENSTOCK_STORE",
    help="s3://BUCKET/PREFIX or file:///FOLDER; or set PENSTOCK_STORE.",
)
_queue_option = click.option(
    "--queue",
    "name",
    metavar="NAME",
    envvar="PENSTOCK_QUEUE",
    default=DEFAULT_QUEUE,
    show_default=True,
    help="The name of the queue; or set PENSTOCK_QUEUE.",
)
tag_option = click.option(
    "--tag",
    "tags",
    metavar="FILTER",
    multiple=True,
    help="Only tasks with such a tag: name=value, name!=value or name; all that are given hold.",
)


def on_a_queue(verb: Verb) -> Verb:
    """Give a verb `store`, `name` and `as_json`."""
    return _store_option(_queue_option(json_option(verb)))


@asynccontextmanager
async def opened(store: str | None, name: str, *, create: bool = False) -> AsyncIterator[Queue]:
    """The queue that the options name, connected. Raises `QueueNotFound` unless `create`."""
    async with await Queue.open(checked_store(store), name=name, create=create) as queue:
        yield queue


def checked_store(store: str | None) -> str:
    """The URL of a store that outlives this command. Raises `InvalidInput`."""
    if not store:
        raise InvalidInput(
            "Which store? Give --store URL or set PENSTOCK_STORE.",
            hint="For example: --store file:///tmp/store, or --store s3://BUCKET/PREFIX.",
        )
    if store.startswith("memory:"):
        raise InvalidInput(
            "A memory:// store lives in one process and would be gone with this command.",
            hint="For a try, use a folder: --store file:///tmp/store",
        )
    return store
