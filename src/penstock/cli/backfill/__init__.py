"""`penstock backfill`: partitions computed because somebody asked, one file a verb.

`steer` has the three verbs that only change the state of one: pause, resume, cancel.
"""

from __future__ import annotations

import click

from penstock.cli.backfill.listing import list_
from penstock.cli.backfill.show import show
from penstock.cli.backfill.start import start
from penstock.cli.backfill.steer import cancel, pause, resume


@click.group(
    invoke_without_command=True,
    short_help="Compute a range or a list of partitions.",
    epilog="Example: penstock backfill start totals --start 0 --end 1000000 --step 1000",
)
@click.pass_context
def backfill(context: click.Context) -> None:
    """Compute partitions of a job, of any number, at the priority bulk.

    A backfill is planned at once and becomes tasks bit by bit, so that it never stands in the way
    of what is new. It survives the restart of everything.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for verb in (start, list_, show, pause, resume, cancel):
    backfill.add_command(verb)
