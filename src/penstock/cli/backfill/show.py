"""`penstock backfill show ID`: how far a backfill is."""

from __future__ import annotations

import click

from penstock.cli.backfill.showing import show_backfill
from penstock.cli.backfill.wait import exit_code, waited, with_waiting
from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import backfills
from penstock.cli.options import absolute_option
from penstock.cli.telling import show_json
from penstock.dispatcher.client import Client
from penstock.dispatcher.wire.steering import BackfillAnswer


@click.command(
    short_help="Show a backfill, or wait for it.",
    epilog="Example: penstock backfill show 7 --wait",
)
@click.argument("id", metavar="ID", type=click.IntRange(min=1), shell_complete=backfills)
@with_waiting
@absolute_option
@on_a_dispatcher
@click.pass_context
def show(
    context: click.Context,
    *,
    id: int,
    wait: bool,
    timeout_seconds: float,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Show how far a backfill is; with --wait, when it is over.

    Exit code 0: here it is; with --wait, everything is computed. 1: there is no such backfill; with
    --wait, a task is dead, it was cancelled, or the time is up.
    """

    async def work(client: Client) -> BackfillAnswer:
        if wait:
            return await waited(client, id, timeout_seconds=timeout_seconds)
        return await client.find_backfill(id)

    found, now = asked(url, token, work)
    if as_json:
        show_json(found)
    else:
        show_backfill(found, now=now)
    context.exit(exit_code(found, wait=wait))
