"""`penstock operator`: what runs and waits of each operator, and how much of it may run."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import operators
from penstock.cli.telling import fitted, line, show_json


@click.group(
    invoke_without_command=True,
    short_help="See and limit what runs of operators.",
    epilog="Example: penstock operator list",
)
@click.pass_context
def operator(context: click.Context) -> None:
    """What runs and waits of operators, for people and autoscalers, and their limits."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@operator.command(
    "list",
    short_help="List operators with what runs and waits.",
    epilog="Example: penstock operator list",
)
@on_a_dispatcher
def list_(*, url: str, token: str | None, as_json: bool) -> None:
    """List operators: what runs, what could run, and how many tasks should run at once.

    The last is the figure for an autoscaler: what runs and waits, as far as limits allow.
    """
    answer, _ = asked(url, token, lambda client: client.operators())
    if as_json:
        show_json(answer)
        return
    rows = [
        (
            line(each.name),
            f"{each.in_flight:,}",
            "" if each.in_flight_max is None else f"{each.in_flight_max:,}",
            f"{each.waiting:,}",
            f"{each.desired:,}",
        )
        for each in answer.operators
    ]
    if rows:
        heads = ("operator", "running", "at most", "waiting", "wanted")
        fitted(heads, rows, numbers=(1, 2, 3, 4))
    else:
        click.echo("There are no operators; 'penstock dag apply FILE' brings them.", err=True)


@operator.command(
    short_help="Say how many tasks of an operator may run.",
    epilog="Example: penstock operator limit five_jobs:clean 4",
)
@click.argument("name", metavar="OPERATOR", shell_complete=operators)
@click.argument("most", metavar="[NUMBER]", required=False, type=click.IntRange(1, 1_000_000))
@click.option("--none", "is_without", is_flag=True, help="Take the limit away.")
@on_a_dispatcher
def limit(
    *, name: str, most: int | None, is_without: bool, url: str, token: str | None, as_json: bool
) -> None:
    """Say how many tasks of an operator may run at a time, over all workers and jobs.

    Exit code 0: it holds from the next claim on. 1: no job has ever had this operator.
    """
    if (most is None) != is_without:
        raise click.UsageError("Give a number, or --none to take the limit away.")
    answer, _ = asked(url, token, lambda client: client.limit_operator(name, most))
    if as_json:
        show_json(answer)
    elif answer.in_flight_max is None:
        click.echo(f"{line(answer.name)} has no limit.")
    else:
        click.echo(f"At most {answer.in_flight_max:,} tasks of {line(answer.name)} run at a time.")
