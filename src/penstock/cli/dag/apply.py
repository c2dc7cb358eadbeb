"""`penstock dag apply FILE`: put a DAG in force."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.dag.applied import show_applied


@click.command(
    short_help="Put a file in force.",
    epilog="Example: penstock dag apply pipeline.yaml",
)
@click.argument("file", metavar="FILE", type=click.Path(readable=False))
@click.option("--force", is_flag=True, help="Also if that makes work useless that waits or runs.")
@click.option("--dry-run", is_flag=True, help="Change nothing; tell what would happen.")
@on_a_dispatcher
@click.pass_context
def apply(
    context: click.Context,
    *,
    file: str,
    force: bool,
    dry_run: bool,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Put the DAG of a file in force, in one step, whatever was in force before.

    A file that says the same as the one in force changes nothing. Jobs whose data would come out
    the same keep what they have made; the others are built anew, and readers are served what there
    was until that is done. With --dry-run nothing is changed, and it is told what would be.

    Exit code 0: it is in force, or with --dry-run, it could be. 1: not, because it would break work
    (see --force), or the dispatcher cannot be asked. 2: the file is wrong.
    """
    # A name that is no text in this locale could not be printed, or sent.
    where = click.format_filename(file)
    answer, _ = asked(
        url,
        token,
        lambda client: client.apply(Path(file), where=where, force=force, dry_run=dry_run),
    )
    show_applied(answer, as_json=as_json)
    context.exit(1 if answer.breaks and not force else 0)
