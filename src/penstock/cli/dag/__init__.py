"""`penstock dag`: DAG files and the versions that are deployed, one file a verb.

Some verbs read files and need nothing else; the others ask a dispatcher. A verb is imported when it
is asked for, because reading YAML needs a package that not every installation has, and `penstock
queue` has to work without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click

from penstock.kernel.errors import InvalidInput

VERBS: Final = ("check", "show", "diff", "apply", "list", "rollback")
"""In the order of the help. The module and the command in it have the name of the verb."""

# Python has this name already.
_PLACES: Final = {"list": ("listing", "list_")}
_YAML: Final = "yaml"


class _Verbs(click.Group):
    """The verbs, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        module, name = _PLACES.get(cmd_name, (cmd_name, cmd_name))
        try:
            verb = getattr(import_module(f"{__name__}.{module}"), name)
        except ModuleNotFoundError as error:
            if error.name != _YAML:
                raise
            # Not a failure with exit code 1, which would tell a caller of `diff` of differences.
            raise InvalidInput(
                "Reading a DAG needs PyYAML, which is not installed.",
                hint="Install it with: pip install 'penstock[dispatcher]'",
            ) from error
        assert isinstance(verb, click.Command)
        return verb


@click.group(
    cls=_Verbs,
    invoke_without_command=True,
    epilog="Example: penstock dag check pipeline.yaml",
)
@click.pass_context
def dag(context: click.Context) -> None:
    """Check, compare and deploy the YAML files of pipelines.

    'check', 'show' and 'diff' of two files need no dispatcher.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
