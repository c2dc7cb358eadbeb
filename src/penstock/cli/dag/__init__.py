"""`penstock dag`: DAG files, and the versions that are deployed.

Some verbs read files and need nothing else; the others ask a dispatcher. A verb is imported when it
is asked for, because reading YAML needs a package that not every installation has, and `penstock
queue` has to work without it.
"""

from __future__ import annotations

from typing import Final

import click

from penstock.cli.verbs import VerbPlace, Verbs
from penstock.kernel.errors import InvalidInput

_HERE: Final = "penstock.cli.dag"
PLACES: Final = {
    "check": VerbPlace(f"{_HERE}.files", "check", "List all problems in DAG files."),
    "show": VerbPlace(f"{_HERE}.files", "show", "Show the jobs of a file as a tree."),
    "diff": VerbPlace(
        f"{_HERE}.files", "diff", "Compare a DAG file with another or the applied one."
    ),
    "apply": VerbPlace(f"{_HERE}.versions", "apply", "Apply a DAG file."),
    "list": VerbPlace(f"{_HERE}.versions", "list_", "List the versions that were applied."),
    "rollback": VerbPlace(f"{_HERE}.versions", "rollback", "Roll back to an earlier version."),
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
