"""`penstock queue get ID`: the present state of a task."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import click

from penstock.cli.options import absolute_option
from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.showing import as_json as show_json
from penstock.cli.queue.showing import compact, fields, length, when
from penstock.queue.ledger import Progress
from penstock.queue.pack import Reference
from penstock.queue.views import TaskView


@click.command(
    short_help="Show a task: status, input, result, error.",
    epilog="Example: penstock queue get ID --store file:///tmp/store",
)
@click.argument("id", metavar="ID")
@absolute_option
@on_a_queue
def get(*, id: str, store: str | None, name: str, as_json: bool) -> None:
    """Show where a task is, how far it says it is, its input, and its result or its error."""
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
    yield "status", view.status + (" (asked to stop)" if view.cancel_asked else "")
    yield "attempt", str(view.attempt or "none yet")
    yield "submitted", when(view.submitted_at, now=now)
    if view.due_at is not None:
        yield "due", when(view.due_at, now=now)
    if view.settled_at is not None:
        yield "settled", when(view.settled_at, now=now)
    if view.expires_at is not None and (not view.is_settled or view.status == "expired"):
        yield "expires" if not view.is_settled else "expired", when(view.expires_at, now=now)
    if view.key is not None:
        yield "key", view.key
    yield from _options(view)
    if view.progress is not None:
        yield "progress", _progress(view.progress, now=now)
    yield "input", compact(view.input) if view.input_ref is None else _stored(view.input_ref)
    if view.status == "succeeded":
        yield (
            "result",
            compact(view.result) if view.result_ref is None else _stored(view.result_ref),
        )
    if view.problem:
        yield "problem", view.problem
    if view.error:
        yield "error", f"{view.error}: {view.message}" if view.message else view.error
    if view.trace:
        yield "trace", view.trace


def _options(view: TaskView) -> Iterator[tuple[str, str]]:
    if view.priority:
        yield "priority", str(view.priority)
    if view.limit:
        yield "limit", view.limit
    if view.tags:
        yield "tags", " ".join(f"{name}={value}" for name, value in sorted(view.tags.items()))
    if view.batch:
        yield "batch", view.batch


def _progress(told: Progress, *, now: float) -> str:
    share = f" ({told.done / told.total:.0%})" if told.total > 0 else ""
    said = f", {told.message}" if told.message else ""
    return f"{told.done:g} of {told.total:g}{share}{said}, {length(now - told.at_ms / 1000)} ago"


def _stored(payload: Reference) -> str:
    return f"{payload.bytes:,} bytes at {payload.key}"
