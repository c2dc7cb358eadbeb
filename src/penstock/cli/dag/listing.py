"""`penstock dag list`: the versions of the DAG."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.options import absolute_option
from penstock.cli.telling import ago, fitted, show_json


@click.command(
    "list",
    short_help="List the versions that were applied.",
    epilog="Example: penstock dag list",
)
@absolute_option
@on_a_dispatcher
def list_(*, url: str, token: str | None, as_json: bool) -> None:
    """List the versions of the DAG, the newest first, and which of them is in force.

    'since' tells when each was put in force last; first by its number is not first by that.
    """
    answer, now = asked(url, token, lambda client: client.versions())
    if as_json:
        show_json(answer)
        return
    if not answer.versions:
        click.echo("No DAG was applied yet; 'penstock dag apply FILE' does it.", err=True)
        return
    rows = [
        (
            str(each.id),
            "in force" if each.is_current else "",
            ago(each.since, now=now),
            ago(each.created_at, now=now),
            each.hash[:12],
        )
        for each in answer.versions
    ]
    fitted(("version", "state", "since", "first applied", "hash"), rows, numbers=(0,))
