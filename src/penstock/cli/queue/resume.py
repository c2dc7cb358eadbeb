"""`penstock queue resume`: lift a pause or a drain."""

from __future__ import annotations

import asyncio

import click

from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.pause import show_held, type_option
from penstock.queue.control import Held


@click.command(
    short_help="Lift a pause or a drain.",
    epilog="Example: penstock queue resume --store file:///tmp/store",
)
@type_option
@on_a_queue
def resume(*, type: str | None, store: str | None, name: str, as_json: bool) -> None:
    """Lift pause and drain from a type, or from the queue as a whole.

    A type that was paused or drained by itself stays so until it is resumed with --type. Prints
    what is still held.
    """
    held, now = asyncio.run(_resumed(store, name, type))
    show_held(held, now=now, as_json=as_json)


async def _resumed(
    store: str | None, name: str, type: str | None
) -> tuple[tuple[Held, ...], float]:
    async with opened(store, name) as queue:
        held = await queue.resume(type)
        return held, queue.access.now().middle
