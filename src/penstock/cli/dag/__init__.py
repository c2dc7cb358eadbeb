"""`penstock dag`: DAG files and the versions that are deployed, one file a verb.

Some verbs read files and need nothing else; the others ask a dispatcher. A verb is imported when it
is asked for, because reading YAML needs a package that not every installation has, and `penstock
queue` has to work without it.
"""

from __future__ import annotations

from typing import Final

import click

from penstock.cli.groups import Place, Verbs
from penstock.kernel.errors import InvalidInput

_HERE: Final = "penstock.cli.dag"
PLACES: Final = {
    "check": Place(f"{_HERE}.check", "check", "List everything that is wrong with files."),
    "show": Place(f"{_HERE}.show", "show", "Show the jobs of a file as a tree."),
    "diff": Place(
        f"{_HERE}.diff", "diff", "Compare a file with another, or with what is in force."
    ),
    "apply": Place(f"{_HERE}.apply", "apply", "Put a file in force."),
    "list": Place(f"{_HERE}.listing", "list_", "List the versions that were applied."),
    "rollback": Place(f"{_HERE}.rollback", "rollback", "Put an earlier version in force."),
}
_YAML: Final = "yaml"


class _Verbs(Verbs):
    """The verbs, and one sentence where what reads YAML is missing."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        try:
            return super().get_command(ctx, cmd_name)
        except ModuleNotFoundError as error:
            if error.name != _YAML:
                raise
            # Not a failure with exit code 1, which would tell a caller of `diff` of differences.
            raise InvalidInput(
                "Reading a DAG needs PyYAML, which is not installed.",
                hint="Install it with: pip install 'penstock[dispatcher]'",
            ) from error


@click.group(
    cls=_Verbs,
    places=PLACES,
    invoke_without_command=True,
    short_help="Check, compare and deploy DAG files.",
    epilog="Example: penstock dag check pipeline.yaml",
)
@click.pass_context
def dag(context: click.Context) -> None:
    """Check, compare and deploy the YAML files of pipelines.

    'check', 'show' and 'diff' of two files need no dispatcher.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
