"""`penstock dataset maintain`: rewrite small files now."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import datasets
from penstock.cli.telling import counted, show_json


@click.command(
    short_help="Rewrite the files of a dataset now.",
    epilog="Example: penstock dataset maintain sales",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
@click.option("--partition", metavar="KEY", help="Only this partition.")
@on_a_dispatcher
def maintain(
    *, name: str, partition: str | None, url: str, token: str | None, as_json: bool
) -> None:
    """Make a task for each partition of several files that puts them together, or clusters them, as
    `maintain` of the DAG says.

    The dispatcher does so by itself, one partition after the other, where files are many and
    small. This is for now, and also for files that are neither. The rows stay as they are, and
    nobody downstream is told.
    """
    answer, _ = asked(url, token, lambda client: client.maintain(name, partition_key=partition))
    if as_json:
        show_json(answer)
        return
    if not answer.tasks:
        click.echo("There is nothing to rewrite that has no task yet.")
        return
    first, last = answer.tasks[0], answer.tasks[-1]
    which = f"task {first}" if first == last else f"tasks {first} to {last}"
    more = "" if answer.is_all else "; there is more, ask again when they are over"
    click.echo(f"Made {counted(len(answer.tasks), 'task')}: {which}{more}.")
