"""`penstock queue resume`: lift a pause or a drain."""

from __future__ import annotations

import asyncio

import click

from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.pause import show_held, type_option
from penstock.cli.queue.showing import notes
from penstock.queue.control import Held
from penstock.queue.places import check_name


@click.command(
    short_help="Lift a pause or a drain.",
    epilog="Example: penstock queue resume --store file:///tmp/store",
)
@type_option
@on_a_queue
def resume(*, type: str | None, store: str | None, name: str, as_json: bool) -> None:
    """Lift pause and drain from a type, or from the queue as a whole.

    A type that was paused or drained by itself stays so until it is resumed with --type. Prints
    what is still held. Exit code 0, also if there was nothing to lift, which is then said.
    """
    before, held, now = asyncio.run(_resumed(store, name, type))
    what = "queue as a whole" if type is None else f"type {type!r}"
    if all(each.type != type for each in before):
        notes([f"the {what} was neither paused nor drained; there was nothing to lift."])
    elif not as_json:
        click.echo(f"The {what} goes on.")
    if held or as_json:
        show_held(held, now=now, as_json=as_json)


async def _resumed(
    store: str | None, name: str, type: str | None
) -> tuple[tuple[Held, ...], tuple[Held, ...], float]:
    """What was held before, what is after, and the store's time then."""
    async with opened(store, name) as queue:
        if type is not None:
            check_name(type, what="type")
        before = await queue.control.state()
        held = await queue.resume(type)
        return before, held, queue.access.now().middle
