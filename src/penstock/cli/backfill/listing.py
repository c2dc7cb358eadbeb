"""`penstock backfill list`: the latest backfills."""

from __future__ import annotations

import click

from penstock.cli.backfill.showing import show_backfills
from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.options import absolute_option
from penstock.cli.telling import show_json


@click.command(
    "list",
    short_help="List backfills and how far they are.",
    epilog="Example: penstock backfill list",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=50,
    show_default=True,
    help="At most so many.",
)
@absolute_option
@on_a_dispatcher
def list_(*, limit: int, url: str, token: str | None, as_json: bool) -> None:
    """List the latest backfills, the newest first.

    Those of the kind 'rebuild' were made by 'penstock dag apply', for jobs that are built anew.
    """
    answer, now = asked(url, token, lambda client: client.backfills(limit=limit))
    if as_json:
        show_json(answer)
    elif answer.backfills:
        show_backfills(answer.backfills, now=now)
    else:
        click.echo("No backfills.", err=True)
