"""`penstock queue list`: the tasks that are in a queue."""

from __future__ import annotations

import asyncio

import click

from penstock.cli.options import absolute_option
from penstock.cli.queue.connection import on_a_queue, opened, tag_option
from penstock.cli.queue.showing import age, note_of, notes, plain, table
from penstock.cli.queue.showing import as_json as show_json
from penstock.queue.inspection import Listing
from penstock.queue.inspection.filters import tag_filters
from penstock.queue.replays import name_of, replayed
from penstock.queue.views import STATES, TaskView


@click.command(
    "list",
    short_help="List tasks by status, type and tags.",
    epilog="Example: penstock queue list --status failed --store file:///tmp/store",
)
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(STATES),
    help="Only these; may be given several times.",
)
@click.option("--type", help="Only tasks of this type.")
@tag_option
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=50,
    show_default=True,
    help="At most so many.",
)
@absolute_option
@on_a_queue
def list_(
    *,
    statuses: tuple[str, ...],
    type: str | None,
    tags: tuple[str, ...],
    limit: int,
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """List tasks: those that run or retry, those that wait, and those that settled recently.

    Settled tasks leave for the archive some minutes after their end, those with a key after a
    day, and are then found by 'get' only. With --status failed alone, the dead letters in the
    archive are listed too. What failed and was replayed since is marked as replayed.
    """
    listing, again, now = asyncio.run(
        _listed(store, name, statuses, type=type, tags=tags, limit=limit)
    )
    if as_json:
        told = plain(listing)
        for task, view in zip(told["tasks"], listing.tasks, strict=True):
            task["is_replayed"] = name_of(view) in again
        show_json(told)
        return
    rows = [
        (
            view.status,
            view.type,
            str(view.attempt or ""),
            age(view.submitted_at, now=now),
            view.id,
            _note(view, now=now, is_replayed=name_of(view) in again),
        )
        for view in listing.tasks
    ]
    if rows:
        heads = ("status", "type", "attempt", "submitted", "id", "note")
        table(heads, rows, numbers=(2,), whole=(4,))
    else:
        click.echo("No such tasks." if statuses or type or tags else "No tasks.", err=True)
    notes([*listing.unknown_tags, *listing.notes])
    if not listing.is_whole:
        notes(["there may be more; raise --limit, or narrow it with --status and --type."])


async def _listed(
    store: str | None,
    name: str,
    statuses: tuple[str, ...],
    *,
    type: str | None,
    tags: tuple[str, ...],
    limit: int,
) -> tuple[Listing, frozenset[str], float]:
    """The tasks, the names of those that were replayed, and the store's time then."""
    tag_filters(tags)  # What is wrong is said before anything is asked.
    async with opened(store, name) as queue:
        listing = await queue.tasks(status=statuses or None, type=type, tags=tags, limit=limit)
        is_failed = any(view.status == "failed" for view in listing)
        again = await replayed(queue.access) if is_failed else frozenset()
        return listing, again, queue.access.now().middle


def _note(view: TaskView, *, now: float, is_replayed: bool) -> str:
    told = note_of(view, now=now)
    if not is_replayed:
        return told
    return f"replayed; {told}" if told else "replayed"
