"""`penstock demo`: what there is to see, on a data folder that is gone afterwards.

By itself it runs the pipeline of examples/flights on Spark, `queue` shows the pieces below it.

| module | owns |
|---|---|
| `flights` | the story: an installation, the pipeline, what it says |
| `running` | one run of the pipeline, from its first event to its last partition |
| `display` | the picture of how far it is |
| `chaos` | what is killed on the way, and when |
| `result` | what is published: sums of files, the table |
| `finding` | what the data says |
| `staying` | the end on a terminal: the console, and a task to mend and replay |
| `pieces`, `pipeline`, `store`, `queue`, `proof` | `penstock demo queue` |
"""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.demo.flights import show_flights
from penstock.cli.demo.pieces import show_pieces
from penstock.cli.demo.staying import is_a_terminal


@click.group(
    invoke_without_command=True,
    short_help="See a pipeline run on Spark.",
    epilog="Example: penstock demo --chaos",
)
@click.option(
    "--days", type=click.IntRange(1, 365), default=31, show_default=True, help="How many days."
)
@click.option(
    "--chaos",
    is_flag=True,
    help="Run it again, kill a worker and the dispatcher, and compare the results.",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep everything in this folder.  [default: a temporary one]",
)
@click.option(
    "--stay/--no-stay",
    default=None,
    help="Stay with the console and a task to mend, until Ctrl-C.  [default: on a terminal]",
)
@click.pass_context
def demo(
    context: click.Context, *, days: int, chaos: bool, data: Path | None, stay: bool | None
) -> None:
    """Run a pipeline on Spark, from the flights that left New York in 2013 to a report.

    It brings all that it needs: a Postgres, a dispatcher, a worker, Spark and the data. A month
    takes about a minute. 'penstock demo queue' shows what lies below: tasks without Spark, the
    store, the bucket's own queue, simulated worlds, the price.

    It tells where its console is, which shows the pipeline as it runs. On a terminal it stays at
    the end, with a task that has failed on purpose: find out why in the console, mend it, and
    replay it.

    Exit code 0: the pipeline is done, and with --chaos both results are the same. 1: not.
    """
    if context.invoked_subcommand is None:
        is_staying = is_a_terminal() if stay is None else stay
        show_flights(days=days, chaos=chaos, data=data, is_staying=is_staying)


@demo.command(
    short_help="Show the queue and the store below it.", epilog="Example: penstock demo queue"
)
def queue() -> None:
    """Show what the pipeline stands on, on embedded defaults. Takes a minute."""
    show_pieces()
