"""`penstock dataset cut-over NAME`: have readers read what is being built."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import datasets
from penstock.cli.telling import counted, line, show_json


@click.command(
    "cut-over",
    short_help="Have readers read what is being built.",
    epilog="Example: penstock dataset cut-over sales --keep",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
@click.option("--force", is_flag=True, help="Also if something of the current one is missing.")
@click.option("--keep", is_flag=True, help="Take over what cannot be built anew, as it is.")
@on_a_dispatcher
def cut_over(
    *, name: str, force: bool, keep: bool, url: str, token: str | None, as_json: bool
) -> None:
    """Have readers read the generation that is being built, of all datasets of the same job.

    That happens by itself once it has all that the current generation has: every partition, and
    of a job that appends every publication. It never has what an edited filter leaves out, whose
    tasks are dead, or whose events retention has removed: then somebody decides. With --force it
    is missing from then on. With --keep what was never computed anew is taken over from the current
    generation, as it is; what is computed of that is computed again, and then it is cut over.

    Exit code 0: readers read it, or will. 1: they do not, and it is said why.
    """
    answer, _ = asked(url, token, lambda client: client.cut_over(name, force=force, keep=keep))
    if as_json:
        show_json(answer)
        return
    if answer.kept is not None:
        click.echo(f"Taken over as they are: {counted(answer.kept, 'publication')}.")
    if answer.is_waiting:
        click.echo(
            f"Readers of {line(answer.dataset)} read {answer.generation} until all is built that"
            " is computed of it."
        )
    else:
        click.echo(f"Readers of {line(answer.dataset)} read {answer.generation} now.")
