"""`penstock task`: the tasks of a pipeline, one file a verb; `steer` has cancel and replay."""

from __future__ import annotations

import click

from penstock.cli.task.listing import list_
from penstock.cli.task.logs import logs
from penstock.cli.task.show import show
from penstock.cli.task.steer import cancel, replay


@click.group(
    invoke_without_command=True,
    short_help="Look at tasks, cancel or replay them.",
    epilog="Example: penstock task list --status dead",
)
@click.pass_context
def task(context: click.Context) -> None:
    """Look at the tasks of a pipeline, cancel them, or run dead ones again.

    These are the tasks of a dispatcher; those of a bucket queue are under 'penstock queue'.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for verb in (list_, show, logs, cancel, replay):
    task.add_command(verb)
