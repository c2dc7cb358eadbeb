"""`penstock queue pause`: start nothing more until it is resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import click

from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.showing import as_json as show_json
from penstock.cli.queue.showing import plain, since
from penstock.queue.control import WORKER_SECONDS, Held

type_option = click.option("--type", metavar="TYPE", help="Only tasks of this type.")


@click.command(
    short_help="Start nothing more until it is resumed.",
    epilog='Example: penstock queue pause --type resize --reason "disk full"'
    " --store file:///tmp/store",
)
@type_option
@click.option("--reason", default="", help="Why; workers log it, and stats shows it.")
@on_a_queue
def pause(*, type: str | None, reason: str, store: str | None, name: str, as_json: bool) -> None:
    """Start nothing more, of a type or at all, until it is resumed.

    Workers hear of it within 10 seconds. What runs goes on, what was claimed and has not started
    is given back, and submits are accepted.
    """
    held, now = asyncio.run(_paused(store, name, type, reason))
    show_held(held, now=now, as_json=as_json)
    if not as_json:
        click.echo(f"Workers hear of it within {WORKER_SECONDS:.0f} s.")


async def _paused(
    store: str | None, name: str, type: str | None, reason: str
) -> tuple[tuple[Held, ...], float]:
    async with opened(store, name) as queue:
        held = await queue.pause(type, reason)
        return held, queue.access.now().middle


def show_held(held: Sequence[Held], *, now: float, as_json: bool) -> None:
    """Everything that is paused or drained."""
    if as_json:
        show_json({"held": plain(list(held))})
        return
    for line in held_lines(held, now=now):
        click.echo(line)
    if not held:
        click.echo("Nothing is paused or drained.")


def held_lines(held: Sequence[Held], *, now: float) -> Iterator[str]:
    """One sentence for everything that is paused or drained."""
    for each in held:
        what = "The queue" if each.type is None else f"The type {each.type!r}"
        if each.paused_at is not None:
            reason = f": {each.reason}" if each.reason else "."
            yield f"{what} is paused since {since(each.paused_at, now=now)}{reason}"
        if each.drained_at is not None:
            begun = since(each.drained_at, now=now)
            yield f"{what} is drained, and takes no more tasks, since {begun}."
