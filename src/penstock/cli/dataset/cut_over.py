"""`penstock dataset cut-over NAME`: have readers read what is being built."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import datasets
from penstock.cli.telling import line, show_json


@click.command(
    "cut-over",
    short_help="Have readers read what is being built.",
    epilog="Example: penstock dataset cut-over sales --force",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
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
