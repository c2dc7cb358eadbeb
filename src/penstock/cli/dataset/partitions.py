"""`penstock dataset partitions NAME`: what is published of a dataset."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import datasets
from penstock.cli.dataset.showing import number, size
from penstock.cli.options import absolute_option
from penstock.cli.queue.showing import notes
from penstock.cli.telling import ago, fitted, line, show_json


@click.command(
    short_help="List what is published of a dataset.",
    epilog="Example: penstock dataset partitions sales",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
@click.option("--generation", metavar="UUID", help="By default the current one.")
@click.option("--after", metavar="KEY", help="Only partitions after this one, for the next page.")
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=50,
    show_default=True,
    help="At most so many.",
)
@absolute_option
@on_a_dispatcher
def partitions(
    *,
    name: str,
    generation: str | None,
    after: str | None,
    limit: int,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """List the partitions of a dataset that are published, by key, how much each of them is, and
    where.
    """
    answer, now = asked(
        url,
        token,
        lambda client: client.partitions(name, generation=generation, after=after, limit=limit),
    )
    if as_json:
        show_json(answer)
        return
    rows = [
        (
            line(each.partition_key) or "(whole)",
            ago(each.published_at, now=now),
            f"{each.revision:,}",
            number(each.rows),
            size(each.bytes),
            number(each.files),
            str(each.task_id),
            line(each.location, characters_max=1000),
        )
        for each in answer.partitions
    ]
    if rows:
        heads = ("partition", "published", "revision", "rows", "size", "files", "task", "location")
        fitted(heads, rows, numbers=(2, 3, 4, 5, 6), least=(7, 5))
    else:
        click.echo("Nothing is published.", err=True)
    if answer.after is not None:
        notes([f"there are more; go on with --after '{line(answer.after)}'."])
