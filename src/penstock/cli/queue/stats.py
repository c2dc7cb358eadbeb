"""`penstock queue stats`: a queue in figures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

import click

from penstock.cli.options import absolute_option
from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.pause import held_lines
from penstock.cli.queue.showing import age, length, notes, table
from penstock.cli.queue.showing import as_json as show_json
from penstock.queue import inspection
from penstock.queue.inspection import Stats
from penstock.queue.inspection.figures import DIRECT

_FAILURES_OF: Final = 50
"""So many packs that have settled are read for what of them has failed."""


@click.command(
    short_help="Count tasks; show workers and shards.",
    epilog="Example: penstock queue stats --store file:///tmp/store",
)
@absolute_option
@on_a_queue
def stats(*, store: str | None, name: str, as_json: bool) -> None:
    """Count tasks by type, and show the workers and the shards that they own.

    Counted from lists, six for a small queue, and one read a worker; for the failures the last 50
    packs that have settled are read. Tasks of a pack that is in progress all count as in progress;
    settled tasks, and those of them that failed, count until they are archived.
    """
    found = asyncio.run(_counted(store, name))
    if as_json:
        show_json(found)
        return
    _show_types(found)
    _show_workers(found)
    for line in _remarks(found):
        click.echo(line)
    notes(found.notes)


async def _counted(store: str | None, name: str) -> Stats:
    async with opened(store, name) as queue:
        return await inspection.stats(queue.access, failures_of=_FAILURES_OF)


def _show_types(found: Stats) -> None:
    if not found.types:
        click.echo(f"The queue {found.queue!r} is empty.")
        return
    rows = [
        (
            each.type,
            f"{each.ready:,}",
            f"{each.delayed:,}",
            f"{each.in_progress:,}",
            f"{each.settled_recently:,}",
            f"{each.failed_recently or 0:,}",
            "" if each.oldest_ready_at is None else age(each.oldest_ready_at, now=found.at),
        )
        for each in found.types
    ]
    heads = (
        *("type", "ready", "delayed", "in progress"),
        *("settled recently", "failed", "oldest ready since"),
    )
    table(heads, rows, numbers=(1, 2, 3, 4, 5))


def _show_workers(found: Stats) -> None:
    if not found.workers:
        return
    click.echo()
    rows = [
        (
            each.name,
            each.role,
            each.host,
            str(each.pid),
            str(each.concurrency or ""),
            str(len(each.shards)),
            " ".join(each.handles),
            f"in {length(each.ends_at - found.at)}",
        )
        for each in found.workers
    ]
    heads = ("worker", "role", "host", "pid", "at once", "shards", "handles", "ends unless renewed")
    table(heads, rows, numbers=(3, 4, 5))


def _remarks(found: Stats) -> Iterator[str]:
    yield ""
    yield from held_lines(found.held, now=found.at)
    unowned = len(found.unowned)
    if all(each.role == DIRECT for each in found.workers):
        yield "No worker of the mode 'leased' is registered."
        yield "Those of the modes 'shared' and 'sampled' do not register."
    elif unowned:
        yield f"{unowned} of {found.shards} shards have no owner."
    else:
        yield f"All {found.shards} shards have an owner."
    others = sum(1 for worker in found.workers if worker.of != found.shards)
    if others:
        yield f"Of the workers, {others} have not moved to {found.shards} shards yet."
    if found.monitor:
        yield f"The monitor of the workers of the mode 'shared' is {found.monitor}."
    met = sorted({kind for worker in found.workers for kind in worker.help_wanted})
    if met:
        yield f"No handler, or more than the owners can run, of: {', '.join(met)}."
    if found.dead_letter_objects or any(each.failed_recently for each in found.types):
        yield "There are dead letters: 'penstock queue list --status failed' shows them."
