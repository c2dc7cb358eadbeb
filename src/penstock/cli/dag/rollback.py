"""`penstock dag rollback [VERSION]`: put an earlier version in force again."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import versions
from penstock.cli.dag.applied import show_applied


@click.command(
    short_help="Put an earlier version in force.",
    epilog="Example: penstock dag rollback 3",
)
@click.argument(
    "version",
    metavar="[VERSION]",
    type=click.IntRange(min=1),
    required=False,
    shell_complete=versions,
)
@click.option("--dry-run", is_flag=True, help="Change nothing; tell what would happen.")
@on_a_dispatcher
def rollback(
    *, version: int | None, dry_run: bool, url: str, token: str | None, as_json: bool
) -> None:
    """Put an earlier version of the DAG in force.

    Without VERSION it is the one that was in force before the present one, whatever its number; so
    to roll back twice is to go there and back. 'penstock dag list' shows which there are, and when
    each was in force last. What waits for a generation that nobody reads any more is cancelled.

    Exit code 0: it is in force. 1: there is no such version, or the dispatcher cannot be asked.
    """
    answer, _ = asked(url, token, lambda client: client.rollback(version, dry_run=dry_run))
    show_applied(answer, as_json=as_json)
