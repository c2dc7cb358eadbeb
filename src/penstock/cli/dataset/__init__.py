"""`penstock dataset`: what has been published."""

from __future__ import annotations

import click

from penstock.cli.dataset.contents import files, preview, verify
from penstock.cli.dataset.maintenance import (
    cut_over,
    maintain,
    purge,
    rebuild_table,
    refresh,
    sweep,
)
from penstock.cli.dataset.overview import diff, list_, partitions, show, snapshots


@click.group(
    invoke_without_command=True,
    short_help="Show published datasets.",
    epilog="Example: penstock dataset list",
)
@click.pass_context
def dataset(context: click.Context) -> None:
    """Datasets, their generations and their partitions."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


looking = (list_, show, partitions, snapshots, diff, files, preview, verify)
for verb in (*looking, sweep, maintain, refresh, rebuild_table, cut_over, purge):
    dataset.add_command(verb)
