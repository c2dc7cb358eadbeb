"""`penstock keys`: what signs the tokens of tasks, one file a verb."""

from __future__ import annotations

import click

from penstock.cli.keys.bucket_policy import bucket_policy
from penstock.cli.keys.listing import list_
from penstock.cli.keys.revoke import revoke
from penstock.cli.keys.rotate import rotate


@click.group(
    invoke_without_command=True,
    short_help="The keys that sign the tokens of tasks.",
    epilog="Example: penstock keys list",
)
@click.pass_context
def keys(context: click.Context) -> None:
    """The keys that sign the tokens of tasks.

    Every dispatcher has its own, in a file of its data folder, or all have one of AWS KMS. What a
    key has signed is verified by its public half, which all dispatchers know.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for verb in (list_, rotate, revoke, bucket_policy):
    keys.add_command(verb)
