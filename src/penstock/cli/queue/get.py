"""`penstock queue get ID`: the present state of a task."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import click

from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.showing import as_json as show_json
from penstock.cli.queue.showing import compact, fields, status, when
from penstock.queue.views import TaskView


@click.command(
    short_help="Show a task: status, input, result, error.",
    epilog="Example: penstock queue get ID --store file:///tmp/store",
)
@click.argument("id", metavar="ID")
@on_a_queue
def get(*, id: str, store: str | None, name: str, as_json: bool) -> None:
    """Show where a task is, its input, and its result or its error."""
    view, now = asyncio.run(_got(store, name, id))
    if as_json:
        show_json(view)
    else:
        fields(_rows(view, now=now))


async def _got(store: str | None, name: str, id: str) -> tuple[TaskView, float]:
    async with opened(store, name) as queue:
        view = await queue.get(id)
        return view, queue.access.now().middle


def _rows(view: TaskView, *, now: float) -> Iterator[tuple[str, str]]:
    yield "id", view.id
    yield "type", view.type
    yield "status", status(view.status) + (" (asked to stop)" if view.cancel_asked else "")
    yield "attempt", str(view.attempt or "none yet")
    yield "submitted", when(view.submitted_at, now=now)
    if view.due_at is not None:
        yield "due", when(view.due_at, now=now)
    if view.settled_at is not None:
        yield "settled", when(view.settled_at, now=now)
    if view.key is not None:
        yield "key", view.key
    yield "input", compact(view.input)
    if view.status == "succeeded":
        yield "result", compact(view.result)
    if view.error:
        yield "error", f"{view.error}: {view.message}" if view.message else view.error
    if view.trace:
        yield "trace", view.trace
