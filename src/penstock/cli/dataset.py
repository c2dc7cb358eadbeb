"""`penstock dataset`: what has been published."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.queue.showing import notes
from penstock.cli.telling import ago, fitted, line, show_json


@click.group(invoke_without_command=True, epilog="Example: penstock dataset list")
@click.pass_context
def dataset(context: click.Context) -> None:
    """Datasets, their generations and their partitions."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@dataset.command(
    "list",
    short_help="List datasets and their generations.",
    epilog="Example: penstock dataset list",
)
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


@dataset.command(
    short_help="List what is published of a dataset.",
    epilog="Example: penstock dataset partitions sales",
)
@click.argument("name", metavar="DATASET")
@click.option("--generation", metavar="UUID", help="By default the current one.")
@click.option("--after", metavar="KEY", help="Only partitions after this one, for the next page.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True)
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
    """List the partitions of a dataset that are published, by key, and where each of them is."""
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
            str(each.task_id),
            line(each.location, characters_max=1000),
        )
        for each in answer.partitions
    ]
    if rows:
        fitted(("partition", "published", "revision", "task", "location"), rows, numbers=(2, 3))
    else:
        click.echo("Nothing is published.", err=True)
    if answer.after is not None:
        notes([f"there are more; go on with --after '{line(answer.after)}'."])


@dataset.command(
    "cut-over",
    short_help="Have readers read what is being built.",
    epilog="Example: penstock dataset cut-over sales --force",
)
@click.argument("name", metavar="DATASET")
@click.option("--force", is_flag=True, help="Also if partitions of the current one are missing.")
@on_a_dispatcher
def cut_over(*, name: str, force: bool, url: str, token: str | None, as_json: bool) -> None:
    """Have readers read the generation that is being built, of all datasets of the same job.

    That happens by itself once it has all partitions of the current generation. It never has
    those that an edited filter leaves out, or whose tasks are dead: then --force is needed.

    Exit code 0: readers read it. 1: they do not, and it is said why.
    """
    answer, _ = asked(url, token, lambda client: client.cut_over(name, force=force))
    if as_json:
        show_json(answer)
    else:
        click.echo(f"Readers of {line(answer.dataset)} read {answer.generation} now.")
