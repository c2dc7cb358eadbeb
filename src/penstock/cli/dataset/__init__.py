"""`penstock dataset`: what has been published, one file a verb."""

from __future__ import annotations

import click

from penstock.cli.dataset.cut_over import cut_over
from penstock.cli.dataset.files import files
from penstock.cli.dataset.listing import list_
from penstock.cli.dataset.maintain import maintain
from penstock.cli.dataset.partitions import partitions
from penstock.cli.dataset.preview import preview
from penstock.cli.dataset.refresh import refresh
from penstock.cli.dataset.show import show
from penstock.cli.dataset.sweep import sweep
from penstock.cli.dataset.verify import verify


@click.group(
    invoke_without_command=True,
    short_help="Look at what is published.",
    epilog="Example: penstock dataset list",
)
@click.pass_context
def dataset(context: click.Context) -> None:
    """Datasets, their generations and their partitions."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


verbs = (list_, show, partitions, files, preview, verify, sweep, maintain, refresh, cut_over)
for verb in verbs:
    dataset.add_command(verb)
