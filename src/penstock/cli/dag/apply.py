"""`penstock dag apply FILE`: put a DAG in force."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.telling import counted, show_json
from penstock.dispatcher.wire.dags import AppliedAnswer


@click.command(
    short_help="Put a file in force.",
    epilog="Example: penstock dag apply pipeline.yaml",
)
@click.argument("file", metavar="FILE", type=click.Path(readable=False))
@click.option("--force", is_flag=True, help="Also if that makes work useless that waits or runs.")
@on_a_dispatcher
def apply(*, file: str, force: bool, url: str, token: str | None, as_json: bool) -> None:
    """Put the DAG of a file in force, in one step, whatever was in force before.

    A file that says the same as the one in force changes nothing. Jobs whose data would come out
    the same keep what they have made; the others are built anew, and readers are served what there
    was until that is done.

    Exit code 0: it is in force. 1: it is not, because it would break work (see --force), or the
    dispatcher cannot be asked. 2: the file is wrong.
    """
    # A name that is no text in this locale could not be printed, or sent.
    where = click.format_filename(file)
    answer, _ = asked(url, token, lambda client: client.apply(Path(file), where=where, force=force))
    show_applied(answer, as_json=as_json)


def show_applied(answer: AppliedAnswer, *, as_json: bool) -> None:
    """What has become of the DAG."""
    if as_json:
        show_json(answer)
        return
    if not answer.is_changed:
        click.echo(f"Version {answer.version} says the same and is in force already.")
        return
    click.echo(f"Version {answer.version} is in force ({answer.hash[:12]}).")
    if answer.building:
        names = ", ".join(answer.building)
        click.echo(f"Built anew, and served as before until then: {names}.")
    if answer.cancelled:
        click.echo(f"Cancelled: {counted(answer.cancelled, 'task')} that nobody needs any more.")
