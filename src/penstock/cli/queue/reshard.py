"""`penstock queue reshard --shards N`: another number of shards, while workers run."""

from __future__ import annotations

import asyncio
from typing import Final

import click

from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.showing import as_json as show_json
from penstock.queue.config import QueueConfig, read_config
from penstock.queue.owning.shards import check_shards

_MOVED_SECONDS: Final = 100


@click.command(
    short_help="Change the number of shards while workers run.",
    epilog="Example: penstock queue reshard --shards 128 --store file:///tmp/store",
)
@click.option("--shards", type=int, required=True, help="A power of two from 1 to 4096.")
@on_a_queue
def reshard(*, shards: int, store: str | None, name: str, as_json: bool) -> None:
    """Change the number of shards: at most so many workers look for tasks in the mode 'leased'.

    Workers notice within 30 seconds, go on with what they do, and share out the new shards among
    themselves. Nothing has to be stopped, and no task is moved.
    """
    check_shards(shards)
    before, after = asyncio.run(_changed(store, name, shards))
    if as_json:
        show_json({"before": before, "shards": after.shards, "era": after.era})
    elif before == after.shards:
        click.echo(f"The queue has {before} shards already.")
    else:
        click.echo(
            f"The queue has {after.shards} shards now; before it had {before}."
            f" Workers move to them within {_MOVED_SECONDS} s; 'penstock queue stats' shows them."
        )


async def _changed(store: str | None, name: str, shards: int) -> tuple[int, QueueConfig]:
    async with opened(store, name) as queue:
        found = await read_config(queue.access.store, queue.access.layout)
        before = (found or queue.access.config).shards
        await queue.reshard(shards)
        return before, queue.access.config
