"""`penstock queue history ID`: what has happened to a task."""

from __future__ import annotations

import asyncio

import click

from penstock.cli.options import absolute_option
from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.showing import age, table
from penstock.cli.queue.showing import as_json as show_json
from penstock.queue.views import TaskEvent


@click.command(
    short_help="Show what has happened to a task.",
    epilog="Example: penstock queue history ID --store file:///tmp/store",
)
@click.argument("id", metavar="ID")
@absolute_option
@on_a_queue
def history(*, id: str, store: str | None, name: str, as_json: bool) -> None:
    """Show what has happened to a task, oldest first: when, what, which attempt, who."""
    events, now = asyncio.run(_told(store, name, id))
    if as_json:
        show_json(events)
        return
    rows = [
        (age(each.at, now=now), each.what, str(each.attempt or ""), each.who, each.note)
        for each in events
    ]
    table(("time", "what", "attempt", "who", "note"), rows, numbers=(2,))


async def _told(store: str | None, name: str, id: str) -> tuple[list[TaskEvent], float]:
    async with opened(store, name) as queue:
        return await queue.history(id), queue.access.now().middle
