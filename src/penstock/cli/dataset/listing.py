"""`penstock dataset list`: datasets and their generations."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.options import absolute_option
from penstock.cli.telling import ago, fitted, show_json


@click.command(
    "list",
    short_help="List datasets and their generations.",
    epilog="Example: penstock dataset list",
)
@absolute_option
@on_a_dispatcher
def list_(*, url: str, token: str | None, as_json: bool) -> None:
    """List datasets, who writes them, and their generations with the partitions in each.

    Readers read the current generation; one that is being built takes its place when it has all
    that the current one has.
    """
    answer, now = asked(url, token, lambda client: client.datasets())
    if as_json:
        show_json(answer)
        return
    rows = [
        (
            each.name,
            each.job or "",
            generation.state,
            f"{generation.partitions:,}",
            ago(generation.created_at, now=now),
            generation.version,
        )
        for each in answer.datasets
        for generation in each.generations
    ]
    if not rows:
        click.echo("There are no datasets; 'penstock dag apply FILE' makes them.", err=True)
        return
    heads = ("dataset", "written by", "state", "partitions", "made", "generation")
    fitted(heads, rows, numbers=(3,))
